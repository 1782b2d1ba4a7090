"""A table into parts and back: every rule and format, any size of part, and damage that is refused.

Lives here: state_parts and load_parts. Not here: files and deltas (test_deltas.py), reading rows out of saved parts
(test_table_file.py).
"""

from __future__ import annotations

import pytest
import torch

from mome.table.parts import clock_part, load_parts, row_parts, state_parts
from mome.table.placement import Placement
from mome.table.rows import RowTable, TableSpec
from optim.rows import KINDS, RowRule

SPEC = TableSpec(rows=60, lanes=2, dim=5, init=0.3)
CASES = [(kind, "fp32") for kind in KINDS] + [("adam", form) for form in ("bf16", "bf16+16", "fp8")]
CASES += [("momentum", "bf16"), ("factored", "fp8")]


def make(kind="adam", format="fp32", spec=SPEC, **rule) -> RowTable:
    return RowTable(spec, RowRule(kind, weight_decay=0.2, **rule), 7, name="words", format=format)


def train(table: RowTable, first: int, final: int) -> RowTable:
    for event in range(first, final):
        generator = torch.Generator().manual_seed(event)
        ws = table.pull([torch.randint(45, (8,), generator=generator)])
        ws.gather(0).backward(torch.randn(8, 2, 5, generator=generator))
        table.push(ws, 0.3 / (event + 1))
    return table


def whole(table: RowTable) -> dict[str, torch.Tensor]:
    (part,) = state_parts(table)
    return {key: tensor.clone() for key, tensor in part.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(("kind", "format"), CASES)
@pytest.mark.parametrize("part_bytes", [1, 300, 1 << 20])
def test_g_going_on_from_parts_equals_never_having_stopped(kind, format, part_bytes):
    straight = train(make(kind, format), 0, 9)
    parts = list(state_parts(train(make(kind, format), 0, 5), part_bytes))
    assert (len(parts) > 1) == (part_bytes < 1000) and all(len(part["ids"]) for part in parts)
    second = train(make(kind, format), 0, 2)
    load_parts(second, iter(parts))
    assert second.event == 5 and second.touched_rows == sum(len(part["ids"]) for part in parts)
    assert same(whole(train(second, 5, 9)), whole(straight))


def test_an_untouched_table_is_one_empty_part():
    parts = list(state_parts(make()))
    assert len(parts) == 1 and len(parts[0]["ids"]) == 0
    table = train(make(), 0, 2)
    load_parts(table, parts)
    assert table.event == 0 and table.touched_rows == 0
    assert torch.equal(table.read_rows(torch.arange(60)), make().read_rows(torch.arange(60)))


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: make(spec=TableSpec(40, 2, 5, 0.3)), "not ascending below 40"),
        (lambda: make(spec=TableSpec(60, 5, 2, 0.3)), r"another shape.*rows"),
        (lambda: make("sgd"), "another kind.*second"),
        (lambda: make(format="fp8"), "another kind.*scale"),
        (lambda: make("momentum"), "another kind"),
        (lambda: make("factored"), "another kind.*columns"),
    ],
)
def test_parts_of_another_table_are_refused_and_change_nothing(other, match):
    part = whole(train(make(), 0, 6))
    table = train(other(), 0, 2) if other().spec.rows == 60 and other().spec.lanes == 2 else other()
    before = whole(table)
    with pytest.raises(ValueError, match=f"words.*{match}"):
        load_parts(table, [part])
    assert same(whole(table), before)


def damage(part: dict[str, torch.Tensor], how: str) -> None:
    if how == "unsorted":
        part["ids"] = part["ids"].flip(0)
    elif how == "twice":
        part["ids"][1] = part["ids"][0]
    elif how == "outside":
        part["ids"][-1] = 60
    elif how == "negative":
        part["ids"][0] = -1
    elif how == "future":
        part["last_event"][0] = 7
    elif how == "never":
        part["last_event"][0] = 0
    elif how == "dtype":
        part["rows"] = part["rows"].double()
    elif how == "row":
        part["last_event"] = part["last_event"][:-1]
    elif how == "added":
        part["moment"] = part["rows"].clone()
    elif how == "clock":
        part["log_decay"][-1] = 1.0
    else:
        del part[how]


DAMAGES = ["unsorted", "twice", "outside", "negative", "future", "never", "dtype", "row", "added", "ids"]


@pytest.mark.parametrize("how", [*DAMAGES, "clock", "rows", "last_event", "second", "log_decay", "log_beta2"])
def test_a_damaged_first_part_is_refused_and_changes_nothing(how):
    part = whole(train(make(), 0, 6))
    damage(part, how)
    table = train(make(), 0, 2)
    before = whole(table)
    with pytest.raises(ValueError, match=r"words|clock"):
        load_parts(table, [part])
    assert same(whole(table), before)
    train(table, 2, 3)


