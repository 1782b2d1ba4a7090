"""Rows in a sparse file that may be larger than memory.

Lives here: MmapStore, what it refuses, and its errors in one line.
Not here: the other stores (store.py), the system calls (kernels/file_rows.py), and files that are only read: those of
checkpoints and exports (file.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.file_rows import read_file_rows, write_file_rows
from kernels.gather import gather_rows
from mome.errors import UserError
from mome.files import write_json
from mome.table.base import RowStore

FORMAT = 1
# Bytes read and written before a file is written back and dropped from the cache: each time the disk is waited for.
LEAST_MOVED = 64 << 20


class MmapStore(RowStore):
    """Rows in the sparse file `path`, made if it is not there, with its shape beside it in `path`.json.

    A row that was never written is a hole: zero bytes, no room on the disk. The file is locked while it is open. Rows
    are written by system calls, never through a map, so that a full disk is an OSError and not a signal that ends the
    process; they are read through a map of the file where it has at most resident_bytes and its file system lets
    holes be read for nothing, and else by system calls too.

    resident_bytes: of the file this process keeps so much mapped at most, and what it has mapped counts as its
    resident memory. A larger file is not mapped: a fault brings in up to 2 MiB around a row, so that a bound on what
    is resident would undo it row by row.
    keep_cached False: each time that as many bytes (64 MiB at least) were read and written, write the file back and
    drop it from the operating system's cache too, for tables beyond memory and for measuring reads from the disk.

    Raises UserError for a file that is truncated or too long, of another shape or dtype, open elsewhere, or without a
    sound description; OSError where the operating system refuses (a read-only file or folder, a size that the file
    system does not know); ValueError as RowStore. A mapped file that loses its end, or whose disk fails, while it is
    being read ends the process (SIGBUS); before and after, and where it is not mapped, that is an error.
    """

    def __init__(
        self, path: Path | str, rows: int, tail: Sequence[int], dtype: torch.dtype, *,
        resident_bytes: int = 1 << 30, keep_cached: bool = True,
    ) -> None:  # fmt: skip
        self._file: int | None = None
        super().__init__(rows, tail, dtype)
        if resident_bytes < 0:
            raise ValueError(f"resident_bytes {resident_bytes:,}: give 0 (nothing is mapped) or more")
        self.path = Path(path)
        self.resident_bytes, self.keep_cached = resident_bytes, keep_cached
        self._sidecar = self.path.with_name(self.path.name + ".json")
        self._pages: mmap.mmap | None = None
        self._moved = 0
        self._open()

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the rows take on the disk."""
        return os.fstat(self._whole()).st_blocks * 512

    def read(self, ids_U: Tensor, out: Tensor | None = None) -> Tensor:
        """As RowStore, to the CPU; ids may lie on any device. OSError where the disk fails."""
        ids_U = self._checked(ids_U)
        if out is None:
            out = torch.empty(len(ids_U), *self.tail, dtype=self.dtype)
        elif out.shape != (len(ids_U), *self.tail) or out.dtype != self.dtype:
            raise ValueError(self._unlike(ids_U, out))
        file = self._whole()
        if self._mapped is not None:
            gather_rows(self._mapped, ids_U, out)
        else:
            with self._named("not all rows could be read; look after the disk"):
                read_file_rows(file, ids_U, out)
        self._count(out.nbytes)
        return out

    def write(self, ids_U: Tensor, values: Tensor) -> None:
        """As RowStore, from any device. OSError where the disk is full or fails: some of the rows are written then."""
        ids_U = self._checked(ids_U)
        if values.shape != (len(ids_U), *self.tail) or values.dtype != self.dtype:
            raise ValueError(self._unlike(ids_U, values))
        file = self._whole()
        with self._named(f"of {values.nbytes:,} bytes not all are written; make room there, go back to a checkpoint"):
            write_file_rows(file, ids_U, values.detach().cpu().contiguous())
        self._count(values.nbytes)

    def flush(self) -> None:
        """Return once every row is on the disk. OSError where that fails."""
        file = self._whole()
        with self._named("not all rows are on the disk; make room there, go back to a checkpoint"):
            getattr(os, "fdatasync", os.fsync)(file)

    def clear(self) -> None:
        file = self._whole()
        os.ftruncate(file, 0)
        self._grow(file)
        self.release()

    def release(self, cache: bool = True) -> None:
        """Unmap what reads have mapped; with cache False also write the file back and drop it from the cache."""
        self._moved = 0
        if self._pages is not None and sys.platform == "linux":
            self._pages.madvise(mmap.MADV_DONTNEED)
        if not cache and hasattr(os, "posix_fadvise"):
            self.flush()
            os.posix_fadvise(self._whole(), 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Unlock and close the file. What was written is the operating system's to save: flush first against that."""
        file, self._file, self._mapped, self._pages = self._file, None, None, None
        if file is not None:
            # A map that a reader still holds, and forked children, keep the file open; they must not keep the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        new = not self.path.exists()
        if new and self._sidecar.exists():
            raise UserError(
                f"{self.path}: missing, though {self._sidecar.name} is there: bring it back, or delete both"
            )
        with self._named("a table that trains is written to; make it writable or choose another folder"):
            if new:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            elif not os.stat(self.path).st_mode & 0o222:
                # The operating system would not hold a superuser back.
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._file = os.open(self.path, os.O_RDWR | (os.O_CREAT if new else 0), 0o666)
        try:
            self._lock()
            # Another process may have made it in the meantime.
            if new and not self._sidecar.exists():
                self._make()
            self._check()
            self._mapped = self._map() if self.nbytes <= self.resident_bytes else None
            if self._mapped is not None and self._reading_takes_room():
                self._mapped = self._pages = None
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        """Keep others out for as long as the file is open."""
        with self._named("its file system has no locks; choose a local folder"):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"{self.path}: in use, by another process or this one; wait for it or stop it"
                ) from error

    def _make(self) -> None:
        try:
            with self._named("its shape cannot be written beside it; make room there or choose another folder"):
                write_json(self._sidecar, {"format": FORMAT, **self._shape()})
            self._grow(self._file)
        except BaseException:
            self.path.unlink(missing_ok=True)
            self._sidecar.unlink(missing_ok=True)
            raise

    def _grow(self, file: int) -> None:
        """Give an empty file its size, all of it a hole."""
        with self._named(f"no file of {self.nbytes:,} bytes can be there; take fewer rows or another file system"):
            os.ftruncate(file, self.nbytes)

    def _map(self) -> Tensor:
        with self._named(f"its {self.nbytes:,} bytes cannot be mapped; lower resident_bytes"):
            self._pages = mmap.mmap(self._file, self.nbytes)
        return torch.from_numpy(np.frombuffer(self._pages, np.uint8)).view(self.dtype).view(self.rows, *self.tail)

    def _reading_takes_room(self) -> bool:
        """Whether a hole that is read through the map takes room, as in tmpfs: on a full disk that would be SIGBUS."""
        if not hasattr(os, "SEEK_HOLE"):
            return True
        if os.statvfs(self.path).f_bavail == 0:
            return True
        hole = os.lseek(self._file, 0, os.SEEK_HOLE)
        before = os.fstat(self._file).st_blocks
        return hole < self.nbytes and self._pages[hole] == 0 and os.fstat(self._file).st_blocks > before

    def _shape(self) -> dict[str, object]:
        return {"rows": self.rows, "tail": list(self.tail), "dtype": str(self.dtype).removeprefix("torch.")}

    def _check(self) -> None:
        """Raise UserError unless the description is sound and says this store's shape, and the file has its size."""
        name = self._sidecar.name
        try:
            said = json.loads(self._sidecar.read_text())
            version, found = said["format"], {key: said[key] for key in self._shape()}
        except FileNotFoundError as error:
            raise UserError(f"{self.path}: {name} with its shape is missing: bring it back, {self._anew}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path}: {name} with its shape is damaged: bring it back, {self._anew}") from error
        if version != FORMAT:
            raise UserError(f"{self.path}: of format {version}, where {FORMAT} is known: use its version, {self._anew}")
        for key, mine in self._shape().items():
            if found[key] != mine:
                raise UserError(
                    f"{self.path}: its {key} is {found[key]}, here it is {mine}: take the configuration that made it, "
                    f"{self._anew}"
                )
        self._whole()

    @property
    def _anew(self) -> str:
        return f"or delete {self.path.name} and {self._sidecar.name} to begin anew"

    def _whole(self) -> int:
        """The open file. Raises UserError if its size is not its rows': to touch a map beyond its end is deadly."""
        if self._file is None:
            raise ValueError(f"{self.path}: this store is closed; open it again")
        size = os.fstat(self._file).st_size
        if size != self.nbytes:
            what = "truncated" if size < self.nbytes else "too long"
            raise UserError(
                f"{self.path}: {what}, {size:,} bytes where {self.described} take {self.nbytes:,}: bring back a copy, "
                f"{self._anew}"
            )
        return self._file

    def _checked(self, ids_U: Tensor) -> Tensor:
        ids_U = ids_U.cpu()
        if ids_U.numel():
            low, high = (int(x) for x in ids_U.aminmax())
            if low < 0 or high >= self.rows:
                raise ValueError(f"{self.path}: row id {low if low < 0 else high} is outside 0 to {self.rows - 1}")
        return ids_U

    def _unlike(self, ids_U: Tensor, given: Tensor) -> str:
        return f"{self.path}: {len(ids_U)} rows of {self.described} are not {list(given.shape)} {given.dtype}"

    def _count(self, nbytes: int) -> None:
        self._moved += nbytes
        if not self.keep_cached and self._moved > max(self.resident_bytes, LEAST_MOVED):
            self.release(cache=False)

    @contextlib.contextmanager
    def _named(self, remedy: str):
        """Within it an OSError says the file and what to do."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}: {remedy}", str(self.path)) from error
