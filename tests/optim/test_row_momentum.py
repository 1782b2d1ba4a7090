"""Momentum's lazy move in closed form, and lazy rows of every rule, against recurrences event by event in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.row_update import column_profile_, column_squares, mean_square, row_update_, row_update_reference
from optim.rows import DECAYS, KINDS, RowClock, RowRule, _Travel

RULES = [
    RowRule(kind, beta2=0.9, weight_decay=0.0 if decay == "none" else 0.4, decay=decay, momentum=0.8)
    for kind in KINDS
    for decay in DECAYS
    if kind != "momentum" or not decay.startswith("gated")
]


def rates(events: int) -> list[float]:
    """Warm-up from 0, a plateau, a restart, then a cooldown that ends in ten events at exactly 0."""
    return [0.5 * max(0.0, min(e % (events // 2) / 7, 1.0, (events - 11 - e) / 9)) for e in range(events)]


def recurrence(lrs: list[float], factors: list[float], mu: float, last: int) -> float:
    """C(last, newest event), one event at a time."""
    travel, power = 0.0, 1.0
    for lr, factor in zip(lrs[last:], factors[last:]):
        power *= mu
        travel = factor * travel + lr * power
    return travel


def small_blocks(clock: RowClock) -> RowClock:
    """The same clock with blocks of four events, so that a short test crosses many borders."""
    clock._travel = _Travel(clock.rule.momentum, block=4)
    return clock


@settings(max_examples=30, deadline=None)
@given(
    lrs=st.lists(st.sampled_from([0.0, 1e-3, 0.3, 1.7]), min_size=1, max_size=70),
    mu=st.sampled_from([0.0, 0.3, 0.9, 0.999]),
    weight_decay=st.sampled_from([0.0, 0.05, 0.58]),
    block=st.integers(1, 5),
)
def test_travel_equals_the_recurrence_for_every_last_event(lrs, mu, weight_decay, block):
    clock = RowClock(RowRule("momentum", weight_decay=weight_decay, momentum=mu))
    clock._travel = _Travel(mu, block)
    factors = [1.0 - lr * weight_decay for lr in lrs]
    for event, lr in enumerate(lrs, 1):
        clock.extend(lr, 0.9)
        last = torch.arange(event + 1, dtype=torch.int32)
        true = [recurrence(lrs[:event], factors, mu, one) for one in range(event + 1)]
        true = torch.tensor(true, dtype=torch.float64)
        torch.testing.assert_close(clock.travel(last), true, rtol=1e-12, atol=1e-300)
        powers = torch.tensor([mu ** (event - one) for one in last.tolist()], dtype=torch.float64)
        torch.testing.assert_close(clock.moment_decay(last), powers, rtol=1e-14, atol=0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind}-{rule.decay}")
def test_lazy_rows_equal_dense_training(rule):
    """Rows never, once, always, in bursts and at random touched; weights and all state after every event."""
    events, rows, lanes, dim = 90, 9, 2, 3
    clock = RowClock(rule)
    if rule.keeps_moment:
        small_blocks(clock)
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(rows, lanes, dim, dtype=torch.float64, generator=generator)
    second, moment, columns = (
        torch.zeros(rows, lanes).double(),
        torch.zeros_like(weight),
        torch.zeros(lanes, dim).double(),
    )
    dense = (weight.clone(), second.clone(), moment.clone(), columns.clone())
    last = torch.zeros(rows, dtype=torch.int32)

    def now(ids):
        decay, travel = clock.decay(last[ids])[:, None, None], clock.travel(last[ids])[:, None, None]
        fade = clock.second_decay(last[ids])[:, None] if rule.decays_second else 1.0
        return (
            weight[ids] * decay - travel * moment[ids],
            second[ids] * fade,
            moment[ids] * clock.moment_decay(last[ids])[:, None, None],
        )

    for event, lr in enumerate(rates(events)):
        beta2 = 0.95 if event < 40 else 0.95**2
        chance = torch.tensor([0.0, event == 30, 1.0, event % 30 < 3, event % 7 == 0, 0.1, 0.3, 0.5, 0.9])
        touched = torch.rand(rows, generator=generator) < chance
        ids = touched.nonzero().flatten()
        grad = torch.randn(rows, lanes, dim, dtype=torch.float64, generator=generator) * touched[:, None, None]
        # Touched and without gradient: dense training cannot tell it from an untouched row, except by decay.
        grad[2] *= event % 5 != 0
        own, power = now(ids), mean_square(grad[ids], 0.5)
        clock.extend(lr, beta2)
        kernel = clock.row_event(lr, beta2, scale=0.5)
        profile = None
        if rule.keeps_columns:
            profile = column_profile_(columns, column_squares(grad[ids], 0.5), kernel, rows, torch.float64)
        row_update_(
            own[0], grad[ids], power, own[1] if rule.keeps_second else None, own[2] if rule.keeps_moment else None,
            profile, kernel,
        )  # fmt: skip
        weight[ids], second[ids], moment[ids], last[ids] = *own, clock.event
        dense = row_update_reference(
            dense[0], grad, *dense[1:], kernel, rows, touched if rule.decay == "touched" else None
        )  # fmt: skip
        for got, true in zip((*now(torch.arange(rows)), columns), dense):
            torch.testing.assert_close(got, true, rtol=1e-12, atol=1e-13)
    # Row 0, never touched, has moved by decay and by nothing else.
    moved = dense[0][0] != weight[0]
    assert moved.all() if rule.decays_untouched else not moved.any()


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_twenty_thousand_events_neither_underflow_nor_drift(weight_decay):
    """mu^20000 is 1e-915: what a row lost since the first events is still there to 13 digits."""
    events, mu = 20_000, 0.9
    clock = RowClock(RowRule("momentum", weight_decay=weight_decay, momentum=mu))
    lrs = [1e-3 * (1.0 + math.sin(e / 100)) for e in range(events)]
    for lr in lrs:
        clock.extend(lr, 0.9)
    last = [0, 1, 254, 255, 256, 10_000, events - 300, events - 257, events - 2, events - 1, events]
    factors = [1.0 - lr * weight_decay for lr in lrs]
    true = torch.tensor([recurrence(lrs, factors, mu, one) for one in last], dtype=torch.float64)
    assert (true[:-1] > 1e-6).all()
    torch.testing.assert_close(clock.travel(torch.tensor(last)), true, rtol=1e-12, atol=0)
    assert clock.travel(torch.arange(events + 1)).isfinite().all()


@pytest.mark.parametrize("mu", [0.5, 0.999])
def test_a_million_events(mu):
    """With constants, C has a closed form: a clock set to it at event 999,000 must come out on it after a million."""
    lr, weight_decay, events, block = 0.01, 1e-4, 999_000, 256
    factor = 1.0 - lr * weight_decay
    last = torch.arange(events + 1, dtype=torch.float64)

    def closed_form(gap):
        return lr * mu * (factor**gap - mu**gap) / (factor - mu)

    block_end = ((last // block + 1) * block - 1).clamp(max=events)
    ends = torch.arange(1, (events + 1) // block + 1, dtype=torch.float64) * block - 1
    clock = RowClock(RowRule("momentum", weight_decay=weight_decay, momentum=mu))
    clock.load_state_dict(
        {
            "log_decay": last * math.log1p(-lr * weight_decay),
            "log_beta2": last * math.log(0.9),
            "travel": closed_form(block_end - last),
            "travel_ends": closed_form(events - ends),
        }
    )
    for _ in range(1000):
        clock.extend(lr, 0.9)
    last = torch.cat((torch.arange(0, 10**6, 997), torch.arange(10**6 - 600, 10**6 + 1)))
    torch.testing.assert_close(clock.travel(last), closed_form((10**6 - last).double()), rtol=1e-9, atol=0)
    assert clock.event == 10**6


def test_saved_and_loaded_goes_on_bit_for_bit():
    lrs = rates(3000)
    for stop in (0, 1, 254, 255, 256, 511, 1777):
        straight, first, second = (RowClock(RowRule("momentum", weight_decay=0.3)) for _ in range(3))
        for lr in lrs[:stop]:
            first.extend(lr, 0.99)
        second.load_state_dict(first.state_dict())
        last = torch.arange(stop + 1)
        assert second.event == stop and torch.equal(first.travel(last), second.travel(last))
        for event, lr in enumerate(lrs[: stop + 1200]):
            straight.extend(lr, 0.99)
            if event >= stop:
                second.extend(lr, 0.99)
        last = torch.arange(straight.event + 1)
        assert torch.equal(straight.travel(last), second.travel(last))
        for name, tensor in straight.state_dict().items():
            assert torch.equal(tensor, second.state_dict()[name])


def test_a_saved_travel_is_no_view_of_its_buffer():
    clock = RowClock(RowRule("momentum"))
    for _ in range(300):
        clock.extend(0.1, 0.9)
    state = clock.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    clock.extend(0.1, 0.9)
    assert all(torch.equal(before[name], tensor) for name, tensor in state.items())
    assert state["travel"].shape == (301,) and state["travel_ends"].shape == (1,)


def test_other_rules_keep_and_answer_no_travel():
    clock = RowClock(RowRule("adam", weight_decay=0.3))
    clock.extend(0.1, 0.9)
    assert not clock.travel(torch.tensor([0, 1])).any()
    assert set(clock.state_dict()) == {"log_decay", "log_beta2"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: {**s, "travel": s["travel"][:-1]},
        lambda s: {**s, "travel": s["travel"].float()},
        lambda s: {**s, "travel": s["travel"].fill_(math.nan)},
        lambda s: {**s, "travel": -s["travel"]},
        lambda s: {**s, "travel": s["travel"] + 1.0},
        lambda s: {**s, "travel": s["travel"].index_fill(0, torch.tensor([299]), 1.0)},
        lambda s: {**s, "travel_ends": s["travel_ends"][:0]},
        lambda s: {**s, "travel_ends": s["travel_ends"].float()},
        lambda s: {**s, "travel_ends": s["travel_ends"].fill_(math.inf)},
        lambda s: {**s, "log_decay": s["log_decay"][:-1], "log_beta2": s["log_beta2"][:-1]},
    ],
)
def test_a_damaged_travel_is_refused_and_changes_nothing(damage):
    clock = RowClock(RowRule("momentum", weight_decay=0.5))
    for _ in range(299):
        clock.extend(0.1, 0.9)
    before = clock.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        clock.load_state_dict(damage(clock.state_dict()))
    assert clock.event == 299 and all(torch.equal(before[name], clock.state_dict()[name]) for name in before)
