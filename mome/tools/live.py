"""What is shown while several runs are trained one after another.

Lives here: a bar on a terminal, plain lines elsewhere, and the estimate of the time to go.
Not here: starting the runs (compare.py).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence

from mome.tools.report import duration
from mome.tools.stats import mean

PLAIN_EVERY = 60.0  # seconds between two plain lines about one run


def time_to_go(current: float, waiting: Sequence[str], taken: Mapping[str, Sequence[float]]) -> float:
    """Seconds until all is done: what is left of the current run plus, for each arm that waits, its mean time so far.

    An arm that has not run yet counts with the mean of all runs; NaN while nothing is known.
    """
    everything = mean([seconds for each in taken.values() for seconds in each])
    return current + math.fsum(mean(taken[arm]) if taken.get(arm) else everything for arm in waiting)


class Live:
    """Progress over `total` runs; use as a context."""

    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(file=sys.stdout, highlight=False)
        columns = (MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        self.bar = Progress(*columns, console=console) if console.is_terminal else None
        self.task = self.bar.add_task("", total=total) if self.bar else None
        self.total, self.done, self.said = total, 0, 0.0

    def __enter__(self) -> Live:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()

    def begin(self, run: str) -> None:
        """A run starts, or goes on."""
        self.said = time.monotonic()
        if self.bar:
            self.bar.update(self.task, description=run)
        else:
            print(f"[{self.done + 1}/{self.total}] {run}", flush=True)

    def tick(self, run: str, step: int, steps: float, left: float) -> None:
        """The current run stands at `step` of `steps`; `left` seconds to go for all runs; both may be NaN."""
        share = self.done + (step / steps if steps > 0 else 0.0)
        said = f"{run}, step {step:,}" + (f" of {steps:,.0f}" if steps > 0 else "") + _to_go(left)
        if self.bar:
            self.bar.update(self.task, completed=share, description=said)
        elif time.monotonic() - self.said >= PLAIN_EVERY:
            self.said = time.monotonic()
            print(f"[{self.done + 1}/{self.total}] {said}", flush=True)

    def end(self, run: str, outcome: str, left: float) -> None:
        """A run is done."""
        self.done += 1
        line = f"[{self.done}/{self.total}] {run}: {outcome}{_to_go(left) if self.done < self.total else ''}"
        if self.bar:
            self.bar.console.print(line, markup=False)
            self.bar.update(self.task, completed=self.done, description="")
        else:
            print(line, flush=True)


def _to_go(left: float) -> str:
    return "" if math.isnan(left) else f"; {duration(max(left, 0.0))} to go"
