"""pull and push against dense training of the same rule over every row: weights, state and what a forward pass reads.

Lives here: the dense oracle and the proof for every rule and decay, in float64 to 1e-12 and in float32 to rounding.
Not here: the closed forms by themselves (tests/optim/), formats, places and refusals (test_table.py).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.row_update import RowEvent, row_update_reference
from mome.table.rows import RowTable, TableSpec
from optim.rows import DECAYS, KINDS, RowRule

TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}


def legal_rules() -> list[RowRule]:
    """Every rule with every decay that it takes."""
    found = []
    for kind in KINDS:
        for decay in DECAYS:
            if kind == "momentum" and decay.startswith("gated"):
                continue
            weight_decay = 0.0 if decay == "none" else 0.4
            found.append(RowRule(kind, beta2=0.9, eps=1e-8, weight_decay=weight_decay, decay=decay, momentum=0.8))
    return found


RULES = legal_rules()
NAMES = [f"{rule.kind}-{rule.decay}" for rule in RULES]


class Dense:
    """Every row is a dense parameter, every event an update of all of them; `touched` decay needs to know which."""

    def __init__(self, table: RowTable):
        spec = table.spec
        self.rule, self.rows = table.rule, spec.rows
        self.weight_RLD = table.read_rows(torch.arange(spec.rows)).detach().requires_grad_()
        self.second_RL = torch.zeros(spec.rows, spec.lanes, dtype=table.dtype)
        self.moment_RLD = torch.zeros(spec.rows, spec.lanes, spec.dim, dtype=table.dtype)
        self.columns_LD = torch.zeros(spec.lanes, spec.dim, dtype=torch.float64)
        self.product = 1.0

    def push(self, lr: float, beta2: float, touched_U: torch.Tensor, scale: float = 1.0) -> None:
        self.product *= beta2
        rule = self.rule
        grad = self.weight_RLD.grad
        grad = torch.zeros_like(self.weight_RLD) if grad is None else grad
        gate = {"gated": "strict", "gated-retroactive": "loose"}.get(rule.decay, "none")
        event = RowEvent(
            rule.kind, lr=lr, factor=1.0 - lr * rule.weight_decay, gate=gate, beta2=beta2,
            correction=1.0 - self.product, eps=rule.eps, momentum=rule.momentum, scale=scale,
        )  # fmt: skip
        touched_R = None
        if rule.decay == "touched":
            touched_R = torch.zeros(self.rows, dtype=torch.bool)
            touched_R[touched_U] = True
        weight, self.second_RL, self.moment_RLD, self.columns_LD = row_update_reference(
            self.weight_RLD.detach(),
            grad,
            self.second_RL,
            self.moment_RLD,
            self.columns_LD,
            event,
            self.rows,
            touched_R,
        )
        self.weight_RLD = weight.requires_grad_()


def assert_equal(table: RowTable, dense: Dense, tolerance: dict[str, float] = TOLERANCE) -> None:
    everything = torch.arange(table.spec.rows)
    torch.testing.assert_close(table.read_rows(everything), dense.weight_RLD.detach(), **tolerance)
    if table.rule.keeps_second:
        torch.testing.assert_close(table.read_second(everything), dense.second_RL, **tolerance)
    if table.rule.keeps_moment:
        torch.testing.assert_close(table.read_moment(everything), dense.moment_RLD, **tolerance)
    if table.rule.keeps_columns:
        torch.testing.assert_close(table.columns_LD, dense.columns_LD, **tolerance)


def loss_of(rows: torch.Tensor, step: int) -> torch.Tensor:
    """Its gradient depends on the rows, so that a stale read shows; some rows' gradients are exactly zero."""
    generator = torch.Generator().manual_seed(step)
    push = torch.randn(rows.shape, generator=generator, dtype=torch.float64).to(rows.dtype)
    push = push * (torch.rand(rows.shape[:-2], generator=generator)[..., None, None] < 0.7)
    return ((rows + push).square() * push.abs()).sum()


