"""Sample and export from a real run, read back in a fresh process; compare and report with the real trainer."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError, safe_open

import train_gpt
from mome.errors import UserError
from mome.generate import Decoder
from mome.pretrained import export, from_pretrained
from mome.run import load_run
from tests import tiny


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return tiny.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def run_folder(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    decay = (
        "--table.routed.weight-decay",
        "0.5",
        "--table.ngram.weight-decay",
        "0.2",
        "--table.value.weight-decay",
        "0.1",
    )
    assert (
        train_gpt.main(tiny.tiny_flags(corpus, runs, "--memories", "routed", "ngram", "value", "--cycle", "5", *decay))
        == 0
    )
    return tiny.only_run(runs)


def logits(parts, config, tokenizer):
    windows = config.make_schedule().at(config.steps - 1).windows
    return Decoder(parts, windows, tokenizer.bos).feed([tokenizer.bos, 9, 8, 7, 120, 9, 8])


def test_an_export_read_in_a_fresh_process_has_equal_logits(run_folder, tmp_path):
    run = load_run(run_folder)
    expected = logits(run.parts, run.config, run.tokenizer)
    export(run, tmp_path / "out", shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("rows_ngram_*.safetensors"))) > 3
    code = (
        "import sys, torch; from mome.pretrained import from_pretrained\n"
        "torch.save(from_pretrained(sys.argv[1]).logits([9, 8, 7, 120, 9, 8]), sys.argv[2])\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "out"), str(tmp_path / "logits.pt")]
    subprocess.run(words, cwd=tiny.ROOT, env=tiny.environment(), check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_rows_in_files_equal_the_trained_table(run_folder, corpus):
    """What the tools read from a checkpoint is what training would read next, decay included."""
    from mome.checkpoint import Checkpoint, newest
    from mome.run import build
    from mome.table.deltas import load_files

    run = load_run(run_folder)
    checkpoint = Checkpoint(newest(run.folder.checkpoints, print))
    parts = build(run.config, run.tokenizer.vocab_size, run.tokenizer.bos)
    for name, table in parts.tables.items():
        load_files(table, checkpoint.table(name))
        decayed = table.read_rows(torch.arange(table.spec.rows))
        assert torch.equal(torch.cat(list(run.parts.tables[name].iter_rows(7))), decayed)
        ids = torch.tensor([[3, 3, 11], [0, table.spec.rows - 1, 5]])
        one = run.parts.tables[name].pull([ids])
        assert torch.equal(one.rows.index_select(0, one.slots_of(ids).flatten()), decayed[ids.flatten()])
        assert 0 < table.touched_rows < table.spec.rows and table.clock.decay(torch.tensor([0]))[0] < 1


def test_the_commands(run_folder, tmp_path):
    status, out, err = tiny.run(
        ["sample", str(run_folder), "def value", "--tokens", "5", "--seed", "3"], module=["-m", "mome"]
    )
    assert status == 0 and out.startswith("def value"), err
    status, _, err = tiny.run(["export", str(run_folder), str(tmp_path / "out")], module=["-m", "mome"])
    assert status == 0, err
    status, again, err = tiny.run(
        ["sample", str(tmp_path / "out"), "def value", "--tokens", "5", "--seed", "3"], module=["-m", "mome"]
    )
    assert status == 0 and again == out, err
    with safe_open(tmp_path / "out" / "rows_ngram_00000.safetensors", "pt") as file:
        assert list(file.keys()) == ["rows"]


def test_refusals(run_folder, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    with pytest.raises(UserError, match="is in use"):
        export(load_run(run_folder), tmp_path / "used")
    with pytest.raises(UserError, match="no exported model"):
        from_pretrained(tmp_path / "used")
    export(load_run(run_folder), tmp_path / "out")
    kept = tmp_path / "out" / "rows_ngram_00000.safetensors"
    kept.write_bytes(kept.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"rows_ngram_00000.*cut short"):
        from_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"format": "mome-9"}))
    with pytest.raises(UserError, match="mome-9"):
        from_pretrained(tmp_path / "out")


def test_an_export_says_how_good_it_is_and_nothing_of_the_makers_machine(run_folder, tmp_path):
    export(load_run(run_folder), tmp_path / "out")
    text = (tmp_path / "out" / "config.json").read_text()
    kept, result = json.loads(text), json.loads((run_folder / "result.json").read_text())
    assert (kept["val_loss"], kept["val_bpb"]) == (result["val_loss"], result["val_bpb"])
    assert kept["step"] == result["steps"] == 12
    run = kept["run"]
    assert [run[key] for key in ("train_glob", "val_glob", "tokenizer")] == [
        "train_*.bin",
        "val_*.bin",
        "tokenizer.json",
    ]
    assert run["runs_dir"] == run_folder.parent.name and "/" not in text
    for path in (tmp_path / "out").iterdir():
        assert str(run_folder.parent.parent).encode() not in path.read_bytes(), path
    config = from_pretrained(tmp_path / "out").config
    assert config.memories == ("routed", "ngram", "value") and config.steps == 12


@pytest.mark.parametrize("change", [{"steps": 11}, None])
def test_a_validation_of_other_weights_is_not_claimed(run_folder, tmp_path, change):
    copy = shutil.copytree(run_folder, tmp_path / "copy")
    if change:
        result = json.loads((copy / "result.json").read_text())
        (copy / "result.json").write_text(json.dumps(result | change))
    else:
        (copy / "result.json").unlink()
    export(load_run(copy), tmp_path / "out")
    kept = json.loads((tmp_path / "out" / "config.json").read_text())
    assert kept["step"] == 12 and "val_loss" not in kept and "val_bpb" not in kept


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(28, "No space left on device"), SafetensorError("disk\nfull")]
)
def test_an_export_that_fails_leaves_nothing(run_folder, tmp_path, monkeypatch, error):
    run = load_run(run_folder)

    def failing(*_):
        assert (tmp_path / ".out.partial").is_dir() and not (tmp_path / "out").exists()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(run.tokenizer, "save", failing)
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OSError) as refused:
            export(run, tmp_path / "out")
    assert "\n" not in str(refused.value) and list(tmp_path.iterdir()) == []
    export(run, tmp_path / "out")
    assert from_pretrained(tmp_path / "out") and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_that_was_killed_blocks_nothing(run_folder, tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from mome import pretrained; from mome.run import load_run\n"
        "pretrained.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "pretrained.export(load_run(Path(sys.argv[1])), Path(sys.argv[2]))\n"
    )
    words = [sys.executable, "-c", code, str(run_folder), str(tmp_path / "out")]
    assert subprocess.run(words, cwd=tiny.ROOT, env=tiny.environment()).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    export(load_run(run_folder), tmp_path / "out")
    assert from_pretrained(tmp_path / "out") and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_compare_trains_arms_with_the_real_trainer(corpus, tmp_path):
    words = tiny.tiny_flags(corpus, tmp_path)[1:]
    del words[words.index("--runs-dir") : words.index("--runs-dir") + 2]
    flags = " ".join(words)
    rows = "--memory.ngram.rows 512"
    arms = [f"with=local {flags}", f"without=local-dense {flags.replace(rows, '')}"]
    out = tmp_path / "out"
    command = ["compare", "--arms", *arms, "--seeds", "2", "--steps", "4", "--out", str(out)]
    status, said, err = tiny.run(command, module=["-m", "mome"])
    assert status == 0 and err == "", err
    places = {"with", "without", "compare.json", "compare.md", "compare.png"}
    assert {path.name for path in out.iterdir()} == places
    verdict = json.loads((out / "compare.json").read_text(), parse_constant=pytest.fail)
    assert [(row["arm"], row["n"], row["difference_n"]) for row in verdict["arms"]] == [
        ("with", 2, 2),
        ("without", 2, 2),
    ]
    assert [(run["arm"], run["seed"]) for run in verdict["runs"]] == [
        ("with", 0), ("with", 1), ("without", 0), ("without", 1),
    ]  # fmt: skip

    results = {}
    for run in verdict["runs"]:
        (folder,) = (path.parent for path in out.glob(f"{run['arm']}/seed{run['seed']}/*/config.json"))
        assert run["folder"] == str(folder)
        results[run["arm"], run["seed"]] = result = json.loads((folder / "result.json").read_text())
        assert run["result"] == result
        config = json.loads((folder / "config.json").read_text())
        assert (config["seed"], config["steps"], config["preset"]) == (
            run["seed"], 4, {"with": "local", "without": "local-dense"}[run["arm"]],
        )  # fmt: skip
    # Two steps of 4 rows and two of 8, of 32 tokens each, for every run.
    assert {(result["steps"], result["tokens"]) for result in results.values()} == {(4, 2 * (4 + 8) * 32)}
    assert len({result["val_tokens"] for result in results.values()}) == 1
    assert "Every run: 4 steps, 768 tokens." in (out / "compare.md").read_text()

    row = verdict["arms"][1]
    losses = [[results[arm, seed]["val_loss"] for seed in (0, 1)] for arm in ("with", "without")]
    assert losses[1][0] != losses[1][1] and row["val_loss_mean"] == pytest.approx(sum(losses[1]) / 2, rel=1e-12)
    assert row["val_bpb_mean"] == pytest.approx(sum(results["without", seed]["val_bpb"] for seed in (0, 1)) / 2)
    differences = [theirs - base for base, theirs in zip(*losses)]
    assert row["difference_mean"] == pytest.approx(sum(differences) / 2, rel=1e-9)
    assert row["difference_se"] == pytest.approx(abs(differences[0] - differences[1]) / 2, rel=1e-9)
    assert row["t"] == pytest.approx(row["difference_mean"] / row["difference_se"]) and 0 < row["p"] < 1
    ratios = [results["without", seed]["step_ms"] / results["with", seed]["step_ms"] for seed in (0, 1)]
    assert row["step_ms_ratio"] == pytest.approx(sum(ratios) / 2)
    knocked = [results["with", seed]["knockout"] for seed in (0, 1)]
    rises = {kind: sum(one[kind] - one["full"] for one in knocked) / 2 for kind in knocked[0] if kind != "full"}
    assert set(rises) >= {"off", "mean_row", "shuffled_rows", "swapped_routes", "off:routed", "off:ngram"}
    assert verdict["arms"][0]["knockout"] == pytest.approx(rises) and row["knockout"] == {}
    table = [line for line in said.splitlines() if line.startswith("| ")]
    assert len(table) == 3 and f"{row['val_loss_mean']:.4f}" in table[2] and "off:ngram" in table[0]
    assert verdict["warning"] is None and "warning" not in said
