"""Shards: the bytes of the format, one clear error for each broken file, atomic writing.

Here: data/shards.py. Not here: how steps are packed from shards (test_loader.py).
"""

from __future__ import annotations

import hashlib
import os
import resource
import struct

import numpy as np
import pytest

from data.errors import DataError
from data.shards import Shard, find_shards, fingerprint, write_shard


def raw(path, tokens=(), magic=20240520, version=1, count=None, extra=b""):
    """A shard file by struct alone."""
    count = len(tokens) if count is None else count
    header = struct.pack("<3i", magic, version, count) + b"\0" * (1024 - 12)
    path.write_bytes(header + b"".join(struct.pack("<H", t) for t in tokens) + extra)
    return path


def error_of(call, *args, **kwargs) -> str:
    with pytest.raises(DataError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("tokens", [[0], [65535, 0, 50256], list(range(257))])
@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_written_bytes_are_the_format_and_read_back(tmp_path, tokens, dtype):
    write_shard(tmp_path / "a.bin", np.array(tokens, dtype=dtype))
    assert (tmp_path / "a.bin").read_bytes() == raw(tmp_path / "b.bin", tokens).read_bytes()
    shard = Shard(tmp_path / "a.bin", vocab_size=65536)
    assert len(shard) == len(tokens)
    assert isinstance(shard.tokens, np.memmap) and shard.tokens.dtype == np.uint16
    assert shard.tokens.tolist() == tokens
    assert shard.scan_max() == max(tokens)


def test_non_contiguous_tokens_are_written_as_seen(tmp_path):
    tokens = np.arange(20)[::-3]
    write_shard(tmp_path / "a.bin", tokens)
    assert Shard(tmp_path / "a.bin").tokens.tolist() == tokens.tolist()


def test_unused_header_words_are_ignored(tmp_path):
    path = raw(tmp_path / "a.bin", [1, 2])
    data = bytearray(path.read_bytes())
    data[12:1024] = b"\xff" * 1012
    path.write_bytes(data)
    assert Shard(path).tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda path: None, ["there is no shard"]),
        (lambda path: path.write_bytes(b""), ["empty"]),
        (lambda path: path.write_bytes(b"x" * 1023), ["truncated", "1023 bytes"]),
        (lambda path: raw(path, [1, 2, 3], count=4), ["truncated", "1,030 bytes", "1,032"]),
        (lambda path: raw(path, [1, 2, 3], extra=b"\0"), ["over-long", "1,031 bytes"]),
        (lambda path: raw(path, [1, 2, 3], count=2), ["over-long", "2 tokens"]),
        (lambda path: raw(path, [1], magic=20240521), ["magic", "20240521", "20240520"]),
        (lambda path: raw(path, [1], version=2), ["version 2"]),
        (lambda path: raw(path, [1], count=-1), ["count of -1"]),
        (lambda path: raw(path, []), ["count of 0"]),
        (lambda path: path.mkdir(), ["cannot read", "directory"]),
    ],
    ids="missing empty no-header truncated half-token over-long magic version negative zero directory".split(),
)
def test_a_broken_shard_is_one_clear_line(tmp_path, make, words):
    path = tmp_path / "broken.bin"
    make(path)
    message = error_of(Shard, path)
    assert str(path) in message
    for word in words:
        assert word in message


def test_reading_the_header_reads_no_token(tmp_path):
    shard = Shard(raw(tmp_path / "a.bin", [1, 9, 2]), vocab_size=5)
    message = error_of(shard.scan_max)
    assert str(tmp_path / "a.bin") in message


@pytest.mark.parametrize("at", [0, 5, 9])
def test_an_id_outside_the_vocabulary_is_named_with_its_position(tmp_path, at):
    tokens = [3] * 10
    tokens[at:] = [7 + i for i in range(10 - at)]
    shard = Shard(raw(tmp_path / "a.bin", tokens), vocab_size=7)
    for _ in range(2):
        message = error_of(shard.scan_max)
        assert f"token id 7 at position {at} " in message and "vocabulary of 7" in message
    assert Shard(tmp_path / "a.bin", vocab_size=max(tokens) + 1).scan_max() == max(tokens)
    assert Shard(tmp_path / "a.bin").scan_max() == max(tokens)


