"""python -m mome plan PRESET ...: memory, traffic and step time of a configuration on H100 nodes, before it is run.

Lives here: the command, its options, the files it writes.
Not here: what is counted (counted.py and the modules that it uses), many numbers of ranks (ranks.py), text (report.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mome.command import DEFAULT, refuse_unused
from mome.config import RunConfig, nearest, require, to_dict
from mome.errors import UserError
from mome.files import write_atomic, write_json
from mome.options import parse as options_from
from mome.presets import PRESETS
from mome.tools.bench.output import require_place
from mome.tools.plan.counted import Plan, make_plan, shape_of
from mome.tools.plan.links import Node
from mome.tools.plan.ranks import lines_of, record
from mome.tools.plan.report import Section, head_of, markdown, rank_sections, sections_of, show
from mome.tools.plan.stream import Tokens, make_memories, open_tokens
from mome.tools.plan.traffic import WIRE_BYTES


@dataclass(frozen=True)
class Options:
    """What a configuration needs on H100 nodes, counted from the ids of a real token stream: memory by kind, bytes on
    the wire, owners' loads, predicted step time, what does not fit and what would make it fit. Trains nothing."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    gpus: int = 8
    """GPUs, one process each."""
    rank_rows: int = 0
    """Micro-rows a GPU and step (0: those of the preset's heaviest step shared out, one at least; with --ranks all of
    them on each)."""
    tokens_from: tuple[str, ...] = ()
    """Shards (.bin) whose ids are counted; none: those the configuration trains on."""
    ranks: tuple[int, ...] = ()
    """Instead of a plan: dense against sparse bytes and owners' loads at these numbers of ranks."""
    counted_cycles: int = 2
    """Cycles that are counted."""
    most_tokens: int = 1 << 23
    """Tokens of a cycle beyond which only its first ranks are counted."""
    activations: Literal["bf16", "fp32"] = "bf16"
    """Dtype of activations: bf16 as on GPUs, fp32 as on the CPU."""
    json: Path | None = None
    """Write the numbers to this file."""
    markdown: Path | None = None
    """Write the tables to this file."""

    def __post_init__(self):
        for name in ("gpus", "counted_cycles", "most_tokens"):
            require(getattr(self, name) >= 1, name.replace("_", "-"), getattr(self, name), "give 1 or more")
        require(self.rank_rows >= 0, "rank-rows", self.rank_rows, "give 0 or more")
        for size in self.ranks:
            require(size >= 1, "ranks", size, "give numbers of 1 or more")


def options_of(words: Sequence[str]) -> Options:
    """Options from the command line, with the trainer's flags over a preset. Raises UserError."""
    named = bool(words) and not words[0].startswith("-")
    preset = words[0] if named else DEFAULT
    if preset not in PRESETS:
        raise UserError(f"{preset}: no such preset{nearest(preset, PRESETS)}; there are {', '.join(PRESETS)}")
    flags = words[1:] if named else words
    options = options_from(Options, flags, f"python -m mome plan {preset}", default=Options(PRESETS[preset]))
    refuse_unused(options.config, PRESETS[preset])
    return options


def main(words: Sequence[str]) -> int:
    """The command. Errors: UserError, DataError, ValueError, OSError."""
    options = options_of(words)
    for path in (options.json, options.markdown):
        require_place(path)
    tokens = open_tokens(options.config, options.tokens_from)
    if options.ranks:
        title, sections, numbers = many(options, tokens)
    else:
        title, sections, numbers = one(options, tokens)
    print(title)
    show(sections)
    if options.json:
        write_json(options.json, numbers)
        print(options.json)
    if options.markdown:
        write_atomic(options.markdown, markdown(title, command_of(words), sections))
        print(options.markdown)
    return 0


def one(options: Options, tokens: Tokens) -> tuple[str, list[Section], dict[str, Any]]:
    """A plan: its title, its text, its numbers."""
    node = Node()
    plan = make_plan(
        options.config, tokens, options.gpus, rank_rows=options.rank_rows, cycles=options.counted_cycles,
        most_tokens=options.most_tokens, node=node, wide=WIRE_BYTES[options.activations],
    )  # fmt: skip
    return head_of(plan), sections_of(plan, node), numbers_of(plan) | {"node": asdict(node)}


def many(options: Options, tokens: Tokens) -> tuple[str, list[Section], dict[str, Any]]:
    """The table of many numbers of ranks: its title, its text, its numbers."""
    config = options.config
    if not config.memories:
        raise UserError(f"preset {config.preset} has no memory, and so no rows to send: --memories switches some on")
    shape, _ = shape_of(config, 1, options.rank_rows)
    lines = lines_of(
        config, tokens, make_memories(config, tokens.tokenizer), shape, options.ranks, cycles=options.counted_cycles,
        most_tokens=options.most_tokens, node=Node(), say=print,
    )  # fmt: skip
    title = (
        f"{config.preset}: {shape.rank_tokens:,} tokens a rank and cycle, at {len(options.ranks)} numbers of ranks, "
        f"from {tokens.count:,} tokens of {tokens.name}"
    )
    numbers = {"config": to_dict(config), "shape": asdict(shape), "tokens": tokens.count, "name": tokens.name}
    return title, rank_sections(lines), numbers | {"lines": [record(line) for line in lines]}


def numbers_of(plan: Plan) -> dict[str, Any]:
    """A plan as plain numbers."""
    found = {
        name: value for name, value in vars(plan).items() if name not in ("config", "tables", "memory", "shape", "now",
                                                                          "step")
    }  # fmt: skip
    return found | {
        "config": to_dict(plan.config), "shape": asdict(plan.shape), "memory": asdict(plan.memory),
        "step": asdict(plan.step) | {"apart": plan.step.apart, "behind": plan.step.behind},
        "tables": {name: asdict(table) for name, table in plan.tables.items()},
    }  # fmt: skip


def command_of(words: Sequence[str]) -> str:
    """What was called, without the folders of its files: they are this machine's."""
    shown = [Path(word).name if "/" in word else word for word in words]
    return shlex.join(["python", "-m", "mome", "plan", *shown])
