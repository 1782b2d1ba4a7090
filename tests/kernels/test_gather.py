"""Rows by id, forth and back, and sums over segments: against their oracles, in both backends, with any threads.

Lives here: what kernels/gather.py promises.
Not here: which segments there are (test_segments.py) and the choice of a backend (test_dispatch.py).
"""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels
from kernels import gather
from kernels.cpu import gather as cpu
from kernels.gather import (
    gather_rows,
    gather_rows_reference,
    scatter_rows_,
    scatter_rows_reference,
    segment_sum_,
    segment_sum_reference,
)
from kernels.row_update import mean_square
from kernels.segments import segments_of, unique_ids

# The widths lie below, at and above what is copied as a block and what is asked for early; 97 is prime.
SHAPES = [(1,), (7,), (1, 1), (5, 3), (11, 2, 8), (97, 4), (13, 97), (6, 300), (3, 1, 64)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn]


@pytest.fixture(params=kernels.CHOICES)
def forced(request, monkeypatch) -> str:
    monkeypatch.setenv(kernels.VARIABLE, request.param)
    return request.param


@pytest.fixture
def eager(monkeypatch):
    """However little there is to do, it is shared out; returns a setter of the number of threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(gather, "SHARE", 1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def table(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * 50).to(dtype)


def raw(rows: Tensor) -> Tensor:
    """The bytes: torch.equal says that NaN differs from itself and that -0 does not differ from 0."""
    return rows.contiguous().view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(raw(one), raw(other))


def some_ids(rows: int, count: int) -> Tensor:
    return torch.randint(0, rows, (count,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gather_and_scatter_move_bits(shape, dtype, forced, poison_empty):
    rows = table(shape, dtype)
    ids_N = some_ids(len(rows), 29)
    got = gather_rows(rows, ids_N)
    assert same(got, gather_rows_reference(rows, ids_N))
    out = torch.zeros_like(got)
    assert gather_rows(rows, ids_N, out) is out and same(out, got)
    ids_U = torch.randperm(len(rows))[: max(1, len(rows) // 2)]
    values = table((len(ids_U), *shape[1:]), dtype)
    expected = scatter_rows_reference(rows, ids_U, values)
    assert scatter_rows_(rows, ids_U, values) is None
    assert same(rows, expected)


def test_special_numbers_keep_their_bits(forced):
    rows = torch.tensor([[-0.0] * 5, [float("nan")] * 5, [float("inf")] * 5, [1e-45] * 5])
    raw(rows)[1, 0] = 7
    ids_N = torch.tensor([1, 0, 3, 2, 1])
    assert same(gather_rows(rows, ids_N), rows[ids_N])
    to = torch.zeros_like(rows)
    scatter_rows_(to, torch.tensor([2, 0, 1, 3]), rows)
    assert same(to[[2, 0, 1, 3]], rows)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 90), st.lists(st.integers(0, 1 << 30), min_size=1, max_size=40))
def test_any_sizes(count, width, picks):
    rows = torch.randn(count, width)
    ids_N = torch.tensor(picks) % count
    assert same(gather_rows(rows, ids_N), rows[ids_N])
    unique_U, slots_N = unique_ids(ids_N)
    grad_NE, segments = torch.randn(len(ids_N), width), segments_of(slots_N, len(unique_U))
    expected = scatter_rows_reference(rows, unique_U, segment_sum_reference(rows[unique_U], grad_NE, segments, True))
    sums_UE = gather_rows(rows, unique_U)
    segment_sum_(sums_UE, grad_NE, segments, add=True)
    scatter_rows_(rows, unique_U, sums_UE)
    assert torch.equal(rows, expected)


def test_nothing(forced):
    nothing, rows = torch.empty(0, dtype=torch.int64), torch.randn(4, 3)
    before = rows.clone()
    assert gather_rows(rows, nothing).shape == (0, 3)
    assert gather_rows(torch.empty(0, 3), nothing).shape == (0, 3)
    assert gather_rows(torch.empty(4, 0), torch.tensor([3])).shape == (1, 0)
    scatter_rows_(rows, nothing, torch.empty(0, 3))
    segment_sum_(rows, torch.empty(0, 3), segments_of(nothing, 4), add=False)
    segment_sum_(torch.empty(4, 0), torch.empty(1, 0), segments_of(torch.tensor([3]), 4), add=False)
    assert torch.equal(rows, before)


@pytest.mark.parametrize(
    "way", [lambda x: x[:, ::2], lambda x: x.t()[:11], lambda x: x[2:], lambda x: x.view(-1)[3:-7]]
)
def test_views_and_places_that_are_not_aligned(way, forced):
    for dtype in (torch.float32, torch.int8, torch.float64):
        whole = table((40, 30), dtype)
        rows = way(whole)
        ids_N = some_ids(len(rows), 19)[::2]
        assert same(gather_rows(rows, ids_N), rows[ids_N])
        out = way(torch.zeros(40, 30, dtype=dtype))[: len(ids_N)]
        gather_rows(rows, ids_N[: len(out)], out)
        assert same(out, rows[ids_N[: len(out)]])
        ids_U = torch.randperm(len(rows))[:5]
        expected = scatter_rows_reference(rows, ids_U, rows[:5].clone())
        scatter_rows_(rows, ids_U, rows[:5].clone())
        assert same(rows, expected)


def test_autograd_sees_nothing(forced):
    rows, grad = torch.randn(5, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    assert not gather_rows(rows, torch.tensor([1, 1])).requires_grad
    scatter_rows_(rows, torch.tensor([1, 3]), grad)
    assert torch.equal(rows[[1, 3]], grad)
    segment_sum_(rows, grad, segments_of(torch.tensor([4, 4]), 5), add=False)
    assert torch.equal(rows[4], grad[0] + grad[1])
    assert rows.is_leaf and rows.grad_fn is None


@pytest.mark.parametrize("width", [1, 8, 100])
@pytest.mark.parametrize("wrong", [-1, 5, 1 << 40])
@pytest.mark.parametrize("place", [0, 3, 20])
def test_an_id_out_of_range_is_refused_and_nothing_else_is_written(wrong, width, place, forced):
    rows, ids_N = torch.randn(5, width), torch.tensor([0, 2] * 10 + [0])
    ids_N[place] = wrong
    guard = torch.zeros(7, width)
    with pytest.raises(ValueError, match=f"gather: row id {wrong} is outside 0 to 4"):
        gather_rows(rows, ids_N)
    with pytest.raises(ValueError, match=f"scatter: row id {wrong} is outside 0 to 4"):
        scatter_rows_(guard[1:6], ids_N, torch.ones(21, width))
    assert guard[[0, 2, 4, 5, 6]].count_nonzero() == 0


def test_what_does_not_fit_is_refused(forced):
    rows, ids_N = torch.randn(5, 3), torch.tensor([1, 2])
    for wrong in (ids_N.int(), ids_N.view(1, 2), ids_N.float()):
        with pytest.raises(ValueError, match=r"gather_rows with ids .*give a list of int64"):
            gather_rows(rows, wrong)
        with pytest.raises(ValueError, match=r"scatter_rows_ with ids .*give a list of int64"):
            scatter_rows_(rows, wrong, torch.randn(2, 3))
    for wrong in (torch.randn(2, 4), torch.randn(3, 3), torch.randn(2, 3, dtype=torch.float64), torch.randn(6)):
        with pytest.raises(ValueError, match=r"gather_rows into .*give \[2, 3\] torch.float32"):
            gather_rows(rows, ids_N, wrong)
        with pytest.raises(ValueError, match=r"scatter_rows_ of .*give \[2, 3\] torch.float32"):
            scatter_rows_(rows, ids_N, wrong)
        with pytest.raises(ValueError, match=r"segment_sum_ of .*give \[2, 3\] torch.float32"):
            segment_sum_(rows, wrong, segments_of(ids_N, 5), add=True)
    with pytest.raises(ValueError, match="slot 9 is outside 0 to 4"):
        segment_sum_(rows, torch.randn(2, 3), segments_of(torch.tensor([0, 9]), 10), add=True)
    with pytest.raises(ValueError, match=r"\[U, E\]"):
        segment_sum_(torch.randn(5), torch.randn(2), segments_of(ids_N, 5), add=True)


SLOTS = {
    "one": torch.tensor([0]),
    "one in a hot segment": torch.tensor([3] * 400 + [1, 5, 1]),
    "all alike": torch.full((257,), 2),
    "all different": torch.randperm(53),
    "random": torch.randint(0, 23, (199,)),
    "hot first": torch.cat((torch.zeros(150, dtype=torch.int64), torch.randint(0, 61, (997,)))),
}


def loops(sums_UE: Tensor, grad_NE: Tensor, slots_N: Tensor, add: bool) -> Tensor:
    """Every row of grad added in turn to a total of its slot."""
    totals: dict[int, Tensor] = {}
    for slot, row in zip(slots_N.tolist(), grad_NE):
        totals[slot] = totals[slot] + row if slot in totals else row
    sums_UE = sums_UE.clone()
    for slot, total in totals.items():
        sums_UE[slot] = sums_UE[slot] + total if add else total
    return sums_UE


@pytest.mark.parametrize("slots_N", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 16, 97])
@pytest.mark.parametrize("add", [False, True])
def test_segment_sums_are_those_of_loops(slots_N, dtype, width, add, forced, poison_empty):
    rows = int(slots_N.max()) + 3
    sums_UE, grad_NE = table((rows, width), dtype), table((len(slots_N), width), dtype)
    segments = segments_of(slots_N, rows)
    expected, before = loops(sums_UE, grad_NE, slots_N, add), grad_NE.clone()
    assert torch.equal(segment_sum_reference(sums_UE, grad_NE, segments, add), expected)
    segment_sum_(sums_UE, grad_NE, segments, add=add)
    assert torch.equal(sums_UE, expected) and torch.equal(grad_NE, before)


@pytest.mark.parametrize("slots_N", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize(("lanes", "dim"), [(1, 1), (1, 97), (2, 16), (3, 9), (5, 8)])
@pytest.mark.parametrize("add", [False, True])
def test_the_power_of_summed_rows_has_the_bits_of_mean_square(slots_N, lanes, dim, add, forced):
    rows = int(slots_N.max()) + 3
    for dtype in (torch.float32, torch.float64):
        sums_UE, grad_NE = table((rows, lanes * dim), dtype), table((len(slots_N), lanes * dim), dtype)
        power_UL = torch.full((rows, lanes), -1.0, dtype=dtype)
        segments = segments_of(slots_N, rows)
        segment_sum_(sums_UE, grad_NE, segments, add=add, power_UL=power_UL)
        expected = mean_square(sums_UE.view(rows, lanes, dim))
        untouched = torch.ones(rows, dtype=torch.bool).index_fill_(0, segments.slots, False)
        assert (power_UL[untouched] == -1.0).all() and torch.equal(power_UL[~untouched], expected[~untouched])
        exact = sums_UE.double().view(rows, lanes, dim).square().mean(-1)
        torch.testing.assert_close(expected.double(), exact, rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_power_that_does_not_fit_is_refused():
    segments = segments_of(torch.tensor([0, 1]), 2)
    for power_UL in (torch.zeros(2, 2), torch.zeros(1, 3), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 0)):
        with pytest.raises(ValueError, match="segment_sum_ with power"):
            segment_sum_(torch.zeros(2, 3), torch.zeros(2, 3), segments, add=False, power_UL=power_UL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_are_as_exact_as_the_naive_way(dtype, forced):
    slots_N, grad_NE = SLOTS["hot first"], table((1147, 16), dtype)
    segments, sums_UE = segments_of(slots_N, 61), table((61, 16), dtype)
    exact = segment_sum_reference(sums_UE.double(), grad_NE.double(), segments, True)
    naive = sums_UE.clone().index_add_(0, slots_N, grad_NE)
    segment_sum_(sums_UE, grad_NE, segments, add=True)
    tolerance = torch.finfo(dtype).eps * exact.abs().max()
    assert (sums_UE - exact).abs().max() <= (naive - exact).abs().max() + tolerance


def test_strided_gradients(forced):
    grad_NE, slots_N = torch.randn(8, 1).expand(8, 40), torch.randint(0, 3, (8,))
    for grad in (grad_NE, torch.randn(8, 80)[:, ::2]):
        sums_UE = torch.zeros(3, 40)
        segment_sum_(sums_UE, grad, segments_of(slots_N, 3), add=False)
        torch.testing.assert_close(sums_UE, torch.zeros(3, 40).index_add_(0, slots_N, grad), rtol=0, atol=1e-5)


def test_threads_and_repeats_change_no_bit(eager):
    rows, ids_N = torch.randn(500, 48), torch.cat((torch.full((300,), 7), some_ids(500, 1500)))
    unique_U, slots_N = unique_ids(ids_N)
    segments, grad_NE = segments_of(slots_N, len(unique_U)), torch.randn(len(ids_N), 48)
    results = []
    for many in (1, 2, 3, 3, 2):
        eager(many)
        sums_UE, changed = torch.randn(len(unique_U), 48, generator=torch.Generator().manual_seed(1)), rows.clone()
        segment_sum_(sums_UE, grad_NE, segments, add=True)
        scatter_rows_(changed, unique_U, sums_UE)
        results.append((gather_rows(changed, ids_N), sums_UE, changed))
    for later in results[1:]:
        assert all(same(one, other) for one, other in zip(results[0], later))


def test_a_wrong_id_is_found_in_any_share(eager):
    eager(3)
    ids_N = some_ids(50, 1000)
    for place in (0, 400, 999):
        wrong_N = ids_N.clone()
        wrong_N[place] = 50
        with pytest.raises(ValueError, match="row id 50 is outside 0 to 49"):
            gather_rows(torch.randn(50, 8), wrong_N)


def test_shares_follow_the_lookups_and_not_the_segments(eager, monkeypatch):
    eager(2)
    shares = []
    monkeypatch.setattr(cpu, "segment_sum", lambda begin, end, *args: shares.append((begin, end)))
    slots_N = torch.cat((torch.zeros(1500, dtype=torch.int64), torch.arange(1, 1001)))
    segments = segments_of(slots_N, 1001)
    segment_sum_(torch.zeros(1001, 16), torch.zeros(2500, 16), segments, add=False)
    shares.sort()
    assert shares[0][0] == 0 and shares[-1][1] == 1001
    assert all(one[1] == other[0] for one, other in itertools.pairwise(shares))
    lookups = [int(segments.starts[end] - segments.starts[begin]) for begin, end in shares]
    assert lookups[0] == 1500 and max(lookups[1:]) < 300


def test_two_threads_at_once(eager):
    eager(2)
    wrong = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(300, 40, generator=generator)
        for _ in range(15):
            ids_N = torch.randint(0, 300, (700,), generator=generator)
            unique_U, slots_N = unique_ids(ids_N)
            segments, got = segments_of(slots_N, len(unique_U)), gather_rows(rows, ids_N)
            sums_UE = torch.zeros(len(unique_U), 40)
            segment_sum_(sums_UE, got, segments, add=False)
            expected = segment_sum_reference(torch.zeros_like(sums_UE), rows[ids_N], segments, False)
            changed = rows.clone()
            scatter_rows_(changed, unique_U, sums_UE)
            if not (torch.equal(sums_UE, expected) and torch.equal(changed[unique_U], expected)):
                wrong.append(seed)

    working = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()
    assert not wrong
