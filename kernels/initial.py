"""Counters into bits, and the numbers of rows before training: a function of (seed, row, element) alone.

Lives here: splitmix64, the mixer behind every counter-based random number; the oracle of initial values, and the op.
Not here: what a table asks for (mome/table/rows.py), and the bits that round a row (kernels/rounding.py).

Replaces a random stream, whose numbers depend on who drew before. Why faster: rows are made when they are first read,
in one pass and without int64 temporaries. Invariants: any subset of rows equals the same rows of the whole, the oracle
and numba agree in every bit. Oracle: initial_reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import backend

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

# Numbers the oracle mixes at once: the int64 counters and their temporaries stay in the cache of a core.
_CHUNK = 1 << 16


def splitmix64(counter: Tensor) -> Tensor:
    """64 mixed bits for each counter: int64 in, int64 out (two's complement of the unsigned value), any shape.

    The n-th output of Steele, Lea and Flood's SplitMix64 (OOPSLA 2014) seeded with 0 is splitmix64(n - 1).
    """
    z = counter + 1
    z *= _GOLDEN
    # >> is arithmetic on int64: the mask clears the copies of the sign bit.
    z ^= (z >> 30).bitwise_and_((1 << 34) - 1)
    z *= _MIX_1
    z ^= (z >> 27).bitwise_and_((1 << 37) - 1)
    z *= _MIX_2
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def mixed(value: int) -> int:
    """splitmix64 of one integer of any size, modulo 2**64: in -2**63 .. 2**63 - 1, as an int64 tensor holds it."""
    return int(splitmix64(torch.tensor(_signed64(value))))


def initial_reference(ids_U: Tensor, size: int, seed: int, half_width: float, dtype: torch.dtype) -> Tensor:
    """initial_values by torch on any device. The oracle."""
    out_UE = torch.empty(len(ids_U), size, dtype=dtype, device=ids_U.device)
    element_E = torch.arange(size, device=ids_U.device) + mixed(seed)
    rows = max(1, _CHUNK // max(1, size))
    for part_U, into_UE in zip(ids_U.split(rows), out_UE.split(rows)):
        bits_UE = splitmix64(part_U[:, None] * size + element_E)
        # 24 bits u become the odd number 2u + 1 - 2**24, which float32 holds exactly.
        odd_UE = (bits_UE >> 40).bitwise_and_((1 << 24) - 1).mul_(2).sub_((1 << 24) - 1)
        torch.mul(odd_UE.to(dtype), half_width * 2.0**-24, out=into_UE)
    return out_UE


def initial_values(ids_U: Tensor, size: int, seed: int, half_width: float, dtype: torch.dtype) -> Tensor:
    """The `size` numbers of each of these rows before training: [U, size] on the device of ids_U.

    ids_U: int64, below 2**63 / size, duplicates allowed. seed: any integer, modulo 2**64. dtype: float32 or float64.
    Uniform in [-half_width, half_width], symmetric about 0, in steps of half_width * 2**-23; all zero for 0.0. Number
    (row, element) comes from the upper 24 bits of splitmix64(splitmix64(seed) + row * size + element), so float32
    equals float64 to rounding.
    """
    assert dtype in (torch.float32, torch.float64), f"initial values of {dtype}"
    if half_width == 0.0:
        return torch.zeros(len(ids_U), size, dtype=dtype, device=ids_U.device)
    if backend("initial_values", ids_U.device, _check) == "reference":
        return initial_reference(ids_U, size, seed, half_width, dtype)
    from kernels.cpu.initial import initial_values as fast

    return fast(ids_U, size, mixed(seed), half_width, dtype)


def _check() -> bool:
    ids_U = torch.tensor([0, 3, (1 << 40) + 1])
    cases = [(ids_U, 5, -7, 0.3, dtype) for dtype in (torch.float32, torch.float64)]
    return all(torch.equal(initial_values(*case), initial_reference(*case)) for case in cases)


def _signed64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
