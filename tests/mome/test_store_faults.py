"""What a store refuses, it refuses in one line that names the thing and the remedy, and nothing is harmed.

Lives here: sizes beyond everything, files that are not what they should be, locks, disks that are full or fail.
Not here: what stores do when all is well (test_store.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from data.command import error_line
from mome.errors import UserError
from mome.table.store import DeviceStore, HostStore, MmapStore

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = {"mapped": 1 << 30, "file": 0}
SHAPE = {"rows": 100, "tail": (4, 8), "dtype": torch.bfloat16}
NBYTES = 100 * 4 * 8 * 2


@contextlib.contextmanager
def refused(kind: type[BaseException], *words: str):
    """The block raises this, and the user is shown one line that has these words."""
    with pytest.raises(kind) as caught:
        yield
    line = error_line(caught.value)
    assert "\n" not in line and len(line) < 500
    for word in words:
        assert word in line, line


def opened(path: Path, **changed) -> MmapStore:
    return MmapStore(path, **(SHAPE | changed))


@pytest.fixture
def path(tmp_path):
    """A file store with ones in its row 7, closed."""
    with opened(tmp_path / "t.rows") as store:
        store.write(torch.tensor([7]), torch.ones(1, 4, 8, dtype=torch.bfloat16))
    return tmp_path / "t.rows"


@pytest.fixture(params=BOUNDS)
def store(request, path):
    with opened(path, resident_bytes=BOUNDS[request.param]) as store:
        yield store


@pytest.fixture
def whole(path):
    """After the test the store can be opened and holds what it held."""
    yield path
    with opened(path) as store:
        assert store.read(torch.tensor([7])).eq(1).all() and not store.read(torch.tensor([6, 8])).any()


def every(rows, tail, dtype, folder):
    yield lambda: DeviceStore(rows, tail, dtype)
    yield lambda: HostStore(rows, tail, dtype, "cpu")
    yield lambda: MmapStore(folder / "t", rows, tail, dtype)


@pytest.mark.parametrize(
    ("rows", "tail", "word"),
    [
        (1 << 61, (2,), "int64"),
        (1 << 40, (1 << 20, 4), "int64"),
        (0, (4,), "at least 1"),
        (-3, (), "at least 1"),
        (5, (4, 0), "at least 1"),
    ],
)
def test_sizes_that_are_none_and_sizes_past_an_int64(rows, tail, word, tmp_path):
    for make in every(rows, tail, torch.float32, tmp_path):
        with refused(ValueError, word, "x".join(f" {n} " for n in (rows, *tail)).strip()):
            make()
    assert not list(tmp_path.iterdir())


def test_a_size_that_memory_does_not_hold():
    for make in (DeviceStore, lambda *shape: HostStore(*shape, "cpu")):
        with refused(ValueError, f"{1 << 55:,} bytes", "fewer rows", "a file"):
            make(1 << 40, (1 << 13,), torch.float32)


def test_huge_pages_are_the_hosts():
    with refused(ValueError, "huge", "meta"):
        DeviceStore(3, (1,), torch.float32, "meta", huge=True)


def test_a_size_that_the_file_system_does_not_take(tmp_path):
    for made_before in (False, True):
        folder = tmp_path / "sub"
        assert folder.exists() == made_before
        with refused(OSError, "t:", f"{1 << 62:,} bytes", "fewer rows"):
            MmapStore(folder / "t", 1 << 50, (1 << 10,), torch.float32)
        assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (
            NBYTES - 1,
            ("truncated", f"{NBYTES - 1:,} bytes", f"{NBYTES:,}", "bring back", "delete t.rows and t.rows.json"),
        ),
        (0, ("truncated", "0 bytes")),
        (NBYTES + 4096, ("too long", "100 x 4 x 8 bfloat16")),
    ],
)
def test_a_file_of_another_size(size, words, path, store):
    """Closed, and under an open store, where a read of a map beyond the end would be a signal."""
    os.truncate(path, size)
    with refused(UserError, str(path), *words):
        store.read(torch.tensor([7]))
    with refused(UserError, str(path), *words):
        store.write(torch.tensor([7]), torch.ones(1, 4, 8, dtype=torch.bfloat16))
    store.close()
    with refused(UserError, str(path), *words):
        opened(path)
    assert path.stat().st_size == size


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rows": 50}, ("its rows is 100, here it is 50",)),
        ({"tail": (8, 4)}, ("its tail is [4, 8], here it is [8, 4]",)),
        ({"tail": (32,)}, ("its tail", "[32]")),
        ({"dtype": torch.float16}, ("its dtype is bfloat16", "float16")),
        ({"rows": 400, "tail": (4, 2)}, ("its rows is 100", "configuration")),
    ],
)
def test_a_file_of_another_shape(changed, words, whole):
    with refused(UserError, str(whole), "delete t.rows and t.rows.json to begin anew", *words):
        opened(whole, **changed)


def test_a_file_in_use(whole):
    """By another process, then by this one; free again when that closes, dies, or has a child that lives on."""
    script = f"""
