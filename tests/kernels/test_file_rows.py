"""Rows of a file by id: what is read and written are slices of its bytes, on both backends, and errors are errors.

Lives here: kernels/file_rows.py, its loops and its fallback.
Not here: the store above it (tests/mome/test_store.py).
"""

from __future__ import annotations

import os
import resource

import pytest
import torch

import kernels
from kernels import backend
from kernels.file_rows import read_file_rows, read_file_rows_reference, write_file_rows, write_file_rows_reference

BACKENDS = ["reference", "numba"]
# Bytes of a row: one, odd, a cache line and more, a page, more than a piece.
LENGTHS = [1, 3, 72, 4096, 70_001]


@pytest.fixture(params=BACKENDS)
def forced(request, monkeypatch):
    monkeypatch.setenv("MOME_KERNELS", request.param)
    return request.param


@pytest.fixture
def file(tmp_path):
    descriptor = os.open(tmp_path / "rows", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def uint8(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def patterns(rows: int) -> dict[str, torch.Tensor]:
    return {
        "none": torch.arange(0),
        "one": torch.tensor([rows - 1]),
        "all": torch.arange(rows),
        "shuffled": torch.randperm(rows),
        "descending": torch.arange(rows).flip(0),
        "runs": torch.tensor([0, 1, 2, 5, 6, 9]),
        "repeats": torch.tensor([4, 4, 4, 5, 5, 0]),
        "any": torch.randint(rows, (37,)),
    }


def drop_cache(descriptor: int) -> None:
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("cold", [False, True])
def test_reads_are_slices_of_the_file(length, cold, file, forced):
    rows_RB = uint8(23, length)
    os.pwrite(file, rows_RB.numpy().tobytes(), 0)
    for name, ids in patterns(23).items():
        if cold:
            drop_cache(file)
        out = uint8(len(ids), length)
        read_file_rows(file, ids, out)
        assert torch.equal(out, rows_RB[ids]), name


@pytest.mark.parametrize("length", LENGTHS)
def test_writes_change_these_rows_and_no_others(length, file, forced):
    rows_RB = uint8(23, length)
    os.pwrite(file, rows_RB.numpy().tobytes(), 0)
    for name, ids in patterns(23).items():
        ids = ids[torch.randperm(len(ids))].unique(sorted=False) if name in ("repeats", "any") else ids
        values = uint8(len(ids), length)
        write_file_rows(file, ids, values)
        rows_RB[ids] = values
        assert os.pread(file, 24 * length, 0) == rows_RB.numpy().tobytes(), name


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.float8_e4m3fn, torch.bool]
)
@pytest.mark.parametrize("tail", [(), (3,), (2, 5)])
def test_any_dtype_and_tail(dtype, tail, file, forced):
    values = torch.randn(19, *tail).to(dtype)
    write_file_rows(file, torch.arange(19), values)
    out, expected = torch.ones(4, *tail).to(dtype), torch.ones(4, *tail).to(dtype)
    ids = torch.tensor([18, 0, 7, 7])
    read_file_rows(file, ids, out)
    read_file_rows_reference(file, ids, expected)
    as_bytes = [x.view(torch.uint8) for x in (out, expected)]
    assert torch.equal(*as_bytes) and torch.equal(out.float(), values.float()[ids])


def test_values_with_a_gradient_and_ids_of_a_stride(file, forced):
    values, ids = torch.randn(5, 3, requires_grad=True), torch.arange(10)[::2]
    write_file_rows(file, ids, values)
    out = torch.empty(5, 3)
    read_file_rows(file, ids, out)
    assert torch.equal(out, values)


def test_threads_do_not_change_a_bit(file, monkeypatch):
    monkeypatch.setenv("MOME_KERNELS", "numba")
    rows_RB, before = uint8(4000, 257), torch.get_num_threads()
    write_file_rows_reference(file, torch.arange(4000), rows_RB)
    ids = torch.randint(4000, (3001,))
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = uint8(3001, 257)
            read_file_rows(file, ids, out)
            assert torch.equal(out, rows_RB[ids])
    finally:
        torch.set_num_threads(before)


def test_holes_are_zeros_and_stay_holes(file, forced):
    os.ftruncate(file, 1 << 40)
    out = uint8(3, 512)
    read_file_rows(file, torch.tensor([0, 12345, (1 << 31) - 1]), out)
    assert not out.any()
    write_file_rows(file, torch.tensor([(1 << 31) - 1]), torch.ones(1, 512, dtype=torch.uint8))
    assert os.pread(file, 512, (1 << 40) - 512) == b"\x01" * 512
    os.fsync(file)
    assert os.fstat(file).st_blocks * 512 < 1 << 20


def test_the_end_of_the_file_and_what_cannot_be_read_are_errors(file, forced, tmp_path):
    os.pwrite(file, b"x" * 100, 0)
    for ids, row in (([0, 9, 10], 10), ([4, 99], 99)):
        with pytest.raises(OSError, match=f"before the end of row {row}"):
            read_file_rows(file, torch.tensor(ids), uint8(len(ids), 10))
    write_only = os.open(tmp_path / "rows", os.O_WRONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        read_file_rows(write_only, torch.tensor([1]), uint8(1, 10))
    os.close(write_only)


def test_a_write_that_does_not_fit_is_an_error_and_what_fits_is_written(file, forced):
    values, limits = uint8(64, 1000), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_500, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_file_rows(file, torch.arange(64), values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.pread(file, 1 << 16, 0) == values.numpy().tobytes()[:10_500]


def test_writes_that_are_cut_short_are_completed(file, monkeypatch):
    """A signal or a network disk may take fewer bytes than it was given."""
    monkeypatch.setenv("MOME_KERNELS", "reference")
    pwrite, preadv, values = os.pwrite, os.preadv, uint8(9, 100)
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:33], offset))
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: preadv(file, [parts[0][:7]], offset))
    write_file_rows(file, torch.arange(9), values)
    out = uint8(9, 100)
    read_file_rows(file, torch.arange(9), out)
    assert torch.equal(out, values)


def test_what_does_not_fit_is_refused(file):
    good, ids = uint8(3, 4), torch.arange(3)
    wrong = [(ids.int(), good), (ids[:2], good), (ids[None], good), (ids, good.t()), (ids, uint8(3, 8)[:, ::2])]
    for op in (read_file_rows, write_file_rows):
        for some_ids, rows in wrong:
            with pytest.raises(ValueError, match=f"{op.__name__} with"):
                op(file, some_ids, rows)


def test_without_the_calls_it_needs_the_plain_way_is_taken_and_said(file, monkeypatch, capsys):
    from kernels.cpu import file_rows

    def lacking():
        raise AttributeError("undefined symbol: preadv2")

    monkeypatch.delenv("MOME_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(kernels, "_reported", set())
    monkeypatch.setattr(file_rows, "require_calls", lacking)
    values = uint8(4, 6)
    write_file_rows(file, torch.arange(4), values)
    out = uint8(4, 6)
    read_file_rows(file, torch.arange(4), out)
    assert torch.equal(out, values) and backend("file_rows", "cpu") == "reference"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "file_rows" in said and "preadv2" in said
