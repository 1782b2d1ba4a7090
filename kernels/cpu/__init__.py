"""numba kernels for the CPU, one op a file like the oracles above them.

Lives here: `jit`, the one way a kernel here is compiled.
Not here: oracles and public functions (kernels/), threads (threads.py), and the choice of a backend (kernels/).

Replaces nothing by itself. Invariants: kernels release the GIL and are never numba-parallel, because numba's workqueue
layer aborts the process when two threads enter parallel regions at once; they are cached on disk where a folder can be
written; a kernel calls only functions of its own file, because the cache does not see changes in others, and of
intrinsics.py: who edits that removes the caches (__pycache__). This file and threads.py import where numba is missing;
the files with kernels do not.
"""

from __future__ import annotations

from collections.abc import Callable


def jit(function: Callable, *, fastmath: bool | set[str] = False) -> Callable:
    """Compile at the first call, without the GIL; the machine code is kept on disk where that is possible.

    Division by zero gives inf or NaN, as in numpy; indices are not checked. fastmath: liberties of LLVM's by name, for
    sums whose order may be another than the written one; False: none.
    """
    import numba

    options = {"nogil": True, "error_model": "numpy", "fastmath": fastmath}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # Neither beside the sources nor in the user's cache can anything be written.
        return numba.njit(**options)(function)
