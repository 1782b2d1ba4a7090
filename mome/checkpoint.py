"""Checkpoints: a folder a step, whole or not there, read at any number of processes.

    step_NNNNNN/COMPLETE        every file of it with its size and CRC-32; written last
                state.json      step, tokens, position in the data, ... (JSON values)
                dense/          model tensors ("model.NAME") and optimizer state ("optim.KEY"); see mome/sharded.py
                table_*         tables as deltas; see mome/table/deltas.py
                cycle_NAME.SSSS.safetensors     ids and gradient of rank S, where a cycle was under way

Lives here: markers, finding the newest whole one, reading one back, merging its deltas.
Not here: writing one while training goes on (mome/saving.py), and what goes into one (train_gpt.py).

A table's file that two checkpoints share is one file under two names (a hard link): what damages its bytes on the disk
damages both. COMPLETE says which files count; others are what a kill left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mome.errors import SharedError, UserError
from mome.files import sync, write_atomic
from mome.sharded import load_dense, load_whole, reason_of
from mome.table.deltas import TableFiles, merged, part_name, tables_in
from mome.table.parts import PART_BYTES
from mome.world import World

COMPLETE = "COMPLETE"
KEEP = 2
FORMAT = 2

# By name: size in bytes and CRC-32.
Marks = dict[str, list[int]]


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> list[int]:
    """Write a safetensors file and flush it to the disk; returns its mark. Raises OSError where that fails."""
    try:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
        return mark_of(path)
    except SafetensorError as error:
        # A full disk, in words of its own.
        raise OSError(*reason_of(error)) from error


def mark_of(path: Path) -> list[int]:
    """Size and CRC-32 of a file, once it is on the disk."""
    sync(path)
    return [path.stat().st_size, checksum(path)]


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    total = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
    return total


def marks_of(path: Path) -> Marks:
    """What the marker of a checkpoint states. Raises UserError when there is none that can be read."""
    try:
        marks = json.loads((path / COMPLETE).read_text())
        listed = all(len(mark) == 2 and isinstance(mark[0], int) for mark in marks.values())
        if listed and marks.keys() >= {"state.json", "dense/.metadata"}:
            return marks
        reason = "not a list of a checkpoint's files"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        reason = str(error)
    raise UserError(f"{path}: not whole, its {COMPLETE} cannot be read ({reason}); remove it to use the one before")


def faults(path: Path, *, read: bool = False, share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with a checkpoint, a line a file: sizes, and if they are to be read checksums too.

    share: (rank, size) to look at every size-th file only, so that several processes look at all.
    """
    try:
        marks = marks_of(path)
    except UserError as error:
        return [str(error).removeprefix(f"{path}: ")]
    wrong = []
    for name, (size, total) in sorted(marks.items())[share[0] :: share[1]]:
        try:
            found = (path / name).stat().st_size
            if found != size:
                wrong.append(f"{name}: {found:,} bytes instead of {size:,}")
            elif read and checksum(path / name) != total:
                wrong.append(f"{name}: other bytes than were written (its CRC-32 differs)")
        except OSError as error:
            wrong.append(f"{name}: {error.strerror or error}")
    return wrong


def is_whole(path: Path, *, read: bool = False) -> bool:
    """Whether a checkpoint has no faults."""
    return not faults(path, read=read)


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:06d}"


def in_order(folder: Path) -> list[Path]:
    """The checkpoints that were named by their step, oldest step first, whole or not."""
    found = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def whole_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return [path for path in in_order(folder) if is_whole(path)]


def newest(folder: Path, log: Callable[[str], None], world: World | None = None) -> Path | None:
    """The newest whole checkpoint, every file read; None where nothing was saved yet.

    A newer one that is not whole is named (by rank 0) and passed over. Each process reads its share of the files, and
    all come to the same answer. Raises SharedError when none of several is whole.
    """
    world = world or World()
    found = world.gather_objects("checkpoint", [path.name for path in in_order(folder)])[0]
    for name in reversed(found):
        wrong = faults(folder / name, read=True, share=(world.rank, world.size))
        wrong = [line for lines in world.gather_objects("checkpoint", wrong) for line in lines]
        if not wrong:
            return folder / name
        if world.first:
            log(f"checkpoint {name} is not whole ({wrong[0]}); looking for one before it")
    if found:
        raise SharedError(f"{folder}: no whole checkpoint is left; remove this folder to begin the run anew")
    return None


def draft_marks(draft: Path, rank: int) -> Path:
    """Where a rank leaves the marks of its files once all of them are on the disk."""
    return draft / f"marks_{rank:04d}.json"


