"""Checkpoints of several processes: saved by any number and loaded by any, bit for bit; who fails is named by all.

Lives here: Saver and Checkpoint with a World of 1 to 4 ranks, dense state as mome/dense.py keeps it.
Not here: one process (tests/mome/test_saving.py), whole runs (test_equal.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mome import saving
from mome.checkpoint import Checkpoint, newest, path_of
from mome.errors import SharedError
from mome.saving import Saver
from mome.table.deltas import load_files
from mome.table.parts import state_parts
from mome.table.placement import Placement
from mome.table.rows import RowTable, TableSpec
from mome.world import World
from optim.rows import RowRule
from tests.dist.processes import start

WORLDS = (1, 2, 3, 4)
SPEC = TableSpec(rows=61, lanes=2, dim=3, init=0.3)
MATRICES = ("a", "b", "c")
SLICED = {"emb": 10, "head": 5}


def make_tables(world: World) -> dict[str, RowTable]:
    return {
        name: RowTable(
            SPEC, RowRule(kind, weight_decay=0.2), 7, name=name, rank=world.rank,
            placement=Placement(SPEC.rows, world.size, placement),
        )
        for name, kind, placement in (("words", "adam", "contiguous"), ("pairs", "momentum", "cyclic"))
    }  # fmt: skip


def train(table: RowTable, events: range) -> None:
    """Eight of the lower 45 rows an event, those that the rank owns."""
    for event in events:
        generator = torch.Generator().manual_seed(event)
        ids, grad = torch.randint(45, (8,), generator=generator), torch.randn(8, 2, 3, generator=generator)
        own = table.owned(ids)
        ws = table.pull([ids[own]])
        ws.gather(0).backward(grad[own])
        table.push(ws, 0.3 / (event + 1))


def model(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.arange(6.0).view(2, 3) * step + n for n, name in enumerate((*MATRICES, "bias"))}


def optim(world: World, step: int) -> dict[str, Any]:
    """A matrix' state on its owner alone, slices of flat state, and what every rank has."""
    state: dict[str, Any] = {"bias/exp_avg": torch.full((3,), float(step)), "bias/step": torch.tensor(float(step))}
    for n, name in enumerate(MATRICES):
        if n % world.size == world.rank:
            state[f"{name}/momentum"] = torch.arange(4.0) * step + n
    for name, numel in SLICED.items():
        whole = torch.arange(float(numel)) * step
        state[f"{name}/exp_avg"] = sliced(world, whole)
    return state


def sliced(world: World, whole: torch.Tensor) -> torch.Tensor:
    if world.alone:
        return whole
    parts = whole.chunk(world.size)
    own = parts[world.rank] if world.rank < len(parts) else whole[:0]
    mesh = init_device_mesh("cpu", (world.size,))
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(1,))


def save_some(world: World, folder: Path, most: int) -> None:
    """Three saves and a cycle under way in the last; the first is settled as a trainer does it, beside steps."""
    saving.MOST_DELTAS = most
    tables, saver = make_tables(world), Saver(folder, world, part_bytes=200)
    for step in (1, 2, 3):
        for table in tables.values():
            train(table, range(4 * step, 4 * step + 4))
        cycle = {"words": {"ids": torch.arange(4) + 2 * world.rank, "grad": torch.full((4, 2, 3), 10.0**world.rank)}}
        dense = model(step), optim(world, step)
        saver.begin(step, {"note": world.rank}, *dense, tables, cycle if step == 3 else None)
        for tensor in (*dense[0].values(), *dense[1].values(), cycle["words"]["grad"]):
            # Training goes on: the snapshot does not see it.
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1.0)
        if step > 1:
            saver.finish()
            continue
        path = None
        while path is None:
            votes = torch.tensor(saver.votes(), dtype=torch.float64)
            path = saver.settle(*map(int, world.all_reduce("step sums", votes).wait().tolist()))
        assert path == path_of(folder, 1)
    world.meet("save")


