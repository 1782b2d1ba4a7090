"""Where a table's rows lie.

Lives here: DeviceStore, raw rows in one tensor on one device, read and written by row id.
Not here: what a raw row is worth now (decay), who may write it, and optimizer state (rows.py).
"""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceStore:
    """rows x lanes x dim numbers in one contiguous tensor; what it holds is undefined until written.

    `rows_RLD` is that tensor, for checkpoints. Offsets are int64 throughout: rows * lanes * dim may pass 2**31.
    """

    def __init__(self, rows: int, lanes: int, dim: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.rows_RLD = torch.empty(rows, lanes, dim, dtype=dtype, device=device)

    def read(self, ids_U: Tensor, out: Tensor | None = None) -> Tensor:
        """Copies of these rows (ids int64 [U], in range, duplicates allowed): [U, lanes, dim], into `out` if given."""
        return torch.index_select(self.rows_RLD, 0, ids_U, out=out)

    def write(self, ids_U: Tensor, rows_ULD: Tensor) -> None:
        """Overwrite the rows with these ids (int64 [U], in range, each once)."""
        self.rows_RLD.index_copy_(0, ids_U, rows_ULD)
