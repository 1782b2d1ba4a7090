"""python -m mome ckpt list|verify|compact RUN: the checkpoints of a run, read, checked and merged.

Lives here: the command. Not here: the format (mome/checkpoint.py) and writing one (mome/saving.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mome.checkpoint import Checkpoint, compact, faults, in_order, marks_of, whole_checkpoints
from mome.errors import UserError
from mome.options import parse
from mome.runfolder import RunFolder


@dataclass(frozen=True)
class CkptOptions:
    """List a run's checkpoints, read every byte of them, or merge the deltas of the newest."""

    what: Annotated[Literal["list", "verify", "compact"], tyro.conf.Positional]
    """list: step, size and parts of each. verify: read everything and name what is wrong; status 1 if anything is.
    compact: the newest one's deltas into one, at once: what breaks it off leaves the old files or the new ones."""
    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""


def main(words: Sequence[str]) -> int:
    """The command; returns the exit status."""
    options = parse(CkptOptions, words, "python -m mome ckpt")
    folder = RunFolder.open(options.run)
    found = in_order(folder.checkpoints)
    if not found:
        raise UserError(f"{folder.path}: no checkpoint in it; train it, or give another of runs/*")
    if options.what == "compact":
        with folder.locked():
            compact_newest(folder)
        return 0
    for line in listing(found) if options.what == "list" else ():
        print(line)
    return sum([verify(path) for path in found]) and 1 if options.what == "verify" else 0


def listing(found: Sequence[Path]) -> Iterator[str]:
    """A line for each checkpoint, oldest first. new: bytes that its save wrote, not linked from the one before."""
    yield f"{'checkpoint':16} {'bytes':>16} {'new':>16} {'deltas':>7} {'processes':>10}"
    for path in found:
        if wrong := faults(path):
            yield f"{path.name:16} not whole: {wrong[0]}"
            continue
        try:
            checkpoint, sizes = Checkpoint(path), {name: size for name, (size, _) in marks_of(path).items()}
            tables = checkpoint.tables().values()
        except UserError as error:
            yield f"{path.name:16} not whole: {str(error).removeprefix(f'{path}/')}"
            continue
        linked = [part.path.name for files in tables for part in files.parts if part.delta < files.delta]
        whole, old = sum(sizes.values()), sum(sizes[name] for name in linked)
        deltas = max((files.deltas for files in tables), default=0)
        yield f"{path.name:16} {whole:16,} {whole - old:16,} {deltas:7} {checkpoint.state['world']:10}"


def verify(path: Path) -> bool:
    """Read a checkpoint and say what is wrong with it; whether anything is."""
    wrong = faults(path, read=True)
    if not wrong:
        try:
            # The list of files could be whole, and the tables in it not.
            checkpoint = Checkpoint(path)
            sizes = [size for size, _ in marks_of(path).values()]
            print(f"{path.name}: whole, {len(checkpoint.names)} files, {sum(sizes):,} bytes")
            checkpoint.tables()
        except UserError as error:
            wrong = [str(error)]
    for line in wrong:
        print(f"{path.name}: {line}")
    return bool(wrong)


def compact_newest(folder: RunFolder) -> None:
    """Merge the deltas of the newest whole checkpoint, and say what came of it."""
    whole = whole_checkpoints(folder.checkpoints)
    if not whole:
        raise UserError(f"{folder.checkpoints}: no whole checkpoint; python -m mome ckpt verify says what is wrong")
    path = whole[-1]
    # Damaged bytes would get a marker that says they are right.
    if wrong := faults(path, read=True):
        raise UserError(f"{path}: {wrong[0]}; remove it to use the one before")
    before = sum(size for size, _ in marks_of(path).values())
    deltas = compact(path)
    after = sum(size for size, _ in marks_of(path).values())
    print(f"{path.name}: {deltas} deltas, {before:,} bytes -> {after:,} bytes")
