"""The backbone: a compact modern GPT with four plug points for memories.

Lives here: ModelConfig, GPT, Block, what a plug point offers (Site), the cache of a decode (DecodeState), FLOPs.
Not here: memories and their rows, which are handed in; the loss; the ops (kernels/); the plain GPT (mome/plain.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import AttentionPlan, windowed_attention
from kernels.pointwise import linear_relu_squared, norm_rotate, rms_norm, rotary_table
from mome.errors import UserError

SITES = ("input", "residual", "value", "ffn")
SMEAR_CHANNELS = 12
EMBED_STD = 0.02


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the backbone."""

    kind: Literal["mome", "plain"] = "mome"
    """mome: the backbone with plug points; plain: GPT-2's, the reference to beat."""
    layers: int = 4
    """Blocks, each attention and MLP."""
    width: int = 192
    """Channels of the residual stream."""
    heads: int = 4
    """Attention heads; width / heads is a multiple of 4."""
    mlp_ratio: int = 4
    """Hidden units of an MLP over the width."""
    max_tokens: int = 1024
    """The longest sequence, in training and in sampling."""
    long_every: int = 2
    """Every which layer has the long window (the last of each so many); 0: none (mome only)."""
    attention_scale: float | None = None
    """Factor of the scores; None: 0.1 * sqrt(128 / head width), the record's 0.1 at 128 (mome only)."""

    def __post_init__(self):
        for name in ("layers", "width", "heads", "mlp_ratio", "max_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "give a whole number of 1 or more")
        _require(self.kind in ("mome", "plain"), "kind", self.kind, "choose mome or plain")
        _require(self.width % self.heads == 0, "width", self.width, f"give a multiple of the {self.heads} heads")
        if self.kind == "mome":
            step = 4 * self.heads
            _require(self.width % step == 0, "width", self.width, f"give a multiple of {step}, 4 channels a head")
        _require(self.long_every >= 0, "long_every", self.long_every, "give 0 or more")
        scale = self.attention_scale
        _require(scale is None or 0 < scale < math.inf, "attention_scale", scale, "give a number above 0")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def is_long(self, layer: int) -> bool:
        """Whether a layer has the long window."""
        return self.long_every > 0 and (layer + 1) % self.long_every == 0


def _require(holds: bool, name: str, value: Any, remedy: str) -> None:
    if not holds:
        raise UserError(f"--model.{name.replace('_', '-')} {value}: {remedy}")


def count_flops(config: ModelConfig, vocab_size: int, row_tokens: int, windows: tuple[int, int]) -> int:
    """Training FLOPs a token: forward and twice as many backward, of matrix products and attention scores.

    Attention counts the keys that causality and window allow in a micro-row of row_tokens, document bounds apart; the
    plain GPT's window is the whole row. Norms, gates and memory reads are left out.
    """
    width = config.width
    products = config.layers * (4 + 2 * config.mlp_ratio) * width**2 + vocab_size * width
    forward = 2 * products * row_tokens
    for layer in range(config.layers):
        window = row_tokens if config.kind == "plain" else windows[config.is_long(layer)]
        before = min(window, row_tokens - 1)
        seen = row_tokens * (before + 1) - before * (before + 1) // 2
        forward += 2 * 2 * width * seen
    return round(3 * forward / row_tokens)


@dataclass(frozen=True)
class Site:
    """What a plug point offers to a memory.

    x: the tensor that the memory is added to: [B, T, D] at input and residual, [B, T, H, K] at value, [B, T, F] at ffn.
    h: [B, T, D], RMS-normed, what routers and gates look at: the input of the attention at value, of the MLP at ffn,
       x itself normed at input and residual.
    """

    x: Tensor
    h: Tensor


class DecodeState:
    """What a sequence in pieces carries over: keys and values of each layer's window, documents, the last embedding.

    Made by `new_state`; forward passes append to it in place. windows: the largest that a forward pass may use.
    """

    def __init__(self, batch: int, layers: int, windows: tuple[int, int]):
        self.batch = batch
        self.windows = windows
        self.position = 0
        self.docs_BS: Tensor | None = None
        self.last_embed_B1D: Tensor | None = None
        self.keys_BSHK: list[Tensor | None] = [None] * layers
        self.values_BSHK: list[Tensor | None] = [None] * layers

    def extend_docs(self, docs_BT: Tensor) -> Tensor:
        """The documents of the held positions and of these new ones, [B, S]; keeps what the longest window needs."""
        joined_BS = docs_BT if self.docs_BS is None else torch.cat([self.docs_BS, docs_BT], 1)
        self.docs_BS = _last(joined_BS, max(self.windows))
        return joined_BS

    def extend(self, layer: int, window: int, k_BTHK: Tensor, v_BTHK: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, S, H, K] of the held positions and of these new ones; keeps `window` of them."""
        joined = []
        for held, new_BTHK in ((self.keys_BSHK, k_BTHK), (self.values_BSHK, v_BTHK)):
            joined.append(new_BTHK if held[layer] is None else torch.cat([held[layer], new_BTHK], 1))
            held[layer] = _last(joined[-1], window)
        return joined[0], joined[1]


def _last(x_BS: Tensor, count: int) -> Tensor:
    """A copy of the last `count` positions: a view would keep all of them in memory."""
    return x_BS[:, max(0, x_BS.shape[1] - count) :].detach().clone()


class Block(nn.Module):
    """The weights of one layer, matrices [out, in]; output projections start at zero."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, hidden = config.width, config.mlp_ratio * config.width
        # Uniform with standard deviation 0.5 / sqrt(in) (modded-nanogpt's banks).
        bound = 0.5 * math.sqrt(3 / width)
        self.qkv = nn.Parameter(torch.empty(3 * width, width).uniform_(-bound, bound))
        self.attn_out = nn.Parameter(torch.zeros(width, width))
        self.up = nn.Parameter(torch.empty(hidden, width).uniform_(-bound, bound))
        self.down = nn.Parameter(torch.zeros(width, hidden))
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))
        """Of the residual stream and of the normed embedding, which every block can take in again."""


