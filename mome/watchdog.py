"""Who is dead or stuck: each process's sign of life in torchrun's store, and the end of all when one is missing.

Lives here: Watchdog (a thread that nobody waits for, with a connection of its own), and what tells a collective that
broke from other errors.
Not here: collectives (mome/world.py), and what a restarted run goes on with (mome/restart.py).

Every rank watches the next one alone, so that a thousand of them ask the store a thousand times a second and not a
million times: of the ranks that die at once, one follows a rank that lives. Who finds a fault writes it into the store,
where all read it within a second; the first one written is what all say.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch import distributed

from mome.errors import UserError
from mome.world import World

INTERVAL = 1.0
# Seconds between a verdict and the end of a process whose main thread does not end it by itself, and of one that is
# ending itself (a thread or a collective may hold it up).
GRACE, LINGER = 2.0, 25.0
# Signs of life that a peer may miss before it counts as silent, once a collective has broken; and for how many seconds
# the reason is looked for.
MISSED, SEARCH = 3, 5.0
STATUS = 1
KEPT, NOTHING = "the last checkpoint is whole: go on with --resume", "nothing was saved before"


class Beat(NamedTuple):
    """A sign of life. number: collectives entered so far; name: the one that it is in; left: it has ended its part."""

    count: int
    step: int
    name: str
    number: int
    left: bool = False

    def place(self) -> str:
        return f"in '{self.name}' of step {self.step}" if self.name else f"at step {self.step}"


class Process(NamedTuple):
    """A rank's process; machine: empty where it cannot be told whether a process lives."""

    machine: str
    host: str
    pid: int
    born: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Watchdog:
    """Ends this process, with one line on stderr and STATUS, when a peer is dead or stuck.

        with Watchdog(world, timeout) as watchdog:
            ...                       train; the ranks have met for the last time when the block ends

    Dead: its process is gone (seen at once on the same machine), or it has given no sign of life for `timeout` seconds;
    such a one on this machine that is merely stopped is killed. Stuck: this rank has come to no further collective for
    `timeout` seconds, and a peer is behind it, or all are held up; so whatever a rank does while others wait for it
    (validating, saving) must take less. Time during which this process itself did not run does not count.

    An error that leaves the block is told to the peers, which end with its text, and goes on; if it is a collective
    that broke, UserError with the collective, the step and who is to blame takes its place. Made, and left,
    by every rank at the same place; raises UserError when another process ended before. One process: does nothing.

    saved: whether there is a checkpoint to go on with; for the messages, until somebody knows there is none. While the
    block runs SIGTERM ends the process at once, but for when a peer is gone: then torchrun sends it to all that are
    left, and this has yet to say why.
    """

    def __init__(self, world: World, timeout: float = 600.0) -> None:
        self.world, self.timeout = world, timeout
        self.interval = min(INTERVAL, timeout / 5)
        self._verdict = ""
        self._shown: BaseException | None = None
        self._known, self._wake, self._ending = threading.Event(), threading.Event(), threading.Lock()
        self._question: Callable[[], str] | None = None
        self._leaving = False
        self.saved: Callable[[], bool] = lambda: False
        self._count, self._progress, self._before = 0, 0, time.monotonic()
        self._still = self._quiet = 0.0
        self._watched, self._heard = (world.rank + 1) % world.size, -1
        if world.alone:
            return
        try:
            everybody = world.gather_objects("watchdog", (uuid.uuid4().hex, this_process()))
            # A restart finds the store of the attempt before: the first rank's word tells their keys apart.
            self._prefix, self._peers = f"watchdog/{everybody[0][0]}", [one for _, one in everybody]
            self._host, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            wait = timedelta(seconds=max(timeout, 1.0))
            self._store = distributed.TCPStore(self._host, self._port, is_master=False, timeout=wait)
            self._beat()
            self._store.set(self._key("verdict"), "")
            world.meet("watchdog")
        except RuntimeError as error:
            if not lost(error):
                raise
            raise UserError(
                f"another process ended before the first step ({plain(error)}): see what it says"
            ) from error
        self._before = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watchdog:
        if not self.world.alone:
            self._signal = signal.signal(signal.SIGTERM, self._asked)
        return self

    def _asked(self, number: int, frame: object) -> None:
        if not self.broken():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if self.world.alone:
            return
        signal.signal(signal.SIGTERM, self._signal)
        if error is None:
            self._leave()
            return
        shown = self.tell(error)
        if shown is not error:
            raise shown from error

    def tell(self, error: BaseException) -> BaseException:
        """Tell the peers why this rank ends, or find out why a collective broke; what is to be raised in its place.

        Called by __exit__, and before it by who has much to close first, while others wait. From here on this process
        has LINGER seconds left, in which the thread prints nothing.
        """
        if self.world.alone or self._shown is not None:
            return self._shown or error
        place = self._now().place()
        # If the thread has begun to print, this process ends here.
        self._ending.acquire()
        if lost(error):
            why = self._ask(lambda: self._search(error), SEARCH + GRACE) or plain(error)
            self._shown = UserError(f"{place}: {why}; {self._kept()}")
        else:
            self._ask(lambda: self._post(f"rank {self.world.rank} failed {place}: {plain(error)}"), GRACE)
            self._shown = error
        return self._shown

    def broken(self) -> bool:
        """Whether a peer is known to be gone, so that nothing can be done together any more; asks no one, so that a
        signal's handler may call it: torchrun sends SIGTERM to those whom a dead one leaves."""
        here = [] if self.world.alone else self._peers
        return bool(self._verdict) or not all(lives(one) for one in here)

    def _kept(self) -> str:
        return KEPT if self.saved() else NOTHING

    def _ask(self, question: Callable[[], str], seconds: float) -> str:
        """What the thread answers: it alone talks to the store."""
        self._question = question
        self._wake.set()
        self._known.wait(seconds)
        return self._verdict

    def _leave(self) -> None:
        self._leaving = True
        self._wake.set()
        self._thread.join(GRACE)

    # What follows runs in the thread.

    def _watch(self) -> None:
        while not self._verdict:
            self._wake.wait(self.interval)
            self._wake.clear()
            try:
                if self._leaving:
                    self._beat(left=True)
                    return
                self._verdict = self._question() if self._question else self._look()
            except RuntimeError as error:
                if not lost(error):
                    raise
                # The agent's process keeps it: without that nobody is told, and nobody is restarted.
                self._verdict = (
                    f"torchrun's store at {self._host}:{self._port} is gone or does not answer: has torchrun died?"
                )
        self._known.set()
        if self._ending.acquire(timeout=GRACE):
            say(f"rank {self.world.rank}: {self._now().place()}: {self._verdict}; {self._kept()}")
        else:
            time.sleep(LINGER)
        os._exit(STATUS)

    def _look(self) -> str:
        """What is wrong, if something is; a beat on the way."""
        now = time.monotonic()
        # A machine that sleeps, or Ctrl-Z, stops all of them: what counts is how long this thread has looked.
        passed, self._before = min(now - self._before, 2 * self.interval), now
        number = self._now().number
        self._still = self._still + passed if number == self._progress else 0.0
        self._progress = number
        self._beat()
        verdict, beat = self._read("verdict", self._watched)
        if verdict:
            return verdict.decode()
        beat = Beat(*json.loads(beat))
        while beat.left and self._watched != self.world.rank:
            self._watched, self._heard = (self._watched + 1) % self.world.size, -1
            beat = self._beats([self._watched])[self._watched]
        if self._watched == self.world.rank:
            return ""
        self._quiet = self._quiet + passed if beat.count == self._heard else 0.0
        self._heard = beat.count
        gone = self._gone([self._watched])
        if gone:
            return self._post(gone)
        if self._quiet > self.timeout:
            kill_stopped(self._peers[self._watched])
            return self._post(self._silent(self._watched, beat, self._quiet))
        # Later than the silence of who is stopped, which is more to say, and ends it.
        if self._still > self.timeout + 2 * self.interval:
            # Not again at each look: all beats are many.
            self._still *= 0.9
            behind = self._behind() or self._held_up()
            if behind:
                return self._post(behind)
        return ""

    def _search(self, error: BaseException) -> str:
        """Why a collective broke."""
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        began, first = time.monotonic(), self._beats(others)
        while True:
            self._beat()
            (verdict,) = self._read("verdict")
            if verdict:
                return verdict.decode()
            gone = self._gone(others)
            if gone:
                return self._post(gone)
            passed, beats = time.monotonic() - began, self._beats(others)
            silent = [one for one in others if beats[one].count == first[one].count and not beats[one].left]
            if silent and passed > (MISSED + 0.5) * self.interval:
                kill_stopped(self._peers[silent[0]])
                return self._post(self._silent(silent[0], beats[silent[0]], passed))
            if passed > SEARCH - 1:
                break
            time.sleep(self.interval / 5)
        left = [f"rank {rank} has ended its part" for rank, beat in beats.items() if beat.left]
        return self._post(self._behind() or next(iter(left), f"no rank is known to be dead ({plain(error)})"))

    def _gone(self, ranks: Iterable[int]) -> str:
        """Which of them died without a word, if one did."""
        dead = [rank for rank in ranks if not lives(self._peers[rank])]
        # Read after its end: its last word is there.
        for rank, beat in self._beats(dead).items():
            if not beat.left:
                return f"rank {rank} ({self._peers[rank]}) died, last seen {beat.place()}"
        return ""

    def _silent(self, rank: int, beat: Beat, seconds: float) -> str:
        return (
            f"rank {rank} ({self._peers[rank]}) has given no sign of life for {seconds:.0f} s, last seen {beat.place()}"
        )

    def _behind(self) -> str:
        """Who has not come to what this rank has entered, the one furthest behind."""
        mine = self._now()
        beats = self._beats(rank for rank in range(self.world.size) if rank != self.world.rank)
        rank, beat = min(beats.items(), key=lambda one: (one[1].left, one[1].number))
        if beat.left or beat.number >= mine.number:
            return ""
        entered = self.world.entered.copy()
        name = next((f"'{one}'" for number, one in entered if number > beat.number), "the next collective")
        return (
            f"rank {rank} ({self._peers[rank]}) has not come to {name} of step {mine.step} in {self.timeout:.0f} s, "
            f"last seen {beat.place()} (--timeout allows more)"
        )

    def _held_up(self) -> str:
        """Who waits for what, if nobody is behind and all are held up: by different collectives, or by a network."""
        beats = self._beats(range(self.world.size)) | {self.world.rank: self._now()}
        if not all(beat.name and not beat.left for beat in beats.values()):
            return ""
        places = {}
        for rank, beat in sorted(beats.items()):
            places.setdefault(beat.place(), []).append(str(rank))
        waits = ", ".join(f"rank {' and '.join(ranks[:4])} {place}" for place, ranks in places.items())
        return f"nobody has come further for {self.timeout:.0f} s: {waits} (--timeout allows more)"

    def _now(self) -> Beat:
        at = self.world.at()
        return Beat(self._count, at.step, at.name, at.number)

    def _beat(self, left: bool = False) -> None:
        self._count += 1
        self._store.set(self._key(self.world.rank), json.dumps(self._now()._replace(left=left)))

    def _beats(self, ranks: Iterable[int]) -> dict[int, Beat]:
        ranks = list(ranks)
        texts = self._read(*ranks) if ranks else []
        return {rank: Beat(*json.loads(text)) for rank, text in zip(ranks, texts)}

    def _read(self, *names: str | int) -> list[bytes]:
        return self._store.multi_get([self._key(name) for name in names])

    def _post(self, text: str) -> str:
        """Tell all why they end; the first reason stands."""
        return self._store.compare_set(self._key("verdict"), "", text).decode()

    def _key(self, name: str | int) -> str:
        return f"{self._prefix}/{name}"


