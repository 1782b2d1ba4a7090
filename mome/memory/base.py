"""The memory protocol: what a memory asks of a table, and what it adds at which plug point of the backbone.

Lives here: Memory, the shape of the backbone it is built for, and what memories share (placement, gates, refusals).
Not here: any one memory, the rows (mome/table/), and the plug points (mome/gpt.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mome.errors import UserError
from mome.table.hashing import MOST_ROWS
from mome.table.spec import TableSpec

Placement = Literal["all", "alternate", "last"] | tuple[int, ...]


@dataclass(frozen=True)
class ModelShape:
    """What a memory has to know of the backbone."""

    layers: int
    width: int
    heads: int
    head_dim: int
    vocab_size: int
    bos: int
    token_strings: Sequence[bytes | None] | None = None
    """What each id stands for (data.tokenizer's token_strings); None where a saved model is about to be loaded."""


class PlugPoint(Protocol):
    """What a plug point offers; mome.gpt.Site is one.

    x: the tensor that the memory is added to, [B, T, D] at residual, [B, T, H, K] at value.
    h: [B, T, D], the RMS-normed block input.
    """

    x: Tensor
    h: Tensor


class Memory(nn.Module, ABC):
    """Sparse rows, looked up by token ids, that add something to the backbone at some of its layers.

    The rows are no parameters of this module: a RowTable of shape `spec` owns and trains them, and a forward pass
    brings the rows of its tokens. The module owns the small dense parameters. Their names say how they are trained:
    `router.*` and `gate.*` are matrices [out, in], everything else is a vector.

    A memory sees the context through the plug point alone, and through its h alone unless a router is told to look
    at x: exchanging h takes the context away.
    """

    Config: ClassVar[type]
    """Frozen dataclass of options, every field with a default."""
    site: ClassVar[Literal["input", "value", "residual", "ffn"]]
    plan: ClassVar[Literal["ahead", "late"]] = "ahead"
    """ahead: row ids follow from token ids alone; late: they are found in the forward pass."""

    layers: tuple[int, ...]
    """Layers at which `read` is called, ascending."""
    spec: TableSpec
    reads: int
    """Rows that one token reads."""
    history: int
    """How many ids before the first token `row_ids` looks at."""
    warnings: tuple[str, ...] = ()
    """What the configuration is likely to cost, a line each: a trainer says them once, at its start."""

    @abstractmethod
    def row_ids(self, tokens_BT: Tensor, history_BH: Tensor | None) -> Tensor:
        """Row ids, int64 [B, T, reads], of token ids int64 [B, T].

        history_BH: the ids before each micro-row, the nearest last, -1 where there is none; None is -1 everywhere.
        Ids in one piece, in chunks or one token at a time are the same when the history is handed on.
        """

    @abstractmethod
    def prepare(self, rows_BTRLD: Tensor, tokens_BT: Tensor, history_BH: Tensor | None) -> Any:
        """What all layers share, made once a forward pass of rows [B, T, reads, lanes, dim]; goes to `read`."""

    @abstractmethod
    def read(self, layer: int, payload: Any, site: PlugPoint) -> Tensor:
        """What is added to site.x at `layer`: shape and dtype of site.x."""


def place_layers(placement: Placement, depth: int, option: str) -> tuple[int, ...]:
    """The layers, ascending, of a backbone of `depth` layers that a placement names.

    alternate: every second layer, so that the last one has a memory (MoME's released code); last: the last layer.
    Raises UserError naming `option` for an unknown word or for layers that are not ascending numbers below depth.
    """
    named = {"all": range(depth), "alternate": range((depth - 1) % 2, depth, 2), "last": range(depth - 1, depth)}
    if isinstance(placement, str):
        check(placement in named, option, placement, f"choose one of {', '.join(named)}, or give layer numbers")
        return tuple(named[placement])
    layers = tuple(placement)
    ascending = all(one < other for one, other in pairwise(layers))
    inside = all(isinstance(layer, int) and 0 <= layer < depth for layer in layers)
    remedy = f"give ascending layer numbers from 0 to {depth - 1}"
    check(len(layers) > 0 and inside and ascending, option, placement, remedy)
    return layers


def open_gates(h_BTD: Tensor, weight_GC: Tensor) -> Tensor:
    """Gates 2 * sigmoid(W h[:C]), [B, T, G] in the weight's dtype: 1 at zero weights (MoME's released code)."""
    return 2 * torch.sigmoid(F.linear(h_BTD[..., : weight_GC.shape[1]].to(weight_GC.dtype), weight_GC))


def zero_gates(layers: int, gates: int, channels: int) -> nn.ParameterList:
    """A zero gate matrix [gates, channels] for each memory layer."""
    return nn.ParameterList(nn.Parameter(torch.zeros(gates, channels)) for _ in range(layers))


def check(holds: bool, option: str, value: Any, remedy: str) -> None:
    """Raise the one-line UserError of an option out of range; option: its path below --memory, as routed.top_k."""
    if not holds:
        shown = ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value
        raise UserError(f"--memory.{option.replace('_', '-')} {shown}: {remedy}")


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Raise UserError unless value is one of the choices."""
    check(value in choices, option, value, f"choose one of {', '.join(choices)}")


def check_gate_channels(option: str, channels: int, width: int) -> None:
    """Raise UserError unless a gate can look at this many channels of a hidden state of that width."""
    check(1 <= channels <= width, option, channels, f"a gate looks at 1 to {width} (the model's width) channels")


def check_rows(option: str, rows: int, hash_option: str, kind: str) -> None:
    """Raise UserError unless a hash can fill so many rows: the reserved one, and one or more for n-grams."""
    most = MOST_ROWS[kind]
    wider = f"; --memory.{hash_option} mix takes more" if kind == "xor" and rows > most else ""
    check(2 <= rows <= most, option, rows, f"the hash {kind} takes 2 to {most} rows{wider}")
