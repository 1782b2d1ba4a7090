"""A plan: everything that is counted and predicted for a configuration on so many GPUs, as numbers.

Lives here: Plan and how it is made; run_traffic, the bytes that a run's exchange sends, cycle by cycle.
Not here: the counting itself (the modules beside this one), and how a plan is shown (report.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from torch import nn

from data.loader import RowPlan
from mome.config import RunConfig
from mome.dense import share_out, step_bytes
from mome.memory import Memory
from mome.tools.plan.clock import Step, step_of
from mome.tools.plan.growth import Growth, growth_of
from mome.tools.plan.links import Node
from mome.tools.plan.memory import (
    FLOAT,
    Holding,
    Scheme,
    TableUse,
    capacity,
    holding,
    meta_model,
    remedies,
    schemes,
)
from mome.tools.plan.stream import (
    Shape,
    Tokens,
    heaviest_cycle,
    loader_of,
    make_memories,
    planned_cycles,
    prefix_of,
    run_cycles,
)
from mome.tools.plan.traffic import (
    Flow,
    Prefix,
    Wire,
    crossover,
    crossover_in_time,
    flow_of,
    flows_of,
    imbalance,
    placement_of,
    wire_of,
)
from mome.world import ORDER
from optim.schedule import StepValues


@dataclass(frozen=True)
class CycleTraffic:
    """What the exchange of one cycle sends. sent: by name of ORDER, bytes of each rank, all tables together."""

    start: int
    end: int
    sent: dict[str, list[int]]

    @property
    def total(self) -> int:
        """Bytes of all ranks."""
        return sum(sum(ranks) for ranks in self.sent.values())


def run_traffic(config: RunConfig, tokens: Tokens, size: int, steps: int, prefix: Prefix = tuple) -> list[CycleTraffic]:
    """The bytes that the tables of a run send in the cycles of its first `steps` steps, exactly, from its own ids.

    What World.sent counts under the names in `sent`, without validation. prefix: what the run makes placements that are
    `balanced` from. Raises DataError where the ranks cannot share a
    step's micro-rows evenly.
    """
    memories, found = make_memories(config, tokens.tokenizer), []
    for start, end, cycle in run_cycles(config, tokens, memories, size, steps):
        sent: dict[str, list[int]] = {}
        for name, flow in flows_of(config, memories, cycle, size, prefix).items():
            for part, ranks in flow.sent_by_name(wire_of(config, name, memories[name].spec)).items():
                sent[part] = [one + more for one, more in zip(sent.get(part, [0] * size), ranks)]
        found.append(CycleTraffic(start, end, sent))
    return found


@dataclass(frozen=True)
class TablePlan:
    """One table. Rows and bytes are means over the counted cycles where it does not say otherwise.

    reads: distinct rows a rank; capacity: the most that its tokens can ask for; use: the most that was counted, of any
    rank and cycle; mean_sent, largest_sent: bytes a rank and cycle, of all and of the busiest; total_sent: of all
    ranks, by the formula; serves, updates: largest over mean of the rows that owners send and update; touched: distinct
    rows of all ranks, with fitted: whether that is a fit, and growth behind it.
    """

    placement: str
    rows: int
    wire: Wire
    reads: float
    capacity: int
    use: TableUse
    mean_sent: float
    largest_sent: float
    total_sent: float
    serves: float
    updates: float
    touched: float
    fitted: bool
    growth: Growth | None
    crossover: float
    in_time: float
    schemes: list[Scheme]


@dataclass(frozen=True)
class Plan:
    """A configuration on `size` GPUs. counted: ranks whose ids were looked at. sent: by name of ORDER, bytes that the
    mean rank sends a cycle (a step's times its steps for what goes every step). padding: what the dense exchange sends
    over what its numbers alone would take; replicated: how many of them every rank updates itself. flops_share:
    of the matrix units, with nothing hidden. verdict: what does not fit, and what each remedy comes to, or that it
    fits.
    """

    config: RunConfig
    size: int
    counted: int
    cycles: int
    shape: Shape
    now: StepValues
    tokens_name: str
    tokens_count: int
    memory: Holding
    tables: dict[str, TablePlan]
    sent: dict[str, float]
    padding: float
    replicated: int
    step: Step
    flops_share: float
    verdict: list[str]


def shape_of(config: RunConfig, size: int, rank_rows: int) -> tuple[Shape, StepValues]:
    """The heaviest cycle of a configuration; rank_rows 0: its micro-rows shared out, one at least a rank."""
    now, steps = heaviest_cycle(config)
    return Shape(steps, rank_rows or max(1, now.rows // size), now.tokens, now.document_cap), now


def make_plan(
    config: RunConfig, tokens: Tokens, size: int, *, rank_rows: int = 0, cycles: int = 2, most_tokens: int = 1 << 23,
    node: Node | None = None, wide: int = 2, say: Callable[[str], None] = print,
) -> Plan:  # fmt: skip
    """Count and predict. A cycle of more than most_tokens tokens is counted over its first ranks alone.

    wide: bytes of an activation's number. Memory is that of tensors: a process has its software besides.
    """
    node = node or Node()
    shape, now = shape_of(config, size, rank_rows)
    counted = max(1, min(size, most_tokens // shape.rank_tokens))
    memories = make_memories(config, tokens.tokenizer)
    say(f"counting rows of {cycles} cycles of {counted * shape.rank_tokens:,} tokens")
    found = list(planned_cycles(config, tokens, memories, shape, counted, cycles)) if memories else []
    prefix = prefix_of(config, tokens, shape, counted)
    model, _ = meta_model(config, tokens.tokenizer.vocab_size)
    tables, flows = {}, {}
    for name, memory in memories.items():
        placement = placement_of(config, name, memory, size, prefix)
        each = [flow_of(one[name], placement) for one in found]
        # The heaviest stands for the step; bytes and loads are means.
        flows[name] = max(each, key=lambda flow: int(flow.needed_SW.sum()))
        growth = None
        if counted < size:
            say(f"table {name}: fitting its growth")
            growth = growth_of_table(config, tokens, memory, shape, 2 * most_tokens)
        tables[name] = table_plan(config, name, memory, placement, each, growth, size, shape, node)
    uses = {name: table.use for name, table in tables.items()}
    rest = {
        "rank_tokens": shape.rank_tokens, "pass_tokens": min(config.micro_batch, shape.rank_rows) * shape.tokens,
        "vocab_size": tokens.tokenizer.vocab_size, "wide": wide,
    }  # fmt: skip
    held = holding(config, model, memories, uses, size, **rest)
    wires = {name: table.wire for name, table in tables.items()}
    step = step_of(
        config, model, memories, uses, flows, wires, size, shape, now.windows, tokens.tokenizer.vocab_size, node
    )
    share = step.compute["forward and backward"] * node.share_flops / step.apart
    verdict = remedies(config, model, memories, uses, size, node, **rest)
    return Plan(
        config, size, counted, cycles, shape, now, tokens.name, tokens.count, held, tables,
        sent_by_order(config, model, memories, flows, wires, size, shape),
        *dense_exchange(config, model, size), step, share, verdict or ["fits"],
    )  # fmt: skip


def table_plan(
    config: RunConfig, name: str, memory: Memory, placement, flows: list[Flow], growth: Growth | None, size: int,
    shape: Shape, node: Node,
) -> TablePlan:  # fmt: skip
    """One table from its flow in each counted cycle. growth: where not all ranks were counted."""
    wire, updates = wire_of(config, name, memory.spec), fmean(imbalance(flow.touched_W) for flow in flows)
    use = TableUse.of(flows[0], placement)
    for flow in flows[1:]:
        use = use.largest(TableUse.of(flow, placement))
    touched, fitted = fmean(float(flow.touched_W.sum()) for flow in flows), False
    if growth is not None:
        touched, fitted = growth.at(size * shape.rank_tokens)
        use = replace(use, touches=max(use.touches, round(min(touched / size * updates, use.owns))))
    mean = fmean(flow.mean_sent(wire) for flow in flows)
    return TablePlan(
        placement=placement.kind, rows=memory.spec.rows, wire=wire,
        reads=fmean(float(flow.needed_SW.sum()) / flow.ranks for flow in flows),
        capacity=capacity(memory, shape.rank_tokens), use=use, mean_sent=mean,
        largest_sent=fmean(flow.largest_sent(wire) for flow in flows), total_sent=size * mean,
        serves=fmean(imbalance(flow.served_W) for flow in flows), updates=updates, touched=touched, fitted=fitted,
        growth=growth, crossover=fmean(crossover(flow, wire) for flow in flows),
        in_time=fmean(crossover_in_time(flow, wire, node) for flow in flows),
        schemes=schemes(config, name, memory, use, size, mean),
    )  # fmt: skip


def growth_of_table(config: RunConfig, tokens: Tokens, memory: Memory, shape: Shape, most_tokens: int) -> Growth:
    """Growth of a table's distinct rows over one epoch of the stream, most_tokens of it at most."""
    rows = max(1, min(tokens.count // 2, 1 << 18) // shape.tokens)
    loader = loader_of(config, tokens, lambda step: RowPlan(rows, shape.tokens, shape.document_cap))
    pieces = []
    for _ in range(max(1, min(tokens.count, most_tokens) // (rows * shape.tokens))):
        ids_BTR = memory.row_ids(loader.next().tokens, None)
        pieces.append(np.asarray(ids_BTR).reshape(-1, ids_BTR.shape[-1]))
    return growth_of(pieces, memory.spec.rows)


def dense_exchange(config: RunConfig, model: nn.Module, size: int) -> tuple[float, int]:
    """(bytes of the dense exchange over those that its numbers alone would take, how many of its numbers every rank
    updates itself); in one process 1 and all.

    A reduction to all sends as much as a reduce-scatter and a gather of the same numbers.
    """
    shares = share_out(model.named_parameters(), config.optim, size)
    each = [share for label in shares.values() for share in label.values()]
    numbers, replicated = sum(one.numel for one in each), sum(one.numel for one in each if one.way == "replicated")
    sent = sum(step_bytes(model.named_parameters(), config.optim, size).values())
    return sent / (2 * numbers * FLOAT * (size - 1) / size) if sent else 1.0, replicated


def sent_by_order(
    config: RunConfig, model: nn.Module, memories: Mapping[str, Memory], flows: Mapping[str, Flow],
    wires: Mapping[str, Wire], size: int, shape: Shape,
) -> dict[str, float]:  # fmt: skip
    """Bytes of the mean rank in a cycle, by name of ORDER."""
    sent = {name: 0.0 for name, _, _ in ORDER}
    for name, value in step_bytes(model.named_parameters(), config.optim, size).items():
        sent[name] = float(value * shape.steps)
    for name in memories:
        remote, wire = float(flows[name].remote_S.double().mean()), wires[name]
        sent["row counts"] += 8 * (size - 1)
        sent["row ids"] += remote * wire.id
        sent["row gradients"] += remote * wire.gradient
        # What all serve is what all lack.
        sent["rows"] += remote * wire.row
    return sent
