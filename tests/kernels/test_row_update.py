"""The row rules: the oracle against loops and torch.optim, the torch and numba updates against the oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import kernels.row_update as row_update
from kernels import backend
from kernels.row_update import (
    GATES,
    KINDS,
    RowEvent,
    column_profile_,
    column_squares,
    mean_square,
    row_update_,
    row_update_reference,
)

EVENTS = [
    RowEvent(kind, lr=0.03, factor=0.979, gate=gate, beta2=0.9, correction=0.19, momentum=0.8, scale=scale)
    for kind in KINDS
    for gate, scale in (("none", 1.0), ("strict", 0.3), ("loose", 1.0))
    if kind != "momentum" or gate == "none"
]
SHAPES = [(1, 1, 1), (5, 3, 7), (64, 4, 16), (0, 2, 3), (131, 1, 67)]
# Rows of the whole table, of which a case holds those with a gradient.
ROWS = 200


def named(event: RowEvent) -> str:
    return f"{event.kind}-{event.gate}-{event.scale}"


@pytest.fixture(params=["reference", "numba"])
def path(request, monkeypatch):
    monkeypatch.setenv("MOME_KERNELS", request.param)
    return request.param


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random_case(shape, dtype):
    """Weights, gradients (some exactly 0), second moments, buffers, columns."""
    weight, grad, moment = (torch.randn(shape, dtype=dtype) for _ in range(3))
    grad = grad * (torch.rand(shape) < 0.8)
    return weight, grad, torch.rand(shape[:2], dtype=dtype), moment, torch.rand(shape[1:], dtype=torch.float64)


def updated(case, event, out=False, update=row_update_):
    """(weight, second, moment, columns) after the event, as the oracle returns them, by the functions for tables."""
    weight, grad, second, moment, columns = (x.clone() for x in case)
    before = grad.clone()
    power, profile = mean_square(grad, event.scale), None
    if event.kind == "factored":
        profile = column_profile_(columns, column_squares(grad, event.scale), event, ROWS, weight.dtype)
    state = (
        second if event.kind in ("adam", "adagrad", "factored") else None,
        moment if event.kind == "momentum" else None,
        profile,
    )
    if out:
        ids = torch.randperm(len(weight) + 3)[: len(weight)]
        table, untouched = torch.full((len(weight) + 3, *weight.shape[1:]), 7.0, dtype=weight.dtype), weight.clone()
        update(weight, grad, power, *state, event, out_RLD=table, ids_U=ids)
        assert torch.equal(weight, untouched)
        others = torch.ones(len(table), dtype=torch.bool).index_fill(0, ids, False)
        assert (table[others] == 7.0).all()
        weight = table.index_select(0, ids)
    else:
        update(weight, grad, power, *state, event)
    assert torch.equal(grad, before)
    return weight, second, moment, columns


@pytest.mark.parametrize("event", EVENTS, ids=named)
def test_the_oracle_equals_loops_over_scalars(event):
    case = random_case((4, 3, 5), torch.float64)
    weight, grad, second, moment, columns = (x.tolist() for x in case)
    touched = torch.tensor([True, True, False, True])
    got = [x.tolist() for x in row_update_reference(*case, event, ROWS, touched)]
    lr, beta2 = event.lr, event.beta2
    for lane in range(3):
        g_RD = [[x * event.scale for x in grad[r][lane]] for r in range(4)]
        c_D = columns[lane]
        if event.kind == "factored":
            means = [sum(g_D[d] ** 2 for g_D in g_RD) / ROWS for d in range(5)]
            c_D = [beta2 * c + (1 - beta2) * mean for c, mean in zip(c_D, means)]
        assert got[3][lane] == pytest.approx(c_D, rel=1e-13)
        for r in range(4):
            v = second[r][lane]
            power = sum(x * x for x in g_RD[r]) / 5
            if event.kind in ("adam", "factored"):
                v = beta2 * v + (1 - beta2) * power
            elif event.kind == "adagrad":
                v += power
            assert math.isclose(got[1][r][lane], v, rel_tol=1e-13)
            for d in range(5):
                w, g, b = weight[r][lane][d], g_RD[r][d], moment[r][lane][d]
                gate = {"none": True, "strict": g * w > 0, "loose": g * w >= 0}[event.gate]
                w *= event.factor if gate and r != 2 else 1.0
                if event.kind == "momentum":
                    b = event.momentum * b + g
                assert math.isclose(got[2][r][lane][d], b, rel_tol=1e-13)
                root = 1.0
                if event.kind in ("adam", "adagrad", "factored"):
                    share = c_D[d] / (sum(c_D) / 5) if event.kind == "factored" else 1.0
                    correction = 1.0 if event.kind == "adagrad" else event.correction
                    root = math.sqrt(v * share / correction) + event.eps
                step = lr * (b if event.kind == "momentum" else g) / root
                assert math.isclose(got[0][r][lane][d], w - step, rel_tol=1e-12, abs_tol=1e-14)


@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd", "momentum"])
def test_the_oracle_equals_torch_optim_where_a_lane_is_one_number(kind):
    weight, moment = torch.randn(6, 2, 1, dtype=torch.float64), torch.zeros(6, 2, 1, dtype=torch.float64)
    second = torch.zeros(6, 2, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    decay = 0.4 if kind == "adam" else 0.0
    optimizer = {
        "adam": lambda: torch.optim.AdamW([parameter], lr=0.1, betas=(0.0, 0.9), eps=1e-8, weight_decay=decay),
        "adagrad": lambda: torch.optim.Adagrad([parameter], lr=0.1, eps=1e-8),
        "sgd": lambda: torch.optim.SGD([parameter], lr=0.1),
        "momentum": lambda: torch.optim.SGD([parameter], lr=0.1, momentum=0.8),
    }[kind]()
    for number in range(1, 8):
        lr = 0.1 / number
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.randn_like(parameter)
        event = RowEvent(kind, lr, 1 - lr * decay, "none", 0.9, 1 - 0.9**number, 1e-8, 0.8)
        weight, second, moment, _ = row_update_reference(weight, parameter.grad, second, moment, None, event, 6)
        optimizer.step()
    torch.testing.assert_close(weight, parameter.detach(), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("event", EVENTS, ids=named)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_update_equals_the_oracle_in_float64(path, event, shape, poison_empty):
    case = random_case(shape, torch.float64)
    expected = row_update_reference(*case, event, ROWS)
    for out in (False, True):
        for got, true in zip(updated(case, event, out), expected):
            torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("event", EVENTS, ids=named)
def test_float32_is_as_good_as_the_naive_float32(path, event):
    case = random_case((257, 3, 64), torch.float32)
    exact = row_update_reference(*(x.double() for x in case), event, ROWS)
    naive = row_update_reference(*case, event, ROWS)
    for got, plain, true in zip(updated(case, event), naive, exact):
        assert (got - true).abs().max() <= (plain - true).abs().max() + 2e-7


@pytest.mark.parametrize("event", EVENTS, ids=named)
def test_in_place_or_into_a_table_and_by_any_threads_the_bits_are_the_same(path, event, two_threads):
    case = random_case((2100, 2, 67), torch.float32)
    once = updated(case, event)
    for out, threads in ((True, 2), (False, 1), (True, 1)):
        torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for a, b in zip(once, updated(case, event, out)))


@pytest.mark.parametrize("event", EVENTS, ids=named)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_gradient_is_finite_and_leaves_only_decay(path, event, dtype):
    weight, nothing = torch.randn(3, 2, 4, dtype=dtype), torch.zeros(3, 2, 4, dtype=dtype)
    case = (weight, nothing, nothing[..., 0], nothing, torch.zeros(2, 4, dtype=torch.float64))
    got, *state = updated(case, event)
    torch.testing.assert_close(got, weight * (1.0 if event.gate == "strict" else event.factor))
    assert not any(x.any() for x in state)


@pytest.mark.parametrize("event", EVENTS, ids=named)
@pytest.mark.parametrize(("size", "shift"), [(1e-18, 0.0), (1e15, 0.0), (0.0, 1.0), (0.0, -3.0)])
def test_tiny_huge_and_equal_numbers(path, event, size, shift):
    weight, grad, second, moment, columns = random_case((31, 2, 5), torch.float32)
    case = (weight, grad * size + shift, second * size * size, moment * size, columns * size * size)
    exact = row_update_reference(*(x.double() for x in case), event, ROWS)
    naive = row_update_reference(*case, event, ROWS)
    for got, plain, true in zip(updated(case, event), naive, exact):
        spread = true.abs().amax().clamp(min=1e-300) if true.numel() else 1.0
        assert (
            got.isfinite().all() and ((got - true) / spread).abs().max() <= ((plain - true) / spread).abs().max() + 1e-6
        )


@pytest.mark.parametrize("gate", ["strict", "loose"])
def test_a_gate_sees_the_sign_of_a_product_that_underflows(path, gate):
    signs = torch.tensor([[1.0, -1.0, 0.0]])
    weight = (signs.T * torch.ones(1, 3)).reshape(1, 1, 9) * 1e-30
    grad = (torch.ones(3, 1) * signs).reshape(1, 1, 9) * 1e-30
    assert not (weight * grad).any()
    event = RowEvent("sgd", lr=0.0, factor=0.5, gate=gate)
    got, *_ = updated((weight, grad, weight[..., 0], weight, weight[0].double()), event)
    agreement = (signs.T * signs).reshape(1, 1, 9)
    gated = agreement > 0 if gate == "strict" else agreement >= 0
    assert torch.equal(got, torch.where(gated, weight * 0.5, weight))


def test_other_layouts_and_dtypes_take_the_torch_path(monkeypatch):
    """Strided rows and a table of another dtype give what contiguous ones give: numba never sees them."""
    monkeypatch.setenv("MOME_KERNELS", "numba")
    event = RowEvent("adam", lr=0.1, factor=0.9)
    weight, grad, second, *_ = random_case((6, 2, 4), torch.float32)
    expected, _ = row_update_reference(weight, grad, second, None, None, event, 6)[:2]
    power = mean_square(grad)
    strided = torch.empty(6, 4, 2).transpose(1, 2).copy_(weight)
    row_update_(strided, grad, power, second.clone(), None, None, event)
    torch.testing.assert_close(strided, expected)
    table = torch.zeros(9, 2, 4, dtype=torch.bfloat16)
    ids = torch.tensor([8, 0, 3, 1, 2, 5])
    row_update_(weight, grad, power, second.clone(), None, None, event, out_RLD=table, ids_U=ids)
    torch.testing.assert_close(table[ids], expected.bfloat16())
    torch.testing.assert_close(mean_square(grad.transpose(0, 2)), grad.transpose(0, 2).square().mean(-1))
    torch.testing.assert_close(column_squares(grad.bfloat16()), grad.bfloat16().double().square().sum(0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("at", [0, 5, 36])
def test_mean_square_shows_what_is_not_finite(path, bad, at):
    grad = torch.randn(4, 3, 37)
    grad[2, 1, at] = bad
    for scale in (1.0, 0.5):
        assert mean_square(grad, scale).isfinite().logical_not().nonzero().tolist() == [[2, 1]]
    if math.isfinite(bad):
        assert mean_square(grad, 1e-15).isfinite().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_sums_of_squares(path, shape, scale, poison_empty):
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        grad = torch.randn(shape, dtype=dtype)
        squares = (grad.double() * scale).square()
        torch.testing.assert_close(mean_square(grad, scale), squares.mean(-1).to(dtype), rtol=tolerance, atol=0)
        columns = column_squares(grad, scale)
        assert columns.dtype == torch.float64
        torch.testing.assert_close(columns, squares.sum(0), rtol=1e-12, atol=0)


def test_sums_of_squares_have_the_same_bits_for_any_threads(path, two_threads):
    grad = torch.randn(5000, 2, 67)
    twice = [mean_square(grad), column_squares(grad)]
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(twice, [mean_square(grad), column_squares(grad)]))


def test_a_lane_without_gradients_has_profile_zero():
    columns, squares = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    squares[1] = torch.tensor([4.0, 0.0, 2.0])
    profile = column_profile_(columns, squares, RowEvent("factored", lr=0.1, beta2=0.9), 10, torch.float32)
    assert profile.dtype == torch.float32 and not profile[0].any()
    torch.testing.assert_close(profile[1], torch.tensor([2.0, 0.0, 1.0]).sqrt())
    torch.testing.assert_close(columns[1], squares[1] * 0.1 / 10)


@pytest.mark.parametrize(
    ("field", "value"),
    [("kind", "lion"), ("gate", "open"), ("scale", 0.0), ("scale", -1.0), ("scale", math.inf), ("scale", math.nan)],
)
def test_an_impossible_event_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=str(value)):
        RowEvent(**{"kind": "adam", "lr": 0.1, field: value})


def test_momentum_has_no_gate():
    for gate in GATES[1:]:
        with pytest.raises(ValueError, match=gate):
            RowEvent("momentum", lr=0.1, gate=gate)


@pytest.mark.parametrize(
    ("kind", "change", "complaint"),
    [
        ("sgd", {"grad": torch.zeros(4, 2, 2)}, "gradients"),
        ("sgd", {"power": torch.zeros(4)}, "powers"),
        ("adam", {"second": None}, "second moments missing"),
        ("adagrad", {"second": torch.zeros(3, 2)}, "second moments"),
        ("momentum", {"moment": None}, "buffers missing"),
        ("momentum", {"moment": torch.zeros(4, 2, 1)}, "buffers"),
        ("factored", {"profile": None}, "profile missing"),
        ("factored", {"profile": torch.zeros(3, 2)}, "profile"),
        ("sgd", {"ids_U": None}, "ids of the rows to write missing"),
        ("sgd", {"out_RLD": None}, "rows to write missing"),
        ("sgd", {"ids_U": torch.arange(5)}, "ids of the rows to write"),
        ("sgd", {"ids_U": torch.arange(4, dtype=torch.int32)}, "int64"),
        ("sgd", {"ids_U": torch.tensor([0, 1, 2, 9])}, "9"),
        ("sgd", {"ids_U": torch.tensor([0, 1, -1, 2])}, "-1"),
        ("sgd", {"out_RLD": torch.zeros(9, 3, 2)}, "rows to write"),
    ],
)
def test_what_does_not_belong_together_is_refused_and_changes_nothing(path, kind, change, complaint):
    arguments = {
        "weight": torch.ones(4, 2, 3), "grad": torch.ones(4, 2, 3), "power": torch.ones(4, 2),
        "second": torch.ones(4, 2), "moment": torch.ones(4, 2, 3), "profile": torch.ones(2, 3),
        "out_RLD": torch.ones(9, 2, 3), "ids_U": torch.arange(4),
    } | change  # fmt: skip
    out = {name: arguments.pop(name) for name in ("out_RLD", "ids_U")}
    with pytest.raises(ValueError, match=complaint):
        row_update_(*arguments.values(), RowEvent(kind, lr=0.1), **out)
    kept = [x for name, x in (arguments | out).items() if x is not None and name not in (*change, "ids_U")]
    assert all((x == 1).all() for x in kept)


def test_a_kernel_that_is_wrong_is_found_out(monkeypatch):
    from kernels.cpu import row_update as cpu

    monkeypatch.delenv("MOME_KERNELS", raising=False)
    assert row_update._self_check() and backend("row_update", "cpu", row_update._self_check) == "numba"
    for name in ("mean_square", "column_squares"):
        with monkeypatch.context() as patch:
            right = getattr(cpu, name)
            patch.setattr(cpu, name, lambda *args, right=right: right(*args) * 1.01)
            assert not row_update._self_check()
    right = cpu.row_update_
    for kind in KINDS:

        def wrong(*args, kind=kind):
            *tensors, event, out, ids = args
            right(*tensors, replace(event, lr=0.11) if event.kind == kind else event, out, ids)

        with monkeypatch.context() as patch:
            patch.setattr(cpu, "row_update_", wrong)
            assert not row_update._self_check()
