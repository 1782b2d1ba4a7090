"""Saving beside training: deltas that cost what changed, snapshots, full disks, and a kill at every instant.

Lives here: Saver and compact in one process.
Not here: markers and damage (test_checkpoint.py), the files of a table (test_deltas.py), several processes
(tests/dist/test_checkpoint.py).
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch

from mome import saving
from mome.checkpoint import Checkpoint, compact, faults, is_whole, marks_of, newest, path_of
from mome.errors import SharedError
from mome.saving import Saver
from mome.table.deltas import load_files
from mome.table.parts import bytes_a_row, state_parts
from mome.table.rows import RowTable, TableSpec
from optim.rows import RowRule

SPEC = TableSpec(rows=60, lanes=2, dim=5, init=0.3)


def make(name: str = "words", spec: TableSpec = SPEC, kind: str = "adam") -> RowTable:
    return RowTable(spec, RowRule(kind, weight_decay=0.2), 7, name=name)


def train(table: RowTable, event: int, below: int = 45, count: int = 10) -> None:
    generator = torch.Generator().manual_seed(event)
    ws = table.pull([torch.randint(below, (count,), generator=generator)])
    ws.gather(0).backward(torch.randn(count, table.spec.lanes, table.spec.dim, generator=generator))
    table.push(ws, 0.3)


def whole(table: RowTable) -> dict[str, torch.Tensor]:
    (part,) = state_parts(table)
    return {key: tensor.clone() for key, tensor in part.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """No test here cuts the power, so nothing waits for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Run:
    """A model of one weight and two tables, trained by steps; `states` holds what each step came to."""

    def __init__(self, folder: Path, after: Checkpoint | None = None, **options):
        self.tables = {"words": make(), "pairs": make("pairs", kind="factored")}
        self.weight, self.moment, self.step = torch.zeros(3), torch.zeros(2, 2), 0
        self.folder = folder
        if after:
            self.weight, self.step = after.tensors("model")["w"], after.state["step"]
            after.load_optimizer(state := {"w/momentum": self.moment})
            self.moment = state["w/momentum"]
            for name, table in self.tables.items():
                load_files(table, after.table(name))
        self.saver = Saver(folder, after=after, **options)

    def train(self) -> None:
        self.step += 1
        self.weight += self.step
        self.moment -= self.step
        for table in self.tables.values():
            train(table, self.step)

    def begin(self) -> bool:
        return self.saver.begin(
            self.step, {"note": self.step}, {"w": self.weight}, {"w/momentum": self.moment}, self.tables
        )

    def save(self) -> Path:
        self.begin()
        return self.saver.finish()

    def state(self) -> dict[str, torch.Tensor]:
        found = {"w": self.weight.clone(), "moment": self.moment.clone(), "step": torch.tensor(self.step)}
        return found | {f"{name} {key}": x for name, table in self.tables.items() for key, x in whole(table).items()}


def restored(path: Path) -> dict[str, torch.Tensor]:
    return Run(path.parent, Checkpoint(path)).state()


@pytest.mark.parametrize("options", [{}, {"part_bytes": 300}, {"held_bytes": 0, "part_bytes": 300}])
@pytest.mark.parametrize("most", [3, 16])
def test_what_is_loaded_is_what_was_saved_through_merges_and_resumptions(tmp_path, monkeypatch, options, most):
    monkeypatch.setattr(saving, "MOST_DELTAS", most)
    run, deltas, resumed = Run(tmp_path, **options), [], False
    for step in range(1, 15):
        run.train()
        if step % 5 == 0:
            # Two events in a delta, and a save without any.
            run.save()
            assert run.begin() is False and run.saver.finish() is None
            run.train()
        path = run.save()
        assert path == path_of(tmp_path, run.step) and is_whole(path, read=True)
        assert same(restored(path), run.state())
        deltas.append(Checkpoint(path).table("words").deltas)
        if step == 7:
            run, resumed = Run(tmp_path, Checkpoint(newest(tmp_path, print)), **options), True
    assert resumed and max(deltas) <= most and deltas.count(1) >= 2
    # As many rows as twice the distinct ones, at most.
    files = Checkpoint(path).table("words")
    assert files.rows() <= 2 * run.tables["words"].touched_rows
    assert len(files.parts) > 2 if options else len(files.parts) == files.deltas
    assert not list(tmp_path.glob(".writing*")) and len(list(tmp_path.iterdir())) == 2


