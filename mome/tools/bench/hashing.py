"""python -m mome bench hashing: from token ids to row ids, and from row ids to the distinct ones.

Lives here: the options, the races, and what each hash makes of one stream of tokens.
Not here: the hashes (mome/table/hashing.py), the sort (kernels/segments.py), whole corpora (mome/tools/collisions.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.shards import Shard
from kernels import backend
from kernels.segments import segments_of, segments_of_reference, unique_ids
from mome.config import require
from mome.options import parse
from mome.run import CACHE
from mome.table.collisions import distinct_ngrams, order_use
from mome.table.hashing import hash_ngrams
from mome.tools.bench.output import bench_environment, leave, print_table, require_place, span
from mome.tools.bench.race import Job, Race, Step, Timed, run_jobs
from mome.tools.bench.streams import uniform_ids, zipf_ids, zipf_ranks

# Key of the results -> kind, orders, heads.
HASHES: dict[str, tuple[str, tuple[int, ...], int]] = {
    "xor_2_3": ("xor", (2, 3), 1),
    "mix_2_3": ("mix", (2, 3), 1),
    "mix_2_3_8_heads": ("mix", (2, 3), 8),
    "mix_2_to_8": ("mix", tuple(range(2, 9)), 1),
}
# Key -> what it does and, in the table, its name. The first of each pair is ours.
SORTS: dict[str, tuple[str, Callable[[Tensor, Tensor, int], object]]] = {
    "unique_ids": ("unique_ids", lambda ids_N, slots_N, rows: unique_ids(ids_N)),
    "torch_unique": (
        "torch.unique, with inverse", lambda ids_N, slots_N, rows: torch.unique(ids_N, return_inverse=True),
    ),
    "numpy_unique": (
        "numpy.unique, with inverse", lambda ids_N, slots_N, rows: np.unique(ids_N.numpy(), return_inverse=True),
    ),
    "segments_of": ("segments_of", lambda ids_N, slots_N, rows: segments_of(slots_N, rows)),
    "torch_segments": ("torch: stable argsort and runs", lambda ids_N, slots_N, rows: segments_of_reference(slots_N)),
}  # fmt: skip
RATIOS = {"unique_ids": ("torch_unique", "numpy_unique"), "segments_of": ("torch_segments",)}
STREAMS = {"zipf": zipf_ids, "uniform": uniform_ids}
ORDERS = (2, 3)
VOCABULARY = 8192  # of the tokens that are drawn; the built-in corpus has as many


@dataclass(frozen=True)
class HashingOptions:
    """Time on the CPU how fast token ids become row ids and row ids distinct ones, in turns with torch and numpy, and
    count which share of a token stream reads a row that a more frequent n-gram owns (minority mass)."""

    json: Path | None = None
    """Write the numbers to this file; records/bench/README.md says what they are."""
    quick: bool = False
    """Small sizes and few steps: to see it work, not to measure."""
    tokens: int = 16_384
    """Tokens of a step, hashed in rows of 512, and ids of a step of which the distinct ones are found."""
    rows: int = 65_536
    """Rows for each order and head."""
    id_rows: int = 1_000_000
    """Rows over which the ids lie of which the distinct ones are found."""
    batches: int = 16
    """Different steps; after them they come again."""
    visits: int = 12
    """Turns of each side."""
    steps: int = 8
    """Timed steps a turn."""
    corpus_tokens: int = 1 << 20
    """Tokens of which the minority mass is taken: the first of the built-in corpus where that has been built, else
    drawn by Zipf's law from as many ids."""
    seed: int = 0
    """Of what is drawn."""

    def __post_init__(self):
        least = {"tokens": 512, "rows": 2, "id_rows": 1, "batches": 1, "visits": 1, "steps": 1, "corpus_tokens": 3}
        for name, bound in least.items():
            flag = name.replace("_", "-")
            require(getattr(self, name) >= bound, flag, getattr(self, name), f"give a whole number of {bound} or more")
        require(self.tokens % 512 == 0, "tokens", self.tokens, "give a multiple of 512, the length of a row")
        require(self.rows < 2**31, "rows", self.rows, "the hash xor takes fewer than 2**31")
        require(0 <= self.seed < 2**63, "seed", self.seed, "give a whole number from 0 to 2**63 - 1")


QUICK = HashingOptions(
    quick=True, tokens=2048, rows=4096, id_rows=4096, batches=2, visits=2, steps=2, corpus_tokens=1 << 14
)


