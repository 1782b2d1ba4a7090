"""Bad input to the trainer: one clear line on stderr, a non-zero exit, nothing lost."""

from __future__ import annotations

import json
import shutil
import sys
import threading

import numpy as np
import pytest

import train_gpt
from data.shards import write_shard
from mome.checkpoint import Checkpoint, newest, whole_checkpoints
from mome.runfolder import RunFolder
from mome.table.rows import RowTable
from tests import tiny


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """A run of 6 steps with checkpoints at 2, 4 and 6, not to be changed."""
    runs = tmp_path_factory.mktemp("runs")
    assert train_gpt.main(tiny.tiny_flags(corpus, runs, "--steps", "6", "--save-every", "2")) == 0
    return tiny.only_run(runs)


def refused(words, capsys) -> str:
    """The one line of a refusal."""
    capsys.readouterr()
    assert train_gpt.main(words) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return err


def with_shard(corpus, part, path):
    """The corpus flags with the shards of one part exchanged."""
    flags = list(corpus)
    flags[flags.index(f"--{part}-glob") + 1] = str(path)
    return flags


def damaged(corpus, part, tmp_path, change) -> list[str]:
    """The corpus flags with a changed copy of one shard."""
    source = corpus[corpus.index(f"--{part}-glob") + 1].replace("*", "000")
    content = bytearray(open(source, "rb").read())
    path = tmp_path / f"bad_{part}.bin"
    path.write_bytes(change(content))
    return with_shard(corpus, part, path)


def header(content: bytearray, place: int, value: int) -> bytearray:
    content[4 * place : 4 * place + 4] = value.to_bytes(4, "little")
    return content


CHANGES = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-2],
    "over-long": lambda content: content + b"\0\0",
    "magic": lambda content: header(content, 0, 7),
    "version": lambda content: header(content, 1, 9),
    "token": lambda content: content[:-2] + (60_000).to_bytes(2, "little"),
}


@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize("change", CHANGES)
def test_damaged_shards(corpus, tmp_path, capsys, part, change):
    err = refused(tiny.tiny_flags(damaged(corpus, part, tmp_path, CHANGES[change]), tmp_path / "runs"), capsys)
    assert f"bad_{part}.bin" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("part, what", [("train", "training"), ("val", "validation")])
def test_no_shard(corpus, tmp_path, capsys, part, what):
    err = refused(tiny.tiny_flags(with_shard(corpus, part, tmp_path / "none_*.bin"), tmp_path / "runs"), capsys)
    assert what in err and "none_*.bin" in err


def test_a_shard_shorter_than_a_row(corpus, tmp_path, capsys):
    write_shard(tmp_path / "short.bin", np.arange(10))
    assert "10 tokens" in refused(
        tiny.tiny_flags(with_shard(corpus, "train", tmp_path / "short.bin"), tmp_path / "runs"), capsys
    )


def test_data_used_up_goes_on_with_the_next_epoch_or_stops_with_a_checkpoint(corpus, tmp_path, capsys):
    write_shard(tmp_path / "small.bin", np.arange(700) % 250)
    flags = with_shard(corpus, "train", tmp_path / "small.bin")
    assert train_gpt.main(tiny.tiny_flags(flags, tmp_path / "repeat")) == 0
    assert "epoch 2 begins" in capsys.readouterr().out
    err = refused(tiny.tiny_flags(flags, tmp_path / "stop", "--on-exhausted", "stop", "--cycle", "3"), capsys)
    assert "700 tokens" in err
    assert whole_checkpoints(tiny.only_run(tmp_path / "stop") / "checkpoint")


def test_resume_of_no_run(tmp_path, capsys):
    assert "no run folder" in refused(["--resume", str(tmp_path)], capsys)


def test_resume_under_another_configuration(finished, corpus, capsys):
    words = tiny.tiny_flags(
        corpus, finished.parent, "--steps", "6", "--save-every", "2", "--model.width", "64", "--resume", str(finished)
    )
    assert "model.width: 32 -> 64" in refused(words, capsys)


