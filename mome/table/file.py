"""Tables that are only read, from safetensors files, without ever holding the whole of one in memory.

Lives here: memory maps of safetensors files, the rows of an export (FileTable) and of a checkpoint (saved_table).
Not here: tables that train (rows.py), what goes into a checkpoint (parts.py, deltas.py) or an export
(mome/pretrained.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mome.errors import UserError
from mome.table.rows import RowTable
from mome.table.spec import TableSpec, kept
from mome.table.working import WorkingSet
from optim.rows import RowRule

# As numpy maps them; it has no name for the last two.
_DTYPES = {
    "F32": (np.float32, torch.float32), "F64": (np.float64, torch.float64), "I64": (np.int64, torch.int64),
    "I32": (np.int32, torch.int32), "I16": (np.int16, torch.int16), "BF16": (np.int16, torch.bfloat16),
    "F8_E4M3": (np.uint8, torch.float8_e4m3fn), "U8": (np.uint8, torch.uint8),
}  # fmt: skip


def mapped_names(path: Path) -> list[str]:
    """The names of the tensors of a safetensors file. Raises UserError for a file that is cut or no such file."""
    try:
        return [name for name in _header(path)[0] if name != "__metadata__"]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: no readable rows in it ({error}); copy or write it again") from error


def mapped_torch(path: Path, name: str) -> Tensor:
    """A tensor of a safetensors file as a private memory map: what is not looked at is not read. As mapped_tensor."""
    # torch knows no read-only tensors: one that was written to would change, and its file would not.
    array, dtype = mapped_tensor(path, name, "c")
    return torch.from_numpy(array).view(dtype)


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON of a safetensors file and its length."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError("it is cut short or damaged")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise ValueError("it is damaged")
    return header, size


def mapped_tensor(path: Path, name: str, mode: str = "r") -> tuple[np.memmap, torch.dtype]:
    """A tensor of a safetensors file as a memory map (numpy's mode: read-only), and the dtype that its bits have.

    Layout (safetensors' format description): a little-endian uint64, that many bytes of JSON, then the data.
    Raises UserError for a file that is cut or lacks the tensor.
    """
    try:
        header, size = _header(path)
        entry = header[name]
        first, end = entry["data_offsets"]
        if path.stat().st_size < 8 + size + end:
            raise ValueError("it is cut short")
        kind, dtype = _DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        if end - first != math.prod(shape) * np.dtype(kind).itemsize:
            raise ValueError("it is damaged")
        if not end - first:
            return np.empty(shape, kind), dtype
        return np.memmap(path, kind, mode=mode, offset=8 + size + first, shape=shape), dtype
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path}: no readable rows in it ({error}); copy or write it again") from error


class FileTable:
    """Rows in files, each with a float32 tensor `rows` [n, lanes, dim], in order; has pull and iter_rows of RowTable.

    Raises UserError for files that are cut, of another dtype, or that hold other rows than spec says.
    """

    def __init__(self, spec: TableSpec, files: Sequence[Path]):
        self.spec = spec
        if not files:
            raise UserError(f"an export without a file of rows for a table of {spec.rows}: export the run again")
        self._rows = []
        for path in files:
            rows, dtype = mapped_tensor(path, "rows")
            if rows.shape[1:] != (spec.lanes, spec.dim) or dtype != torch.float32:
                raise UserError(
                    f"{path}: holds rows of {list(rows.shape[1:])} {dtype}, the configuration says "
                    f"{[spec.lanes, spec.dim]} {torch.float32}"
                )
            self._rows.append(rows)
        self._starts = np.cumsum([0, *(len(rows) for rows in self._rows)])
        if self._starts[-1] != spec.rows:
            raise UserError(
                f"{files[0]}: with its {len(files) - 1} others holds {self._starts[-1]} rows, the configuration says "
                f"{spec.rows}"
            )

    def pull(self, ids: Sequence[Tensor], *, grad: bool = False) -> WorkingSet:
        """The rows of these ids as a working set for reading; grad must be False."""
        assert not grad, "a table in a file does not train"
        unique_U = torch.unique(torch.cat([step.flatten() for step in ids]))
        if len(unique_U) and not 0 <= int(unique_U[0]) <= int(unique_U[-1]) < self.spec.rows:
            raise UserError(f"row ids {int(unique_U[0])} to {int(unique_U[-1])} of a table of {self.spec.rows} rows")
        slots = [torch.searchsorted(unique_U, step) for step in ids]
        return WorkingSet(unique_U, self._read(unique_U.numpy()), slots, 0, None)

    def iter_rows(self, chunk: int) -> Iterator[Tensor]:
        """All rows in order, `chunk` at a time: [<= chunk, lanes, dim]."""
        for first in range(0, self.spec.rows, chunk):
            yield self._read(np.arange(first, min(first + chunk, self.spec.rows)))

    def _read(self, ids_U: np.ndarray) -> Tensor:
        rows_ULD = np.empty((len(ids_U), self.spec.lanes, self.spec.dim), self._rows[0].dtype)
        for start, rows in zip(self._starts, self._rows):
            here = (ids_U >= start) & (ids_U < start + len(rows))
            rows_ULD[here] = rows[ids_U[here] - start]
        return torch.from_numpy(rows_ULD)


def saved_table(
    spec: TableSpec, rule: RowRule, seed: int, name: str, format: str, clock: Path, files: Sequence[Path]
) -> RowTable:
    """A table as a checkpoint's files hold it (deltas.py), for reading only: it pulls as the one that was saved would.

    spec to format are those that the saved table was made with; files: its parts, oldest delta first. Raises UserError
    for files that are cut, or belong to another table.
    """
    ids = [mapped_tensor(path, "ids")[0] for path in files]
    stores = {
        key: _SavedPlane(ids, [mapped_tensor(path, key) for path in files], files, clock, tail, dtype)
        for key, (tail, dtype) in kept(spec, rule, format).items()
    }
    table = RowTable(spec, rule, seed, name=name, format=format, stores=stores)
    try:
        with safe_open(clock, "pt") as file:
            table.clock.load_state_dict({key: file.get_tensor(key) for key in table.clock.state_dict()})
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{clock}: its clock cannot be read ({error}); copy or write it again") from error
    table.forget()
    return table


class _SavedPlane:
    """One plane of a checkpoint's parts as a store that is only read: the last part that has a row, else zeros."""

    memory = None

    def __init__(
        self, ids: list[np.ndarray], planes: list[tuple[np.ndarray, torch.dtype]], paths: Sequence[Path], clock: Path,
        tail: tuple[int, ...], dtype: torch.dtype,
    ):  # fmt: skip
        self._clock, self._ids, self._planes = clock, ids, [plane for plane, _ in planes]
        for path, ids_N, (plane, kind) in zip(paths, ids, planes):
            if len(plane) != len(ids_N):
                raise UserError(f"{path}: a part of {len(ids_N)} ids and {len(plane)} rows: it is damaged")
            if plane.shape[1:] != tail or kind != dtype:
                raise UserError(
                    f"{path}: holds rows of {list(plane.shape[1:])} {kind}, the configuration says {list(tail)} {dtype}"
                )

    def write(self, ids_U: Tensor, values: Tensor) -> None:
        raise ValueError(
            f"{self._clock.parent}: rows of a checkpoint are only read; load them into a table that trains"
        )

    def read(self, ids_U: Tensor, out: Tensor) -> Tensor:
        """Copies of these rows (int64 [U]) into out [U, *tail]."""
        out.zero_()
        wanted_U, into = ids_U.numpy(), out.view(torch.uint8) if out.dtype.itemsize == 1 else out
        into = (into.view(torch.int16) if out.dtype == torch.bfloat16 else into).numpy()
        if not len(wanted_U):
            return out
        low, high = wanted_U.min(), wanted_U.max()
        for ids_N, plane in zip(self._ids, self._planes):
            # Most parts hold a stretch of the ids.
            if len(ids_N) and ids_N[0] <= high and ids_N[-1] >= low:
                at_U = np.minimum(np.searchsorted(ids_N, wanted_U), len(ids_N) - 1)
                here = ids_N[at_U] == wanted_U
                into[here] = plane[at_U[here]]
        return out
