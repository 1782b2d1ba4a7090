"""The command line of train_gpt.py: a preset, flags over it, --resume and --dry-run.

Lives here: words to a RunConfig, with one line for a word that is not known.
Not here: what a run does with it (train_gpt.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mome.config import RunConfig, nearest
from mome.errors import UserError
from mome.options import parse as options_from
from mome.presets import ABOUT, PRESETS
from mome.runfolder import RunFolder

DEFAULT = "local"


@dataclass(frozen=True)
class Options:
    """What train_gpt.py was asked to do."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    resume: Path | None = None
    """Folder of a run to go on with, under its own configuration."""
    dry_run: bool = False
    """Print shapes, parameters, bytes, schedule and FLOPs, and stop."""


def parse(words: list[str]) -> Options:
    """Options from the command line. Raises UserError for an unknown preset or flag, naming the nearest one."""
    named = bool(words) and not words[0].startswith("-")
    preset = words[0] if named else DEFAULT
    if preset not in PRESETS:
        raise UserError(f"{preset}: no such preset{nearest(preset, PRESETS)}; there are {', '.join(PRESETS)}")
    flags = words[1:] if named else words
    if any(one.endswith(".bin") and other.endswith(".bin") for one, other in itertools.pairwise(flags)):
        raise UserError("a pattern of shards came as many words: quote the pattern, --train-glob 'shards/train_*.bin'")
    if not named and flags[:1] in (["-h"], ["--help"]):
        print("presets:", *(f"  {name:12} {about}" for name, about in ABOUT.items()), sep="\n", end="\n\n")
    prog = "python train_gpt.py " + (preset if named else "[PRESET]")
    options = options_from(Options, flags, prog, default=Options(PRESETS[preset]))
    if options.resume is None:
        return options
    folder = RunFolder.open(options.resume)
    if named or options.config != PRESETS[preset]:
        folder.require_same(options.config, PRESETS[preset])
    return Options(folder.config(), options.resume, options.dry_run)