class Hashing:
    """The bench: hashes race each other, sorts race each other on both streams, and minority mass is counted."""

    def __init__(self, options: HashingOptions) -> None:
        self.options = options
        shards = sorted((CACHE / "local").glob("train_*.bin"))
        self.data = "local" if shards else "zipf"
        random = torch.Generator().manual_seed(options.seed)
        if shards:
            self.corpus_N = Shard(shards[0]).tokens[: options.corpus_tokens]
        else:
            self.corpus_N = zipf_ranks(options.corpus_tokens, VOCABULARY, random).numpy().astype(np.uint16)
        drawn = zipf_ranks(options.batches * options.tokens, VOCABULARY, random)
        self.tokens = list(drawn.view(options.batches, -1, 512))
        turns = {"warm": options.batches, "visits": options.visits, "steps": options.steps}
        self.hashes = Race("hashes", tuple(HASHES), self._hash, **turns, units=self._ids)
        self.ids = {name: draw(options.batches, options.tokens, options.id_rows, options.seed)
                    for name, draw in STREAMS.items()}  # fmt: skip
        self.sorts = {name: Race(f"distinct {name} ids", tuple(SORTS), functools.partial(self._sort, name), **turns)
                      for name in STREAMS}  # fmt: skip
        self.minority: dict[tuple[str, int], float] = {}

    def jobs(self) -> list[Job]:
        """All races, then the counting."""
        found = self.hashes.jobs()
        for race in self.sorts.values():
            found += race.jobs()
        return [*found, Job("minority mass", self._count)]

    def results(self) -> dict[str, float]:
        """The numbers, by the keys of records/bench/README.md."""
        found = {}
        for name, one in self.hashes.timed().items():
            # ns an id; the fewest are the most ids a second.
            found |= {f"hash_mids_{name}": 1e3 / one.median, f"hash_mids_{name}_min": 1e3 / one.most}
            found[f"hash_mids_{name}_max"] = 1e3 / one.least
        for stream, race in self.sorts.items():
            timed = race.timed()
            for name, one in timed.items():
                key = f"{name}_ms_{stream}"
                found |= {key: one.median, f"{key}_min": one.least, f"{key}_max": one.most}
            for mine, peers in RATIOS.items():
                for peer in peers:
                    ratio, least, most = timed[mine].over(timed[peer])
                    key = f"{mine}_over_{peer}_{stream}"
                    found |= {key: ratio, f"{key}_min": least, f"{key}_max": most}
        return found | {f"minority_{kind}_{order}": mass for (kind, order), mass in self.minority.items()}

    def show(self) -> None:
        """A table of hashes, one of sorts a stream, and the masses."""
        options = self.options
        timed = self.hashes.timed().items()
        rows = [(_told(name), span(1e3 / one.median, 1e3 / one.most, 1e3 / one.least, ",.1f"))
                for name, one in timed]  # fmt: skip
        masses = [f"{kind} of order {order}: {mass:.4f}" for (kind, order), mass in self.minority.items()]
        where = "the built-in corpus" if self.data == "local" else "tokens drawn by Zipf's law"
        print_table(
            f"row ids of {options.tokens:,} tokens a step, {torch.get_num_threads()} threads",
            ["", "million row ids a second (least to most)"], rows,
            [f"minority mass of {len(self.corpus_N):,} tokens of {where} in {options.rows:,} rows: {', '.join(masses)}",
             ""],
        )  # fmt: skip
        for stream, race in self.sorts.items():
            print_table(
                f"{options.tokens:,} {stream} ids over {options.id_rows:,} rows",
                ["", "ms (least to most)", "ours / it"], _sort_rows(race.timed()), [""],
            )  # fmt: skip

    def _hash(self, name: str) -> Step:
        kind, orders, heads = HASHES[name]
        tokens, rows = self.tokens, self.options.rows
        return lambda number: hash_ngrams(tokens[number % len(tokens)], None, orders, rows, kind, heads)

    def _ids(self, name: str, number: int) -> float:
        _, orders, heads = HASHES[name]
        return 1e-9 * self.options.tokens * len(orders) * heads

    def _sort(self, stream: str, name: str) -> Step:
        work = SORTS[name][1]
        pairs = [(ids_N, torch.unique(ids_N, return_inverse=True)) for ids_N in self.ids[stream]]
        inputs = [(ids_N, slots_N, len(unique_U)) for ids_N, (unique_U, slots_N) in pairs]
        return lambda number: work(*inputs[number % len(inputs)])

    def _count(self) -> None:
        for ngrams in distinct_ngrams(self.corpus_N, ORDERS):
            for kind in ("xor", "mix"):
                use = order_use(self.corpus_N, ngrams, self.options.rows, kind)
                self.minority[kind, ngrams.order] = use.joint.minority


def _told(name: str) -> str:
    """'mix, orders 2 to 8'."""
    kind, orders, heads = HASHES[name]
    return f"{kind}, orders {orders[0]} to {orders[-1]}" + (f", {heads} heads" if heads > 1 else "")


def _sort_rows(timed: dict[str, Timed]) -> list[tuple[str, str, str]]:
    rows = []
    for name, one in timed.items():
        mine = next((mine for mine, peers in RATIOS.items() if name in peers), None)
        ratio = span(*timed[mine].over(one)) if mine else ""
        rows.append((SORTS[name][0], span(one.median, one.least, one.most, ",.3f"), ratio))
    return rows


def main(words: Sequence[str]) -> None:
    """The command."""
    options = parse(HashingOptions, words, "python -m mome bench hashing", QUICK if "--quick" in words else None)
    require_place(options.json)
    bench = Hashing(options)
    run_jobs(bench.jobs())
    bench.show()
    more = {"data": bench.data, "kernels": {"segments": backend("segments", "cpu")}}
    leave("hashing", bench_environment(("numba",), **more), bench.results(), options.json)
