"""Numba kernels of the features of every (op, device) pair, from the schedule decoded so far."""

import typing

import numba
import numpy as np

from gdp.base.kernels.options import INNER, INNER_INLINE
from gdp.policy.decode_memory_kernels import room
from gdp.policy.view.decode_problem import PAIR

NEIGHBOURHOOD = 48
"""Uses looked at for the pull of future readers; bounds the work per op on graphs with hubs."""


@numba.njit(**INNER)
@typing.no_type_check
def squash(x):
    """Linear near zero and logarithmic far out, as `timing.squash`."""
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
def arrival(p, s, t, i):
    """When a tensor would be on a device if it were sent there now, and the seconds of sending."""
    if s.arrival_s[t, i] < np.inf:
        return s.arrival_s[t, i], 0.0
    home = s.placed[p.producer[t], 0]
    seconds = p.latency_s[home, i] + p.sent_bytes[t] * p.s_per_byte[home, i]
    start, channel = s.finish_s[p.producer[t]], p.channel[home, i]
    if channel >= 0:
        start = max(start, s.channel_s[channel])
    return start + seconds, seconds


@numba.njit(**INNER)
@typing.no_type_check
def opens_segment(p, s, op, i):
    """True where an op on a device starts a cut sub-model: it reads from elsewhere, or nothing."""
    if p.is_io[op]:
        return False
    if p.in_start[op] == p.in_start[op + 1]:
        return True
    for k in range(p.in_start[op], p.in_start[op + 1]):
        made_by = p.producer[p.in_tensor[k]]
        if p.is_io[made_by] or s.placed[made_by, 0] != i:
            return True
    return False


@numba.njit(**INNER)
@typing.no_type_check
def future_pull(p, s, op, pull, kin, sibling):
    """Preferences of the op's readers, as shares over devices.

    pull: bytes of the readers' other inputs that are already placed; kin: readers whose group is
    decided; sibling: placed readers of the op's own inputs.
    """
    seen = 0
    for q in range(p.out_start[op], p.out_start[op + 1]):
        t = p.out_tensor[q]
        for k in range(p.use_start[t], p.use_start[t + 1]):
            reader = p.use_op[k]
            decided = s.group_device[p.group[reader]]
            if decided >= 0:
                kin[decided] += 1.0
            for m in range(p.in_start[reader], p.in_start[reader + 1]):
                seen += 1
                home = s.placed[p.producer[p.in_tensor[m]], 0]
                if home >= 0:
                    size = p.sent_bytes[p.in_tensor[m]] + 1.0
                    pull[home] += size
            if seen > NEIGHBOURHOOD:
                break
        if seen > NEIGHBOURHOOD:
            break
    normalise(pull)
    normalise(kin)
    seen = 0
    for m in range(p.in_start[op], p.in_start[op + 1]):
        t = p.in_tensor[m]
        for k in range(p.use_start[t], p.use_start[t + 1]):
            seen += 1
            if s.placed[p.use_op[k], 0] >= 0:
                sibling[s.placed[p.use_op[k], 0]] += 1.0
            if seen > NEIGHBOURHOOD:
                break
    normalise(sibling)


@numba.njit(**INNER)
@typing.no_type_check
def advised(p, s, op, mask, row):
    """Fill in the advisers' devices of an op: row 0 of the advice is the incumbent.

    One feature per adviser, then the advisers' votes by quality, the share of the op's readers that
    the incumbent has on the device, and how far the decode has followed the incumbent so far.
    """
    count = p.advice.shape[0]
    if count == 0:
        return
    for k in range(count):
        i = p.advice[k, op]
        if mask[i]:
            row[i, PAIR.incumbent + k] = 1.0
            row[i, PAIR.votes] += p.advice_weight[k]
    i = p.advice[0, op]
    if mask[i]:
        row[i, PAIR.followed] = s.record[3]
    seen = 0
    for q in range(p.out_start[op], p.out_start[op + 1]):
        seen += p.use_start[p.out_tensor[q] + 1] - p.use_start[p.out_tensor[q]]
    if seen == 0:
        return
    share, remaining = 1.0 / min(seen, NEIGHBOURHOOD), NEIGHBOURHOOD
    for q in range(p.out_start[op], p.out_start[op + 1]):
        t = p.out_tensor[q]
        for k in range(p.use_start[t], p.use_start[t + 1]):
            i = p.advice[0, p.use_op[k]]
            if mask[i] and remaining > 0:
                row[i, PAIR.readers] += share
            remaining -= 1


