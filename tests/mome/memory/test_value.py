"""ValueMemory against loops over tokens and heads."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mome.errors import UserError
from mome.memory import ModelShape
from mome.memory.routed import RoutedConfig, RoutedMemory
from mome.memory.value import ValueConfig, ValueMemory

SHAPE = ModelShape(layers=5, width=12, heads=3, head_dim=5, vocab_size=17, bos=0)


class Point(NamedTuple):
    x: Tensor
    h: Tensor


def test_equals_loops(poison_empty):
    memory = ValueMemory(ValueConfig(gate_channels=7, layers=(0, 3)), SHAPE, seed=0).double()
    for gate in memory.gate:
        gate.data.normal_()
    tokens_BT = torch.randint(17, (2, 5))
    table = torch.randn(17, memory.spec.lanes, 5, dtype=torch.float64, requires_grad=True)
    rows = table.index_select(0, memory.row_ids(tokens_BT, None).flatten()).view(2, 5, 1, -1, 5)
    site = Point(torch.randn(2, 5, 3, 5, dtype=torch.float64), torch.randn(2, 5, 12, dtype=torch.float64))
    payload = memory.prepare(rows, tokens_BT, None)
    total = 0.0
    for index, layer in enumerate((0, 3)):
        delta = memory.read(layer, payload, site)
        total = total + (delta * (index + 1)).sum()
        for b in range(2):
            for t in range(5):
                for head in range(3):
                    score = sum(w * z for w, z in zip(memory.gate[index][head].tolist(), site.h[b, t].tolist()))
                    gamma = 2 / (1 + math.exp(-score))
                    expected = gamma * table[tokens_BT[b, t], index * 3 + head]
                    torch.testing.assert_close(delta[b, t, head], expected, rtol=1e-12, atol=1e-12)
    total.backward()
    assert table.grad.isfinite().all() and (table.grad != 0).any()


def test_same_table_as_routed_memory_with_as_many_slots_as_heads():
    value = ValueMemory(ValueConfig(gate_channels=3), SHAPE, 0)
    routed = RoutedMemory(RoutedConfig(gate_channels=3), SHAPE, 0)
    assert value.spec == routed.spec and value.layers == routed.layers
    assert value.spec.init == pytest.approx((3 / 12) ** 0.5)


def test_gate_is_one_at_the_start_and_init_is_an_option():
    memory = ValueMemory(ValueConfig(gate_channels=3, layers="last", init=0.0), SHAPE, 0)
    assert memory.spec.init == 0.0
    rows = torch.randn(1, 4, 1, 3, 5)
    payload = memory.prepare(rows, torch.zeros(1, 4, dtype=torch.long), None)
    assert torch.equal(memory.read(4, payload, Point(torch.randn(1, 4, 3, 5), torch.randn(1, 4, 12))), rows[:, :, 0])
    with pytest.raises(UserError, match=r"--memory\.value\.init -1"):
        ValueConfig(init=-1.0)
