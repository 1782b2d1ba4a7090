"""One table over ranks against one table with all ids: odd, empty and one-sided ids, bytes to the last one, wires.

Lives here: cycles through Exchange alone. Not here: whole trainings (test_equal.py), who owns what (test_placement.py).
"""

from __future__ import annotations

import pytest
import torch

from mome.table.exchange import Exchange
from mome.table.placement import Placement, least_loaded
from mome.table.rows import RowTable
from mome.table.spec import TableSpec, initial_rows, table_seed
from optim.rows import RowRule
from tests.dist.processes import start

SPEC = TableSpec(rows=101, lanes=2, dim=3, init=0.3)
ROW = SPEC.lanes * SPEC.dim


def placements(size):
    yield Placement(SPEC.rows, size)
    yield Placement(SPEC.rows, size, "cyclic")
    loads = torch.arange(21)
    yield Placement(SPEC.rows, size, "balanced", 5, least_loaded(loads, size))


def ids_of(pattern, rank, size, event):
    """Two steps' ids of a rank in an event."""
    random = torch.Generator().manual_seed(1000 * event + rank)
    drawn = [torch.randint(SPEC.rows, (17, 2), generator=random), torch.randint(SPEC.rows, (5,), generator=random)]
    if pattern == "one owner":
        return [one % 3 for one in drawn]
    if pattern == "one row":
        return [torch.full_like(one, 100) for one in drawn]
    if pattern == "some ranks empty" and rank != event % size:
        return [one[:0] for one in drawn]
    if pattern == "nobody":
        return [one[:0] for one in drawn]
    if pattern == "all rows":
        return [torch.arange(SPEC.rows), drawn[1]]
    return drawn


PATTERNS = ("random", "one owner", "one row", "some ranks empty", "nobody", "all rows")


def cycle(exchange, world, steps):
    """The calls of a cycle up to its rows."""
    wanted = exchange.want(steps)
    counts_W1 = torch.tensor(exchange.give(wanted)).unsqueeze(1)
    take = world.counts("row counts", counts_W1).wait().flatten().tolist()
    route = exchange.ask(wanted, take)
    exchange.asked(route)
    owner, coming = exchange.serve(route, exchange.fetch(route))
    return exchange.arrive(route, owner, coming)


def weights_of(ids, event):
    """What each read is multiplied by: of its id and event alone, so that a rank and one process have the same."""
    return (
        ((ids.double() + 1).unsqueeze(-1) * torch.arange(1.0, ROW + 1) * (event + 1) * 0.37)
        .sin()
        .view(*ids.shape, SPEC.lanes, SPEC.dim)
    )


def train(exchange, world, pattern, event):
    """One event; returns (rows wanted of others, rows served to others)."""
    steps = ids_of(pattern, world.rank, world.size, event)
    shared = cycle(exchange, world, steps)
    for n, ids in enumerate(steps):
        rows = shared.here.gather(n)
        (rows.sin() * weights_of(ids, event).to(rows.dtype)).sum().backward()
    counts = sum(shared.route.give), sum(shared.route.take)
    exchange.merge(shared, exchange.send(shared))
    exchange.table.push(shared.owner, 0.1)
    return counts


