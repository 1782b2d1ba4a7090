"""What the commands of this room show a person: progress, and one line in place of a stack trace.

Lives here: the progress bar (rich on a terminal, plain lines elsewhere) and the wrapper of a command's main.
Not here: the commands themselves (local.py, tokenize.py, fineweb.py) and the trainer's own display.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress

from data.errors import DataError

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


def run_command(command: Callable[[], None]) -> int:
    """Run `command`, return the exit code: 0; 1 for a DataError or OSError, with a line on stderr; 130 for Ctrl-C."""
    try:
        command()
    except (DataError, OSError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0