def lost(error: BaseException) -> bool:
    """Whether an error is a collective (or the store) that broke or took too long, and not a fault of the program."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        isinstance(error, distributed.DistError) or "gloo" in text or "NCCL" in text
    )


def plain(error: BaseException) -> str:
    """An error in one line; of a broken collective the first sentence, without the place in torch's sources."""
    text = " ".join(str(error).encode("ascii", "ignore").decode().split())
    if not lost(error):
        return f"{type(error).__name__}: {text}" if text and not isinstance(error, UserError) else text or repr(error)
    text = text.partition("] ")[2] if text.startswith("[") else text
    return text.partition(". ")[0][:200]


def this_process() -> Process:
    """Where this process can be found."""
    return Process(_here(), socket.gethostname(), os.getpid(), _state(os.getpid())[1])


def lives(process: Process) -> bool:
    """False only if a process is known to be gone: it ran on this machine, and does no more."""
    if not process.machine or process.machine != _here():
        return True
    state, born = _state(process.pid)
    return state not in "ZX" and born == process.born


def kill_stopped(process: Process) -> None:
    """End a process of this machine that gives no sign of life: a stopped one would not notice that all is over."""
    if process.machine and process.machine == _here() and lives(process):
        os.kill(process.pid, signal.SIGKILL)


def say(text: str) -> None:
    """A line on stderr, past every lock, for a process that ends now; a bar goes, and the cursor comes back."""
    clear = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""
    os.write(2, f"{clear}{Path(sys.argv[0]).name}: {text}\n".encode("ascii", "replace"))


@functools.cache
def _here() -> str:
    """This machine: a process number means the same process on one boot, within one name space. Else empty."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _state(pid: int) -> tuple[str, str]:
    """The state of a process and when it began (numbers are given again); of none, and where nobody tells: empty."""
    try:
        # The name, in brackets, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
