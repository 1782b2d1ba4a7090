"""How long a step should take: counted FLOPs and bytes over the stated speeds of a node.

Lives here: the parts of a step in seconds, with nothing hidden behind anything and with everything that can be.
Not here: the speeds (links.py), the bytes on the wire (traffic.py). Nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from mome.config import RunConfig
from mome.dense import share_out, step_bytes
from mome.gpt import count_flops
from mome.memory import Memory
from mome.tools.plan.links import Node
from mome.tools.plan.memory import FLOAT, TableUse, updated_bytes
from mome.tools.plan.stream import Shape
from mome.tools.plan.traffic import Flow, Wire
from optim.groups import groups

# Rounds of an orthogonalization (optim/orthogonalize.py).
ROUNDS = 5


@dataclass(frozen=True)
class Step:
    """Seconds of a step by part: `compute` on the GPU's units and memory, `links` on the wire and on PCIe."""

    compute: dict[str, float]
    links: dict[str, float]

    @property
    def apart(self) -> float:
        """One after the other."""
        return sum(self.compute.values()) + sum(self.links.values())

    @property
    def behind(self) -> float:
        """With all that travels behind the computing, or the other way round."""
        return max(sum(self.compute.values()), sum(self.links.values()))


def orthogonal_flops(config: RunConfig, model: nn.Module, size: int) -> int:
    """FLOPs of orthogonalizing every matrix that the busiest rank updates: ROUNDS times X X^T, its square and a product
    of both, 4 r^2 c + 2 r^3 for r rows and c columns, r <= c (optim/orthogonalize.py; other forms take fewer)."""
    named, by_label = dict(model.named_parameters()), {group.label: group for group in groups(config.optim)}
    flops = [0] * size
    for label, shares in share_out(named.items(), config.optim, size).items():
        for name, share in shares.items() if by_label[label].rule == "normuon" else ():
            r, c = sorted((named[name].shape[-2] // by_label[label].split, named[name].shape[-1]))
            for rank in (share.owner,) if share.way == "whole" else range(size):
                flops[rank] += share.numel // (r * c) * ROUNDS * (4 * r * r * c + 2 * r**3)
    return max(flops)


def step_of(
    config: RunConfig, model: nn.Module, memories: Mapping[str, Memory], uses: Mapping[str, TableUse],
    flows: Mapping[str, Flow], wires: Mapping[str, Wire], size: int, shape: Shape, windows: tuple[int, int],
    vocab_size: int, node: Node,
) -> Step:  # fmt: skip
    """A step of the busiest rank, its share of a cycle's work included."""
    tokens = shape.rank_rows * shape.tokens
    flops = count_flops(config.model, vocab_size, shape.tokens, windows) * tokens
    # Gradients, weights and state of what a rank updates are read, and weights and state written.
    updated = max(3 * own + 2 * held for own, held in updated_bytes(config, model, size))
    compute = {
        "forward and backward": node.math_seconds(flops),
        "orthogonalization": node.math_seconds(orthogonal_flops(config, model, size)),
        "dense update": node.memory_seconds(updated),
    }
    sent = step_bytes(model.named_parameters(), config.optim, size)
    links = {name: node.ring_seconds(moved, size) for name, moved in sent.items()}
    for name, memory in memories.items():
        use, numbers = uses[name], memory.spec.lanes * memory.spec.dim
        # A lookup reads a row and writes it; its gradient is read and added to the set's.
        looked = 5 * tokens * memory.reads * numbers * FLOAT
        compute[f"{name} lookups"] = node.memory_seconds(looked)
        # Rows and gradients of what an owner updates, read and written once, and packed for the wire: once a cycle.
        moved = (4 * use.touches + 3 * (use.needs + use.serves) * (size > 1)) * numbers * FLOAT
        compute[f"{name} rows"] = node.memory_seconds(moved / shape.steps)
        flow, wire = flows[name], wires[name]
        asked = float(flow.remote_S.max())
        served = float(flow.served_W.max()) * flow.scale
        parts = {
            "counts": node.spread_seconds(8 * (size - 1), size),
            "ids": node.spread_seconds(asked * wire.id, size),
            "row gradients": node.spread_seconds(asked * wire.gradient, size),
            "rows": node.spread_seconds(served * wire.row, size),
        }
        links |= {f"{name} {part}": seconds / shape.steps for part, seconds in parts.items()}
        if getattr(config.table, name).place != "device":
            row_bytes = numbers * FLOAT
            links[f"{name} rows over PCIe"] = node.host_seconds(use.touches * row_bytes) / shape.steps
    return Step(compute, links)
