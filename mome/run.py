"""What trainer and tools share: a model with its tables, from a configuration or from a run's folder.

Lives here: the corpus a configuration names, building the parts, one forward pass with memory rows, loading a run.
Not here: the training loop (train_gpt.py), validation (mome/evaluate.py), sampling (mome/generate.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import data.local
from data.errors import DataError
from data.loader import RowPlan
from data.shards import Shard, find_shards, fingerprint
from data.tokenizer import GPT2_VOCAB, Tokenizer, load_tokenizer
from mome.checkpoint import Checkpoint, newest
from mome.config import RunConfig
from mome.errors import SharedError, UserError
from mome.gpt import GPT
from mome.memory import MEMORIES, Memory, ModelShape
from mome.plain import PlainGPT
from mome.runfolder import RunFolder
from mome.table.exchange import Exchange
from mome.table.file import FileTable, saved_table
from mome.table.placement import Placement, least_loaded
from mome.table.rows import RowTable
from mome.table.working import WorkingSet
from mome.world import World
from optim.schedule import Schedule

CACHE = Path(__file__).resolve().parent.parent / ".cache"
SEARCHED_FOR_BOS = 1 << 20
# Buckets of rows a rank that the placement balanced tells apart: more gain nothing.
BUCKETS = 256


@dataclass
class Corpus:
    """Opened and checked token data. fingerprint: of the tokens and the tokenizer."""

    tokenizer: Tokenizer
    train: list[Shard]
    val: list[Shard]
    fingerprint: str


def opened(pattern: str, what: str, tokenizer: Tokenizer) -> list[Shard]:
    """The shards of a glob, every id checked. Raises DataError, also when no document start is near a shard's start."""
    shards = [Shard(path, tokenizer.vocab_size) for path in find_shards(pattern, what)]
    for shard in shards:
        shard.scan_max()
        if not (shard.tokens[:SEARCHED_FOR_BOS] == tokenizer.bos).any():
            raise DataError(
                f"{shard.path}: no document start (id {tokenizer.bos}) in its first {SEARCHED_FOR_BOS:,} tokens; "
                "it was made with another tokenizer: give that with --tokenizer"
            )
    return shards


def open_corpus(config: RunConfig, log: Callable[[str], None]) -> Corpus:
    """The shards and the tokenizer that a configuration names; the built-in corpus is made when it is missing."""
    local = None
    if config.train_glob and config.tokenizer == "local":
        beside = Path(config.train_glob).parent / "tokenizer.json"
        raise UserError(f"--train-glob {config.train_glob}: name its tokenizer too, --tokenizer {beside} or gpt2")
    if config.train_glob:
        tokenizer = load_tokenizer(config.tokenizer)
        train_glob, val_glob = config.train_glob, config.val_glob
    elif config.tokenizer == "local":
        local = data.local.build(CACHE / "local", log)
        tokenizer = load_tokenizer(local.tokenizer_path)
        train_glob, val_glob = local.train_glob, local.val_glob
    else:
        raise UserError(
            f"preset {config.preset} trains on your shards: give --train-glob and --val-glob "
            "(python -m data.tokenize makes them)"
        )
    train, val = opened(train_glob, "training", tokenizer), opened(val_glob, "validation", tokenizer)
    shared = {shard.path.resolve() for shard in train} & {shard.path.resolve() for shard in val}
    if shared:
        raise UserError(f"{shared.pop()} is among the training and the validation shards; narrow one of the globs")
    if local:
        return Corpus(tokenizer, train, val, local.fingerprint)
    both = fingerprint([shard.path for shard in [*train, *val]]) + tokenizer.fingerprint()
    return Corpus(tokenizer, train, val, hashlib.sha256(both.encode()).hexdigest())


