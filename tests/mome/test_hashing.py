"""Both n-gram hashes and their sign indices against Python integers, in pieces, and at what a bad hash does.

Lives here: the mixer's published sequence; ids of every order and head, ranges, history, refusals, weak row counts.
Not here: what a hash does to a corpus (test_collisions.py), and initial values (tests/kernels/test_initial.py).
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.initial import splitmix64
from mome.table.collisions import ideal_used
from mome.table.hashing import (
    HASH_MULTIPLIERS,
    MOST_ROWS,
    ORDERS,
    SIGN_MULTIPLIERS,
    hash_ngrams,
    multiple_of,
    ngram_windows,
    sign_indices,
    weaknesses,
)

RECORD_ROWS = 377_280
HALF_ROWS = 84_602_880 // 2
EVERY_ORDER = tuple(ORDERS)
# Of every hash all that it can do: kind, orders, heads.
WHOLE = [("xor", (2, 3), 1), ("mix", EVERY_ORDER, 3)]


def wrap_int32(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x


def plain_splitmix64(counter: int) -> int:
    mask = (1 << 64) - 1
    z = (counter + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def plain_code(window: list[int], kind: str, head: int, signs: bool) -> int:
    """window: current token first. Every product wraps on its own, as int32 arithmetic does; mix is unsigned."""
    if kind == "mix":
        mixed = 0
        for token in window:
            mixed = plain_splitmix64(mixed ^ token)
        return plain_splitmix64(mixed ^ plain_splitmix64(len(window) << 40 | head << 1 | signs))
    mixed = 0
    for token, multiplier in zip(window, (SIGN_MULTIPLIERS if signs else HASH_MULTIPLIERS)[len(window)], strict=True):
        mixed = wrap_int32(mixed ^ wrap_int32(token * multiplier))
    return mixed


def plain_ids(
    stream: list[int], orders: tuple[int, ...], rows: int, kind: str, heads: int, signs: bool = False
) -> list[list[int]]:
    """Row ids (signs: sign rows) [T][R] by definition."""
    out = []
    for t in range(len(stream)):
        ids = []
        for place, order in enumerate(orders):
            window = [stream[t - back] if t >= back else -1 for back in range(order)]
            for head in range(heads):
                first = 0 if signs else (place * heads + head) * rows
                if -1 in window:
                    ids.append(0 if signs else first + rows - 1)
                else:
                    ids.append(first + plain_code(window, kind, head, signs) % (rows if signs else rows - 1))
        out.append(ids)
    return out


def test_splitmix64_equals_the_published_sequence():
    """The first outputs of the reference C program seeded with 0, and any counter against Python integers."""
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    counters = torch.tensor([0, 1, 2, 1 << 40, (1 << 63) - 1, -1, -(1 << 63), 123_456_789_012_345])
    before = counters.clone()
    got = [value % (1 << 64) for value in splitmix64(counters).tolist()]
    assert torch.equal(counters, before)
    assert got[:3] == known
    assert got == [plain_splitmix64(counter) for counter in counters.tolist()]


tokens = st.one_of(st.integers(0, 50_303), st.sampled_from([0, 1, 50_256, 65_535, (1 << 31) - 1]))


@settings(max_examples=25, deadline=None)
@given(
    stream=st.lists(tokens, min_size=1, max_size=12),
    whole=st.sampled_from(WHOLE),
    rows=st.sampled_from([2, 3, 8191, RECORD_ROWS, HALF_ROWS, (1 << 31) - 1]),
)
def test_ids_equal_python_integers(stream, whole, rows):
    (kind, orders, heads), ids = whole, torch.tensor([stream])
    assert hash_ngrams(ids, None, orders, rows, kind, heads)[0].tolist() == plain_ids(stream, orders, rows, kind, heads)
    for sign_rows in (1, 500, 8192):
        got = sign_indices(ids, None, orders, sign_rows, kind, heads)[0].tolist()
        assert got == plain_ids(stream, orders, sign_rows, kind, heads, signs=True)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(tokens, min_size=1, max_size=5),
    st.one_of(st.integers(2, 1 << 62), st.integers(0, 40).map(lambda below: (1 << 62) - below)),
    st.sampled_from([(2,), (3, 8)]),
)
def test_mix_fills_tables_beyond_32_bits(stream, rows, orders):
    """The remainder is of an unsigned number: that of the signed one would be another row, or below 0."""
    ids = hash_ngrams(torch.tensor([stream]), None, orders, rows, "mix")
    assert ids[0].tolist() == plain_ids(stream, orders, rows, "mix", 1)
    assert ids.dtype == torch.int64 and int(ids.min()) >= 0 and int(ids.max()) < rows * len(orders)


def test_the_largest_ids_wrap_and_stay_in_range():
    """Without the wrap, or with a remainder that keeps the sign, these differ or leave the table."""
    stream = [50_303, 50_303, 50_303, 65_535, 65_535, (1 << 31) - 1, (1 << 31) - 1]
    for order in (2, 3):
        ids = hash_ngrams(torch.tensor([stream]), None, (order,), HALF_ROWS)
        assert ids[0].tolist() == plain_ids(stream, (order,), HALF_ROWS, "xor", 1)
        assert ids.dtype == torch.int64 and int(ids.min()) >= 0 and int(ids.max()) < HALF_ROWS
    unwrapped = ((36313 * 65_535) ^ (27191 * 65_533)) % (HALF_ROWS - 1)
    assert hash_ngrams(torch.tensor([[65_533, 65_535]]), None, (2,), HALF_ROWS)[0, 1, 0] != unwrapped


def test_a_known_bigram_and_trigram():
    """By hand: (36313 * 3) ^ (27191 * 2) = 108939 ^ 54382, and (17351 * 5) ^ (60961 * 3) ^ (45259 * 2)."""
    assert hash_ngrams(torch.tensor([[2, 3]]), None, (2,), RECORD_ROWS)[0, 1, 0] == (108_939 ^ 54_382) % 377_279
    trigram = (86_755 ^ 182_883 ^ 90_518) % (HALF_ROWS - 1)
    assert hash_ngrams(torch.tensor([[2, 3, 5]]), None, (3,), HALF_ROWS)[0, 2, 0] == trigram


@pytest.mark.parametrize(("kind", "orders", "heads"), WHOLE)
def test_tokens_without_enough_predecessors_get_the_reserved_row_and_no_other_does(kind, orders, heads):
    ids = torch.randint(0, 50_000, (4, 300))
    rows = hash_ngrams(ids, None, orders, 101, kind, heads)
    signs = sign_indices(ids, None, orders, 64, kind, heads)
    for place, order in enumerate(order for order in orders for _ in range(heads)):
        found = rows[..., place] - 101 * place
        assert int(found.min()) >= 0 and torch.equal(found == 100, torch.arange(300).expand(4, 300) < order - 1)
        assert not signs[:, : order - 1, place].any()


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(WHOLE), st.integers(0, 2**31), st.lists(st.integers(0, 13), max_size=4), st.integers(7, 9))
def test_pieces_with_their_history_equal_the_whole(whole, seed, cuts, width):
    """In one piece, cut anywhere, or token by token; a history may be wider than the orders ask for."""
    kind, orders, heads = whole
    stream = torch.randint(0, 50_304, (3, 13), generator=torch.Generator().manual_seed(seed))
    rows, signs = (f(stream, None, orders, 5003, kind, heads) for f in (hash_ngrams, sign_indices))
    for bounds in ([0, *sorted(cuts), 13], list(range(14))):
        history = torch.full((3, width), -1)
        for start, end in pairwise(bounds):
            piece = stream[:, start:end]
            assert torch.equal(hash_ngrams(piece, history, orders, 5003, kind, heads), rows[:, start:end])
            assert torch.equal(sign_indices(piece, history, orders, 5003, kind, heads), signs[:, start:end])
            history = torch.cat([history, piece], dim=1)[:, -width:]


def test_a_narrow_history_is_all_that_is_known():
    stream = torch.randint(0, 99, (2, 6))
    for history in (torch.full((2, 2), -1), torch.empty(2, 0, dtype=torch.int64)):
        for kind, orders, heads in WHOLE:
            whole = hash_ngrams(stream, None, orders, 97, kind, heads)
            assert torch.equal(hash_ngrams(stream, history, orders, 97, kind, heads), whole)
    for gap in ([-1, 5], [5, -1]):
        ids = hash_ngrams(torch.tensor([[7]]), torch.tensor([gap]), (2, 3), 97, "mix")[0, 0]
        assert ids[1] == 97 + 96 and (ids[0] == 96) == (gap[-1] == -1)


def test_an_order_alone_has_the_ids_it_has_among_others():
    stream = torch.randint(0, 50_304, (2, 30))
    together = hash_ngrams(stream, None, EVERY_ORDER, 1009, "mix", 2)
    for place, order in enumerate(EVERY_ORDER):
        alone = hash_ngrams(stream, None, (order,), 1009, "mix", 2)
        assert torch.equal(alone, together[..., 2 * place : 2 * place + 2] - 2 * place * 1009)


def test_windows_show_the_current_token_first():
    windows = ngram_windows(torch.tensor([[4, 5, 6]]), torch.tensor([[1, 2, 3]]), 3)
    assert [window[0].tolist() for window in windows] == [[4, 5, 6], [3, 4, 5], [2, 3, 4]]


@pytest.mark.parametrize(("kind", "orders", "heads"), WHOLE)
def test_inputs_are_left_alone_and_empty_ones_work(kind, orders, heads):
    stream, history = torch.randint(0, 99, (2, 5), dtype=torch.int32), torch.randint(0, 99, (2, 2))
    copies = stream.clone(), history.clone()
    rows = hash_ngrams(stream, history, orders, 50, kind, heads)
    assert torch.equal(stream, copies[0]) and torch.equal(history, copies[1])
    assert torch.equal(rows, hash_ngrams(stream.long(), history, orders, 50, kind, heads))
    ranges = len(orders) * heads
    for shape in ((0, 4), (2, 0)):
        empty = torch.empty(*shape, dtype=torch.int64)
        assert hash_ngrams(empty, None, orders, 50, kind, heads).shape == (*shape, ranges)
        assert sign_indices(empty, None, orders, 50, kind, heads).shape == (*shape, ranges)


def test_the_order_of_tokens_counts():
    """All permutations of four tokens, and those of equal sums and equal XORs, are different n-grams."""
    windows = torch.cartesian_prod(*[torch.arange(4)] * 4)
    ids = hash_ngrams(windows[:, -1:], windows[:, :-1], (4,), 1 << 60, "mix")
    assert len(ids.unique()) == 4**4


@pytest.mark.parametrize(("kind", "order"), [("xor", 2), ("xor", 3), ("mix", 2), ("mix", 5), ("mix", 8)])
def test_hashes_spread_over_the_rows(kind, order):
    ids = hash_ngrams(torch.randint(0, 50_257, (1, 100_000)), None, (order,), 1001, kind)[0, order - 1 :, 0]
    counts = torch.bincount(ids, minlength=1001)[:1000].double()
    chi_square = float(((counts - len(ids) / 1000) ** 2 / (len(ids) / 1000)).sum())
    assert abs(chi_square - 999) < 5 * (2 * 999) ** 0.5


def test_heads_orders_and_signs_agree_by_chance_alone():
    """Of the pairs of n-grams that share a row under one head, one in so many rows shares it under another."""
    windows = torch.randint(0, 50_257, (60_000, 3))
    ids = hash_ngrams(windows[:, -1:], windows[:, :-1], (2, 3), 51, "mix", 3)[:, 0]
    signs = sign_indices(windows[:, -1:], windows[:, :-1], (2, 3), 50, "mix", 3)[:, 0]
    columns = torch.cat([ids % 51, signs], dim=1).split(1, dim=1)
    for at, one in enumerate(columns):
        for other in columns[:at]:
            counts = torch.bincount((one * 50 + other).flatten(), minlength=2500).double()
            chi_square = float(((counts - 24) ** 2 / 24).sum())
            assert abs(chi_square - 2499) < 6 * (2 * 2499) ** 0.5


def test_a_polynomial_hash_folds_where_these_do_not():
    """The bad example: cur + prev * V modulo the rows, as several published n-gram tables have it.

    Modulo k * V the product prev * V takes k values, so that all n-grams with one last token fall on k rows: those of
    frequent tokens pile up, and the rows of rare ones idle. A prime is no remedy; a distance from the multiple is.
    """
    vocabulary, times, count = 2000, 5, 30_000
    mass = (torch.arange(vocabulary) + 1.0).reciprocal()
    drawn = torch.multinomial(mass, 2 * count, replacement=True, generator=torch.Generator().manual_seed(0))
    distinct = drawn.view(count, 2).unique(dim=0)

    def used(ids, modulus: int) -> float:
        return len((ids % modulus).unique()) / ideal_used(modulus, len(distinct))

    multiple, prime = times * vocabulary, 10_007
    polynomial = distinct[:, 1] + distinct[:, 0] * vocabulary
    assert all(prime % divisor for divisor in range(2, 101))
    assert used(polynomial, multiple) < 0.75 and used(polynomial, prime) < 0.98
    assert used(polynomial, multiple + 51) > 0.98
    for kind in ("xor", "mix"):
        for modulus in (multiple, prime, multiple + 51):
            ids = hash_ngrams(distinct[:, 1:], distinct[:, :1], (2,), modulus + 1, kind).flatten()
            assert used(ids, modulus) > 0.98


@pytest.mark.parametrize("kind", ["xor", "mix"])
@pytest.mark.parametrize("rows", [-1, 0, 1, 1 << 31, (1 << 62) + 1, 1 << 70])
def test_row_counts_out_of_range_are_refused(rows, kind):
    words = torch.tensor([[1, 2]])
    if 2 <= rows <= MOST_ROWS[kind]:
        assert hash_ngrams(words, None, (2,), rows, kind)[0, 1, 0] < rows
    else:
        with pytest.raises(ValueError, match=f"range of {rows} rows for the hash {kind}: choose 2 to"):
            hash_ngrams(words, None, (2,), rows, kind)
    if not 1 <= rows < 1 << 31:
        with pytest.raises(ValueError, match="sign pool"):
            sign_indices(words, None, (2,), rows, kind)


@pytest.mark.parametrize(
    ("orders", "kind", "heads", "words"),
    [
        ((1,), "mix", 1, "order 1: give ascending orders from 2 to 8"),
        ((9,), "mix", 1, "order 9"),
        ((), "mix", 1, "order none"),
        ((3, 2), "mix", 1, "order 3, 2"),
        ((2, 2), "mix", 1, "order 2, 2"),
        ((4,), "xor", 1, "not orders 4 and 1: choose mix"),
        ((2,), "xor", 2, "not orders 2 and 2: choose mix"),
        ((2,), "mix", 0, "0 heads"),
        ((2,), "sum", 1, "choose xor or mix"),
    ],
)
def test_what_a_hash_cannot_do_is_refused(orders, kind, heads, words):
    for function in (hash_ngrams, sign_indices):
        with pytest.raises(ValueError, match=words):
            function(torch.tensor([[1, 2]]), None, orders, 10, kind, heads)


def test_ids_past_64_bits_and_other_histories_are_refused():
    words = torch.tensor([[1, 2]])
    assert int(hash_ngrams(words, None, (2, 3), 1 << 62, "mix")[0, 0, 1]) == (1 << 63) - 1
    with pytest.raises(ValueError, match="3 ranges of 4611686018427387904 rows: their ids do not fit into 64 bits"):
        hash_ngrams(words, None, (2, 3, 4), 1 << 62, "mix")
    with pytest.raises(ValueError, match="history of 2 rows for 1"):
        hash_ngrams(words, torch.tensor([[1], [2]]), (2,), 10)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "times"),
    [
        (65_536, 8192, 8), (65_537, 8192, 8), (65_530, 8192, 8), (65_500, 8192, 0), (5 * 50_257, 50_257, 5),
        (5 * 50_257 + 51, 50_257, 5), (5 * 50_257 + 52, 50_257, 0), (RECORD_ROWS, 50_304, 0), (500, 50_257, 0),
        (1501, 300, 5), (1500, 300, 5), (1499, 300, 0),
    ],
)  # fmt: skip
def test_row_counts_beside_a_multiple_of_the_vocabulary(rows, vocabulary, times):
    assert multiple_of(rows, vocabulary) == times


def test_where_the_xor_hash_is_worse_than_chance_it_says_so():
    assert weaknesses((2, 3), 65_536, "xor", 8192) == []
    (one,) = weaknesses((2, 3), 2 * 36313 + 1, "xor", 8192)
    assert one.startswith("order 2: 72,627 rows are one more than a multiple of 36313")
    assert weaknesses((2, 3), 2 * 36313 + 1, "mix", 8192) == weaknesses((3,), 2 * 36313 + 1, "xor", 8192) == []


def test_rows_beyond_the_reach_of_the_xor_hash_are_named():
    """By going through all bigrams of a small vocabulary: none is hashed beyond what the warning says."""
    pairs = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    ids = hash_ngrams(pairs[:, 1:], pairs[:, :1], (2,), 1 << 30)
    reach = 1 << int(ids.max()).bit_length()
    assert weaknesses((2,), reach + 1, "xor", 100) == []
    (one,) = weaknesses((2,), reach + 2, "xor", 100)
    assert f"reaches {reach:,} of {reach + 2:,} rows" in one
    assert weaknesses((2,), reach + 2, "mix", 100) == weaknesses((2,), MOST_ROWS["xor"], "xor", 1 << 17) == []