import sys, torch
from mome.table.store import MmapStore
store = MmapStore(sys.argv[1], {SHAPE["rows"]}, {SHAPE["tail"]}, {SHAPE["dtype"]})
print("open", flush=True)
sys.stdin.read()
"""
    run = [sys.executable, "-c", script, str(whole)]
    with subprocess.Popen(run, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        with refused(UserError, str(whole), "in use", "wait for it or stop it"):
            opened(whole)
        other.kill()
    store = opened(whole)
    with refused(UserError, "in use"):
        opened(whole)
    held, child = store._mapped, os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        store.close()
        opened(whole).close()
        assert held[7].eq(1).all()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_store_that_nobody_holds_unlocks_its_file(whole):
    opened(whole)
    opened(whole).close()


def test_a_read_only_file(whole):
    whole.chmod(0o444)
    with refused(PermissionError, str(whole), "Permission denied", "make it writable"):
        opened(whole)
    whole.chmod(0o644)


@contextlib.contextmanager
def unprivileged():
    """As a user whom permissions bind: a superuser becomes nobody for a while."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder():
    # The folders of tmp_path are their owner's alone.
    folder = Path(tempfile.mkdtemp())
    try:
        for place in (folder / "t.rows", folder / "new/t.rows"):
            folder.chmod(0o555)
            with unprivileged(), refused(PermissionError, str(place), "Permission denied", "choose another folder"):
                opened(place)
        assert not list(folder.iterdir())
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_path_that_cannot_be_a_file(path, tmp_path):
    with refused(IsADirectoryError, str(tmp_path), "directory"):
        opened(tmp_path)
    with refused(OSError, str(path / "t"), "choose another folder"):
        opened(path / "t")


def test_a_file_without_its_description(whole):
    sidecar = whole.with_name("t.rows.json")
    text = sidecar.read_text()
    sidecar.unlink()
    with refused(UserError, str(whole), "t.rows.json", "missing", "bring it back, or delete t.rows"):
        opened(whole)
    assert not sidecar.exists()
    sidecar.write_text(text)


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "7", '"x"', "{}", '{"format": 1, "rows": 100, "tail": [4, 8]}', "\xff\xfe", "\x00" * 40],
)
def test_a_damaged_description(text, whole):
    sidecar = whole.with_name("t.rows.json")
    sound = sidecar.read_bytes()
    sidecar.write_bytes(text.encode("latin-1"))
    with refused(UserError, str(whole), "t.rows.json", "damaged", "bring it back, or delete t.rows"):
        opened(whole)
    assert sidecar.read_bytes() == text.encode("latin-1")
    sidecar.write_bytes(sound)


def test_a_description_of_another_version(whole):
    sidecar = whole.with_name("t.rows.json")
    sound = sidecar.read_text()
    sidecar.write_text(json.dumps(json.loads(sound) | {"format": 2}))
    with refused(UserError, str(whole), "format 2", "1 is known"):
        opened(whole)
    sidecar.write_text(sound)


def test_a_description_without_its_file(path):
    path.unlink()
    with refused(UserError, str(path), "missing", "t.rows.json is there", "delete"):
        opened(path)
    assert not path.exists()


def test_a_negative_bound(tmp_path):
    with refused(ValueError, "resident_bytes -1"):
        opened(tmp_path / "t", resident_bytes=-1)


@pytest.mark.parametrize("wrong", [-1, 100, 1 << 40, -(1 << 62)])
def test_a_row_that_is_none(wrong, store, whole):
    ids = torch.tensor([7, wrong])
    with refused(ValueError, str(whole), f"row id {wrong} is outside 0 to 99"):
        store.read(ids)
    with refused(ValueError, str(whole), f"row id {wrong} is outside 0 to 99"):
        store.write(ids, torch.zeros(2, 4, 8, dtype=torch.bfloat16))
    assert whole.stat().st_size == NBYTES
    store.close()