def every_pair(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """One of four processes: a world of each size after the other saves, then each loads what all have saved.

    Joining the first world that loads is what waits for the saves. Returns, by that size, what this rank had of each.
    """
    rank, loaded = int(os.environ["RANK"]), {}
    for act, sizes in ((save_both, WORLDS), (load_all, WORLDS[::-1])):
        for size in sizes:
            if rank < size:
                store = f"file://{folder}/store_{act.__name__}_{size}"
                distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
                world = World(rank, size)
                loaded[size] = act(world, folder)
                world.close()
    return loaded


def save_both(world: World, folder: Path) -> None:
    for most in (2, 16):
        save_some(world, folder / f"{world.size}_{most}", most)


def load_all(world: World, folder: Path) -> list[dict[str, Any]]:
    return [load_one(world, folder / f"{saved}_{most}") for saved in WORLDS for most in (2, 16)]


def load_one(world: World, folder: Path) -> dict[str, Any]:
    saved = Checkpoint(newest(folder, print, world))
    found = {f"model {name}": tensor for name, tensor in saved.tensors("model").items()}
    state = {
        key: torch.full_like(value, -7.0) if isinstance(value, torch.Tensor) else value
        for key, value in optim(world, 1).items()
    }
    saved.load_optimizer(state)
    for key, value in state.items():
        found[f"optim {key}"] = value.to_local() if isinstance(value, DTensor) else value
    for name, table in make_tables(world).items():
        load_files(table, saved.table(name))
        found |= {f"{name} {key}": tensor for part in state_parts(table) for key, tensor in part.items()}
    cycle = saved.cycle("words", world.rank, world.size)
    found |= {"cycle ids": cycle["ids"], "cycle grad": cycle["grad"]}
    return found | {"state": saved.state}


def test_what_any_number_saved_any_number_loads_bit_for_bit(tmp_path):
    ranks = start(every_pair, 4, tmp_path, join=False)
    for saved in WORLDS:
        chained, merged = (Checkpoint(path_of(tmp_path / f"{saved}_{most}", 3)) for most in (16, 2))
        # The dense file of every rank, and the rows of every rank.
        assert {f"dense/__{rank}_0.distcp" for rank in range(saved)} <= set(chained.names)
        lists = {name.split(".")[2] for name in chained.names if name.startswith("table_pairs.0001")}
        assert lists == {f"{rank:04d}" for rank in range(saved)}
        assert (chained.table("words").deltas, merged.table("words").deltas) == (3, 1)
    truth = make_tables(World())
    for table in truth.values():
        train(table, range(4, 16))
    for size in WORLDS:
        for n, saved in enumerate(saved for saved in WORLDS for _ in range(2)):
            check([one[size][n] for one in ranks[:size]], saved, truth)


def check(ranks: list[dict[str, Any]], saved: int, truth: dict[str, RowTable]) -> None:
    """What the ranks have together is what one process had."""
    for one in ranks:
        assert one["state"] == {"note": 0, "step": 3, "world": saved, "format": 2}
        for name, tensor in model(3).items():
            assert torch.equal(one[f"model {name}"], tensor)
        for key in ("bias/exp_avg", "bias/step"):
            assert torch.equal(one[f"optim {key}"], optim(World(), 3)[key])
    for n, name in enumerate(MATRICES):
        (got,) = [one[f"optim {name}/momentum"] for one in ranks if f"optim {name}/momentum" in one]
        assert torch.equal(got, torch.arange(4.0) * 3 + n)
    for name, numel in SLICED.items():
        got = torch.cat([one[f"optim {name}/exp_avg"] for one in ranks])
        assert torch.equal(got, torch.arange(float(numel)) * 3)
    for name, table in truth.items():
        (whole,) = state_parts(table)
        order = torch.cat([one[f"{name} ids"] for one in ranks]).argsort()
        for key in ("ids", *table.kept):
            assert torch.equal(torch.cat([one[f"{name} {key}"] for one in ranks])[order], whole[key]), (name, key)
        for key in table.clock.state_names:
            assert all(torch.equal(one[f"{name} {key}"], whole[key]) for one in ranks)
    got, expected = torch.zeros(20), torch.zeros(20)
    for one in ranks:
        assert bool((one["cycle ids"].diff() > 0).all())
        got.index_add_(0, one["cycle ids"], one["cycle grad"][:, 0, 0])
    for rank in range(saved):
        expected[2 * rank : 2 * rank + 4] += 10.0**rank
    assert torch.equal(got, expected)


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def fail_and_go_on(world: World, folder: Path) -> list[str]:
    """Saves that fail on rank 1 (a table's file; DCP's file) or on rank 0 (the folder), and one that then succeeds."""
    from torch.distributed.checkpoint import filesystem

    said, tables, saver = [], make_tables(world), Saver(folder, world)
    for step in range(1, 6):
        for table in tables.values():
            train(table, range(4 * step, 4 * step + 4))
        kept = saving.write_tensors, filesystem.FileSystem.create_stream, saving.is_whole
        if step == 2 and world.rank == 1:
            saving.write_tensors = full
        if step == 3 and world.rank == 1:
            filesystem.FileSystem.create_stream = full
        if step == 4 and world.rank == 0:
            saving.is_whole = full
        try:
            saver.begin(step, {}, model(step), optim(world, step), tables)
            saver.finish()
        except SharedError as error:
            said.append(str(error))
        saving.write_tensors, filesystem.FileSystem.create_stream, saving.is_whole = kept
        world.meet("save")
        left = sorted(path.name for path in folder.iterdir())
        assert left == (["step_000001"] if step < 5 else ["step_000001", "step_000005"]), left
        world.meet("save")
    # Somebody flips a bit: all fall back to the one before.
    if world.first:
        one = next((folder / "step_000005").glob("table_pairs.clock*"))
        one.write_bytes(one.read_bytes()[:-1] + b"\x55")
    world.meet("save")
    log: list[str] = []
    assert newest(folder, log.append, world) == folder / "step_000001"
    assert len(log) == world.first and all("step_000005" in line and "table_pairs.clock" in line for line in log)
    # On the way out nobody asks the others, and what all have written is kept.
    saver.begin(6, {}, model(6), optim(world, 6), tables)
    saver.close()
    world.meet("save")
    assert (folder / "step_000006").exists() and newest(folder, print, world) == folder / "step_000006"
    for table in tables.values():
        fresh = make_tables(world)[table.name]
        load_files(fresh, Checkpoint(folder / "step_000006").table(table.name))
        ours, theirs = list(state_parts(table)), list(state_parts(fresh))
        assert all(torch.equal(ours[0][key], theirs[0][key]) for key in ours[0])
    return said


@pytest.mark.parametrize("world", [3])
def test_a_rank_that_cannot_write_is_named_by_all_and_nothing_is_lost(world, tmp_path):
    said = start(fail_and_go_on, world, tmp_path / "run")
    for table, dense, folder in said:
        assert "step_000002: cannot be written (rank 1: No space left on device)" in table
        assert "step_000003: cannot be written (rank 1: No space left on device)" in dense
        assert "step_000004: cannot be written (" in folder
    assert "No space left" in said[0][2]
