"""Run folders as a trainer leaves them, made in a temporary folder.

Lives here: the configuration, the numbers and the fixture that writes them.
Not here: a trainer (tests/tools/test_compare.py has a small one).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

STAGES = [{"share": 0.5, "windows": [128, 256]}, {"share": 0.5, "windows": [128, 512]}]
CONFIG = {
    "preset": "local",
    "steps": 40,
    "seed": 0,
    "memories": ["routed", "ngram"],
    "train_glob": "",
    "model": {"kind": "mome", "layers": 4, "width": 192},
    "schedule": {"cooldown": 0.5, "stages": STAGES},
}
RESULT = {
    "val_loss": 3.25,
    "val_bpb": 1.5,
    "seconds": 83.0,
    "steps": 40,
    "tokens": 81920,
    "step_ms": 150.25,
    "active_params": 2_500_000,
    "memory_params": 40_000_000,
    "peak_bytes": 900 * 2**20,
    "world": 1,
    "rank_tokens": [81920],
    "knockout": {"full": 3.25, "off": 3.75, "mean_row": 3.5, "shuffled_rows": 4.25, "swapped_routes": 3.24},
}


def metrics(steps: int, offset: float = 0.0, every: int = 10) -> list[dict]:
    """Lines of a run whose loss falls from about 9; every so many steps it is validated."""
    lines = []
    for step in range(1, steps + 1):
        loss = 3.0 + offset + 6.0 * math.exp(-4.0 * step / steps) + 0.1 * math.sin(7.0 * step)
        line = {"step": step, "loss": loss, "tokens": 2048 * step, "seconds": 0.25 * step, "rows_touched": 900}
        if every and step % every == 0:
            line |= {"val_loss": loss + 0.05, "val_bpb": loss / 2.1}
        lines.append(line)
    return lines


@pytest.fixture
def config():
    return dict(CONFIG)


@pytest.fixture
def result():
    return dict(RESULT)


@pytest.fixture
def lines():
    return metrics


@pytest.fixture
def make_run(tmp_path):
    """make_run(name, ...) -> folder of a finished run; None leaves a file out, text is written as it is."""

    def make(name="20260101-120000_local", *, config=CONFIG, result=RESULT, lines=None, environment=None, sample=""):
        folder: Path = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        environment = {"torch": "2.13.0", "device": "cpu"} if environment is None else environment
        for file, value in (("config", config), ("environment", environment), ("result", result)):
            if value is not None:
                (folder / f"{file}.json").write_text(value if isinstance(value, str) else json.dumps(value))
        lines = metrics(40) if lines is None else lines
        written = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(written)
        if sample:
            (folder / "sample.txt").write_text(sample)
        return folder

    return make
