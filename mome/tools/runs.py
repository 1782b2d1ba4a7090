"""A run folder as a reader sees it: tolerant of runs that are unfinished, killed in mid-line, or gone wrong.

Lives here: Run and read_run, curves out of metrics.jsonl, labels that tell runs apart, what code a run came from.
Not here: writing a run folder (mome/runfolder.py), any model code.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mome.errors import UserError
from mome.tools.page import shown


@dataclass(frozen=True)
class Run:
    """What a folder holds. Missing files are empty; `notes` says in whole sentences what could not be read."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any]
    lines: list[dict[str, Any]]  # one a step, ascending; of a step that was run twice the later line
    sample: str
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder's own name, whatever path led to it."""
        return self.folder.resolve().name

    @property
    def preset(self) -> str:
        """The preset: from the configuration, or else the folder's name without its leading time."""
        named = self.config.get("preset")
        return str(named) if named else self.name.partition("_")[2] or self.name


@dataclass(frozen=True)
class Points:
    """A curve: steps, tokens and seconds so far, loss in nats per token, half the width of its band; float64 [n]."""

    steps: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    loss: np.ndarray
    spread: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.loss)


def read_run(folder: Path) -> Run:
    """Read a run folder. Errors: UserError when it is no folder, or holds neither config.json nor metrics.jsonl."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: name a run folder, such as runs/<time>_local")
    if not (folder / "config.json").exists() and not (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder} is no run folder: it holds neither config.json nor metrics.jsonl")
    notes: list[str] = []
    objects = {name: _read_object(folder / f"{name}.json", notes) for name in ("config", "environment", "result")}
    if not (folder / "result.json").exists():
        notes.append("There is no result.json: the run has not finished, or was stopped.")
    lines = _read_lines(folder / "metrics.jsonl", notes)
    broken = [line["step"] for line in lines if "loss" in line and not math.isfinite(number(line["loss"]))]
    if broken:
        notes.append(f"The training loss is not finite at step {broken[0]}.")
    sample = folder / "sample.txt"
    text = sample.read_text(encoding="utf-8", errors="replace") if sample.exists() else ""
    return Run(folder, **objects, lines=lines, sample=text, notes=tuple(notes))


def read_result(folder: Path) -> dict[str, Any]:
    """The result.json of a run folder; empty when it is missing or cannot be read."""
    return _read_object(folder / "result.json", [])


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a run folder; empty when it is missing or cannot be read."""
    return _read_object(folder / "config.json", [])


def code_of(run: Run) -> tuple[tuple[str, ...], str]:
    """What a run was trained by: its git revisions (several after a resumption elsewhere), a SHA-256 of its sources.

    The digest is over the names and contents in source.zip, not over their times; "" where there is none to read.
    """
    resumed = run.environment.get("resumed")
    stages = [run.environment, *(resumed if isinstance(resumed, list) else [])]
    revisions = [str(stage["revision"]) for stage in stages if isinstance(stage, dict) and "revision" in stage]
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(run.folder / "source.zip") as archive:
            for entry in sorted(archive.infolist(), key=lambda entry: entry.filename):
                digest.update(f"{entry.filename} {entry.file_size} {entry.CRC}\n".encode())
    except (OSError, zipfile.BadZipFile):
        return tuple(dict.fromkeys(revisions)), ""
    return tuple(dict.fromkeys(revisions)), digest.hexdigest()


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{path.name} cannot be read as a JSON object.")
    return {}


def _read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    by_step: dict[int, dict[str, Any]] = {}
    unreadable = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
                step = int(line["step"])
            except (ValueError, KeyError, TypeError):
                # A line without its end is what a killed run leaves behind, and no news.
                unreadable += text.endswith("\n") and bool(text.strip())
                continue
            # Validation may stand on a line of its own: a step's lines are joined.
            by_step[step] = by_step.get(step, {}) | line
    if unreadable:
        notes.append(f"{unreadable} line{'s' * (unreadable > 1)} of metrics.jsonl cannot be read.")
    return [by_step[step] | {"step": step} for step in sorted(by_step)]


def number(value: Any) -> float:
    """A number as float; NaN for what is none (None, text, a list, a truth value)."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def points(run: Run, key: str) -> Points:
    """The curve of one key ("loss", "val_loss") over the lines that have it; a value that is no number is NaN."""
    rows = [line for line in run.lines if key in line]

    def column(name: str) -> np.ndarray:
        return np.array([number(line.get(name)) for line in rows], dtype=np.float64)

    return Points(column("step"), column("tokens"), column("seconds"), column(key))


def smooth(values: np.ndarray, span: float) -> np.ndarray:
    """Exponential moving average over about `span` values, unbiased at the start.

    sum(w x) / sum(w) with w = (1 - 1/span)^age. Values that are not finite weigh nothing; before the first finite one
    the average is NaN.
    """
    keep, top, weight = 1.0 - 1.0 / max(span, 1.0), 0.0, 0.0
    out = np.full(len(values), math.nan)
    for i, value in enumerate(values):
        top, weight = top * keep, weight * keep
        if math.isfinite(value):
            top, weight = top + value, weight + 1.0
        if weight:
            out[i] = top / weight
    return out


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as one level with dotted keys; a list counts as a value unless it holds objects."""
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, list) and any(isinstance(item, dict) for item in inner):
            inner = {str(i): item for i, item in enumerate(inner)}
        if isinstance(inner, dict) and inner:
            flat |= flatten(inner, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for each run, all different: the preset, or with it the settings that differ, or the folder."""
    flat = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config if key not in ("preset", "runs_dir"))
    differ = [key for key in keys if len({repr(config.get(key)) for config in flat}) > 1]

    def told(config: Mapping[str, Any]) -> str:
        return ", ".join(f"{key.rpartition('.')[2]} {shown(config.get(key)).replace(', ', '+')}" for key in differ)

    presets = [run.preset for run in runs]
    settings = [f"{preset}, {told(config)}" for preset, config in zip(presets, flat)]
    folders = [str(run.folder) for run in runs]
    for choice, most in ((presets, 60), (settings, 48), ([run.name for run in runs], 60), (folders, 4096)):
        if len(set(choice)) == len(runs) and max(map(len, choice)) <= most:
            return choice
    return [f"{folder} ({i})" for i, folder in enumerate(folders, 1)]
