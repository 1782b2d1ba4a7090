"""Rounded rows: random bits, bfloat16, float32 in two halves; oracles against float64, numba against the oracles.

Lives here: what kernels/rounding.py promises, fp8 apart.
Not here: fp8 (tests/kernels/test_fp8.py), planes and names of formats (tests/mome/test_formats.py).
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.cpu.rounding as fast
from kernels.initial import splitmix64
from kernels.rounding import (
    join_bf16,
    join_bf16_reference,
    round_bf16,
    round_bf16_reference,
    rounding_bits,
    rounding_key,
    split_bf16,
    split_bf16_reference,
)

SIZES = [(0, 5), (1, 1), (3, 0), (7, 3), (131, 257), (2, 4096)]
KEY = rounding_key(3, 5)
# +-0, the smallest subnormal numbers, subnormal to normal, 1, the largest bfloat16 and what is above it.
SPECIAL = [0x00000000, 0x00000001, 0x0000FFFF, 0x00010000, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3F80FFFF, 0x7F7EFFFF]
SPECIAL += [0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF]
NOT_FINITE = [0x7F800000, 0x7F800001, 0x7F80FFFF, 0x7F810000, 0x7FC00000, 0x7FFFFFFF]


def floats(patterns):
    """float32 of these bit patterns, and of the same with the sign bit."""
    both = torch.tensor(patterns, dtype=torch.int64)
    return torch.cat((both, both - (1 << 31))).to(torch.int32).view(torch.float32)


def random_patterns(rows, size):
    """Numbers of every exponent and sign, NaN and inf among them."""
    return torch.randint(-(1 << 31), 1 << 31, (rows, size)).to(torch.int32).view(torch.float32)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def correlation(a, b):
    """In units of its standard error for independent uniform bits."""
    a, b = (x.flatten().double().sub(32767.5).div(65536 / math.sqrt(12)) for x in (a, b))
    return float((a * b).mean()) * math.sqrt(a.numel())


def lagged(key_of, event, rows=64, size=64):
    """The largest correlation between two adjacent events' bits, over shifts of up to two words."""
    first, second = (rounding_bits(torch.arange(rows), size, key_of(e)).flatten() for e in (event, event + 1))
    n = len(first)
    shifts = range(-8, 9)
    return max(abs(correlation(first[max(0, s) : n + min(0, s)], second[max(0, -s) : n - max(0, s)])) for s in shifts)


