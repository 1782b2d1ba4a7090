"""The row initialiser: uniform, keyed by (seed, row, element), and right past 2**31 numbers."""

from __future__ import annotations

import math

import pytest
import torch

from mome.table.parts import state_parts
from mome.table.rows import RowTable, TableSpec, initial_rows
from optim.rows import RowRule

RULE = RowRule("adam", weight_decay=0.3)


@pytest.mark.parametrize("init", [0.0, 0.25])
def test_a_new_table_is_the_initialisers_and_nothing_uninitialised(init, poison_empty):
    table = RowTable(TableSpec(1000, 3, 40, init), RULE, seed=1)
    rows = torch.cat(list(table.iter_rows()))
    assert rows.isfinite().all() and (init > 0 or not rows.any())
    for _ in range(2):
        ws = table.pull([torch.randint(1000, (20,))])
        (ws.gather(0) + 1).square().sum().backward()
        table.push(ws, 0.1)
    assert all(tensor.isfinite().all() for tensor in next(state_parts(table)).values())


def test_the_initialiser_makes_any_subset_equal_to_the_whole():
    spec = TableSpec(3000, 2, 17, 0.1)
    whole = initial_rows(spec, 5, torch.arange(3000), torch.float32)
    for ids in (torch.randperm(3000)[:700], torch.tensor([2999]), torch.arange(0), torch.zeros(5).long()):
        assert torch.equal(initial_rows(spec, 5, ids, torch.float32), whole[ids])
    double = initial_rows(spec, 5, torch.arange(3000), torch.float64)
    torch.testing.assert_close(whole.double(), double, rtol=1e-7, atol=0)


def test_the_initialiser_is_uniform_and_keyed_by_seed_and_name():
    spec = TableSpec(2000, 4, 50, init=0.2)
    rows = initial_rows(spec, 3, torch.arange(2000), torch.float64).flatten()
    n = rows.numel()
    assert rows.min() >= -0.2 and rows.max() <= 0.2 and rows.min() < -0.1999 and rows.max() > 0.1999
    sd = 0.2 / math.sqrt(3)
    assert abs(rows.mean()) < 5 * sd / math.sqrt(n)
    assert abs(rows.square().mean() / sd**2 - 1) < 5 * math.sqrt(0.8 / n)
    counts = torch.histc(rows, bins=64, min=-0.2, max=0.2)
    assert ((counts - n / 64).abs() < 5 * math.sqrt(n / 64)).all()
    lag = torch.stack([(rows[k:] * rows[:-k]).mean() / sd**2 for k in (1, 50, 200)])
    assert lag.abs().max() < 5 / math.sqrt(n)
    other = initial_rows(spec, 4, torch.arange(2000), torch.float64).flatten()
    assert abs((rows * other).mean()) / sd**2 < 5 / math.sqrt(n)
    named = [RowTable(spec, RULE, 1, name=name).read_rows(torch.arange(50)) for name in ("a", "b", "a")]
    assert torch.equal(named[0], named[2]) and not torch.equal(named[0], named[1])


@pytest.mark.parametrize("place", ["device", "host", "file"])
@pytest.mark.parametrize("format", ["fp32", "bf16", "bf16+16", "fp8"])
def test_every_place_and_format_begins_with_the_same_rows(place, format, tmp_path):
    """What was never pushed is not rounded: it is not in the store."""
    spec = TableSpec(90, 2, 7, 0.3)
    folder = tmp_path if place == "file" else None
    table = RowTable(spec, RULE, 5, name="words", format=format, place=place, folder=folder)
    whole = initial_rows(spec, table.seed, torch.arange(90), torch.float32)
    for ids in (torch.randperm(90)[:31], torch.tensor([[89, 89], [0, 3]]), torch.arange(90), torch.arange(0)):
        assert torch.equal(table.read_rows(ids), whole[ids])
    ws = table.pull([torch.arange(0, 90, 2)])
    table.push(ws, 0.0)
    assert torch.equal(table.read_rows(torch.arange(1, 90, 2)), whole[1::2])
    table.close()


def test_any_integer_is_a_seed():
    for seed in (-1, 0, 1 << 63, (1 << 64) + 1, -(1 << 70)):
        rows = RowTable(TableSpec(50, 3, 4, 0.3), RULE, seed).read_rows(torch.arange(50))
        assert rows.abs().max() <= 0.3 and rows.abs().max() > 0.25


def plain_initial(seed: int, counter: int, init: float) -> float:
    mask = (1 << 64) - 1

    def mix(n: int) -> int:
        z = (n + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    return (2 * (mix(mix(seed) + counter) >> 40) + 1 - (1 << 24)) * init / (1 << 24)


def test_addresses_past_two_to_the_31_are_int64():
    """The initialiser at rows of a table of 2**41 numbers, without the table, against Python integers."""
    spec = TableSpec(rows=1 << 32, lanes=8, dim=64, init=0.5)
    ids = torch.tensor([0, (1 << 31) // 512, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
    rows = initial_rows(spec, 9, ids, torch.float64)
    for u, row in enumerate(ids.tolist()):
        for lane, d in ((0, 0), (3, 17), (7, 63)):
            assert rows[u, lane, d].item() == plain_initial(9, row * 512 + lane * 64 + d, 0.5)
