"""What a hash does to the n-grams of a token stream: rows used, rows shared, and whose mass pays for it.

Lives here: counting distinct n-grams exactly, where hashed rows put them, what chance would do. By sorting, in numpy.
Not here: the hashes (hashing.py), where the tokens come from and how it is shown (mome/tools/collisions.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mome.table.hashing import hash_ngrams

# Distinct n-grams that are hashed at once: keeps the int64 temporaries of a hash small beside the counts.
_CHUNK = 1 << 18
# Batches, spread over the stream, over which distinct rows a lookup are averaged.
_BATCHES = 16


@dataclass(frozen=True)
class Ngrams:
    """The distinct n-grams of a stream, D of them in no order that matters.

    starts_D: int64, where in the stream one of each begins; counts_D: int64, how often it occurs.
    """

    order: int
    starts_D: np.ndarray
    counts_D: np.ndarray

    @property
    def tokens(self) -> int:
        """n-grams of the stream, each as often as it occurs."""
        return int(self.counts_D.sum())


@dataclass(frozen=True)
class Placement:
    """Where a hash puts D distinct n-grams.

    used: rows that hold one or more. shared: share of the distinct n-grams whose row holds another one as well.
    minority: share of the tokens whose n-gram is not its row's most frequent one (of equal ones, one is that).
    """

    used: int
    shared: float
    minority: float


@dataclass(frozen=True)
class HeadUse:
    """One head. per_lookup: distinct rows a lookup within a batch, the mean over batches spread over the stream."""

    placement: Placement
    per_lookup: float


@dataclass(frozen=True)
class OrderUse:
    """One order under one hash.

    available: rows of a range that n-grams hash to (the reserved one is not). ideal: how many of them `distinct`
    n-grams would use if each fell anywhere with the same chance, and independent. joint: the placement by all heads
    together, n-grams sharing a place where all their rows coincide; of one head it is that head's.
    """

    order: int
    tokens: int
    distinct: int
    available: int
    ideal: float
    heads: tuple[HeadUse, ...]
    joint: Placement


def distinct_ngrams(tokens_N: np.ndarray, orders: Sequence[int]) -> Iterator[Ngrams]:
    """The n-grams of each of these ascending orders (2 or more), counted exactly; document bounds are crossed.

    tokens_N: integers from 0 to 2**31 - 1, shorter than 2**31. An n-gram is the class of its first n - 1 tokens and its
    last one, so that a key of any order fits into 64 bits. Takes about 35 bytes a token meanwhile.
    """
    vocabulary = int(tokens_N.max(initial=0)) + 1
    class_N = np.asarray(tokens_N, dtype=np.int32)
    for order in range(2, orders[-1] + 1):
        key_N = class_N[:-1].astype(np.int64)
        key_N *= vocabulary
        key_N += tokens_N[order - 1 :]
        sorted_N = np.argsort(key_N)
        key_N = key_N[sorted_N]
        first_N = _first_of_runs(key_N)
        del key_N
        if order in orders:
            starts_D = np.flatnonzero(first_N)
            yield Ngrams(order, sorted_N[starts_D], np.diff(starts_D, append=len(first_N)))
        class_N = np.empty(len(first_N), dtype=np.int32)
        class_N[sorted_N] = np.cumsum(first_N, dtype=np.int32) - 1


def order_use(
    tokens_N: np.ndarray, ngrams: Ngrams, rows: int, kind: str = "xor", heads: int = 1, batch: int = 4096
) -> OrderUse:
    """How one order's n-grams use ranges of `rows` rows under a hash (arguments and errors: see hash_ngrams).

    batch: tokens of a batch, for the distinct rows a lookup.
    """
    rows_DK = rows_of(tokens_N, ngrams, rows, kind, heads)
    placements = [placement(rows_D, ngrams.counts_D) for rows_D in rows_DK.T]
    joint = placement(joint_places(rows_DK), ngrams.counts_D) if heads > 1 else placements[0]
    ratios_K = lookups(tokens_N, ngrams.order, rows, kind, heads, batch)
    return OrderUse(
        order=ngrams.order, tokens=ngrams.tokens, distinct=len(ngrams.counts_D), available=rows - 1,
        ideal=ideal_used(rows - 1, len(ngrams.counts_D)), joint=joint,
        heads=tuple(HeadUse(one, float(ratio)) for one, ratio in zip(placements, ratios_K)),
    )  # fmt: skip


def rows_of(tokens_N: np.ndarray, ngrams: Ngrams, rows: int, kind: str, heads: int) -> np.ndarray:
    """The row of each distinct n-gram under each head, within that head's range: int64 [D, heads]."""
    out_DK = np.empty((len(ngrams.starts_D), heads), dtype=np.int64)
    for at in range(0, len(out_DK), _CHUNK):
        starts_C = ngrams.starts_D[at : at + _CHUNK]
        window_CW = torch.from_numpy(tokens_N[starts_C[:, None] + np.arange(ngrams.order)].astype(np.int64))
        ids_C1K = hash_ngrams(window_CW[:, -1:], window_CW[:, :-1], (ngrams.order,), rows, kind, heads)
        out_DK[at : at + _CHUNK] = (ids_C1K[:, 0] - rows * torch.arange(heads)).numpy()
    return out_DK


