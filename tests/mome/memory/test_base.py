"""The protocol: every memory of the registry keeps it; layer placement, gates and refusals."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mome.errors import UserError
from mome.memory import MEMORIES, Memory, ModelShape
from mome.memory.base import open_gates, place_layers

SHAPE = ModelShape(layers=5, width=24, heads=3, head_dim=7, vocab_size=31, bos=2)
SMALL = {
    "routed": {"gate_channels": 6, "slots": 4},
    "ngram": {"gate_channels": 6, "rows": 97, "sign_rows": 16},
    "value": {"gate_channels": 6},
}


class Point(NamedTuple):
    x: Tensor
    h: Tensor


def make(name: str, seed: int = 0, **options) -> Memory:
    kind = MEMORIES[name]
    return kind(kind.Config(**{**SMALL[name], **options}), SHAPE, seed)


def test_the_registry_covers_what_the_tests_cover():
    assert set(MEMORIES) == set(SMALL)


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize(
    ("dtype", "steps"), [(torch.float32, 11), (torch.float64, 1), (torch.bfloat16, 11), (torch.float32, 0)]
)
def test_protocol(name, dtype, steps):
    memory = make(name)
    assert dataclasses.is_dataclass(memory.Config) and memory.Config.__dataclass_params__.frozen
    assert memory.plan == "ahead" and memory.layers == tuple(sorted(set(memory.layers)))
    tokens_BT = torch.randint(SHAPE.vocab_size, (2, steps))
    history_BH = torch.full((2, memory.history), -1)
    ids_BTR = memory.row_ids(tokens_BT, history_BH)
    assert ids_BTR.dtype == torch.int64 and ids_BTR.shape == (2, steps, memory.reads)
    assert ((ids_BTR >= 0) & (ids_BTR < memory.spec.rows)).all()
    assert torch.equal(ids_BTR, memory.row_ids(tokens_BT, None))
    assert torch.equal(ids_BTR, memory.row_ids(tokens_BT.int(), None))

    rows = torch.randn(2, steps, memory.reads, memory.spec.lanes, memory.spec.dim, dtype=dtype)
    shape = {"value": (2, steps, 3, 7), "residual": (2, steps, 24)}[memory.site]
    site = Point(x=torch.randn(shape, dtype=dtype), h=torch.randn(2, steps, 24, dtype=dtype))
    if dtype == torch.float64:
        memory.double()
    payload = memory.prepare(rows, tokens_BT, history_BH)
    for layer in memory.layers:
        delta = memory.read(layer, payload, site)
        assert delta.shape == shape and delta.dtype == dtype and delta.isfinite().all() and (delta != 0).all()


@pytest.mark.parametrize("name", MEMORIES)
def test_parameters_are_matrices_by_name_and_vectors_else(name):
    for parameter_name, parameter in make(name).named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.ndim == (2 if parameter_name.split(".")[0] in ("router", "gate") else 1), parameter_name


@pytest.mark.parametrize("name", MEMORIES)
def test_built_on_the_meta_device(name):
    with torch.device("meta"):
        memory = make(name, **({"router_std": 0.1} if name == "routed" else {}))
    assert memory.spec == make(name).spec


@pytest.mark.parametrize("name", MEMORIES)
def test_no_layers_outside_its_own(name):
    memory = make(name, layers=(1, 3))
    assert memory.layers == (1, 3)
    rows = torch.randn(1, 4, memory.reads, memory.spec.lanes, memory.spec.dim)
    payload = memory.prepare(rows, torch.zeros(1, 4, dtype=torch.long), None)
    with pytest.raises(ValueError):
        memory.read(2, payload, Point(torch.randn(1, 4, 3, 7), torch.randn(1, 4, 24)))


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("channels", [0, 25])
def test_gate_channels_out_of_range(name, channels):
    with pytest.raises(UserError, match=rf"--memory\.{name}\.gate-channels {channels}: .*1 to 24"):
        make(name, gate_channels=channels)


def test_placements():
    assert place_layers("all", 4, "m.layers") == (0, 1, 2, 3)
    assert place_layers("alternate", 4, "m.layers") == (1, 3)
    assert place_layers("alternate", 5, "m.layers") == (0, 2, 4)
    assert place_layers("alternate", 1, "m.layers") == (0,)
    assert place_layers("last", 4, "m.layers") == (3,)
    assert place_layers((0, 2), 4, "m.layers") == (0, 2)


@pytest.mark.parametrize("placement", ["every", (), (4,), (-1,), (2, 1), (1, 1), ("0",)])
def test_placements_refused(placement):
    with pytest.raises(UserError, match=r"--memory\.m\.layers"):
        place_layers(placement, 4, "m.layers")


def test_gates_are_one_at_zero_weights_and_follow_the_first_channels():
    h = torch.randn(2, 3, 8, dtype=torch.float64)
    weight = torch.zeros(5, 4, dtype=torch.float64)
    assert torch.equal(open_gates(h, weight), torch.ones(2, 3, 5, dtype=torch.float64))
    weight = torch.randn(5, 4, dtype=torch.float64)
    expected = 2 / (1 + torch.exp(-torch.einsum("btc,gc->btg", h[..., :4], weight)))
    torch.testing.assert_close(open_gates(h, weight), expected, rtol=1e-13, atol=1e-13)
