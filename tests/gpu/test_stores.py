"""Stores beside a CUDA device hold what those on the CPU hold, and their copies wait for what they must wait for.

Lives here: DeviceStore and HostStore on the device, marked gpu, run by tests/gpu/check.sh.
Not here: the same stores on the CPU (tests/mome/test_store.py).
"""

from __future__ import annotations

import threading

import pytest
import torch

from mome.table.store import DeviceStore, HostStore

DEVICE = "cuda"
NO_CUDA = "needs a CUDA device: run tests/gpu/check.sh on a machine that has one"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)]


@pytest.mark.parametrize("kind", [DeviceStore, HostStore])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8])
@pytest.mark.parametrize("tail", [(), (3,), (2, 5)])
def test_the_bits_are_those_of_a_store_on_the_cpu(kind, dtype, tail):
    with kind(500, tail, dtype, DEVICE) as store, DeviceStore(500, tail, dtype) as plain:
        for count in (0, 1, 90, 500, 17):
            ids, values = torch.randperm(500)[:count], torch.randint(100, (count, *tail)).to(dtype)
            plain.write(ids, values)
            store.write(ids.to(DEVICE) if count % 2 else ids, values.to(DEVICE))
            wanted = torch.randint(500, (count,))
            for some in (wanted, wanted.to(DEVICE)):
                out = torch.zeros(count, *tail, dtype=dtype, device=DEVICE)
                assert store.read(some, out) is out
                for got in (out, store.read(some)):
                    assert got.is_cuda and torch.equal(got.cpu(), plain.read(wanted))
        store.clear()
        assert not store.read(torch.arange(500)).any()


def test_a_host_store_is_pinned_and_counts_no_memory_of_the_device():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with HostStore(1 << 14, (1024,), torch.float32, DEVICE) as store:
        assert store._host.memory.is_pinned() and store.memory is None
        assert torch.cuda.memory_allocated() == before


def test_copies_are_ordered_against_what_the_device_does():
    """A write waits for values that are still being made; what uses a read waits for it; so does the next one."""
    size, ids = 1 << 12, torch.arange(1 << 12)
    with HostStore(size, (512,), torch.float32, DEVICE) as store:
        out = torch.empty(size, 512, device=DEVICE)
        for number in range(1, 9):
            torch.cuda._sleep(20_000_000)
            store.write(ids, torch.full((size, 512), float(number), device=DEVICE))
            sums = [store.read(ids).sum(), store.read(ids, out).sum()]
            out.fill_(-1)
            assert all(one.item() == number * size * 512 for one in sums)


def test_threads_read_at_once():
    ids, wrong = torch.arange(1000), []
    with HostStore(1000, (64,), torch.float32, DEVICE) as store:
        store.write(ids, torch.arange(1000.0, device=DEVICE)[:, None].expand(-1, 64).contiguous())

        def look(seed):
            some = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))
            for count in range(1, 1000, 37):
                if not torch.equal(store.read(some[:count])[:, 5].cpu(), some[:count].float()):
                    wrong.append(count)

        threads = [threading.Thread(target=look, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("kind", [DeviceStore, HostStore])
def test_a_size_that_does_not_fit_is_said(kind):
    with pytest.raises(ValueError, match="bytes does not fit"):
        kind(1 << 36, (1 << 12,), torch.float32, DEVICE)
