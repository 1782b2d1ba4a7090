"""Checkpoints: a folder a step, whole or not there.

Lives here: writing one atomically, finding the newest whole one, reading it back.
Not here: what goes into one (train_gpt.py) and what a table's tensors mean (mome/table/).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mome.errors import UserError
from mome.files import sync

COMPLETE = "COMPLETE"
KEEP = 2


def save(
    folder: Path, step: int, state: dict[str, Any], tensors: Iterable[tuple[str, dict[str, torch.Tensor]]],
    optimizer: Any,
) -> Path:  # fmt: skip
    """Write `folder`/step_NNNNNN; the marker with the size of every file comes last, then the rename.

    state: JSON values. tensors: names and groups, one safetensors file each, written as they come. optimizer: what
    torch.save takes. A step that is there already stays as it is; the newest KEEP are kept, and nothing half-written.
    Raises OSError when it cannot be written; then those already there are untouched.
    """
    target = folder / f"step_{step:06d}"
    if is_whole(target, read=True):
        return target
    draft = folder / f".writing_{step:06d}"
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for name, group in tensors:
            save_file(
                {key: value.detach().cpu().contiguous() for key, value in group.items()}, draft / f"{name}.safetensors"
            )
        torch.save(optimizer, draft / "optimizer.pt")
        (draft / "state.json").write_text(json.dumps(state))
        for path in draft.iterdir():
            sync(path)
        marks = {path.name: [path.stat().st_size, checksum(path)] for path in sorted(draft.iterdir())}
        (draft / COMPLETE).write_text(json.dumps(marks))
        sync(draft / COMPLETE)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(draft, target)
        sync(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch.save and safetensors wrap a full disk in errors of their own.
        shutil.rmtree(draft, ignore_errors=True)
        reason = str(error).splitlines()[0]
        raise OSError(
            f"checkpoint {target}: cannot be written ({reason}); free space or permissions, then --resume"
        ) from error
    kept = whole_checkpoints(folder)[-KEEP:]
    for old in (*in_order(folder), *folder.glob(".writing_*")):
        if old not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return target


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    total = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            total = zlib.crc32(block, total)
    return total


def is_whole(path: Path, *, read: bool = False) -> bool:
    """Whether the marker is there and every file has the size, and if it is to be read the checksum, that it states."""
    try:
        marks = json.loads((path / COMPLETE).read_text()).items()
        sizes = all((path / name).stat().st_size == size for name, (size, _) in marks)
        return sizes and (not read or all(checksum(path / name) == mark for name, (_, mark) in marks))
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def in_order(folder: Path) -> list[Path]:
    """The checkpoints that `save` named, oldest step first, whole or not."""
    found = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def whole_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return [path for path in in_order(folder) if is_whole(path)]


def newest(folder: Path, log: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint, every file read; None where nothing was saved yet.

    A newer one that is not whole is named and passed over. Raises UserError when none of several is whole.
    """
    found = in_order(folder)
    for path in reversed(found):
        if is_whole(path, read=True):
            return path
        log(f"checkpoint {path.name} is not whole; looking for one before it")
    if found:
        raise UserError(f"{folder}: no whole checkpoint is left; remove this folder to begin the run anew")
    return None


class Checkpoint:
    """A whole checkpoint on disk, read piece by piece."""

    def __init__(self, path: Path):
        self.path = path
        self.state: dict[str, Any] = self._read("state.json", lambda file: json.loads(file.read_text()))

    def file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"

    def part_files(self, name: str) -> list[Path]:
        """The files NAME.000, NAME.001, ... in order."""
        found = self.path.glob(f"{name}.[0-9][0-9][0-9]*.safetensors")
        return sorted(found, key=lambda path: int(path.suffixes[-2][1:]))

    def parts(self, name: str) -> Iterator[dict[str, torch.Tensor]]:
        """Their tensors, a file at a time."""
        for path in self.part_files(name):
            yield self.tensors(path.name.removesuffix(".safetensors"))

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return self._read(f"{name}.safetensors", load_file)

    def optimizer(self) -> Any:
        return self._read("optimizer.pt", lambda file: torch.load(file, map_location="cpu", weights_only=True))

    def _read(self, name: str, read: Callable[[Path], Any]) -> Any:
        """What `read` makes of a file; a damaged one is named."""
        try:
            return read(self.path / name)
        except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{self.path / name}: damaged ({reason}); remove {self.path} to use the one before"
            ) from error
