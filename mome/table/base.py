"""What every store is: an array of rows of one dtype that begins as zero bytes.

Lives here: RowStore, the interface and its sizes; ZeroPages, memory that costs nothing until it is touched.
Not here: the stores themselves (store.py, mapped.py), and what the bytes of a row mean (formats.py).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class RowStore(ABC):
    """rows x tail numbers of one dtype, zero bytes at first, read and written by row id. Offsets are int64 throughout.

    Ids are int64 [U] and in range; `read` takes duplicates, `write` takes each id once. Sorted ids are the fastest:
    neighbours then share pages, and a file moves in fewer pieces. One thread writes; others may read
    meanwhile and see a row that is just being written as old, new or half of each, never anything else.
    Used as a context manager a store is closed at the end.
    """

    def __init__(self, rows: int, tail: Sequence[int], dtype: torch.dtype) -> None:
        """Raises ValueError for no rows, an empty row, and for more bytes than an int64 counts."""
        self.rows, self.tail, self.dtype = rows, tuple(tail), dtype
        if rows < 1 or min(self.tail, default=1) < 1:
            raise ValueError(f"a store of {self.described}: rows and every size of a row must be at least 1")
        self.row_bytes = math.prod(self.tail) * dtype.itemsize
        # Logical: what has not been touched takes no room.
        self.nbytes = rows * self.row_bytes
        if self.nbytes >= 1 << 63:
            raise ValueError(f"a store of {self.described}: {self.nbytes:,} bytes pass an int64: take fewer rows")

    @property
    def described(self) -> str:
        """Shape and dtype, for messages."""
        return f"{' x '.join(map(str, (self.rows, *self.tail)))} {str(self.dtype).removeprefix('torch.')}"

    @property
    def memory(self) -> Tensor | None:
        """The rows themselves, [rows, *tail], where a kernel may write into them; None where it may not."""
        return None

    @abstractmethod
    def read(self, ids_U: Tensor, out: Tensor | None = None) -> Tensor:
        """Copies of these rows: [U, *tail], into `out` (contiguous) if given."""

    @abstractmethod
    def write(self, ids_U: Tensor, values: Tensor) -> None:
        """Overwrite these rows with values [U, *tail] of the store's dtype."""

    def flush(self) -> None:
        """Return once what was written survives a power cut, where the store can promise that."""
        return

    @abstractmethod
    def clear(self) -> None:
        """Every row is zero bytes again and takes no room. No other thread may use the store meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """Give memory, files and locks back; no thread uses the store then or after. A second time does nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def huge_pages_suit(nbytes: int) -> bool:
    """Whether memory of so many bytes should ask for pages of 2 MiB: where all of it may become resident.

    That is a sixteenth of the machine's memory: what is touched sparsely then takes what it says, never more.
    """
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return False
    return nbytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16


class ZeroPages:
    """Bytes of host memory, all zero, of which only what is touched takes room: `bytes` is that tensor, uint8.

    huge: ask for pages of 2 MiB (Linux). Random rows come 1.2 to 1.5 times as fast, but every touched one of a table
    that is mostly untouched takes 2 MiB. Raises ValueError where the memory cannot be had.
    """

    def __init__(self, nbytes: int, huge: bool = False) -> None:
        # Not numpy.zeros, which asks for huge pages by itself.
        try:
            self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise ValueError(no_room(nbytes, "this machine's memory")) from error
        if sys.platform == "linux":
            # A kernel without huge pages refuses either advice, and small ones do as well.
            with contextlib.suppress(OSError):
                self._pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self.bytes = torch.from_numpy(np.frombuffer(self._pages, np.uint8))

    def clear(self) -> None:
        """Back to zero bytes that take no room."""
        if sys.platform == "linux":
            self._pages.madvise(mmap.MADV_DONTNEED)
        else:
            self.bytes.zero_()


def no_room(nbytes: int, place: str) -> str:
    """The line for a table that is too big for a place."""
    return f"a store of {nbytes:,} bytes does not fit into {place}: take fewer rows or a smaller format, or a file"
