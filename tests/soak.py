"""Fifty kills of a run under torchrun, and the metrics of one that nobody touched: `python -m tests.soak --kills 50`.

Every kill takes a random rank at a random instant: among steps, while a checkpoint is written (and tables are merged),
or while the ranks start and load; some are stopped (SIGSTOP) and not killed. torchrun restarts the ranks, and they go
on by themselves. At the end metrics, validation loss and knock-outs must be those of the run without a kill.

Lives here: the two runs, the kills, what was found (JSON), exit status 1 when something differs or hangs.
Not here: pytest, for it takes many minutes; single kills in continuous integration (tests/dist/test_watchdog.py). It
lies beside the tests, not with the records: it trains on their tiny corpus, and its result is yes or no.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import tiny

TRAINER = tiny.ROOT / "train_gpt.py"
# Everything at once, saved so often that many kills fall into a save.
FLAGS = (
    "--memories", "routed", "ngram", "value", "--cycle", "3", "--table.ngram.weight-decay", "0.1",
    "--table.value.format", "bf16", "--table.value.rule", "factored", "--val-every", "200", "--save-every", "10",
    "--paranoid", "50",
)  # fmt: skip
# What is of the attempt and not of the training: an attempt's first step asks for rows that were asked for before.
OF_THE_ATTEMPT = ("bytes_sent",)
KINDS, SHARES = ("step", "save", "start"), (9, 8, 3)
# Seconds beyond the timeout in which all ranks must be gone, and those that a start may take.
MORE, START = 15.0, 180.0
# Beside them, what torchrun gives a process that is stopped before anyone knows of it.
AGENT = 35.0


class Failure(Exception):
    """What must not happen; the message says what did."""


class Run:
    """A training under torchrun."""

    def __init__(self, words: list[str], world: int, runs: Path, restarts: int):
        self.runs, self.world = runs, world
        runs.mkdir(parents=True)
        self.log = open(runs / ".log", "w")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}",
            f"--max-restarts={restarts}", str(TRAINER), *words,
        ]  # fmt: skip
        self.agent = subprocess.Popen(
            command, cwd=tiny.ROOT, env=tiny.environment(), stdout=self.log, stderr=subprocess.STDOUT
        )

    def ranks(self) -> dict[int, dict[int, int]]:
        """Attempt -> rank -> process, of those that live."""
        found: dict[int, dict[int, int]] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"\n{self.agent.pid}\n" not in f"\n{parent_of(entry)}\n":
                    continue
                pairs = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except (OSError, IndexError):
                continue
            values = dict(pair.partition("=")[::2] for pair in pairs)
            if "RANK" in values:
                attempt = found.setdefault(int(values["TORCHELASTIC_RESTART_COUNT"]), {})
                attempt[int(values["RANK"])] = int(entry.name)
        return found

    def folder(self) -> Path | None:
        return next((one for one in self.runs.iterdir() if one.is_dir() and not one.name.startswith(".")), None)

    def size(self) -> int:
        """Bytes of metrics."""
        folder = self.folder()
        path = folder and folder / "metrics.jsonl"
        return path.stat().st_size if path and path.exists() else 0

    def step(self) -> int:
        """The last step in the metrics."""
        folder = self.folder()
        lines = tiny.metrics(folder) if self.size() else []
        return lines[-1]["step"] if lines else 0

    def drafts(self) -> set[tuple[str, int]]:
        """Checkpoints that are being written, or that a kill left so; each with the time of its last change."""
        folder, found = self.folder(), set()
        for path in (folder / "checkpoint").glob(".writing_*") if folder else ():
            try:
                found.add((path.name, path.stat().st_ctime_ns))
            except FileNotFoundError:
                continue
        return found

    def until(self, what: str, found: Callable[[], Any], seconds: float) -> Any:
        """What `found` gives, once it gives something."""
        deadline = time.monotonic() + seconds
        while not (value := found()):
            if self.agent.poll() is not None:
                raise Failure(f"torchrun ended ({self.agent.returncode}) before {what}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise Failure(f"no {what} in {seconds:.0f} s:\n{self.tail()}")
            time.sleep(0.01)
        return value

    def tail(self) -> str:
        return (self.runs / ".log").read_text(errors="replace")[-3000:]

    def finish(self, seconds: float) -> None:
        try:
            status = self.agent.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise Failure(f"the run has not ended in {seconds:.0f} s:\n{self.tail()}") from error
        if status:
            raise Failure(f"torchrun ended with {status}:\n{self.tail()}")

    def close(self) -> None:
        """End what is left, the ranks first: torchrun would start them anew."""
        pids = [pid for ranks in self.ranks().values() for pid in ranks.values()]
        self.agent.kill()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.agent.wait()
        self.log.close()


def parent_of(entry: Path) -> int:
    """The process that started this one, a folder of /proc; IndexError for what has ended."""
    state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    return int(parent) if state not in "ZX" else 0


def kill_one(run: Run, attempt: int, chance: random.Random, stop: bool, timeout: float) -> dict[str, Any]:
    """Wait for an attempt (or a later one) and for a random instant of it, and end one rank; what came of it."""
    number, ranks = run.until(
        f"attempt {attempt} of {run.world} ranks",
        lambda: next(((n, one) for n, one in run.ranks().items() if n >= attempt and len(one) == run.world), None),
        START,
    )
    kind, left = chance.choices(KINDS, SHARES)[0], run.drafts()
    if kind == "start":
        time.sleep(chance.uniform(0.0, 6.0))
    else:
        before = run.size()
        run.until("step", lambda: run.size() != before, START)
        # Not always the first save of an attempt, or it would get no further.
        for n in range(chance.randrange(1, 4) if kind == "save" else 0):
            if n:
                run.until("end of a save", lambda: not run.drafts() - left, START)
            run.until("save", lambda: run.drafts() - left, START)
        time.sleep(chance.uniform(0.0, 0.1 if kind == "save" else 3.0))
    rank, how = chance.randrange(run.world), signal.SIGSTOP if stop else signal.SIGKILL
    done = {"attempt": number, "kind": kind, "signal": how.name, "rank": rank}
    done |= {"step": run.step(), "saving": bool(run.drafts() - left)}
    began = time.monotonic()
    os.kill(ranks[rank], how)
    pids = set(ranks.values())
    run.until(
        "end of all ranks", lambda: not pids & {pid for one in run.ranks().values() for pid in one.values()},
        timeout + MORE + (AGENT if stop and kind == "start" else 0.0),
    )  # fmt: skip
    return done | {"gone_seconds": round(time.monotonic() - began, 2)}


def soak(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Both runs; everything that was found. Raises Failure."""
    corpus = tiny.make_corpus(folder)
    more = [*FLAGS, "--steps", str(options.steps), "--timeout", str(options.timeout), "--seed", str(options.seed)]
    words = {name: tiny.tiny_flags(corpus, folder / name, *more) for name in ("whole", "killed")}
    began = time.monotonic()
    whole = Run(words["whole"], options.world, folder / "whole", 0)
    try:
        whole.finish(3600.0)
    finally:
        whole.close()
    alone = time.monotonic() - began
    say(f"the run without a kill took {alone:.0f} s")
    chance, kills = random.Random(options.seed), []
    stops = set(chance.sample(range(options.kills), min(options.stops, options.kills)))
    began = time.monotonic()
    run = Run(words["killed"], options.world, folder / "killed", 2 * options.kills + 10)
    try:
        for n in range(options.kills):
            kills.append(kill_one(run, n, chance, n in stops, options.timeout))
            passed = time.monotonic() - began
            say(
                f"kill {n + 1}/{options.kills}  {kills[-1]}  "
                f"{passed / (n + 1) * (options.kills - n - 1) + alone:,.0f} s to go"
            )
        run.finish(3600.0)
    finally:
        run.close()
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]], "kills": kills, "seconds": round(time.monotonic() - began),
        "seconds_without": round(alone), "longest_end_seconds": max((one["gone_seconds"] for one in kills), default=0),
        "saving_when_killed": sum(one["saving"] for one in kills), **compare(whole, run),
    }  # fmt: skip


