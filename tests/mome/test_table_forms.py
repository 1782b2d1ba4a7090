"""Formats, places and look-ahead: the same bits where they must be, no bias where rows are rounded."""

from __future__ import annotations

import contextlib
import os
import queue
import threading

import pytest
import torch

from mome.table.parts import load_parts, state_parts
from mome.table.rows import RowTable, TableSpec
from optim.rows import KINDS, RowRule

SPEC = TableSpec(rows=80, lanes=2, dim=6, init=0.3)
FORMS = ("fp32", "bf16", "bf16+16", "fp8")
PLACES = ("device", "host", "file")


def make(folder=None, place="device", format="fp32", kind="adam", seed=3, spec=SPEC, **rule) -> RowTable:
    rule = RowRule(kind, **{"weight_decay": 0.2, **rule})
    where = {"folder": folder, "resident_bytes": 64} if place == "file" else {}
    return RowTable(spec, rule, seed, name="words", format=format, place=place, **where)


def ids_of(event: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(event)
    # Some events touch what the one before touched, some nothing at all.
    low = 30 * (event % 3 == 2)
    return [torch.randint(low, low + 40, (0 if event % 5 == 4 else 9,), generator=generator) for _ in range(2)]


def push(table: RowTable, ws, event: int) -> None:
    generator = torch.Generator().manual_seed(100 + event)
    for k in range(2):
        rows = ws.gather(k)
        (rows + torch.randn(rows.shape, generator=generator)).square().sum().backward()
    table.push(ws, 0.2 / (1 + event % 4))


def train(table: RowTable, events: int, depth: int = 0) -> torch.Tensor:
    """Each cycle fetched `depth` pushes before it is taken."""
    raw = {}
    for event in range(events):
        for ahead in range(event, min(events, event + depth + 1)):
            if ahead not in raw:
                raw[ahead] = table.fetch(table.plan(ids_of(ahead)))
        push(table, table.take(raw.pop(event)), event)
    return table.read_rows(torch.arange(table.spec.rows))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMS)
def test_every_place_and_depth_of_look_ahead_gives_the_same_bits(kind, format, tmp_path):
    truth = train(make(format=format, kind=kind), 12)
    for place in PLACES:
        for depth in (1, 5):
            table = make(tmp_path / f"{place}{depth}", place, format, kind)
            assert torch.equal(train(table, 12, depth), truth), (place, depth)
            table.close()
    assert torch.equal(train(make(format=format, kind=kind), 12), truth)


def test_a_fetch_older_than_what_is_remembered_is_read_anew():
    tables = [make(), make()]
    raw = tables[0].fetch(tables[0].plan([torch.arange(40)]))
    for table in tables:
        for event in range(70):
            push(table, table.pull(ids_of(event)), event)
    late, now = tables[0].take(raw), tables[1].pull([torch.arange(40)])
    assert torch.equal(late.rows, now.rows)


@pytest.mark.parametrize("place", PLACES)
def test_fetches_in_a_thread_beside_pushes_see_no_torn_row(place, tmp_path):
    """The thread fetches all the time; whatever it read, what is taken equals a pull."""
    table, fetched, stop = make(tmp_path, place), queue.Queue(4), threading.Event()
    plan = table.plan([torch.arange(80)])

    def read():
        while not stop.is_set():
            fetched.put(table.fetch(plan))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for event in range(80):
            push(table, table.pull(ids_of(event)), event)
            assert torch.equal(table.take(fetched.get(timeout=60)).rows, table.pull([torch.arange(80)]).rows)
    finally:
        stop.set()
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                fetched.get(timeout=0.01)
        thread.join()
    table.close()


def test_bf16_and_its_low_half_are_float32_bit_for_bit():
    assert torch.equal(train(make(format="bf16+16"), 40), train(make(), 40))


def test_a_format_takes_the_bytes_it_says():
    a_row = {format: make(format=format).table_bytes() / 80 for format in FORMS}
    assert a_row == {"fp32": 48, "bf16": 24, "bf16+16": 48, "fp8": 12 + 8}


@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_n_rounded_rows_move_without_bias_where_the_nearest_number_would_stay(format):
    """Each number moves 200 times by a sixtieth of a step of its format: the mean must move along."""
    spec = TableSpec(rows=512, lanes=1, dim=64, init=0.0)
    table = RowTable(spec, RowRule("sgd"), 11, name="words", format=format)
    everything = torch.arange(512)
    ws = table.pull([everything])
    # 1 in every lane's first number, so that fp8's scale is that of 1.
    ws.rows.grad = -torch.ones_like(ws.rows)
    table.push(ws, 1.0)
    # The code step below 1 is 2**-9 for bf16 and 1/28 for fp8 (448 / 16 codes a step at the top).
    move = (2**-8 if format == "bf16" else 1 / 28) / 60
    keep = torch.ones(64)
    keep[0] = 0.0
    for _ in range(200):
        ws = table.pull([everything])
        ws.rows.grad = keep.expand_as(ws.rows).contiguous()
        table.push(ws, move)
    moved = 1 - table.read_rows(everything)[:, 0, 1:].double()
    expected = 200 * move
    spread = moved.std() / moved.numel() ** 0.5
    assert abs(moved.mean() - expected) < 5 * spread and spread < expected / 50


