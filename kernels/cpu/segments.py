"""Sorting ids and their positions on the CPU: a radix sort of packed keys, and what is read off the sorted keys.

Lives here: the span of ids, the sort, distinct values with their inverse, and segments.
Not here: the oracles and the choice of a way (kernels/segments.py).

Replaces torch.unique, torch.argsort and the bookkeeping after them. Why faster: a key (id - lowest) << bits | position
is one integer, and a few passes of counting over 11 binary digits each sort it, ties by position with no comparison at
all. Invariants: keys are distinct and not negative; nothing here depends on a number of threads. Oracle:
kernels/segments.py.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu import jit

# Measured best of 8 and 11: the counts of 2048 digits stay in the first cache.
DIGIT = 11


@jit
def span(ids_N):
    """Lowest and highest of at least one id."""
    low, high = ids_N[0], ids_N[0]
    for k in range(len(ids_N)):
        low = min(low, ids_N[k])
        high = max(high, ids_N[k])
    return low, high


@jit
def sorted_keys(ids_N, low, id_bits, bits, keys_N, spare_N):
    """Sort the keys into ascending order, with both buffers used up; in which of them they lie then, 0 or 1."""
    count = len(ids_N)
    for k in range(count):
        keys_N[k] = (ids_N[k] - low) << bits | k
    # The positions are in order already: only the digits of the id are left to sort by.
    passes = max(1, (id_bits + DIGIT - 1) // DIGIT)
    width = (id_bits + passes - 1) // passes
    mask = (1 << width) - 1
    ends = np.empty((1 << width) + 1, np.int64)
    for number in range(passes):
        shift = bits + number * width
        ends[:] = 0
        for k in range(count):
            ends[(keys_N[k] >> shift & mask) + 1] += 1
        for digit in range(mask):
            ends[digit + 1] += ends[digit]
        for k in range(count):
            digit = keys_N[k] >> shift & mask
            spare_N[ends[digit]] = keys_N[k]
            ends[digit] += 1
        keys_N, spare_N = spare_N, keys_N
    return passes % 2


@jit
def distinct(keys_N, low, bits, unique_N, slots_N):
    """How many ids there are; writes them, ascending, and for each position which one it has."""
    mask = (1 << bits) - 1
    last, unique = -1, -1
    for k in range(len(keys_N)):
        one = keys_N[k] >> bits
        if one != last:
            last = one
            unique += 1
            unique_N[unique] = one + low
        slots_N[keys_N[k] & mask] = unique
    return unique + 1


@jit
def distinct_of_order(ids_N, order_N, unique_N, slots_N):
    """The same for ids whose keys do not fit into one integer, from the order of a stable sort."""
    unique = -1
    for k in range(len(order_N)):
        position = order_N[k]
        if unique < 0 or ids_N[position] != unique_N[unique]:
            unique += 1
            unique_N[unique] = ids_N[position]
        slots_N[position] = unique
    return unique + 1


@jit
def segments(keys_N, low, bits, order_N, starts_M, slots_N):
    """How many segments there are; writes the positions in order, each segment's slot and start, and the last end."""
    mask = (1 << bits) - 1
    last, found = -1, 0
    for k in range(len(keys_N)):
        order_N[k] = keys_N[k] & mask
        one = keys_N[k] >> bits
        if one != last:
            last = one
            starts_M[found] = k
            slots_N[found] = one + low
            found += 1
    starts_M[found] = len(keys_N)
    return found
