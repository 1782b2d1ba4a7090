"""FineWeb in GPT-2 tokens from the Hugging Face Hub: the shards the speedrun trains and validates on.

Lives here: which files, their download with resume, and the check of size, content hash and header.
Not here: the shard format (shards.py) and what a network library does with one connection (huggingface_hub).
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
from filelock import FileLock, Timeout
from huggingface_hub import constants, get_hf_file_metadata, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from data.command import parse, run_command
from data.console import Progress
from data.errors import DataError
from data.shards import Shard

REPOSITORY = "kjj0/fineweb10B-gpt2"
VALIDATION = "fineweb_val_000000.bin"
TRAIN_SHARDS = 103
OUT = Path(__file__).resolve().parent.parent / ".cache" / "fineweb10B"
# Seconds to wait before each new try after a failure; a try that brings new bytes starts the count afresh.
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0)


def download(
    shards: int, out: Path = OUT, endpoint: str | None = None, log: Callable[[str], None] = print
) -> list[Path]:
    """The validation shard and the first `shards` training shards (100M tokens, 200 MB each) in the folder `out`.

    endpoint: the Hub's address, by default that of HF_ENDPOINT. Files that are there whole are kept, without a network.
    A broken download stays beside them as NAME.ETAG.part, and this or the next call goes on where it ended. A file
    takes its name only after its size, its SHA-256 (where the Hub tells it) and its header are found right.
    Raises DataError with the remedy when that fails, OSError when the disk refuses.
    """
    if not 1 <= shards <= TRAIN_SHARDS:
        raise DataError(f"--shards {shards} is out of range: 1 to {TRAIN_SHARDS}")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / ".lock", timeout=0):
            names = [VALIDATION, *(f"fineweb_train_{number:06d}.bin" for number in range(1, shards + 1))]
            return [_fetch(name, out, endpoint or constants.ENDPOINT, log) for name in names]
    except Timeout:
        raise DataError(f"another download into {out} is running: wait for it or choose another --out") from None


def _fetch(name: str, out: Path, endpoint: str, log: Callable[[str], None]) -> Path:
    """One file, whole: the one that is there, or else the one downloaded in as many connections as it takes."""
    target = out / name
    if target.exists():
        try:
            log(f"{name}: there already, {len(Shard(target)):,} tokens")
            return target
        except DataError as error:
            log(f"{name}: not whole, downloading it again ({error})")
    url = hf_hub_url(REPOSITORY, name, repo_type="dataset", endpoint=endpoint)
    failures = 0
    while True:
        before = _partial_bytes(out, name)
        try:
            part, sha256 = _receive(url, name, out, log)
            break
        except (httpx2.HTTPError, httpx2.InvalidURL, OfflineModeIsEnabled) as error:
            have = _partial_bytes(out, name)
            failures = 1 if have > before else failures + 1
            if failures > len(RETRY_SECONDS) or not _may_pass(error):
                raise DataError(_remedy(error, name, endpoint, out)) from error
            wait = RETRY_SECONDS[failures - 1]
            log(f"{name}: stopped at {have / 1e6:,.1f} MB ({_reason(error)}); trying again in {wait:.0f} s")
            time.sleep(wait)
    _verify(part, sha256, name, endpoint)
    os.replace(part, target)
    log(f"{name}: downloaded, {len(Shard(target)):,} tokens")
    return target


def _receive(url: str, name: str, out: Path, log: Callable[[str], None]) -> tuple[Path, str | None]:
    """Add what is missing to the partial file of `name`, over one connection. Returns it and the SHA-256 it must have.

    hf_hub_download starts a file over in each call (its partial file has a random name and is deleted), so the bytes
    are asked for here, with the library's metadata, headers and session, by a Range from where the partial file ends.
    """
    metadata = get_hf_file_metadata(url)
    if metadata.size is None or metadata.etag is None:
        raise DataError(f"{url} answers without the size and ETag of {name}: is HF_ENDPOINT a Hub?")
    # The ETag in its name keeps bytes of two versions apart.
    part = out / f"{name}.{re.sub(r'[^0-9a-zA-Z]', '_', metadata.etag)[:16]}.part"
    for stale in set(_partial_files(out, name)) - {part}:
        stale.unlink()
    have = part.stat().st_size if part.exists() else 0
    if have > metadata.size:
        part.unlink()
        have = 0
    # LFS files have their SHA-256 as ETag.
    sha256 = metadata.etag if len(metadata.etag) == 64 else None
    if have < metadata.size:
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with (
            get_session().stream("GET", url, headers=headers, timeout=timeout) as answer,
            open(part, "ab") as handle,
            Progress(name, metadata.size, log, done=have) as progress,
        ):
            hf_raise_for_status(answer)
            if answer.status_code != 206:  # the whole file, in spite of the Range
                handle.truncate(0)
                progress.advance(-have)
            for chunk in answer.iter_raw():
                handle.write(chunk)
                progress.advance(len(chunk))
    got = part.stat().st_size
    if got < metadata.size:
        raise httpx2.ReadError(f"{got:,} of {metadata.size:,} bytes came")
    if got > metadata.size:
        part.unlink()
        raise DataError(f"{url} sent {got:,} bytes, not the {metadata.size:,} it announced: deleted, try again")
    return part, sha256


def _verify(part: Path, sha256: str | None, name: str, endpoint: str) -> None:
    """DataError, and the file is deleted, when its content hash or its header is wrong."""
    try:
        if sha256:
            with open(part, "rb") as handle:
                found = hashlib.file_digest(handle, "sha256").hexdigest()
            if found != sha256:
                raise DataError(f"its SHA-256 is {found[:16]}, not {sha256[:16]}")
        Shard(part)
    except DataError as error:
        part.unlink()
        raise DataError(
            f"what {endpoint} sent as {name} is not that shard and was deleted: {error}: "
            "try again, or set HF_ENDPOINT to another Hub"
        ) from None


def _partial_files(out: Path, name: str) -> list[Path]:
    return list(out.glob(f"{name}.*.part"))


def _partial_bytes(out: Path, name: str) -> int:
    return sum(path.stat().st_size for path in _partial_files(out, name))


def _status(error: Exception) -> int | None:
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: no answer, a broken one, or a busy or broken server."""
    if isinstance(error, HfHubHTTPError):
        return _status(error) in (408, 429) or _status(error) >= 500
    return not isinstance(error, (OfflineModeIsEnabled, httpx2.InvalidURL, httpx2.UnsupportedProtocol))


