"""The default corpus from a few of its files: what is written, that it is the same everywhere, and what a stop leaves.

Lives here: the choice of files, the shards against the sources, the cache, the fingerprint.
Not here: the whole build, which the first run of the trainer does and checks against the constant.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import data.local as module
from data.errors import DataError
from data.local import FINGERPRINT, LocalCorpus, build, main, sources, validation_key, write_corpus
from data.shards import Shard, fingerprint
from data.tokenizer import load_tokenizer, train_bpe

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 400


def few_files() -> list[tuple[str, Path]]:
    """Some short files of the corpus, empty ones and at least three validation documents among them."""
    every = sources()
    validation = [one for one in every if validation_key(one[0]) < 0.03 and 0 < one[1].stat().st_size < 4000]
    chosen = [*validation[:4], *[one for one in every if one[1].stat().st_size < 1500][::12]]
    return sorted(set(chosen))


@pytest.fixture(scope="module")
def files() -> list[tuple[str, Path]]:
    return few_files()


@pytest.fixture(scope="module")
def written(files, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "corpus"
    write_corpus(folder, files, VOCAB, lambda _: None)
    return folder


@pytest.fixture
def small(files, written, monkeypatch):
    """build() on the few files, with the fingerprint that they have; the list counts the builds."""
    builds = []

    def counting(*args):
        builds.append(1)
        write_corpus(*args)

    monkeypatch.setattr(module, "write_corpus", counting)
    monkeypatch.setattr(module, "sources", lambda: files)
    monkeypatch.setattr(module, "VOCAB_SIZE", VOCAB)
    with pytest.raises(DataError) as caught:
        module._checked(written)
    assert FINGERPRINT[:16] in str(caught.value)
    monkeypatch.setattr(module, "FINGERPRINT", fingerprint_of(written))
    return builds


def fingerprint_of(folder: Path) -> str:
    shards = fingerprint([folder / "train_000000.bin", folder / "val_000000.bin"])
    return module.hashlib.sha256(
        (shards + load_tokenizer(folder / "tokenizer.json").fingerprint()).encode()
    ).hexdigest()


def documents(path: Path, tokenizer) -> list[str]:
    shard = Shard(path, tokenizer.vocab_size)
    shard.scan_max()
    starts = [*shard.document_starts(tokenizer.bos), len(shard)]
    assert shard.tokens[0] == tokenizer.bos
    return [tokenizer.decode(shard.tokens[at + 1 : end]) for at, end in zip(starts, starts[1:])]  # noqa: RUF007


def names_under(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_sources_are_the_python_files_of_both_wheels():
    found = sources()
    names = [name for name, _ in found]
    assert names == sorted(set(names)) and len(names) == 2112
    assert {name.split("/")[0] for name in names} == {"networkx", "sympy"}
    assert not any("__pycache__" in name or not name.endswith(".py") for name in names)
    # At least 5 million tokens, as long as a token has no more than 6 bytes; it has about 3.
    assert sum(path.stat().st_size for _, path in found) == 32_639_577


def test_about_three_in_a_hundred_validate():
    keys = np.array([validation_key(name) for name, _ in sources()])
    assert 0.02 < (keys < module.VALIDATION_SHARE).mean() < 0.04
    assert abs(keys.mean() - 0.5) < 0.03 and keys.min() >= 0 and keys.max() < 1
    assert validation_key("sympy/core/add.py") == int("12ea35f56d12", 16) / 2**48


def test_the_shards_hold_the_files(files, written):
    tokenizer = load_tokenizer(written / "tokenizer.json")
    assert tokenizer.vocab_size == VOCAB
    texts = {name: path.read_bytes().decode() for name, path in files}
    assert "" in texts.values()
    train = [texts[name] for name in sorted(texts) if texts[name] and validation_key(name) >= 0.03]
    validation = [name for name in sorted(texts, key=validation_key) if texts[name] and validation_key(name) < 0.03]
    assert len(validation) >= 3 and validation != sorted(validation)
    assert documents(written / "train_000000.bin", tokenizer) == train
    assert documents(written / "val_000000.bin", tokenizer) == [texts[name] for name in validation]
    assert tokenizer.fingerprint() == train_bpe(iter(train), VOCAB).fingerprint(), "trained on the training part alone"
    assert names_under(written) == ["tokenizer.json", "train_000000.bin", "val_000000.bin"]


def test_threads_and_hash_seeds_do_not_show(files, written, tmp_path):
    code = (
        "import json, sys; from pathlib import Path; from data.local import write_corpus\n"
        "folder, vocab, files = json.load(sys.stdin)\n"
        "write_corpus(Path(folder), [(name, Path(path)) for name, path in files], vocab, print)"
    )
    for threads, seed in (("1", "3"), ("4", "4")):
        folder = tmp_path / threads
        text = json.dumps([str(folder), VOCAB, [(name, str(path)) for name, path in files]])
        env = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], env=env, input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert fingerprint_of(folder) == fingerprint_of(written)


def test_built_once_then_taken_from_the_cache(small, tmp_path):
    lines = []
    corpus = build(tmp_path / "cache" / "local", lines.append)
    assert len(small) == 1 and any("training a byte-level BPE" in line for line in lines)
    lines.clear()
    assert build(tmp_path / "cache" / "local", lines.append) == corpus and len(small) == 1 and not lines
    assert corpus.fingerprint == module.FINGERPRINT
    folder = tmp_path / "cache" / "local"
    paths = (str(folder / name) for name in ("train_000000.bin", "val_000000.bin", "tokenizer.json"))
    assert corpus == LocalCorpus(*paths, module.FINGERPRINT)
    assert [one for one in names_under(folder.parent) if not one.endswith(".lock")] == ["local"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "other token", "no tokenizer", "empty folder"])
def test_a_damaged_cache_is_built_again(small, tmp_path, damage):
    build(tmp_path / "local", lambda _: None)
    shard = tmp_path / "local" / "train_000000.bin"
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-2])
    elif damage == "other token":
        shard.write_bytes(shard.read_bytes()[:-2] + b"\1\0")
    elif damage == "no tokenizer":
        (tmp_path / "local" / "tokenizer.json").unlink()
    else:
        for path in [shard] if damage == "missing" else list((tmp_path / "local").iterdir()):
            path.unlink()
    lines = []
    assert build(tmp_path / "local", lines.append).fingerprint == module.FINGERPRINT
    assert len(small) == 2 and "building it again" in lines[0]


def test_a_folder_of_something_else_is_left_alone(small, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match=r"holds other files \(thesis.tex\): choose another folder"):
        build(tmp_path / "mine", lambda _: None)
    assert names_under(tmp_path / "mine") == ["thesis.tex"] and not small


def test_other_sources_are_refused_and_nothing_is_kept(small, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FINGERPRINT", "0" * 64)
    with pytest.raises(DataError, match=r"pip install --force-reinstall --no-deps networkx==3\.6\.1 sympy==1\.14\.0"):
        build(tmp_path / "local", lambda _: None)
    assert names_under(tmp_path) == [".local.lock"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_stopped_build_leaves_nothing_half_made(small, tmp_path, monkeypatch, stop):
    write = module.write_shard

    def stopping(path, tokens):
        if path.name.startswith("val"):
            raise stop
        write(path, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_shard", stopping)
        with pytest.raises(type(stop)):
            build(tmp_path / "local", lambda _: None)
    assert names_under(tmp_path) == [".local.lock"]
    (tmp_path / ".local.partial").mkdir()  # what SIGKILL leaves
    (tmp_path / ".local.partial" / "train_000000.bin").write_bytes(b"half")
    assert build(tmp_path / "local", lambda _: None).fingerprint == module.FINGERPRINT
    assert names_under(tmp_path) == [".local.lock", "local"]


def test_of_several_that_ask_at_once_one_builds(small, tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(build(tmp_path / "local", lambda _: None))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(small) == 1 and len(found) == 3 and len(set(found)) == 1


@pytest.mark.parametrize("package", ["sympy", "no-such-package"])
def test_another_version_is_refused(monkeypatch, package):
    monkeypatch.setattr(module, "PACKAGES", {"networkx": "3.6.1", package: "1.13.0"})
    with pytest.raises(DataError, match=f"needs {package}==1.13.0.*pip install"):
        sources()


def test_missing_and_foreign_files_name_the_remedy(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    for name, words in (("gone.py", "is missing from its package"), ("latin.py", "is not the file of its package")):
        with pytest.raises(DataError, match=f"{name} {words}.*pip install"):
            write_corpus(tmp_path / "out", [("sympy/x.py", tmp_path / name)], VOCAB, print)
    assert not (tmp_path / "out").exists()


def test_the_command(small, tmp_path, capsys, monkeypatch):
    assert main(["--cache", str(tmp_path / "local")]) == 0
    out = capsys.readouterr().out
    assert module.FINGERPRINT in out and str(tmp_path / "local" / "train_000000.bin") in out
    (tmp_path / "file").write_text("")
    assert main(["--cache", str(tmp_path / "file" / "local")]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
