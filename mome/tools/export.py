"""python -m mome export RUN DIR: a run's model as files to hand on.

Lives here: the command.
Not here: the format and reading it back (mome/pretrained.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mome.options import parse
from mome.pretrained import export
from mome.run import load_run


@dataclass(frozen=True)
class ExportOptions:
    """Write a run's newest checkpoint as safetensors; mome.pretrained.from_pretrained reads it."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    folder: Annotated[Path, tyro.conf.Positional]
    """New folder to write into."""


def main(words: Sequence[str]) -> None:
    """The command."""
    options = parse(ExportOptions, words, "python -m mome export")
    run = load_run(options.run)
    export(run, options.folder)
    written = sum(path.stat().st_size for path in options.folder.iterdir())
    print(f"{options.folder}: {written:,} bytes, step {run.step}")
