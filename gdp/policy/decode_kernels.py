"""Numba kernels of the autoregressive decoder: one placement, op by op.

The kernel keeps a running estimate of the schedule in decode order (append, no insertion) and of
memory, computes from it the features of every (op, device) pair, scores them with the small head,
masks illegal devices, picks one and updates the estimate. The simulator, not this estimate, judges.
"""

import typing

import numba
import numpy as np

from gdp.kernels.options import BARE, INNER, INNER_INLINE
from gdp.kernels.struct import as_struct
from gdp.policy.model.config import Head
from gdp.policy.view.decode_problem import NUM_PAIR_FEATURES, PAIR, DecodeProblem


@numba.njit(**INNER)
@typing.no_type_check
def held_bytes(p, s, t, i, copies):
    """Bytes that a tensor takes on a device: so many copies, one more per later stage if kept.

    Every device is taken to become one stage.
    """
    if p.kept[t]:
        stage = s.stage[i] if s.stage[i] >= 0 else s.num_stages[0]
        copies += s.stage.shape[0] - 1 - stage
    return copies * p.held_bytes[t]


@numba.njit(**INNER)
@typing.no_type_check
def room(p, s, op, i):
    """Bytes left on a device with an op's undecided group on it, at its fullest; may be negative.

    Its weights, the tensors already made that any member reads, and the op's output. Where caches
    lie on another device, what is left there, if that is less.
    """
    weights, tensors, group = s.weight_bytes[i], s.live_bytes[i], p.group[op]
    home, cached = p.cache_home[i], 0
    s.visit[0] += 1
    for k in range(p.group_start[group], p.group_start[group + 1]):
        member = p.group_op[k]
        if not s.holds[p.weight[member], i]:
            weights += p.weight_bytes[p.weight[member]]
        if p.first_cache < p.num_weights:
            cache = p.weight[member] + p.first_cache
            cached += 0 if s.holds[cache, home] else p.weight_bytes[cache]
        for x in range(p.in_start[member], p.in_start[member + 1]):
            t = p.in_tensor[x]
            if s.placed[p.producer[t], 0] >= 0 and not s.held[t, i] and s.seen[t] != s.visit[0]:
                s.seen[t] = s.visit[0]
                tensors += held_bytes(p, s, t, i, p.copies)
    for k in range(p.out_start[op], p.out_start[op + 1]):
        tensors += held_bytes(p, s, p.out_tensor[k], i, 1.0)
    if home == i:
        weights += cached
    need = weights + max(s.fullest_bytes[i], tensors)
    left = min(p.memory_bytes[i] - need, pool_room(p, s, i) - need)
    if home != i and cached > 0:
        need = s.weight_bytes[home] + cached + s.fullest_bytes[home]
        left = min(left, p.memory_bytes[home] - need, pool_room(p, s, home) - need)
    return left


@numba.njit(**INNER)
@typing.no_type_check
def pool_room(p, s, i):
    """Bytes that other devices leave of a memory that they share; all of a device's own."""
    if p.pool[i] < 0:
        return p.memory_bytes[i]
    left = np.float64(p.pool_bytes[p.pool[i]])
    for other in range(p.pool.shape[0]):
        if other != i and p.pool[other] == p.pool[i]:
            left -= s.weight_bytes[other] + s.fullest_bytes[other]
    return left


@numba.njit(**INNER)
@typing.no_type_check
def crowded_reader(p, s, op, more):
    """The device whose placed readers of this op's outputs would overflow its memory.

    -1 where there is none, -2 where there are several. `more` [D] is scratch.
    """
    for i in range(more.shape[0]):
        more[i] = 0.0
    for k in range(p.out_start[op], p.out_start[op + 1]):
        t = p.out_tensor[k]
        for x in range(p.use_start[t], p.use_start[t + 1]):
            i = s.group_device[p.group[p.use_op[x]]]
            if i >= 0 and not s.held[t, i]:
                s.held[t, i] = True  # once each; undone below
                more[i] += held_bytes(p, s, t, i, p.copies)
        for i in range(more.shape[0]):
            s.held[t, i] = False
    crowded = -1
    for i in range(more.shape[0]):
        fullest = max(s.fullest_bytes[i], s.live_bytes[i] + more[i])
        limit = min(p.memory_bytes[i], pool_room(p, s, i))
        if more[i] > 0 and s.weight_bytes[i] + fullest > limit:
            crowded = i if crowded == -1 else -2
    return crowded


@numba.njit(**INNER)
@typing.no_type_check
def receive(p, s, t, i):
    """Hold a copy of a tensor on a device that will read it."""
    if not s.held[t, i]:
        s.held[t, i] = True
        s.live_bytes[i] += held_bytes(p, s, t, i, p.copies)
        s.fullest_bytes[i] = max(s.fullest_bytes[i], s.live_bytes[i])


