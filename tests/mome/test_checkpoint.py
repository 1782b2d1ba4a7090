"""Checkpoints are whole or not there."""

from __future__ import annotations

import pytest
import torch

from mome import checkpoint
from mome.errors import UserError


def save(folder, step):
    return checkpoint.save(
        folder, step, {"step": step}, [("model", {"w": torch.full((3,), float(step))})], [{"lr": step}]
    )


def test_round_trip(tmp_path):
    saved = checkpoint.Checkpoint(save(tmp_path, 5))
    assert saved.state == {"step": 5}
    assert saved.optimizer() == [{"lr": 5}]
    assert torch.equal(saved.tensors("model")["w"], torch.full((3,), 5.0))


def test_the_newest_two_stay(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [path.name for path in checkpoint.whole_checkpoints(tmp_path)] == ["step_000002", "step_000003"]
    assert checkpoint.newest(tmp_path, print).name == "step_000003"


@pytest.mark.parametrize("damage", ["marker", "cut", "missing"])
def test_a_half_written_one_is_passed_over_and_named(tmp_path, damage):
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    if damage == "marker":
        (last / "COMPLETE").unlink()
    elif damage == "cut":
        weights = last / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        (last / "optimizer.pt").unlink()
    said = []
    assert checkpoint.newest(tmp_path, said.append).name == "step_000001"
    assert len(said) == 1 and "step_000002" in said[0]


def test_one_flipped_bit_is_seen(tmp_path):
    save(tmp_path, 1)
    weights = save(tmp_path, 2) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 0x40
    weights.write_bytes(content)
    assert checkpoint.newest(tmp_path, print).name == "step_000001"


def test_a_damaged_one_of_the_same_step_is_written_anew(tmp_path):
    save(tmp_path, 1)
    weights = save(tmp_path, 2) / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-2] + bytes([content[-2] ^ 0x40]) + content[-1:])
    save(tmp_path, 2)
    assert checkpoint.newest(tmp_path, print).name == "step_000002" and weights.read_bytes() == content


def test_none_whole_is_refused_and_nothing_is_removed(tmp_path):
    for path in [save(tmp_path, step) for step in (1, 2)]:
        (path / "COMPLETE").write_text("5")
    with pytest.raises(UserError, match="no whole checkpoint is left"):
        checkpoint.newest(tmp_path, print)
    assert len(list(tmp_path.iterdir())) == 2


def test_steps_are_numbers_and_copies_of_the_users_stay(tmp_path):
    save(tmp_path, 999_999)
    (tmp_path / "step_best").mkdir()
    assert save(tmp_path, 1_000_000).exists()
    save(tmp_path, 1_000_001)
    assert checkpoint.newest(tmp_path, print).name == "step_1000001"
    assert (tmp_path / "step_best").exists() and not (tmp_path / "step_999999").exists()


def test_none_at_all(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing", print) is None


def test_a_failed_save_leaves_the_last_one_and_no_draft(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*args):
        raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"step_000002: cannot be written .*No space left.*--resume"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_whole_one_is_not_written_again_and_a_half_written_one_is(tmp_path):
    first = save(tmp_path, 1)
    checkpoint.save(tmp_path, 1, {"step": 1, "again": True}, {}, [])
    assert checkpoint.Checkpoint(first).state == {"step": 1}
    (first / "COMPLETE").unlink()
    checkpoint.save(tmp_path, 1, {"step": 1, "again": True}, {}, [])
    assert checkpoint.Checkpoint(first).state["again"]


def test_a_good_save_clears_what_kills_left(tmp_path):
    (tmp_path / ".writing_000007").mkdir()
    (tmp_path / "step_000003").mkdir()
    save(tmp_path, 8)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000008"]


@pytest.mark.parametrize("name", ["state.json", "optimizer.pt", "model.safetensors"])
def test_damage_of_the_right_size_is_named(tmp_path, name):
    path = save(tmp_path, 1)
    (path / name).write_bytes(b"\0" * (path / name).stat().st_size)
    with pytest.raises(UserError, match=name):
        kept = checkpoint.Checkpoint(path)
        kept.optimizer(), kept.tensors("model")
