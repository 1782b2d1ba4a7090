"""Instructions that numba lacks, and sums whose bits every kernel must agree on.

Lives here: `prefetch`, `copy_row` and `mean_of_squares`.
Not here: the kernels that use them (gather.py), and how kernels are compiled (kernels/cpu/__init__.py).

Replaces loads that wait for memory, and loops over short rows. Why faster: measured beside the loops that use them.
Invariants: neither checks an index. Oracle: tests/kernels/test_dispatch.py copies rows in numpy.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from kernels.cpu import jit


@intrinsic
def prefetch(typing_context, array_RE, row, column):
    """Ask for the cache line of array[row, column] (non-negative integers); nothing waits, nothing is returned.

    Rows of a table larger than the caches come at the latency of memory, one after the other, unless asked for early.
    """

    def codegen(context, builder, signature, args):
        place = _place(context, builder, signature.args[0], *args)
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        instruction = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        )
        # To read, to keep in all caches, data.
        builder.call(instruction, [builder.bitcast(place, byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array_RE, types.intp, types.intp), codegen


@intrinsic
def copy_row(typing_context, to_RE, row, from_QE, other):
    """to[row] = from[other] for C-contiguous arrays of one dtype and width, as one block of bytes.

    For rows of a few hundred bytes: a loop over the row asks first whether the arrays overlap, which takes as long.
    """

    def codegen(context, builder, signature, args):
        to, source = signature.args[0], signature.args[2]
        zero = context.get_constant(types.intp, 0)
        places = [
            _place(context, builder, kind, array, index, zero)
            for kind, array, index in ((to, args[0], args[1]), (source, args[2], args[3]))
        ]
        array = arrayobj.make_array(to)(context, builder, args[0])
        _, width = cgutils.unpack_tuple(builder, array.shape, 2)
        cgutils.raw_memcpy(builder, *places, builder.mul(width, array.itemsize), 1)
        return context.get_dummy_value()

    return types.void(to_RE, types.intp, from_QE, types.intp), codegen


@jit
def mean_of_squares(row_D, scale):
    """Mean of (scale * x)^2 over a row, in an order of its own: the same bits wherever this is inlined.

    Eight sums, one for each remainder of the position by 8, because one would wait for itself at every number.
    """
    dim = len(row_D)
    nothing = scale - scale
    a, b, c, d, e, f, g, h = nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing
    whole = dim - dim % 8
    for k in range(0, whole, 8):
        a += (scale * row_D[k]) * (scale * row_D[k])
        b += (scale * row_D[k + 1]) * (scale * row_D[k + 1])
        c += (scale * row_D[k + 2]) * (scale * row_D[k + 2])
        d += (scale * row_D[k + 3]) * (scale * row_D[k + 3])
        e += (scale * row_D[k + 4]) * (scale * row_D[k + 4])
        f += (scale * row_D[k + 5]) * (scale * row_D[k + 5])
        g += (scale * row_D[k + 6]) * (scale * row_D[k + 6])
        h += (scale * row_D[k + 7]) * (scale * row_D[k + 7])
    for k in range(whole, dim):
        a += (scale * row_D[k]) * (scale * row_D[k])
    return (((a + b) + (c + d)) + ((e + f) + (g + h))) / dim


def _place(context, builder, kind, array, row, column):
    array = arrayobj.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, array, [row, column], wraparound=False)
