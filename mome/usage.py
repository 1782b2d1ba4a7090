"""What the process of a run holds and moves: memory, and bytes between its files and the disk.

Lives here: the peak of a run, the counters that stand in a step's line of metrics, and the clock.
Not here: the bytes of a table by its shape (mome/table/rows.py), how the counters are drawn (mome/tools/).
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch

STATUS, IO = Path("/proc/self/status"), Path("/proc/self/io")


def peak_bytes(device: torch.device) -> int:
    """The most memory held: on the GPU when there is one, else resident in this process (Linux counts KiB)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def clock(device: torch.device) -> float:
    """Seconds of a clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def process_bytes(disk: bool = False) -> dict[str, int]:
    """resident_bytes: anonymous memory and mapped files that lie in RAM now (Linux: RssAnon + RssFile). With `disk`
    also read_bytes and written_bytes: what this process has had fetched from block devices since it began, and what it
    has had sent to them (read_bytes and write_bytes of /proc/self/io; a page that the cache had counts nothing).

    What the system does not state, or does not let this process read, is left out.
    """
    status, moved = _fields(STATUS), _fields(IO) if disk else {}
    found = {}
    if status.keys() >= {"RssAnon", "RssFile"}:
        found["resident_bytes"] = 1024 * (status["RssAnon"] + status["RssFile"])
    for name, field in (("read_bytes", "read_bytes"), ("written_bytes", "write_bytes")):
        if field in moved:
            found[name] = moved[field]
    return found


def _fields(path: Path) -> dict[str, int]:
    """Lines 'name: number ...' of a file of the kernel's; empty where it cannot be read."""
    try:
        lines = [line.partition(":")[::2] for line in path.read_text().splitlines()]
    except OSError:
        return {}
    values = {name: value.split()[:1] for name, value in lines}
    return {name: int(value[0]) for name, value in values.items() if value and value[0].isdecimal()}
