"""python -m mome bench tables: a step of a table of rows against its peers, and against itself at other sizes.

Lives here: the command: its parts one after another, their results in one object.
Not here: the options (options.py), the race against the peers (peers.py), sizes and whole steps (flat.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from kernels import backend
from mome.options import parse
from mome.tools.bench import sides
from mome.tools.bench.flat import Flat, WholeStep
from mome.tools.bench.options import QUICK, TablesOptions
from mome.tools.bench.output import bench_environment, leave, memory_named, require_memory, require_place
from mome.tools.bench.peers import Peers
from mome.tools.bench.race import run_jobs

OPS = ("segments", "gather", "row_update")
PARTS = {"peers": Peers, "flat": Flat, "step": WholeStep}


def main(words: Sequence[str]) -> None:
    """The command."""
    default = QUICK if "--quick" in words else None
    options = parse(TablesOptions, words, "python -m mome bench tables", default)
    require_place(options.json)
    parts = [PARTS[name](options) for name in PARTS if name in options.parts]
    require_memory(max(part.needs() for part in parts), "lower --rows, --dim or --flat-bits")
    with memory_named("lower --rows, --dim or --flat-bits"):
        run_jobs([job for part in parts for job in part.jobs()])
    results = {}
    for part in parts:
        part.show()
        results |= part.results()
    kernels = {op: backend(op, "cpu") for op in OPS}
    leave("tables", bench_environment(("numba", sides.FBGEMM_PACKAGE), kernels=kernels), results, options.json)
