"""Rows of a file by id, without the interpreter between two system calls.

Lives here: the loops of reads and writes, and the C functions that they call.
Not here: the oracles, checks and errors (kernels/file_rows.py).

Replaces os.preadv and os.pwrite in a loop. Why faster: no Python objects for each row and no wait for the interpreter's
lock, which another thread may hold for milliseconds; rows that are not cached are on their way from the disk before the
first of them is waited for. Invariants: a share is True when all of its rows went through whole, and stops at the first
that did not. Oracle: kernels/file_rows.py.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
from numba import types

from kernels.cpu import jit

# Bytes of neighbours that move at once. The system caches a file in blocks as large as it was written in, and a row
# that later goes into a block of 1 or 8 MiB costs two or three times as much as into one of this size (ext4).
_PIECE = 1 << 16

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_WILLNEED = getattr(os, "POSIX_FADV_WILLNEED", 0)

_pread = types.ExternalFunction("pread", types.intp(types.intc, types.uintp, types.uintp, types.int64))
_preadv2 = types.ExternalFunction("preadv2", types.intp(types.intc, types.uintp, types.intc, types.int64, types.intc))
_pwrite = types.ExternalFunction("pwrite", types.intp(types.intc, types.uintp, types.uintp, types.int64))
_fadvise = types.ExternalFunction("posix_fadvise", types.intc(types.intc, types.int64, types.int64, types.intc))


def require_calls() -> None:
    """Raise AttributeError or OSError where the C library lacks what the loops call: compiled, they would abort."""
    library = ctypes.CDLL(None)
    for name in ("pread", "preadv2", "pwrite", "posix_fadvise"):
        getattr(library, name)
    if not _NOWAIT or ctypes.sizeof(ctypes.c_long) < 8:
        raise OSError("no reads that do not wait, or file offsets of 32 bits")


@jit
def _after(ids_N, first, end, length):
    """Where the ids that follow ids[first] one by one end, after a piece at the latest."""
    last = min(end, first + max(1, _PIECE // length))
    i = first + 1
    while i < last and ids_N[i] == ids_N[i - 1] + 1:
        i += 1
    return i


@jit
def read(begin, end, file, ids_N, out_NB):
    """out[i] = row ids[i] of the file."""
    length = out_NB.shape[1]
    late, waiting = np.empty(end - begin, np.int64), 0
    # struct iovec: address, bytes.
    piece = np.empty(2, np.uint64)
    i = begin
    while i < end:
        first, i = i, _after(ids_N, i, end, length)
        offset, size = ids_N[first] * length, (i - first) * length
        piece[0] = out_NB.ctypes.data + np.uint64(first * length)
        piece[1] = size
        if _preadv2(file, piece.ctypes.data, 1, offset, _NOWAIT) != size:
            _fadvise(file, offset, size, _WILLNEED)
            late[waiting] = first
            waiting += 1
    for first in late[:waiting]:
        size = (_after(ids_N, first, end, length) - first) * length
        if _pread(file, out_NB.ctypes.data + np.uint64(first * length), size, ids_N[first] * length) != size:
            return False
    return True


@jit
def write(begin, end, file, ids_U, values_UB):
    """Row ids[i] of the file = values[i]."""
    length = values_UB.shape[1]
    i = begin
    while i < end:
        first, i = i, _after(ids_U, i, end, length)
        size = (i - first) * length
        if _pwrite(file, values_UB.ctypes.data + np.uint64(first * length), size, ids_U[first] * length) != size:
            return False
    return True
