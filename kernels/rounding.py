"""Rows in fewer bits: stochastic rounding to bfloat16 and to fp8 with a scale a lane, and float32 as two exact halves.

Lives here: the random bits, and each format's oracle with its op: round_bf16, split_bf16, join_bf16, encode_fp8,
decode_fp8.
Not here: which format a table has and its planes (mome/table/formats.py), and where they lie (mome/table/store.py).

Replaces rounding to nearest, which drops every update below half a step, and a random stream, whose numbers depend on
who drew before. Why faster: one pass on the CPU, random bits included. Invariants: the bits follow from (seed, event,
row, element) alone, so no order, chunk or number of threads changes a row; the oracles and numba agree in every bit; a
finite number never becomes infinite or NaN, and what is neither never becomes finite. Oracles: the functions that end
in _reference. Origin: stochastic rounding by adding random bits and cutting off is FBGEMM's; the 16 low bits kept apart
are the mantissa plane of modded-nanogpt's optimizers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import backend
from kernels.initial import mixed, splitmix64

# The largest e4m3 number, and the smallest scale: below it float32 would keep fewer than 24 bits of a scale.
FP8_MAX = 448.0
LEAST_SCALE = 2.0**-126

# Sets these bits apart from those of other uses of the same seed.
_ROUNDING = 0x726F756E64696E67

_MAGNITUDE, _INFINITE, _QUIET = 0x7FFFFFFF, 0x7F800000, 0x00400000
_MOST_BF16 = 0x7F7FFFFF
# Biased float32 exponents: of 2**-6, the smallest normal e4m3 number, and of 2**(3 - x), which makes steps of 1.
_LEAST_OCTAVE, _STEPS = 121, 257


def rounding_key(seed: int, event: int) -> int:
    """The key of one event's random bits: an int64. Neighbouring seeds and events have keys that share nothing."""
    return mixed(mixed(seed ^ _ROUNDING) + event)


def rounding_bits(ids_U: Tensor, size: int, key: int) -> Tensor:
    """16 random bits for each element of these rows (int64 ids): int32 [U, size], 0 to 65535.

    Element e of row r has bits 16 * (e % 4) and up of splitmix64(key + r * ceil(size / 4) + e // 4).
    """
    words = -(-size // 4)
    counter_UW = ids_U[:, None] * words + (torch.arange(words, device=ids_U.device) + key)
    # Little-endian, as all machines with torch wheels are: the lowest bits come first.
    return splitmix64(counter_UW).view(torch.int16)[:, :size].to(torch.int32).bitwise_and_(0xFFFF)


def round_bf16_reference(rows_UE: Tensor, ids_U: Tensor, key: int) -> Tensor:
    """round_bf16 by torch on any device. The oracle."""
    pattern_UE = rows_UE.contiguous().view(torch.int32)
    magnitude_UE = pattern_UE & _MAGNITUDE
    rounded_UE = (magnitude_UE + rounding_bits(ids_U, rows_UE.shape[1], key)).clamp_(max=_MOST_BF16)
    # The payload of a NaN may lie in the bits that are cut off: a quiet one stays a NaN without them.
    special_UE = torch.where(magnitude_UE > _INFINITE, magnitude_UE | _QUIET, magnitude_UE)
    rounded_UE = torch.where(magnitude_UE >= _INFINITE, special_UE, rounded_UE)
    return ((pattern_UE & ~_MAGNITUDE) | rounded_UE).bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)


def round_bf16(rows_UE: Tensor, ids_U: Tensor, key: int, out: Tensor | None = None) -> Tensor:
    """Float32 rows [U, E] of these ids (int64 [U], distinct) to bfloat16 [U, E], into `out` if given.

    Each number goes to one of its two bfloat16 neighbours, to the upper one with probability (x - lower) / (upper -
    lower), a multiple of 2**-16: exactly unbiased, subnormal numbers and -0.0 included. Two exceptions: above the
    largest bfloat16, 3.39e38, it goes down to that, because one update must not make a row infinite by chance; inf and
    NaN stay what they are.
    """
    if backend("round_bf16", rows_UE.device, _check_bf16) == "reference":
        return _into(out, round_bf16_reference(rows_UE, ids_U, key))
    from kernels.cpu.rounding import round_bf16 as fast

    return fast(rows_UE, ids_U, key, out)


