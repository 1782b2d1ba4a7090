"""NgramMemory against loops; its ids and sums are the same in one piece, in chunks and one token at a time."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mome.errors import UserError
from mome.memory import ModelShape
from mome.memory.ngram import NgramConfig, NgramMemory, sign_pool

BOS = 3
SHAPE = ModelShape(layers=4, width=10, heads=2, head_dim=5, vocab_size=50_000, bos=BOS)


class Point(NamedTuple):
    x: Tensor
    h: Tensor


def make(seed: int = 0, **options) -> NgramMemory:
    options = {"rows": 101, "sign_rows": 64, "gate_channels": 4, **options}
    return NgramMemory(NgramConfig(**options), SHAPE, seed)


def xor_int32(ids: list[int], multipliers: tuple[int, ...]) -> int:
    mixed = 0
    for token, multiplier in zip(ids, multipliers, strict=True):
        mixed ^= token * multiplier
    mixed &= 0xFFFFFFFF
    return mixed - (1 << 32) if mixed >= 1 << 31 else mixed


def splitmix64(counter: int) -> int:
    mask = 2**64 - 1
    z = (counter + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


ROW_MULTIPLIERS = {2: (36313, 27191), 3: (17351, 60961, 45259)}
SIGN_MULTIPLIERS = {2: (48271, 30011), 3: (58699, 39779, 26801)}


def looked_up(before: list[int], order: int, rows: int, signs: int, cross: bool) -> tuple[int, int]:
    """(row in the order's range, sign row) of the n-gram that ends a stream of ids."""
    window = before[::-1][:order]
    short = len(window) < order or -1 in window
    if short or (not cross and BOS in window[:-1]):
        return rows - 1, 0
    return xor_int32(window, ROW_MULTIPLIERS[order]) % (rows - 1), xor_int32(window, SIGN_MULTIPLIERS[order]) % signs


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize("orders", [(2,), (3,), (2, 3)])
def test_equals_loops(cross, orders, poison_empty):
    memory = make(cross_documents=cross, orders=orders, layers=(0, 3), seed=5).double()
    memory.scale.data.uniform_(0.5, 2)
    for gate in memory.gate:
        gate.data.normal_()
    assert memory.history == max(orders) - 1 and memory.reads == len(orders)
    tokens_BT = torch.randint(50_000, (2, 23))
    tokens_BT[0, [0, 1, 7, 12]] = BOS
    history_BH = torch.tensor([[-1, BOS], [9, 40_000]])[:, 2 - memory.history :]
    ids = memory.row_ids(tokens_BT, history_BH)
    rows = torch.randn(2, 23, len(orders), 1, 10, dtype=torch.float64, requires_grad=True)
    payload = memory.prepare(rows, tokens_BT, history_BH)
    site = Point(torch.randn(2, 23, 10, dtype=torch.float64), torch.randn(2, 23, 10, dtype=torch.float64))
    deltas = [memory.read(layer, payload, site) for layer in (0, 3)]
    for b in range(2):
        for t in range(23):
            stream = history_BH[b].tolist() + tokens_BT[b, : t + 1].tolist()
            total = torch.zeros(10, dtype=torch.float64)
            for read, order in enumerate(orders):
                row, sign = looked_up(stream, order, 101, 64, cross)
                assert ids[b, t, read] == row + 101 * read
                total += rows[b, t, read, 0] * memory.signs_SD[sign]
            for index, delta in enumerate(deltas):
                score = sum(w * z for w, z in zip(memory.gate[index][0].tolist(), site.h[b, t].tolist()))
                gate = memory.scale[index].item() * 2 / (1 + math.exp(-score))
                torch.testing.assert_close(delta[b, t], gate * total, rtol=1e-12, atol=1e-12)
    sum(delta.sum() for delta in deltas).backward()
    assert rows.grad.isfinite().all() and (rows.grad != 0).all()


@settings(max_examples=30, deadline=None)
@given(st.booleans(), st.integers(0, 2**31), st.lists(st.integers(0, 14), max_size=4))
def test_pieces_equal_the_whole(cross, seed, cuts):
    memory = make(cross_documents=cross, rows=1009).double()
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(8, (2, 14), generator=generator)  # BOS is frequent among 8 ids
    whole = memory.row_ids(tokens_BT, None)
    rows = torch.randn(2, 14, 2, 1, 10, generator=generator, dtype=torch.float64)
    payload = memory.prepare(rows, tokens_BT, None)
    for bounds in ([0, *sorted(cuts), 14], list(range(15))):
        history_BH = torch.full((2, 2), -1)
        for start, end in pairwise(bounds):
            piece = tokens_BT[:, start:end]
            assert torch.equal(memory.row_ids(piece, history_BH), whole[:, start:end])
            assert torch.equal(memory.prepare(rows[:, start:end], piece, history_BH), payload[:, start:end])
            history_BH = torch.cat([history_BH, piece], dim=1)[:, -2:]


def test_reserved_rows():
    tokens_BT = torch.tensor([[5, 6, BOS, 7, 8, 9]])
    reserved = {True: ([0], [0, 1]), False: ([0, 2], [0, 1, 2, 3])}
    for cross, by_order in reserved.items():
        ids = make(cross_documents=cross).row_ids(tokens_BT, None)
        for read, cut in enumerate(by_order):
            assert (ids[0, :, read] == 101 * (read + 1) - 1).nonzero().flatten().tolist() == cut
    ids = make().row_ids(tokens_BT, torch.tensor([[-1, 4]]))
    assert ids[0, 0, 0] != 100 and ids[0, 0, 1] == 201 and ids[0, 1, 1] != 201


def test_documents_before_do_not_matter_when_not_crossed():
    one, other = torch.tensor([[11, 12, BOS, 7, 8, 9]]), torch.tensor([[21, 22, BOS, 7, 8, 9]])
    for cross in (False, True):
        ids, other_ids = (make(cross_documents=cross).row_ids(tokens_BT, None)[:, 2:] for tokens_BT in (one, other))
        assert torch.equal(ids, other_ids) == (not cross)


def test_signs_depend_on_the_seed_alone():
    pool = sign_pool(7, 512, 96)
    assert pool.dtype == torch.int8 and set(pool.unique().tolist()) == {-1, 1}
    assert torch.equal(pool, sign_pool(7, 512, 96))
    bits = [splitmix64(splitmix64(7) + place) & 1 for place in range(1000)]
    assert pool.flatten()[:1000].tolist() == [2 * bit - 1 for bit in bits]
    assert abs(pool.double().mean()) < 5 / (512 * 96) ** 0.5
    rows = pool.double() @ pool.double().t() / 96
    assert (rows - torch.eye(512)).abs().max() < 6 / 96**0.5
    for seed in (6, 8):
        assert abs((pool.double() * sign_pool(seed, 512, 96)).mean()) < 5 / (512 * 96) ** 0.5
    memory = make(seed=7)
    assert "signs_SD" not in memory.state_dict()
    assert torch.equal(memory.double().signs_SD, sign_pool(7, 64, 10))


def test_without_signs_the_rows_are_added():
    memory = make(sign_rows=0)
    rows = torch.randn(1, 6, 2, 1, 10)
    payload = memory.prepare(rows, torch.randint(50, (1, 6)), None)
    assert torch.equal(payload, rows[:, :, 0, 0] + rows[:, :, 1, 0])


def test_initial_scale_and_rows():
    memory = make()
    assert memory.layers == (0, 1, 2, 3) and memory.spec.init == 0.0
    assert memory.scale.tolist() == [0.25] * 4
    assert make(scale=0.05, layers="alternate").scale.tolist() == pytest.approx([0.05, 0.05])
    rows = torch.randn(1, 6, 2, 1, 10)
    payload = memory.prepare(rows, torch.randint(50, (1, 6)), None)
    point = Point(torch.randn(1, 6, 10), torch.randn(1, 6, 10))
    torch.testing.assert_close(sum(memory.read(layer, payload, point) for layer in memory.layers), payload)


def test_gates_look_at_h():
    memory = make()
    for gate in memory.gate:
        gate.data.normal_()
    rows, x, h = torch.randn(2, 6, 2, 1, 10), torch.randn(2, 6, 10), torch.randn(2, 6, 10)
    payload = memory.prepare(rows, torch.randint(50, (2, 6)), None)
    assert not torch.allclose(memory.read(1, payload, Point(x, h)), memory.read(1, payload, Point(x, h.roll(1, 0))))
    assert torch.equal(memory.read(1, payload, Point(x, h)), memory.read(1, payload, Point(x + 1, h)))


@pytest.mark.parametrize(
    ("option", "value"),
    [("rows", 1), ("orders", ()), ("orders", (4,)), ("orders", (3, 2)), ("orders", (2, 2)), ("sign_rows", -1)],
)
def test_refused(option, value):
    with pytest.raises(UserError, match=rf"--memory\.ngram\.{option.replace('_', '-')}"):
        make(**{option: value})
