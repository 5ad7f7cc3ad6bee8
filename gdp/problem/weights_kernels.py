"""Numba kernels of the weights and caches that devices hold. Axes as in `gdp.problem.arrays`."""

from typing import no_type_check

import numba

from gdp.base.kernels.options import INNER, INNER_INLINE
from gdp.base.kernels.struct import as_struct
from gdp.problem.arrays import Arrays

as_struct(Arrays)


@numba.njit(**INNER_INLINE)
@no_type_check
def holder(a, kind, d):
    """The device that holds weights of a kind, of ops on device d."""
    return d if a.held_on.shape[0] == 1 else a.held_on[kind, d]


@numba.njit(**INNER)
@no_type_check
def added_bytes(a, holds, g, d, at):
    """Weights and caches that device `at` does not hold yet and would with group g on device d."""
    added = 0
    for x in range(a.group_weight_start[g], a.group_weight_start[g + 1]):
        w = a.group_weight[x]
        if holder(a, a.weight_kind[w], d) == at and holds[w, at] == 0:
            added += a.weight_bytes[w]
    return added


@numba.njit(**INNER_INLINE)
@no_type_check
def hold_weights(a, holds, used, g, d, sign):
    """Count the weights and caches of group g, on device d or (sign -1) off it, in `used` [D]."""
    for x in range(a.group_weight_start[g], a.group_weight_start[g + 1]):
        w = a.group_weight[x]
        at = holder(a, a.weight_kind[w], d)
        before = holds[w, at]
        holds[w, at] = before + sign
        if (before == 0) != (before + sign == 0):
            used[at] += sign * a.weight_bytes[w]
