"""Checkpoints are whole or not there: markers, damage, the newest whole one, cycles under way, and what is refused.

Lives here: one process. Not here: saving beside training and its kills (test_saving.py), deltas (test_deltas.py),
several processes (tests/dist/test_checkpoint.py).
"""

from __future__ import annotations

import json
import os

import pytest
import torch

from mome import checkpoint
from mome.checkpoint import Checkpoint, is_whole, newest, whole_checkpoints
from mome.errors import UserError
from mome.saving import Saver


def save(folder, step, cycle=None, **state):
    saver = Saver(folder)
    model = {"w": torch.full((3,), float(step)), "deep.b": torch.arange(4).view(2, 2), "none": torch.empty(0, 5)}
    saver.begin(step, {"note": step} | state, model, {"w/momentum": torch.full((3,), -float(step))}, {}, cycle)
    return saver.finish() or checkpoint.path_of(folder, step)


def dense_file(path):
    return path / "dense" / "__0_0.distcp"


def flip(path, at=-2):
    """Turn a bit of a file over, in place."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


def test_round_trip(tmp_path):
    saved = Checkpoint(save(tmp_path, 5))
    assert saved.state == {"note": 5, "step": 5, "world": 1, "format": checkpoint.FORMAT}
    model = saved.tensors("model")
    assert set(model) == {"w", "deep.b", "none"} and model["none"].shape == (0, 5)
    assert torch.equal(model["w"], torch.full((3,), 5.0)) and torch.equal(model["deep.b"], torch.arange(4).view(2, 2))
    state = {"w/momentum": torch.zeros(3)}
    saved.load_optimizer(state)
    assert torch.equal(state["w/momentum"], torch.full((3,), -5.0))


def test_an_optimizer_of_another_shape_is_named(tmp_path):
    saved = Checkpoint(save(tmp_path, 1))
    with pytest.raises(UserError, match=r"optim.w/momentum has shape \(3,\), the run wants \(4,\)"):
        saved.load_optimizer({"w/momentum": torch.zeros(4)})
    with pytest.raises(UserError, match=r"optim.v/exp_avg has shape none.*another configuration"):
        saved.load_optimizer({"v/exp_avg": torch.zeros(4)})


def test_the_newest_two_stay(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["step_000002", "step_000003"]
    assert newest(tmp_path, print).name == "step_000003"


@pytest.mark.parametrize("damage", ["marker", "cut", "missing"])
def test_a_half_written_one_is_passed_over_and_named(tmp_path, damage):
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    if damage == "marker":
        (last / "COMPLETE").unlink()
    elif damage == "cut":
        dense_file(last).write_bytes(dense_file(last).read_bytes()[:-1])
    else:
        (last / "dense" / ".metadata").unlink()
    said = []
    assert newest(tmp_path, said.append).name == "step_000001"
    assert len(said) == 1 and "step_000002" in said[0]
    assert {"marker": "COMPLETE", "cut": "bytes instead of", "missing": ".metadata: No such file"}[damage] in said[0]


@pytest.mark.parametrize("name", ["state.json", "dense/__0_0.distcp", "dense/.metadata"])
def test_one_flipped_bit_is_seen(tmp_path, name):
    save(tmp_path, 1)
    flip(save(tmp_path, 2) / name)
    assert newest(tmp_path, print).name == "step_000001"


def test_a_damaged_one_of_the_same_step_is_written_anew(tmp_path):
    save(tmp_path, 1)
    weights = dense_file(save(tmp_path, 2))
    content = weights.read_bytes()
    flip(weights)
    save(tmp_path, 2)
    assert newest(tmp_path, print).name == "step_000002" and weights.read_bytes() == content


def test_a_damaged_newer_one_goes_when_training_has_gone_back_before_it(tmp_path):
    for step in (1, 2, 6):
        save(tmp_path, step)
    flip(dense_file(tmp_path / "step_000006"))
    save(tmp_path, 3)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_000002", "step_000003"]


def test_none_whole_is_refused_and_nothing_is_removed(tmp_path):
    for path in [save(tmp_path, step) for step in (1, 2)]:
        (path / "COMPLETE").write_text("5")
    with pytest.raises(UserError, match="no whole checkpoint is left"):
        newest(tmp_path, print)
    assert len(list(tmp_path.iterdir())) == 2


def test_steps_are_numbers_and_copies_of_the_users_stay(tmp_path):
    save(tmp_path, 999_999)
    (tmp_path / "step_best").mkdir()
    assert save(tmp_path, 1_000_000).exists()
    save(tmp_path, 1_000_001)
    assert newest(tmp_path, print).name == "step_1000001"
    assert (tmp_path / "step_best").exists() and not (tmp_path / "step_999999").exists()


def test_none_at_all(tmp_path):
    assert newest(tmp_path / "nothing", print) is None


def test_a_whole_one_is_not_written_again_and_a_half_written_one_is(tmp_path):
    first = save(tmp_path, 1)
    save(tmp_path, 1, again=True)
    assert "again" not in Checkpoint(first).state
    (first / "COMPLETE").unlink()
    save(tmp_path, 1, again=True)
    assert Checkpoint(first).state["again"]


def test_a_good_save_clears_what_kills_left(tmp_path):
    (tmp_path / ".writing_000007").mkdir()
    (tmp_path / "step_000003").mkdir()
    save(tmp_path, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000008"]


@pytest.mark.parametrize("name", ["state.json", "dense/__0_0.distcp", "dense/.metadata", "COMPLETE"])
@pytest.mark.parametrize("content", [b"\0", b"[", b"\x80\x02"])
def test_damage_of_the_right_size_is_named(tmp_path, name, content):
    path = save(tmp_path, 1)
    size = (path / name).stat().st_size
    (path / name).write_bytes((content * size)[:size])
    with pytest.raises(UserError, match=rf"step_000001.*({os.path.dirname(name) or name}).*remove") as caught:
        Checkpoint(path).tensors("model")
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    path = save(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    for kept in (state | {"format": 9}, {"step": 1}):
        (path / "state.json").write_text(json.dumps(kept))
        with pytest.raises(UserError, match=r"of format (9|None), this version reads 2"):
            Checkpoint(path)


def test_a_marker_with_names_only_is_no_marker(tmp_path):
    path = save(tmp_path, 1)
    for wrong in ('{"state.json": 5}', '{"state.json": [1]}', "[]", '"x"', "null"):
        (path / "COMPLETE").write_text(wrong)
        assert not is_whole(path)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_lists_of_a_cycle_under_way_go_round_and_are_merged_by_row(tmp_path, size):
    lists = [([2, 5, 9], 1.0), ([5], 10.0), ([0, 9], 100.0)]
    cycle = {"words": {"ids": torch.tensor(lists[0][0]), "grad": torch.full((3, 1, 2), lists[0][1])}}
    path = save(tmp_path, 1, cycle)
    for number, (ids, value) in enumerate(lists[1:], 1):
        name = f"cycle_words.{number:04d}.safetensors"
        tensors = {"ids": torch.tensor(ids), "grad": torch.full((len(ids), 1, 2), value)}
        marks = checkpoint.marks_of(path) | {name: checkpoint.write_tensors(path / name, tensors)}
        (path / "COMPLETE").write_text(json.dumps(marks))
    total = {}
    for rank in range(size):
        got = Checkpoint(path).cycle("words", rank, size)
        assert bool((got["ids"].diff() > 0).all()) and got["grad"].shape == (len(got["ids"]), 1, 2)
        expected = {}
        for ids, value in lists[rank::size]:
            for row in ids:
                expected[row] = expected.get(row, 0.0) + value
        assert {int(row): float(grad[0, 0]) for row, grad in zip(got["ids"], got["grad"])} == expected
        for row, value in expected.items():
            total[row] = total.get(row, 0.0) + value
    assert total == {0: 100.0, 2: 1.0, 5: 11.0, 9: 101.0}
    with pytest.raises(UserError, match="no cycle of the table 'other'"):
        Checkpoint(path).cycle("other")
    with pytest.raises(UserError, match="no table 'other'"):
        Checkpoint(path).table("other")
