"""Deltas of a table in files: restored and merged they are the whole table, bit for bit, and the newest row wins.

Lives here: load_files, merged, tables_in on files made here.
Not here: parts in memory (test_parts.py), folders, links and compaction of a checkpoint (test_saving.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mome.errors import UserError
from mome.table.deltas import TableFiles, clock_name, load_files, merged, part_name, tables_in
from mome.table.file import saved_table
from mome.table.parts import clock_part, row_parts, state_parts
from mome.table.placement import Placement
from mome.table.rows import RowTable, TableSpec
from optim.rows import KINDS, RowRule

SPEC = TableSpec(rows=60, lanes=2, dim=5, init=0.3)
EVERYTHING = torch.arange(60)
FORMS = ("fp32", "bf16", "bf16+16", "fp8")


def make(kind="adam", format="fp32", rank=0, placement=None) -> RowTable:
    rule = RowRule(kind, weight_decay=0.2)
    return RowTable(SPEC, rule, 7, name="words", format=format, rank=rank, placement=placement)


def train(table: RowTable, events: range) -> None:
    """Ten of the lower 45 rows an event, those that the table owns."""
    for event in events:
        generator = torch.Generator().manual_seed(event)
        ids, grad = torch.randint(45, (10,), generator=generator), torch.randn(10, 2, 5, generator=generator)
        own = table.owned(ids)
        ws = table.pull([ids[own]])
        ws.gather(0).backward(grad[own])
        table.push(ws, 0.3 / (event + 1))


def write_delta(tables: list[RowTable], folder: Path, delta: int, part_bytes: int = 1 << 20) -> None:
    """The rows pushed since the last time, a list a rank, and the clock in place of the one before."""
    for one in folder.glob("table_words.clock.*"):
        one.unlink()
    save_file(clock_part(tables[0]), folder / clock_name("words", delta))
    for rank, table in enumerate(tables):
        for n, part in enumerate(row_parts(table, table.take_unsaved(), part_bytes)):
            save_file(part, folder / part_name("words", delta, rank, n))


def files_in(folder: Path) -> TableFiles:
    return tables_in(folder, [path.name for path in folder.iterdir()])["words"]


def whole(table: RowTable) -> dict[str, torch.Tensor]:
    (part,) = state_parts(table)
    return {key: tensor.clone() for key, tensor in part.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def joined(parts) -> dict[str, torch.Tensor]:
    parts = list(parts)
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.parametrize(("kind", "format"), [*((kind, "fp32") for kind in KINDS), *(("adam", form) for form in FORMS)])
@pytest.mark.parametrize("part_bytes", [1, 300, 1 << 20])
def test_deltas_restore_and_read_as_the_whole_table_does(kind, format, part_bytes, tmp_path):
    table = make(kind, format)
    for delta in range(1, 6):
        train(table, range(3 * delta, 3 * delta + 3) if delta != 3 else range(0))
        write_delta([table], tmp_path, delta, part_bytes)
    files = files_in(tmp_path)
    assert files.delta == 5 and files.deltas == 4 and files.rows() > table.touched_rows
    other = make(kind, format)
    train(other, range(2))
    load_files(other, files)
    assert same(whole(other), whole(table)) and not len(other.take_unsaved())
    read = saved_table(SPEC, table.rule, 7, "words", format, files.clock, [part.path for part in files.parts])
    assert torch.equal(read.read_rows(EVERYTHING), table.read_rows(EVERYTHING))
    # Both go on alike.
    train(other, range(20, 23))
    train(table, range(20, 23))
    assert same(whole(other), whole(table)) and torch.equal(other.take_unsaved(), table.take_unsaved())


def test_a_table_that_was_never_touched_is_a_clock(tmp_path):
    table = make()
    write_delta([table], tmp_path, 1)
    files = files_in(tmp_path)
    assert files.parts == () and files.deltas == files.rows() == 0
    other = make()
    train(other, range(2))
    load_files(other, files)
    assert other.event == 0 and same(whole(other), whole(table))
    read = saved_table(SPEC, table.rule, 7, "words", "fp32", files.clock, [])
    assert torch.equal(read.read_rows(EVERYTHING), table.read_rows(EVERYTHING))


@pytest.mark.parametrize("kinds", [("contiguous", "cyclic"), ("cyclic", "contiguous"), ("contiguous", "contiguous")])
@pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (3, 1), (2, 3), (4, 4), (3, 7)])
def test_ranks_of_one_number_and_placement_load_what_those_of_another_saved(kinds, saved, loaded, tmp_path):
    truth = make()
    ranks = [make(rank=rank, placement=Placement(60, saved, kinds[0])) for rank in range(saved)]
    for delta in range(1, 4):
        for table in (truth, *ranks):
            train(table, range(3 * delta, 3 * delta + 3))
        write_delta(ranks, tmp_path, delta, 400)
    truth = whole(truth)
    for rank in range(loaded):
        table = make(rank=rank, placement=Placement(60, loaded, kinds[1]))
        load_files(table, files_in(tmp_path))
        own = table.owned(truth["ids"])
        got = next(state_parts(table))
        assert all(torch.equal(got[key], truth[key][own]) for key in ("ids", *table.kept))
        assert torch.equal(got["log_decay"], truth["log_decay"])
    # The command merges what any number of ranks wrote.
    assert same(joined(merged(files_in(tmp_path).parts, part_bytes=500)), {k: truth[k] for k in ("ids", *make().kept)})


@settings(max_examples=60, deadline=None)
@given(
    lists=st.lists(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=3), min_size=1, max_size=4),
    rows=st.integers(1, 40),
    modulus=st.sampled_from([None, 2]),
)
def test_merging_takes_the_newest_of_every_row(lists, rows, modulus, tmp_path_factory):
    """Lists of parts (a list of ids is split into parts by hypothesis), each list a newer delta than the one before."""
    folder = tmp_path_factory.mktemp("lists")
    newest = {}
    for delta, parts in enumerate(lists, 1):
        ids = sorted(set().union(*parts))
        cuts = [len(parts[0]) % (len(ids) + 1), len(ids)]
        for n, (begin, end) in enumerate(zip([0, *cuts], cuts)):
            piece = torch.tensor(ids[begin:end], dtype=torch.int64)
            planes = {"rows": 100.0 * delta + piece[:, None].float(), "last_event": piece.int() + delta}
            save_file({"ids": piece} | planes, folder / part_name("t", delta, 0, n))
        newest |= {row: delta for row in ids}
    save_file({"x": torch.zeros(1)}, folder / clock_name("t", 9))
    files = tables_in(folder, [path.name for path in folder.iterdir()])["t"]
    owned = None if modulus is None else (lambda ids: ids % modulus == 1)
    got = list(merged(files.parts, owned, part_bytes=16 * rows))
    # One row of each list at least is looked at together.
    assert all(0 < len(part["ids"]) <= max(rows, len(lists)) for part in got)
    expected = sorted(row for row in newest if modulus is None or row % modulus == 1)
    assert [int(row) for part in got for row in part["ids"]] == expected
    for part in got:
        for row, value, last in zip(part["ids"], part["rows"], part["last_event"]):
            assert float(value) == 100.0 * newest[int(row)] + int(row) and int(last) == int(row) + newest[int(row)]


def test_the_names_say_what_a_file_is(tmp_path):
    names = [
        clock_name("a.b", 7), part_name("a.b", 12345, 2, 1000), part_name("a.b", 7, 0, 0), part_name("a.b", 7, 0, 1),
        "table_a.b.0007.0000.000.safetensors.fresh", "table_x.txt", "state.json", "dense/.metadata",
    ]  # fmt: skip
    (files,) = tables_in(tmp_path, names[::-1]).values()
    assert (files.table, files.delta, files.deltas) == ("a.b", 7, 2)
    assert [part[:3] for part in files.parts] == [(7, 0, 0), (7, 0, 1), (12345, 2, 1000)]
    with pytest.raises(UserError, match=r"0 clocks of the table 'a.b'"):
        tables_in(tmp_path, names[1:])
    with pytest.raises(UserError, match=r"2 clocks of the table 'a.b'"):
        tables_in(tmp_path, [*names, clock_name("a.b", 8)])


def change(path: Path, how) -> None:
    part = load_file(path)
    how(part)
    save_file(part, path)


def test_damage_is_refused_and_a_table_read_in_part_is_not_used(tmp_path):
    table = make()
    for delta in (1, 2):
        train(table, range(3 * delta, 3 * delta + 3))
        write_delta([table], tmp_path, delta, 400)
    files, kept = files_in(tmp_path), whole(table)
    first, last = files.parts[0].path, files.parts[-1].path
    other = make()
    train(other, range(2))
    before = whole(other)

    def refused(kind, match, usable):
        with pytest.raises(kind, match=match):
            load_files(other, files)
        if usable:
            assert same(whole(other), before)
        else:
            with pytest.raises(ValueError, match="read only in part"):
                whole(other)

    good = {path: path.read_bytes() for path in (files.clock, first, last)}
    for path, how, kind, match, usable in (
        (files.clock, lambda part: part.pop("log_beta2"), ValueError, "log_beta2 missing", True),
        (first, lambda part: part.pop("second"), ValueError, "second missing", True),
        (first, lambda part: part["last_event"].fill_(99), ValueError, "an event that its clock lacks", True),
        (first, lambda part: part["ids"].copy_(part["ids"].flip(0)), ValueError, "not ascending", True),
        (last, lambda part: part["last_event"].fill_(0), ValueError, "an event that its clock lacks", False),
        (last, lambda part: part["ids"].fill_(60), ValueError, "not ascending below 60", False),
        (last, lambda part: part.pop("rows"), ValueError, "rows missing", False),
    ):
        change(path, how)
        refused(kind, match, usable)
        path.write_bytes(good[path])
        load_files(other, files)
        assert same(whole(other), kept)
        other = make()
        train(other, range(2))
    for path, usable in ((files.clock, True), (first, True), (last, False)):
        path.write_bytes(good[path][:-5])
        refused(UserError, rf"{path.name}.*(cut short|cannot be read)", usable)
        path.write_bytes(good[path])
        load_files(other, files)
        other = make()
        train(other, range(2))
    change(last, lambda part: part.pop("rows"))
    with pytest.raises(UserError, match="not hold the same planes"):
        list(merged(files.parts))
    change(first, lambda part: part.pop("ids"))
    with pytest.raises(UserError, match=r"0001.0000.000.*without ids"):
        list(merged(files.parts))
