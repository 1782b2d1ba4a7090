"""The JSON report of tests/gpu/check.sh, from what its phases left: `report.py WORK OUT`.

Lives here: reading the test results and the run folder, the verdict, the report.
Not here: what is run, and its time limits (check.sh).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "tyro", "rich")
LOG_LINES = 40


def read_tests(path: Path) -> dict[str, Any]:
    """Counts and the failures' names from a JUnit file; all zero when pytest wrote none."""
    counts: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    if path.exists():
        for case in ElementTree.parse(path).iter("testcase"):
            tags = {child.tag for child in case}
            kind = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
            counts[kind] += 1
            if kind == "failed":
                counts["failures"].append(f"{case.get('classname')}::{case.get('name')}")
    return counts


def read_run(runs: Path) -> dict[str, Any]:
    """What the one run under `runs` left: its environment, result and losses (nats a token, a number a step)."""
    folders = sorted(runs.glob("*/metrics.jsonl"))
    if not folders:
        return {}
    folder = folders[-1].parent
    values: dict[str, Any] = {}
    for name in ("environment", "result"):
        path = folder / f"{name}.json"
        values[name] = json.loads(path.read_text()) if path.exists() else None
    lines = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break  # a run killed at its time limit may have written half a line
    values["losses"] = [line["loss"] for line in lines]
    values["train_seconds"] = lines[-1]["seconds"] if lines else None
    # The first steps compile and warm up: the median is of what comes after.
    taken = [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines[4:])]
    values["step_ms"] = round(1000 * statistics.median(taken), 3) if taken else None
    return values


def verdict(phases: dict[str, dict[str, Any]], tests: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """What is wrong, a line each; empty when all is well."""
    wrong = [
        f"{name}: {'out of time' if phase['exit'] in (124, 137) else 'exit ' + str(phase['exit'])}"
        for name, phase in phases.items()
        if phase["exit"]
    ]
    if not tests["passed"]:
        wrong.append("tests: none passed")
    if tests["failed"] or tests["skipped"]:
        wrong.append(f"tests: {tests['failed']} failed, {tests['skipped']} skipped")
    losses = run.get("losses") or []
    if len(losses) != 20 or not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
        wrong.append(f"train: {len(losses)} steps, not 20 with a finite loss each")
    elif losses[-1] >= losses[0]:
        wrong.append(f"train: the loss did not fall ({losses[0]:.3f} -> {losses[-1]:.3f})")
    if losses and (run["environment"] or {}).get("device", "cpu") == "cpu":
        wrong.append("train: the run did not use the GPU")
    return wrong


def machine() -> dict[str, Any]:
    """Versions and the device, as this interpreter sees them."""
    import torch

    there = {name: None for name in PACKAGES}
    for name in PACKAGES:
        try:
            there[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    seen = {"python": platform.python_version(), "platform": platform.platform(), "cores": os.cpu_count(), **there}
    seen |= {"cuda": torch.version.cuda, "device": None}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        seen |= {"device": device.name, "device_bytes": device.total_memory, "devices": torch.cuda.device_count()}
        seen |= {"capability": list(torch.cuda.get_device_capability(0)), "nccl": list(torch.cuda.nccl.version())}
    return seen


def main(work: Path, out: Path) -> int:
    started = [line.split() for line in (work / "phases").read_text().splitlines()]
    ends = [float(start) for _, _, start in started[1:]] + [time.time()]
    phases: dict[str, dict[str, Any]] = {}
    for (name, code, start), end in zip(started, ends, strict=True):
        phases[name] = {"exit": int(code), "seconds": round(end - float(start), 2)}
        if int(code):
            phases[name]["log"] = (work / f"{name}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
    tests, run = read_tests(work / "tests.xml"), read_run(work / "runs")
    wrong = verdict(phases, tests, run)
    report = {"ok": not wrong, "wrong": wrong, "machine": machine(), "phases": phases, "tests": tests, "train": run}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    for line in wrong:
        print(f"check.sh: {line}", file=sys.stderr)
    print(f"check.sh: {'all passed' if not wrong else 'FAILED'}; report in {out}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
