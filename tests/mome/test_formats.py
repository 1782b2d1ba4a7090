"""Row formats: planes and bytes, there and back, and what every one of them promises to the table.

Lives here: mome/table/formats.py on rows of every kind and size.
Not here: the arithmetic of rounding (tests/kernels/test_rounding.py).
"""

from __future__ import annotations

import pytest
import torch

from kernels.rounding import rounding_key
from mome.table.formats import FORMATS, row_format

NAMES = ["fp32", "fp64", "bf16", "bf16+16", "fp8"]
SHAPES = [(0, 2, 3), (1, 1, 1), (5, 3, 7), (131, 2, 64)]


def rows_of(shape, name):
    return torch.randn(shape, dtype=row_format(name).dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_the_names_are_the_formats():
    assert list(FORMATS) == NAMES
    assert [row_format(name).exact for name in NAMES] == [True, True, False, True, False]
    with pytest.raises(ValueError, match=r"'int4'.*fp32, fp64, bf16, bf16\+16, fp8"):
        row_format("int4")


@pytest.mark.parametrize(
    ("name", "size"), [("fp32", 768), ("fp64", 1536), ("bf16", 384), ("bf16+16", 768), ("fp8", 204)]
)
def test_bytes_a_row(name, size):
    planes = row_format(name).planes(3, 64).values()
    assert sum(torch.Size(tail).numel() * kind.itemsize for tail, kind in planes) == size


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name, shape, poison_empty):
    rows, ids, kind = rows_of(shape, name), torch.randperm(shape[0]) * 7, row_format(name)
    planes = kind.encode(rows, ids, rounding_key(1, 1))
    shapes = {key: (plane.shape[1:], plane.dtype) for key, plane in planes.items()}
    assert shapes == kind.planes(*shape[1:])
    assert all(len(plane) == len(rows) for plane in planes.values())
    back = kind.decode(planes)
    assert back.shape == rows.shape and back.dtype == kind.dtype
    if kind.exact:
        assert torch.equal(bits(back), bits(rows))
    else:
        # One step of bfloat16, or of e4m3 in the top octave of the lane.
        step = rows.abs() * 2.0**-7 if name == "bf16" else rows.abs().amax(-1, keepdim=True) / 14
        assert ((back - rows).abs() <= step).all()


@pytest.mark.parametrize("name", NAMES)
def test_into_buffers_that_are_reused(name, poison_empty):
    kind, key = row_format(name), rounding_key(3, 4)
    rows, ids = rows_of((50, 3, 5), name), torch.randperm(1000)[:50]
    fresh = kind.encode(rows, ids, key)
    out = {key: torch.full((50, *shape), 1, dtype=dtype) for key, (shape, dtype) in kind.planes(3, 5).items()}
    again = kind.encode(rows, ids, key, out)
    assert all(again[plane].data_ptr() == out[plane].data_ptr() for plane in out)
    assert all(torch.equal(bits(out[plane]), bits(fresh[plane])) for plane in out)
    into = torch.full((50, 3, 5), torch.nan, dtype=kind.dtype)
    assert kind.decode(out, into).data_ptr() == into.data_ptr()
    assert torch.equal(bits(into), bits(kind.decode(fresh)))


@pytest.mark.parametrize("name", ["bf16", "bf16+16"])
def test_a_buffer_that_would_be_copied_is_refused(name):
    rows, kind = torch.randn(6, 2, 4), row_format(name)
    out = {key: torch.zeros(2, 6, 4, dtype=dtype).transpose(0, 1) for key, (_, dtype) in kind.planes(2, 4).items()}
    with pytest.raises(RuntimeError, match="view"):
        kind.encode(rows, torch.arange(6), 0, out)


@pytest.mark.parametrize("name", NAMES)
def test_zero_bytes_are_a_row_of_zeros(name):
    kind = row_format(name)
    planes = {key: torch.zeros(4, *shape, dtype=dtype) for key, (shape, dtype) in kind.planes(2, 3).items()}
    assert torch.equal(kind.decode(planes), torch.zeros(4, 2, 3, dtype=kind.dtype))
    coded = kind.encode(torch.zeros(4, 2, 3, dtype=kind.dtype), torch.arange(4), 5)
    assert all(torch.equal(bits(coded[key]), bits(planes[key])) for key in planes)


@pytest.mark.parametrize("name", NAMES)
def test_order_and_chunks_change_no_bit_and_rounding_follows_the_key(name):
    rows, ids, kind = rows_of((301, 2, 9), name), torch.randperm(100_000)[:301], row_format(name)
    planes = kind.encode(rows, ids, rounding_key(1, 8))
    order = torch.randperm(301)
    for part in (*order.split(64), order, torch.tensor([7])):
        some = kind.encode(rows[part], ids[part], rounding_key(1, 8))
        assert all(torch.equal(bits(some[key]), bits(planes[key][part])) for key in planes)
    for other_ids, key in ((ids, rounding_key(1, 9)), (ids, rounding_key(2, 8)), (ids + 1, rounding_key(1, 8))):
        other = kind.encode(rows, other_ids, key)
        same = all(torch.equal(bits(other[key]), bits(planes[key])) for key in planes)
        assert same == kind.exact


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_shows(name):
    rows = rows_of((3, 2, 4), name)
    rows[0, 1, 2], rows[2, 0, 0] = torch.nan, -torch.inf
    kind = row_format(name)
    back = kind.decode(kind.encode(rows, torch.arange(3), 1))
    lanes = (~back.isfinite()).any(-1).nonzero().tolist()
    assert lanes == [[0, 1], [2, 0]]
