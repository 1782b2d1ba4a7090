"""python -m mome compare: train arms over paired seeds as processes, one at a time, and test their differences.

Lives here: what an arm is, the interleaved order, starting, resuming and stopping the trainer, and the command.
Not here: the numbers and the table (verdict.py, stats.py), what is shown meanwhile (live.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mome.errors import UserError
from mome.files import write_json
from mome.options import parse
from mome.tools.live import Live, time_to_go
from mome.tools.report import duration
from mome.tools.runs import number, read_config, read_result
from mome.tools.verdict import write_verdict

TRAINER = Path(__file__).resolve().parents[2] / "train_gpt.py"
OWN_FLAGS = ("--seed", "--runs-dir", "--resume", "--dry-run")
TAIL_LINES = 20
STOP_SECONDS = 120  # what a trainer gets to save its checkpoint after Ctrl-C
POLL_SECONDS = 0.25
STOPPED = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # exit statuses of a trainer that saved and stopped as told
ToGo = Callable[[float], float]  # seconds left of the current run -> seconds left of all


@dataclass(frozen=True)
class Arm:
    """A name and the trainer's words: a preset and flags."""

    name: str
    words: tuple[str, ...]


class RunFailed(UserError):
    """A run ended without a result; `tail` holds the last lines of its stderr."""

    def __init__(self, message: str, tail: str):
        super().__init__(message)
        self.tail = tail


def parse_arm(text: str) -> Arm:
    """[NAME=]PRESET [flags], in one word of the shell: 'local', 'local --cycle 4', 'routed=local --memories routed'.

    Without NAME= the arm is called by its words. Errors: UserError.
    """
    named = re.match(r"([A-Za-z0-9][\w.+-]*)=", text)
    try:
        words = shlex.split(text[named.end() :] if named else text)
    except ValueError as error:
        raise UserError(f"arm {text!r} cannot be split into words: {error}") from error
    if not words or words[0].startswith("-"):
        raise UserError(f"arm {text!r} names no preset; write [NAME=]PRESET [flags] in one word of the shell")
    _refuse_own(words, f"arm {text!r}")
    return Arm(named[1] if named else " ".join(words), tuple(words))


def _refuse_own(words: Sequence[str], where: str) -> None:
    for word in words:
        if word.partition("=")[0].replace("_", "-") in OWN_FLAGS:
            raise UserError(f"{where} holds {word}, which compare sets itself; leave it out")


def order(arms: Sequence[Arm], seeds: Sequence[int]) -> list[tuple[Arm, int]]:
    """Who is trained when: A B C for the first seed, C B A for the next, and so on: a drift of the machine cancels."""
    return [(arm, seed) for i, seed in enumerate(seeds) for arm in (arms if i % 2 == 0 else reversed(arms))]


def run_arms(
    arms: Sequence[Arm],
    seeds: Sequence[int],
    out: Path,
    *,
    command: Sequence[str],
    steps: int | None = None,
    extra: Sequence[str] = (),
) -> dict[str, dict[int, Path]]:
    """Train every arm with every seed; returns arm -> seed -> finished run folder, in the order of `arms` and `seeds`.

    A run is `command` PRESET flags --seed S [--steps N] extra --runs-dir OUT/<arm>/seed<S>. One that has a result.json
    is not repeated; one that has a whole checkpoint goes on with --resume. Its output is kept in stdout.log and
    stderr.log beside it. KeyboardInterrupt stops the run under way, which saves, and is passed on.
    Errors: UserError for arms that cannot be told apart, for an `out` of other runs, or while another process trains
    in it; RunFailed when a run fails. All that is done is kept.
    """
    places = {arm.name: out / _slug(arm.name) for arm in arms}
    if len({arm.name for arm in arms}) < len(arms) or len(set(places.values())) < len(arms):
        named = ", ".join(arm.name for arm in arms)
        raise UserError(f"two of the arms share a name or its folder ({named}); name them apart with NAME=PRESET")
    length = [] if steps is None else ["--steps", str(steps)]
    plan = order(arms, seeds)
    found: dict[tuple[str, int], Path] = {}
    taken: dict[str, list[float]] = {}
    with Live(len(plan)) as live:
        for i, (arm, seed) in enumerate(plan):
            place, label = places[arm.name] / f"seed{seed}", f"{arm.name}, seed {seed}"
            to_go = functools.partial(time_to_go, waiting=[later.name for later, _ in plan[i + 1 :]], taken=taken)
            words = [*arm.words, "--seed", str(seed), *length, *extra]
            with _claimed(place, words, label) as lock:
                start, ran = time.monotonic(), _finished(place) is None
                if ran:
                    _train([*command, *words, "--runs-dir", str(place)], place, label, lock, live, to_go)
                found[arm.name, seed] = folder = _finished(place)
            result = read_result(folder)
            seconds = time.monotonic() - start if ran else number(result.get("seconds"))
            if not math.isnan(seconds):
                taken.setdefault(arm.name, []).append(seconds)
            outcome = f"validation loss {number(result.get('val_loss')):.4f}, "
            outcome += duration(seconds) if ran else "done before"
            live.end(label, outcome, to_go(0.0))
    return {arm.name: {seed: found[arm.name, seed] for seed in seeds} for arm in arms}


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+]+", "-", name).strip("-.") or "arm"


