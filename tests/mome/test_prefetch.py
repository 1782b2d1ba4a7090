"""What is made ready in a thread is what would have been made at once: order, bounds, errors, and the rows' bits.

Lives here: Prefetcher alone; tables trained through it, with rows that are pushed between their fetch and their use.
Not here: whole runs (tests/test_train.py).
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kernels.cpu import threads
from mome.table.prefetch import Prefetcher
from mome.table.rows import RowTable, TableSpec
from optim.rows import RowRule

DEPTHS = [0, 1, 2, 5]


def of_prefetch() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("prefetch")]


@pytest.fixture(autouse=True)
def no_thread_stays():
    assert not of_prefetch()
    yield
    assert not of_prefetch()


def wait_until(true) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.0005)


def who_works() -> set[threading.Thread]:
    """The threads that a kernel on many rows is shared out to."""
    return set(threads.run(lambda begin, end: threading.current_thread(), 10**8))


@pytest.mark.parametrize("depth", DEPTHS)
def test_results_come_in_order_and_as_many_are_pending_as_the_depth_allows(depth):
    ahead = Prefetcher(lambda item: item * item, depth)
    for first in range(depth):
        ahead.submit(first)
    for item in range(depth, 20):
        ahead.submit(item)
        assert ahead.pending == depth + 1
        with pytest.raises(ValueError, match="take one first"):
            ahead.submit(item)
        assert ahead.take() == (item - depth) ** 2
    assert ahead.pending == depth
    ahead.close()
    with pytest.raises(ValueError, match="nothing is pending"):
        ahead.take()


def test_a_depth_below_0_is_refused():
    with pytest.raises(ValueError, match="depth -1"):
        Prefetcher(id, -1)


def test_without_depth_nothing_runs_before_it_is_needed_and_no_thread():
    asked = []
    ahead = Prefetcher(lambda item: asked.append((item, threading.current_thread())), 0)
    ahead.submit(1)
    assert not asked
    ahead.take()
    assert asked == [(1, threading.current_thread())] and not of_prefetch()


def test_the_thread_runs_ahead_and_alone():
    """Its kernels and torch's have one thread, those of the caller as many as before, new threads of others too."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        ahead = Prefetcher(lambda _: (threading.current_thread(), torch.get_num_threads(), *who_works()), 2)
        for item in range(3):
            ahead.submit(item)
        for _ in range(3):
            thread, of_torch, *of_kernels = ahead.take()
            assert thread in of_prefetch() and of_torch == 1 and of_kernels == [thread]
        assert torch.get_num_threads() == 3
        seen = []
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert seen == [3]
        ahead.close()
    finally:
        torch.set_num_threads(before)


def test_taking_waits_for_a_slow_thread():
    go = threading.Event()
    ahead = Prefetcher(lambda item: go.wait(30) and item, 1)
    ahead.submit(7)
    threading.Timer(0.05, go.set).start()
    assert ahead.take() == 7
    ahead.close()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("error", [OSError(5, "a disk"), ValueError("an id"), KeyboardInterrupt(), MemoryError()])
def test_an_error_surfaces_as_itself_where_its_item_is_taken_and_not_before(depth, error):
    def work(item):
        if item == 4:
            raise error
        return item

    ahead, items = Prefetcher(work, depth), iter(range(20))
    for expected in range(8):
        while ahead.pending <= depth:
            ahead.submit(next(items))
        if expected == 4:
            with pytest.raises(type(error)) as raised:
                ahead.take()
            assert raised.value is error
        else:
            assert ahead.take() == expected
    ahead.close()


def test_closing_waits_for_the_item_under_way_and_drops_the_others():
    begun, done = [], []

    def work(item):
        begun.append(item)
        time.sleep(0.05)
        done.append(item)

    ahead = Prefetcher(work, 3)
    for item in range(4):
        ahead.submit(item)
    wait_until(lambda: begun)
    ahead.close()
    assert begun == done == [0] and not of_prefetch() and ahead.pending == 0
    ahead.close()


SHAPES = {
    "many rows": (TableSpec(400, 2, 3, 0.5), 24),
    "all hot": (TableSpec(6, 1, 5, 0.5), 40),
    "one row": (TableSpec(1, 3, 2, 0.5), 7),
}
RULES = {
    "adam": RowRule("adam", beta2=0.9, weight_decay=0.4),
    "momentum": RowRule("momentum", weight_decay=0.3),
    "factored": RowRule("factored", weight_decay=0.2, decay="gated-retroactive"),
}


