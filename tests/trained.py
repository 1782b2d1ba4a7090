"""Parts away from their initial values, for tests in which each number must count.

Lives here: `trained_like` and `rows_of`. Not here: tiny corpora and whole runs (tiny.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mome.command import parse
from mome.run import Parts, build
from mome.table.rows import RowTable


def push_random(table: RowTable) -> None:
    """One event that moves every number of a table by about as much as it is worth itself."""
    ws = table.pull([torch.arange(table.spec.rows, device=table.device)])
    ws.rows.grad = torch.randn_like(ws.rows)
    table.push(ws, 1.0)


def trained_like(words: list[str], vocab_size: int, bos: int) -> Parts:
    """The parts of a command line in float64, every parameter and row moved."""
    parts = build(parse(words).config, vocab_size, bos)
    parts.model.double()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    for table in parts.tables.values():
        push_random(table)
    return parts


def rows_of(parts: Parts, tokens_BT: Tensor, history_BH: Tensor | None = None) -> dict[str, Tensor]:
    """The rows that tokens read, by memory, in float64: [B, T, reads, lanes, dim]."""
    sets, slots = parts.read(tokens_BT, history_BH)
    return {name: one.gather_slots(slots[name]).double() for name, one in sets.items()}