def split_bf16_reference(rows_UE: Tensor) -> tuple[Tensor, Tensor]:
    """split_bf16 by torch on any device. The oracle."""
    pattern_UE = rows_UE.contiguous().view(torch.int32)
    return (pattern_UE >> 16).to(torch.int16).view(torch.bfloat16), pattern_UE.to(torch.int16)


def split_bf16(rows_UE: Tensor, high: Tensor | None = None, low: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Float32 rows [U, E] as their upper halves (bfloat16 [U, E]) and lower halves (int16 [U, E], a bit pattern).

    Into `high` and `low` if given. The upper half is the number cut off to bfloat16, which a forward pass may read
    alone; a NaN may be inf in it. join_bf16 gives every bit back.
    """
    if backend("split_bf16", rows_UE.device, _check_halves) == "reference":
        upper_UE, lower_UE = split_bf16_reference(rows_UE)
        return _into(high, upper_UE), _into(low, lower_UE)
    from kernels.cpu.rounding import split_bf16 as fast

    return fast(rows_UE, high, low)


def join_bf16_reference(high_UE: Tensor, low_UE: Tensor) -> Tensor:
    """join_bf16 by torch on any device. The oracle."""
    upper_UE = high_UE.contiguous().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return upper_UE.bitwise_or_(low_UE.to(torch.int32).bitwise_and_(0xFFFF)).view(torch.float32)


def join_bf16(high_UE: Tensor, low_UE: Tensor, out: Tensor | None = None) -> Tensor:
    """The float32 rows [U, E] that split_bf16 took apart, bit for bit, into `out` if given."""
    if backend("split_bf16", high_UE.device, _check_halves) == "reference":
        return _into(out, join_bf16_reference(high_UE, low_UE))
    from kernels.cpu.rounding import join_bf16 as fast

    return fast(high_UE, low_UE, out)


def encode_fp8_reference(rows_ULD: Tensor, ids_U: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """encode_fp8 by torch on any device. The oracle."""
    top_UL = rows_ULD.abs().amax(-1)
    # Tensors divide exactly on every device; a GPU would multiply by the rounded inverse of a Python number.
    scale_UL = (top_UL / torch.full_like(top_UL, FP8_MAX)).clamp_(min=LEAST_SCALE)
    usable_UL = (top_UL > 0) & top_UL.isfinite()
    # At most 448 to float32 rounding, which the rounding to 2**-16 of a step takes away: no code is above 448's.
    ratio_ULD = torch.where(usable_UL.unsqueeze(-1), rows_ULD.abs() / scale_UL.unsqueeze(-1), 0.0)
    octave_ULD = (ratio_ULD.view(torch.int32) >> 23).clamp_(min=_LEAST_OCTAVE)
    # In units of 2**-16 of the step between codes, from 0 at the octave's start.
    fixed_ULD = (ratio_ULD * ((_STEPS - octave_ULD) << 23).view(torch.float32) * 65536.0).round_().to(torch.int32)
    bits_ULD = rounding_bits(ids_U, rows_ULD[0].numel() if len(rows_ULD) else 0, key).view(rows_ULD.shape)
    codes_ULD = ((octave_ULD - _LEAST_OCTAVE) << 3) + ((fixed_ULD + bits_ULD) >> 16)
    codes_ULD |= (rows_ULD.contiguous().view(torch.int32) >> 24) & 0x80
    codes_ULD *= usable_UL.unsqueeze(-1)
    scale_UL = torch.where(usable_UL, scale_UL, torch.where(top_UL == 0, 0.0, torch.nan))
    return codes_ULD.to(torch.uint8), scale_UL


def encode_fp8(
    rows_ULD: Tensor, ids_U: Tensor, key: int, codes: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Float32 rows [U, L, D] of these ids (int64 [U], distinct) as e4m3 codes and a scale a lane.

    Returns codes (uint8 [U, L, D], the bit patterns of float8_e4m3fn) and scale (float32 [U, L]), in `codes` and
    `scale` if given. scale = max of |x| over the lane / 448, and at least 2**-126. x / scale goes to one of its two
    neighbouring codes, to the one further from 0 with the probability that is its place between them, rounded to a
    multiple of 2**-16. So the mean is off by at most 2**-17 of a step (and the rounding of float32), and a number that
    lies within float32 rounding of a code always gets that code: a lane that is decoded, multiplied by a factor or two
    and encoded again has the codes it had, while its scale is above 2**-126. (Each float32 rounding, of up to eight,
    moves a number by less than 1/16 of 2**-16 of a step.)
    A lane of zeros has scale 0 and codes 0; a lane with inf or NaN has scale NaN and is NaN as a whole.
    """
    if backend("fp8", rows_ULD.device, _check_fp8) == "reference":
        codes_ULD, scale_UL = encode_fp8_reference(rows_ULD, ids_U, key)
        return _into(codes, codes_ULD), _into(scale, scale_UL)
    from kernels.cpu.rounding import encode_fp8 as fast

    return fast(rows_ULD, ids_U, key, codes, scale)


def decode_fp8_reference(codes_ULD: Tensor, scale_UL: Tensor) -> Tensor:
    """decode_fp8 by torch on any device. The oracle."""
    return codes_ULD.view(torch.float8_e4m3fn).to(torch.float32) * scale_UL.unsqueeze(-1)


def decode_fp8(codes_ULD: Tensor, scale_UL: Tensor, out: Tensor | None = None) -> Tensor:
    """The float32 rows [U, L, D] that encode_fp8's codes and scales stand for, into `out` if given."""
    if backend("fp8", codes_ULD.device, _check_fp8) == "reference":
        return _into(out, decode_fp8_reference(codes_ULD, scale_UL))
    from kernels.cpu.rounding import decode_fp8 as fast

    return fast(codes_ULD, scale_UL, out)


def _into(out: Tensor | None, value: Tensor) -> Tensor:
    return value if out is None else out.copy_(value)


def _trial() -> tuple[Tensor, Tensor, int]:
    """Rows [3, 14], ids and a key to hold numba to the oracles; with zeros, a subnormal number and a huge one."""
    rows_UE = torch.linspace(-3.0, 3.0, 42).square_().sub_(1.0).view(3, 14)
    rows_UE[1, :4] = torch.tensor([0.0, -0.0, 1e-41, 3.4e38])
    return rows_UE, torch.tensor([2, 0, (1 << 40) + 1]), rounding_key(1, 1)


def _check_bf16() -> bool:
    return _same([round_bf16(*_trial())], [round_bf16_reference(*_trial())])


def _check_halves() -> bool:
    rows_UE = _trial()[0]
    halves = split_bf16(rows_UE)
    return _same([*halves, join_bf16(*halves)], [*split_bf16_reference(rows_UE), rows_UE])


def _check_fp8() -> bool:
    rows_UE, ids_U, key = _trial()
    rows_ULD = rows_UE.view(3, 2, 7)
    planes = encode_fp8(rows_ULD, ids_U, key)
    expected = encode_fp8_reference(rows_ULD, ids_U, key)
    return _same([*planes, decode_fp8(*planes)], [*expected, decode_fp8_reference(*expected)])


def _same(ours: list[Tensor], expected: list[Tensor]) -> bool:
    """Bit for bit: torch.equal would take -0.0 for 0.0."""
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, expected, strict=True))
