"""A table over several processes: rows come from their owners for a cycle, and gradients go back the same way.

Lives here: Exchange and what a cycle passes through on its way: Wanted, Route, Shared.
Not here: who owns a row (placement.py), rows and their rule (rows.py), the collectives and their order (mome/world.py),
and when each of these calls happens (mome/cycle.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.gather import gather_rows, scatter_rows_
from kernels.segments import unique_ids
from mome.table.rows import RowTable
from mome.table.working import Buffers, IdPlan, RawRows, WorkingSet
from mome.world import Pending, World

# Row ids that fit travel as int32.
_INT32 = 1 << 31


class Wanted(NamedTuple):
    """The rows a rank needs for a cycle. plan: them, and where each step's ids are; counts: how many each owner has.

    own_O, others_R: positions in plan.ids of this rank's own rows, and of the others, grouped by owner, ids ascending.
    """

    plan: IdPlan
    counts: list[int]
    own_O: Tensor
    others_R: Tensor


@dataclass
class Route:
    """The ways of a cycle's rows. give: how many this rank wants of each other one (what it will send gradients for);
    take: how many each other one wants of it. Once the ids are there: served, the distinct rows this rank reads for
    all; slots_M: where in them the wanted rows of rank 0, 1, ... are, its own among them at `own`."""

    wanted: Wanted
    give: list[int]
    take: list[int]
    asked: Pending | None = None
    served: IdPlan | None = None
    slots_M: Tensor | None = None
    own: slice = field(default_factory=lambda: slice(0, 0))


@dataclass
class Shared:
    """A cycle's rows on this rank. here: the working set that the model reads; owner: that of the rows this rank owns
    and anybody reads, which the row rule is applied to. In one process they are one."""

    here: WorkingSet
    owner: WorkingSet
    route: Route

    @property
    def rows(self) -> int:
        """Distinct rows that this rank owns and the cycle touches: their sum over the ranks is the cycle's."""
        return len(self.owner.ids)


