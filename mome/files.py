"""Files that are whole or not there, and JSON that every reader takes.

Lives here: write_atomic, write_json, json_text, sync; no torch, so that tools which only read and draw stay quick.
Not here: what goes into a file, and the shards and tokenizers of data/, which write themselves.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) or replace it: it holds the old content or the new one, never a part, even after a
    power cut. Makes its folder. Errors: OSError, and then the old file is as it was and nothing else is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process in its name: two that write the same file do not share a draft.
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(draft, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_text(value: Any, indent: int | None = 1) -> str:
    """JSON without NaN and infinity, which not every reader takes: they become null. indent None: one line."""
    return json.dumps(_finite(value), indent=indent)


def write_json(path: Path, value: Any) -> None:
    """Write json_text(value) as write_atomic does, with a newline at the end."""
    write_atomic(path, json_text(value) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
