"""One op a file: its plain oracle first, then the fast path. Nothing here knows a model or a schedule.

Lives here: `backend`, which settles once an op and device whether the torch reference or the numba kernel runs.
Not here: the ops and their self-checks; numba itself, which kernels/cpu/ alone imports, when an op first needs it.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VARIABLE = "MOME_KERNELS"
CHOICES = ("reference", "numba")

_chosen: dict[tuple[str, str, str | None], str] = {}
_checking: set[tuple[str, str, str | None]] = set()
_reported: set[str] = set()
# Held while an op is checked, so that a second thread waits for the verdict; the check may call other ops.
_lock = threading.RLock()


def backend(op: str, device: torch.device | str, check: Callable[[], object] | None = None) -> str:
    """Which implementation of an op runs on a device: "reference" or "numba".

    check runs the numba kernel on a tiny input and compares it with the oracle: it raises, or returns False, where they
    differ. On the CPU numba is chosen when it imports and the check passes; else the reference, and one line on stderr
    says why. Other devices have the reference. The environment variable MOME_KERNELS, "reference" or "numba", forces
    one. Kept for each op, kind of device and value of the variable; a question without a check is not kept.
    Raises ValueError for another value of the variable, and where numba is forced and cannot run.
    """
    key = (op, device.partition(":")[0] if isinstance(device, str) else device.type, os.environ.get(VARIABLE))
    return _chosen.get(key) or _choose(key, check)


def _choose(key: tuple[str, str, str | None], check: Callable[[], object] | None) -> str:
    op, device, forced = key
    if forced == "triton":
        raise ValueError(f"{VARIABLE}=triton: there is no Triton kernel for {op} yet: choose {' or '.join(CHOICES)}")
    if forced and forced not in CHOICES:
        raise ValueError(f"{VARIABLE}={forced}: no such kernels: choose {' or '.join(CHOICES)}, or unset it")
    with _lock:
        if key in _chosen:
            return _chosen[key]
        if key in _checking:
            return "numba"
        name = "reference"
        if forced == "numba" or (not forced and device == "cpu"):
            fault = f"its kernel is for the CPU, not for {device}" if device != "cpu" else _fault(key, check)
            if fault and forced:
                raise ValueError(f"{VARIABLE}=numba: {op} cannot run on numba: {fault}: unset it")
            if fault and op not in _reported:
                _reported.add(op)
                print(f"kernels: {op} runs on the torch reference, for numba fails: {fault}", file=sys.stderr)
            name = "reference" if fault else "numba"
        if check is not None or name == "reference":
            _chosen[key] = name
        return name


def _fault(key: tuple[str, str, str | None], check: Callable[[], object] | None) -> str:
    """Why numba cannot run an op, in one line; empty: it can."""
    _checking.add(key)
    try:
        importlib.import_module("numba")
        wrong = check is not None and check() is False
    # Whatever a broken installation raises, training goes on with the reference.
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        _checking.discard(key)
    return "its self-check differs from the oracle" if wrong else ""
