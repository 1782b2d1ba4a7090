"""The working set: gathers and their gradients against plain indexing, and memory that is reused without harm."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kernels.row_update import mean_square
from mome.table.rows import RowTable, TableSpec
from mome.table.working import Buffers
from optim.rows import RowRule

SPEC = TableSpec(rows=500, lanes=2, dim=8, init=0.3)


def make(dtype=torch.float64, spec=SPEC, rule="adam") -> RowTable:
    return RowTable(spec, RowRule(rule, weight_decay=0.1), 1, dtype, name="words")


@pytest.mark.parametrize("sizes", [[0], [1], [7, 0, 31], [64, 64]])
def test_gathers_and_gradients_equal_plain_indexing(sizes):
    """Several gathers of several steps, duplicates and all, beside a use of the leaf that autograd sees itself."""
    table = make()
    ids = [torch.randint(20, (n,)) for n in sizes]
    ws = table.pull(ids)
    leaf = ws.rows.detach().clone().requires_grad_()
    for k, one in enumerate(ids):
        weights = torch.randn(len(one), 2, 8, dtype=torch.float64)
        slots = torch.searchsorted(ws.ids, one)
        found, expected = ws.gather(k), leaf[slots]
        assert torch.equal(found, expected) and torch.equal(ws.slots(k), slots)
        (found.sin() * weights).sum().backward()
        (expected.sin() * weights).sum().backward()
        again = ws.gather_slots(slots.flip(0).view(1, -1))
        assert again.shape == (1, len(one), 2, 8)
        (again.square().sum() + ws.rows.sum()).backward()
        (leaf[slots].square().sum() + leaf.sum()).backward()
        torch.testing.assert_close(ws.rows.grad, leaf.grad, rtol=1e-13, atol=1e-14)


def test_one_backward_through_several_gathers():
    ws = make().pull([torch.tensor([3, 3, 9])])
    a, b = ws.gather(0), ws.gather_slots(torch.tensor([1, 0]))
    (a.sum() + (b * b).sum() + (a[:2] * b).sum()).backward()
    leaf = ws.rows.detach().clone().requires_grad_()
    x, y = leaf[[0, 0, 1]], leaf[[1, 0]]
    (x.sum() + (y * y).sum() + (x[:2] * y).sum()).backward()
    torch.testing.assert_close(ws.rows.grad, leaf.grad, rtol=1e-14, atol=0)


def test_a_retained_graph_is_an_error_and_never_a_wrong_number():
    ws = make().pull([torch.randint(500, (50,))])
    out = ws.gather(0)
    loss = (out * out).sum()
    loss.backward(retain_graph=True)
    # The memory behind `out` now belongs to this one.
    (ws.gather(0) * 2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_retained_graph_that_needs_no_rows_adds_up():
    """The gradient of a sum needs nothing of what was gathered: twice through it is twice the gradient."""
    ws = make().pull([torch.tensor([4, 4, 7])])
    loss = ws.gather(0).sum()
    loss.backward(retain_graph=True)
    ws.gather(0)
    loss.backward()
    assert torch.equal(ws.rows.grad, torch.tensor([4.0, 2.0]).double()[:, None, None].expand(2, 2, 8))


def test_a_pushed_set_is_unusable_and_so_is_what_it_gathered():
    table = make()
    ws = table.pull([torch.tensor([1, 2, 2])])
    loss = ws.gather(0).square().sum()
    table.push(ws, 0.1)
    # Its memory is that of the next one.
    other = table.pull([torch.tensor([1, 2, 2])])
    other.gather(0).sum().backward()
    for use in (
        loss.backward, lambda: ws.rows, lambda: ws.gather(0), lambda: ws.gather_slots(torch.tensor([0])),
        lambda: table.grad_square(ws),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"event 0 .*used up: pull again"):
            use()
    assert torch.equal(other.rows.grad, torch.tensor([1.0, 2.0]).double()[:, None, None].expand(2, 2, 8))


def test_a_gradient_of_a_gradient_is_refused():
    ws = make().pull([torch.tensor([1, 2])])
    rows = ws.gather(0)
    weight = torch.ones(2, 2, 8, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad((rows * weight).sum(), weight, create_graph=True)
    grad.sum().backward()
    assert torch.equal(ws.rows.grad, torch.ones_like(ws.rows))


def test_sets_for_reading_have_memory_of_their_own():
    """A validation in mid-cycle disturbs neither the gathers under way nor what it read itself."""
    table = make()
    ws = table.pull([torch.randint(500, (60,))])
    out = ws.gather(0)
    kept = out.detach().clone()
    reading = [table.pull([torch.randint(500, (60,))], grad=False).gather(0) for _ in range(5)]
    copies = [one.clone() for one in reading]
    with torch.no_grad():
        ws.gather(0)
    assert torch.equal(out, kept)
    out.square().sum().backward()
    table.push(ws, 0.1)
    table.pull([torch.arange(60)]).gather(0)
    assert all(torch.equal(one, copy) for one, copy in zip(reading, copies))


def test_two_sets_at_once_do_not_share_memory():
    table = make()
    one, other = table.pull([torch.arange(30)]), table.pull([torch.arange(30, 60)])
    a, b = one.gather(0), other.gather(0)
    assert torch.equal(a, table.read_rows(torch.arange(30))) and torch.equal(b, table.read_rows(torch.arange(30, 60)))


def test_the_power_that_comes_with_the_sums_is_dropped_when_somebody_else_changes_the_gradient():
    ids = [torch.tensor([1, 2, 2]), torch.tensor([2, 9])]
    pushed = []
    for change in (None, "in place", "another tensor", "by hand"):
        table = make()
        ws = table.pull(ids)
        assert ws.power is None
        for step in range(2):
            (ws.gather(step) * (step + 1.0)).sum().backward()
        assert torch.equal(ws.power, mean_square(ws.rows.grad))
        assert math.isclose(table.grad_square(ws), float(ws.rows.grad.square().sum()), rel_tol=1e-12)
        if change == "in place":
            ws.rows.grad.mul_(3.0)
        elif change == "another tensor":
            ws.rows.grad = ws.rows.grad * 3.0
        elif change == "by hand":
            ws.rows.grad = ws.rows.grad * 1.5
            # Adds to what was not summed here: nothing is known of it.
            ws.rows.grad += ws.rows.grad
        assert (ws.power is None) == (change is not None)
        assert math.isclose(table.grad_square(ws), float(ws.rows.grad.square().sum()), rel_tol=1e-12)
        # Adagrad-like at the first event: the second moment shows which power was taken.
        table.push(ws, 0.1)
        pushed.append(table.read_second(torch.tensor([1, 2, 9])))
    for other in pushed[1:]:
        torch.testing.assert_close(other, 9.0 * pushed[0], rtol=1e-12, atol=0)


WIDE = TableSpec(rows=5000, lanes=2, dim=64, init=0.3)
LOOKUPS = 4000


def cycles(table: RowTable, steps: int, grad: torch.Tensor) -> None:
    for step in range(steps):
        ws = table.pull([torch.randint(5000, (LOOKUPS,), generator=torch.Generator().manual_seed(step % 7))])
        ws.gather(0).backward(grad)
        table.push(ws, 0.01)


def row_sized(work) -> int:
    """CPU allocations, inside operators too, of at least a tenth of the rows that a step touches."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    least = LOOKUPS * 2 * 64 * 4 // 20
    return sum(one.name() == "[memory]" and one.nbytes() >= least for one in seen.profiler.kineto_results.events())


