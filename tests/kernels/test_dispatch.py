"""The choice of a backend, compiling where nothing can be cached, and the threads that share a kernel's rows.

Lives here: what kernels/__init__.py, and of kernels/cpu/ __init__.py, intrinsics.py and threads.py promise.
Not here: what the kernels compute (the other files of this folder).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

import kernels
from kernels import backend
from kernels.cpu import jit, threads
from kernels.cpu.intrinsics import copy_row, prefetch

ROOT = Path(__file__).resolve().parent.parent.parent

NO_NUMBA = """
import sys
sys.modules["numba"] = None
import torch
from kernels.cpu.threads import run
from kernels.gather import gather_rows, scatter_rows_
from kernels.segments import segments_of, unique_ids
assert run(lambda begin, end: end, 5, threads=1, least=1) == [5]
rows = torch.arange(12.0).view(3, 4)
for _ in range(2):
    unique, slots = unique_ids(torch.tensor([2, 0, 2]))
    assert unique.tolist() == [0, 2] and slots.tolist() == [1, 0, 1]
    assert segments_of(slots, 2).order.tolist() == [1, 0, 2]
    out = gather_rows(rows, torch.tensor([2, 0, 2]))
    assert torch.equal(out, rows[[2, 0, 2]])
    changed = rows.clone()
    scatter_rows_(changed, unique, out[:2])
    assert torch.equal(changed, rows[[2, 1, 0]])
"""

LIGHT = """
import sys
import kernels
assert not {"torch", "numba", "numpy"} & set(sys.modules), "kernels is not light"
import kernels.cpu.threads, kernels.gather, kernels.segments
assert "numba" not in sys.modules, "an op woke numba before its first use"
"""

FORK = """
import os, time
from kernels.cpu import threads
def slow(begin, end):
    time.sleep(0.005)
    return begin, end
spans = [(0, 1), (1, 2), (2, 3), (3, 4)]
assert threads.run(slow, 4, threads=2, least=1) == spans
child = os.fork()
if child == 0:
    os._exit(0 if threads.run(slow, 4, threads=2, least=1) == spans else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def python(source: str, **env: str) -> str:
    """What a fresh process prints on stderr; it must succeed."""
    env = {key: value for key, value in os.environ.items() if key != kernels.VARIABLE} | {"PYTHONPATH": str(ROOT)} | env
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    """No op has been asked for, and nothing is forced."""
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(kernels, "_reported", set())


def good() -> bool:
    return True


def bad() -> bool:
    raise RuntimeError("no such instruction\nand more")


def refuse() -> bool:
    raise AssertionError("this check must not run")


def test_numba_where_its_check_passes(capsys):
    assert backend("op", "cpu", good) == backend("op", torch.device("cpu"), refuse) == backend("op", "cpu") == "numba"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("check, reason", [(bad, "RuntimeError: no such instruction"), (lambda: False, "self-check")])
def test_the_reference_where_it_does_not_with_one_line(check, reason, capsys, monkeypatch):
    assert backend("op", "cpu", check) == "reference"
    assert backend("op", "cpu", refuse) == "reference"
    monkeypatch.setenv(kernels.VARIABLE, "")
    assert backend("op", "cpu", check) == "reference"
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "op runs on the torch reference" in err and reason in err
    assert backend("other", "cpu", check) == "reference"
    assert capsys.readouterr().err.count("\n") == 1


def test_other_devices_have_the_reference_silently(capsys):
    assert backend("op", "cuda:1", refuse) == backend("op", torch.device("meta"), refuse) == "reference"
    assert capsys.readouterr() == ("", "")


def test_the_variable_forces(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    assert backend("op", "cpu", refuse) == "reference"
    monkeypatch.setenv(kernels.VARIABLE, "numba")
    assert backend("op", "cpu", good) == "numba"
    with pytest.raises(ValueError, match="worse cannot run on numba: RuntimeError: no such instruction: unset it"):
        backend("worse", "cpu", bad)
    with pytest.raises(ValueError, match="not for cuda"):
        backend("op", "cuda", good)


@pytest.mark.parametrize("word, complaint", [("triton", "no Triton kernel for op yet"), ("fast", "no such kernels")])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_another_word_is_refused(word, complaint, device, monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, word)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{word}.*{complaint}.*reference or numba"):
            backend("op", device, good)


def test_a_question_without_a_check_settles_nothing(capsys):
    assert backend("op", "cpu") == "numba"
    assert backend("op", "cpu", lambda: False) == "reference"
    assert backend("op", "cpu") == "reference"


def test_a_check_may_call_its_op_and_others():
    def check() -> bool:
        return backend("op", "cpu", refuse) == "numba" and backend("other", "cpu", good) == "numba"

    assert backend("op", "cpu", check) == "numba"


def test_threads_that_ask_at_once_share_one_check():
    checks, answers = [], []

    def check() -> bool:
        checks.append(threading.get_ident())
        time.sleep(0.05)
        return True

    asking = [threading.Thread(target=lambda: answers.append(backend("op", "cpu", check))) for _ in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert answers == ["numba"] * 4 and len(checks) == 1


def test_without_numba_each_op_says_so_once_and_is_right():
    lines = python(NO_NUMBA).splitlines()
    assert len(lines) == 2 and all("ModuleNotFoundError" in line for line in lines), lines
    assert "segments runs on the torch reference" in lines[0] and "gather runs on the torch reference" in lines[1]
    assert python(NO_NUMBA, MOME_KERNELS="reference") == ""


def test_an_import_wakes_nothing():
    assert python(LIGHT) == ""


def test_a_kernel_compiles_where_nothing_can_be_cached(monkeypatch):
    def double(x):
        return 2 * x

    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(double)
    assert jit(double)(21) == 42


@jit
def copied(array, to):
    for row in range(len(array)):
        prefetch(array, len(array) - 1 - row, 0)
        copy_row(to, row, array, len(array) - 1 - row)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 100)])
