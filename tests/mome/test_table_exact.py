"""pull and push against dense training of the same rule over every row, weights and state, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.row_update import row_update_reference
from mome.table.rows import RowTable, TableSpec
from optim.rows import RowRule

KINDS = ["adam", "adagrad", "sgd"]
RULES = [RowRule(kind, beta2=0.9, weight_decay=decay) for kind in KINDS for decay in (0.0, 0.4)]
TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}


def rates(events: int) -> list[float]:
    """Warm-up over three events, then a cooldown that ends at exactly 0."""
    return [0.5 * min((e + 1) / 3, (events - 1 - e) / max(1, events - 1)) for e in range(events)]


class Dense:
    """Every row is a dense parameter, every event an update of all of them."""

    def __init__(self, table: RowTable):
        spec = table.spec
        self.rule = table.rule
        self.weight_RLD = table.read_rows(torch.arange(spec.rows)).requires_grad_()
        self.second_RL = torch.zeros(spec.rows, spec.lanes, dtype=torch.float64)
        self.product = 1.0

    def push(self, lr: float, beta2: float) -> None:
        self.product *= beta2
        grad = self.weight_RLD.grad
        grad = torch.zeros_like(self.weight_RLD) if grad is None else grad
        weight, self.second_RL = row_update_reference(
            self.weight_RLD.detach(), grad, self.second_RL, kind=self.rule.kind, lr=lr, beta2=beta2,
            weight_decay=self.rule.weight_decay, correction=1.0 - self.product, eps=self.rule.eps,
        )  # fmt: skip
        self.weight_RLD = weight.requires_grad_()


def assert_equal(table: RowTable, dense: Dense) -> None:
    everything = torch.arange(table.spec.rows)
    torch.testing.assert_close(table.read_rows(everything), dense.weight_RLD.detach(), **TOLERANCE)
    if table.rule.keeps_second:
        torch.testing.assert_close(table.read_second(everything), dense.second_RL, **TOLERANCE)


def loss_of(rows: torch.Tensor, step: int) -> torch.Tensor:
    """Its gradient depends on the rows, so that a stale read shows; some rows' gradients are exactly zero."""
    generator = torch.Generator().manual_seed(step)
    push = torch.randn(rows.shape, generator=generator, dtype=rows.dtype)
    push = push * (torch.rand(rows.shape[:-2], generator=generator)[..., None, None] < 0.7)
    return ((rows + push).square() * push.abs()).sum()


def train_both(table: RowTable, cycles: list[list[torch.Tensor]], beta2s: list[float] | None = None) -> Dense:
    dense = Dense(table)
    step = 0
    for event, (ids, lr) in enumerate(zip(cycles, rates(len(cycles)))):
        beta2 = beta2s[event] if beta2s else table.rule.beta2
        ws = table.pull(ids)
        for k, one in enumerate(ids):
            torch.testing.assert_close(ws.gather(k), dense.weight_RLD[one], **TOLERANCE)
            loss_of(ws.gather(k), step).backward()
            loss_of(dense.weight_RLD[one], step).backward()
            step += 1
        assert table.push(ws, lr, beta2 if beta2s else None) == len(ws.ids)
        dense.push(lr, beta2)
        assert_equal(table, dense)
    return dense


