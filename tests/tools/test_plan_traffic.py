"""What a plan counts of the rows that ranks send, against loops over sets and against the exchange itself.

Lives here: reads, flows and bytes, growth and its fit, hot rows, crossovers of sparse and dense, seconds of a link.
Not here: memory, published figures and the command (test_plan.py), placements (tests/mome/test_placement.py).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.loader import Batch, take
from mome.run import place_rows
from mome.table.exchange import Exchange
from mome.table.placement import Placement
from mome.table.rows import RowTable
from mome.tools.plan import options_of
from mome.tools.plan.counted import run_traffic
from mome.tools.plan.growth import growth_of, heaps_fit
from mome.tools.plan.links import Node
from mome.tools.plan.stream import Shape, heaviest_cycle, joined, make_memories, open_tokens, planned_cycles, reads_of
from mome.tools.plan.traffic import (
    Wire,
    crossover,
    crossover_in_time,
    dense_bytes,
    flow_of,
    hottest,
    imbalance,
    placement_of,
    replicas,
    wire_of,
)
from mome.world import ORDER, World
from tests import tiny
from tests.dist.processes import start


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    """The flags that name a tiny corpus: its tokenizer, its training and its validation shards."""
    return tiny.make_corpus(tmp_path_factory.mktemp("corpus"))


def asked(corpus, *words: str):
    """Options of the plan of a small model on the tiny corpus, and its tokens."""
    options = options_of(tiny_words(corpus, *words))
    return options, open_tokens(options.config, options.tokens_from)


def tiny_words(corpus, *words: str) -> list[str]:
    small = ["--row-tokens", "32", "--steps", "12", "--model.layers", "2", "--model.width", "32", "--model.heads", "2"]
    rows = [] if "--memories" in words else ["--memory.ngram.rows", "512"]
    return ["local", *corpus, *small, *rows, *words]


# Counting ------------------------------------------------------------------------------------------------------------


@st.composite
def read(draw):
    """Distinct rows of each rank, the table's rows, the number of ranks and a placement's kind."""
    rows, size = draw(st.integers(1, 30)), draw(st.integers(1, 5))
    ids = [sorted(draw(st.sets(st.integers(0, rows - 1)))) for _ in range(size)]
    return ids, rows, size, draw(st.sampled_from(("contiguous", "cyclic")))


@settings(max_examples=200, deadline=None)
@given(read(), st.integers(1, 9), st.integers(1, 9))
def test_bytes_are_those_of_the_formula(drawn, id_bytes, row_bytes):
    ids, rows, size, kind = drawn
    placement, wire = Placement(rows, size, kind), Wire(id_bytes, row_bytes, 2 * row_bytes)
    flow = flow_of(joined([torch.tensor(one, dtype=torch.int64) for one in ids], 7), placement)
    owner = {one: int(placement.owner(torch.tensor(one))) for one in range(rows)}
    remote = [sum(owner[one] != rank for one in mine) for rank, mine in enumerate(ids)]
    served = [sum(owner[one] == rank for other, mine in enumerate(ids) if other != rank for one in mine)
              for rank in range(size)]  # fmt: skip
    assert flow.remote_S.tolist() == remote and flow.served_W.tolist() == served
    touched = {one for mine in ids for one in mine}
    assert flow.touched_W.tolist() == [sum(owner[one] == rank for one in touched) for rank in range(size)]
    sent = [m * (id_bytes + 2 * row_bytes) + s * row_bytes + 8 * (size - 1) for m, s in zip(remote, served)]
    assert flow.sent(wire).tolist() == sent
    assert sum(sent) == sum(remote) * wire.all + size * (size - 1) * 8
    assert math.isclose(flow.mean_sent(wire) * size, sum(sent)) and flow.largest_sent(wire) == max(sent)
    by_name = flow.sent_by_name(wire)
    assert [sum(part) for part in zip(*by_name.values())] == sent
    assert set(by_name) <= {name for name, _, _ in ORDER}


def test_a_load_is_the_largest_over_the_mean():
    assert imbalance(torch.tensor([1, 2, 3])) == 1.5 and imbalance(torch.zeros(4)) == 1.0


def test_reads_are_the_distinct_rows_of_each_rank(corpus):
    options, tokens = asked(corpus)
    memories = make_memories(options.config, tokens.tokenizer)
    tokens_GT = torch.randint(0, 300, (6, 9))
    batches = [Batch(n, tokens_GT.roll(n), tokens_GT, torch.zeros(6, 9)) for n in range(2)]
    for name, reads in reads_of(batches, memories, 3).items():
        for rank in range(3):
            mine = torch.cat([take(one, rank, 3).tokens for one in batches])
            held = torch.unique(memories[name].row_ids(mine, None))
            assert torch.equal(reads.ids_N[reads.rank_N == rank], held)
        assert reads.tokens == 2 * 2 * 9 and reads.rows == len(reads.ids_N) / 3


def rank_exchanges(world: World, words: list[str]) -> dict[str, int]:
    """One rank's part in the exchange of a run's first cycles, by the exchange itself; what it sent, by name."""
    options = options_of(words)
    tokens = open_tokens(options.config, options.tokens_from)
    config, memories = options.config, make_memories(options.config, tokens.tokenizer)
    plan = Shape(2, 4 // world.size, 32, heaviest_cycle(config)[0].document_cap)
    tables = {}
    for name, memory in memories.items():
        own, placement = getattr(config.table, name), place_rows("cyclic", memory, world, tuple)
        table = RowTable(memory.spec, own.row_rule(), seed=0, placement=placement, rank=world.rank)
        tables[name] = Exchange(table, world, torch.bfloat16 if own.wire == "bf16" else None)
    for cycle in planned_cycles(config, tokens, memories, plan, world.size, 2):
        # Reads of a rank are what its exchange wants; here they are asked for once more, by one list of ids.
        for name, exchange in tables.items():
            mine = cycle[name].ids_N[cycle[name].rank_N == world.rank]
            wanted = exchange.want([mine])
            counts = world.counts("row counts", torch.tensor(exchange.give(wanted)).unsqueeze(1)).wait()
            route = exchange.ask(wanted, counts.flatten().tolist())
            exchange.asked(route)
            owner, coming = exchange.serve(route, exchange.fetch(route))
            shared = exchange.arrive(route, owner, coming)
            exchange.merge(shared, exchange.send(shared))
    return world.sent


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_the_exchange_sends_what_is_predicted(corpus, wire):
    words = tiny_words(corpus, "--table.ngram.wire", wire)
    sent = start(rank_exchanges, 2, words)
    options, tokens = asked(corpus, "--table.ngram.wire", wire)
    config, memories = options.config, make_memories(options.config, tokens.tokenizer)
    predicted: dict[str, list[int]] = {}
    shape = Shape(2, 2, 32, heaviest_cycle(config)[0].document_cap)
    for cycle in planned_cycles(config, tokens, memories, shape, 2, 2):
        for name, memory in memories.items():
            flow = flow_of(cycle[name], placement_of(config, name, memory, 2, tuple))
            for part, ranks in flow.sent_by_name(wire_of(config, name, memory.spec)).items():
                predicted[part] = [a + b for a, b in zip(predicted.get(part, [0, 0]), ranks)]
    for part, ranks in predicted.items():
        assert [one[part] for one in sent] == ranks and sum(ranks) > 0


def test_the_traffic_of_a_run_is_cut_at_its_cycles(corpus):
    options, tokens = asked(corpus, "--cycle", "4")
    found = run_traffic(options.config, tokens, 2, 12)
    # A cycle ends after each four steps, and with a stage, after six.
    assert [(one.start, one.end) for one in found] == [(0, 4), (4, 6), (6, 8), (8, 12)]
    assert all(one.total == sum(map(sum, one.sent.values())) > 0 for one in found)
    assert all(one.total == 0 for one in run_traffic(options.config, tokens, 1, 12))
    with pytest.raises(DataError, match="start 2 or 4"):
        run_traffic(options.config, tokens, 3, 12)


# Growth, hot rows, crossovers ----------------------------------------------------------------------------------------


def test_growth_is_counted_and_beyond_the_stream_fitted():
    ids_NR = np.random.default_rng(0).zipf(1.4, (1 << 14, 2)) % 5000
    growth = growth_of([ids_NR[:1000], ids_NR[1000:]], 5000)
    for length in (1 << 14, 1 << 13, 1 << 10):
        assert growth.at(length) == (pytest.approx(len(np.unique(ids_NR[:length]))), False)
    more = np.concatenate([ids_NR, np.random.default_rng(1).zipf(1.4, (1 << 15, 2)) % 5000])
    rows, fitted = growth.at(len(more))
    assert fitted and rows == pytest.approx(len(np.unique(more)), rel=0.05)
    assert 0 < growth.error < 0.1 and growth.at(10**12)[0] <= 5000


def test_the_fit_is_heaps_law_on_the_rows_it_fills():
    lengths = [2**n for n in range(10, 15)]
    rows = [-1e4 * math.expm1(-3 * n**0.6 / 1e4) for n in lengths]
    factor, exponent = heaps_fit(lengths, rows, 10_000)
    assert factor == pytest.approx(3) and exponent == pytest.approx(0.6)


def test_growth_of_little():
    growth = growth_of(np.array([[3]]), 9)
    assert growth.at(1) == (pytest.approx(1), False) and math.isnan(growth.error) and growth.at(2)[1]
    with pytest.raises(ValueError, match="without tokens"):
        growth_of([], 9)


def test_a_row_that_all_read_costs_as_much_to_reduce_as_to_send_but_for_its_id():
    reads = joined([torch.tensor([0, rank + 1]) for rank in range(4)], 1)
    (one,) = replicas(reads, reads, Placement(8, 4, "cyclic"), Wire(4, 100, 100), [1])
    assert hottest(reads, 1).tolist() == [0]
    assert one.paid == 2 * 100 * 3 / 4 and one.saved == 3 / 4 * 204 and one.gain == pytest.approx(3)
    # Read by one rank, which does not own it: nothing but a loss.
    alone = joined([torch.tensor([1]), torch.tensor([], dtype=torch.int64)], 1)
    (lost,) = replicas(alone, alone, Placement(8, 2, "cyclic"), Wire(4, 100, 100), [1])
    assert (
        lost.saved == 204 / 2 and lost.paid == 100 and replicas(alone, alone, Placement(8, 2), Wire(4, 9, 9), []) == []
    )


def test_beyond_the_crossover_the_dense_exchange_sends_less():
    rows, size, wire = 400, 4, Wire(4, 8, 8)
    placement = Placement(rows, size, "cyclic")

    def flow(count: int):
        return flow_of(joined([torch.randperm(rows)[:count].sort().values for _ in range(size)], 1), placement)

    share = crossover(flow(100), wire)
    assert share == pytest.approx(16 / 20, abs=0.05)
    counts = 8 * (size - 1)
    for part, less in ((0.9 * share, False), (1.1 * share, True)):
        assert (flow(round(part * rows)).mean_sent(wire) - counts > dense_bytes(rows, wire, size)) == less
    assert crossover(flow_of(joined([torch.arange(4)], 1), Placement(rows)), wire) == 1.0
    # One node: the links of both ways are the same, and the busiest rank decides.
    assert crossover_in_time(flow(100), wire, Node()) < share
    # Two nodes of eight: an all-to-all has an eighth of a ring's ports.
    placement, size = Placement(rows, 16, "cyclic"), 16
    assert crossover_in_time(flow(100), wire, Node()) < crossover_in_time(flow(100), wire, Node(gpus=16)) / 3


def test_seconds_of_a_collective():
    node = Node()
    assert node.ring_seconds(10**9, 1) == node.spread_seconds(10**9, 1) == 0
    assert node.ring_seconds(10**9, 8) == pytest.approx(10**9 / 360e9 + 15e-6)
    # Across nodes an all-to-all has one port a GPU, a ring all of a node's.
    assert node.spread_seconds(10**9, 64) == pytest.approx(40e-6 + 63 * 0.3e-6 + 10**9 * 56 / 63 / 42.5e9)
    assert node.ring_seconds(10**9, 64) == pytest.approx(40e-6 + 10**9 / 340e9)
