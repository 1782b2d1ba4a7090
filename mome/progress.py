"""What a person sees while a run goes on, a bar on a terminal and plain lines elsewhere, and how one stops it.

Lives here: one reporter with the same calls for both, and the signals that ask for a stop.
Not here: what is logged to the run's folder (mome/runfolder.py).
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 5.0


class Reporter:
    """Shows steps of a run of `steps` steps, of which `done` are done. silent: it shows nothing."""

    def __init__(self, steps: int, done: int, silent: bool = False):
        self.steps, self.silent = steps, silent
        self.console = Console(file=sys.stdout, highlight=False)
        self.started, self.done_at_start, self.last_line = time.perf_counter(), done, 0.0
        self.bar = None
        if self.console.is_terminal and not silent:
            columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
            self.bar = Progress(*columns, console=self.console)
            self.task = self.bar.add_task("", total=steps, completed=done, text="")
            self.bar.start()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.bar:
            self.bar.console.print(text, markup=False)
        elif not self.silent:
            print(text, flush=True)

    def step(self, step: int, loss: float, tokens_per_second: float, rows: int) -> None:
        """A step is done: its loss in nats, the rate, the table rows touched in its cycle."""
        text = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s  {rows:,} rows"
        if self.bar:
            self.bar.update(self.task, completed=step, text=text)
            return
        now = time.perf_counter()
        if self.silent:
            return
        if now - self.last_line >= SECONDS_BETWEEN_LINES or step in (1, self.steps):
            self.last_line = now
            left = (now - self.started) / max(step - self.done_at_start, 1) * (self.steps - step)
            print(f"step {step}/{self.steps}  {text}  {left:,.0f} s to go", flush=True)

    def close(self) -> None:
        if self.bar:
            self.bar.stop()


class Stop:
    """While it is entered, SIGINT and SIGTERM ask for a stop after the step under way; a second one ends at once.

    broken: whether a step together with the other processes is not to be had any more; who asks, they then end anyway.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, reporter: Reporter, broken: Callable[[], bool] = lambda: False):
        self.signal, self.reporter, self.broken = None, reporter, broken

    def __enter__(self) -> Stop:
        self.before = [signal.signal(one, self._ask) for one in self.SIGNALS]
        return self

    def __exit__(self, *error) -> None:
        for one, handler in zip(self.SIGNALS, self.before):
            signal.signal(one, handler)

    def _ask(self, number, frame) -> None:
        if self.broken():
            # torchrun's, for those whom a dead one has left: the watchdog ends them, and says why.
            return
        self.signal = number
        self.reporter.say(f"{signal.Signals(number).name}: saving after this step (once more: at once)")
        # The bar goes now: a second signal ends the process without a chance to give the cursor back.
        self.reporter.close()
        for one in self.SIGNALS:
            signal.signal(one, signal.SIG_DFL)
