"""The processes of a run: who they are, and every collective that they call, in one order.

Lives here: World, its collectives by name (torch.distributed), what each sent, and ORDER, the order of a step.
Not here: what the tensors mean (mome/dense.py, mome/table/exchange.py), and who notices a dead peer (mome/watchdog.py).
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from mome.errors import SharedError
from mome.restart import attempt_store

# What a step calls, from its start to its end; every rank the same, and nobody from a thread. * in the first step of a
# cycle, for the cycle after it; + in the last. Without look-ahead (and for the first cycle of a process) the three that
# bring rows come one after the other before the step.
ORDER = (
    ("row counts", "*", "how many rows each rank wants of each other one; on the host, behind the forward pass"),
    ("row ids", "*", "which ones; behind the backward pass"),
    ("dense gradients", "", "summed, each onto its owner; in scatter order"),
    ("replicated gradients", "", "of parameters that every rank updates, summed in one piece"),
    ("row gradients", "+", "back to the owners, along the ways that the rows came"),
    ("step sums", "", "loss, norms, whether all is finite, who wants to stop, whose checkpoint is written"),
    ("rows", "+", "of the next cycle, before the weights"),
    ("dense weights", "", "from their owners to all; in work order"),
)


class At(NamedTuple):
    """Where a process is: the step (from 1), the collective that holds it up ("": none does), how many it entered."""

    step: int
    name: str
    number: int


class Pending:
    """A collective under way; `wait` gives its result. held: what is entered meanwhile."""

    def __init__(
        self, result: Callable[[], Any], work: Any = None, held: Callable[[], Any] = contextlib.nullcontext
    ) -> None:
        self._result, self._work, self._held = result, work, held

    def wait(self) -> Any:
        if self._work is not None:
            with self._held():
                self._work.wait()
            self._work = None
        return self._result()


class World:
    """rank of size processes, each with one device. Collectives are called by the main thread alone, by every rank in
    the same order and with the same names; with one process they call nothing and cost nothing. (The writer of
    checkpoints plans by collectives of its own, in its thread, on a group that nobody else uses.)

    sent: by name, the bytes that this process handed over for others so far: what travels in all-to-alls, and for
    reductions and gathers what a ring sends, (size - 1) / size of the whole, twice for an all-reduce. Meetings, objects
    and checkpoints are not counted.
    step: what the trainer says it is at, for messages. calls: a list to which names are appended, or None.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.step = 0
        self.sent: dict[str, int] = {}
        self.calls: list[str] | None = None
        # The last collectives, by number: with NCCL one is left before it is over.
        self.entered: deque[tuple[int, str]] = deque(maxlen=64)
        self._number = 0
        self._waiting = ""
        self._timeout: timedelta | None = None
        # Counts are needed on the host: NCCL would take them through the device and make the host wait for it.
        self._host_group = None

    @classmethod
    def join(cls, device: torch.device, timeout: float = 600.0, longer: float = 0.0) -> World:
        """This process's world: as torchrun says, or one process. timeout: seconds in which all must have come;
        collectives may take so much longer.

        Meets once, so that a broken set-up shows before the first step. Raises UserError where they do not come.
        """
        if "RANK" not in os.environ:
            return cls(device=device)
        backend, store = "nccl" if device.type == "cuda" else "gloo", attempt_store(timeout)
        wait = timedelta(seconds=timeout + longer)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        distributed.init_process_group(backend, store=store, timeout=wait, rank=rank, world_size=size)
        world = cls(distributed.get_rank(), distributed.get_world_size(), device)
        world._timeout = wait
        if not world.alone and world.device.type == "cuda":
            world._host_group = world.new_host_group()
        distributed.all_reduce(torch.ones(1, device=device))
        return world

    def close(self) -> None:
        """Leave the process group."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this process speaks for all: it prints, and writes what is not sharded."""
        return self.rank == 0

    def new_host_group(self) -> Any:
        """A process group of all ranks on the host, for one that uses it alone; None where there is one process."""
        return None if self.alone else distributed.new_group(backend="gloo", timeout=self._timeout)

    def at(self) -> At:
        """Where this process is now. Safe in any thread."""
        return At(self.step, self._waiting, self._number)

    def all_reduce(self, name: str, tensor: Tensor) -> Pending:
        """The sum over the ranks, in place; every rank gets the same bits."""
        if self.alone:
            return Pending(lambda: tensor)
        self._count(name, 2 * tensor.nbytes * (self.size - 1) // self.size)
        return self._call(name, lambda: distributed.all_reduce(tensor, async_op=True), tensor)

    def reduce_scatter(self, name: str, whole: Tensor, own: Tensor) -> Pending:
        """own [n, ...] = this rank's n-th of the sum over ranks of whole [size * n, ...], of the same dtype."""
        if self.alone:
            if own.data_ptr() != whole.data_ptr():
                own.copy_(whole)
            return Pending(lambda: own)
        self._count(name, whole.nbytes * (self.size - 1) // self.size)
        call = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
        return self._call(name, lambda: call(own, whole, async_op=True), own)

    def all_gather(self, name: str, whole: Tensor, own: Tensor) -> Pending:
        """whole [size * n, ...] = own [n, ...] of every rank in order; own may be its place in whole."""
        if self.alone:
            if own.data_ptr() != whole.data_ptr():
                whole.copy_(own)
            return Pending(lambda: whole)
        self._count(name, own.nbytes * (self.size - 1))
        call = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        return self._call(name, lambda: call(whole, own, async_op=True), whole)

    def all_to_all(self, name: str, send: Tensor, give: Sequence[int], take: Sequence[int]) -> Pending:
        """Pieces of send [sum(give), ...], one a rank in order, go to the ranks; the result holds what they sent here,
        [sum(take), ...], in order. give[rank] and take[rank] are 0: what is this rank's own never travels."""
        assert give[self.rank] == take[self.rank] == 0, "a rank's own rows do not travel"
        if self.alone:
            return Pending(lambda: send)
        self._count(name, send.nbytes)
        got = send.new_empty(sum(take), *send.shape[1:])
        call = lambda: distributed.all_to_all_single(got, send, list(take), list(give), async_op=True)  # noqa: E731
        return self._call(name, call, got)

    def counts(self, name: str, counts_WK: Tensor) -> Pending:
        """counts [size, K] (int64, CPU), line r for rank r: the result's line r is what rank r has for this one."""
        if self.alone:
            return Pending(lambda: counts_WK)
        self._count(name, counts_WK.nbytes // self.size * (self.size - 1))
        got = torch.empty_like(counts_WK)
        group = self._host_group
        return self._call(name, lambda: distributed.all_to_all_single(got, counts_WK, group=group, async_op=True), got)

    def gather_objects(self, name: str, value: Any) -> list[Any]:
        """The (small, picklable) values of all ranks in order, on every rank. Slow: for the start and the end."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        self._enter(name)
        with self._waits(name):
            distributed.all_gather_object(values, value, group=self._host_group)
        return values

    def meet(self, name: str) -> None:
        """Return when every rank has come here: on the host, where NCCL's wait would not hold anybody up."""
        if not self.alone:
            here, group = torch.zeros(1), self._host_group
            self._call(name, lambda: distributed.all_reduce(here, group=group, async_op=True), here).wait()

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise SharedError on every rank, naming the facts and ranks that differ from rank 0's, unless all agree."""
        everybody = self.gather_objects("facts", dict(facts))
        first, wrong = everybody[0], []
        for key in sorted({key for one in everybody for key in one}):
            odd = [rank for rank, one in enumerate(everybody) if one.get(key) != first.get(key)]
            if odd:
                values = f"{_short(everybody[odd[0]].get(key))} instead of {_short(first.get(key))}"
                wrong.append(f"{key} on rank {', '.join(map(str, odd))} ({values} on rank 0)")
        if wrong:
            raise SharedError(
                f"the processes do not agree on {'; '.join(wrong)}: start them with the same files and flags"
            )

    def bytes_sent(self) -> int:
        """All that `sent` counts."""
        return sum(self.sent.values())

    def training_bytes(self) -> int:
        """What `sent` counts of the collectives in ORDER: not of validations and saves."""
        return sum(self.sent.get(name, 0) for name, _, _ in ORDER)

    def _call(self, name: str, call: Callable[[], Any], result: Tensor) -> Pending:
        self._enter(name)
        return Pending(lambda: result, call(), lambda: self._waits(name))

    def _enter(self, name: str) -> None:
        self._number += 1
        self.entered.append((self._number, name))
        if self.calls is not None:
            self.calls.append(name)

    @contextlib.contextmanager
    def _waits(self, name: str) -> Iterator[None]:
        """While the block runs this process is held up by a collective; after one that breaks it stays there."""
        self._waiting = name
        yield
        self._waiting = ""

    def _count(self, name: str, size: int) -> None:
        self.sent[name] = self.sent.get(name, 0) + size


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
