"""Is a step flat in the number of rows: a table at several sizes, and whole training steps at two.

Lives here: Flat, one stream of n-gram hashes that tables of every size read in turns; WholeStep, runs of the trainer.
Not here: taking turns (race.py), the trainer (train_gpt.py), the peers (peers.py).
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mome.errors import UserError
from mome.tools.bench import sides
from mome.tools.bench.counting import distinct
from mome.tools.bench.options import TablesOptions
from mome.tools.bench.output import print_table, span
from mome.tools.bench.race import Job, Race, Step, Timed, units_of
from mome.tools.bench.streams import hashed_keys
from mome.tools.runs import number, read_result
from mome.tools.stats import mean, median

TRAINER = Path(__file__).resolve().parents[3] / "train_gpt.py"
# n-gram kinds in a step's draw: more than any table here has rows that a stream of this length reaches.
KINDS = 1 << 24
ORDERS = 2  # of `local`: its n-gram table has so many times --memory.ngram.rows
TAIL_LINES = 20


class Flat:
    """Nanoseconds per unique row of a whole step (ours, row-wise Adam) at each of --flat-bits.

    Every size reads the same keys modulo its rows. Warming up goes once over all batches, so that every row of the
    stream has been touched and its pages exist; of a large table no more than these are ever touched.
    """

    def __init__(self, options: TablesOptions) -> None:
        self.options = options
        self.names = [str(bits) for bits in options.flat_bits]
        self.ids: dict[str, list[Tensor]] = {}
        self.unique: dict[str, list[int]] = {}
        random = torch.Generator().manual_seed(options.seed)
        self.grad_ND = torch.randn(options.lookups, options.dim, generator=random)
        self.race = Race(
            "flat, log2 of rows", self.names, self._step, warm=options.batches, visits=options.visits,
            steps=options.steps, units=units_of(self.unique),
        )  # fmt: skip

    def jobs(self) -> list[Job]:
        """The stream, the race, and letting go of the tables."""
        return [Job("flat, ids", self._draw), *self.race.jobs(), Job("letting go", self.race.made.clear)]

    def needs(self) -> int:
        """Bytes: of a table all its state (8 bytes a row), of its rows those pages of 4 KiB that the stream reaches."""
        options = self.options
        pages = [min((4 * options.dim << bits) >> 12, options.batches * options.lookups) for bits in options.flat_bits]
        return sum(8 << bits for bits in options.flat_bits) + sum(pages) * 4096 + (1 << 30)

    def results(self) -> dict[str, float]:
        """flat_A_B: ns per unique row at 2^B rows over 2^A, B the largest size; and what they are made of."""
        timed, found = self.race.timed(), {}
        for name, one in timed.items():
            found |= {f"flat_ns_{name}": one.median, f"flat_ns_{name}_min": one.least, f"flat_ns_{name}_max": one.most}
            found[f"flat_unique_{name}"] = mean(self.unique[name])
        largest = self.names[-1]
        for name in self.names[:-1]:
            ratio, least, most = timed[largest].over(timed[name])
            key = f"flat_{name}_{largest}"
            found |= {key: ratio, f"{key}_min": least, f"{key}_max": most}
        return found

    def show(self) -> None:
        """A table with a line a size."""
        timed, largest = self.race.timed(), self.names[-1]
        rows = [
            (
                f"2^{name}", f"{mean(self.unique[name]):,.0f}", span(one.median, one.least, one.most, ",.0f"),
                "" if name == largest else span(*timed[largest].over(one)),
            )
            for name, one in timed.items()
        ]  # fmt: skip
        options = self.options
        title = f"one stream of hashes modulo the rows: {options.lookups:,} lookups a step, {options.dim} float32 a row"
        columns = ["rows", "distinct a step", "ns per distinct row (least to most)", f"2^{largest} rows / these"]
        print_table(title, columns, rows, [""])

    def _draw(self) -> None:
        options = self.options
        keys = hashed_keys(options.batches, options.lookups, KINDS, options.seed)
        for name in self.names:
            self.ids[name] = [keys_N % (1 << int(name)) for keys_N in keys]
            self.unique[name] = distinct(self.ids[name])

    def _step(self, name: str) -> Step:
        ids, grad_ND = self.ids[name], self.grad_ND
        take = sides.Ours(1 << int(name), self.options.dim, sides.RULES["ours"]).step
        return lambda number: take(ids[number % len(ids)], grad_ND)


class WholeStep:
    """Milliseconds a training step of `local` at two sizes of its n-gram table, runs in turns A B B A.

    The trainer runs as a process, with the threads of this one, without validation, checkpoint or sample on the way;
    a run's number is step_ms of its result, the median over its steps.
    """

    def __init__(self, options: TablesOptions, command: Sequence[str] = (sys.executable, str(TRAINER))) -> None:
        self.options, self.command = options, tuple(command)
        self.taken: dict[int, list[float]] = {bits: [] for bits in options.step_bits}

    def jobs(self) -> list[Job]:
        """Every run."""
        found = []
        for turn in range(self.options.step_runs):
            for bits in self.options.step_bits if turn % 2 == 0 else reversed(self.options.step_bits):
                found.append(Job(f"a run of local at 2^{bits} n-gram rows", functools.partial(self._run, bits)))
        return found

    def needs(self) -> int:
        """Nothing of this process."""
        return 0

    def results(self) -> dict[str, float]:
        """flat_step: the larger size over the smaller; step_ms_A and step_ms_B."""
        small, large = (self._timed(bits) for bits in self.options.step_bits)
        ratio, least, most = large.over(small)
        found = {"flat_step": ratio, "flat_step_min": least, "flat_step_max": most}
        return found | {f"step_ms_{bits}": median(self.taken[bits]) for bits in self.options.step_bits}

    def show(self) -> None:
        """A line a size."""
        small, large = self.options.step_bits
        rows = [(f"2^{bits}", span(one.median, one.least, one.most, ",.1f")) for bits, one in
                ((bits, self._timed(bits)) for bits in (small, large))]  # fmt: skip
        ratio = span(*self._timed(large).over(self._timed(small)), ".3f")
        notes = [f"2^{large} over 2^{small}, pair by pair: {ratio}", ""]
        print_table("a whole training step of `local`", ["n-gram rows", "ms (least to most)"], rows, notes)

    def words(self, bits: int, folder: str) -> list[str]:
        """What the trainer is told: one size, into this folder."""
        return [
            "local", "--memory.ngram.rows", str((1 << bits) // ORDERS), "--runs-dir", folder, "--steps",
            str(self.options.step_steps), "--seed", "0", "--val-every", "0", "--val-rows", "1", "--final-val-rows", "1",
            "--save-every", "0", "--sample-tokens", "0",
        ]  # fmt: skip

    def _timed(self, bits: int) -> Timed:
        return Timed(tuple((one,) for one in self.taken[bits]))

    def _run(self, bits: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
            words = [*self.command, *self.words(bits, folder)]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, errors="replace")
            results = [read_result(path.parent) for path in Path(folder).glob("*/result.json")]
            taken = [number(result.get("step_ms")) for result in results]
            if done.returncode or len(taken) != 1:
                tail = " | ".join(done.stderr.splitlines()[-TAIL_LINES:])
                raise UserError(f"the run of local at 2^{bits} n-gram rows failed, status {done.returncode}: {tail}")
            self.taken[bits].extend(taken)
