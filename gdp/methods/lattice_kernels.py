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
Axes: see `gdp.methods.lattice.Lattice` and `Windows`.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

ONE = np.uint64(1)


@numba.njit(cache=True, nogil=True, inline="always")
@no_type_check
def _bit(element):
    return ONE << np.uint64(element & 63)


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
@no_type_check
def window_bits(win, phi, base, rest, held, bits):
    """Set bit s of `bits` for each state s in which this down-set may be reached; True if any.

    A state says how many devices of each class hold the down-set. By LP duality the work inside,
    weighted by any prices of the classes, fits what these devices can do in the target time, and
    the work outside fits the others.
    """
    bits[:] = 0
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
            bits[s >> 6] |= _bit(s)
            found = True
    return found


@numba.njit(cache=True, nogil=True)
@no_type_check
def _add_element(lat, x, inside, count, tail_in, base, rest):
    """Put element x into the down-set; base and rest follow."""
    inside[x >> 6] |= _bit(x)
    for i in range(lat.element_start[x], lat.element_start[x + 1]):
        edge = lat.element_edge[i]
        _toggle(lat, edge, count[edge], tail_in[edge], base, rest, -1.0)
        count[edge] += 1
        if lat.tail[edge] == x:
            tail_in[edge] = True
        _toggle(lat, edge, count[edge], tail_in[edge], base, rest, 1.0)


@numba.njit(cache=True, nogil=True)
@no_type_check
def _remove_element(lat, x, inside, count, tail_in):
    """Take element x out again; base and rest are restored by the caller, to the last bit."""
    inside[x >> 6] &= ~_bit(x)
    for i in range(lat.element_start[x], lat.element_start[x + 1]):
        edge = lat.element_edge[i]
        count[edge] -= 1
        if lat.tail[edge] == x:
            tail_in[edge] = False


@numba.njit(cache=True, nogil=True)
@no_type_check
def _next_free(free, after):
    """The smallest element > after in a bit vector, or -1."""
    word = (after + 1) >> 6
    if word >= free.size:
        return -1
    shift = np.uint64((after + 1) & 63)
    left = free[word] >> shift << shift
    while left == 0:
        word += 1
        if word >= free.size:
            return -1
        left = free[word]
    x = word << 6
    for step in (32, 16, 8, 4, 2, 1):
        low = left & ((ONE << np.uint64(step)) - ONE)
        if low == 0:
            left >>= np.uint64(step)
            x += step
    return x


@numba.njit(cache=True, nogil=True)
@no_type_check
def _grow(array, size):
    """A copy with room for twice as many rows."""
    larger = np.empty((2 * array.shape[0], *array.shape[1:]), dtype=array.dtype)
    larger[:size] = array[:size]
    return larger


class Walk(NamedTuple):
    """A depth-first walk over down-sets; [d] is the value at depth d. Axes: M elements."""

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


@numba.njit(cache=True, nogil=True)
@no_type_check
def _start_walk(lat, win):
    """A walk at the empty down-set."""
    m = lat.num_elements
    free = np.zeros(lat.num_words, dtype=np.uint64)
    for x in range(m):
        if lat.missing[x] == 0:
            free[x >> 6] |= _bit(x)
    base, rest = np.zeros((m + 1, lat.num_rows)), np.zeros((m + 1, lat.num_rows))
    tail_in = lat.tail < 0
    for edge in range(lat.low.size):
        _toggle(lat, edge, lat.low[edge], tail_in[edge], base[0], rest[0], 1.0)
    return Walk(
        np.zeros_like(free),
        free,
        lat.missing.copy(),
        lat.low.copy(),
        tail_in,
        base,
        rest,
        np.zeros((m + 1, win.phi.shape[0])),
        np.zeros(m + 1, dtype=np.int64),
        np.full(m + 1, -1, dtype=np.int64),
        np.full(m + 1, -1, dtype=np.int64),
    )


@numba.njit(cache=True, nogil=True)
@no_type_check
def _descend(lat, win, walk, depth, x):
    """Go from depth to depth + 1 by adding element x."""
    below = depth + 1
    walk.base[below], walk.rest[below] = walk.base[depth], walk.rest[depth]
    _add_element(lat, x, walk.inside, walk.count, walk.tail_in, walk.base[below], walk.rest[below])
    for q in range(win.phi.shape[0]):
        walk.phi[below, q] = walk.phi[depth, q] + win.phi[q, x]
    walk.held[below] = walk.held[depth] + lat.held_bytes[x]
    walk.free[x >> 6] &= ~_bit(x)
    for i in range(lat.next_start[x], lat.next_start[x + 1]):
        after = lat.next[i]
        walk.missing[after] -= 1
        if walk.missing[after] == 0:
            walk.free[after >> 6] |= _bit(after)
    walk.cursor[depth], walk.chosen[below], walk.cursor[below] = x, x, x


@numba.njit(cache=True, nogil=True)
@no_type_check
def _ascend(lat, walk, depth):
    """Go from depth to depth - 1."""
    x = walk.chosen[depth]
    _remove_element(lat, x, walk.inside, walk.count, walk.tail_in)
    for i in range(lat.next_start[x], lat.next_start[x + 1]):
        after = lat.next[i]
        if walk.missing[after] == 0:
            walk.free[after >> 6] &= ~_bit(after)
        walk.missing[after] += 1
    walk.free[x >> 6] |= _bit(x)


@numba.njit(cache=True, nogil=True)
@no_type_check
def enumerate_down_sets(lat, win, most_seen, most_kept):
    """(status, seen, bits, windows, base, size) of the down-sets that some state may reach.

    Every down-set but the empty one comes from the one without its element of largest index, which
    is maximal because indices are topological: a depth-first walk meets each once and stores none.
    status: 0 all found, 1 more than `most_seen` seen, 2 more than `most_kept` kept.
    O(seen (words + degree + states prices)).
    """
    kept, room = 0, 1024
    bits = np.empty((room, lat.num_words), dtype=np.uint64)
    windows = np.empty((room, win.words), dtype=np.uint64)
    base = np.empty((room, lat.num_rows))
    size = np.empty(room, dtype=np.int64)
    walk = _start_walk(lat, win)
    window = np.empty(win.words, dtype=np.uint64)
    status, depth, seen, is_new = 0, 0, 0, True
    while depth >= 0:
        if is_new:
            seen += 1
            here = walk.base[depth]
            if window_bits(win, walk.phi[depth], here, walk.rest[depth], walk.held[depth], window):
                if kept == size.size:
                    bits, windows = _grow(bits, kept), _grow(windows, kept)
                    base, size = _grow(base, kept), _grow(size, kept)
                bits[kept], windows[kept] = walk.inside, window
                base[kept], size[kept] = here, depth
                kept += 1
            if seen > most_seen or kept > most_kept:
                status = 1 if seen > most_seen else 2
                break
        x = _next_free(walk.free, walk.cursor[depth])
        is_new = x >= 0
        if is_new:
            _descend(lat, win, walk, depth, x)
            depth += 1
        else:
            if depth > 0:
                _ascend(lat, walk, depth)
            depth -= 1
    return status, seen, bits[:kept], windows[:kept], base[:kept], size[:kept]
