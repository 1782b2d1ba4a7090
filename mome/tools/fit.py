"""A straight line through blocks of points, as pure functions of numbers.

Lives here: least squares with an offset for each block, the error of the slope, a test of whether the points bend.
Not here: paired differences (stats.py), what is fitted and what is said of it (scaling.py).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Fit:
    """y = intercept + slope x, the intercept being the mean over blocks; se: standard error of the slope; df: degrees
    of freedom that it rests on; bend, bend_p: F of the points' departure from the line and its p; scatter, scatter_df:
    standard deviation of a point about what its block and its x have in common, and its degrees of freedom."""

    n: int
    blocks: int
    intercept: float
    slope: float
    se: float
    df: int
    bend: float
    bend_p: float
    scatter: float
    scatter_df: int

    def interval(self) -> tuple[float, float]:
        """Where the slope lies with 95 % confidence; NaN where it has no error."""
        return interval(self.slope, self.se, self.df)


def interval(centre: float, se: float, df: int) -> tuple[float, float]:
    """centre -+ t se, t being the 0.975 quantile of Student's t with df degrees of freedom; NaN for df < 1."""
    if df < 1 or math.isnan(se):
        return math.nan, math.nan
    from scipy.special import stdtrit

    half = float(stdtrit(df, 0.975)) * se
    return centre - half, centre + half


def block_line(x: Sequence[float], y: Sequence[float], blocks: Sequence[Hashable]) -> Fit:
    """Fit y_i = offset of its block + slope x_i by least squares, all [n].

    With x and y counted from their block's mean: slope = sum(x y) / sum(x x); se = sqrt(sum(residual^2) / df /
    sum(x x)), df = n - blocks - 1. What a whole block has in common is no error of the slope; a departure of all blocks
    from a straight line is one. It is also tested apart: F compares the line with a free mean for each x beside the
    offsets (lack of fit), on what the latter leaves over: the scatter. What has no degree of freedom left is NaN.
    Errors: ValueError for lists of different lengths, and where no block has two different x.
    """
    if not len(x) == len(y) == len(blocks):
        raise ValueError(f"a line needs as many x, y and blocks, got {len(x)}, {len(y)} and {len(blocks)}")
    names = list(dict.fromkeys(blocks))
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    member = np.array([[block == name for name in names] for block in blocks], np.float64).reshape(len(xs), len(names))
    centres = [member.T @ values / member.sum(0) for values in (xs, ys)]
    within, risen = (values - member @ centre for values, centre in zip((xs, ys), centres))
    spread = float(within @ within)
    if spread <= 1e-24 * max(1.0, float(xs @ xs)):
        raise ValueError("a line needs a block with two different x")
    slope = float(within @ risen) / spread
    left = float(np.square(risen - slope * within).sum())
    df = len(xs) - len(names) - 1
    levels = np.unique(xs)
    # One level less: the offsets hold the mean of all.
    free = np.hstack([member, (xs[:, None] == levels[None, 1:]).astype(np.float64)])
    solved, _, rank, _ = np.linalg.lstsq(free, risen, rcond=None)
    scattered, scatter_df = float(np.square(risen - free @ solved).sum()), len(xs) - int(rank)
    bend, bend_p = _lack_of_fit(left, df, scattered, scatter_df, float(ys @ ys))
    return Fit(
        n=len(xs), blocks=len(names), intercept=float(np.mean(centres[1] - slope * centres[0])), slope=slope,
        se=math.sqrt(left / df / spread) if df > 0 else math.nan, df=df,
        bend=bend, bend_p=bend_p,
        scatter=math.sqrt(scattered / scatter_df) if scatter_df > 0 else math.nan, scatter_df=scatter_df,
    )  # fmt: skip


def _lack_of_fit(line: float, line_df: int, free: float, free_df: int, total: float) -> tuple[float, float]:
    """F and p out of both sums of squares; total: that of y itself, whose rounding is no departure."""
    more, rounding = line_df - free_df, 1e-24 * total
    if more < 1 or free_df < 1 or line <= rounding:
        return math.nan, math.nan
    from scipy.special import fdtrc

    ratio = max(0.0, line - free) / more / (max(free, rounding) / free_df)
    return ratio, float(fdtrc(more, free_df, ratio))
