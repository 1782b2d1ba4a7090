"""Every store holds the bits it was given, begins as zeros, and takes no room for what was never touched.

Lives here: DeviceStore, HostStore (on the CPU) and MmapStore, mapped and not, against a plain tensor; their room.
Not here: what they refuse (test_store_faults.py), system calls (tests/kernels/test_file_rows.py), CUDA (tests/gpu/).
"""

from __future__ import annotations

import os
import resource
import threading
import time
import tracemalloc
from pathlib import Path

import pytest
import torch

from mome.table.store import DeviceStore, HostStore, MmapStore

KINDS = ["device", "huge", "host", "mapped", "file"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.int32, torch.float8_e4m3fn, torch.uint8]
TAILS = [(), (3,), (2, 5)]
MIB = 1 << 20


@pytest.fixture
def make(tmp_path):
    """make(kind, rows, tail, dtype, **more) -> a store; closed at the end."""
    made = []

    def build(kind, rows, tail, dtype, **more):
        if kind in ("device", "huge"):
            store = DeviceStore(rows, tail, dtype, huge=kind == "huge")
        elif kind == "host":
            store = HostStore(rows, tail, dtype, "cpu")
        else:
            bound = {} if kind == "mapped" else {"resident_bytes": 0}
            store = MmapStore(tmp_path / f"{len(made)}.rows", rows, tail, dtype, **(bound | more))
        made.append(store)
        return store

    yield build
    for store in made:
        store.close()


