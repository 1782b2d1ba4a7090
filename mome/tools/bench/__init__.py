"""python -m mome bench NAME: how fast, against whom, in one run; a table, and with --json FILE its numbers.

Lives here: the choice among the benches, and what the process is told before torch loads.
Not here: the benches (tables.py, hashing.py), how sides take turns (race.py), the table and the file (output.py).
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Sequence

from mome.errors import UserError

BENCHES: dict[str, tuple[str, str]] = {
    "tables": ("mome.tools.bench.tables", "a step of a table of rows against its peers, and against its own size"),
    "hashing": ("mome.tools.bench.hashing", "row ids of n-grams a second, and distinct ids against torch and numpy"),
}


def usage() -> str:
    """The help text: every bench with what it measures."""
    width = max(map(len, BENCHES))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in BENCHES.items()]
    first = "usage: python -m mome bench NAME [--quick] [--json FILE] ... (options: python -m mome bench NAME --help)"
    return "\n".join([first, "", *lines])


def main(words: Sequence[str]) -> None:
    """The command. Raises UserError for an unknown bench, and whatever the bench raises."""
    if words and words[0] in ("-h", "--help"):
        print(usage())
        raise SystemExit(0)
    if not words:
        raise UserError(f"bench needs a name: {', '.join(BENCHES)}")
    name, *rest = words
    if name not in BENCHES:
        near = difflib.get_close_matches(name, BENCHES, n=1, cutoff=0.4)
        raise UserError(f"unknown bench {name!r}: {f'did you mean {near[0]}?' if near else ', '.join(BENCHES)}")
    # As the trainer has it (records/NOTEBOOK.md); every side of a bench waits alike.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # The profiler that counts allocations says when it starts and stops, in the middle of the progress.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    importlib.import_module(BENCHES[name][0]).main(rest)
