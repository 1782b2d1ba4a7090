"""RowTable: purity, refusals, restoring a cycle, order, repeats and sizes.

Not here: dense equality (test_table_dense.py), the working set's memory (test_working.py), checkpoints (test_parts.py),
formats, places and look-ahead (test_table_forms.py).
"""

from __future__ import annotations

import math

import pytest
import torch

from mome.table.parts import load_parts, state_parts
from mome.table.rows import RowTable, TableSpec
from optim.rows import KINDS, RowRule

SPEC = TableSpec(rows=50, lanes=3, dim=4, init=0.3)


def make(kind="adam", spec=SPEC, seed=1, dtype=torch.float32, **rule) -> RowTable:
    return RowTable(spec, RowRule(kind, **{"weight_decay": 0.3, **rule}), seed=seed, dtype=dtype, name="words")


def snapshot(table: RowTable) -> dict[str, torch.Tensor]:
    (part,) = state_parts(table)
    return {key: tensor.clone() for key, tensor in part.items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def cycle_of(event: int, steps: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(event)
    return [torch.randint(35, (2, 5), generator=generator) for _ in range(steps)]


def backward(rows: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    push = torch.randn(rows.shape, generator=generator, dtype=rows.dtype)
    ((rows + push).square()).sum().backward()


def train(table: RowTable, first: int, final: int, between=lambda table: None) -> None:
    for event in range(first, final):
        ws = table.pull(cycle_of(event))
        for k in range(2):
            backward(ws.gather(k), 10 * event + k)
            between(table)
        table.push(ws, lr=0.05 / (event + 1))


# Reading


def test_a_working_set_is_the_sorted_unique_rows_as_a_leaf():
    table = make()
    ids = [torch.tensor([[7, 3], [7, 40]]), torch.tensor([3, 3, 0], dtype=torch.int32)]
    ws = table.pull(ids)
    assert ws.ids.tolist() == [0, 3, 7, 40] and ws.event == 0
    assert ws.rows.is_leaf and ws.rows.requires_grad and ws.rows.shape == (4, 3, 4)
    for k, one in enumerate(ids):
        assert ws.slots(k).dtype == torch.int64 and torch.equal(ws.ids[ws.slots(k)], one.long())
        assert torch.equal(ws.slots_of(one), ws.slots(k))
        assert ws.gather(k).shape == (*one.shape, 3, 4)
        assert torch.equal(ws.gather(k), table.read_rows(one))
    assert not table.pull(ids, grad=False).rows.requires_grad


@pytest.mark.parametrize("ids", [[], [torch.empty(0, dtype=torch.int64)], [torch.empty(3, 0, dtype=torch.int64)] * 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_working_set_works_and_its_push_only_moves_the_clock(ids, kind):
    table = make(kind)
    before = snapshot(table)
    ws = table.pull(ids)
    assert ws.rows.shape == (0, 3, 4)
    for k, one in enumerate(ids):
        assert ws.gather(k).shape == (*one.shape, 3, 4)
        ws.gather(k).sum().backward()
    assert table.push(ws, 0.1) == 0 and table.event == 1 and table.touched_rows == 0
    after = snapshot(table)
    for key in before.keys() - table.clock.state_dict().keys():
        assert torch.equal(before[key], after[key])


@pytest.mark.parametrize("kind", KINDS)
def test_reading_in_between_changes_no_bit(kind):
    def read(table):
        before = snapshot(table)
        table.pull([torch.arange(50)], grad=False)
        table.pull([torch.randint(50, (9,))])
        table.read_rows(torch.arange(50))
        list(table.iter_rows(7))
        assert same_bits(before, snapshot(table))

    alone, watched = make(kind), make(kind)
    train(alone, 0, 6)
    train(watched, 0, 6, between=read)
    assert same_bits(snapshot(alone), snapshot(watched))


def test_export_reads_agree_and_apply_the_decay():
    table = make()
    train(table, 0, 5)
    table.push(table.pull([]), 0.5)
    whole = table.read_rows(torch.arange(50))
    assert not torch.equal(whole[table.touched_ids()], snapshot(table)["rows"])
    for chunk in (1, 7, 50, 4096):
        parts = list(table.iter_rows(chunk))
        assert all(len(part) <= chunk for part in parts) and torch.equal(torch.cat(parts), whole)
    assert torch.equal(table.read_rows(torch.tensor([[5, 5], [0, 49]])), whole[torch.tensor([[5, 5], [0, 49]])])
    assert torch.equal(table.pull([torch.arange(50)], grad=False).rows, whole)


# Refusals


@pytest.mark.parametrize("wrong", [-1, 50, 1 << 40, -(1 << 40)])
def test_ids_outside_the_table_are_refused_by_name(wrong):
    table = make()
    for call in (
        lambda ids: table.pull([torch.tensor([3]), ids]),
        lambda ids: table.pull([ids], grad=False),
        table.read_rows,
        table.read_second,
    ):
        with pytest.raises(ValueError, match=rf"words.* {wrong} .*49"):
            call(torch.tensor([1, wrong]))


def test_ids_that_are_no_list_of_integers_are_refused():
    table = make()
    for ids in ([torch.tensor([1.0])], [torch.tensor([True])]):
        with pytest.raises(ValueError, match="integers"):
            table.pull(ids)
    with pytest.raises(ValueError, match="list"):
        table.pull(torch.tensor([1, 2]))


@pytest.mark.parametrize("wrong", [0, 4, 41, 99, -1])
def test_ids_outside_a_working_set_are_refused(wrong):
    table = make()
    with pytest.raises(ValueError, match=rf"row id {wrong} .*working set"):
        table.pull([torch.tensor([3, 7, 40])]).slots_of(torch.tensor([[3], [wrong]]))
    with pytest.raises(ValueError, match="working set"):
        table.pull([]).slots_of(torch.tensor([3]))


def refused(table: RowTable, ws, match: str, lr: float = 0.1, beta2: float | None = None, scale: float = 1.0) -> None:
    before, rows = snapshot(table), ws.rows.detach().clone()
    with pytest.raises(ValueError, match=match):
        table.push(ws, lr, beta2, scale)
    assert same_bits(before, snapshot(table)) and torch.equal(rows, ws.rows.detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(kind, bad):
    table = make(kind)
    train(table, 0, 2)
    ws = table.pull([torch.tensor([5, 9, 9])])
    backward(ws.gather(0), 0)
    good = ws.rows.grad.clone()
    ws.rows.grad[1, 2, 3] = bad
    refused(table, ws, "words.*row 9 ")
    # The refused set is still good once its gradient is.
    ws.rows.grad.copy_(good)
    assert table.push(ws, 0.1) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("lr", "beta2"), [(1 / 0.3, None), (5.0, None), (-0.1, None), (math.nan, None), (math.inf, None), (0.1, 1.0)]
)
def test_an_unusable_learning_rate_or_beta2_is_refused_and_changes_nothing(kind, lr, beta2):
    table = make(kind)
    train(table, 0, 2)
    ws = table.pull([torch.tensor([5, 9])])
    backward(ws.gather(0), 0)
    refused(table, ws, r"table rows|below 1", lr, beta2)
    assert table.push(ws, 0.1) == 2


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("ids", [[5, 9], []])
def test_a_factor_on_gradients_that_is_no_factor_is_refused_and_changes_nothing(scale, ids):
    table = make()
    train(table, 0, 2)
    ws = table.pull([torch.tensor(ids).long()])
    ws.gather(0).sum().backward()
    refused(table, ws, r"words.*times.*above 0", scale=scale)
    assert table.push(ws, 0.1) == len(ids)


def test_fetched_rows_are_taken_once_and_by_their_own_table():
    table, twin = make(), make()
    raw = table.fetch(table.plan([torch.tensor([5, 9])]))
    with pytest.raises(ValueError, match=r"words.*another.*fetch again"):
        twin.take(raw)
    ws = table.take(raw)
    rows = ws.rows.detach().clone()
    with pytest.raises(ValueError, match=r"words.*taken already: fetch again"):
        table.take(raw)
    assert torch.equal(ws.rows, rows) and table.push(ws, 0.1) == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_ids_may_be_of_any_integer_dtype_and_shape(dtype):
    table = make()
    ids = torch.randint(50, (3, 4)).to(dtype).t()
    plan = table.plan([ids, ids[0, 0], ids[:0]])
    assert plan.ids.dtype == torch.int64 and plan.ids.tolist() == sorted(set(ids.flatten().tolist()))
    for one, slots in zip((ids, ids[0, 0], ids[:0]), plan.slots):
        assert slots.dtype == torch.int64 and torch.equal(plan.ids[slots], one.long())
    assert torch.equal(table.read_rows(ids), table.read_rows(torch.arange(50))[ids.long()])


def test_a_working_set_that_is_out_of_date_is_refused_and_changes_nothing():
    table, twin = make(), make()
    ids = [torch.tensor([5, 9])]
    ws, other, reading = table.pull(ids), table.pull(ids), table.pull(ids, grad=False)
    refused(table, twin.pull(ids), "words.*pull again")
    refused(table, reading, "grad=True")
    table.push(ws, 0.1)
    with pytest.raises(ValueError, match=r"used up.*pull again"):
        ws.rows.sum()
    with pytest.raises(ValueError, match=r"words.*event 0.*pull again"):
        table.push(ws, 0.1)
    refused(table, other, "words.*event 0.*pull again")
    ws = table.pull(ids)
    load_parts(table, [snapshot(table)])
    refused(table, ws, "pull again")


@pytest.mark.parametrize(
    ("field", "value"),
    [("rows", 0), ("lanes", 0), ("dim", -1), ("init", -0.1), ("init", math.nan), ("init", math.inf)],
)
def test_a_spec_out_of_range_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        TableSpec(**{"rows": 1, "lanes": 1, "dim": 1, "init": 0.0, field: value})


@pytest.mark.parametrize("shape", [(1 << 60, 2, 4), (2**63 - 1, 1, 2), (1, 1 << 32, 1 << 31), (2**63, 1, 1)])
def test_more_numbers_than_an_int64_counts_are_refused(shape):
    with pytest.raises(ValueError, match=rf"{shape[0]} rows x {shape[1]} lanes.*2\*\*63 - 1.*fewer rows"):
        TableSpec(*shape, 0.0)


def test_a_rounded_dtype_is_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        make(dtype=torch.bfloat16)


# Checkpoints


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop_after", [0, 1])
def test_stopped_in_mid_cycle_and_restored_equals_never_stopped(kind, stop_after, tmp_path):
    """Saved after `stop_after` of a cycle's two steps, loaded into a new table: not a bit differs."""
    straight = make(kind)
    train(straight, 0, 8)

    first = make(kind)
    train(first, 0, 4)
    ws = first.pull(cycle_of(4))
    for k in range(stop_after):
        backward(ws.gather(k), 40 + k)
    torch.save({"table": snapshot(first), "ids": ws.ids, "grad": ws.rows.grad}, tmp_path / "saved.pt")

    saved = torch.load(tmp_path / "saved.pt")
    second = make(kind)
    load_parts(second, [saved["table"]])
    assert second.event == 4
    restored = second.pull([saved["ids"]])
    if saved["grad"] is not None:
        restored.add_gradient(torch.arange(len(saved["ids"])), saved["grad"])
    assert restored.event == 4 and torch.equal(restored.rows, ws.rows)
    for k in range(stop_after, 2):
        slots = restored.slots_of(cycle_of(4)[k])
        assert torch.equal(slots, ws.slots(k))
        backward(restored.rows.index_select(0, slots.flatten()).view(*slots.shape, 3, 4), 40 + k)
    second.push(restored, lr=0.05 / 5)
    train(second, 5, 8)
    assert same_bits(snapshot(straight), snapshot(second))


# Order, repeats, sizes


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_give_the_same_bits(kind):
    one, other = make(kind), make(kind)
    train(one, 0, 6)
    train(other, 0, 6)
    assert same_bits(snapshot(one), snapshot(other))


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_lookups_does_not_matter(kind):
    """Small whole numbers as gradients add up without rounding, so a permutation must give the same bits."""
    tables = [make(kind), make(kind)]
    for _ in range(5):
        ids, push = torch.randint(30, (40,)), torch.randint(-3, 4, (40, 3, 4)).float()
        order = torch.randperm(40)
        for table, ids_k, push_k in ((tables[0], ids, push), (tables[1], ids[order].view(5, 8), push[order])):
            ws = table.pull([ids_k])
            (ws.gather(0).view(40, 3, 4) * push_k).sum().backward()
            table.push(ws, 0.1)
    assert same_bits(snapshot(tables[0]), snapshot(tables[1]))


def test_learning_rate_zero_moves_no_weight():
    for kind in KINDS:
        table = make(kind)
        train(table, 0, 2)
        rows = table.read_rows(torch.arange(50))
        for seed in range(2, 5):
            ws = table.pull(cycle_of(seed))
            backward(ws.gather(0), seed)
            table.push(ws, lr=0.0)
        assert torch.equal(table.read_rows(torch.arange(50)), rows)


@pytest.mark.parametrize(
    ("kind", "a_row"), [("adam", 6 * 4 + 4), ("adagrad", 6 * 4 + 4), ("sgd", 4), ("momentum", 6 * 64 * 4 + 4)]
)
def test_state_is_one_fp32_a_lane_and_one_int32_a_row(kind, a_row):
    table = make(kind, TableSpec(1000, 6, 64, 0.0))
    assert table.state_bytes() == 1000 * a_row and table.table_bytes() == 1000 * 6 * 64 * 4
    assert sum(table.bytes_by_kind().values()) == table.state_bytes() + table.table_bytes()
    assert sum(store.nbytes for store in table.stores.values()) == table.state_bytes() + table.table_bytes()
    train(table, 0, 2)
    held = snapshot(table)
    a_touched_row = sum(held[key].nbytes for key in held.keys() & {"rows", "second", "moment", "last_event"})
    assert a_touched_row == table.touched_rows * (a_row + 6 * 64 * 4)


def test_the_factored_rule_keeps_one_float64_a_column_too():
    assert make("factored", TableSpec(1000, 6, 64, 0.0)).bytes_by_kind()["columns"] == 6 * 64 * 8


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"place": "tape"}, "no place 'tape'.*device, host, file"), ({"place": "file"}, "folder"),
        ({"folder": "x"}, "folder"), ({"format": "int4"}, "fp32, "), ({"format": "fp64"}, "fp64"),
        ({"format": "bf16+16", "dtype": torch.float64}, "float64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(given, match):
    with pytest.raises(ValueError, match=match):
        RowTable(SPEC, RowRule("adam"), 1, name="words", **given)


def test_every_row_ever_touched_is_remembered_once_over_many_events():
    table = make(spec=TableSpec(300, 1, 2, 0.0))
    for event in range(150):
        table.push(table.pull([torch.tensor([2 * event, max(0, 2 * event - 2)])]), 0.1)
    assert torch.equal(table.touched_ids(), torch.arange(0, 300, 2)) and table.touched_rows == 150
    assert len(table.first_touched) == 1