def test_a_row_is_copied_as_a_block(dtype, shape):
    array = np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)
    to = np.full((shape[0] + 1, shape[1]), 99, dtype)
    copied(array, to)
    assert (to[:-1] == array[::-1]).all() and (to[-1] == 99).all()


@jit
def marks(begin, end, count_N):
    for i in range(begin, end):
        count_N[i] += 1
    return end - begin


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100, 1013])
@pytest.mark.parametrize("many", [1, 2, 3, 8])
def test_shares_cover_each_row_once(count, many):
    count_N = np.zeros(count, np.int64)
    sizes = threads.run(marks, count, count_N, threads=many, least=1)
    assert (count_N == 1).all() and sum(sizes) == count
    assert len(sizes) == (1 if many == 1 else max(1, min(count, threads.SPLIT * many)))


def test_shares_come_in_order_and_are_not_too_small():
    spans = threads.run(lambda begin, end: (begin, end), 1000, threads=3, least=200)
    assert spans == [(0, 200), (200, 400), (400, 600), (600, 800), (800, 1000)]
    assert threads.run(lambda *span: span, threads.LEAST + 1, threads=3) == [(0, threads.LEAST + 1)]
    assert threads.run_shares(lambda *span: span, [0, 5, 5, 9], threads=2) == [(0, 5), (5, 5), (5, 9)]


def who(begin, end):
    time.sleep(0.01)
    return threading.get_ident()


def test_the_work_is_shared_and_torch_says_by_how_many(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    # On a busy machine a helper may wake when all is done: once in many calls it does not.
    used = [len(set(threads.run(who, 12, least=1))) for _ in range(50)]
    assert 1 < max(used) <= 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert set(threads.run(who, 12, least=1)) == {threading.get_ident()}


def test_a_fault_surfaces_when_all_shares_are_done():
    done = []

    def kernel(begin, end):
        time.sleep(0.002 * begin)
        if begin == 1:
            raise ZeroDivisionError("share 1")
        done.append(begin)

    with pytest.raises(ZeroDivisionError, match="share 1"):
        threads.run(kernel, 6, threads=3, least=1)
    assert sorted(done) == [0, 2, 3, 4, 5]
    assert threads.run(lambda *span: span, 2, threads=2, least=1) == [(0, 1), (1, 2)]


def test_many_callers_at_once():
    faults = []

    def call(seed: int) -> None:
        count_N = np.zeros(997, np.int64)
        for turn in range(1, 60):
            threads.run(marks, len(count_N), count_N, threads=3, least=1)
            if not (count_N == turn).all():
                faults.append((seed, turn))

    calling = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for thread in calling:
        thread.start()
    for thread in calling:
        thread.join()
    assert faults == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_threads_of_its_own():
    python(FORK)
