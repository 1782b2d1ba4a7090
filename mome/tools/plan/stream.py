"""The rows that ranks read in the cycles of a real token stream, through the trainer's own loader and memories.

Lives here: Tokens (shards and their tokenizer), Reads (the distinct rows of each rank), cycles of a run or of a plan.
Not here: who owns the rows and what is sent for them (traffic.py), how their number grows (growth.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import data.local
from data.loader import Batch, Loader, RowPlan, take
from data.shards import Shard
from data.tokenizer import Tokenizer, load_tokenizer
from kernels.segments import unique_ids
from mome.config import RunConfig
from mome.errors import UserError
from mome.memory import MEMORIES, Memory, ModelShape
from mome.run import CACHE, opened, row_plan
from optim.schedule import StepValues


@dataclass(frozen=True)
class Tokens:
    """A token stream. name: what a report calls it."""

    name: str
    shards: list[Shard]
    tokenizer: Tokenizer

    @property
    def count(self) -> int:
        return sum(map(len, self.shards))


@dataclass(frozen=True)
class Reads:
    """The distinct rows of a table that each of `ranks` ranks reads in a cycle.

    ids_N: int64, rank after rank and ascending within one; rank_N: int64, whose each is. tokens: of a rank.
    """

    ids_N: Tensor
    rank_N: Tensor
    ranks: int
    tokens: int

    @property
    def rows(self) -> float:
        """Distinct rows a rank, the mean."""
        return len(self.ids_N) / self.ranks

    def without(self, ids_H: Tensor) -> Reads:
        """The same but for these rows."""
        kept_N = torch.isin(self.ids_N, ids_H, invert=True)
        return Reads(self.ids_N[kept_N], self.rank_N[kept_N], self.ranks, self.tokens)


@dataclass(frozen=True)
class Shape:
    """What a cycle of a plan is: `steps` steps of `rank_rows` micro-rows a rank, of `tokens` tokens each."""

    steps: int
    rank_rows: int
    tokens: int
    document_cap: int

    @property
    def rank_tokens(self) -> int:
        """Tokens of a rank in a cycle."""
        return self.steps * self.rank_rows * self.tokens


def open_tokens(config: RunConfig, globs: Sequence[str]) -> Tokens:
    """The stream to count: the shards of the globs, else those that the configuration trains on.

    Raises UserError where neither names any, and DataError for shards of another tokenizer.
    """
    patterns, name = list(globs) or [config.train_glob], config.tokenizer
    if patterns == [""]:
        if name != "local":
            raise UserError(
                f"preset {config.preset} trains on your shards: give some with --tokens-from 'shards/train_*.bin'"
            )
        local = data.local.build(CACHE / "local", print)
        return Tokens("local", opened(local.train_glob, "training", load_tokenizer(local.tokenizer_path)),
                      load_tokenizer(local.tokenizer_path))  # fmt: skip
    if name == "local":
        beside = Path(patterns[0]).parent / "tokenizer.json"
        raise UserError(f"--tokens-from {patterns[0]}: name its tokenizer too, --tokenizer {beside} or gpt2")
    tokenizer = load_tokenizer(name)
    shards = [shard for pattern in patterns for shard in opened(pattern, "training", tokenizer)]
    return Tokens(", ".join(Path(pattern).name for pattern in patterns), shards, tokenizer)


def make_memories(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Memory]:
    """The memories of a configuration, for their row ids; no table and no backbone is made."""
    model = config.model
    shape = ModelShape(
        model.layers, model.width, model.heads, model.head_dim, tokenizer.vocab_size, tokenizer.bos,
        tokenizer.token_strings(),
    )  # fmt: skip
    return {name: MEMORIES[name](getattr(config.memory, name), shape, seed=config.seed) for name in config.memories}


def heaviest_cycle(config: RunConfig) -> tuple[StepValues, int]:
    """The cycle with the most tokens, the first of equal ones: the values of its steps, and how many it has."""
    cadence, best, step = config.make_cadence(), None, 0
    while step < config.steps:
        start, end = cadence.cycle(step)
        now = cadence.schedule.at(start)
        if best is None or now.rows * (end - start) > best[0].rows * best[1]:
            best = now, end - start
        step = end
    return best


def loader_of(config: RunConfig, tokens: Tokens, plan) -> Loader:
    """The trainer's loader under another plan of rows; it begins the stream again where it ends."""
    return Loader(
        tokens.shards, plan, bos=tokens.tokenizer.bos, seed=config.seed,
        chunk_tokens=max(stage.document_cap for stage in config.schedule.stages), tails=config.tails,
        shuffle=config.shuffle, log=lambda line: None,
    )  # fmt: skip


def planned_cycles(
    config: RunConfig, tokens: Tokens, memories: Mapping[str, Memory], shape: Shape, ranks: int, count: int
) -> Iterator[dict[str, Reads]]:
    """`count` cycles of this shape, one after the other in the stream, with so many ranks: Reads by table."""
    plan = RowPlan(ranks * shape.rank_rows, shape.tokens, shape.document_cap)
    loader = loader_of(config, tokens, lambda step: plan)
    for _ in range(count):
        yield reads_of([loader.next() for _ in range(shape.steps)], memories, ranks)


def prefix_of(
    config: RunConfig, tokens: Tokens, shape: Shape, ranks: int, most_rows: int = 4096
) -> Callable[[], Iterator[Tensor]]:
    """Makes the token ids of a plan's first cycle, a batch after the other, most_rows micro-rows of them at most."""

    def batches() -> Iterator[Tensor]:
        rows, left = ranks * shape.rank_rows, most_rows
        plan = RowPlan(rows, shape.tokens, shape.document_cap)
        loader = loader_of(config, tokens, lambda step: plan)
        for _ in range(min(shape.steps, -(-most_rows // rows))):
            yield loader.next().tokens[:left]
            left -= min(left, rows)

    return batches


def run_cycles(
    config: RunConfig, tokens: Tokens, memories: Mapping[str, Memory], ranks: int, steps: int
) -> Iterator[tuple[int, int, dict[str, Reads]]]:
    """The cycles of the first `steps` steps of a run by so many ranks: (first step, step after the last, Reads).

    Raises DataError where the ranks cannot share a step's micro-rows evenly.
    """
    cadence, step = config.make_cadence(), 0
    loader = loader_of(config, tokens, lambda at: row_plan(cadence.schedule, at))
    while step < steps:
        start, end = cadence.cycle(step)
        yield start, end, reads_of([loader.next() for _ in range(end - start)], memories, ranks)
        step = end


def reads_of(batches: Sequence[Batch], memories: Mapping[str, Memory], ranks: int) -> dict[str, Reads]:
    """Reads of the steps of a cycle, by table; each rank has its own micro-rows of each step."""
    found: dict[str, list[Tensor]] = {name: [] for name in memories}
    for rank in range(ranks):
        mine_GT = torch.cat([take(batch, rank, ranks).tokens for batch in batches])
        for name, memory in memories.items():
            found[name].append(unique_ids(memory.row_ids(mine_GT, None).flatten())[0])
    count = sum(batch.tokens.numel() for batch in batches) // ranks
    return {name: joined(ids, count) for name, ids in found.items()}


def joined(ids: Sequence[Tensor], tokens: int) -> Reads:
    """Reads from the distinct rows of rank 0, 1, ..., each int64 and ascending."""
    lengths = torch.tensor([len(one) for one in ids])
    return Reads(torch.cat(list(ids)), torch.arange(len(ids)).repeat_interleave(lengths), len(ids), tokens)
