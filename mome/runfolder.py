"""A run's folder: its files, each written whole, and the numbers a step.

Lives here: making and reopening the folder, config, environment, metrics, result, the zipped source.
Not here: checkpoints (mome/checkpoint.py), the plot and the page (mome/tools/report.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from data.tokenizer import Tokenizer
from mome.config import RunConfig, flat, from_dict, to_dict
from mome.errors import UserError
from mome.files import json_text, sync, write_atomic, write_json

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("mome", "optim", "data", "kernels", "records")
PACKAGES = ("torch", "numpy", "tokenizers", "tiktoken", "safetensors", "tyro", "rich")
# What may differ between a run and its resumption without changing what is trained.
FREE_KEYS = ("runs_dir", "paranoid", "timeout")
# What the bits of a result depend on beside configuration and data.
DECISIVE = ("torch", "device", "dtype", "threads", "kernels", "world", "source")


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoint"

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
        """A new folder `runs_dir`/<time>_<preset>; two runs in one second get different names."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}_{config.preset}"
        for suffix in ("", *(f"_{n}" for n in range(2, 1000))):
            path = config.runs_dir / f"{name}{suffix}"
            draft = config.runs_dir / f".starting_{os.getpid()}"
            draft.mkdir(parents=True, exist_ok=True)
            write_json(draft / "config.json", to_dict(config))
            try:
                draft.rename(path)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    continue
                raise
            return cls(path)
        raise UserError(f"--runs-dir {config.runs_dir}: a thousand runs in this second; try again")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """A folder that a run left. Raises UserError when it is none."""
        if not (path / "config.json").is_file():
            raise UserError(f"{path} is no run folder (it has no config.json); give one of runs/*")
        return cls(path)

    def config(self) -> RunConfig:
        try:
            return from_dict(RunConfig, json.loads((self.path / "config.json").read_text()))
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{self.path / 'config.json'}: not a configuration of this version ({error})") from error

    def require_same(self, given: RunConfig, preset: RunConfig) -> None:
        """Refuse to go on with flags (what `given` changes in `preset`) that the run does not have, naming them."""
        saved, wanted, usual = (flat(to_dict(config)) for config in (self.config(), given, preset))
        asked = ["preset", *(key for key in wanted if wanted[key] != usual[key] and key not in FREE_KEYS)]
        wrong = [f"{key}: {saved[key]} -> {wanted[key]}" for key in asked if saved[key] != wanted[key]]
        if wrong:
            raise UserError(
                f"--resume {self.path}: the run has another configuration ({'; '.join(wrong)}); leave it out"
            )

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics that can be read; what a kill or a power cut left of others is passed over."""
        lines = []
        text = self.metrics_path.read_text(errors="replace") if self.metrics_path.exists() else ""
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                if isinstance(values, dict) and {"step", "tokens", "seconds"} <= values.keys():
                    lines.append(values)
        return lines

    def truncate_metrics(self, step: int, say: Callable[[str], None]) -> None:
        """Keep the lines of the first `step` steps, and say how many of them are lost."""
        kept = [line for line in self.metrics() if line["step"] <= step]
        if len(kept) < step:
            say(f"{self.metrics_path}: the lines of {step - len(kept)} steps before the checkpoint are lost")
        write_atomic(self.metrics_path, "".join(json_text(line, indent=None) + "\n" for line in kept))

    def log(self, values: dict[str, Any]) -> None:
        """Append one line of metrics."""
        with open(self.metrics_path, "a") as file:
            file.write(json_text(values, indent=None) + "\n")

    def log_validation(self, step: int, val_loss: float, val_bpb: float | None) -> None:
        """Add the last validation to the last line of metrics, that of `step`."""
        lines = self.metrics()
        for line in lines[-1:]:
            if line["step"] == step:
                line |= {"val_loss": val_loss, "val_bpb": val_bpb}
        write_atomic(self.metrics_path, "".join(json_text(line, indent=None) + "\n" for line in lines))

    def typical_step_seconds(self) -> float | None:
        """Median seconds of the steps of one size (tokens), averaged over all steps: stages differ in size."""
        by_size: dict[int, list[float]] = {}
        lines = [{"step": 0, "tokens": 0, "seconds": 0.0}, *self.metrics()]
        for before, after in itertools.pairwise(lines):
            if after["step"] == before["step"] + 1:
                by_size.setdefault(after["tokens"] - before["tokens"], []).append(after["seconds"] - before["seconds"])
        steps = sum(map(len, by_size.values()))
        return sum(statistics.median(times) * len(times) for times in by_size.values()) / steps if steps else None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of the folder meanwhile. Raises UserError when one is in it."""
        with open(self.path / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{self.path}: another process is training in it; wait for it or stop it") from error
            yield

    def start(self, environment: dict[str, Any], tokenizer: Tokenizer, say: Callable[[str], None]) -> None:
        """Write what is known before the first step; on a resumption add what is no longer as it was, and say so."""
        path = self.path / "environment.json"
        if path.exists():
            try:
                first = dict(json.loads(path.read_text()))
            except (ValueError, TypeError):
                say(f"{path} cannot be read; written anew")
                first = environment
            changed = {key: environment[key] for key in DECISIVE if environment[key] != first.get(key)}
            if changed:
                was = "; ".join(f"{key} {first.get(key)} -> {value}" for key, value in changed.items())
                say(f"not as at the start of this run, so equal up to rounding and not bit for bit: {was}")
                write_json(path, first | {"resumed": [*first.get("resumed", []), changed]})
        else:
            write_json(path, environment)
        if not (self.path / "source.zip").exists():
            self.write_source()
        if not (self.path / "tokenizer.json").exists():
            tokenizer.save(self.path / "tokenizer.json")

    def write_source(self) -> None:
        """Zip every .py as it runs."""
        draft = self.path / ".source.zip.writing"
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sources():
                archive.write(path, path.relative_to(ROOT))
        sync(draft)
        os.replace(draft, self.path / "source.zip")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def environment(device: torch.device, dtype: torch.dtype, why: str, world: int, data: str) -> dict[str, Any]:
    """Versions, hardware, revision and the data's fingerprint: what a reader needs to trust a number."""
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": f"{os.environ.get('MOME_KERNELS') or 'chosen'}, numba {_version('numba')}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "dtype_reason": why,
        "world": world,
        "revision": revision(),
        "source": source_hash(),
        "data": data,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def sources() -> list[Path]:
    """Every .py that a run may use."""
    return [ROOT / "train_gpt.py", *(path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))]


def source_hash() -> str:
    """SHA-256 of all of them."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def processor() -> str:
    """The processor's name as Linux states it, else what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def revision() -> str:
    """The git revision, '+' when files differ from it; 'unknown' outside a checkout."""
    try:
        dirty = "+" if git("status", "--porcelain") else ""
        return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def git(*words: str) -> str:
    """What git says of this checkout."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
