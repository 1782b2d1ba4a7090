"""Who updates which dense parameter, in what order, for how many bytes; and one process, to the bit as before.

Lives here: share_out on many sizes, the two orders, the formula of bytes, state and its errors, hashes.
Not here: several processes (tests/dist/test_dense.py), rules and labels (tests/optim/).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from mome.dense import LEAST_SLICE, MOST_PADDED, DenseOptimizers, Share, part_of, share_out, step_bytes
from mome.errors import UserError
from mome.world import World
from optim.groups import (
    SCATTER_ORDER,
    WORK_ORDER,
    OptimConfig,
    assign,
    build_optimizers,
    first_state,
    groups,
    in_order,
    set_schedule,
)

D = 8
SHAPES = {
    "embed": (40, D), "head": (40, D), "smear_gate": (12,), "smear_lambda": (), "blocks.0.qkv": (3 * D, D),
    "blocks.0.attn_out": (D, D), "blocks.0.up": (4 * D, D), "blocks.0.down": (D, 4 * D), "blocks.0.bias": (D,),
    "memories.routed.router": (2, 6, D), "memories.value.gate": (2, 2, 4),
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", ["muon", "adamw"])


def toy(dtype=torch.float32) -> list[tuple[str, Parameter]]:
    return [(name, Parameter(torch.randn(shape, dtype=dtype) * 0.1)) for name, shape in SHAPES.items()]


def on_meta(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, Parameter]]:
    with torch.device("meta"):
        return [(name, Parameter(torch.empty(shape))) for name, shape in shapes.items()]


def fill_grads(named, step: int, without: str | None = None) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, weight in named:
        grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        weight.grad = None if name == without else grad


def layers(count: int, width: int) -> dict[str, tuple[int, ...]]:
    """The matrices of so many blocks, 12 width^2 elements each."""
    shapes = {"qkv": (3 * width, width), "attn_out": (width, width), "up": (4 * width, width)}
    shapes |= {"down": (width, 4 * width)}
    return {f"blocks.{n}.{name}": shape for n in range(count) for name, shape in shapes.items()}


def places(share: Share) -> set[int]:
    """Where a parameter lies in a part of a buffer."""
    return set(range(share.begin, share.begin + share.length))


def spread(sizes: list[int], ranks: int) -> int:
    """The most that a rank has when the largest goes first, and each to the rank with the least."""
    loads = [0] * ranks
    for size in sorted(sizes, reverse=True):
        loads[loads.index(min(loads))] += size
    return max(loads)


# Who owns what


@KINDS
@given(
    size=st.integers(1, 70),
    widths=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    vocab=st.integers(1, 4000),
)
@settings(max_examples=60, deadline=None)
def test_every_element_has_its_owners_and_its_own_place(kind, size, widths, vocab):
    """One owner, or all ranks; a slice is where torch would chunk it; places in a rank's part never meet."""
    shapes = {f"blocks.{n}.up": (width, 5) for n, width in enumerate(widths)}
    shapes |= {"embed": (vocab, 37), "a.gate": (vocab, 11), "b.gate": (vocab, 13), "a.scale": ()}
    config, named = OptimConfig(kind=kind), on_meta(shapes)
    rule = {group.label: group.rule for group in groups(config)}
    flat: set[int] = set()
    shares = share_out(named, config, size)
    assert [name for one in shares.values() for name in one] == [
        name for pairs in assign(named, config).values() for name, _ in pairs
    ]
    for label, one in shares.items():
        taken: list[set[int]] = [set() for _ in range(size)]
        for share in one.values():
            owned = [share.owned(rank) for rank in range(size)]
            everything = range(share.numel)
            if share.way == "replicated":
                scarce = size * spread(widths, size) * 5 > MOST_PADDED * sum(widths) * 5
                assert size == 1 or (scarce if rule[label] == "normuon" else share.numel < LEAST_SLICE * size)
                assert owned == [everything] * size
                assert flat.isdisjoint(places(share))
                flat |= places(share)
                continue
            if share.way == "whole":
                assert rule[label] == "normuon" and size * part_of(one) <= MOST_PADDED * 5 * sum(widths)
                assert [rank for rank in range(size) if owned[rank]] == [share.owner]
                assert owned[share.owner] == everything
            else:
                chunks = torch.arange(share.numel).chunk(size)
                assert [list(cells) for cells in owned if cells] == [chunk.tolist() for chunk in chunks]
            for rank in range(size) if share.way == "sliced" else [share.owner]:
                assert taken[rank].isdisjoint(places(share))
                taken[rank] |= places(share)
        assert part_of(one) == max((max(cells, default=-1) + 1 for cells in taken), default=0)
    assert flat == set(range(len(flat)))