@numba.njit(**INNER)
@typing.no_type_check
def gather_inputs(p, s, op, mask, row, work):
    """Fill in the features of an op's inputs, and when they would be on every legal device."""
    ready, missing, sent, resident = work[1], work[3], work[4], work[5]
    total, heaviest, heaviest_bytes = 0.0, -1, -1.0
    for k in range(p.in_start[op], p.in_start[op + 1]):
        t = p.in_tensor[k]
        size = p.sent_bytes[t] + 1.0
        total += size
        if size > heaviest_bytes:
            heaviest_bytes, heaviest = size, s.placed[p.producer[t], 0]
        for i in range(mask.shape[0]):
            if mask[i]:
                at, seconds = arrival(p, s, t, i)
                ready[i] = max(ready[i], at)
                missing[i] += seconds
                sent[i] += 1.0 if seconds > 0 else 0.0
                resident[i] += size if s.arrival_s[t, i] < np.inf else 0.0
    for i in range(mask.shape[0]):
        if mask[i]:
            row[i, PAIR.transfer] = squash(missing[i] / p.scale_s)
            row[i, PAIR.resident] = resident[i] / total if total > 0 else 0.0
            row[i, PAIR.heaviest] = 1.0 if i == heaviest else 0.0
            row[i, PAIR.sent] = sent[i] / 4.0


@numba.njit(**INNER)
@typing.no_type_check
def gather_times(p, s, op, mask, row, work):
    """Fill in when an op would begin and end on every legal device, compared with the others."""
    begin, ready, end, missing, scale = work[0], work[1], work[2], work[3], p.scale_s
    least_begin, least_ready, least_free, least_end = np.inf, np.inf, np.inf, np.inf
    quickest, argmin = np.inf, -1
    for i in range(mask.shape[0]):
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
    for i in range(mask.shape[0]):
        if not mask[i]:
            continue
        x, cost = row[i], end[i] - begin[i]
        x[PAIR.end] = squash((end[i] - least_end) / scale)
        x[PAIR.begin] = squash((begin[i] - least_begin) / scale)
        x[PAIR.ready] = squash((ready[i] - least_ready) / scale)
        x[PAIR.free] = squash((s.free_s[i] - least_free) / scale)
        x[PAIR.device_waits] = squash(max(0.0, ready[i] - s.free_s[i]) / scale)
        x[PAIR.inputs_wait] = squash(max(0.0, s.free_s[i] - ready[i]) / scale)
        x[PAIR.slower] = squash((cost - quickest) / scale)
        x[PAIR.slower_log] = np.log(max(cost, 1e-3 * scale) / max(quickest, 1e-3 * scale)) / 3.0
        x[PAIR.ends_first] = 1.0 if i == argmin else 0.0
        x[PAIR.past_end] = squash((end[i] + p.tail_s[op] - s.record[0]) / scale)
        x[PAIR.transfer_share] = squash(missing[i] / (cost + 1e-3 * scale))
        x[PAIR.detour] = squash((missing[i] + cost - quickest) / scale)


@numba.njit(**INNER)
@typing.no_type_check
def gather_loads(p, s, op, mask, row, work):
    """Fill in how busy and how full every legal device is; needs the times."""
    begin, end, top = work[0], work[2], 0.0
    for i in range(mask.shape[0]):
        top = max(top, s.load_s[i])
    for c in range(p.num_channels):
        top = max(top, s.channel_load_s[c])
    for i in range(mask.shape[0]):
        if not mask[i]:
            continue
        x, cost = row[i], end[i] - begin[i]
        x[PAIR.load_share] = s.load_s[i] / (s.record[1] + 1e-30)
        x[PAIR.fair_load] = s.load_s[i] / p.fair_s
        x[PAIR.headroom] = max(-1.0, room(p, s, op, i) / p.memory_bytes[i])
        x[PAIR.recent] = s.recent[i]
        x[PAIR.host] = 1.0 if i == p.host else 0.0
        x[PAIR.used] = 1.0 if s.used[i] else 0.0
        x[PAIR.past_load] = squash((s.load_s[i] + cost - top) / p.scale_s)


@numba.njit(**INNER)
@typing.no_type_check
def pair_features(p, s, op, mask, row, work):
    """Fill `row` [D, F] with the features of an op on every legal device; `work` is [9, D]."""
    for i in range(mask.shape[0]):
        for f in range(row.shape[1]):
            row[i, f] = 0.0
        for k in range(work.shape[0]):
            work[k, i] = 0.0
    pull, kin, sibling = work[6], work[7], work[8]
    future_pull(p, s, op, pull, kin, sibling)
    for i in range(mask.shape[0]):
        if mask[i]:
            row[i, PAIR.pull] = pull[i]
            row[i, PAIR.kin] = kin[i]
            row[i, PAIR.sibling] = sibling[i]
    gather_inputs(p, s, op, mask, row, work)
    gather_times(p, s, op, mask, row, work)
    gather_loads(p, s, op, mask, row, work)
    advised(p, s, op, mask, row)
