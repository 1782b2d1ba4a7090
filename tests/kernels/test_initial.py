"""Initial values: the oracle against Python integers, numba against the oracle bit for bit.

Lives here: what kernels/initial.py promises.
Not here: the rows of a new table (tests/mome/test_table_init.py), splitmix64's sequence (tests/mome/test_hashing.py).
"""

from __future__ import annotations

import pytest
import torch

from kernels.cpu.initial import initial_values as fast
from kernels.initial import initial_reference, initial_values, mixed, splitmix64

MASK = (1 << 64) - 1
DTYPES = [torch.float32, torch.float64]


def plain_mix(counter: int) -> int:
    z = (counter + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def plain_value(seed: int, counter: int, half_width: float) -> float:
    return (2 * (plain_mix(plain_mix(seed & MASK) + counter & MASK) >> 40) + 1 - (1 << 24)) * half_width / (1 << 24)


def random_ids(count: int) -> torch.Tensor:
    return torch.randint(1 << 40, (count,))


@pytest.mark.parametrize("seed", [0, 5, -1, 1 << 63, -(1 << 70) - 3])
def test_the_oracle_equals_python_integers(seed):
    ids = torch.cat((torch.tensor([0, 1, (1 << 31) - 1, (1 << 31) // 13, 1 << 33]), random_ids(20)))
    values = initial_reference(ids, 13, seed, 0.3, torch.float64)
    for row, row_id in zip(values.tolist(), ids.tolist()):
        expected = [plain_value(seed, row_id * 13 + element, 0.3) for element in range(13)]
        assert row == pytest.approx(expected, rel=1e-15)


def test_one_integer_is_mixed_as_a_tensor_is():
    values = [0, 1, -1, (1 << 63) - 1, -(1 << 63), 12345]
    assert [mixed(value) for value in values] == splitmix64(torch.tensor(values)).tolist()
    assert [mixed(value) & MASK for value in values] == [plain_mix(value & MASK) for value in values]
    assert mixed(1 << 64) == mixed(0) and mixed((1 << 64) - 5) == mixed(-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 7), (1, 1), (3, 0), (257, 5), (1031, 131), (40, 4000)])
def test_numba_has_the_oracles_bits(rows, size, dtype, poison_empty):
    ids = random_ids(rows)
    ours = fast(ids, size, mixed(9), 0.7, dtype)
    assert ours.dtype == dtype and ours.shape == (rows, size)
    assert torch.equal(ours, initial_reference(ids, size, 9, 0.7, dtype))
    assert torch.equal(ours, initial_values(ids, size, 9, 0.7, dtype))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_subsets_and_order_change_no_bit(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ids = random_ids(4001)
        whole = initial_values(ids, 64, 1, 0.1, torch.float32)
        assert torch.equal(whole, initial_reference(ids, 64, 1, 0.1, torch.float32))
        some = torch.randint(4001, (700,))
        assert torch.equal(initial_values(ids[some], 64, 1, 0.1, torch.float32), whole[some])
        assert torch.equal(initial_values(ids[::3], 64, 1, 0.1, torch.float32), whole[::3])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_width_means_zeros_and_any_width_is_kept(dtype):
    ids = random_ids(50)
    assert not initial_values(ids, 6, 2, 0.0, dtype).any()
    for half_width in (1e-30, 1.0, 1e30):
        values = initial_values(ids, 6, 2, half_width, dtype)
        assert 0.9 * half_width < values.abs().max() <= half_width
        assert torch.equal(values, initial_reference(ids, 6, 2, half_width, dtype))
