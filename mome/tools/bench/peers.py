"""The race of bench tables: a row table against its peers, on Zipf and on uniform ids.

Lives here: who takes part, on which ids, what is counted beside the times, and the keys of its results.
Not here: the sides (sides.py), a table at several sizes (flat.py), taking turns (race.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mome.tools.bench import sides
from mome.tools.bench.counting import SHARE, Allocations, count_allocations, distinct, moved_bytes
from mome.tools.bench.options import TablesOptions
from mome.tools.bench.output import print_table, span
from mome.tools.bench.race import Job, Race, Step, Timed
from mome.tools.bench.streams import uniform_ids, zipf_ids
from mome.tools.stats import mean

STREAMS = {"zipf": zipf_ids, "uniform": uniform_ids}
OURS, PEERS, GATHERS = tuple(sides.RULES), (*sides.POOLINGS, "sparseadam", "eager"), ("gather_fresh", "gather_reused")
COUNTED_STEPS = 4

Take = Callable[[Tensor, Tensor], object]  # ids [N] and the gradient [N, D] of what they read -> a step, done


class Peers:
    """The race on both streams. What it holds of tables is let go when its last job is done."""

    def __init__(self, options: TablesOptions) -> None:
        self.options = options
        self.missing = sides.fbgemm_missing()
        self.names = [name for name in sides.LABELS if name not in sides.POOLINGS or self.missing is None]
        random = torch.Generator().manual_seed(options.seed)
        self.grad_ND = torch.randn(options.lookups, options.dim, generator=random)
        self.ids: dict[str, list[Tensor]] = {}
        self.unique: dict[str, list[int]] = {}
        self.made: dict[str, Take] = {}
        self.races = {
            stream: Race(
                f"{stream} ids", self.names, functools.partial(self._step, stream),
                warm=options.batches, visits=options.visits, steps=options.steps,
            )
            for stream in STREAMS
        }  # fmt: skip
        self.counts: dict[tuple[str, str], Allocations] = {}

    def jobs(self) -> list[Job]:
        """Both races, what is counted after each, and letting go."""
        found = []
        for stream, race in self.races.items():
            found += [Job(f"{stream} ids", functools.partial(self._draw, stream)), *race.jobs()]
            found += [Job(f"{stream} ids, counting: {name}", functools.partial(self._count, stream, name))
                      for name in self.names]  # fmt: skip
        return [*found, Job("letting go", self._let_go)]

    def needs(self) -> int:
        """Bytes of the tables with their optimizer states: one for each of ours, FBGEMM's two and the eager one, three
        for SparseAdam; and what is drawn and copied."""
        options = self.options
        tables = len(OURS) + 3 + 3
        return tables * options.rows * (options.dim + 2) * 4 + (2 * options.copy_mib << 20) + (1 << 30)

    def results(self) -> dict[str, float]:
        """The numbers, by the keys of records/bench/README.md."""
        options, found = self.options, {}
        for stream, race in self.races.items():
            timed, unique = race.timed(), self.unique[stream]
            for name in (*OURS, *PEERS, "gather_fresh", "gather_reused"):
                if name in timed:
                    found |= named(f"{name}_ms", stream, timed[name])
            for mine in OURS:
                for peer in (peer for peer in PEERS if peer in timed):
                    ratio, least, most = timed[mine].over(timed[peer])
                    key = f"{mine}_over_{peer}_{stream}"
                    found |= {key: ratio, f"{key}_min": least, f"{key}_max": most}
            copied = (2 * options.copy_mib << 20) / (timed["copy"].median * 1e-3)
            moved = mean([moved_bytes(options.lookups, count, options.dim) for count in unique])
            suffix = "" if stream == "zipf" else f"_{stream}"
            found |= {
                f"unique_rows_{stream}": mean(unique),
                f"moved_bytes_{stream}": moved,
                f"copy_gbs_{stream}": copied / 1e9,
                f"copy_fraction{suffix}": moved / (timed["ours"].median * 1e-3) / copied,
            }
            for name in self.names:
                counted = self.counts[stream, name]
                found[f"row_allocations_{name}_{stream}"] = counted.rows
                found[f"page_faults_{name}_{stream}"] = counted.faults
        ours = [self.counts[stream, name] for stream in STREAMS for name in OURS]
        found["row_allocations_per_step"] = max(counted.rows for counted in ours)
        found["page_faults_per_step"] = max(counted.faults for counted in ours)
        return found

    def show(self) -> None:
        """A table a stream, and who is missing."""
        options, results = self.options, self.results()
        for stream, race in self.races.items():
            timed, rows = race.timed(), []
            for name in self.names:
                one, counted = timed[name], self.counts[stream, name]
                ratio = span(*timed["ours"].over(one)) if name in PEERS else ""
                rows.append((
                    sides.LABELS[name], span(one.median, one.least, one.most), ratio, f"{counted.rows:g}",
                    f"{counted.faults:,.0f}",
                ))  # fmt: skip
            fraction = results["copy_fraction" if stream == "zipf" else f"copy_fraction_{stream}"]
            print_table(
                f"{stream} ids: {options.lookups:,} lookups a step, {options.rows:,} rows x {options.dim} float32, "
                f"{torch.get_num_threads()} threads",
                ["", "ms a step (least to most)", "ours / it", "row-sized allocations", "page faults"],
                rows,
                [
                    "ours / it: row-wise Adam over that side; allocations and faults are those of a step",
                    f"{results[f'unique_rows_{stream}']:,.0f} distinct rows a step; "
                    f"{results[f'moved_bytes_{stream}'] / 1e6:,.1f} MB must move, and do at {fraction:.0%} of the "
                    f"bandwidth of a copy ({results[f'copy_gbs_{stream}']:.1f} GB/s, reads and writes)",
                    *([self.missing] if self.missing else []),
                    "",
                ],
            )

    def _draw(self, stream: str) -> None:
        options = self.options
        self.ids[stream] = STREAMS[stream](options.batches, options.lookups, options.rows, options.seed)
        self.unique[stream] = distinct(self.ids[stream])

    def _step(self, stream: str, name: str) -> Step:
        ids, grad_ND = self.ids[stream], self.grad_ND
        take = self._side(name)
        return lambda number: take(ids[number % len(ids)], grad_ND)

    def _side(self, name: str) -> Take:
        """The step of a side, on both streams the same table: made when first asked for."""
        if name not in self.made:
            options = self.options
            size = (options.rows, options.dim)
            if name in OURS:
                self.made[name] = sides.Ours(*size, sides.RULES[name]).step
            elif name in sides.POOLINGS:
                self.made[name] = sides.Fbgemm(*size, sides.POOLINGS[name]).step
            elif name in GATHERS:
                eager = self._side("eager").__self__
                read = sides.gather(eager.weight_RD, options.lookups if name == "gather_reused" else None)
                self.made[name] = lambda ids_N, grad_ND: read(ids_N)
            elif name == "copy":
                move = sides.copy(options.copy_mib << 20)
                self.made[name] = lambda ids_N, grad_ND: move()
            else:
                kinds = {"sparseadam": sides.SparseAdam, "eager": sides.Eager}
                self.made[name] = kinds[name](*size).step
        return self.made[name]

    def _count(self, stream: str, name: str) -> None:
        size = 4 * self.options.dim
        unique = self.unique[stream][:COUNTED_STEPS]
        thresholds = {number: max(1, size * count // SHARE) for number, count in enumerate(unique)}
        self.counts[stream, name] = count_allocations(self.races[stream].made[name], thresholds)

    def _let_go(self) -> None:
        self.made.clear()
        for race in self.races.values():
            race.made.clear()


def named(key: str, stream: str, timed: Timed) -> dict[str, float]:
    """Median, least and greatest under their keys."""
    return {f"{key}_{stream}": timed.median, f"{key}_{stream}_min": timed.least, f"{key}_{stream}_max": timed.most}
