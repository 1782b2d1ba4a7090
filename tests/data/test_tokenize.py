"""The command that turns one's own text into shards: what is in them, and what it does with input it cannot use.

Lives here: reading, cutting, validation choice, filling shards, worker processes, the command line.
Not here: the ids themselves (test_tokenizer.py) and the shard format (test_shards.py).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data.tokenize as module
from data.errors import DataError
from data.shards import Shard, fingerprint
from data.tokenize import ShardFiller, main, pieces, read_documents, tokenize, validates
from data.tokenizer import ByteBPE, load_tokenizer, train_bpe

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bpe() -> ByteBPE:
    return train_bpe(iter([Path(module.__file__).read_text(encoding="utf-8")]), 500)


@pytest.fixture(scope="module")
def tokenizer_file(bpe, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe.save(path)
    return str(path)


@pytest.fixture
def quiet():
    return lambda _: None


def words(count: int, seed: int = 0) -> str:
    draw = np.random.default_rng(seed)
    return " ".join(draw.choice(["one", "two", "three,", "four.\n", "5", "x = y", "caf\u00e9"], count))


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "id": 7}) + "\n" for text in texts), encoding="utf-8")
    return path


def documents(out: Path, part: str, tokenizer) -> list[str]:
    """The texts in the shards of one part; a piece without start token goes on with the one before."""
    ids = np.concatenate([Shard(path, tokenizer.vocab_size).tokens for path in sorted(out.glob(f"{part}_*.bin"))])
    starts = [*np.flatnonzero(ids == tokenizer.bos), len(ids)]
    assert starts[0] == 0
    return [tokenizer.decode(ids[at + 1 : end]) for at, end in zip(starts, starts[1:])]  # noqa: RUF007


def names_under(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_shards_hold_the_documents_of_both_kinds_of_file(bpe, tokenizer_file, tmp_path, quiet):
    texts = [words(30, seed) for seed in range(60)]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf first\r\nline\n")
    (tmp_path / "empty.txt").write_text("")
    jsonl = write_jsonl(tmp_path / "b.jsonl", [*texts, "", f"has <|endoftext|> in it {chr(0x1F600)}"])
    jsonl.write_bytes(jsonl.read_bytes() + b'\n  \n{"text": "last, no newline \\ud800"}')
    files = [tmp_path / "a.txt", tmp_path / "empty.txt", jsonl]
    made = tokenize(files, tokenizer_file, tmp_path / "out", val_fraction=0.2, log=quiet)

    every = [" first\r\nline\n", *texts, f"has <|endoftext|> in it {chr(0x1F600)}", "last, no newline \ud800"]
    chosen = [False, *(validates(text, 0.2) for text in every[1:])]
    assert 4 <= sum(chosen) <= 25
    train, val = documents(tmp_path / "out", "train", bpe), documents(tmp_path / "out", "val", bpe)
    every[-1] = "last, no newline \ufffd"
    assert train == [text for text, held in zip(every, chosen) if not held]
    assert val == [text for text, held in zip(every, chosen) if held]
    assert made.documents == len(every)
    assert made.train_tokens == sum(1 + len(bpe.encode(text)) for text in train)
    assert made.val_tokens == sum(1 + len(bpe.encode(text)) for text in val)
    assert made.fingerprint == fingerprint(sorted((tmp_path / "out").glob("*.bin")))
    assert load_tokenizer(made.tokenizer_path).fingerprint() == bpe.fingerprint()
    assert names_under(tmp_path / "out") == ["tokenizer.json", "train_000000.bin", "val_000000.bin"]
    assert made.train_glob == str(tmp_path / "out" / "train_*.bin")


def test_validation_is_a_function_of_the_text_and_a_fraction_of_the_texts():
    chosen = [validates(f"document {number}", 0.1) for number in range(3000)]
    assert 0.08 < np.mean(chosen) < 0.12
    assert not any(validates(f"{number}", 0.0) for number in range(100))
    assert all(validates(f"document {number}", 0.5) for number in range(3000) if chosen[number])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from(["a", "b c", " word", "\n", " ", ".", "1 x", "'s a", "\u00e9 b"]), max_size=30).map(
        "".join
    )
    | st.text(max_size=30),
    st.sampled_from([1, 2, 7, 30]),
)
def test_pieces_encode_as_the_whole_does(bpe, text, characters):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_CHARACTERS", characters)
        cut = list(pieces([(text, 1000)], 0.5))
    assert "".join(piece.text for piece in cut) == text
    assert [piece.first for piece in cut] == [True, *[False] * (len(cut) - 1)][: len(cut)]
    assert sum(piece.size for piece in cut) == (1000 if text else 0)
    assert [one for piece in cut for one in bpe.encode(piece.text)] == bpe.encode(text)


def test_long_text_is_cut_small_enough(monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 100)
    cut = list(pieces([(words(2000), 5)], 0.0))
    assert len(cut) > 50 and max(len(piece.text) for piece in cut) < 200
    assert len(list(pieces([("x" * 1000, 5)], 0.0))) == 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(1, 10), st.integers(1, 60))
def test_shards_are_full_but_cut_no_document_that_fits(tmp_path_factory, sizes, limit, tail):
    folder = tmp_path_factory.mktemp("filler")
    filler = ShardFiller(folder, "train", limit)
    stream = np.arange(sum(sizes)).astype(np.uint16)
    bounds = np.cumsum([0, *sizes])
    for at, end in zip(bounds, bounds[1:]):  # noqa: RUF007
        filler.add(stream[at:end])
    filler.flush()
    filler.flush()
    shards = [np.array(Shard(path).tokens) for path in sorted(folder.glob("*.bin"))]
    assert np.array_equal(np.concatenate(shards), stream) and filler.tokens == len(stream)
    assert max(map(len, shards)) <= limit
    for at, end in zip(bounds, bounds[1:]):  # noqa: RUF007
        holders = sum(bool(np.isin(stream[at:end], shard).any()) for shard in shards)
        assert holders == max(1, -(-(end - at) // limit))
    for one, two in zip(shards, shards[1:]):  # noqa: RUF007
        follows = np.flatnonzero(bounds == two[0])
        assert not len(follows) or len(one) + sizes[follows[0]] > limit, "a document that fitted was put off"

    if len(stream) > 1:
        taken = filler.take_tail(tail)
        keep = max(1, len(stream) - tail)
        left = np.concatenate([Shard(path).tokens for path in sorted(folder.glob("*.bin"))])
        assert np.array_equal(left, stream[:keep]) and np.array_equal(taken, stream[keep:]) and filler.tokens == keep


@pytest.mark.parametrize("shard_tokens", [100_000_000, 350])
def test_one_document_still_gives_validation(bpe, tokenizer_file, tmp_path, shard_tokens):
    text = words(1000)
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    lines = []
    made = tokenize([tmp_path / "book.txt"], tokenizer_file, tmp_path / "out", shard_tokens, 0.25, log=lines.append)
    ids = bpe.encode(text)
    assert len(ids) > 4 * 350
    train, val = documents(tmp_path / "out", "train", bpe), documents(tmp_path / "out", "val", bpe)
    assert made.val_tokens == 1 + round(0.25 * (1 + len(ids))) and made.train_tokens + made.val_tokens == len(ids) + 2
    assert [train, val] == [[bpe.decode(ids[: made.train_tokens - 1])], [bpe.decode(ids[made.train_tokens - 1 :])]]
    assert any("the end of the text" in line for line in lines)
    assert all(len(Shard(path)) <= shard_tokens for path in (tmp_path / "out").glob("*.bin"))


def test_two_calls_of_one_process_use_each_its_tokenizer(bpe, tokenizer_file, tmp_path, quiet):
    other = train_bpe(iter([words(500)]), 300)
    other.save(tmp_path / "other.json")
    (tmp_path / "a.txt").write_text("one two x = y one two", encoding="utf-8")
    for file, tokenizer in ((tokenizer_file, bpe), (tmp_path / "other.json", other)):
        tokenize([tmp_path / "a.txt"], str(file), tmp_path / "out", val_fraction=0, log=quiet)
        assert documents(tmp_path / "out", "train", tokenizer) == ["one two x = y one two"]
        shutil.rmtree(tmp_path / "out")


def test_no_validation_on_request(tokenizer_file, tmp_path, quiet):
    write_jsonl(tmp_path / "a.jsonl", [words(20, seed) for seed in range(30)])
    made = tokenize([tmp_path / "a.jsonl"], tokenizer_file, tmp_path / "out", val_fraction=0, log=quiet)
    assert made.val_tokens == 0 and names_under(tmp_path / "out") == ["tokenizer.json", "train_000000.bin"]


def test_the_shortest_text_there_is(tokenizer_file, tmp_path, quiet):
    (tmp_path / "a.txt").write_text("x")
    made = tokenize([tmp_path / "a.txt"], tokenizer_file, tmp_path / "out", log=quiet)
    assert (made.documents, made.train_tokens, made.val_tokens) == (1, 1, 2)


def test_the_command_with_worker_processes_writes_the_same(bpe, tokenizer_file, tmp_path, monkeypatch, quiet):
    texts = [words(30, seed) for seed in range(50)]
    files = [write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "b.txt"]
    files[1].write_text(words(60_000), encoding="utf-8")  # more than one piece
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 3000)
    alone = tokenize(files, tokenizer_file, tmp_path / "alone", 20_000, 0.1, workers=1, log=quiet)
    command = [sys.executable, "-m", "data.tokenize", *map(str, files), "--tokenizer", tokenizer_file, "--workers", "2"]
    command += ["--out", str(tmp_path / "pool"), "--shard-tokens", "20000", "--val-fraction", "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert alone.fingerprint in done.stdout and f"{alone.train_tokens:,} training" in done.stdout
    assert names_under(tmp_path / "pool") == names_under(tmp_path / "alone") and len(names_under(tmp_path / "pool")) > 4
    for name in names_under(tmp_path / "alone"):
        assert (tmp_path / "pool" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_a_worker_that_dies_ends_in_one_line(tokenizer_file, tmp_path, monkeypatch, quiet):
    (tmp_path / "a.txt").write_text(words(20_000), encoding="utf-8")
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 500)
    advance = module.Progress.advance

    def killing(progress, count):
        advance(progress, count)
        for child in active_children():
            os.kill(child.pid, signal.SIGKILL)

    monkeypatch.setattr(module.Progress, "advance", killing)
    with pytest.raises(DataError, match=r"a worker process died.*--workers 1"):
        tokenize([tmp_path / "a.txt"], tokenizer_file, tmp_path / "out", workers=2, log=quiet)
    assert names_under(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_from_outside_it_leaves_no_process_and_the_next_call_starts_clean(tokenizer_file, tmp_path, quiet, how):
    source = write_jsonl(tmp_path / "a.jsonl", [words(50_000)] * 80)
    command = [sys.executable, "-m", "data.tokenize", str(source), "--tokenizer", tokenizer_file, "--workers", "2"]
    command += ["--out", str(tmp_path / "out"), "--shard-tokens", "10000", "--val-fraction", "0"]
    pipe = subprocess.PIPE
    run = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / ".out.partial" / "train_000000.bin").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert run.poll() is None
    # Ctrl-C on a terminal reaches every process of the group, SIGKILL here the parent alone.
    os.killpg(run.pid, how) if how == signal.SIGINT else run.kill()
    _, error = run.communicate(timeout=30)  # the pipes end when the last worker that holds them has ended
    if how == signal.SIGINT:
        assert (run.returncode, error) == (130, "stopped\n")
        assert names_under(tmp_path) == ["a.jsonl"]
    else:
        assert names_under(tmp_path) == [".out.partial", "a.jsonl"]
    (tmp_path / "b.txt").write_text("short")
    tokenize([tmp_path / "b.txt"], tokenizer_file, tmp_path / "out", log=quiet)
    assert names_under(tmp_path) == ["a.jsonl", "b.txt", "out"]


BAD = {
    "latin.txt": (b"caf\xe9", r"latin.txt is not UTF-8 \(byte 3\).*iconv"),
    "latin.jsonl": (b'{"text": "a"}\n{"text": "\xe9"}\n', r"latin.jsonl, line 2 is not UTF-8"),
    "broken.jsonl": (b'{"text": "a"}\n\n{"text": \n', r"broken.jsonl, line 3 is not JSON"),
    "list.jsonl": (b'["a"]\n', r'list.jsonl, line 1 has no string under "text"'),
    "number.jsonl": (b'{"text": 5}\n', r'number.jsonl, line 1 has no string under "text"'),
    "other.jsonl": (b'{"content": "a"}\n', r'other.jsonl, line 1 has no string under "text"'),
    "empty.txt": (b"", r"there is no text in .*empty.txt"),
    "page.html": (b"<p>", r"page.html: only .txt"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_cannot_be_read(tokenizer_file, tmp_path, capsys, name):
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        tokenize([tmp_path / name], tokenizer_file, tmp_path / "out", log=print)
    assert main([str(tmp_path / name), "--tokenizer", tokenizer_file, "--out", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert names_under(tmp_path) == [name], "nothing is left of a refused call"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": []}, "no file given"),
        ({"files": ["missing.txt"]}, "there is no file .*missing.txt"),
        ({"files": ["."]}, r"is a folder: name the files in it, e.g. .*\*.txt"),
        ({"tokenizer": "missing.json"}, "there is no tokenizer .*missing.json"),
        ({"shard_tokens": 0}, "--shard-tokens 0 is out of range: 1 to 2147483647"),
        ({"shard_tokens": 2**31}, "--shard-tokens 2147483648 is out of range"),
        ({"val_fraction": -0.1}, "--val-fraction -0.1 is out of range"),
        ({"val_fraction": 0.6}, "--val-fraction 0.6 is out of range"),
        ({"val_fraction": float("nan")}, "--val-fraction nan is out of range"),
        ({"workers": -1}, "--workers -1 is out of range"),
    ],
)
def test_arguments_that_cannot_be_used(tokenizer_file, tmp_path, monkeypatch, quiet, change, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=message):
        tokenize(**({"files": ["a.txt"], "tokenizer": tokenizer_file, "out": "out", "log": quiet} | change))
    assert names_under(tmp_path) == ["a.txt"]


def test_shards_that_are_there_are_not_touched(tokenizer_file, tmp_path, quiet):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "out").mkdir()
    tokenize([tmp_path / "a.txt"], tokenizer_file, tmp_path / "out", log=quiet)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(DataError, match="out is not empty: choose another --out"):
        tokenize([tmp_path / "a.txt"], tokenizer_file, tmp_path / "out", log=quiet)
    with pytest.raises(DataError, match=r"a\.txt is not empty"):
        tokenize([tmp_path / "a.txt"], tokenizer_file, tmp_path / "a.txt", log=quiet)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_too_many_ids_for_a_shard(tmp_path, monkeypatch, bpe, quiet):
    monkeypatch.setattr(module, "load_tokenizer", lambda _: bpe)
    monkeypatch.setattr(bpe, "vocab_size", 65537)
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(DataError, match="has 65537 ids; shards hold at most 65536"):
        tokenize([tmp_path / "a.txt"], "large.json", tmp_path / "out", log=quiet)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_stopped_it_leaves_nothing(tokenizer_file, tmp_path, monkeypatch, capsys, stop):
    (tmp_path / "a.txt").write_text("some text")

    def stopping(*_):
        raise stop

    monkeypatch.setattr(module, "write_shard", stopping)
    code = main([str(tmp_path / "a.txt"), "--tokenizer", tokenizer_file, "--out", str(tmp_path / "out")])
    assert code == (130 if isinstance(stop, KeyboardInterrupt) else 1)
    assert capsys.readouterr().err.count("\n") == 1
    assert names_under(tmp_path) == ["a.txt"]


def test_reading_counts_the_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfx")
    write_jsonl(tmp_path / "b.jsonl", ["y", "z"])
    read = list(read_documents([tmp_path / "a.txt", tmp_path / "b.jsonl"]))
    assert [text for text, _ in read] == ["x", "y", "z"]
    assert sum(size for _, size in read) == 4 + (tmp_path / "b.jsonl").stat().st_size