@numba.njit(**INNER)
@typing.no_type_check
def settle_group(p, s, group, i):
    """Place a group: add its weights and its already produced inputs to the device's memory."""
    s.group_device[group] = i
    for k in range(p.group_start[group], p.group_start[group + 1]):
        member = p.group_op[k]
        weight = p.weight[member]
        if not s.holds[weight, i]:
            s.holds[weight, i] = True
            s.weight_bytes[i] += p.weight_bytes[weight]
        if p.first_cache < p.num_weights:
            cache, home = weight + p.first_cache, p.cache_home[i]
            if not s.holds[cache, home]:
                s.holds[cache, home] = True
                s.weight_bytes[home] += p.weight_bytes[cache]
        for x in range(p.in_start[member], p.in_start[member + 1]):
            if s.placed[p.producer[p.in_tensor[x]], 0] >= 0:
                receive(p, s, p.in_tensor[x], i)


@numba.njit(**INNER)
@typing.no_type_check
def hold_outputs(p, s, op, i):
    """Hold outputs of an op on its device and on the devices of readers already placed."""
    if not p.is_backward[op] and not p.is_io[op] and s.stage[i] < 0:
        s.stage[i] = s.num_stages[0]
        s.num_stages[0] += 1
    for k in range(p.out_start[op], p.out_start[op + 1]):
        t = p.out_tensor[k]
        s.held[t, i] = True
        s.live_bytes[i] += held_bytes(p, s, t, i, 1.0)
        for x in range(p.use_start[t], p.use_start[t + 1]):
            reader = s.group_device[p.group[p.use_op[x]]]
            if reader >= 0:
                receive(p, s, t, reader)
    s.fullest_bytes[i] = max(s.fullest_bytes[i], s.live_bytes[i])
    for k in range(p.out_start[op], p.out_start[op + 1]):
        if s.uses_left[p.out_tensor[k]] == 0:
            drop(p, s, p.out_tensor[k])


@numba.njit(**INNER)
@typing.no_type_check
def read_inputs(p, s, op):
    """Free what an op was the last to read."""
    for k in range(p.in_start[op], p.in_start[op + 1]):
        t = p.in_tensor[k]
        s.uses_left[t] -= 1
        if s.uses_left[t] == 0:
            drop(p, s, t)


@numba.njit(**INNER)
@typing.no_type_check
def drop(p, s, t):
    """Free a tensor that all its readers have read.

    A full pipeline keeps what is sent: the next sample's tensor is on its way while one is read.
    """
    count = 0
    for i in range(s.live_bytes.shape[0]):
        count += s.held[t, i]
    if p.copies > 1.0 and count > 1:
        return
    for i in range(s.live_bytes.shape[0]):
        if s.held[t, i]:
            s.held[t, i] = False
            s.live_bytes[i] -= p.held_bytes[t]


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


class DecodeState(typing.NamedTuple):
    """The machine part-way through a decode. Axes: N ops, T tensors, D devices, C channels."""

    arrival_s: typing.Any  # [T, D] when a tensor is there, inf where it is not
    free_s: typing.Any  # [D] when the last op placed there ends
    channel_s: typing.Any  # [C] when the last transfer ends
    load_s: typing.Any  # [D] busy seconds
    channel_load_s: typing.Any  # [C]
    finish_s: typing.Any  # [N]
    group_device: typing.Any  # [groups], -1 while undecided
    holds: typing.Any  # [weights, D]
    weight_bytes: typing.Any  # [D]
    live_bytes: typing.Any  # [D] of tensors
    fullest_bytes: typing.Any  # [D] the largest `live_bytes` so far
    held: typing.Any  # [T, D] whether a tensor is there or on its way
    seen: typing.Any  # [T] the last visit that counted a tensor
    visit: typing.Any  # [1] number of visits
    stage: typing.Any  # [D] in order of the first forward ops, -1 before
    num_stages: typing.Any  # [1]
    uses_left: typing.Any  # [T]
    used: typing.Any  # [D]
    recent: typing.Any  # [D] decaying share of the latest ops
    record: typing.Any  # [0]: longest finish plus tail so far; [1]: total load; [2]: largest load
    placed: typing.Any  # [N, 1] device of every placed op, -1 before


class DecodeScratch(typing.NamedTuple):
    """Scratch arrays, overwritten at every op."""

    row: typing.Any  # [D, F] float32: the pair features
    logit: typing.Any  # [D]
    mask: typing.Any  # [D] bool
    hidden: typing.Any  # [2, W] float32
    work: typing.Any  # [9, D]


