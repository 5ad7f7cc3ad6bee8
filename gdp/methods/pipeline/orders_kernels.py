"""The dynamic program along one order of the elements. Loads numba: import it inside functions.

    best(i, u) = min over j < i and crews k of max(best(j, u - k), cost_k(order[j:i]))

The linearised form of the program over down-sets: at most M + 1 of them, in a chain. From each j
the stage grows by one element at a time, and what it pays changes only for that element's tensors.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.kernels.options import BARE, INLINE
from gdp.kernels.struct import as_struct
from gdp.methods.pipeline.lattice_kernels import (
    ZERO,
    add_element,
    element_bit,
    open_at_empty,
    window_bits,
)


class Chain(NamedTuple):
    """The program along an order, and its scratch. Axes: M elements, X cuts, S states."""

    order: np.ndarray  # [M]
    cut: np.ndarray  # [X + 1] prefixes after which a stage may end: ascending from 0 to M, M + 1
    window: np.ndarray  # [X, V] the states that each may be reached in
    best: np.ndarray  # [X, S] the least dearest stage
    origin: np.ndarray  # [X, S] the cut before the last stage, -1 where a device is left unused
    taken: np.ndarray  # [X, S] the crew of the last stage, or the class of the unused device
    live: np.ndarray  # [S]
    count: np.ndarray  # pyright: ignore[reportIncompatibleMethodOverride] # [H] pins in the stage
    tail_in: np.ndarray  # [H]
    has_shared: np.ndarray  # [K]
    work: np.ndarray  # [C]
    is_barred: np.ndarray  # [C]
    paid: np.ndarray  # [R]
    rest: np.ndarray  # [R]
    phi: np.ndarray  # [Q]


as_struct(Chain)


@numba.njit(**BARE)
@no_type_check
def fill_windows(lat, win, chain):
    """Fill in the window of every cut. Leaves the scratch of stages empty."""
    k, held = 0, 0
    open_at_empty(lat, chain.count, chain.tail_in, chain.paid, chain.rest)
    for q in range(chain.phi.size):
        chain.phi[q] = 0.0
    for i in range(lat.num_elements + 1):
        if chain.cut[k] == i:
            window_bits(win, chain.phi, chain.paid, chain.rest, held, chain.window[k])
            k += 1
        if i < lat.num_elements:
            x = chain.order[i]
            add_element(lat, x, chain.count, chain.tail_in, chain.paid, chain.rest)
            for q in range(chain.phi.size):
                chain.phi[q] += win.phi[q, x]
            held += lat.held_bytes[x]
    for edge in range(chain.count.size):
        chain.count[edge], chain.tail_in[edge] = 0, False


@numba.njit(**INLINE)
@no_type_check
def _grow_stage(lat, x, count, tail_in, paid):
    """Add element x to a stage; what it pays follows."""
    for k in range(lat.element_start[x], lat.element_start[x + 1]):
        edge = lat.element_edge[k]
        row = lat.row[edge]
        if count[edge] > 0:
            paid[row] -= lat.w_out[edge] if tail_in[edge] else lat.w_in[edge]
        count[edge] += 1
        if lat.tail[edge] == x:
            tail_in[edge] = True
        if not tail_in[edge]:
            paid[row] += lat.w_in[edge]
        elif count[edge] < lat.pins_of[edge]:
            paid[row] += lat.w_out[edge]


@numba.njit(**INLINE)
@no_type_check
def _cost(lat, crew, work, barred, held, paid):
    """Seconds a sample of the stage on a crew; inf where it may not be there."""
    c = lat.crew_class[crew]
    if barred[c] or held > lat.capacity_bytes[crew]:
        return np.inf
    cost = 0.0
    for lane in range(lat.lane_start[crew], lat.lane_start[crew + 1]):
        busy = work[c] if lat.lane_works[lane] else 0.0
        if lat.lane_row[lane] >= 0:
            busy += paid[lat.lane_row[lane]]
        cost = max(cost, busy * lat.lane_share[lane])
    return cost


@numba.njit(**BARE)
@no_type_check
def _live_states(lat, chain, k, target_s):
    """Fill `live` with the states of a cut that fewer devices do not reach as well; how many."""
    num_live = 0
    for s in range(chain.best.shape[1]):
        dominated = False
        for c in range(lat.count.size):
            before = lat.previous[s, c]
            if before >= 0 and chain.best[k, before] <= chain.best[k, s]:
                chain.best[k, s] = chain.best[k, before]
                chain.origin[k, s], chain.taken[k, s] = -1, c
                dominated = True
        if chain.best[k, s] < target_s and not dominated:
            chain.live[num_live] = s
            num_live += 1
    return num_live


@numba.njit(**BARE)
@no_type_check
def _hold(lat, chain, x, held):
    """The bytes of the stage with element x, which it now holds."""
    held += lat.held_bytes[x]
    for k in range(chain.has_shared.size):
        if not chain.has_shared[k] and lat.shared[k, x >> 6] & element_bit(x):
            chain.has_shared[k] = True
            held += lat.shared_bytes[k]
    return held


@numba.njit(**BARE)
@no_type_check
def _push(lat, chain, origin, end, num_live, held, target_s):
    """Improve the states of cut `end` by the stage that starts at cut `origin`."""
    for c in range(lat.crew_class.size):
        cost = _cost(lat, c, chain.work, chain.is_barred, held, chain.paid)
        if cost >= target_s:
            continue
        for n in range(num_live):
            s = lat.following[chain.live[n], c]
            if s < 0 or chain.window[end, s >> 6] & element_bit(s) == ZERO:
                continue
            value = max(chain.best[origin, chain.live[n]], cost)
            if value < chain.best[end, s]:
                chain.best[end, s] = value
                chain.origin[end, s], chain.taken[end, s] = origin, c


@numba.njit(**BARE)
@no_type_check
def run_chain(lat, work_s, barred, chain, target_s, first, end):
    """Start stages of less than `target_s` at the cuts first..end-1, in order."""
    last = chain.best.shape[0] - 1
    for j in range(first, min(end, last + 1)):
        for s in range(chain.best.shape[1]):  # what is known of the whole is a target for the rest
            target_s = min(target_s, chain.best[last, s])
        num_live = _live_states(lat, chain, j, target_s)
        if num_live == 0 or j == last:
            continue
        for c in range(chain.work.size):
            chain.work[c], chain.is_barred[c] = 0.0, False
        for r in range(chain.paid.size):
            chain.paid[r] = 0.0
        for k in range(chain.has_shared.size):
            chain.has_shared[k] = False
        held, k, stop = 0, j + 1, chain.cut[j]
        for i in range(chain.cut[j], lat.num_elements):
            x, stop = chain.order[i], i + 1
            _grow_stage(lat, x, chain.count, chain.tail_in, chain.paid)
            held = _hold(lat, chain, x, held)
            least = np.inf
            for c in range(chain.work.size):
                chain.work[c] += work_s[c, x]
                chain.is_barred[c] |= barred[c, x]
                if not chain.is_barred[c] and held <= lat.capacity_bytes[c]:
                    least = min(least, chain.work[c])
            if least >= target_s * lat.most:
                break
            if chain.cut[k] == i + 1:
                _push(lat, chain, j, k, num_live, held, target_s)
                k += 1
        for i in range(chain.cut[j], stop):
            x = chain.order[i]
            for k in range(lat.element_start[x], lat.element_start[x + 1]):
                chain.count[lat.element_edge[k]], chain.tail_in[lat.element_edge[k]] = 0, False
