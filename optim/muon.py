"""NorMuon: momentum, orthogonalised, evened out over neurons, with decay where it agrees with the update.

Lives here: the optimizer for matrices, alone, stacked, or fused like QKV; same shapes go through one batched call.
Not here: the orthogonalisation itself (optim/orthogonalize.py) and which parameter gets which values (optim/groups.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from optim.orthogonalize import polar_express


class NorMuon(torch.optim.Optimizer):
    """NorMuon (arXiv 2510.05491) in modded-nanogpt's form, for parameters [rows, cols] or [..., rows, cols].

    For each matrix, with mu = momentum, f = lr * lr_mul * sqrt(max(1, rows / cols)):
        M <- M + (1 - mu)(G - M);  U = G + mu (M - G);  X = orthogonalize(U)
        s = mean of X^2 over each row (over each column when rows < cols);  V <- V + (1 - beta2)(s - V)
        X <- X / sqrt(max(V, 1e-10)), rescaled to the Frobenius norm that it had
        W <- W - f (X + lr * weight_decay * [X W >= 0] W)
    so the decay is quadratic in lr and acts only where it goes the way of the update.

    A parameter group holds lr, momentum, beta2, weight_decay, lr_mul, split and variance. split: how many matrices lie
    under each other in one (3 for a fused QKV [3D, D]). variance: False leaves out the lines with V, and is Muon.
    orthogonalize(matrices, dtype) and dtype (None: its default): see optim/orthogonalize.py.
    State: momentum (shape of the parameter) and variance, in the dtype of the parameter. A parameter with no gradient
    is left alone. Raises ValueError for a parameter that is no matrix, does not split evenly or is not contiguous.
    """

    def __init__(
        self,
        params,
        lr: float = 0.023,
        momentum: float = 0.95,
        beta2: float = 0.9,
        weight_decay: float = 0.0,
        lr_mul: float = 1.0,
        split: int = 1,
        variance: bool = True,
        orthogonalize: Callable[[Tensor, torch.dtype | None], Tensor] = polar_express,
        dtype: torch.dtype | None = None,
    ):
        self.orthogonalize, self.dtype = orthogonalize, dtype
        defaults = {
            "lr": lr, "momentum": momentum, "beta2": beta2, "weight_decay": weight_decay, "lr_mul": lr_mul,
            "split": split, "variance": variance,
        }  # fmt: skip
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                _check(parameter, group["split"])

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            batches: dict[tuple, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shape = (parameter.shape[-2] // group["split"], parameter.shape[-1])
                    batches.setdefault((shape, parameter.dtype, parameter.device), []).append(parameter)
            for (shape, _, _), parameters in batches.items():
                self._update(parameters, *shape, group)

    def _update(self, parameters: list[Tensor], rows: int, cols: int, group: dict) -> None:
        """Update all parameters that consist of [rows, cols] matrices; N counts the matrices of all of them."""
        states = [self._state_of(parameter, rows, cols, group["variance"]) for parameter in parameters]
        weights = [parameter.view(-1, rows, cols) for parameter in parameters]
        grads = [parameter.grad.reshape(-1, rows, cols) for parameter in parameters]
        counts = [len(weight) for weight in weights]

        momenta = [state["momentum"].view(-1, rows, cols) for state in states]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        update_NRC = torch.cat(torch._foreach_lerp(grads, momenta, group["momentum"]))
        update_NRC = self.orthogonalize(update_NRC, self.dtype)

        if group["variance"]:
            _even_out(update_NRC, [state["variance"] for state in states], counts, group["beta2"])
        if group["weight_decay"]:
            weight_NRC = torch.cat(weights)
            agrees_NRC = (update_NRC * weight_NRC).ge_(0)
            update_NRC.addcmul_(agrees_NRC, weight_NRC, value=group["lr"] * group["weight_decay"])
        factor = group["lr"] * group["lr_mul"] * math.sqrt(max(1.0, rows / cols))
        torch._foreach_add_(weights, update_NRC.split(counts), alpha=-factor)

    def _state_of(self, parameter: Tensor, rows: int, cols: int, variance: bool) -> dict:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
            if variance:
                shape = (rows, 1) if rows >= cols else (1, cols)
                state["variance"] = parameter.new_zeros(parameter.numel() // (rows * cols), *shape)
        return state


def _even_out(x_NRC: Tensor, variances: list[Tensor], counts: list[int], beta2: float) -> None:
    """Scale the rows (or columns) of x in place by 1 / sqrt(running mean square), keeping each Frobenius norm."""
    dim = -1 if x_NRC.shape[-2] >= x_NRC.shape[-1] else -2
    squares = torch.linalg.vector_norm(x_NRC, dim=dim, keepdim=True).square_()
    torch._foreach_lerp_(variances, (squares / x_NRC.shape[dim]).split(counts), 1 - beta2)
    scale = torch.cat(variances).clamp_(min=1e-10).rsqrt_()
    before = squares.sum((-2, -1), keepdim=True)
    after = (squares * scale.square()).sum((-2, -1), keepdim=True)
    # A matrix without a gradient yet is all zeros: 0 / 0 without the bound.
    x_NRC.mul_(scale.mul_((before / after.clamp_(min=1e-30)).sqrt_()))


def _check(parameter: Tensor, split: int) -> None:
    shape = tuple(parameter.shape)
    if parameter.ndim < 2:
        raise ValueError(f"NorMuon got a parameter of shape {shape}; it takes matrices: give this one to an Adam")
    if shape[-2] % split:
        raise ValueError(f"NorMuon got a parameter of shape {shape}, whose {shape[-2]} rows don't split into {split}")
    if not parameter.is_contiguous():
        raise ValueError(f"NorMuon got a parameter of shape {shape} that is not contiguous; make it with .contiguous()")
