"""The statistics equal scipy, numpy and sums done by hand.

Lives here: paired tests, ratios, averaged curves, and their edges (no value, one, two, no variance).
Not here: the table that shows them (tests/tools/test_compare.py).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from mome.tools.stats import mean, mean_curve, median, paired, paired_ratio, sd

numbers = st.floats(-100, 100).map(lambda x: round(x, 3))


@given(st.lists(numbers, min_size=2, max_size=30))
def test_moments_equal_numpy(values):
    assert mean(values) == pytest.approx(np.mean(values), abs=1e-12)
    assert sd(values) == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    assert median(values) == np.median(values)


def test_moments_of_few_values():
    assert math.isnan(mean([])) and math.isnan(median([])) and math.isnan(sd([])) and math.isnan(sd([2.0]))
    assert mean([2.0]) == median([2.0]) == 2.0
    assert sd([1.0, 4.0]) == pytest.approx(3 / math.sqrt(2))


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=30))
def test_paired_equals_scipy(pairs):
    a, b = zip(*pairs)
    differences = {x - y for x, y in pairs}
    if max(differences) - min(differences) < 1e-6:
        return  # no variance but rounding: below
    found, known = paired(a, b), scipy.stats.ttest_rel(a, b)
    assert found.n == len(pairs)
    assert found.t == pytest.approx(known.statistic, rel=1e-9, abs=1e-9)
    assert found.p == pytest.approx(known.pvalue, rel=1e-9, abs=1e-9)
    assert found.se == pytest.approx(scipy.stats.sem(np.subtract(a, b)), rel=1e-9)


def test_paired_by_hand():
    # d = -1, -2, -3: mean -2, sd 1, se 1/sqrt(3), t = -2 sqrt(3); two degrees of freedom: p = 1 - |t| / sqrt(2 + t^2).
    found = paired([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    assert (found.n, found.mean) == (3, -2.0)
    assert found.se == pytest.approx(1 / math.sqrt(3))
    assert found.t == pytest.approx(-2 * math.sqrt(3))
    assert found.p == pytest.approx(1 - math.sqrt(12) / math.sqrt(14))


def test_two_pairs_by_hand():
    # d = 1, 3: mean 2, sd sqrt(2), se 1, t = 2; with one degree of freedom (Cauchy) p = 1 - (2 / pi) atan |t|.
    found = paired([5.0, 7.0], [4.0, 4.0])
    assert (found.n, found.mean, found.t) == (2, 2.0, pytest.approx(2.0))
    assert found.se == pytest.approx(1.0)
    assert found.p == pytest.approx(1 - 2 / math.pi * math.atan(2))


def test_one_pair_has_a_mean_only():
    found = paired([3.0], [3.5])
    assert (found.n, found.mean) == (1, -0.5)
    assert all(map(math.isnan, (found.se, found.t, found.p)))


def test_no_pair():
    found = paired([], [])
    assert found.n == 0 and math.isnan(found.mean) and math.isnan(found.p)


@pytest.mark.parametrize("shift", [0.0, 0.5, -0.5])
def test_no_variance(shift):
    found = paired([1.0 + shift, 2.0 + shift, 4.0 + shift], [1.0, 2.0, 4.0])
    assert (found.n, found.mean, found.se) == (3, shift, 0.0)
    if shift:
        assert found.t == math.copysign(math.inf, shift) and found.p == 0.0
    else:
        assert math.isnan(found.t) and math.isnan(found.p)


def test_the_ratio_is_formed_within_a_pair():
    # One pair ran on a machine three times as slow: the ratio of medians would be 1.5.
    assert paired_ratio([110.0, 330.0, 110.0, 330.0], [100.0, 300.0, 100.0, 300.0]) == pytest.approx((1.1, 1.1, 1.1))
    assert paired_ratio([1.0, 4.0, 3.0], [1.0, 2.0, 2.0]) == (1.5, 1.0, 2.0)
    assert all(map(math.isnan, paired_ratio([], [])))
    assert all(map(math.isnan, paired_ratio([1.0], [0.0])))


@pytest.mark.parametrize("function", [paired, paired_ratio])
def test_sides_of_different_length_are_refused(function):
    with pytest.raises(ValueError, match="got 2 and 1"):
        function([1.0, 2.0], [1.0])


def test_mean_curve_takes_the_steps_that_all_have():
    steps, centre, spread = mean_curve([{1: (10, 2.0), 2: (20, 4.0), 3: (30, 0.0)}, {3: (30, 1.0), 1: (10, 5.0)}])
    assert steps.tolist() == [1, 3]
    assert centre.tolist() == [[10, 3.5], [30, 0.5]]
    assert spread == pytest.approx(np.array([[0, 3 / math.sqrt(2)], [0, 1 / math.sqrt(2)]]))


def test_mean_curve_of_one_and_of_none():
    steps, centre, spread = mean_curve([{4: (1.0,)}])
    assert steps.tolist() == [4] and centre.tolist() == [[1.0]] and np.isnan(spread).all()
    assert all(len(part) == 0 for part in mean_curve([]))
    assert all(len(part) == 0 for part in mean_curve([{1: (1.0,)}, {2: (1.0,)}]))
