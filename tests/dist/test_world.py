"""Every collective of World, on 1, 2 and 3 ranks: what comes out, what it counts, and the order that it writes down.

Lives here: each one against what it must be, computed from all ranks' inputs; ranks that do not agree; the harness.
Not here: what the trainer sends with them (test_equal.py), and dead peers (test_watchdog.py).
"""

from __future__ import annotations

import os
import time
from typing import Any

import threading
import time

import pytest
import torch
from torch import Tensor

from mome.errors import UserError
from mome.world import ORDER, World
from tests.dist.processes import start

SIZES = (1, 2, 3)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
ROWS = 5


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """What rank hands in: whole numbers, so that every order of a sum gives the same."""
    draw = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 9, shape, generator=draw).to(dtype)


def rows_for(rank: int, other: int, size: int) -> int:
    """How many rows rank sends to other: all numbers from 0 on, none to itself."""
    return 0 if rank == other else (2 * rank + other + size) % 4


def every_collective(world: World) -> dict[str, Any]:
    """The results of all, by name; several are under way at once, and not waited for in their order."""
    rank, size = world.rank, world.size
    world.calls, out = [], {}
    for dtype in DTYPES:
        whole = numbers(rank, size * ROWS, 2, dtype=dtype)
        scattered = world.reduce_scatter(f"scatter {dtype}", whole, torch.empty(ROWS, 2, dtype=dtype))
        gathered = world.all_gather(
            f"gather {dtype}", torch.empty(size * ROWS, dtype=dtype), numbers(rank, ROWS, dtype=dtype)
        )
        out[f"gather {dtype}"] = gathered.wait()
        out[f"scatter {dtype}"] = scattered.wait()
    tensor = numbers(rank, 3)
    out["sum"] = world.all_reduce("sum", tensor).wait()
    assert out["sum"].data_ptr() == tensor.data_ptr(), "in place"
    out["scalar"] = world.all_reduce("scalar", torch.tensor(float(rank + 1))).wait()
    # A gather into the place where a rank's own part lies already.
    whole = torch.zeros(size, 4)
    whole[rank] = rank + 1
    out["in place"] = world.all_gather("in place", whole, whole[rank : rank + 1]).wait()
    give = [rows_for(rank, other, size) for other in range(size)]
    counts = world.counts("counts", torch.tensor([[one, rank] for one in give])).wait()
    out["counts"] = counts
    for name, kind in (("rows", torch.bfloat16), ("ids", torch.int32)):
        send = torch.cat([numbers(10 * rank + other, n, 2, dtype=kind) for other, n in enumerate(give)])
        out[name] = world.all_to_all(name, send, give, counts[:, 0].tolist()).wait()
    out["nothing"] = world.all_to_all("nothing", torch.empty(0, 3), [0] * size, [0] * size).wait()
    out["objects"] = world.gather_objects("objects", {"rank": rank})
    world.meet("end")
    out["sent"], out["calls"], out["bytes"] = dict(world.sent), world.calls, world.bytes_sent()
    return out


@pytest.mark.parametrize("size", SIZES)
def test_every_collective_gives_what_it_must(size):
    out, ranks = start(every_collective, size), range(size)
    for dtype in DTYPES:
        whole = torch.stack([numbers(rank, size * ROWS, 2, dtype=dtype) for rank in ranks]).sum(0)
        gathered = torch.cat([numbers(rank, ROWS, dtype=dtype) for rank in ranks])
        for rank in ranks:
            assert torch.equal(out[rank][f"scatter {dtype}"], whole[rank * ROWS : (rank + 1) * ROWS])
            assert torch.equal(out[rank][f"gather {dtype}"], gathered)
    stacked = torch.stack([numbers(rank, 3) for rank in ranks])
    for rank in ranks:
        got = out[rank]
        assert torch.equal(got["sum"], stacked.sum(0))
        assert got["scalar"].shape == () and float(got["scalar"]) == size * (size + 1) / 2
        assert torch.equal(got["in place"], torch.arange(1.0, size + 1)[:, None].expand(size, 4))
        took = [rows_for(other, rank, size) for other in ranks]
        assert got["counts"].tolist() == ([[n, other] for other, n in enumerate(took)])
        for name, kind in (("rows", torch.bfloat16), ("ids", torch.int32)):
            sent = [numbers(10 * other + rank, n, 2, dtype=kind) for other, n in enumerate(took)]
            assert torch.equal(got[name], torch.cat(sent)) and got[name].dtype == kind
        assert got["nothing"].shape == (0, 3)
        assert got["objects"] == [{"rank": other} for other in ranks]


