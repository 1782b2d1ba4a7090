"""What a GPU has to hold, by kind, whether that fits, and what would make it fit.

Lives here: bytes by kind of one rank, the estimate of activations, remedies, the released dense path beside ours.
Not here: how many rows a rank reads (traffic.py), and what a table keeps of a row (mome/table/spec.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from mome.config import RunConfig
from mome.dense import part_of, share_out
from mome.memory import Memory
from mome.run import build_model
from mome.table.formats import row_format
from mome.table.placement import Placement
from mome.table.spec import bytes_by_kind, kept
from mome.tools.plan.links import Node
from mome.tools.plan.traffic import WIRE_BYTES, Flow
from optim.groups import state_bytes

FLOAT = 4
SIZES = tuple(2**power for power in range(21))


@dataclass(frozen=True)
class TableUse:
    """The most that a rank has of a table in a cycle: distinct rows that it reads (needs), those of them that are its
    own, rows it owns and anybody reads (touches), rows that it sends (serves), rows that it owns at all."""

    needs: int
    own: int
    touches: int
    serves: int
    owns: int

    @staticmethod
    def of(flow: Flow, placement: Placement) -> TableUse:
        return TableUse(
            int(flow.needed_SW.sum(1).max()), int(flow.own_S.max()), int(flow.touched_W.max()),
            round(float(flow.served_W.max()) * flow.scale), largest_part(placement),
        )  # fmt: skip

    def largest(self, other: TableUse) -> TableUse:
        """Of both the larger, number by number."""
        return TableUse(*(max(pair) for pair in zip(vars(self).values(), vars(other).values())))


def largest_part(placement: Placement) -> int:
    """Rows of the rank that owns the most of them."""
    if placement.kind != "balanced":
        # Ranges, and remainders, are longest on rank 0.
        return placement.rows_of(0)
    return max(placement.rows_of(rank) for rank in range(placement.size))


def meta_model(config: RunConfig, vocab_size: int) -> tuple[nn.Module, dict[str, Memory]]:
    """The model without its numbers."""
    with torch.device("meta"):
        return build_model(config, vocab_size, bos=0)


def dense_memory(config: RunConfig, model: nn.Module, size: int) -> dict[str, int]:
    """Bytes of the dense parameters on the rank that has the most of them, in float32 (mome/dense.py).

    Weights and gradients are whole on every rank. What travels has buffers of its own, in which each rank's part of a
    label is as long as the longest: `size` parts, one more for the sums, and all that is replicated. State is where its
    parameter is updated.
    """
    named, buffers = dict(model.named_parameters()), 0
    for label in share_out(named.items(), config.optim, size).values() if size > 1 else ():
        replicated = sum(share.numel for share in label.values() if share.way == "replicated")
        buffers += ((size + 1) * part_of(label) + replicated) * FLOAT
    weights = sum(parameter.nbytes for parameter in named.values())
    return {
        "dense weights": weights, "dense gradients": weights, "dense buffers": buffers,
        "dense optimizer state": max(state for _, state in updated_bytes(config, model, size)),
    }  # fmt: skip


def updated_bytes(config: RunConfig, model: nn.Module, size: int) -> list[tuple[int, int]]:
    """Of each rank the bytes of the dense weights that it updates, in float32, and of their state."""
    named = dict(model.named_parameters())
    weights, state = [0] * size, [0] * size
    for label in share_out(named.items(), config.optim, size).values():
        for name, share in label.items():
            held = state_bytes([(name, named[name])], config.optim)
            for rank in (share.owner,) if share.way == "whole" else range(size):
                # The last slices are shorter, or empty.
                weights[rank] += share.length * FLOAT
                state[rank] += held * share.length // share.numel
    return list(zip(weights, state))


def table_memory(config: RunConfig, name: str, memory: Memory, use: TableUse, size: int, tokens: int) -> dict[str, int]:
    """Bytes of a table on the rank that has the most. tokens: that a rank reads for in a cycle.

    The working set is what a cycle needs beside the table: the rows that a rank reads, and those that it owns and
    anybody reads, each with a gradient in float32, state, buffers of the wire, slots, and the rows read ahead.
    """
    own, spec, rule = getattr(config.table, name), memory.spec, getattr(config.table, name).row_rule()
    numbers = spec.lanes * spec.dim
    kinds = bytes_by_kind(replace(spec, rows=max(1, use.owns)), rule, own.format)
    codes = row_format(own.format).planes(spec.lanes, spec.dim)
    whole = {
        key: torch.Size(tail).numel() * kind.itemsize for key, (tail, kind) in kept(spec, rule, own.format).items()
    }
    inside, code = sum(kinds[key] for key in codes), sum(whole[key] for key in codes)
    # A row and its gradient; in the format fp32 a row is its own code.
    a_row = 2 * numbers * FLOAT
    owner = use.touches * (a_row + sum(whole.values()) - (code if own.format == "fp32" else 0))
    here = 0
    if size > 1:
        wire = numbers * WIRE_BYTES[own.wire]
        merged, travelling = (use.serves + use.own) * numbers * FLOAT, 2 * max(use.needs - use.own, use.serves) * wire
        here = use.needs * a_row + merged + travelling
    ahead = config.prefetch * use.touches * sum(whole.values())
    slots = (1 + config.prefetch) * tokens * memory.reads * 8
    state = {f"table state, {key.replace('_', ' ')}": kinds[key] for key in kinds if key not in codes}
    return {"table rows": inside} | state | {"working set": owner + here + ahead + slots}


def activation_bytes(config: RunConfig, memories: Mapping[str, Memory], vocab_size: int, tokens: int, wide: int) -> int:
    """An estimate of what one forward pass of so many tokens keeps for its backward, `wide` bytes a number.

    A block keeps about 12 + 2 mlp_ratio times the width of a token: two norms with their inputs, q, k, v before and
    after the rotation, the attention's result and its projection, the hidden units before and after ReLU^2. Then the
    gathered rows of each memory with what it makes of them (3 x), embedding and head inputs (6 x the width), and the
    head's gradient, which is made in the forward pass in float32.
    """
    model = config.model
    a_token = model.layers * (12 + 2 * model.mlp_ratio) * model.width + 6 * model.width
    a_token += sum(3 * memory.reads * memory.spec.lanes * memory.spec.dim for memory in memories.values())
    return tokens * a_token * wide + vocab_size * model.width * FLOAT


def add(total: dict[str, int], more: Mapping[str, int]) -> dict[str, int]:
    """Sums by key, in place."""
    for key, value in more.items():
        total[key] = total.get(key, 0) + value
    return total


@dataclass(frozen=True)
class Holding:
    """Bytes by kind of the rank that has the most: on the GPU, and in host memory or files for tables placed there."""

    gpu: dict[str, int]
    host: dict[str, int]
    file: dict[str, int]

    def fits(self, node: Node) -> bool:
        """Whether GPU and host memory take it."""
        gpu = sum(self.gpu.values()) <= node.memory - node.kept_free
        return gpu and sum(self.host.values()) <= node.host_memory - node.host_kept_free


def holding(
    config: RunConfig, model: nn.Module, memories: Mapping[str, Memory], uses: Mapping[str, TableUse], size: int,
    rank_tokens: int, pass_tokens: int, vocab_size: int, wide: int = 2,
) -> Holding:  # fmt: skip
    """What a rank holds. rank_tokens: in a cycle; pass_tokens: of one forward pass; wide: bytes of an activation."""
    gpu, elsewhere = dense_memory(config, model, size), {"host": {}, "file": {}}
    for name, memory in memories.items():
        found = table_memory(config, name, memory, uses[name], size, rank_tokens)
        place = getattr(config.table, name).place
        if place != "device":
            add(elsewhere[place], {key: found.pop(key) for key in list(found) if key.startswith("table ")})
        add(gpu, found)
    add(gpu, {"activations (estimate)": activation_bytes(config, memories, vocab_size, pass_tokens, wide)})
    return Holding(gpu, elsewhere["host"], elsewhere["file"])


def remedies(
    config: RunConfig, model: nn.Module, memories: Mapping[str, Memory], uses: Mapping[str, TableUse], size: int,
    node: Node, **rest: int,
) -> list[str]:  # fmt: skip
    """What each remedy alone comes to, a line each, where something does not fit; nothing where all does."""
    whole = holding(config, model, memories, uses, size, **rest)
    if whole.fits(node):
        return []
    room = node.memory - node.kept_free
    over, over_host = sum(whole.gpu.values()) - room, sum(whole.host.values()) - node.host_memory + node.host_kept_free
    said = []
    if over > 0:
        said.append(f"does not fit: {gb(sum(whole.gpu.values()))} a GPU, {gb(over)} more than the {gb(room)} there are")
    if over_host > 0:
        said.append(f"does not fit: {gb(over_host)} more a GPU than its share of the host's memory")

    def tried(words: str, config: RunConfig, uses: Mapping[str, TableUse] = uses, size: int = size) -> None:
        now = holding(config, model, memories, uses, size, **rest)
        sizes = f"{gb(sum(now.gpu.values()))} a GPU" + (f", {gb(sum(now.host.values()))} host" if now.host else "")
        said.append(f"{words}: {sizes}, {'fits' if now.fits(node) else 'still too much'}")

    def tables(**changes: str) -> RunConfig:
        changed = {name: replace(getattr(config.table, name), **changes) for name in memories}
        return replace(config, table=replace(config.table, **changed))

    if memories:
        tried("fp8 rows (--table.NAME.format fp8)", tables(format="fp8"))
        tried("rows in host memory (--table.NAME.place host)", tables(place="host"))
        tried("rows in files (--table.NAME.place file)", tables(place="file"))
        fewer = fewest_cut(lambda uses: holding(config, model, memories, uses, size, **rest).fits(node), uses)
        if fewer is None:
            said.append("fewer rows: no number of them would fit")
        else:
            said.append(f"fewer rows: 1/{fewer} of them fit, if a cycle touches as many")
    more = fewest_ranks(config, model, memories, uses, size, node, **rest)
    said.append(f"{more} GPUs would fit, with as many tokens each" if more else "no number of GPUs would fit")
    if any(getattr(config.table, name).wire == "fp32" for name in memories) and size > 1:
        tried("bf16 on the wire (--table.NAME.wire bf16)", tables(wire="bf16"))
    if rest["pass_tokens"] > config.row_tokens:
        one = rest | {"pass_tokens": config.row_tokens}
        now = holding(config, model, memories, uses, size, **one)
        fits = "fits" if now.fits(node) else "still too much"
        said.append(f"--micro-batch 1: {gb(sum(now.gpu.values()))} a GPU, {fits}")
    return said


def fewest_cut(fits, uses: Mapping[str, TableUse]) -> int | None:
    """The smallest power of two by which rows must be divided, all tables alike; None: none is enough."""
    for part in SIZES[1:]:
        if fits({name: replace(use, owns=-(-use.owns // part)) for name, use in uses.items()}):
            return part
    return None


def fewest_ranks(
    config: RunConfig, model: nn.Module, memories: Mapping[str, Memory], uses: Mapping[str, TableUse], size: int,
    node: Node, **rest: int,
) -> int | None:  # fmt: skip
    """The smallest power of two of GPUs, more than now, on which it fits; what a rank reads
    stays as it is, and what it owns becomes less. None: none up to 2**20."""
    for more in SIZES:
        if more > size:
            spread = {name: replace(use, owns=-(-use.owns * size // more)) for name, use in uses.items()}
            if holding(config, model, memories, spread, more, **rest).fits(node):
                return more
    return None


@dataclass(frozen=True)
class Scheme:
    """Bytes a GPU of one way to train a table: weights, gradients, state, and what it sends a cycle."""

    name: str
    weights: int
    gradients: int
    state: int
    traffic: int


def schemes(config: RunConfig, name: str, memory: Memory, use: TableUse, size: int, sent: float) -> list[Scheme]:
    """The dense path of MoME's released code beside this table: a replica a GPU, a dense gradient, AdamW's state in
    slices, everything reduced and gathered every step (of P numbers: weights 2 P, gradients 2 P, state 4 P / ranks, and
    4 P sent in bf16; twice that in fp32). sent: bytes that this table's exchange sends a rank and cycle."""
    spec = memory.spec
    numbers = spec.rows * spec.lanes * spec.dim
    found = [
        Scheme(f"released, {kind}", wide * numbers, wide * numbers, 2 * wide * numbers // size, 2 * wide * numbers)
        for kind, wide in (("bf16", 2), ("fp32", 4))
    ]
    own = getattr(config.table, name)
    ours = table_memory(config, name, memory, use, size, 0)
    state = sum(size for key, size in ours.items() if key.startswith("table state"))
    gradients = use.touches * spec.lanes * spec.dim * FLOAT
    if size > 1:
        gradients += use.needs * spec.lanes * spec.dim * FLOAT
    return [*found, Scheme(f"this, {own.format}", ours["table rows"], gradients, state, round(sent))]


def capacity(memory: Memory, rank_tokens: int) -> int:
    """The most rows that a rank can read in a cycle of so many tokens, whatever they are: what a cache has room for."""
    return min(memory.spec.rows, memory.reads * rank_tokens)


def gb(count: float) -> str:
    """Bytes as people write them, three digits; a GB is 10^9."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.4g} {unit}" if count >= 100 * size else f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
