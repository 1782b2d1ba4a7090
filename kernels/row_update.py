"""The row rules' arithmetic on gathered rows: the dense oracle, and the in-place update of a working set's rows.

Lives here: mean squares a lane, and one event of row-wise Adam (beta1 = 0), Adagrad or SGD with decoupled weight decay.
Not here: what happened to a row while it was untouched (optim/rows.py), gathering and scattering (mome/table/).
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_update_reference(
    weight_RLD: Tensor,
    grad_RLD: Tensor,
    second_RL: Tensor,
    *,
    kind: str,
    lr: float,
    weight_decay: float,
    beta2: float,
    correction: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """One event of dense training over every row: the new weights and the new second moments. The oracle.

    w <- w * (1 - lr * weight_decay), then, with m the mean of g^2 over a lane's D numbers:
    "adam"     v <- beta2 * v + (1 - beta2) * m;  w <- w - lr * g / (sqrt(v / correction) + eps),
               correction = 1 - product of beta2 over all events, this one included;
    "adagrad"  v <- v + m;  w <- w - lr * g / (sqrt(v) + eps);
    "sgd"      w <- w - lr * g; v is left alone.
    Sources: the row rule of modded-nanogpt's pull request 360 (one number a row, here one a lane); FBGEMM's row-wise
    Adagrad. Raises ValueError for another kind.
    """
    weight_RLD = weight_RLD * (1.0 - lr * weight_decay)
    if kind == "sgd":
        return weight_RLD - lr * grad_RLD, second_RL
    power_RL = grad_RLD.square().mean(dim=-1)
    if kind == "adam":
        second_RL = beta2 * second_RL + (1.0 - beta2) * power_RL
        root_RL = (second_RL / correction).sqrt()
    elif kind == "adagrad":
        second_RL = second_RL + power_RL
        root_RL = second_RL.sqrt()
    else:
        raise ValueError(f"row rule {kind!r}: choose adam, adagrad or sgd")
    return weight_RLD - lr * grad_RLD / (root_RL + eps).unsqueeze(-1), second_RL


def mean_square(grad_ULD: Tensor) -> Tensor:
    """Mean over D of g^2: [U, L]. Not finite where a gradient is not, or where its square overflows."""
    # A norm reads the gradient once and makes no second copy of it, three times as fast as squaring.
    return torch.linalg.vector_norm(grad_ULD, dim=-1).square_().div_(grad_ULD.shape[-1])


def row_update_(
    weight_ULD: Tensor,
    grad_ULD: Tensor,
    power_UL: Tensor,
    second_UL: Tensor | None,
    *,
    kind: str,
    lr: float,
    weight_decay: float,
    beta2: float,
    correction: float,
    eps: float,
) -> None:
    """The same event, in place, on the weights and second moments of touched rows, both as dense training left them.

    power_UL is mean_square(grad_ULD); second_UL is None for "sgd"; the gradient is only read.
    Raises ValueError for another kind.
    """
    weight_ULD.mul_(1.0 - lr * weight_decay)
    if kind == "sgd":
        weight_ULD.add_(grad_ULD, alpha=-lr)
        return
    assert second_UL is not None, f"row rule {kind} needs the second moments"
    if kind == "adam":
        second_UL.mul_(beta2).add_(power_UL, alpha=1.0 - beta2)
        root_UL = (second_UL / correction).sqrt_()
    elif kind == "adagrad":
        second_UL.add_(power_UL)
        root_UL = second_UL.sqrt()
    else:
        raise ValueError(f"row rule {kind!r}: choose adam, adagrad or sgd")
    scale_UL = root_UL.add_(eps).reciprocal_().mul_(lr)
    weight_ULD.addcmul_(grad_ULD, scale_UL.unsqueeze(-1), value=-1.0)
