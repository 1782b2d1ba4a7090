"""AdamW with a gated decay, at the speed of torch's fused kernel.

Lives here: CautiousAdam, torch.optim.AdamW with one pass before it.
Not here: the rules for rows of a table (optim/rows.py) and which parameter gets which values (optim/groups.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of a pass on a CPU: weight, moment, gradient and scratch then fit the L2 cache of a core (4 x 256 KiB).
CHUNK = 1 << 16


class CautiousAdam(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) whose groups may also hold a cautious_decay.

    Where the update and the weight have the same sign (strictly, so that a row with no gradient yet stays as it is),
    the weight is decayed by lr^2 * cautious_decay; being quadratic in lr, the decay follows the schedule down.
        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        w <- w - lr (u + weight_decay * w + lr * cautious_decay * [u w > 0] w)
    Source: the Adam of modded-nanogpt (cautious weight decay). lr is the group's own, any multiplier included.
    With cautious_decay = 0 nothing is added to AdamW, neither work nor rounding. State: AdamW's.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        cautious_decay: float = 0.0,
    ):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.defaults["cautious_decay"] = cautious_decay
        for group in self.param_groups:
            group.setdefault("cautious_decay", cautious_decay)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            factor = group["lr"] ** 2 * group["cautious_decay"]
            if factor:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        moment = self.state[parameter].get("exp_avg")
                        _decay(parameter, parameter.grad, moment, group["betas"][0], factor)
        super().step()


def _decay(weight: Tensor, grad: Tensor, moment: Tensor | None, beta1: float, factor: float) -> None:
    """w <- w - factor * w where w has the sign of the first moment that the step is about to form."""
    tensors = [torch.atleast_1d(one) for one in (weight, grad, grad if moment is None else moment)]
    rows = len(tensors[0])
    if weight.device.type == "cpu":
        rows = max(1, CHUNK * rows // max(1, weight.numel()))
    ratio = 0.0 if moment is None else beta1 / (1 - beta1)
    for w, g, m in zip(*(one.split(max(1, rows)) for one in tensors)):
        gate = torch.add(g, m, alpha=ratio).mul_(w).gt_(0)
        w.addcmul_(gate, w, value=-factor)
