"""N-gram hashes and sign indices against Python integers with an explicit int32 wrap; splitmix64 against its paper."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mome.table.hashing import hash_ngrams, ngram_windows, sign_index, splitmix64

RECORD_ROWS = 377_280
HALF_ROWS = 84_602_880 // 2


def wrap_int32(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x


def plain_row(ids: list[int], multipliers: list[int], modulus: int) -> int:
    """ids: current token first. Every product wraps on its own, as int32 arithmetic does."""
    mixed = 0
    for token, multiplier in zip(ids, multipliers, strict=True):
        mixed = wrap_int32(mixed ^ wrap_int32(token * multiplier))
    return mixed % modulus


def plain_hash(stream: list[int], order: int, rows: int) -> list[int]:
    multipliers = {2: [36313, 27191], 3: [17351, 60961, 45259]}[order]
    out = []
    for t in range(len(stream)):
        window = [stream[t - back] if t >= back else -1 for back in range(order)]
        out.append(rows - 1 if -1 in window[1:] else plain_row(window, multipliers, rows - 1))
    return out


def plain_sign(stream: list[int], order: int, rows: int) -> list[int]:
    multipliers = {2: [48271, 30011], 3: [58699, 39779, 26801]}[order]
    out = []
    for t in range(len(stream)):
        window = [stream[t - back] if t >= back else -1 for back in range(order)]
        out.append(0 if -1 in window[1:] else plain_row(window, multipliers, rows))
    return out


tokens = st.one_of(st.integers(0, 50_303), st.sampled_from([0, 1, 50_256, 65_535, (1 << 31) - 1]))


@settings(max_examples=60, deadline=None)
@given(
    stream=st.lists(tokens, min_size=1, max_size=12),
    order=st.sampled_from([2, 3]),
    rows=st.sampled_from([2, 3, 8191, RECORD_ROWS, HALF_ROWS, (1 << 31) - 1]),
)
def test_hashes_equal_python_integers(stream, order, rows):
    ids = torch.tensor([stream])
    assert hash_ngrams(ids, None, order, rows)[0].tolist() == plain_hash(stream, order, rows)
    for sign_rows in (1, 500, 8192):
        assert sign_index(ids, None, order, sign_rows)[0].tolist() == plain_sign(stream, order, sign_rows)


def test_the_largest_ids_wrap_and_stay_in_range():
    """Without the wrap, or with a remainder that keeps the sign, these differ or leave the table."""
    stream = [50_303, 50_303, 50_303, 65_535, 65_535, (1 << 31) - 1, (1 << 31) - 1]
    for order in (2, 3):
        ids = hash_ngrams(torch.tensor([stream]), None, order, HALF_ROWS)
        assert ids[0].tolist() == plain_hash(stream, order, HALF_ROWS)
        assert ids.dtype == torch.int64 and int(ids.min()) >= 0 and int(ids.max()) < HALF_ROWS
    unwrapped = ((36313 * 65_535) ^ (27191 * 65_533)) % (HALF_ROWS - 1)
    assert hash_ngrams(torch.tensor([[65_533, 65_535]]), None, 2, HALF_ROWS)[0, 1] != unwrapped


def test_a_known_bigram_and_trigram():
    """By hand: (36313 * 3) ^ (27191 * 2) = 108939 ^ 54382, and (17351 * 5) ^ (60961 * 3) ^ (45259 * 2)."""
    assert hash_ngrams(torch.tensor([[2, 3]]), None, 2, RECORD_ROWS)[0, 1] == (108_939 ^ 54_382) % 377_279
    trigram = (86_755 ^ 182_883 ^ 90_518) % (HALF_ROWS - 1)
    assert hash_ngrams(torch.tensor([[2, 3, 5]]), None, 3, HALF_ROWS)[0, 2] == trigram


def test_tokens_without_enough_predecessors_get_the_reserved_row_and_no_other_does():
    ids = torch.randint(0, 50_000, (4, 500))
    for order in (2, 3):
        rows = hash_ngrams(ids, None, order, 101)
        assert torch.equal(rows == 100, torch.arange(500).expand(4, 500) < order - 1)
        assert not sign_index(ids, None, order, 64)[:, : order - 1].any()


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_a_history_continues_the_stream(order, cut):
    stream = torch.randint(0, 50_304, (3, 11))
    whole, signs = hash_ngrams(stream, None, order, 5003), sign_index(stream, None, order, 8192)
    for width in (order - 1, order, cut):
        history = torch.full((3, width), -1)
        kept = min(width, cut)
        history[:, width - kept :] = stream[:, cut - kept : cut]
        if kept < min(order - 1, cut):
            continue
        assert torch.equal(hash_ngrams(stream[:, cut:], history, order, 5003), whole[:, cut:])
        assert torch.equal(sign_index(stream[:, cut:], history, order, 8192), signs[:, cut:])


def test_a_history_of_no_tokens_is_no_history():
    stream = torch.randint(0, 99, (2, 6))
    for history in (torch.full((2, 2), -1), torch.empty(2, 0, dtype=torch.int64)):
        for order in (2, 3):
            assert torch.equal(hash_ngrams(stream, history, order, 97), hash_ngrams(stream, None, order, 97))


def test_a_gap_in_the_history_counts_as_missing():
    assert hash_ngrams(torch.tensor([[7]]), torch.tensor([[-1, 5]]), 3, 97).item() == 96
    assert hash_ngrams(torch.tensor([[7]]), torch.tensor([[5, -1]]), 3, 97).item() == 96
    assert hash_ngrams(torch.tensor([[7]]), torch.tensor([[-1, 5]]), 2, 97).item() != 96


def test_windows_show_the_current_token_first():
    windows = ngram_windows(torch.tensor([[4, 5, 6]]), torch.tensor([[1, 2, 3]]), 3)
    assert [window[0].tolist() for window in windows] == [[4, 5, 6], [3, 4, 5], [2, 3, 4]]


def test_inputs_are_left_alone_and_empty_or_narrow_ones_work():
    stream, history = torch.randint(0, 99, (2, 5), dtype=torch.int32), torch.randint(0, 99, (2, 2))
    copies = stream.clone(), history.clone()
    rows = hash_ngrams(stream, history, 3, 50)
    assert torch.equal(stream, copies[0]) and torch.equal(history, copies[1])
    assert torch.equal(rows, hash_ngrams(stream.long(), history, 3, 50))
    assert hash_ngrams(torch.empty(0, 4, dtype=torch.int64), None, 2, 50).shape == (0, 4)
    assert hash_ngrams(torch.empty(2, 0, dtype=torch.int64), None, 3, 50).shape == (2, 0)


def test_hashes_spread_over_the_rows():
    ids = hash_ngrams(torch.randint(0, 50_257, (1, 200_000)), None, 3, 1001)[0, 2:]
    counts = torch.bincount(ids, minlength=1001)[:1000].double()
    assert counts.min() > 120 and counts.max() < 290


@pytest.mark.parametrize("rows", [-1, 0, 1, 1 << 31, 1 << 40])
def test_row_counts_out_of_range_are_refused(rows):
    with pytest.raises(ValueError, match="rows"):
        hash_ngrams(torch.tensor([[1, 2]]), None, 2, rows)
    if rows != 1:
        with pytest.raises(ValueError, match="sign pool"):
            sign_index(torch.tensor([[1, 2]]), None, 2, rows)


def test_other_orders_and_histories_are_refused():
    for order in (1, 4):
        with pytest.raises(ValueError, match="order"):
            hash_ngrams(torch.tensor([[1, 2]]), None, order, 10)
        with pytest.raises(ValueError, match="order"):
            sign_index(torch.tensor([[1, 2]]), None, order, 10)
    with pytest.raises(ValueError, match="history"):
        hash_ngrams(torch.tensor([[1, 2]]), torch.tensor([[1], [2]]), 2, 10)


def plain_splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_splitmix64_equals_the_published_sequence():
    """The first outputs of the reference C program seeded with 0, and any counter against Python integers."""
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    counters = torch.tensor([0, 1, 2, 1 << 40, (1 << 63) - 1, -1, -(1 << 63), 123_456_789_012_345])
    before = counters.clone()
    got = [value % (1 << 64) for value in splitmix64(counters).tolist()]
    assert torch.equal(counters, before)
    assert got[:3] == known
    golden = 0x9E3779B97F4A7C15
    assert got == [plain_splitmix64(counter * golden % (1 << 64)) for counter in counters.tolist()]