@pytest.mark.parametrize(
    ("kind", "format"), [("adam", "fp32"), ("momentum", "fp32"), ("adam", "bf16"), ("adagrad", "fp8")]
)
def test_no_row_sized_memory_is_allocated_once_warm(kind, format, monkeypatch):
    monkeypatch.setenv("MOME_KERNELS", "numba")
    table = RowTable(WIDE, RowRule(kind, weight_decay=0.1), 1, format=format)
    grad = torch.ones(LOOKUPS, 2, 64)
    cycles(table, 14, grad)
    assert row_sized(lambda: cycles(table, 7, grad)) == 0
    # The count can tell: reads for others' use are theirs to keep, and so are fresh memory.
    assert row_sized(lambda: [table.read_rows(torch.arange(LOOKUPS)) for _ in range(3)]) >= 3


def test_buffers_grow_to_what_is_needed_and_no_further():
    buffers = Buffers(torch.device("cpu"))
    for size in [3, 100, 90, 101, 5, 0, 100, 126, 120]:
        lease = buffers.take((size, 4), torch.float32)
        assert lease.tensor.shape == (size, 4) and lease.tensor.is_contiguous()
        lease.tensor.fill_(1.0)
        buffers.give(lease)
        buffers.give(lease)
        held = [size for kind in buffers._free.values() for size, _ in kind]
        assert len(held) == 1 and held[0] <= 1.25 * 126 * 4 + 1
    both = [buffers.take((10,), torch.float32) for _ in range(2)]
    both[0].tensor.zero_(), both[1].tensor.fill_(1.0)
    assert not both[0].tensor.any()
    assert buffers.take((10,), torch.int32).tensor.dtype == torch.int32


