"""Whether stages below a target cover the graph. Loads numba: import it inside functions.

A down-set J is reached in a state (devices used of each class) when stages that each take less than
the target cover it with them. States of a down-set are one bit vector, and to use one more device
(or crew) shifts it, so a pair (J, I) costs a few word operations for all states together:

    reached(I) |= next_k(reached(J))  for every crew k with cost_k(I \\ J) < target

Down-sets are sorted so that a subset comes first. Nothing is kept of a pair.
"""

from typing import no_type_check

import numba
import numpy as np

from gdp.kernels.options import BARE
from gdp.methods.pipeline.lattice_kernels import ZERO
from gdp.methods.pipeline.stage_kernels import (
    candidates,
    extent,
    open_edges,
    stage_cost,
    stage_rows,
)


@numba.njit(**BARE)
@no_type_check
def _next_states(can_add, stride, states, out):
    """Fill `out` with the states that have the devices of a crew more than some in `states`."""
    words, bits = stride >> 6, np.uint64(stride & 63)
    for w in range(states.size - 1, -1, -1):
        moved = ZERO
        if w >= words:
            moved = (states[w - words] & can_add[w - words]) << bits
            if bits and w > words:
                moved |= (states[w - words - 1] & can_add[w - words - 1]) >> (np.uint64(64) - bits)
        out[w] = moved


@numba.njit(**BARE)
@no_type_check
def _keep_light(lat, j, found, count, leads, missing, work_s, target_s):
    """Keep in `found` the down-sets that some useful crew may reach by its work alone."""
    kept = 0
    for n in range(count):
        i, keep = found[n], False
        for k in range(leads.shape[0]):
            c = lat.crew_class[k]
            if (work_s[i, c] - work_s[j, c]) * lat.crew_share[k] < target_s:
                for w in range(leads.shape[1]):
                    keep |= leads[k, w] & missing[i, w] != ZERO
        if keep:
            found[kept] = i
            kept += 1
    return kept


@numba.njit(**BARE)
@no_type_check
def _close_upward(lat, reached, moved):
    """A state is reached when fewer devices reach it."""
    for c in range(lat.count.size):
        for _ in range(lat.count[c]):
            _next_states(lat.can_add[c], lat.stride[c], reached, moved)
            for w in range(moved.size):
                reached[w] |= moved[w]


@numba.njit(**BARE)
@no_type_check
def _brings_news(lead, missing):
    news = ZERO
    for w in range(lead.size):
        news |= lead[w] & missing[w]
    return news != ZERO


@numba.njit(**BARE)
@no_type_check
def push_states(lat, sets, opened, room, target_s, first, end, reached, missing):
    """Push the down-sets first..end-1 to those that contain them; the number of pairs costed.

    `reached` and `missing` [n, V] hold the states so far and those of the window still wanted.
    Stops early once the full down-set is reached.
    """
    n = sets.bits.shape[0]
    words, num_crews = reached.shape[1], lat.stride.size
    pairs = 0
    for j in range(first, min(end, n - 1)):
        known = ZERO
        for w in range(words):
            known |= reached[j, w]
            room.wanted[w] = ZERO
        if known == ZERO:
            continue
        for c in range(num_crews):
            _next_states(lat.can_add[c], lat.stride[c], reached[j], room.leads[c])
            for w in range(words):
                room.wanted[w] |= room.leads[c, w]
        start, stop = extent(sets, room.wanted)
        horizon_s = sets.least_s[j] + target_s * lat.most
        count = candidates(
            j, start, stop, horizon_s, room.wanted, sets.bits, missing, sets.least_s, room.found
        )
        count = _keep_light(lat, j, room.found, count, room.leads, missing, sets.work_s, target_s)
        pairs += count
        if count == 0:
            continue
        num_open = open_edges(lat, sets.bits[j], opened)
        stage_rows(opened, num_open, sets.bits, sets.base, room.found, count, room.paid)
        for k in range(count):
            i = room.found[k]
            for c in range(num_crews):
                if not _brings_news(room.leads[c], missing[i]):
                    continue
                if stage_cost(lat, sets, j, i, c, room.paid[k]) < target_s:
                    for w in range(words):
                        reached[i, w] |= room.leads[c, w]
                    _close_upward(lat, reached[i], room.moved)
                    for w in range(words):
                        missing[i, w] &= ~reached[i, w]
        if _brings_news(reached[n - 1], reached[n - 1]):
            break
    return pairs
