"""Cross entropy of a linear head, with or without softcap: the oracle, and chunks that never hold all logits.

Lives here: the softcap, the nats of each token, and their sum with both gradients.
Not here: shapes with a batch and what is reported (mome/loss/).

Replaces softmax over a tensor [tokens, classes] and its autograd graph. Why faster: three matrix products and no more;
logits are made and used up in pieces that stay in cache, in reused buffers, and only their gradient leaves the cache.
Invariants: sums in float32 or more; the sizes of the pieces change the result by rounding alone; ignored tokens have no
loss and no gradient. Origin: softcap and the gradient made in the forward pass are modded-nanogpt's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
# 23 * sigmoid((z + 5) / 7.5) = HALF_CAP * (1 + tanh((z + SHIFT) / SPREAD)), and tanh is the cheaper one.
HALF_CAP, SHIFT, SPREAD = 11.5, 5.0, 15.0

# Measured with float32 on cores with 2 MB of cache: sizes between these and twice as much are within a few percent, but
# MKL's product for the head's gradient is a third slower at 192 rows or more when the width is 128.
ROWS = 128
CLASSES = 2048


def cap(logits: Tensor) -> Tensor:
    """23 * sigmoid((z + 5) / 7.5) elementwise, between 0 and 23 (modded-nanogpt's asymmetric softcap)."""
    return 2 * HALF_CAP * torch.sigmoid((logits + SHIFT) * (2 / SPREAD))


def cross_entropy_reference(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: bool) -> Tensor:
    """-log softmax(logits)[target] in nats, [N], in float32 or more; 0 where the target is -100. The oracle."""
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    logits_NV = hidden_ND.to(wide) @ weight_VD.to(wide).t()
    return F.cross_entropy(cap(logits_NV) if softcap else logits_NV, targets_N, ignore_index=IGNORE, reduction="none")


def chunked_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: bool, *, rows: int = ROWS, classes: int = CLASSES
) -> Tensor:
    """cross_entropy_reference's nats [N], without a gradient, `rows` tokens and `classes` classes at a time.

    hidden: float32, float64 or bfloat16; the weight is cast to its dtype. targets: int64. Raises ValueError for a
    target that is no class and not -100, and for float16, whose range is too small.
    """
    nats_N, _, _ = _sweep(hidden_ND.detach(), weight_VD.detach(), targets_N, softcap, rows, classes, None)
    return nats_N


def chunked_cross_entropy_sum(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: bool, scale: float = 1.0, *,
    rows: int = ROWS, classes: int = CLASSES,
) -> Tensor:  # fmt: skip
    """scale * sum of the nats: a scalar in float32 or more, differentiable once in hidden and weight.

    Both gradients are made in the forward pass; the backward hands them out. Arguments and errors as above.
    """
    if torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad):
        return _Sum.apply(hidden_ND, weight_VD, targets_N, softcap, scale, rows, classes)
    return chunked_cross_entropy(hidden_ND, weight_VD, targets_N, softcap, rows=rows, classes=classes).sum() * scale


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND, weight_VD, targets_N, softcap, scale, rows, classes) -> Tensor:
        nats_N, grad_hidden_ND, grad_weight_VD = _sweep(hidden_ND, weight_VD, targets_N, softcap, rows, classes, scale)
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype))
        return nats_N.sum() * scale

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        # loss.backward() comes with a 1: a sweep over the head's gradient saved. Asking a GPU for it would stall.
        if grad.device.type != "cpu" or grad.item() != 1:
            grad_hidden_ND, grad_weight_VD = grad_hidden_ND * grad, grad_weight_VD * grad
        return grad_hidden_ND, grad_weight_VD, None, None, None, None, None