def test_buffers_serve_threads():
    """No memory is lent to two at once; threads that take turns all the time would be lent the same."""
    buffers, wrong = Buffers(torch.device("cpu")), []
    for lease in [buffers.take((5,), torch.int64) for _ in range(100)]:
        buffers.give(lease)

    def work(mark):
        for size in range(400):
            leases = [buffers.take((1 + size % 3,), torch.int64) for _ in range(3)]
            for lease in leases:
                lease.tensor.fill_(mark)
            time.sleep(0)
            wrong.extend(size for lease in leases if not bool((lease.tensor == mark).all()))
            for lease in leases:
                buffers.give(lease)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_a_dropped_graph_leaks_nothing():
    """Gathers whose backward pass never comes give their memory back with the set."""
    table = make(torch.float32)
    for _ in range(20):
        ws = table.pull([torch.arange(400)])
        for _ in range(3):
            ws.gather(0)
        table.push(ws, 0.1)
    held = sum(one.nbytes for kind in table._buffers._free.values() for _, one in kind)
    assert held < 12 * 400 * 2 * 8 * 4
    ws = table.pull([torch.arange(400)])
    seen = weakref.ref(ws)
    ws.gather(0).sum()
    del ws
    gc.collect()
    assert seen() is None


def test_a_result_that_only_a_detached_copy_still_shows_is_marked_as_changed():
    ws = make().pull([torch.randint(500, (50,))])
    x, w = ws.gather(0), torch.ones(50, 2, 8, dtype=torch.float64, requires_grad=True)
    detached, first = x.detach(), x.sum()
    second = (detached * w).sum()
    del x
    first.backward()
    del first
    (ws.gather(0) * 2).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_forward_passes_that_are_abandoned_hold_no_memory():
    """As in activation checkpointing: the graph goes, and what was lent to it goes along, before the push and after."""
    table = make(torch.float32)
    ws = table.pull([torch.arange(400)])
    for _ in range(100):
        ws.gather(0)
    table.push(ws, 0.1)
    assert sum(len(kind) for kind in table._buffers._free.values()) < 10


def test_a_small_request_leaves_a_large_buffer_to_who_needs_it():
    buffers = Buffers(torch.device("cpu"))
    large = buffers.take((1_000_000,), torch.float32)
    memory = large.memory
    buffers.give(large)
    small = buffers.take((5000,), torch.float32)
    assert small.memory is not memory and buffers.take((900_000,), torch.float32).memory is memory
