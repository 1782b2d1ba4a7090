"""N processes of a test, quick to start: one server imports torch once, and every rank is forked from it.

    losses = start(rank_loss, 4, "muon", 3)          rank_loss(world, "muon", 3) of a test module, on 4 ranks

Lives here: `start` (results of all ranks, or a test that fails with what they printed), `launch` (the same left to the
caller, who may kill some), and the environment that torchrun would give them, its store in the hands of this process.
Not here: tests; torchrun itself, for those that kill it (test_watchdog.py).

Put many cases into one start: a rank costs about a tenth of a second, the first start of a test process about four.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from mome.world import World

ROOT = Path(__file__).resolve().parents[2]
# What costs seconds to import and starts no thread; nothing of this repository, which may be half written.
PRELOADED = (
    "torch", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.device_mesh", "numpy", "numba", "pytest", "hypothesis", "tyro", "rich.progress",
    "tokenizers", "safetensors.torch",
)  # fmt: skip
# Every rank computes with one thread: N of them share the cores of one machine.
SHARED = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# Seconds that the other ranks get to end by themselves when one has failed.
GRACE = 3.0


class Ended(NamedTuple):
    """What a rank came to. code: its exit status, minus the signal that ended it; None: it had to be killed after the
    time was over. seconds: after the start. result: what its function returned."""

    code: int | None
    seconds: float
    out: str
    err: str
    result: Any


def start(
    function: Callable[..., Any], world: int, *args: Any, env: Mapping[str, str] | None = None, timeout: float = 60.0,
    join: bool = True,
) -> list[Any]:  # fmt: skip
    """function(World, *args) on `world` ranks; what each returned, in order of rank.

    function: of a module, by name. args, results: whatever pickles; results as they were, tensors too.
    join: whether the ranks have joined their World (gloo, CPU) already; else function(*args), and RANK and its like are
    set as under torchrun. env: more variables, set before the function's module is imported.
    Raises AssertionError with what the ranks printed when one fails, or when `timeout` seconds are over (with the
    stacks of those that still ran).
    """
    with launch(function, world, *args, env=env, join=join, timeout=timeout) as ranks:
        ended = ranks.wait(timeout, together=True)
    if all(one.code == 0 for one in ended):
        return [one.result for one in ended]
    raise AssertionError(f"{function.__name__} on {world} ranks:\n{describe(ended)}")


@contextlib.contextmanager
def launch(
    function: Callable[..., Any], world: int, *args: Any, env: Mapping[str, str] | None = None, join: bool = True,
    timeout: float = 60.0,
) -> Iterator[Ranks]:  # fmt: skip
    """The same ranks under way; those that still run when the block ends are killed. timeout: of their collectives."""
    with tempfile.TemporaryDirectory() as folder:
        # Held here as torchrun's agent holds it: no rank takes it along when it dies.
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            **SHARED, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", **(env or {}),
        }  # fmt: skip
        call = pickle.dumps((function, args))
        ranks = Ranks(Path(folder))
        try:
            for rank in range(world):
                own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.add(rank, own, call, timeout if join else None)
            yield ranks
        finally:
            ranks.end()
            del store


class Ranks:
    """Processes of one test."""

    def __init__(self, folder: Path):
        self.folder, self.processes, self.started = folder, [], time.monotonic()
        self.killed: set[int] = set()

    def add(self, rank: int, env: Mapping[str, str], call: bytes, join_timeout: float | None) -> None:
        process = _server().Process(target=_rank, args=(self.folder, rank, dict(env), call, join_timeout), daemon=True)
        process.start()
        if not self.processes:
            # Only now, for the first one waits until the server is there.
            self.started = time.monotonic()
        self.processes.append(process)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a rank a signal."""
        os.kill(self.processes[rank].pid, number)

    def out(self, rank: int) -> str:
        """What a rank has printed so far."""
        path = self.folder / f"{rank}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, word: str, timeout: float = 30.0) -> None:
        """Return when every rank has printed `word`."""
        deadline = time.monotonic() + timeout
        while not all(word in self.out(rank) for rank in range(len(self.processes))):
            if time.monotonic() > deadline or not any(one.is_alive() for one in self.processes):
                raise AssertionError(f"not every rank printed {word!r}:\n{describe(self.wait(0.0))}")
            time.sleep(0.01)

    def wait(self, timeout: float, together: bool = False) -> list[Ended]:
        """What the ranks came to. Those that run after `timeout` seconds are killed, with their stacks on stderr; if
        `together`, also those that run GRACE seconds after another one failed."""
        deadline = time.monotonic() + timeout
        ends: dict[int, float] = {}
        while len(ends) < len(self.processes) and time.monotonic() < deadline:
            for rank, process in enumerate(self.processes):
                if rank not in ends and not process.is_alive():
                    ends[rank] = time.monotonic() - self.started
                    if together and process.exitcode != 0:
                        deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.005)
        self.end()
        return [
            self._ended(rank, ends.get(rank, time.monotonic() - self.started)) for rank in range(len(self.processes))
        ]

    def end(self) -> None:
        """Kill what still runs; it leaves its stacks."""
        left = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in left:
            self.kill(rank, signal.SIGUSR1)
        time.sleep(0.3 if left else 0.0)
        for rank in left:
            self.killed.add(rank)
            self.processes[rank].kill()
        for process in self.processes:
            process.join(10.0)

    def _ended(self, rank: int, seconds: float) -> Ended:
        err, result = self.folder / f"{rank}.err", self.folder / f"{rank}.pickle"
        return Ended(
            None if rank in self.killed else self.processes[rank].exitcode,
            seconds,
            self.out(rank),
            err.read_text(errors="replace") if err.exists() else "",
            pickle.loads(result.read_bytes()) if result.exists() else None,
        )


def describe(ended: list[Ended]) -> str:
    """How each rank ended and the last of what it printed."""
    said = []
    for rank, one in enumerate(ended):
        how = f"exit {one.code}" if one.code is not None else "killed, for it ran on"
        said.append(f"--- rank {rank}: {how} after {one.seconds:.1f} s\n{one.out[-2000:]}{one.err[-6000:]}")
    return "\n".join(said)


def _server() -> multiprocessing.context.ForkServerContext:
    """The server, started when first asked for, with nothing of this process but the environment of the ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    before = os.environ.copy()
    try:
        # PYTHONPATH: for a test run from elsewhere.
        os.environ |= {**SHARED, "PYTHONPATH": str(ROOT)}
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= before
    return context


def _rank(folder: Path, rank: int, env: dict[str, str], call: bytes, join_timeout: float | None) -> None:
    """What a rank does: print into files, call the function, leave its result."""
    for number, name in ((1, "out"), (2, "err")):
        descriptor = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The streams of the server were made for other files, and its own may hold the wrong encoding.
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    os.environ |= env
    code = 1
    try:
        torch.manual_seed(0)
        function, args = pickle.loads(call)
        result = _joined(function, args, join_timeout) if join_timeout is not None else function(*args)
        draft = folder / f"{rank}.writing"
        draft.write_bytes(pickle.dumps(result))
        draft.rename(folder / f"{rank}.pickle")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: a group whose peers are gone, or a thread that a test left, must not keep this process.
    os._exit(code)


def _joined(function: Callable[..., Any], args: tuple, timeout: float) -> Any:
    """The function with its World; one rank is a process like any other that nobody started together with more."""
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    world = World.join(torch.device("cpu"), timeout)
    result = function(world, *args)
    world.close()
    return result
