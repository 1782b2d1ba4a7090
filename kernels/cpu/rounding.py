"""Rows in fewer bits on the CPU, each format in one pass.

Lives here: the numba kernels of kernels/rounding.py and their calls on tensors.
Not here: what they must compute, the key of an event, and the choice of a backend (kernels/rounding.py).

Replaces chains of torch operations on int32 temporaries. Why faster: a row's random bits are made in a buffer that
stays in the first cache, and the loops over a row are plain enough to become vector instructions. Invariants: a row
does not depend on the others or on the threads; every bit is the oracle's; outputs may be reused. Oracles: the
functions of kernels/rounding.py that end in _reference.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import jit
from kernels.cpu.threads import run

# Numbers below which a share of the rows is not worth a thread.
_LEAST = 1 << 16

# Integers of both signs would make numba compute in float64: everything that is mixed is uint64.
_ONE, _30, _27, _31 = np.uint64(1), np.uint64(30), np.uint64(27), np.uint64(31)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

_SIGN, _MAGNITUDE, _INFINITE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_QUIET, _MOST_BF16 = np.uint32(0x00400000), np.uint32(0x7F7FFFFF)
_8, _16, _23, _24 = np.uint32(8), np.uint32(16), np.uint32(23), np.uint32(24)

_FP8_MAX, _LEAST_SCALE, _65536 = np.float32(448.0), np.float32(2.0**-126), np.float32(65536.0)
_TWO_23, _MANTISSA = np.float32(1 << 23), np.uint32((1 << 23) - 1)
_LEAST_OCTAVE, _STEPS, _FP8_SIGN = np.uint32(121), np.uint32(257), np.uint32(0x80)
# A look-up beats assembling a float, because it needs no case for subnormal codes and NaN.
_FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()


def round_bf16(rows_UE: Tensor, ids_U: Tensor, key: int, out: Tensor | None = None) -> Tensor:
    """As kernels.rounding.round_bf16."""
    out = torch.empty(rows_UE.shape, dtype=torch.bfloat16) if out is None else out
    args = _patterns(rows_UE), _unsigned(ids_U), np.uint64(key % (1 << 64)), _halves(out)
    run(_round_bf16, len(rows_UE), *args, least=_least(rows_UE))
    return out


def split_bf16(rows_UE: Tensor, high: Tensor | None = None, low: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As kernels.rounding.split_bf16."""
    high = torch.empty(rows_UE.shape, dtype=torch.bfloat16) if high is None else high
    low = torch.empty(rows_UE.shape, dtype=torch.int16) if low is None else low
    run(_split, len(rows_UE), _patterns(rows_UE), _halves(high), _halves(low), least=_least(rows_UE))
    return high, low


def join_bf16(high_UE: Tensor, low_UE: Tensor, out: Tensor | None = None) -> Tensor:
    """As kernels.rounding.join_bf16."""
    out = torch.empty(high_UE.shape, dtype=torch.float32) if out is None else out
    args = _halves(high_UE.contiguous()), _halves(low_UE.contiguous()), out.numpy().view(np.uint32)
    run(_join, len(high_UE), *args, least=_least(high_UE))
    return out