def all_patterns(world, dtype, wire):
    """For every placement and pattern: what the rows came to, read by every rank, and the bytes that were sent."""
    found = {}
    for placement in placements(world.size):
        for pattern in PATTERNS:
            rule = RowRule("adam", weight_decay=0.1)
            table = RowTable(SPEC, rule, 7, dtype, name="words", placement=placement, rank=world.rank)
            exchange = Exchange(table, world, wire)
            before, counts = world.sent.copy(), []
            for event in range(4):
                counts.append(train(exchange, world, pattern, event))
            sent = {name: world.sent.get(name, 0) - before.get(name, 0) for name in world.sent}
            rows = exchange.pull([torch.arange(SPEC.rows)]).gather(0)
            found[placement.kind, pattern] = rows, table.touched_rows, counts, sent
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_pattern_gives_the_rows_of_one_table_and_sends_what_the_formula_says(size):
    found = start(all_patterns, size, torch.float64, None)
    for key in found[0]:
        table = RowTable(SPEC, RowRule("adam", weight_decay=0.1), 7, torch.float64, name="words")
        for event in range(4):
            steps = [step for rank in range(size) for step in ids_of(key[1], rank, size, event)]
            ws = table.pull(steps)
            for n, ids in enumerate(steps):
                (ws.gather(n).sin() * weights_of(ids, event)).sum().backward()
            table.push(ws, 0.1)
        expected = table.read_rows(torch.arange(SPEC.rows))
        for rank in found:
            torch.testing.assert_close(rank[key][0], expected, rtol=1e-12, atol=1e-12, msg=lambda m, k=key: f"{k}: {m}")
            # Every rank reads the same bits, whoever owns them.
            assert torch.equal(rank[key][0], found[0][key][0])
        assert sum(rank[key][1] for rank in found) == table.touched_rows
        # A rank sends remote * (id + gradient row) + served * row + counts; nothing else, nothing twice.
        for _, _, counts, sent in (rank[key] for rank in found):
            remote, served = (sum(column) for column in zip(*counts))
            assert sum(sent.values()) == (remote * (4 + 8 * ROW) + served * 8 * ROW + 4 * 8 * (size - 1)), (key, sent)
        remote = sum(one[0] for rank in found for one in rank[key][2])
        assert remote == sum(one[1] for rank in found for one in rank[key][2])
        assert (remote == 0) == (size == 1 or key[1] == "nobody")


def test_repeats_give_the_same_bits():
    one, other = (start(all_patterns, 3, torch.float32, None) for _ in range(2))
    for mine, theirs in zip(one, other):
        assert all(torch.equal(mine[key][0], theirs[key][0]) for key in mine)


def test_a_wire_of_bfloat16_sends_half_and_errs_by_its_rounding():
    exact, rounded = (start(all_patterns, 2, torch.float32, wire) for wire in (None, torch.bfloat16))
    key = ("contiguous", "random")
    sent, half = exact[0][key][3], rounded[0][key][3]
    assert half["rows"] * 2 == sent["rows"] and half["row gradients"] * 2 == sent["row gradients"] > 0
    assert half["row ids"] == sent["row ids"]
    # What is read at the end was rounded on its way, but for this rank's own rows: they differ by training alone.
    off = (rounded[0][key][0] - exact[0][key][0]).abs().max()
    assert 0 < off < 0.02


WIDE = TableSpec(rows=2**31 + 5, lanes=1, dim=1, init=0.5)
ENDS = torch.tensor([0, 2**30, 2**30 + 3, 2**31 + 4])


def wide(world):
    """Ids beyond int32 travel as int64; rows are found at either end of the table and of its halves."""
    placement = Placement(WIDE.rows, world.size)
    table = RowTable(WIDE, RowRule("sgd"), 1, name="wide", placement=placement, rank=world.rank)
    exchange = Exchange(table, world)
    shared = cycle(exchange, world, [ENDS])
    (shared.here.gather(0) * (1.0 + world.rank)).sum().backward()
    exchange.merge(shared, exchange.send(shared))
    table.push(shared.owner, 0.5)
    return exchange.pull([ENDS]).gather(0), shared.route.give, world.sent["row ids"]


def test_ids_beyond_int32():
    found = start(wide, 2)
    expected = initial_rows(WIDE, table_seed(1, "wide"), ENDS, torch.float32) - 0.5 * 3.0
    for rank, (rows, give, sent) in enumerate(found):
        torch.testing.assert_close(rows, expected)
        assert give[1 - rank] == 2 and sent == 16


def bad_ids(world):
    table = RowTable(SPEC, RowRule("sgd"), 1, name="words", placement=Placement(SPEC.rows, world.size), rank=world.rank)
    with pytest.raises(ValueError, match="row id 101 is outside 0 to 100"):
        Exchange(table, world).want([torch.tensor([5, 101])])
    with pytest.raises(ValueError, match="row id -1 is outside"):
        Exchange(table, world).want([torch.tensor([-1])])


def test_an_id_out_of_range_is_refused_before_anything_travels():
    start(bad_ids, 2)