def test_a_delta_costs_what_changed_and_each_folder_is_complete_in_itself(tmp_path):
    spec = TableSpec(100_000, 2, 16, 0.3)
    table, saver = make(spec=spec), Saver(tmp_path)
    train(table, 0, below=90_000, count=40_000)
    own = []
    for step in range(1, 4):
        before = table.clock.event
        if step > 1:
            train(table, step, below=90_000, count=3000)
        pushed = torch.unique(torch.randint(90_000, (3000,), generator=torch.Generator().manual_seed(step)))
        saver.begin(step, {}, {}, {}, {"words": table})
        path = saver.finish()
        files = Checkpoint(path).table("words")
        own.append([part.path for part in files.parts if part.delta == files.delta])
        size = sum(one.stat().st_size for one in own[-1])
        if step > 1:
            assert before + 1 == table.clock.event
            assert size <= 1.2 * len(pushed) * (bytes_a_row(table.kept) - 8), "the id counts as overhead"
            linked = [part.path for part in files.parts if part.delta < files.delta]
            assert linked and all(one.stat().st_nlink >= 2 for one in linked)
    # Without the folders before.
    shutil.rmtree(path_of(tmp_path, 2))
    other = make(spec=spec)
    load_files(other, Checkpoint(path).table("words"))
    assert same(whole(other), whole(table))


def test_a_snapshot_does_not_see_what_is_trained_after_it(tmp_path, monkeypatch):
    go, dense = threading.Event(), saving.save_dense

    def slowly(*args):
        assert go.wait(20)
        dense(*args)

    monkeypatch.setattr(saving, "save_dense", slowly)
    run = Run(tmp_path)
    run.train()
    grad = torch.ones(2, 1, 1)
    expected = run.state()
    cycle = {"words": {"ids": torch.tensor([3, 4]), "grad": grad}}
    assert run.saver.status == "idle" and run.saver.votes() == (0, 0)
    run.saver.begin(1, {"note": 1}, {"w": run.weight}, {"w/momentum": run.moment}, run.tables, cycle)
    for _ in range(3):
        run.train()
    grad.zero_()
    assert run.saver.status == "writing" and run.saver.votes() == (0, 0)
    assert run.saver.settle(0, 0) is None and not list(tmp_path.glob("step*"))
    go.set()
    while run.saver.status == "writing":
        pass
    assert run.saver.status == "written" and run.saver.votes() == (1, 0)
    assert run.saver.settle(1, 0) == path_of(tmp_path, 1) and run.saver.status == "idle"
    assert same(restored(path_of(tmp_path, 1)), expected)
    assert float(Checkpoint(path_of(tmp_path, 1)).cycle("words")["grad"].sum()) == 2
    # What was pushed meanwhile is in the next one.
    assert same(restored(run.save()), run.state())


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("held_bytes", [0, 1 << 20])
@pytest.mark.parametrize("where", ["save_dense", "write_tensors", "write_atomic", "mark_of", "commit", "_link"])
def test_a_full_disk_leaves_the_last_checkpoint_and_loses_no_row(tmp_path, monkeypatch, where, held_bytes):
    run = Run(tmp_path, held_bytes=held_bytes)
    run.train()
    first, kept = run.save(), run.state()
    run.train()
    with monkeypatch.context() as patch:
        patch.setattr(saving, where, full)
        assert run.begin()
        with pytest.raises(
            (SharedError, OSError), match=r"step_000002: cannot be written .No space left.*--resume"
        ) as e:
            run.saver.finish()
        assert "\n" not in str(e.value)
    assert run.saver.status == "idle" and [path.name for path in tmp_path.iterdir()] == [first.name]
    assert same(restored(first), kept)
    run.train()
    assert same(restored(run.save()), run.state())