def cycles_of(spec: TableSpec, reads: int) -> list[list[torch.Tensor]]:
    """Twelve cycles of two steps, or of one, half of their ids from the first few rows."""
    generator = torch.Generator().manual_seed(7)
    cold = [torch.randint(spec.rows, (2, reads), generator=generator) for _ in range(24)]
    steps = [torch.where(torch.rand(2, reads, generator=generator) < 0.5, ids % 5, ids) for ids in cold]
    return [steps[n : n + 2 - n % 4 // 2] for n in range(0, 24, 2)]


def train(table: RowTable, cycles, depth: int, pace: str) -> list[torch.Tensor]:
    """Losses, then rows, last events and state. pace: who is late, "thread", "trainer" or neither."""
    fetched = []

    def work(steps):
        if pace == "thread":
            time.sleep(0.003)
        raw = table.fetch(table.plan(steps))
        fetched.append(raw.event)
        return raw

    ahead, asked, losses = Prefetcher(work, depth), 0, []
    for event in range(len(cycles)):
        while ahead.pending <= depth and asked < len(cycles):
            ahead.submit(cycles[asked])
            asked += 1
        ws = table.take(ahead.take())
        for step in range(len(cycles[event])):
            loss = (ws.gather(step) - 0.1 * step).square().sum()
            loss.backward()
            losses.append(loss.detach())
        if pace == "trainer" and depth:
            # All that was asked for has been read, so that this push makes it old.
            wait_until(lambda want=asked: len(fetched) == want)
        table.push(ws, lr=0.3 * (1 - event / len(cycles)))
    ahead.close()
    if pace == "trainer" and depth:
        late = [event - before for event, before in enumerate(fetched)]
        assert max(late) == depth, "no row was fetched early: the test shows nothing"
    ids = torch.arange(table.spec.rows)
    state = table.pull([ids], grad=False).state
    return [torch.stack(losses), table.read_rows(ids), *(state[key].clone() for key in sorted(state))]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_depth_and_no_pace_changes_a_bit(shape, kind):
    (spec, reads), rule = SHAPES[shape], RULES[kind]
    expected = train(RowTable(spec, rule, seed=3), cycles_of(spec, reads), 0, "any")
    for depth in DEPTHS[1:]:
        for pace in ("any", "thread", "trainer"):
            assert same(train(RowTable(spec, rule, seed=3), cycles_of(spec, reads), depth, pace), expected), pace


@pytest.mark.parametrize("format", ["bf16", "bf16+16", "fp8"])
@pytest.mark.parametrize("place", ["device", "host", "file"])
def test_in_every_place_and_format(place, format, tmp_path):
    (spec, reads), results = SHAPES["many rows"], []
    for depth in (0, 2):
        folder = tmp_path / str(depth) if place == "file" else None
        table = RowTable(spec, RULES["adam"], seed=3, format=format, place=place, folder=folder)
        results.append(train(table, cycles_of(spec, reads), depth, "trainer"))
        table.close()
    assert same(*results)


def test_more_pushes_than_a_table_remembers():
    spec, rule = TableSpec(30, 1, 2, 0.5), RULES["adam"]
    generator = torch.Generator().manual_seed(1)
    cycles = [[torch.randint(30, (4,), generator=generator)] for _ in range(150)]
    assert same(*(train(RowTable(spec, rule, seed=3), cycles, depth, "trainer") for depth in (0, 80)))


def test_rows_that_were_not_mended_would_be_seen(monkeypatch):
    spec, reads = SHAPES["all hot"]
    whole = train(RowTable(spec, RULES["adam"], seed=3), cycles_of(spec, reads), 1, "trainer")
    monkeypatch.setattr(RowTable, "_patch", lambda self, raw, planes: None)
    assert not same(train(RowTable(spec, RULES["adam"], seed=3), cycles_of(spec, reads), 1, "trainer"), whole)


def test_reading_for_a_validation_beside_the_thread_disturbs_neither():
    spec, reads = SHAPES["many rows"]
    table, cycles = RowTable(spec, RULES["adam"], seed=3), cycles_of(spec, reads)
    everything = torch.arange(spec.rows)
    rows = table.read_rows(everything).clone()
    ahead = Prefetcher(lambda steps: table.fetch(table.plan(steps)), 1)
    ahead.submit(cycles[0])
    for _ in range(100):
        ahead.submit(cycles[0])
        assert torch.equal(table.read_rows(everything), rows)
        ws = table.take(ahead.take())
        assert torch.equal(ws.rows.detach(), rows[ws.ids])
    ahead.close()
