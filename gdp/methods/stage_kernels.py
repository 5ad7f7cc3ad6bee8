"""The dynamic program over pairs of down-sets. Loads numba: import it inside functions.

    best(I, u) = min over J inside I and classes c of max(best(J, u - c), cost_c(I \\ J))

where u counts the devices used of each class. Down-sets are sorted so that a subset comes first;
each pushes its values to the larger ones. Nothing is kept of a pair. See `gdp.methods.lattice` for
the arrays and `gdp.methods.lattice_kernels` for what a stage pays.
"""

from typing import no_type_check

import numba
import numpy as np

from gdp.methods.lattice_kernels import ONE, _bit

ZERO = np.uint64(0)


@numba.njit(cache=True, nogil=True)
@no_type_check
def totals(bits, values):
    """Sums of values [K, M] over each down-set [n, W]: [n, K], in the order of the elements."""
    total = np.zeros((bits.shape[0], values.shape[0]), dtype=values.dtype)
    for i in range(bits.shape[0]):
        for x in range(values.shape[1]):
            if bits[i, x >> 6] & _bit(x):
                for k in range(values.shape[0]):
                    total[i, k] += values[k, x]
    return total


@numba.njit(cache=True, nogil=True)
@no_type_check
def open_edges(lat, inside, opened):
    """Fill `opened` with the hyperedges that are open at a down-set; the number of them.

    Each is the set of its pins outside, as (word, mask) pairs.
    """
    k, slot = 0, 0
    for edge in range(lat.low.size):
        count = lat.low[edge]
        for p in range(lat.pin_start[edge], lat.pin_start[edge + 1]):
            if inside[lat.pin[p] >> 6] & _bit(lat.pin[p]):
                count += 1
        if count == 0 or count == lat.pins_of[edge]:
            continue
        tail = lat.tail[edge]
        opened.start[k] = slot
        opened.row[k] = lat.row[edge]
        opened.never_closes[k] = lat.high[edge] > 0
        opened.w_in[k], opened.w_out[k] = lat.w_in[edge], lat.w_out[edge]
        opened.tail_word[k], opened.tail_mask[k] = 0, ZERO
        if tail >= 0 and inside[tail >> 6] & _bit(tail) == ZERO:
            opened.tail_word[k], opened.tail_mask[k] = tail >> 6, _bit(tail)
        for p in range(lat.pin_start[edge], lat.pin_start[edge + 1]):
            word, mask = lat.pin[p] >> 6, _bit(lat.pin[p])
            if inside[word] & mask:
                continue
            # Pins are ascending, so those of one word are neighbours.
            if slot > opened.start[k] and opened.word[slot - 1] == word:
                opened.mask[slot - 1] |= mask
            else:
                opened.word[slot], opened.mask[slot] = word, mask
                slot += 1
        k += 1
        opened.start[k] = slot
    return k


@numba.njit(cache=True, nogil=True)
@no_type_check
def stage_rows(opened, num_open, bits, base, found, paid):
    """Fill paid [k, R] with what the stage between J (in `opened`) and down-set found[k] pays."""
    for n in range(found.size):
        i = found[n]
        for r in range(paid.shape[1]):
            paid[n, r] = base[i, r]
        for k in range(num_open):
            touched, left = ZERO, ZERO
            for slot in range(opened.start[k], opened.start[k + 1]):
                hit = bits[i, opened.word[slot]] & opened.mask[slot]
                touched |= hit
                left |= hit ^ opened.mask[slot]
            still_open = left != ZERO or opened.never_closes[k]
            row = opened.row[k]
            if opened.tail_mask[k] == ZERO:
                if touched != ZERO:
                    paid[n, row] += opened.w_in[k]
                if still_open:
                    paid[n, row] -= opened.w_out[k]
            elif bits[i, opened.tail_word[k]] & opened.tail_mask[k] != ZERO:
                if not still_open:
                    paid[n, row] += opened.w_out[k]
            elif touched == ZERO:
                paid[n, row] -= opened.w_in[k]


