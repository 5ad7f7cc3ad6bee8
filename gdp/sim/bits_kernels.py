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


@intrinsic
@typing.no_type_check
def lowest_bit(typing_context, word):
    """The index of the lowest set bit of a nonzero uint64."""
    del typing_context
    signature = numba.types.int64(numba.types.uint64)

    @typing.no_type_check
    def generate(context, builder, signature, arguments):
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return signature, generate


@numba.njit(cache=True, nogil=True)
@typing.no_type_check
def clear_bits(bits):
    """Empty every set."""
    bits[:] = np.uint64(0)


@numba.njit(cache=True, nogil=True, forceinline=True)
@typing.no_type_check
def add_bit(bits, row, n, position):
    """Add a position to set `row`, of n positions at most."""
    low = (n + 63) >> 6
    middle = (low + 63) >> 6
    one = np.uint64(1)
    bits[row, position >> 6] |= one << np.uint64(position & 63)
    position >>= 6
    bits[row, low + (position >> 6)] |= one << np.uint64(position & 63)
    position >>= 6
    bits[row, low + middle + (position >> 6)] |= one << np.uint64(position & 63)


@numba.njit(cache=True, nogil=True, forceinline=True)
@typing.no_type_check
def pop_bit(bits, row, n):
    """Remove and return the smallest position of set `row`; -1 where it is empty."""
    low = (n + 63) >> 6
    middle = (low + 63) >> 6
    zero, one = np.uint64(0), np.uint64(1)
    for top in range(low + middle, bits.shape[1]):
        word = bits[row, top]
        if word == zero:
            continue
        at_middle = ((top - low - middle) << 6) + lowest_bit(word)
        middle_word = bits[row, low + at_middle]
        at_low = (at_middle << 6) + lowest_bit(middle_word)
        low_word = bits[row, at_low]
        position = (at_low << 6) + lowest_bit(low_word)
        low_word &= low_word - one
        bits[row, at_low] = low_word
        if low_word == zero:
            middle_word &= middle_word - one
            bits[row, low + at_middle] = middle_word
            if middle_word == zero:
                bits[row, top] = word & (word - one)
        return position
    return -1
