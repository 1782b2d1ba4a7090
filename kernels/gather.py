"""Rows of a table by id, forth and back, and sums of gradient rows: the oracles, and copies that ask for rows early.

Lives here: gather_rows, scatter_rows_ and segment_sum_, each below its oracle.
Not here: the loops (kernels/cpu/gather.py), which ids and segments there are (kernels/segments.py), autograd.

Replaces index_select, index_copy_ and index_add_. Why faster: the latency of memory is hidden, and threads share the
lookups of a working set evenly even where one id makes up a sixth of them. Invariants: rows are copied bit for bit in
any dtype; a sum adds its rows in the order of their positions, whatever the number of threads; nothing here is seen by
autograd. Origin of the sums over sorted segments: the deduplicated updates of FBGEMM's table-batched embeddings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kernels import backend
from kernels.row_update import mean_square
from kernels.segments import Segments

# Bytes that a share has at least: less is moved in the time that another thread takes to wake. And bytes that are
# moved in the time that a row costs beyond its own bytes.
SHARE = 1 << 20
ROW = 64
# Bytes of a row; below, torch is faster, which has no views to make. Measured with 4 to 16 bytes.
NARROWEST = 16
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def gather_rows_reference(rows: Tensor, ids_N: Tensor) -> Tensor:
    """rows[ids]. The oracle."""
    return rows.detach()[ids_N]


def gather_rows(rows: Tensor, ids_N: Tensor, out: Tensor | None = None) -> Tensor:
    """The rows with these ids, [N, *tail], bit for bit and without a gradient; into `out` where that is given.

    rows: [R, *tail] of any dtype; ids: int64 [N], any order, repeats allowed. Raises ValueError for another dtype of
    ids, an `out` of another shape or dtype, and on the CPU for an id outside 0 to R - 1.
    """
    _check_ids(ids_N, "gather_rows")
    rows = rows.detach()
    shape = (len(ids_N), *rows.shape[1:])
    if out is None:
        out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    _check_alike(out, shape, rows.dtype, "gather_rows into")
    if not out.numel():
        return out
    if _fast(rows, out):
        _copy("gather", rows, ids_N, out.detach())
    else:
        with _out_of_range("gather", ids_N, len(rows)):
            torch.index_select(rows, 0, ids_N, out=out.detach())
    return out


def scatter_rows_reference(rows: Tensor, ids_U: Tensor, values: Tensor) -> Tensor:
    """A copy of rows with rows[ids] = values. The oracle."""
    rows = rows.detach().clone()
    rows[ids_U] = values
    return rows


def scatter_rows_(rows: Tensor, ids_U: Tensor, values: Tensor) -> None:
    """rows[ids] = values in place, bit for bit; other rows are not touched.

    rows: [R, *tail]; ids: int64 [U], each once (else one of the values is kept, no matter which); values: [U, *tail] of
    the dtype of rows. Raises ValueError for another shape or dtype, and on the CPU for an id outside 0 to R - 1; rows
    may be written partly then.
    """
    _check_ids(ids_U, "scatter_rows_")
    rows, values = rows.detach(), values.detach()
    _check_alike(values, (len(ids_U), *rows.shape[1:]), rows.dtype, "scatter_rows_ of")
    if not values.numel():
        return
    if _fast(rows, values):
        _copy("scatter", rows, ids_U, values)
        return
    if rows.dtype.itemsize == 1:
        # index_copy_ knows no float8.
        rows, values = rows.view(torch.uint8), values.view(torch.uint8)
    with _out_of_range("scatter", ids_U, len(rows)):
        rows.index_copy_(0, ids_U, values)


def segment_sum_reference(sums_UE: Tensor, grad_NE: Tensor, segments: Segments, add: bool) -> Tensor:
    """A copy of sums with sums[slot] = (add: +=) the sum of the segment's rows of grad. The oracle."""
    sums_UE = sums_UE.detach().clone()
    _segment_sum_in_torch(sums_UE, grad_NE.detach(), segments, add)
    return sums_UE


def _segment_sum_in_torch(sums_UE: Tensor, grad_NE: Tensor, segments: Segments, add: bool) -> None:
    """Never index_add_ of the rows of grad: on a GPU the order of its additions differs from run to run."""
    wide = torch.promote_types(sums_UE.dtype, torch.float32)
    ordered_NE, lengths_S = grad_NE.index_select(0, segments.order).to(wide), segments.starts.diff()
    total_SE = torch.segment_reduce(ordered_NE, "sum", lengths=lengths_S, axis=0, unsafe=True)
    if add:
        total_SE += sums_UE.index_select(0, segments.slots)
    sums_UE.index_copy_(0, segments.slots, total_SE.to(sums_UE.dtype))


