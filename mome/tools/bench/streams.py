"""The ids of a bench: fixed streams that every side reads alike.

Lives here: ids that follow Zipf's law, scattered over the rows; uniform ids; keys that a table of any size can hash.
Not here: what is done with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.initial import splitmix64

MASK = (1 << 63) - 1


def zipf_ranks(count: int, ranks: int, random: torch.Generator) -> Tensor:
    """int64 [count] in 0..ranks - 1, independent, with p(rank) = 1 / (rank + 1) / H_ranks, by inversion in float64."""
    mass_R = torch.arange(1, ranks + 1, dtype=torch.float64).reciprocal_().cumsum_(0)
    drawn_N = torch.rand(count, dtype=torch.float64, generator=random).mul_(mass_R[-1])
    return torch.searchsorted(mass_R, drawn_N, right=True).clamp_(max=ranks - 1)


def zipf_ids(steps: int, lookups: int, rows: int, seed: int) -> list[Tensor]:
    """A list of steps of int64 [lookups]: Zipf ranks over the rows, each rank at a row that a permutation gives it."""
    random = torch.Generator().manual_seed(seed)
    place_R = torch.randperm(rows, generator=random)
    return list(place_R[zipf_ranks(steps * lookups, rows, random)].view(steps, lookups))


def uniform_ids(steps: int, lookups: int, rows: int, seed: int) -> list[Tensor]:
    """A list of steps of int64 [lookups], every row as likely as any other."""
    random = torch.Generator().manual_seed(seed)
    return list(torch.randint(rows, (steps, lookups), generator=random))


def hashed_keys(steps: int, lookups: int, kinds: int, seed: int) -> list[Tensor]:
    """A list of steps of int64 [lookups], the hashes of n-grams: Zipf ranks over `kinds` of them, mixed to 63 bits.

    A table of R rows reads key modulo R: the same n-grams whatever R is.
    """
    random = torch.Generator().manual_seed(seed)
    return list(splitmix64(zipf_ranks(steps * lookups, kinds, random)).bitwise_and_(MASK).view(steps, lookups))
