"""What changes over a run: batch, windows, document cap, learning rate and momentum, as a function of the step.

Lives here: stages, the schedule that says what each step is, and the cadence that says which steps are one event.
Not here: base learning rates (optim/groups.py), and what the numbers do to a model or a loader.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal


@dataclass(frozen=True)
class Stage:
    """A part of a run in which a step always has the same form."""

    share: float
    """Of the steps, relative to the sum of all shares."""
    rows: int
    """Micro-rows a step."""
    windows: tuple[int, int]
    """Attention windows in tokens: short, long."""
    lr_mul: float = 1.0
    """Learning rate multiplier."""
    document_cap: int = 2048
    """Longest piece of a document, in tokens."""

    def __post_init__(self) -> None:
        _check(0 < self.share < math.inf, "stage share", self.share, "above 0")
        _check(self.rows >= 1, "stage rows", self.rows, "at least 1 micro-row")
        _check(len(self.windows) == 2 and 0 <= self.windows[0] <= self.windows[1], "stage windows", self.windows,
               "(short, long) in tokens, with 0 <= short <= long")  # fmt: skip
        _check(0 <= self.lr_mul < math.inf, "stage lr_mul", self.lr_mul, "0 or more")
        _check(self.document_cap >= 1, "stage document_cap", self.document_cap, "at least 1 token")


@dataclass(frozen=True)
class StepValues:
    """What one step is: rows micro-rows of tokens tokens each, documents cut at document_cap tokens, attention windows
    (short, long) in tokens, the multiplier lr of every base learning rate, Muon's momentum, and the index of its stage.
    """

    rows: int
    tokens: int
    windows: tuple[int, int]
    lr: float
    momentum: float
    document_cap: int
    stage: int


@dataclass(frozen=True)
class Schedule:
    """A run of `steps` steps, 0 to steps - 1, cut into stages; a pure function of the step.

    Stages. The one with shares up to the sum c of the total C ends before step floor(steps * c / C + 1/2), so that the
    stages always add up to the run. A stage that comes to no step at all (in a very short run) is dropped.

    Learning rate at step s, the smaller of two: while warming up, lr_mul * (s + 1) / warmup_steps; and always
    lr_mul * y + floor * (1 - y). y is 1 before the cooldown, the last cooldown_share of the steps (rounded), and in it,
    with t going from 0 to 1 at the end of the run, 1 - t ("linear") or (1 + cos(pi t)) / 2 ("cosine"). So the jumps
    between stages remain in a cooldown, ever smaller, and every stage ends at the same floor.

    Momentum = (start, end, warmup, cooldown): from start to end over the first warmup steps and back over the last
    cooldown steps; where the two overlap in a short run, the smaller value.

    Raises ValueError for a value out of range. Source: modded-nanogpt at record 89, whose numbers are 3 stages with
    lr_mul 1, 2^0.6, 3^0.5, cooldown_share 0.6, floor 0.15 and momentum (0.85, 0.95, 300, 50).
    """

    stages: tuple[Stage, ...]
    steps: int
    tokens_per_row: int
    cooldown_share: float = 0.6
    floor: float = 0.15
    warmup_steps: int = 0
    momentum: tuple[float, float, int, int] = (0.85, 0.95, 300, 50)
    kind: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        _check(len(self.stages) > 0, "schedule stages", self.stages, "at least one stage")
        _check(self.steps >= 1, "schedule steps", self.steps, "at least 1")
        _check(self.tokens_per_row >= 1, "schedule tokens_per_row", self.tokens_per_row, "at least 1")
        _check(0 <= self.cooldown_share <= 1, "schedule cooldown_share", self.cooldown_share, "from 0 to 1")
        _check(0 <= self.floor < math.inf, "schedule floor", self.floor, "0 or more")
        _check(self.warmup_steps >= 0, "schedule warmup_steps", self.warmup_steps, "0 or more")
        start, end, warmup, cooldown = self.momentum
        _check(0 <= start <= end < 1 and warmup >= 0 and cooldown >= 0, "schedule momentum", self.momentum,
               "(start, end, warmup, cooldown) with 0 <= start <= end < 1 and steps of 0 or more")  # fmt: skip
        _check(self.kind in ("linear", "cosine"), "schedule kind", self.kind, "linear or cosine")
        sums = list(accumulate(stage.share for stage in self.stages))
        object.__setattr__(self, "_ends", [math.floor(self.steps * part / sums[-1] + 0.5) for part in sums])

    @property
    def total_tokens(self) -> int:
        """Tokens trained on in the whole run."""
        starts = [0, *self._ends[:-1]]
        rows = sum((end - start) * stage.rows for start, end, stage in zip(starts, self._ends, self.stages))
        return rows * self.tokens_per_row

    def at(self, step: int) -> StepValues:
        """The values of a step. Raises ValueError for a step outside the run."""
        index = self._stage_of(step)
        stage = self.stages[index]
        return StepValues(
            stage.rows, self.tokens_per_row, stage.windows, self._lr(step, stage), self._momentum(step),
            stage.document_cap, index,
        )  # fmt: skip

    def stage_end(self, step: int) -> int:
        """The first step after the stage that a step is in (steps in the last stage): no cycle reaches beyond it."""
        return self._ends[self._stage_of(step)]

    def stage_start(self, step: int) -> int:
        """The first step of the stage that a step is in."""
        return [0, *self._ends][self._stage_of(step)]

    def _stage_of(self, step: int) -> int:
        if not 0 <= step < self.steps:
            raise ValueError(f"step {step} is outside the schedule; its {self.steps} steps are 0 to {self.steps - 1}")
        return bisect.bisect_right(self._ends, step)

    def _lr(self, step: int, stage: Stage) -> float:
        cooldown = math.floor(self.steps * self.cooldown_share + 0.5)
        t = max(0.0, (step - (self.steps - cooldown)) / cooldown) if cooldown else 0.0
        y = 1 - t if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * t))
        fall = stage.lr_mul * y + self.floor * (1 - y)
        return min(fall, stage.lr_mul * (step + 1) / self.warmup_steps) if self.warmup_steps else fall

    def _momentum(self, step: int) -> float:
        start, end, warmup, cooldown = self.momentum
        up = step / warmup if warmup else 1.0
        down = (self.steps - step) / cooldown if cooldown else 1.0
        return start + (end - start) * min(1.0, up, down)


@dataclass(frozen=True)
class Cadence:
    """Which steps share one event of the tables: cycles that follow each other from the first step to the last.

    A cycle ends after each `early` steps, counted from step 0; with late > 0, from the step `switch` on, after each
    `late` steps, counted from there. A stage and the early part always end one, however short.
    Raises ValueError for a value out of range. Source: modded-nanogpt, pull request 360: an event after every odd step
    up to 336 (early 2, switch 336), then after each step that is 3 modulo 4 (late 4).
    """

    schedule: Schedule
    early: int
    late: int = 0
    switch: int = 0

    def __post_init__(self) -> None:
        _check(self.early >= 1, "cadence early", self.early, "at least 1 step")
        _check(self.late >= 0, "cadence late", self.late, "a number of steps, or 0 for none")
        _check(self.switch >= 0, "cadence switch", self.switch, "a step")

    def cycle(self, step: int) -> tuple[int, int]:
        """(first step, step after the last) of the cycle that a step is in. Raises ValueError outside the run."""
        begin, end, period = 0, self.schedule.steps, self.early
        if self.late:
            begin, end, period = (self.switch, end, self.late) if step >= self.switch else (0, self.switch, self.early)
        first = step - (step - begin) % period
        return max(first, self.schedule.stage_start(step)), min(first + period, end, self.schedule.stage_end(step))


def _check(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {value}; it must be {allowed}")