def segment_sum_(
    sums_UE: Tensor, grad_NE: Tensor, segments: Segments, *, add: bool, power_UL: Tensor | None = None
) -> None:  # fmt: skip
    """sums[slot] = the sum of grad over the positions of a segment, or with add: += it; other rows are not touched.

    power: [U, L] of the dtype of sums, L a divisor of E: the mean of the squares of each lane (E / L numbers) of the
    rows that were summed, the bits of kernels.row_update.mean_square.

    sums: [U, E]; grad: [N, E] of its dtype, only read; segments: segments_of(the N slots, U). Sums are made
    position after position, in float32 or more. Raises ValueError for shapes, dtypes or segments that do not fit.
    """
    sums_UE, grad_NE = sums_UE.detach(), grad_NE.detach()
    _check_alike(grad_NE, (len(segments.order), *sums_UE.shape[1:]), sums_UE.dtype, "segment_sum_ of")
    if sums_UE.ndim != 2:
        raise ValueError(f"segment_sum_ into {list(sums_UE.shape)}: give rows of numbers, [U, E]")
    if power_UL is not None:
        lanes = power_UL.shape[-1]
        _check_alike(power_UL, (len(sums_UE), lanes), sums_UE.dtype, "segment_sum_ with power")
        if not lanes or sums_UE.shape[1] % lanes:
            raise ValueError(f"segment_sum_ with power of {lanes} lanes: rows of {sums_UE.shape[1]} do not split so")
    if not grad_NE.numel():
        return
    if not sums_UE.is_cuda and (highest := int(segments.slots[-1])) >= len(sums_UE):
        raise ValueError(f"segment_sum_: slot {highest} is outside 0 to {len(sums_UE) - 1}")
    if sums_UE.dtype in (torch.float32, torch.float64) and _fast(sums_UE, grad_NE, narrowest=0):
        _segment_sum(sums_UE, grad_NE, segments, add, power_UL)
        return
    _segment_sum_in_torch(sums_UE, grad_NE, segments, add)
    if power_UL is not None:
        sums_SLD = sums_UE.index_select(0, segments.slots).unflatten(1, (lanes, -1))
        power_UL.index_copy_(0, segments.slots, mean_square(sums_SLD))


def _fast(rows: Tensor, others: Tensor, narrowest: int = NARROWEST) -> bool:
    if backend("gather", rows.device, _self_check) == "reference":
        return False
    return rows.is_contiguous() and others.is_contiguous() and others.nbytes >= narrowest * len(others)


def _copy(way: str, rows: Tensor, ids_N: Tensor, others: Tensor) -> None:
    """The kernel of that name over bit patterns as wide as the rows allow."""
    from kernels.cpu import gather as cpu
    from kernels.cpu import threads

    width, length = others.numel() // len(others), others.nbytes // len(others)
    places = length | rows.data_ptr() | others.data_ptr()
    # A view as wider words also asks that the storage's own beginning be so far away.
    places |= (rows.storage_offset() | others.storage_offset()) * rows.itemsize
    word = WORDS[min(8, places & -places)]
    ids = ids_N.contiguous().numpy()
    table, block = (one.view(len(one), width).view(word).numpy() for one in (rows, others))
    wrong = max(threads.run(getattr(cpu, way), len(ids), table, ids, block, least=SHARE // (length + ROW)))
    if wrong >= 0:
        raise ValueError(f"{way}: row id {ids[wrong]} is outside 0 to {len(rows) - 1}")


def _segment_sum(
    sums_UE: Tensor, grad_NE: Tensor, segments: Segments, add: bool, power_UL: Tensor | None = None
) -> None:  # fmt: skip
    from kernels.cpu import gather as cpu
    from kernels.cpu import threads

    order, starts, slots = (part.numpy() for part in segments)
    sums, grad = sums_UE.numpy(), grad_NE.numpy()
    # Lookups are read and sums are written: both are counted, so that one long segment does not make a long share.
    work = len(order) + len(slots)
    shares = threads.share_count(work, least=SHARE // (grad_NE.nbytes // len(grad_NE) + ROW))
    goals = (work * share // shares for share in range(shares + 1))
    bounds = [bisect_left(range(len(slots)), goal, key=lambda s: int(starts[s]) + s) for goal in goals]
    power = sums[:0] if power_UL is None else power_UL.numpy()
    threads.run_shares(cpu.segment_sum, bounds, sums, grad, order, starts, slots, add, power)


def _check_ids(ids_N: Tensor, op: str) -> None:
    if ids_N.ndim != 1 or ids_N.dtype != torch.int64:
        raise ValueError(f"{op} with ids {list(ids_N.shape)} {ids_N.dtype}: give a list of int64")


def _check_alike(given: Tensor, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> None:
    if given.shape != shape or given.dtype != dtype:
        raise ValueError(f"{what} {list(given.shape)} {given.dtype}: give {list(shape)} {dtype}")


@contextmanager
def _out_of_range(way: str, ids_N: Tensor, rows: int) -> Iterator[None]:
    """torch's own complaint of an id on the CPU names no id."""
    try:
        yield
    except IndexError:
        wrong = ids_N[(ids_N < 0) | (ids_N >= rows)][0]
        raise ValueError(f"{way}: row id {int(wrong)} is outside 0 to {rows - 1}") from None


def _self_check() -> bool:
    rows_RE = torch.arange(15.0).view(5, 3)
    ids_N, slots_U = torch.tensor([4, 0, 4, 1]), torch.tensor([3, 1])
    out_NE = torch.full((4, 3), torch.nan)
    _copy("gather", rows_RE, ids_N, out_NE)
    changed_RE = rows_RE.clone()
    _copy("scatter", changed_RE, slots_U, out_NE[:2])
    segments = Segments(torch.tensor([1, 3, 0, 2]), torch.tensor([0, 1, 2, 4]), torch.tensor([0, 1, 4]))
    sums_RE = rows_RE.clone()
    power_RL = torch.zeros(5, 1)
    _segment_sum(sums_RE, out_NE, segments, add=True, power_UL=power_RL)
    expected_RL = sums_RE.square().mean(dim=1, keepdim=True).index_fill_(0, torch.tensor([2, 3]), 0.0)
    pairs = [
        (out_NE, gather_rows_reference(rows_RE, ids_N)),
        (changed_RE, scatter_rows_reference(rows_RE, slots_U, out_NE[:2])),
        (sums_RE, segment_sum_reference(rows_RE, out_NE, segments, add=True)),
    ]
    return all(torch.equal(one, other) for one, other in pairs) and torch.allclose(power_RL, expected_RL)
