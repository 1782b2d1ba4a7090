"""Copies of table rows and sums of gradient rows on the CPU.

Lives here: gather and scatter of rows as bit patterns, and sums over segments.
Not here: the oracles, checks of shapes and how rows are shared out (kernels/gather.py).

Replaces torch.index_select, index_copy_ and index_add_. Why faster: the rows of the next lookups are on their way while
one is copied, which hides the latency of memory that a table larger than the caches has. Invariants: a row is copied
bit for bit; a segment is summed by one thread in the order of its positions. Oracle: kernels/gather.py.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu import jit
from kernels.cpu.intrinsics import copy_row, mean_of_squares, prefetch

# Lookups ahead, and bytes of a row; measured best of 2 to 16 lookups, and of 256 bytes to whole rows of 6 KB.
AHEAD = 8
MOST = 1024
LINE = 64
# Bytes of rows that are copied as one block.
BLOCK = 256


@jit
def _reach(rows_RB):
    """Columns from one cache line to the next, and how many of a row are asked for early: none of a single line."""
    width, line = rows_RB.shape[1], LINE // rows_RB.itemsize
    return line, min(width, MOST // rows_RB.itemsize) if width > line else 0


@jit
def gather(begin, end, rows_RB, ids_N, out_NB):
    """out[i] = rows[ids[i]]; the first i whose id is out of range, which ends it, or -1."""
    rows, width = rows_RB.shape
    step, most = _reach(rows_RB)
    block = width * rows_RB.itemsize <= BLOCK
    for i in range(begin, end):
        row = ids_N[i]
        if row < 0 or row >= rows:
            return i
        if i + AHEAD < end and 0 <= ids_N[i + AHEAD] < rows:
            for j in range(0, most, step):
                prefetch(rows_RB, ids_N[i + AHEAD], j)
        if block:
            copy_row(out_NB, i, rows_RB, row)
        else:
            for j in range(width):
                out_NB[i, j] = rows_RB[row, j]
    return -1


@jit
def scatter(begin, end, rows_RB, ids_U, values_UB):
    """rows[ids[i]] = values[i]; the first i whose id is out of range, which ends it, or -1."""
    rows, width = rows_RB.shape
    step, most = _reach(rows_RB)
    block = width * rows_RB.itemsize <= BLOCK
    for i in range(begin, end):
        row = ids_U[i]
        if row < 0 or row >= rows:
            return i
        if i + AHEAD < end and 0 <= ids_U[i + AHEAD] < rows:
            for j in range(0, most, step):
                prefetch(rows_RB, ids_U[i + AHEAD], j)
        if block:
            copy_row(rows_RB, row, values_UB, i)
        else:
            for j in range(width):
                rows_RB[row, j] = values_UB[i, j]
    return -1


@jit
def segment_sum(begin, end, sums_UE, grad_NE, order_N, starts_M, slots_S, add, power_UL):
    """sums[slots[s]] = the sum of grad[order[k]] over segment s, or += it; power (if it has rows): their mean squares.

    A row just summed is in the first cache: its squares cost no second journey.
    """
    count, width = grad_NE.shape
    lanes = power_UL.shape[1] if len(power_UL) else 0
    dim = width // max(1, lanes)
    one = sums_UE.dtype.type(1)
    step, most = _reach(grad_NE)
    total_E = np.empty(width, sums_UE.dtype)
    for s in range(begin, end):
        slot, first, last = slots_S[s], starts_M[s], starts_M[s + 1]
        # Most ids of a step occur once: their row takes no detour. One loop for both cases is a half slower.
        if last == first + 1:
            if first + AHEAD < count:
                for j in range(0, most, step):
                    prefetch(grad_NE, order_N[first + AHEAD], j)
            row = order_N[first]
            if add:
                for j in range(width):
                    sums_UE[slot, j] += grad_NE[row, j]
            else:
                for j in range(width):
                    sums_UE[slot, j] = grad_NE[row, j]
            for lane in range(lanes):
                power_UL[slot, lane] = mean_of_squares(sums_UE, slot, lane * dim, dim, one)
            continue
        total_E[:] = 0
        for k in range(first, last):
            if k + AHEAD < count:
                for j in range(0, most, step):
                    prefetch(grad_NE, order_N[k + AHEAD], j)
            row = order_N[k]
            for j in range(width):
                total_E[j] += grad_NE[row, j]
        if add:
            for j in range(width):
                sums_UE[slot, j] += total_E[j]
        else:
            for j in range(width):
                sums_UE[slot, j] = total_E[j]
        for lane in range(lanes):
            power_UL[slot, lane] = mean_of_squares(sums_UE, slot, lane * dim, dim, one)