def compare(whole: Run, killed: Run) -> dict[str, Any]:
    """What differs between two finished runs; equal: nothing."""
    lines, results = [], []
    for run in (whole, killed):
        folder = tiny.only_run(run.runs)
        metrics = tiny.metrics(folder)
        lines.append([{key: one[key] for key in one if key not in OF_THE_ATTEMPT} for one in metrics])
        result = json.loads((folder / "result.json").read_text())
        results.append({key: result[key] for key in ("val_loss", "val_bpb", "knockout", "tokens", "steps")})
    steps = [one["step"] for one, other in zip(*lines) if one != other]
    return {
        "equal": lines[0] == lines[1] and results[0] == results[1], "lines": [len(one) for one in lines],
        "steps_that_differ": steps[:20], "results": results,
    }  # fmt: skip


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="how often a rank is ended")
    parser.add_argument("--stops", type=int, default=5, help="how many of these stop it (SIGSTOP)")
    parser.add_argument("--world", type=int, default=4, help="ranks; a divisor of the micro-rows of a step, 4 and 8")
    parser.add_argument("--steps", type=int, default=3000, help="steps of the run; too few end before the last kill")
    parser.add_argument("--seed", type=int, default=0, help="of the run and of the kills")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds after which a stuck rank ends all")
    parser.add_argument("--out", type=Path, help="where the result goes (JSON); else to the end of the output")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        try:
            found = soak(options, Path(folder), lambda text: print(text, flush=True))
        except Failure as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1
    found |= {name: getattr(options, name) for name in ("world", "steps", "seed", "timeout")}
    text = json.dumps(found, indent=1) + "\n"
    if options.out:
        options.out.write_text(text)
        print(f"{options.out}: equal: {found['equal']}")
    else:
        print(text)
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
