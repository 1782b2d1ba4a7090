"""What a run is, as data: frozen dataclasses, JSON in and out, validation.

Lives here: RunConfig and the pieces that no other room owns, and the strict reading of a saved configuration.
Not here: the presets (mome/presets.py), the command line (mome/command.py), and what the values do.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mome.errors import UserError
from mome.gpt import ModelConfig
from mome.memory import MEMORIES
from optim.groups import OptimConfig
from optim.rows import RowRule
from optim.schedule import Cadence, Schedule, Stage


def require(condition: bool, flag: str, value: Any, remedy: str) -> None:
    """Raise the one-line error of a value out of range."""
    if not condition:
        raise UserError(f"--{flag} {value}: {remedy}")


@dataclass(frozen=True)
class TableConfig:
    """How the rows of one memory's table are trained."""

    rule: Literal["adam", "adagrad", "sgd", "momentum", "factored"] = "adam"
    """Row rule: row-wise Adam with beta1 = 0, row-wise Adagrad, SGD, SGD with momentum, or Adam with beta1 = 0 whose
    second moment is a number a lane times a number a column."""
    lr: float = 0.05
    """Learning rate before the schedule's multiplier."""
    beta2: float = 0.98
    """Decay of the second moment (adam and factored)."""
    beta2_by: Literal["event", "step"] = "event"
    """What beta2 counts: events, or steps, so that an event of n steps decays by beta2 to the power n."""
    eps: float = 1e-10
    momentum: float = 0.9
    """Of the rule momentum, an event."""
    weight_decay: float = 0.0
    """Decoupled decay."""
    decay: Literal["none", "touched", "gated", "retroactive", "gated-retroactive"] = "retroactive"
    """What decays at an event: nothing; the rows it touches; of those (gated) the numbers that it moves towards 0; all
    rows, untouched ones exactly, when they are next read; all (gated) but the numbers that it moves away from 0."""
    format: Literal["fp32", "bf16", "bf16+16", "fp8"] = "fp32"
    """How rows are kept: bf16 and fp8 (e4m3, a scale a lane) round stochastically; bf16+16 is fp32 in two parts."""
    place: Literal["device", "host", "file"] = "device"
    """Where rows are kept: with the model, in host memory, or with their state in sparse files of the run's folder."""
    resident_gib: float = 1.0
    """GiB of a file that may be mapped into memory; larger files are read by system calls (place file; 0: all are)."""
    cached: bool = True
    """Whether the system may keep the files in its cache; if not, they are written back and dropped (place file)."""
    placement: Literal["cyclic", "contiguous", "balanced"] = "cyclic"
    """Which of several processes owns a row: row modulo ranks (cyclic), ranges (contiguous), or small ranges that a
    beginning of the data loads alike (balanced); records/plan has what each is worth."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """How rows and their gradients travel between processes; bf16 rounds both to nearest."""

    def __post_init__(self):
        require(0 <= self.lr < math.inf, "table.NAME.lr", self.lr, "a learning rate is 0 or more, and finite")
        require(0 < self.beta2 < 1, "table.NAME.beta2", self.beta2, "beta2 lies between 0 and 1")
        require(1e-30 <= self.eps < math.inf, "table.NAME.eps", self.eps, "eps is above 0, 1e-30 at least, and finite")
        require(0 <= self.momentum < 1, "table.NAME.momentum", self.momentum, "a momentum is 0 or more, and below 1")
        decay = self.weight_decay
        require(0 <= decay < math.inf, "table.NAME.weight-decay", decay, "a decay is 0 or more, and finite")
        moves = self.rule == "momentum" and self.decay.startswith("gated")
        require(not moves, "table.NAME.decay", self.decay, "momentum moves untouched rows; take touched or retroactive")
        room = self.resident_gib
        require(0 <= room < math.inf, "table.NAME.resident-gib", room, "give 0 GiB or more, and finite")

    def row_rule(self) -> RowRule:
        return RowRule(
            kind=self.rule, beta2=self.beta2, eps=self.eps, momentum=self.momentum, decay=self.decay,
            weight_decay=0.0 if self.decay == "none" else self.weight_decay,
        )  # fmt: skip

    def event_beta2(self, steps: int) -> float:
        """beta2 of an event of so many steps."""
        return self.beta2**steps if self.beta2_by == "step" else self.beta2


@dataclass(frozen=True)
class ScheduleConfig:
    """Batch, windows, learning rate and momentum over the steps of a run."""

    stages: tuple[Stage, ...] = (Stage(share=1.0, rows=8, windows=(128, 256)),)
    """Parts of the run in order; their number is the preset's."""
    cooldown: float = 0.5
    """Share of the steps over which the learning rate goes down to `floor`."""
    floor: float = 0.1
    """Learning rate multiplier at the end."""
    warmup: float = 0.0
    """Share of the steps over which the learning rate goes up from 0."""
    shape: Literal["linear", "cosine"] = "linear"
    """Form of the cooldown."""
    momentum: tuple[float, float] = (0.85, 0.95)
    """Muon momentum: at the start (and at the end), and between."""
    momentum_warmup: float = 0.2
    """Share of the steps from the first momentum to the second."""
    momentum_cooldown: float = 0.04
    """Share of the steps back to the first momentum at the end."""

    def __post_init__(self):
        for name in ("cooldown", "floor", "warmup", "momentum_warmup", "momentum_cooldown"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"schedule.{flag_of(name)}", value, "a share lies between 0 and 1")