@dataclass
class Parts:
    """A model and the tables that its memories read. exchanges: of tables that train, what brings the rows of all."""

    model: GPT | PlainGPT
    memories: dict[str, Memory]
    tables: dict[str, RowTable | FileTable]
    exchanges: dict[str, Exchange] = field(default_factory=dict)

    def row_ids(self, tokens_BT: Tensor, history_BH: Tensor | None = None) -> dict[str, Tensor]:
        """Row ids [B, T, reads] of every memory; history: the ids before each micro-row, -1 where there are none."""
        return {
            name: memory.row_ids(tokens_BT, self._tail(memory, history_BH)) for name, memory in self.memories.items()
        }

    def _tail(self, memory: Memory, history_BH: Tensor | None) -> Tensor | None:
        return None if history_BH is None else history_BH[:, history_BH.shape[1] - memory.history :]

    def payloads(
        self, rows: Mapping[str, Tensor], tokens_BT: Tensor, history_BH: Tensor | None = None
    ) -> dict[str, Any]:
        """What each memory makes of its gathered rows [B, T, reads, lanes, dim], once a forward pass."""
        return {
            name: self.memories[name].prepare(rows_BTRLD, tokens_BT, self._tail(self.memories[name], history_BH))
            for name, rows_BTRLD in rows.items()
        }

    def forward(
        self, sets: Mapping[str, WorkingSet], slots: Mapping[str, Tensor], tokens_BT: Tensor, docs_BT: Tensor, *,
        windows: tuple[int, int], dtype: torch.dtype, history_BH: Tensor | None = None,
        change: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None, **model_options: Any,
    ) -> Tensor:  # fmt: skip
        """Hidden states [B, T, D] of one pass: rows of the working sets, what memories make of them, the backbone.

        slots: where in its working set each memory's rows are [B, T, reads].
        change: what is done to the gathered rows, a memory left out being off. model_options: state, swap_routes.
        """
        rows = {name: one.gather_slots(slots[name]).to(dtype) for name, one in sets.items()}
        payloads = self.payloads(change(rows) if change else rows, tokens_BT, history_BH)
        return self.model(tokens_BT, docs_BT, payloads, windows=windows, **model_options)

    def read(
        self, tokens_BT: Tensor, history_BH: Tensor | None = None
    ) -> tuple[dict[str, WorkingSet], dict[str, Tensor]]:
        """Working sets for reading, one a table, and where in them the rows of these tokens are [B, T, reads].

        With several processes a collective: every rank calls it, with tokens or none (B = 0).
        """
        ids = self.row_ids(tokens_BT, history_BH)
        sources = self.exchanges or self.tables
        sets = {name: source.pull([ids[name]], grad=False) for name, source in sources.items()}
        return sets, {name: one.slots(0) for name, one in sets.items()}


def vocabulary_size(config: RunConfig) -> int:
    """Tokens in the vocabulary, without building the built-in corpus or fetching GPT-2's tokenizer."""
    if config.tokenizer == "local" and not config.train_glob:
        return data.local.VOCAB_SIZE
    if config.tokenizer == "gpt2":
        return GPT2_VOCAB
    return load_tokenizer(config.tokenizer).vocab_size


def build_model(
    config: RunConfig, vocab_size: int, bos: int, token_strings: Sequence[bytes | None] | None = None
) -> tuple[GPT | PlainGPT, dict[str, Memory]]:
    """Backbone and memories with their initial dense weights, a function of the configuration and its seed alone.

    token_strings: see ModelShape; not needed where a saved model is loaded into this one.
    """
    if config.model.kind == "plain":
        torch.manual_seed(config.seed)
        return PlainGPT(config.model, vocab_size), {}
    model = config.model
    shape = ModelShape(model.layers, model.width, model.heads, model.head_dim, vocab_size, bos, token_strings)
    torch.manual_seed(config.seed)
    memories = {}
    for name in config.memories:
        try:
            memories[name] = MEMORIES[name](getattr(config.memory, name), shape, seed=config.seed)
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"memory {name}: {error}") from error
    # The backbone draws from a stream of its own, so that switching a memory on leaves it as it was.
    torch.manual_seed(config.seed)
    return GPT(model, vocab_size, memories), memories