def commit(draft: Path, target: Path, ranks: int) -> None:
    """Make a checkpoint of what so many ranks have written: its marker, its name, and the end of all but the last KEEP.
    Newer ones go too: training went back before them, because they are damaged.

    Raises OSError where a rank's marks are missing or the disk refuses; those that are there are untouched then.
    """
    marks: Marks = {}
    for rank in range(ranks):
        marks |= json.loads(draft_marks(draft, rank).read_text())
    write_atomic(draft / COMPLETE, json.dumps(marks))
    for rank in range(ranks):
        draft_marks(draft, rank).unlink()
    shutil.rmtree(target, ignore_errors=True)
    os.replace(draft, target)
    sync(target.parent)
    before = in_order(target.parent)
    kept = [path for path in before[: before.index(target) + 1] if is_whole(path)][-KEEP:]
    for old in (*in_order(target.parent), *target.parent.glob(".writing_*")):
        if old not in kept:
            # By another name first: who lists them meanwhile sees a whole one, or none.
            going = old.with_name(f".writing_{old.name}")
            with contextlib.suppress(OSError):
                os.replace(old, going)
            shutil.rmtree(going, ignore_errors=True)


class Checkpoint:
    """A whole checkpoint on disk, read piece by piece. Raises UserError for what is damaged, naming it.

    names: its files. state: what the trainer saved, with `step` and `world`, how many processes wrote it.
    """

    def __init__(self, path: Path):
        self.path = path
        self.names = tuple(marks_of(path))
        self.state: dict[str, Any] = self._read("state.json", lambda file: dict(json.loads(file.read_text())))
        if self.state.get("format") != FORMAT:
            raise UserError(
                f"{path}: a checkpoint of format {self.state.get('format')}, this version reads {FORMAT}; go on with "
                "the version that wrote it"
            )

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """All dense tensors of a kind ("model"), whole, on the CPU."""
        return load_whole(self.path / "dense", f"{kind}.")

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Fill the tensors of an optimizer's state_dict in place; DTensors with this rank's part."""
        into = {f"optim.{key}": value for key, value in state.items()}
        load_dense(self.path / "dense", into)
        for key in state:
            state[key] = into[f"optim.{key}"]

    def tables(self) -> dict[str, TableFiles]:
        """The files of every table."""
        return tables_in(self.path, self.names)

    def table(self, name: str) -> TableFiles:
        """The files of one table, for load_files and saved_table."""
        if name not in (tables := self.tables()):
            raise UserError(f"{self.path}: no table {name!r} in it; it belongs to another configuration")
        return tables[name]

    def cycle(self, name: str, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
        """What rank `rank` of `size` has of a table's working set under way: ids [U], sorted, and grad [U, lanes, dim].

        List j of those that were saved goes to rank j mod size; the lists of one rank are merged, their gradients
        summed in the order of the lists. A rank without a list has no row.
        """
        lists = sorted(
            (int(found[1]), one)
            for one in self.names
            if (found := re.fullmatch(rf"cycle_{re.escape(name)}\.(\d+)\.safetensors", one))
        )
        if not lists:
            raise UserError(f"{self.path}: no cycle of the table {name!r} in it; it belongs to another configuration")
        mine = [self._read(one, load_file) for number, one in lists if number % size == rank]
        if not mine:
            first = self._read(lists[0][1], load_file)
            return {key: tensor[:0].clone() for key, tensor in first.items()}
        if len(mine) == 1:
            return mine[0]
        ids_U, place_N = torch.unique(torch.cat([one["ids"] for one in mine]), return_inverse=True)
        grad_ULD = mine[0]["grad"].new_zeros(len(ids_U), *mine[0]["grad"].shape[1:])
        grad_ULD.index_add_(0, place_N, torch.cat([one["grad"] for one in mine]))
        return {"ids": ids_U, "grad": grad_ULD}

    def _read(self, name: str, read: Callable[[Path], Any]) -> Any:
        """What `read` makes of a file; a damaged one is named."""
        try:
            return read(self.path / name)
        except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise UserError(
                f"{self.path / name}: damaged ({reason_of(error)[1]}); remove {self.path} to use the one before"
            ) from error


def compact(path: Path, part_bytes: int = PART_BYTES) -> int:
    """Merge the deltas of every table of a checkpoint into one, the newest row winning; returns how many there were at
    most. In memory is about a part at a time.

    The checkpoint holds the old files or the new ones at any instant: COMPLETE changes from one list to the other at
    once, and what it does not name does not count. Raises OSError where there is no room; then it is as it was.
    """
    marks, most = marks_of(path), 0
    try:
        for files in Checkpoint(path).tables().values():
            most = max(most, files.deltas)
            if files.deltas < 2:
                continue
            # A list that no rank has: the new files stand beside those that still count.
            number = 1 + max(part.list for part in files.parts)
            for n, part in enumerate(merged(files.parts, part_bytes=part_bytes)):
                name = part_name(files.table, files.delta, number, n)
                # Not over what a kill left, which may be a file of other checkpoints too.
                (path / name).unlink(missing_ok=True)
                marks[name] = write_tensors(path / name, part)
            for part in files.parts:
                del marks[part.path.name]
        write_atomic(path / COMPLETE, json.dumps(marks))
    finally:
        counted = marks_of(path)
        for one in (*path.glob("table_*"), *path.glob(".*.part")):
            if one.name not in counted:
                one.unlink()
    return most
