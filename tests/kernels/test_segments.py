"""Distinct ids and segments against their oracles: any int64, any repeats, any backend and number of threads.

Lives here: what kernels/segments.py promises.
Not here: sums over segments (test_gather.py) and the choice of a backend (test_dispatch.py).
"""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from kernels.cpu import segments as cpu
from kernels.segments import Segments, segments_of, segments_of_reference, unique_ids, unique_ids_reference

LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1


def zipf(count: int, rows: int) -> Tensor:
    """Ids of which a few make up most, as tokens do: the hottest about a seventh."""
    weights = 1.0 / torch.arange(1, rows + 1, dtype=torch.float64)
    return torch.multinomial(weights, count, replacement=True) * 7919 % rows


CASES = {
    "one": torch.tensor([5]),
    "two alike": torch.tensor([7, 7]),
    "all alike": torch.full((1013,), 3),
    "uniform": torch.randint(0, 1 << 20, (1013,)),
    "zipf": zipf(5003, 1000),
    "sorted": torch.arange(257),
    "falling": torch.arange(257).flip(0),
    "one digit": torch.randint(0, 1 << cpu.DIGIT, (997,)),
    "two digits and a bit": torch.randint(0, 1 << (2 * cpu.DIGIT + 1), (997,)),
    "past int32": torch.randint(0, 1 << 33, (997,)),
    "the widest keys that fit": torch.randint(0, 1 << 53, (1024,)) | 1 << 52,
    "wider": torch.randint(0, 1 << 62, (1025,)).repeat(2),
    "negative": torch.randint(-1000, 1000, (997,)),
    "lowest and highest": torch.tensor([HIGHEST, LOWEST, 0, LOWEST, -1, HIGHEST]),
    "high but near": torch.randint(HIGHEST - 50, HIGHEST, (997,)),
}


@pytest.fixture(params=kernels.CHOICES)
def forced(request, monkeypatch) -> str:
    monkeypatch.setenv(kernels.VARIABLE, request.param)
    return request.param


def assert_unique(ids_N: Tensor) -> None:
    unique_U, slots_N = unique_ids(ids_N)
    expected_U, expected_N = torch.unique(ids_N, return_inverse=True)
    assert unique_U.dtype == slots_N.dtype == torch.int64
    assert torch.equal(unique_U, expected_U) and torch.equal(slots_N, expected_N)
    assert unique_U.untyped_storage().nbytes() == unique_U.nbytes


def by_hand(slots: list[int]) -> Segments:
    distinct = sorted(set(slots))
    groups = [[k for k, slot in enumerate(slots) if slot == one] for one in distinct]
    starts = [sum(len(group) for group in groups[:s]) for s in range(len(groups) + 1)]
    return Segments(
        *(torch.tensor(x, dtype=torch.int64) for x in ([k for group in groups for k in group], starts, distinct))
    )


def assert_same(got: Segments, expected: Segments) -> None:
    for name, one, other in zip(Segments._fields, got, expected):
        assert one.dtype == torch.int64 and torch.equal(one, other), name


@pytest.mark.parametrize("ids_N", CASES.values(), ids=CASES)
def test_unique_ids(ids_N, forced):
    before = ids_N.clone()
    assert_unique(ids_N)
    assert torch.equal(ids_N, before)


@pytest.mark.parametrize("ids_N", CASES.values(), ids=CASES)
def test_segments_of(ids_N, forced):
    _, slots_N = unique_ids_reference(ids_N)
    rows = int(slots_N.max()) + 1
    expected = by_hand(slots_N.tolist())
    assert_same(segments_of(slots_N, rows), expected)
    assert_same(segments_of(slots_N, 1 << 62), expected)
    assert_same(segments_of_reference(slots_N), expected)


def test_slots_far_apart(forced):
    slots_N = torch.tensor([1 << 61, 0, 1 << 62, 5, 0, (1 << 62) - 1])
    assert_same(segments_of(slots_N, (1 << 62) + 1), by_hand(slots_N.tolist()))


def test_nothing(forced):
    nothing = torch.empty(0, dtype=torch.int64)
    unique_U, slots_N = unique_ids(nothing)
    assert unique_U.shape == slots_N.shape == (0,) and unique_U.dtype == slots_N.dtype == torch.int64
    assert_same(segments_of(nothing, 5), Segments(nothing, torch.zeros(1, dtype=torch.int64), nothing))


def test_every_other_id(forced):
    ids_N = torch.randint(0, 50, (200,))
    assert_unique(ids_N[::2])
    assert_same(segments_of(ids_N[::2], 50), by_hand(ids_N[::2].tolist()))


ids = st.one_of(st.integers(LOWEST, HIGHEST), st.integers(0, 9), st.integers(0, 1 << 22))


@settings(max_examples=30, deadline=None)
@given(st.lists(ids, min_size=1, max_size=40))
@example([0, -1])
@example([LOWEST, HIGHEST])
def test_any_ids(values):
    assert_unique(torch.tensor(values))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=60))
def test_any_slots(values):
    assert_same(segments_of(torch.tensor(values), 31), by_hand(values))


@pytest.mark.parametrize("wrong", [-1, 4, 1 << 40])
def test_a_slot_out_of_range_is_refused(wrong, forced):
    with pytest.raises(ValueError, match=f"slot {wrong} is outside 0 to 3"):
        segments_of(torch.tensor([0, wrong, 3]), 4)


@pytest.mark.parametrize("ids", [torch.tensor([1], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)])
def test_another_kind_of_ids_is_refused(ids, forced):
    with pytest.raises(ValueError, match=r"unique_ids of .*give a list of int64"):
        unique_ids(ids)
    with pytest.raises(ValueError, match=r"segments_of of .*give a list of int64"):
        segments_of(ids, 5)


def test_two_threads_at_once():
    cases = [(one, unique_ids_reference(one)) for one in (CASES["zipf"], CASES["wider"], CASES["uniform"])]
    wrong = []

    def work() -> None:
        for _ in range(20):
            for ids_N, (expected_U, expected_N) in cases:
                unique_U, slots_N = unique_ids(ids_N)
                segments, expected = segments_of(slots_N, len(unique_U)), segments_of_reference(expected_N)
                pairs = [(unique_U, expected_U), (slots_N, expected_N), *zip(segments, expected)]
                wrong.extend(1 for one, other in pairs if not torch.equal(one, other))

    working = [threading.Thread(target=work) for _ in range(2)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    assert not wrong
