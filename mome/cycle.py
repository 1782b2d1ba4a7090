"""Cycles: steps that share one working set a table, its rows read, and asked of their owners, while those before train.

Lives here: Cycle; Cycles, which looks ahead in the data, begins a cycle or restores one, and ends it with a push.
Not here: where cycles end (optim/schedule.py), the threads (mome/table/prefetch.py), what an exchange does
(mome/table/exchange.py), training on a cycle (train_gpt.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.loader import Batch, Loader, take
from mome.config import RunConfig
from mome.run import Parts
from mome.table.exchange import Exchange, Route, Shared, Wanted
from mome.table.prefetch import Prefetcher
from mome.table.working import RawRows, WorkingSet
from mome.world import Pending, World


@dataclass
class Cycle:
    """Steps [start, end) that share one working set a table; slots, of each step in them, until it is trained on."""

    start: int
    end: int
    shared: dict[str, Shared]
    slots: dict[int, dict[str, Tensor]]
    coming: dict[str, Pending] = field(default_factory=dict)

    @property
    def sets(self) -> dict[str, WorkingSet]:
        """By table, what the model reads on this rank."""
        return {name: one.here for name, one in self.shared.items()}

    @property
    def rows(self) -> int:
        """Distinct rows that the cycle touches, of those that this rank owns."""
        return sum(one.rows for one in self.shared.values())


@dataclass
class _Ahead:
    """A cycle on its way: its first step, the steps in it, and by table what it wants and where that comes from."""

    start: int
    steps: list[int]
    wanted: dict[str, Wanted]
    counts: Pending | None = None
    routes: dict[str, Route] = field(default_factory=dict)
    read: bool = False
    served: dict[str, tuple[WorkingSet, Pending]] | None = None


class Cycles:
    """The cycles of a run, each prepared `config.prefetch` cycles ahead; that number changes no bit.

    Of several processes every one prepares the same cycles, each for its own micro-rows. With a look-ahead, the calls
    of a cycle in ORDER (mome/world.py): `ask_counts` before the forward pass of its first step, `ask_ids` after it,
    `read_asked` after the backward pass; at its end `send`, `merge`, `push` and `serve`.
    """

    def __init__(self, config: RunConfig, parts: Parts, loader: Loader, world: World) -> None:
        self.config, self.parts, self.loader, self.world = config, parts, loader, world
        self.cadence = config.make_cadence()
        # One more than is being read: what the newest cycle wants must be known when it is asked for.
        self.wanted = Prefetcher(self._want, config.prefetch and config.prefetch + 1)
        self.reading = Prefetcher(self._read, config.prefetch)
        self._planned = 0
        self._ahead: deque[_Ahead] = deque()

    @property
    def exchanges(self) -> dict[str, Exchange]:
        return self.parts.exchanges

    def begin(self, step: int) -> Cycle:
        """The cycle that starts at `step`, the loader's next. Raises DataExhausted when there is no batch for it, and
        what its preparation raised."""
        if not self._ahead and not self.wanted.pending:
            self._planned = step
        while len(self._ahead) < max(1, self.config.prefetch):
            one = self._next(step)
            if one is None:
                break
            self._ask_ids(self._ask_counts(one))
            self._read_asked(one)
        if not self._ahead:
            # Says so, by DataExhausted: a cycle has one batch at least.
            self.loader.next()
        self._serve()
        ahead = self._ahead.popleft()
        shared = {
            name: exchange.arrive(ahead.routes[name], *ahead.served[name]) for name, exchange in self.exchanges.items()
        }
        slots = {at: {name: one.here.slots(n) for name, one in shared.items()} for n, at in enumerate(ahead.steps)}
        return Cycle(*self.cadence.cycle(step), shared, slots)

    def ask_counts(self, step: int) -> None:
        """In the first step of a cycle, the loader's next: tell owners how many rows the newest cycle ahead wants."""
        if self.config.prefetch and (one := self._next(step)):
            self._ask_counts(one)

    def ask_ids(self) -> None:
        """And which ones."""
        for one in self._ahead:
            if one.counts is not None:
                self._ask_ids(one)

    def read_asked(self) -> None:
        """And let the thread read what was asked of this rank."""
        for one in self._ahead:
            if not one.read:
                self._read_asked(one)

    def restore(self, step: int, kept: Mapping[str, Mapping[str, Tensor]]) -> Cycle:
        """The cycle that a checkpoint interrupted before `step`. kept: ids [U] and grad [U, lanes, dim] by table, what
        this rank has to answer for: its own of before, or with another number of ranks those of some."""
        start, end = self.cadence.cycle(step)
        self._planned = end
        batches = self.loader.peek(end - step)
        ids = [self._row_ids(batch) for batch in batches]
        shared = {}
        for name, exchange in self.exchanges.items():
            device = exchange.table.device
            had_U, grad_ULD = (kept[name][key].to(device) for key in ("ids", "grad"))
            wanted = exchange.want([had_U, *(one[name] for one in ids)])
            ahead = _Ahead(start, [], {name: wanted})
            self._ask_ids(self._ask_counts(ahead))
            exchange.asked(ahead.routes[name])
            owner, coming = exchange.serve(ahead.routes[name], exchange.fetch(ahead.routes[name]))
            shared[name] = exchange.arrive(ahead.routes[name], owner, coming)
            if grad_ULD.shape != (len(had_U), *owner.rows.shape[1:]):
                raise ValueError(
                    f"table {name!r}: a saved gradient of shape {tuple(grad_ULD.shape)} for {len(had_U)} rows of "
                    f"{tuple(owner.rows.shape[1:])}: the checkpoint is of another cycle or table"
                )
            if len(had_U):
                shared[name].here.add_gradient(wanted.plan.slots[0], grad_ULD.to(owner.rows.dtype))
        slots = {
            batch.step: {name: one.here.slots(n + 1) for name, one in shared.items()} for n, batch in enumerate(batches)
        }
        return Cycle(start, end, shared, slots)

    def send(self, cycle: Cycle) -> None:
        """The gradients of the cycle start for the owners."""
        cycle.coming = {name: exchange.send(cycle.shared[name]) for name, exchange in self.exchanges.items()}

    def merge(self, cycle: Cycle) -> float:
        """The gradients of all ranks in the owners' sets, once they have come; the sum of their squares here."""
        for name, exchange in self.exchanges.items():
            exchange.merge(cycle.shared[name], cycle.coming[name])
        return sum(table.grad_square(cycle.shared[name].owner) for name, table in self.parts.tables.items())

    def square_so_far(self, cycle: Cycle) -> float:
        """In mid-cycle: the sum of the squares of this rank's gradients, not finite if one of them is not."""
        return sum(table.grad_square(cycle.shared[name].here) for name, table in self.parts.tables.items())

    def culprit(self, cycle: Cycle) -> str:
        """Which of this rank's rows has a gradient that is not finite, for a message; empty: none has."""
        for name, one in cycle.shared.items():
            found = self.parts.tables[name].not_finite(one.here if one.here.leaf is not None else one.owner)
            if found is not None:
                return f" (table {name}, row {found})"
        return ""

    def push(self, cycle: Cycle, lr_mul: float, square: float, columns: Mapping[str, Tensor]) -> None:
        """One event of the tables: the row rules applied to the rows of a cycle, which is used up.

        square: of the norm of the gradients of all tables, over distinct rows and all ranks, which is scaled down to
        config.row_clip. columns: see RowTable.push. Raises what RowTable.push raises; then the tables that come first
        may have been updated.
        """
        clip, norm = self.config.row_clip, math.sqrt(square)
        # A norm that is not finite is left to the push, which refuses the row.
        scale = min(1.0, clip / norm) if clip and 0 < norm < math.inf else 1.0
        for name, table in self.parts.tables.items():
            trained = getattr(self.config.table, name)
            beta2 = trained.event_beta2(cycle.end - cycle.start)
            owner = cycle.shared[name].owner
            table.push(owner, trained.lr * lr_mul, beta2, scale, columns_LD=columns.get(name))

    def serve(self) -> None:
        """Send the rows of the next cycle that others asked for, if one is ahead. Alone there is nothing to send, and
        what reading raised waits for the step that needs the rows."""
        if not self.world.alone:
            self._serve()

    def _serve(self) -> None:
        if not self._ahead or self._ahead[0].served is not None:
            return
        raw = self.reading.take()
        self._ahead[0].served = {
            name: exchange.serve(self._ahead[0].routes[name], raw[name]) for name, exchange in self.exchanges.items()
        }

    def close(self) -> None:
        """Forget what was looked ahead at, and end the threads."""
        self.wanted.close()
        self.reading.close()

    def _next(self, step: int) -> _Ahead | None:
        """The next cycle that was not asked for yet, `step` being the loader's next step; None: there is none."""
        while self.wanted.pending <= self.wanted.depth and self._planned < self.cadence.schedule.steps:
            _, end = self.cadence.cycle(self._planned)
            batches = self.loader.peek(end - step)[self._planned - step :]
            if not batches:
                break
            self.wanted.submit((self._planned, batches))
            self._planned = end
        if not self.wanted.pending:
            return None
        self._ahead.append(self.wanted.take())
        return self._ahead[-1]

    def _ask_counts(self, one: _Ahead) -> _Ahead:
        give_TW = [self.exchanges[name].give(wanted) for name, wanted in one.wanted.items()]
        counts_WT = torch.tensor(give_TW, dtype=torch.int64).view(len(give_TW), self.world.size).T.contiguous()
        one.counts = self.world.counts("row counts", counts_WT) if give_TW else Pending(lambda: counts_WT)
        return one

    def _ask_ids(self, one: _Ahead) -> _Ahead:
        take_TW, one.counts = one.counts.wait().T.tolist(), None
        for (name, wanted), take_W in zip(one.wanted.items(), take_TW, strict=True):
            one.routes[name] = self.exchanges[name].ask(wanted, take_W)
        return one

    def _read_asked(self, one: _Ahead) -> None:
        one.read = True
        for route in one.routes.values():
            if route.asked is not None:
                route.asked.wait()
        self.reading.submit(one.routes)

    def _want(self, item: tuple[int, Sequence[Batch]]) -> _Ahead:
        """What a cycle wants on this rank."""
        start, batches = item
        ids = [self._row_ids(batch) for batch in batches]
        wanted = {name: one.want([step[name] for step in ids]) for name, one in self.exchanges.items()}
        return _Ahead(start, [batch.step for batch in batches], wanted)

    def _read(self, routes: Mapping[str, Route]) -> dict[str, RawRows]:
        """The raw rows of a cycle that this rank serves."""
        for name, route in routes.items():
            self.exchanges[name].asked(route)
        return {name: self.exchanges[name].fetch(route) for name, route in routes.items()}

    def _row_ids(self, batch: Batch) -> dict[str, Tensor]:
        return self.parts.row_ids(take(batch, self.world.rank, self.world.size).tokens.to(self.world.device))
