"""The row rules: the oracle against loops and torch.optim, the in-place update against the oracle."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.row_update import mean_square, row_update_, row_update_reference

KINDS = ["adam", "adagrad", "sgd"]
SCALARS = {"lr": 0.03, "weight_decay": 0.7, "beta2": 0.9, "correction": 0.19, "eps": 1e-10}
SHAPES = [(1, 1, 1), (5, 3, 7), (64, 4, 16), (0, 2, 3), (131, 1, 192)]


def random_case(shape, dtype):
    weight, grad = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    return weight, grad, torch.rand(shape[:2], dtype=dtype)


def in_place(weight, grad, second, kind, **scalars):
    weight, second = weight.clone(), second.clone()
    row_update_(weight, grad, mean_square(grad), None if kind == "sgd" else second, kind=kind, **scalars)
    return weight, second


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_equals_loops_over_scalars(kind):
    weight, grad, second = random_case((4, 3, 5), torch.float64)
    new_weight, new_second = row_update_reference(weight, grad, second, kind=kind, **SCALARS)
    lr, beta2 = SCALARS["lr"], SCALARS["beta2"]
    for r in range(4):
        for lane in range(3):
            g = grad[r, lane].tolist()
            power = sum(x * x for x in g) / 5
            v = second[r, lane].item()
            if kind == "adam":
                v = beta2 * v + (1 - beta2) * power
                scale = math.sqrt(v / SCALARS["correction"]) + SCALARS["eps"]
            elif kind == "adagrad":
                v += power
                scale = math.sqrt(v) + SCALARS["eps"]
            else:
                scale = 1.0
            assert math.isclose(new_second[r, lane].item(), v, rel_tol=1e-14)
            for d in range(5):
                expected = weight[r, lane, d].item() * (1 - lr * SCALARS["weight_decay"]) - lr * g[d] / scale
                assert math.isclose(new_weight[r, lane, d].item(), expected, rel_tol=1e-13, abs_tol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_equals_torch_optim_where_a_lane_is_one_number(kind):
    weight = torch.randn(6, 2, 1, dtype=torch.float64)
    second = torch.zeros(6, 2, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    decay = 0.4 if kind == "adam" else 0.0
    optimizer = {
        "adam": lambda: torch.optim.AdamW([parameter], lr=0.1, betas=(0.0, 0.9), eps=1e-8, weight_decay=decay),
        "adagrad": lambda: torch.optim.Adagrad([parameter], lr=0.1, eps=1e-8),
        "sgd": lambda: torch.optim.SGD([parameter], lr=0.1),
    }[kind]()
    for event in range(1, 8):
        lr = 0.1 / event
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.randn_like(parameter)
        weight, second = row_update_reference(
            weight, parameter.grad, second,
            kind=kind, lr=lr, weight_decay=decay, beta2=0.9, correction=1 - 0.9**event, eps=1e-8,
        )  # fmt: skip
        optimizer.step()
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_in_place_equals_the_oracle_in_float64(kind, shape):
    case = random_case(shape, torch.float64)
    for got, expected in zip(in_place(*case, kind, **SCALARS), row_update_reference(*case, kind=kind, **SCALARS)):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_as_good_as_the_naive_float32(kind):
    case = random_case((257, 3, 64), torch.float32)
    exact = row_update_reference(*(x.double() for x in case), kind=kind, **SCALARS)
    naive = row_update_reference(*case, kind=kind, **SCALARS)
    for got, plain, true in zip(in_place(*case, kind, **SCALARS), naive, exact):
        assert (got - true).abs().max() <= (plain - true).abs().max() + 2e-7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_gradient_is_finite_and_leaves_only_decay(kind, dtype):
    weight = torch.randn(3, 2, 4, dtype=dtype)
    nothing = torch.zeros(3, 2, dtype=dtype)
    got, second = in_place(weight, torch.zeros_like(weight), nothing, kind, **SCALARS)
    torch.testing.assert_close(got, weight * (1 - SCALARS["lr"] * SCALARS["weight_decay"]))
    assert torch.equal(second, nothing)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_only_read(kind):
    weight, grad, second = random_case((5, 2, 3), torch.float32)
    before = grad.clone()
    in_place(weight, grad, second, kind, **SCALARS)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_mean_square_shows_what_is_not_finite(bad):
    grad = torch.randn(4, 3, 8)
    grad[2, 1, 5] = bad
    assert mean_square(grad).isfinite().logical_not().nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("shape", SHAPES)
def test_mean_square_is_the_mean_of_squares(shape, poison_empty):
    grad = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(mean_square(grad), grad.square().mean(-1), rtol=1e-13, atol=0)


def test_an_unknown_kind_is_refused():
    case = random_case((2, 2, 2), torch.float32)
    with pytest.raises(ValueError, match="lion"):
        row_update_reference(*case, kind="lion", **SCALARS)
    with pytest.raises(ValueError, match="lion"):
        in_place(*case, "lion", **SCALARS)
