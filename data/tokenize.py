"""One's own text to token shards: .txt files (a document each) and .jsonl files (a document a line), on many cores.

Lives here: reading the files, cutting text for the workers, choosing validation documents, filling shards.
Not here: the tokenizers (tokenizer.py) and the shard format (shards.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from data.command import parse, run_command
from data.console import Progress
from data.errors import DataError
from data.shards import MAX_COUNT, MAX_ID, Shard, fingerprint, write_shard
from data.tokenizer import Tokenizer, load_tokenizer

PIECE_CHARACTERS = 1_000_000
# Between a letter and a space before a letter every known splitting rule splits, so pieces encode as the whole does.
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
# Below this many bytes a worker process takes longer to start than to finish.
_WORKER_BYTES = 4_000_000


@dataclass(frozen=True)
class Piece:
    """A stretch of one document. first: it starts the document; validation: its document validates;
    size: bytes of its file to count as read."""

    text: str
    first: bool
    validation: bool
    size: int


@dataclass(frozen=True)
class Summary:
    """What was written. Tokens include the start token of each document; empty documents are not counted."""

    documents: int
    train_tokens: int
    val_tokens: int
    train_glob: str
    val_glob: str
    tokenizer_path: str
    fingerprint: str


def read_documents(paths: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """(text, bytes read for it) of each document, in order. Raises DataError that names file and line, or OSError."""
    for path in paths:
        if path.suffix == ".txt":
            data = path.read_bytes()
            yield _decode(data, str(path)), len(data)
            continue
        with open(path, "rb") as handle:
            for number, line in enumerate(handle, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    record = json.loads(_decode(line, where))
                except json.JSONDecodeError as error:
                    raise DataError(f"{where} is not JSON ({error}): every line holds one JSON object") from None
                if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                    raise DataError(
                        f'{where} has no string under "text": every line is an object like {{"text": "..."}}'
                    )
                yield record["text"], len(line)


def _decode(data: bytes, where: str) -> str:
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 (byte {error.start}): convert it, e.g. with iconv -t UTF-8") from None


def validates(text: str, fraction: float) -> bool:
    """Whether the document validates: by a hash of its text alone, so that copies of a text never lie on both sides."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "big") < fraction * 2**48


def pieces(documents: Iterable[tuple[str, int]], val_fraction: float) -> Iterator[Piece]:
    """Documents, without the empty ones, cut into pieces of about PIECE_CHARACTERS, where no tokenizer joins the sides.

    The first document always trains, so that there is something to train on.
    """
    started = False
    for text, size in documents:
        validation = started and validates(text, val_fraction)
        at = 0
        while at < len(text):
            cut = _CUT.search(text, at + PIECE_CHARACTERS)
            end = cut.start() if cut else len(text)
            read = size * end // len(text) - size * at // len(text)
            yield Piece(text[at:end], at == 0, validation, read)
            at, started = end, True


