"""fp8 rows: codes and scales against float64, decay that never moves a code, no bias, numba against the oracle.

Lives here: encode_fp8 and decode_fp8 of kernels/rounding.py.
Not here: random bits and the other formats (tests/kernels/test_rounding.py).
"""

from __future__ import annotations

import math

import pytest
import torch

import kernels.cpu.rounding as fast
from kernels.rounding import (
    LEAST_SCALE,
    decode_fp8,
    decode_fp8_reference,
    encode_fp8,
    encode_fp8_reference,
    rounding_bits,
    rounding_key,
)

KEY = rounding_key(3, 5)
ALL = torch.arange(256, dtype=torch.uint8)
FINITE = ALL[(ALL & 0x7F) != 0x7F]
SIZES = [(0, 2, 3), (1, 1, 1), (5, 3, 7), (131, 2, 64), (2, 1, 1031)]


def plain_number(code: int) -> float:
    """The e4m3fn number of a code (OCP 8-bit floating point specification): no infinities, one NaN a sign."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if sign else size


NUMBERS = [plain_number(code) for code in range(127)]


def spread(shape):
    """Numbers whose magnitudes differ by powers of ten within a lane."""
    return torch.randn(shape) * 10.0 ** torch.randint(-6, 3, shape)


def lanes_of_codes(scales):
    """Lanes that hold every finite number, at these scales: [U, 1, 254]."""
    return decode_fp8_reference(FINITE.expand(len(scales), 1, -1), scales[:, None])


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_every_code_is_its_number_and_comes_back():
    decoded = decode_fp8(ALL.view(1, 1, -1), torch.ones(1, 1)).flatten().tolist()
    for code, number in enumerate(decoded):
        expected = plain_number(code)
        assert math.isnan(number) if math.isnan(expected) else number == expected
    scales = torch.cat(
        (torch.tensor([1.0, LEAST_SCALE, 7e35, 1 / 3]), torch.rand(300) * 10.0 ** torch.randint(-30, 30, (300,)))
    )
    rows = lanes_of_codes(scales)
    for event in range(3):
        codes, scale = encode_fp8(rows, torch.arange(len(scales)), rounding_key(1, event))
        assert torch.equal(codes, FINITE.expand_as(codes))
        torch.testing.assert_close(scale.flatten(), scales, rtol=2e-7, atol=0)


def test_codes_are_the_neighbours_that_float64_and_the_bits_say():
    rows, ids = spread((40, 3, 31)), torch.randint(1 << 33, (40,))
    codes, scale = encode_fp8_reference(rows, ids, KEY)
    assert torch.equal(scale, (rows.abs().amax(-1).double() / 448).float())
    # The quotient is float32's, as an exact one could lie on the other side of a rounding to 2**-16.
    ratio = (rows.abs() / scale[..., None]).double().clamp(max=448.0)
    bits = rounding_bits(ids, 93, KEY).view(rows.shape)
    table = torch.tensor(NUMBERS, dtype=torch.float64)
    lower = torch.searchsorted(table, ratio, right=True) - 1
    place = (ratio - table[lower]) / (table[(lower + 1).clamp(max=126)] - table[lower]).clamp(min=1e-300)
    expected = lower + (bits + (place * 65536).round() >= 65536)
    expected += 128 * rows.signbit()
    assert torch.equal(codes.long(), expected)


@pytest.mark.parametrize("number", [1.0 + 0.125 / 3, 2.0**-9 / 3, 300.00003, 2.0**-27])
def test_the_chance_of_a_code_is_off_by_at_most_half_a_draw(number):
    """Which draws climb is known from the number in float64: what is left is the rounding of the chance to 2**-16."""
    rows_drawn = torch.arange(65536)
    draws = rounding_bits(rows_drawn, 2, KEY)[:, 1]
    rows = torch.tensor([448.0, number]).expand(65536, 1, 2)
    codes = encode_fp8(rows, rows_drawn, KEY)[0][:, 0, 1]
    number = rows[0, 0, 1].item()
    lower = max(code for code in range(127) if NUMBERS[code] <= number)
    place = (number - NUMBERS[lower]) / (NUMBERS[lower + 1] - NUMBERS[lower])
    chance = round(place * 65536) / 65536
    assert torch.equal(codes, lower + (draws >= 65536 * (1 - chance)).to(torch.uint8))
    assert abs(chance - place) <= 2.0**-17


@pytest.mark.parametrize("factors", [1, 2])
def test_a_thousand_decays_move_the_scale_and_never_a_code(factors):
    """Pull and push may each multiply a row once before it is encoded again."""
    generator = torch.Generator().manual_seed(1)
    scales = 10.0 ** torch.linspace(-3, 3, 20)
    rows = torch.cat((lanes_of_codes(scales), torch.randn(20, 1, 254)))
    ids = torch.arange(len(rows))
    codes, scale = encode_fp8(rows, ids, KEY)
    first, exact, total = codes.clone(), decode_fp8(codes, scale).double(), 1.0
    for event in range(1000):
        rows = decode_fp8(codes, scale)
        for _ in range(factors):
            factor = (1 - 0.05 * torch.rand(1, generator=generator).square()).float()
            rows, total = rows * factor, total * float(factor)
        codes, scale = encode_fp8(rows, ids, rounding_key(2, event))
        assert torch.equal(codes, first)
    assert total < 1e-6
    error = (decode_fp8(codes, scale).double() / (exact * total) - 1)[exact != 0].abs().max()
    # Four roundings an event, a random walk: 5 of its standard deviations of at most 2**-24 * sqrt(4000 / 3).
    assert error < 5 * 2.0**-24 * math.sqrt(4000 / 3)


def test_a_million_updates_move_by_their_sum_where_nearest_rounding_stalls():
    rows, size, events = 64, 64, 256
    ids = torch.randperm(1 << 20)[:rows]
    step, chance = 0.125, 218 / 65536
    increment = chance * step
    # The first number of each lane fixes its scale at 1.
    start = torch.ones(rows, 1, size + 1)
    start[..., 0] = 448.0
    codes, scale = encode_fp8(start, ids, KEY)
    nearest = start.clone()
    for event in range(events):
        moved = decode_fp8(codes, scale)
        moved[..., 1:] += increment
        codes, scale = encode_fp8(moved, ids, rounding_key(1, event))
        assert torch.equal(scale, torch.ones_like(scale))
        nearest[..., 1:] = (nearest[..., 1:] + increment).to(torch.float8_e4m3fn).float()
    assert torch.equal(nearest, start)
    steps = (decode_fp8(codes, scale)[..., 1:].double() - 1) / step
    variance = events * chance * (1 - chance)
    n = rows * size
    # Beside chance, the bound on the bias: 2**-17 of a step an event.
    assert abs(steps.mean() - events * chance) < 5 * math.sqrt(variance / n) + events * 2.0**-17
    spread = (2 + (1 - 6 * chance * (1 - chance)) / variance) / n
    assert abs(steps.var() / variance - 1) < 5 * math.sqrt(spread)


def test_finite_lanes_stay_finite_and_within_a_step():
    most = torch.finfo(torch.float32).max
    rows = torch.stack(
        [
            torch.tensor([most, -most, 1.0, 1e-45, -0.0, 3e38]),
            torch.tensor([1e-45, 0.0, -1e-45, 0.0, 0.0, 0.0]),
            torch.tensor([1e-38, -1e-40, 3e-39, 5e-42, 0.0, -0.0]),
            torch.tensor([5e-36, 1e-37, -5.2e-36, 2e-38, 1e-45, 5.3e-36]),
            torch.tensor([448.0, 447.99997, 448.00003, 1e-3, 2.0**-9, 2.0**-6]),
            torch.tensor([-1.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        ]
    ).unsqueeze(1)
    rows = torch.cat((rows, spread((300, 1, 6)), torch.randn(300, 1, 1).expand(-1, -1, 6) * 1e-37))
    for event in range(20):
        codes, scale = encode_fp8(rows, torch.arange(len(rows)), rounding_key(4, event))
        assert ((codes & 0x7F) != 0x7F).all()
        back = decode_fp8(codes, scale)
        assert back.isfinite().all() and torch.equal(back.signbit(), rows.signbit())
        octave = (rows.abs().double() / scale[..., None].double()).clamp(min=2.0**-6).log2().floor()
        step = scale[..., None].double() * 2.0 ** (octave - 3)
        assert ((back.double() - rows.double()).abs() <= step * 1.00001 + 1.5e-45).all()


@pytest.mark.parametrize("encode", [encode_fp8, encode_fp8_reference])
def test_a_lane_of_zeros_and_one_that_is_not_finite(encode):
    rows = torch.ones(4, 2, 5)
    rows[0, 0], rows[1, 1, 3], rows[2, 0, 0], rows[3, 1, 4] = -0.0, math.nan, math.inf, -math.inf
    codes, scale = encode(rows, torch.arange(4), KEY)
    back = decode_fp8(codes, scale)
    lanes = torch.zeros(4, 2, dtype=torch.bool)
    lanes[1, 1] = lanes[2, 0] = lanes[3, 1] = True
    assert torch.equal(back.isnan(), lanes[..., None].expand_as(back))
    assert torch.equal(scale[0], torch.tensor([0.0, (torch.ones(()) / 448).item()]))
    assert not codes[0, 0].any() and not codes[lanes].any()
    torch.testing.assert_close(back[0, 1], rows[0, 1])


@pytest.mark.parametrize("shape", SIZES)
def test_numba_has_the_oracles_bits(shape, poison_empty):
    rows, ids = spread(shape), torch.randperm(1 << 16)[: shape[0]] << 17
    rows.flatten()[::13] = 0.0
    rows.flatten()[7::11] *= -0.0
    if shape[0] > 100:
        rows[3], rows[5, 1], rows[8, 0, 0], rows[9, 0, 5] = 0.0, 1e-41, math.nan, math.inf
        rows[20:60] *= 10.0 ** torch.linspace(-45, 35, 40)[:, None, None]
    ours, expected = fast.encode_fp8(rows, ids, KEY), encode_fp8_reference(rows, ids, KEY)
    assert same(ours[0], expected[0])
    assert torch.equal(ours[1].nan_to_num(-1), expected[1].nan_to_num(-1))
    assert same(fast.decode_fp8(*ours).nan_to_num(-1), decode_fp8_reference(*expected).nan_to_num(-1))
    codes, one = ALL.view(1, 1, -1), torch.ones(1, 1)
    assert same(fast.decode_fp8(codes, one).nan_to_num(-1), decode_fp8_reference(codes, one).nan_to_num(-1))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_order_change_no_bit(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows, ids = spread((4099, 3, 21)), torch.randperm(1 << 16)[:4099]
        codes, scale = encode_fp8(rows, ids, KEY)
        expected = encode_fp8_reference(rows, ids, KEY)
        assert same(codes, expected[0]) and same(scale, expected[1])
        order = torch.randperm(4099)
        again = encode_fp8(rows[order], ids[order], KEY)
        assert same(again[0], codes[order]) and same(again[1], scale[order])
        assert same(decode_fp8(codes[order], scale[order]), decode_fp8(codes, scale)[order])
        assert not torch.equal(encode_fp8(rows, ids + 1, KEY)[0], codes)
    finally:
        torch.set_num_threads(before)