def encode_fp8(
    rows_ULD: Tensor, ids_U: Tensor, key: int, codes: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As kernels.rounding.encode_fp8."""
    codes = torch.empty(rows_ULD.shape, dtype=torch.uint8) if codes is None else codes
    scale = torch.empty(rows_ULD.shape[:2], dtype=torch.float32) if scale is None else scale
    rows = rows_ULD.detach().contiguous().numpy()
    args = rows, rows.view(np.uint32), _unsigned(ids_U), np.uint64(key % (1 << 64)), codes.numpy(), scale.numpy()
    run(_encode_fp8, len(rows), *args, least=_least(rows_ULD))
    return codes, scale


def decode_fp8(codes_ULD: Tensor, scale_UL: Tensor, out: Tensor | None = None) -> Tensor:
    """As kernels.rounding.decode_fp8."""
    out = torch.empty(codes_ULD.shape, dtype=torch.float32) if out is None else out
    args = codes_ULD.contiguous().numpy(), scale_UL.contiguous().numpy(), _FP8, out.numpy()
    run(_decode_fp8, len(codes_ULD), *args, least=_least(codes_ULD))
    return out


def _patterns(rows: Tensor) -> np.ndarray:
    return rows.detach().contiguous().numpy().view(np.uint32)


def _unsigned(ids_U: Tensor) -> np.ndarray:
    return ids_U.contiguous().numpy().view(np.uint64)


def _halves(out: Tensor) -> np.ndarray:
    return out.view(torch.int16).numpy().view(np.uint16)


def _least(rows: Tensor) -> int:
    return _LEAST // max(1, rows[0].numel() if len(rows) else 1)


@jit
def _mix(counter):
    z = (counter + _ONE) * _GOLDEN
    z = (z ^ (z >> _30)) * _MIX_1
    z = (z ^ (z >> _27)) * _MIX_2
    return z ^ (z >> _31)


@jit
def _fill_words(first, words):
    for w in range(len(words)):
        words[w] = _mix(first + np.uint64(w))


@jit
def _round_bf16(begin, end, rows, ids, key, out):
    size = rows.shape[1]
    words = np.empty((size + 3) // 4, np.uint64)
    # Little-endian, as in the oracle: the lowest bits come first.
    bits = words.view(np.uint16)
    for u in range(begin, end):
        _fill_words(key + ids[u] * np.uint64(len(words)), words)
        row, to = rows[u], out[u]
        for e in range(size):
            magnitude = row[e] & _MAGNITUDE
            rounded = min(magnitude + np.uint32(bits[e]), _MOST_BF16)
            special = magnitude | (_QUIET if magnitude > _INFINITE else np.uint32(0))
            pattern = special if magnitude >= _INFINITE else rounded
            to[e] = np.uint16(((row[e] & _SIGN) | pattern) >> _16)


@jit
def _split(begin, end, rows, high, low):
    for u in range(begin, end):
        row, upper, lower = rows[u], high[u], low[u]
        for e in range(len(row)):
            upper[e] = np.uint16(row[e] >> _16)
            lower[e] = np.uint16(row[e])


@jit
def _join(begin, end, high, low, out):
    for u in range(begin, end):
        upper, lower, row = high[u], low[u], out[u]
        for e in range(len(row)):
            row[e] = (np.uint32(upper[e]) << _16) | np.uint32(lower[e])


@jit
def _encode_fp8(begin, end, rows, patterns, ids, key, codes, scales):
    lanes, dim = rows.shape[1:]
    words = np.empty((lanes * dim + 3) // 4, np.uint64)
    bits = words.view(np.uint16)
    for u in range(begin, end):
        _fill_words(key + ids[u] * np.uint64(len(words)), words)
        for lane in range(lanes):
            row, pattern, to = rows[u, lane], patterns[u, lane], codes[u, lane]
            drawn = bits[lane * dim : (lane + 1) * dim]
            # Patterns of magnitudes are ordered as the numbers are, with inf and then NaN on top.
            top = np.uint32(0)
            for d in range(dim):
                top = max(top, np.uint32(pattern[d] & _MAGNITUDE))
            if top == np.uint32(0) or top >= _INFINITE:
                scales[u, lane] = np.float32(0.0) if top == np.uint32(0) else np.float32(np.nan)
                to[:] = 0
                continue
            scale = max(np.uint32(top).view(np.float32) / _FP8_MAX, _LEAST_SCALE)
            scales[u, lane] = scale
            for d in range(dim):
                ratio = np.float32(abs(row[d]) / scale)
                octave = max(np.uint32(np.float32(ratio).view(np.uint32) >> _23), _LEAST_OCTAVE)
                unit = np.uint32((_STEPS - octave) << _23).view(np.float32)
                # In units of 2**-16 of the step between codes, from 0 at the octave's start.
                # Added to 2**23, a float32 rounds to the nearest integer, which then is the mantissa's bits.
                fixed = np.float32(ratio * unit * _65536 + _TWO_23).view(np.uint32) & _MANTISSA
                code = (octave - _LEAST_OCTAVE) * _8 + ((fixed + np.uint32(drawn[d])) >> _16)
                to[d] = np.uint8(code | ((pattern[d] >> _24) & _FP8_SIGN))


@jit
def _decode_fp8(begin, end, codes, scales, numbers, out):
    for u in range(begin, end):
        for lane in range(codes.shape[1]):
            scale, row, to = scales[u, lane], codes[u, lane], out[u, lane]
            for d in range(len(row)):
                to[d] = numbers[row[d]] * scale
