"""What a bench counts rather than times: bytes that a step must move, allocations as large as its rows, page faults.

Lives here: the byte formula of a step of a row table, and the counter over torch's and numpy's allocations.
Not here: which sides are counted (tables.py).
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mome.tools.bench.race import Step

SHARE = 10  # an allocation counts from a tenth of the bytes of the rows a step touches


@dataclass(frozen=True)
class Allocations:
    """Means over the counted steps: allocations of at least a tenth of the step's rows, and minor page faults."""

    rows: float
    faults: float


def distinct(steps: Sequence[Tensor]) -> list[int]:
    """How many distinct ids each step has."""
    return [len(torch.unique(ids_N)) for ids_N in steps]


def moved_bytes(lookups: int, unique: int, dim: int, itemsize: int = 4) -> int:
    """Bytes that a step of a row-wise rule with one second moment a row must read or write, N lookups of U rows of D.

    Rows, D numbers each:   pull reads U from the table and writes U to the working set; the lookup reads these U and
                            writes N; the backward pass reads N of gradient and writes U of its sums; the push reads U
                            of sums and U of weights and writes U to the table: 7 U + 2 N.
    Numbers beside them:    second moment and last event, 4 bytes each, read and written: 4 U. Ids and slots, 8 bytes
                            each: N ids read, N slots written, read by the lookup and by the backward pass, U distinct
                            ids written, and read by pull and push: 4 N + 3 U.
    What sorting moves, and a row that is read again because it left the cache, are not in it: it is a lower bound.
    """
    return (7 * unique + 2 * lookups) * dim * itemsize + 4 * unique * 4 + (4 * lookups + 3 * unique) * 8


def count_allocations(step: Step, thresholds: Mapping[int, int]) -> Allocations:
    """Run these steps (number -> least bytes that count) three times over, and count what they allocate. Warm up first.

    torch's CPU allocations, those inside an operator included, are the [memory] events of torch.profiler with
    profile_memory; a step's count is how many of them reach its threshold. Python's and numpy's are traced by
    tracemalloc, whose peak is looked at before and after every call: what rises by the threshold or more from one look
    to the next counts one. What a compiled kernel allocates for itself is seen by neither, and shows in the page
    faults: pages that the process touched for the first time, of whatever origin, in the third round, without tools.
    """
    count = sum(_torch_allocations(step, number, least) for number, least in thresholds.items())
    count += sum(_traced(step, number, least) for number, least in thresholds.items())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in thresholds:
        step(number)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return Allocations(count / len(thresholds), faults / len(thresholds))


def _torch_allocations(step: Step, number: int, least: int) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(number)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sum(event["args"]["Bytes"] >= least for event in events if event.get("name") == "[memory]")


def _traced(step: Step, number: int, least: int) -> int:
    before, count = 0, 0

    def look(*_: object) -> None:
        nonlocal before, count
        now, peak = tracemalloc.get_traced_memory()
        count += peak - before >= least
        tracemalloc.reset_peak()
        before = now

    profiler = sys.getprofile()
    tracemalloc.start()
    try:
        sys.setprofile(look)
        step(number)
    finally:
        sys.setprofile(profiler)
        tracemalloc.stop()
    return count