def noise(shape, dtype) -> torch.Tensor:
    """Random bits, NaN and all."""
    return torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def is_cached(store: MmapStore, row: int) -> bool:
    file = os.open(store.path, os.O_RDONLY)
    try:
        return os.preadv(file, [bytearray(1)], row * store.row_bytes, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    finally:
        os.close(file)


def forget(store: MmapStore) -> None:
    """Drop the file from the system's cache, or skip where there is no disk under it."""
    store.release(cache=False)
    if is_cached(store, 0):
        pytest.skip("the file system keeps its files in memory")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_sequence_of_reads_and_writes_gives_the_bits_of_a_tensor(kind, dtype, make, poison_empty):
    for tail in TAILS:
        rows = 41
        store, plain = make(kind, rows, tail, dtype), torch.zeros(rows, *tail, dtype=dtype)
        assert (store.nbytes, store.rows, store.tail, store.dtype) == (plain.nbytes, rows, tail, dtype)
        for count in (0, 1, 7, rows):
            ids = torch.randperm(rows)[:count]
            if count == 7:
                ids = ids.sort().values
            values = noise((count, *tail), dtype)
            assert store.write(ids, values) is None
            as_bytes = plain.view(rows, -1).view(torch.uint8)
            as_bytes[ids] = values.reshape(count, max(1, plain[0].numel())).view(torch.uint8)
            for wanted in (ids, torch.arange(rows), torch.randint(rows, (2 * rows,)), torch.tensor([rows - 1, 0])):
                expected = as_bytes[wanted].view(dtype).view(len(wanted), *tail)
                assert same_bits(store.read(wanted), expected)
                out = noise((len(wanted), *tail), dtype)
                assert store.read(wanted, out) is out and same_bits(out, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_is_zero_bytes_at_first_and_after_clear(kind, make):
    store, ids = make(kind, 1000, (4, 8), torch.bfloat16), torch.randperm(1000)[:400]
    for _ in range(2):
        assert not store.read(torch.arange(1000)).view(torch.int16).any()
        store.write(ids, noise((400, 4, 8), torch.bfloat16))
        assert store.read(ids).view(torch.int16).any()
        store.flush()
        store.clear()
    assert not store.read(torch.arange(1000)).view(torch.int16).any()


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_taken_from_any_strides_and_from_a_leaf(kind, make):
    store, leaf = make(kind, 9, (4,), torch.float32), torch.randn(4, 5, requires_grad=True)
    store.write(torch.tensor([8, 0, 1, 2, 5])[::2], leaf.t()[:3])
    got = store.read(torch.tensor([8, 1, 5]))
    assert torch.equal(got, leaf.t()[:3]) and not got.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_is_a_copy(kind, make):
    store, ids = make(kind, 5, (3,), torch.float32), torch.arange(5)
    first = store.read(ids)
    store.write(ids, torch.ones(5, 3))
    assert not first.any()
    store.read(ids).zero_()
    assert store.read(ids).all()


def test_memory_is_the_rows_where_a_kernel_may_write_them(make):
    store = make("device", 6, (2, 3), torch.float32)
    assert store.memory.shape == (6, 2, 3)
    store.memory[4] = 7
    assert store.read(torch.tensor([4])).eq(7).all()
    before = store.memory
    store.clear()
    assert not before.any() and before.data_ptr() == store.memory.data_ptr()
    assert all(make(kind, 6, (2, 3), torch.float32).memory is None for kind in ("host", "mapped", "file"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_closes_at_the_end_of_with_and_twice(kind, make):
    with make(kind, 64, (1,), torch.float32) as store:
        store.write(torch.arange(64), torch.ones(64, 1))
    store.close()
    with pytest.raises(ValueError):
        store.read(torch.tensor([0]))


@pytest.mark.parametrize("kind", ["device", "host"])
def test_memory_goes_back_when_a_store_is_closed_or_cleared(kind, make):
    before = status("RssAnon")
    for end in ("clear", "close"):
        store = make(kind, 64, (MIB,), torch.uint8)
        store.write(torch.arange(64), torch.ones(1, MIB, dtype=torch.uint8).expand(64, -1).contiguous())
        getattr(store, end)()
        assert status("RssAnon") < before + 16 * MIB, end


def test_a_store_past_two_to_the_31_numbers_reads_what_it_wrote_and_takes_what_was_touched(make):
    """One byte a number and pages that are never touched: 2 GiB of addresses, a few pages of memory."""
    rows = (1 << 31) // 64 + 3
    ids = torch.tensor([5, rows // 2, rows - 4, rows - 3, rows - 1])
    values = torch.arange(5 * 64).view(5, 64).to(torch.uint8)
    before = status("RssAnon")
    store = make("device", rows, (64,), torch.uint8)
    store.write(ids, values)
    assert torch.equal(store.read(ids.flip(0)), values.flip(0))
    assert store.memory.flatten()[(rows - 1) * 64 + 9] == values[4, 9]
    # Three neighbourhoods were touched: pages of 2 MiB would be 6 MiB.
    assert status("RssAnon") - before < 2 * MIB


def test_huge_pages_are_asked_for_and_only_then(make):
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not path.exists() or "[never]" in path.read_text():
        pytest.skip("this system has no huge pages")
    for kind in ("device", "huge"):
        store = make(kind, 16, (MIB,), torch.uint8)
        address, inside, flags = store.memory.data_ptr(), False, ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first = line.split()[0]
            if not first.endswith(":"):
                low, high = (int(x, 16) for x in first.split("-"))
                inside = low <= address < high
            elif inside and first == "VmFlags:":
                flags = line
        assert ("hg" in flags.split(), "nh" in flags.split()) == (kind == "huge", kind != "huge")


@pytest.mark.parametrize("kind", ["mapped", "file"])
def test_a_file_is_there_again_with_every_bit(kind, tmp_path):
    bound, ids = (1 << 30 if kind == "mapped" else 0), torch.tensor([0, 5, 99])
    values = noise((3, 2, 7), torch.float8_e4m3fn)
    with MmapStore(tmp_path / "new/folder/t", 100, (2, 7), torch.float8_e4m3fn, resident_bytes=bound) as store:
        store.write(ids, values)
        store.flush()
    with MmapStore(str(tmp_path / "new/folder/t"), 100, [2, 7], torch.float8_e4m3fn) as store:
        assert same_bits(store.read(ids), values) and not store.read(torch.arange(6, 99)).view(torch.uint8).any()
    assert sorted(path.name for path in (tmp_path / "new/folder").iterdir()) == ["t", "t.json"]


def test_mapped_or_not_is_one_file(tmp_path):
    path, ids = tmp_path / "t", torch.randperm(300)
    values = torch.randn(300, 33)
    with MmapStore(path, 300, (33,), torch.float32, resident_bytes=0) as store:
        store.write(ids, values)
    with MmapStore(path, 300, (33,), torch.float32) as store:
        assert torch.equal(store.read(ids), values)
        store.write(ids[:9], values[9:18])
        assert torch.equal(store.read(ids[:9]), values[9:18])
    with MmapStore(path, 300, (33,), torch.float32, resident_bytes=300 * 33 * 4 - 1) as store:
        assert torch.equal(store.read(ids[:9]), values[9:18]) and torch.equal(store.read(ids[9:]), values[9:])


def test_thirteen_terabytes_open_at_once_and_take_what_was_written(tmp_path):
    rows, path = 1 << 33, tmp_path / "t"
    started = time.perf_counter()
    try:
        store = MmapStore(path, rows, (768,), torch.bfloat16)
    except OSError as error:
        assert "13,194,139,533,312 bytes" in str(error)
        pytest.skip(f"this file system takes no such file: {error.strerror}")
    with store:
        assert time.perf_counter() - started < 5 and store.nbytes == 13_194_139_533_312
        assert store.allocated_bytes < MIB
        ids = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, 1 << 32, rows - 2, rows - 1])
        values = torch.randn(len(ids), 768).bfloat16()
        store.write(ids, values)
        assert torch.equal(store.read(ids), values)
        assert not store.read(torch.tensor([2, rows // 2 + 7, rows - 3])).any()
        store.flush()
        assert store.allocated_bytes < MIB
        store.clear()
        store.flush()
        assert not store.read(ids).any() and store.allocated_bytes < MIB


def test_reads_leave_no_more_of_a_file_resident_than_was_allowed(tmp_path):
    """Every row of 256 MiB, in a random order. Where the file may be resident it is: so that the check can fail."""
    rows = 256 * MIB // 3072
    for bound, least, most in ((16 * MIB, 0, 16 * MIB), (256 * MIB, 200 * MIB, 260 * MIB)):
        with MmapStore(tmp_path / "t", rows, (768,), torch.float32, resident_bytes=bound) as store:
            for ids in torch.arange(rows).split(4096):
                store.write(ids, torch.full((len(ids), 768), 2.0))
            assert store.read(torch.tensor([0])).eq(2).all()
            before = peak = status("RssFile")
            for ids in torch.randperm(rows).split(4096):
                assert store.read(ids.sort().values).eq(2).all()
                peak = max(peak, status("RssFile"))
            assert least <= peak - before < most
            store.release()
            assert status("RssFile") - before < 16 * MIB


def test_without_a_cache_the_file_is_dropped_as_reads_and_writes_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("mome.table.mapped.LEAST_MOVED", 0)
    ids = torch.arange(256)
    for keep in (True, False):
        with MmapStore(
            tmp_path / f"{keep}", 256, (4096,), torch.uint8, resident_bytes=1 << 18, keep_cached=keep
        ) as store:
            store.write(ids, noise((256, 4096), torch.uint8))
            forget(store)
            store.read(ids[:32])
            assert is_cached(store, 0)
            store.read(ids[:64])
            assert is_cached(store, 0) == keep
            store.write(ids[:65], noise((65, 4096), torch.uint8))
            assert is_cached(store, 0) == keep


def test_a_cold_read_comes_from_the_disk(tmp_path):
    with MmapStore(tmp_path / "t", 512, (4096,), torch.uint8, resident_bytes=0) as store:
        values = noise((512, 4096), torch.uint8)
        store.write(torch.arange(512), values)
        forget(store)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
        ids = torch.randperm(512)[:300]
        assert torch.equal(store.read(ids), values[ids])
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) * 512 >= 300 * 4096


@pytest.mark.parametrize("kind", KINDS)
def test_reading_into_a_buffer_makes_no_rows(kind, make):
    store, ids = make(kind, 4096, (256,), torch.float32), torch.arange(0, 4096, 2)
    out = torch.empty(2048, 256)
    store.write(ids, out.fill_(1))
    store.read(ids, out)

    def again():
        for _ in range(3):
            store.read(ids, out)
            store.write(ids, out)

    tracemalloc.start()
    again()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        again()
    made = [event.self_cpu_memory_usage for event in profile.events()]
    assert max(peak, *made, 0) < out.nbytes // 4


@pytest.mark.parametrize("kind", KINDS)
def test_reads_beside_a_write_see_old_numbers_or_new_ones(kind, make):
    store, ids = make(kind, 512, (200,), torch.int32), torch.arange(512)
    wrong, over = [], threading.Event()

    def look():
        while not over.is_set():
            got = store.read(ids)
            if not bool(((got >= 0) & (got <= 60)).all()):
                wrong.append(got)

    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(1, 61):
        store.write(ids, torch.full((512, 200), number, dtype=torch.int32))
        if kind in ("mapped", "file") and number % 10 == 0:
            store.release(cache=number % 20 == 0)
    over.set()
    for reader in readers:
        reader.join()
    assert not wrong and store.read(ids).eq(60).all()
