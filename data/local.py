"""The default corpus: the Python sources of two packages that torch brings along, so that nothing is downloaded.

Lives here: which files, which of them validate, the build, its cache and the fingerprint it must have.
Not here: the tokenizer's training (tokenizer.py), the shard format (shards.py), one's own text (tokenize.py).
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from filelock import FileLock

from data.command import parse, run_command
from data.console import Progress
from data.errors import DataError
from data.shards import fingerprint, write_shard
from data.tokenizer import Tokenizer, load_tokenizer, train_bpe

PACKAGES = {"networkx": "3.6.1", "sympy": "1.14.0"}
VOCAB_SIZE = 8192
VALIDATION_SHARE = 0.03
FINGERPRINT = "b13b17f10dbcb86e67816d84e954f5925186a88f0d72c58299712c6095370fbc"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "local"
_INSTALL = "pip install --force-reinstall --no-deps " + " ".join(f"{name}=={PACKAGES[name]}" for name in PACKAGES)
_TRAIN, _VALIDATION, _TOKENIZER = "train_000000.bin", "val_000000.bin", "tokenizer.json"
_BATCH_DOCUMENTS = 64


@dataclass(frozen=True)
class LocalCorpus:
    """Where the corpus lies: patterns of its training and validation shards, its tokenizer.json, its fingerprint."""

    train_glob: str
    val_glob: str
    tokenizer_path: str
    fingerprint: str


def build(cache_dir: Path = CACHE, log: Callable[[str], None] = print) -> LocalCorpus:
    """The corpus in `cache_dir`, built there first if it is not there whole: 15 to 30 s on two cores.

    10 million tokens of 8,192 ids, one document a file of `PACKAGES`. The same on every machine: the fingerprint over
    shards and tokenizer is FINGERPRINT, or DataError says how to install the sources anew. A build that is stopped
    leaves nothing half-made, and of several processes that ask at once one builds. Also raises OSError when the disk
    refuses, and DataError when a damaged corpus would have to make room in a folder that holds other files.
    """
    cache_dir = Path(cache_dir)
    cache_dir.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(cache_dir.with_name(f".{cache_dir.name}.lock")):
        if cache_dir.exists():
            strangers = sorted({path.name for path in cache_dir.iterdir()} - {_TRAIN, _VALIDATION, _TOKENIZER})
            try:
                return _checked(cache_dir)
            except DataError as error:
                if strangers:
                    raise DataError(f"{cache_dir} holds other files ({strangers[0]}): choose another folder") from error
                log(f"the corpus in {cache_dir} is damaged or of another version; building it again ({error})")
        staging = cache_dir.with_name(f".{cache_dir.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        try:
            write_corpus(staging, sources(), VOCAB_SIZE, log)
            _checked(staging)
            shutil.rmtree(cache_dir, ignore_errors=True)
            staging.rename(cache_dir)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return _checked(cache_dir)


def sources() -> list[tuple[str, Path]]:
    """(posix path relative to site-packages, path) of every .py file that the wheels of PACKAGES hold, sorted.

    Raises DataError, with the command to run, when a package or one of its files is missing or of another version.
    """
    files = []
    for name, version in PACKAGES.items():
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise DataError(f"the default corpus needs {name}=={version}, which is not installed: {_INSTALL}") from None
        if package.version != version:
            raise DataError(f"the default corpus needs {name}=={version}, not {package.version}: {_INSTALL}")
        # The wheel's own list, so that files which others put beside it do not count.
        for entry in package.files or ():
            if entry.parts[0] == name and entry.suffix == ".py":
                files.append((entry.as_posix(), Path(entry.locate())))
    return sorted(files)


def validation_key(path: str) -> float:
    """Uniform in [0, 1), a function of the relative path alone: below VALIDATION_SHARE the document validates."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:6], "big") / 2**48


def write_corpus(folder: Path, files: Sequence[tuple[str, Path]], vocab_size: int, log: Callable[[str], None]) -> None:
    """Write the training and the validation shard and tokenizer.json into the new folder `folder`.

    files: (relative path, path), in the order of the training documents; validation documents go by validation_key.
    The tokenizer is trained on the training documents alone. Empty files are left out.
    """
    started = time.monotonic()
    texts = {name: _read(path) for name, path in files}
    names = [name for name in texts if texts[name]]
    train = [name for name in names if validation_key(name) >= VALIDATION_SHARE]
    validation = sorted((name for name in names if validation_key(name) < VALIDATION_SHARE), key=validation_key)
    size = sum(len(texts[name].encode()) for name in names)
    log(f"default corpus: {len(names):,} Python files, {size / 1e6:.1f} MB, {len(validation)} of them for validation")
    log(f"training a byte-level BPE of {vocab_size:,} ids (about 10 s)")
    tokenizer = train_bpe((texts[name] for name in train), vocab_size)
    folder.mkdir(parents=True)
    tokenizer.save(folder / _TOKENIZER)
    with Progress("tokenizing", size, log) as progress:
        train_tokens = _encode([texts[name] for name in train], tokenizer, progress)
        validation_tokens = _encode([texts[name] for name in validation], tokenizer, progress)
    write_shard(folder / _TRAIN, train_tokens)
    write_shard(folder / _VALIDATION, validation_tokens)
    seconds = time.monotonic() - started
    log(f"{len(train_tokens):,} training and {len(validation_tokens):,} validation tokens in {seconds:.0f} s")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise DataError(f"{path} is missing from its package: {_INSTALL}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not the file of its package ({error}): {_INSTALL}") from None


def _encode(texts: list[str], tokenizer: Tokenizer, progress: Progress) -> np.ndarray:
    """uint16 [tokens]: each document after its start token."""
    pieces = [np.empty(0, dtype=np.uint16)]
    for at in range(0, len(texts), _BATCH_DOCUMENTS):
        batch = texts[at : at + _BATCH_DOCUMENTS]
        pieces += [np.array([tokenizer.bos, *ids], dtype=np.uint16) for ids in tokenizer.encode_batch(batch)]
        progress.advance(sum(len(text.encode()) for text in batch))
    return np.concatenate(pieces)


def _checked(folder: Path) -> LocalCorpus:
    """The corpus in `folder`. Raises DataError when a file is missing or the fingerprint is not FINGERPRINT."""
    train, val, tokenizer = folder / _TRAIN, folder / _VALIDATION, folder / _TOKENIZER
    found = hashlib.sha256((fingerprint([train, val]) + load_tokenizer(tokenizer).fingerprint()).encode()).hexdigest()
    if found != FINGERPRINT:
        raise DataError(
            f"the default corpus has fingerprint {found[:16]}, not {FINGERPRINT[:16]}: the installed sources or the "
            f"tokenizers library are not the pinned ones: {_INSTALL}, and pip install -r requirements.txt"
        )
    return LocalCorpus(str(train), str(val), str(tokenizer), found)


@dataclass(frozen=True)
class Options:
    """Build the default corpus, unless it is there, and print where it lies."""

    cache: Path = CACHE
    """The folder that holds it."""


def main(words: Sequence[str]) -> int:
    """The command python -m data.local: builds the corpus if need be and prints where it is. Returns the exit code."""

    def command() -> None:
        corpus = build(parse(Options, words, "python -m data.local").cache)
        print(f"train      {corpus.train_glob}\nvalidation {corpus.val_glob}")
        print(f"tokenizer  {corpus.tokenizer_path}\nfingerprint {corpus.fingerprint}")

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
