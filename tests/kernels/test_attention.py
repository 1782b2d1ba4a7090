"""Windowed attention against the dense oracle: values and gradients, odd sizes, documents, cached keys.

Lives here: what kernels/attention.py promises, its cost counted in scores.
Not here: the cache that a decode keeps (tests/mome/test_gpt.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kernels.attention import CPU_BLOCK, AttentionPlan, attention_reference, windowed_attention

SCALE = 0.7


def documents(batch: int, keys: int, length: int = 9) -> Tensor:
    """Random document numbers, never falling."""
    return (torch.rand(batch, keys) < 1 / length).int().cumsum(1).int()


def inputs(batch: int, queries: int, keys: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shape = (batch, keys, 2, 4)
    q, k, v = (torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3))
    return q[:, keys - queries :].detach().requires_grad_(), k, v


def with_grads(out: Tensor, leaves: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    return out, *torch.autograd.grad(out, leaves, grad)


def both(qkv, docs_BS: Tensor, window: int, block: int | None, dtype: torch.dtype = torch.float64):
    """(value, gradients) of the fast path and of the oracle; the queries are the last of the keys."""
    queries, keys = qkv[0].shape[1], qkv[1].shape[1]
    offset, docs_BT = keys - queries, docs_BS[:, keys - queries :]
    grad = torch.randn(qkv[0].shape, dtype=torch.float64).to(dtype)
    plan = AttentionPlan(docs_BT, docs_BS, window, offset, dtype=dtype, block=block)
    fast = with_grads(windowed_attention(*qkv, plan, SCALE), qkv, grad)
    return fast, with_grads(attention_reference(*qkv, docs_BT, docs_BS, window, SCALE, offset), qkv, grad)


@pytest.mark.parametrize("tokens", [1, 2, 13, CPU_BLOCK, CPU_BLOCK + 1, 131])
@pytest.mark.parametrize("window", [0, 1, 7, 130, 1000])
def test_equals_the_oracle(tokens, window, poison_empty):
    for batch, block in ((1, None), (3, 5)):
        fast, oracle = both(inputs(batch, tokens, tokens), documents(batch, tokens), window, block)
        for one, other in zip(fast, oracle):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("queries, held", [(1, 0), (1, 1), (1, 40), (3, 17), (70, 11), (17, 64)])
def test_queries_after_cached_keys(queries, held, poison_empty):
    for window, block in itertools.product((0, 3, 11, 500), (None, 4)):
        qkv, docs_BS = inputs(2, queries, held + queries), documents(2, held + queries)
        fast, oracle = both(qkv, docs_BS, window, block)
        for one, other in zip(fast, oracle):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_gradcheck():
    docs_BT = documents(2, 7, 3)
    plan = AttentionPlan(docs_BT, docs_BT, 3, dtype=torch.float64, block=3)
    torch.autograd.gradcheck(lambda q, k, v: windowed_attention(q, k, v, plan, SCALE), inputs(2, 7, 7))


def test_the_window_by_hand():
    """One-hot values and equal scores show which keys a query sees: itself, `window` before it, its own document."""
    docs_BT = torch.tensor([[0, 0, 0, 0, 1, 1]])
    zeros = torch.zeros(1, 6, 1, 6, dtype=torch.float64)
    values = torch.eye(6, dtype=torch.float64).view(1, 6, 1, 6)
    seen = windowed_attention(zeros, zeros, values, AttentionPlan(docs_BT, docs_BT, 2, dtype=torch.float64), 1.0)
    expected = [[0], [0, 1], [0, 1, 2], [1, 2, 3], [4], [4, 5]]
    assert [row.nonzero().flatten().tolist() for row in seen[0, :, 0]] == expected


def test_strided_inputs_as_a_fused_projection_gives_them():
    qkv = torch.randn(2, 70, 6, 4, dtype=torch.float64)
    docs_BT = documents(2, 70)
    plan = AttentionPlan(docs_BT, docs_BT, 20, dtype=torch.float64)
    out = windowed_attention(*qkv.split(2, 2), plan, SCALE)
    oracle = attention_reference(*(one.contiguous() for one in qkv.split(2, 2)), docs_BT, docs_BT, 20, SCALE)
    torch.testing.assert_close(out, oracle, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_the_naive_way_in_the_same_dtype(dtype):
    docs_BS = documents(2, 150, 40)
    exact_in = inputs(2, 150, 150)
    narrow_in = tuple(one.detach().to(dtype).requires_grad_() for one in exact_in)
    rounded_in = tuple(one.detach().double().requires_grad_() for one in narrow_in)
    torch.manual_seed(1)
    fast, naive = both(narrow_in, docs_BS, 60, None, dtype)
    torch.manual_seed(1)
    _, exact = both(rounded_in, docs_BS, 60, None)
    tolerance = 4 * torch.finfo(dtype).eps
    for one, other, true in zip(fast, naive, exact):
        assert (one - true).abs().max() <= (other - true).abs().max() + tolerance * true.abs().max()


def test_large_scores_do_not_overflow():
    q, k, v = (1e3 * one.detach() for one in inputs(1, 80, 80, torch.float32))
    docs_BT = documents(1, 80)
    out = windowed_attention(q, k, v, AttentionPlan(docs_BT, docs_BT, 16, dtype=torch.float32), 1.0)
    assert out.isfinite().all()


def test_nothing_unseen_counts():
    """Keys and values out of sight may hold anything: the output is the same to the last bit."""
    qkv, docs_BT = inputs(2, 100, 100), documents(2, 100)
    plan = AttentionPlan(docs_BT, docs_BT, 5, dtype=torch.float64)
    q, k, v = (one.detach() for one in qkv)
    before = windowed_attention(q, k, v, plan, SCALE)
    seen = (docs_BT[:, 50:51] == docs_BT) & (torch.arange(100) <= 50) & (torch.arange(100) >= 45)
    for one in (k, v):
        one[~seen] = 1e3
    assert torch.equal(windowed_attention(q, k, v, plan, SCALE)[:, 50], before[:, 50])


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)])
def test_empty(shape):
    batch, tokens = shape
    qkv, docs_BT = inputs(batch, tokens, tokens), documents(batch, tokens)
    out = windowed_attention(*qkv, AttentionPlan(docs_BT, docs_BT, 3, dtype=torch.float64), SCALE)
    assert out.shape == qkv[0].shape
    torch.autograd.grad(out.sum(), qkv[0])


def test_cost_grows_with_tokens_times_window():
    docs_BT = torch.zeros(1, 4096, dtype=torch.int32)
    plan = AttentionPlan(docs_BT, docs_BT, 128, dtype=torch.float32)
    scores = sum(block.bias_B1QS.numel() for block in plan.blocks)
    assert scores <= 4096 * (128 + CPU_BLOCK)


def test_backward_makes_no_gradient_of_all_keys_for_each_block():
    """Elements allocated in the backward pass grow linearly with the tokens."""

    def allocated(tokens: int) -> int:
        qkv, docs_BT = inputs(1, tokens, tokens, torch.float32), torch.zeros(1, tokens, dtype=torch.int32)
        out = windowed_attention(*qkv, AttentionPlan(docs_BT, docs_BT, 16, dtype=torch.float32, block=16), SCALE)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            out.sum().backward()
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())

    assert allocated(1024) < 6 * allocated(256)


@pytest.mark.parametrize(
    "queries, keys, window, offset, words",
    [(4, 4, -1, 0, "window -1"), (4, 4, 2, 1, "4 queries from position 1"), (2, 4, 2, -1, "from position -1")],
)
def test_refusals(queries, keys, window, offset, words):
    with pytest.raises(ValueError, match=words):
        AttentionPlan(documents(1, queries), documents(1, keys), window, offset, dtype=torch.float32)