def random_cycles(rows: int, events: int, steps: int = 1, reads: int = 6) -> list[list[torch.Tensor]]:
    """The upper third of the rows is never touched, some events touch nothing at all."""
    touched = max(1, rows * 2 // 3)
    return [[torch.randint(touched, (reads if e % 5 else 0,)) for _ in range(steps)] for e in range(events)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind}-{rule.weight_decay}")
@pytest.mark.parametrize(("rows", "lanes", "dim"), [(30, 3, 4), (1, 1, 1), (7, 1, 192), (200, 6, 2)])
def test_equals_dense_training_under_a_schedule(rule, rows, lanes, dim):
    table = RowTable(TableSpec(rows, lanes, dim, init=0.3), rule, seed=1, dtype=torch.float64)
    start = table.read_rows(torch.arange(rows))
    dense = train_both(table, random_cycles(rows, events=24))
    assert table.event == 24
    # The untouched rows have moved by decay, and by nothing else.
    if rows > 2:
        shrunk = torch.tensor([1 - lr * rule.weight_decay for lr in rates(24)], dtype=torch.float64).prod()
        torch.testing.assert_close(dense.weight_RLD[-1].detach(), start[-1] * shrunk, **TOLERANCE)


@settings(max_examples=60, deadline=None)
@given(
    touches=st.lists(st.lists(st.lists(st.integers(0, 8), max_size=6), min_size=1, max_size=3), min_size=1),
    kind=st.sampled_from(KINDS),
    lanes=st.integers(1, 3),
    decay=st.sampled_from([0.0, 0.3, 1.9]),
)
def test_equals_dense_training_for_any_touches(touches, kind, lanes, decay):
    spec = TableSpec(rows=9, lanes=lanes, dim=3, init=0.3)
    table = RowTable(spec, RowRule(kind, beta2=0.8, weight_decay=decay), seed=2, dtype=torch.float64)
    train_both(table, [[torch.tensor(ids, dtype=torch.int64) for ids in event] for event in touches])


@pytest.mark.parametrize("kind", KINDS)
def test_beta2_may_change_by_event(kind):
    table = RowTable(TableSpec(20, 2, 3, 0.3), RowRule(kind, weight_decay=0.2), seed=3, dtype=torch.float64)
    beta2s = [0.95 if e < 8 else 0.95**2 for e in range(20)]
    train_both(table, random_cycles(20, events=20), beta2s)


@pytest.mark.parametrize("kind", KINDS)
def test_one_number_a_lane_equals_torch_optim(kind):
    """An oracle that shares no line with this project: torch.optim on the whole table, through autograd."""
    decay = 0.4 if kind == "adam" else 0.0
    table = RowTable(TableSpec(12, 2, 1, 0.3), RowRule(kind, 0.9, 1e-9, decay), seed=4, dtype=torch.float64)
    parameter = torch.nn.Parameter(table.read_rows(torch.arange(12)))
    optimizer = {
        "adam": lambda: torch.optim.AdamW([parameter], betas=(0.0, 0.9), eps=1e-9, weight_decay=decay),
        "adagrad": lambda: torch.optim.Adagrad([parameter], eps=1e-9),
        "sgd": lambda: torch.optim.SGD([parameter]),
    }[kind]()
    for event, lr in enumerate(rates(30)):
        ids = torch.randint(8, (5,))
        ws = table.pull([ids])
        loss_of(ws.gather(0), event).backward()
        table.push(ws, lr)
        optimizer.zero_grad(set_to_none=False)
        loss_of(parameter[ids], event).backward()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        torch.testing.assert_close(table.read_rows(torch.arange(12)), parameter.detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_touched_with_no_gradient_or_one_that_sums_to_zero(kind):
    """Touched rows are those of the working set, whatever their gradient adds up to."""
    table = RowTable(TableSpec(6, 1, 2, 0.3), RowRule(kind, weight_decay=0.3), seed=5, dtype=torch.float64)
    dense = Dense(table)
    for lr in rates(12):
        ids = torch.tensor([0, 1, 1, 2, 3])
        # Row 0: [1, -1]; row 1: twice, the two cancel; row 2: exactly zero; row 3: an ordinary one.
        push = torch.tensor([[1.0, -1.0], [2.0, 1.0], [-2.0, -1.0], [0.0, 0.0], [0.5, 1.0]], dtype=torch.float64)
        ws = table.pull([ids])
        (ws.gather(0)[:, 0] * push).sum().backward()
        (dense.weight_RLD[ids][:, 0] * push).sum().backward()
        assert table.push(ws, lr) == 4
        dense.push(lr, table.rule.beta2)
        assert_equal(table, dense)
    assert table.touched_rows == 4


@pytest.mark.parametrize("kind", KINDS)
def test_one_index_repeated_a_thousand_times(kind):
    table = RowTable(TableSpec(5, 2, 3, 0.3), RowRule(kind, weight_decay=0.3), seed=6, dtype=torch.float64)
    train_both(table, [[torch.full((10, 100), 3)] for _ in range(5)])
    assert table.touched_rows == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_cycle_equals_accumulating_while_the_dense_parameter_steps(kind, steps):
    table = RowTable(TableSpec(15, 2, 3, 0.3), RowRule(kind, weight_decay=0.3), seed=7, dtype=torch.float64)
    dense = Dense(table)
    sparse_side, dense_side = (torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for lr in rates(10):
        ids = [torch.randint(10, (2, 4)) for _ in range(steps)]
        ws = table.pull(ids)
        for k, one in enumerate(ids):
            for side, rows in ((sparse_side, ws.gather(k)), (dense_side, dense.weight_RLD[one])):
                loss_of(rows * side, k).backward()
                with torch.no_grad():
                    side -= 1e-3 * side.grad
                side.grad = None
        table.push(ws, lr)
        dense.push(lr, table.rule.beta2)
        assert_equal(table, dense)
        torch.testing.assert_close(sparse_side, dense_side, **TOLERANCE)


def test_a_long_pause_with_decay_stays_exact():
    """Ten thousand events between two touches: weights and second moments all but vanish, without garbage."""
    table = RowTable(TableSpec(4, 1, 2, 0.3), RowRule("adam", 0.95, weight_decay=0.1), seed=8, dtype=torch.float64)
    dense = Dense(table)

    def touch(ids):
        ws = table.pull([ids])
        loss_of(ws.gather(0), 1).backward()
        loss_of(dense.weight_RLD[ids], 1).backward()
        table.push(ws, 0.1)
        dense.push(0.1, 0.95)

    touch(torch.tensor([0, 1]))
    for _ in range(10_000):
        table.push(table.pull([]), 0.1)
        dense.push(0.1, 0.95)
    torch.testing.assert_close(table.read_rows(torch.arange(4)), dense.weight_RLD.detach(), rtol=1e-9, atol=1e-30)
    assert 0 < table.read_rows(torch.tensor(0)).abs().min() < 1e-40
    touch(torch.tensor([1, 2]))
    assert_equal(table, dense)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_near_float64(kind):
    spec, rule = TableSpec(40, 2, 8, 0.3), RowRule(kind, weight_decay=0.3)
    tables = [RowTable(spec, rule, seed=9, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    push = torch.randn(60, 10, 2, 8, dtype=torch.float64)
    ids = torch.randint(30, (60, 10))
    for event, lr in enumerate(rates(60)):
        for table in tables:
            ws = table.pull([ids[event]])
            (ws.gather(0) * push[event].to(table.dtype)).sum().backward()
            table.push(ws, lr)
    single, double = (table.read_rows(torch.arange(40)) for table in tables)
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)
