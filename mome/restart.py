"""What an attempt of torchrun needs that follows another one: a store without its words, and the run's folder.

Lives here: `attempt_store`, and the pointer file, named for the job, to the folder that the first attempt made.
Not here: run folders (mome/runfolder.py), and why an attempt ended (mome/watchdog.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
import zlib
from datetime import timedelta
from pathlib import Path

from torch import distributed

from mome.errors import UserError
from mome.files import write_atomic

POINTER, STOPPED = ".torchrun_", "stopped"
# Seconds after which nobody restarts any more.
OLD = 7 * 86400.0


def attempt_store(timeout: float) -> distributed.Store:
    """The store for init_process_group (with rank and world_size). Every rank calls it.

    torchrun's agent keeps one store for all attempts, and torch looks up its peers there under the names of the attempt
    before: a restart then connects to the dead (github.com/pytorch/pytorch/issues/135712). Agents of several machines
    count restarts each for itself, so the first rank makes up a name for the attempt and gives it to who asks.
    Raises UserError on the first rank, and where nobody is at the store's address, DistStoreError on others, after
    `timeout` seconds.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
    try:
        store = distributed.TCPStore(
            *where, None if agent else size, is_master=not agent and rank == 0, timeout=timedelta(seconds=timeout)
        )
    except distributed.DistError as error:
        raise UserError(
            f"the {size} processes have not met at {where[0]}:{where[1]} in {timeout:.0f} s: start all of them "
            "(torchrun does), and see what the others say"
        ) from error
    if not agent:
        return store
    name = uuid.uuid4().hex
    if rank == 0:
        _give(store, name, size, timeout)
    else:
        mine = name
        store.set(f"asks/{rank}", mine)
        name = store.get(f"answers/{mine}").decode()
        store.set(f"{name}/has/{rank}", "")
    return distributed.PrefixStore(name, store)


def _give(store: distributed.Store, name: str, size: int, timeout: float) -> None:
    """Answer every rank that asks until each has the name; what was asked in the attempt before is answered in vain."""
    answered: dict[int, bytes] = {}
    missing, deadline = set(range(1, size)), time.monotonic() + timeout
    while missing:
        for rank in sorted(missing):
            if store.check([f"{name}/has/{rank}"]):
                missing.remove(rank)
            elif store.check([f"asks/{rank}"]):
                asked = store.get(f"asks/{rank}")
                if answered.get(rank) != asked:
                    store.set(f"answers/{asked.decode()}", name)
                    answered[rank] = asked
        if time.monotonic() > deadline:
            raise UserError(f"ranks {sorted(missing)} have not come in {timeout:.0f} s: see what they say, start again")
        time.sleep(0.01)


def remember(runs_dir: Path, folder: Path, what: str = "", *, stopped: bool = False) -> None:
    """Let the next attempt of this job find a run's folder, which lies in runs_dir. Called by one rank; outside
    torchrun it does nothing.

    what: stands for what the job trains, its configuration: another job of the same name is not taken for this one.
    stopped: somebody asked for its end, so that torchrun, to which every end but one is a failure, must not go on.
    """
    if pointer := pointer_of(runs_dir, what):
        write_atomic(pointer, folder.name + (f"/{STOPPED}" if stopped else "") + "\n")


def recall(runs_dir: Path, what: str = "") -> Path | None:
    """The folder that an earlier attempt of this job made; None in the first attempt, when none got so far, and outside
    torchrun. Called by one rank, once, at the start.

    The first attempt removes what an older job of the same name has left (--rdzv-id, which is "none" unless given), and
    what others have left long ago. A restart for a node that joins does not count as one with torchrun: such a run is
    gone on with by --resume. Raises UserError when the attempt before was stopped on request.
    """
    pointer = pointer_of(runs_dir, what)
    if pointer is None:
        return None
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        with contextlib.suppress(OSError):
            pointer.unlink(missing_ok=True)
        for other in runs_dir.glob(f"{POINTER}*"):
            with contextlib.suppress(OSError):
                if time.time() - other.stat().st_mtime > OLD:
                    other.unlink()
        return None
    try:
        name, _, stopped = pointer.read_text().strip().partition("/")
    except OSError:
        return None
    folder = runs_dir / name
    if stopped:
        raise UserError(f"{folder}: stopped on request, so not started again; go on with --resume {folder}")
    return folder if (folder / "config.json").is_file() else None


def pointer_of(runs_dir: Path, what: str = "") -> Path | None:
    """The pointer file of this job; None outside torchrun."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if not job:
        return None
    tail = f"_{zlib.crc32(what.encode()):08x}" if what else ""
    return runs_dir / f"{POINTER}{re.sub(r'[^A-Za-z0-9_.-]', '_', job)}{tail}"
