"""The one table of which dense parameter is trained how: label, rule, learning rate, betas, decay, split.

Lives here: OptimConfig, PATTERNS (name -> label), groups (label -> values), the optimizers made from them, and the two
orders in which several processes take the labels.
Not here: the rules themselves, the schedule, and rows of memory tables (mome/config.py holds their rules).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch.nn import Parameter
from torch.optim import AdamW

from optim.adam import CautiousAdam
from optim.muon import NorMuon


@dataclass(frozen=True)
class OptimConfig:
    """Base values before the schedule's multiplier; defaults are modded-nanogpt's at record 89 (speedrun track 1)."""

    kind: Literal["muon", "adamw"] = "muon"
    """muon: NorMuon for matrices, cautious Adam for the rest. adamw: AdamW for all, as a plain GPT has it."""
    matrix_lr: float = 0.023
    """NorMuon's learning rate."""
    matrix_weight_decay: float = 1.2
    """NorMuon's cautious decay, times the learning rate squared."""
    matrix_beta2: float = 0.9
    """Decay of NorMuon's mean square of a neuron."""
    adam_lr: float = 0.008
    """Cautious Adam's learning rate."""
    adam_eps: float = 1e-10
    adam_weight_decay: float = 0.005
    """Cautious Adam's decay, times the learning rate squared (and 150 for embedding and head)."""
    embed_lr_mul: float = 1.0
    """Multiplier of adam_lr for the token embedding."""
    head_lr_mul: float = 1.0
    """Multiplier of adam_lr for the head."""
    gate_lr_mul: float = 1.0
    """Multiplier of adam_lr for gates and router biases."""
    scalar_lr_mul: float = 5.0
    """Multiplier of adam_lr for scalars and vectors."""
    smear_lr_mul: float = 0.01
    """Multiplier of adam_lr for the weights of the smear's gate."""
    router_lr_mul: float = 1.0
    """Multiplier of matrix_lr for routers."""
    down_lr_mul: float = 4.0
    """Multiplier of matrix_lr for MLP output matrices: the record's 2, and 2 because it stores them [4D, D]."""
    plain_lr: float = 1e-3
    """AdamW's learning rate (kind adamw)."""
    plain_weight_decay: float = 0.1
    """AdamW's decay of matrices (kind adamw)."""

    def __post_init__(self) -> None:
        if self.kind not in ("muon", "adamw"):
            raise ValueError(f"optim kind is {self.kind}; it must be muon or adamw")
        if not 0 <= self.matrix_beta2 < 1:
            raise ValueError(f"optim matrix_beta2 is {self.matrix_beta2}; it must be from 0 to below 1")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"optim {field.name} is {value}; it must be finite and not negative")


@dataclass(frozen=True)
class Group:
    """The values of a label. betas: (beta1, beta2); NorMuon's beta1 is its momentum, until the schedule sets it.

    lr: before the schedule's multiplier. lr_mul: apart from lr in NorMuon alone, whose decay is lr * (lr * lr_mul).
    weight_decay: times lr^2 where it agrees with the update (adam, normuon), times lr everywhere (adamw).
    split: matrices that lie under each other in one parameter.
    """

    label: str
    rule: Literal["normuon", "adam", "adamw"]
    lr: float
    lr_mul: float
    betas: tuple[float, float]
    weight_decay: float
    split: int = 1


NamedParameters = Iterable[tuple[str, Parameter]]

# Read top down, the first row that fits: what the name begins with; a word that stands in it, whole between dots and
# underscores; fewest dimensions (a parameter of one number counts as having none); label.
PATTERNS: tuple[tuple[str, str, int, str], ...] = (
    ("",        "router_bias",                                      0, "gates"),
    ("",        "scale|scales|lambda|lambdas|lam|lams|bias|biases", 0, "scalars"),
    ("",        "smear",                                            1, "smear"),
    ("",        "gate|gates",                                       0, "gates"),
    ("",        "router|routers",                                   2, "router"),
    ("embed",   "embed",                                            2, "embed"),
    ("head",    "head",                                             2, "head"),
    ("blocks.", "qkv",                                              2, "qkv"),
    ("blocks.", "down",                                             2, "down"),
    ("blocks.", "attn_out|up",                                      2, "matrix"),
)  # fmt: skip

