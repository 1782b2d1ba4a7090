"""python -m mome collisions on a tiny corpus: the table, the notes, the file, and one line for every mistake.

Lives here: the command in this process, as __main__ calls it.
Not here: whether the numbers are right (tests/mome/test_collisions.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import data.local
from data.shards import Shard, write_shard
from data.tokenizer import load_tokenizer
from mome.__main__ import main
from mome.table.canonical import canonical_ids
from mome.table.collisions import distinct_ngrams, order_use
from tests import tiny


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder with train_000.bin, val_000.bin and tokenizer.json of 300 ids."""
    folder = tmp_path_factory.mktemp("corpus")
    tiny.make_corpus(folder)
    return folder


def flags(folder: Path) -> list[str]:
    return ["--train-glob", str(folder / "train_*.bin"), "--tokenizer", str(folder / "tokenizer.json")]


def collisions(*words: str) -> int:
    return main(["collisions", *words])


def lines_of(text: str) -> list[list[str]]:
    """The cells of the table's rows, its first column being the hash."""
    cells = [line.replace("\u2502", " ").split() for line in text.splitlines()]
    return [line for line in cells if line[:1] in (["xor"], ["mix"]) and line[1].isdecimal()]


def test_the_table_and_the_file(corpus, tmp_path, capsys):
    path = tmp_path / "deep" / "collisions.json"
    assert collisions(*flags(corpus), "--rows", "100", "--orders", "2", "3", "--json", str(path)) == 0
    out = capsys.readouterr().out
    kept = json.loads(path.read_text())
    tokens = Shard(corpus / "train_000.bin").tokens
    assert (kept["tokens"], kept["vocabulary"], kept["classes"], kept["rows"]) == (len(tokens), 300, 300, 100)
    assert [(one["hash"], one["order"]) for one in kept["orders"]] == [("xor", 2), ("mix", 2), ("xor", 3), ("mix", 3)]
    assert [line[:3] for line in lines_of(out)] == [[one["hash"], str(one["order"]), "0"] for one in kept["orders"]]
    ngrams = list(distinct_ngrams(tokens, [2, 3]))
    for one, line in zip(kept["orders"], lines_of(out)):
        use = order_use(tokens, ngrams[one["order"] - 2], 100, one["hash"], batch=4096)
        (head,) = one["heads"]
        assert (one["tokens"], one["distinct"], one["ideal"]) == (use.tokens, use.distinct, use.ideal)
        assert head["placement"]["minority"] == use.heads[0].placement.minority == one["joint"]["minority"]
        assert head["per_lookup"] == use.heads[0].per_lookup
        assert line[3:6] == [f"{use.tokens:,}", f"{use.distinct:,}", f"{use.heads[0].placement.used:,}"]
        assert f"{use.heads[0].placement.minority:.4f}" in line
    assert str(path) in out
    assert all(note in " ".join(out.split()) for note in kept["notes"])


def test_heads_are_told_one_by_one_and_together(corpus, capsys):
    assert collisions(*flags(corpus), "--rows", "50", "--orders", "2", "5", "--heads", "2") == 0
    out = capsys.readouterr().out
    assert [line[:3] for line in lines_of(out)] == [["mix", n, head] for n in "25" for head in ("0", "1", "all")]
    assert "xor is left out: it has orders 2 and 3, one head" in out


