"""Token shards: the speedrun's .bin file, written atomically, memory-mapped and checked when read.

Lives here: the format, Shard, write_shard, finding shards by pattern, the fingerprint of a corpus.
Not here: which tokens a training step sees (loader.py), and how text becomes ids (tokenizer.py).
"""

from __future__ import annotations

import glob
import hashlib
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data.errors import DataError

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MAX_ID = 2**16 - 1
MAX_COUNT = 2**31 - 1

_REMAKE = "make it again (python -m data.tokenize, or python -m data.fineweb for FineWeb)"


def write_shard(path: str | os.PathLike[str], tokens: np.ndarray) -> None:
    """Write a shard so that `path` holds either what it held before or the whole new shard, whenever this is stopped.

    tokens: integer [n], n >= 1, ids 0..65535. Format (modded-nanogpt, data/): 256 little-endian int32, of which the
    first three are magic, version and n and the rest 0, then n little-endian uint16.
    Raises DataError for other tokens, and when the file cannot be written (no folder, no permission, no space).
    """
    path = Path(path)
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"{path}: a shard takes a flat array of integers, not {tokens.dtype} of shape {tokens.shape}")
    if not 1 <= len(tokens) <= MAX_COUNT:
        raise DataError(f"{path}: a shard holds 1 to {MAX_COUNT:,} tokens, not {len(tokens):,}: split the corpus")
    if tokens.min() < 0 or tokens.max() > MAX_ID:
        at = int(np.argmax((tokens < 0) | (tokens > MAX_ID)))
        raise DataError(f"{path}: token id {tokens[at]} at position {at} does not fit a shard: ids are 0 to {MAX_ID}")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    # In the folder of the target, so that the rename stays within one file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with open(temporary, "xb") as handle:
            handle.write(header.tobytes())
            handle.write(memoryview(np.ascontiguousarray(tokens, dtype="<u2")).cast("B"))
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot write the shard {path}: {reason}: free space or choose another folder") from error
    finally:
        temporary.unlink(missing_ok=True)


class Shard:
    """One shard, memory-mapped. Construction reads the header alone and raises DataError for a file that is missing,
    unreadable, empty, truncated, over-long, or of another magic, version or count; no token is read.

    path: Path; vocab_size: ids the model knows, or None; tokens: np.memmap uint16 [len(shard)], read-only.
    """

    def __init__(self, path: str | os.PathLike[str], vocab_size: int | None = None):
        self.path = Path(path)
        self.vocab_size = vocab_size
        self._max: int | None = None
        try:
            with open(self.path, "rb") as handle:
                count = _read_count(self.path, handle.read(HEADER_BYTES), os.fstat(handle.fileno()).st_size)
                self.tokens = np.memmap(handle, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))
        except FileNotFoundError:
            raise DataError(f"there is no shard {self.path}: check the path, or {_REMAKE}") from None
        except OSError as error:
            raise DataError(f"cannot read the shard {self.path}: {error.strerror or error}") from error

    def __len__(self) -> int:
        return len(self.tokens)

    def document_starts(self, bos: int) -> np.ndarray:
        """Positions int64 [documents], ascending, where documents start: each `bos`, and 0 (a leading piece counts)."""
        starts = np.flatnonzero(self.tokens.view(np.ndarray) == bos)
        return starts if len(starts) and starts[0] == 0 else np.concatenate(([0], starts))

    def scan_max(self) -> int:
        """The largest id (reads every token, once). Raises DataError with the first position of an id >= vocab_size."""
        tokens = self.tokens.view(np.ndarray)
        if self._max is None:
            self._max = int(tokens.max())
        if self.vocab_size is not None and self._max >= self.vocab_size:
            at = int(np.argmax(tokens >= self.vocab_size))
            raise DataError(
                f"{self.path}: token id {tokens[at]} at position {at} is outside the vocabulary of {self.vocab_size}: "
                "use the tokenizer this shard was made with"
            )
        return self._max


def _read_count(path: Path, header: bytes, size: int) -> int:
    """The token count in `header`, once all else about a file of `size` bytes is found to agree with it."""
    if size == 0:
        raise DataError(f"the shard {path} is empty (0 bytes): {_REMAKE}")
    if len(header) < HEADER_BYTES:
        raise DataError(f"the shard {path} is truncated: {size} bytes, its header alone has {HEADER_BYTES}: {_REMAKE}")
    magic, version, count = (int(value) for value in np.frombuffer(header, dtype="<i4", count=3))
    if magic != MAGIC:
        raise DataError(f"{path} is no token shard: magic number {magic}, not {MAGIC}: check the path, or {_REMAKE}")
    if version != VERSION:
        raise DataError(f"the shard {path} has format version {version}, only {VERSION} can be read: {_REMAKE}")
    if count <= 0:
        raise DataError(f"the shard {path} has a token count of {count} in its header: {_REMAKE}")
    expected = HEADER_BYTES + 2 * count
    if size != expected:
        kind = "truncated" if size < expected else "over-long"
        raise DataError(f"the shard {path} is {kind}: {size:,} bytes, {expected:,} for its {count:,} tokens: {_REMAKE}")
    return count


def find_shards(pattern: str, what: str) -> list[Path]:
    """The files that match a glob pattern (`**` and `~` are understood), sorted by path.

    what: "training" or "validation", for the DataError when nothing matches.
    """
    paths = sorted(path for path in map(Path, glob.glob(os.path.expanduser(pattern), recursive=True)) if path.is_file())
    if not paths:
        raise DataError(f"no {what} shard matches {pattern}: check the pattern, or run python -m data.tokenize first")
    return paths


def fingerprint(paths: Iterable[str | os.PathLike[str]]) -> str:
    """SHA-256, hex, over token count (8 bytes, little-endian) and tokens (uint16, little-endian) of each shard in turn.

    Names and unused header words do not count. Reads every byte; raises DataError as Shard does.
    """
    digest = hashlib.sha256()
    for path in paths:
        shard = Shard(path)
        digest.update(len(shard).to_bytes(8, "little"))
        digest.update(shard.tokens)
    return digest.hexdigest()
