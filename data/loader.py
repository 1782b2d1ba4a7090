"""What a training step and a validation read: packed micro-rows with document bounds, and the position among them.

Lives here: the packer with its look-ahead and saved state, the rows of one rank, the fixed validation rows.
Not here: the file format (shards.py), the schedule that sets a step's plan (optim/schedule.py), devices and processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError
from data.shards import Shard

IGNORED = -100


class DataExhausted(DataError):
    """The corpus cannot fill another step and is not to be repeated."""


@dataclass(frozen=True)
class RowPlan:
    """What a step asks for: G = rows micro-rows of T = tokens inputs; document_cap: tokens of a unit at most."""

    rows: int
    tokens: int
    document_cap: int

    def __post_init__(self):
        for name, value in asdict(self).items():
            if value < 1:
                raise DataError(f"a row plan needs {name} >= 1, not {value}")


@dataclass(frozen=True, eq=False)
class Batch:
    """A step's micro-rows. tokens, targets: int64 [G, T]; docs: int32 [G, T], 0 at the start of each micro-row and one
    more at each unit that starts within it, so that tokens of equal number may attend to each other."""

    step: int
    tokens: Tensor
    targets: Tensor
    docs: Tensor


def take(batch: Batch, rank: int, world: int) -> Batch:
    """The G / world consecutive micro-rows of one rank (views). Raises DataError when world does not divide G."""
    rows = len(batch.tokens)
    if rows % world:
        divisors = [n for n in range(1, rows + 1) if rows % n == 0]
        below = max(n for n in divisors if n < world)
        above = [n for n in divisors if n > world][:1]
        nearest = " or ".join(str(n) for n in [below, *above])
        raise DataError(f"{rows} micro-rows a step cannot be shared evenly by {world} processes: start {nearest}")
    assert 0 <= rank < world
    mine = slice(rank * (rows // world), (rank + 1) * (rows // world))
    return Batch(batch.step, batch.tokens[mine], batch.targets[mine], batch.docs[mine])


class Position(NamedTuple):
    """Where in the data, whatever the plan. shard counts in the order of the epoch (all of them: it is used up); offset
    counts in the order of the shard, tokens for tails="keep" and documents for tails="drop"."""

    epoch: int
    shard: int
    offset: int


class Spans(NamedTuple):
    """Consecutive pieces of one shard, each the start or the rest of a unit: starts, lengths int64 [n]."""

    shard: Shard
    starts: np.ndarray
    lengths: np.ndarray


class Order(NamedTuple):
    """A shard's chunks or capped documents in the order of an epoch. starts int64 [n]: where each begins in the shard;
    ends int64 [n]: where each ends in their concatenation."""

    shard: Shard
    starts: np.ndarray
    ends: np.ndarray

    def keep(self, offset: int, count: int, cap: int) -> tuple[Spans, int, int]:
        """Units with the tokens offset .. offset + count (fewer at the end), the offset after them, its bound."""
        size = int(self.ends[-1])
        end = min(offset + count, size)
        first = int(np.searchsorted(self.ends, offset, side="right"))
        last = int(np.searchsorted(self.ends, end, side="left"))
        units = cut(*self._spans(first, last + 1), cap)
        return Spans(self.shard, *trim(*units, offset - self._begin(first), end - offset)), end, size

    def drop(self, offset: int, count: int) -> tuple[Spans, int, int]:
        """Units from the document `offset` on that have `count` tokens (fewer at the end), the last one truncated; the
        document after them; the number of documents."""
        last = int(np.searchsorted(self.ends, self._begin(offset) + count, side="left"))
        stop = min(last + 1, len(self.ends))
        return Spans(self.shard, *trim(*self._spans(offset, stop), 0, count)), stop, len(self.ends)

    def _begin(self, index: int) -> int:
        return int(self.ends[index - 1]) if index else 0

    def _spans(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self.starts[first:stop], np.diff(self.ends[first:stop], prepend=self._begin(first))


def permutation(seed: int, epoch: int, stream: int, count: int) -> np.ndarray:
    """Permutation int64 [count] keyed by (seed, epoch, stream). stream 0 orders the shards, stream i + 1 the chunks of
    shard i. Sorted raw PCG64 words: NumPy keeps those the same in every version, which it does not for `shuffle`."""
    words = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch, stream))).random_raw(count)
    return np.argsort(words, kind="stable")


def cut(starts: np.ndarray, lengths: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut spans (starts, lengths: int64 [n]) into pieces of `size` tokens, the last of each span shorter; in order."""
    counts = -(-lengths // size)
    before = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    return np.repeat(starts, counts) + before, np.minimum(np.repeat(lengths, counts) - before, size)


def trim(starts: np.ndarray, lengths: np.ndarray, skip: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the concatenation of spans the tokens skip .. skip + count, as spans (none of them empty)."""
    ends = np.cumsum(lengths)
    begins = ends - lengths
    low, high = np.maximum(begins, skip), np.minimum(ends, skip + count)
    held = high > low
    return (starts + low - begins)[held], (high - low)[held]


class Loader:
    """Packs documents into steps; step s is a function of (shards, seed, plan, s), never of a rank or a world size.

    A document runs from one `bos` to before the next; a piece before a shard's first `bos` counts as a document.
    tails="keep": documents are cut into chunks of `chunk_tokens`, chunks are ordered, and the tokens of that order are
      the epoch: each micro-row takes the next T as inputs, and the token after them as its last target, which is also
      the first input of the next micro-row. So every token is an input once an epoch. A unit starts at each chunk and
      at every `document_cap` tokens of it; a unit that a micro-row does not hold goes on in the next.
    tails="drop" (modded-nanogpt's rule): the unit of a document is its first `document_cap` tokens, the rest is unused.
      A micro-row takes units until it has T + 1 tokens and drops what is left of the last; the next micro-row starts
      with the next document.
    Targets are the packed stream shifted by one and may cross documents.

    plan: step -> RowPlan; no document_cap may exceed chunk_tokens (give the largest of the plan).
    shuffle: shards, and within each its chunks (keep) or documents (drop), come in a `permutation` of the epoch;
      else in file order. on_exhausted: "repeat" goes on with the next epoch, within a micro-row too, and logs one line
      in the step where it does; "stop" makes next() raise DataExhausted once a step cannot be filled.
    Raises DataError for a bad argument, for fewer than T + 1 tokens in all, and, when it first reads a shard that was
    given a vocab_size, for an id outside of it.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        plan: Callable[[int], RowPlan],
        *,
        bos: int,
        seed: int,
        chunk_tokens: int,
        tails: str = "keep",
        shuffle: bool = True,
        on_exhausted: str = "repeat",
        log: Callable[[str], None] = print,
    ):
        if tails not in ("keep", "drop"):
            raise DataError(f"tails must be keep or drop, not {tails!r}")
        if on_exhausted not in ("repeat", "stop"):
            raise DataError(f"on_exhausted must be repeat or stop, not {on_exhausted!r}")
        if seed < 0 or chunk_tokens < 1:
            raise DataError(f"a loader needs seed >= 0 and chunk_tokens >= 1, not {seed} and {chunk_tokens}")
        self._shards = list(shards)
        self._total = sum(map(len, self._shards))
        self._plan, self._bos, self._seed, self._chunk_tokens = plan, bos, seed, chunk_tokens
        self._keep, self._shuffle, self._repeat, self._log = tails == "keep", shuffle, on_exhausted == "repeat", log
        self._step, self._position = 0, Position(0, 0, 0)
        self._ready: deque[tuple[Position, Batch]] = deque()  # batches looked ahead at, each with where it begins
        self._order_key: tuple[int, int, int] | None = None
        self._checked_plan(0)

    def next(self) -> Batch:
        """The next step's batch. Raises DataExhausted (each time) where on_exhausted="stop" ends the data."""
        if not self._ready:
            self._build()
        begin, batch = self._ready.popleft()
        epoch = self._first_position().epoch
        if epoch > begin.epoch:
            self._log(f"training data ({self._total:,} tokens) used up in step {batch.step}: epoch {epoch + 1} begins")
        return batch

    def peek(self, count: int) -> list[Batch]:
        """The next `count` batches, the very objects that next() will return; fewer only where "stop" ends the data."""
        while len(self._ready) < count:
            try:
                self._build()
            except DataExhausted:
                break
        return [batch for _, batch in list(self._ready)[:count]]

    def state(self) -> dict[str, int]:
        """Where the first batch that next() has not returned begins, json-able; a peek does not move it."""
        step = self._ready[0][1].step if self._ready else self._step
        return {"step": step, **self._first_position()._asdict(), "corpus_tokens": self._total}

    def load_state(self, state: dict[str, int]) -> None:
        """Go to where state() was taken, by a loader of the same arguments. Raises DataError when it does not fit."""
        names = ("step", *Position._fields, "corpus_tokens")
        if sorted(state) != sorted(names) or any(not isinstance(n, int) or n < 0 for n in state.values()):
            raise DataError(f"a loader state holds the counts {', '.join(names)}, not {state}: use a whole checkpoint")
        position = Position(*(state[name] for name in Position._fields))
        if state["corpus_tokens"] != self._total:
            raise DataError(
                f"the loader state belongs to a corpus of {state['corpus_tokens']:,} tokens, this one has "
                f"{self._total:,}: give the shards the run began with"
            )
        size = 1
        if position.shard < len(self._shards):
            order = self._order(position, self._checked_plan(state["step"]).document_cap)
            size = int(order.ends[-1]) if self._keep else len(order.ends)
        if position.shard > len(self._shards) or position.offset >= size:
            raise DataError(f"the loader state {state} lies outside this corpus: give the shards the run began with")
        self._step, self._position = state["step"], position
        self._ready.clear()

    def _first_position(self) -> Position:
        return self._ready[0][0] if self._ready else self._position

    def _checked_plan(self, step: int) -> RowPlan:
        plan = self._plan(step)
        if plan.document_cap > self._chunk_tokens:
            raise DataError(
                f"the document cap of step {step} is {plan.document_cap}, chunk_tokens only {self._chunk_tokens}: "
                "give the largest document cap of the plan"
            )
        if self._total < plan.tokens + 1:
            raise DataError(
                f"the training data has {self._total:,} tokens, a micro-row of step {step} needs {plan.tokens + 1:,}: "
                "add text or shorten the rows"
            )
        return plan

    def _build(self) -> None:
        """Pack the next step and append it to what is ready; changes nothing when the data ends first."""
        plan, position = self._checked_plan(self._step), self._position
        if self._keep:
            pieces, position = self._read(position, plan.rows * plan.tokens, plan.document_cap)
            extra, _ = self._read(position, 1, plan.document_cap)
            flat, fresh = gather(pieces + extra)
            inputs, targets, fresh = flat[:-1], flat[1:], fresh[:-1]
        else:
            pieces = []
            for _ in range(plan.rows):
                row, position = self._read(position, plan.tokens + 1, plan.document_cap)
                pieces += row
            flat, fresh = (x.reshape(plan.rows, plan.tokens + 1) for x in gather(pieces))
            inputs, targets, fresh = flat[:, :-1], flat[:, 1:], fresh[:, :-1]
        fresh = fresh.reshape(plan.rows, plan.tokens)
        fresh[:, 0] = False
        batch = Batch(
            self._step,
            # Copies: inputs and targets overlap in `flat`, and a caller may write into one of them.
            torch.from_numpy(inputs.reshape(fresh.shape).astype(np.int64)),
            torch.from_numpy(targets.reshape(fresh.shape).astype(np.int64)),
            torch.from_numpy(np.cumsum(fresh, axis=1, dtype=np.int32)),
        )
        self._ready.append((self._position, batch))
        self._step, self._position = self._step + 1, position

    def _read(self, position: Position, count: int, cap: int) -> tuple[list[Spans], Position]:
        """The units that hold the next `count` tokens, and the position after them. Raises DataExhausted."""
        pieces = []
        while count:
            if position.shard == len(self._shards):
                if not self._repeat:
                    raise DataExhausted(
                        f"the training data ({self._total:,} tokens) ends before step {self._step} is full: "
                        "train fewer steps, add shards, or let the data repeat"
                    )
                position = Position(position.epoch + 1, 0, 0)
            order = self._order(position, cap)
            if self._keep:
                spans, offset, size = order.keep(position.offset, count, cap)
            else:
                spans, offset, size = order.drop(position.offset, count)
            pieces.append(spans)
            count -= int(spans.lengths.sum())
            used_up = offset == size
            position = Position(position.epoch, position.shard + used_up, 0 if used_up else offset)
        return pieces, position

    def _order(self, position: Position, cap: int) -> Order:
        """The chunks (keep) or capped documents (drop) of the shard at `position`, in order; the last one is held."""
        if self._order_key != (position.epoch, position.shard, cap):
            which = position.shard
            if self._shuffle:
                which = int(permutation(self._seed, position.epoch, 0, len(self._shards))[which])
            shard = self._shards[which]
            shard.scan_max()
            starts = shard.document_starts(self._bos)
            lengths = np.diff(starts, append=len(shard))
            if self._keep:
                starts, lengths = cut(starts, lengths, self._chunk_tokens)
            else:
                lengths = np.minimum(lengths, cap)
            if self._shuffle:
                order = permutation(self._seed, position.epoch, which + 1, len(starts))
                starts, lengths = starts[order], lengths[order]
            self._held_order = Order(shard, starts, np.cumsum(lengths))
            self._order_key = (position.epoch, position.shard, cap)
        return self._held_order


def gather(pieces: Sequence[Spans]) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of pieces in a row: ids uint16 [n], and bool [n], True where a piece begins."""
    total = sum(int(piece.lengths.sum()) for piece in pieces)
    ids, fresh = np.empty(total, np.uint16), np.zeros(total, bool)
    done = 0
    for piece in pieces:
        before = np.cumsum(piece.lengths) - piece.lengths
        count = int(piece.lengths.sum())
        source = np.repeat(piece.starts - before, piece.lengths) + np.arange(count)
        ids[done : done + count] = piece.shard.tokens.view(np.ndarray)[source]
        fresh[done + before] = True
        done += count
    return ids, fresh


def validation_rows(
    shards: Sequence[Shard], tokens: int, rows: int | None, bos: int, batch_rows: int = 1
) -> Iterator[Batch]:
    """Fixed micro-rows of T = tokens, unaligned and contiguous, in file order; docs change at each `bos`.

    Row k of a shard has the inputs k*T .. k*T + T and the targets one further; no row crosses shards. rows=None: all of
    them, so that each token but a shard's first is a target once; the last row of a shard is padded with inputs `bos`
    of a document of their own and targets -100. rows=n: n of the whole rows, evenly spaced over all shards (all rows as
    with None when there are no more than n).
    Yields Batch of batch_rows rows (the last may have fewer), step counting them from 0.
    Raises DataError, before the first is yielded, for ids outside a shard's vocab_size and when there is no target.
    """
    for name, value in (("tokens", tokens), ("rows", 1 if rows is None else rows), ("batch_rows", batch_rows)):
        if value < 1:
            raise DataError(f"validation needs {name} >= 1, not {value}")
    for shard in shards:
        shard.scan_max()
    whole = [(shard, k * tokens) for shard in shards for k in range((len(shard) - 1) // tokens)]
    if rows is not None and rows < len(whole):
        chosen = [whole[i * len(whole) // rows] for i in range(rows)]
    else:
        chosen = [(shard, at) for shard in shards for at in range(0, len(shard) - 1, tokens)]
    if not chosen:
        raise DataError("the validation data has no token to predict: give a shard of at least 2 tokens")
    return _validation_batches(chosen, tokens, bos, batch_rows)


def _validation_batches(chosen: list[tuple[Shard, int]], tokens: int, bos: int, batch_rows: int) -> Iterator[Batch]:
    for step, first in enumerate(range(0, len(chosen), batch_rows)):
        group = chosen[first : first + batch_rows]
        inputs = np.full((len(group), tokens), bos, np.int64)
        targets = np.full((len(group), tokens), IGNORED, np.int64)
        fresh = np.zeros((len(group), tokens), bool)
        for row, (shard, at) in enumerate(group):
            ids = shard.tokens[at : at + tokens + 1]
            count = len(ids) - 1
            inputs[row, :count], targets[row, :count] = ids[:-1], ids[1:]
            fresh[row, :count] = ids[:-1] == bos
            fresh[row, count : count + 1] = True
        fresh[:, 0] = False
        docs = np.cumsum(fresh, axis=1, dtype=np.int32)
        yield Batch(step, torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(docs))
