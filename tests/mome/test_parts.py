"""A table into parts and back: every rule and format, any size of part, and damage that is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from mome.errors import UserError
from mome.table.file import saved_table
from mome.table.parts import load_parts, state_parts
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


@pytest.mark.parametrize(("kind", "format"), CASES)
def test_a_saved_table_reads_what_the_live_one_does(kind, format, tmp_path):
    table = train(make(kind, format), 0, 6)
    files = [tmp_path / f"{n}.safetensors" for n in range(99)]
    count = 0
    for file, part in zip(files, state_parts(table, 200)):
        save_file(part, file)
        count += 1
    saved = saved_table(SPEC, table.rule, 7, "words", format, files[:count])
    assert count > 2 and torch.equal(torch.cat(list(saved.iter_rows(7))), table.read_rows(torch.arange(60)))
    ids = torch.tensor([[3, 3], [59, 0]])
    assert torch.equal(saved.pull([ids], grad=False).gather(0), table.read_rows(ids))


def test_a_saved_table_of_another_shape_or_cut_is_refused(tmp_path):
    table = train(make(), 0, 3)
    file = tmp_path / "one.safetensors"
    save_file(next(state_parts(table)), file)
    with pytest.raises(UserError, match=r"one.safetensors.*\[2, 5\].*\[2, 6\]"):
        saved_table(TableSpec(60, 2, 6, 0.3), table.rule, 7, "words", "fp32", [file])
    with pytest.raises(UserError, match=r"one.safetensors.*scale|one.safetensors.*uint8"):
        saved_table(SPEC, table.rule, 7, "words", "fp8", [file])
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"one.safetensors.*cut short"):
        saved_table(SPEC, table.rule, 7, "words", "fp32", [file])


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
    elif how == "clock":
        part["log_decay"][-1] = 1.0
    else:
        del part[how]


DAMAGES = ["unsorted", "twice", "outside", "negative", "future", "never"]


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
