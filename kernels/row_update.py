"""The row rules' arithmetic on gathered rows: the dense oracle, and the in-place update of a working set's rows.

Lives here: RowEvent (one event as data), mean squares a lane, sums of squares a column, and one event of row-wise Adam
(beta1 = 0), Adagrad, SGD, momentum SGD or the factored second moment, with decoupled, possibly gated weight decay.
Not here: what happened to a row while it was untouched (optim/rows.py), gathering rows (kernels/gather.py).

Replaces dense optimizers over whole tables. Why faster: work goes with the touched rows; on the CPU the numba kernels
(kernels/cpu/row_update.py) read each number once and write it once, into the table if that is where it belongs.
Invariants: the gradient is only read; nothing that is not finite hides in mean_square. Oracle: row_update_reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import backend

KINDS = ("adam", "adagrad", "sgd", "momentum", "factored")
GATES = ("none", "strict", "loose")


@dataclass(frozen=True)
class RowEvent:
    """One event of a row rule. Raises ValueError for an unknown or impossible kind and gate, and a useless scale.

    kind: see row_update_reference. lr: learning rate. factor: 1 - lr * weight_decay, on the weights the gate names:
    "none": all; "strict": those with g * w > 0; "loose": those with g * w >= 0, signs in exact arithmetic.
    beta2: decay of second moments; correction: 1 - product of beta2 over all events, this one included; eps: added to
    the root; momentum: decay of the buffer; scale: factor on the gradients, such as 1 / ranks.
    """

    kind: str
    lr: float
    factor: float = 1.0
    gate: str = "none"
    beta2: float = 0.99
    correction: float = 1.0
    eps: float = 1e-10
    momentum: float = 0.9
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"row rule {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.gate not in GATES:
            raise ValueError(f"gate {self.gate!r} on weight decay: choose one of {', '.join(GATES)}")
        if self.kind == "momentum" and self.gate != "none":
            raise ValueError(f"gate {self.gate!r} on weight decay: with momentum there is none, choose gate none")
        if not 0.0 < self.scale < math.inf:
            raise ValueError(f"gradients times {self.scale}: the scale must be finite and above 0")


def row_update_reference(
    weight_RLD: Tensor,
    grad_RLD: Tensor,
    second_RL: Tensor | None,
    moment_RLD: Tensor | None,
    columns_LD: Tensor | None,
    event: RowEvent,
    rows: int,
    touched_R: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """One event of dense training over every row: the new weights, second moments, buffers and columns. The oracle.

    With g the gradient times event.scale, m the mean of g^2 over a lane's D numbers, w' = w * factor where the gate
    says so (and, if touched_R is given, bool [R], only in those rows):
    "sgd"       w <- w' - lr * g;
    "adagrad"   v <- v + m;  w <- w' - lr * g / (sqrt(v) + eps);
    "adam"      v <- beta2 * v + (1 - beta2) * m;  w <- w' - lr * g / (sqrt(v / correction) + eps);
    "momentum"  b <- momentum * b + g;  w <- w' - lr * b;
    "factored"  v as in adam;  c <- beta2 * c + (1 - beta2) * (mean of g^2 over all `rows` rows, float64 [L, D]);
                w <- w' - lr * g / (sqrt(v * c / mean of c over D / correction) + eps).
    What a rule does not keep is returned as it came. Sources: the row rule of modded-nanogpt's pull request 360 (one
    number a row, here one a lane) and its sign-gated decay; FBGEMM's row-wise Adagrad; for the factored moment Ember
    (arXiv 2607.01455, modded-nanogpt's pull request 346).
    """
    grad_RLD = grad_RLD * event.scale
    decayed_RLD = weight_RLD * event.factor
    if event.gate != "none":
        agreement_RLD = grad_RLD.sign() * weight_RLD.sign()
        gate_RLD = agreement_RLD > 0 if event.gate == "strict" else agreement_RLD >= 0
        decayed_RLD = torch.where(gate_RLD, decayed_RLD, weight_RLD)
    if touched_R is not None:
        decayed_RLD = torch.where(touched_R[:, None, None], decayed_RLD, weight_RLD)
    if event.kind == "sgd":
        return decayed_RLD - event.lr * grad_RLD, second_RL, moment_RLD, columns_LD
    if event.kind == "momentum":
        moment_RLD = event.momentum * moment_RLD + grad_RLD
        return decayed_RLD - event.lr * moment_RLD, second_RL, moment_RLD, columns_LD
    power_RL = grad_RLD.square().mean(dim=-1)
    if event.kind == "adagrad":
        second_RL = second_RL + power_RL
        root_RLD = second_RL.sqrt().unsqueeze(-1)
    else:
        second_RL = event.beta2 * second_RL + (1.0 - event.beta2) * power_RL
        root_RLD = (second_RL / event.correction).sqrt().unsqueeze(-1)
    if event.kind == "factored":
        squares_LD = grad_RLD.double().square().sum(dim=0)
        columns_LD = event.beta2 * columns_LD + (1.0 - event.beta2) * squares_LD / rows
        mean_L1 = columns_LD.mean(dim=-1, keepdim=True)
        share_LD = torch.where(mean_L1 == 0, 0.0, columns_LD / mean_L1)
        root_RLD = root_RLD * share_LD.sqrt().to(root_RLD.dtype)
    return decayed_RLD - event.lr * grad_RLD / (root_RLD + event.eps), second_RL, moment_RLD, columns_LD


def mean_square(grad_ULD: Tensor, scale: float = 1.0) -> Tensor:
    """Mean over D of (scale * g)^2: [U, L]. Not finite where a gradient is not, or where that square overflows."""
    if _on_numba((grad_ULD,)):
        from kernels.cpu import row_update as cpu

        return cpu.mean_square(grad_ULD, scale)
    return _mean_square(grad_ULD, scale)


def column_squares(grad_ULD: Tensor, scale: float = 1.0) -> Tensor:
    """Sum over U of (scale * g)^2, summed in float64: float64 [L, D]."""
    if _on_numba((grad_ULD,)):
        from kernels.cpu import row_update as cpu

        return cpu.column_squares(grad_ULD, scale)
    return _column_squares(grad_ULD, scale)


def column_profile_(columns_LD: Tensor, squares_LD: Tensor, event: RowEvent, rows: int, dtype: torch.dtype) -> Tensor:
    """One event of the column averages c, in place, and sqrt(c / mean of c over D) after it: [L, D] of dtype.

    columns_LD: float64; squares_LD: column_squares over the rows of all ranks; rows: those of the whole table, touched
    or not. The profile is 0 in a lane that never had a gradient.
    """
    columns_LD.mul_(event.beta2).add_(squares_LD, alpha=(1.0 - event.beta2) / rows)
    mean_L1 = columns_LD.mean(dim=-1, keepdim=True)
    # 0 / 1 in place of 0 / 0.
    return (columns_LD / mean_L1.masked_fill_(mean_L1 == 0, 1.0)).sqrt_().to(dtype)


def row_update_(
    weight_ULD: Tensor,
    grad_ULD: Tensor,
    power_UL: Tensor,
    second_UL: Tensor | None,
    moment_ULD: Tensor | None,
    profile_LD: Tensor | None,
    event: RowEvent,
    *,
    out_RLD: Tensor | None = None,
    ids_U: Tensor | None = None,
) -> None:
    """The same event on touched rows, weights and state as dense training left them; state is updated in place.

    power_UL is mean_square(grad_ULD, event.scale), profile_LD what column_profile_ gave for this event, all of one
    dtype; second, moment and profile are None where the rule keeps none. The new weights replace weight_ULD, or, with
    out_RLD and ids_U (int64, distinct), the rows ids_U of out_RLD: weight_ULD is then only read.
    Raises ValueError, and then nothing has changed, for shapes that do not belong together, for state that the rule
    needs and does not get, and for ids outside out_RLD.
    """
    tensors = (weight_ULD, grad_ULD, power_UL, second_UL, moment_ULD, profile_LD)
    _check(*tensors, event.kind, out_RLD, ids_U)
    if not len(weight_ULD):
        return
    if _on_numba((*tensors, out_RLD)):
        from kernels.cpu import row_update as cpu

        cpu.row_update_(*tensors, event, out_RLD, ids_U)
    else:
        _row_update_(*tensors, event, out_RLD, ids_U)


def _check(
    weight_ULD: Tensor,
    grad_ULD: Tensor,
    power_UL: Tensor,
    second_UL: Tensor | None,
    moment_ULD: Tensor | None,
    profile_LD: Tensor | None,
    kind: str,
    out_RLD: Tensor | None,
    ids_U: Tensor | None,
) -> None:
    """Refuse what would make the kernels, which check nothing, read or write elsewhere."""
    shape = weight_ULD.shape
    expected = {"gradients": (grad_ULD, shape), "powers": (power_UL, shape[:2])}
    if kind in ("adam", "adagrad", "factored"):
        expected["second moments"] = (second_UL, shape[:2])
    if kind == "momentum":
        expected["buffers"] = (moment_ULD, shape)
    if kind == "factored":
        expected["profile"] = (profile_LD, shape[1:])
    if out_RLD is not None or ids_U is not None:
        expected["ids of the rows to write"] = (ids_U, shape[:1])
        expected["rows to write"] = (None if out_RLD is None else out_RLD[:0], (0, *shape[1:]))
    for name, (tensor, wanted) in expected.items():
        found = None if tensor is None else tuple(tensor.shape)
        if found != tuple(wanted):
            raise ValueError(
                f"row rule {kind}, weights {tuple(shape)}: {name} {found or 'missing'}, not {tuple(wanted)}"
            )
    if ids_U is not None and ids_U.dtype != torch.int64:
        raise ValueError(f"row ids to write to are {ids_U.dtype}: they must be int64")
    # Elsewhere a look at the ids would make the CPU wait, and index_copy_ looks at them there.
    if ids_U is not None and ids_U.is_cpu and len(ids_U):
        low, high = (int(x) for x in ids_U.aminmax())
        if low < 0 or high >= len(out_RLD):
            raise ValueError(f"row ids from {low} to {high} to write to: there are {len(out_RLD)} rows")


def _on_numba(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether the numba kernels may have these: float32 or float64 throughout, contiguous, on the CPU."""
    first = tensors[0]
    if backend("row_update", first.device, _self_check) != "numba" or first.dtype not in (torch.float32, torch.float64):
        return False
    return all(x is None or (x.is_cpu and x.dtype == first.dtype and x.is_contiguous()) for x in tensors)


def _self_check() -> bool:
    """Whether every numba kernel gives the oracle's values on a few numbers."""
    from kernels.cpu import row_update as cpu

    weight_ULD, grad_ULD = torch.linspace(-1.0, 1.0, 20).view(2, 2, 5), torch.linspace(0.5, -0.7, 20).view(2, 2, 5)
    power_UL, squares_LD = cpu.mean_square(grad_ULD, 0.5), cpu.column_squares(grad_ULD, 0.5)
    ids_U, same = torch.tensor([3, 1]), []
    for kind in KINDS:
        event = RowEvent(kind, lr=0.1, factor=0.9, gate="none" if kind == "momentum" else "strict", scale=0.5)
        second_UL, moment_ULD, columns_LD = weight_ULD[..., 0].abs(), weight_ULD.flip(0), grad_ULD[0].double().abs()
        expected = row_update_reference(weight_ULD, grad_ULD, second_UL, moment_ULD, columns_LD, event, rows=7)
        profile_LD = column_profile_(columns_LD, squares_LD, event, 7, torch.float32) if kind == "factored" else None
        out_RLD = torch.zeros(4, 2, 5)
        cpu.row_update_(
            weight_ULD, grad_ULD, power_UL, second_UL, moment_ULD, profile_LD, event, out_RLD, ids_U
        )  # fmt: skip
        found = (out_RLD.index_select(0, ids_U), second_UL, moment_ULD, columns_LD)
        same += [torch.allclose(a, b) for a, b in zip(found, expected)]
    return all(same)


def _mean_square(grad_ULD: Tensor, scale: float) -> Tensor:
    # A norm reads the gradient once and makes no second copy of it, three times as fast as squaring.
    grad_ULD = grad_ULD if scale == 1.0 else grad_ULD * scale
    return torch.linalg.vector_norm(grad_ULD, dim=-1).square_().div_(grad_ULD.shape[-1])


def _column_squares(grad_ULD: Tensor, scale: float) -> Tensor:
    return torch.linalg.vector_norm(grad_ULD, dim=0, dtype=torch.float64).mul_(scale).square_()


def _row_update_(
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
    """row_update_ in torch, for any device and layout."""
    weight_ULD = weight_ULD if out_RLD is None else weight_ULD.clone()
    if event.scale != 1.0:
        grad_ULD = grad_ULD * event.scale
    if event.gate == "none":
        weight_ULD.mul_(event.factor)
    else:
        # The sign times the weight, for g * w itself may underflow.
        agreement_ULD = grad_ULD.sign().mul_(weight_ULD)
        gate_ULD = agreement_ULD > 0 if event.gate == "strict" else agreement_ULD >= 0
        weight_ULD.copy_(torch.where(gate_ULD, weight_ULD * event.factor, weight_ULD))
    if event.kind == "sgd":
        weight_ULD.add_(grad_ULD, alpha=-event.lr)
    elif event.kind == "momentum":
        weight_ULD.sub_(moment_ULD.mul_(event.momentum).add_(grad_ULD), alpha=event.lr)
    else:
        if event.kind == "adagrad":
            root_UL = second_UL.add_(power_UL).sqrt()
        else:
            second_UL.mul_(event.beta2).add_(power_UL, alpha=1.0 - event.beta2)
            root_UL = (second_UL / event.correction).sqrt_()
        root_ULx = root_UL.unsqueeze(-1)
        if event.kind == "factored":
            root_ULx = root_ULx * profile_LD
        weight_ULD.addcmul_(grad_ULD, root_ULx.add_(event.eps).reciprocal_().mul_(event.lr), value=-1.0)
    if out_RLD is not None:
        out_RLD.index_copy_(0, ids_U, weight_ULD.to(out_RLD.dtype))
