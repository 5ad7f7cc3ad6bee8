"""Numba kernels of contiguous blocks: what enters each block, and the best cut points.

Axes: Q positions in a sequence of groups, K candidate cut points, D devices in their order.
"""

from typing import no_type_check

import numba
import numpy as np

from gdp.base.kernels.cache import KEEP
from gdp.base.kernels.options import BARE, INLINE
from gdp.base.kernels.struct import as_struct
from gdp.problem.arrays import Arrays

as_struct(Arrays)


@numba.njit(**INLINE)
@no_type_check
def add_to_blocks(counts, above, upto, after, value):
    """Add a value to all blocks from cuts above + 1 .. upto to cuts beyond `after`."""
    counts[above + 1, after + 1] += value
    counts[upto + 1, after + 1] -= value


@numba.njit(**BARE)
@no_type_check
def fill_block_inputs(a, sequence, place, piece, reader, tensors, sent_bytes, openers):
    """tensors, sent_bytes, openers [K + 1, K + 1], zero before: of block cuts[x]..cuts[y], what it
    receives, and the ops in it that open a segment, as sums over both axes up to [x, y].

    It receives every tensor made outside and read inside, once. Openers are the ops that read any
    of those, or an input of the graph, or nothing, or what is made later in the sequence. `place`
    [G] is where each group is in the sequence, -1 where it is not; `piece` [Q] the cut before each
    position; `reader` [T] the piece of the last reader so far, -1 before.

    A tensor enters the blocks between its maker, or the reader before, and a reader, and not those
    that hold its maker: each reader adds a rectangle by two corners. O(N + E).
    """
    one = np.int64(1)
    for q in range(sequence.shape[0]):
        here = piece[q]
        for z in range(a.group_start[sequence[q]], a.group_start[sequence[q] + 1]):
            i = a.group_op[z]
            opens_above = here if a.in_start[i] < a.in_start[i + 1] else -1
            for k in range(a.in_start[i], a.in_start[i + 1]):
                t = a.in_tensor[k]
                at = place[a.group[a.producer[t]]]
                made = piece[at] if at >= 0 else -1
                later = at > q or a.is_input[a.producer[t]]
                opens_above = min(opens_above, -1 if later else made)
                if reader[t] < here:
                    above = max(reader[t], made) if made <= here else reader[t]
                    add_to_blocks(tensors, above, here, here, one)
                    add_to_blocks(sent_bytes, above, here, here, a.sent_bytes[t])
                    if made > here:  # but for those that hold the maker, too
                        add_to_blocks(tensors, above, here, made, -one)
                        add_to_blocks(sent_bytes, above, here, made, -a.sent_bytes[t])
                    reader[t] = here
            add_to_blocks(openers, opens_above, here, here, one)


@numba.njit(cache=KEEP, nogil=True)
@no_type_check
def best_cuts(work_s, weight_bytes, receive_s, openers, order, segment_s, room_bytes, in_turn):
    """The cut points of least largest stage, or where stages run in turn of least sum. O(D K^2).

    `work_s` [D, K] and `weight_bytes` [K] are sums up to each cut. least[j, y] = min over x <= y of
    least[j - 1, x] and stage(order[j], x, y), added or the larger of them. A stage computes and
    receives, of many samples at the same time; it is infinite over its memory. Empty stages cost
    nothing. Returns (seconds, ends [D]); the seconds are infinite where nothing fits.
    """
    num_devices, num_cuts = order.shape[0], weight_bytes.shape[0]
    least = np.full((num_devices + 1, num_cuts), np.inf)
    best_from = np.zeros((num_devices + 1, num_cuts), np.int64)
    least[0, 0] = 0.0
    for j in range(num_devices):
        d = order[j]
        for y in range(num_cuts):
            least[j + 1, y], best_from[j + 1, y] = least[j, y], y
            for x in range(y - 1, -1, -1):
                busy = work_s[d, y] - work_s[d, x]
                if busy >= least[j + 1, y] or weight_bytes[y] - weight_bytes[x] > room_bytes[d]:
                    break  # an earlier start only adds to both
                if least[j, x] >= least[j + 1, y]:
                    continue
                opened_s = segment_s[d] * openers[x, y]
                if in_turn:
                    value = least[j, x] + busy + opened_s + receive_s[x, y]
                else:
                    value = max(busy + opened_s, receive_s[x, y], least[j, x])
                if value < least[j + 1, y]:
                    least[j + 1, y], best_from[j + 1, y] = value, x
    ends = np.zeros(num_devices, np.int64)
    y = num_cuts - 1
    for j in range(num_devices, 0, -1):
        ends[j - 1] = y
        y = best_from[j, y]
    return least[num_devices, num_cuts - 1], ends
