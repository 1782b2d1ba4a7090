"""python -m mome ckpt: what it lists, what it finds wrong, and a compaction in place.

Lives here: the command on checkpoints made here. Not here: the format, its kills and its faults (tests/mome/).
"""

from __future__ import annotations

import pytest
import torch

from mome.checkpoint import Checkpoint, path_of
from mome.errors import UserError
from mome.runfolder import RunFolder
from mome.saving import Saver
from mome.table.rows import RowTable, TableSpec
from mome.tools.ckpt import main
from optim.rows import RowRule


@pytest.fixture
def run(tmp_path):
    """A run folder of three saves."""
    (tmp_path / "config.json").write_text("{}")
    table = RowTable(TableSpec(90, 2, 5, 0.3), RowRule("adam"), 7, name="words")
    saver = Saver(tmp_path / "checkpoint")
    for step in (1, 2, 3):
        ws = table.pull([torch.arange(10 * step, 10 * step + 40)])
        ws.rows.grad = torch.ones_like(ws.rows)
        table.push(ws, 0.1)
        saver.begin(step, {}, {"w": torch.ones(3)}, {}, {"words": table})
        saver.finish()
    return tmp_path


def test_list_shows_what_a_save_cost(run, capsys):
    assert main(["list", str(run)]) == 0
    head, second, third = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "bytes", "new", "deltas", "processes"]
    path = path_of(run / "checkpoint", 3)
    sizes = {one.name: one.stat().st_size for one in path.rglob("*") if one.is_file() and one.name != "COMPLETE"}
    linked = sum(size for name, size in sizes.items() if name.startswith(("table_words.0001", "table_words.0002")))
    assert second.split()[0] == "step_000002" and third.split() == [
        "step_000003", f"{sum(sizes.values()):,}", f"{sum(sizes.values()) - linked:,}", "3", "1"
    ]  # fmt: skip
    (path / "state.json").write_text("")
    assert main(["list", str(run)]) == 0
    assert "step_000003      not whole: state.json: 0 bytes" in capsys.readouterr().out


def test_verify_names_the_file(run, capsys):
    assert main(["verify", str(run)]) == 0
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == [
        "step_000002: whole", "step_000003: whole"
    ]  # fmt: skip
    clock = next((run / "checkpoint/step_000003").glob("*clock*"))
    clock.write_bytes(clock.read_bytes()[:-1] + b"\x55")
    (run / "checkpoint/step_000002/dense/.metadata").unlink()
    assert main(["verify", str(run)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step_000002: dense/.metadata: No such file or directory"
    assert second == f"step_000003: {clock.name}: other bytes than were written (its CRC-32 differs)"


def test_compact_merges_the_newest_and_says_so(run, capsys):
    assert main(["compact", str(run)]) == 0
    assert capsys.readouterr().out.startswith("step_000003: 3 deltas, ")
    counts = [Checkpoint(path_of(run / "checkpoint", step)).table("words").deltas for step in (2, 3)]
    assert counts == [2, 1] and main(["verify", str(run)]) == 0
    assert Checkpoint(path_of(run / "checkpoint", 3)).table("words").rows() == 60


def test_a_damaged_checkpoint_is_not_compacted(run):
    part = Checkpoint(path_of(run / "checkpoint", 3)).table("words").parts[0].path
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=rf"step_000003: {part.name}: other bytes.*remove it"):
        main(["compact", str(run)])


def test_refusals(run, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(UserError, match="no run folder"):
        main(["list", str(other)])
    (other / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no checkpoint in it"):
        main(["verify", str(other)])
    with pytest.raises(UserError, match="merge"):
        main(["merge", str(run)])
    with RunFolder(run).locked(), pytest.raises(UserError, match="another process is training"):
        main(["compact", str(run)])
    for step in (2, 3):
        (path_of(run / "checkpoint", step) / "COMPLETE").unlink()
    with pytest.raises(UserError, match="no whole checkpoint"):
        main(["compact", str(run)])
