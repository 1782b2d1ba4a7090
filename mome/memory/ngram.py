"""NgramMemory: rows of hashed n-grams, added to the residual stream through a gate a token.

Lives here: row ids with the rule for document bounds, the +-1 sign pool, the sum over orders and heads, the gates.
Not here: the hash functions (mome/table/hashing.py), which tokens count as one (canonical.py there), and the rows.

Equations (modded-nanogpt: bigram table and gates; its pull request 360: trigrams, sums of signed rows): with e_{t,n,k}
the row that head k hashes the n-gram ending at token t to, and s_{t,n,k} a row of +-1 that it picks by another hash,
    p_t = sum_{n,k} s_{t,n,k} * e_{t,n,k}    once a forward pass,
    x_t <- x_t + c_l 2 sigmoid(W_l h_t[:C]) p_t     before the attention of each memory layer l; W_l = 0 at the start.
n-grams that share a row seldom share their signs, nor, with several heads, all their rows (Engram, arXiv 2601.07372):
they disturb each other less. The rows start at zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from kernels.initial import splitmix64
from mome.memory.base import (
    Memory,
    ModelShape,
    Placement,
    PlugPoint,
    check,
    check_choice,
    check_gate_channels,
    check_rows,
    open_gates,
    place_layers,
    zero_gates,
)
from mome.table.canonical import canonical_ids
from mome.table.hashing import (
    HASHES,
    MOST_SIGN_ROWS,
    ORDERS,
    hash_ngrams,
    ngram_windows,
    sign_indices,
    weaknesses,
)
from mome.table.spec import TableSpec


@dataclass(frozen=True)
class NgramConfig:
    """Options of the n-gram tables."""

    rows: int = 65_536
    """Rows for each order and head; the last of them stands for a token with too little before it."""
    orders: tuple[int, ...] = (2, 3)
    """Lengths of the n-grams, 2 to 8, each read from rows of its own; of the hash xor 2, 3 or both."""
    hash: Literal["xor", "mix"] = "xor"
    """How an n-gram picks its row: the speedrun's XOR of products, below 2**31 rows, or a mix of 64 bits."""
    heads: int = 1
    """Rows that an n-gram picks for each order, by independent hashes, each from rows of its own; mix only."""
    canonical: bool = False
    """Whether tokens that differ in case, accents, white space around them or compatible forms hash as one."""
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
        check_choice("ngram.hash", self.hash, HASHES)
        xor, orders = self.hash == "xor", self.orders
        ascending = len(orders) > 0 and all(one < other for one, other in pairwise(orders))
        remedy = f"give ascending lengths from {ORDERS[0]} to {ORDERS[-1]}"
        check(ascending and all(order in ORDERS for order in orders), "ngram.orders", orders, remedy)
        alone = "goes with --memory.ngram.hash mix alone"
        check(not xor or orders[-1] <= 3, "ngram.orders", orders, f"beyond 3 {alone}")
        check(1 <= self.heads <= 64, "ngram.heads", self.heads, "give 1 to 64")
        check(not xor or self.heads == 1, "ngram.heads", self.heads, f"more than 1 {alone}")
        check_rows("ngram.rows", self.rows, "ngram.hash", self.hash)
        signs = 0 <= self.sign_rows <= MOST_SIGN_ROWS
        check(signs, "ngram.sign_rows", self.sign_rows, f"give 1 to {MOST_SIGN_ROWS} rows, or 0 for no signs")