def train_both(
    table: RowTable, cycles: list[list[torch.Tensor]], rates: list[float], beta2s: list[float] | None = None,
    scale: float = 1.0, tolerance: dict[str, float] = TOLERANCE,
) -> Dense:  # fmt: skip
    """Train the table and its dense twin on the same ids, comparing reads in the forward and all rows after."""
    dense, step = Dense(table), 0
    for event, (ids, lr) in enumerate(zip(cycles, rates, strict=True)):
        beta2 = beta2s[event] if beta2s else table.rule.beta2
        ws = table.pull(ids)
        for k, one in enumerate(ids):
            torch.testing.assert_close(ws.gather(k), dense.weight_RLD[one], **tolerance)
            loss_of(ws.gather(k), step).backward()
            loss_of(dense.weight_RLD[one], step).backward()
            step += 1
        touched_U = ws.ids.clone()
        assert table.push(ws, lr, beta2 if beta2s else None, scale) == len(touched_U)
        dense.push(lr, beta2, touched_U, scale)
        assert_equal(table, dense, tolerance)
    return dense


ROWS = 9


@st.composite
def histories(draw) -> tuple[list[list[torch.Tensor]], list[float], list[float]]:
    """Ids, rates and beta2 of some events. Row 0: nearly always, 1: in a burst, 2: once, the last: never."""
    events = draw(st.integers(1, 14))
    shape = draw(st.sampled_from(["warm-up", "cooldown to zero", "restarts", "constant"]))
    once, burst = draw(st.integers(0, events - 1)), draw(st.integers(0, events - 1))
    rates, cycles, beta2s = [], [], []
    for e in range(events):
        at = {
            "warm-up": (e + 1) / events, "cooldown to zero": (events - 1 - e) / max(1, events - 1),
            "restarts": (4 - e % 4) / 4 if e % 5 else 0.0, "constant": 1.0,
        }[shape]  # fmt: skip
        rates.append(0.5 * at)
        beta2s.append(draw(st.sampled_from([0.5, 0.9, 0.999])))
        steps = []
        for _ in range(draw(st.integers(1, 2))):
            ids = draw(st.lists(st.integers(3, ROWS - 2), max_size=6))
            ids += (
                [0] * draw(st.integers(0, 4)) + ([1, 1] if burst <= e < burst + 3 else []) + ([2] if e == once else [])
            )
            ids = draw(st.permutations(ids))
            steps.append(torch.tensor(ids, dtype=torch.int64))
        cycles.append(steps)
    return cycles, rates, beta2s


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(history=histories())
def test_d_e_o_every_rule_equals_dense_training(rule, history):
    cycles, rates, beta2s = history
    table = RowTable(TableSpec(ROWS, 2, 3, 0.5), rule, seed=3, dtype=torch.float64)
    train_both(table, cycles, rates, beta2s)
    assert table.event == len(cycles)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_float32_is_as_near_to_float64_as_dense_training_in_float32(rule):
    generator = torch.Generator().manual_seed(5)
    cycles = [[torch.randint(40, (12,), generator=generator)] for _ in range(30)]
    rates = [0.3 * (30 - e) / 30 for e in range(30)]
    tables = [RowTable(TableSpec(60, 2, 5, 0.5), rule, seed=3, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    loose = {"rtol": 1.0, "atol": 10.0}
    naive = train_both(tables[0], cycles, rates, tolerance=loose).weight_RLD.detach().double()
    truth = train_both(tables[1], cycles, rates).weight_RLD.detach()
    found = tables[0].read_rows(torch.arange(60)).double()
    assert (found - truth).abs().max() <= 4 * (naive - truth).abs().max() + 2e-6 * truth.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_b_order_and_repeats(kind):
    """Permuting the lookups changes sums by rounding alone; the same lookups give the same bits."""
    rule = RowRule(kind, weight_decay=0.1)
    ids = torch.tensor([3] * 50 + [5, 4, 3, 4])
    grad = torch.randn(54, 2, 4, dtype=torch.float64)
    found = []
    for order in (torch.arange(54), torch.arange(54), torch.randperm(54)):
        table = RowTable(TableSpec(8, 2, 4, 0.5), rule, 1, torch.float64)
        ws = table.pull([ids[order]])
        ws.gather(0).backward(grad[order])
        table.push(ws, 0.1)
        found.append(table.read_rows(torch.arange(8)))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_c_rows_whose_gradient_is_zero_or_sums_to_zero_count_as_touched(rule):
    table = RowTable(TableSpec(5, 1, 2, 0.5), rule, 1, torch.float64)
    dense = Dense(table)
    for lr in (0.5, 0.3):
        ws = table.pull([torch.tensor([1, 1, 2])])
        ws.gather(0).backward(torch.tensor([[[1.0, -1.0]], [[-1.0, 1.0]], [[0.0, 0.0]]], dtype=torch.float64))
        touched_U = ws.ids.clone()
        assert table.push(ws, lr) == 2 and table.touched_rows == 2
        dense.push(lr, rule.beta2, touched_U)
        assert_equal(table, dense)


def test_f_reading_changes_nothing():
    rule = RowRule("momentum", weight_decay=0.2)
    table = RowTable(TableSpec(6, 1, 3, 0.5), rule, 1, torch.float64)
    for _ in range(3):
        ws = table.pull([torch.tensor([0, 2])])
        ws.gather(0).square().sum().backward()
        table.push(ws, 0.3)
    first = table.read_rows(torch.arange(6))
    for _ in range(3):
        table.pull([torch.tensor([0, 5])]), table.read_moment(torch.arange(6)), list(table.iter_rows(2))
    assert torch.equal(table.read_rows(torch.arange(6)), first)


def test_h_a_cycle_of_steps_is_one_big_batch():
    rule = RowRule("adam", weight_decay=0.2)
    tables = [RowTable(TableSpec(20, 1, 3, 0.5), rule, 1, torch.float64) for _ in range(2)]
    parts = [torch.randint(20, (7,)) for _ in range(4)]
    many, one = tables[0].pull(parts), tables[1].pull([torch.cat(parts)])
    for k in range(4):
        loss_of(many.gather(k), k).backward()
    whole = one.gather(0)
    sum(loss_of(part, k) for k, part in enumerate(whole.split(7))).backward()
    for table, ws in zip(tables, (many, one)):
        table.push(ws, 0.1)
    torch.testing.assert_close(*(table.read_rows(torch.arange(20)) for table in tables), **TOLERANCE)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_j_a_clipped_gradient_is_a_scaled_one(rule):
    table = RowTable(TableSpec(9, 2, 3, 0.5), rule, 1, torch.float64)
    cycles = [[torch.tensor([1, 1, 4])], [torch.tensor([4, 7])], [torch.tensor([1])]]
    train_both(table, cycles, [0.3, 0.2, 0.1], scale=0.37)


def test_j_the_norm_is_of_the_deduplicated_gradient():
    table = RowTable(TableSpec(9, 2, 3, 0.5), RowRule("sgd"), 1, torch.float64)
    grad = torch.randn(4, 2, 3, dtype=torch.float64)
    ws = table.pull([torch.tensor([1, 1, 1, 5])])
    assert table.grad_square(ws) == 0.0
    ws.gather(0).backward(grad)
    expected = grad[:3].sum(0).square().sum() + grad[3].square().sum()
    assert table.grad_square(ws) == pytest.approx(float(expected), rel=1e-12)


def test_m_addresses_past_two_to_the_31_numbers():
    """2**23 rows of 300 numbers take room only where they are touched."""
    table = RowTable(TableSpec(1 << 23, 3, 100, 0.25), RowRule("adam", weight_decay=0.1), 1)
    small = RowTable(TableSpec(1 << 23, 3, 100, 0.25), RowRule("adam", weight_decay=0.1), 1)
    ids = torch.tensor([0, 7158279, (1 << 31) // 300, (1 << 23) - 1])
    for one in (table, small):
        ws = one.pull([ids if one is table else ids.flip(0)])
        ws.rows.grad = torch.ones_like(ws.rows) * torch.arange(1, 5)[:, None, None]
        one.push(ws, 0.1)
    assert torch.equal(table.read_rows(ids), small.read_rows(ids))
    assert not torch.equal(table.read_rows(ids[:1]), table.read_rows(ids[1:2]))
