"""What the commands of this room show a person while they work.

Lives here: the progress bar (rich on a terminal, plain lines elsewhere).
Not here: a command's words and errors (command.py), and the trainer's own display (mome/progress.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

PLAIN_SECONDS = 10.0


class Progress:
    """Progress in bytes, as a context manager: a bar on stderr if that is a terminal, else a line every 10 seconds.

    what: the words before the numbers; total: bytes; done: bytes that were there before; log: takes a plain line.
    """

    def __init__(self, what: str, total: int, log: Callable[[str], None], done: int = 0):
        console = Console(stderr=True)
        self.what, self.total, self.done, self.log = what, total, done, log
        self.next_line = time.monotonic() + PLAIN_SECONDS
        self.bar = None
        if console.is_terminal:
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
            self.bar = RichProgress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console)
            self.task = self.bar.add_task(what, total=total, completed=done)

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def advance(self, count: int) -> None:
        """Count `count` more bytes as done (fewer, if negative)."""
        self.done += count
        if self.bar:
            self.bar.update(self.task, completed=self.done)
        elif time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + PLAIN_SECONDS
            self.log(f"{self.what}: {self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB")