def test_matrices_are_spread_over_all_labels():
    """12 layers on 8 ranks: 144 squares, 18 each, though no label divides by 8."""
    loads = [0] * 8
    for one in share_out(on_meta(layers(12, 4)), OptimConfig(), 8).values():
        for share in one.values():
            loads[share.owner] += share.numel
    assert loads == [18 * 4**2] * 8


def test_bytes_of_a_step():
    """By hand: 2 matrices, an embedding in slices, a vector and 4 flags. On 4 ranks the matrices are replicated too: a
    label of one matrix would send 4 times its elements."""
    shapes = {"blocks.0.up": (32, 8), "blocks.0.down": (8, 30), "embed": (99, 100), "scale": (7,)}
    named = on_meta(shapes)
    matrices = 32 * 8 + 8 * 30
    for size, part, replicated in ((2, matrices + 99 * 100 // 2, 7 + 4), (4, 99 * 100 // 4, matrices + 7 + 4)):
        others = size - 1
        assert step_bytes(named, OptimConfig(), size) == {
            "dense gradients": others * part * 4, "replicated gradients": 2 * replicated * 4 * others // size,
            "dense weights": others * part * 4,
        }  # fmt: skip
    assert step_bytes(named, OptimConfig(), 1) == {}
    assert step_bytes(on_meta({"scale": (7,)}), OptimConfig(), 2) == {"replicated gradients": 2 * 8 * 4 // 2}


# The orders


@KINDS
def test_orders_name_each_label_once(kind):
    config = OptimConfig(kind=kind)
    for order in (SCATTER_ORDER, WORK_ORDER):
        assert sorted(in_order(order, config)) == sorted(group.label for group in groups(config))


def test_orders_name_nothing_else():
    labels = {group.label for kind in ("muon", "adamw") for group in groups(OptimConfig(kind=kind))}
    assert set(SCATTER_ORDER) == set(WORK_ORDER) == labels
    assert len(SCATTER_ORDER) == len(WORK_ORDER) == len(labels)


@pytest.mark.parametrize("order", [SCATTER_ORDER[1:], (*WORK_ORDER, "qkv"), (*WORK_ORDER[1:], "qkv")], ids=str)
def test_a_label_that_lacks_or_comes_twice_is_refused(order):
    with pytest.raises(AssertionError, match="exactly once"):
        in_order(order, OptimConfig())


def test_the_most_bytes_set_out_first():
    """Of a model as the presets have it, whose labels all have members."""
    config = OptimConfig()
    shapes = {"embed": (50304, 768), "head": (50304, 768), "memories.routed.router": (4, 64, 768)}
    shares = share_out(on_meta(shapes | layers(12, 768)), config, 2)
    parts = [part_of(shares[label]) for label in in_order(SCATTER_ORDER, config) if label in shares]
    assert parts[2:] == sorted(parts[2:], reverse=True) and parts[0] == parts[1] and len(parts) == 6


# One process


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_process_is_what_it_was_to_the_bit(kind, dtype):
    config, world = OptimConfig(kind=kind), World()
    named = toy(dtype)
    other = [(name, Parameter(weight.detach().clone())) for name, weight in named]
    before = {name: weight.data_ptr() for name, weight in named}
    dense, optimizers = DenseOptimizers(named, config, world), build_optimizers(other, config)
    world.calls = []
    for step in range(4):
        without = "blocks.0.up" if step == 2 else None
        fill_grads(named, step, without)
        fill_grads(other, step, without)
        dense.scatter()
        norm = torch.nn.utils.get_total_norm([weight.grad for _, weight in other if weight.grad is not None])
        square = dense.square()
        assert square.dtype == torch.float64 and square.shape == ()
        torch.testing.assert_close(square.sqrt().to(dtype), norm, rtol=1e-6, atol=0)
        for one in (dense.optimizers, optimizers):
            set_schedule(one, config, lr_mul=1 / (1 + step), momentum=0.9 + 0.01 * step)
        dense.update()
        dense.gathered()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for (name, one), (_, two) in zip(named, other):
            assert torch.equal(one, two) and one.grad is None and one.data_ptr() == before[name], name
    assert world.calls == [] and world.sent == {}
    held = {id(w): state for optimizer in optimizers for w, state in optimizer.state.items()}
    mine = dense.state_dict()
    for name, weight in other:
        for key, tensor in held[id(weight)].items():
            assert torch.equal(mine.pop(f"{name}/{key}"), tensor.view(-1) if key.startswith("exp_") else tensor)
    assert mine == {}


def test_the_square_of_no_gradient_and_of_one_that_is_not_finite():
    dense = DenseOptimizers(named := toy(), OptimConfig(), World())
    dense.scatter()
    assert float(dense.square()) == 0
    fill_grads(named, 0)
    named[3][1].grad.fill_(float("nan"))
    assert not torch.isfinite(dense.square())


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_state_is_what_the_rules_would_make(kind, dtype):
    """The same keys, shapes and dtypes as after a step, all zero; they are there before any step."""
    named, config = toy(dtype), OptimConfig(kind=kind)
    fill_grads(named, 0)
    optimizers = build_optimizers(named, config)
    for optimizer in optimizers:
        optimizer.step()
        for group in optimizer.param_groups:
            row = next(one for one in groups(config) if one.label == group["label"])
            for weight in group["params"]:
                first, made = first_state(weight, row), optimizer.state[weight]
                assert set(first) == set(made)
                for key, one in first.items():
                    assert one.shape == made[key].shape and one.dtype == made[key].dtype and not one.requires_grad
                    assert not one.any()
    state = DenseOptimizers(named, config, World()).state_dict()
    assert len({key.split("/")[0] for key in state}) == len(named) and not any(one.any() for one in state.values())


# State


def test_state_loads_from_copies_and_from_itself():
    named, config = toy(), OptimConfig()
    dense = DenseOptimizers(named, config, World())
    fill_grads(named, 0)
    dense.update()
    saved = {key: one.clone() for key, one in dense.state_dict().items()}
    other = DenseOptimizers(toy(), config, World())
    other.load_state_dict(saved)
    other.load_state_dict(other.state_dict())
    assert all(torch.equal(one, saved[key]) for key, one in other.state_dict().items())
    saved["embed/exp_avg"].zero_()
    assert other.state_dict()["embed/exp_avg"].any()


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("embed/exp_avg", None, r"optimizer state embed/exp_avg is missing, not of shape \(320,\): load"),
        ("blocks.0.qkv/momentum", (2, 2), r"state blocks.0.qkv/momentum is of shape \(2, 2\), not of shape \(24, 8\)"),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_changes_nothing(key, value, complaint):
    dense = DenseOptimizers(toy(), OptimConfig(), World())
    state = {name: torch.ones_like(one) for name, one in dense.state_dict().items()}
    del state[key]
    if value:
        state[key] = torch.ones(value)
    with pytest.raises(UserError, match=complaint):
        dense.load_state_dict(state)
    assert not any(one.any() for one in dense.state_dict().values())


def test_hashes_see_one_bit_of_any_dtype():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        named = toy(dtype)
        dense = DenseOptimizers(named, OptimConfig(kind="adamw"), World())
        before = dense.hash_of_replicas()
        assert before == dense.hash_of_replicas() and list(before) == list(SHAPES)
        with torch.no_grad():
            named[3][1].copy_(-named[3][1])
        after = dense.hash_of_replicas()
        assert {name for name in SHAPES if before[name] != after[name]} == {"smear_lambda"}


# What is refused


def test_a_parameter_that_is_not_contiguous_is_named():
    with pytest.raises(ValueError, match="parameter embed is not contiguous"):
        DenseOptimizers([("embed", Parameter(torch.zeros(8, 40).mT))], OptimConfig(), World())


def test_several_dtypes_are_refused_in_several_processes():
    named = [("embed", Parameter(torch.zeros(4, 4))), ("scale", Parameter(torch.zeros(3, dtype=torch.float64)))]
    DenseOptimizers(named, OptimConfig(), World())
    with pytest.raises(ValueError, match=r"parameter scale is torch.float64 and embed torch.float32: .* all the same"):
        DenseOptimizers(named, OptimConfig(), World(1, 2))
