"""The working set: the few rows of a cycle as a dense leaf, gathered into reused memory, its gradient summed in place.

Lives here: WorkingSet, what a table hands over on the way to one (IdPlan, RawRows), and the reused buffers behind them.
Not here: which rows a cycle has and what a push does with their gradient (rows.py).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.gather import gather_rows, segment_sum_
from kernels.segments import segments_of

# Room beyond what was asked for: the distinct rows of a cycle differ by a few per cent from the last one's.
_SPARE = 1.25
# Numbers below which a buffer is not worth weighing.
_SMALL = 4096


class Buffers:
    """Memory that is lent and given back: fresh pages cost the CPU more than what is written to them.

    Without reuse it lends fresh tensors, as on any device but the CPU, whose allocator keeps memory itself.
    """

    def __init__(self, device: torch.device, reuse: bool = True) -> None:
        self._reuse = reuse and device.type == "cpu"
        self._device = device
        # With their sizes, which are cheaper to look at than a tensor's.
        self._free: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        self._lock = threading.Lock()

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Lease:
        """A tensor of this shape, its numbers undefined."""
        count = math.prod(shape)
        if not self._reuse:
            return Lease(torch.empty(tuple(shape), dtype=dtype, device=self._device), None)
        with self._lock:
            free = self._free.setdefault(dtype, [])
            # Not one many times too large: it will be missed by who needs it.
            most, fits, short = max(4 * count, _SMALL), None, None
            for place, (size, _) in enumerate(free):
                if size < count:
                    if short is None or size > free[short][0]:
                        short = place
                elif size <= most and (fits is None or size < free[fits][0]):
                    fits = place
            # The smallest that fits; where none does, the largest below goes, or the list would only ever grow.
            if fits is not None:
                _, chosen = free.pop(fits)
            else:
                if short is not None:
                    free.pop(short)
                chosen = torch.empty(max(1, math.ceil(_SPARE * count)), dtype=dtype)
        # Not a view: autograd would track one, and refuse to let its base be written again.
        tensor = torch.empty(0, dtype=dtype).set_(chosen.untyped_storage(), 0, tuple(shape))
        return Lease(tensor, chosen)

    def give(self, lease: Lease) -> None:
        """Take a lease back; whoever still looks at its tensor will see it change."""
        if lease.memory is not None:
            with self._lock:
                self._free[lease.memory.dtype].append((lease.memory.numel(), lease.memory))
            lease.memory = None


@dataclass(eq=False)
class Lease:
    """A tensor and the memory behind it (None: its own, or given back)."""

    tensor: Tensor
    memory: Tensor | None


@dataclass(frozen=True)
class IdPlan:
    """Distinct rows of a cycle. ids: int64 [U], sorted; slots: for each step where its ids are in them, shaped so."""

    ids: Tensor
    slots: list[Tensor]


@dataclass
class RawRows:
    """What the stores held for a plan. planes: by name, [U, *tail], none once taken; event: the last one surely in
    them; age: stands for the table, from one load to the next."""

    plan: IdPlan
    planes: dict[str, Lease]
    event: int
    age: object


class _GatherRows(torch.autograd.Function):
    """rows[slots] into lent memory; the backward pass adds to the leaf's .grad itself, without a zero-filled tensor."""

    @staticmethod
    def forward(ctx: Any, rows_ULD: Tensor, slots_N: Tensor, ws: WorkingSet) -> Tensor:
        # Held by this node alone: a graph that is dropped takes it along.
        lease = ws.buffers.take((len(slots_N), *rows_ULD.shape[1:]), rows_ULD.dtype)
        out_NLD = lease.tensor
        gather_rows(rows_ULD.detach(), slots_N, out=out_NLD)
        # Shares the version with all that is made of the result, and is no part of the graph.
        lease.tensor = out_NLD.detach()
        ctx.ws, ctx.slots_N, ctx.lease = ws, slots_N, lease
        return out_NLD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NLD: Tensor) -> tuple[None, None, None]:
        ctx.ws.add_gradient(ctx.slots_N, grad_NLD)
        ctx.ws.give_back(ctx.lease)
        return None, None, None


