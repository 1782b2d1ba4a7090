"""Causal attention with a left window inside the documents of packed rows: the oracle, and blocks of queries.

Lives here: the plain masked softmax, AttentionPlan (which keys a block of queries meets), windowed_attention.
Not here: projections, rotary and the key cache (mome/gpt.py).

Replaces one dense masked softmax over T x T. Why faster: a block of queries meets only the keys of its window, so that
time and memory grow with T * window; the masks are made once a forward pass, for all layers. Invariants: a query always
sees itself; no gradient is padded to T keys a block. Origin: sliding windows and document masks of modded-nanogpt
(FlashAttention-3's left window, which does not count the query itself).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries a block. CPU: measured best of 32, 64, 128 and 256 at windows 128 to 512; CUDA: fewer, larger launches.
CPU_BLOCK = 64
CUDA_BLOCK = 256


def attention_reference(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, docs_BT: Tensor, docs_BS: Tensor, window: int, scale: float,
    offset: int = 0,
) -> Tensor:  # fmt: skip
    """Softmax(scale * q k) v over the keys that each query sees, [B, T, H, K], densely. The oracle.

    Query i stands at position offset + i among the S keys and sees the keys j of its own document with
    0 <= offset + i - j <= window.
    """
    seen_BTS = _seen(docs_BT, docs_BS, 0, window, offset)
    scores_BHTS = scale * torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSHK)
    weights_BHTS = scores_BHTS.masked_fill(~seen_BTS.unsqueeze(1), -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshk->bthk", weights_BHTS, v_BSHK)


def _seen(docs_BQ: Tensor, docs_BS: Tensor, first_key: int, window: int, first_query: int) -> Tensor:
    """Which of the keys from first_key on the queries from first_query on see, bool [B, Q, S]."""
    device = docs_BQ.device
    query_Q1 = torch.arange(first_query, first_query + docs_BQ.shape[1], device=device).unsqueeze(1)
    distance_QS = query_Q1 - torch.arange(first_key, first_key + docs_BS.shape[1], device=device)
    near_QS = (distance_QS >= 0) & (distance_QS <= window)
    return near_QS & (docs_BQ.unsqueeze(2) == docs_BS.unsqueeze(1))


class _Block(NamedTuple):
    """Queries [first, last), the keys [low, high) that they meet, and what is added to their scores: 0 or -inf."""

    first: int
    last: int
    low: int
    high: int
    bias_B1QS: Tensor


class AttentionPlan:
    """Which keys each block of queries meets, and the masks: all that depends on documents and window alone.

    docs_BT, docs_BS: document numbers of the queries and of the keys; query i stands at position offset + i among the
    keys. window >= 0: keys before its own that a query sees. dtype: of the queries. block: queries a block; None: what
    is fastest on the device. Raises ValueError for queries beyond the keys and for a negative window.
    """

    def __init__(
        self, docs_BT: Tensor, docs_BS: Tensor, window: int, offset: int = 0, *,
        dtype: torch.dtype, block: int | None = None,
    ):  # fmt: skip
        queries, keys = docs_BT.shape[1], docs_BS.shape[1]
        if window < 0:
            raise ValueError(f"attention window {window}: give 0 (each token sees itself alone) or more")
        if offset < 0 or offset + queries > keys:
            raise ValueError(f"attention: {queries} queries from position {offset} on do not fit into {keys} keys")
        self.keys = keys
        self.block = block or (CUDA_BLOCK if docs_BT.is_cuda else CPU_BLOCK)
        self.blocks: list[_Block] = []
        for first in range(0, queries, self.block):
            last = min(first + self.block, queries)
            low, high = max(0, offset + first - window), offset + last
            seen_BQS = _seen(docs_BT[:, first:last], docs_BS[:, low:high], low, window, offset + first)
            bias_BQS = torch.zeros((), dtype=dtype, device=docs_BT.device).where(seen_BQS, -torch.inf)
            self.blocks.append(_Block(first, last, low, high, bias_BQS.unsqueeze(1)))


def windowed_attention(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """attention_reference's values for the documents, window and offset of the plan, [B, T, H, K]; differentiable.

    q, k and v have the plan's dtype and any strides. Time and memory are O((T + block) * (window + block)).
    """
    if q_BTHK.numel() == 0:
        return q_BTHK.clone()
    parts = zip(q_BTHK.split(plan.block, 1), _Windows.apply(k_BSHK, plan), _Windows.apply(v_BSHK, plan), plan.blocks)
    attended = [
        F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=block.bias_B1QS, scale=scale
        ).transpose(1, 2)
        for q, k, v, block in parts
    ]
    return attended[0] if len(attended) == 1 else torch.cat(attended, 1)


class _Windows(torch.autograd.Function):
    """The keys that each block meets, as views; the backward adds the blocks' gradients into one tensor.

    Plain slices would each pad their gradient with zeros to all keys, which is O(T * T / block).
    """

    @staticmethod
    def forward(ctx, x_BSHK: Tensor, plan: AttentionPlan) -> tuple[Tensor, ...]:
        ctx.plan, ctx.shape = plan, x_BSHK.shape
        return tuple(x_BSHK[:, block.low : block.high] for block in plan.blocks)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        grad_BSHK = grads[0].new_zeros(ctx.shape)
        for grad, block in zip(grads, ctx.plan.blocks):
            grad_BSHK[:, block.low : block.high] += grad
        return grad_BSHK, None
