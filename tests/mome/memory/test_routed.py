"""RoutedMemory against independent loops over tokens, heads and slots, written from MoME's equations."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mome.errors import UserError
from mome.memory import ModelShape
from mome.memory.routed import RoutedConfig, RoutedMemory, select, slot_weights, tie_order
from mome.table.hashing import hash_ngrams

SHAPE = ModelShape(layers=5, width=12, heads=3, head_dim=5, vocab_size=17, bos=0)


class Point(NamedTuple):
    x: Tensor
    h: Tensor


def make(shape: ModelShape = SHAPE, seed: int = 0, **options) -> RoutedMemory:
    return RoutedMemory(RoutedConfig(**{"gate_channels": 7, **options}), shape, seed).double()


def fill(memory: RoutedMemory) -> RoutedMemory:
    for parameter in memory.parameters():
        parameter.data.normal_()
    return memory


def inputs(memory: RoutedMemory, batch: int = 2, steps: int = 5, shape: ModelShape = SHAPE):
    """(tokens, rows gathered from a random table, site)."""
    tokens_BT = torch.randint(shape.vocab_size, (batch, steps))
    table = torch.randn(memory.spec.rows, memory.spec.lanes, memory.spec.dim, dtype=torch.float64, requires_grad=True)
    ids = memory.row_ids(tokens_BT, None)
    rows = table.index_select(0, ids.flatten()).view(batch, steps, 1, memory.spec.lanes, memory.spec.dim)
    x = torch.randn(batch, steps, shape.heads, shape.head_dim, dtype=torch.float64)
    return tokens_BT, rows, Point(x, torch.randn(batch, steps, shape.width, dtype=torch.float64))


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def oracle_weights(logits: list[float], preferred: int, top_k: int, kind: str) -> list[float]:
    slots = len(logits)
    chosen = sorted(range(slots), key=lambda s: (-logits[s], (s - preferred) % slots))[:top_k]
    exps = [math.exp(z) for z in logits]
    softmax = [e / sum(exps) for e in exps]
    if kind == "softmax" or (top_k == 1 and kind in ("sigmoid-norm", "softmax-norm")):
        return [softmax[s] if s in chosen else 0.0 for s in range(slots)]
    if kind == "sigmoid":
        return [sigmoid(logits[s]) if s in chosen else 0.0 for s in range(slots)]
    score = [sigmoid(z) for z in logits] if kind == "sigmoid-norm" else exps
    total = sum(score[s] for s in chosen)
    return [score[s] / total if s in chosen else 0.0 for s in range(slots)]


def oracle(memory: RoutedMemory, layer: int, ids_BT: Tensor, rows: Tensor, site: Point) -> tuple[Tensor, Tensor]:
    """(delta, routes) by loops over micro-rows, tokens, heads and slots."""
    config, slots, heads = memory.config, memory.slots, memory.heads
    index = memory.layers.index(layer)
    router, bias, gate = memory.router[index].tolist(), memory.router_bias[index].tolist(), memory.gate[index].tolist()
    delta, routes = torch.zeros_like(site.x), torch.zeros(*site.x.shape[:3], slots, dtype=torch.float64)
    for b in range(site.x.shape[0]):
        for t in range(site.x.shape[1]):
            h = site.h[b, t].tolist()
            for head in range(heads):
                if config.router_input == "hidden":
                    seen, first = h, head * slots
                else:
                    seen, first = site.x[b, t, head].tolist(), 0
                logits = []
                for s in range(first, first + slots):
                    logits.append(sum(w * z for w, z in zip(router[s], seen, strict=True)) + bias[s])
                preferred = (int(ids_BT[b, t]) + index * heads + head) % slots
                weights = oracle_weights(logits, preferred, config.top_k, config.weights)
                table = 0 if config.share_layers else index
                banks, bank = (heads, head) if config.bank == "per-head" else (1, 0)
                lane = (table * banks + bank) * (slots + config.shared_slots)
                memory_D = torch.zeros(memory.spec.dim, dtype=torch.float64)
                for s in range(slots):
                    memory_D += weights[s] * rows[b, t, 0, lane + s]
                for s in range(config.shared_slots):
                    memory_D += rows[b, t, 0, lane + slots + s]
                gamma = 2 * sigmoid(sum(w * z for w, z in zip(gate[head], h)))
                delta[b, t, head] = gamma * memory_D
                routes[b, t, head] = torch.tensor(weights, dtype=torch.float64)
    return delta, routes


KINDS = ["sigmoid-norm", "softmax-norm", "softmax-norm-detach", "softmax", "sigmoid"]
FORMS = [
    {},
    {"router_input": "value"},
    {"bank": "per-head", "shared_slots": 1},
    {"share_layers": True},
    {"share_layers": True, "bank": "per-head", "shared_slots": 2, "router_input": "value"},
    {"index": "bigram", "bigram_rows": 29},
]


@torch.no_grad()
def check_against_loops(memory: RoutedMemory, **sizes):
    tokens_BT, rows, site = inputs(memory, **sizes)
    payload = memory.prepare(rows, tokens_BT, None)
    ids_BT = memory.row_ids(tokens_BT, None)[..., 0]
    for layer in memory.layers:
        delta, routes = oracle(memory, layer, ids_BT, rows, site)
        torch.testing.assert_close(memory.read(layer, payload, site), delta, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(memory.routes(layer, payload, site), routes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "top_k"), [(4, 2), (4, 1), (3, 3), (7, 3), (1, 1)])
def test_equals_loops_for_every_kind_of_weights(kind, slots, top_k, poison_empty):
    check_against_loops(fill(make(weights=kind, slots=slots, top_k=top_k)))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())) or "default")
@pytest.mark.parametrize("zero_router", [False, True])
def test_equals_loops_for_every_form(form, zero_router, poison_empty):
    memory = make(slots=4, layers=(0, 2, 3), **form)
    check_against_loops(memory if zero_router else fill(memory))


@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (3, 1), (1, 13)])
def test_equals_loops_for_odd_sizes(batch, steps):
    shape = ModelShape(layers=3, width=7, heads=1, head_dim=3, vocab_size=5, bos=0)
    memory = fill(make(shape, gate_channels=1, slots=3, layers="all"))
    check_against_loops(memory, batch=batch, steps=steps, shape=shape)


def test_defaults_are_the_published_configuration():
    memory = make()
    assert (memory.config.weights, memory.config.top_k, memory.config.router_input) == ("sigmoid-norm", 2, "hidden")
    assert memory.layers == (0, 2, 4) and make(ModelShape(4, 12, 3, 5, 17, 0)).layers == (1, 3)
    assert (memory.spec.rows, memory.spec.lanes, memory.spec.dim) == (17, 3 * 3, 5)
    assert memory.spec.init == pytest.approx(3**0.5 / 12**0.5)
    assert all((parameter == 0).all() for parameter in memory.parameters())


def test_shapes_of_the_other_forms():
    assert make(slots=4, bank="per-head", shared_slots=2).spec.lanes == 3 * 3 * 6
    assert make(slots=4, share_layers=True).spec.lanes == 4 and len(make(slots=4, share_layers=True).router) == 3
    assert make(index="bigram", bigram_rows=1000).spec.rows == 1000
    assert make(init=0.5).spec.init == 0.5
    assert make(layers="last").layers == (4,) and make(layers="all").layers == (0, 1, 2, 3, 4)


def test_at_the_start_the_gate_is_one_and_the_selected_weigh_alike():
    memory = make(slots=4)
    tokens_BT, rows, site = inputs(memory)
    payload = memory.prepare(rows, tokens_BT, None)
    routes = memory.routes(2, payload, site)
    assert set(routes.unique().tolist()) == {0.0, 0.5}
    lanes = rows[:, :, 0, 4:8]
    torch.testing.assert_close(memory.read(2, payload, site), torch.einsum("bthm,btmd->bthd", routes, lanes))


@pytest.mark.parametrize(("heads", "slots", "top_k"), [(4, 4, 2), (6, 3, 1), (2, 5, 2), (3, 12, 2)])
def test_a_zero_router_spreads_evenly_over_slots(heads, slots, top_k):
    shape = ModelShape(layers=4, width=12, heads=heads, head_dim=2, vocab_size=slots * 7, bos=0)
    memory = make(shape, slots=slots, top_k=top_k, layers="all", share_layers=True)
    tokens_BT = torch.arange(shape.vocab_size).unsqueeze(0)
    rows = torch.zeros(1, shape.vocab_size, 1, slots, 2, dtype=torch.float64)
    site = Point(torch.zeros(1, shape.vocab_size, heads, 2).double(), torch.randn(1, shape.vocab_size, 12).double())
    payload = memory.prepare(rows, tokens_BT, None)
    used = torch.stack([memory.routes(layer, payload, site) > 0 for layer in memory.layers])  # layers, 1, T, H, M
    assert (used.sum(-1) == top_k).all()
    # Over rows: each head of each layer visits every slot equally often.
    assert (used.sum((1, 2)) == shape.vocab_size * top_k // slots).all()
    # Within a row: heads and layers differ, so no two slots of it are more than one round apart.
    by_row = used.sum((0, 1, 3))
    assert (by_row.amax(-1) - by_row.amin(-1)).max() <= top_k


def test_selection_breaks_partial_ties_by_the_rotation():
    logits_MN = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]] * 5).t()
    order = tie_order(torch.arange(5), heads=1, slots=5, first_site=0)
    picked = select(logits_MN.unsqueeze(0), order, top_k=2)[0]
    # Slot 0 always; of the tied 1, 2, 3 the first at or after slot n going around.
    assert [picked[:, n].nonzero().flatten().tolist() for n in range(5)] == [[0, 1], [0, 1], [0, 2], [0, 3], [0, 1]]


@pytest.mark.parametrize("kind", ["sigmoid-norm", "softmax-norm", "softmax-norm-detach"])
def test_full_routing_is_the_dense_weighted_sum(kind):
    memory = fill(make(slots=4, top_k=4, weights=kind))
    tokens_BT, rows, site = inputs(memory)
    payload = memory.prepare(rows, tokens_BT, None)
    logits = torch.einsum("btd,hmd->bthm", site.h, memory.router[1].view(3, 4, 12)) + memory.router_bias[1].view(3, 4)
    scores = logits.sigmoid() if kind == "sigmoid-norm" else logits.exp()
    dense = torch.einsum("bthm,btmd->bthd", scores / scores.sum(-1, keepdim=True), rows[:, :, 0, 4:8])
    gates = 2 * torch.einsum("btc,hc->bth", site.h[..., :7], memory.gate[1]).sigmoid()
    torch.testing.assert_close(memory.read(2, payload, site), gates.unsqueeze(-1) * dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["sigmoid-norm", "softmax-norm", "softmax", "sigmoid"])
@pytest.mark.parametrize(
    "form", [{"slots": 4}, {"slots": 3, "top_k": 1}, {"slots": 3, "router_input": "value", "bank": "per-head"}]
)
def test_gradients_of_router_gate_and_rows(kind, form):
    shape = ModelShape(layers=2, width=4, heads=2, head_dim=2, vocab_size=5, bos=0)
    memory = fill(make(shape, gate_channels=3, layers="last", weights=kind, shared_slots=1, **form))
    tokens_BT, rows, site = inputs(memory, 1, 3, shape)
    leaves = [rows.detach().requires_grad_(), site.h.requires_grad_(), *memory.parameters()]
    if memory.config.router_input == "value":
        leaves.append(site.x.requires_grad_())

    def read(*_):
        return memory.read(1, memory.prepare(leaves[0], tokens_BT, None), site)

    assert torch.autograd.gradcheck(read, tuple(leaves))


def test_the_detached_sum_passes_no_gradient():
    logits = torch.randn(1, 4, 3, dtype=torch.float64, requires_grad=True)
    selected = torch.tensor([True, False, True, True]).view(1, 4, 1).expand(1, 4, 3)
    upstream = torch.randn(1, 4, 3, dtype=torch.float64)
    (got,) = torch.autograd.grad((slot_weights(logits, selected, "softmax-norm-detach", 3) * upstream).sum(), logits)
    scores = torch.softmax(logits, dim=1) * selected
    constant = scores.sum(1, keepdim=True).detach()
    (expected,) = torch.autograd.grad((scores / constant * upstream).sum(), logits)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    (through,) = torch.autograd.grad((slot_weights(logits, selected, "softmax-norm", 3) * upstream).sum(), logits)
    assert not torch.allclose(got, through)


def test_weights_survive_extreme_logits():
    logits = torch.tensor([-200.0, -300.0, -400.0, -200.0]).view(1, 4, 1).requires_grad_()
    order = tie_order(torch.tensor([0]), 1, 4, 0)
    for kind in KINDS:
        for top_k in (1, 2, 4):
            weights = slot_weights(logits, select(logits.detach(), order, top_k), kind, top_k)
            (gradient,) = torch.autograd.grad(weights.sum(), logits)
            assert weights.isfinite().all() and gradient.isfinite().all(), (kind, top_k)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"top_k": 1},
        {"top_k": 4},
        {"weights": "sigmoid"},
        {"index": "bigram", "bigram_rows": 50},
        {"router_input": "value"},
    ],
)
def test_a_zero_router_learns_to_route_one_token_by_its_context(form):
    """A token is followed by +target in one context and by -target in the other: no fixed row can serve both."""
    shape = ModelShape(layers=1, width=8, heads=2, head_dim=4, vocab_size=6, bos=0)
    memory = make(shape, slots=4, layers="last", gate_channels=1, **form)
    context, target = torch.randn(8, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
    context[0] = 0  # the gate, which looks at this channel alone, cannot tell the contexts apart
    sign = torch.tensor([1.0, -1.0], dtype=torch.float64)
    tokens_BT = torch.tensor([[1], [1]])
    value = torch.randn(2, 4, dtype=torch.float64)
    site = Point(sign.view(2, 1, 1, 1) * value, sign.view(2, 1, 1) * context)
    rows = torch.empty(memory.spec.rows, memory.spec.lanes, 4, dtype=torch.float64)
    rows.uniform_(-memory.spec.init, memory.spec.init).requires_grad_()
    routers = [*memory.router, *memory.router_bias]
    optimizer = torch.optim.Adam([rows, *routers], lr=0.05)
    for step in range(40):
        ids = memory.row_ids(tokens_BT, None).flatten()
        payload = memory.prepare(rows.index_select(0, ids).view(2, 1, 1, -1, 4), tokens_BT, None)
        routes = memory.routes(0, payload, site)
        if step == 0:
            assert torch.equal(routes[0], routes[1])
        loss = (memory.read(0, payload, site) - sign.view(2, 1, 1, 1) * target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            assert (memory.router[0].grad != 0).any()
        optimizer.step()
    assert (routes[0] - routes[1]).abs().max() > 0.1
    assert loss < 0.5 * target.square().mean()  # what the best context-free row leaves is the whole of it


def test_router_noise_is_an_option_and_depends_on_the_seed():
    one, same, other = (make(router_std=0.1, seed=seed, slots=8, top_k=2) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters()))
    assert not torch.equal(one.router[0], other.router[0]) and not torch.equal(one.router[0], one.router[1])
    assert 0.09 < torch.cat([w.flatten() for w in one.router]).std() < 0.11
    assert all((bias == 0).all() for bias in one.router_bias)


def test_routes_look_at_h_and_with_value_routers_at_x():
    for router_input in ("hidden", "value"):
        memory = fill(make(slots=4, router_input=router_input))
        memory.gate[1].data.zero_()
        tokens_BT, rows, site = inputs(memory)
        payload = memory.prepare(rows, tokens_BT, None)
        base = memory.read(2, payload, site)
        same_h = torch.equal(base, memory.read(2, payload, Point(site.x, site.h.roll(1, 0))))
        same_x = torch.equal(base, memory.read(2, payload, Point(site.x.roll(1, 0), site.h)))
        assert (same_h, same_x) == ((False, True) if router_input == "hidden" else (True, False))


@pytest.mark.parametrize("kind", ["xor", "mix"])
def test_bigram_rows_in_pieces_equal_the_whole(kind):
    memory = fill(make(index="bigram", bigram_rows=29, slots=4, hash=kind))
    tokens_BT, rows, site = inputs(memory, 2, 9)
    assert memory.history == 1
    ids = hash_ngrams(tokens_BT, None, (2,), 29, kind)
    whole_ids, whole = memory.row_ids(tokens_BT, None), memory.read(2, memory.prepare(rows, tokens_BT, None), site)
    assert torch.equal(whole_ids, ids) and (whole_ids[:, 0] == 28).all() and (whole_ids[:, 1:] < 28).all()
    for bounds in ([0, 4, 9], list(range(10))):
        history_BH = torch.full((2, 1), -1)
        for start, end in pairwise(bounds):
            piece = tokens_BT[:, start:end]
            assert torch.equal(memory.row_ids(piece, history_BH), whole_ids[:, start:end])
            payload = memory.prepare(rows[:, start:end], piece, history_BH)
            delta = memory.read(2, payload, Point(site.x[:, start:end], site.h[:, start:end]))
            torch.testing.assert_close(delta, whole[:, start:end], rtol=1e-12, atol=1e-12)
            history_BH = piece[:, -1:]


def test_routing_is_done_in_float32_or_more(poison_empty):
    memory = fill(make(slots=4)).float()
    tokens_BT, rows, site = inputs(memory)
    half_rows, half_site = rows.detach().bfloat16(), Point(site.x.bfloat16(), site.h.bfloat16())
    payload = memory.prepare(half_rows, tokens_BT, None)
    exact = memory.routes(2, payload, Point(half_site.x.float(), half_site.h.float()))
    assert torch.equal(memory.routes(2, payload, half_site), exact) and exact.dtype == torch.float32
    assert memory.bfloat16().routes(2, payload, half_site).dtype == torch.float32
    half = memory.read(2, payload, half_site)
    wide_site = Point(half_site.x.double(), half_site.h.double())
    wide = memory.double().read(2, memory.prepare(half_rows.double(), tokens_BT, None), wide_site)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), wide, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("slots", {"slots": -1}),
        ("slots", {"slots": 256}),
        ("top-k", {"top_k": 0}),
        ("top-k", {"top_k": 4}),
        ("index", {"index": "trigram"}),
        ("bigram-rows", {"index": "bigram"}),
        ("bigram-rows", {"bigram_rows": 100}),
        ("bigram-rows", {"index": "bigram", "bigram_rows": 1 << 31}),
        ("hash", {"hash": "mix"}),
        ("hash", {"hash": "sum", "index": "bigram", "bigram_rows": 100}),
        ("weights", {"weights": "relu"}),
        ("router-input", {"router_input": "query"}),
        ("router-std", {"router_std": -0.1}),
        ("bank", {"bank": "own"}),
        ("shared-slots", {"shared_slots": -1}),
        ("layers", {"layers": (5,)}),
        ("init", {"init": -1.0}),
        ("init", {"init": 0.0}),
    ],
)
def test_refused(option, options):
    with pytest.raises(UserError, match=rf"^--memory\.routed\.{option} .*: .*[a-z]"):
        make(**options)
    assert make(init=0.0, router_std=0.1).spec.init == 0.0