@numba.njit(cache=True, nogil=True)
@no_type_check
def stage_cost(lat, sets, j, i, c, paid):
    """Seconds of the stage between down-sets j and i on class c; inf if it does not fit."""
    if sets.barred[i, c] != sets.barred[j, c]:
        return np.inf
    held = sets.held[i] - sets.held[j]
    for k in range(lat.shared_bytes.size):
        for w in range(lat.num_words):
            if lat.shared[k, w] & sets.bits[i, w] & ~sets.bits[j, w]:
                held += lat.shared_bytes[k]
                break
    if held > lat.capacity_bytes[c]:
        return np.inf
    work = sets.work_s[i, c] - sets.work_s[j, c]
    cost = 0.0
    for lane in range(lat.lane_start[c], lat.lane_start[c + 1]):
        busy = work if lat.lane_works[lane] else 0.0
        if lat.lane_row[lane] >= 0:
            busy += paid[lat.lane_row[lane]]
        cost = max(cost, busy)
    return cost


@numba.njit(cache=True, nogil=True)
@no_type_check
def _live_states(lat, best, j, target_s, live):
    """Fill `live` with the states of down-set j worth pushing; the number of them.

    A state is not when fewer devices do as well: `best` becomes the value of at most that many.
    """
    count = 0
    for s in range(best.shape[1]):
        dominated = False
        for c in range(lat.previous.shape[1]):
            before = lat.previous[s, c]
            if before >= 0 and best[j, before] <= best[j, s]:
                best[j, s] = best[j, before]
                dominated = True
        if best[j, s] < target_s and not dominated:
            live[count] = s
            count += 1
    return count


@numba.njit(cache=True, nogil=True)
@no_type_check
def candidates(j, start, stop, horizon_s, wanted, bits, window, least_s, found):
    """Fill `found` with the down-sets that contain j and have a wanted state in their window.

    This is the innermost loop, over arrays of its own: the tuples of arrays cost more to pass.
    """
    count, words = 0, bits.shape[1]
    for i in range(max(start, j + 1), stop):
        if least_s[i] >= horizon_s:
            break
        reachable = ZERO
        for w in range(wanted.size):
            reachable |= window[i, w] & wanted[w]
        if reachable == ZERO:
            continue
        outside = ZERO
        for w in range(words):
            outside |= bits[j, w] & ~bits[i, w]
        if outside == ZERO:
            found[count] = i
            count += 1
    return count


@numba.njit(cache=True, nogil=True)
@no_type_check
def _promising(j, found, count, moves, window, work_s, best, target_s):
    """Keep in `found` the down-sets of which work alone leaves some state to be improved from j.

    moves [K, 3]: the state of j, the class of the next device, and the state it leads to.
    """
    kept = 0
    for k in range(count):
        i = found[k]
        for n in range(moves.shape[0]):
            s = moves[n, 2]
            if window[i, s >> 6] >> np.uint64(s & 63) & ONE == ZERO:
                continue
            limit = min(best[i, s], target_s)
            c = moves[n, 1]
            if best[j, moves[n, 0]] < limit and work_s[i, c] - work_s[j, c] < limit:
                found[kept] = i
                kept += 1
                break
    return kept


@numba.njit(cache=True, nogil=True)
@no_type_check
def _push(lat, sets, best, j, found, moves, target_s, paid):
    """Improve the states of the down-sets in `found` from those of j."""
    for k in range(found.size):
        i, last, cost = found[k], -1, np.inf
        for n in range(moves.shape[0]):
            s, c = moves[n, 2], moves[n, 1]
            if sets.window[i, s >> 6] & _bit(s) == ZERO:
                continue
            if c != last:
                last, cost = c, stage_cost(lat, sets, j, i, c, paid[k])
            value = max(best[j, moves[n, 0]], cost)
            if value < target_s and value < best[i, s]:
                best[i, s] = value


@numba.njit(cache=True, nogil=True)
@no_type_check
def _moves(lat, sets, live, num_live, moves, wanted):
    """(moves of the live states, ascending in class; first and last down-set they may lead to)."""
    count, start, stop = 0, sets.bits.shape[0], 0
    wanted[:] = ZERO
    for c in range(lat.following.shape[1]):
        for k in range(num_live):
            s = lat.following[live[k], c]
            if s >= 0:
                moves[count, 0], moves[count, 1], moves[count, 2] = live[k], c, s
                count += 1
                wanted[s >> 6] |= _bit(s)
                start = min(start, sets.first[s])
                stop = max(stop, sets.last[s] + 1)
    return moves[:count], start, stop


