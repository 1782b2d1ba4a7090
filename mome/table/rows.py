"""The sparse table and the working set: the few rows of a cycle as a dense leaf, and the only code that writes rows.

Lives here: TableSpec, RowTable (pull, push, restore, checkpoint, export reads), WorkingSet, the row initialiser.
Not here: where raw rows lie (store.py), the rules' arithmetic (kernels/row_update.py), which ids a memory asks for.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.row_update import mean_square, row_update_
from mome.table.hashing import splitmix64
from mome.table.store import DeviceStore
from optim.rows import RowClock, RowRule

# Numbers the initialiser mixes at once: the int64 counters and their temporaries stay in the cache of a core.
_INIT_CHUNK = 1 << 16


@dataclass(frozen=True)
class TableSpec:
    """What a memory asks of a table: rows x lanes x dim numbers, uniform in [-init, init] at the start (0.0: zeros).

    A lane is one slot of one layer: dim numbers that share one number of optimizer state.
    Raises ValueError for a value out of range.
    """

    rows: int
    lanes: int
    dim: int
    init: float

    def __post_init__(self) -> None:
        for name in ("rows", "lanes", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"a table with {name} = {getattr(self, name)}: {name} must be at least 1")
        if not 0.0 <= self.init < float("inf"):
            raise ValueError(f"a table with init = {self.init}: the half-width must be finite and not negative")


def initial_rows(spec: TableSpec, seed: int, ids_U: Tensor, dtype: torch.dtype) -> Tensor:
    """What the rows with these ids (int64 [U]) hold before training: [U, lanes, dim], on the device of ids_U.

    Uniform in [-init, init], symmetric about 0, in steps of init * 2**-23. A number depends on (seed, row, element)
    alone, so any subset of rows equals the same rows of the whole, and float32 equals float64 to rounding.
    """
    size = spec.lanes * spec.dim
    if spec.init == 0.0:
        return torch.zeros(len(ids_U), spec.lanes, spec.dim, dtype=dtype, device=ids_U.device)
    out_UE = torch.empty(len(ids_U), size, dtype=dtype, device=ids_U.device)
    key = splitmix64(torch.tensor(_signed64(seed), device=ids_U.device))
    element_E = torch.arange(size, device=ids_U.device) + key
    for part_U, into_UE in zip(ids_U.split(_chunk_rows(spec)), out_UE.split(_chunk_rows(spec))):
        bits_UE = splitmix64(part_U[:, None] * size + element_E)
        # 24 bits u become the odd number 2u + 1 - 2**24, which float32 holds exactly.
        odd_UE = (bits_UE >> 40).bitwise_and_((1 << 24) - 1).mul_(2).sub_((1 << 24) - 1)
        torch.mul(odd_UE.to(dtype), spec.init * 2.0**-24, out=into_UE)
    return out_UE.view(len(ids_U), spec.lanes, spec.dim)


class WorkingSet:
    """The rows of one cycle. Made by RowTable.pull or restore; used up by RowTable.push.

    ids:   int64 [U], sorted, each once.
    rows:  [U, lanes, dim], a leaf that autograd treats like any parameter; its .grad adds up over the cycle's steps.
    event: the table's event count when it was pulled.
    slots(k) and gather(k) know the steps it was pulled for; a restored set has no steps and answers slots_of alone.
    """

    def __init__(self, ids_U: Tensor, rows_ULD: Tensor, steps: Sequence[Tensor], event: int, ticket: object) -> None:
        self.ids = ids_U
        self.rows = rows_ULD
        self.event = event
        self.ticket = ticket
        self._steps = list(steps)

    def slots(self, step: int) -> Tensor:
        """Where in `rows` the ids of a step of the pulled cycle are: int64, shaped like that step's ids."""
        return torch.searchsorted(self.ids, self._steps[step])

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
        """The rows that a step reads: [*shape of its ids, lanes, dim], differentiable in `rows`."""
        slots = self.slots(step)
        # Never rows[slots]: its backward on the CPU is slower and its sums differ from run to run.
        return self.rows.index_select(0, slots.flatten()).view(*slots.shape, *self.rows.shape[1:])