def test_a_folder_that_cannot_be_made_is_refused_at_once_and_loses_no_row(tmp_path):
    run = Run(tmp_path / "checkpoint")
    run.train()
    (tmp_path / "checkpoint").write_text("")
    with pytest.raises(SharedError, match=r"step_000001: cannot be written .(File exists|Not a directory).*--resume"):
        run.begin()
    (tmp_path / "checkpoint").unlink()
    assert same(restored(run.save()), run.state())


def test_a_disk_that_is_really_full_is_one_line(tmp_path):
    """The limit on a file's size stands for the full disk, for DCP's file and for a table's."""
    import resource
    import signal

    before, run = resource.getrlimit(resource.RLIMIT_FSIZE), Run(tmp_path)
    run.weight = torch.zeros(3000)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit, trained in ((6000, False), (1500, True)):
        run.train()
        if trained:
            run.weight = torch.zeros(3)
            train(run.tables["words"], 50, 60, 60)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            with pytest.raises(SharedError, match=r"step_00000.: cannot be written \(.+\); free space") as caught:
                run.save()
            assert "\n" not in str(caught.value)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list(tmp_path.iterdir())
    signal.signal(signal.SIGXFSZ, handler)
    assert same(restored(run.save()), run.state())


def test_a_table_that_broke_is_not_saved(tmp_path):
    run = Run(tmp_path)
    run.train()
    run.tables["pairs"].broken = "it was read only in part"
    with pytest.raises(ValueError, match=r"pairs.*in part"):
        run.begin()
    assert not list(tmp_path.iterdir())


def test_a_save_under_way_is_finished_before_the_next_and_at_the_end(tmp_path):
    run = Run(tmp_path)
    for _ in range(3):
        run.train()
        run.begin()
    run.saver.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    assert same(restored(path_of(tmp_path, 3)), run.state())
    run.saver.close()