@pytest.mark.parametrize("size", SIZES)
def test_bytes_are_those_that_travel(size):
    for rank, got in enumerate(start(every_collective, size)):
        sent = got["sent"]
        if size == 1:
            assert sent == {} and got["bytes"] == 0
            continue
        others = size - 1
        for dtype in DTYPES:
            # Whole parts: what a ring sends of its own share and passes on of the others'.
            assert sent[f"scatter {dtype}"] == others * ROWS * 2 * dtype.itemsize
            assert sent[f"gather {dtype}"] == others * ROWS * dtype.itemsize
        assert sent["sum"] == 2 * 3 * 8 * others // size
        assert sent["in place"] == others * 4 * 4
        assert sent["counts"] == others * 2 * 8
        rows = sum(rows_for(rank, other, size) for other in range(size))
        assert sent["rows"] == rows * 2 * 2 and sent["ids"] == rows * 2 * 4 and sent["nothing"] == 0
        assert got["bytes"] == sum(sent.values())


def test_calls_are_written_down_in_order_and_equal_on_all_ranks():
    calls = [got["calls"] for got in start(every_collective, 3)]
    assert calls[0] == calls[1] == calls[2]
    begun = [f"{what} {dtype}" for dtype in DTYPES for what in ("scatter", "gather")]
    rest = ["sum", "scalar", "in place", "counts", "rows", "ids", "nothing", "objects", "end"]
    assert calls[0] == begun + rest
    assert start(every_collective, 1)[0]["calls"] == []


def test_the_order_of_a_step_names_each_collective_once():
    names = [name for name, _, _ in ORDER]
    assert len(set(names)) == len(names) and {when for _, when, _ in ORDER} == {"", "*", "+"}


def whereabouts(world: World) -> list[tuple]:
    """Where a rank says it is, asked by a thread: under way with two, held up by the second one, after both."""
    world.step, seen = 7, []
    if world.rank == 1:
        # The other one has to wait for this one.
        time.sleep(1.0)
    first, second = (world.all_reduce(name, torch.ones(1)) for name in ("first", "second"))
    seen.append(world.at())
    asked = threading.Timer(0.4, lambda: seen.append(world.at()))
    asked.start()
    second.wait()
    asked.join()
    first.wait()
    seen.append(world.at())
    return seen


def test_a_rank_knows_what_holds_it_up():
    waited, came = start(whereabouts, 2)
    assert waited == [(7, "", 2), (7, "second", 2), (7, "", 2)]
    assert came == [(7, "", 2)] * 3
    assert start(whereabouts, 1) == [[(7, "", 0)] * 3]


def disagree(world: World, facts: list[dict]) -> str:
    world.agree({"seed": 1, "data": "x" * 100})
    try:
        world.agree(facts[world.rank])
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_agree_say_on_what():
    same = {"seed": 3, "revision": "a", "config": {"steps": 5}}
    facts = [same, same | {"seed": 4}, same | {"seed": 4, "config": {"steps": 6}, "more": 1}]
    said = start(disagree, 3, facts)
    assert len(set(said)) == 1 and "\n" not in said[0]
    for part in (
        "seed on rank 1, 2 (4 instead of 3 on rank 0)", "more on rank 2", "config on rank 2", "same files and flags",
    ):  # fmt: skip
        assert part in said[0], said[0]
    assert "revision" not in said[0]
    assert start(disagree, 2, [same, dict(same)]) == ["", ""]
    assert start(disagree, 1, [same]) == [""]


def own_row_travels(world: World) -> None:
    world.all_to_all("rows", torch.ones(world.size, 1), [1] * world.size, [1] * world.size)


def test_a_rank_does_not_send_to_itself():
    with pytest.raises(AssertionError, match="a rank's own rows do not travel"):
        start(own_row_travels, 2)


def environment(names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def one_hangs(world: World) -> None:
    if world.rank == 1:
        time.sleep(60)
    world.meet("nowhere")


def test_the_harness_gives_what_torchrun_would_and_tells_why_it_fails():
    names = ["RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "X"]
    assert start(environment, 2, names, env={"X": "y"}, join=False) == [["0", "2", "1", "y"], ["1", "2", "1", "y"]]
    with pytest.raises(AssertionError, match=r"(?s)one_hangs on 2 ranks.*rank 1: killed.*in one_hangs"):
        start(one_hangs, 2, timeout=1.0)
