"""The sides of bench tables: none is fast because it leaves something out.

Lives here: each side that trains, against dense training in float64; the yardsticks; the bytes that a step must move.
Not here: how sides take turns and what is counted (test_bench.py).
"""

from __future__ import annotations

import pytest
import torch

from kernels.row_update import row_update_reference
from mome.tools.bench import sides
from mome.tools.bench.counting import distinct, moved_bytes
from mome.tools.bench.streams import zipf_ids
from optim.rows import RowClock, RowRule

ROWS, DIM, LOOKUPS = 61, 8, 500
ALL_ROWS = torch.arange(ROWS)


def dense(rule: RowRule, stream: list[torch.Tensor], grad_ND: torch.Tensor) -> torch.Tensor:
    """What a rule makes of zero rows in dense float64 training."""
    clock = RowClock(rule, "cpu")
    weight_RLD, second_RL = torch.zeros(ROWS, 1, DIM, dtype=torch.float64), torch.zeros(ROWS, 1, dtype=torch.float64)
    for ids_N in stream:
        grad_RD = torch.zeros(ROWS, DIM, dtype=torch.float64).index_add_(0, ids_N, grad_ND.double())
        clock.extend(sides.LR, rule.beta2)
        event = clock.row_event(sides.LR, rule.beta2)
        weight_RLD, second_RL, *_ = row_update_reference(
            weight_RLD, grad_RD.unsqueeze(1), second_RL, None, None, event, ROWS
        )
    return weight_RLD.squeeze(1)


@pytest.fixture(params=[False, True], ids=["some", "all"])
def stream(request):
    """(whether every step touches all rows, ids, gradient)."""
    ids = zipf_ids(5, LOOKUPS - ROWS, ROWS, 0)
    if request.param:
        ids = [torch.cat((ids_N, ALL_ROWS)) for ids_N in ids]
    else:
        ids = [torch.cat((ids_N, ids_N[:ROWS])) for ids_N in ids]
        assert any(count < ROWS for count in distinct(ids))
    return request.param, ids, torch.randn(LOOKUPS, DIM)


def trained(side, ids, grad_ND) -> torch.Tensor:
    for ids_N in ids:
        side.step(ids_N, grad_ND)
    return side.read(ALL_ROWS).double()


def close(one, other, atol=2e-7):
    assert other.abs().max() > 0.01
    torch.testing.assert_close(one, other, rtol=2e-5, atol=atol)


@pytest.mark.parametrize("name", sides.RULES)
def test_our_sides_train_as_dense_training_does(name, stream):
    _, ids, grad_ND = stream
    rule = sides.RULES[name]
    close(trained(sides.Ours(ROWS, DIM, rule), ids, grad_ND), dense(rule, ids, grad_ND))


def test_the_eager_side_has_the_same_rule_where_every_row_is_touched(stream):
    every, ids, grad_ND = stream
    found, wanted = trained(sides.Eager(ROWS, DIM), ids, grad_ND), dense(sides.RULES["ours"], ids, grad_ND)
    if every:
        close(found, wanted)
    assert torch.equal(found == 0, wanted == 0)


def test_sparse_adam_trains(stream):
    every, ids, grad_ND = stream
    found = trained(sides.SparseAdam(ROWS, DIM), ids, grad_ND)
    weight = torch.zeros(ROWS, DIM, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=sides.LR)
    for ids_N in ids:
        weight.grad = torch.zeros(ROWS, DIM).index_add_(0, ids_N, grad_ND)
        optimizer.step()
    if every:
        # Adam divides each number by its own size: the rounding of sums that cancel is not small beside them.
        close(found, weight.detach().double(), atol=1e-5)
    assert torch.equal(found == 0, weight.detach() == 0)


@pytest.mark.skipif(sides.fbgemm_missing() is not None, reason="fbgemm-gpu-cpu is not installed")
@pytest.mark.parametrize("pooling", sides.POOLINGS.values())
def test_fbgemm_trains_as_our_adagrad_does(pooling, stream):
    _, ids, grad_ND = stream
    close(trained(sides.Fbgemm(ROWS, DIM, pooling), ids, grad_ND), dense(sides.RULES["ours_adagrad"], ids, grad_ND))


def test_a_gather_reads_and_a_copy_copies():
    weight_RD, ids_N = torch.randn(ROWS, DIM), torch.tensor([3, 3, 60])
    for lookups in (None, 3):
        assert torch.equal(sides.gather(weight_RD, lookups)(ids_N), weight_RD[ids_N])
    assert sides.copy(64)().nbytes == 64


def test_moved_bytes_are_those_of_the_path():
    lookups, unique, dim = 30, 20, 16
    row = 4 * dim
    pull = unique * (row + row) + unique * (4 + 4)
    lookup = unique * row + lookups * row + lookups * 8
    backward = lookups * row + unique * row + lookups * 8
    push = unique * 3 * row + unique * (4 + 4)
    ids = lookups * (8 + 8) + 3 * unique * 8
    assert moved_bytes(lookups, unique, dim) == pull + lookup + backward + push + ids