def _batches(stream: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces grouped to about PIECE_CHARACTERS: one task of a worker each."""
    batch: list[Piece] = []
    characters = 0
    for piece in stream:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= PIECE_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


_worker_tokenizer = functools.cache(load_tokenizer)


def _start_worker() -> None:
    # Ctrl-C is the parent's to handle; a parent that was killed cannot tell its workers, so each one watches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # The processes are the parallelism: threads of the tokenizer's library on top would fight over the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode_in_worker(saved: str, texts: list[str]) -> list[np.ndarray]:
    tokenizer = _worker_tokenizer(saved)
    return [np.array(tokenizer.encode(text), dtype=np.uint16) for text in texts]


def _encoded(
    stream: Iterable[Piece], tokenizer: Tokenizer, saved: Path, workers: int
) -> Iterator[tuple[Piece, np.ndarray]]:
    """(piece, its ids uint16) in order, encoded by `workers` processes, which load the tokenizer from `saved`."""
    if workers == 1:
        for piece in stream:
            yield piece, np.array(tokenizer.encode(piece.text), dtype=np.uint16)
        return
    # A fresh interpreter each: forking would copy locks that threads of the tokenizer's library may hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker) as pool:
        waiting = deque()
        try:
            for batch in _batches(stream):
                waiting.append((batch, pool.submit(_encode_in_worker, str(saved), [piece.text for piece in batch])))
                if len(waiting) > 2 * workers:
                    yield from _finished(waiting)
            while waiting:
                yield from _finished(waiting)
        except BrokenProcessPool:
            raise DataError("a worker process died, most likely out of memory: try --workers 1") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _finished(waiting: deque) -> Iterator[tuple[Piece, np.ndarray]]:
    batch, future = waiting.popleft()
    yield from zip(batch, future.result())


class ShardFiller:
    """Collects documents into shards FOLDER/PART_000000.bin, ... of at most `limit` tokens.

    A document goes whole into one shard, unless it is longer than `limit`: then it goes on in the next.
    """

    def __init__(self, folder: Path, part: str, limit: int):
        self.folder, self.part, self.limit = folder, part, limit
        self.tokens = self.shards = 0
        self.pending: list[np.ndarray] = []
        self.pending_tokens = 0

    def add(self, document: np.ndarray) -> None:
        """Take a document, uint16 [tokens], its start token included."""
        self.tokens += len(document)
        if self.pending_tokens + len(document) > self.limit:
            self.flush()
        while len(document) > self.limit:
            self._write(document[: self.limit])
            document = document[self.limit :]
        self.pending.append(document)
        self.pending_tokens += len(document)

    def take_tail(self, count: int) -> np.ndarray:
        """Take the last `count` tokens back out, uint16, but never the first token of all."""
        self.flush()
        taken = []
        while count > 0 and self.tokens > 1:
            path = self._path(self.shards - 1)
            tokens = np.array(Shard(path).tokens)
            keep = max(len(tokens) - count, 1 if self.shards == 1 else 0)
            taken.insert(0, tokens[keep:])
            if keep:
                write_shard(path, tokens[:keep])
            else:
                path.unlink()
                self.shards -= 1
            self.tokens -= len(tokens) - keep
            count -= len(tokens) - keep
        return np.concatenate(taken)

    def flush(self) -> None:
        """Write what is pending, if there is any."""
        if self.pending:
            self._write(np.concatenate(self.pending))
        self.pending, self.pending_tokens = [], 0

    def _write(self, tokens: np.ndarray) -> None:
        write_shard(self._path(self.shards), tokens)
        self.shards += 1

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.part}_{number:06d}.bin"


def tokenize(
    files: Sequence[Path],
    tokenizer: str,
    out: Path,
    shard_tokens: int = 100_000_000,
    val_fraction: float = 0.01,
    workers: int = 0,
    log: Callable[[str], None] = print,
) -> Summary:
    """Write train_*.bin, val_*.bin and tokenizer.json into the new or empty folder `out`, all of them or none.

    files: .txt and .jsonl; tokenizer: "gpt2" or the path of a tokenizer.json; shard_tokens: most tokens of a shard;
    val_fraction: share of the documents, chosen by hash of their text, that validates; if that chooses none (few
    documents), the end of the text does. workers: processes; 0: one for each core, but one alone for little text.
    The shards do not depend on `workers`. Raises DataError for what cannot be used, OSError when the disk refuses.
    """
    files = [Path(path) for path in files]
    total = _check(files, shard_tokens, val_fraction, workers)
    out = Path(out).resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is not empty: choose another --out, so that no shards are mixed or lost")
    loaded = load_tokenizer(tokenizer)
    if loaded.vocab_size > MAX_ID + 1:
        raise DataError(f"tokenizer {tokenizer} has {loaded.vocab_size} ids; shards hold at most {MAX_ID + 1}")
    workers = workers or max(1, min(_cores(), total // _WORKER_BYTES))
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        saved = staging / "tokenizer.json"
        loaded.save(saved)
        train, val = ShardFiller(staging, "train", shard_tokens), ShardFiller(staging, "val", shard_tokens)
        stream = pieces(read_documents(files), val_fraction)
        # Closing stops the workers at once when the other side of the loop fails or is interrupted.
        with (
            Progress("tokenizing", total, log) as progress,
            closing(_encoded(stream, loaded, saved, workers)) as encoded,
        ):
            documents = _fill(encoded, loaded.bos, train, val, progress)
        if not documents:
            raise DataError(f"there is no text in {files[0]}" + (" and the other files" if len(files) > 1 else ""))
        if val_fraction and not val.tokens:
            val.add(_cut_validation(train, val_fraction, loaded.bos))
            log("no document fell to validation: the end of the text is cut off for it")
        train.flush()
        val.flush()
        digest = fingerprint(sorted(staging.glob("*.bin")))
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    patterns = str(out / "train_*.bin"), str(out / "val_*.bin")
    return Summary(documents, train.tokens, val.tokens, *patterns, str(out / saved.name), digest)


def _check(files: list[Path], shard_tokens: int, val_fraction: float, workers: int) -> int:
    """Total bytes of `files`; DataError for what cannot be used."""
    if not files:
        raise DataError("no file given: name .txt or .jsonl files")
    if not 1 <= shard_tokens <= MAX_COUNT:
        raise DataError(f"--shard-tokens {shard_tokens} is out of range: 1 to {MAX_COUNT}")
    if not 0 <= val_fraction <= 0.5:
        raise DataError(f"--val-fraction {val_fraction} is out of range: 0 (no validation shard) to 0.5")
    if workers < 0:
        raise DataError(f"--workers {workers} is out of range: 0 (one for each core) or more")
    for path in files:
        if path.is_dir():
            raise DataError(f"{path} is a folder: name the files in it, e.g. {path}/*.txt")
        if not path.exists():
            raise DataError(f"there is no file {path}")
        if path.suffix not in (".txt", ".jsonl"):
            raise DataError(f"{path}: only .txt (one document a file) and .jsonl (one document a line) are read")
    return sum(path.stat().st_size for path in files)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fill(
    encoded: Iterable[tuple[Piece, np.ndarray]], bos: int, train: ShardFiller, val: ShardFiller, progress: Progress
) -> int:
    """Join the pieces of each document after `bos` and hand it to its side. Returns the number of documents."""
    documents = 0
    parts: list[np.ndarray] = []
    side = train
    for piece, ids in encoded:
        if piece.first:
            if parts:
                side.add(np.concatenate(parts))
            documents += 1
            parts = [np.array([bos], dtype=np.uint16)]
            side = val if piece.validation else train
        parts.append(ids)
        progress.advance(piece.size)
    if parts:
        side.add(np.concatenate(parts))
    return documents


def _cut_validation(train: ShardFiller, fraction: float, bos: int) -> np.ndarray:
    """`fraction` of all tokens, off the end of the training text, made to start as a document."""
    tail = train.take_tail(max(1, round(fraction * train.tokens)))
    return tail if tail[:1] == bos else np.concatenate([np.array([bos], dtype=np.uint16), tail])


@dataclass(frozen=True)
class Options:
    """Turn text into token shards for training."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES...")]
    """.txt (one document a file) and .jsonl (one document a line, under "text")."""
    tokenizer: str
    """gpt2, or the path of a tokenizer.json."""
    out: Path
    """Folder for train_*.bin, val_*.bin and tokenizer.json."""
    shard_tokens: int = 100_000_000
    """Most tokens of a shard."""
    val_fraction: float = 0.01
    """Share of the documents kept for validation."""
    workers: int = 0
    """Processes; 0: one for each core."""


def main(words: Sequence[str]) -> int:
    """The command python -m data.tokenize. Returns the exit code."""

    def command() -> None:
        made = tokenize(**vars(parse(Options, words, "python -m data.tokenize")))
        print(f"documents   {made.documents:,}: {made.train_tokens:,} training, {made.val_tokens:,} validation tokens")
        print(f"train       {made.train_glob}\nvalidation  {made.val_glob}")
        print(f"tokenizer   {made.tokenizer_path}\nfingerprint {made.fingerprint}")

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