def test_resume_with_the_preset_alone_is_taken_and_another_preset_is_not(finished, tmp_path, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    assert train_gpt.main(["local", "--resume", str(copy)]) == 0
    assert "preset: local -> local-dense" in refused(["local-dense", "--resume", str(copy)], capsys)


def test_two_processes_do_not_train_in_one_folder(finished, tmp_path, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    with RunFolder(copy).locked():
        assert "another process" in refused(["--resume", str(copy)], capsys)


def test_one_shard_in_both_globs(corpus, tmp_path, capsys):
    source = corpus[corpus.index("--train-glob") + 1]
    err = refused(tiny.tiny_flags(with_shard(corpus, "val", source), tmp_path), capsys)
    assert "train_000.bin is among the training and the validation shards" in err


def test_shards_of_another_tokenizer(corpus, tmp_path, capsys):
    write_shard(tmp_path / "other.bin", np.arange(1, 5000) % 200 + 5)
    err = refused(tiny.tiny_flags(with_shard(corpus, "train", tmp_path / "other.bin"), tmp_path / "runs"), capsys)
    assert "other.bin: no document start" in err


def test_a_table_larger_than_memory(corpus, tmp_path, capsys):
    err = refused(tiny.tiny_flags(corpus, tmp_path, "--memory.ngram.rows", "2000000000"), capsys)
    assert "table ngram: a store of 512,000,000,000 bytes does not fit" in err and "or a file" in err
    assert not list(tmp_path.iterdir())


def test_resume_with_the_same_words_is_taken(finished, corpus, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy")
    words = tiny.tiny_flags(corpus, finished.parent, "--steps", "6", "--save-every", "2", "--resume", str(copy))
    assert train_gpt.main(words) == 0


def test_resume_on_other_data(finished, tmp_path, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    write_shard(tmp_path / "other.bin", np.arange(5000) % 250)
    config["train_glob"] = str(tmp_path / "other.bin")
    (copy / "config.json").write_text(json.dumps(config))
    assert "other data" in refused(["--resume", str(copy)], capsys)


def test_resume_falls_back_to_the_last_whole_checkpoint(finished, tmp_path, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    next((copy / "checkpoint" / "step_000006" / "dense").glob("*.distcp")).write_bytes(b"")
    assert train_gpt.main(["--resume", str(copy)]) == 0
    assert "step_000006 is not whole" in capsys.readouterr().out
    assert tiny.metrics(copy) == tiny.metrics(finished)


@pytest.mark.parametrize("damage", ["cut", "garbage", "gone", "strange"])
def test_damaged_metrics_are_said_and_stop_nothing(finished, tmp_path, capsys, damage):
    copy = shutil.copytree(finished, tmp_path / "copy")
    path = copy / "metrics.jsonl"
    lines = path.read_text().splitlines()
    if damage == "gone":
        path.unlink()
    else:
        changed = {"cut": lines[:3], "garbage": ["\0" * 40], "strange": [*lines[:2], "5", "[]", "{}", *lines[3:]]}[
            damage
        ]
        path.write_text("".join(line + "\n" for line in changed))
    assert train_gpt.main(["--resume", str(copy)]) == 0
    assert "are lost" in capsys.readouterr().out
    result, kept = json.loads((copy / "result.json").read_text()), tiny.metrics(copy)
    assert result["val_loss"] == json.loads((finished / "result.json").read_text())["val_loss"]
    assert [line["step"] for line in kept if "val_loss" in line] == ([6] if damage == "strange" else [])


def test_what_a_terminal_cannot_show_costs_nothing(corpus, tmp_path):
    flags = tiny.tiny_flags(corpus, tmp_path, "--steps", "1", "--sample-tokens", "30")
    command = [sys.executable, str(tiny.ROOT / "train_gpt.py"), *flags]
    environment = {**tiny.environment(), "PYTHONIOENCODING": "ascii"}
    process = tiny.subprocess.run(command, cwd=tiny.ROOT, env=environment, capture_output=True)
    assert process.returncode == 0, process.stderr
    assert (tiny.only_run(tmp_path) / "report.html").exists()


def test_a_model_larger_than_memory_is_one_line(corpus, tmp_path, capsys):
    assert "memory" in refused(tiny.tiny_flags(corpus, tmp_path, "--model.width", "4000000"), capsys)


def test_resume_of_a_checkpoint_of_another_shape(finished, tmp_path, capsys):
    copy = shutil.copytree(finished, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["model"]["width"] = 64
    (copy / "config.json").write_text(json.dumps(config))
    err = refused(["--resume", str(copy)], capsys)
    assert "shape" in err and "another configuration" in err


def test_a_gradient_that_is_not_finite_is_seen_before_anything_changes(corpus, tmp_path, capsys, monkeypatch):
    measure = train_gpt.Training.gradient_squares
    calls = iter(range(1000))

    def poisoned(training, last):
        if next(calls) == 3:
            training.parts.model.head.grad[7, 2] = float("nan")
        return measure(training, last)

    monkeypatch.setattr(train_gpt.Training, "gradient_squares", poisoned)
    err = refused(tiny.tiny_flags(corpus, tmp_path, "--save-every", "1"), capsys)
    assert "step 4: loss " in err and "gradient norm nan" in err
    folder = tiny.only_run(tmp_path)
    saved = Checkpoint(newest(folder / "checkpoint", print))
    assert all(tensor.isfinite().all() for tensor in saved.tensors("model").values())
    # Without the poison the run goes on to its end.
    monkeypatch.undo()
    assert train_gpt.main(["--resume", str(folder)]) == 0


def test_a_refused_push_names_the_step_and_keeps_the_last_checkpoint(corpus, tmp_path, capsys, monkeypatch):
    measure = train_gpt.Training.gradient_squares

    def then_poisoned(training, last):
        squares = measure(training, last)
        if training.step == 3:
            training.cycle.sets["ngram"].rows.grad[2, 0, 1] = float("nan")
        return squares

    monkeypatch.setattr(train_gpt.Training, "gradient_squares", then_poisoned)
    err = refused(tiny.tiny_flags(corpus, tmp_path, "--cycle", "2", "--save-every", "2"), capsys)
    assert "step 4: table 'ngram': the gradient of row" in err and "the last good checkpoint is kept" in err
    folder = tiny.only_run(tmp_path)
    assert [path.name for path in whole_checkpoints(folder / "checkpoint")] == ["step_000002"]
    monkeypatch.undo()
    assert train_gpt.main(["--resume", str(folder)]) == 0
    assert [line["step"] for line in tiny.metrics(folder)] == list(range(1, 13))


@pytest.mark.parametrize("depth", ["0", "3"])
def test_an_error_while_reading_ahead_stops_the_step_that_needs_the_rows(corpus, tmp_path, capsys, monkeypatch, depth):
    fetch, calls = RowTable.fetch, iter(range(100))

    def fetch_or_fail(table, plan, reuse=True):
        if table.name == "ngram" and next(calls) == 4:
            raise OSError(5, "Input/output error", "ngram.bin")
        return fetch(table, plan, reuse)

    monkeypatch.setattr(RowTable, "fetch", fetch_or_fail)
    flags = ("--cycle", "2", "--prefetch", depth, "--val-every", "0", "--save-every", "4")
    assert "Input/output error" in refused(tiny.tiny_flags(corpus, tmp_path, *flags), capsys)
    # The fifth cycle is that of the steps 9 and 10; it was asked for much earlier where the depth is 3.
    folder = tiny.only_run(tmp_path)
    assert len(tiny.metrics(folder)) == 8
    assert [path.name for path in whole_checkpoints(folder / "checkpoint")] == ["step_000004", "step_000008"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_a_checkpoint_that_cannot_be_written_is_one_line(corpus, tmp_path, capsys, monkeypatch):
    step = train_gpt.timed_step

    def step_then_block(training, *args):
        line = step(training, *args)
        if training.step == 3:
            # Root may write into a read-only folder, so a file stands where the folder should be.
            (tiny.only_run(tmp_path) / "checkpoint").write_text("")
        return line

    monkeypatch.setattr(train_gpt, "timed_step", step_then_block)
    assert "cannot be written" in refused(tiny.tiny_flags(corpus, tmp_path, "--save-every", "3"), capsys)
    assert len(tiny.metrics(tiny.only_run(tmp_path))) == 3


@pytest.mark.parametrize("step", [0, 3])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(corpus, tmp_path, capsys, monkeypatch, step):
    measure = train_gpt.cross_entropy
    calls = iter(range(1000))
    monkeypatch.setattr(
        train_gpt,
        "cross_entropy",
        lambda *args, **named: measure(*args, **named) * (float("nan") if next(calls) == step else 1),
    )
    err = refused(tiny.tiny_flags(corpus, tmp_path, "--save-every", "1"), capsys)
    assert f"step {step + 1}: loss nan" in err
    kept = whole_checkpoints(tiny.only_run(tmp_path) / "checkpoint")
    assert [path.name for path in kept] == [f"step_{n:06d}" for n in range(1, step + 1)][-2:]


def test_a_full_disk_stops_with_one_line_and_keeps_the_last_checkpoint(corpus, tmp_path):
    """The limit on a file's size stands for the full disk: the model outgrows it, what came before does not."""
    flags = tiny.tiny_flags(corpus, tmp_path, "--model.width", "192", "--save-every", "2")
    limited = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000));"
        "import train_gpt; sys.exit(train_gpt.main(sys.argv[1:]))"
    )
    process = tiny.subprocess.run(
        [sys.executable, "-c", limited, *flags], cwd=tiny.ROOT, env=tiny.environment(), capture_output=True, text=True
    )
    assert process.returncode == 1
    assert process.stderr.count("\n") == 1 and "cannot be written" in process.stderr and "--resume" in process.stderr
    folder = tiny.only_run(tmp_path)
    assert not list((folder / "checkpoint").glob("*"))
    # Written while training goes on: a step or more later it is known that there is no room.
    assert 2 <= len(tiny.metrics(folder)) < 12
    # With room again the run goes on and ends.
    status, _, err = tiny.run(["--resume", str(folder)])
    assert status == 0, err


def test_a_runs_folder_that_cannot_be_written(corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "file" in refused(tiny.tiny_flags(corpus, tmp_path / "file"), capsys)


def test_a_command_that_does_not_exist_names_the_nearest():
    status, _, err = tiny.run(["smaple"], module=["-m", "mome"])
    assert status == 1 and "sample" in err and err.count("\n") == 1
