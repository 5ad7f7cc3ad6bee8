"""Numba kernels of what the decoder sees of an (op, device) pair: its dynamic features.

They read the running estimate of the schedule (`decode_kernels.State`) and what advisers propose.
"""

import typing

import numba
import numpy as np

from gdp.kernel import INNER, INNER_INLINE

NUM_PAIR_FEATURES = 35
"""Dynamic features of one (op, device) pair; `pair_features` fills them in this order."""
FIRST_ADVICE = 26
"""Where what advisers say begins: the incumbent's device, each adviser's, and sums over them."""

NEIGHBOURHOOD = 48
"""Uses looked at for the pull of future readers; bounds the work per op on graphs with hubs."""


@numba.njit(**INNER)
@typing.no_type_check
def squash(x):
    return np.arcsinh(x) / 3.0


@numba.njit(**INNER_INLINE)
@typing.no_type_check
def normalise(share):
    """Scale to sum 1, where there is anything."""
    total = 0.0
    for i in range(share.shape[0]):
        total += share[i]
    if total > 0:
        for i in range(share.shape[0]):
            share[i] /= total


@numba.njit(**INNER)
@typing.no_type_check
def demand(p, s, op, i):
    """Bytes that an op (and the weights of its group) would add on a device."""
    need = 0.0
    if s.group_device[p.group[op]] < 0:
        for k in range(p.member_first[p.group[op]], p.member_first[p.group[op] + 1]):
            member = p.member[k]
            if not s.holds[p.weight[member], i]:
                need += p.weight_size[p.weight[member]]
    for k in range(p.in_first[op], p.in_first[op + 1]):
        if s.arrival_s[p.in_tensor[k], i] == np.inf:
            need += p.copies * p.tensor_bytes[p.in_tensor[k]]
    for k in range(p.out_first[op], p.out_first[op + 1]):
        need += p.tensor_bytes[p.out_tensor[k]]
    return need


@numba.njit(**INNER)
@typing.no_type_check
def arrival(p, s, t, i):
    """When a tensor would be on a device if it were sent there now, and the seconds of sending."""
    if s.arrival_s[t, i] < np.inf:
        return s.arrival_s[t, i], 0.0
    home = s.placed[p.producer[t], 0]
    seconds = p.latency_s[home, i] + p.tensor_bytes[t] * p.s_per_byte[home, i]
    start = max(s.finish_s[p.producer[t]], s.channel_s[p.channel[home, i]])
    return start + seconds, seconds


@numba.njit(**INNER)
@typing.no_type_check
def opens_segment(p, s, op, i):
    """Whether an op on a device starts a cut sub-model: it reads from elsewhere, or nothing."""
    if p.is_io[op]:
        return False
    if p.in_first[op] == p.in_first[op + 1]:
        return True
    for k in range(p.in_first[op], p.in_first[op + 1]):
        made_by = p.producer[p.in_tensor[k]]
        if p.is_io[made_by] or s.placed[made_by, 0] != i:
            return True
    return False


@numba.njit(**INNER)
@typing.no_type_check
def headroom(p, s, op, i):
    """Share of a device's memory that stays free with the op on it, in [-1, 1]."""
    left = p.memory_bytes[i] - s.weight_bytes[i] - s.live_bytes[i] - demand(p, s, op, i)
    return max(-1.0, left / p.memory_bytes[i])


@numba.njit(**INNER)
@typing.no_type_check
def future_pull(p, s, op, pull, kin, sibling):
    """Where the op's readers will want it, as shares over devices.

    pull: bytes of the readers' other inputs that are already placed; kin: readers whose group is
    decided; sibling: placed readers of the op's own inputs.
    """
    seen = 0
    for q in range(p.out_first[op], p.out_first[op + 1]):
        t = p.out_tensor[q]
        for k in range(p.reader_first[t], p.reader_first[t + 1]):
            reader = p.reader[k]
            decided = s.group_device[p.group[reader]]
            if decided >= 0:
                kin[decided] += 1.0
            for m in range(p.in_first[reader], p.in_first[reader + 1]):
                seen += 1
                home = s.placed[p.producer[p.in_tensor[m]], 0]
                if home >= 0:
                    size = p.tensor_bytes[p.in_tensor[m]] + 1.0
                    pull[home] += size
            if seen > NEIGHBOURHOOD:
                break
        if seen > NEIGHBOURHOOD:
            break
    normalise(pull)
    normalise(kin)
    seen = 0
    for m in range(p.in_first[op], p.in_first[op + 1]):
        t = p.in_tensor[m]
        for k in range(p.reader_first[t], p.reader_first[t + 1]):
            seen += 1
            if s.placed[p.reader[k], 0] >= 0:
                sibling[s.placed[p.reader[k], 0]] += 1.0
            if seen > NEIGHBOURHOOD:
                break
    normalise(sibling)


