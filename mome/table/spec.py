"""What a table is asked to be: its shape, its initial rows, what is kept of a row and how many bytes that takes.

Lives here: TableSpec and what follows from it without a table. Not here: tables (rows.py).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.initial import initial_values
from mome.table.formats import row_format
from optim.rows import RowRule

_INT64 = 2**63 - 1


@dataclass(frozen=True)
class TableSpec:
    """What a memory asks of a table: rows x lanes x dim numbers, uniform in [-init, init] at the start (0.0: zeros).

    A lane is one slot of one layer: dim numbers that share one number of optimizer state.
    Raises ValueError for a value out of range.
    """

    rows: int
    lanes: int
    dim: int
    init: float

    def __post_init__(self) -> None:
        for name in ("rows", "lanes", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"a table with {name} = {getattr(self, name)}: {name} must be at least 1")
        if self.rows * self.lanes * self.dim > _INT64:
            raise ValueError(
                f"a table of {self.rows} rows x {self.lanes} lanes x {self.dim} numbers: more than 2**63 - 1 numbers "
                "have no int64 address; give it fewer rows"
            )
        if not 0.0 <= self.init < float("inf"):
            raise ValueError(f"a table with init = {self.init}: the half-width must be finite and not negative")


def table_seed(seed: int, name: str) -> int:
    """The seed of a table's initial rows and of its rounding: tables of one run differ by their names."""
    return seed ^ zlib.crc32(name.encode())


def initial_rows(spec: TableSpec, seed: int, ids_U: Tensor, dtype: torch.dtype) -> Tensor:
    """What the rows with these ids (int64 [U]) hold before training: [U, lanes, dim]; see kernels/initial.py."""
    values_UE = initial_values(ids_U, spec.lanes * spec.dim, seed, spec.init, dtype)
    return values_UE.view(len(ids_U), spec.lanes, spec.dim)


def kept(
    spec: TableSpec, rule: RowRule, format: str, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What a table keeps for each row, by name: (shape, dtype). The format's planes, the rule's state, the last event.

    last_event (int32) is 0 until a row is first pushed, so it also tells which rows were ever touched.
    """
    planes = dict(row_format(format).planes(spec.lanes, spec.dim))
    if rule.keeps_second:
        planes["second"] = ((spec.lanes,), dtype)
    if rule.keeps_moment:
        planes["moment"] = ((spec.lanes, spec.dim), dtype)
    planes["last_event"] = ((), torch.int32)
    return planes


def bytes_by_kind(spec: TableSpec, rule: RowRule, format: str, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Bytes of a table by what they are for; not counted are the clock's 16 bytes an event (24 with momentum)."""
    sizes = {}
    for name, (shape, kind) in kept(spec, rule, format, dtype).items():
        sizes[name] = spec.rows * torch.Size(shape).numel() * kind.itemsize
    if rule.keeps_columns:
        sizes["columns"] = 8 * spec.lanes * spec.dim
    return sizes
