"""Chunked cross entropy against the oracle and autograd: pieces of any size, extremes, ignored tokens, narrow dtypes.

Lives here: what kernels/cross_entropy.py promises.
Not here: shapes with a batch (tests/mome/test_loss.py).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.cross_entropy import cap, chunked_cross_entropy, chunked_cross_entropy_sum, cross_entropy_reference

SIZES = [1, 2, 3, 7, 13, 4096]
SOFTCAP = pytest.mark.parametrize("softcap", [True, False])


def problem(count: int = 23, width: int = 5, vocab: int = 31, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and targets in float64; every fourth target is ignored."""
    hidden_ND = (spread * torch.randn(count, width, dtype=torch.float64)).requires_grad_()
    weight_VD = torch.randn(vocab, width, dtype=torch.float64).requires_grad_()
    targets_N = torch.randint(0, vocab, (count,))
    targets_N[3::4] = -100
    return hidden_ND, weight_VD, targets_N


def loss_and_grads(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], atol: float = 1e-12) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=atol)


@SOFTCAP
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("classes", SIZES)
def test_equals_the_oracle_in_pieces_of_any_size(softcap, rows, classes, poison_empty):
    hidden_ND, weight_VD, targets_N = problem()
    oracle_N = cross_entropy_reference(hidden_ND, weight_VD, targets_N, softcap)
    nats_N = chunked_cross_entropy(hidden_ND, weight_VD, targets_N, softcap, rows=rows, classes=classes)
    torch.testing.assert_close(nats_N, oracle_N, rtol=0, atol=1e-12)
    total = chunked_cross_entropy_sum(hidden_ND, weight_VD, targets_N, softcap, 0.3, rows=rows, classes=classes)
    oracle = loss_and_grads(0.3 * oracle_N.sum(), hidden_ND, weight_VD)
    assert_same(loss_and_grads(total, hidden_ND, weight_VD), oracle)


@SOFTCAP
def test_gradcheck(softcap):
    hidden_ND, weight_VD, targets_N = problem(count=6, vocab=9)
    torch.autograd.gradcheck(
        lambda h, w: 1.7 * chunked_cross_entropy_sum(h, w, targets_N, softcap, rows=4, classes=5),
        (hidden_ND, weight_VD),
    )