def _reason(error: Exception) -> str:
    status = _status(error)
    return f"HTTP status {status}" if status else (str(error).splitlines() or [type(error).__name__])[0]


def _remedy(error: Exception, name: str, endpoint: str, out: Path) -> str:
    """One line: what failed and what to do."""
    if isinstance(error, OfflineModeIsEnabled):
        return f"{name} is not in {out} and HF_HUB_OFFLINE forbids downloading it: unset HF_HUB_OFFLINE"
    if _status(error) in (401, 403):
        return (
            f"{endpoint} refuses {REPOSITORY} ({_reason(error)}): check HF_ENDPOINT, and HF_TOKEN if it needs a login"
        )
    if _status(error) == 404:
        return f"{endpoint} has no {name} in {REPOSITORY} (HTTP status 404): check HF_ENDPOINT"
    return (
        f"cannot download {name} from {endpoint} ({_reason(error)}): check the network, or set HF_ENDPOINT to a Hub "
        f"that can be reached; without a network put the .bin files into {out}. What came so far is kept"
    )


@dataclass(frozen=True)
class Options:
    """Download FineWeb (GPT-2 tokens, 100M a shard) from the Hugging Face Hub. What is there already is kept."""

    shards: int
    """Training shards, 1 to 103; the validation shard comes with them."""
    out: Path = OUT
    """Folder for the shards."""


def main(words: Sequence[str]) -> int:
    """The command python -m data.fineweb. Returns the exit code."""

    def command() -> None:
        options = parse(Options, words, "python -m data.fineweb")
        download(options.shards, options.out)
        print(f"train       {options.out / 'fineweb_train_*.bin'}\nvalidation  {options.out / VALIDATION}")

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