def test_fewer_tokens_and_folded_ids(corpus, tmp_path, capsys):
    path = tmp_path / "some.json"
    asked = ["--tokens", "1000", "--canonical", "--hash", "mix", "--orders", "2", "--json", str(path)]
    assert collisions(*flags(corpus), *asked) == 0
    tokenizer = load_tokenizer(corpus / "tokenizer.json")
    folded = canonical_ids(tokenizer.token_strings()).numpy()
    tokens = folded[Shard(corpus / "train_000.bin").tokens[:1000]]
    kept = json.loads(path.read_text())
    (one,), (ngrams,) = kept["orders"], distinct_ngrams(tokens, [2])
    assert (kept["tokens"], kept["classes"]) == (1000, len(np.unique(folded))) and kept["classes"] < 300
    assert (one["hash"], one["tokens"], one["distinct"]) == ("mix", 999, len(ngrams.counts_D))
    assert f"folded to {kept['classes']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--rows", "1501"], "warning: 1,501 rows lie within a thousandth of 5 x the vocabulary of 300"),
        (["--rows", "36314", "--hash", "xor"], "36,314 rows are one more than a multiple of 36313"),
        (["--rows", "1000000"], "fewer rows would do"),
        (["--rows", "20", "--orders", "3"], "with 80 rows it would be"),
        (["--rows", "30000000", "--hash", "xor", "--orders", "2"], "the others are never read"),
    ],
)
def test_notes_say_what_to_do(corpus, words, note, capsys):
    assert collisions(*flags(corpus), *words) == 0
    assert note in " ".join(capsys.readouterr().out.split())


def test_a_hash_worse_than_chance_is_named(corpus, monkeypatch, capsys):
    monkeypatch.setattr("mome.table.collisions.hash_ngrams", lambda tokens, *_: tokens.unsqueeze(-1) % 7)
    assert collisions(*flags(corpus), "--hash", "mix", "--rows", "50", "--orders", "2") == 0
    assert "order 2: mix uses" in capsys.readouterr().out


def test_the_built_in_corpus_is_the_default(corpus, monkeypatch, capsys):
    files = [str(corpus / name) for name in ("train_000.bin", "val_000.bin", "tokenizer.json")]
    monkeypatch.setattr("data.local.build", lambda *_: data.local.LocalCorpus(*files, "x"))
    assert collisions() == 0
    out = capsys.readouterr().out
    assert "65,536 rows for each order and head" in out and len(lines_of(out)) == 4


def test_several_shards_are_one_stream(corpus, tmp_path, capsys):
    tokens = Shard(corpus / "train_000.bin").tokens
    for n, piece in enumerate((tokens[:700], tokens[700:1500])):
        write_shard(tmp_path / f"part_{n}.bin", piece)
    words = ["--train-glob", str(tmp_path / "part_*.bin"), "--tokenizer", str(corpus / "tokenizer.json")]
    assert collisions(*words, "--tokens", "1200", "--json", str(tmp_path / "x.json")) == 0
    kept = json.loads((tmp_path / "x.json").read_text())
    (ngrams,) = distinct_ngrams(tokens[:1200], [2])
    assert kept["tokens"] == 1200 and kept["orders"][0]["distinct"] == len(ngrams.counts_D)
    assert "1,200 tokens of 300 ids" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "1"], "a range of 1 rows for the hash xor: choose 2 to"),
        (["--rows", str(1 << 63), "--hash", "mix"], "choose 2 to 4611686018427387904 rows"),
        (["--rows", str(1 << 62), "--heads", "2"], "their ids do not fit into 64 bits"),
        (["--orders", "4", "--hash", "xor"], "choose mix"),
        (["--orders", "3", "2"], "give ascending orders from 2 to 8"),
        (["--orders", "9"], "give ascending orders from 2 to 8"),
        (["--heads", "0"], "0 heads"),
        (["--hash", "sum"], "--hash"),
        (["--tokens", "-1"], "--tokens -1: give 0 or more"),
        (["--batch", "0"], "--batch 0: give 1 or more"),
        (["--tokenizer", "gpt2"], "--tokenizer gpt2: say with --train-glob"),
        (["--train-glob", "no/*.bin"], "name its tokenizer too, --tokenizer no/tokenizer.json"),
        (["--json", "."], "this is a folder"),
        (["--rwos", "3"], "did you mean --rows?"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_counted(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.local.build", lambda *_: pytest.fail("the corpus was built"))
    assert collisions(*words) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ") and said in err


def test_shards_of_another_tokenizer_are_refused(corpus, tmp_path, capsys):
    write_shard(tmp_path / "other.bin", np.array([5, 6, 7]))
    words = ["--train-glob", str(tmp_path / "other.bin"), "--tokenizer", str(corpus / "tokenizer.json")]
    assert collisions(*words) == 1
    assert "no document start" in capsys.readouterr().err