MemoryConfigs = dataclasses.make_dataclass(
    "MemoryConfigs",
    [(name, memory.Config, field(default_factory=memory.Config)) for name, memory in MEMORIES.items()],
    frozen=True,
)
MemoryConfigs.__doc__ = "The configuration of each memory in the registry."
TableConfigs = dataclasses.make_dataclass(
    "TableConfigs", [(name, TableConfig, field(default_factory=TableConfig)) for name in MEMORIES], frozen=True
)
TableConfigs.__doc__ = "How the rows of each memory in the registry are trained."


@dataclass(frozen=True)
class RunConfig:
    """A run: with the data, the device and the number of threads it determines the result."""

    preset: Annotated[str, tyro.conf.Suppress] = ""
    steps: int = 200
    """Optimizer steps. A shorter run is a whole run: the schedule scales with it."""
    seed: int = 0
    """Of the initial weights, the tables and the order of the data."""
    memories: tuple[str, ...] = ()
    """Which memories are on: any of routed, ngram, value; none: the flag alone."""
    tokenizer: str = "local"
    """local (the built-in corpus), gpt2, or a tokenizer.json made by data.tokenize."""
    train_glob: str = ""
    """Training shards (.bin); empty: the built-in corpus."""
    val_glob: str = ""
    """Validation shards (.bin); empty: the built-in corpus."""
    row_tokens: int = 512
    """Tokens of a packed micro-row."""
    micro_batch: int = 8
    """Micro-rows in one forward pass; a step accumulates over as many passes as it needs."""
    cycle: int = 1
    """Steps that share one working set; tables are updated at its end. A stage ends a cycle."""
    cycle_late: int = 0
    """The same for the later part of the run (0: no such part)."""
    cycle_late_from: float = 0.25
    """Share of the steps before that part."""
    row_clip: float = 0.0
    """Largest norm of an event's gradients of all tables together, beyond which they are scaled down to it (0: any)."""
    prefetch: int = 1
    """Cycles whose rows are read ahead in a thread (0: none); the result is the same bit for bit."""
    tails: Literal["keep", "drop"] = "keep"
    """What is past the document cap: trained on as a document of its own, or dropped (the speedrun's rule)."""
    shuffle: bool = True
    """Documents in an order drawn from the seed, or in file order."""
    on_exhausted: Literal["repeat", "stop"] = "repeat"
    """At the end of the data: the next epoch, or stop."""
    val_every: int = 50
    """Steps between validations (0: only at the end)."""
    val_rows: int = 64
    """Rows of the validations on the way, evenly spread over the shards."""
    final_val_rows: int = 0
    """Rows of the last validation (0: all)."""
    save_every: int = 100
    """Steps between checkpoints (0: only at the end)."""
    paranoid: int = 0
    """Steps between comparisons of all dense weights between processes, bit for bit (0: never)."""
    timeout: float = 600.0
    """Seconds that a process may keep the others waiting before all are ended."""
    sample_tokens: int = 64
    """Length of the sample at the end (0: none)."""
    runs_dir: Path = Path("runs")
    """Where the run's folder is made."""
    model: ModelConfig = field(default_factory=ModelConfig)
    memory: MemoryConfigs = field(default_factory=MemoryConfigs)
    table: TableConfigs = field(default_factory=TableConfigs)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self):
        for name in ("steps", "row_tokens", "micro_batch", "cycle"):
            require(getattr(self, name) >= 1, flag_of(name), getattr(self, name), "give a whole number of 1 or more")
        counts = ("seed", "val_every", "val_rows", "final_val_rows", "save_every", "sample_tokens", "prefetch")
        for name in (*counts, "cycle_late", "paranoid"):
            require(getattr(self, name) >= 0, flag_of(name), getattr(self, name), "give a whole number of 0 or more")
        require(self.val_rows >= 1, "val-rows", self.val_rows, "give a whole number of 1 or more")
        require(1 <= self.timeout < math.inf, "timeout", self.timeout, "give 1 second or more")
        share = self.cycle_late_from
        require(0 < share < 1, "cycle-late-from", share, "a share above 0 and below 1; --cycle alone is for all steps")
        require(0 <= self.row_clip < math.inf, "row-clip", self.row_clip, "a norm is 0 or more (0: any), and finite")
        for name in self.memories:
            if name not in MEMORIES:
                raise UserError(
                    f"--memories {name}: no such memory{nearest(name, MEMORIES)}; there are {', '.join(MEMORIES)}"
                )
        require(len(set(self.memories)) == len(self.memories), "memories", self.memories, "name each memory once")
        if self.model.kind == "plain":
            require(not self.memories, "memories", self.memories, "the plain model has no plug points for a memory")
            require(self.optim.kind == "adamw", "optim.kind", self.optim.kind, "the plain model takes adamw")
        require(self.seed < 2**63, "seed", self.seed, "give a whole number below 2**63")
        require(
            self.row_tokens <= self.model.max_tokens,
            "row-tokens",
            self.row_tokens,
            f"the model takes at most {self.model.max_tokens} tokens; raise --model.max-tokens",
        )
        peak = max(self.schedule.floor, *(stage.lr_mul for stage in self.schedule.stages))
        for name in self.memories:
            table = getattr(self.table, name)
            wiped = peak * table.lr * table.row_rule().weight_decay
            require(
                wiped < 1, f"table.{name}.weight-decay", table.weight_decay,
                f"times the highest learning rate it is {wiped:.3g}, and 1 wipes out every row; lower one of them",
            )  # fmt: skip
        if bool(self.train_glob) != bool(self.val_glob):
            raise UserError("--train-glob and --val-glob go together: give both, or neither for the built-in corpus")

    def make_schedule(self) -> Schedule:
        """The schedule over this run's steps."""
        plan = self.schedule
        return Schedule(
            plan.stages, self.steps, self.row_tokens, cooldown_share=plan.cooldown, floor=plan.floor,
            warmup_steps=round(plan.warmup * self.steps), kind=plan.shape,
            momentum=(
                *plan.momentum, round(plan.momentum_warmup * self.steps), round(plan.momentum_cooldown * self.steps)
            ),
        )  # fmt: skip

    def make_cadence(self) -> Cadence:
        """Which steps of this run share a working set."""
        switch = math.floor(self.steps * self.cycle_late_from + 0.5)
        return Cadence(self.make_schedule(), self.cycle, self.cycle_late, switch)


