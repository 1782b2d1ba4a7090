"""Sides that take turns in one run, so that a machine that drifts is slow for all of them alike.

Lives here: Race (A B C, C B A, ... with a step between that is not timed), Timed, and progress with a time to go.
Not here: the sides (sides.py, flat.py, hashing.py), what is counted rather than timed (counting.py).
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mome.tools.live import time_to_go
from mome.tools.report import duration
from mome.tools.stats import median

PLAIN_SECONDS = 5.0  # between two plain lines

Step = Callable[[int], None]  # the step of this number, whole: ids, forward, backward, update


@dataclass(frozen=True)
class Job:
    """A piece of work whose time is like that of other jobs of its kind."""

    kind: str
    work: Callable[[], None]


@dataclass(frozen=True)
class Timed:
    """What a side took, in the unit of its race: a list of steps a visit."""

    visits: tuple[tuple[float, ...], ...]

    @property
    def all(self) -> list[float]:
        return [one for visit in self.visits for one in visit]

    @property
    def median(self) -> float:
        return median(self.all)

    @property
    def least(self) -> float:
        return min(self.all)

    @property
    def most(self) -> float:
        return max(self.all)

    def over(self, other: Timed) -> tuple[float, float, float]:
        """Ratio of the medians, then its least and greatest value where only two visits in the same turn count."""
        pairs = [median(mine) / median(theirs) for mine, theirs in zip(self.visits, other.visits, strict=True)]
        ratio = self.median / other.median
        # Of a few visits none need be as extreme as all together.
        return ratio, min(ratio, *pairs), max(ratio, *pairs)


class Race:
    """Sides over the same numbered steps. make(name) builds a side's step when its turn to warm up comes.

    warm: steps that each side takes first, untimed; then `visits` visits of `steps` timed steps, in the order A B C,
    C B A, A B C. A visit begins with one more step that is not timed: it brings back to the caches what the side before
    it pushed out, as if each side were alone on the machine. A timed step's seconds are divided by units(name, number).
    Collecting garbage is put off while a visit lasts.
    """

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        make: Callable[[str], Step],
        *,
        warm: int,
        visits: int,
        steps: int,
        units: Callable[[str, int], float] = lambda name, number: 1e-3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.title, self.names, self.make = title, tuple(names), make
        self.warm, self.visits, self.steps = warm, visits, steps
        self.units, self.clock = units, clock
        self.made: dict[str, Step] = {}
        self._taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in self.names}

    def jobs(self) -> list[Job]:
        """All of the race, in the order it must be done in."""
        found = [Job(f"{self.title}, warm-up: {name}", functools.partial(self._warm, name)) for name in self.names]
        for visit in range(self.visits):
            for name in self.names if visit % 2 == 0 else reversed(self.names):
                found.append(Job(f"{self.title}: {name}", functools.partial(self._visit, name, visit)))
        return found

    def timed(self) -> dict[str, Timed]:
        """What each side took."""
        return {name: Timed(tuple(visits)) for name, visits in self._taken.items()}

    def _warm(self, name: str) -> None:
        self.made[name] = self.make(name)
        for number in range(self.warm):
            self.made[name](number)

    def _visit(self, name: str, visit: int) -> None:
        first, step, taken = visit * (self.steps + 1), self.made[name], []
        gc.disable()
        try:
            for number in range(first, first + self.steps + 1):
                started = self.clock()
                step(number)
                taken.append((self.clock() - started) / self.units(name, number))
        finally:
            gc.enable()
        self._taken[name].append(tuple(taken[1:]))


def run_jobs(jobs: Sequence[Job]) -> None:
    """Do them in order, and show how far it is: a bar on a terminal, else a line every few seconds; on stderr."""
    taken: dict[str, list[float]] = {}
    with _Shown(len(jobs)) as shown:
        for done, job in enumerate(jobs):
            waiting = [later.kind for later in jobs[done:]]
            shown.at(done, job.kind, time_to_go(0.0, waiting, taken))
            started = time.perf_counter()
            job.work()
            taken.setdefault(job.kind, []).append(time.perf_counter() - started)


class _Shown:
    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True, highlight=False)
        columns = (MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        self.bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self.task = self.bar.add_task("", total=total) if self.bar else None
        self.total, self.said = total, 0.0

    def __enter__(self) -> _Shown:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar:
            self.bar.stop()

    def at(self, done: int, kind: str, left: float) -> None:
        """`done` jobs are done, one of this kind begins; `left` seconds to go, NaN while unknown."""
        said = kind if left != left else f"{kind}; {duration(left)} to go"
        if self.bar:
            self.bar.update(self.task, completed=done, description=said)
        elif time.monotonic() - self.said >= PLAIN_SECONDS:
            self.said = time.monotonic()
            print(f"[{done}/{self.total}] {said}", file=sys.stderr, flush=True)


def units_of(counts: Mapping[str, Sequence[int]]) -> Callable[[str, int], float]:
    """Nanoseconds for each of the things that a step of a side handles, its steps going round a list of counts."""
    return lambda name, number: 1e-9 * counts[name][number % len(counts[name])]
