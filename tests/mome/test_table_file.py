"""Tables that are only read: an export's rows and a checkpoint's parts, as they were written, and never a cut file.

Lives here: mapped_tensor, FileTable and saved_table on files made here.
Not here: parts and a table that trains (test_parts.py), several deltas (test_deltas.py), whole exports (tests/tools/).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mome.errors import UserError
from mome.table.file import FileTable, mapped_tensor, saved_table
from mome.table.parts import clock_part, row_parts
from mome.table.rows import RowTable, TableSpec
from optim.rows import KINDS, RowRule
from tests.trained import push_random

SPEC = TableSpec(rows=60, lanes=2, dim=5, init=0.3)
FORMS = ("fp32", "bf16", "bf16+16", "fp8")
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.bfloat16, torch.uint8]
EVERYTHING = torch.arange(60)


def exported(folder: Path, rows: torch.Tensor, sizes: list[int]) -> list[Path]:
    files = [folder / f"rows_{n}.safetensors" for n in range(len(sizes))]
    for file, part in zip(files, rows.split(sizes)):
        save_file({"rows": part.contiguous()}, file)
    return files


def trained(kind: str = "adam", format: str = "fp32", **rule) -> RowTable:
    """Rows 45 and later were never touched; the last events touch few, so that the others have decayed."""
    table = RowTable(SPEC, RowRule(kind, **{"weight_decay": 0.2, **rule}), 7, name="words", format=format)
    for event in range(6):
        ws = table.pull([torch.randint(45, (12,))])
        ws.gather(0).backward(torch.randn(12, 2, 5))
        table.push(ws, 0.3 / (event + 1))
    return table


def saved(table: RowTable, folder: Path, part_bytes: int = 1 << 20) -> tuple[Path, list[Path]]:
    """The file of its clock, and those of its parts."""
    files = []
    for part in row_parts(table, table.touched_ids(), part_bytes):
        files.append(folder / f"words.{len(files):03d}.safetensors")
        save_file(part, files[-1])
    save_file(clock_part(table), folder / "words.clock.safetensors")
    return folder / "words.clock.safetensors", files


# One tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 2, 3), (3, 0, 2)])
def test_a_mapped_tensor_has_the_bits_of_the_file(dtype, shape, tmp_path):
    tensor = torch.randint(100, shape).to(dtype)
    save_file({"other": torch.ones(3), "this": tensor}, tmp_path / "one.safetensors")
    found, kind = mapped_tensor(tmp_path / "one.safetensors", "this")
    assert kind == dtype and found.shape == shape
    assert not (found.size and found.flags.writeable)
    assert found.tobytes() == tensor.view(-1).view(torch.uint8).numpy().tobytes()


def test_a_cut_file_is_refused_wherever_it_was_cut(tmp_path):
    save_file({"rows": torch.randn(4, 2, 5)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for kept in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:kept])
        with pytest.raises(UserError, match="cut: no readable rows"):
            mapped_tensor(tmp_path / "cut", "rows")


@pytest.mark.parametrize(
    "entry",
    [
        None, {}, 5, {"dtype": "F32", "shape": [4, 2, 6], "data_offsets": [0, 160]},
        {"dtype": "F32", "shape": [4, 2, 4], "data_offsets": [0, 160]},
        {"dtype": "F64", "shape": [4, 2, 5], "data_offsets": [0, 160]},
        {"dtype": "Q7", "shape": [4, 2, 5], "data_offsets": [0, 160]},
        {"dtype": "F32", "shape": [4, 2, 5], "data_offsets": [160, 0]},
        {"dtype": "F32", "shape": "4", "data_offsets": [0, 160]},
        {"dtype": "F32", "shape": [4, 2, 5], "data_offsets": [0]},
    ],
)  # fmt: skip
def test_a_header_that_makes_no_sense_is_refused(entry, tmp_path):
    header = json.dumps({} if entry is None else {"rows": entry}).encode()
    (tmp_path / "odd").write_bytes(len(header).to_bytes(8, "little") + header + bytes(160))
    with pytest.raises(UserError, match=r"odd: no readable rows.*copy or write it again"):
        mapped_tensor(tmp_path / "odd", "rows")


@pytest.mark.parametrize("content", [None, b"", b"\0" * 400, b"\xff" * 400, b"{}" * 200])
def test_what_is_no_safetensors_file_is_refused(content, tmp_path):
    if content is not None:
        (tmp_path / "odd").write_bytes(content)
    with pytest.raises(UserError, match="odd: no readable rows"):
        mapped_tensor(tmp_path / "odd", "rows")


# An export


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [7, 53], [17, 0, 40, 3]])
def test_an_exports_rows_are_read_as_they_were_written(sizes, tmp_path):
    rows = torch.randn(60, 2, 5)
    table = FileTable(SPEC, exported(tmp_path, rows, sizes))
    for chunk in (1, 7, 60, 4096):
        assert torch.equal(torch.cat(list(table.iter_rows(chunk))), rows)
    steps = [torch.tensor([[3, 59], [3, 0]]), torch.tensor([17, 16], dtype=torch.int32), torch.empty(0, 2).long()]
    ws = table.pull(steps)
    assert ws.ids.tolist() == [0, 3, 16, 17, 59] and not ws.rows.requires_grad
    for k, ids in enumerate(steps):
        assert torch.equal(ws.gather(k), rows[ids.long()]) and torch.equal(ws.slots_of(ids), ws.slots(k))


@pytest.mark.parametrize("wrong", [-1, 60, 1 << 40])
def test_an_id_outside_an_export_is_refused(wrong, tmp_path):
    table = FileTable(SPEC, exported(tmp_path, torch.randn(60, 2, 5), [60]))
    with pytest.raises(UserError, match=f"{wrong} .*of a table of 60 rows"):
        table.pull([torch.tensor([1, wrong])])


@pytest.mark.parametrize(
    ("rows", "sizes", "match"),
    [
        (torch.zeros(59, 2, 5), [30, 29], "holds 59 rows.*60"), (torch.zeros(61, 2, 5), [61], "holds 61 rows.*60"),
        (torch.zeros(60, 5, 2), [60], r"\[5, 2\].*\[2, 5\]"), (torch.zeros(60, 10), [60], r"\[10\].*\[2, 5\]"),
        (torch.zeros(60, 2, 5).bfloat16(), [60], "bfloat16.*float32"),
        (torch.zeros(60, 2, 5).double(), [60], "float64.*float32"),
    ],
)  # fmt: skip
def test_an_export_of_another_table_is_refused(rows, sizes, match, tmp_path):
    with pytest.raises(UserError, match=rf"rows_0.safetensors.*{match}"):
        FileTable(SPEC, exported(tmp_path, rows, sizes))


def test_an_export_is_refused_for_its_later_files_too(tmp_path):
    files = exported(tmp_path, torch.zeros(60, 2, 5), [20, 40])
    save_file({"rows": torch.zeros(40, 2, 1)}, files[1])
    with pytest.raises(UserError, match=r"rows_1.safetensors.*\[2, 1\]"):
        FileTable(SPEC, files)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    with pytest.raises(UserError, match=r"rows_1.safetensors.*cut short"):
        FileTable(SPEC, files)
    with pytest.raises(UserError, match=r"without a file.*export"):
        FileTable(SPEC, [])


# A checkpoint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMS)
@pytest.mark.parametrize("part_bytes", [1, 400, 1 << 20])
def test_a_saved_table_reads_what_the_live_one_does(kind, format, part_bytes, tmp_path):
    table = trained(kind, format)
    clock, files = saved(table, tmp_path, part_bytes)
    assert {1: len(files) == table.touched_rows, 400: 1 < len(files) < 20, 1 << 20: len(files) == 1}[part_bytes]
    read = saved_table(SPEC, table.rule, 7, "words", format, clock, files)
    assert read.event == table.event
    for chunk in (7, 60):
        assert torch.equal(torch.cat(list(read.iter_rows(chunk))), table.read_rows(EVERYTHING))
    ids = torch.tensor([[3, 3], [59, 0]])
    assert torch.equal(read.pull([ids], grad=False).gather(0), table.read_rows(ids))
    if table.rule.keeps_second:
        assert torch.equal(read.read_second(ids), table.read_second(ids))
    if table.rule.keeps_moment:
        assert torch.equal(read.read_moment(ids), table.read_moment(ids))


@pytest.mark.parametrize("decay", ["none", "touched", "gated", "gated-retroactive"])
def test_a_saved_table_decays_as_its_rule_says(decay, tmp_path):
    table = trained(decay=decay, weight_decay=0.0 if decay == "none" else 0.5)
    read = saved_table(SPEC, table.rule, 7, "words", "fp32", *saved(table, tmp_path, 300))
    assert torch.equal(read.read_rows(EVERYTHING), table.read_rows(EVERYTHING))


def test_a_saved_table_that_was_never_or_wholly_touched(tmp_path):
    table = RowTable(SPEC, RowRule("adam", weight_decay=0.2), 7, name="words")
    for part_bytes in (1, 1 << 20):
        read = saved_table(SPEC, table.rule, 7, "words", "fp32", *saved(table, tmp_path, part_bytes))
        assert torch.equal(read.read_rows(EVERYTHING), table.read_rows(EVERYTHING))
        push_random(table)


def test_a_saved_table_does_not_train(tmp_path):
    read = saved_table(SPEC, RowRule("adam"), 7, "words", "fp32", *saved(trained(weight_decay=0.0), tmp_path))
    with pytest.raises(ValueError, match=rf"{tmp_path}.*only read.*a table that trains"):
        push_random(read)


def test_a_saved_table_refuses_ids_as_the_live_one_does(tmp_path):
    table = trained()
    read = saved_table(SPEC, table.rule, 7, "words", "fp32", *saved(table, tmp_path))
    with pytest.raises(ValueError, match=r"words.* 60 .*59"):
        read.pull([torch.tensor([60])], grad=False)


def test_parts_of_another_table_are_refused(tmp_path):
    clock, (file,) = saved(trained(), tmp_path)
    for spec, kind, format, match in (
        (TableSpec(60, 2, 6, 0.3), "adam", "fp32", r"\[2, 5\].*\[2, 6\]"),
        (SPEC, "adam", "bf16", "float32.*bfloat16"),
        (SPEC, "adam", "fp8", "uint8|scale"),
        (SPEC, "momentum", "fp32", "moment"),
    ):
        with pytest.raises(UserError, match=rf"words.000.*({match})"):
            saved_table(spec, RowRule(kind), 7, "words", format, clock, [file])
    with pytest.raises(UserError, match=r"words.clock.*cannot be read.*travel"):
        saved_table(SPEC, RowRule("momentum"), 7, "words", "fp32", clock, [])
    with pytest.raises(UserError, match=r"nowhere.*clock cannot be read"):
        saved_table(SPEC, RowRule("adam"), 7, "words", "fp32", tmp_path / "nowhere", [])


def test_damaged_parts_are_refused(tmp_path):
    table = trained()
    clock, files = saved(table, tmp_path, 600)
    good = [file.read_bytes() for file in files]
    parts = list(row_parts(table, table.touched_ids(), 600))

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match):
            saved_table(SPEC, table.rule, 7, "words", "fp32", clock, files)

    for n in (0, len(files) - 1):
        for cut in (1, 40, len(good[n]) - 20):
            files[n].write_bytes(good[n][:-cut])
            refused(rf"words.00{n}.*cut short")
        save_file({key: tensor for key, tensor in parts[n].items() if key != "second"}, files[n])
        refused(rf"words.00{n}.*second")
        save_file(parts[n] | {"second": parts[n]["second"][:-1].contiguous()}, files[n])
        refused("damaged")
        files[n].write_bytes(good[n])
    sums = clock_part(table)
    save_file({"log_decay": sums["log_decay"]}, clock)
    refused("words.clock.*clock.*log_beta2")
    save_file(sums | {"log_decay": sums["log_decay"] + 1}, clock)
    refused("words.clock.*clock")
    save_file(sums, clock)
    read = saved_table(SPEC, table.rule, 7, "words", "fp32", clock, files)
    assert torch.equal(read.read_rows(EVERYTHING), table.read_rows(EVERYTHING))
