"""Dense against sparse bytes of a table at many numbers of ranks, under each placement, from real ids.

Lives here: a line a table and number of ranks, counted over some cycles, as text (Markdown) and as numbers.
Not here: the counting (traffic.py), one plan in all its parts (report.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from mome.config import RunConfig
from mome.memory import Memory
from mome.run import place_rows
from mome.table.placement import KINDS
from mome.tools.plan.links import Node
from mome.tools.plan.stream import Reads, Shape, Tokens, planned_cycles, prefix_of
from mome.tools.plan.traffic import (
    Replicas,
    crossover,
    crossover_in_time,
    dense_bytes,
    flow_of,
    imbalance,
    replicas,
    wire_of,
)
from mome.world import World

HOTTEST = (16, 256, 4096)


@dataclass(frozen=True)
class Line:
    """One table at one number of ranks; means over the cycles that were counted.

    counted: ranks that were. reads: distinct rows a rank; share: of the table's. touched: distinct rows of all ranks
    (of those counted). sparse, busiest: bytes that a rank sends a cycle under `placement`, the mean and the busiest
    rank's; dense: by the dense exchange. serves, updates: largest over mean, by placement, of the rows that owners send
    and of those that they update; holds: of the rows that they own. crossover, in_time: the share of rows a rank from
    which the dense exchange sends less, and from which it is faster on H100 nodes. hot: worth of replicas.
    """

    table: str
    placement: str
    ranks: int
    counted: int
    rows: int
    reads: float
    share: float
    touched: float
    sparse: float
    busiest: float
    dense: int
    serves: dict[str, float]
    updates: dict[str, float]
    holds: dict[str, float]
    crossover: float
    in_time: float
    hot: list[Replicas]


def lines_of(
    config: RunConfig, tokens: Tokens, memories: Mapping[str, Memory], shape: Shape, sizes: Sequence[int], *,
    cycles: int, most_tokens: int, node: Node, say: Callable[[str], None],
) -> list[Line]:  # fmt: skip
    """The lines, ranks by ranks. A cycle of more than most_tokens tokens is counted over its first ranks alone.

    The first cycle is the prefix that weighs placements and picks hot rows; the `cycles` after it are counted.
    """
    found = []
    for size in sizes:
        counted = max(1, min(size, most_tokens // shape.rank_tokens))
        say(f"{size} ranks: {counted} of them counted, {counted * shape.rank_tokens:,} tokens a cycle")
        prefix, *rest = planned_cycles(config, tokens, memories, shape, counted, 1 + cycles)
        for name, memory in memories.items():
            found.append(line_of(
                config, name, memory, size, prefix[name], [one[name] for one in rest],
                prefix_of(config, tokens, shape, counted), node,
            ))  # fmt: skip
    return found


def line_of(
    config: RunConfig, name: str, memory: Memory, size: int, prefix: Reads, cycles: Sequence[Reads], beginning,
    node: Node,
) -> Line:  # fmt: skip
    """One line. prefix, beginning: the first cycle, as distinct rows and as what makes its tokens."""
    wire, rows, used = wire_of(config, name, memory.spec), memory.spec.rows, getattr(config.table, name).placement
    placements = {kind: place_rows(kind, memory, World(0, size), beginning) for kind in KINDS}
    flows = {kind: [flow_of(one, placement) for one in cycles] for kind, placement in placements.items()}
    reads = fmean(one.rows for one in cycles)
    hot = [replicas(one, prefix, placements[used], wire, HOTTEST) for one in cycles]
    return Line(
        table=name, placement=used, ranks=size, counted=cycles[0].ranks, rows=rows, reads=reads, share=reads / rows,
        touched=fmean(int(flow.touched_W.sum()) for flow in flows[used]),
        sparse=fmean(flow.mean_sent(wire) for flow in flows[used]),
        busiest=fmean(flow.largest_sent(wire) for flow in flows[used]),
        dense=dense_bytes(rows, wire, size),
        serves={kind: fmean(imbalance(flow.served_W) for flow in flows[kind]) for kind in KINDS},
        updates={kind: fmean(imbalance(flow.touched_W) for flow in flows[kind]) for kind in KINDS},
        holds={kind: imbalance_of_rows(placements[kind]) for kind in KINDS},
        crossover=fmean(crossover(flow, wire) for flow in flows[used]),
        in_time=fmean(crossover_in_time(flow, wire, node) for flow in flows[used]),
        hot=[
            Replicas(each[0].rows, fmean(one.saved for one in each), each[0].paid, fmean(one.serves for one in each))
            for each in zip(*hot)
        ],
    )  # fmt: skip


def imbalance_of_rows(placement) -> float:
    """Rows of the largest owner over the mean."""
    most = max(placement.rows_of(rank) for rank in range(placement.size))
    return most * placement.size / placement.rows


TRAFFIC = (
    "table", "ranks", "rows a rank reads", "of the table", "sparse MB", "busiest MB", "dense MB", "sparse / dense",
    "dense sends less from", "is faster from",
)  # fmt: skip
OWNERS = ("table", "ranks", *(f"{what}, {kind}" for what in ("serves", "updates", "holds") for kind in KINDS))
HOT = ("table", "ranks", "hottest rows", "saved MB", "paid MB", "gain B", "gain of sparse", "serves before", "after")


def traffic_cells(line: Line) -> list[str]:
    return [
        line.table, f"{line.ranks}", f"{line.reads:,.0f}", f"{line.share:.2%}", f"{line.sparse / 1e6:,.3f}",
        f"{line.busiest / 1e6:,.3f}", f"{line.dense / 1e6:,.3f}", f"{line.sparse / max(1, line.dense):.4f}",
        f"{line.crossover:.1%}", f"{line.in_time:.1%}",
    ]  # fmt: skip


def owner_cells(line: Line) -> list[str]:
    every = [group[kind] for group in (line.serves, line.updates, line.holds) for kind in KINDS]
    return [line.table, f"{line.ranks}", *(f"{one:.2f}" for one in every)]


def hot_cells(line: Line, serves: float) -> list[list[str]]:
    return [
        [
            line.table, f"{line.ranks}", f"{one.rows:,}", f"{one.saved / 1e6:,.3f}", f"{one.paid / 1e6:,.3f}",
            f"{one.gain:+,.0f}", f"{one.gain / line.sparse:+.3%}" if line.sparse else "-", f"{serves:.2f}",
            f"{one.serves:.2f}",
        ]
        for one in line.hot
    ]  # fmt: skip


def record(line: Line) -> dict[str, Any]:
    """A line as plain numbers."""
    return asdict(line)
