"""Kernels over the down-sets of a contracted graph. Loads numba: import it inside functions.

A down-set I is a bit vector. A stage is the difference S of two of them, J inside I. A tensor is a
hyperedge h: its producer's element (the tail) and its readers' elements are its pins. S cuts h
when some, but not all, pins are in S: it pays `w_out` where it holds the tail, `w_in` elsewhere.
What a stage pays follows from J and I alone, with h open at X when X holds some but not all pins:

    paid(S) = base(I) + sum over h open at J of
                  [tail in J]     w_in [some pin in S] - w_out [h open at I]
                  [tail in S]     w_out (1 - [h open at I])
                  [tail beyond I] w_in ([some pin in S] - 1)
    base(I) = sum over h open at I of (w_out if tail in I else w_in)

so a pair (J, I) costs as many steps as tensors are open at J, however large the stage is.
Axes: see `gdp.methods.pipeline.lattice.Lattice` and `StateWindows`.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.base.kernels.options import BARE, INLINE
from gdp.base.kernels.struct import as_struct
from gdp.methods.pipeline.lattice import Lattice, StateWindows

ONE, ZERO = np.uint64(1), np.uint64(0)
RUNNING, OVER, FULL = 0, 1, 2  # how `walk_on` ended


@numba.njit(**INLINE)
@no_type_check
def element_bit(element):
    """The bit of an element in its word."""
    return ONE << np.uint64(element & 63)


@numba.njit(**INLINE)
@no_type_check
def busiest_lane_s(lat, group, work_s, paid):
    """Seconds a sample of the busiest lane of a stage on a group."""
    cost = 0.0
    for lane in range(lat.lane_start[group], lat.lane_start[group + 1]):
        busy = work_s if lat.lane_works[lane] else 0.0
        if lat.lane_row[lane] >= 0:
            busy += paid[lat.lane_row[lane]]
        cost = max(cost, busy * lat.lane_share[lane])
    return cost


@numba.njit(**INLINE)
@no_type_check
def _toggle(lat, edge, count, tail_in, base, rest, sign):
    """Add or remove (`sign`) what an open hyperedge contributes to base [R] and rest [R].

    rest is the least that the devices after this down-set pay for it, base the least that those
    before it paid.
    """
    inner = count - lat.low[edge]
    if count == 0 or count == lat.pins_of[edge]:
        return
    row = lat.row[edge]
    base[row] += sign * (lat.w_out[edge] if tail_in else lat.w_in[edge])
    if inner < lat.pin_start[edge + 1] - lat.pin_start[edge]:
        rest[row] += sign * (lat.w_in[edge] if tail_in else lat.w_out[edge])


@numba.njit(**BARE)
@no_type_check
def window_bits(win, phi, base, rest, held, bits):
    """Set bit s of `bits` for each state s in which this down-set may be reached; True if any.

    A state says how many devices of each class hold the down-set. By LP duality the work inside,
    weighted by any prices of the classes, fits what these devices can do in the target time, and
    the work outside fits the others.
    """
    for w in range(bits.size):
        bits[w] = ZERO
    found = False
    for s in range(win.used_cap.shape[0]):
        fits = held <= win.used_bytes[s] and win.total_bytes - held <= win.rest_bytes[s]
        for q in range(win.used_cap.shape[1]):
            if not fits:
                break
            used, left = phi[q], win.phi_total[q] - phi[q]
            for r in range(base.size):
                used += win.used_row[s, q, r] * base[r]
                left += win.rest_row[s, q, r] * rest[r]
            fits = used <= win.used_cap[s, q] and left <= win.rest_cap[s, q]
        if fits:
            bits[s >> 6] |= element_bit(s)
            found = True
    return found


@numba.njit(**BARE)
@no_type_check
def open_at_empty(lat, count, tail_in, base, rest):
    """Fill count and tail_in [H], base and rest [R] for the empty down-set."""
    for r in range(base.size):
        base[r], rest[r] = 0.0, 0.0
    for edge in range(lat.low.size):
        count[edge], tail_in[edge] = lat.low[edge], lat.tail[edge] < 0
        _toggle(lat, edge, count[edge], tail_in[edge], base, rest, 1.0)


@numba.njit(**INLINE)
@no_type_check
def add_element(lat, x, count, tail_in, base, rest):
    """Put element x into the down-set; what is open, base and rest follow."""
    for i in range(lat.element_start[x], lat.element_start[x + 1]):
        edge = lat.element_edge[i]
        _toggle(lat, edge, count[edge], tail_in[edge], base, rest, -1.0)
        count[edge] += 1
        if lat.tail[edge] == x:
            tail_in[edge] = True
        _toggle(lat, edge, count[edge], tail_in[edge], base, rest, 1.0)


@numba.njit(**INLINE)
@no_type_check
def _remove_element(lat, x, count, tail_in):
    """Take element x out again; base and rest are kept by depth, so they are back to the bit."""
    for i in range(lat.element_start[x], lat.element_start[x + 1]):
        edge = lat.element_edge[i]
        count[edge] -= 1
        if lat.tail[edge] == x:
            tail_in[edge] = False


@numba.njit(**BARE)
@no_type_check
def _next_free(free, after):
    """The smallest element > after in a bit vector, or -1."""
    word = (after + 1) >> 6
    if word >= free.size:
        return -1
    shift = np.uint64((after + 1) & 63)
    left = free[word] >> shift << shift
    while left == ZERO:
        word += 1
        if word >= free.size:
            return -1
        left = free[word]
    x = word << 6
    for step in (32, 16, 8, 4, 2, 1):
        low = left & ((ONE << np.uint64(step)) - ONE)
        if low == ZERO:
            left >>= np.uint64(step)
            x += step
    return x


class Walk(NamedTuple):
    """A depth-first walk over down-sets; [d] is the value at depth d. Axes: M elements."""

    at: np.ndarray  # [4] depth (-1: over), whether the down-set is new, seen so far, kept so far
    inside: np.ndarray  # [W] the down-set
    free: np.ndarray  # [W] elements outside of which all predecessors are inside
    missing: np.ndarray  # [M] predecessors outside
    count: np.ndarray  # pyright: ignore[reportIncompatibleMethodOverride] # [H] pins inside
    tail_in: np.ndarray  # [H]
    base: np.ndarray  # [M + 1, R]
    rest: np.ndarray  # [M + 1, R]
    phi: np.ndarray  # [M + 1, Q]
    held: np.ndarray  # [M + 1]
    chosen: np.ndarray  # [M + 1] the element added to get to depth d
    cursor: np.ndarray  # [M + 1] the last element tried from depth d


class KeptSets(NamedTuple):
    """Space for down-sets that some state may reach, unsorted.

    Axes as in `gdp.methods.pipeline.lattice`.
    """

    bits: np.ndarray  # [n, W]
    window: np.ndarray  # [n, V]
    base: np.ndarray  # [n, R]
    size: np.ndarray  # [n] elements


as_struct(Lattice, StateWindows, Walk, KeptSets)


def start_walk(lat: Lattice, win: StateWindows) -> Walk:
    """A walk at the empty down-set."""
    m, h = lat.num_elements, len(lat.low)
    free = np.zeros(lat.num_words, dtype=np.uint64)
    for x in np.flatnonzero(lat.missing == 0).tolist():
        free[x >> 6] |= np.uint64(1 << (x & 63))
    walk = Walk(
        at=np.array([0, 1, 0, 0], dtype=np.int64),
        inside=np.zeros_like(free),
        free=free,
        missing=lat.missing.copy(),
        count=np.zeros(h, dtype=np.int64),
        tail_in=np.zeros(h, dtype=bool),
        base=np.zeros((m + 1, lat.num_rows)),
        rest=np.zeros((m + 1, lat.num_rows)),
        phi=np.zeros((m + 1, len(win.phi))),
        held=np.zeros(m + 1, dtype=np.int64),
        chosen=np.full(m + 1, -1, dtype=np.int64),
        cursor=np.full(m + 1, -1, dtype=np.int64),
    )
    open_at_empty(lat, walk.count, walk.tail_in, walk.base[0], walk.rest[0])
    return walk


@numba.njit(**BARE)
@no_type_check
def _descend(lat, win, walk, depth, x):
    """Go from depth to depth + 1 by adding element x."""
    below = depth + 1
    for r in range(lat.num_rows):
        walk.base[below, r], walk.rest[below, r] = walk.base[depth, r], walk.rest[depth, r]
    walk.inside[x >> 6] |= element_bit(x)
    add_element(lat, x, walk.count, walk.tail_in, walk.base[below], walk.rest[below])
    for q in range(win.phi.shape[0]):
        walk.phi[below, q] = walk.phi[depth, q] + win.phi[q, x]
    walk.held[below] = walk.held[depth] + lat.held_bytes[x]
    walk.free[x >> 6] &= ~element_bit(x)
    for i in range(lat.next_start[x], lat.next_start[x + 1]):
        after = lat.next[i]
        walk.missing[after] -= 1
        if walk.missing[after] == 0:
            walk.free[after >> 6] |= element_bit(after)
    walk.cursor[depth], walk.chosen[below], walk.cursor[below] = x, x, x


@numba.njit(**BARE)
@no_type_check
def _ascend(lat, walk, depth):
    """Go from depth to depth - 1."""
    x = walk.chosen[depth]
    walk.inside[x >> 6] &= ~element_bit(x)
    _remove_element(lat, x, walk.count, walk.tail_in)
    for i in range(lat.next_start[x], lat.next_start[x + 1]):
        after = lat.next[i]
        if walk.missing[after] == 0:
            walk.free[after >> 6] &= ~element_bit(after)
        walk.missing[after] += 1
    walk.free[x >> 6] |= element_bit(x)


@numba.njit(**BARE)
@no_type_check
def walk_on(lat, win, walk, kept, most_steps):
    """Go on with a walk for some steps, keeping the down-sets that some state may reach.

    Every down-set but the empty one comes from the one without its element of largest index, which
    is maximal because indices are topological: a depth-first walk meets each once and stores none.
    Returns OVER, FULL (no room is left in `kept`) or RUNNING. O(words + degree + states prices) a
    step.
    """
    depth, is_new = walk.at[0], walk.at[1]
    status = RUNNING
    for _ in range(most_steps):
        if is_new:
            k = walk.at[3]
            if k == kept.size.size:
                status = FULL
                break
            walk.at[2] += 1
            base = walk.base[depth]
            row = kept.window[k]
            if window_bits(win, walk.phi[depth], base, walk.rest[depth], walk.held[depth], row):
                for w in range(walk.inside.size):
                    kept.bits[k, w] = walk.inside[w]
                for r in range(base.size):
                    kept.base[k, r] = base[r]
                kept.size[k] = depth
                walk.at[3] += 1
        x = _next_free(walk.free, walk.cursor[depth])
        if x >= 0:
            _descend(lat, win, walk, depth, x)
            depth, is_new = depth + 1, 1
        else:
            if depth > 0:
                _ascend(lat, walk, depth)
            depth, is_new = depth - 1, 0
            if depth < 0:
                status = OVER
                break
    walk.at[0], walk.at[1] = depth, is_new
    return status
