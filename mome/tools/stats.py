"""Statistics of paired runs, as pure functions of numbers.

Lives here: mean, standard deviation, the paired difference with its t and p, paired ratios, curves averaged over seeds.
Not here: reading run folders (runs.py), what a comparison prints (verdict.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean: sum(x) / n; NaN for no value."""
    return math.fsum(values) / len(values) if len(values) else math.nan


def sd(values: Sequence[float]) -> float:
    """Sample standard deviation: sqrt(sum((x - mean)^2) / (n - 1)); NaN for n < 2."""
    if len(values) < 2:
        return math.nan
    centre = mean(values)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (len(values) - 1))


def median(values: Sequence[float]) -> float:
    """Middle value, or the mean of the two middle ones; NaN for no value."""
    return float(np.median(np.asarray(values, dtype=np.float64))) if len(values) else math.nan


@dataclass(frozen=True)
class Paired:
    """The paired difference of two arms: n pairs, mean, standard error of the mean, t = mean / se, two-sided p."""

    n: int
    mean: float
    se: float
    t: float
    p: float


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Paired t-test of a against b, the i-th values of both coming from the same seed.

    d_i = a_i - b_i; mean = sum(d) / n; se = sd(d) / sqrt(n); t = mean / se; p = 2 F(-|t|), F being Student's t with
    n - 1 degrees of freedom: the two-sided test of scipy.stats.ttest_rel. One pair has a mean only: se, t and p are
    NaN. Where every d is equal, se = 0: t is infinite with p = 0, or NaN where the mean is 0 too.
    Errors: ValueError for lists of different lengths.
    """
    if len(a) != len(b):
        raise ValueError(f"a paired test needs as many values on both sides, got {len(a)} and {len(b)}")
    differences = [x - y for x, y in zip(a, b)]
    n, centre = len(differences), mean(differences)
    if n < 2:
        return Paired(n, centre, math.nan, math.nan, math.nan)
    se = sd(differences) / math.sqrt(n)
    if se == 0.0:
        certain = (math.nan, math.nan) if centre == 0.0 else (math.copysign(math.inf, centre), 0.0)
        return Paired(n, centre, se, *certain)
    from scipy.special import stdtr

    t = centre / se
    return Paired(n, centre, se, t, 2.0 * float(stdtr(n - 1, -abs(t))))


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and greatest of a_i / b_i, the i-th values coming from the same seed; NaN where there is none.

    The ratio is formed within a pair, before the median, so that a machine that is slow during one pair does not count.
    Errors: ValueError for lists of different lengths.
    """
    if len(a) != len(b):
        raise ValueError(f"a paired ratio needs as many values on both sides, got {len(a)} and {len(b)}")
    ratios = [x / y for x, y in zip(a, b) if y]
    return (median(ratios), min(ratios), max(ratios)) if ratios else (math.nan, math.nan, math.nan)


def mean_curve(curves: Sequence[Mapping[int, Sequence[float]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average curves point by point over the steps that all of them have.

    curves: one mapping a seed, step -> numbers (k of them, the same k everywhere). Returns steps [n] int64 ascending,
    means [n, k] and sample standard deviations [n, k] float64 (NaN for one curve). NaN values spread to their point.
    """
    shared = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    if not shared:
        return np.zeros(0, np.int64), np.zeros((0, 0)), np.zeros((0, 0))
    values = np.array([[curve[step] for step in shared] for curve in curves], dtype=np.float64)
    spread = values.std(axis=0, ddof=1) if len(curves) > 1 else np.full(values.shape[1:], math.nan)
    return np.array(shared, np.int64), values.mean(axis=0), spread
