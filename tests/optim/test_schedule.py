"""The schedule: stage bounds, learning rate and momentum by hand, short runs, bad values.

Lives here: optim/schedule.py alone.
Not here: how a trainer uses it.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.schedule import Cadence, Schedule, Stage, StepValues

RECORD = Schedule(
    stages=(
        Stage(share=1, rows=8, windows=(128, 384), document_cap=896),
        Stage(share=1, rows=16, windows=(384, 896), lr_mul=2**0.6),
        Stage(share=1, rows=24, windows=(640, 1408), lr_mul=3**0.5),
    ),
    steps=1270,
    tokens_per_row=16384,
)


def one_stage(steps=100, **values) -> Schedule:
    return Schedule((Stage(share=1.0, rows=2, windows=(64, 128)),), steps, 256, **values)


def bounds(schedule: Schedule) -> list[int]:
    ends, step = [], 0
    while step < schedule.steps:
        step = schedule.stage_end(step)
        ends.append(step)
    return ends


def test_the_record():
    assert bounds(RECORD) == [423, 847, 1270]
    assert RECORD.total_tokens == 423 * 131_072 + 424 * 262_144 + 423 * 393_216
    assert RECORD.at(0) == StepValues(8, 16384, (128, 384), 1.0, 0.85, 896, 0)
    assert RECORD.at(422).stage == 0 and RECORD.at(423).stage == 1 and RECORD.at(847).stage == 2
    assert RECORD.at(423).rows == 16 and RECORD.at(423).windows == (384, 896) and RECORD.at(423).document_cap == 2048
    assert RECORD.at(508).lr == 2**0.6 and RECORD.at(507).lr == 2**0.6
    t = (600 - 508) / 762
    assert RECORD.at(600).lr == pytest.approx(2**0.6 * (1 - t) + 0.15 * t, rel=1e-12)
    t = (1269 - 508) / 762
    assert RECORD.at(1269).lr == pytest.approx(3**0.5 * (1 - t) + 0.15 * t, rel=1e-12)
    assert RECORD.at(150).momentum == pytest.approx(0.9)
    assert RECORD.at(300).momentum == RECORD.at(1220).momentum == 0.95
    assert RECORD.at(1245).momentum == pytest.approx(0.9)
    assert RECORD.at(1269).momentum == pytest.approx(0.852)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(1, 500))
def test_stages_add_up_to_the_steps(shares, steps):
    stages = tuple(Stage(share=share, rows=n + 1, windows=(1, 1)) for n, share in enumerate(shares))
    schedule = Schedule(stages, steps, 10)
    values = [schedule.at(step) for step in range(steps)]
    assert schedule.total_tokens == sum(value.rows * value.tokens for value in values)
    indices = [value.stage for value in values]
    assert indices == sorted(indices)
    for index, share in enumerate(shares):
        # Two bounds, each rounded to the nearest step.
        assert abs(indices.count(index) - steps * share / sum(shares)) <= 1 + 1e-6
    for step, value in enumerate(values):
        end = schedule.stage_end(step)
        assert step < end <= steps and value.rows == stages[value.stage].rows
        assert schedule.at(end - 1).stage == value.stage
        assert end == steps or schedule.at(end).stage > value.stage


@pytest.mark.parametrize(("steps", "expected"), [(7, [2, 5, 7]), (4, [1, 3, 4]), (2, [1, 2]), (1, [1])])
def test_odd_runs(steps, expected):
    """Thirds of 7 are 2.33 and 4.67; of 2, 0.67 and 1.33, so the middle stage comes to nothing; of 1, 0.33 and 0.67."""
    schedule = Schedule(RECORD.stages, steps, 16)
    assert bounds(schedule) == expected
    dropped = {1: {0, 2}, 2: {1}}.get(steps, set())
    assert {schedule.at(step).stage for step in range(steps)} == {0, 1, 2} - dropped


def test_linear_by_hand():
    schedule = one_stage(10, cooldown_share=0.4, floor=0.2, warmup_steps=4)
    assert [schedule.at(step).lr for step in range(10)] == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4]
    )


def test_cosine_with_warm_up_by_hand():
    schedule = one_stage(8, cooldown_share=1.0, floor=0.1, warmup_steps=2, kind="cosine")
    curve = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert curve[1] < 1.0
    assert [schedule.at(step).lr for step in range(8)] == pytest.approx([0.5, curve[1], *curve[2:]])
    assert one_stage(8, cooldown_share=0.5, floor=0.0, kind="cosine").at(6).lr == pytest.approx(0.5)


def test_no_cooldown_and_a_warm_up_longer_than_the_run():
    assert {one_stage(5, cooldown_share=0.0).at(step).lr for step in range(5)} == {1.0}
    assert [one_stage(3, cooldown_share=0.0, warmup_steps=6).at(step).lr for step in range(3)] == pytest.approx(
        [1 / 6, 2 / 6, 3 / 6]
    )


def test_stage_jumps_stay_in_the_warm_up_and_the_cooldown():
    stages = (Stage(share=1, rows=1, windows=(1, 1)), Stage(share=1, rows=1, windows=(1, 1), lr_mul=2.0))
    warm = Schedule(stages, 4, 16, cooldown_share=0.0, warmup_steps=4)
    assert [warm.at(step).lr for step in range(4)] == pytest.approx([0.25, 0.5, 1.5, 2.0])
    cool = Schedule(stages, 4, 16, cooldown_share=1.0, floor=0.0)
    assert [cool.at(step).lr for step in range(4)] == pytest.approx([1.0, 0.75, 1.0, 0.5])


def test_momentum_by_hand():
    schedule = one_stage(10, momentum=(0.8, 0.9, 4, 2))
    assert [schedule.at(step).momentum for step in range(10)] == pytest.approx(
        [0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9, 0.9, 0.9, 0.85]
    )
    short = one_stage(4, momentum=(0.8, 0.9, 10, 4))
    assert [short.at(step).momentum for step in range(4)] == pytest.approx([0.8, 0.81, 0.82, 0.825])
    assert {one_stage(3, momentum=(0.8, 0.9, 0, 0)).at(step).momentum for step in range(3)} == {0.9}


@pytest.mark.parametrize("step", [-1, 100, 1000])
def test_a_step_out_of_range(step):
    for ask in (one_stage().at, one_stage().stage_end):
        with pytest.raises(ValueError, match=f"step {step} is outside the schedule; its 100 steps are 0 to 99"):
            ask(step)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"steps": 0}, "steps"),
        ({"cooldown_share": 1.5}, "cooldown_share"),
        ({"floor": -0.1}, "floor"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"momentum": (0.95, 0.85, 1, 1)}, "momentum"),
        ({"momentum": (0.8, 1.0, 1, 1)}, "momentum"),
        ({"kind": "step"}, "kind"),
    ],
)
def test_bad_schedules(values, name):
    with pytest.raises(ValueError, match=f"schedule {name} is "):
        one_stage(**values)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"share": 0.0}, "share"),
        ({"share": math.inf}, "share"),
        ({"rows": 0}, "rows"),
        ({"windows": (256, 128)}, "windows"),
        ({"windows": (-1, 128)}, "windows"),
        ({"lr_mul": -1.0}, "lr_mul"),
        ({"document_cap": 0}, "document_cap"),
    ],
)
def test_bad_stages(values, name):
    with pytest.raises(ValueError, match=f"stage {name} is "):
        Stage(**({"share": 1.0, "rows": 2, "windows": (64, 128)} | values))


def test_no_stage():
    with pytest.raises(ValueError, match="schedule stages is "):
        Schedule((), 10, 16)


def cycles(cadence: Cadence) -> list[tuple[int, int]]:
    found, step = [], 0
    while step < cadence.schedule.steps:
        found.append(cadence.cycle(step))
        step = found[-1][1]
    return found


def test_the_cadence_of_the_record():
    ends = [end for _, end in cycles(Cadence(one_stage(400), early=2, late=4, switch=336))]
    assert ends == [*range(2, 337, 2), *range(340, 401, 4)]


def test_cycles_end_with_their_stage_and_at_the_switch():
    stages = tuple(Stage(share=share, rows=1, windows=(1, 1)) for share in (5, 7))
    schedule = Schedule(stages, 12, 8)
    assert cycles(Cadence(schedule, 2)) == [(0, 2), (2, 4), (4, 5), (5, 6), (6, 8), (8, 10), (10, 12)]
    assert cycles(Cadence(schedule, 4, late=2, switch=7)) == [(0, 4), (4, 5), (5, 7), (7, 9), (9, 11), (11, 12)]
    assert cycles(Cadence(schedule, 100)) == [(0, 5), (5, 12)]
    assert cycles(Cadence(schedule, 100, late=1, switch=11)) == [(0, 5), (5, 11), (11, 12)]
    # A switch at the first step leaves no early part, one after the last no late part.
    assert cycles(Cadence(schedule, 1, late=5, switch=0)) == cycles(Cadence(schedule, 5, late=1, switch=99))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 9), st.integers(0, 40))
def test_cycles_cover_the_run_and_every_step_knows_its_own(shares, early, late, switch):
    stages = tuple(Stage(share=share, rows=1, windows=(1, 1)) for share in shares)
    schedule = Schedule(stages, 30, 8)
    cadence, step = Cadence(schedule, early, late, switch), 0
    for first, end in cycles(cadence):
        period = late if late and first >= switch else early
        assert first == step < end and end - first <= period
        assert all(cadence.cycle(inner) == (first, end) for inner in range(first, end))
        assert end <= schedule.stage_end(first) and not (late and first < switch < end)
        # Whole, unless a stage, the switch or the run cuts it.
        cut = {schedule.stage_start(first), schedule.stage_end(first), *((switch,) if late else ())}
        assert end - first == period or {first, end} & cut
        step = end


@pytest.mark.parametrize("values", [{"early": 0}, {"early": 1, "late": -1}, {"early": 1, "switch": -1}])
def test_a_cadence_out_of_range_is_refused(values):
    with pytest.raises(ValueError, match="cadence"):
        Cadence(one_stage(), **values)
    with pytest.raises(ValueError, match="outside the schedule"):
        Cadence(one_stage(5), 2).cycle(5)
