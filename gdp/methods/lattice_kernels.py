"""Kernels over the down-sets of a contracted graph. They load numba: import them inside functions.

A down-set I is a bit vector. A stage is the difference S of two of them, J inside I. Every tensor is
a hyperedge h: its producer's element (the tail) and its readers' elements are its pins. S cuts h
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

from typing import no_type_check

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
    x = after + 1
    word = x >> 6
    if word >= free.size:
        return -1
    left = free[word] >> np.uint64(x & 63) << np.uint64(x & 63)
    while left == 0:
        word += 1
        if word >= free.size:
            return -1
        left = free[word]
    x = word << 6
    while left & ONE == 0:
        left >>= ONE
        x += 1
    return x


@numba.njit(cache=True, nogil=True)
@no_type_check
def grow(array, size):
    """A copy with room for twice as many rows."""
    larger = np.empty((2 * array.shape[0],) + array.shape[1:], dtype=array.dtype)
    larger[:size] = array[:size]
    return larger


@numba.njit(cache=True, nogil=True)
@no_type_check
def enumerate_down_sets(lat, win, most_seen, most_kept):
    """(status, seen, bits, windows, base, size) of the down-sets that some state may reach.

    Every down-set but the empty one comes from the one without its element of largest index, which
    is maximal because indices are topological: a depth-first walk meets each once and stores none.
    status: 0 all found, 1 more than `most_seen` seen, 2 more than `most_kept` kept.
    O(seen (words + degree) + seen states prices).
    """
    m, words, rows = lat.num_elements, lat.num_words, lat.num_rows
    kept, size = 0, 1024
    out_bits = np.empty((size, words), dtype=np.uint64)
    out_window = np.empty((size, win.words), dtype=np.uint64)
    out_base = np.empty((size, rows))
    out_size = np.empty(size, dtype=np.int64)
    inside, free = np.zeros(words, dtype=np.uint64), np.zeros(words, dtype=np.uint64)
    count, tail_in = lat.low.copy(), lat.tail < 0
    missing = lat.missing.copy()
    for x in range(m):
        if missing[x] == 0:
            free[x >> 6] |= _bit(x)
    base, rest = np.zeros((m + 1, rows)), np.zeros((m + 1, rows))
    for edge in range(lat.low.size):
        _toggle(lat, edge, count[edge], tail_in[edge], base[0], rest[0], 1.0)
    phi = np.zeros((m + 1, win.phi.shape[0]))
    held = np.zeros(m + 1, dtype=np.int64)
    chosen = np.full(m + 2, -1, dtype=np.int64)  # [d]: the element added to get to depth d
    cursor = np.full(m + 2, -1, dtype=np.int64)  # [d]: the last element tried from depth d
    window = np.empty(win.words, dtype=np.uint64)
    depth, seen, fresh = 0, 0, True
    while depth >= 0:
        if fresh:
            seen += 1
            if seen > most_seen:
                return 1, seen, out_bits[:kept], out_window[:kept], out_base[:kept], out_size[:kept]
            if window_bits(win, phi[depth], base[depth], rest[depth], held[depth], window):
                if kept == most_kept:
                    return 2, seen, out_bits[:0], out_window[:0], out_base[:0], out_size[:0]
                if kept == out_size.size:
                    out_bits, out_window = grow(out_bits, kept), grow(out_window, kept)
                    out_base, out_size = grow(out_base, kept), grow(out_size, kept)
                out_bits[kept], out_window[kept] = inside, window
                out_base[kept], out_size[kept] = base[depth], depth
                kept += 1
        x = _next_free(free, cursor[depth])
        fresh = x >= 0
        if fresh:
            cursor[depth] = x
            base[depth + 1], rest[depth + 1] = base[depth], rest[depth]
            _add_element(lat, x, inside, count, tail_in, base[depth + 1], rest[depth + 1])
            phi[depth + 1] = phi[depth] + win.phi[:, x]
            held[depth + 1] = held[depth] + lat.held_bytes[x]
            free[x >> 6] &= ~_bit(x)
            for i in range(lat.next_start[x], lat.next_start[x + 1]):
                missing[lat.next[i]] -= 1
                if missing[lat.next[i]] == 0:
                    free[lat.next[i] >> 6] |= _bit(lat.next[i])
            depth += 1
            chosen[depth], cursor[depth] = x, x
        else:
            x = chosen[depth]
            depth -= 1
            if depth >= 0:
                _remove_element(lat, x, inside, count, tail_in)
                for i in range(lat.next_start[x], lat.next_start[x + 1]):
                    if missing[lat.next[i]] == 0:
                        free[lat.next[i] >> 6] &= ~_bit(lat.next[i])
                    missing[lat.next[i]] += 1
                free[x >> 6] |= _bit(x)
    return 0, seen, out_bits[:kept], out_window[:kept], out_base[:kept], out_size[:kept]