# Several processes (mome/dense.py), both kinds. The gradients of most bytes set out first.
SCATTER_ORDER = (
    "head", "embed", "decayed", "matrix", "down", "qkv", "router", "undecayed", "gates", "smear", "scalars",
)  # fmt: skip
# Least work first: the weights of one label travel while those after it are still being worked on.
WORK_ORDER = (
    "scalars", "smear", "gates", "undecayed", "head", "embed", "decayed", "router", "qkv", "down", "matrix",
)  # fmt: skip


def groups(config: OptimConfig) -> tuple[Group, ...]:
    """The table. betas, lr and decay multipliers of modded-nanogpt's parameter table where it has the parameter."""
    c = config
    if c.kind == "adamw":
        return (
            Group("decayed", "adamw", c.plain_lr, 1.0, (0.9, 0.95), c.plain_weight_decay),
            Group("undecayed", "adamw", c.plain_lr, 1.0, (0.9, 0.95), 0.0),
        )
    muon, decay = (0.95, c.matrix_beta2), c.matrix_weight_decay
    adam, adam_decay, slow = c.adam_lr, c.adam_weight_decay, (0.9, 0.99)
    return (
        #     label      rule       lr                      lr_mul           betas        weight_decay      split
        Group("qkv",     "normuon", c.matrix_lr,            1.0,             muon,        decay,            3),
        Group("matrix",  "normuon", c.matrix_lr,            1.0,             muon,        decay),
        Group("down",    "normuon", c.matrix_lr,            c.down_lr_mul,   muon,        decay),
        Group("router",  "normuon", c.matrix_lr,            c.router_lr_mul, muon,        decay),
        Group("embed",   "adam",    adam * c.embed_lr_mul,  1.0,             (0.5, 0.95), 150 * adam_decay),
        Group("head",    "adam",    adam * c.head_lr_mul,   1.0,             (0.5, 0.95), 150 * adam_decay),
        Group("gates",   "adam",    adam * c.gate_lr_mul,   1.0,             slow,        adam_decay),
        Group("smear",   "adam",    adam * c.smear_lr_mul,  1.0,             slow,        0.0),
        Group("scalars", "adam",    adam * c.scalar_lr_mul, 1.0,             slow,        0.0),
    )  # fmt: skip


def in_order(order: Sequence[str], config: OptimConfig) -> tuple[str, ...]:
    """The labels of a kind as SCATTER_ORDER or WORK_ORDER has them; asserts that it names each of them exactly once."""
    labels = {group.label for group in groups(config)}
    found = tuple(label for label in order if label in labels)
    assert len(found) == len(labels) == len(set(found)), f"{order} must name each of {sorted(labels)} exactly once"
    return found


def label_of(name: str, parameter: torch.Tensor, config: OptimConfig) -> str:
    """The label of a parameter, by its name and its number of dimensions.

    For kind adamw as GPT-2 is trained: decayed from two dimensions on, else undecayed. Raises ValueError, naming the
    parameter, when no row of PATTERNS fits.
    """
    dims = 0 if parameter.numel() == 1 else parameter.ndim
    if config.kind == "adamw":
        return "decayed" if dims >= 2 else "undecayed"
    for start, words, least, label in PATTERNS:
        if dims >= least and name.startswith(start) and re.search(rf"(?:^|[._])(?:{words})(?:$|[._])", name):
            return label
    if dims <= 1:
        return "scalars"
    shape = tuple(parameter.shape)
    raise ValueError(f"parameter {name} of shape {shape} has no label; add a row to PATTERNS in optim/groups.py")


def assign(named_parameters: NamedParameters, config: OptimConfig) -> dict[str, list[tuple[str, Parameter]]]:
    """Label -> its (name, parameter) pairs, in the order of the table and the model; labels without any are left out.

    Raises ValueError for a parameter without a label, and for one that comes twice, by name or as the same tensor.
    """
    members: dict[str, list[tuple[str, Parameter]]] = {group.label: [] for group in groups(config)}
    names: set[str] = set()
    owners: dict[int, str] = {}
    for name, parameter in named_parameters:
        if name in names:
            raise ValueError(f"parameter {name} is listed twice; an optimizer would step it twice")
        if id(parameter) in owners:
            raise ValueError(f"parameter {name} is {owners[id(parameter)]} again; list a shared parameter once")
        names.add(name)
        owners[id(parameter)] = name
        members[label_of(name, parameter, config)].append((name, parameter))
    return {label: pairs for label, pairs in members.items() if pairs}


