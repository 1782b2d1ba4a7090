"""Validation: nats a token and bits a byte over validation rows, and the same with the memory knocked out.

Lives here: the one evaluation loop, never sampled, which changes nothing that training sees.
Not here: where the rows come from (data/loader.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from data.loader import validation_rows
from data.shards import Shard
from mome.loss import token_nats
from mome.run import Parts
from mome.world import World

KNOCKOUTS = ("off", "mean_row", "shuffled_rows", "swapped_routes")


def knockouts(parts: Parts) -> tuple[str, ...]:
    """'full', every knock-out of all memories at once, and with several memories each one off alone, 'off:NAME'."""
    alone = tuple(f"off:{name}" for name in parts.memories) if len(parts.memories) > 1 else ()
    return ("full", *KNOCKOUTS, *alone) if parts.memories else ()


@dataclass(frozen=True)
class Score:
    """val_loss: mean nats over all tokens. val_bpb: bits a byte over tokens that stand for text; None if none does."""

    val_loss: float
    val_bpb: float | None
    tokens: int


@torch.no_grad()
def evaluate(
    parts: Parts, shards: list[Shard], token_bytes_V: Tensor, bos: int, windows: tuple[int, int], *,
    row_tokens: int, rows: int, batch_rows: int, dtype: torch.dtype, knockout: str = "full", world: World | None = None,
) -> Score:  # fmt: skip
    """Score the model on `rows` evenly spread validation rows of `row_tokens` tokens (0: all of them).

    Special tokens stand for no bytes: they count in val_loss and not in val_bpb. Of several processes each takes every
    size-th batch, and all get the score of all.
    knockout: 'full', or what is put in the memory's place: 'off' nothing ('off:NAME': in that of one alone), 'mean_row'
    the mean of the rows that the batch reads, 'shuffled_rows' each row exchanged for another one of the batch,
    'swapped_routes' routers and gates that look at another micro-row. Bigram and trigram rows are kept apart.
    """
    world = world or World()
    device = next(parts.model.parameters()).device
    token_bytes_V = token_bytes_V.to(device)
    # Nats of all tokens, nats of text, tokens, bytes of text.
    sums_4 = torch.zeros(4, dtype=torch.float64, device=device)
    batches = validation_rows(shards, row_tokens, rows or None, bos, batch_rows=batch_rows)
    while whole := list(islice(batches, world.size)):
        # Who has none left in the last round reads no rows, but is there when the others do.
        batch, some = (whole[world.rank], slice(None)) if world.rank < len(whole) else (whole[0], slice(0))
        tokens_BT, targets_BT, docs_BT = (one[some].to(device) for one in (batch.tokens, batch.targets, batch.docs))
        sets, slots = parts.read(tokens_BT)
        if not len(tokens_BT):
            continue
        generator = torch.Generator().manual_seed(batch.step)
        hidden_BTD = parts.forward(
            sets, slots, tokens_BT, docs_BT, windows=windows, dtype=dtype,
            change=partial(knock_out, knockout=knockout, generator=generator), swap_routes=knockout == "swapped_routes",
        )  # fmt: skip
        nats_BT = token_nats(hidden_BTD, parts.model.head, targets_BT, softcap=parts.model.softcap).double()
        valid_BT = targets_BT >= 0
        bytes_BT = token_bytes_V[targets_BT.clamp(min=0)] * valid_BT
        sums_4 += torch.stack(
            [nats_BT.sum(), (nats_BT * (bytes_BT > 0)).sum(), valid_BT.sum().double(), bytes_BT.sum().double()]
        )
    nats, text_nats, tokens, text_bytes = world.all_reduce("validation sums", sums_4).wait().tolist()
    bpb = text_nats / (math.log(2) * text_bytes) if text_bytes else None
    return Score(nats / tokens, bpb, int(tokens))


def knock_out(rows: dict[str, Tensor], knockout: str, generator: torch.Generator) -> dict[str, Tensor]:
    """The gathered rows [B, T, reads, lanes, dim] with something else in their place, as `evaluate` says."""
    if knockout == "off":
        return {}
    if knockout.startswith("off:"):
        return {name: rows_BTRLD for name, rows_BTRLD in rows.items() if name != knockout.removeprefix("off:")}
    if knockout == "mean_row":
        return {name: rows_BTRLD.mean((0, 1), keepdim=True).expand_as(rows_BTRLD) for name, rows_BTRLD in rows.items()}
    if knockout == "shuffled_rows":
        return {name: shuffled(rows_BTRLD, generator) for name, rows_BTRLD in rows.items()}
    return rows


def shuffled(rows_BTRLD: Tensor, generator: torch.Generator) -> Tensor:
    """The positions' rows in another order, each read (order of n-gram) among its own kind."""
    flat = rows_BTRLD.flatten(0, 1)
    order = torch.randperm(len(flat), generator=generator).to(flat.device)
    return flat.index_select(0, order).view_as(rows_BTRLD)