def placement(places_D: np.ndarray, counts_D: np.ndarray) -> Placement:
    """What it comes to that the i-th n-gram, which occurs counts_D[i] times, is put in places_D[i] (any integers)."""
    if not len(places_D):
        return Placement(0, 0.0, 0.0)
    sorted_D = np.argsort(places_D)
    starts_U = np.flatnonzero(_first_of_runs(places_D[sorted_D]))
    held_U = np.diff(starts_U, append=len(places_D))
    kept = np.maximum.reduceat(counts_D[sorted_D], starts_U).sum()
    shared = held_U[held_U > 1].sum() / len(places_D)
    return Placement(len(starts_U), float(shared), float(1 - kept / counts_D.sum()))


def joint_places(rows_DK: np.ndarray) -> np.ndarray:
    """One number for each n-gram, int64 [D], the same where the rows of all heads are the same."""
    place_D = np.zeros(len(rows_DK), dtype=np.int64)
    for rows_D in rows_DK.T:
        # Both are below D, and the key of the two below D squared.
        dense_D = np.unique(rows_D, return_inverse=True)[1]
        place_D = np.unique(place_D * len(rows_DK) + dense_D, return_inverse=True)[1]
    return place_D


def lookups(tokens_N: np.ndarray, order: int, rows: int, kind: str, heads: int, batch: int) -> np.ndarray:
    """Distinct rows a lookup for each head, float64 [heads]: the mean over batches of `batch` tokens of the stream.

    Batches begin where an n-gram has its history, so that no lookup is a reserved one; NaN for a stream with none.
    """
    reach = order - 1
    batch = min(batch, len(tokens_N) - reach)
    if batch < 1:
        return np.full(heads, math.nan)
    firsts = np.unique(np.linspace(reach, len(tokens_N) - batch, _BATCHES).astype(np.int64))
    ratios = []
    for first in firsts:
        piece_1T = torch.from_numpy(tokens_N[first - reach : first + batch].astype(np.int64)).unsqueeze(0)
        ids_TK = hash_ngrams(piece_1T[:, reach:], piece_1T[:, :reach], (order,), rows, kind, heads)[0].numpy()
        ratios.append([len(np.unique(ids_T)) / batch for ids_T in ids_TK.T])
    return np.mean(ratios, axis=0)


def ideal_used(rows: int, distinct: int) -> float:
    """Rows that are used when `distinct` n-grams fall on `rows` rows at random: R (1 - (1 - 1/R)^n), by expectation."""
    if distinct == 0 or rows == 1:
        return float(min(rows, distinct))
    return -rows * math.expm1(distinct * math.log1p(-1 / rows))


def _first_of_runs(sorted_N: np.ndarray) -> np.ndarray:
    """Bool [N]: whether a value differs from the one before it."""
    first_N = np.ones(len(sorted_N), dtype=bool)
    np.not_equal(sorted_N[1:], sorted_N[:-1], out=first_N[1:])
    return first_N