class SeenChoices(typing.NamedTuple):
    """Inputs of the policy at each free choice, for learning."""

    taken: typing.Any  # [N] bool: a choice was free
    legal: typing.Any  # [N, D] bool
    feats: typing.Any  # [N, D, F] float32


as_struct(DecodeProblem, Head, DecodeState, DecodeScratch, SeenChoices)


def new_state(p: typing.Any) -> DecodeState:
    """An empty machine."""
    n, d = p.cost_s.shape
    return DecodeState(
        arrival_s=np.full((len(p.sent_bytes), d), np.inf),
        free_s=np.zeros(d),
        channel_s=np.zeros(p.num_channels),
        load_s=np.zeros(d),
        channel_load_s=np.zeros(p.num_channels),
        finish_s=np.zeros(n),
        group_device=np.full(p.num_groups, -1, dtype=np.int64),
        holds=np.zeros((p.num_weights, d), dtype=np.bool_),
        weight_bytes=np.zeros(d),
        live_bytes=np.zeros(d),
        fullest_bytes=np.zeros(d),
        held=np.zeros((len(p.sent_bytes), d), dtype=np.bool_),
        seen=np.zeros(len(p.sent_bytes), dtype=np.int64),
        visit=np.zeros(1, dtype=np.int64),
        stage=np.full(d, -1, dtype=np.int64),
        num_stages=np.zeros(1, dtype=np.int64),
        uses_left=p.num_uses.copy(),
        used=np.zeros(d, dtype=np.bool_),
        recent=np.zeros(d),
        record=np.zeros(4),
        placed=np.full((n, 1), -1, dtype=np.int64),
    )


def new_scratch(num_devices: int, width: int) -> DecodeScratch:
    """Scratch arrays for a head of `width` hidden units."""
    return DecodeScratch(
        row=np.zeros((num_devices, NUM_PAIR_FEATURES), dtype=np.float32),
        logit=np.zeros(num_devices),
        mask=np.zeros(num_devices, dtype=np.bool_),
        hidden=np.zeros((2, width), dtype=np.float32),
        work=np.zeros((9, num_devices)),
    )


@numba.njit(**BARE)
@typing.no_type_check
def rollout(p, s, x, head, forced, uniform, greedy, temperature, device, seen, keep):
    """Fill `device` [N] with one placement; returns the log-probability of its free choices.

    `s` is an empty machine, `x` scratch. `forced[op] >= 0` fixes the device of an op (teacher
    forcing). With `keep`, `seen` records every free choice.
    """
    total = 0.0
    for step in range(p.cost_s.shape[0]):
        op = p.order[step]
        choice = s.group_device[p.group[op]]
        options = 0
        if choice < 0:
            options = legal_devices(p, s, op, x.mask, x.work[0])
            if forced[op] >= 0 and not x.mask[forced[op]]:
                x.mask[forced[op]] = True
                options += 1
            choice = forced[op]
        if options == 1 and choice < 0:
            choice = first_of(x.mask)
        elif options > 0:
            pair_features(p, s, op, x.mask, x.row, x.work)
            score_pairs(head, op, x.row, x.mask, x.logit, x.hidden)
            if choice < 0:
                if greedy:
                    choice = best_of(x.logit, x.mask)
                else:
                    choice = draw(x.logit, x.mask, temperature, uniform[op])
        if options > 1:
            total += log_probability(x.logit, x.mask, choice)
            if keep:
                record_choice(x, op, seen)
            if p.advice.shape[0] > 0:
                s.record[3] += 0.1 * ((1.0 if choice == p.advice[0, op] else 0.0) - s.record[3])
        device[op] = choice
        commit(p, s, op, choice)
    return total


@numba.njit(**INNER)
@typing.no_type_check
def record_choice(x, op, seen):
    """Record the legal devices and their features at a choice."""
    seen.taken[op] = True
    for i in range(x.row.shape[0]):
        seen.legal[op, i] = x.mask[i]
        for f in range(x.row.shape[1]):
            seen.feats[op, i, f] = x.row[i, f]


@numba.njit(**INNER)
@typing.no_type_check
def first_of(mask):
    """The first device allowed."""
    for i in range(mask.shape[0]):
        if mask[i]:
            return i
    return -1


