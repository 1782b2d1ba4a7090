"""Rows of a file by id, read and written by system calls: the oracles, and reads that fetch what is not cached at once.

Lives here: read_file_rows and write_file_rows, each below its oracle.
Not here: the loops (kernels/cpu/file_rows.py); which file, its locks and what an error means to a user (mome/table/).

Replaces a map of the file, where the file is larger than what may stay mapped. Why faster: a fault costs more than a
copy by the kernel, and where rows are not cached the disk is given all of them instead of one after the other.
Invariants: nothing of the file stays in the process, whereas a fault maps up to 2 MiB around a row; a full or broken
disk is an OSError, not a signal that ends the process; a call comes back with every row whole, or raises.
"""

from __future__ import annotations

import errno
import os

import torch
from torch import Tensor

from kernels import backend

# Bytes that a thread should have to read at least, and what the system call for a row costs beyond its bytes.
SHARE = 1 << 18
CALL = 2048


def read_file_rows_reference(file: int, ids_N: Tensor, out: Tensor) -> None:
    """out[i] = the row ids[i] of the file, a system call each. The oracle."""
    data, length = _bytes(out)
    for i, row in enumerate(ids_N.tolist()):
        part, offset = data[i * length : (i + 1) * length], row * length
        while part:
            done = os.preadv(file, [part], offset)
            if not done:
                raise OSError(errno.EIO, f"the file ends before the end of row {row}")
            part, offset = part[done:], offset + done


@torch.no_grad()
def read_file_rows(file: int, ids_N: Tensor, out: Tensor) -> None:
    """Fill `out` [N, *tail] with the rows of an open file that ids (int64 [N], any order, repeats allowed) name.

    A row has the bytes of out[0] and row i begins at i times as many. `out` is contiguous and, like ids, on the CPU.
    Raises OSError where the file ends before a row does, or cannot be read, and ValueError for what does not fit.
    """
    _check(ids_N, out, "read_file_rows")
    if out.numel() and not _fast("read", file, ids_N, out):
        read_file_rows_reference(file, ids_N, out)


def write_file_rows_reference(file: int, ids_U: Tensor, values: Tensor) -> None:
    """Row ids[i] of the file = values[i], a system call each. The oracle."""
    data, length = _bytes(values)
    for i, row in enumerate(ids_U.tolist()):
        part, offset = data[i * length : (i + 1) * length], row * length
        while part:
            done = os.pwrite(file, part, offset)
            part, offset = part[done:], offset + done


@torch.no_grad()
def write_file_rows(file: int, ids_U: Tensor, values: Tensor) -> None:
    """Write values [U, *tail] to the rows of an open file that ids (int64 [U], each once) name.

    As read_file_rows; the file grows where a row lies beyond its end. Raises OSError where the disk is full or refuses:
    some of the rows are written then.
    """
    _check(ids_U, values, "write_file_rows")
    if values.numel() and not _fast("write", file, ids_U, values):
        write_file_rows_reference(file, ids_U, values)


def _check(ids_N: Tensor, rows: Tensor, op: str) -> None:
    if ids_N.ndim != 1 or ids_N.dtype != torch.int64 or rows.ndim < 1 or len(rows) != len(ids_N):
        what = f"ids {list(ids_N.shape)} {ids_N.dtype} and rows {list(rows.shape)}"
        raise ValueError(f"{op} with {what}: give a list of int64 and as many rows")
    if ids_N.device.type != "cpu" or rows.device.type != "cpu" or not rows.is_contiguous():
        raise ValueError(f"{op} with rows on {rows.device}: give contiguous ones, and ids, on the CPU")


def _bytes(rows: Tensor) -> tuple[memoryview, int]:
    """All bytes of contiguous rows, and those of one."""
    data = memoryview(rows.detach().reshape(-1).view(torch.uint8).numpy())
    return data, len(data) // max(1, len(rows))


def _fast(way: str, file: int, ids_N: Tensor, rows: Tensor) -> bool:
    """Whether the kernel did all of it; if not, the plain calls do it again and meet the error."""
    return backend("file_rows", "cpu", _self_check) == "numba" and _kernel(way, file, ids_N, rows)


def _kernel(way: str, file: int, ids_N: Tensor, rows: Tensor) -> bool:
    from kernels.cpu import file_rows as cpu
    from kernels.cpu import threads

    length = rows.nbytes // len(rows)
    # Writes to one file wait for each other; one thread writes them in order.
    most = 1 if way == "write" else None
    arrays = ids_N.contiguous().numpy(), rows.detach().view(len(rows), -1).view(torch.uint8).numpy()
    return all(threads.run(getattr(cpu, way), len(rows), file, *arrays, threads=most, least=SHARE // (length + CALL)))


def _self_check() -> bool:
    from kernels.cpu import file_rows as cpu

    cpu.require_calls()
    values_UB, ids_U = torch.arange(12, dtype=torch.uint8).view(4, 3), torch.tensor([5, 6, 2, 0])
    out_NB = torch.zeros(3, 3, dtype=torch.uint8)
    file = os.memfd_create("file_rows")
    try:
        done = _kernel("write", file, ids_U, values_UB) and _kernel("read", file, ids_U[[1, 3, 1]], out_NB)
        beyond = _kernel("read", file, torch.tensor([0, 6, 7]), out_NB.clone())
        return done and not beyond and torch.equal(out_NB, values_UB[[1, 3, 1]])
    finally:
        os.close(file)
