"""Which rank owns which row of a table, and where among its own rows it keeps it.

Lives here: Placement (contiguous, cyclic, and balanced over buckets of rows), and least_loaded, which fills buckets.
Not here: what is sent to an owner (exchange.py), and stores, which know only the rows of one rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("contiguous", "cyclic", "balanced")


@dataclass(frozen=True, eq=False)
class Placement:
    """An owner for each of `rows` rows among `size` ranks; the number of rows does not depend on that of ranks.

    contiguous: ranges of ceil(rows / size) rows. Of a table of several ranges (orders of n-grams, heads) some ranks
    then own whole ones, and those of the longer orders have more rows to update.
    cyclic: row r belongs to rank r mod size. Neighbours by token id are about as frequent, hashed rows are anywhere.
    balanced: row r lies in bucket r // bucket_rows, and owners [buckets] says whose that is; see least_loaded.
    Raises ValueError for a kind, or owners, that do not fit.
    """

    rows: int
    size: int = 1
    kind: str = "contiguous"
    bucket_rows: int = 0
    owners: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"placement {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.size < 1 or self.rows < 1:
            raise ValueError(f"{self.rows} rows for {self.size} ranks: give 1 or more of both")
        if (self.kind == "balanced") != (self.owners is not None):
            raise ValueError("owners of buckets go with the placement balanced, and with no other")
        if self.owners is None:
            return
        if self.bucket_rows < 1 or len(self.owners) != -(-self.rows // self.bucket_rows):
            raise ValueError(
                f"{len(self.owners)} owners for {self.rows} rows in buckets of {self.bucket_rows}: give one a bucket"
            )
        if self.owners.dtype != torch.int64 or int(self.owners.min()) < 0 or int(self.owners.max()) >= self.size:
            raise ValueError(f"owners of buckets must be int64 ranks from 0 to {self.size - 1}")
        sizes_B = torch.full_like(self.owners, self.bucket_rows)
        sizes_B[-1] = self.rows - (len(sizes_B) - 1) * self.bucket_rows
        # An owner keeps its buckets in their order: where each begins is what it has before.
        begins_B = torch.zeros_like(sizes_B)
        for rank in range(self.size):
            mine = self.owners == rank
            begins_B[mine] = sizes_B[mine].cumsum(0) - sizes_B[mine]
        object.__setattr__(self, "_begins_B", begins_B)
        object.__setattr__(self, "_sizes_B", sizes_B)

    @property
    def whole(self) -> bool:
        """Whether one rank owns everything, at its own place."""
        return self.size == 1

    @property
    def chunk(self) -> int:
        """Rows of a contiguous range; the last ones may be shorter, or empty."""
        return -(-self.rows // self.size)

    def owner(self, ids: Tensor) -> Tensor:
        """The rank that owns each row: int64, shaped like ids."""
        if self.kind == "contiguous":
            return ids // self.chunk
        if self.kind == "cyclic":
            return ids % self.size
        return self.owners.to(ids.device)[ids // self.bucket_rows]

    def local(self, ids: Tensor) -> Tensor:
        """Where its owner keeps each row, 0 to rows_of(owner) - 1: int64, shaped like ids, ascending for ascending ids
        of one owner."""
        if self.whole:
            return ids
        if self.kind == "contiguous":
            return ids % self.chunk
        if self.kind == "cyclic":
            return ids // self.size
        return self._begins_B.to(ids.device)[ids // self.bucket_rows] + ids % self.bucket_rows

    def rows_of(self, rank: int) -> int:
        """How many rows a rank owns."""
        if self.kind == "contiguous":
            return max(0, min(self.rows, (rank + 1) * self.chunk) - rank * self.chunk)
        if self.kind == "cyclic":
            return max(0, (self.rows - rank + self.size - 1) // self.size)
        return int(self._sizes_B[self.owners == rank].sum())

    def split(self, ids_U: Tensor) -> tuple[Tensor | None, list[int]]:
        """Ascending ids grouped by owner: the positions in that order, ids still ascending within an owner (None: as
        they are), and how many each owner has."""
        if self.whole:
            return None, [len(ids_U)]
        if self.kind == "contiguous":
            bounds = torch.arange(1, self.size, device=ids_U.device) * self.chunk
            ends = [*torch.searchsorted(ids_U, bounds).tolist(), len(ids_U)]
            return None, [end - begin for begin, end in zip([0, *ends], ends)]
        owner_U = self.owner(ids_U)
        return torch.argsort(owner_U, stable=True), torch.bincount(owner_U, minlength=self.size).tolist()


def least_loaded(loads: Sequence[int] | Tensor, size: int) -> Tensor:
    """Owners [buckets] of buckets with these loads: the heaviest first, each to the rank with the least so far (longest
    processing time, Graham 1969: at most 4/3 - 1/(3 size) of the best maximum). Equal loads: the lower bucket first,
    the lower rank first."""
    loads = torch.as_tensor(loads, dtype=torch.int64)
    owners = torch.empty(len(loads), dtype=torch.int64)
    ranks = [(0, 0, rank) for rank in range(size)]
    for bucket in torch.argsort(loads, descending=True, stable=True).tolist():
        # Among equal loads the one with fewer buckets.
        load, held, rank = heapq.heappop(ranks)
        owners[bucket] = rank
        heapq.heappush(ranks, (load + int(loads[bucket]), held + 1, rank))
    return owners
