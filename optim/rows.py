"""Row rules and their clock: what dense training does to a row that nobody touches, as a function of two prefix sums.

Lives here: RowRule (a rule as data) and RowClock (float64 prefix sums over events of log decay and log beta2).
Not here: the arithmetic on rows (kernels/row_update.py) and where rows lie (mome/table/).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("adam", "adagrad", "sgd")


@dataclass(frozen=True)
class RowRule:
    """A rule for table rows, decoupled weight decay included; its formulas are in kernels/row_update.py.

    kind: "adam" (beta1 = 0, one second moment a lane), "adagrad" (row-wise, one sum a lane) or "sgd" (no state a lane).
    beta2: decay of Adam's second moment per event; eps: added to the root; weight_decay: an event with learning rate lr
    multiplies every row, touched or not, by 1 - lr * weight_decay. Raises ValueError for a value out of range.
    """

    kind: str
    beta2: float = 0.99
    eps: float = 1e-10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"row rule {self.kind!r}: choose one of {', '.join(KINDS)}")
        _check_beta2(self.beta2)
        if not 0.0 < self.eps < math.inf:
            raise ValueError(f"row rule with eps = {self.eps}: it must be above 0, or a zero gradient makes 0 / 0")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"row rule with weight_decay = {self.weight_decay}: it must be finite and not negative")

    @property
    def keeps_second(self) -> bool:
        """Whether the rule stores one number a lane."""
        return self.kind != "sgd"


class RowClock:
    """Counts events (pushes) and holds S[e] = sum of log(1 - lr * weight_decay), B[e] = sum of log beta2, e = 0..event.

    Since a row was last written, at event `last`, dense training has multiplied it by exp(S[event] - S[last]), and its
    second moment by exp(B[event] - B[last]). Differences of logarithms: no product over a long history underflows.
    The sums are float64 on `device`, 16 bytes an event.
    """

    def __init__(self, weight_decay: float, device: torch.device | str = "cpu") -> None:
        self.weight_decay = weight_decay
        self.event = 0
        self._sums = torch.zeros(2, 1024, dtype=torch.float64, device=device)
        # The newest sums as Python floats: the next ones come from them without waiting for the device.
        self._log_decay = 0.0
        self._log_beta2 = 0.0

    def extend(self, lr: float, beta2: float) -> None:
        """Add one event. Raises ValueError and changes nothing if lr < 0, lr * weight_decay >= 1 or beta2 is off."""
        if not 0.0 <= lr < math.inf:
            raise ValueError(f"learning rate {lr} for table rows: it must be finite and not negative")
        if lr * self.weight_decay >= 1.0:
            raise ValueError(
                f"learning rate {lr} times weight decay {self.weight_decay} is {lr * self.weight_decay:.4g}: "
                "keep it below 1, or one event wipes out every row"
            )
        _check_beta2(beta2)
        if self.event + 1 == self._sums.shape[1]:
            self._sums = torch.cat((self._sums, torch.zeros_like(self._sums)), dim=1)
        self.event += 1
        self._log_decay += math.log1p(-lr * self.weight_decay)
        self._log_beta2 += math.log(beta2)
        self._sums[0, self.event] = self._log_decay
        self._sums[1, self.event] = self._log_beta2

    def decay(self, last_U: Tensor) -> Tensor:
        """Factor on the weights of rows last written at these events (int32 or int64, 0..event): float64 [U]."""
        return self._since(0, self._log_decay, last_U)

    def second_decay(self, last_U: Tensor) -> Tensor:
        """Factor on Adam's second moment of rows last written at these events: float64 [U]."""
        return self._since(1, self._log_beta2, last_U)

    @property
    def correction(self) -> float:
        """Adam's bias correction 1 - prod of beta2 over all events so far (0.0 before the first)."""
        return -math.expm1(self._log_beta2)

    def state_dict(self) -> dict[str, Tensor]:
        """`log_decay` and `log_beta2`: float64 [event + 1], on the CPU."""
        sums = self._sums[:, : self.event + 1].cpu()
        # Copies, because torch.save of a view would write the whole buffer behind it.
        return {"log_decay": sums[0].clone(), "log_beta2": sums[1].clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over the sums of a state_dict. Raises ValueError and changes nothing if they are unusable."""
        decay, beta2 = state["log_decay"], state["log_beta2"]
        alike = decay.ndim == 1 and decay.shape == beta2.shape and decay.dtype == beta2.dtype == torch.float64
        if not alike or not len(decay):
            raise ValueError("this checkpoint's row clock is not two float64 lists of one length: it is damaged")
        # Logarithms of factors in (0, 1]: from 0 the sums never rise, and NaN fails every comparison.
        falling = all(bool((x[0] == 0) & (x.diff() <= 0).all() & (x[-1] > -math.inf)) for x in (decay, beta2))
        if not falling:
            raise ValueError("this checkpoint's row clock holds sums that are not finite and falling: it is damaged")
        self.event = len(decay) - 1
        room = max(1024, 2 * len(decay))
        self._sums = torch.zeros(2, room, dtype=torch.float64, device=self._sums.device)
        self._sums[0, : len(decay)] = decay
        self._sums[1, : len(decay)] = beta2
        self._log_decay = float(decay[-1])
        self._log_beta2 = float(beta2[-1])

    def _since(self, which: int, now: float, last_U: Tensor) -> Tensor:
        return self._sums[which].index_select(0, last_U).neg_().add_(now).exp_()


def _check_beta2(beta2: float) -> None:
    if not 0.0 < beta2 < 1.0:
        raise ValueError(f"beta2 = {beta2} for table rows: it must lie strictly between 0 and 1")