@dataclass(eq=False)
class WorkingSet:
    """The rows of one cycle. Made by a table's pull or take, or from several owners' (exchange.py); used up by a push.

    ids:   int64 [U], sorted, each once.
    rows:  [U, lanes, dim], a leaf that autograd treats like any parameter; its .grad adds up over the cycle's steps.
    event: the table's event count when it was pulled.
    steps: for each step it was pulled for the slots of its ids.
    state: optimizer state of the rows as dense training holds it now; the raw last events.
    """

    ids: Tensor
    leaf: Tensor | None
    steps: list[Tensor]
    event: int
    ticket: object
    state: dict[str, Tensor] = field(default_factory=dict)
    buffers: Buffers | None = None
    leases: list[Lease] = field(default_factory=list)
    _power: tuple[Tensor, Tensor, int] | None = None

    @property
    def rows(self) -> Tensor:
        """The leaf. Raises ValueError once the set has been pushed: its memory then belongs to later ones."""
        if self.leaf is None:
            raise ValueError(f"the working set of event {self.event} was pushed and is used up: pull again")
        return self.leaf

    def slots(self, step: int) -> Tensor:
        """Where in `rows` the ids of a step of the pulled cycle are: int64, shaped like that step's ids."""
        return self.steps[step]

    def slots_of(self, ids: Tensor) -> Tensor:
        """The same for any ids: int64, shaped like ids. Raises ValueError for an id that is not in the working set."""
        ids = ids.to(self.ids.device, torch.int64).contiguous()
        slots = torch.searchsorted(self.ids, ids)
        if ids.numel():
            found = slots < len(self.ids)
            if bool(found.all()):
                found = self.ids.index_select(0, slots.flatten()).view_as(ids) == ids
            if not bool(found.all()):
                wrong = int(ids[~found][0])
                raise ValueError(f"row id {wrong} is not among the {len(self.ids)} of this working set: pull it first")
        return slots

    def gather(self, step: int) -> Tensor:
        """The rows that a step reads: [*shape of its ids, lanes, dim], as gather_slots makes them."""
        return self.gather_slots(self.steps[step])

    def gather_slots(self, slots: Tensor) -> Tensor:
        """The rows at these slots: [*slots.shape, lanes, dim], differentiable once, in `rows` by way of .backward().

        The backward pass sums the gradient of equal slots in the order of their positions straight into rows.grad, so
        torch.autograd.grad does not see it. On the CPU the result's memory is lent: it is valid until its backward pass
        has run, or the set is pushed; going through a retained graph again is an error, never a wrong number.
        """
        rows_ULD, shape = self.rows, (*slots.shape, *self.rows.shape[1:])
        slots_N = slots.flatten()
        if self.buffers is None or not (rows_ULD.requires_grad and torch.is_grad_enabled()):
            return gather_rows(rows_ULD.detach(), slots_N).view(shape)
        return _GatherRows.apply(rows_ULD, slots_N, self).view(shape)

    def add_gradient(self, slots_N: Tensor, grad_NLD: Tensor) -> None:
        """rows.grad[slots_N] += grad_NLD, duplicates summed in the order of their positions."""
        rows_ULD, count = self.rows, len(self.ids)
        segments = segments_of(slots_N, count)
        size = rows_ULD.shape[1] * rows_ULD.shape[2]
        grad_NE = grad_NLD.reshape(len(slots_N), size).contiguous()
        fresh = rows_ULD.grad is None
        if fresh:
            sums_ULD = self.lend(rows_ULD.shape).tensor
            power_UL = self.lend(rows_ULD.shape[:2]).tensor
            if len(segments.slots) < count:
                sums_ULD.zero_()
                power_UL.zero_()
            rows_ULD.grad = sums_ULD
        else:
            power_UL = self.power
        segment_sum_(rows_ULD.grad.view(count, size), grad_NE, segments, add=not fresh, power_UL=power_UL)
        if power_UL is not None:
            self._power = (power_UL, rows_ULD.grad, rows_ULD.grad._version)

    @property
    def power(self) -> Tensor | None:
        """Mean square of each lane of rows.grad, [U, lanes], as it came with the sums; None where it must be computed:
        somebody else made or changed the gradient."""
        if self._power is None:
            return None
        power_UL, grad_ULD, version = self._power
        return power_UL if self.rows.grad is grad_ULD and grad_ULD._version == version else None

    def lend(self, shape: Sequence[int]) -> Lease:
        """Memory of the rows' dtype for as long as this set lives."""
        lease = self.buffers.take(shape, self.rows.dtype)
        self.leases.append(lease)
        return lease

    def give_back(self, lease: Lease) -> None:
        """Return what was lent to a gather; its result, where something still looks at it, is marked as changed."""
        if lease.memory is not None:
            torch.autograd.graph.increment_version(lease.tensor)
            self.buffers.give(lease)

    def close(self) -> None:
        """Return all memory but that of gathers whose backward pass has not run: the set is used up."""
        for tensor in (self.leaf, self.leaf.grad):
            if tensor is not None:
                torch.autograd.graph.increment_version(tensor)
        self.leaf = self._power = None
        self.state = {}
        for lease in self.leases:
            self.buffers.give(lease)
        self.leases = []
