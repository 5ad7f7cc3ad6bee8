"""The dynamic program along one order of the elements. Loads numba: import it inside functions.

    best(i, u) = min over j < i and classes c of max(best(j, u - c), cost_c(order[j:i]))

The linearised form of the program over down-sets: M + 1 of them, in a chain. From each j the stage
grows by one element at a time, and what it pays changes only for that element's tensors.
"""

from typing import no_type_check

import numba
import numpy as np

from gdp.methods.lattice_kernels import _add_element, _bit, _toggle, window_bits

ZERO = np.uint64(0)


@numba.njit(cache=True, nogil=True)
@no_type_check
def _chain_windows(lat, win, order):
    """The window of every prefix of the order, [M + 1, V]."""
    m = lat.num_elements
    windows = np.empty((m + 1, win.words), dtype=np.uint64)
    inside = np.zeros(lat.num_words, dtype=np.uint64)
    count, tail_in = lat.low.copy(), lat.tail < 0
    base, rest = np.zeros(lat.num_rows), np.zeros(lat.num_rows)
    for edge in range(lat.low.size):
        _toggle(lat, edge, count[edge], tail_in[edge], base, rest, 1.0)
    phi, held = np.zeros(win.phi.shape[0]), 0
    for i in range(m + 1):
        window_bits(win, phi, base, rest, held, windows[i])
        if i < m:
            _add_element(lat, order[i], inside, count, tail_in, base, rest)
            phi += win.phi[:, order[i]]
            held += lat.held_bytes[order[i]]
    return windows


@numba.njit(cache=True, nogil=True)
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


@numba.njit(cache=True, nogil=True)
@no_type_check
def _cost(lat, c, work, barred, held, paid):
    if barred[c] or held > lat.capacity_bytes[c]:
        return np.inf
    cost = 0.0
    for lane in range(lat.lane_start[c], lat.lane_start[c + 1]):
        busy = work[c] if lat.lane_works[lane] else 0.0
        if lat.lane_row[lane] >= 0:
            busy += paid[lat.lane_row[lane]]
        cost = max(cost, busy)
    return cost


@numba.njit(cache=True, nogil=True)
@no_type_check
def run_chain(lat, win, work_s, barred, order, target_s):
    """(best [M + 1, S], origin [M + 1, S], class [M + 1, S]) of the prefixes of an order.

    Stages must take less than `target_s`; origin is the prefix before the last stage, -1 where a
    device is left unused.
    """
    m, num_classes = lat.num_elements, work_s.shape[0]
    num_states = lat.following.shape[0]
    windows = _chain_windows(lat, win, order)
    best = np.full((m + 1, num_states), np.inf)
    origin = np.full((m + 1, num_states), -1, dtype=np.int32)
    taken = np.full((m + 1, num_states), -1, dtype=np.int32)
    best[0, 0] = 0.0
    live = np.empty(num_states, dtype=np.int64)
    count, tail_in = np.zeros(lat.low.size, dtype=np.int64), np.zeros(lat.low.size, dtype=np.bool_)
    has_shared = np.empty(lat.shared_bytes.size, dtype=np.bool_)
    work, is_barred = np.empty(num_classes), np.empty(num_classes, dtype=np.bool_)
    paid = np.empty(lat.num_rows)
    for j in range(m + 1):
        num_live = 0
        for s in range(num_states):
            dominated = False
            for c in range(num_classes):
                before = lat.previous[s, c]
                if before >= 0 and best[j, before] <= best[j, s]:
                    best[j, s], origin[j, s], taken[j, s] = best[j, before], -1, c
                    dominated = True
            if best[j, s] < target_s and not dominated:
                live[num_live] = s
                num_live += 1
        if num_live == 0 or j == m:
            continue
        work[:], is_barred[:], paid[:], has_shared[:] = 0.0, False, 0.0, False
        held, end = 0, j
        for i in range(j + 1, m + 1):
            x = order[i - 1]
            end = i
            _grow_stage(lat, x, count, tail_in, paid)
            held += lat.held_bytes[x]
            for k in range(has_shared.size):
                if not has_shared[k] and lat.shared[k, x >> 6] & _bit(x):
                    has_shared[k] = True
                    held += lat.shared_bytes[k]
            least = np.inf
            for c in range(num_classes):
                work[c] += work_s[c, x]
                is_barred[c] |= barred[c, x]
                if not is_barred[c]:
                    least = min(least, work[c])
            if least >= target_s:
                break
            for c in range(num_classes):
                cost = _cost(lat, c, work, is_barred, held, paid)
                if cost >= target_s:
                    continue
                for n in range(num_live):
                    s = lat.following[live[n], c]
                    if s < 0 or windows[i, s >> 6] & _bit(s) == ZERO:
                        continue
                    value = max(best[j, live[n]], cost)
                    if value < best[i, s]:
                        best[i, s], origin[i, s], taken[i, s] = value, j, c
        for i in range(j, end):
            for k in range(lat.element_start[order[i]], lat.element_start[order[i] + 1]):
                count[lat.element_edge[k]], tail_in[lat.element_edge[k]] = 0, False
    return best, origin, taken
