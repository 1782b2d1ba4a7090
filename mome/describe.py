"""What a configuration comes to, counted before anything is trained.

Lives here: shapes, parameters by group, bytes, schedule and FLOPs as text (--dry-run), and the counts of a result.
Not here: predictions of time, which need a measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from mome.config import RunConfig
from mome.gpt import count_flops
from mome.memory import Memory
from mome.run import build_model, vocabulary_size
from mome.table.formats import row_format
from mome.table.spec import bytes_by_kind
from optim.groups import OptimConfig, aligned, label_of, state_bytes
from optim.groups import describe as describe_groups
from optim.schedule import Schedule, StepValues

FLOAT_BYTES = 4


def parameter_counts(model: nn.Module, memories: Mapping[str, Memory]) -> tuple[int, int]:
    """(active, memory): dense parameters plus the row elements that one token reads, and all elements of the tables."""
    dense = sum(parameter.numel() for parameter in model.parameters())
    read = sum(memory.reads * memory.spec.lanes * memory.spec.dim for memory in memories.values())
    return dense + read, sum(memory.spec.rows * memory.spec.lanes * memory.spec.dim for memory in memories.values())


def describe(config: RunConfig) -> str:
    """Shapes, parameters by group, bytes, schedule and training FLOPs a token of a configuration, in ASCII."""
    vocab_size = vocabulary_size(config)
    with torch.device("meta"):
        model, memories = build_model(config, vocab_size, bos=0)
    active, in_memory = parameter_counts(model, memories)
    schedule = config.make_schedule()
    windows = schedule.at(config.steps - 1).windows
    flops = count_flops(config.model, vocab_size, row_tokens=config.row_tokens, windows=windows)
    head = (
        f"{config.preset}: {config.model.kind}, {config.model.layers} layers, width {config.model.width}, "
        f"{config.model.heads} heads, vocabulary {vocab_size:,}\n"
        f"active parameters {active:,} (dense, and the rows a token reads); memory parameters {in_memory:,}"
    )
    tail = (
        f"{schedule.total_tokens:,} tokens in {config.steps} steps; "
        f"{flops:,} training FLOPs a token in the last stage (without memory reads)"
    )
    groups = describe_groups(model.named_parameters(), config.optim)
    tables = [tables_of(config, memories)] if memories else []
    return "\n\n".join([
        head, tensors_of(model, config.optim), groups, *tables, bytes_of(config, model, memories),
        stages_of(schedule), tail,
    ])  # fmt: skip


def tensors_of(model: nn.Module, optim: OptimConfig) -> str:
    """A line a tensor that is trained densely, those that differ in one number of their name and nothing else in one:
    name, shape, how many there are, parameters of all of them, group (the label in optim/groups.py)."""
    groups: dict[tuple, list[int]] = {}
    for name, parameter in model.named_parameters():
        before, number, after = re.fullmatch(r"(.*?)(?:(?<=\.)(\d+)(?=\.|$)(.*))?", name).groups()
        kind = (before, after, tuple(parameter.shape), label_of(name, parameter, optim))
        groups.setdefault(kind, []).extend([] if number is None else [int(number)])
    lines = [("tensor", "shape", "group", "tensors", "parameters")]
    for (before, after, shape, label), numbers in groups.items():
        count = max(1, len(numbers))
        size = " x ".join(map(str, shape)) or "1"
        name = before + ranges(numbers) + (after or "")
        lines.append((name, size, label, str(count), f"{count * torch.Size(shape).numel():,}"))
    return aligned(lines, left=3)


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as people write them: 0-3,5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@dataclass(frozen=True)
class Bytes:
    """What one part of a run holds in memory between two steps; working set and gradients of a table at most."""

    weights: int
    working_set: int
    gradients: int
    state: int


def byte_counts(config: RunConfig, model: nn.Module, memories: Mapping[str, Memory]) -> dict[str, Bytes]:
    """Bytes of the dense parameters ("dense") and of each table (its name), in float32; model may be on meta."""
    dense = sum(parameter.nbytes for parameter in model.parameters())
    counts = {"dense": Bytes(dense, 0, dense, state_bytes(model.named_parameters(), config.optim))}
    for name, memory in memories.items():
        spec = memory.spec
        pulled = spec.lanes * spec.dim * FLOAT_BYTES * min(spec.rows, memory.reads * cycle_tokens(config))
        weights, kinds = kept_bytes(config, name, memory)
        counts[name] = Bytes(weights, pulled, pulled, sum(kinds.values()) - weights)
    return counts


def kept_bytes(config: RunConfig, name: str, memory: Memory) -> tuple[int, dict[str, int]]:
    """Bytes of the rows of a memory's table, and of all it keeps by what it is for: the rows' planes, then state."""
    trained, spec = getattr(config.table, name), memory.spec
    kinds = bytes_by_kind(spec, trained.row_rule(), trained.format)
    return sum(kinds[plane] for plane in row_format(trained.format).planes(spec.lanes, spec.dim)), kinds


def cycle_tokens(config: RunConfig) -> int:
    """The most tokens that a cycle of the run has."""
    cadence, most = config.make_cadence(), 0
    for start, end, now in stages(cadence.schedule):
        # A stage's longest cycle is among the first two of its early and of its late part: the first may be cut short.
        for first in {start, min(max(start, cadence.switch), end - 1)}:
            one = cadence.cycle(first)
            two = cadence.cycle(min(one[1], end - 1))
            most = max(most, *(now.rows * now.tokens * (last - begin) for begin, last in (one, two)))
    return most


def stages(schedule: Schedule) -> Iterator[tuple[int, int, StepValues]]:
    """(first step, step after the last, values of the first step) of each stage that has steps."""
    start = 0
    while start < schedule.steps:
        end = schedule.stage_end(start)
        yield start, end, schedule.at(start)
        start = end


def bytes_of(config: RunConfig, model: nn.Module, memories: Mapping[str, Memory]) -> str:
    """byte_counts as text, with the sum."""
    ahead = f", and {config.prefetch} such sets more are read ahead" if config.prefetch else ""
    note = f"\n(a table's working set and gradients: of the most rows that a cycle can read{ahead})" if memories else ""
    counts = byte_counts(config, model, memories)
    lines = [("bytes", "weights", "working set", "gradients", "optimizer state")]
    rows = {"dense parameters" if name == "dense" else f"table {name}": one for name, one in counts.items()}
    rows["all"] = Bytes(*(sum(column) for column in zip(*(vars(one).values() for one in counts.values()))))
    lines += [(name, *(f"{value:,}" for value in vars(one).values())) for name, one in rows.items()]
    return aligned(lines, left=1) + note


def tables_of(config: RunConfig, memories: Mapping[str, Memory]) -> str:
    """A line a table: its shape, what a token reads, how it is trained; and one: how it is kept, in bytes."""
    lines = [("table", "site", "layers", "rows", "lanes", "dim", "bytes read a token", "rule", "lr", "decay")]
    counted = {name: kept_bytes(config, name, memory) for name, memory in memories.items()}
    kinds = list(dict.fromkeys(kind for _, sizes in counted.values() for kind in sizes))
    kept = [("table", "format", "place", *(f"bytes of {kind.replace('_', ' ')}" for kind in kinds))]
    for name, memory in memories.items():
        spec, trained = memory.spec, getattr(config.table, name)
        weight_decay, (weights, sizes) = trained.row_rule().weight_decay, counted[name]
        lines.append((
            name, memory.site, ranges(memory.layers), f"{spec.rows:,}", str(spec.lanes), str(spec.dim),
            f"{memory.reads * weights // spec.rows:,}", trained.rule, f"{trained.lr:g}",
            f"{weight_decay:g}" + (f" {trained.decay}" if weight_decay else ""),
        ))  # fmt: skip
        kept.append((name, trained.format, trained.place, *(f"{sizes.get(kind, 0):,}" for kind in kinds)))
    return aligned(lines, left=3) + "\n\n" + aligned(kept, left=3)


def stages_of(schedule: Schedule) -> str:
    """A line a stage of the schedule."""
    lines = [("steps", "rows a step", "tokens a step", "windows", "document cap", "lr at its start")]
    for start, end, now in stages(schedule):
        lines.append((
            f"{start}-{end - 1}", str(now.rows), f"{now.rows * now.tokens:,}", "{} / {}".format(*now.windows),
            str(now.document_cap), f"{now.lr:.3f}",
        ))  # fmt: skip
    return aligned(lines, left=1)