@pytest.mark.parametrize(
    "tokens, starts",
    [([9, 1, 9, 9], [0, 2, 3]), ([1, 9, 2], [0, 1]), ([1, 2], [0]), ([9], [0]), ([1, 1, 9], [0, 2])],
)
def test_document_starts(tmp_path, tokens, starts):
    found = Shard(raw(tmp_path / "a.bin", tokens)).document_starts(9)
    assert found.dtype == np.int64 and found.tolist() == starts


@pytest.mark.parametrize(
    "tokens, words",
    [
        (np.array([1, 65536, 70000]), ["65536", "position 1"]),
        (np.array([1, 2, -1]), ["-1", "position 2"]),
        (np.array([], dtype=np.int64), ["not 0"]),
        (np.array([1.0]), ["float64"]),
        (np.array([[1, 2]]), ["(1, 2)"]),
    ],
)
def test_tokens_that_do_not_fit_are_refused_and_write_nothing(tmp_path, tokens, words):
    message = error_of(write_shard, tmp_path / "a.bin", tokens)
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("old", [None, [5, 6]])
@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, old, step, error):
    path = tmp_path / "a.bin"
    if old:
        write_shard(path, np.array(old))

    def fail(*args):
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else DataError) as caught:
        write_shard(path, np.array([1, 2, 3]))
    monkeypatch.undo()
    if isinstance(caught.value, DataError):
        assert str(path) in str(caught.value) and "No space left" in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == (["a.bin"] if old else [])
    if old:
        assert Shard(path).tokens.tolist() == old


def test_a_disk_that_fills_up_in_mid_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.array([5, 6]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        message = error_of(write_shard, path, np.zeros(1_000_000, dtype=np.uint16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(path) in message
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    assert Shard(path).tokens.tolist() == [5, 6]


def test_a_folder_that_is_not_there(tmp_path):
    message = error_of(write_shard, tmp_path / "no" / "a.bin", np.array([1]))
    assert str(tmp_path / "no" / "a.bin") in message and "folder" in message


def test_a_reader_keeps_the_old_tokens_while_the_file_is_replaced(tmp_path):
    path = tmp_path / "a.bin"
    write_shard(path, np.array([5, 6]))
    before = Shard(path)
    write_shard(path, np.array([1, 2, 3]))
    assert before.tokens.tolist() == [5, 6]
    assert Shard(path).tokens.tolist() == [1, 2, 3]


def test_find_shards_sorts_and_skips_folders(tmp_path, monkeypatch):
    for name in ["t_2.bin", "t_10.bin", "t_1.bin", "v.bin"]:
        raw(tmp_path / name, [1])
    (tmp_path / "t_folder.bin").mkdir()
    raw(tmp_path / "t_folder.bin" / "t_deep.bin", [1])
    names = ["t_1.bin", "t_10.bin", "t_2.bin"]
    assert [p.name for p in find_shards(f"{tmp_path}/t_*.bin", "training")] == names
    assert [p.name for p in find_shards(f"{tmp_path}/**/t_deep.bin", "training")] == ["t_deep.bin"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [p.name for p in find_shards("~/t_*.bin", "training")] == names


def test_no_shard_matches(tmp_path):
    message = error_of(find_shards, f"{tmp_path}/val*.bin", "validation")
    assert f"no validation shard matches {tmp_path}/val*.bin" in message


def test_fingerprint_is_of_contents_in_order(tmp_path):
    a, b = raw(tmp_path / "a.bin", [1, 2, 3]), raw(tmp_path / "b.bin", [4])
    expected = hashlib.sha256(struct.pack("<q3H", 3, 1, 2, 3) + struct.pack("<qH", 1, 4)).hexdigest()
    assert fingerprint([a, b]) == fingerprint(map(str, [a, b])) == expected
    assert fingerprint([b, a]) != expected
    # The same tokens cut elsewhere, or one token changed, make another corpus.
    c, d = raw(tmp_path / "c.bin", [1, 2]), raw(tmp_path / "d.bin", [3, 4])
    assert fingerprint([c, d]) != expected
    assert fingerprint([a, raw(tmp_path / "b.bin", [5])]) != expected
    assert "there is no shard" in error_of(fingerprint, [tmp_path / "e.bin"])
