"""NgramMemory: hashed bigram and trigram rows, added to the residual stream through a gate a token.

Lives here: row ids with the rule for document bounds, the +-1 sign pool, the sum over orders, the gates.
Not here: the hash functions (mome/table/hashing.py) and the rows.

Equations (modded-nanogpt: bigram table and gates; its pull request 360: trigrams, sums of signed rows): with e_{t,n}
the row that the n-gram ending at token t is hashed to, and s_{t,n} a row of +-1 that it picks by another hash,
    p_t = sum_n s_{t,n} * e_{t,n}            once a forward pass,
    x_t <- x_t + c_l 2 sigmoid(W_l h_t[:C]) p_t     before the attention of each memory layer l; W_l = 0 at the start.
n-grams that share a row seldom share their signs, so they disturb each other less. The rows start at zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mome.memory.base import (
    Memory,
    ModelShape,
    Placement,
    PlugPoint,
    check,
    check_gate_channels,
    open_gates,
    place_layers,
    zero_gates,
)
from mome.table.hashing import hash_ngrams, ngram_windows, sign_index, splitmix64
from mome.table.rows import TableSpec


@dataclass(frozen=True)
class NgramConfig:
    """Options of the n-gram tables."""

    rows: int = 65_536
    """Rows for each order; the last of them stands for a token with too little before it."""
    orders: tuple[int, ...] = (2, 3)
    """Lengths of the n-grams, each read from rows of its own: 2, 3 or both."""
    sign_rows: int = 8192
    """Rows of the pool of fixed signs; 0: no signs."""
    layers: Placement = "all"
    """Layers with a memory: all, alternate (every second, ending at the last), last, or layer numbers."""
    gate_channels: int = 32
    """Channels of the hidden state that the gates look at."""
    scale: float | None = None
    """Initial c_l of each layer; None: 1 / number of memory layers, so that together they add the rows once."""
    cross_documents: bool = True
    """Whether an n-gram may begin in the document before; if not, such a token has too little before it. Documents are
    told apart by their start token alone, as in decoding: the pieces of one longer than the document cap are not."""

    def __post_init__(self):
        check(2 <= self.rows < 2**31, "ngram.rows", self.rows, "give 2 rows or more, and fewer than 2**31")
        orders = self.orders in ((2,), (3,), (2, 3))
        check(orders, "ngram.orders", self.orders, "give 2, 3, or both in this order")
        check(0 <= self.sign_rows < 2**31, "ngram.sign_rows", self.sign_rows, "give 1 row or more, or 0 for no signs")


class NgramMemory(Memory):
    """Hashed n-grams; a read for each order, from that order's own range of rows; lanes = 1, dim = width."""

    Config = NgramConfig
    site = "residual"

    def __init__(self, config: NgramConfig, model: ModelShape, seed: int):
        """seed: of the sign pool, which is made again from it and not saved."""
        super().__init__()
        check_gate_channels("ngram.gate_channels", config.gate_channels, model.width)
        self.config = config
        self.bos = model.bos
        self.layers = place_layers(config.layers, model.layers, "ngram.layers")
        self.reads = len(config.orders)
        self.history = max(config.orders) - 1
        self.spec = TableSpec(config.rows * self.reads, lanes=1, dim=model.width, init=0.0)
        scale = 1 / len(self.layers) if config.scale is None else config.scale
        self.scale = nn.Parameter(torch.full((len(self.layers),), float(scale)))
        self.gate = zero_gates(len(self.layers), 1, config.gate_channels)
        self.register_buffer("signs_SD", sign_pool(seed, config.sign_rows, model.width), persistent=False)

    def row_ids(self, tokens_BT: Tensor, history_BH: Tensor | None) -> Tensor:
        """Row ids [B, T, orders]; the last row of an order's range where the n-gram is cut off."""
        rows = self.config.rows
        ids = []
        for place, order in enumerate(self.config.orders):
            ids_BT = hash_ngrams(tokens_BT, history_BH, order, rows)
            ids_BT = ids_BT.masked_fill(self._cut_off(tokens_BT, history_BH, order), rows - 1)
            ids.append(ids_BT + place * rows)
        return torch.stack(ids, dim=-1)

    def prepare(self, rows_BTRLD: Tensor, tokens_BT: Tensor, history_BH: Tensor | None) -> Tensor:
        """The signed sum over the orders, [B, T, D]."""
        rows_BTRD = rows_BTRLD.squeeze(3)
        if not self.config.sign_rows:
            return rows_BTRD.sum(dim=2)
        picks = []
        for order in self.config.orders:
            pick_BT = sign_index(tokens_BT, history_BH, order, self.config.sign_rows)
            picks.append(pick_BT.masked_fill(self._cut_off(tokens_BT, history_BH, order), 0))
        pick_BTR = torch.stack(picks, dim=-1)
        signs_BTRD = self.signs_SD.index_select(0, pick_BTR.flatten()).view_as(rows_BTRD)
        return (rows_BTRD * signs_BTRD).sum(dim=2)

    def read(self, layer: int, payload: Tensor, site: PlugPoint) -> Tensor:
        index = self.layers.index(layer)
        gates_BT1 = self.scale[index] * open_gates(site.h, self.gate[index])
        return (gates_BT1 * payload).to(site.x.dtype)

    def _cut_off(self, tokens_BT: Tensor, history_BH: Tensor | None, order: int) -> Tensor:
        """Bool [B, T]: with cross_documents off, whether a document begins in the n-gram after its first token."""
        cut_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        if not self.config.cross_documents:
            for ids_BT in ngram_windows(tokens_BT, history_BH, order)[:-1]:
                cut_BT |= ids_BT == self.bos
        return cut_BT


def sign_pool(seed: int, rows: int, width: int) -> Tensor:
    """Fixed signs, int8 [rows, width] of +-1, the same for a seed on every machine and in every version of torch."""
    # The seed is mixed first, so that the counters of neighbouring seeds do not overlap.
    bits = splitmix64(splitmix64(torch.tensor(seed)) + torch.arange(rows * width)) & 1
    return (2 * bits - 1).to(torch.int8).view(rows, width)