def build(
    config: RunConfig, vocab_size: int, bos: int, world: World | None = None, folder: Path | None = None,
    token_strings: Sequence[bytes | None] | None = None, prefix: Callable[[], Iterable[Tensor]] = lambda: (),
    dtype: torch.dtype = torch.float32,
) -> Parts:  # fmt: skip
    """Model and tables with their initial values, those rows that are this process's, on its device.

    dtype: of weights and of working sets; float64 for exactness tests. folder: where the files of tables with place
    `file` are made. prefix: makes token ids [B, T] of a beginning of the data, the same on every rank; asked for
    placements that are balanced by it.
    """
    world = world or World()
    model, memories = build_model(config, vocab_size, bos, token_strings)
    tables, exchanges = {}, {}
    for name, memory in memories.items():
        own = getattr(config.table, name)
        where = {"place": own.place, "rank": world.rank, "placement": place_rows(own.placement, memory, world, prefix)}
        if own.place == "file":
            mine = folder if world.alone else folder / f"rank_{world.rank:04d}"
            where |= {"folder": mine, "resident_bytes": round(own.resident_gib * 2**30), "keep_cached": own.cached}
        try:
            tables[name] = RowTable(
                memory.spec, own.row_rule(), seed=config.seed, dtype=dtype, device=world.device, name=name,
                format=own.format, **where,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(f"table {name}: {error}; --table.{name}.format, --table.{name}.place") from error
        exchanges[name] = Exchange(tables[name], world, torch.bfloat16 if own.wire == "bf16" else None)
    return Parts(model.to(world.device, dtype), memories, tables, exchanges)


def place_rows(kind: str, memory: Memory, world: World, prefix: Callable[[], Iterable[Tensor]]) -> Placement:
    """Who owns which rows of a memory's table; kind as TableConfig has it."""
    rows = memory.spec.rows
    if kind != "balanced" or world.alone:
        return Placement(rows, world.size, "contiguous" if kind == "balanced" else kind)
    bucket = max(1, -(-rows // (BUCKETS * world.size)))
    # One to begin with, or all buckets that the prefix does not touch would be the least loaded rank's.
    loads_B = torch.ones(-(-rows // bucket), dtype=torch.int64)
    for tokens_BT in prefix():
        # What an owner has to serve are distinct rows, a micro-row's here.
        for ids_TR in memory.row_ids(tokens_BT, None):
            loads_B += torch.bincount(torch.unique(ids_TR) // bucket, minlength=len(loads_B))
    return Placement(rows, world.size, kind, bucket, least_loaded(loads_B, world.size))


def pick_device() -> tuple[torch.device, torch.dtype, str]:
    """Where to compute, in which dtype, and why."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), torch.float32, "no CUDA device: float32 on the CPU, the same on every CPU"
    # Under torchrun each process of a machine has a device of its own.
    number, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= devices:
        raise SharedError(f"more processes than the {devices} CUDA devices of this machine: --nproc_per_node={devices}")
    torch.cuda.set_device(number)
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return device, torch.bfloat16, "CUDA compute capability 8.0 or later has bfloat16 matrix units"
    return device, torch.float32, "this CUDA device has no bfloat16 matrix units"


@dataclass
class LoadedRun:
    """A run read back from its folder."""

    folder: RunFolder
    config: RunConfig
    parts: Parts
    tokenizer: Tokenizer
    step: int


def load_run(path: Path, log: Callable[[str], None] = print, saved: Path | None = None) -> LoadedRun:
    """A checkpoint of a run, for reading: on the CPU in float32, its tables left in their files. saved: which one, that
    was just written; None: the newest whole one, every file of it read.
    """
    folder = RunFolder.open(path)
    config = folder.config()
    tokenizer = load_tokenizer(folder.path / "tokenizer.json")
    whole = saved or newest(folder.checkpoints, log)
    if whole is None:
        raise UserError(
            f"{folder.path}: no whole checkpoint yet; go on with: python train_gpt.py --resume {folder.path}"
        )
    checkpoint = Checkpoint(whole)
    model, memories = build_model(config, tokenizer.vocab_size, tokenizer.bos)
    load_model(model, checkpoint)
    tables = {}
    for name, memory in memories.items():
        trained, files = getattr(config.table, name), checkpoint.table(name)
        paths = [part.path for part in files.parts]
        tables[name] = saved_table(
            memory.spec, trained.row_rule(), config.seed, name, trained.format, files.clock, paths
        )
    return LoadedRun(
        folder, config, Parts(model.requires_grad_(False), memories, tables), tokenizer, checkpoint.state["step"]
    )


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill a model from a checkpoint; one of another shape is refused by the first tensor that differs."""
    own, saved = model.state_dict(), checkpoint.tensors("model")
    for name in sorted({*own, *saved}):
        if name not in own or name not in saved or own[name].shape != saved[name].shape:
            shapes = [tuple(group[name].shape) if name in group else "none" for group in (saved, own)]
            raise UserError(
                f"{checkpoint.path}: {name} has shape {shapes[0]}, the model wants {shapes[1]}; "
                "it belongs to another configuration"
            )
    model.load_state_dict(saved)


def row_plan(schedule: Schedule, step: int) -> RowPlan:
    """What a step is made of; past the last step (a look-ahead's end) the plan stays as it was."""
    now = schedule.at(min(step, schedule.steps - 1))
    return RowPlan(rows=now.rows, tokens=now.tokens, document_cap=now.document_cap)
