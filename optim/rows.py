"""Row rules and their clock: what dense training does to a row that nobody touches, as a function of a few sums.

Lives here: RowRule (a rule as data) and RowClock (float64 sums over events: log decay, log beta2, momentum's travel).
Not here: the arithmetic on rows (kernels/row_update.py) and where rows lie (mome/table/).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.row_update import KINDS, RowEvent

DECAYS = ("none", "touched", "gated", "retroactive", "gated-retroactive")

# The gate on weight decay that each mode puts on the rows of an event.
_GATES = {"gated": "strict", "gated-retroactive": "loose"}
# Below this, lr / eps may overflow float32, and a zero gradient beside it makes 0 * inf.
_LEAST_EPS = 1e-30


@dataclass(frozen=True)
class RowRule:
    """A rule for table rows, decoupled weight decay included; its formulas are in kernels/row_update.py.

    kind: "adam" (beta1 = 0, one second moment a lane), "adagrad" (row-wise, one sum a lane), "sgd" (no state a lane),
    "momentum" (SGD with a buffer as large as the row) or "factored" (a row average a lane times a column average).
    beta2: decay of the second moments per event; eps: added to the root; momentum: decay of the buffer per event.
    weight_decay: an event with learning rate lr multiplies weights by 1 - lr * weight_decay. Which ones, `decay` says:
    "none": none, and weight_decay must be 0; "touched": those of the rows of the event's working set;
    "gated": those whose update has their own sign, so that an untouched row never decays (modded-nanogpt's rule);
    "retroactive": every weight of the table; "gated-retroactive": every weight but those whose update has the other
    sign, so that an untouched row decays as under plain decay. Raises ValueError for a value out of range.
    """

    kind: str
    beta2: float = 0.99
    eps: float = 1e-10
    weight_decay: float = 0.0
    decay: str = "retroactive"
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"row rule {self.kind!r}: choose one of {', '.join(KINDS)}")
        if self.decay not in DECAYS:
            raise ValueError(f"row rule with decay = {self.decay!r}: choose one of {', '.join(DECAYS)}")
        _check_beta2(self.beta2)
        if not _LEAST_EPS <= self.eps < math.inf:
            raise ValueError(
                f"row rule with eps = {self.eps}: it must be at least {_LEAST_EPS}, or a zero gradient makes 0 / 0"
            )
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"row rule with weight_decay = {self.weight_decay}: it must be finite and not negative")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"row rule with momentum = {self.momentum}: it must be at least 0 and below 1")
        if self.decay == "none" and self.weight_decay:
            raise ValueError(
                f"row rule with weight_decay = {self.weight_decay} and decay = 'none': choose one of the two"
            )
        if self.decay in _GATES and self.kind == "momentum":
            raise ValueError(
                f"row rule 'momentum' with decay = {self.decay!r}: momentum moves untouched rows as well, and the sign "
                "of that is not kept; choose decay touched or retroactive"
            )

    @property
    def keeps_second(self) -> bool:
        """Whether the rule stores one number a lane."""
        return self.kind in ("adam", "adagrad", "factored")

    @property
    def decays_second(self) -> bool:
        """Whether that number shrinks at events that do not touch its row."""
        return self.kind in ("adam", "factored")

    @property
    def keeps_moment(self) -> bool:
        """Whether the rule stores one number a weight."""
        return self.kind == "momentum"

    @property
    def keeps_columns(self) -> bool:
        """Whether the rule stores lanes x dim numbers a table."""
        return self.kind == "factored"

    @property
    def decays_untouched(self) -> bool:
        """Whether an event shrinks the weights of rows that it does not touch."""
        return self.weight_decay > 0.0 and self.decay in ("retroactive", "gated-retroactive")

    @property
    def gate(self) -> str:
        """Which elements of a touched row decay: "none" (all), "strict" or "loose", as RowEvent says."""
        return _GATES.get(self.decay, "none")


class RowClock:
    """Counts events (pushes) and knows what they did to a row that was last written at event `last` (0: never).

    With S[e] = sum of log(1 - lr * weight_decay) and B[e] = sum of log beta2, dense training has since multiplied its
    weights by exp(S[event] - S[last]), and its second moments by exp(B[event] - B[last]). Differences of logarithms:
    no product over a long history underflows. The momentum rule's buffer has shrunk by momentum^(event - last), and
    has moved the weights by -travel times what it was at event `last`.
    S and B are float64 on `device`, 16 bytes an event; the momentum rule keeps 8 more, on the CPU.
    """

    def __init__(self, rule: RowRule, device: torch.device | str = "cpu") -> None:
        self.rule = rule
        self.event = 0
        self._sums = torch.zeros(2, 1024, dtype=torch.float64, device=device)
        # The newest sums as Python floats: the next ones come from them without waiting for the device.
        self._log_decay = 0.0
        self._log_beta2 = 0.0
        self._travel = _Travel(rule.momentum) if rule.keeps_moment else None

    def extend(self, lr: float, beta2: float) -> None:
        """Add one event. Raises ValueError and changes nothing if lr < 0, lr * weight_decay >= 1 or beta2 is off."""
        if not 0.0 <= lr < math.inf:
            raise ValueError(f"learning rate {lr} for table rows: it must be finite and not negative")
        decay = lr * self.rule.weight_decay
        if decay >= 1.0:
            raise ValueError(
                f"learning rate {lr} times weight decay {self.rule.weight_decay} is {decay:.4g}: "
                "keep it below 1, or one event wipes out every row"
            )
        _check_beta2(beta2)
        if self.event + 1 == self._sums.shape[1]:
            self._sums = torch.cat((self._sums, torch.zeros_like(self._sums)), dim=1)
        self.event += 1
        decay = decay if self.rule.decays_untouched else 0.0
        self._log_decay += math.log1p(-decay)
        self._log_beta2 += math.log(beta2)
        self._sums[0, self.event] = self._log_decay
        self._sums[1, self.event] = self._log_beta2
        if self._travel is not None:
            self._travel.extend(lr, 1.0 - decay)

    def row_event(self, lr: float, beta2: float, scale: float = 1.0) -> RowEvent:
        """The newest event as the row kernels take it; lr and beta2 as given to extend, scale a factor on gradients."""
        assert self.event, "extend the clock before asking for its event"
        rule = self.rule
        factor = 1.0 - lr * rule.weight_decay
        return RowEvent(rule.kind, lr, factor, rule.gate, beta2, self.correction, rule.eps, rule.momentum, scale)

    def decay(self, last_U: Tensor) -> Tensor:
        """Factor on the weights of rows last written at these events (int32 or int64, 0..event): float64 [U].

        1 unless rule.decays_untouched.
        """
        return self._since(0, self._log_decay, last_U)

    def second_decay(self, last_U: Tensor) -> Tensor:
        """Factor on a decaying second moment of rows last written at these events: float64 [U]."""
        return self._since(1, self._log_beta2, last_U)

    def moment_decay(self, last_U: Tensor) -> Tensor:
        """Factor on the momentum rule's buffers of rows last written at these events: float64 [U]."""
        return torch.pow(self.rule.momentum, (self.event - last_U).double())

    def travel(self, last_U: Tensor) -> Tensor:
        """C of w_now = decay * w - C * buffer, w and buffer as last written at these events: float64 [U].

        On the device of last_U, by way of the CPU. 0 unless the rule is momentum.
        """
        if self._travel is None:
            return torch.zeros(last_U.shape, dtype=torch.float64, device=last_U.device)
        end_U, inner_U, outer_U = (x.to(last_U.device) for x in self._travel.since(last_U.cpu()))
        return self.decay(end_U).mul_(inner_U).add_(outer_U)

    @property
    def correction(self) -> float:
        """Adam's bias correction 1 - prod of beta2 over all events so far (0.0 before the first)."""
        return -math.expm1(self._log_beta2)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names in this clock's state_dict."""
        return ("log_decay", "log_beta2") if self._travel is None else ("log_decay", "log_beta2", *_Travel.NAMES)

    def state_dict(self) -> dict[str, Tensor]:
        """`log_decay`, `log_beta2`: float64 [event + 1], on the CPU; with momentum also what its travel rests on."""
        sums = self._sums[:, : self.event + 1].cpu()
        # Copies, because torch.save of a view would write the whole buffer behind it.
        state = {"log_decay": sums[0].clone(), "log_beta2": sums[1].clone()}
        return state if self._travel is None else state | self._travel.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over the sums of a state_dict. Raises ValueError and changes nothing if they are unusable."""
        if set(state) != set(self.state_names):
            odd = ", ".join(sorted(set(state) ^ set(self.state_names)))
            raise ValueError(
                f"this checkpoint's row clock is of another row rule than {self.rule.kind!r}: {odd} differ"
            )
        decay, beta2 = state["log_decay"], state["log_beta2"]
        alike = decay.ndim == 1 and decay.shape == beta2.shape and decay.dtype == beta2.dtype == torch.float64
        if not alike or not len(decay):
            raise ValueError("this checkpoint's row clock is not two float64 lists of one length: it is damaged")
        # Logarithms of factors in (0, 1]: from 0 the sums never rise, and NaN fails every comparison.
        falling = all(bool((x[0] == 0) & (x.diff() <= 0).all() & (x[-1] > -math.inf)) for x in (decay, beta2))
        if not falling:
            raise ValueError("this checkpoint's row clock holds sums that are not finite and falling: it is damaged")
        if self._travel is not None:
            self._travel.load_state_dict(state, len(decay) - 1)
        self.event = len(decay) - 1
        room = max(1024, 2 * len(decay))
        self._sums = torch.zeros(2, room, dtype=torch.float64, device=self._sums.device)
        self._sums[0, : len(decay)] = decay
        self._sums[1, : len(decay)] = beta2
        self._log_decay = float(decay[-1])
        self._log_beta2 = float(beta2[-1])

    def _since(self, which: int, now: float, last_U: Tensor) -> Tensor:
        return self._sums[which].index_select(0, last_U).neg_().add_(now).exp_()


class _Travel:
    """C(l, e) = sum over k = l+1..e of lr_k mu^(k-l) a_(k+1) .. a_e, for the newest e and any l: momentum's lazy move.

    A buffer b written at event l moves its weights at event k by -lr_k mu^(k-l) b, and every later event shrinks that
    move by its decay factor a. Step by step C(l, e) = a_e C(l, e-1) + lr_e mu^(e-l), one number for each l; to do that
    for every l would cost more with every event. So the events lie in blocks, block i from i * block to t = i * block +
    block - 1. The recurrence runs for the l of the newest block, whose values are final once event t is there, and for
    the ends t of the closed ones. An l of a closed block follows from those two, because

        C(l, e) = (a_(t+1) .. a_e) C(l, t) + mu^(t-l) C(t, e):

    sums of numbers of one sign, so nothing cancels, and mu is never divided by, so nothing overflows. One event costs
    events / block + block multiply-adds in two vector operations: 4 thousand after a million events.
    """

    NAMES = ("travel", "travel_ends")

    def __init__(self, momentum: float, block: int = 256) -> None:
        self.momentum = momentum
        self.block = block
        self.event = 0
        # C(l, end of l's block, or newest event), and C(end, newest event), 0 for the newest block.
        self._inner = np.zeros(4 * block)
        self._ends = np.zeros(4)
        # mu^j, and mu^(j * block): every power that is needed is a product of one of each.
        self._powers = momentum ** np.arange(block + 1.0)
        self._strides = momentum ** (block * np.arange(4.0))

    def extend(self, lr: float, factor: float) -> None:
        """Add one event: its learning rate and its factor on untouched weights."""
        self.event = now = self.event + 1
        closed, past = divmod(now, self.block)
        if now == len(self._inner):
            self._inner = np.concatenate((self._inner, np.zeros_like(self._inner)))
            self._ends = np.concatenate((self._ends, np.zeros_like(self._ends)))
            self._strides = self.momentum ** (self.block * np.arange(float(len(self._ends))))
        # In place, and oldest first: mu^(now - l) with l rising.
        open_ = self._inner[now - past : now]
        open_ *= factor
        open_ += lr * self._powers[past:0:-1]
        ends = self._ends[:closed]
        ends *= factor
        ends += (lr * self._powers[past + 1]) * self._strides[:closed][::-1]

    def since(self, last_U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(t, C(l, t), mu^(t-l) C(t, e)) for last events l (integers 0..event, CPU): integers, float64, float64 [U].

        t is the end of l's block, or the newest event e if that is not closed yet.
        """
        last = last_U.numpy()
        block = last // self.block
        end = np.minimum((block + 1) * self.block - 1, self.event)
        outer = self._powers[end - last] * self._ends[block]
        return torch.from_numpy(end), torch.from_numpy(self._inner[last]), torch.from_numpy(outer)

    def state_dict(self) -> dict[str, Tensor]:
        """`travel`: float64 [event + 1], `travel_ends`: float64 [closed blocks]; copies."""
        closed = (self.event + 1) // self.block
        parts = self._inner[: self.event + 1], self._ends[:closed]
        return {name: torch.from_numpy(part.copy()) for name, part in zip(self.NAMES, parts)}

    def load_state_dict(self, state: dict[str, Tensor], event: int) -> None:
        """Take over a state_dict made at this event. Raises ValueError and changes nothing if it is unusable."""
        inner, ends = (state[name] for name in self.NAMES)
        closed = (event + 1) // self.block
        if inner.dtype != torch.float64 or ends.dtype != torch.float64:
            raise ValueError("this checkpoint's row clock holds travels that are not float64: it is damaged")
        if inner.shape != (event + 1,) or ends.shape != (closed,):
            raise ValueError("this checkpoint's row clock holds travels of other events than its sums: it is damaged")
        inner, ends = inner.cpu().numpy(), ends.cpu().numpy()
        # A row written at the last event of a block, or at the newest, has not travelled in it.
        still = not inner[self.block - 1 :: self.block].any() and inner[-1] == 0.0
        if not still or not all(((x >= 0.0) & (x < np.inf)).all() for x in (inner, ends)):
            raise ValueError("this checkpoint's row clock holds travels that are not finite or go back: it is damaged")
        self.event = event
        blocks = max(4, 2 * (closed + 1))
        self._inner = np.zeros(blocks * self.block)
        self._inner[: event + 1] = inner
        self._ends = np.zeros(blocks)
        self._ends[:closed] = ends
        self._strides = self.momentum ** (self.block * np.arange(float(blocks)))


def _check_beta2(beta2: float) -> None:
    if not 0.0 < beta2 < 1.0:
        raise ValueError(f"beta2 = {beta2} for table rows: it must lie strictly between 0 and 1")