def _sweep(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, softcap: bool, rows: int, classes: int, scale: float | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Nats [N] and, unless scale is None, the gradients of scale * their sum: hidden [N, D], weight [V, D]."""
    _check(hidden_ND, weight_VD, targets_N)
    count, vocab = len(hidden_ND), len(weight_VD)
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    weight_VD = weight_VD.to(hidden_ND.dtype)
    rows, classes = max(1, min(rows, count)), min(classes, vocab)
    nats_N = hidden_ND.new_zeros(count, dtype=wide)
    scratch = hidden_ND.new_empty(2, rows * classes, dtype=wide)
    buffer_RV = grad_hidden_ND = grad_weight_VD = None
    if scale is not None or not softcap:
        buffer_RV = hidden_ND.new_empty(rows, vocab, dtype=wide)
    if scale is not None:
        grad_hidden_ND = torch.zeros_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide)
    slope = HALF_CAP / SPREAD if softcap else 1.0
    for start in range(0, count, rows):
        hidden_RD, targets_R = hidden_ND[start : start + rows], targets_N[start : start + rows]
        part_RV = None if buffer_RV is None else buffer_RV[: len(hidden_RD)]
        valid_R, goals_R1 = targets_R != IGNORE, targets_R.clamp(min=0).unsqueeze(1)
        goal_logits_R = (hidden_RD.to(wide) * weight_VD.index_select(0, goals_R1.squeeze(1)).to(wide)).sum(1)
        if softcap:
            turned_R = goal_logits_R.add_(SHIFT).mul_(1 / SPREAD).tanh_()
            total_R = _capped(hidden_RD, weight_VD, part_RV, scratch, classes)
            nats_R = total_R.log().sub_(turned_R, alpha=HALF_CAP)
            at_goal_R = total_R * (1 - turned_R.square())
        else:
            total_R, peak_R = _plain(hidden_RD, weight_VD, part_RV, classes)
            nats_R = total_R.log().add_(peak_R).sub_(goal_logits_R)
            at_goal_R = total_R
        nats_N[start : start + rows] = nats_R.mul_(valid_R)
        if scale is not None:
            # The slopes lack the factor 1 / total: it goes to the few columns of hidden instead of the many of logits.
            part_RV.scatter_add_(1, goals_R1, -at_goal_R.unsqueeze(1))
            part_RV = part_RV.to(hidden_ND.dtype)
            factor_R1 = (scale * slope / total_R * valid_R).unsqueeze(1)
            grad_hidden_ND[start : start + rows] = torch.mm(part_RV, weight_VD) * factor_R1
            _add_product(grad_weight_VD, part_RV.t(), (hidden_RD * factor_R1).to(hidden_ND.dtype))
    return nats_N, grad_hidden_ND, grad_weight_VD


def _capped(hidden_RD: Tensor, weight_VD: Tensor, slopes_RV: Tensor | None, scratch: Tensor, classes: int) -> Tensor:
    """Sums over classes [R] of e = exp(HALF_CAP * y), y = tanh((z + SHIFT) / SPREAD); slopes becomes e * (1 - y^2).

    A capped logit is at most 23, so that no maximum has to be taken out.
    """
    total_R = scratch.new_zeros(len(hidden_RD))
    for first in range(0, len(weight_VD), classes):
        weight_CD = weight_VD[first : first + classes]
        shape = (len(hidden_RD), len(weight_CD))
        turned_RC, exp_RC = (flat[: shape[0] * shape[1]].view(shape) for flat in scratch)
        _product(turned_RC, hidden_RD, weight_CD.t(), SHIFT / SPREAD, 1 / SPREAD)
        torch.mul(turned_RC.tanh_(), HALF_CAP, out=exp_RC).exp_()
        total_R += exp_RC.sum(1)
        if slopes_RV is not None:
            out_RC = slopes_RV[:, first : first + classes]
            torch.addcmul(exp_RC, exp_RC, turned_RC.square_(), value=-1, out=out_RC)
    return total_R


def _plain(hidden_RD: Tensor, weight_VD: Tensor, exp_RV: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Sums over classes [R] of exp(z - peak), which stay in exp_RV, and the peaks [R]."""
    peak_R = exp_RV.new_full((len(hidden_RD),), -torch.inf)
    pieces = exp_RV.split(classes, 1)
    for logits_RC, weight_CD in zip(pieces, weight_VD.split(classes)):
        _product(logits_RC, hidden_RD, weight_CD.t(), 0.0, 1.0)
        peak_R = torch.maximum(peak_R, logits_RC.amax(1))
    total_R = torch.zeros_like(peak_R)
    for logits_RC in pieces:
        total_R += logits_RC.sub_(peak_R.unsqueeze(1)).exp_().sum(1)
    return total_R, peak_R


def _product(out: Tensor, a: Tensor, b: Tensor, shift: float, scale: float) -> None:
    """out = shift + scale * a b, with sums in the dtype of out."""
    if a.dtype != out.dtype:
        out.copy_(_wide_product(a, b, out.dtype)).mul_(scale).add_(shift)
    elif shift:
        torch.addmm(out.new_tensor(shift), a, b, alpha=scale, out=out)
    else:
        torch.mm(a, b, out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, with sums in the dtype of total."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += _wide_product(a, b, total.dtype)


def _wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b of narrow matrices, summed and returned in a wider dtype; the CPU has no product of that kind."""
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else torch.mm(a.to(dtype), b.to(dtype))


def _check(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> None:
    if hidden_ND.dtype == torch.float16:
        raise ValueError("cross entropy: float16 is too narrow for its sums; compute in bfloat16 or float32")
    # On a GPU the question would stall, and indexing fails by itself.
    if targets_N.device.type == "cpu" and targets_N.numel():
        low, high = targets_N.aminmax()
        if high >= len(weight_VD) or (low < 0 and not ((targets_N >= 0) | (targets_N == IGNORE)).all()):
            last = len(weight_VD) - 1
            raise ValueError(f"cross entropy: targets go from {low} to {high}; give {IGNORE} or 0 to {last}")
