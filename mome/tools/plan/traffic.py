"""What the ranks of a run send for the rows of a cycle, counted from the ids that each of them reads.

Lives here: Wire and Flow with the formulas of a sparse and a dense exchange, placements, hot rows, crossovers.
Not here: the ids (stream.py), the exchange itself (mome/table/exchange.py), seconds (clock.py).

Formula: a rank sends, per cycle and table, remote * (id + gradient) + served * row + (size - 1) counts; remote: the
distinct rows it reads and does not own; served: of the rows it owns those that others read, once for each of them.
Summed over ranks: sum of remote * (id + row + gradient) + size * (size - 1) counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mome.config import RunConfig
from mome.memory import Memory
from mome.run import place_rows
from mome.table.placement import Placement
from mome.table.spec import TableSpec
from mome.tools.plan.links import Node
from mome.tools.plan.stream import Reads
from mome.world import World

WIRE_BYTES = {"fp32": 4, "bf16": 2}
# A count of rows travels as int64.
COUNT_BYTES = 8

# Makes token ids [B, T] of a beginning of the data, by which buckets of rows are weighed.
Prefix = Callable[[], Iterable[Tensor]]


@dataclass(frozen=True)
class Wire:
    """Bytes of what travels for a row: its id, itself, its gradient."""

    id: int
    row: int
    gradient: int

    @property
    def all(self) -> int:
        return self.id + self.row + self.gradient


def wire_of(config: RunConfig, name: str, spec: TableSpec) -> Wire:
    """How the rows of a table travel."""
    row = spec.lanes * spec.dim * WIRE_BYTES[getattr(config.table, name).wire]
    return Wire(4 if spec.rows <= 1 << 31 else 8, row, row)


@dataclass(frozen=True, eq=False)
class Flow:
    """The rows of a cycle that the first `ranks` of `size` ranks need of each owner.

    needed_SW: distinct rows that rank s reads of owner w. touched_W: distinct rows of an owner that any of them reads.
    tokens: of a rank.
    """

    needed_SW: Tensor
    touched_W: Tensor
    tokens: int

    @property
    def size(self) -> int:
        return self.needed_SW.shape[1]

    @property
    def ranks(self) -> int:
        return self.needed_SW.shape[0]

    @cached_property
    def own_S(self) -> Tensor:
        """Rows that a rank reads and owns."""
        return self.needed_SW.diagonal()

    @cached_property
    def remote_S(self) -> Tensor:
        """Rows that a rank reads and does not own."""
        return self.needed_SW.sum(1) - self.own_S

    @cached_property
    def served_W(self) -> Tensor:
        """Rows that an owner sends, as often as they are asked for."""
        served_W = self.needed_SW.sum(0)
        served_W[: self.ranks] -= self.own_S
        return served_W

    @property
    def scale(self) -> float:
        """What sums over the counted ranks are times to be those over all: 1 where all were counted."""
        return self.size / self.ranks

    def sent(self, wire: Wire) -> Tensor:
        """Bytes that each rank sends, int64 [size], exact. Only where all ranks were counted."""
        assert self.ranks == self.size, "some ranks were not counted"
        counts = (self.size - 1) * COUNT_BYTES
        return self.remote_S * (wire.id + wire.gradient) + self.served_W * wire.row + counts

    def sent_by_name(self, wire: Wire) -> dict[str, list[int]]:
        """The same by the names of mome/world.py's ORDER, each a number a rank."""
        assert self.ranks == self.size, "some ranks were not counted"
        return {
            "row counts": [(self.size - 1) * COUNT_BYTES] * self.size,
            "row ids": (self.remote_S * wire.id).tolist(),
            "row gradients": (self.remote_S * wire.gradient).tolist(),
            "rows": (self.served_W * wire.row).tolist(),
        }

    def mean_sent(self, wire: Wire) -> float:
        """Bytes that a rank sends, the mean over all ranks."""
        return float(self.remote_S.double().mean()) * wire.all + (self.size - 1) * COUNT_BYTES

    def largest_sent(self, wire: Wire) -> float:
        """Bytes that the busiest rank sends."""
        if self.ranks == self.size:
            return float(self.sent(wire).max())
        asks = float(self.remote_S.max()) * (wire.id + wire.gradient)
        return asks + float(self.served_W.max()) * self.scale * wire.row + (self.size - 1) * COUNT_BYTES