class NgramMemory(Memory):
    """Hashed n-grams; a read for each order and head, from a range of rows of its own; lanes = 1, dim = width."""

    Config = NgramConfig
    site = "residual"

    def __init__(self, config: NgramConfig, model: ModelShape, seed: int):
        """seed: of the sign pool, which is made again from it and not saved.

        With canonical ids the classes of tokens are a buffer that is saved with the model. It is made from the shape's
        token_strings; without them it is unknown (-1) until a saved model is loaded.
        """
        super().__init__()
        check_gate_channels("ngram.gate_channels", config.gate_channels, model.width)
        self.config = config
        self.bos = model.bos
        self.layers = place_layers(config.layers, model.layers, "ngram.layers")
        self.reads = len(config.orders) * config.heads
        self.history = max(config.orders) - 1
        self.spec = TableSpec(config.rows * self.reads, lanes=1, dim=model.width, init=0.0)
        scale = 1 / len(self.layers) if config.scale is None else config.scale
        self.scale = nn.Parameter(torch.full((len(self.layers),), float(scale)))
        self.gate = zero_gates(len(self.layers), 1, config.gate_channels)
        self.register_buffer("signs_SD", sign_pool(seed, config.sign_rows, model.width), persistent=False)
        if config.canonical:
            strings = model.token_strings
            unknown_V = torch.full((model.vocab_size,), -1)
            self.register_buffer("canonical_V", unknown_V if strings is None else canonical_ids(strings))
            self._known = False
        self.warnings = tuple(weaknesses(config.orders, config.rows, config.hash, model.vocab_size))

    def row_ids(self, tokens_BT: Tensor, history_BH: Tensor | None) -> Tensor:
        """Row ids [B, T, orders x heads]; the last row of a range where the n-gram is cut off.

        Raises ValueError when canonical ids are asked for and unknown.
        """
        config = self.config
        kind = (config.orders, config.rows, config.hash, config.heads)
        ids_BTR = hash_ngrams(self._hashed(tokens_BT), self._hashed(history_BH), *kind)
        last_R = torch.arange(1, self.reads + 1, device=ids_BTR.device) * config.rows - 1
        return self._cut_off(ids_BTR, last_R, tokens_BT, history_BH)

    def prepare(self, rows_BTRLD: Tensor, tokens_BT: Tensor, history_BH: Tensor | None) -> Tensor:
        """The signed sum over the orders and heads, [B, T, D]."""
        config, rows_BTRD = self.config, rows_BTRLD.squeeze(3)
        if not config.sign_rows:
            return rows_BTRD.sum(dim=2)
        kind = (config.orders, config.sign_rows, config.hash, config.heads)
        pick_BTR = sign_indices(self._hashed(tokens_BT), self._hashed(history_BH), *kind)
        pick_BTR = self._cut_off(pick_BTR, pick_BTR.new_zeros(()), tokens_BT, history_BH)
        signs_BTRD = self.signs_SD.index_select(0, pick_BTR.flatten()).view_as(rows_BTRD)
        return (rows_BTRD * signs_BTRD).sum(dim=2)

    def read(self, layer: int, payload: Tensor, site: PlugPoint) -> Tensor:
        index = self.layers.index(layer)
        gates_BT1 = self.scale[index] * open_gates(site.h, self.gate[index])
        return (gates_BT1 * payload).to(site.x.dtype)

    def _hashed(self, ids: Tensor | None) -> Tensor | None:
        """The ids that are hashed in place of these, -1 for -1."""
        if ids is None or not self.config.canonical:
            return ids
        ids = ids.long()
        # Asked once: on a GPU an answer stalls.
        self._known = self._known or bool((self.canonical_V >= 0).all())
        if not self._known:
            raise ValueError("the canonical ids of ngram are unknown: give ModelShape token_strings, or load a model")
        return torch.where(ids < 0, ids, self.canonical_V[ids.clamp(min=0)])

    def _cut_off(self, found_BTR: Tensor, instead: Tensor, tokens_BT: Tensor, history_BH: Tensor | None) -> Tensor:
        """With cross_documents off, `instead` wherever a document begins in the n-gram after its first token."""
        if self.config.cross_documents:
            return found_BTR
        cuts, cut_BT = [], torch.zeros_like(tokens_BT, dtype=torch.bool)
        # Raw ids: what starts a document is the token, whatever it may fold with.
        for place, ids_BT in enumerate(ngram_windows(tokens_BT, history_BH, self.config.orders[-1])[:-1]):
            cut_BT = cut_BT | (ids_BT == self.bos)
            if place + 2 in self.config.orders:
                cuts += [cut_BT] * self.config.heads
        return torch.where(torch.stack(cuts, dim=-1), instead, found_BTR)


def sign_pool(seed: int, rows: int, width: int) -> Tensor:
    """Fixed signs, int8 [rows, width] of +-1, the same for a seed on every machine and in every version of torch."""
    # The seed is mixed first, so that the counters of neighbouring seeds do not overlap.
    bits = splitmix64(splitmix64(torch.tensor(seed)) + torch.arange(rows * width)) & 1
    return (2 * bits - 1).to(torch.int8).view(rows, width)
