"""RoutedMemory: MoME, a mixture of memory embeddings; the context picks among the slots of a token's row.

Lives here: the routers, the selection and its weights, the read into the attention values, the routes for an audit.
Not here: the rows. The dense baseline with as many parameters is value.py.

Equations (MoME, arXiv 2609.15126, and its released code jojo23333/Mixutre-Of-Memory-Embedding). A row n_t = f(x_t) has
M slots of width d for each memory layer; for head i of a layer, with h_t the RMS-normed block input,
    l_{t,i} = W_i h_t + b_i in R^M,   A = the K slots with the largest l,
    a_s = sigmoid(l_s) / sum_{r in A} sigmoid(l_r) for s in A, 0 elsewhere   (K = 1: a_s = softmax(l)_s over all M),
    m_{t,i} = sum_s a_s E[n_t, s],   v'_{t,i} = v_{t,i} + gamma_{t,i} m_{t,i},   gamma_t = 2 sigmoid(W_g h_t[:C]).
One bank of slots serves all heads of a layer. Routing is done in fp32 or more. gamma = 1 at the start.

Ties. W = b = 0 at the start, so all logits tie. They are broken by rotation: head i of the j-th memory layer prefers,
in row n, slot (n + j H + i) mod M, then the next, and so on around. Rows and heads thus spread evenly over the slots,
and a zero router learns: the slots of a row differ from the start (uniform rows), so the selected logits get different
gradients, and after one update of W the context decides. Rows that start at zero are refused with a zero router: where
all heads select the same slots (K = M, or one head) these stay equal and nothing reaches the router.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from mome.table.hashing import HASHES, hash_ngrams, weaknesses
from mome.table.spec import TableSpec

Weights = Literal["sigmoid-norm", "softmax-norm", "softmax-norm-detach", "softmax", "sigmoid"]
MAX_SLOTS = 255  # ranks among slots are counted in one byte


@dataclass(frozen=True)
class RoutedConfig:
    """Options of routed memory; the defaults are MoME's published nanochat configuration."""

    slots: int = 0
    """Slots of a row for each memory layer (M); 0: as many as heads, the size of a dense value embedding."""
    top_k: int = 2
    """Slots that a head reads (K)."""
    layers: Placement = "alternate"
    """Layers with a memory: alternate (every second, ending at the last), all, last, or layer numbers."""
    index: Literal["token", "bigram"] = "token"
    """What a row stands for: a token, or a hashed pair of the token and the one before it."""
    bigram_rows: int = 0
    """Rows of the table when index is bigram; the last one stands for a token with nothing before it."""
    hash: Literal["xor", "mix"] = "xor"
    """How a bigram picks its row: the speedrun's XOR of products, below 2**31 rows, or a mix of 64 bits."""
    weights: Weights = "sigmoid-norm"
    """Weights of the selected slots: sigmoid or softmax over all slots; norm: made to sum to 1; detach: no gradient
    through that sum. With top_k 1 sigmoid-norm and softmax-norm are the softmax over all slots, or the router would get
    no gradient."""
    router_input: Literal["hidden", "value"] = "hidden"
    """What routers look at: the normed block input, or each head's raw value (all heads of a layer then share one)."""
    router_std: float = 0.0
    """Standard deviation of the routers' initial weights; 0: ties broken by rotation decide the first step."""
    bank: Literal["shared", "per-head"] = "shared"
    """Whether the heads of a layer choose among the same slots, or each among its own."""
    share_layers: bool = False
    """Whether all memory layers read the same slots, each with routers of its own."""
    shared_slots: int = 0
    """Slots beside the routed ones that are always read, with weight 1."""
    gate_channels: int = 32
    """Channels of the hidden state that the gates look at."""
    init: float | None = None
    """Half-width of the rows' uniform initial values; None: sqrt(3 / width)."""

    def __post_init__(self):
        for field in ("slots", "bigram_rows", "shared_slots", "router_std"):
            check(getattr(self, field) >= 0, f"routed.{field}", getattr(self, field), "give 0 or more")
        check(self.slots <= MAX_SLOTS, "routed.slots", self.slots, f"give at most {MAX_SLOTS}")
        check(self.top_k >= 1, "routed.top_k", self.top_k, "a head reads 1 slot or more")
        check(self.init is None or self.init >= 0, "routed.init", self.init, "a half-width is 0 or more")
        check_choice("routed.index", self.index, ("token", "bigram"))
        check_choice("routed.weights", self.weights, get_args(Weights))
        check_choice("routed.router_input", self.router_input, ("hidden", "value"))
        check_choice("routed.bank", self.bank, ("shared", "per-head"))
        bigram = self.index == "bigram"
        check_choice("routed.hash", self.hash, HASHES)
        alone = "goes with --memory.routed.index bigram alone"
        check(bigram or self.hash == "xor", "routed.hash", self.hash, alone)
        if bigram:
            check_rows("routed.bigram_rows", self.bigram_rows, "routed.hash", self.hash)
        else:
            check(self.bigram_rows == 0, "routed.bigram_rows", self.bigram_rows, alone)
        remedy = "equal slots and a zero router never part; raise --memory.routed.router-std as well"
        check(self.init != 0 or self.router_std > 0, "routed.init", self.init, remedy)