class Exchange:
    """What one table's rows go through between the ranks. The order of calls for a cycle:

        want -> (counts, all tables in one) -> ask -> asked -> fetch -> serve -> arrive     rows come
        send -> merge                                                                      gradients go back
    `want`, `asked` and `fetch` call no collective: a thread may do them. In one process nothing is sent and nothing is
    copied. Gradients of a row are summed by its owner, those of rank 0 first, so that repeats give the same bits; the
    row rule is applied once a row.
    Every rank asks for a row once a cycle, however often it reads it, so a row that all W ranks read costs W - 1 times
    (id + row + gradient row). Keeping it on all ranks would cost an all-reduce of its gradient, 2 (W - 1) rows in a
    ring: only the ids less, 0.4 % for rows of 128 float32. Nor is there a number of rows read from which a dense
    exchange sends less, but for those ids. So neither exists here (records/plan has the counts).
    wire: the dtype in which rows and gradients travel, None: the one they are computed in. With bfloat16 a rank trains
    on others' rows rounded to 8 bits of mantissa, and its gradients are rounded before they are summed: an error of up
    to 1/256 of each number, to nearest, so unbiased only as far as roundings up and down cancel.
    """

    def __init__(self, table: RowTable, world: World, wire: torch.dtype | None = None) -> None:
        assert (table.placement.size, table.rank) == (world.size, world.rank)
        self.table, self.world = table, world
        self.wire = wire or table.dtype
        self._ids = torch.int32 if table.spec.rows <= _INT32 else torch.int64

    def want(self, steps: Sequence[Tensor]) -> Wanted:
        """What the ids of a cycle's steps on this rank need. Raises ValueError for an id out of range."""
        plan = self.table.plan(steps)
        order_U, counts = self.table.placement.split(plan.ids)
        if order_U is None:
            order_U = torch.arange(len(plan.ids), device=plan.ids.device)
        rank = self.world.rank
        before, own = sum(counts[:rank]), counts[rank]
        return Wanted(
            plan, counts, order_U[before : before + own], torch.cat((order_U[:before], order_U[before + own :]))
        )

    def give(self, wanted: Wanted) -> list[int]:
        """How many rows this rank wants of each other one."""
        return [0 if rank == self.world.rank else count for rank, count in enumerate(wanted.counts)]

    def ask(self, wanted: Wanted, take: list[int], name: str = "row ids") -> Route:
        """Send the ids to their owners. take: what `give` is on each of the others for this rank."""
        route = Route(wanted, self.give(wanted), take)
        if not self.world.alone:
            ids_R = wanted.plan.ids.index_select(0, wanted.others_R).to(self._ids)
            route.asked = self.world.all_to_all(name, ids_R, route.give, take)
        return route

    def asked(self, route: Route) -> None:
        """Plan what is served, once the ids of the others are there (route.asked was waited for)."""
        wanted, rank = route.wanted, self.world.rank
        if self.world.alone:
            route.served = IdPlan(wanted.plan.ids, [])
            return
        asked_A = route.asked.wait().to(torch.int64)
        before, own = sum(route.take[:rank]), len(wanted.own_O)
        own_O = wanted.plan.ids.index_select(0, wanted.own_O)
        served_S, route.slots_M = unique_ids(torch.cat((asked_A[:before], own_O, asked_A[before:])))
        route.served, route.own = IdPlan(served_S, []), slice(before, before + own)

    def fetch(self, route: Route, reuse: bool = True) -> RawRows:
        """The raw rows that are served; see RowTable.fetch."""
        return self.table.fetch(route.served, reuse=reuse)

    def serve(self, route: Route, raw: RawRows, name: str = "rows", *, grad: bool = True) -> tuple[WorkingSet, Pending]:
        """The served rows as they are worth now, and those that others asked for on their way to them."""
        owner = self.table.take(raw, grad=grad)
        if self.world.alone:
            return owner, Pending(lambda: None)
        rows_AE = gather_rows(owner.rows.detach().flatten(1), self._others(route))
        # What is only read comes as it is: a validation must not depend on who owns what.
        wire = self.wire if grad else self.table.dtype
        return owner, self.world.all_to_all(name, rows_AE.to(wire), route.take, route.give)

    def arrive(self, route: Route, owner: WorkingSet, coming: Pending) -> Shared:
        """The rows of the cycle on this rank, once those of the others have come."""
        plan = route.wanted.plan
        if self.world.alone:
            owner.steps = plan.slots
            return Shared(owner, owner, route)
        others_RE, grad = coming.wait(), owner.rows.requires_grad
        # What is only read is nobody's to give back.
        buffers = owner.buffers if grad else Buffers(owner.rows.device, reuse=False)
        lease = buffers.take((len(plan.ids), *owner.rows.shape[1:]), owner.rows.dtype)
        leaf_UE = lease.tensor.flatten(1)
        own_OE = gather_rows(owner.rows.detach().flatten(1), route.slots_M[route.own])
        scatter_rows_(leaf_UE, route.wanted.own_O, own_OE)
        scatter_rows_(leaf_UE, route.wanted.others_R, others_RE.to(leaf_UE.dtype))
        here = WorkingSet(
            plan.ids, lease.tensor.requires_grad_(grad), plan.slots, owner.event, object(), {}, owner.buffers, [lease]
        )
        return Shared(here, owner, route)

    def send(self, shared: Shared) -> Pending:
        """Gradients of others' rows on their way to the owners; a row without one sends zeros."""
        if self.world.alone:
            return Pending(lambda: None)
        grad_UE = _gradient(shared.here).flatten(1)
        remote_RE = gather_rows(grad_UE, shared.route.wanted.others_R).to(self.wire)
        return self.world.all_to_all("row gradients", remote_RE, shared.route.give, shared.route.take)

    def merge(self, shared: Shared, coming: Pending) -> None:
        """Sum the gradients of all ranks into the owner's set, once they have come; `here` is used up."""
        if self.world.alone:
            return
        route, others_AE = shared.route, coming.wait()
        grad_UE = _gradient(shared.here).flatten(1)
        own_OE = gather_rows(grad_UE, route.wanted.own_O)
        lease = shared.owner.lend((len(route.slots_M), *shared.owner.rows.shape[1:]))
        all_ME = lease.tensor.flatten(1)
        all_ME[: route.own.start] = others_AE[: route.own.start]
        all_ME[route.own] = own_OE
        all_ME[route.own.stop :] = others_AE[route.own.start :]
        shared.here.close()
        shared.owner.add_gradient(route.slots_M, lease.tensor)

    def pull(self, steps: Sequence[Tensor], *, grad: bool = False, name: str = "read") -> WorkingSet:
        """The rows of these ids for reading, from their owners: a collective, that every rank calls, ids or none.

        grad must be False: a cycle's rows come by the calls above.
        """
        assert not grad, "rows that train come by a cycle"
        wanted = self.want(steps)
        counts_W1 = torch.tensor(self.give(wanted)).unsqueeze(1)
        take = self.world.counts(f"{name} counts", counts_W1).wait().flatten().tolist()
        route = self.ask(wanted, take, f"{name} ids")
        self.asked(route)
        owner, coming = self.serve(route, self.fetch(route, reuse=False), f"{name} rows", grad=False)
        return self.arrive(route, owner, coming).here

    def _others(self, route: Route) -> Tensor:
        """Where in the served rows those of the other ranks are."""
        return torch.cat((route.slots_M[: route.own.start], route.slots_M[route.own.stop :]))


def _gradient(ws: WorkingSet) -> Tensor:
    """A set's gradient so far, zeros where nothing has been read."""
    if ws.rows.grad is None:
        ws.rows.grad = ws.lend(ws.rows.shape).tensor.zero_()
    return ws.rows.grad
