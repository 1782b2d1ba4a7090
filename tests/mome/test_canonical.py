"""Canonical ids: what folds into one, what stays apart, against classes that are compared pair by pair.

Lives here: the folding of texts, classes of tokens, special tokens, bytes that are no text, a run that keeps them.
Not here: what a memory does with them (memory/test_ngram.py).
"""

from __future__ import annotations

import unicodedata

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mome.pretrained import Pretrained, export, from_pretrained
from mome.run import load_run
from mome.table.canonical import canonical_ids, fold
from tests import tiny

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@pytest.mark.parametrize(
    ("text", "folded"),
    [
        (" The", "the"), ("THE", "the"), ("the ", "the"), ("\t a\n\n b", "a b"), ("caf\u00e9", "cafe"),
        ("cafe\u0301", "cafe"), ("\ufb01t", "fit"), ("\uff21\u2463", "a4"), ("stra\u00dfe", "strasse"),
        ("\u03a3", "\u03c3"), ("\u03c2", "\u03c3"), ("\u212b", "a"), ("\u00a0x\u3000y", "x y"), (" ", " "),
        ("\n\n", " "), ("\u3000", " "), ("", ""), ("\u0301", "\u0301"), ("\u00b4", "\u00b4"), (" \u0301", " \u0301"),
        ("...", "..."), ("\u0130", "i"),
    ],
)  # fmt: skip
def test_what_folds(text, folded):
    assert fold(text) == folded


@settings(max_examples=30, deadline=None)
@given(TEXTS)
def test_a_folded_text_stays_and_holds_nothing_that_folds(text):
    once = fold(text)
    assert fold(once) == once
    if once != text:
        assert once == once.casefold() and "Mn" not in map(unicodedata.category, once)
        assert once == " " or once.split() == once.split(" ")
    assert fold(f"\t{text}\n") == once or once == text


TOKENS = st.one_of(st.none(), st.sampled_from([b"a", b" A", b"b", b"\xc3", b"\xc3\xa9", b"E", b" ", b"\n"]), TEXTS)


@settings(max_examples=30, deadline=None)
@given(st.lists(TOKENS, max_size=12))
def test_classes_equal_a_comparison_of_all_pairs(tokens):
    def same(one, other) -> bool:
        if one is None or other is None:
            return False
        texts = []
        for token in (one, other):
            try:
                texts.append(fold(token.decode() if isinstance(token, bytes) else token))
            except UnicodeDecodeError:
                texts.append(token)
        return texts[0] == texts[1]

    ids = canonical_ids(tokens)
    assert ids.dtype == torch.int64 and ids.shape == (len(tokens),)
    for at, token in enumerate(tokens):
        assert ids[at] == next(n for n in range(at + 1) if n == at or same(tokens[n], token))


def test_special_tokens_and_broken_bytes_stay_apart():
    tokens = [None, b"<|endoftext|>", None, b"\xc3", b"\xa9", b"\xc3", "\u00c3", b"\xc3\x83", b"a"]
    assert canonical_ids(tokens).tolist() == [0, 1, 2, 3, 4, 3, 6, 6, 6]


def test_a_run_carries_its_classes_along(tmp_path):
    """Trained with folded n-grams of two heads: checkpoint and export need no tokenizer to know the classes."""
    words = ["--steps", "2", "--memory.ngram.canonical", "--memory.ngram.hash", "mix", "--memory.ngram.heads", "2"]
    words += ["--memory.ngram.orders", "2", "4", "--memory.ngram.rows", "300"]
    status, _, err = tiny.run(tiny.tiny_flags(tiny.make_corpus(tmp_path), tmp_path / "runs", *words))
    assert status == 0, err
    run = load_run(tiny.only_run(tmp_path / "runs"))
    export(run, tmp_path / "exported")
    model = from_pretrained(tmp_path / "exported")
    classes = canonical_ids(run.tokenizer.token_strings())
    assert len(classes.unique()) < len(classes) == 300
    for parts in (run.parts, model.parts):
        assert torch.equal(parts.memories["ngram"].canonical_V, classes)
    ids = run.tokenizer.encode("def table(row): return value")
    assert torch.equal(model.logits(ids), Pretrained(run.parts, run.tokenizer, run.config).logits(ids))
