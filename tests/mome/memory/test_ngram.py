"""NgramMemory against loops; its ids and sums are the same in one piece, in chunks and one token at a time.

Lives here: row ids and signed sums of every hash, order and head, document bounds, canonical ids, options.
Not here: the hashes (test_hashing.py) and the folding of texts (test_canonical.py).
"""

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
MIXED = {"hash": "mix", "orders": (2, 5), "heads": 2}


def looked_up(before: list[int], order: int, head: int, cross: bool, config: NgramConfig) -> tuple[int, int]:
    """(row in the range, sign row) of the n-gram that ends a stream of ids."""
    window = before[::-1][:order]
    short = len(window) < order or -1 in window
    if short or (not cross and BOS in window[:-1]):
        return config.rows - 1, 0
    if config.hash == "xor":
        codes = xor_int32(window, ROW_MULTIPLIERS[order]), xor_int32(window, SIGN_MULTIPLIERS[order])
    else:
        mixed = 0
        for token in window:
            mixed = splitmix64(mixed ^ token)
        codes = [splitmix64(mixed ^ splitmix64(order << 40 | head << 1 | signs)) for signs in (0, 1)]
    return codes[0] % (config.rows - 1), codes[1] % config.sign_rows


@pytest.mark.parametrize("cross", [True, False])
@pytest.mark.parametrize(
    "options", [{"orders": (2,)}, {"orders": (3,)}, {}, MIXED, {"hash": "mix", "orders": (2, 3, 8)}]
)
def test_equals_loops(cross, options, poison_empty):
    memory = make(cross_documents=cross, layers=(0, 3), seed=5, **options).double()
    config, orders = memory.config, memory.config.orders
    reads = [(order, head) for order in orders for head in range(config.heads)]
    memory.scale.data.uniform_(0.5, 2)
    for gate in memory.gate:
        gate.data.normal_()
    assert memory.history == max(orders) - 1 and memory.reads == len(reads) and memory.spec.rows == 101 * len(reads)
    tokens_BT = torch.randint(50_000, (2, 23))
    tokens_BT[0, [0, 1, 7, 12]] = BOS
    history_BH = torch.randint(50_000, (2, 7))
    history_BH[0, :-1], history_BH[0, -1], history_BH[1, 2] = -1, BOS, BOS
    history_BH = history_BH[:, 7 - memory.history :]
    ids = memory.row_ids(tokens_BT, history_BH)
    rows = torch.randn(2, 23, len(reads), 1, 10, dtype=torch.float64, requires_grad=True)
    payload = memory.prepare(rows, tokens_BT, history_BH)
    site = Point(torch.randn(2, 23, 10, dtype=torch.float64), torch.randn(2, 23, 10, dtype=torch.float64))
    deltas = [memory.read(layer, payload, site) for layer in (0, 3)]
    for b in range(2):
        for t in range(23):
            stream = history_BH[b].tolist() + tokens_BT[b, : t + 1].tolist()
            total = torch.zeros(10, dtype=torch.float64)
            for read, (order, head) in enumerate(reads):
                row, sign = looked_up(stream, order, head, cross, config)
                assert ids[b, t, read] == row + 101 * read
                total += rows[b, t, read, 0] * memory.signs_SD[sign]
            for index, delta in enumerate(deltas):
                score = sum(w * z for w, z in zip(memory.gate[index][0].tolist(), site.h[b, t].tolist()))
                gate = memory.scale[index].item() * 2 / (1 + math.exp(-score))
                torch.testing.assert_close(delta[b, t], gate * total, rtol=1e-12, atol=1e-12)
    sum(delta.sum() for delta in deltas).backward()
    assert rows.grad.isfinite().all() and (rows.grad != 0).all()


@settings(max_examples=30, deadline=None)
@given(st.booleans(), st.sampled_from([{}, MIXED]), st.integers(0, 2**31), st.lists(st.integers(0, 14), max_size=4))
def test_pieces_equal_the_whole(cross, options, seed, cuts):
    memory = make(cross_documents=cross, rows=1009, **options).double()
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(8, (2, 14), generator=generator)  # BOS is frequent among 8 ids
    whole = memory.row_ids(tokens_BT, None)
    rows = torch.randn(2, 14, memory.reads, 1, 10, generator=generator, dtype=torch.float64)
    payload = memory.prepare(rows, tokens_BT, None)
    for bounds in ([0, *sorted(cuts), 14], list(range(15))):
        history_BH = torch.full((2, memory.history), -1)
        for start, end in pairwise(bounds):
            piece = tokens_BT[:, start:end]
            assert torch.equal(memory.row_ids(piece, history_BH), whole[:, start:end])
            assert torch.equal(memory.prepare(rows[:, start:end], piece, history_BH), payload[:, start:end])
            history_BH = torch.cat([history_BH, piece], dim=1)[:, -memory.history :]


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


