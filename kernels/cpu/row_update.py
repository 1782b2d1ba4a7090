"""The row rules on the CPU: one pass over the touched rows, from weights and gradients straight into the table.

Lives here: numba kernels for mean squares, sums of squares a column, and one event of each rule; their array plumbing.
Not here: the formulas' oracle and the torch path (kernels/row_update.py), threads (threads.py).

Replaces a chain of torch calls, each a sweep over the rows, and a copy. Why faster: a row's weight and
gradient are read once and its new weight is written once, so the time is that of the memory. Invariants: rows are split
between threads, sums never; every column is summed in the order of its rows; arrays are C-contiguous and of one dtype,
and shapes and ids were checked before (there are no bounds checks here). Oracle: row_update_reference.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.cpu import jit
from kernels.cpu.intrinsics import mean_of_squares
from kernels.cpu.threads import run
from kernels.row_update import RowEvent

# Numbers that a thread's share should hold: about a tenth of a millisecond of memory traffic.
_SHARE = 1 << 17
_NO_IDS = np.empty(0, dtype=np.int64)
_SGD, _ADAGRAD, _ADAM = range(3)
_CODES = {"sgd": _SGD, "adagrad": _ADAGRAD, "adam": _ADAM}


def mean_square(grad_ULD: Tensor, scale: float) -> Tensor:
    """kernels.row_update.mean_square, into a fresh [U, L]."""
    power_UL = torch.empty(grad_ULD.shape[:2], dtype=grad_ULD.dtype)
    grad, power = _array(grad_ULD.flatten(1)), _array(power_UL)
    run(_mean_square, len(grad), grad, power, grad.dtype.type(scale), least=_least(grad))
    return power_UL


def column_squares(grad_ULD: Tensor, scale: float) -> Tensor:
    """kernels.row_update.column_squares, into a fresh float64 [L, D]."""
    rows, lanes, dim = grad_ULD.shape
    squares_LD = torch.zeros(lanes, dim, dtype=torch.float64)
    # Shared out by columns, a cache line or more each, so that no sum is split.
    least = max(16, _SHARE // max(1, rows))
    run(_column_squares, lanes * dim, _array(grad_ULD.flatten(1)), _array(squares_LD.view(-1)), least=least)
    return squares_LD.mul_(scale * scale)


def row_update_(
    weight_ULD: Tensor,
    grad_ULD: Tensor,
    power_UL: Tensor,
    second_UL: Tensor | None,
    moment_ULD: Tensor | None,
    profile_LD: Tensor | None,
    event: RowEvent,
    out_RLD: Tensor | None,
    ids_U: Tensor | None,
) -> None:
    """kernels.row_update.row_update_, its arguments already checked."""
    weight, grad = _array(weight_ULD), _array(grad_ULD)
    into = weight if out_RLD is None else _array(out_RLD)
    ids = _NO_IDS if ids_U is None else _array(ids_U)
    number = weight.dtype.type
    shared = (weight, grad, into, ids, number(event.scale), number(event.lr), number(event.factor))
    if event.kind == "momentum":
        kernel, own = _momentum, (_array(moment_ULD), number(event.momentum))
    else:
        # The factors where the update has the other sign than the weight, and where one of them is 0.
        against = number(event.factor if event.gate == "none" else 1.0)
        still = number(1.0 if event.gate == "strict" else event.factor)
        power = _array(power_UL)
        second = power if second_UL is None else _array(second_UL)
        scalars = (number(x) for x in (event.eps, event.beta2, 1.0 - event.beta2, event.correction))
        kernel, last = (_factored, _array(profile_LD)) if event.kind == "factored" else (_scaled, _CODES[event.kind])
        own = (against, still, power, second, *scalars, last)
    run(kernel, len(weight), *shared, *own, least=_least(weight))


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()


def _least(array: np.ndarray) -> int:
    return max(1, _SHARE // max(1, array[:1].size))


@jit
def _mean_square(begin, end, grad, power, scale):
    lanes = power.shape[1]
    dim = grad.shape[1] // max(1, lanes)
    for u in range(begin, end):
        for lane in range(lanes):
            power[u, lane] = mean_of_squares(grad, u, lane * dim, dim, scale)


@jit
def _column_squares(begin, end, grad, squares):
    sums = squares[begin:end]
    for u in range(grad.shape[0]):
        row = grad[u, begin:end]
        for column in range(len(row)):
            number = np.float64(row[column])
            sums[column] += number * number


@jit
def _decayed(w, g, along, against, still):
    """w times `along` where g has the sign of w, `against` where it has the other, `still` where either is 0."""
    sign = w if g > 0 else (-w if g < 0 else w - w)
    return w * (along if sign > 0 else (against if sign < 0 else still))


@jit
def _scaled(
    begin, end, weight, grad, into, ids, scale, lr, along, against, still,
    power, second, eps, beta2, rest, correction, code,
):  # fmt: skip
    plain = along == against and along == still
    for u in range(begin, end):
        for lane in range(weight.shape[1]):
            rate = lr
            if code == _ADAM:
                second[u, lane] = beta2 * second[u, lane] + rest * power[u, lane]
                rate = lr / (np.sqrt(second[u, lane] / correction) + eps)
            elif code == _ADAGRAD:
                second[u, lane] += power[u, lane]
                rate = lr / (np.sqrt(second[u, lane]) + eps)
            w, g = weight[u, lane], grad[u, lane]
            # Loops of their own: for all the same factor, and where source and target are one array by name, so that
            # the compiler needs no check of overlap.
            if len(ids):
                new = into[ids[u], lane]
                if plain:
                    for d in range(len(w)):
                        new[d] = w[d] * along - rate * (scale * g[d])
                else:
                    for d in range(len(w)):
                        step = scale * g[d]
                        new[d] = _decayed(w[d], step, along, against, still) - rate * step
            elif plain:
                for d in range(len(w)):
                    w[d] = w[d] * along - rate * (scale * g[d])
            else:
                for d in range(len(w)):
                    step = scale * g[d]
                    w[d] = _decayed(w[d], step, along, against, still) - rate * step


@jit
def _factored(
    begin, end, weight, grad, into, ids, scale, lr, along, against, still,
    power, second, eps, beta2, rest, correction, profile,
):  # fmt: skip
    for u in range(begin, end):
        for lane in range(weight.shape[1]):
            second[u, lane] = beta2 * second[u, lane] + rest * power[u, lane]
            root = np.sqrt(second[u, lane] / correction)
            w, g, share = weight[u, lane], grad[u, lane], profile[lane]
            if len(ids):
                new = into[ids[u], lane]
                for d in range(len(w)):
                    step = scale * g[d]
                    new[d] = _decayed(w[d], step, along, against, still) - lr * step / (root * share[d] + eps)
            else:
                for d in range(len(w)):
                    step = scale * g[d]
                    w[d] = _decayed(w[d], step, along, against, still) - lr * step / (root * share[d] + eps)


@jit
def _momentum(begin, end, weight, grad, into, ids, scale, lr, along, moment, momentum):
    for u in range(begin, end):
        for lane in range(weight.shape[1]):
            w, g, m = weight[u, lane], grad[u, lane], moment[u, lane]
            # Apart from the weights, so that no loop has more arrays than the compiler cares to check for overlap.
            for d in range(len(w)):
                m[d] = momentum * m[d] + scale * g[d]
            if len(ids):
                new = into[ids[u], lane]
                for d in range(len(w)):
                    new[d] = along * w[d] - lr * m[d]
            else:
                for d in range(len(w)):
                    w[d] = along * w[d] - lr * m[d]
