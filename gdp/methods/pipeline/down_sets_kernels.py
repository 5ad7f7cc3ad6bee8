r"""The dynamic program over pairs of down-sets. Loads numba: import it inside functions.

    best(I, u) = min over J inside I and replica groups k of max(best(J, u - k), cost_k(I \\ J))

where u counts the devices used of each class, and a group is one device or several. Down-sets are
sorted so that a subset comes first; each pushes its values to the larger ones. Nothing is kept of a
pair. The arrays are those of `gdp.methods.pipeline.lattice`; `lattice_kernels` has the payments
of a stage.
"""

from typing import no_type_check

import numba
import numpy as np

from gdp.base.kernels.options import BARE
from gdp.methods.pipeline.lattice_kernels import ZERO, busiest_lane_s, element_bit


@numba.njit(**BARE)
@no_type_check
def add_totals(bits, values, total):
    """Add to total [n, K] the sums of values [K, M] over each down-set [n, W], element by element.

    The order of the sums is the same for every down-set, so a subset has at most as much.
    """
    for i in range(bits.shape[0]):
        for x in range(values.shape[1]):
            if bits[i, x >> 6] & element_bit(x):
                for k in range(values.shape[0]):
                    total[i, k] += values[k, x]


@numba.njit(**BARE)
@no_type_check
def open_edges(lat, inside, opened):
    """Fill `opened` with the hyperedges that are open at a down-set; the number of them.

    Each is the set of its pins outside, as (word, mask) pairs.
    """
    k, slot = 0, 0
    for edge in range(lat.low.size):
        count = lat.low[edge]
        for p in range(lat.pin_start[edge], lat.pin_start[edge + 1]):
            if inside[lat.pin[p] >> 6] & element_bit(lat.pin[p]):
                count += 1
        if count == 0 or count == lat.pins_of[edge]:
            continue
        tail = lat.tail[edge]
        opened.start[k] = slot
        opened.row[k] = lat.row[edge]
        opened.never_closes[k] = lat.high[edge] > 0
        opened.w_in[k], opened.w_out[k] = lat.w_in[edge], lat.w_out[edge]
        opened.tail_word[k], opened.tail_mask[k] = 0, ZERO
        if tail >= 0 and inside[tail >> 6] & element_bit(tail) == ZERO:
            opened.tail_word[k], opened.tail_mask[k] = tail >> 6, element_bit(tail)
        for p in range(lat.pin_start[edge], lat.pin_start[edge + 1]):
            word, mask = lat.pin[p] >> 6, element_bit(lat.pin[p])
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


@numba.njit(**BARE)
@no_type_check
def stage_rows(opened, num_open, bits, base, found, count, paid):
    """Fill paid [k, R] with the payments of the stage between J (in `opened`) and down-set
    found[k]."""
    for n in range(count):
        i = found[n]
        for r in range(base.shape[1]):
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


@numba.njit(**BARE)
@no_type_check
def stage_cost(lat, sets, j, i, group, paid):
    """Seconds a sample of the stage between down-sets j and i on a group; inf if it cannot be."""
    c = lat.group_class[group]
    if sets.barred[i, c] != sets.barred[j, c]:
        return np.inf
    held = sets.held[i] - sets.held[j]
    for k in range(lat.shared_bytes.size):
        for w in range(lat.num_words):
            if lat.shared[k, w] & sets.bits[i, w] & ~sets.bits[j, w]:
                held += lat.shared_bytes[k]
                break
    if held > lat.capacity_bytes[group]:
        return np.inf
    return busiest_lane_s(lat, group, sets.work_s[i, c] - sets.work_s[j, c], paid)


@numba.njit(**BARE)
@no_type_check
def _live_states(lat, best, j, target_s, live):
    """Fill `live` with the states of down-set j worth pushing; the number of them.

    A state is not when fewer devices do as well: `best` becomes the value of at most that many.
    """
    count = 0
    for s in range(best.shape[1]):
        dominated = False
        for c in range(lat.count.size):
            before = lat.previous[s, c]
            if before >= 0 and best[j, before] <= best[j, s]:
                best[j, s] = best[j, before]
                dominated = True
        if best[j, s] < target_s and not dominated:
            live[count] = s
            count += 1
    return count


@numba.njit(**BARE)
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


@numba.njit(**BARE)
@no_type_check
def _promising(lat, j, found, count, moves, num_moves, window, work_s, best, target_s):
    """Keep in `found` the down-sets of which work alone leaves some state to be improved from j.

    moves [X, 3]: the state of j, the group of the next stage, and the state it leads to.
    """
    kept = 0
    for k in range(count):
        i = found[k]
        for n in range(num_moves):
            s = moves[n, 2]
            if window[i, s >> 6] & element_bit(s) == ZERO:
                continue
            limit = min(best[i, s], target_s)
            c, share = lat.group_class[moves[n, 1]], lat.group_share[moves[n, 1]]
            work = (work_s[i, c] - work_s[j, c]) * share
            if best[j, moves[n, 0]] < limit and work < limit:
                found[kept] = i
                kept += 1
                break
    return kept


