"""How the number of distinct rows grows with the tokens that read them: counted, and beyond the stream fitted.

Lives here: Growth, its count and its Heaps fit, checked on lengths that it did not see.
Not here: the ids (stream.py), and what distinct rows cost (traffic.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

# Lengths halve from one point to the next: so many are fitted, and so many longer ones are held out.
FITTED, HELD_OUT = 5, 2


@dataclass(frozen=True)
class Growth:
    """Distinct rows of the first n tokens of a stream.

    lengths_K, rows_K: counted points, ascending. bound: rows of the table. Beyond the last length Heaps' law is fitted
    (H. S. Heaps, Information Retrieval, 1978): d = factor * n ** exponent distinct keys, by least squares of the
    logarithms over the last FITTED points; thrown at random on the bound they fill bound * (1 - exp(-d / bound)) rows.
    error: the largest relative error of the same fit of the points before the last HELD_OUT at those; NaN: too few.
    """

    lengths_K: tuple[int, ...]
    rows_K: tuple[int, ...]
    bound: int
    factor: float
    exponent: float
    error: float

    def at(self, tokens: int) -> tuple[float, bool]:
        """(distinct rows of so many tokens, whether that is a fit). Counted points are exact; between two of them a
        straight line through their logarithms."""
        if tokens > self.lengths_K[-1]:
            # A fit that falls below what was counted is still no less.
            return max(float(self.rows_K[-1]), _rows(self.factor, self.exponent, tokens, self.bound)), True
        lengths, rows = np.log(self.lengths_K), np.log(np.maximum(self.rows_K, 1))
        return float(np.exp(np.interp(math.log(max(1, tokens)), lengths, rows))), False


def growth_of(ids_NR: np.ndarray | Iterable[np.ndarray], bound: int) -> Growth:
    """Growth over the row ids [N, reads] of a stream's tokens in order, in one array or in pieces.

    Raises ValueError for a stream without tokens.
    """
    pieces = [ids_NR] if isinstance(ids_NR, np.ndarray) else list(ids_NR)
    ids_NR = np.concatenate(pieces) if pieces else np.empty((0, 1), np.int64)
    count, reads = ids_NR.shape
    if not count:
        raise ValueError("the growth of a stream without tokens: give it some")
    _, first_U = np.unique(ids_NR.reshape(-1), return_index=True)
    first_U = np.sort(first_U) // reads
    lengths = sorted({count >> halved for halved in range(FITTED + HELD_OUT) if count >> halved})
    rows = np.searchsorted(first_U, lengths, side="left").tolist()
    error = math.nan
    if len(lengths) == FITTED + HELD_OUT:
        early = heaps_fit(lengths[:FITTED], rows[:FITTED], bound)
        late = zip(lengths[FITTED:], rows[FITTED:])
        error = max(abs(_rows(*early, length, bound) / held - 1) for length, held in late)
    return Growth(tuple(lengths), tuple(rows), bound, *heaps_fit(lengths[-FITTED:], rows[-FITTED:], bound), error)


def heaps_fit(lengths, rows, bound: int) -> tuple[float, float]:
    """(factor, exponent) of distinct keys that fill so many of `bound` rows; one point is taken as a straight line."""
    filled = np.minimum(np.asarray(rows, np.float64) / bound, 1 - 1e-9)
    keys = -bound * np.log1p(-filled)
    if len(lengths) < 2:
        return float(keys[0] / lengths[0]), 1.0
    exponent, offset = np.polyfit(np.log(lengths), np.log(np.maximum(keys, 1e-9)), 1)
    return float(np.exp(offset)), float(exponent)


def _rows(factor: float, exponent: float, tokens: float, bound: int) -> float:
    return -bound * math.expm1(-factor * tokens**exponent / bound)
