"""Polar Express and Newton-Schulz against the SVD and against the polynomial written out.

Lives here: range of the singular values, batching, transposition, degenerate and low-rank matrices.
Not here: the optimizer around it (test_muon.py).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.orthogonalize import NEWTON_SCHULZ, POLAR_EXPRESS, newton_schulz, polar_express


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spread(rows: int, cols: int, decades: float) -> torch.Tensor:
    """A matrix with singular values from 1 down over some powers of ten, evenly in the logarithm."""
    u, _, vt = torch.linalg.svd(gaussian(rows, cols), full_matrices=False)
    return u @ torch.diag(torch.logspace(0, -decades, len(vt), dtype=torch.float64)) @ vt


def by_singular_values(g: torch.Tensor, kind: str) -> torch.Tensor:
    """One matrix: the scalar polynomial applied to each singular value."""
    u, s, vt = torch.linalg.svd(g, full_matrices=False)
    norm = float((s**2).sum() ** 0.5)
    s = s / (1.02 * norm + 1e-6) if kind == "polar" else s / max(norm, 1e-7)
    for a, b, c in POLAR_EXPRESS if kind == "polar" else (NEWTON_SCHULZ,) * 5:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 13), st.integers(1, 40), st.booleans(), st.sampled_from(["polar", "newton"]))
def test_is_the_polynomial_of_the_singular_values(small, large, flip, kind):
    g = gaussian(large, small) if flip else gaussian(small, large)
    result = (polar_express if kind == "polar" else newton_schulz)(g)
    torch.testing.assert_close(result, by_singular_values(g, kind), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("rows", "cols"), [(96, 384), (64, 100), (384, 96)])
def test_singular_values_lie_in_the_stated_range(rows, cols):
    for orthogonalize, low, high in ((polar_express, 0.85, 1.15), (newton_schulz, 0.67, 1.21)):
        s = torch.linalg.svdvals(orthogonalize(gaussian(rows, cols)))
        assert low < float(s.min()) and float(s.max()) < high


def test_polar_express_raises_small_singular_values_that_newton_schulz_leaves():
    polar, newton = (torch.linalg.svdvals(one(spread(64, 64, decades=2.5))) for one in (polar_express, newton_schulz))
    assert polar.min() > 0.8 and newton.min() < 0.6


def test_what_a_result_points_at_is_the_polar_factor():
    g = gaussian(32, 96)
    u, _, vt = torch.linalg.svd(g, full_matrices=False)
    assert torch.linalg.matrix_norm(polar_express(g) - u @ vt, ord=2) < 0.15


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (30, 40)])
def test_transposed_and_batched_are_the_same(shape):
    many = torch.stack([gaussian(*shape, seed=seed) for seed in range(6)])
    result = polar_express(many.view(2, 3, *shape))
    assert result.shape == (2, 3, *shape)
    for one, g in zip(result.flatten(0, 1), many):
        torch.testing.assert_close(one, polar_express(g), rtol=0, atol=1e-12)
    torch.testing.assert_close(polar_express(many.mT), result.flatten(0, 1).mT, rtol=0, atol=1e-12)


@pytest.mark.parametrize("orthogonalize", [polar_express, newton_schulz])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zeros_give_zeros_beside_others(orthogonalize, dtype, poison_empty):
    g = torch.cat([torch.zeros(1, 8, 32), torch.randn(1, 8, 32)]).to(dtype)
    result = orthogonalize(g)
    assert result.dtype == dtype and result.isfinite().all()
    assert not result[0].any() and result[1].any()
    assert orthogonalize(torch.zeros(0, 8, 32)).shape == (0, 8, 32)


LOW_RANK = gaussian(48, 3) @ gaussian(3, 192)


@pytest.mark.parametrize("g", [spread(48, 192, 2), spread(48, 192, 5), LOW_RANK, gaussian(48, 192) * 1e-5])
def test_float32_comes_close_in_the_gram_form(g):
    """Which squares what it is given: a spectrum over two and over five decades, low rank, small numbers."""
    exact = by_singular_values(g, "polar")
    assert float((polar_express(g.float()) - exact).norm() / exact.norm()) < 4e-3


def test_computes_in_the_dtype_that_is_asked_for():
    g = gaussian(32, 64).float()
    low = polar_express(g, dtype=torch.bfloat16)
    assert low.dtype == torch.float32
    distance = float((low - polar_express(g)).norm() / low.norm())
    assert 1e-4 < distance < 0.05


def test_a_vector_is_refused():
    with pytest.raises(ValueError, match=r"shape \(3,\) has no matrices"):
        polar_express(torch.ones(3))