def test_the_softcap_is_the_records():
    logits = torch.linspace(-300, 300, 1001, dtype=torch.float64)
    expected = torch.tensor([23 / (1 + math.exp(-(z + 5) / 7.5)) for z in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(cap(logits), expected, rtol=1e-13, atol=0)


@SOFTCAP
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_logits(softcap, dtype):
    """Logits of some thousands, right and wrong targets: finite, and equal to the oracle."""
    hidden_ND, weight_VD, targets_N = problem(spread=2000.0)
    targets_N[0] = (weight_VD @ hidden_ND[0]).argmax()
    targets_N[1] = (weight_VD @ hidden_ND[1]).argmin()
    hidden_ND, weight_VD = (one.detach().to(dtype).requires_grad_() for one in (hidden_ND, weight_VD))
    ours = loss_and_grads(
        chunked_cross_entropy_sum(hidden_ND, weight_VD, targets_N, softcap, classes=7), hidden_ND, weight_VD
    )
    wide = (hidden_ND.detach().double().requires_grad_(), weight_VD.detach().double().requires_grad_())
    theirs = loss_and_grads(cross_entropy_reference(*wide, targets_N, softcap).sum(), *wide)
    for one, other in zip(ours, theirs):
        assert one.isfinite().all()
        scale = other.abs().max()
        torch.testing.assert_close(one.double(), other, rtol=0, atol=float(1e3 * torch.finfo(dtype).eps * scale))


@SOFTCAP
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_the_naive_way_in_the_same_dtype(softcap, dtype):
    hidden_ND, weight_VD, targets_N = problem(count=300, width=32, vocab=500, spread=0.5)
    hidden_ND = hidden_ND.detach().to(dtype).requires_grad_()
    weight_VD = weight_VD.detach().to(dtype).requires_grad_()
    wide = (hidden_ND.detach().double().requires_grad_(), weight_VD.detach().double().requires_grad_())
    exact = loss_and_grads(cross_entropy_reference(*wide, targets_N, softcap).sum(), *wide)
    naive = loss_and_grads(
        cross_entropy_reference(hidden_ND, weight_VD, targets_N, softcap).sum(), hidden_ND, weight_VD
    )
    ours = loss_and_grads(chunked_cross_entropy_sum(hidden_ND, weight_VD, targets_N, softcap), hidden_ND, weight_VD)
    for one, other, true in zip(ours, naive, exact):
        # Narrow hidden states round the slopes once more than autograd in float32 does.
        assert (one - true).abs().max() <= (other - true).abs().max() + 2 * torch.finfo(dtype).eps * true.abs().max()


@SOFTCAP
def test_a_wide_head_under_narrow_hidden_states(softcap):
    """bfloat16 hidden states and a float32 head: float32 loss and head gradient, near those in float64."""
    hidden_ND, weight_VD, targets_N = problem(count=40, width=16, vocab=50)
    narrow_ND = hidden_ND.detach().bfloat16().requires_grad_()
    wide_VD = weight_VD.detach().float().requires_grad_()
    ours = loss_and_grads(chunked_cross_entropy_sum(narrow_ND, wide_VD, targets_N, softcap), narrow_ND, wide_VD)
    assert [one.dtype for one in ours] == [torch.float32, torch.bfloat16, torch.float32]
    exact = (narrow_ND.detach().double().requires_grad_(), weight_VD)
    theirs = loss_and_grads(cross_entropy_reference(*exact, targets_N, softcap).sum(), *exact)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=float(0.02 * other.abs().max()))


@SOFTCAP
def test_ignored_tokens_leave_no_trace(softcap):
    hidden_ND, weight_VD, targets_N = problem()
    kept = targets_N >= 0
    whole = loss_and_grads(chunked_cross_entropy_sum(hidden_ND, weight_VD, targets_N, softcap), hidden_ND, weight_VD)
    few_ND = hidden_ND.detach()[kept].requires_grad_()
    part = loss_and_grads(chunked_cross_entropy_sum(few_ND, weight_VD, targets_N[kept], softcap), few_ND, weight_VD)
    assert_same((whole[0], whole[1][kept], whole[2]), part)
    assert whole[1][~kept].abs().sum() == 0
    none = loss_and_grads(
        chunked_cross_entropy_sum(hidden_ND, weight_VD, torch.full_like(targets_N, -100), softcap), hidden_ND, weight_VD
    )
    assert all(one.abs().sum() == 0 for one in none)


@SOFTCAP
def test_no_tokens_and_one_class(softcap, poison_empty):
    hidden_ND, weight_VD, targets_N = problem(count=0)
    total = chunked_cross_entropy_sum(hidden_ND, weight_VD, targets_N, softcap)
    loss, grad_hidden_ND, grad_weight_VD = loss_and_grads(total, hidden_ND, weight_VD)
    assert loss == 0 and grad_hidden_ND.shape == hidden_ND.shape and grad_weight_VD.abs().sum() == 0
    hidden_ND, weight_VD, _ = problem(count=4, vocab=1)
    nats_N = chunked_cross_entropy(hidden_ND, weight_VD, torch.zeros(4, dtype=torch.long), softcap)
    torch.testing.assert_close(nats_N, torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-14)


def test_backward_scales_and_may_be_repeated():
    hidden_ND, weight_VD, targets_N = problem()
    total = chunked_cross_entropy_sum(hidden_ND, weight_VD, targets_N, True)
    once = torch.autograd.grad(total, (hidden_ND, weight_VD), retain_graph=True)
    twice = torch.autograd.grad(total, (hidden_ND, weight_VD), torch.tensor(2.0).double(), retain_graph=True)
    again = torch.autograd.grad(total, (hidden_ND, weight_VD))
    for one, two, three in zip(once, twice, again):
        assert torch.equal(2 * one, two) and torch.equal(one, three)


def test_without_gradients_the_sum_is_the_same():
    hidden_ND, weight_VD, targets_N = problem()
    with torch.no_grad():
        silent = chunked_cross_entropy_sum(hidden_ND, weight_VD, targets_N, True, 0.5)
    assert not silent.requires_grad
    torch.testing.assert_close(silent, chunked_cross_entropy_sum(hidden_ND, weight_VD, targets_N, True, 0.5).detach())


@SOFTCAP
def test_full_logits_are_never_held(softcap):
    """The largest tensor made on the way is a small part of [tokens, classes]."""
    hidden_ND, weight_VD, targets_N = problem(count=512, width=4, vocab=3000)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = out if isinstance(out, tuple | list) else (out,)
            self.seen = max([self.seen, *(one.numel() for one in tensors if isinstance(one, Tensor))])
            return out

    with Largest() as largest:
        chunked_cross_entropy_sum(hidden_ND, weight_VD, targets_N, softcap, rows=32, classes=64).backward()
    assert largest.seen <= 32 * 3000


@pytest.mark.parametrize("target", [31, -1, -101])
def test_refuses_a_target_that_is_no_class(target):
    hidden_ND, weight_VD, targets_N = problem()
    targets_N[5] = target
    with pytest.raises(ValueError, match=f"targets go from.*{abs(target)}" if target > 0 else "targets go from"):
        chunked_cross_entropy(hidden_ND, weight_VD, targets_N, True)


def test_refuses_float16():
    hidden_ND, weight_VD, targets_N = problem()
    with pytest.raises(ValueError, match="float16 is too narrow"):
        chunked_cross_entropy(hidden_ND.half(), weight_VD, targets_N, True)
