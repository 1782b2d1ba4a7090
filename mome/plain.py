"""The reference to beat: GPT-2's architecture, called like the backbone.

Lives here: PlainGPT.
Not here: its training (AdamW in optim/groups.py), its configuration (mome/gpt.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mome.gpt import DecodeState, ModelConfig, check_tokens

INIT_STD = 0.02


class PlainBlock(nn.Module):
    """Attention and MLP with LayerNorm before each, biases, and GELU in GPT-2's tanh form."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, hidden = config.width, config.mlp_ratio * config.width
        self.heads = config.heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attn_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def attend(self, x_BTD: Tensor, layer: int, state: DecodeState | None) -> Tensor:
        qkv_BT3HK = _linear(_norm(x_BTD, self.attn_norm), self.qkv).unflatten(-1, (3, self.heads, -1))
        q_BTHK, k_BSHK, v_BSHK = qkv_BT3HK.unbind(2)
        held = 0
        if state is not None:
            held = state.position
            k_BSHK, v_BSHK = state.extend(layer, max(state.windows), k_BSHK, v_BSHK)
        q, k, v = (one.transpose(1, 2) for one in (q_BTHK, k_BSHK, v_BSHK))
        seen_TS = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(held) if held else None
        y_BHTK = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_TS, is_causal=not held)
        return _linear(y_BHTK.transpose(1, 2).flatten(2), self.attn_out)

    def forward(self, x_BTD: Tensor, layer: int, state: DecodeState | None) -> Tensor:
        x_BTD = x_BTD + self.attend(x_BTD, layer, state)
        u_BTF = F.gelu(_linear(_norm(x_BTD, self.mlp_norm), self.up), approximate="tanh")
        return x_BTD + _linear(u_BTF, self.down)


class PlainGPT(nn.Module):
    """GPT-2 (Radford et al. 2019; initial values of openai/gpt-2 and its description) of the configured shape.

    Learned positions, LayerNorm, GELU, biases, causal attention over the whole micro-row whatever its documents, full
    softmax, the head tied to the embedding. Weights N(0, 0.02), divided by sqrt(2 layers) where they write into the
    residual stream. Same call as mome.gpt.GPT.
    """

    softcap = False

    def __init__(self, config: ModelConfig, vocab_size: int):
        super().__init__()
        if config.kind != "plain":
            raise ValueError(f"a PlainGPT is of kind plain, not {config.kind}; use GPT")
        self.config = config
        self.vocab_size = vocab_size
        self.compute_dtype: torch.dtype | None = None
        self.embed = nn.Parameter(torch.randn(vocab_size, config.width) * INIT_STD)
        self.positions = nn.Parameter(torch.randn(config.max_tokens, config.width) * INIT_STD)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for block in self.blocks:
            for linear in (block.qkv, block.attn_out, block.up, block.down):
                writes = linear is block.attn_out or linear is block.down
                nn.init.normal_(linear.weight, std=INIT_STD / math.sqrt(2 * config.layers) if writes else INIT_STD)
                nn.init.zeros_(linear.bias)

    @property
    def head(self) -> nn.Parameter:
        """Weight of the head [V, D]: the embedding."""
        return self.embed

    def new_state(self, batch: int, windows: tuple[int, int]) -> DecodeState:
        """An empty cache for `batch` sequences; it holds all positions, whatever the windows."""
        return DecodeState(batch, self.config.layers, (self.config.max_tokens, self.config.max_tokens))

    def forward(
        self, tokens_BT: Tensor, docs_BT: Tensor, rows: Mapping[str, Any], *, windows: tuple[int, int],
        state: DecodeState | None = None, swap_routes: bool = False,
    ) -> Tensor:  # fmt: skip
        """Hidden states [B, T, D] for the head, normed, in the compute dtype. docs and windows change nothing.

        Raises ValueError for rows or routes of memories, which this model has none of, and as mome.gpt.GPT does.
        """
        if rows or swap_routes:
            raise ValueError("the plain model has no memories; give no rows and no swapped routes")
        check_tokens(tokens_BT, self.vocab_size, state, self.config.max_tokens)
        start, count = 0 if state is None else state.position, tokens_BT.shape[1]
        x_BTD = F.embedding(tokens_BT, self.embed) + self.positions[start : start + count]
        x_BTD = x_BTD.to(self.compute_dtype or x_BTD.dtype)
        for layer, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, layer, state)
        if state is not None:
            state.position += count
        return _norm(x_BTD, self.norm)


def _linear(x: Tensor, linear: nn.Linear) -> Tensor:
    return F.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))


def _norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)
