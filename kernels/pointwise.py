"""Norms, rotary and activations along the channels, with backward passes of few sweeps over memory.

Lives here: rms_norm, norm_rotate (queries and keys), linear_relu_squared (hidden units), each below its oracle.
Not here: attention (kernels/attention.py), and where a model puts these.

Replaces torch's composite rms_norm, rotary by slices and relu().square(). Why faster: on the CPU the cost is the number
of sweeps over memory, and autograd's composites take two to three times as many. Invariants: sums in float32 or more;
results in the dtype of the input. Origin of the rotary: modded-nanogpt's half-truncated one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6
ROTARY_BASE = 1024.0


def rms_norm_reference(x_ND: Tensor) -> Tensor:
    """x / sqrt(mean of x^2 over the last dimension + EPS). The oracle."""
    return F.rms_norm(x_ND, x_ND.shape[-1:], eps=EPS)


def rms_norm(x_ND: Tensor) -> Tensor:
    """RMS normalisation without weights over the last dimension; any shape, dtype of x."""
    return _RmsNorm.apply(x_ND)


def _inverse_rms(x_ND: Tensor) -> Tensor:
    """1 / sqrt(mean of x^2 + EPS), [N, 1], in float32 or more."""
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    norm_N1 = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True, dtype=wide)
    return norm_N1.square_().mul_(1 / x_ND.shape[-1]).add_(EPS).rsqrt_()


def _through_norm(grad_ND: Tensor, y_ND: Tensor, inverse_N1: Tensor) -> Tensor:
    """The gradient for x of y = x / rms(x): (g - y * mean of g * y) / rms(x), in the dtype of 1 / rms."""
    grad_ND, y_ND = grad_ND.to(inverse_N1.dtype), y_ND.to(inverse_N1.dtype)
    mean_N1 = torch.linalg.vecdot(grad_ND, y_ND).unsqueeze(-1).div_(y_ND.shape[-1])
    return torch.addcmul(grad_ND, y_ND, mean_N1, value=-1).mul_(inverse_N1)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ND: Tensor) -> Tensor:
        inverse_N1 = _inverse_rms(x_ND)
        y_ND = (x_ND * inverse_N1).to(x_ND.dtype)
        ctx.save_for_backward(y_ND, inverse_N1)
        return y_ND

    @staticmethod
    def backward(ctx, grad_ND: Tensor) -> Tensor:
        return _through_norm(grad_ND, *ctx.saved_tensors).to(grad_ND.dtype)


def rotary_table(positions: int, head_dim: int) -> Tensor:
    """(cos, sin) of each position and channel pair, float32 [positions, head_dim / 2, 2]; head_dim a multiple of 4.

    The first head_dim / 4 pairs of adjacent channels turn by position * (1 / 1024)^linspace(0, 1) radians, the others
    stand still (modded-nanogpt).
    """
    exponents = torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
    frequencies = torch.cat([ROTARY_BASE**-exponents, torch.zeros_like(exponents)])
    angles = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=-1).float()


def norm_rotate_reference(x_BTHK: Tensor, table_TF2: Tensor) -> Tensor:
    """RMS norm over K, then each pair (a, b) of adjacent channels to (a cos - b sin, a sin + b cos). The oracle."""
    a, b = rms_norm_reference(x_BTHK).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table_TF2.unsqueeze(1).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x_BTHK.dtype)


def norm_rotate(x_BTHK: Tensor, table_TF2: Tensor) -> Tensor:
    """norm_rotate_reference's values, [B, T, H, K] in the dtype of x; differentiable in x."""
    return _NormRotate.apply(x_BTHK, table_TF2)


def _turn(x_BTHK: Tensor, table_TF2: Tensor, back: bool = False) -> Tensor:
    """x with its pairs of channels rotated, forth or back."""
    turn_T1F = torch.view_as_complex(table_TF2.to(x_BTHK.dtype)).unsqueeze(1)
    turn_T1F = turn_T1F.conj_physical() if back else turn_T1F
    return torch.view_as_real(torch.view_as_complex(x_BTHK.unflatten(-1, (-1, 2))) * turn_T1F).flatten(-2)


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BTHK: Tensor, table_TF2: Tensor) -> Tensor:
        inverse_BTH1 = _inverse_rms(x_BTHK)
        y_BTHK = (x_BTHK * inverse_BTH1).contiguous()
        ctx.save_for_backward(y_BTHK, inverse_BTH1, table_TF2)
        return _turn(y_BTHK, table_TF2).to(x_BTHK.dtype)

    @staticmethod
    def backward(ctx, grad_BTHK: Tensor) -> tuple[Tensor, None]:
        y_BTHK, inverse_BTH1, table_TF2 = ctx.saved_tensors
        turned_BTHK = _turn(grad_BTHK.to(y_BTHK.dtype).contiguous(), table_TF2, back=True)
        return _through_norm(turned_BTHK, y_BTHK, inverse_BTH1).to(grad_BTHK.dtype), None


def linear_relu_squared_reference(x_ND: Tensor, weight_FD: Tensor) -> Tensor:
    """max(W x, 0)^2. The oracle."""
    return F.linear(x_ND, weight_FD).relu().square()


def linear_relu_squared(x_ND: Tensor, weight_FD: Tensor) -> Tensor:
    """linear_relu_squared_reference's values, [N, F] for any leading shape N; the gradient at 0 is 0."""
    return _LinearReluSquared.apply(x_ND.flatten(0, -2), weight_FD).unflatten(0, x_ND.shape[:-1])


class _LinearReluSquared(torch.autograd.Function):
    """With the product inside, the hidden units are rectified where they lie and not kept twice."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, weight_FD: Tensor) -> Tensor:
        positive_NF = torch.mm(x_ND, weight_FD.t()).relu_()
        ctx.save_for_backward(x_ND, weight_FD, positive_NF)
        return positive_NF.square()

    @staticmethod
    def backward(ctx, grad_NF: Tensor) -> tuple[Tensor, Tensor]:
        x_ND, weight_FD, positive_NF = ctx.saved_tensors
        half_NF = grad_NF * positive_NF
        return torch.mm(half_NF, weight_FD).mul_(2), torch.mm(half_NF.t(), x_ND).mul_(2)
