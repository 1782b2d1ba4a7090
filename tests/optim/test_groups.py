"""Every parameter is in exactly one group, with the values that the table says.

Lives here: labels by name, errors, the optimizers made, the schedule set, the printed table.
Not here: the rules (test_muon.py, test_adam.py); names of the real models are checked beside them.
"""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch.nn import Parameter

from optim.adam import CautiousAdam
from optim.groups import (
    PATTERNS,
    OptimConfig,
    aligned,
    assign,
    build_optimizers,
    describe,
    groups,
    label_of,
    set_schedule,
    state_bytes,
)
from optim.muon import NorMuon

D = 8
LABELS = {
    "embed": ((40, D), "embed"),
    "head": ((40, D), "head"),
    "head.weight": ((40, D), "head"),
    "smear_gate": ((12,), "smear"),
    "smear.weight": ((1, 12), "smear"),
    "smear_lambda": ((), "scalars"),
    "smear": ((1,), "scalars"),
    "blocks.0.qkv": ((3 * D, D), "qkv"),
    "blocks.1.qkv": ((2, 3 * D, D), "qkv"),
    "blocks.0.attn.qkv.weight": ((3 * D, D), "qkv"),
    "blocks.0.attn_out": ((D, D), "matrix"),
    "blocks.0.up": ((4 * D, D), "matrix"),
    "blocks.0.mlp.up.weight": ((4 * D, D), "matrix"),
    "blocks.0.down": ((D, 4 * D), "down"),
    "blocks.0.attn_gate": ((2, 4), "gates"),
    "blocks.0.ra": ((), "scalars"),
    "blocks.0.bias": ((D,), "scalars"),
    "residual_lambdas": ((4, 2), "scalars"),
    "memories.routed.router.0": ((6, D), "router"),
    "memories.routed.router": ((2, 6, D), "router"),
    "memories.routed.router_bias.0": ((6,), "gates"),
    "memories.routed.gate.0": ((2, 4), "gates"),
    "memories.value.gate": ((2, 2, 4), "gates"),
    "memories.ngram.scale": ((2,), "scalars"),
    "memories.ngram.gate_scale": ((2,), "scalars"),
}


def model(names=LABELS) -> list[tuple[str, Parameter]]:
    return [(name, Parameter(torch.randn(LABELS[name][0]) * 0.1)) for name in names]


