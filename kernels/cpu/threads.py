"""Work on a range of rows, shared out to threads.

Lives here: `run` (equal shares), `run_shares` (shares of given bounds), and the threads behind them.
Not here: kernels; what is summed within one share, and so the bits of a result.

Replaces numba's parallel=True, whose workqueue layer aborts the process when two threads enter parallel regions at
once. Why faster: handing out shares costs tens of microseconds; who is free takes the next share, so that a thread that
wakes late holds nobody up. Invariants: a kernel's result for a row does not depend on the share it is in, so the number
of threads changes no bit; a call returns when no thread works on its arrays any more; any thread may call at any time.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

import torch

# Rows that a share should have at least, when the caller knows no better.
LEAST = 1024
# Shares for each thread.
SPLIT = 4


def thread_count(threads: int | None = None) -> int:
    """How many threads a call uses: `threads`, or as many as torch is set to in this thread."""
    return torch.get_num_threads() if threads is None else threads


def share_count(count: int, threads: int | None = None, least: int = LEAST) -> int:
    """Into how many shares `count` rows fall, none of them shorter than `least`; 1 for a single thread."""
    threads = thread_count(threads)
    return max(1, min(SPLIT * threads, count // max(1, least))) if threads > 1 else 1


def run(kernel: Callable, count: int, *args: object, threads: int | None = None, least: int = LEAST) -> list:
    """kernel(begin, end, *args) for shares that cover range(count); what each share returned, in order.

    threads: at most so many; None: as torch is set. least: rows below which a share is not worth handing out, fewer for
    long rows. Waits for all shares, then raises what the first faulty one raised.
    """
    shares = share_count(count, threads, least)
    if shares == 1:
        return [kernel(0, count, *args)]
    return run_shares(kernel, [count * share // shares for share in range(shares + 1)], *args, threads=threads)


def run_shares(kernel: Callable, bounds: Sequence[int], *args: object, threads: int | None = None) -> list:
    """kernel(begin, end, *args) for each pair of neighbours in bounds, like `run`."""
    helpers = min(thread_count(threads), len(bounds) - 1) - 1
    if helpers < 1:
        return [kernel(begin, end, *args) for begin, end in itertools.pairwise(bounds)]
    job = _Job(kernel, bounds, args)
    _crew.help(job, helpers)
    return job.finish()


class _Job:
    """The shares of one call, of which each thread takes the next one that is free."""

    def __init__(self, kernel: Callable, bounds: Sequence[int], args: tuple) -> None:
        self.kernel, self.bounds, self.args = kernel, bounds, args
        self.results: list = [None] * (len(bounds) - 1)
        self.fault: BaseException | None = None
        # Counting and the queue are atomic, and cheaper than a lock.
        self.next_share = itertools.count()
        self.done: SimpleQueue = SimpleQueue()

    def work(self) -> int:
        """Take shares until none is left; how many this thread took."""
        args = self.args
        for taken, share in enumerate(self.next_share):
            if share >= len(self.results):
                return taken
            try:
                self.results[share] = self.kernel(self.bounds[share], self.bounds[share + 1], *args)
            except BaseException as error:
                self.fault = self.fault or error
            self.done.put(share)
        raise AssertionError("a count has no end")

    def finish(self) -> list:
        self.work()
        for _ in self.results:
            self.done.get()
        # A helper that wakes later finds no share, and must not keep the arrays alive until then.
        self.args = ()
        if self.fault is not None:
            raise self.fault
        return self.results


class _Crew:
    """Helping threads, as many as any call so far asked for, which wait on one queue of jobs."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.members: list[int] = []
        self.lock = threading.Lock()
        self.avoided = -1

    def help(self, job: _Job, helpers: int) -> None:
        """Let so many threads join in."""
        if len(self.members) < helpers:
            self._hire(helpers)
        if _current_cpu is not None and self.avoided != (cpu := _current_cpu()):
            self._avoid(cpu)
        for _ in range(helpers):
            self.jobs.put(job)

    def _hire(self, helpers: int) -> None:
        with self.lock:
            while len(self.members) < helpers:
                member = threading.Thread(target=self._serve, name="kernels", daemon=True)
                member.start()
                self.members.append(member.native_id)
            self.avoided = -1

    def _serve(self) -> None:
        while True:
            self.jobs.get().work()

    def _avoid(self, cpu: int) -> None:
        """Keep the helpers off the caller's CPU.

        A scheduler that packs threads onto few CPUs, as virtual machines have it, wakes a helper where its waker runs:
        there it would wait until the caller has done all the work itself.
        """
        self.avoided = cpu
        # A set of CPUs that changed meanwhile, or a sandbox that forbids the call: then the scheduler decides.
        with suppress(OSError):
            if others := os.sched_getaffinity(0) - {cpu}:
                for member in self.members:
                    os.sched_setaffinity(member, others)


def start_over() -> None:
    """New helping threads from here on: a fork has none, and a thread keeps its creator's treatment of denormals."""
    global _crew
    _crew = _Crew()


_crew = _Crew()
# Holds the GIL, for it is shorter than handing that over.
_current_cpu = getattr(ctypes.PyDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=start_over)