@contextlib.contextmanager
def _claimed(place: Path, words: Sequence[str], label: str) -> Iterator[IO[bytes]]:
    """The folder of one arm and seed, locked, and found to hold runs of these words only.

    The trainer inherits the lock: one that outlives its compare cannot be joined by a second one.
    """
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "lock", "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{label} is being trained by another process in {place}; wait for it or stop it") from None
        record = place / "command.json"
        if record.exists():
            before = json.loads(record.read_text())
            if before != list(words):
                held = shlex.join(map(str, before))
                raise UserError(f"{place} holds a run of other words ({held}); choose another --out, or delete it")
        write_json(record, list(words))
        yield lock


def _folders(place: Path) -> list[Path]:
    """Run folders, newest first; a name with a leading dot is one that was still being made."""
    found = [path.parent for path in place.glob("*/config.json") if not path.parent.name.startswith(".")]
    return sorted(found, key=lambda folder: folder.name, reverse=True)


def _finished(place: Path) -> Path | None:
    return next((folder for folder in _folders(place) if read_result(folder)), None)


def _resumable(place: Path) -> Path | None:
    return next((folder for folder in _folders(place) if any(folder.glob("checkpoint/*/COMPLETE"))), None)


def _train(words: list[str], place: Path, label: str, lock: IO[bytes], live: Live, to_go: ToGo) -> None:
    """One run to its end. Errors: RunFailed."""
    unfinished = _resumable(place)
    if unfinished:
        words = [*words, "--resume", str(unfinished)]
    live.begin(label + (", resumed" if unfinished else ""))
    with open(place / "stdout.log", "ab") as stdout, open(place / "stderr.log", "ab") as stderr:
        before = stderr.tell()
        streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr, "pass_fds": (lock.fileno(),)}
        # A session of its own: Ctrl-C reaches the trainer once, from here, and not from the terminal as well.
        process = subprocess.Popen(words, start_new_session=True, **streams)
        try:
            _watch(process, place, label, live, to_go)
        except BaseException:
            _stop(process)
            raise
    if process.returncode or _finished(place) is None:
        how = "was stopped" if process.returncode in STOPPED else f"failed with exit status {process.returncode}"
        with open(place / "stderr.log", "rb") as log:
            log.seek(before)
            tail = "\n".join(log.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
        raise RunFailed(f"{label} {how} (logs in {place}); what is done is kept, and the same command goes on", tail)


def _watch(process: subprocess.Popen, place: Path, label: str, live: Live, to_go: ToGo) -> None:
    """Wait for the trainer and show how far its metrics are."""
    start, first, steps = time.monotonic(), None, math.nan
    while True:
        try:
            process.wait(timeout=POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            folder = next(iter(_folders(place)), None)
            step = _last_step(folder / "metrics.jsonl") if folder else None
            if step is None:
                continue
            steps = number(read_config(folder).get("steps")) if math.isnan(steps) else steps
            first = step if first is None else first
            rate = (step - first) / (time.monotonic() - start)
            left = (steps - step) / rate if rate > 0 else math.nan
            live.tick(label, step, steps, to_go(left))


def _last_step(path: Path) -> int | None:
    """The step of the last whole line of a file that is being written."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            return int(json.loads(file.read().split(b"\n")[-2])["step"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _stop(process: subprocess.Popen) -> None:
    """Ask the trainer to save and stop, as Ctrl-C does; end it when it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=STOP_SECONDS)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


def _check(runs: Sequence[list[str]]) -> None:
    """Let train_gpt.py's own command line refuse a wrong arm before anything is trained. Errors: UserError."""
    from mome.command import parse as parse_run

    for words in runs:
        parse_run(words)


@dataclass(frozen=True)
class Options:
    """Train arms over paired seeds, one run at a time, and test their differences; what follows -- goes to every run.

    An arm is [NAME=]PRESET [flags] in one word of the shell, such as local or 'routed=local --memories routed'. The
    first arm is the one that the others are held against. Called again, the same command goes on where it stopped.
    """

    arms: tuple[str, ...]
    """The arms."""
    seeds: int = 4
    """How many seeds: 0 to N - 1, the same for every arm."""
    steps: int | None = None
    """Steps of every run; by default the preset's."""
    out: Path = Path("runs/compare")
    """Where the runs and compare.json, compare.md, compare.png go."""


def main(words: Sequence[str], command: Sequence[str] = ()) -> int:
    """The command; `command` starts another trainer than train_gpt.py. Errors: UserError, OSError."""
    own, extra = list(words), []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parse(Options, own, "python -m mome compare")
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: at least one seed is needed, and two for a test")
    _refuse_own(extra, "what follows --")
    arms = [parse_arm(text) for text in options.arms]
    if not arms:
        raise UserError("--arms needs at least one arm, such as local")
    if not command:
        _check([[*arm.words, *extra] for arm in arms])
        command = [sys.executable, str(TRAINER)]
    # As Ctrl-C: the trainer saves, and the same command goes on later.
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.default_int_handler)
    try:
        runs = run_arms(arms, range(options.seeds), options.out, command=command, steps=options.steps, extra=extra)
    except RunFailed as failure:
        print(failure.tail, file=sys.stderr)
        raise
    except KeyboardInterrupt:
        print(f"stopped; all that is done is kept in {options.out}, and the same command goes on", file=sys.stderr)
        return 130
    print(write_verdict(runs, options.out, ["python", "-m", "mome", "compare", *words]))
    print(f"{options.out}/compare.md, compare.json and compare.png")
    return 0