def test_decay_moves_the_scales_of_fp8_rows_and_never_their_codes():
    table = make(format="fp8", weight_decay=0.5)
    for event in range(4):
        push(table, table.pull(ids_of(event)), event)
    ids = torch.arange(30)
    codes, scale = table.stores["rows"].read(ids), table.stores["scale"].read(ids)
    touched = table.stores["last_event"].read(ids) > 0
    before = table.read_rows(ids)[touched]
    for _ in range(50):
        # Touched with gradient zero, every other event untouched: both decay.
        table.push(table.pull([ids]), 0.05)
        table.push(table.pull([torch.tensor([79])]), 0.05)
    assert torch.equal(table.stores["rows"].read(ids)[touched], codes[touched])
    assert (table.stores["scale"].read(ids)[touched] < 0.1 * scale[touched]).all()
    torch.testing.assert_close(table.read_rows(ids)[touched], before * (1 - 0.025) ** 100, rtol=1e-4, atol=0)


def test_rounding_is_keyed_by_seed_event_and_row_alone():
    """Other rows in the same push, or another order of the lookups, change no bit of a row."""
    alone, among, other = make(format="bf16"), make(format="bf16"), make(format="bf16", seed=4)
    for table, ids in ((alone, [5]), (among, [3, 5, 60]), (other, [5])):
        ws = table.pull([torch.tensor(ids)])
        ws.rows.grad = torch.full_like(ws.rows, 0.01)
        table.push(ws, 0.1)
    assert torch.equal(alone.read_rows(torch.tensor([5])), among.read_rows(torch.tensor([5])))
    assert not torch.equal(alone.read_rows(torch.tensor([5])), other.read_rows(torch.tensor([5])))


@pytest.mark.parametrize("format", FORMS)
def test_files_of_an_earlier_table_are_made_anew_and_its_parts_bring_it_back(format, tmp_path):
    """Without the clock, rows in a file are worth nothing: whoever opens it begins at event 0, or loads."""
    first = make(tmp_path, "file", format)
    rows = train(first, 8)
    parts = list(state_parts(first, 500))
    first.flush()
    first.close()
    second, fresh = make(tmp_path, "file", format), make(format=format)
    assert second.event == 0 and torch.equal(second.read_rows(torch.arange(80)), fresh.read_rows(torch.arange(80)))
    assert torch.equal(train(second, 3), train(fresh, 3))
    load_parts(second, parts)
    assert second.event == 8 and torch.equal(second.read_rows(torch.arange(80)), rows)
    second.close()
    second.close()
    with pytest.raises(ValueError, match="closed"):
        second.pull([torch.tensor([1])])


def test_a_file_table_is_locked_and_says_so(tmp_path):
    table = make(tmp_path, "file")
    with pytest.raises(ValueError, match="in use"):
        make(tmp_path, "file")
    table.close()
    make(tmp_path, "file").close()
    with pytest.raises(ValueError, match="its rows is 80, here it is 81"):
        make(tmp_path, "file", spec=TableSpec(81, 2, 6, 0.3))


@pytest.mark.parametrize("fault", [MemoryError("no room"), KeyboardInterrupt("stop"), RuntimeError("a fault")])
def test_whatever_stops_a_push_half_way_leaves_a_table_that_refuses(fault, monkeypatch):
    """In memory the new rows are written before their state is."""
    table = make()
    train(table, 2)
    ws = table.pull(ids_of(2))

    def stopped(ids_U, values):
        raise fault

    monkeypatch.setattr(table.stores["second"], "write", stopped)
    with pytest.raises(type(fault)):
        push(table, ws, 2)
    monkeypatch.undo()
    for use in (lambda: table.pull([torch.tensor([1])]), lambda: list(state_parts(table))):
        with pytest.raises(ValueError, match=r"words.*event 3.*checkpoint"):
            use()


@pytest.mark.parametrize("plane", ["rows", "second", "last_event"])
def test_a_disk_that_refuses_leaves_a_table_that_refuses(plane, tmp_path, monkeypatch):
    """Half of an event may be written: what is on the disk is of no use, and the table says so from then on."""
    table = make(tmp_path, "file")
    train(table, 2)
    ws = table.pull(ids_of(2))

    def full(ids_U, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table.stores[plane], "write", full)
    with pytest.raises(OSError, match="No space"):
        push(table, ws, 2)
    monkeypatch.undo()
    for use in (
        lambda: table.pull([torch.tensor([1])]), lambda: table.push(ws, 0.1), lambda: list(state_parts(table)),
        lambda: table.fetch(table.plan([torch.tensor([1])])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"words.*event 3.*No space.*checkpoint"):
            use()


def test_a_file_that_is_cut_leaves_a_table_that_refuses_even_when_it_is_whole_again(tmp_path):
    table = make(tmp_path, "file")
    ws, file = table.pull([torch.tensor([1, 2])]), tmp_path / "words" / "second.bin"
    size = file.stat().st_size
    os.truncate(file, 7)
    with pytest.raises(ValueError, match=r"second.bin: truncated"):
        table.push(ws, 0.1)
    os.truncate(file, size)
    with pytest.raises(ValueError, match=r"words.*event 1 .*truncated.*checkpoint"):
        table.pull([torch.tensor([1])])


def test_as_many_numbers_as_an_int64_counts_may_be_more_bytes_than_that(tmp_path):
    spec = TableSpec((1 << 60) - 1, 2, 4, 0.0)
    for place in PLACES:
        with pytest.raises(ValueError, match=r"pass an int64: take fewer rows"):
            make(tmp_path, place, spec=spec)