def flag_of(name: str) -> str:
    return name.replace("_", "-")


def nearest(word: str, known) -> str:
    """' (did you mean X?)' for the known word nearest to this one, or nothing."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]}?)" if match else ""


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_dict(kind: type, values: dict[str, Any], where: str = "") -> Any:
    """A dataclass from plain JSON values; an unknown key is refused with the nearest known one."""
    hints = typing.get_type_hints(kind)
    unknown = [key for key in values if key not in hints]
    if unknown:
        raise UserError(f"config: unknown key {where}{unknown[0]}{nearest(unknown[0], hints)}")
    return kind(**{key: _typed(hints[key], value, f"{where}{key}.") for key, value in values.items()})


def _typed(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(hint, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        # A union's first member that takes the value: tuples before text, as JSON tells the two apart.
        fits = [arm for arm in args if (typing.get_origin(arm) is tuple) == isinstance(value, list)]
        return _typed(fits[0], value, where) if fits else value
    if origin is tuple:
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(_typed(one, item, where) for one, item in zip(kinds, value, strict=True))
    return Path(value) if hint is Path else value


def flat(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """A saved configuration with dotted keys, 'model.width'."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{where}{key}.") if isinstance(value, dict) else {where + key: value}
    return out


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Lines 'key: a -> b' for what differs between two saved configurations."""
    a, b = flat(one), flat(other)
    return [f"{key}: {a.get(key)} -> {b.get(key)}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
