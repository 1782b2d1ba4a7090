"""Sample and export from a real run, read back in a fresh process; compare and report with the real trainer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

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
        "import sys, torch; from mome.pretrained import from_pretrained; from mome.generate import Decoder\n"
        "parts, tokenizer, config = from_pretrained(sys.argv[1])\n"
        "windows = config.make_schedule().at(config.steps - 1).windows\n"
        "torch.save(Decoder(parts, windows, tokenizer.bos).feed([tokenizer.bos, 9, 8, 7, 120, 9, 8]), sys.argv[2])\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "out"), str(tmp_path / "logits.pt")]
    subprocess.run(words, cwd=tiny.ROOT, env=tiny.environment(), check=True)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_rows_in_files_equal_the_trained_table(run_folder, corpus):
    """What the tools read from a checkpoint is what training would read next, decay included."""
    from mome.checkpoint import Checkpoint, newest
    from mome.run import build

    run = load_run(run_folder)
    checkpoint = Checkpoint(newest(run.folder.checkpoints, print))
    parts = build(run.config, run.tokenizer.vocab_size, run.tokenizer.bos)
    for name, table in parts.tables.items():
        table.load_state_dict(checkpoint.tensors(f"table_{name}"))
        decayed = table.read_rows(torch.arange(table.spec.rows))
        assert torch.equal(torch.cat(list(run.parts.tables[name].iter_rows(7))), decayed)
        ids = torch.tensor([[3, 3, 11], [0, table.spec.rows - 1, 5]])
        one = run.parts.tables[name].pull([ids])
        assert torch.equal(one.rows.index_select(0, one.slots_of(ids).flatten()), decayed[ids.flatten()])
        assert not torch.equal(decayed, table.store.rows_RLD)


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


def test_compare_trains_arms_with_the_real_trainer(corpus, tmp_path):
    words = tiny.tiny_flags(corpus, tmp_path)[1:]
    del words[words.index("--runs-dir") : words.index("--runs-dir") + 2]
    flags = " ".join(words)
    arms = [f"with=local {flags}", f"without=local-dense {flags}"]
    status, out, err = tiny.run(
        ["compare", "--arms", *arms, "--seeds", "2", "--steps", "4", "--out", str(tmp_path / "out")],
        module=["-m", "mome"],
    )
    assert status == 0, err
    verdict = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "compare.json",
        "compare.md",
        "compare.png",
        "with",
        "without",
    }
    assert "without" in out and verdict