class RoutedRows(NamedTuple):
    """What `prepare` hands to `read`.

    slots: for each memory layer the rows [N, G, M + S, d] of N = B * T tokens: G banks, M routed and S shared slots.
    ids_N: int64, the row of each token, which decides how ties are broken.
    """

    slots: tuple[Tensor, ...]
    ids_N: Tensor


class RoutedMemory(Memory):
    """MoME; row = token or hashed bigram, dim = head_dim.

    lanes = tables x banks x (slots + shared slots) in that order, where tables = memory layers (1 with share_layers)
    and banks = 1 (heads with bank per-head); by default lane = layer index * slots + slot.
    """

    Config = RoutedConfig
    site = "value"
    reads = 1

    def __init__(self, config: RoutedConfig, model: ModelShape, seed: int):
        """seed: of the routers' initial weights, when router_std is above 0."""
        super().__init__()
        check_gate_channels("routed.gate_channels", config.gate_channels, model.width)
        self.config = config
        self.heads = model.heads
        self.slots = config.slots or model.heads
        remedy = f"a head reads at most its {self.slots} slots; raise --memory.routed.slots"
        check(config.top_k <= self.slots, "routed.top_k", config.top_k, remedy)
        self.layers = place_layers(config.layers, model.layers, "routed.layers")
        self.history = 1 if config.index == "bigram" else 0
        self.banks = model.heads if config.bank == "per-head" else 1
        self.tables = 1 if config.share_layers else len(self.layers)
        rows = config.bigram_rows if config.index == "bigram" else model.vocab_size
        if config.index == "bigram":
            self.warnings = tuple(weaknesses((2,), rows, config.hash, model.vocab_size))
        init = (3 / model.width) ** 0.5 if config.init is None else config.init
        self.spec = TableSpec(rows, self.tables * self.banks * (self.slots + config.shared_slots), model.head_dim, init)
        hidden = config.router_input == "hidden"
        shape = (model.heads * self.slots, model.width) if hidden else (self.slots, model.head_dim)
        self.router = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in self.layers)
        self.router_bias = nn.ParameterList(nn.Parameter(torch.zeros(shape[0])) for _ in self.layers)
        self.gate = zero_gates(len(self.layers), model.heads, config.gate_channels)
        if config.router_std:
            generator = torch.Generator().manual_seed(seed)
            for weight in self.router:
                noise = torch.randn(shape, generator=generator, device="cpu")
                weight.data.copy_(noise * config.router_std)

    def row_ids(self, tokens_BT: Tensor, history_BH: Tensor | None) -> Tensor:
        if self.config.index == "token":
            return tokens_BT.long().unsqueeze(-1)
        return hash_ngrams(tokens_BT, history_BH, (2,), self.spec.rows, self.config.hash)

    def prepare(self, rows_BTRLD: Tensor, tokens_BT: Tensor, history_BH: Tensor | None) -> RoutedRows:
        """Splits the lanes by layer; a table that all layers share is there once for each."""
        lanes = (self.tables, self.banks, self.slots + self.config.shared_slots)
        # unbind, because its backward writes each layer's gradient once; slices would each pad theirs with zeros.
        slots = rows_BTRLD.flatten(0, 2).unflatten(1, lanes).unbind(1)
        ids_N = self.row_ids(tokens_BT, history_BH).flatten()
        return RoutedRows(slots * len(self.layers) if self.config.share_layers else slots, ids_N)

    def read(self, layer: int, payload: RoutedRows, site: PlugPoint) -> Tensor:
        index = self.layers.index(layer)
        weights_NHS = self._weights(index, payload.ids_N, site).permute(2, 0, 1)
        weights_NHS = F.pad(weights_NHS, (0, self.config.shared_slots), value=1.0)
        # The gate goes into the weights, a handful for each head, rather than over the head's width.
        weights_NHS = weights_NHS * open_gates(site.h, self.gate[index]).flatten(0, 1).unsqueeze(-1)
        # bmm over a permuted batch is ten times slower on the CPU: lay it out.
        weights_NGHS = weights_NHS.to(site.x.dtype).contiguous().unflatten(1, (self.banks, -1))
        return (weights_NGHS @ payload.slots[index].to(site.x.dtype)).view(site.x.shape)

    def routes(self, layer: int, payload: RoutedRows, site: PlugPoint) -> Tensor:
        """Weights of the routed slots at `layer`, [B, T, H, M], fp32 or more, as `read` uses them; 0: not selected."""
        weights_HMN = self._weights(self.layers.index(layer), payload.ids_N, site)
        return weights_HMN.permute(2, 0, 1).reshape(*site.h.shape[:2], self.heads, self.slots)

    def _weights(self, index: int, ids_N: Tensor, site: PlugPoint) -> Tensor:
        """Weights [H, M, N]: tokens last, so that work on a handful of slots still runs along memory."""
        wide = torch.promote_types(self.router[index].dtype, torch.float32)
        router, bias = self.router[index].to(wide), self.router_bias[index].to(wide)
        if self.config.router_input == "hidden":
            logits_HMN = torch.addmm(bias.unsqueeze(1), router, site.h.flatten(0, 1).to(wide).t())
            logits_HMN = logits_HMN.unflatten(0, (self.heads, self.slots))
        else:
            logits_HMN = F.linear(site.x.flatten(0, 1).to(wide), router, bias).permute(1, 2, 0).contiguous()
        order_HMN = tie_order(ids_N, self.heads, self.slots, first_site=index * self.heads)
        selected_HMN = select(logits_HMN, order_HMN, self.config.top_k)
        return slot_weights(logits_HMN, selected_HMN, self.config.weights, self.config.top_k)