@numba.njit(cache=True, nogil=True)
@no_type_check
def has_state(states, i, s):
    """Whether bit s of row i is set."""
    return states[i, s >> 6] >> np.uint64(s & 63) & ONE != ZERO


@numba.njit(cache=True, nogil=True)
@no_type_check
def is_subset(inner, outer):
    outside = ZERO
    for w in range(inner.size):
        outside |= inner[w] & ~outer[w]
    return outside == ZERO


@numba.njit(cache=True, nogil=True)
@no_type_check
def push_values(lat, sets, opened, target_s, first, end, best):
    """Push the values of the down-sets first..end-1 to those that contain them; the pairs costed.

    best [n, S] holds the least dearest stage so far, inf where nothing below the target is known.
    """
    n, num_states = best.shape
    live = np.empty(num_states, dtype=np.int64)
    room = np.empty((lat.following.size, 3), dtype=np.int64)
    wanted = np.zeros(sets.window.shape[1], dtype=np.uint64)
    paid = np.empty((n, lat.num_rows))
    found = np.empty(n, dtype=np.int64)
    pairs = 0
    for j in range(first, min(end, n)):
        num_live = _live_states(lat, best, j, target_s, live)
        if num_live == 0 or j == n - 1:
            continue
        moves, start, stop = _moves(lat, sets, live, num_live, room, wanted)
        horizon_s = sets.least_s[j] + target_s
        count = candidates(
            j, start, stop, horizon_s, wanted, sets.bits, sets.window, sets.least_s, found
        )
        count = _promising(j, found, count, moves, sets.window, sets.work_s, best, target_s)
        pairs += count
        if count:
            num_open = open_edges(lat, sets.bits[j], opened)
            stage_rows(opened, num_open, sets.bits, sets.base, found[:count], paid)
            _push(lat, sets, best, j, found[:count], moves, target_s, paid)
        target_s = min(target_s, best[n - 1].min())
    return pairs


@numba.njit(cache=True, nogil=True)
@no_type_check
def _stage_before(lat, sets, opened, target_s, reached, i, s):
    """(cost, down-set, class) of the cheapest stage below the target that ends at i in state s."""
    paid, one = np.empty((1, lat.num_rows)), np.full(1, i, dtype=np.int64)
    best, from_j, by_class = np.inf, -1, -1
    for j in range(i):
        near = sets.least_s[i] - sets.least_s[j] < target_s
        if not near or not is_subset(sets.bits[j], sets.bits[i]):
            continue
        num_open = -1
        for c in range(lat.previous.shape[1]):
            before = lat.previous[s, c]
            if before < 0 or not has_state(reached, j, before):
                continue
            if num_open < 0:
                num_open = open_edges(lat, sets.bits[j], opened)
                stage_rows(opened, num_open, sets.bits, sets.base, one, paid)
            cost = stage_cost(lat, sets, j, i, c, paid[0])
            if cost < best:
                best, from_j, by_class = cost, j, c
    return (best, from_j, by_class) if best < target_s else (np.inf, -1, -1)


@numba.njit(cache=True, nogil=True)
@no_type_check
def trace_back(lat, sets, opened, target_s, reached):
    """(down-set, class, seconds) of each stage, from the last to the first: three arrays.

    Stages are found again by computing the same costs, which saves a pointer for every value.
    """
    n = sets.bits.shape[0]
    ends, classes, costs = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n)
    i, s, count = n - 1, 0, 0
    while not has_state(reached, i, s):
        s += 1
    while i > 0:
        cost, j, c = _stage_before(lat, sets, opened, target_s, reached, i, s)
        if j >= 0:
            ends[count], classes[count], costs[count] = i, c, cost
            count, i, s = count + 1, j, lat.previous[s, c]
            continue
        # No last stage: the state holds because fewer devices do.
        for c in range(lat.previous.shape[1]):
            if lat.previous[s, c] >= 0 and has_state(reached, i, lat.previous[s, c]):
                s = lat.previous[s, c]
                break
    return ends[:count], classes[:count], costs[:count]
