"""The sparse table: rows that a step sees only through a working set, and the only code that writes them.

Lives here: RowTable (plan, fetch, take, push).
Not here: its shape (spec.py), the working set (working.py), where planes lie (store.py), formats (formats.py),
checkpoints (parts.py), the rules' arithmetic (kernels/row_update.py), which ids a memory asks for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.gather import gather_rows
from kernels.rounding import rounding_key
from kernels.row_update import RowEvent, column_profile_, column_squares, mean_square, row_update_
from kernels.segments import unique_ids
from mome.table.base import huge_pages_suit
from mome.table.formats import row_format
from mome.table.placement import Placement
from mome.table.spec import TableSpec, bytes_by_kind, initial_rows, kept, table_seed
from mome.table.store import DeviceStore, HostStore, MmapStore
from mome.table.working import Buffers, IdPlan, RawRows, WorkingSet
from optim.rows import RowClock, RowRule

PLACES = ("device", "host", "file")
# Pushes that a fetch may lag behind before its rows are read again as a whole.
_REMEMBERED = 64


class RowTable:
    """A table of spec.rows rows, of which a step sees a working set. Reading is pure; only `push` writes.

    What dense training would have done to a row while nobody touched it is a function of the row's last event and of
    the clock's prefix sums, so pulling, validating, saving or stopping changes nothing. A row that was never pushed is
    worth its initial values, whatever its place holds: no table is ever filled. A step computes in float32, or in
    float64 for exactness tests, whatever the format of the rows.

    format: how a row is kept, a name of mome.table.formats. place: "device"; "host" (rows in host memory, state on the
    device); "file" (everything in sparse files under `folder`, which are emptied: what a table was is in its
    checkpoint; resident_bytes, keep_cached: see MmapStore). stores: in place of those, stores made already, by the
    names of `kept`.
    placement, rank: of several processes each keeps the rows that are its own. Ids are those of the whole table
    everywhere, and only a table's own rows may be asked of it (exchange.py brings the others).
    Raises ValueError for what does not fit together.
    """

    def __init__(
        self, spec: TableSpec, rule: RowRule, seed: int, dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu", name: str = "", *, format: str = "fp32", place: str = "device",
        folder: Path | None = None, resident_bytes: int = 1 << 30, keep_cached: bool = True,
        stores: dict[str, Any] | None = None, placement: Placement | None = None, rank: int = 0,
    ) -> None:  # fmt: skip
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"a table of {dtype}: choose torch.float32, or torch.float64 for exactness tests")
        if place not in PLACES:
            raise ValueError(f"table {name!r}: no place {place!r}; choose one of {', '.join(PLACES)}")
        if (place == "file") != (folder is not None):
            raise ValueError(f"table {name!r}: a folder goes with place 'file', and with no other")
        self.spec, self.rule, self.name, self.place = spec, rule, name, place
        self.device, self.dtype = torch.device(device), dtype
        self.format = "fp64" if dtype == torch.float64 and format == "fp32" else format
        self.seed = table_seed(seed, name)
        self.placement, self.rank = placement or Placement(spec.rows), rank
        # Of more ranks than rows some own none; a store has a row at least.
        rows = max(1, self.placement.rows_of(rank))
        self._here = replace(spec, rows=rows)
        self.clock = RowClock(rule, device)
        self._codec = row_format(self.format)
        if self._codec.exact and ("fp64" in self.format) != (dtype == torch.float64):
            raise ValueError(f"table {name!r}: format {self.format} with {dtype}: fp64 and float64 go together")
        self.kept = kept(spec, rule, self.format, dtype)
        self.stores = stores or {}
        huge = huge_pages_suit(sum(self.bytes_by_kind().values()))
        for key, (tail, kind) in self.kept.items() if stores is None else ():
            if place == "file":
                path = folder / (name or "table") / f"{key}.bin"
                path.parent.mkdir(parents=True, exist_ok=True)
                one = MmapStore(path, rows, tail, kind, resident_bytes=resident_bytes, keep_cached=keep_cached)
                # Rows of an earlier table there are of no use without its clock; load_parts brings both.
                one.clear()
            elif place == "host" and key in self._codec.planes(spec.lanes, spec.dim):
                one = HostStore(rows, tail, kind, device, huge=huge)
            else:
                one = DeviceStore(rows, tail, kind, device, huge=huge and self.device.type == "cpu")
            self.stores[key] = one
        self.columns_LD = None
        if rule.keeps_columns:
            self.columns_LD = torch.zeros(spec.lanes, spec.dim, dtype=torch.float64, device=device)
        self._buffers = Buffers(self.device)
        self.forget()

    def forget(self, broken: str | None = None) -> None:
        """Make nothing of what was pulled or fetched before usable any more: the rows are about to be replaced.

        broken: why the table may not be used until this is None again.
        """
        self._ticket = object()
        self._age = object()
        self.broken = broken
        # Of the last pushes: event and rows, newest last; and the rows pushed for the first time, in any order.
        self._recent: deque[tuple[int, Tensor]] = deque(maxlen=_REMEMBERED)
        self._done = self.clock.event
        self.first_touched: list[Tensor] = []
        self._unsaved: list[Tensor] = []

    @property
    def event(self) -> int:
        """How many pushes the table has seen."""
        return self.clock.event

    @property
    def touched_rows(self) -> int:
        """How many rows were in a pushed working set at least once."""
        return sum(len(ids_U) for ids_U in self.first_touched)

    def touched_ids(self) -> Tensor:
        """Those rows, sorted: int64 [touched_rows], on the CPU."""
        if len(self.first_touched) > 1:
            self.first_touched = [torch.cat(self.first_touched)]
        return self.first_touched[0].sort().values if self.first_touched else torch.empty(0, dtype=torch.int64)

    def take_unsaved(self) -> Tensor:
        """The rows pushed since this was last asked, or since a load; sorted, int64, on the CPU."""
        ids_U = _merged(self._unsaved)
        self._unsaved = []
        return ids_U

    def keep_unsaved(self, ids_U: Tensor) -> None:
        """Take rows back that could not be saved after all."""
        self._unsaved.append(ids_U)

    def owned(self, ids: Tensor) -> Tensor:
        """Which of these rows are kept here: bool, shaped like ids."""
        return self.placement.owner(ids) == self.rank

    def read_planes(self, ids_U: Tensor) -> dict[str, Tensor]:
        """What is kept of these rows (int64 [U], sorted, owned), raw, on the CPU: the names of `kept`, [U, *tail]."""
        places_U = self.placement.local(ids_U.to(self.device))
        return {key: store.read(places_U).cpu() for key, store in self.stores.items()}

    def write_planes(self, ids_U: Tensor, planes: dict[str, Tensor]) -> None:
        """Put back what read_planes gave, for a load: rows pulled or fetched before must not be used any more."""
        places_U = self.placement.local(ids_U.to(self.device))
        for key, store in self.stores.items():
            store.write(places_U, planes[key].to(self.device))

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of this process's rows by what they are for, touched or not; see the function of this name."""
        return bytes_by_kind(self._here, self.rule, self.format, self.dtype)

    def table_bytes(self) -> int:
        """Bytes of the rows themselves."""
        planes = self._codec.planes(self.spec.lanes, self.spec.dim)
        return sum(size for key, size in self.bytes_by_kind().items() if key in planes)

    def state_bytes(self) -> int:
        """Bytes of optimizer state."""
        return sum(self.bytes_by_kind().values()) - self.table_bytes()

    def plan(self, steps: Sequence[Tensor]) -> IdPlan:
        """The distinct rows of a cycle. Reads nothing, writes nothing, safe in any thread.

        steps: one integer tensor of any shape for each step, duplicates and all. Raises ValueError for an id outside
        0..rows - 1.
        """
        if isinstance(steps, Tensor):
            raise ValueError(f"table {self.name!r}: give a list with one tensor of ids a step, not a bare tensor")
        flat = [self._as_ids(step).flatten() for step in steps]
        if not flat:
            return IdPlan(torch.empty(0, dtype=torch.int64, device=self.device), [])
        ids_U, slots_N = unique_ids(flat[0] if len(flat) == 1 else torch.cat(flat))
        if len(ids_U):
            self._check_bounds(int(ids_U[0]), int(ids_U[-1]))
        parts = slots_N.split([len(one) for one in flat])
        return IdPlan(ids_U, [part.view(step.shape) for part, step in zip(parts, steps)])

    def fetch(self, plan: IdPlan, reuse: bool = True) -> RawRows:
        """The raw planes of these rows. Writes nothing; may run in a thread beside push, which `take` mends."""
        self.refuse_broken()
        # Before reading: a push that ends meanwhile counts as one since the fetch.
        event, age = self._done, self._age
        planes, buffers = {}, self._buffers if reuse else Buffers(self.device, reuse=False)
        places_U = self.placement.local(plan.ids)
        for key, (tail, kind) in self.kept.items():
            planes[key] = buffers.take((len(plan.ids), *tail), kind)
            self._read(key, places_U, planes[key].tensor)
        return RawRows(plan, planes, event, age)

    def pull(self, steps: Sequence[Tensor], *, grad: bool = True) -> WorkingSet:
        """The working set of a cycle: plan, fetch and take in one. One pulled without grad can't be pushed."""
        return self.take(self.fetch(self.plan(steps), reuse=grad), grad=grad)

    @torch.no_grad()
    def take(self, raw: RawRows, *, grad: bool = True) -> WorkingSet:
        """A fetch as a working set, its rows worth what they are worth now; uses the fetch up.

        Rows pushed since the fetch are read again, so that the result does not depend on when the fetch was.
        """
        self.refuse_broken()
        if raw.age is not self._age or not raw.planes:
            raise ValueError(
                f"table {self.name!r}: these rows were fetched before the table was loaded, or from another one, or "
                "were taken already: fetch again"
            )
        ids_U, leases = raw.plan.ids, raw.planes
        planes = {key: lease.tensor for key, lease in leases.items()}
        self._patch(raw, planes)
        raw.planes = {}
        inside = self._codec.planes(self.spec.lanes, self.spec.dim)
        # An exact full-width format is its own decoding: the rows stay where they were read to.
        if self.format in ("fp32", "fp64"):
            rows_ULD = planes["rows"]
        else:
            buffers = self._buffers if grad else Buffers(self.device, reuse=False)
            leases["leaf"] = buffers.take((len(ids_U), self.spec.lanes, self.spec.dim), self.dtype)
            rows_ULD = self._codec.decode({key: planes[key] for key in inside}, leases["leaf"].tensor)
            for key in inside:
                self._buffers.give(leases.pop(key))
        last_U = planes["last_event"]
        if self.spec.init:
            self._materialise(ids_U, last_U, rows_ULD)
        if self.rule.decays_untouched:
            rows_ULD.mul_(self.clock.decay(last_U).to(self.dtype)[:, None, None])
        if self.rule.keeps_moment:
            moment_ULD = planes["moment"]
            rows_ULD.addcmul_(moment_ULD, self.clock.travel(last_U).to(self.dtype)[:, None, None], value=-1.0)
            moment_ULD.mul_(self.clock.moment_decay(last_U).to(self.dtype)[:, None, None])
        if self.rule.decays_second:
            planes["second"].mul_(self.clock.second_decay(last_U).to(self.dtype)[:, None])
        state = {key: planes[key] for key in ("second", "moment", "last_event") if key in planes}
        return WorkingSet(
            ids_U, rows_ULD.requires_grad_(grad), raw.plan.slots, self.event, self._ticket, state, self._buffers,
            list(leases.values()),
        )  # fmt: skip

    def grad_square(self, ws: WorkingSet) -> float:
        """Sum of the squares of a working set's gradient so far, duplicates summed first: what a global norm is of."""
        if ws.rows.grad is None:
            return 0.0
        power_UL = mean_square(ws.rows.grad) if ws.power is None else ws.power
        return float(power_UL.sum(dtype=torch.float64)) * self.spec.dim

    def not_finite(self, ws: WorkingSet, power_UL: Tensor | None = None) -> int | None:
        """The first row whose gradient is not finite, or its square overflows; None: none is. power: its squares."""
        if power_UL is None:
            if ws.rows.grad is None:
                return None
            power_UL = mean_square(ws.rows.grad)
        if not len(ws.ids) or bool(power_UL.amax().isfinite()):
            return None
        return int(ws.ids[~power_UL.isfinite().all(dim=1)][0])

    @torch.no_grad()
    def push(
        self, ws: WorkingSet, lr: float, beta2: float | None = None, scale: float = 1.0, *,
        columns_LD: Tensor | None = None,
    ) -> int:  # fmt: skip
        """One event: apply the row rule to every row of the working set, and use the set up. Returns the rows updated.

        lr: this event's learning rate; beta2: in place of the rule's, for this event alone (a cadence that changes);
        scale: a factor on the gradient (clipping). A row without gradient counts as touched with gradient zero.
        columns_LD: for a rule that keeps columns, where other processes have rows of this event too: the sum over all
        of them of column_squares, without the factor.
        Raises ValueError, and then nothing has changed, for a set that was pulled before the last push or load, by
        another table, or without grad; for a gradient that is not finite or whose square overflows; for what
        RowClock.extend refuses. Raises OSError or UserError when a file can't be written: then the table refuses to
        go on.
        """
        self.refuse_broken()
        if ws.ticket is not self._ticket:
            raise ValueError(
                f"table {self.name!r}: this working set was pulled at event {ws.event}, and the table has changed "
                f"since (event {self.event}) or is another one: pull again after each push or load"
            )
        rows_ULD = ws.rows
        if not rows_ULD.requires_grad:
            raise ValueError(f"table {self.name!r}: this working set was pulled for reading only: pull with grad=True")
        if rows_ULD.grad is None:
            rows_ULD.grad = ws.lend(rows_ULD.shape).tensor.zero_()
        if not 0.0 < scale < math.inf:
            raise ValueError(f"table {self.name!r}: a gradient times {scale}: the factor must be finite and above 0")
        grad_ULD, rows_ULD = rows_ULD.grad, rows_ULD.detach()
        power_UL = mean_square(grad_ULD, scale) if ws.power is None or scale != 1.0 else ws.power
        if (row := self.not_finite(ws, power_UL)) is not None:
            raise ValueError(
                f"table {self.name!r}: the gradient of row {row} is not finite or its square overflows, at event "
                f"{self.event + 1}: nothing was changed; lower the learning rates or go back to a checkpoint"
            )
        beta2 = self.rule.beta2 if beta2 is None else beta2
        self.clock.extend(lr, beta2)
        try:
            self._write(ws, rows_ULD, grad_ULD, power_UL, self.clock.row_event(lr, beta2, scale), columns_LD)
        except BaseException as error:
            # Some of the rows may be of this event and some not.
            self.broken = f"it could not be written at event {self.event} ({error})"
            raise
        self._done = self.event
        ws.close()
        return len(ws.ids)

    def _write(
        self, ws: WorkingSet, rows_ULD: Tensor, grad_ULD: Tensor, power_UL: Tensor, event: RowEvent,
        columns_LD: Tensor | None,
    ) -> None:  # fmt: skip
        """The rule applied to the rows of a set, and all that is kept of them into the stores."""
        self._ticket = object()
        self._recent.append((self.event, ws.ids))
        whole = self.format in ("fp32", "fp64")
        places_U = self.placement.local(ws.ids)
        memory = self.stores["rows"].memory if whole else None
        profile_LD = None
        if self.columns_LD is not None:
            own = columns_LD is None
            squares_LD = column_squares(grad_ULD, event.scale) if own else columns_LD * event.scale**2
            profile_LD = column_profile_(self.columns_LD, squares_LD, event, self.spec.rows, self.dtype)
        row_update_(
            rows_ULD, grad_ULD, power_UL, ws.state.get("second"), ws.state.get("moment"), profile_LD, event,
            out_RLD=memory, ids_U=None if memory is None else places_U,
        )  # fmt: skip
        fresh_U = ws.ids[ws.state["last_event"] == 0].cpu()
        ws.state["last_event"].fill_(self.event)
        planes = dict(ws.state)
        if whole and memory is None:
            planes["rows"] = rows_ULD
        elif not whole:
            out = {}
            for key in self._codec.planes(self.spec.lanes, self.spec.dim):
                tail, kind = self.kept[key]
                ws.leases.append(self._buffers.take((len(ws.ids), *tail), kind))
                out[key] = ws.leases[-1].tensor
            planes |= self._codec.encode(rows_ULD, ws.ids, rounding_key(self.seed, self.event), out)
        for key, values in planes.items():
            self.stores[key].write(places_U, values)
        self.first_touched.append(fresh_U)
        self._unsaved.append(ws.ids.cpu())
        # One list of all, or there would be one more for each event.
        if len(self.first_touched) > _REMEMBERED:
            self.first_touched = [torch.cat(self.first_touched)]
        if len(self._unsaved) > _REMEMBERED:
            self._unsaved = [_merged(self._unsaved)]

    def read_rows(self, ids: Tensor) -> Tensor:
        """What the rows with these ids (any shape, duplicates allowed) are worth now: [*ids.shape, lanes, dim]."""
        return self.pull([ids], grad=False).gather(0)

    def read_second(self, ids: Tensor) -> Tensor:
        """The second moments of these rows now, as dense training holds them: [*ids.shape, lanes]."""
        return self._read_state("second", ids)

    def read_moment(self, ids: Tensor) -> Tensor:
        """The momentum of these rows now, as dense training holds it: [*ids.shape, lanes, dim]."""
        return self._read_state("moment", ids)

    def iter_rows(self, chunk: int = 4096) -> Iterator[Tensor]:
        """All rows in order, as they are worth now, `chunk` at a time: [<= chunk, lanes, dim], each a fresh tensor."""
        for start in range(0, self.spec.rows, chunk):
            yield self.read_rows(torch.arange(start, min(start + chunk, self.spec.rows), device=self.device))

    def flush(self) -> None:
        """Bring file places to the disk."""
        for store in self.stores.values():
            store.flush()

    def close(self) -> None:
        """Let go of files and their locks."""
        for store in self.stores.values():
            store.close()

    def _materialise(self, ids_U: Tensor, last_U: Tensor, rows_ULD: Tensor) -> None:
        fresh_F = (last_U == 0).nonzero().flatten()
        if len(fresh_F):
            rows_ULD.index_copy_(0, fresh_F, initial_rows(self.spec, self.seed, ids_U[fresh_F], self.dtype))

    def _patch(self, raw: RawRows, planes: dict[str, Tensor]) -> None:
        """Read again what pushes after the fetch have written, the newest being what the stores hold now."""
        ids_U = raw.plan.ids
        since = [pushed_U for event, pushed_U in self._recent if event > raw.event]
        if not len(ids_U) or raw.event == self.event:
            return
        stale_U = torch.ones_like(ids_U, dtype=torch.bool)
        if len(since) == self.event - raw.event:
            stale_U.zero_()
            for pushed_P in since:
                places_P = torch.searchsorted(ids_U, pushed_P).clamp_(max=len(ids_U) - 1)
                stale_U[places_P[ids_U[places_P] == pushed_P]] = True
        where_S = stale_U.nonzero().flatten()
        if len(where_S):
            places_S = self.placement.local(ids_U[where_S])
            for key, plane in planes.items():
                lease = self._buffers.take((len(places_S), *plane.shape[1:]), plane.dtype)
                plane[where_S] = self._read(key, places_S, lease.tensor)
                self._buffers.give(lease)

    def _read(self, key: str, places_U: Tensor, out: Tensor) -> Tensor:
        """One plane of the rows at these places, into out."""
        if self.place == "file" and out.device.type != "cpu":
            # Files are read to the host.
            return out.copy_(self.stores[key].read(places_U))
        return self.stores[key].read(places_U, out)

    def _read_state(self, key: str, ids: Tensor) -> Tensor:
        if key not in self.kept:
            raise ValueError(f"table {self.name!r}: the rule {self.rule.kind} keeps no {key}")
        ws = self.pull([ids], grad=False)
        slots = ws.slots(0)
        return gather_rows(ws.state[key], slots.flatten()).view(*slots.shape, *ws.state[key].shape[1:])

    def refuse_broken(self) -> None:
        """Raise ValueError if the rows are of no use: a write or a load that ended half way."""
        if self.broken:
            raise ValueError(f"table {self.name!r}: {self.broken}; resume from the last checkpoint")

    def _as_ids(self, ids: Tensor) -> Tensor:
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"table {self.name!r}: row ids are integers, not {ids.dtype}")
        return ids.to(self.device, torch.int64)

    def _check_bounds(self, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self.spec.rows:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"table {self.name!r}: row id {wrong} is outside 0 to {self.spec.rows - 1}, its rows")


def _merged(lists: list[Tensor]) -> Tensor:
    """The distinct ids of several lists, sorted: int64, on the CPU."""
    return torch.unique(torch.cat(lists)) if lists else torch.empty(0, dtype=torch.int64)
