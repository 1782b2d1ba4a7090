"""Where a table's rows lie: a device's memory, host memory beside a device, or a file.

Lives here: DeviceStore, HostStore; MmapStore by its name.
Not here: the file (mapped.py), what all stores have in common (base.py), what a raw row is worth now and who may write
it (rows.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.gather import gather_rows, scatter_rows_
from mome.table.base import RowStore, ZeroPages, no_room
from mome.table.mapped import MmapStore

__all__ = ["DeviceStore", "HostStore", "MmapStore"]


class DeviceStore(RowStore):
    """Rows in the memory of one device, which `memory` is. On the CPU they take no room until they are touched.

    huge (CPU alone): see ZeroPages. Raises ValueError for what the device cannot hold, and as RowStore.
    """

    def __init__(
        self, rows: int, tail: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", *,
        huge: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(rows, tail, dtype)
        self.device = torch.device(device)
        self._memory: Tensor | None = None
        self._pages: ZeroPages | None = None
        if self.device.type == "cpu":
            self._pages = ZeroPages(self.nbytes, huge)
            self._memory = self._pages.bytes.view(dtype).view(rows, *self.tail)
            return
        if huge:
            raise ValueError(f"huge pages for a store on {self.device}: they are the host's alone")
        try:
            self._memory = torch.zeros(rows, *self.tail, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise ValueError(no_room(self.nbytes, f"the memory of {self.device}")) from error

    @property
    def memory(self) -> Tensor:
        if self._memory is None:
            raise ValueError(f"this store of {self.described} is closed; make another")
        return self._memory

    def read(self, ids_U: Tensor, out: Tensor | None = None) -> Tensor:
        return gather_rows(self.memory, ids_U.to(self.device), out)

    def write(self, ids_U: Tensor, values: Tensor) -> None:
        scatter_rows_(self.memory, ids_U.to(self.device), values.detach().contiguous())

    def clear(self) -> None:
        if self._pages:
            self._pages.clear()
        else:
            self.memory.zero_()

    def close(self) -> None:
        # Tensors that others made of it keep the memory; nothing else does.
        self._memory = self._pages = None


class HostStore(RowStore):
    """Rows in host memory; what is read lies on `device`, and what is written comes from there.

    With a CUDA device the rows are pinned, hence resident from the start, and copies go over a side stream through a
    pinned buffer that each thread reuses: a read waits for nothing that the device is doing, and what the device is
    given later waits for the copy. On the CPU it is plain memory. huge: see ZeroPages. Raises ValueError for what the
    host cannot hold or pin, and as RowStore.
    """

    def __init__(
        self, rows: int, tail: Sequence[int], dtype: torch.dtype, device: torch.device | str, *, huge: bool = False
    ) -> None:
        super().__init__(rows, tail, dtype)
        self.device = torch.device(device)
        self._host = DeviceStore(rows, tail, dtype, huge=huge)
        self._staging = None
        if self.device.type == "cuda":
            _pin(self._host.memory)
            self._unpin = weakref.finalize(self, _unpin, self._host.memory)
            self._staging = _Staging(self.device, self.tail, dtype)

    def read(self, ids_U: Tensor, out: Tensor | None = None) -> Tensor:
        ids_U = ids_U.cpu()
        if self._staging is None:
            return self._host.read(ids_U, out)
        return self._staging.to_device(self._host.read(ids_U, self._staging.buffer(len(ids_U))), out)

    def write(self, ids_U: Tensor, values: Tensor) -> None:
        if self._staging is not None and values.is_cuda:
            values = self._staging.to_host(values)
        self._host.write(ids_U.cpu(), values)

    def clear(self) -> None:
        if self._staging is None:
            self._host.clear()
        else:
            # The driver holds on to the pages of pinned memory: they cannot be given back.
            self._host.memory.view(torch.uint8).zero_()

    def close(self) -> None:
        if self._staging is not None:
            self._unpin()
        self._host.close()


class _Staging:
    """Copies between the host and a CUDA device on a stream of their own, through a pinned buffer a thread."""

    def __init__(self, device: torch.device, tail: tuple[int, ...], dtype: torch.dtype) -> None:
        self.device, self.tail, self.dtype = device, tail, dtype
        self._stream = torch.cuda.Stream(device)
        self._local = threading.local()

    def buffer(self, count: int) -> Tensor:
        """This thread's buffer, [count, *tail], once the last copy from or into it is over."""
        mine = self._local
        if hasattr(mine, "done"):
            mine.done.synchronize()
        else:
            mine.done, mine.rows = torch.cuda.Event(), None
        if mine.rows is None or len(mine.rows) < count:
            # A quarter more than was asked for: counts of rows differ a little from step to step.
            mine.rows = torch.empty(count + count // 4, *self.tail, dtype=self.dtype, pin_memory=True)
        return mine.rows[:count]

    def to_device(self, rows: Tensor, out: Tensor | None) -> Tensor:
        """Rows of this thread's buffer on the device, for the current stream."""
        current = torch.cuda.current_stream(self.device)
        if out is not None:
            # What the current stream still does with `out` comes first.
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if out is None:
                out = torch.empty(rows.shape, dtype=self.dtype, device=self.device)
                out.record_stream(current)
            out.copy_(rows, non_blocking=True)
            self._local.done.record(self._stream)
        current.wait_event(self._local.done)
        return out

    def to_host(self, values: Tensor) -> Tensor:
        """These values of the current stream in this thread's buffer."""
        rows = self.buffer(len(values))
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            rows.copy_(values, non_blocking=True)
            self._local.done.record(self._stream)
        self._local.done.synchronize()
        return rows


def _pin(memory: Tensor) -> None:
    # Not torch's own pinned tensors: their allocator rounds a size up to a power of two.
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        raise ValueError(no_room(memory.nbytes, f"memory that CUDA can pin (CUDA error {status})"))


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