class GPT(nn.Module):
    """RMSNorm without weights, QK-norm, half-truncated rotary, windows, ReLU^2, smear, untied head with a softcap.

    Facts and constants: modded-nanogpt at record 89 (smear, embedding skip, softcap, initial values).

    memories: name -> module with `site`, `layers` and read(layer, payload, Site) -> delta shaped like Site.x, called at
    each of its layers (an input memory once, as layer 0). All memories at one site see the same x and are summed:
        input: e <- e + smear + delta, before the first norm; residual: x <- x + delta, before the block's attention;
        value: v <- v + delta; ffn: u <- u + delta, u the hidden units after ReLU^2.

    compute_dtype: of activations, None for the parameters' own; weights are cast to it where they are used.
    """

    softcap = True

    def __init__(self, config: ModelConfig, vocab_size: int, memories: Mapping[str, nn.Module]):
        super().__init__()
        if config.kind != "mome":
            raise ValueError(f"a GPT is of kind mome, not {config.kind}; use PlainGPT")
        for name, memory in memories.items():
            if memory.site not in SITES:
                raise ValueError(f"memory {name} wants site {memory.site}; there are {', '.join(SITES)}")
            if not all(0 <= layer < config.layers for layer in memory.layers):
                raise ValueError(f"memory {name} wants layers {memory.layers}; there are 0 to {config.layers - 1}")
        self.config = config
        self.vocab_size = vocab_size
        self.compute_dtype: torch.dtype | None = None
        self.scale = config.attention_scale or 0.1 * math.sqrt(128 / config.head_dim)
        self.embed = nn.Parameter(torch.randn(vocab_size, config.width) * EMBED_STD)
        self.head = nn.Parameter(torch.zeros(vocab_size, config.width))
        self.smear_gate = nn.Parameter(torch.zeros(min(SMEAR_CHANNELS, config.width)))
        self.smear_lambda = nn.Parameter(torch.zeros(()))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.memories = nn.ModuleDict(dict(memories))
        self.register_buffer("rotary", rotary_table(config.max_tokens, config.head_dim), persistent=False)

    def new_state(self, batch: int, windows: tuple[int, int]) -> DecodeState:
        """An empty cache for `batch` sequences and windows (short, long) up to these."""
        return DecodeState(batch, self.config.layers, windows)

    def forward(
        self, tokens_BT: Tensor, docs_BT: Tensor, rows: Mapping[str, Any], *, windows: tuple[int, int],
        state: DecodeState | None = None, swap_routes: bool = False,
    ) -> Tensor:  # fmt: skip
        """Hidden states [B, T, D] for the head, normed, in the compute dtype.

        tokens: int64. docs: document number within the sequence, never falling. rows: payload of each memory that is
        on; one left out adds nothing. windows: (short, long), keys before its own that a token sees. state: goes on
        where the last call with it ended; pieces of any length equal the whole at once. swap_routes: memories look at
        the x and h of the micro-row before (a knock-out; of a single micro-row at those of its other half).

        Raises ValueError for a token outside the vocabulary (on the CPU), more than max_tokens positions, rows of an
        unknown memory, or windows beyond the state's.
        """
        start = 0 if state is None else state.position
        self._check(tokens_BT, docs_BT, rows, windows, state)
        plugs = _Plugs(self.memories, rows, swap_routes)
        embed_BTD = self._smear(F.embedding(tokens_BT, self.embed).to(self.compute_dtype or self.embed.dtype), state)
        x0_BTD = x_BTD = rms_norm(plugs.add("input", 0, embed_BTD))
        plans = self._plans(docs_BT, windows, state, x_BTD.dtype)
        rotary_TF2 = self.rotary[start : start + tokens_BT.shape[1]]
        for layer, block in enumerate(self.blocks):
            lambdas = block.lambdas.to(x_BTD.dtype)
            x_BTD = plugs.add("residual", layer, lambdas[0] * x_BTD + lambdas[1] * x0_BTD)
            x_BTD = x_BTD + self._attend(layer, x_BTD, plans[self.config.is_long(layer)], rotary_TF2, plugs, state)
            h_BTD = rms_norm(x_BTD)
            u_BTF = plugs.add("ffn", layer, linear_relu_squared(h_BTD, block.up.to(h_BTD.dtype)), h_BTD)
            x_BTD = x_BTD + _linear(u_BTF, block.down)
        if state is not None:
            state.position += tokens_BT.shape[1]
        return rms_norm(x_BTD)

    def _attend(
        self, layer: int, x_BTD: Tensor, plan: AttentionPlan, rotary_TF2: Tensor, plugs: _Plugs,
        state: DecodeState | None,
    ) -> Tensor:  # fmt: skip
        """What the attention of a layer adds to x."""
        heads = self.config.heads
        h_BTD = rms_norm(x_BTD)
        # Heads of q, k and v lie side by side, so that one call norms and rotates q and k.
        qkv_BTJK = _linear(h_BTD, self.blocks[layer].qkv).unflatten(-1, (3 * heads, -1))
        qk_BTJK, v_BTHK = qkv_BTJK.split((2 * heads, heads), 2)
        q_BTHK, k_BTHK = norm_rotate(qk_BTJK, rotary_TF2).split(heads, 2)
        v_BTHK = plugs.add("value", layer, v_BTHK, h_BTD)
        if state is not None:
            window = state.windows[self.config.is_long(layer)]
            k_BTHK, v_BTHK = state.extend(layer, window, k_BTHK, v_BTHK)
        y_BTHK = windowed_attention(q_BTHK, k_BTHK, v_BTHK, plan, self.scale)
        return _linear(y_BTHK.flatten(2), self.blocks[layer].attn_out)

    def _smear(self, embed_BTD: Tensor, state: DecodeState | None) -> Tensor:
        """e_t + lambda * sigmoid(w . e_t[:12]) * e_{t-1}, e_{-1} = 0; it crosses document bounds."""
        gate_BT1 = _linear(embed_BTD[..., : len(self.smear_gate)], self.smear_gate.unsqueeze(0)).sigmoid()
        gate_BT1 = gate_BT1 * self.smear_lambda.to(gate_BT1.dtype)
        first_B1D = torch.zeros_like(embed_BTD[:, :1])
        if state is not None and embed_BTD.shape[1]:
            first_B1D = first_B1D if state.last_embed_B1D is None else state.last_embed_B1D
            state.last_embed_B1D = embed_BTD[:, -1:].detach()
        return embed_BTD + gate_BT1 * torch.cat([first_B1D, embed_BTD[:, :-1]], 1)

    def _plans(
        self, docs_BT: Tensor, windows: tuple[int, int], state: DecodeState | None, dtype: torch.dtype
    ) -> tuple[AttentionPlan, AttentionPlan]:
        """The attention plans of the short and of the long layers; with a state their keys begin with the held ones."""
        count = docs_BT.shape[1]
        docs_BS = docs_BT if state is None else state.extend_docs(docs_BT)
        plans = []
        for index, window in enumerate(windows):
            held = 0 if state is None else min(state.position, state.windows[index])
            near_BS = docs_BS[:, docs_BS.shape[1] - held - count :]
            plans.append(AttentionPlan(docs_BT, near_BS, window, offset=held, dtype=dtype))
        return plans[0], plans[1]

    def _check(
        self, tokens_BT: Tensor, docs_BT: Tensor, rows: Mapping, windows: tuple[int, int], state: DecodeState | None
    ) -> None:
        check_tokens(tokens_BT, self.vocab_size, state, self.config.max_tokens)
        if docs_BT.shape != tokens_BT.shape:
            shapes = f"{tuple(docs_BT.shape)}, tokens {tuple(tokens_BT.shape)}"
            raise ValueError(f"docs have shape {shapes}; give each token its document")
        for name in rows:
            if name not in self.memories:
                has = ", ".join(self.memories) or "none"
                raise ValueError(f"rows of a memory {name!r} that the model does not have; it has {has}")
        if state is not None and any(now > held for now, held in zip(windows, state.windows)):
            remedy = f"make it with new_state(batch, {windows})"
            raise ValueError(f"windows {windows} are longer than the state's {state.windows}; {remedy}")


