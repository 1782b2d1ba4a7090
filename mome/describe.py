"""What a configuration comes to, counted before anything is trained.

Lives here: parameters by group, bytes, schedule and FLOPs as text (--dry-run), and the counts of a result.
Not here: predictions of time, which need a measurement.
"""

from __future__ import annotations

import io

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from mome.config import RunConfig
from mome.gpt import count_flops
from mome.memory import Memory
from mome.run import build_model, vocabulary_size
from optim.groups import describe as describe_groups

FLOAT_BYTES = 4


def parameter_counts(model: nn.Module, memories: dict[str, Memory]) -> tuple[int, int]:
    """(active, memory): dense parameters plus the row elements that one token reads, and all elements of the tables."""
    dense = sum(parameter.numel() for parameter in model.parameters())
    read = sum(memory.reads * memory.spec.lanes * memory.spec.dim for memory in memories.values())
    return dense + read, sum(memory.spec.rows * memory.spec.lanes * memory.spec.dim for memory in memories.values())


def describe(config: RunConfig) -> str:
    """Shapes, parameters by group, bytes, schedule and training FLOPs a token of a configuration."""
    vocab_size = vocabulary_size(config)
    with torch.device("meta"):
        model, memories = build_model(config, vocab_size, bos=0)
    active, in_memory = parameter_counts(model, memories)
    page = Console(file=io.StringIO(), width=120, highlight=False)
    page.print(
        f"{config.preset}: {config.model.kind}, {config.model.layers} layers, width {config.model.width}, "
        f"{config.model.heads} heads, vocabulary {vocab_size:,}"
    )
    page.print(
        f"active parameters {active:,} (dense, and the rows a token reads); memory parameters {in_memory:,}",
        markup=False,
    )
    page.print(describe_groups(model.named_parameters(), config.optim), markup=False)
    page.print(tables_of(config, memories))
    page.print(stages_of(config))
    schedule = config.make_schedule()
    now = schedule.at(config.steps - 1)
    flops = count_flops(config.model, vocab_size, row_tokens=config.row_tokens, windows=now.windows)
    page.print(
        f"{schedule.total_tokens:,} tokens in {config.steps} steps; "
        f"{flops:,} training FLOPs a token in the last stage (without memory reads)"
    )
    return page.file.getvalue().rstrip()


def tables_of(config: RunConfig, memories: dict[str, Memory]) -> Table:
    """A line a table: its shape, its bytes, what a token reads, how it is trained."""
    table = Table(title="tables", title_justify="left")
    for column in (
        "memory",
        "site",
        "layers",
        "rows",
        "lanes",
        "dim",
        "weight MB",
        "state MB",
        "read a token",
        "rule",
        "lr",
        "decay",
    ):
        table.add_column(column)
    for name, memory in memories.items():
        spec, trained = memory.spec, getattr(config.table, name)
        rule_state = spec.rows * (FLOAT_BYTES * spec.lanes * (trained.rule != "sgd") + FLOAT_BYTES)
        table.add_row(
            name, memory.site, ",".join(map(str, memory.layers)), f"{spec.rows:,}", str(spec.lanes), str(spec.dim),
            f"{spec.rows * spec.lanes * spec.dim * FLOAT_BYTES / 1e6:,.1f}", f"{rule_state / 1e6:,.1f}",
            f"{memory.reads * spec.lanes * spec.dim * FLOAT_BYTES:,} B",
            trained.rule, str(trained.lr), str(trained.weight_decay),
        )  # fmt: skip
    return table


def stages_of(config: RunConfig) -> Table:
    """A line a stage of the schedule."""
    table = Table(title="schedule", title_justify="left")
    for column in ("steps", "rows a step", "tokens a step", "windows", "document cap", "lr at its start"):
        table.add_column(column)
    schedule, step = config.make_schedule(), 0
    while step < config.steps:
        now, end = schedule.at(step), schedule.stage_end(step)
        windows = "{} / {}".format(*now.windows)
        table.add_row(
            f"{step}-{end - 1}",
            str(now.rows),
            f"{now.rows * now.tokens:,}",
            windows,
            str(now.document_cap),
            f"{now.lr:.3f}",
        )
        step = end
    return table
