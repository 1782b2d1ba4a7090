"""Which rows a list of ids names, and which positions name the same row: the oracles, and one radix sort.

Lives here: unique_ids (distinct ids and the slot of each lookup) and segments_of (lookups grouped by slot).
Not here: the sort (kernels/cpu/segments.py), sums over segments (kernels/gather.py), the bounds of ids (mome/table/).

Replaces torch.unique with its inverse, and a stable argsort. Why faster: an id and its position are sorted as one
integer, by counting. Invariants: the result is a function of the ids alone, so threads and machines change nothing; any
int64 id works; equal slots keep the order of their positions, which fixes the order of every sum made over them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels import backend


class Segments(NamedTuple):
    """The positions of N lookups grouped by slot, int64 on the device of the slots.

    order [N]: positions by slot, and by position within a slot; starts [S + 1]: segment s is order[starts[s]:
    starts[s + 1]], never empty; slots [S]: the slot of each segment, ascending, each once.
    """

    order: Tensor
    starts: Tensor
    slots: Tensor


def unique_ids_reference(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids [U] in ascending order, and for each of the N ids where it is among them. The oracle."""
    return torch.unique(ids_N, return_inverse=True)


def unique_ids(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """unique_ids_reference's two tensors, int64; ids: int64 [N], any values, any device.

    Raises ValueError for another dtype or shape.
    """
    _check(ids_N, "unique_ids")
    if not len(ids_N) or backend("segments", ids_N.device, _self_check) == "reference":
        return unique_ids_reference(ids_N)
    return _unique_ids(ids_N)


def segments_of_reference(slots_N: Tensor) -> Segments:
    """A stable sort of the slots and the runs in it. The oracle."""
    order_N = torch.argsort(slots_N, stable=True)
    slots_S, lengths_S = torch.unique_consecutive(slots_N.index_select(0, order_N), return_counts=True)
    return Segments(order_N, torch.cat((lengths_S.new_zeros(1), lengths_S.cumsum(0))), slots_S)


def segments_of(slots_N: Tensor, rows: int) -> Segments:
    """The positions of each slot; slots: int64 [N], each from 0 to rows - 1, any device.

    Raises ValueError for another dtype or shape, and on the CPU for a slot out of range.
    """
    _check(slots_N, "segments_of")
    if not len(slots_N) or backend("segments", slots_N.device, _self_check) == "reference":
        if len(slots_N) and not slots_N.is_cuda:
            _check_range(*(int(x) for x in slots_N.aminmax()), rows)
        return segments_of_reference(slots_N)
    return _segments_of(slots_N, rows)


def _unique_ids(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    from kernels.cpu import segments as cpu

    ids, slots_N = ids_N.contiguous().numpy(), torch.empty_like(ids_N, memory_format=torch.contiguous_format)
    buffers = np.empty((2, len(ids)), np.int64)
    low, high = cpu.span(ids)
    id_bits, bits = (high - low).bit_length(), (len(ids) - 1).bit_length()
    if id_bits + bits < 64:
        which = cpu.sorted_keys(ids, low, id_bits, bits, *buffers)
        unique = buffers[1 - which]
        count = cpu.distinct(buffers[which], low, bits, unique, slots_N.numpy())
    else:
        unique = buffers[0]
        count = cpu.distinct_of_order(ids, np.argsort(ids, kind="stable"), unique, slots_N.numpy())
    # A copy: a view would keep the whole buffer, and torch.save would write it.
    return torch.from_numpy(unique[:count].copy()), slots_N


def _segments_of(slots_N: Tensor, rows: int) -> Segments:
    from kernels.cpu import segments as cpu

    slots = slots_N.contiguous().numpy()
    low, high = cpu.span(slots)
    _check_range(low, high, rows)
    count = len(slots)
    id_bits, bits = (high - low).bit_length(), (count - 1).bit_length()
    if id_bits + bits > 63:
        return segments_of_reference(slots_N)
    buffers = np.empty((2, count), np.int64)
    which = cpu.sorted_keys(slots, low, id_bits, bits, *buffers)
    order, starts, distinct = np.empty(count, np.int64), np.empty(count + 1, np.int64), buffers[1 - which]
    found = cpu.segments(buffers[which], low, bits, order, starts, distinct)
    parts = (order, starts[: found + 1].copy(), distinct[:found].copy())
    return Segments(*(torch.from_numpy(part) for part in parts))


def _check(ids_N: Tensor, op: str) -> None:
    if ids_N.ndim != 1 or ids_N.dtype != torch.int64:
        raise ValueError(f"{op} of {list(ids_N.shape)} {ids_N.dtype}: give a list of int64")


def _check_range(low: int, high: int, rows: int) -> None:
    if low < 0 or high >= rows:
        raise ValueError(f"segments_of: slot {low if low < 0 else high} is outside 0 to {rows - 1}")


def _self_check() -> bool:
    ids_N = torch.tensor([5, 2, 5, -1, 1 << 40, 2, 5])
    (unique_U, slots_N), (expected_U, expected_N) = _unique_ids(ids_N), unique_ids_reference(ids_N)
    segments, expected = _segments_of(slots_N, 4), segments_of_reference(slots_N)
    pairs = [(unique_U, expected_U), (slots_N, expected_N), *zip(segments, expected)]
    return all(torch.equal(one, other) for one, other in pairs)
