"""The collision report against dictionaries on small streams, and against the formulas of random placement.

Lives here: distinct n-grams, rows used and shared, minority mass, joint collisions, rows a lookup.
Not here: the hashes (test_hashing.py) and the command (tests/tools/test_collisions_cli.py).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mome.table.collisions as module
from mome.table.collisions import (
    Ngrams,
    Placement,
    distinct_ngrams,
    ideal_used,
    joint_places,
    lookups,
    order_use,
    placement,
    rows_of,
)
from mome.table.hashing import hash_ngrams

STREAMS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 65_535)), max_size=40)
ORDERS = st.lists(st.integers(2, 8), min_size=1, max_size=4, unique=True).map(sorted)


def plain_counts(stream: list[int], order: int) -> Counter:
    return Counter(tuple(stream[at : at + order]) for at in range(len(stream) - order + 1))


def plain_placement(counts: dict, place: dict) -> Placement:
    """By definition, from n-gram -> how often and n-gram -> where."""
    held = defaultdict(list)
    for ngram, count in counts.items():
        held[place[ngram]].append(count)
    if not counts:
        return Placement(0, 0.0, 0.0)
    shared = sum(len(one) for one in held.values() if len(one) > 1) / len(counts)
    minority = sum(sum(one) - max(one) for one in held.values()) / sum(counts.values())
    return Placement(len(held), pytest.approx(shared), pytest.approx(minority, abs=1e-12))


def row_of(ngram: tuple[int, ...], rows: int, kind: str, heads: int) -> tuple[int, ...]:
    ids = hash_ngrams(torch.tensor([ngram]), None, (len(ngram),), rows, kind, heads)[0, -1]
    return tuple(int(row) - head * rows for head, row in enumerate(ids))


@settings(max_examples=30, deadline=None)
@given(STREAMS, ORDERS)
def test_distinct_ngrams_equal_a_dictionary(stream, orders):
    for dtype in (np.uint16, np.int64):
        tokens = np.array(stream, dtype=dtype)
        found = list(distinct_ngrams(tokens, orders))
        assert [one.order for one in found] == orders
        for one in found:
            ngrams = [tuple(tokens[at : at + one.order].tolist()) for at in one.starts_D]
            assert len(set(ngrams)) == len(ngrams)
            assert dict(zip(ngrams, one.counts_D.tolist())) == plain_counts(stream, one.order)
            assert one.tokens == max(0, len(stream) - one.order + 1)


def test_ngrams_of_large_ids_do_not_run_into_each_other():
    """Keys of order 8 would need 128 bits: classes keep them apart."""
    tokens = np.random.default_rng(0).integers(65_530, 65_536, 3000).astype(np.uint16)
    (one,) = distinct_ngrams(tokens, [8])
    assert len(one.counts_D) == len(plain_counts(tokens.tolist(), 8))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 5), st.integers(1, 9)), max_size=20))
def test_a_placement_equals_a_dictionary(pairs):
    places, counts = (np.array([pair[at] for pair in pairs], dtype=np.int64) for at in (0, 1))
    names = range(len(pairs))
    assert placement(places, counts) == plain_placement(dict(zip(names, counts)), dict(zip(names, places)))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=40),
    st.sampled_from([("xor", 2, 1), ("xor", 3, 1), ("mix", 2, 1), ("mix", 3, 2), ("mix", 5, 3)]),
    st.integers(2, 12),
    st.integers(1, 50),
)
def test_a_whole_order_equals_dictionaries(stream, how, rows, batch):
    (kind, order, heads), tokens = how, np.array(stream, dtype=np.uint16)
    (ngrams,) = distinct_ngrams(tokens, [order])
    use = order_use(tokens, ngrams, rows, kind, heads, batch)
    counts = plain_counts(stream, order)
    places = {ngram: row_of(ngram, rows, kind, heads) for ngram in counts}
    assert (use.order, use.tokens, use.distinct, use.available) == (order, counts.total(), len(counts), rows - 1)
    assert use.ideal == pytest.approx((rows - 1) * (1 - (1 - 1 / (rows - 1)) ** len(counts)))
    assert use.joint == plain_placement(counts, places)
    for head, found in enumerate(use.heads):
        assert found.placement == plain_placement(counts, {ngram: place[head] for ngram, place in places.items()})
        if not counts:
            assert math.isnan(found.per_lookup)
        elif batch >= counts.total():
            assert found.per_lookup == pytest.approx(len({place[head] for place in places.values()}) / counts.total())


def test_rows_a_lookup_are_a_mean_over_batches():
    tokens = np.random.default_rng(1).integers(0, 30, 400).astype(np.uint16)
    whole = hash_ngrams(torch.from_numpy(tokens.astype(np.int64))[None], None, (3,), 64, "mix", 2)[0].numpy()
    firsts = sorted({int(at) for at in np.linspace(2, 350, module._BATCHES)})
    expected = [np.mean([len(set(whole[at : at + 50, head])) / 50 for at in firsts]) for head in range(2)]
    assert lookups(tokens, 3, 64, "mix", 2, 50) == pytest.approx(expected)
    assert lookups(np.zeros(400, dtype=np.uint16), 2, 64, "xor", 1, 50).tolist() == [1 / 50]


def test_pieces_of_the_hashing_make_no_difference(monkeypatch):
    tokens = np.random.default_rng(2).integers(0, 50, 500).astype(np.uint16)
    (ngrams,) = distinct_ngrams(tokens, [4])
    whole = rows_of(tokens, ngrams, 1 << 40, "mix", 2)
    monkeypatch.setattr(module, "_CHUNK", 7)
    assert np.array_equal(rows_of(tokens, ngrams, 1 << 40, "mix", 2), whole)
    assert whole.shape == (len(ngrams.starts_D), 2) and whole.max() < (1 << 40) - 1


def test_joint_places_keep_the_rows_of_all_heads():
    rows = np.array([[1, 5], [2, 5], [1, 5], [5, 1], [1 << 61, 0], [2, 4]])
    places = joint_places(rows)
    assert [[int(one == other) for other in places] for one in places] == [
        [int(tuple(one) == tuple(other)) for other in rows] for one in rows
    ]


def test_ideal_used():
    for rows, distinct in ((7, 3), (100, 1000), (5, 0), (1, 0), (1, 4), (65_535, 493_225)):
        assert ideal_used(rows, distinct) == pytest.approx(rows * (1 - (1 - 1 / rows) ** distinct))
    assert ideal_used(1 << 62, 1000) == pytest.approx(1000)


@pytest.mark.parametrize("kind", ["xor", "mix"])
def test_a_good_hash_is_a_random_placement(kind):
    """Rows used, sharing, and joint collisions lie where independent uniform rows would be, to five sigmas."""
    random, rows, heads = np.random.default_rng(3), 4001, 2 if kind == "mix" else 1
    tokens = random.integers(0, 3000, 30_000).astype(np.uint16)
    (ngrams,) = distinct_ngrams(tokens, [2])
    use = order_use(tokens, ngrams, rows, kind, heads)
    distinct, places = use.distinct, rows - 1
    empty = math.exp(-distinct / places)
    # Of the number of empty cells (Kolchin, Sevast'yanov, Chistyakov, Random Allocations, I.1).
    spread = (places * empty * (1 - (1 + distinct / places) * empty)) ** 0.5
    for head in use.heads:
        assert abs(head.placement.used - use.ideal) < 5 * spread
        alone = (1 - 1 / places) ** (distinct - 1)
        assert abs(head.placement.shared - (1 - alone)) < 5 * (2 * alone / distinct) ** 0.5
    if heads == 2:
        pairs = distinct * (distinct - 1) / 2 / places**2
        assert abs(use.joint.shared * distinct - 2 * pairs) < 5 * 2 * pairs**0.5


def test_counts_of_nothing():
    for tokens in ([], [7]):
        (ngrams,) = distinct_ngrams(np.array(tokens, dtype=np.uint16), [2])
        use = order_use(np.array(tokens, dtype=np.uint16), ngrams, 10)
        assert (use.tokens, use.distinct, use.ideal, use.joint) == (0, 0, 0.0, Placement(0, 0.0, 0.0))
    assert Ngrams(2, np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tokens == 0