class _Plugs:
    """The memories that are on in one forward pass."""

    def __init__(self, memories: nn.ModuleDict, rows: Mapping[str, Any], swap_routes: bool):
        self.memories, self.rows, self.swap_routes = memories, rows, swap_routes

    def add(self, where: str, layer: int, x: Tensor, h_BTD: Tensor | None = None) -> Tensor:
        """x plus what the memories at this site and layer read; h is x normed where none is given."""
        readers = [
            (memory, self.rows[name]) for name, memory in self.memories.items()
            if name in self.rows and memory.site == where and (where == "input" or layer in memory.layers)
        ]  # fmt: skip
        if not readers:
            return x
        h_BTD = rms_norm(x) if h_BTD is None else h_BTD
        site = Site(swapped(x), swapped(h_BTD)) if self.swap_routes else Site(x, h_BTD)
        total = x
        for memory, payload in readers:
            total = total + memory.read(layer, payload, site)
        return total


def swapped(x: Tensor) -> Tensor:
    """Every micro-row's neighbour; of a single micro-row the other half."""
    return x.roll(1, 0) if len(x) > 1 else x.roll(x.shape[1] // 2, 1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


def check_tokens(tokens_BT: Tensor, vocab_size: int, state: DecodeState | None, max_tokens: int) -> None:
    """Raise ValueError for ids outside the vocabulary (on the CPU: a GPU would stall), and for what does not fit."""
    batch, end = tokens_BT.shape
    if state is not None:
        end += state.position
        if state.batch != batch:
            remedy = f"make it with new_state({batch}, windows)"
            raise ValueError(f"{batch} sequences for a state of {state.batch}; {remedy}")
    if end > max_tokens:
        remedy = "raise --model.max-tokens, or cut it"
        raise ValueError(f"a sequence of {end} tokens; the model takes {max_tokens}: {remedy}")
    if tokens_BT.device.type == "cpu" and tokens_BT.numel():
        low, high = (int(bound) for bound in tokens_BT.aminmax())
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            remedy = "encode with the tokenizer that the model was trained with"
            raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size}; {remedy}")
