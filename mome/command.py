"""The command line of train_gpt.py: a preset, flags over it, --resume and --dry-run.

Lives here: words to a RunConfig, with one line for a word that is not known.
Not here: what a run does with it (train_gpt.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from mome.config import RunConfig, flag_of, flat, nearest, to_dict
from mome.errors import SharedError, UserError
from mome.memory import MEMORIES
from mome.options import parse as options_from
from mome.presets import ABOUT, PRESETS
from mome.runfolder import FREE_KEYS, RunFolder

DEFAULT = "local"


@dataclass(frozen=True)
class Options:
    """What train_gpt.py was asked to do."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    resume: Path | None = None
    """Folder of a run to go on with, under its own configuration."""
    dry_run: bool = False
    """Print shapes, parameters, bytes, schedule and FLOPs, and stop."""


def unused(config: RunConfig) -> dict[str, str]:
    """Beginnings of dotted keys that nothing reads in this configuration -> why."""
    found = {}
    for name in MEMORIES:
        if name not in config.memories:
            why = f"the memory {name} is off (--memories switches it on)"
            found |= {f"memory.{name}.": why, f"table.{name}.": why}
        else:
            found |= {f"table.{name}.{key}": why for key, why in unused_of_table(config, name).items()}
    if not config.memories:
        found |= {key: "no memory is on" for key in ("cycle", "row_clip", "prefetch")}
    elif not config.cycle_late:
        found["cycle_late_from"] = "--cycle-late is 0"
    muon = ("matrix_", "adam_", "embed_", "head_", "gate_", "scalar_", "smear_", "router_", "down_")
    idle = ("plain_",) if config.optim.kind == "muon" else muon
    found |= {f"optim.{start}": f"--optim.kind is {config.optim.kind}" for start in idle}
    if config.optim.kind == "adamw":
        found["schedule.momentum"] = "--optim.kind is adamw"
    if config.model.kind == "plain":
        found |= {f"model.{name}": "the plain model has none" for name in ("long_every", "attention_scale")}
    return found


def unused_of_table(config: RunConfig, name: str) -> dict[str, str]:
    """The same for the options of one table that is on, without `table.NAME.` before them."""
    table, found = getattr(config.table, name), {}
    rule = table.row_rule()
    if not rule.decays_second:
        # beta2_by as well.
        found["beta2"] = f"the rule {table.rule} has none"
    elif max(config.cycle, config.cycle_late) == 1:
        found["beta2_by"] = "every event has one step"
    if not rule.keeps_second:
        found["eps"] = f"the rule {table.rule} has none"
    if not rule.keeps_moment:
        found["momentum"] = f"the rule is {table.rule}"
    if not table.weight_decay:
        found["decay"] = "the weight decay is 0"
    elif table.decay == "none":
        found["weight_decay"] = "the decay is none"
    if table.place != "file":
        found |= {key: f"the place is {table.place}" for key in ("resident_gib", "cached")}
    return found


def refuse_unused(config: RunConfig, preset: RunConfig) -> None:
    """Raise UserError for a flag that would change nothing."""
    given, usual = flat(to_dict(config)), flat(to_dict(preset))
    for start, why in unused(config).items():
        for key in given:
            if key.startswith(start) and given[key] != usual.get(key):
                raise UserError(f"--{flag_of(key)} changes nothing: {why}")


def parse(words: list[str]) -> Options:
    """Options from the command line. Raises SharedError (all processes have the same words) for an unknown preset or
    flag, naming the nearest one."""
    try:
        return _parse(words)
    except UserError as error:
        raise SharedError(str(error)) from error


def _parse(words: list[str]) -> Options:
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
    refuse_unused(options.config, PRESETS[preset])
    if options.resume is None:
        return options
    folder = RunFolder.open(options.resume)
    if named or options.config != PRESETS[preset]:
        folder.require_same(options.config, PRESETS[preset])
    # What changes nothing that is trained may be another than at the start.
    free = {key: getattr(options.config, key) for key in FREE_KEYS if key != "runs_dir"}
    changed = {key: value for key, value in free.items() if value != getattr(PRESETS[preset], key)}
    return Options(replace(folder.config(), **changed), options.resume, options.dry_run)
