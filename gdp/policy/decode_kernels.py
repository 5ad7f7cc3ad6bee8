"""Numba kernels of the autoregressive decoder: one placement, op by op.

The kernel keeps a running estimate of the schedule in decode order (append, no insertion) and of
memory, computes from it the features of every (op, device) pair, scores them with the small head,
masks illegal devices, picks one and updates the estimate. The simulator, not this estimate, judges.
"""

import typing

import numba
import numpy as np

from gdp.base.kernels.options import BARE, INNER
from gdp.base.kernels.struct import as_struct
from gdp.policy.decode_feature_kernels import arrival, opens_segment, pair_features
from gdp.policy.decode_memory_kernels import (
    crowded_reader,
    hold_outputs,
    read_inputs,
    room,
    settle_group,
)
from gdp.policy.model.config import Head
from gdp.policy.view.decode_problem import NUM_PAIR_FEATURES, DecodeProblem


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
