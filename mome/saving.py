"""Saving while training goes on: a snapshot now, its files from a thread, a checkpoint once all ranks have written.

    saver.begin(...)                      main thread: copies; the thread writes into .writing_NNNNNN
    saver.settle(*sums of saver.votes())  main thread, each step, sums over ranks: commits, or raises what failed
    saver.finish()                        main thread: wait, then the same; for the last save
    saver.close()                         on the way out, also after an error: what is written everywhere is kept

Lives here: Saver. Not here: the format and reading (mome/checkpoint.py), deltas (mome/table/deltas.py), what is saved.

A save is a delta: of each table the rows pushed since the save before, with hard links to the files of that one
(copies where the file system knows no links), so that it costs what changed and each checkpoint is complete in itself.
When a chain has grown (MOST_DELTAS, or twice the rows that it is worth) the ranks write it as one delta instead, each
its own rows. All ranks share the file system of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mome.checkpoint import (
    FORMAT,
    Checkpoint,
    Marks,
    commit,
    draft_marks,
    is_whole,
    mark_of,
    marks_of,
    path_of,
    write_tensors,
)
from mome.errors import SharedError
from mome.files import json_text, sync, write_atomic
from mome.sharded import reason_of, save_dense, snapshot
from mome.table.deltas import PartFile, clock_name, may_own, merged, part_name
from mome.table.parts import PART_BYTES, clock_part, row_parts
from mome.table.rows import RowTable
from mome.world import World

MOST_DELTAS = 16
# Rows beyond so many bytes are written by the main thread at once, instead of copied for the other one.
HELD_BYTES = 1 << 30
# Seconds that `close` waits for what is being written.
CLOSING = 20.0


@dataclass
class _Chain:
    """The deltas of one table in the last checkpoint: how many, and their rows, one counted as often as it is there."""

    deltas: int = 0
    rows: int = 0


@dataclass
class _Job:
    """One save on one rank, from its snapshot to its end."""

    step: int
    delta: int
    draft: Path
    state: str
    tables: Mapping[str, RowTable]
    before: Path | None  # the checkpoint whose files are linked
    chains: dict[str, _Chain]  # as they will be
    merge: set[str]  # tables whose chain becomes one delta
    unsaved: dict[str, Tensor]
    dense: dict[str, Any] = field(default_factory=dict)
    small: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by file name
    held: list[tuple[PartFile, dict[str, Tensor]]] = field(default_factory=list)
    written: dict[str, list[PartFile]] = field(default_factory=dict)  # parts of this delta by table
    marks: Marks = field(default_factory=dict)
    failure: str = ""
    thread: threading.Thread | None = None


class Saver:
    """The checkpoints of a run in `folder`, all ranks together; every method but `status`, `votes` and `close` is
    called by every rank, in the same order.

    after: the checkpoint that training went on from. part_bytes: of one file of a table; held_bytes: see HELD_BYTES.
    """

    def __init__(
        self, folder: Path, world: World | None = None, after: Checkpoint | None = None, *,
        part_bytes: int = PART_BYTES, held_bytes: int = HELD_BYTES,
    ) -> None:  # fmt: skip
        self.folder, self.world = folder, world or World()
        self.part_bytes, self.held_bytes = part_bytes, held_bytes
        # DCP plans by collectives, in the thread: on a group that nobody else uses.
        self._group = self.world.new_host_group()
        self._job: _Job | None = None
        self._last: Path | None = None
        self._delta = 0
        self._chains: dict[str, _Chain] = {}
        if after is not None:
            tables = after.tables()
            self._last = after.path
            self._delta = max((files.delta for files in tables.values()), default=0)
            if self.world.first:
                self._chains = {name: _Chain(files.deltas, files.rows()) for name, files in tables.items()}

    @property
    def last(self) -> Path | None:
        """The newest checkpoint of this run, once all ranks have written it."""
        return self._last

    @property
    def status(self) -> str:
        """ "idle", "writing", "written" or "failed: why", on this rank."""
        job = self._job
        if job is None:
            return "idle"
        if job.thread.is_alive():
            return "writing"
        return f"failed: {job.failure}" if job.failure else "written"

    def votes(self) -> tuple[int, int]:
        """(1, 0) once this rank has written, (0, 1) if it failed: to be summed over the ranks for `settle`."""
        status = self.status
        return int(status == "written"), int(status.startswith("failed"))

    def begin(
        self, step: int, state: Mapping[str, Any], model: Mapping[str, Any], optim: Mapping[str, Any],
        tables: Mapping[str, RowTable], cycle: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> bool:  # fmt: skip
        """Take a snapshot, and let the thread write it; the save before is finished first.

        state: JSON values (rank 0's count). model, optim: tensors that every rank holds alike, DTensors, or tensors
        that one rank alone has. cycle: ids and grad of each table's working set under way. False: the step's
        checkpoint is there already and whole. Raises SharedError where the folder cannot be written, and what `finish`
        raises.
        """
        self.finish()
        for table in tables.values():
            table.refuse_broken()
        unsaved = {name: table.take_unsaved() for name, table in tables.items()}
        draft, refusal = self.folder / f".writing_{step:06d}", ""
        there = lost = False
        if self.world.first:
            try:
                there = is_whole(path_of(self.folder, step), read=True)
                lost = self._last is not None and not is_whole(self._last)
                if not there:
                    shutil.rmtree(draft, ignore_errors=True)
                    (draft / "dense").mkdir(parents=True)
            except OSError as error:
                refusal = reason_of(error)[1]
        # What is to be done follows from these sums alone, so that all ranks do the same.
        sums = [int(there), int(lost), int(bool(refusal))]
        for name, table in tables.items():
            chain = self._chains.get(name, _Chain())
            first = self.world.first
            sums += [chain.deltas * first, chain.rows * first, len(unsaved[name]), table.touched_rows]
        there, lost, refused, *rest = self.world.all_reduce(
            "save", torch.tensor(sums, dtype=torch.int64, device=self.world.device)
        ).wait().tolist()  # fmt: skip
        if there or refused:
            self._give_back(tables, unsaved)
            if refused:
                raise SharedError(self._cannot(step, refusal or "rank 0 cannot make its folder"))
            return False
        job = _Job(
            step, self._delta + 1, draft, json_text(dict(state) | self._facts(step), indent=None), tables,
            None if lost else self._last, {}, set(), unsaved,
        )  # fmt: skip
        for at, name in enumerate(tables):
            deltas, rows, fresh, touched = rest[4 * at : 4 * at + 4]
            chain = _Chain(deltas + bool(fresh), rows + fresh)
            if lost:
                # Its files are gone: the rows are all here still.
                job.unsaved[name] = tables[name].touched_ids()
                chain = _Chain(1, touched)
            elif deltas and fresh and (chain.deltas > MOST_DELTAS or chain.rows > 2 * touched):
                job.merge.add(name)
                chain = _Chain(1, touched)
            job.chains[name] = chain
        self._snapshot(job, model, optim, cycle or {})
        self._job = job
        job.thread = threading.Thread(target=self._write, args=(job,), name=f"save-{step}", daemon=True)
        job.thread.start()
        return True

    def settle(self, written: int, failed: int) -> Path | None:
        """What follows from the sums of all ranks' votes: nothing while one still writes; else the checkpoint.

        The votes must be of the save under way: taken after its `begin`.
        Raises SharedError when one of them failed: then nothing is left of this save, its rows go into the next one,
        and the checkpoint before is as it was. OSError, on rank 0 alone, when the disk refuses the last of it.
        """
        job = self._job
        if job is None or written + failed < self.world.size:
            return None
        if failed:
            reasons = self.world.gather_objects("save", job.failure)
            self._job = None
            self._give_back(job.tables, job.unsaved)
            if self.world.first:
                shutil.rmtree(job.draft, ignore_errors=True)
            rank, reason = next((rank, one) for rank, one in enumerate(reasons) if one)
            known = reason.startswith("rank ") or self.world.alone
            raise SharedError(self._cannot(job.step, reason if known else f"rank {rank}: {reason}"))
        self._job = None
        if self.world.first:
            try:
                commit(job.draft, path_of(self.folder, job.step), self.world.size)
            except OSError as error:
                shutil.rmtree(job.draft, ignore_errors=True)
                self._give_back(job.tables, job.unsaved)
                raise OSError(self._cannot(job.step, reason_of(error)[1])) from error
        self._last, self._delta, self._chains = path_of(self.folder, job.step), job.delta, job.chains
        return self._last

    def finish(self) -> Path | None:
        """Wait for the save under way, if there is one, and settle it."""
        if self._job is None:
            return None
        self._job.thread.join()
        sums = torch.tensor(self.votes(), dtype=torch.int64, device=self.world.device)
        return self.settle(*self.world.all_reduce("save", sums).wait().tolist())

    def close(self) -> None:
        """End without asking the other ranks, who may be gone: a save that all of them have written is kept."""
        job, self._job = self._job, None
        if job is None:
            return
        deadline = time.monotonic() + CLOSING
        job.thread.join(None if self.world.alone else CLOSING)
        if job.thread.is_alive() or not self.world.first:
            return
        while not job.failure and time.monotonic() < deadline:
            if all(draft_marks(job.draft, rank).exists() for rank in range(self.world.size)):
                with contextlib.suppress(OSError):
                    commit(job.draft, path_of(self.folder, job.step), self.world.size)
                return
            time.sleep(0.05)
        shutil.rmtree(job.draft, ignore_errors=True)

    def _facts(self, step: int) -> dict[str, Any]:
        return {"format": FORMAT, "step": step, "world": self.world.size}

    def _cannot(self, step: int, reason: str) -> str:
        where = path_of(self.folder, step)
        return f"checkpoint {where}: cannot be written ({reason}); free space or permissions, then --resume"

    def _give_back(self, tables: Mapping[str, RowTable], unsaved: Mapping[str, Tensor]) -> None:
        for name, ids_U in unsaved.items():
            tables[name].keep_unsaved(ids_U)

    def _snapshot(
        self, job: _Job, model: Mapping[str, Any], optim: Mapping[str, Any], cycle: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Copies of everything, and of the rows what may be held; the others are written here."""
        rank, held = self.world.rank, 0
        named = {f"model.{key}": value for key, value in model.items()}
        job.dense = snapshot(named | {f"optim.{key}": value for key, value in optim.items()}, self._group)
        for name, kept in cycle.items():
            job.small[f"cycle_{name}.{rank:04d}.safetensors"] = snapshot(kept)
        try:
            for name, table in job.tables.items():
                if self.world.first:
                    job.small[clock_name(name, job.delta)] = clock_part(table)
                job.written[name] = []
                for n, part in enumerate(row_parts(table, job.unsaved[name], self.part_bytes)):
                    file = part_name(name, job.delta, rank, n) + (".fresh" if name in job.merge else "")
                    one = PartFile(job.delta, rank, n, job.draft / file)
                    job.written[name].append(one)
                    held += sum(tensor.nbytes for tensor in part.values())
                    if held > self.held_bytes:
                        job.marks[one.path.name] = write_tensors(one.path, part)
                    else:
                        job.held.append((one, part))
        except (OSError, MemoryError) as error:
            # The thread still goes where the other ranks' threads will meet it.
            job.failure = reason_of(error)[1]

    def _write(self, job: _Job) -> None:
        """The thread: everything that this rank has to write, and at last its marks."""
        try:
            # First, and whatever else failed here: the threads of all ranks meet in it.
            save_dense(job.draft / "dense", job.dense, self._group)
            if not job.failure:
                self._write_files(job)
        except BaseException as error:
            job.failure = job.failure or reason_of(error)[1]
        finally:
            job.dense, job.small, job.held = {}, {}, []

    def _write_files(self, job: _Job) -> None:
        rank, draft, marks = self.world.rank, job.draft, job.marks
        dense = [*draft.glob(f"dense/__{rank}_*"), *([draft / "dense/.metadata"] if rank == 0 else [])]
        marks |= {f"dense/{path.name}": mark_of(path) for path in dense}
        for name, tensors in job.small.items():
            marks[name] = write_tensors(draft / name, tensors)
        for one, part in job.held:
            marks[one.path.name] = write_tensors(one.path, part)
        older = Checkpoint(job.before).tables() if job.before else {}
        for name, table in job.tables.items():
            parts = older[name].parts if name in older else ()
            if name in job.merge:
                parts = [one for one in parts if may_own(table, one)]
                for n, part in enumerate(merged([*parts, *job.written[name]], table.owned, self.part_bytes)):
                    file = part_name(name, job.delta, rank, n)
                    marks[file] = write_tensors(draft / file, part)
                for one in job.written[name]:
                    one.path.unlink()
                    del marks[one.path.name]
            elif rank == 0 and parts:
                known = marks_of(job.before)
                for one in parts:
                    _link(one.path, draft / one.path.name)
                    marks[one.path.name] = known[one.path.name]
        if rank == 0:
            write_atomic(draft / "state.json", job.state)
            marks["state.json"] = mark_of(draft / "state.json")
        sync(draft / "dense")
        write_atomic(draft_marks(draft, rank), json.dumps(marks))


def _link(old: Path, new: Path) -> None:
    """The same file under a second name; a copy where there are no links, or no more of them."""
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES):
            raise
        shutil.copyfile(old, new)
        sync(new)
