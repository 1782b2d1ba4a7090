"""Instructions that numba lacks, for kernels that move rows.

Lives here: `prefetch` and `copy_row`.
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


def _place(context, builder, kind, array, row, column):
    array = arrayobj.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, array, [row, column], wraparound=False)
