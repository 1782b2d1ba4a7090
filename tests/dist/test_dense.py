"""The dense optimizers of several processes against those of one: weights, norms, state, bytes, order, checkpoints.

Lives here: one start for each of 1 to 4 ranks, in which all cases run; each loads what the one before it saved.
Not here: who owns what, and one process (tests/mome/test_dense.py).
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.nn import Parameter

from mome.dense import DenseOptimizers, part_of, share_out, step_bytes
from mome.world import World
from optim.groups import SCATTER_ORDER, WORK_ORDER, OptimConfig, build_optimizers, in_order, set_schedule
from tests.dist.processes import start

D = 8
# Micro-rows of a step, its steps before the checkpoint, and in all.
ROWS, SAVED, STEPS = 12, 3, 5
# Every label; sliced ones of odd sizes, two in one label, and small ones beside them; matrices alone and stacked.
SHAPES = {
    "embed": (131, 67),
    "head": (128, 65),
    "smear_gate": (12,),
    "smear_lambda": (),
    "blocks.0.qkv": (3 * D, D),
    "blocks.0.attn_out": (D, D),
    "blocks.0.up": (4 * D, D),
    "blocks.0.down": (D, 7 * D),
    "blocks.0.lambdas": (1,),
    "blocks.0.bias": (D,),
    "blocks.1.qkv": (2, 3 * D, D),
    "blocks.1.up": (3 * D, D),
    "memories.routed.router": (2, 6, D),
    "memories.routed.router_bias": (8193,),
    "memories.ngram.gate": (3, 2999),
    "memories.value.gate": (2, 2, 4),
    "memories.value.scale": (2,),
}
# Fewer matrices than ranks, and nothing else: most ranks own nothing.
MODELS = {"all": tuple(SHAPES), "few": ("blocks.0.up",), "two": ("blocks.0.up", "blocks.0.down", "embed")}
CASES = [
    (model, kind, dtype)
    for model in MODELS for kind in ("muon", "adamw") for dtype in (torch.float64, torch.float32)
]  # fmt: skip
SIZES = (3, 2, 1, 4)
# The starts are shared: one worker runs all that looks at them.
pytestmark = pytest.mark.xdist_group("dist_dense")


def random(*key: object) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def toy(model: str, dtype: torch.dtype, seed: int = 0) -> list[tuple[str, Parameter]]:
    return [
        (name, Parameter((0.1 * torch.randn(SHAPES[name], generator=random(seed, name))).to(dtype)))
        for name in MODELS[model]
    ]


def has_gradient(name: str, step: int, row: int) -> bool:
    """Some parameters take part in one micro-row alone, and some in none of a step."""
    if (name, step) in {("blocks.0.up", 1), ("memories.value.scale", 0), ("memories.ngram.gate", 2)}:
        return False
    return row == {"memories.routed.router": 0, "blocks.1.up": 1, "embed": 1, "blocks.0.bias": 0}.get(name, row)


def backward(named: list[tuple[str, Parameter]], step: int, rows: range) -> None:
    """Gradients of these micro-rows, functions of the weights, so that errors would grow."""
    for name, weight in named:
        for row in rows:
            if has_gradient(name, step, row):
                noise = torch.randn(weight.shape, generator=random(name, step, row), dtype=torch.float64)
                grad = (noise / ROWS).to(weight.dtype) + weight.detach() / ROWS
                weight.grad = grad if weight.grad is None else weight.grad + grad


def set_values(optimizers, config: OptimConfig, step: int) -> None:
    set_schedule(optimizers, config, lr_mul=1 / (1 + step), momentum=0.85 + 0.01 * step)


def copies(named) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in named}


def one_process(model: str, kind: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[float]]:
    """The oracle: the optimizers of optim.groups, as they are. Weights at the end, and the norm of every step."""
    named, config, norms = toy(model, dtype), OptimConfig(kind=kind), []
    optimizers = build_optimizers(named, config)
    for step in range(STEPS):
        backward(named, step, range(ROWS))
        norms.append(sum(float(one.grad.double().square().sum()) for _, one in named if one.grad is not None) ** 0.5)
        set_values(optimizers, config, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return copies(named), norms


def train(world: World, named, dense: DenseOptimizers, config: OptimConfig, steps: range) -> list[float]:
    """Steps as the trainer takes them; their norms."""
    norms = []
    for step in steps:
        backward(named, step, range(world.rank, ROWS, world.size))
        dense.scatter()
        norms.append(float(world.all_reduce("step sums", dense.square()).wait()) ** 0.5)
        set_values(dense.optimizers, config, step)
        dense.update()
        dense.gathered()
        assert all(weight.grad is None for _, weight in named)
    return norms


def gathered_state(dense: DenseOptimizers) -> dict[str, Tensor]:
    """What this rank can say of the state: slices from all, the rest its own."""
    return {
        key: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone()
        for key, one in dense.state_dict().items()
    }


def run_case(world: World, model: str, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    named, config = toy(model, dtype), OptimConfig(kind=kind)
    dense = DenseOptimizers(named, config, world)
    norms = train(world, named, dense, config, range(STEPS))
    return {"weights": copies(named), "norms": norms, "hash": dense.hash_of_replicas(), "state": gathered_state(dense)}


def run_counted(world: World, kind: str) -> dict[str, Any]:
    """Names, sizes and bytes of the collectives of one step."""
    named, config = toy("all", torch.float32), OptimConfig(kind=kind)
    dense = DenseOptimizers(named, config, world)
    parts: dict[str, list[int]] = {}

    def recording(method):
        def recorded(name, whole, own):
            parts.setdefault(name, []).append(own.numel())
            return method(name, whole, own)

        return recorded

    world.reduce_scatter, world.all_gather = recording(world.reduce_scatter), recording(world.all_gather)
    world.sent, world.calls = {}, []
    backward(named, 0, range(world.rank, ROWS, world.size))
    dense.scatter()
    dense.square()
    dense.update()
    dense.gathered()
    del world.reduce_scatter, world.all_gather
    return {"parts": parts, "sent": dict(world.sent), "calls": list(world.calls)}


def run_saved(world: World, kind: str, folder: str, before: str | None) -> dict[str, Any]:
    """Train to SAVED, or load what `before` saved; save; go on to the end."""
    named, config = toy("all", torch.float64, seed=0 if before is None else 1), OptimConfig(kind=kind)
    dense = DenseOptimizers(named, config, world)
    if before is None:
        train(world, named, dense, config, range(SAVED))
    else:
        state = dense.state_dict()
        tensors = {f"optim.{key}": one for key, one in state.items()}
        dcp.load(tensors | {f"model.{name}": one.detach() for name, one in named}, checkpoint_id=before)
        dense.load_state_dict({key: tensors[f"optim.{key}"] for key in state})
    found = {"saved": copies(named), "state": gathered_state(dense)}
    tensors = {f"optim.{key}": one for key, one in dense.state_dict().items()}
    dcp.save(tensors | {f"model.{name}": one.detach() for name, one in named}, checkpoint_id=folder)
    train(world, named, dense, config, range(SAVED, STEPS))
    return found | {"end": copies(named)}


def rank_main(world: World, folder: str, before: int | None) -> dict[Any, Any]:
    found: dict[Any, Any] = {case: run_case(world, *case) for case in CASES}
    found["again"] = run_case(world, *CASES[0])
    for kind in ("muon", "adamw"):
        found["counted", kind] = run_counted(world, kind)
        earlier = None if before is None else f"{folder}/{kind}_{before}"
        found["saved", kind] = run_saved(world, kind, f"{folder}/{kind}_{world.size}", earlier)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, list[dict[Any, Any]]]:
    """World size -> what each rank found."""
    folder = str(tmp_path_factory.mktemp("dense"))
    return {size: start(rank_main, size, folder, before) for size, before in zip(SIZES, (None, *SIZES))}


@pytest.fixture(scope="module")
def oracle() -> dict[tuple, tuple[dict[str, Tensor], list[float]]]:
    return {case: one_process(*case) for case in CASES}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_number_of_processes_equals_one(results, oracle, size, case):
    model, kind, dtype = case
    weights, norms = oracle[case]
    got = results[size][0][case]
    assert set(got["weights"]) == set(weights)
    if size == 1:
        assert all(torch.equal(got["weights"][name], one) for name, one in weights.items())
    exact = oracle[model, kind, torch.float64][0]
    for name, one in weights.items():
        if dtype == torch.float64:
            torch.testing.assert_close(got["weights"][name], one, rtol=1e-12, atol=1e-12, msg=name)
        else:
            # Another order of sums is another rounding, no worse than that of one process.
            error, naive = ((x.double() - exact[name]).abs().max() for x in (got["weights"][name], one))
            assert error <= 3 * naive + 1e-6, name
    torch.testing.assert_close(torch.tensor(got["norms"]), torch.tensor(norms), rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_have_the_same_bits_each_time(results, size):
    ranks = results[size]
    for case in CASES:
        for one in ranks[1:]:
            assert one[case]["hash"] == ranks[0][case]["hash"] and one[case]["norms"] == ranks[0][case]["norms"]
    for one in ranks:
        assert one["again"]["hash"] == one[CASES[0]]["hash"]
    assert len(set(ranks[0][CASES[0]]["hash"].values())) == len(SHAPES)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_has_one_shape_at_any_size_and_no_rank_holds_another_ones(results, size, case):
    model, kind, dtype = case
    shares = share_out(toy(model, dtype), OptimConfig(kind=kind), size)
    ways = {name: share for one in shares.values() for name, share in one.items()}
    alone = results[1][0][case]["state"]
    seen: dict[str, Tensor] = {}
    for rank, one in enumerate(results[size]):
        for key, tensor in one[case]["state"].items():
            assert ways[key.split("/")[0]].owned(rank)
            assert tensor.shape == alone[key].shape and tensor.dtype == alone[key].dtype
            assert torch.equal(seen.setdefault(key, tensor), tensor), key
            tolerance = 1e-11 if dtype == torch.float64 else 1e-3
            torch.testing.assert_close(tensor, alone[key], rtol=tolerance, atol=tolerance, msg=key)
    assert set(seen) == set(alone)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_bytes_and_order_are_as_the_lists_say(results, size, kind):
    named, config = toy("all", torch.float32), OptimConfig(kind=kind)
    shares = share_out(named, config, size)

    def parts(order):
        return [part for label in in_order(order, config) if label in shares and (part := part_of(shares[label]))]

    scattered, gathered = parts(SCATTER_ORDER), parts(WORK_ORDER)
    if kind == "muon" and size > 1:
        # Labels of fewer matrices than ranks are replicated.
        assert len(set(scattered)) == len(scattered) == {2: 7, 3: 5, 4: 3}[size], "an order shows by sizes that differ"
    for one in results[size]:
        counted = one["counted", kind]
        assert counted["sent"] == step_bytes(named, config, size)
        if size == 1:
            assert counted == {"parts": {}, "sent": {}, "calls": []}
            continue
        assert counted["parts"] == {"dense gradients": scattered, "dense weights": gathered}
        assert counted["calls"] == [
            *["dense gradients"] * len(scattered), "replicated gradients", *["dense weights"] * len(gathered)
        ]  # fmt: skip


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_checkpoint_of_any_size_loads_at_any_other_bit_for_bit(results, oracle, kind):
    """Saved at 3, loaded and saved at 2, at 1 and at 4; and each goes on from there as one process without a stop."""
    weights, _ = oracle["all", kind, torch.float64]
    first = results[SIZES[0]]
    state = {key: tensor for one in first for key, tensor in one["saved", kind]["state"].items()}
    for size in SIZES:
        held = {key for one in results[size] for key in one["saved", kind]["state"]}
        assert held == set(state)
        for one in results[size]:
            saved = one["saved", kind]
            assert all(torch.equal(tensor, state[key]) for key, tensor in saved["state"].items())
            assert all(torch.equal(saved["saved"][name], first[0]["saved", kind]["saved"][name]) for name in SHAPES)
            for name in SHAPES:
                torch.testing.assert_close(saved["end"][name], weights[name], rtol=1e-12, atol=1e-12, msg=name)