def flow_of(reads: Reads, placement: Placement) -> Flow:
    """Who needs how many rows of whom."""
    size = placement.size
    owner_N = placement.owner(reads.ids_N)
    pairs = torch.bincount(reads.rank_N * size + owner_N, minlength=reads.ranks * size)
    touched_W = torch.bincount(placement.owner(torch.unique(reads.ids_N)), minlength=size)
    return Flow(pairs.view(reads.ranks, size), touched_W, reads.tokens)


def imbalance(loads: Tensor) -> float:
    """Largest load over the mean; 1 where there is none."""
    total = float(loads.sum())
    return float(loads.max()) * len(loads) / total if total else 1.0


def placement_of(config: RunConfig, name: str, memory: Memory, size: int, prefix: Prefix) -> Placement:
    """Where the rows of a table are in a run of `size` ranks. prefix: what `balanced` is made from."""
    return place_rows(getattr(config.table, name).placement, memory, World(0, size), prefix)


def dense_bytes(rows: int, wire: Wire, size: int) -> int:
    """Bytes that a rank sends when all rows are exchanged: gradients reduced and scattered, rows gathered, in rings."""
    return rows * (wire.row + wire.gradient) * (size - 1) // size


def crossover(flow: Flow, wire: Wire) -> float:
    """Which share of a table's rows each rank has to read until the dense exchange sends fewer bytes in all."""
    remote = float(flow.remote_S.double().mean())
    reads = float(flow.needed_SW.sum(1).double().mean())
    if flow.size == 1 or not remote:
        return 1.0
    # The sparse exchange sends remote / reads * (share of all rows) * all.
    return (wire.row + wire.gradient) * (flow.size - 1) / flow.size / (remote / reads * wire.all)


def crossover_in_time(flow: Flow, wire: Wire, node: Node) -> float:
    """The same for seconds of the busiest rank: an all-to-all across nodes has one port a GPU, a ring all of a node's,
    and ends with its busiest rank. Delays are left out."""
    if flow.size == 1:
        return 1.0
    reads, much = float(flow.needed_SW.sum(1).double().mean()), 1e15
    a_row = node.spread_seconds(much, flow.size) / much * flow.largest_sent(wire) / max(reads, 1.0)
    of_all = node.ring_seconds(much, flow.size) / much * (wire.row + wire.gradient) * (flow.size - 1) / flow.size
    return of_all / a_row if a_row else 1.0


def hottest(prefix: Reads, count: int) -> Tensor:
    """The `count` rows that most ranks of the prefix read; of equal ones the lower."""
    seen_R = torch.bincount(prefix.ids_N)
    return torch.argsort(seen_R, descending=True, stable=True)[:count]


@dataclass(frozen=True)
class Replicas:
    """What it comes to that every rank keeps the `rows` hottest rows and their gradients are reduced over all.

    saved: bytes fewer that a rank then sends in the exchange, the mean; paid: bytes that it sends for the reduction.
    serves: largest over mean of the rows that owners send, afterwards.
    """

    rows: int
    saved: float
    paid: float
    serves: float

    @property
    def gain(self) -> float:
        """Bytes a rank; below 0 it is a loss."""
        return self.saved - self.paid


def replicas(reads: Reads, prefix: Reads, placement: Placement, wire: Wire, counts: Sequence[int]) -> list[Replicas]:
    """Replicas of the hottest rows of a prefix, for each of these counts."""
    before, size, found = flow_of(reads, placement).mean_sent(wire), placement.size, []
    for count in counts:
        ids_H = hottest(prefix, count)
        flow = flow_of(reads.without(ids_H), placement)
        # A ring sends an all-reduce's bytes twice; then each rank applies the row rule to the same sums.
        paid = 2 * len(ids_H) * wire.gradient * (size - 1) / size
        found.append(Replicas(len(ids_H), before - flow.mean_sent(wire), paid, imbalance(flow.served_W)))
    return found


def flows_of(
    config: RunConfig, memories: Mapping[str, Memory], cycle: Mapping[str, Reads], size: int, prefix: Prefix
) -> dict[str, Flow]:
    """The flow of each table in a cycle, under the placement that a run would have."""
    return {
        name: flow_of(cycle[name], placement_of(config, name, memory, size, prefix))
        for name, memory in memories.items()
    }