def fill_grads(named, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in named:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", LABELS)
def test_labels(name):
    shape, label = LABELS[name]
    assert label_of(name, Parameter(torch.empty(shape)), OptimConfig()) == label


NO_LABEL = ["memories.ngram.mixer", "memories.ngram.up", "memories.ngram.embed", "blocks.0.setup", "header", "embeds"]


@pytest.mark.parametrize("name", NO_LABEL)
def test_a_matrix_without_a_label_is_named(name):
    with pytest.raises(ValueError, match=rf"parameter {name} of shape \(3, 8\) has no label"):
        build_optimizers([*model(), (name, Parameter(torch.zeros(3, D)))], OptimConfig())


def test_a_parameter_twice_is_named():
    named = model()
    with pytest.raises(ValueError, match="parameter embed is listed twice"):
        build_optimizers([*named, ("embed", Parameter(torch.zeros(40, D)))], OptimConfig())
    with pytest.raises(ValueError, match="parameter head_2 is embed again"):
        build_optimizers([*named, ("head_2", named[0][1])], OptimConfig())


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_coverage_both_ways(kind):
    """Each parameter in exactly one group, nothing else in any, and every label has a name in these tests."""
    named, config = model(), OptimConfig(kind=kind)
    optimizers = build_optimizers(named, config)
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(named) and {id(p) for p in held} == {id(p) for _, p in named}
    labels = [group["label"] for optimizer in optimizers for group in optimizer.param_groups]
    assert labels == [group.label for group in groups(config)]
    names = {id(p): name for name, p in named}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            assert {label_of(names[id(p)], p, config) for p in group["params"]} == {group["label"]}


def test_table_and_patterns_name_the_same_labels():
    assert {row[-1] for row in PATTERNS} == {group.label for group in groups(OptimConfig())}
    assert len({group.label for group in groups(OptimConfig())}) == len(groups(OptimConfig()))


def by_label(optimizers) -> dict[str, dict]:
    return {group["label"]: group for optimizer in optimizers for group in optimizer.param_groups}


def test_values_of_muon():
    optimizers = build_optimizers(model(), OptimConfig(head_lr_mul=2.5, matrix_beta2=0.8))
    assert [type(one) for one in optimizers] == [NorMuon, CautiousAdam]
    group = by_label(optimizers)
    assert (group["qkv"]["lr"], group["qkv"]["lr_mul"], group["qkv"]["split"]) == (0.023, 1.0, 3)
    assert (group["down"]["lr"], group["down"]["lr_mul"], group["down"]["split"]) == (0.023, 4.0, 1)
    assert all(group[one]["beta2"] == 0.8 and group[one]["weight_decay"] == 1.2 for one in ("qkv", "matrix", "router"))
    assert group["head"]["lr"] == pytest.approx(0.02) and group["embed"]["lr"] == 0.008
    for one in (group["embed"], group["head"]):
        assert one["cautious_decay"] == pytest.approx(0.75) and one["betas"] == (0.5, 0.95)
    assert group["gates"]["cautious_decay"] == 0.005 and group["scalars"]["cautious_decay"] == 0.0
    assert group["scalars"]["lr"] == pytest.approx(0.04) and group["scalars"]["betas"] == (0.9, 0.99)
    assert all(group[one]["eps"] == 1e-10 and group[one]["weight_decay"] == 0 for one in ("embed", "gates", "smear"))


def test_values_of_adamw():
    """As a loop in torch alone has them: decay from two dimensions on."""
    named = model(["embed", "head", "blocks.0.qkv", "blocks.0.bias", "smear_lambda"])
    optimizers = build_optimizers(named, OptimConfig(kind="adamw"))
    assert [type(one) for one in optimizers] == [torch.optim.AdamW]
    group = by_label(optimizers)
    assert [len(group[one]["params"]) for one in ("decayed", "undecayed")] == [3, 2]
    assert group["decayed"]["weight_decay"] == 0.1 and group["undecayed"]["weight_decay"] == 0.0
    for one in group.values():
        assert (one["lr"], one["betas"], one["eps"], one["fused"]) == (1e-3, (0.9, 0.95), 1e-8, True)


def test_only_what_is_there_makes_an_optimizer():
    assert [type(one) for one in build_optimizers(model(["embed"]), OptimConfig())] == [CautiousAdam]
    assert [type(one) for one in build_optimizers(model(["blocks.0.up"]), OptimConfig())] == [NorMuon]
    assert build_optimizers([], OptimConfig()) == []
    assert list(assign(model(["head", "embed"]), OptimConfig())) == ["embed", "head"]


def test_the_schedule_multiplies_base_values_again_and_again():
    config = OptimConfig()
    optimizers = build_optimizers(model(), config)
    for lr_mul, momentum in ((0.5, 0.85), (1.5, 0.9), (0.1, 0.95)):
        set_schedule(optimizers, config, lr_mul=lr_mul, momentum=momentum)
        group = by_label(optimizers)
        for row in groups(config):
            assert group[row.label]["lr"] == row.lr * lr_mul
        assert {group[one]["momentum"] for one in ("qkv", "matrix", "down", "router")} == {momentum}
    assert "momentum" not in group["embed"] and group["down"]["lr_mul"] == 4.0


def test_qkv_is_orthogonalised_in_three():
    (pair,) = model(["blocks.0.qkv"])
    before = pair[1].detach().clone()
    fill_grads([pair])
    # Were the three one matrix, K and V, with a gradient a thousandth of Q's, would come out far smaller.
    pair[1].grad[D:] *= 1e-3
    build_optimizers([pair], OptimConfig(matrix_weight_decay=0.0))[0].step()
    q, k, v = (before - pair[1].detach()).norm(dim=1).view(3, D).norm(dim=1)
    assert float(k / q) == pytest.approx(1, rel=0.3) and float(v / q) == pytest.approx(1, rel=0.3)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_all_optimizers_go_on_bit_for_bit(kind):
    config = OptimConfig(kind=kind)

    def run(named, optimizers, steps):
        for step in steps:
            fill_grads(named, step)
            set_schedule(optimizers, config, lr_mul=1 / (step + 1), momentum=0.9 + 0.01 * step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    def fresh():
        torch.manual_seed(3)
        return model()

    whole = fresh()
    run(whole, build_optimizers(whole, config), range(4))
    first = fresh()
    optimizers = build_optimizers(first, config)
    run(first, optimizers, range(2))
    file = io.BytesIO()
    torch.save([optimizer.state_dict() for optimizer in optimizers], file)
    second = [(name, Parameter(p.detach().clone())) for name, p in first]
    optimizers = build_optimizers(second, config)
    for optimizer, state in zip(optimizers, torch.load(io.BytesIO(file.getvalue()), weights_only=True)):
        optimizer.load_state_dict(state)
    run(second, optimizers, range(2, 4))
    for (name, one), (_, other) in zip(whole, second):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_bytes_of_state_are_what_the_optimizers_hold(kind, dtype):
    named, config = [(name, Parameter(one.detach().to(dtype))) for name, one in model()], OptimConfig(kind=kind)
    on_meta = [(name, Parameter(one.detach().to("meta"))) for name, one in named]
    for _, one in named:
        one.grad = torch.randn_like(one)
    optimizers = build_optimizers(named, config)
    for optimizer in optimizers:
        optimizer.step()
    states = [state for optimizer in optimizers for state in optimizer.state_dict()["state"].values()]
    assert len(states) == len(named)
    assert state_bytes(on_meta, config) == sum(one.nbytes for state in states for one in state.values())


def test_aligned():
    assert aligned([("a", "bb", "c"), ("ddd", "e", "ff")], left=1) == "a    bb   c\nddd   e  ff"
    assert aligned([("a", ""), ("b", "")], left=2) == "a\nb"


def test_describe():
    with torch.device("meta"):
        named = [(name, Parameter(torch.empty(shape))) for name, (shape, _) in LABELS.items()]
    lines = describe(named, OptimConfig(head_lr_mul=2.5)).splitlines()
    assert lines[0].split() == ["group", "rule", "tensors", "parameters", "lr", "lr", "mul", "betas", "decay", "split"]
    assert "head     adam           2         640   0.02       1  0.5 0.95   0.75      1" in lines
    total = sum(math.prod(shape) for shape, _ in LABELS.values())
    assert lines[-1].split() == ["all", str(len(LABELS)), f"{total:,}"]
    assert len(lines) == 2 + len(groups(OptimConfig())) and max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"kind": "sgd"}, "kind is sgd; it must be muon or adamw"),
        ({"matrix_lr": -1.0}, "matrix_lr is -1.0"),
        ({"adam_eps": math.nan}, "adam_eps is nan"),
        ({"matrix_beta2": 1.0}, "matrix_beta2 is 1.0"),
    ],
)
def test_values_out_of_range(values, complaint):
    with pytest.raises(ValueError, match=complaint):
        OptimConfig(**values)
