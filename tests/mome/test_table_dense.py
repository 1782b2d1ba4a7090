"""A table against dense training of every row: reads, norms, weights and state, for every rule and decay.

Lives here: the proof in float64 to 1e-12, in float32 to rounding; letters b, c, d, e, h, j, k, m and o of the list of
what an exact table must show.
Not here: the oracle and the histories (dense.py), equal bits and refusals (test_table_exact.py), the closed forms by
themselves (tests/optim/).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mome.table.rows import RowTable, TableSpec, initial_rows
from optim.rows import RowRule
from tests.mome.dense import (
    NAMES,
    RULES,
    Dense,
    Event,
    assert_same,
    close,
    histories,
    history,
    mixed,
    state_of,
    train_both,
)

ROWS = 9
ROUNDING = 2.0**-24


def make(rule: RowRule, shape: tuple[int, int] = (2, 3), dtype=torch.float64, rows: int = ROWS, init: float = 0.5):
    """A table and its dense twin."""
    table = RowTable(TableSpec(rows, *shape, init), rule, 3, dtype)
    return table, Dense(rule, table.read_rows(torch.arange(rows)))


rule_numbers = st.fixed_dictionaries(
    {
        # The last one times the highest rate is 0.95.
        "weight_decay": st.sampled_from([0.4, 0.0, 1.9]), "eps": st.sampled_from([1e-8, 1e-3]),
        "momentum": st.sampled_from([0.8, 0.0, 0.99]),
    }
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    events=histories(ROWS), numbers=rule_numbers, shape=st.sampled_from([(2, 3), (1, 1), (3, 2), (1, 7)]),
    init=st.sampled_from([0.5, 0.0]),
)  # fmt: skip
def test_d_e_h_j_o_every_rule_equals_dense_training_of_all_rows(rule, events, numbers, shape, init):
    if rule.decay == "none":
        numbers = numbers | {"weight_decay": 0.0}
    table, dense = make(replace(rule, **numbers), shape, init=init)
    train_both(table, [dense], events)


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_d_both_kernels_equal_dense_training(rule, kernels, monkeypatch):
    monkeypatch.setenv("MOME_KERNELS", kernels)
    table, dense = make(rule, rows=20)
    train_both(table, [dense], history(1, 12, mixed(20), "restarts", clip=0.5, beta2s=(0.9, 0.99), empty={3, 4}))
    ids = torch.tensor([[3, 19, 3], [0, 1, 2]])
    close(table.read_rows(ids), dense.weight_RLD.detach()[ids])
    if rule.keeps_second:
        close(table.read_second(ids), dense.second_RL[ids])
    if rule.keeps_moment:
        close(table.read_moment(ids), dense.moment_RLD[ids])


@pytest.mark.parametrize("kind", ["adam", "momentum", "factored"])
def test_d_gaps_of_hundreds_of_events(kind):
    """Past the ends of momentum's blocks of 256 events, and past the 1024 that a clock begins with."""
    rule = RowRule(kind, weight_decay=0.4, beta2=0.999, momentum=0.99, eps=1e-8)
    table, dense = make(rule)
    touched = {0: [0, 1], 254: [1, 2], 255: [3], 256: [4, 3], 511: [5], 512: [3, 5], 900: [1]}
    never_R = torch.ones(ROWS, dtype=torch.bool)
    for e in range(1100):
        lr, beta2 = 0.02 * (e % 50) / 50, 0.999 if e % 3 else 0.99
        ids = torch.tensor(touched.get(e, []), dtype=torch.int64)
        ws = table.pull([ids])
        if len(ids):
            close(ws.rows.detach(), dense.weight_RLD.detach()[ws.ids])
            grad = torch.randn(len(ids), 2, 3, dtype=torch.float64)
            ws.gather(0).backward(grad)
            dense.weight_RLD[ids].backward(grad)
            never_R[ids] = False
        touched_U = ws.ids
        table.push(ws, lr, beta2)
        dense.push(lr, beta2, touched_U)
        if e in (*touched, 253, 257, 510, 513, 767, 768, 1022, 1023, 1024, 1099):
            assert_same(table, dense, never_R)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_float32_is_as_near_to_the_truth_as_dense_float32(rule):
    """Against dense float64 from the same start; dense float32 rounds every row at every event, a table seldom."""
    table, naive = make(rule, (2, 5), torch.float32, rows=40)
    truth = Dense(rule, naive.weight_RLD.double())
    events = history(5, 18, mixed(40), "cooldown to zero", 0.3, beta2s=(0.9, 0.99), clip=2.0)
    train_both(table, [truth, naive], events, check=False)
    found, plain = state_of(table), naive.state()
    for key, true in truth.state().items():
        error, usual = ((one[key].double() - true).abs().max() for one in (found, plain))
        assert error <= 2 * usual + 4 * ROUNDING * true.abs().max(), key


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_d_float32_rounds_a_gap_once_however_long_it_was(rule):
    """A factor and a product round once each: 2 roundings of 2**-24 a term, and one of the sum of two terms."""
    table, _ = make(rule, (2, 5), torch.float32)
    ws = table.pull([torch.arange(6)])
    ws.rows.grad = torch.randn(6, 2, 5)
    table.push(ws, 0.3)
    start = {key: value.clone() for key, value in state_of(table).items()}
    twins = [Dense(rule, start["rows"].to(dtype)) for dtype in (torch.float64, torch.float32)]
    for dense in twins:
        kind = dense.weight_RLD.dtype
        dense.second_RL = start.get("second", dense.second_RL).to(kind)
        dense.moment_RLD = start.get("moment", dense.moment_RLD).to(kind)
    decay = 1.0
    for e in range(80):
        lr = 0.01 * (e % 30)
        table.push(table.pull([]), lr)
        [dense.push(lr, rule.beta2, torch.empty(0, dtype=torch.int64)) for dense in twins]
        decay *= 1.0 - lr * rule.weight_decay if rule.decays_untouched else 1.0
    found, (truth, naive) = state_of(table), (dense.state() for dense in twins)
    kept_RLD = start["rows"].double() * decay
    bounds = {key: 2 * ROUNDING * value.abs() for key, value in truth.items()}
    if rule.keeps_moment:
        bounds["rows"] = 2 * ROUNDING * (kept_RLD.abs() + (truth["rows"] - kept_RLD).abs())
        bounds["rows"] += ROUNDING * truth["rows"].abs()
    for key in truth.keys() - {"columns"}:
        off = (found[key].double() - truth[key]).abs()
        # 1e-12 for the float64 sums, and float32's smallest step for buffers that have all but gone.
        assert bool((off <= bounds[key] * (1 + 1e-6) + 1e-12 * truth[key].abs() + 2.0**-149).all()), key
    if rule.decays_untouched and not rule.keeps_moment:
        # What rounds 80 times is not that near: the bound is one that code can miss.
        assert bool(((naive["rows"].double() - truth["rows"]).abs() > bounds["rows"]).any())


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_b_one_id_repeated_many_times_equals_dense_training(rule):
    table, dense = make(rule)
    many = [torch.tensor([4] * n) for n in (1, 64, 257)]
    mixed = torch.tensor([4, 2] * 100)
    events = [Event([ids], 0.3, 0.9, clip) for ids, clip in zip((*many, mixed), (None, 1.0, None, 0.1))]
    train_both(table, [dense], [*events, Event([many[1], mixed, many[2]], 0.2, 0.5)])
    assert table.touched_rows == 2


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_c_rows_whose_gradient_is_zero_or_sums_to_zero_count_as_touched(rule):
    """Row 1's gradients cancel exactly, row 2's are zeros, row 3's none at all; afterwards all have real ones."""
    table, dense = make(rule)
    one = torch.randn(2, 3, dtype=torch.float64)
    grad = torch.stack([one, -one, torch.zeros_like(one)])
    never_R = torch.ones(ROWS, dtype=torch.bool)
    for event in range(5):
        ws = table.pull([torch.tensor([1, 1, 2]), torch.tensor([3])])
        given = grad if event < 3 else torch.randn_like(grad)
        ws.gather(0).backward(given)
        dense.weight_RLD[torch.tensor([1, 1, 2])].backward(given)
        touched_U = ws.ids
        if event < 3:
            assert not ws.rows.grad.any()
        assert table.push(ws, 0.3 - 0.05 * event) == 3 == table.touched_rows
        assert bool((table.stores["last_event"].read(touched_U) == event + 1).all())
        dense.push(0.3 - 0.05 * event, rule.beta2, touched_U)
        never_R[touched_U] = False
        assert_same(table, dense, never_R)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_k_events_that_touch_nothing_equal_dense_training_without_gradient(rule):
    table, dense = make(rule)
    train_both(table, [dense], history(2, 3, ["always"] * 5 + ["never"] * 4))
    never_R = torch.arange(ROWS) >= 5
    for event in range(6):
        steps = [[], [torch.empty(0, dtype=torch.int64)], [torch.empty(2, 0, dtype=torch.int64)] * 2][event % 3]
        ws = table.pull(steps)
        for k in range(len(steps)):
            ws.gather(k).sum().backward()
        assert table.grad_square(ws) == 0.0 and table.push(ws, 0.4, 0.7) == 0
        dense.push(0.4, 0.7, torch.empty(0, dtype=torch.int64))
        assert_same(table, dense, never_R)
    assert table.event == 9 and table.touched_rows == 5


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_h_the_steps_of_a_cycle_are_one_big_batch(rule):
    (many, _), (one, _) = make(rule), make(rule)
    for _ in range(4):
        parts = [torch.randint(ROWS, (7,)) for _ in range(4)]
        grads = [torch.randn(7, 2, 3, dtype=torch.float64) for _ in range(4)]
        ws = many.pull(parts)
        for k, grad in enumerate(grads):
            ws.gather(k).backward(grad)
        many.push(ws, 0.1)
        ws = one.pull([torch.cat(parts)])
        ws.gather(0).backward(torch.cat(grads))
        one.push(ws, 0.1)
    found, expected = state_of(many), state_of(one)
    for key, value in expected.items():
        close(found[key], value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_j_the_norm_is_of_the_deduplicated_gradient(dtype):
    """Not of the lookups: three of them may add up, or cancel, or be one."""
    table, _ = make(RowRule("sgd"), dtype=dtype)
    grad = torch.randn(4, 2, 3, dtype=dtype)
    grad[3] = -grad[2]
    ws = table.pull([torch.tensor([1, 1, 5, 5])])
    assert table.grad_square(ws) == 0.0
    ws.gather(0).backward(grad)
    expected = float(grad[:2].double().sum(0).square().sum())
    assert math.isclose(table.grad_square(ws), expected, rel_tol=1e-12 if dtype == torch.float64 else 1e-6)


# 2**23 rows of 300 numbers: 2.5e9, past an int32, and room only for what is touched.
HUGE = TableSpec(1 << 23, 3, 100, 0.25)


@pytest.mark.parametrize("place", ["device", "host", "file"])
@pytest.mark.parametrize("kind", ["adam", "factored"])
def test_m_rows_beyond_two_to_the_31_numbers_equal_dense_training(kind, place, tmp_path):
    rule = RowRule(kind, weight_decay=0.4, eps=1e-8)
    where = {"folder": tmp_path} if place == "file" else {}
    table = RowTable(HUGE, rule, 1, place=place, **where)
    last = HUGE.rows - 1
    # The first and last, those around number 2**31, and one beyond it.
    ids = torch.tensor([0, 2**31 // 300, 2**31 // 300 + 1, 7_654_321, last])
    dense = Dense(rule, table.read_rows(ids), HUGE.rows)
    assert torch.equal(dense.weight_RLD.detach(), initial_rows(HUGE, table.seed, ids, torch.float32))
    for touched in ([0, 1, 4], [2, 3], [4, 4, 1]):
        touched = torch.tensor(touched)
        ws = table.pull([ids[touched]])
        grad = torch.randn(len(touched), 3, 100)
        ws.gather(0).backward(grad)
        dense.weight_RLD[touched].backward(grad)
        table.push(ws, 0.3)
        dense.push(0.3, rule.beta2, touched)
    found = state_of(table, ids)
    for key, value in dense.state().items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6 if key == "rows" else 0.0)
    # Where 32 bits of a number's or a byte's address would have written instead.
    wrong = [
        (row * 300 * size) % 2**bits // (300 * size) for row in ids.tolist() for size in (1, 4) for bits in (31, 32)
    ]
    wrong = torch.tensor(sorted({*wrong, *(ids - 1).clamp(min=0).tolist()} - set(ids.tolist())))
    assert len(wrong) > 5
    for store in table.stores.values():
        assert not store.read(wrong).any()
    table.close()
