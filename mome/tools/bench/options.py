"""The options of python -m mome bench tables: sizes, how often, which parts.

Lives here: TablesOptions with its refusals, and the small sizes of --quick.
Not here: what is done with them (tables.py, peers.py, flat.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mome.config import require


@dataclass(frozen=True)
class TablesOptions:
    """Time a step of a row table on the CPU (ids to updated rows, with a given gradient of what was read) against
    FBGEMM, SparseAdam and plain torch in turns, and against itself at other numbers of rows."""

    json: Path | None = None
    """Write the numbers to this file; records/bench/README.md says what they are."""
    quick: bool = False
    """Small sizes and few steps: to see it work, not to measure."""
    parts: tuple[Literal["peers", "flat", "step"], ...] = ("peers", "flat")
    """peers: against the others; flat: against its own size; step: whole steps of `local` at two sizes (slow)."""
    rows: int = 1_000_000
    """Rows of the tables that race the peers."""
    dim: int = 128
    """float32 numbers a row."""
    lookups: int = 16_384
    """Ids a step."""
    batches: int = 32
    """Different steps of ids; after them they come again. Each side is warmed up on all of them."""
    visits: int = 12
    """Turns of each side."""
    steps: int = 4
    """Timed steps a turn."""
    copy_mib: int = 256
    """Size of the tensor whose copying gives the bandwidth."""
    flat_bits: tuple[int, ...] = (16, 20, 24)
    """log2 of the numbers of rows at which a table is timed, ascending."""
    step_bits: tuple[int, int] = (16, 24)
    """log2 of the n-gram rows of the whole steps of `local`."""
    step_steps: int = 24
    """Steps of each of those runs."""
    step_runs: int = 4
    """Runs of each size."""
    seed: int = 0
    """Of the ids."""

    def __post_init__(self):
        least = {"rows": 2, "dim": 1, "lookups": 1, "batches": 1, "visits": 1, "steps": 1, "copy_mib": 1}
        for name, bound in (least | {"step_steps": 2, "step_runs": 1}).items():
            flag = name.replace("_", "-")
            require(getattr(self, name) >= bound, flag, getattr(self, name), f"give a whole number of {bound} or more")
        for name, bits in (("flat-bits", self.flat_bits), ("step-bits", self.step_bits)):
            rising = len(bits) > 1 and list(bits) == sorted({*bits}) and 2 <= bits[0] <= bits[-1] <= 40
            require(rising, name, " ".join(map(str, bits)), "give two or more, ascending, from 2 to 40")
        require(0 <= self.seed < 2**63, "seed", self.seed, "give a whole number from 0 to 2**63 - 1")
        require(bool(self.parts), "parts", "", "name one or more of peers, flat, step")


QUICK = TablesOptions(
    quick=True, rows=16_384, dim=128, lookups=2048, batches=4, visits=2, steps=2, copy_mib=8, flat_bits=(10, 12, 14),
    step_steps=3, step_runs=1,
)  # fmt: skip