def test_what_failed_is_gone_after_the_end(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.train()
    run.save()
    run.train()
    monkeypatch.setattr(saving, "save_dense", full)
    run.begin()
    run.saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_checkpoint_whose_files_are_gone_is_not_linked_to(tmp_path):
    run = Run(tmp_path)
    for _ in range(3):
        run.train()
        run.save()
    shutil.rmtree(path_of(tmp_path, 3))
    run.train()
    path = run.save()
    assert Checkpoint(path).table("words").deltas == 1 and same(restored(path), run.state())
    run.train()
    path = run.save()
    assert Checkpoint(path).table("words").deltas == 2 and same(restored(path), run.state())


def test_a_file_system_without_links_copies(tmp_path, monkeypatch):
    run = Run(tmp_path)

    def no_links(*_):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    for _ in range(3):
        run.train()
        path = run.save()
    assert Checkpoint(path).table("words").deltas == 3 and same(restored(path), run.state())
    assert all(part.path.stat().st_nlink == 1 for part in Checkpoint(path).table("words").parts)


# Kills

EVENTS = ("os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR


def killed_at(number: int, folder: Path, act) -> bool:
    """Run act(folder) in a fork that dies before its number-th change in the folder; whether it did."""
    pid = os.fork()
    if pid == 0:
        left = [number]

        def watch(event, args):
            if event in EVENTS or (event == "open" and args[2] & WRITING and str(folder) in str(args[0])):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(9)

        try:
            sys.addaudithook(watch)
            act(folder)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 9


def copy(folder: Path, to: Path) -> Path:
    """A copy in which files that were linked are linked."""
    shutil.rmtree(to, ignore_errors=True)
    names: dict[int, Path] = {}
    for path in sorted(folder.rglob("*")):
        new = to / path.relative_to(folder)
        new.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            continue
        first = names.setdefault(path.stat().st_ino, new)
        shutil.copyfile(path, new) if first is new else os.link(first, new)
    return to


@pytest.mark.parametrize("merge", [False, True])
def test_killed_at_any_instant_of_a_save_the_old_one_or_the_new_one_is_there(tmp_path, monkeypatch, merge):
    run = Run(tmp_path / "base", part_bytes=1200)
    for _ in range(2):
        run.train()
        run.save()
    old = run.state()
    run.train()
    new = run.state()
    monkeypatch.setattr(saving, "MOST_DELTAS", 2 if merge else 16)

    def saved_on(folder: Path) -> None:
        again = Run(folder, Checkpoint(path_of(folder, 2)), part_bytes=1200)
        again.train()
        again.save()

    number, outcomes, folder = 0, [], copy(tmp_path / "base", tmp_path / "copy")
    while killed_at(number, folder, saved_on):
        found = newest(folder, print)
        outcomes.append(found.name)
        assert same(restored(found), {"step_000002": old, "step_000003": new}[found.name])
        # What a merge does not add needs no second look at every instant.
        number, folder = number + 2 - merge, copy(tmp_path / "base", tmp_path / "copy")
    assert outcomes.count("step_000002") > 8 and outcomes.count("step_000003") > 2
    assert outcomes == sorted(outcomes)


def test_killed_at_any_instant_of_a_compaction_the_checkpoint_is_what_it_was(tmp_path):
    run = Run(tmp_path / "base")
    for _ in range(4):
        run.train()
        run.save()
    expected, sizes, number = run.state(), set(), 0
    base = copy(tmp_path / "base", tmp_path / "copy")
    while killed_at(number, base, lambda folder: compact(folder / "step_000004", 1200)):
        for step in (3, 4):
            assert faults(base / f"step_00000{step}", read=True) == []
        assert same(restored(base / "step_000004"), expected)
        sizes.add(Checkpoint(base / "step_000004").table("words").deltas)
        number += 1
        # One that goes on after the kill leaves nothing behind.
        if number % 3 == 0:
            compact(base / "step_000004", 1200)
            assert same(restored(base / "step_000004"), expected)
            assert {path.name for path in (base / "step_000004").iterdir() if path.is_file()} == {
                "COMPLETE", *(name for name in marks_of(base / "step_000004") if "/" not in name)
            }  # fmt: skip
        base = copy(tmp_path / "base", tmp_path / "copy")
    assert sizes == {4, 1} and number > 15


def test_a_compacted_checkpoint_is_the_same_and_training_goes_on_from_it(tmp_path):
    run = Run(tmp_path, part_bytes=400)
    for _ in range(4):
        run.train()
        path = run.save()
    before = {one.name: one.stat().st_ino for one in path_of(tmp_path, 3).iterdir()}
    assert compact(path, 400) == 4 and same(restored(path), run.state())
    files = Checkpoint(path).table("words")
    assert files.deltas == 1 and files.rows() == run.tables["words"].touched_rows and len(files.parts) > 2
    assert compact(path) == 1 and Checkpoint(path).table("words") == files
    # The one before keeps its files.
    assert {one.name: one.stat().st_ino for one in path_of(tmp_path, 3).iterdir()} == before
    assert is_whole(path_of(tmp_path, 3), read=True)
    run = Run(tmp_path, Checkpoint(path), part_bytes=400)
    run.train()
    path = run.save()
    assert Checkpoint(path).table("words").deltas == 2 and same(restored(path), run.state())


def test_a_compaction_without_room_leaves_all_as_it_was(tmp_path, monkeypatch):
    from mome import checkpoint

    run = Run(tmp_path)
    for _ in range(3):
        run.train()
        path = run.save()
    before, write = sorted(one.name for one in path.iterdir()), checkpoint.write_tensors
    calls = iter(range(9))
    monkeypatch.setattr(checkpoint, "write_tensors", lambda *args: full() if next(calls) else write(*args))
    with pytest.raises(OSError, match="No space"):
        compact(path)
    assert sorted(one.name for one in path.iterdir()) == before and same(restored(path), run.state())
