"""Work done ahead: what later cycles need is made ready in a background thread while earlier ones train.

Lives here: Prefetcher, which knows nothing of rows.
Not here: which cycles are asked for (mome/cycle.py), reading rows and mending what was pushed meanwhile (rows.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Prefetcher(Generic[Item, Result]):
    """Results of `work`, in the order of the items; at most depth + 1 items are submitted and not yet taken.

    depth 0: `work` runs in the caller, when its result is taken, and there is no thread. Else it runs in one thread of
    its own, one item after the other, in which torch and the kernels, which follow its setting, use no more threads.
    It must have no effect, so that the depth changes nothing but the time.
    """

    def __init__(self, work: Callable[[Item], Result], depth: int) -> None:
        if depth < 0:
            raise ValueError(f"a prefetch of depth {depth}: give 0 or more")
        self.depth = depth
        self._work = work
        self._waiting: deque[Callable[[], Result]] = deque()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def pending(self) -> int:
        """Items submitted and not yet taken."""
        return len(self._waiting)

    def submit(self, item: Item) -> None:
        """Ask for the result of one more item. Never waits. Raises ValueError when depth + 1 of them are pending."""
        if self.pending > self.depth:
            raise ValueError(f"{self.pending} items are pending and the depth is {self.depth}: take one first")
        self._waiting.append(self._submit(item).result if self.depth else lambda: self._work(item))

    def take(self) -> Result:
        """The result of the oldest pending item, waited for. Raises what `work` raised for it, and that only here.

        Raises ValueError when none is pending.
        """
        if not self._waiting:
            raise ValueError("nothing is pending: submit an item first")
        return self._waiting.popleft()()

    def close(self) -> None:
        """Drop what is pending and end the thread, once the item that it works on is done. May be called again."""
        self._waiting.clear()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def _submit(self, item: Item) -> Future[Result]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
            # A thread's setting is its own, but torch takes it for that of all later threads too: put it back.
            threads = torch.get_num_threads()
            self._thread.submit(_work_alone).result()
            torch.set_num_threads(threads)
        return self._thread.submit(self._work, item)


def _work_alone() -> None:
    """Let torch use no other thread for what this one asks of it."""
    # Where a thread has not asked yet, its first question takes over the setting of the others.
    torch.get_num_threads()
    torch.set_num_threads(1)
