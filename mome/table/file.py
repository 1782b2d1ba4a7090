"""A table that is only read, from safetensors files, without ever holding the whole of it in memory.

Lives here: memory-mapped rows of a checkpoint (raw, decayed on reading) and of an export (decay already applied).
Not here: tables that train (rows.py), what goes into a checkpoint (train_gpt.py) or an export (mome/pretrained.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from mome.errors import UserError
from mome.table.rows import TableSpec, WorkingSet
from optim.rows import RowClock

_DTYPES = {"F32": np.float32, "F64": np.float64, "I32": np.int32}


def mapped_tensor(path: Path, name: str) -> np.memmap:
    """A tensor of a safetensors file as a read-only memory map. Raises UserError for a file that is cut or lacks it.

    Layout (safetensors' format description): a little-endian uint64, that many bytes of JSON, then the data.
    """
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("it is cut short or damaged")
            entry = json.loads(file.read(size))[name]
        first, end = entry["data_offsets"]
        if path.stat().st_size < 8 + size + end:
            raise ValueError("it is cut short")
        return np.memmap(path, _DTYPES[entry["dtype"]], mode="r", offset=8 + size + first, shape=tuple(entry["shape"]))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path}: no readable rows in it ({error}); copy or write it again") from error


class FileTable:
    """Rows in files, each with a tensor `rows` [n, lanes, dim], in order; has pull and iter_rows of RowTable.

    weight_decay: that of the rule when the files are a checkpoint's (with last_event and log_decay); None when rows are
    worth what the file says.
    """

    def __init__(self, spec: TableSpec, files: Sequence[Path], weight_decay: float | None = None):
        self.spec = spec
        self._rows = [mapped_tensor(path, "rows") for path in files]
        self._starts = np.cumsum([0, *(len(rows) for rows in self._rows)])
        held = (int(self._starts[-1]), *self._rows[0].shape[1:])
        if held != (spec.rows, spec.lanes, spec.dim):
            raise UserError(
                f"{files[0]}: holds rows {held}, the configuration says {(spec.rows, spec.lanes, spec.dim)}"
            )
        self._clock = None
        if weight_decay:
            self._last = mapped_tensor(files[0], "last_event")
            self._clock = RowClock(weight_decay)
            with safe_open(files[0], "pt") as file:
                self._clock.load_state_dict({key: file.get_tensor(key) for key in ("log_decay", "log_beta2")})

    def pull(self, ids: Sequence[Tensor], *, grad: bool = False) -> WorkingSet:
        """The rows of these ids as a working set for reading; grad must be False."""
        assert not grad, "a table in a file does not train"
        unique_U = torch.unique(torch.cat([step.flatten() for step in ids]))
        if len(unique_U) and not 0 <= int(unique_U[0]) <= int(unique_U[-1]) < self.spec.rows:
            raise UserError(f"row ids {int(unique_U[0])} to {int(unique_U[-1])} of a table of {self.spec.rows} rows")
        return WorkingSet(unique_U, self._read(unique_U.numpy()), ids, 0, None)

    def iter_rows(self, chunk: int) -> Iterator[Tensor]:
        """All rows in order, as they are worth now, `chunk` at a time: [<= chunk, lanes, dim]."""
        for first in range(0, self.spec.rows, chunk):
            yield self._read(np.arange(first, min(first + chunk, self.spec.rows)))

    def _read(self, ids_U: np.ndarray) -> Tensor:
        rows_ULD = np.empty((len(ids_U), self.spec.lanes, self.spec.dim), self._rows[0].dtype)
        for start, rows in zip(self._starts, self._rows):
            here = (ids_U >= start) & (ids_U < start + len(rows))
            rows_ULD[here] = rows[ids_U[here] - start]
        out = torch.from_numpy(rows_ULD)
        if self._clock:
            out *= self._clock.decay(torch.from_numpy(self._last[ids_U])).to(out.dtype)[:, None, None]
        return out