@pytest.mark.parametrize("size", [1, 4, 7, 13])
def test_bits_equal_python_integers(size):
    ids = torch.tensor([0, 1, 2, (1 << 31) // size, (1 << 33) - 1])
    words = math.ceil(size / 4)
    for row, row_id in zip(rounding_bits(ids, size, KEY).tolist(), ids.tolist()):
        for element, bits in enumerate(row):
            mixed = int(splitmix64(torch.tensor(KEY) + row_id * words + element // 4))
            assert bits == mixed >> 16 * (element % 4) & 0xFFFF


def test_bits_are_uniform_and_of_rows_and_elements_alone():
    ids = torch.randperm(1 << 20)[:2000]
    bits = rounding_bits(ids, 100, KEY)
    n = bits.numel()
    for place in range(16):
        ones = int((bits >> place & 1).sum())
        assert abs(ones - n / 2) < 5 * math.sqrt(n / 4)
    counts = torch.bincount(bits.flatten() >> 8, minlength=256)
    assert ((counts - n / 256).abs() < 5 * math.sqrt(n / 256)).all()
    for a, b in ((bits[1:], bits[:-1]), (bits[:, 1:], bits[:, :-1]), (bits[:, 4:], bits[:, :-4])):
        assert abs(correlation(a, b)) < 5
    assert torch.equal(rounding_bits(ids[5:9], 100, KEY), bits[5:9])


def test_adjacent_events_and_seeds_share_nothing():
    assert all(lagged(lambda event: rounding_key(3, event), event) < 5 for event in (0, 1, 1000, 1 << 40))
    assert all(lagged(lambda seed: rounding_key(seed, 7), seed) < 5 for seed in (-1, 0, 41))
    # Counters without the mixed key: the next event's bits are this one's, a word further on.
    assert lagged(lambda event: event, 9) > 50
    pairs = [(seed, event) for seed in range(-3, 30) for event in range(30)]
    assert len({rounding_key(*pair) for pair in pairs}) == len(pairs)
    assert rounding_key(1 << 64, 3) == rounding_key(0, 3) and -(1 << 63) <= KEY < 1 << 63


def test_bfloat16_is_the_neighbour_that_float64_and_the_bits_say():
    rows = torch.cat(
        (random_patterns(60, 40), torch.randn(60, 40), floats(SPECIAL).expand(30, -1).repeat(1, 2)[:, :40])
    )
    finite = rows.isfinite()
    ids = torch.randint(1 << 33, (len(rows),))
    rounded = round_bf16_reference(rows, ids, KEY)
    x = rows.double()
    down = (rows.view(torch.int32) & -65536).view(torch.float32)
    up = (down.view(torch.int32) + 65536).view(torch.float32).double()
    chance = (x - down.double()) / (up - down.double())
    climbs = rounding_bits(ids, 40, KEY).double() / 65536 + chance >= 1
    most = torch.finfo(torch.bfloat16).max
    expected = torch.where(climbs, up, down.double()).clamp(-most, most)
    assert torch.equal(rounded.double()[finite], expected[finite])
    assert torch.equal(rounded.signbit(), rows.signbit())
    assert torch.equal(rounded.isinf(), rows.isinf()) and torch.equal(rounded.isnan(), rows.isnan())


def test_each_of_the_65536_draws_counts_once():
    """The mean over the draws is the number itself, exactly: integers of 2**-16 of a step, subnormal ones too."""
    draws = torch.arange(65536)
    for pattern in (0x00000001, 0x0000ABCD, 0x00801234, 0x3F812345, 0x7F7E0001):
        rows = torch.tensor([pattern], dtype=torch.int32).view(torch.float32)
        drawn = rounding_bits(draws, 1, KEY).flatten()
        rounded = round_bf16_reference(rows.expand(65536, 1), draws, KEY).flatten().view(torch.int16).int()
        assert torch.equal(rounded > pattern >> 16, drawn + (pattern & 0xFFFF) >= 65536)


@pytest.mark.parametrize("patterns", [SPECIAL, NOT_FINITE])
def test_special_numbers(patterns):
    rows = floats(patterns).expand(200, -1)
    rounded = round_bf16(rows, torch.arange(200), KEY)
    assert torch.equal(rounded.isfinite(), rows.isfinite())
    assert torch.equal(rounded.isnan(), rows.isnan())
    assert torch.equal(rounded.signbit(), rows.signbit())
    kept = (rows.view(torch.int32) & 0xFFFF == 0) & ~rows.isnan()
    assert torch.equal(rounded.float()[kept], rows[kept])


def test_a_million_updates_move_by_their_sum_where_nearest_rounding_stalls():
    rows, size, events = 64, 64, 256
    ids = torch.randperm(1 << 20)[:rows]
    step, chance = 2.0**-7, 218 / 65536
    increment = chance * step
    rounded = torch.ones(rows, size, dtype=torch.bfloat16)
    nearest = rounded.clone()
    for event in range(events):
        rounded = round_bf16(rounded.float() + increment, ids, rounding_key(1, event))
        nearest = (nearest.float() + increment).bfloat16()
    assert torch.equal(nearest, torch.ones_like(nearest))
    steps = (rounded.double() - 1) / step
    variance = events * chance * (1 - chance)
    n = rows * size
    assert abs(steps.mean() - events * chance) < 5 * math.sqrt(variance / n)
    # Events that shared bits would leave the mean alone and spread the elements; a binomial's fourth moment is known.
    spread = (2 + (1 - 6 * chance * (1 - chance)) / variance) / n
    assert abs(steps.var() / variance - 1) < 5 * math.sqrt(spread)


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_numba_has_the_oracles_bits(rows, size, poison_empty):
    x, ids = random_patterns(rows, size), torch.randperm(1 << 16)[:rows] << 17
    assert same(fast.round_bf16(x, ids, KEY), round_bf16_reference(x, ids, KEY))
    halves = fast.split_bf16(x)
    for ours, expected in zip(halves, split_bf16_reference(x)):
        assert same(ours, expected)
    assert same(fast.join_bf16(*halves), join_bf16_reference(*halves))
    assert same(fast.join_bf16(*halves), x)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_order_and_layout_change_no_bit(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, ids = random_patterns(4099, 67), torch.randperm(1 << 16)[:4099]
        rounded = round_bf16(x, ids, KEY)
        assert same(rounded, round_bf16_reference(x, ids, KEY))
        order = torch.randperm(4099)
        assert same(round_bf16(x[order], ids[order], KEY), rounded[order])
        assert same(round_bf16(x[::2], ids[::2], KEY), rounded[::2].contiguous())
        assert same(round_bf16(x.t().contiguous().t(), ids, KEY), rounded)
        assert same(join_bf16(*split_bf16(x)), x)
    finally:
        torch.set_num_threads(before)


def test_halves_keep_every_bit_of_every_exponent():
    exponents = torch.arange(256).repeat_interleave(64)
    mantissas = torch.randint(1 << 23, (len(exponents),))
    mantissas[::64], mantissas[1::64], mantissas[2::64], mantissas[3::64] = 0, (1 << 23) - 1, 1, 0x8000
    x = floats((exponents << 23 | mantissas).tolist() + SPECIAL + NOT_FINITE).view(1, -1)
    high, low = split_bf16(x)
    assert same(join_bf16(high, low), x) and high.dtype == torch.bfloat16 and low.dtype == torch.int16
    plain = ~x.isnan()
    assert torch.equal(high.float()[plain], (x.view(torch.int32) & -65536).view(torch.float32)[plain])


@settings(max_examples=30, deadline=None)
@given(patterns=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=9), event=st.integers(0, 1 << 40))
def test_any_pattern(patterns, event):
    x = torch.tensor([patterns], dtype=torch.int32).view(torch.float32)
    assert same(join_bf16(*split_bf16(x)), x)
    ids, key = torch.tensor([event]), rounding_key(event, event)
    rounded = round_bf16(x, ids, key)
    assert same(rounded, round_bf16_reference(x, ids, key))
    assert torch.equal(rounded.isfinite(), x.isfinite()) and torch.equal(rounded.isnan(), x.isnan())
