"""RowRule's checks and RowClock's prefix sums, against products in exact or high precision."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from optim.rows import DECAYS, RowClock, RowRule

HALF = RowRule("adam", weight_decay=0.5)


def schedule(events: int) -> list[float]:
    """Warm-up, plateau, cooldown to exactly 0."""
    return [min(1.0, (e + 1) / 5, (events - 1 - e) / 10) * 0.3 for e in range(events)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "lion"),
        ("beta2", 0.0), ("beta2", 1.0), ("beta2", -0.5), ("beta2", math.nan),
        ("eps", 0.0), ("eps", -1e-8), ("eps", math.inf), ("eps", math.nan),
        ("eps", 1e-39),
        ("weight_decay", -0.1), ("weight_decay", math.inf), ("weight_decay", math.nan),
        ("decay", "eager"),
        ("momentum", -0.1), ("momentum", 1.0), ("momentum", math.nan),
    ],
)  # fmt: skip
def test_a_rule_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field if field != "kind" else "lion"):
        RowRule(**{"kind": "adam", field: value})


def test_decays_that_contradict_the_rule_are_refused():
    with pytest.raises(ValueError, match="decay = 'none'"):
        RowRule("adam", weight_decay=0.1, decay="none")
    assert RowRule("adam", decay="none").gate == "none"
    for decay in ("gated", "gated-retroactive"):
        with pytest.raises(ValueError, match="momentum moves untouched rows"):
            RowRule("momentum", weight_decay=0.1, decay=decay)


def test_what_a_rule_keeps():
    kinds = ("adam", "adagrad", "sgd", "momentum", "factored")
    rules = [RowRule(kind) for kind in kinds]
    assert [kind for kind, rule in zip(kinds, rules) if rule.keeps_second] == ["adam", "adagrad", "factored"]
    assert [kind for kind, rule in zip(kinds, rules) if rule.decays_second] == ["adam", "factored"]
    assert [kind for kind, rule in zip(kinds, rules) if rule.keeps_moment] == ["momentum"]
    assert [kind for kind, rule in zip(kinds, rules) if rule.keeps_columns] == ["factored"]


def test_which_rows_a_decay_reaches():
    rules = [RowRule("sgd", weight_decay=0.0 if decay == "none" else 0.5, decay=decay) for decay in DECAYS]
    assert [rule.gate for rule in rules] == ["none", "none", "strict", "none", "loose"]
    assert [rule.decays_untouched for rule in rules] == [False, False, False, True, True]
    assert not RowRule("sgd", decay="retroactive").decays_untouched
    for rule in rules:
        clock = RowClock(rule)
        clock.extend(0.2, 0.9)
        untouched, event = clock.decay(torch.tensor([0, 1])), clock.row_event(0.2, 0.9)
        torch.testing.assert_close(untouched, torch.tensor([0.9 if rule.decays_untouched else 1.0, 1.0]).double())
        assert event.factor == (1.0 if rule.decay == "none" else 0.9) and event.gate == rule.gate


def test_an_event_for_the_kernels_is_the_rule_and_the_newest_event():
    clock = RowClock(RowRule("factored", 0.9, 1e-8, 0.5, "gated", 0.7))
    clock.extend(0.1, 0.8)
    clock.extend(0.2, 0.9)
    event = clock.row_event(0.2, 0.9, scale=0.25)
    assert (event.kind, event.lr, event.factor, event.gate) == ("factored", 0.2, 0.9, "strict")
    assert (event.beta2, event.eps, event.momentum, event.scale) == (0.9, 1e-8, 0.7, 0.25)
    assert event.correction == clock.correction == pytest.approx(1 - 0.72, rel=1e-14)


def test_decay_at_touched_rows_alone_refuses_what_wipes_them_out_too():
    clock = RowClock(RowRule("sgd", weight_decay=0.5, decay="touched"))
    with pytest.raises(ValueError, match="keep it below 1"):
        clock.extend(2.0, 0.9)
    assert clock.event == 0


def test_factors_equal_products_of_fractions():
    events = 40
    lrs, beta2s = schedule(events), [0.9 if e % 3 else 0.81 for e in range(events)]
    clock = RowClock(HALF)
    for lr, beta2 in zip(lrs, beta2s):
        clock.extend(lr, beta2)
    assert clock.event == events
    last = torch.arange(events + 1, dtype=torch.int32)
    decay, second = clock.decay(last), clock.second_decay(last)
    for e in range(events + 1):
        exact = math.prod((1 - Fraction(lr) / 2 for lr in lrs[e:]), start=Fraction(1))
        assert math.isclose(decay[e].item(), float(exact), rel_tol=1e-14)
        exact = math.prod((Fraction(b) for b in beta2s[e:]), start=Fraction(1))
        assert math.isclose(second[e].item(), float(exact), rel_tol=1e-14)
    assert decay[events] == 1.0 and second[events] == 1.0
    exact = 1 - math.prod((Fraction(b) for b in beta2s), start=Fraction(1))
    assert math.isclose(clock.correction, float(exact), rel_tol=1e-14)


def test_events_with_learning_rate_zero_change_no_weight_factor():
    clock = RowClock(HALF)
    clock.extend(0.1, 0.9)
    for _ in range(5):
        clock.extend(0.0, 0.9)
    assert clock.decay(torch.tensor([1, 3, 6])).tolist() == [1.0, 1.0, 1.0]
    assert math.isclose(clock.second_decay(torch.tensor([1])).item(), 0.9**5, rel_tol=1e-15)


def test_a_hundred_thousand_events_neither_underflow_nor_drift():
    """The plain products would be 1e-2176 and 1e-2228: the factors over a gap must not notice."""
    clock = RowClock(HALF)
    events, lr, beta2 = 100_000, 0.1 - 3e-3, 0.95
    for _ in range(events):
        clock.extend(lr, beta2)
    gaps = torch.tensor([0, 1, 2, 100, 10_000, events])
    decay, second = clock.decay(events - gaps), clock.second_decay(events - gaps)
    assert math.log10(1 - lr * 0.5) * events < -2000
    for gap, factor, second_factor in zip(gaps.tolist(), decay.tolist(), second.tolist()):
        # Each of the gap's sums was rounded at a magnitude of 5000: far below float32's own 6e-8.
        assert math.isclose(factor, (1 - lr * 0.5) ** gap, rel_tol=1e-8, abs_tol=1e-300)
        assert math.isclose(second_factor, beta2**gap, rel_tol=1e-8, abs_tol=1e-300)
    assert clock.correction == 1.0


def test_a_beta2_near_one_keeps_its_digits_in_the_correction():
    clock = RowClock(RowRule("adam"))
    beta2 = 1 - 1e-12
    for _ in range(3):
        clock.extend(0.1, beta2)
    assert math.isclose(clock.correction, float(1 - Fraction(beta2) ** 3), rel_tol=1e-13)


@pytest.mark.parametrize(
    ("lr", "beta2"),
    [(2.0, 0.9), (3.0, 0.9), (-0.1, 0.9), (math.nan, 0.9), (math.inf, 0.9), (0.1, 0.0), (0.1, 1.0), (0.1, math.nan)],
)
def test_an_unusable_event_is_refused_and_changes_nothing(lr, beta2):
    clock = RowClock(HALF)
    clock.extend(0.1, 0.9)
    before = clock.state_dict()
    with pytest.raises(ValueError, match=r"table rows|keep it below 1"):
        clock.extend(lr, beta2)
    after = clock.state_dict()
    assert clock.event == 1 and all(torch.equal(before[key], after[key]) for key in before)


def test_saved_and_loaded_goes_on_bit_for_bit():
    lrs = schedule(3000)
    straight, first = RowClock(HALF), RowClock(HALF)
    for lr in lrs:
        straight.extend(lr, 0.99)
    for lr in lrs[:1777]:
        first.extend(lr, 0.99)
    second = RowClock(HALF)
    second.load_state_dict(first.state_dict())
    for lr in lrs[1777:]:
        second.extend(lr, 0.99)
    assert second.event == straight.event and second.correction == straight.correction
    for key, tensor in straight.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[key])


def test_a_saved_clock_is_no_view_of_its_buffer(tmp_path):
    clock = RowClock(HALF)
    clock.extend(0.1, 0.9)
    state = clock.state_dict()
    clock.extend(0.1, 0.9)
    assert all(tensor.shape == (2,) and tensor.untyped_storage().nbytes() == 16 for tensor in state.values())


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: {**s, "log_decay": s["log_decay"][:-1]},
        lambda s: {**s, "log_decay": s["log_decay"].float()},
        lambda s: {**s, "log_decay": s["log_decay"].fill_(math.nan)},
        lambda s: {**s, "log_beta2": -s["log_beta2"]},
        lambda s: {**s, "log_beta2": s["log_beta2"] - 1.0},
        lambda s: {**s, "log_decay": s["log_decay"].index_fill(0, torch.tensor([3]), -math.inf)},
        lambda s: {key: tensor[:0] for key, tensor in s.items()},
        lambda s: {key: tensor[0] for key, tensor in s.items()},
    ],
)
def test_a_damaged_clock_is_refused_and_changes_nothing(damage):
    clock = RowClock(HALF)
    for _ in range(3):
        clock.extend(0.1, 0.9)
    before = clock.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        clock.load_state_dict(damage(clock.state_dict()))
    assert clock.event == 3 and all(torch.equal(before[key], clock.state_dict()[key]) for key in before)


@pytest.mark.parametrize(("saved", "loading"), [("adam", "momentum"), ("momentum", "adam")])
def test_a_clock_of_another_rule_is_refused(saved, loading):
    clocks = [RowClock(RowRule(kind)) for kind in (saved, loading)]
    for clock in clocks:
        clock.extend(0.1, 0.9)
    assert set(clocks[0].state_dict()) == set(clocks[0].state_names)
    with pytest.raises(ValueError, match=rf"another row rule than '{loading}': travel, travel_ends"):
        clocks[1].load_state_dict(clocks[0].state_dict())
