"""Norms, rotary and hidden units against their oracles: values and gradients, strides, dtypes.

Lives here: what kernels/pointwise.py promises.
Not here: where the backbone puts them (tests/mome/test_gpt.py).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.pointwise import (
    linear_relu_squared,
    linear_relu_squared_reference,
    norm_rotate,
    norm_rotate_reference,
    rms_norm,
    rms_norm_reference,
    rotary_table,
)

HEAD_DIM = 12
TABLE_TF2 = rotary_table(7, HEAD_DIM)


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()


OPS = {
    "rms_norm": (rms_norm, rms_norm_reference, [(3, 5, 11)]),
    "rms_norm of one channel": (rms_norm, rms_norm_reference, [(4, 1)]),
    "rms_norm of nothing": (rms_norm, rms_norm_reference, [(0, 5)]),
    "norm_rotate": (
        lambda x: norm_rotate(x, TABLE_TF2), lambda x: norm_rotate_reference(x, TABLE_TF2), [(2, 7, 3, HEAD_DIM)]
    ),
    "linear_relu_squared": (linear_relu_squared, linear_relu_squared_reference, [(2, 5, 7), (13, 7)]),
    "linear_relu_squared of nothing": (linear_relu_squared, linear_relu_squared_reference, [(0, 5, 7), (13, 7)]),
}  # fmt: skip


@pytest.mark.parametrize("fast, oracle, shapes", OPS.values(), ids=OPS)
def test_equals_the_oracle(fast, oracle, shapes, poison_empty):
    leaves = [random(*shape) for shape in shapes]
    out, expected = fast(*leaves), oracle(*leaves)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    grad = torch.randn_like(out)
    for one, other in zip(torch.autograd.grad(out, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fast, oracle, shapes", OPS.values(), ids=OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_the_naive_way_in_the_same_dtype(fast, oracle, shapes, dtype):
    narrow = [random(*shape, dtype=dtype) for shape in shapes]
    wide = [one.detach().double().requires_grad_() for one in narrow]
    grad = random(*fast(*narrow).shape, dtype=dtype).detach()

    def results(op, leaves, grad):
        out = op(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad)

    exact = results(oracle, wide, grad.double())
    for one, other, true in zip(results(fast, narrow, grad), results(oracle, narrow, grad), exact):
        assert one.dtype == dtype
        if true.numel():
            tolerance = 2 * torch.finfo(dtype).eps * max(1.0, true.abs().max())
            assert (one - true).abs().max() <= (other - true).abs().max() + tolerance


def test_slices_of_a_fused_projection():
    fused = random(2, 7, 9, HEAD_DIM)
    grad = torch.randn(2, 3, 7, HEAD_DIM, dtype=torch.float64).transpose(1, 2)
    for name in ("norm_rotate", "rms_norm"):
        op, oracle, _ = OPS[name]
        out, expected = op(fused[:, :, 3:6]), oracle(fused[:, :, 3:6])
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
        one, other = (torch.autograd.grad(result, fused, grad)[0] for result in (out, expected))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_rotary_by_hand():
    """Half of the channels turn, the slowest by 1/1024 radian a position; lengths stay; only distance counts."""
    table_TF2 = rotary_table(2000, 16).double()
    assert table_TF2.shape == (2000, 8, 2)
    position = 1999
    for pair in range(8):
        angle = position * 1024 ** (-pair / 3) if pair < 4 else 0.0
        assert table_TF2[position, pair].tolist() == pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-6)
    q, k = random(1, 1, 1, 16).detach(), random(1, 1, 1, 16).detach()

    def score(i: int, j: int) -> float:
        return float((norm_rotate(q, table_TF2[i : i + 1]) * norm_rotate(k, table_TF2[j : j + 1])).sum())

    assert score(17, 5) == pytest.approx(score(1012, 1000), abs=1e-5)
    assert score(17, 5) != pytest.approx(score(17, 6), abs=1e-3)


def test_zeros_stay_zeros():
    x = torch.zeros(3, 8, dtype=torch.float64, requires_grad=True)
    out = rms_norm(x)
    assert out.abs().sum() == 0
    assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()