@numba.njit(**INNER)
@typing.no_type_check
def advised(p, s, op, mask, row):
    """Fill in what the advisers say of an op: row 0 of the advice is the incumbent.

    One feature per adviser, then the advisers' votes by quality, the share of the op's readers that
    the incumbent has on the device, and how far the decode has followed the incumbent so far.
    """
    count = p.advice.shape[0]
    if count == 0:
        return
    last = FIRST_ADVICE + count
    for k in range(count):
        i = p.advice[k, op]
        if mask[i]:
            row[i, FIRST_ADVICE + k] = 1.0
            row[i, last] += p.advice_weight[k]
    i = p.advice[0, op]
    if mask[i]:
        row[i, last + 2] = s.record[3]
    seen = 0
    for q in range(p.out_first[op], p.out_first[op + 1]):
        seen += p.reader_first[p.out_tensor[q] + 1] - p.reader_first[p.out_tensor[q]]
    if seen == 0:
        return
    share, left = 1.0 / min(seen, NEIGHBOURHOOD), NEIGHBOURHOOD
    for q in range(p.out_first[op], p.out_first[op + 1]):
        t = p.out_tensor[q]
        for k in range(p.reader_first[t], p.reader_first[t + 1]):
            i = p.advice[0, p.reader[k]]
            if mask[i] and left > 0:
                row[i, last + 1] += share
            left -= 1


@numba.njit(**INNER)
@typing.no_type_check
def pair_features(p, s, op, mask, row, work):
    """Fill `row` [D, F] with the dynamic features of an op on every legal device."""
    d = p.cost_s.shape[1]
    scale = p.scale_s
    for i in range(d):
        for f in range(row.shape[1]):
            row[i, f] = 0.0
        for k in range(work.shape[0]):
            work[k, i] = 0.0
    begin, ready, end, missing, sent = work[0], work[1], work[2], work[3], work[4]
    resident, pull, kin, sibling = work[5], work[6], work[7], work[8]
    future_pull(p, s, op, pull, kin, sibling)
    total_in, heaviest, heaviest_bytes = 0.0, -1, -1.0
    for k in range(p.in_first[op], p.in_first[op + 1]):
        t = p.in_tensor[k]
        size = p.tensor_bytes[t] + 1.0
        total_in += size
        if size > heaviest_bytes:
            heaviest_bytes, heaviest = size, s.placed[p.producer[t], 0]
        for i in range(d):
            if mask[i]:
                at, seconds = arrival(p, s, t, i)
                ready[i] = max(ready[i], at)
                missing[i] += seconds
                sent[i] += 1.0 if seconds > 0 else 0.0
                resident[i] += size if s.arrival_s[t, i] < np.inf else 0.0
    least_begin, least_ready, least_free, least_end = np.inf, np.inf, np.inf, np.inf
    quickest, top_load = np.inf, 0.0
    argmin = -1
    for i in range(d):
        if not mask[i]:
            continue
        cost = p.cost_s[op, i]
        if p.segment_s[i] > 0 and opens_segment(p, s, op, i):
            cost += p.segment_s[i]
        begin[i] = max(ready[i], s.free_s[i])
        end[i] = begin[i] + cost
        least_begin, least_ready = min(least_begin, begin[i]), min(least_ready, ready[i])
        least_free, quickest = min(least_free, s.free_s[i]), min(quickest, cost)
        if end[i] < least_end:
            least_end, argmin = end[i], i
    for i in range(d):
        top_load = max(top_load, s.load_s[i])
    for c in range(p.num_channels):
        top_load = max(top_load, s.channel_load_s[c])
    for i in range(d):
        if not mask[i]:
            continue
        cost = end[i] - begin[i]
        x = row[i]
        x[0] = squash((end[i] - least_end) / scale)
        x[1] = squash((begin[i] - least_begin) / scale)
        x[2] = squash((ready[i] - least_ready) / scale)
        x[3] = squash((s.free_s[i] - least_free) / scale)
        x[4] = squash(max(0.0, ready[i] - s.free_s[i]) / scale)
        x[5] = squash(max(0.0, s.free_s[i] - ready[i]) / scale)
        x[6] = squash(missing[i] / scale)
        x[7] = resident[i] / total_in if total_in > 0 else 0.0
        x[8] = s.load_s[i] / (s.record[1] + 1e-30)
        x[9] = s.load_s[i] / p.fair_s
        x[10] = headroom(p, s, op, i)
        x[11] = squash((cost - quickest) / scale)
        x[12] = np.log(max(cost, 1e-3 * scale) / max(quickest, 1e-3 * scale)) / 3.0
        x[13] = 1.0 if i == argmin else 0.0
        x[14] = 1.0 if i == heaviest else 0.0
        x[15] = pull[i]
        x[16] = kin[i]
        x[17] = sibling[i]
        x[18] = s.recent[i]
        x[19] = 1.0 if i == p.host else 0.0
        x[20] = 1.0 if s.used[i] else 0.0
        x[21] = squash((end[i] + p.tail_s[op] - s.record[0]) / scale)
        x[22] = squash((s.load_s[i] + cost - top_load) / scale)
        x[23] = squash(missing[i] / (cost + 1e-3 * scale))
        x[24] = sent[i] / 4.0
        x[25] = squash((missing[i] + cost - quickest) / scale)
    advised(p, s, op, mask, row)
