"""What an attempt of torchrun needs that follows another one: a store without its words, and the run's folder.

Lives here: `attempt_store`, and the pointer file, named for the job, to the folder that the first attempt made.
Not here: run folders (mome/runfolder.py), and why an attempt ended (mome/watchdog.py).
"""

from __future__ import annotations

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


def attempt_store(timeout: float) -> distributed.Store | None:
    """The store for init_process_group (with rank and world_size); None: it may find its own. Every rank calls it.

    torchrun's agent keeps one store for all attempts, and torch looks up its peers there under the names of the attempt
    before: a restart then connects to the dead (github.com/pytorch/pytorch/issues/135712). Agents of several machines
    count restarts each for itself, so the first rank makes up a name for the attempt and gives it to who asks.
    Raises UserError on the first rank, DistStoreError on others, after `timeout` seconds.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=timeout)
    )
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


def remember(runs_dir: Path, folder: Path, what: str = "") -> None:
    """Let the next attempt of this job find a run's folder, which lies in runs_dir. Called by one rank; outside
    torchrun it does nothing.

    what: stands for what the job trains, its configuration: another job of the same name is not taken for this one.
    """
    pointer = pointer_of(runs_dir, what)
    if pointer:
        write_atomic(pointer, folder.name + "\n")


def recall(runs_dir: Path, what: str = "") -> Path | None:
    """The folder that an earlier attempt of this job made; None in the first attempt, when none got so far, and outside
    torchrun. Called by one rank, once, at the start.

    The first attempt removes what an older job of the same name has left (--rdzv-id, which is "none" unless given). A
    restart for a node that joins does not count as one with torchrun: such a run is gone on with by --resume.
    """
    pointer = pointer_of(runs_dir, what)
    if pointer is None:
        return None
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        pointer.unlink(missing_ok=True)
        return None
    try:
        folder = runs_dir / pointer.read_text().strip()
    except FileNotFoundError:
        return None
    return folder if (folder / "config.json").is_file() else None


def forget(runs_dir: Path, what: str = "") -> None:
    """Remove the pointer at the end of a run. Called by the rank that wrote it."""
    pointer = pointer_of(runs_dir, what)
    if pointer:
        pointer.unlink(missing_ok=True)


def pointer_of(runs_dir: Path, what: str = "") -> Path | None:
    """The pointer file of this job; None outside torchrun."""
    job = os.environ.get("TORCHELASTIC_RUN_ID")
    if not job:
        return None
    tail = f"_{zlib.crc32(what.encode()):08x}" if what else ""
    return runs_dir / f".torchrun_{re.sub(r'[^A-Za-z0-9_.-]', '_', job)}{tail}"
