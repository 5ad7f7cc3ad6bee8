"""Sets of small integers that give their smallest member in a few instructions.

A set of n positions is three levels of 64-bit words, each bit of a level saying whether a word of
the level below has any; the top level is scanned. Insert and take the smallest: O(1) up to 262,144
positions, and one word more per 262,144.
"""

import typing

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from gdp.base.kernels.options import INNER_INLINE

U6, U63 = np.uint64(6), np.uint64(63)
ONE, ZERO = np.uint64(1), np.uint64(0)
NONE = np.uint64(0xFFFFFFFF)


@intrinsic
@typing.no_type_check
def lowest_bit(typing_context, word):
    """The index of the lowest set bit of a nonzero uint64."""
    del typing_context, word
    signature = numba.types.uint64(numba.types.uint64)

    @typing.no_type_check
    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return signature, generate


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def clear_bits(bits):
    """Empty every set."""
    bits[:] = ZERO


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def level_starts(row, n):
    """Starts of the three levels of set `row`, and its end."""
    low = (n + U63) >> U6
    middle = (low + U63) >> U6
    top = (middle + U63) >> U6
    start = row * (low + middle + top)
    return start, start + low, start + low + middle, start + low + middle + top


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def add_bit(bits, row, n, position):
    """Add a position (uint64) to set `row`, of n positions at most."""
    low, middle, top, _ = level_starts(row, n)
    bits[low + (position >> U6)] |= ONE << (position & U63)
    position >>= U6
    bits[middle + (position >> U6)] |= ONE << (position & U63)
    position >>= U6
    bits[top + (position >> U6)] |= ONE << (position & U63)


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def pop_bit(bits, row, n):
    """Remove and return the smallest position of set `row`; `NONE` if it is empty."""
    low, middle, top, end = level_starts(row, n)
    for k in range(top, end):
        top_word = bits[k]
        if top_word == ZERO:
            continue
        at_middle = ((k - top) << U6) + lowest_bit(top_word)
        middle_word = bits[middle + at_middle]
        at_low = (at_middle << U6) + lowest_bit(middle_word)
        low_word = bits[low + at_low]
        position = (at_low << U6) + lowest_bit(low_word)
        low_word &= low_word - ONE
        bits[low + at_low] = low_word
        if low_word == ZERO:
            middle_word &= middle_word - ONE
            bits[middle + at_middle] = middle_word
            if middle_word == ZERO:
                bits[k] = top_word & (top_word - ONE)
        return position
    return NONE