@numba.njit(**BARE)
@no_type_check
def _push(lat, sets, best, j, room, count, num_moves, target_s):
    """Improve the states of the down-sets in `room.found` from those of j."""
    for k in range(count):
        i, last, cost = room.found[k], -1, np.inf
        for n in range(num_moves):
            s, c = room.moves[n, 2], room.moves[n, 1]
            if sets.window[i, s >> 6] & element_bit(s) == ZERO:
                continue
            if c != last:
                last, cost = c, stage_cost(lat, sets, j, i, c, room.paid[k])
            value = max(best[j, room.moves[n, 0]], cost)
            if value < target_s and value < best[i, s]:
                best[i, s] = value


@numba.njit(**BARE)
@no_type_check
def _moves(lat, room, num_live):
    """Fill `room.moves` with the moves of the live states, ascending in group; the number of them.

    `room.wanted` becomes the states that they lead to.
    """
    count = 0
    for w in range(room.wanted.size):
        room.wanted[w] = ZERO
    for c in range(lat.following.shape[1]):
        for k in range(num_live):
            s = lat.following[room.live[k], c]
            if s >= 0:
                room.moves[count, 0], room.moves[count, 1] = room.live[k], c
                room.moves[count, 2] = s
                count += 1
                room.wanted[s >> 6] |= element_bit(s)
    return count


@numba.njit(**BARE)
@no_type_check
def extent(sets, wanted):
    """(first, last + 1) down-set whose window holds a wanted state."""
    start, stop = sets.bits.shape[0], 0
    for s in range(sets.first.size):
        if wanted[s >> 6] & element_bit(s):
            start = min(start, sets.first[s])
            stop = max(stop, sets.last[s] + 1)
    return start, stop


@numba.njit(**BARE)
@no_type_check
def push_values(lat, sets, opened, room, target_s, first, end, best):
    """Push the values of the down-sets first..end-1 to those that contain them.

    best [n, S] holds the least dearest stage so far, inf where nothing below the target is known.
    """
    n = best.shape[0]
    for j in range(first, min(end, n - 1)):
        for s in range(best.shape[1]):  # what is known of the whole is a target for the rest
            target_s = min(target_s, best[n - 1, s])
        num_live = _live_states(lat, best, j, target_s, room.live)
        if num_live == 0:
            continue
        num_moves = _moves(lat, room, num_live)
        start, stop = extent(sets, room.wanted)
        horizon_s = sets.least_s[j] + target_s * lat.most
        count = candidates(
            j, start, stop, horizon_s, room.wanted, sets.bits, sets.window, sets.least_s, room.found
        )
        count = _promising(
            lat, j, room.found, count, room.moves, num_moves, sets.window, sets.work_s, best,
            target_s,
        )  # fmt: skip
        if count:
            num_open = open_edges(lat, sets.bits[j], opened)
            stage_rows(opened, num_open, sets.bits, sets.base, room.found, count, room.paid)
            _push(lat, sets, best, j, room, count, num_moves, target_s)


@numba.njit(**BARE)
@no_type_check
def is_subset(sets, j, i):
    """Test that down-set j lies inside down-set i."""
    outside = ZERO
    for w in range(sets.bits.shape[1]):
        outside |= sets.bits[j, w] & ~sets.bits[i, w]
    return outside == ZERO


@numba.njit(**BARE)
@no_type_check
def _stage_before(lat, sets, opened, room, target_s, best, i, s):
    """(cost, down-set, group) of the cheapest stage below the target that ends at i in state s."""
    least, from_j, by_class = np.inf, -1, -1
    room.found[0] = i
    # The least work is a sum in another order than the stage's own, which may be the target itself.
    horizon_s = target_s * lat.most + 1e-9 * (target_s + sets.least_s[i])
    for j in range(i):
        near = sets.least_s[i] - sets.least_s[j] < horizon_s
        if not near or not is_subset(sets, j, i):
            continue
        num_open = -1
        for c in range(lat.previous.shape[1]):
            before = lat.previous[s, c]
            if before < 0 or best[j, before] >= target_s:
                continue
            if num_open < 0:
                num_open = open_edges(lat, sets.bits[j], opened)
                stage_rows(opened, num_open, sets.bits, sets.base, room.found, 1, room.paid)
            cost = stage_cost(lat, sets, j, i, c, room.paid[0])
            if cost < least:
                least, from_j, by_class = cost, j, c
    if least < target_s:
        return least, from_j, by_class
    return np.inf, -1, -1


@numba.njit(**BARE)
@no_type_check
def trace_back(lat, sets, opened, room, target_s, best, ends, classes, costs):
    """Fill in the (down-set, group, seconds) of each stage, last to first; the number of stages.

    -1 where `best` is not as the program over pairs leaves it. Stages are found again by
    computing the same costs, which saves a pointer for every value.
    """
    i, s, count = sets.bits.shape[0] - 1, 0, 0
    while best[i, s] >= target_s:
        s += 1
    while i > 0:
        cost, j, c = _stage_before(lat, sets, opened, room, target_s, best, i, s)
        if j >= 0:
            ends[count], classes[count], costs[count] = i, c, cost
            count, i, s = count + 1, j, lat.previous[s, c]
            continue
        # No last stage: the state holds because fewer devices do.
        fewer = -1
        for c in range(lat.count.size):
            if lat.previous[s, c] >= 0 and best[i, lat.previous[s, c]] < target_s:
                fewer = lat.previous[s, c]
        if fewer < 0:
            return -1
        s = fewer
    return count
