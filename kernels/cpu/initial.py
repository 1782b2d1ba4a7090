"""Initial values of rows on the CPU, in one pass.

Lives here: the numba kernel of initial_values and its call on tensors.
Not here: the formula, the mixed seed and the choice of a backend (kernels/initial.py).

Replaces a chain of torch operations on int64 temporaries. Why faster: a number is mixed, scaled and stored in
registers. Invariants: a row does not depend on the others or on the threads; every bit is the oracle's. Oracle:
kernels.initial.initial_reference.
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
_40, _BITS_24 = np.uint64(40), np.int32((1 << 24) - 1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def initial_values(ids_U: Tensor, size: int, key: int, half_width: float, dtype: torch.dtype) -> Tensor:
    """As kernels.initial.initial_values, with key = splitmix64(seed)."""
    out_UE = torch.empty(len(ids_U), size, dtype=dtype)
    out = out_UE.numpy()
    step = out.dtype.type(half_width * 2.0**-24)
    ids = ids_U.contiguous().numpy().view(np.uint64)
    run(_fill, len(ids), ids, np.uint64(key % (1 << 64)), step, out, least=_LEAST // max(1, size))
    return out_UE


@jit
def _mix(counter):
    z = (counter + _ONE) * _GOLDEN
    z = (z ^ (z >> _30)) * _MIX_1
    z = (z ^ (z >> _27)) * _MIX_2
    return z ^ (z >> _31)


@jit
def _fill(begin, end, ids, key, step, out):
    size = out.shape[1]
    for u in range(begin, end):
        first = key + ids[u] * np.uint64(size)
        row = out[u]
        for e in range(size):
            # Stored first: the product is then of the row's own type, as in the oracle.
            row[e] = np.int32(2) * np.int32(_mix(first + np.uint64(e)) >> _40) - _BITS_24
            row[e] *= step