@numba.njit(**INNER)
@typing.no_type_check
def legal_devices(p, s, op, mask, more):
    """Fill `mask` with the devices that may take an op, and count them; never zero.

    Allowed for the op's whole group; memory for its weights, inputs and outputs, there and where
    they are sent; and of devices that are alike and still empty only the first, since the others
    give the same placement renamed. `more` [D] is scratch.
    """
    d = p.cost_s.shape[1]
    group = p.group[op]
    count = 0
    roomiest = -1
    most = -np.inf
    crowded = crowded_reader(p, s, op, more) if p.mask_memory else -1
    for i in range(d):
        mask[i] = False
        if not p.group_allowed[group, i]:
            continue
        free_bytes = room(p, s, op, i)
        if free_bytes > most:
            most = free_bytes
            roomiest = i
        if p.mask_memory and (free_bytes < 0 or (crowded != -1 and crowded != i)):
            continue
        if p.mask_alike and not s.used[i] and p.twin[i] >= 0 and not s.used[p.twin[i]]:
            continue
        mask[i] = True
        count += 1
    if count == 0:
        mask[roomiest] = True
        count = 1
    return count


@numba.njit(**INNER, fastmath=True)
@typing.no_type_check
def score_pairs(head, op, row, mask, logit, hidden):
    """logit(d) = out . relu(W2 relu(node + device + W1 f) + b): `head.score`, one op."""
    width = head.out.shape[0]
    for i in range(row.shape[0]):
        if not mask[i]:
            continue
        value = np.float32(0.0)
        first, second = hidden[0], hidden[1]
        for j in range(width):
            first[j] = head.node[op, j] + head.device[i, j]
            second[j] = head.bias[j]
        for f in range(row.shape[1]):
            x = row[i, f]
            if x != 0.0:
                for j in range(width):
                    first[j] += x * head.feature[f, j]
        for k in range(width):
            x = first[k]
            if x > 0.0:
                for j in range(width):
                    second[j] += x * head.mixing[k, j]
        for j in range(width):
            if second[j] > 0.0:
                value += second[j] * head.out[j]
        logit[i] = value


@numba.njit(**INNER)
@typing.no_type_check
def best_of(logit, mask):
    """The device of the highest logit among those in the mask; -1 where there is none."""
    best = -1
    for i in range(mask.shape[0]):
        if mask[i] and (best < 0 or logit[i] > logit[best]):
            best = i
    return best


@numba.njit(**INNER)
@typing.no_type_check
def log_probability(logit, mask, choice):
    """Logarithm of the share of one device in the softmax over the mask."""
    top = logit[best_of(logit, mask)]
    total = 0.0
    for i in range(mask.shape[0]):
        if mask[i]:
            total += np.exp(logit[i] - top)
    return logit[choice] - top - np.log(total)


@numba.njit(**INNER)
@typing.no_type_check
def draw(logit, mask, temperature, uniform):
    """A device from the softmax of logit / temperature, by inversion of one uniform number."""
    top = logit[best_of(logit, mask)]
    total = 0.0
    for i in range(mask.shape[0]):
        if mask[i]:
            total += np.exp((logit[i] - top) / temperature)
    target, running, last = uniform * total, 0.0, -1
    for i in range(mask.shape[0]):
        if mask[i]:
            running += np.exp((logit[i] - top) / temperature)
            last = i
            if running >= target:
                return i
    return last


@numba.njit(**INNER)
@typing.no_type_check
def commit(p, s, op, i):
    """Put an op on a device: move what it reads, run it, and account for memory."""
    group = p.group[op]
    segment = p.segment_s[i] > 0 and opens_segment(p, s, op, i)
    if s.group_device[group] < 0:
        settle_group(p, s, group, i)
    ready = 0.0
    for k in range(p.in_start[op], p.in_start[op + 1]):
        t = p.in_tensor[k]
        if s.arrival_s[t, i] == np.inf:
            at, seconds = arrival(p, s, t, i)
            channel = p.channel[s.placed[p.producer[t], 0], i]
            if channel >= 0:
                s.channel_s[channel] = at
                s.channel_load_s[channel] += seconds
            s.arrival_s[t, i] = at
        ready = max(ready, s.arrival_s[t, i])
    cost = p.cost_s[op, i] + (p.segment_s[i] if segment else 0.0)
    s.finish_s[op] = max(ready, s.free_s[i]) + cost
    if cost > 0.0:
        s.free_s[i] = s.finish_s[op]
    s.load_s[i] += cost
    s.placed[op, 0] = i
    s.used[i] = True
    for j in range(s.recent.shape[0]):
        s.recent[j] *= 0.95
    s.recent[i] += 0.05
    s.record[0] = max(s.record[0], s.finish_s[op] + p.tail_s[op])
    s.record[1] += cost
    for k in range(p.out_start[op], p.out_start[op + 1]):
        s.arrival_s[p.out_tensor[k], i] = s.finish_s[op]
    hold_outputs(p, s, op, i)
    read_inputs(p, s, op)
