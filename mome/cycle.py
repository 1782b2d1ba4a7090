"""Cycles: steps that share one working set a table, its rows read while the cycles before train.

Lives here: Cycle, and Cycles, which looks ahead in the data, begins a cycle or restores one, and pushes it.
Not here: where cycles end (optim/schedule.py), the thread (mome/table/prefetch.py), training on a cycle (train_gpt.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from data.loader import Batch, Loader
from mome.config import RunConfig
from mome.run import Parts
from mome.table.prefetch import Prefetcher
from mome.table.working import RawRows, WorkingSet


@dataclass
class Cycle:
    """Steps [start, end) that share one working set a table; slots, of each step in them, until it is trained on."""

    start: int
    end: int
    sets: dict[str, WorkingSet]
    slots: dict[int, dict[str, Tensor]]

    @property
    def rows(self) -> int:
        """Distinct rows that the cycle touches."""
        return sum(len(one.ids) for one in self.sets.values())


class Cycles:
    """The cycles of a run, each prepared `config.prefetch` cycles ahead; that number changes no bit."""

    def __init__(self, config: RunConfig, parts: Parts, loader: Loader, device: torch.device | str = "cpu") -> None:
        self.config, self.parts, self.loader, self.device = config, parts, loader, device
        self.cadence = config.make_cadence()
        self.ahead = Prefetcher(self._fetch, config.prefetch)
        self._asked = 0

    def begin(self, step: int) -> Cycle:
        """The cycle that starts at `step`, the loader's next. Raises DataExhausted when there is no batch for it, and
        what its preparation raised."""
        self._look_ahead(step)
        if not self.ahead.pending:
            # Says so, by DataExhausted: a cycle has one batch at least.
            self.loader.next()
        steps, raw = self.ahead.take()
        sets = {name: self.parts.tables[name].take(one) for name, one in raw.items()}
        slots = {at: {name: one.slots(n) for name, one in sets.items()} for n, at in enumerate(steps)}
        return Cycle(*self.cadence.cycle(step), sets, slots)

    def restore(self, step: int, kept: Mapping[str, Mapping[str, Tensor]]) -> Cycle:
        """The cycle that a checkpoint interrupted before `step`. kept: ids [U] and grad [U, lanes, dim] by table."""
        start, end = self.cadence.cycle(step)
        sets = {
            name: table.restore(*(kept[name][key].to(self.device) for key in ("ids", "grad")))
            for name, table in self.parts.tables.items()
        }
        slots = {}
        for batch in self.loader.peek(end - step):
            ids = self._row_ids(batch)
            slots[batch.step] = {name: one.slots_of(ids[name]) for name, one in sets.items()}
        return Cycle(start, end, sets, slots)

    def push(self, cycle: Cycle, lr_mul: float) -> None:
        """One event of the tables: the row rules applied to the rows of a cycle, which is used up.

        The norm of the gradients of all tables, over distinct rows, is scaled down to config.row_clip.
        Raises what RowTable.push raises; then the tables that come first may have been updated.
        """
        scale, clip = 1.0, self.config.row_clip
        if clip:
            norm = math.sqrt(sum(table.grad_square(cycle.sets[name]) for name, table in self.parts.tables.items()))
            # A norm that is not finite is left to the push, which refuses the row.
            scale = min(1.0, clip / norm) if 0 < norm < math.inf else 1.0
        for name, table in self.parts.tables.items():
            trained = getattr(self.config.table, name)
            beta2 = trained.event_beta2(cycle.end - cycle.start)
            table.push(cycle.sets[name], lr=trained.lr * lr_mul, beta2=beta2, scale=scale)

    def close(self) -> None:
        """Forget what was looked ahead at, and end the thread."""
        self.ahead.close()

    def _look_ahead(self, step: int) -> None:
        """Ask for the cycle that starts at `step` and for those within the depth after it, as far as there is data."""
        if not self.ahead.pending:
            self._asked = step
        while self.ahead.pending <= self.ahead.depth and self._asked < self.cadence.schedule.steps:
            _, end = self.cadence.cycle(self._asked)
            batches = self.loader.peek(end - step)[self._asked - step :]
            if not batches:
                break
            self.ahead.submit(batches)
            self._asked = end

    def _fetch(self, batches: list[Batch]) -> tuple[list[int], dict[str, RawRows]]:
        """The steps of a cycle and its raw rows by table."""
        ids = [self._row_ids(batch) for batch in batches]
        raw = {name: table.fetch(table.plan([step[name] for step in ids])) for name, table in self.parts.tables.items()}
        return [batch.step for batch in batches], raw

    def _row_ids(self, batch: Batch) -> dict[str, Tensor]:
        return self.parts.row_ids(batch.tokens.to(self.device))
