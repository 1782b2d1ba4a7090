"""A whole run, stopped and gone on with in every way, and what it leaves."""

from __future__ import annotations

import json
import random
import signal
import threading
import time

import pytest

import train_gpt
from tests import tiny

EVERY_MEMORY = ("--memories", "routed", "ngram", "value")
FILES = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "result.json",
    "source.zip",
    "loss.png",
    "report.html",
    "sample.txt",
    "tokenizer.json",
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny.make_corpus(tmp_path_factory.mktemp("corpus"))


def train(words):
    assert train_gpt.main(words) == 0


def test_a_run_leaves_a_whole_folder(corpus, tmp_path, capsys):
    train(tiny.tiny_flags(corpus, tmp_path, *EVERY_MEMORY, "--val-every", "5", "--save-every", "5", "--cycle", "2"))
    folder = tiny.only_run(tmp_path)
    assert all((folder / name).stat().st_size for name in FILES)
    assert [path.name for path in sorted((folder / "checkpoint").iterdir())] == ["step_000010", "step_000012"]
    lines = tiny.metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert [line["step"] for line in lines if "val_loss" in line] == [5, 10, 12]
    assert lines[-1]["tokens"] == 6 * 4 * 32 + 6 * 8 * 32
    result = json.loads((folder / "result.json").read_text())
    together, alone = ("full", "off", "mean_row", "shuffled_rows", "swapped_routes"), ("routed", "ngram", "value")
    assert set(result["knockout"]) == {*together, *(f"off:{name}" for name in alone)}
    assert result["val_loss"] == lines[-1]["val_loss"]
    assert result["rank_tokens"] == [lines[-1]["tokens"]] and result["world"] == 1
    assert result["active_params"] > 0 and result["memory_params"] > 2 * 512 * 32
    said = capsys.readouterr().out
    assert "to go" in said and "bits a byte" in said and "float32" in said


def test_the_loss_goes_down_and_the_memory_is_used(corpus, tmp_path):
    train(tiny.tiny_flags(corpus, tmp_path, "--steps", "60"))
    folder = tiny.only_run(tmp_path)
    lines, result = tiny.metrics(folder), json.loads((folder / "result.json").read_text())
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert result["knockout"]["off"] > result["knockout"]["full"] + 0.01


def test_validating_and_saving_change_nothing(corpus, tmp_path):
    flags = (*EVERY_MEMORY, "--cycle", "3")
    train(tiny.tiny_flags(corpus, tmp_path / "quiet", *flags, "--val-every", "0", "--save-every", "0"))
    train(tiny.tiny_flags(corpus, tmp_path / "busy", *flags, "--val-every", "1", "--save-every", "1"))
    quiet, busy = (tiny.metrics(tiny.only_run(tmp_path / name)) for name in ("quiet", "busy"))
    assert [line["loss"] for line in quiet] == [line["loss"] for line in busy]
    assert quiet[-1] == busy[-1]


def stopped_after(step, monkeypatch, words):
    """Train until a signal after that step, and find the run's thread gone; where its tables lay."""
    places = {}
    with monkeypatch.context() as patch:
        timed = train_gpt.timed_step

        def step_then_signal(training, *args):
            line = timed(training, *args)
            if training.step == step:
                places.update((name, table.place) for name, table in training.parts.tables.items())
                signal.raise_signal(signal.SIGTERM)
            return line

        patch.setattr(train_gpt, "timed_step", step_then_signal)
        assert train_gpt.main(words) == 128 + signal.SIGTERM
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    return places


@pytest.mark.parametrize("stop_after", [1, 4, 7])
def test_a_signal_in_mid_cycle_saves_and_resume_goes_on_bit_for_bit(corpus, tmp_path, monkeypatch, stop_after):
    flags = (*EVERY_MEMORY, "--cycle", "3", "--table.ngram.weight-decay", "0.5")
    train(tiny.tiny_flags(corpus, tmp_path / "whole", *flags))
    stopped_after(stop_after, monkeypatch, tiny.tiny_flags(corpus, tmp_path / "cut", *flags))
    folder = tiny.only_run(tmp_path / "cut")
    assert len(tiny.metrics(folder)) == stop_after
    train(["--resume", str(folder)])
    assert tiny.metrics(folder) == tiny.metrics(tiny.only_run(tmp_path / "whole"))