class RowTable:
    """A table of spec.rows rows, of which a step sees a working set. Reading is pure; only `push` writes.

    What dense training would have done to a row while nobody touched it is a function of the row's last event and of
    the clock's prefix sums, so pulling, validating, saving or stopping changes nothing. float32, or float64 for
    exactness tests; optimizer state is one number of that dtype a lane (none for "sgd") and one int32 event a row.
    The initial rows are keyed by the seed and the name, so that tables of one run differ.
    """

    def __init__(
        self,
        spec: TableSpec,
        rule: RowRule,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        name: str = "",
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"a table of {dtype}: choose torch.float32, or torch.float64 for exactness tests")
        self.spec = spec
        self.rule = rule
        self.name = name
        self.device = torch.device(device)
        self.dtype = dtype
        self.store = DeviceStore(spec.rows, spec.lanes, spec.dim, dtype, device)
        self.clock = RowClock(rule.weight_decay, device)
        self._last_R = torch.zeros(spec.rows, dtype=torch.int32, device=device)
        lanes = spec.lanes if rule.keeps_second else 0
        self._second_RL = torch.zeros(spec.rows, lanes, dtype=dtype, device=device)
        self._ticket = object()
        for ids_U in self._chunks(_chunk_rows(spec)):
            self.store.write(ids_U, initial_rows(spec, seed ^ zlib.crc32(name.encode()), ids_U, dtype))

    @property
    def event(self) -> int:
        """How many pushes the table has seen."""
        return self.clock.event

    @property
    def touched_rows(self) -> int:
        """How many rows were in a pushed working set at least once."""
        return int(torch.count_nonzero(self._last_R))

    def table_bytes(self) -> int:
        """Bytes of the rows themselves."""
        return self.spec.rows * self.spec.lanes * self.spec.dim * self.dtype.itemsize

    def state_bytes(self) -> int:
        """Bytes of optimizer state: one number a lane (none for "sgd"), one int32 a row; not the 16 bytes an event."""
        return self._second_RL.nbytes + self._last_R.nbytes

    def pull(self, ids: Sequence[Tensor], *, grad: bool = True) -> WorkingSet:
        """The working set of a cycle. Writes nothing.

        ids: one integer tensor of any shape for each step, duplicates and all. A set pulled without grad is for reading
        and can't be pushed. Raises ValueError for an id outside 0..rows - 1.
        """
        if isinstance(ids, Tensor):
            raise ValueError(f"table {self.name!r}: pull takes a list with one tensor of ids a step, not a bare tensor")
        steps = [self._as_ids(step) for step in ids]
        flat = torch.cat([step.flatten() for step in steps]) if steps else self._last_R.new_empty(0, dtype=torch.int64)
        unique_U = torch.unique(flat)
        if len(unique_U):
            self._check_bounds(int(unique_U[0]), int(unique_U[-1]))
        return self._working_set(unique_U, steps, grad)

    def restore(self, ids_U: Tensor, grad_ULD: Tensor | None) -> WorkingSet:
        """The working set of a cycle that a checkpoint interrupted: its ids and its gradient so far (None: none yet).

        The table must be at the event of the save, as its own load_state_dict leaves it. Raises ValueError for ids that
        are not sorted, distinct and in range, and for a gradient of another shape.
        """
        ids_U = self._as_ids(ids_U)
        if ids_U.ndim != 1 or not bool((ids_U.diff() > 0).all()):
            raise ValueError(f"table {self.name!r}: the saved working set's ids are not a sorted list of distinct rows")
        if len(ids_U):
            self._check_bounds(int(ids_U[0]), int(ids_U[-1]))
        ws = self._working_set(ids_U, [], grad=True)
        if grad_ULD is not None:
            if grad_ULD.shape != ws.rows.shape:
                raise ValueError(
                    f"table {self.name!r}: a saved gradient of shape {tuple(grad_ULD.shape)} for a working set "
                    f"of shape {tuple(ws.rows.shape)}: the checkpoint is of another cycle or table"
                )
            ws.rows.grad = grad_ULD.to(self.device, self.dtype, copy=True)
        return ws

    @torch.no_grad()
    def push(self, ws: WorkingSet, lr: float, beta2: float | None = None) -> int:
        """One event: apply the row rule to every row of the working set, and use the set up. Returns the rows updated.

        lr: this event's learning rate; beta2: in place of the rule's, for this event alone (a cadence that changes).
        A row without gradient counts as touched with gradient zero, which equals not touching it. Raises ValueError,
        and then nothing has changed, for a set that was pulled before the last push or load, by another table, or
        without grad; for a gradient that is not finite or whose square overflows; for what RowClock.extend refuses.
        """
        if ws.ticket is not self._ticket:
            raise ValueError(
                f"table {self.name!r}: this working set was pulled at event {ws.event}, and the table has changed "
                f"since (event {self.event}) or is another one: pull again after each push or load"
            )
        if not ws.rows.requires_grad:
            raise ValueError(f"table {self.name!r}: this working set was pulled for reading only: pull with grad=True")
        rule = self.rule
        beta2 = rule.beta2 if beta2 is None else beta2
        rows_ULD = ws.rows.detach()
        grad_ULD = torch.zeros_like(rows_ULD) if ws.rows.grad is None else ws.rows.grad
        power_UL = mean_square(grad_ULD)
        if len(ws.ids) and not bool(power_UL.amax().isfinite()):
            row = int(ws.ids[~power_UL.isfinite().all(dim=1)][0])
            raise ValueError(
                f"table {self.name!r}: the gradient of row {row} is not finite or its square overflows: nothing was "
                "changed; lower the learning rates or go back to a checkpoint"
            )
        second_UL = self._second_at(ws.ids) if rule.keeps_second else None
        self.clock.extend(lr, beta2)
        self._ticket = object()
        row_update_(
            rows_ULD,
            grad_ULD,
            power_UL,
            second_UL,
            kind=rule.kind,
            lr=lr,
            weight_decay=rule.weight_decay,
            beta2=beta2,
            correction=self.clock.correction,
            eps=rule.eps,
        )
        self.store.write(ws.ids, rows_ULD)
        if second_UL is not None:
            self._second_RL.index_copy_(0, ws.ids, second_UL)
        self._last_R.index_fill_(0, ws.ids, self.event)
        return len(ws.ids)

    def read_rows(self, ids: Tensor) -> Tensor:
        """What the rows with these ids (any shape, duplicates allowed) are worth now: [*ids.shape, lanes, dim]."""
        ids = self._checked(ids)
        return self._read(ids.flatten()).view(*ids.shape, self.spec.lanes, self.spec.dim)

    def read_second(self, ids: Tensor) -> Tensor:
        """The second moments of these rows now, as dense training holds them: [*ids.shape, lanes]; none for "sgd"."""
        ids = self._checked(ids)
        return self._second_at(ids.flatten()).view(*ids.shape, self._second_RL.shape[1])

    def iter_rows(self, chunk: int = 4096) -> Iterator[Tensor]:
        """All rows in order, as they are worth now, `chunk` at a time: [<= chunk, lanes, dim], each a fresh tensor."""
        for ids_U in self._chunks(chunk):
            yield self._read(ids_U)

    def state_dict(self) -> dict[str, Tensor]:
        """Raw rows, last events, second moments and the clock's sums, all tensors.

        The first three are the table's own memory: save or copy them before the next push. A cycle in progress is the
        caller's to save: ws.ids and ws.rows.grad.
        """
        return {**self._tensors(), **self.clock.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy a state_dict in; working sets pulled before are refused from then on.

        Raises ValueError and changes nothing if a tensor is missing, unknown, or of another shape or dtype than this
        table's, or if events and sums disagree.
        """
        mine = self._tensors()
        expected = {*mine, "log_decay", "log_beta2"}
        if set(state) != expected:
            odd = ", ".join(sorted(set(state) ^ expected))
            raise ValueError(f"table {self.name!r}: a checkpoint of another kind of table: {odd} missing or unknown")
        for key, tensor in mine.items():
            if state[key].shape != tensor.shape or state[key].dtype != tensor.dtype:
                raise ValueError(
                    f"table {self.name!r}: a checkpoint of another shape: its {key} is {_described(state[key])}, this "
                    f"table's is {_described(tensor)}: load it with the configuration that saved it"
                )
        first, final = (int(x) for x in state["last_event"].aminmax())
        if first < 0 or final >= state["log_decay"].numel():
            raise ValueError(f"table {self.name!r}: a damaged checkpoint: its rows name an event that its clock lacks")
        self.clock.load_state_dict({key: state[key] for key in ("log_decay", "log_beta2")})
        for key, tensor in mine.items():
            tensor.copy_(state[key])
        self._ticket = object()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"rows": self.store.rows_RLD, "last_event": self._last_R}
        return tensors | ({"second": self._second_RL} if self.rule.keeps_second else {})

    def _chunks(self, chunk: int) -> Iterator[Tensor]:
        for start in range(0, self.spec.rows, chunk):
            yield torch.arange(start, min(start + chunk, self.spec.rows), device=self.device)

    def _as_ids(self, ids: Tensor) -> Tensor:
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"table {self.name!r}: row ids are integers, not {ids.dtype}")
        return ids.to(self.device, torch.int64)

    def _checked(self, ids: Tensor) -> Tensor:
        ids = self._as_ids(ids)
        if ids.numel():
            self._check_bounds(int(ids.min()), int(ids.max()))
        return ids

    def _check_bounds(self, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self.spec.rows:
            wrong = lowest if lowest < 0 else highest
            raise ValueError(f"table {self.name!r}: row id {wrong} is outside 0 to {self.spec.rows - 1}, its rows")

    def _working_set(self, ids_U: Tensor, steps: list[Tensor], grad: bool) -> WorkingSet:
        return WorkingSet(ids_U, self._read(ids_U).requires_grad_(grad), steps, self.event, self._ticket)

    def _read(self, ids_U: Tensor) -> Tensor:
        rows_ULD = self.store.read(ids_U)
        if self.rule.weight_decay:
            factor_U = self.clock.decay(self._last_R.index_select(0, ids_U))
            rows_ULD.mul_(factor_U.to(self.dtype)[:, None, None])
        return rows_ULD

    def _second_at(self, ids_U: Tensor) -> Tensor:
        second_UL = self._second_RL.index_select(0, ids_U)
        if self.rule.kind == "adam":
            factor_U = self.clock.second_decay(self._last_R.index_select(0, ids_U))
            second_UL.mul_(factor_U.to(self.dtype)[:, None])
        return second_UL


def _chunk_rows(spec: TableSpec) -> int:
    return max(1, _INIT_CHUNK // (spec.lanes * spec.dim))


def _described(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _signed64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