@pytest.mark.parametrize("how", [*DAMAGES, "rows", "second"])
def test_a_damaged_later_part_leaves_a_table_that_refuses_until_it_is_loaded(how):
    parts = [{key: tensor.clone() for key, tensor in part.items()} for part in state_parts(train(make(), 0, 6), 900)]
    good = [dict(part) for part in state_parts(train(make(), 0, 6), 900)]
    assert len(parts) > 1
    damage(parts[1], how)
    table = train(make(), 0, 2)
    with pytest.raises(ValueError, match="words"):
        load_parts(table, parts)
    with pytest.raises(ValueError, match=r"words.*in part.*checkpoint"):
        table.pull([torch.tensor([1])])
    load_parts(table, good)
    assert same(whole(table), whole(train(make(), 0, 6)))


@pytest.mark.parametrize("columns", [torch.zeros(2, 6).double(), torch.zeros(2, 5)])
def test_columns_of_another_shape_or_dtype_are_refused_and_change_nothing(columns):
    part = whole(train(make("factored"), 0, 6)) | {"columns": columns}
    table = train(make("factored"), 0, 2)
    before = whole(table)
    with pytest.raises(ValueError, match=r"words.*another shape.*columns"):
        load_parts(table, [part])
    assert same(whole(table), before)


def test_loading_copies_and_saving_too():
    part = whole(train(make("factored"), 0, 4))
    table = make("factored")
    load_parts(table, [part])
    kept = whole(table)
    for tensor in part.values():
        tensor.zero_()
    assert same(whole(table), kept)
    found = next(state_parts(table))
    train(table, 4, 6)
    assert same(found, kept)


def test_a_disk_that_refuses_while_loading_leaves_a_table_that_refuses(tmp_path, monkeypatch):
    parts = list(state_parts(train(make(), 0, 5), 900))
    rule = RowRule("adam", weight_decay=0.2)
    table = RowTable(SPEC, rule, 7, name="words", place="file", folder=tmp_path)

    def full(ids_U, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(table.stores["last_event"], "write", full)
    with pytest.raises(OSError, match="No space"):
        load_parts(table, parts)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"words.*in part.*checkpoint"):
        table.pull([torch.tensor([1])])
    load_parts(table, parts)
    assert same(whole(table), whole(train(make(), 0, 5)))
    table.close()


@pytest.mark.parametrize("order", [[0, 0], [0, 2, 1], [0, 1, 1], [1, 0]])
def test_parts_that_are_there_twice_or_out_of_order_are_refused(order):
    parts = list(state_parts(train(make(), 0, 6), 600))
    whole_clock = {key: parts[0][key] for key in ("log_decay", "log_beta2")}
    bare = [{key: tensor for key, tensor in part.items() if key not in whole_clock} for part in parts]
    given = [bare[n] for n in order]
    with pytest.raises(ValueError, match=r"words.*not ascending"):
        load_parts(make(), [given[0] | whole_clock, *given[1:]])


def test_no_part_at_all_and_sets_from_before_are_refused():
    table = train(make(), 0, 2)
    with pytest.raises(ValueError, match="without a part"):
        load_parts(table, [])
    plan = table.plan([torch.tensor([1, 2])])
    ws, raw = table.pull([torch.tensor([1])]), table.fetch(plan)
    load_parts(table, list(state_parts(table)))
    with pytest.raises(ValueError, match="pull again"):
        table.push(ws, 0.1)
    with pytest.raises(ValueError, match="before the table was loaded"):
        table.take(raw)


@pytest.mark.parametrize("size", [2, 3, 7, 61])
@pytest.mark.parametrize("kind", ["contiguous", "cyclic"])
@pytest.mark.parametrize("part_bytes", [1, 300, 1 << 20])
def test_a_table_that_keeps_some_rows_takes_those_and_no_others(kind, size, part_bytes):
    full = train(make("momentum", "bf16"), 0, 6)
    taken = []
    for rank in range(size):
        rule = RowRule("momentum", weight_decay=0.2)
        placement = Placement(60, size, kind)
        own = RowTable(SPEC, rule, 7, name="words", format="bf16", placement=placement, rank=rank)
        load_parts(own, state_parts(full, part_bytes))
        assert own.event == full.event
        ids_U = own.touched_ids()
        assert bool(own.owned(ids_U).all()) and not len(own.take_unsaved())
        if len(ids_U):
            (part,) = row_parts(full, ids_U)
            assert same(own.read_planes(ids_U) | {"ids": ids_U}, part)
        taken.append(ids_U)
    assert torch.equal(torch.cat(taken).sort().values, full.touched_ids())


def test_parts_are_of_the_rows_that_were_asked_for_and_of_about_the_size():
    table = train(make(), 0, 6)
    ids = table.touched_ids()[::2]
    parts = list(row_parts(table, ids, 5 * 60))
    assert torch.equal(torch.cat([part["ids"] for part in parts]), ids) and len(parts) > 2
    assert all(sum(tensor.nbytes for tensor in part.values()) <= 5 * 60 for part in parts)
    assert list(row_parts(table, ids[:0])) == []
    kept = {key: tensor.clone() for key, tensor in parts[0].items()}
    train(table, 6, 8)
    assert same(parts[0], kept)
    sums = clock_part(table)
    train(table, 8, 9)
    assert len(sums["log_decay"]) == 9 and len(clock_part(table)["log_decay"]) == 10
