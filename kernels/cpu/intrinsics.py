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


@intrinsic
def mean_of_squares(typing_context, array_RE, row, begin, dim, scale):
    """Mean of (scale * x)^2 over array[row, begin : begin + dim], scale of the array's dtype.

    Sixteen sums side by side, one for each remainder of the position by 16, then those added in order, then what is
    left of the row: vectors by name, so that no compiler's liberty decides about the order and each kernel that takes
    this has the same bits.
    """

    def codegen(context, builder, signature, args):
        array, row, begin, dim, scale = args
        number = context.get_value_type(signature.args[0].dtype)
        width, halves = 8, 2
        vector = ir.VectorType(number, width)
        place = _place(context, builder, signature.args[0], array, row, begin)
        scales = ir.Constant(vector, [0.0] * width)
        for lane in range(width):
            scales = builder.insert_element(scales, scale, ir.Constant(ir.IntType(32), lane))
        sums = [
            cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * width)) for _ in range(halves)
        ]  # fmt: skip
        step = ir.Constant(dim.type, width * halves)
        whole = builder.sub(dim, builder.srem(dim, step))
        with cgutils.for_range_slice(builder, dim.type(0), whole, step) as (position, _):
            for half, held in enumerate(sums):
                at = builder.gep(place, [builder.add(position, dim.type(half * width))])
                numbers = builder.load(
                    builder.bitcast(at, vector.as_pointer()), align=signature.args[0].dtype.bitwidth // 8
                )
                numbers = builder.fmul(numbers, scales)
                builder.store(builder.fadd(builder.load(held), builder.fmul(numbers, numbers)), held)
        total = cgutils.alloca_once_value(builder, number(0.0))
        for held in sums:
            lanes = builder.load(held)
            for lane in range(width):
                one = builder.extract_element(lanes, ir.Constant(ir.IntType(32), lane))
                builder.store(builder.fadd(builder.load(total), one), total)
        with cgutils.for_range_slice(builder, whole, dim, dim.type(1)) as (position, _):
            one = builder.fmul(builder.load(builder.gep(place, [position])), scale)
            builder.store(builder.fadd(builder.load(total), builder.fmul(one, one)), total)
        return builder.fdiv(builder.load(total), builder.sitofp(dim, number))

    return array_RE.dtype(array_RE, types.intp, types.intp, types.intp, array_RE.dtype), codegen


def _place(context, builder, kind, array, row, column):
    array = arrayobj.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, array, [row, column], wraparound=False)
