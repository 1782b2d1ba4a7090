"""Matrices turned into their nearest (semi-)orthogonal ones, approximately and fast, by polynomials in products.

Lives here: Polar Express and Newton-Schulz, batched over leading dimensions.
Not here: what an optimizer does with the result (optim/muon.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

# Polar Express (arXiv 2505.16932) for 5 steps, its 2 % safety factor folded in; the digits are the speedrun's.
POLAR_EXPRESS: tuple[Coefficients, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Keller Jordan's quintic (kellerjordan.github.io/posts/muon), the default of torch.optim.Muon.
NEWTON_SCHULZ: Coefficients = (3.4445, -4.7750, 2.0315)


def polar_express(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The polar factor U V^T of every matrix [..., rows, cols] = U S V^T, to singular values of about 0.85 to 1.15.

    Singular values far below 1e-3 of the Frobenius norm come out smaller; a zero matrix gives zeros.
    dtype: to compute in; by default bfloat16 for float32 on CUDA, else that of the matrices, which the result has too.
    Source: arXiv 2505.16932, normalised by 1.02 |G|_F + 1e-6 as in modded-nanogpt.
    """
    return _orthogonalize(matrices, POLAR_EXPRESS, dtype, lambda norm: norm.mul(1.02).add_(1e-6))


def newton_schulz(matrices: Tensor, dtype: torch.dtype | None = None, steps: int = 5) -> Tensor:
    """Like polar_express, to singular values of about 0.7 to 1.2, and slower to raise small ones.

    Source: Keller Jordan's Muon, X <- a X + (b A + c A^2) X with A = X X^T, started at G / max(|G|_F, 1e-7).
    """
    return _orthogonalize(matrices, (NEWTON_SCHULZ,) * steps, dtype, lambda norm: norm.clamp(min=1e-7))


def _orthogonalize(
    matrices: Tensor,
    coefficients: Sequence[Coefficients],
    dtype: torch.dtype | None,
    divisor: Callable[[Tensor], Tensor],
) -> Tensor:
    if matrices.ndim < 2:
        raise ValueError(f"a tensor of shape {tuple(matrices.shape)} has no matrices; give [..., rows, cols]")
    if dtype is None:
        dtype = torch.bfloat16 if matrices.is_cuda and matrices.dtype == torch.float32 else matrices.dtype
    x_NRC = matrices.reshape(-1, *matrices.shape[-2:])
    x_NRC = (x_NRC / divisor(torch.linalg.vector_norm(x_NRC, dim=(-2, -1), keepdim=True))).to(dtype)
    tall = matrices.shape[-2] > matrices.shape[-1]
    if tall:
        x_NRC = x_NRC.mT
    rows, cols = x_NRC.shape[-2:]
    # Below float32 the squared singular values of the Gram form have too few digits.
    in_gram = cols >= 2 * rows and dtype in (torch.float32, torch.float64)
    x_NRC = (_iterate_gram if in_gram else _iterate)(x_NRC, coefficients)
    return (x_NRC.mT if tall else x_NRC).reshape(matrices.shape).to(matrices.dtype)


def _iterate(x_NRC: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """X <- (a + b A + c A^2) X with A = X X^T, for every (a, b, c) in turn."""
    for a, b, c in coefficients:
        gram_NRR = torch.bmm(x_NRC, x_NRC.mT)
        factor_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, factor_NRR, x_NRC, beta=a)
    return x_NRC


def _iterate_gram(x_NRC: Tensor, coefficients: Sequence[Coefficients]) -> Tensor:
    """The same polynomial in small matrices only: with P = a + b A + c A^2, all X X^T become P A P and P's multiply up.

    For rows : cols = 1 : 4 and 5 steps 25 rows^3 products instead of 45.
    """
    gram_NRR = torch.bmm(x_NRC, x_NRC.mT)
    product_NRR = None
    for step, (a, b, c) in enumerate(coefficients):
        factor_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        factor_NRR.diagonal(dim1=-2, dim2=-1).add_(a)
        product_NRR = factor_NRR if product_NRR is None else torch.bmm(factor_NRR, product_NRR)
        if step + 1 < len(coefficients):
            gram_NRR = torch.bmm(factor_NRR, torch.bmm(gram_NRR, factor_NRR))
    return x_NRC if product_NRR is None else torch.bmm(product_NRR, x_NRC)