def with_strings(strings: list[bytes | None], **options) -> NgramMemory:
    shape = ModelShape(4, 10, 2, 5, len(strings), BOS, token_strings=strings)
    config = NgramConfig(rows=1009, sign_rows=64, gate_channels=4, canonical=True, **options)
    return NgramMemory(config, shape, 0)


@pytest.mark.parametrize("options", [{}, MIXED])
def test_canonical_tokens_hash_as_their_class(options):
    strings = [b"the", b" The", b"a", None, b"THE", b" A", b"\xc3", b"\xc3", b"x"]
    memory, plain = with_strings(strings, **options), make(rows=1009, **options)
    assert memory.canonical_V.tolist() == [0, 0, 2, 3, 0, 2, 6, 6, 8]
    tokens_BT = torch.randint(len(strings), (3, 40))
    history_BH = torch.randint(-1, len(strings), (3, memory.history))
    folded = memory.canonical_V[tokens_BT], torch.where(history_BH < 0, -1, memory.canonical_V[history_BH.clamp(min=0)])
    rows = torch.randn(3, 40, memory.reads, 1, 10)
    for before in (None, history_BH):
        told = (folded[0], None if before is None else folded[1])
        assert torch.equal(memory.row_ids(tokens_BT, before), plain.row_ids(*told))
        assert torch.equal(memory.prepare(rows, tokens_BT, before), plain.prepare(rows, *told))
    assert not torch.equal(memory.row_ids(tokens_BT, None), plain.row_ids(tokens_BT, None))
    assert "canonical_V" not in plain.state_dict()


def test_a_document_starts_at_its_raw_token():
    """Even where the start token folds with a token of text, that one starts nothing."""
    strings = [b"a", b"x", b"b", b" X"]
    memory = with_strings(strings, cross_documents=False, orders=(2,))
    assert memory.canonical_V.tolist() == [0, 1, 2, 1] and BOS == 3
    ids = memory.row_ids(torch.tensor([[0, 3, 2, 1, 2]]), None)[0, :, 0]
    assert (ids == 1008).tolist() == [True, True, False, False, False]
    assert ids[2] == ids[4]


def test_canonical_ids_are_saved_and_loaded():
    strings = [b"a", b" A", b"b", None]
    trained, tokens_BT = with_strings(strings), torch.tensor([[0, 1, 2, 1, 0]])
    read = NgramMemory(trained.config, ModelShape(4, 10, 2, 5, len(strings), BOS), 0)
    with pytest.raises(ValueError, match="canonical ids of ngram are unknown"):
        read.row_ids(tokens_BT, None)
    read.load_state_dict(trained.state_dict())
    assert torch.equal(read.row_ids(tokens_BT, None), trained.row_ids(tokens_BT, None))
    with torch.device("meta"):
        assert NgramMemory(trained.config, ModelShape(4, 10, 2, 5, 4, BOS), 0).canonical_V.shape == (4,)


def test_rows_that_the_hash_uses_badly_are_warned_of():
    assert make().warnings == ()
    (line,) = make(rows=3 * 36313 + 1).warnings
    assert "multiple of 36313" in line
    assert make(rows=3 * 36313 + 1, hash="mix").warnings == ()


def test_a_table_beyond_32_bits():
    memory = make(rows=1 << 40, hash="mix", orders=(2, 3))
    ids = memory.row_ids(torch.randint(50_000, (1, 100)), None)[0, 2:]
    assert memory.spec.rows == 1 << 41 and int((ids[:, 0] >> 32).max()) > 0
    assert bool((ids[:, 1] >= 1 << 40).all()) and int(ids.max()) < 1 << 41
    with pytest.raises(ValueError, match="int64"):
        make(rows=1 << 61, hash="mix", orders=(2, 3, 4, 5))


@pytest.mark.parametrize(
    ("option", "value", "others"),
    [
        ("rows", 1, {}), ("rows", 1, {"hash": "mix"}), ("rows", 1 << 31, {}), ("rows", (1 << 62) + 1, {"hash": "mix"}),
        ("orders", (), {}), ("orders", (4,), {}), ("orders", (3, 2), {}), ("orders", (2, 2), {"hash": "mix"}),
        ("orders", (1, 2), {"hash": "mix"}), ("orders", (9,), {"hash": "mix"}), ("sign_rows", -1, {}),
        ("sign_rows", 1 << 31, {}), ("hash", "sum", {}), ("heads", 0, {"hash": "mix"}), ("heads", 2, {}),
        ("heads", 65, {"hash": "mix"}),
    ],
)  # fmt: skip
def test_refused(option, value, others):
    with pytest.raises(UserError, match=rf"^--memory\.ngram\.{option.replace('_', '-')} .*: ") as caught:
        make(**{option: value}, **others)
    assert "\n" not in str(caught.value)