def build_optimizers(named_parameters: NamedParameters, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """One optimizer for each rule that has parameters, in the order of the table; a parameter group for each label.

    A parameter group carries its "label". Raises ValueError as `assign` does.
    """
    members = assign(named_parameters, config)
    by_rule: dict[str, list[dict]] = {}
    for group in groups(config):
        if group.label in members:
            params = [parameter for _, parameter in members[group.label]]
            by_rule.setdefault(group.rule, []).append(_param_group(group, params))
    return [_make(rule, param_groups, config) for rule, param_groups in by_rule.items()]


def build_optimizer(group: Group, params: Sequence[Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of one label alone, with every state there from the start (see first_state)."""
    optimizer = _make(group.rule, [_param_group(group, params)], config)
    for parameter in params:
        optimizer.state[parameter] = first_state(parameter, group)
    return optimizer


def first_state(parameter: torch.Tensor, group: Group) -> dict[str, torch.Tensor]:
    """The state of a parameter before its first step, all zeros, on its device: what its rule would make then.

    adam, adamw: two moments, and a float32 count of steps. normuon: the momentum, and a mean square [matrices, rows, 1]
    for each row, or [matrices, 1, cols] for each column of a matrix, whichever are more.
    """
    if group.rule == "normuon":
        rows, cols = parameter.shape[-2] // group.split, parameter.shape[-1]
        shape = (rows, 1) if rows >= cols else (1, cols)
        variance = parameter.new_zeros(parameter.numel() // (rows * cols), *shape)
        return {"momentum": torch.zeros_like(parameter, requires_grad=False), "variance": variance}
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    moments = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": step} | moments


def _make(rule: str, param_groups: list[dict], config: OptimConfig) -> torch.optim.Optimizer:
    if rule == "normuon":
        return NorMuon(param_groups)
    return CautiousAdam(param_groups, eps=config.adam_eps) if rule == "adam" else AdamW(param_groups, fused=True)


def _param_group(group: Group, params: Sequence[Parameter]) -> dict:
    return {"params": list(params), "label": group.label, "lr": group.lr} | _values(group)


def _values(group: Group) -> dict:
    """A group in the words of its optimizer, apart from lr."""
    if group.rule == "normuon":
        momentum, beta2 = group.betas
        return {
            "lr_mul": group.lr_mul, "momentum": momentum, "beta2": beta2, "weight_decay": group.weight_decay,
            "split": group.split,
        }  # fmt: skip
    plain = group.rule == "adamw"
    decay = {"weight_decay": group.weight_decay} if plain else {"cautious_decay": group.weight_decay}
    return {"betas": group.betas} | decay


def set_schedule(
    optimizers: Iterable[torch.optim.Optimizer], config: OptimConfig, *, lr_mul: float, momentum: float
) -> None:
    """Before a step: every group's lr = its base value * lr_mul, and Muon's momentum. AdamW's betas stay."""
    base = {group.label: group.lr for group in groups(config)}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = base[group["label"]] * lr_mul
            if "momentum" in group:
                group["momentum"] = momentum


def state_bytes(named_parameters: NamedParameters, config: OptimConfig) -> int:
    """Bytes of the optimizers' state. Parameters may be on meta."""
    by_label = {group.label: group for group in groups(config)}
    members = assign(named_parameters, config)
    states = [
        first_state(parameter.detach().to("meta"), by_label[label])
        for label, pairs in members.items() for _, parameter in pairs
    ]  # fmt: skip
    return sum(one.nbytes for state in states for one in state.values())


def describe(named_parameters: NamedParameters, config: OptimConfig) -> str:
    """The table with what falls into it, as text: a line a label and one for the sum. Parameters may be on meta."""
    members = assign(named_parameters, config)
    lines = [("group", "rule", "tensors", "parameters", "lr", "lr mul", "betas", "decay", "split")]
    for group in groups(config):
        pairs = members.get(group.label, [])
        if pairs:
            count = sum(parameter.numel() for _, parameter in pairs)
            lines.append((
                group.label, group.rule, str(len(pairs)), f"{count:,}", f"{group.lr:g}", f"{group.lr_mul:g}",
                "{:g} {:g}".format(*group.betas), f"{group.weight_decay:g}", str(group.split),
            ))  # fmt: skip
    pairs = [pair for one in members.values() for pair in one]
    lines.append(("all", "", str(len(pairs)), f"{sum(parameter.numel() for _, parameter in pairs):,}", *[""] * 5))
    return aligned(lines, left=2)


def aligned(lines: Sequence[Sequence[str]], left: int) -> str:
    """Lines of cells as columns of text: the first `left` columns begin, the others end below each other."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            f"{cell:{'<' if k < left else '>'}{width}}" for k, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )
