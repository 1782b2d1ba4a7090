"""Placements: every row has one owner and one place there, on odd and tiny sizes, and loads are spread as promised.

Lives here: owner, local, rows_of and split against loops over all rows; least_loaded against the best of all splits.
Not here: what is sent to owners (tests/dist/), how even real ids make it (tests/tools/test_plan.py).
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mome.table.placement import KINDS, Placement, least_loaded

SIZES = st.integers(1, 9)


@st.composite
def placements(draw) -> Placement:
    """Any placement of a few rows, of more ranks than rows among them."""
    rows, size, kind = draw(st.integers(1, 40)), draw(SIZES), draw(st.sampled_from(KINDS))
    if kind != "balanced":
        return Placement(rows, size, kind)
    bucket_rows = draw(st.integers(1, rows + 2))
    buckets = -(-rows // bucket_rows)
    owners = draw(st.lists(st.integers(0, size - 1), min_size=buckets, max_size=buckets))
    return Placement(rows, size, kind, bucket_rows, torch.tensor(owners))


@settings(max_examples=300, deadline=None)
@given(placements())
def test_owner_and_place_are_a_bijection(placement):
    ids = torch.arange(placement.rows)
    owners, places = placement.owner(ids), placement.local(ids)
    assert owners.dtype == places.dtype == torch.int64
    held = [placement.rows_of(rank) for rank in range(placement.size)]
    assert sum(held) == placement.rows and min(held) >= 0
    for rank, rows in enumerate(held):
        # All places of an owner, each once, in the order of the ids.
        assert places[owners == rank].tolist() == list(range(rows))


@settings(max_examples=200, deadline=None)
@given(placements(), st.data())
def test_split_groups_by_owner(placement, data):
    ids = data.draw(st.lists(st.integers(0, placement.rows - 1), unique=True))
    ids_U = torch.tensor(sorted(ids), dtype=torch.int64)
    order_U, counts = placement.split(ids_U)
    grouped_U = ids_U if order_U is None else ids_U[order_U]
    assert sum(counts) == len(ids) and len(counts) == placement.size
    for rank, part_U in enumerate(grouped_U.split(counts)):
        assert part_U.tolist() == [one for one in sorted(ids) if int(placement.owner(torch.tensor(one))) == rank]


@settings(max_examples=50, deadline=None)
@given(placements(), st.integers(1, 3))
def test_ids_of_any_shape(placement, width):
    ids_NW = torch.arange(placement.rows).repeat(width, 1).T.contiguous()
    for ask in (placement.owner, placement.local):
        assert torch.equal(ask(ids_NW), ask(torch.arange(placement.rows)).unsqueeze(1).expand(-1, width))


def test_one_rank_owns_everything_where_it_is():
    placement = Placement(7)
    ids = torch.tensor([0, 3, 6])
    assert placement.whole and placement.local(ids) is ids and placement.rows_of(0) == 7
    assert placement.split(ids) == (None, [3])


def test_the_number_of_rows_does_not_follow_the_ranks():
    for size, kind in product((1, 2, 3, 8, 100), ("contiguous", "cyclic")):
        assert sum(Placement(10, size, kind).rows_of(rank) for rank in range(size)) == 10


@pytest.mark.parametrize(
    ("kind", "owners"),
    [("contiguous", [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]), ("cyclic", [0, 1, 2, 0, 1, 2, 0, 1, 2, 0])],
)
def test_what_the_kinds_mean(kind, owners):
    assert Placement(10, 3, kind).owner(torch.arange(10)).tolist() == owners


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((8, 2, "random"), "choose one of contiguous, cyclic, balanced"),
        ((0, 2), "give 1 or more of both"),
        ((8, 0), "give 1 or more of both"),
        ((8, 2, "balanced"), "owners of buckets go with the placement balanced"),
        ((8, 2, "cyclic", 2, torch.zeros(4, dtype=torch.int64)), "owners of buckets go with the placement balanced"),
        ((8, 2, "balanced", 3, torch.zeros(2, dtype=torch.int64)), "2 owners for 8 rows in buckets of 3: give one"),
        ((8, 2, "balanced", 0, torch.zeros(8, dtype=torch.int64)), "in buckets of 0"),
        ((8, 2, "balanced", 4, torch.tensor([0, 2])), "int64 ranks from 0 to 1"),
        ((8, 2, "balanced", 4, torch.tensor([0, -1])), "int64 ranks from 0 to 1"),
        ((8, 2, "balanced", 4, torch.tensor([0, 1], dtype=torch.int32)), "int64 ranks from 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused(words, said):
    with pytest.raises(ValueError, match=said):
        Placement(*words)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_least_loaded_is_within_grahams_bound(loads, size):
    owners = least_loaded(loads, size)
    assert owners.dtype == torch.int64 and len(owners) == len(loads)

    def largest(split) -> int:
        return max(sum(load for load, owner in zip(loads, split) if owner == rank) for rank in range(size))

    best = min(largest(split) for split in product(range(size), repeat=len(loads)))
    assert largest(owners.tolist()) <= best * (4 / 3 - 1 / (3 * size)) + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), SIZES, st.integers(0, 9))
def test_equal_buckets_are_spread_evenly_and_repeatably(buckets, size, load):
    owners = least_loaded([load] * buckets, size)
    assert torch.equal(owners, least_loaded(torch.full((buckets,), load), size))
    held = torch.bincount(owners, minlength=size)
    assert int(held.max() - held.min()) <= 1
    assert owners[:size].tolist() == list(range(min(size, buckets)))


def test_the_heaviest_go_first():
    assert least_loaded([1, 5, 2, 3], 2).tolist() == [0, 0, 1, 1]