def test_values_and_buffers_that_do_not_fit(store, whole):
    ids = torch.tensor([7, 8])
    for shape, dtype in (((2, 8, 4), torch.bfloat16), ((1, 4, 8), torch.bfloat16), ((2, 4, 8), torch.float16)):
        given = torch.zeros(shape, dtype=dtype)
        with refused(ValueError, str(whole), "2 rows of 100 x 4 x 8 bfloat16 are not", str(dtype)):
            store.write(ids, given)
        with refused(ValueError, str(whole), "are not", str(dtype)):
            store.read(ids, given)
    store.close()


def test_a_closed_store(store, whole):
    store.close()
    ids, values = torch.tensor([7]), torch.zeros(1, 4, 8, dtype=torch.bfloat16)
    for use in (lambda: store.read(ids), lambda: store.write(ids, values), store.flush, store.clear):
        with refused(ValueError, str(whole), "closed"):
            use()


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_a_disk_that_is_full_in_the_middle_of_a_write(backend, bound, small_disk, monkeypatch):
    monkeypatch.setenv("MOME_KERNELS", backend)
    with MmapStore(small_disk / "t", 1000, (1024,), torch.float32, resident_bytes=bound) as store:
        store.write(torch.tensor([3, 900]), torch.ones(2, 1024))
        ids = torch.arange(0, 1000, 4)
        with refused(OSError, str(small_disk / "t"), "No space left", f"{250 * 4096:,} bytes", "make room"):
            store.write(ids, torch.full((250, 1024), 2.0))
        # What was there is there, rows of the write are whole, and the store goes on when there is room.
        assert store.read(torch.tensor([3])).eq(1).all()
        held = store.read(ids[:30])
        assert held.eq(2).all() and store.allocated_bytes >= 30 * 4096
        store.clear()
        store.write(ids[:30], torch.full((30, 1024), 3.0))
        assert store.read(ids[:30]).eq(3).all() and not store.read(torch.tensor([3, 900])).any()


def test_reading_what_was_never_written_takes_no_room_even_where_a_hole_read_through_a_map_would(small_disk):
    """On tmpfs such a page is made, and where there is no room for it the process ends by a signal."""
    with MmapStore(small_disk / "t", 30, (1024,), torch.float32) as store:
        store.write(torch.tensor([3]), torch.ones(1, 1024))
        before = store.allocated_bytes
        assert not store.read(torch.arange(4, 30)).any() and store.read(torch.tensor([3])).eq(1).all()
        assert store.allocated_bytes == before


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_a_file_that_may_not_grow_in_the_middle_of_a_write(backend, path, monkeypatch):
    """A limit of the process stands for a full disk where none can be mounted: a real refusal of the system."""
    monkeypatch.setenv("MOME_KERNELS", backend)
    limits, row = resource.getrlimit(resource.RLIMIT_FSIZE), NBYTES // 100
    with opened(path) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50 * row, limits[1]))
        try:
            with refused(OSError, str(path), "File too large", f"{99 * row:,} bytes", "go back to a checkpoint"):
                store.write(torch.arange(1, 100), torch.ones(99, 4, 8, dtype=torch.bfloat16))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert store.read(torch.arange(1, 50)).eq(1).all() and not store.read(torch.arange(50, 100)).any()


@pytest.mark.parametrize("name", ["fdatasync", "pwrite", "preadv"])
def test_a_disk_that_fails(name, path, monkeypatch):
    monkeypatch.setenv("MOME_KERNELS", "reference")

    def failing(*_):
        raise OSError(5, "Input/output error")

    values = torch.ones(1, 4, 8, dtype=torch.bfloat16)
    with opened(path, resident_bytes=0) as store:
        use = {
            "fdatasync": store.flush,
            "pwrite": lambda: store.write(torch.tensor([1]), values),
            "preadv": lambda: store.read(torch.tensor([1])),
        }[name]
        monkeypatch.setattr(os, name, failing)
        with refused(OSError, str(path), "Input/output error", "disk" if name != "pwrite" else "go back"):
            use()


@pytest.mark.parametrize("step", ["fsync", "replace", "ftruncate"])
def test_a_store_that_could_not_be_made_leaves_nothing(step, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, step, full)
        with refused(OSError, str(tmp_path / "t"), "No space left"):
            opened(tmp_path / "t")
    assert not list(tmp_path.iterdir())
    opened(tmp_path / "t").close()