def test_no_prefetch_and_no_place_changes_a_bit(corpus, tmp_path, monkeypatch):
    """Periods that change, formats that round, clipping; read ahead from files, stopped in mid-cycle, gone on with."""
    flags = (
        *EVERY_MEMORY, "--cycle", "2", "--cycle-late", "4", "--cycle-late-from", "0.3", "--row-clip", "0.02",
        "--table.ngram.rule", "factored", "--table.ngram.format", "bf16", "--table.ngram.beta2-by", "step",
        "--table.value.rule", "momentum", "--table.value.weight-decay", "0.1", "--table.value.format", "bf16+16",
        "--val-every", "5",
    )  # fmt: skip
    train(tiny.tiny_flags(corpus, tmp_path / "plain", *flags, "--prefetch", "0"))
    places = ("--table.ngram.place", "file", "--table.value.place", "file", "--table.routed.place", "host")
    words = tiny.tiny_flags(corpus, tmp_path / "ahead", *flags, "--prefetch", "3", *places)
    assert stopped_after(9, monkeypatch, words) == {"routed": "host", "ngram": "file", "value": "file"}
    plain, ahead = (tiny.only_run(tmp_path / name) for name in ("plain", "ahead"))
    train(["--resume", str(ahead)])
    assert tiny.metrics(ahead) == tiny.metrics(plain)
    results = [json.loads((folder / "result.json").read_text()) for folder in (ahead, plain)]
    assert results[0]["knockout"] == results[1]["knockout"]
    assert not (ahead / "tables").exists()


def test_files_of_tables_hold_nothing_that_the_checkpoint_lacks(corpus, tmp_path, monkeypatch):
    """A run that breaks off, before its first checkpoint or after it, has pushed rows that are not to be seen again."""
    flags = ("--table.ngram.place", "file", "--table.ngram.decay", "touched", "--table.ngram.weight-decay", "0.5")
    train(tiny.tiny_flags(corpus, tmp_path / "whole", *flags))
    whole = tiny.metrics(tiny.only_run(tmp_path / "whole"))
    for save_every in ("0", "2"):
        timed = train_gpt.timed_step

        def step_or_fail(training, *args, timed=timed):
            if training.step == 5:
                raise OSError("the power")
            return timed(training, *args)

        with monkeypatch.context() as patch:
            patch.setattr(train_gpt, "timed_step", step_or_fail)
            runs = tmp_path / save_every
            assert train_gpt.main(tiny.tiny_flags(corpus, runs, *flags, "--save-every", save_every)) == 1
        train(["--resume", str(tiny.only_run(runs))])
        assert tiny.metrics(tiny.only_run(runs)) == whole


def test_killed_at_ten_random_instants_equals_never_killed(corpus, tmp_path):
    flags = (*EVERY_MEMORY, "--cycle", "4", "--steps", "400", "--save-every", "7", "--val-every", "25")
    chance = random.Random(5)
    status, _, err = tiny.run(tiny.tiny_flags(corpus, tmp_path / "whole", *flags))
    assert status == 0, err
    words, runs, kills = tiny.tiny_flags(corpus, tmp_path / "killed", *flags), tmp_path / "killed", 0
    while kills < 10:
        process = tiny.start(words)
        # Wait until it trains, so that the kill falls among steps, saves and validations and not into the imports.
        began = time.monotonic()
        while not any(runs.glob("2*/metrics.jsonl")) or "step " not in process.stdout.readline():
            assert time.monotonic() - began < 60 and process.poll() is None, process.stderr.read()
        time.sleep(chance.uniform(0.0, 0.5))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run ended before its kill: give it more steps"
        kills += 1
        words = ["--resume", str(tiny.only_run(runs))]
    status, _, err = tiny.run(words)
    assert status == 0, err
    killed, whole = (tiny.only_run(tmp_path / name) for name in ("killed", "whole"))
    assert tiny.metrics(killed) == tiny.metrics(whole)
    results = [json.loads((folder / "result.json").read_text()) for folder in (killed, whole)]
    assert results[0]["knockout"] == results[1]["knockout"]
    assert results[0]["val_loss"] == results[1]["val_loss"]