def tie_order(ids_N: Tensor, heads: int, slots: int, first_site: int) -> Tensor:
    """Preference among equal slots, int16 [H, M, N], 0 first: slot (row + first_site + head) mod M, then on around."""
    turn_HN = (ids_N + torch.arange(first_site, first_site + heads, device=ids_N.device).unsqueeze(1)) % slots
    slot_M1 = torch.arange(slots, dtype=torch.int16, device=ids_N.device).unsqueeze(1)
    return (slot_M1 - turn_HN.to(torch.int16).unsqueeze(1)) % slots


def select(logits_HMN: Tensor, order_HMN: Tensor, top_k: int) -> Tensor:
    """The top_k largest logits of each (head, token), bool [H, M, N]; among equal ones those of the lowest order."""
    rank_HMN = torch.zeros_like(logits_HMN, dtype=torch.uint8)
    if top_k == logits_HMN.shape[1]:
        return rank_HMN == 0
    for slot in range(logits_HMN.shape[1]):
        rival_H1N, turn_H1N = logits_HMN[:, slot : slot + 1], order_HMN[:, slot : slot + 1]
        rank_HMN += (rival_H1N > logits_HMN) | ((rival_H1N == logits_HMN) & (turn_H1N < order_HMN))
    return rank_HMN < top_k


def slot_weights(logits_HMN: Tensor, selected_HMN: Tensor, kind: Weights, top_k: int) -> Tensor:
    """Weights [H, M, N] of the selected slots by the kinds of RoutedConfig.weights, 0 elsewhere."""
    if kind == "softmax" or (top_k == 1 and kind in ("sigmoid-norm", "softmax-norm")):
        return torch.softmax(logits_HMN, dim=1) * selected_HMN
    if kind == "sigmoid":
        return torch.sigmoid(logits_HMN) * selected_HMN
    if kind == "sigmoid-norm":
        scores_HMN = torch.sigmoid(logits_HMN) * selected_HMN
    else:
        scores_HMN = torch.softmax(logits_HMN, dim=1) * selected_HMN
    # The floor is reached only where every selected score underflows.
    total_H1N = scores_HMN.sum(dim=1, keepdim=True).clamp_min(torch.finfo(scores_HMN.dtype).tiny)
    return scores_HMN / (total_H1N.detach() if kind == "softmax-norm-detach" else total_H1N)
