"""Moves of the local search drawn by a score: features of a move, and the best of several.

Most moves do not improve a placement (91 to 99.5% of those that are simulated), and which do can
be seen in the schedule of the placement they start from: ops that have slack where they would go,
idle time of that device then, less to send, room in its memory. So a step draws several moves,
scores each by a linear function of such features, one for each kind of move, and simulates the
best alone. The schedule is simulated anew only after some moves were accepted: features may be a
little old.

Scores use sums, products and `log2_lines`, and no function of a mathematical library: they are
equal on every machine. Axes as in `gdp.problem.arrays`; F features, B buckets of time.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.kernels.options import INNER, INNER_INLINE
from gdp.kernels.struct import as_struct
from gdp.methods.annealing.moves_kernels import uniform
from gdp.sim.kernels.engine import transfer_time
from gdp.sim.kernels.evaluate import SUM, weights

FEATURES: tuple[str, ...] = (
    "constant", "groups", "ops", "compute", "compute_to", "compute_more", "least_slack", "slack",
    "least_slack_to", "slack_to", "least_slack_gained", "critical", "receive", "receive_to", "send",
    "send_to", "transfer_more", "queued", "queued_to", "critical_cuts", "wait", "gap",
    "longest_gap", "fit", "least_fit", "ready_earlier", "wanted_later", "begins", "ends", "load",
    "load_to", "idle", "idle_to", "idle_to_spare", "degree", "near", "near_to", "latency",
    "devices", "peak_room", "peak_room_to", "bytes", "room", "room_to",
)  # fmt: skip
"""Features of a move, in order; `..._to` is where it leads, the plain name where it comes from.

Seconds are over those of an average op, bytes over a 64th of the device's memory, both then
`log2_lines`. Slack: how much later the ops could end at no loss; fit: idle time of the device,
between the ops' inputs and the latest end, beyond their own; queued: transfers weighed by how busy
their channel is; bytes and room are zero where memory cannot bind.
"""
NUM_FEATURES = len(FEATURES)
(
    CONSTANT, GROUPS, OPS, COMPUTE, COMPUTE_TO, COMPUTE_MORE, LEAST_SLACK, SLACK,
    LEAST_SLACK_TO, SLACK_TO, LEAST_SLACK_GAINED, CRITICAL, RECEIVE, RECEIVE_TO, SEND,
    SEND_TO, TRANSFER_MORE, QUEUED, QUEUED_TO, CRITICAL_CUTS, WAIT, GAP,
    LONGEST_GAP, FIT, LEAST_FIT, READY_EARLIER, WANTED_LATER, BEGINS, ENDS, LOAD,
    LOAD_TO, IDLE, IDLE_TO, IDLE_TO_SPARE, DEGREE, NEAR, NEAR_TO, LATENCY,
    DEVICES, PEAK_ROOM, PEAK_ROOM_TO, BYTES, ROOM, ROOM_TO,
) = range(NUM_FEATURES)  # fmt: skip

LOOKED_AT = 6  # groups of a move whose features are taken, at equal distances
READERS = 8  # of a tensor that are looked at
CLIP = 4.0  # standard deviations of a feature, from the mean

# Rows of Scorer.number
ACCEPTED, VERSION, USABLE, LOGGED, SIZE, KIND, SCORED = 0, 1, 2, 3, 4, 5, 6
# Columns of Scorer.log_outcome
OUT_KIND, OUT_RISE, OUT_ACCEPTED = 0, 1, 2


class Scorer(NamedTuple):
    """Weights of the score, the incumbent's schedule, and the best move drawn so far.

    Times in seconds from the start of the schedule.
    """

    draws: int  # moves drawn for each that is simulated; 1: no scores
    unscored: float  # share of steps whose move is drawn without a score
    renew: int  # accepted moves, after which the schedule is simulated anew
    weight: np.ndarray  # [NUM_KINDS, F]
    mean: np.ndarray  # [F]
    per_scale: np.ndarray  # [F]
    start_s: np.ndarray  # [N]
    finish_s: np.ndarray  # [N]
    latest_s: np.ndarray  # [N] an op may end by then at no loss, all else in the same order
    ready_s: np.ndarray  # [N] the inputs are there
    gap_s: np.ndarray  # [N] its device was idle before the op
    busy_s: np.ndarray  # [D]
    busy_until_s: np.ndarray  # [D, B+1] busy seconds before the bucket
    next_s: np.ndarray  # [D] scratch of `read_schedule`
    channel_load: np.ndarray  # [C+1] busy share of the channel; the last one never queues
    held_bytes: np.ndarray  # [D, B] at most, in the bucket
    peak_bytes: np.ndarray  # [D]
    last_s: np.ndarray  # [D] scratch
    number: np.ndarray  # [7]
    span_s: np.ndarray  # [2] latency, seconds of an average op
    x: np.ndarray  # [F] features of the move at hand
    best_x: np.ndarray  # [F] of the best move drawn so far
    best_score: np.ndarray  # [1]
    group: np.ndarray  # [G] the best move so far
    device: np.ndarray  # [G]
    new_device: np.ndarray  # [G] of the move at hand, where `stamp` is its number
    stamp: np.ndarray  # [G]
    rejected: np.ndarray  # [H] uint64, marks of moves rejected
    mark: np.ndarray  # [1] uint64, of the best move so far
    log_x: np.ndarray  # [R, F] features of simulated moves, for training
    log_outcome: np.ndarray  # [R, 3] kind, rise of the energy, accepted


as_struct(Scorer)


@numba.njit(**INNER_INLINE)
@no_type_check
def log2_lines(z):
    """Logarithm of 1 + |z| to base 2, with the sign of z, by lines between powers of two: what the
    bits of a float say when read as an integer."""
    bits = np.float64(1.0 + abs(z)).view(np.int64)
    value = np.float64(bits) * (1.0 / 4503599627370496.0) - 1023.0
    return value if z >= 0.0 else -value


@numba.njit(**INNER_INLINE)
@no_type_check
def sending_s(m, t, source, to):
    return transfer_time(
        m.latency_s[source, to], m.sent_bytes[t], m.bytes_per_s[source, to], m.round_to
    )


@numba.njit(**INNER)
@no_type_check
def read_schedule(m, a, w, q, device, latency_s):
    """Take the schedule that `w` recorded, in the order of `w.done_op`. O(N + E + D B)."""
    n, d = m.compute_s.shape
    q.number[ACCEPTED] = 0
    q.number[USABLE] = 1 if 0.0 < latency_s < np.inf else 0
    if q.number[USABLE] == 0:
        return
    q.busy_s[:] = 0.0
    q.next_s[:] = 0.0
    for x in range(n):
        i = w.done_op[x]
        e = np.int64(device[i])
        q.start_s[i], q.finish_s[i] = w.start_s[i], w.finish_s[i]
        q.gap_s[i] = w.start_s[i] - q.next_s[e]
        q.next_s[e] = w.finish_s[i]
        q.busy_s[e] += w.finish_s[i] - w.start_s[i]
        ready_s = 0.0
        for y in range(m.in_start[i], m.in_start[i + 1]):
            t = m.in_tensor[y]
            source = np.int64(device[m.producer[t]])
            arrive_s = q.finish_s[m.producer[t]]
            if source != e:
                arrive_s += sending_s(m, t, source, e)
            ready_s = max(ready_s, arrive_s)
        q.ready_s[i] = ready_s
    q.span_s[0] = latency_s
    total_s = 0.0
    for e in range(d):
        total_s += q.busy_s[e]
    q.span_s[1] = max(total_s / n, 1e-30)
    find_latest(m, w, q, device, latency_s)
    fill_buckets(w, q, device, latency_s)
    read_channels(a, w, q, latency_s)
    if a.memory_binds:
        read_memory(m, a, w, q, device, latency_s)


@numba.njit(**INNER)
@no_type_check
def find_latest(m, w, q, device, latency_s):
    """When each op has to end, were all to keep the order on its device; channels aside."""
    q.next_s[:] = latency_s
    for x in range(device.shape[0] - 1, -1, -1):
        i = w.done_op[x]
        e = np.int64(device[i])
        latest_s = q.next_s[e]
        for y in range(m.out_start[i], m.out_start[i + 1]):
            t = m.out_tensor[y]
            for u in range(m.use_start[t], m.use_start[t + 1]):
                j = m.use_op[u]
                wanted_s = q.latest_s[j] - (q.finish_s[j] - q.start_s[j])
                if device[j] != e:
                    wanted_s -= sending_s(m, t, e, np.int64(device[j]))
                latest_s = min(latest_s, wanted_s)
        q.latest_s[i] = latest_s
        q.next_s[e] = latest_s - (q.finish_s[i] - q.start_s[i])


@numba.njit(**INNER)
@no_type_check
def fill_buckets(w, q, device, latency_s):
    """Busy seconds of each device by time."""
    d, count = q.held_bytes.shape
    q.busy_until_s[:] = 0.0
    bucket_s = latency_s / count
    for i in range(device.shape[0]):
        e = np.int64(device[i])
        first = min(count - 1, np.int64(q.start_s[i] / bucket_s))
        last = min(count - 1, np.int64(q.finish_s[i] / bucket_s))
        for b in range(first, last + 1):
            inside_s = min(q.finish_s[i], (b + 1) * bucket_s) - max(q.start_s[i], b * bucket_s)
            if inside_s > 0.0:
                q.busy_until_s[e, b + 1] += inside_s
    for e in range(d):
        for b in range(count):
            q.busy_until_s[e, b + 1] += q.busy_until_s[e, b]


@numba.njit(**INNER)
@no_type_check
def read_channels(a, w, q, latency_s):
    """Share of the time in which each channel is busy."""
    d = q.busy_s.shape[0]
    q.channel_load[:] = 0.0
    for k in range(w.num_sent[0]):
        to, source = w.sent_lane[k] // d, w.sent_lane[k] % d
        seconds = w.sent_arrive_s[k] - w.sent_start_s[k]
        q.channel_load[a.channel[source, to]] += seconds / latency_s
    q.channel_load[q.channel_load.shape[0] - 1] = 0.0


@numba.njit(**INNER)
@no_type_check
def read_memory(m, a, w, q, device, latency_s):
    """Bytes that each device holds by time, by the times of ops; in a bucket, those of all tensors
    that it sees."""
    d, count = q.held_bytes.shape
    weights(a, w, device)
    q.held_bytes[:] = 0
    per_s = count / latency_s
    for t in range(m.producer.shape[0]):
        i = m.producer[t]
        home = np.int64(device[i])
        q.last_s[:] = -1.0
        q.last_s[home] = q.finish_s[i]
        for u in range(m.use_start[t], m.use_start[t + 1]):
            j = m.use_op[u]
            e = np.int64(device[j])
            end_s = latency_s if a.is_output[j] else q.finish_s[j]
            q.last_s[e] = max(q.last_s[e], end_s)
            if e != home:  # it is kept until it has been sent
                q.last_s[home] = max(q.last_s[home], q.start_s[j])
        for e in range(d):
            if q.last_s[e] >= 0.0:
                begin_s = q.start_s[i] if e == home else q.finish_s[i]
                first = min(count - 1, np.int64(begin_s * per_s))
                end = min(count - 1, np.int64(q.last_s[e] * per_s)) + 1
                q.held_bytes[e, first] += m.held_bytes[t]
                if end < count:
                    q.held_bytes[e, end] -= m.held_bytes[t]
    for e in range(d):
        held = w.hold[e, SUM]
        q.peak_bytes[e] = 0
        for b in range(count):
            held += q.held_bytes[e, b]
            q.held_bytes[e, b] = held
            q.peak_bytes[e] = max(q.peak_bytes[e], held)


@numba.njit(**INNER_INLINE)
@no_type_check
def idle_s(q, d, from_s, to_s):
    """Idle seconds of a device between two times, as if evenly spread inside a bucket."""
    return (to_s - from_s) - (busy_before_s(q, d, to_s) - busy_before_s(q, d, from_s))


@numba.njit(**INNER_INLINE)
@no_type_check
def busy_before_s(q, d, time_s):
    count = q.held_bytes.shape[1]
    at = min(max(time_s / q.span_s[0], 0.0), 1.0) * count
    b = min(np.int64(at), count - 1)
    before_s = q.busy_until_s[d, b]
    return before_s + (q.busy_until_s[d, b + 1] - before_s) * (at - b)


@numba.njit(**INNER_INLINE)
@no_type_check
def device_after(m, p, q, device, op):
    """The device of an op once the move at hand is made."""
    g = m.group[op]
    return np.int64(q.new_device[g]) if q.stamp[g] == p.number[0] else np.int64(device[op])


@numba.njit(**INNER)
@no_type_check
def look_at_inputs(m, a, p, q, device, i, home, to):
    """Add an op's inputs to the features; when they would be there."""
    x, tight_s = q.x, 1e-3 * q.span_s[1]
    must_start_s = q.latest_s[i] - (q.finish_s[i] - q.start_s[i])
    ready_s = 0.0
    for y in range(m.in_start[i], m.in_start[i + 1]):
        t = m.in_tensor[y]
        j = m.producer[t]
        source, after = np.int64(device[j]), device_after(m, p, q, device, j)
        arrive_s = q.finish_s[j]
        x[DEGREE] += 1.0
        if source != home:
            seconds = sending_s(m, t, source, home)
            x[RECEIVE] += seconds
            x[QUEUED] += seconds * q.channel_load[a.channel[source, home]]
            if must_start_s - arrive_s - seconds < tight_s:
                x[CRITICAL_CUTS] += 1.0
        else:
            x[NEAR] += 1.0
        if after != to:
            seconds = sending_s(m, t, after, to)
            x[RECEIVE_TO] += seconds
            x[QUEUED_TO] += seconds * q.channel_load[a.channel[after, to]]
            arrive_s += seconds
        else:
            x[NEAR_TO] += 1.0
        ready_s = max(ready_s, arrive_s)
    return ready_s


@numba.njit(**INNER)
@no_type_check
def look_at_outputs(m, a, p, q, device, i, home, to):
    """Add an op's readers to the features; when they would want it to end."""
    x, tight_s = q.x, 1e-3 * q.span_s[1]
    latest_s = q.span_s[0]
    for y in range(m.out_start[i], m.out_start[i + 1]):
        t = m.out_tensor[y]
        x[BYTES] += m.held_bytes[t]
        first = m.use_start[t]
        for u in range(first, min(m.use_start[t + 1], first + READERS)):
            j = m.use_op[u]
            reader, after = np.int64(device[j]), device_after(m, p, q, device, j)
            wanted_s = q.latest_s[j] - (q.finish_s[j] - q.start_s[j])
            x[DEGREE] += 1.0
            if reader != home:
                seconds = sending_s(m, t, home, reader)
                x[SEND] += seconds
                x[QUEUED] += seconds * q.channel_load[a.channel[home, reader]]
                if wanted_s - q.finish_s[i] - seconds < tight_s:
                    x[CRITICAL_CUTS] += 1.0
            else:
                x[NEAR] += 1.0
            if after != to:
                seconds = sending_s(m, t, to, after)
                x[SEND_TO] += seconds
                x[QUEUED_TO] += seconds * q.channel_load[a.channel[to, after]]
                wanted_s -= seconds
            else:
                x[NEAR_TO] += 1.0
            latest_s = min(latest_s, wanted_s)
    return latest_s


@numba.njit(**INNER)
@no_type_check
def look_at_op(m, a, p, q, device, i, to):
    """Add one op, which would go to a device, to the sums of the features."""
    x = q.x
    home = np.int64(device[i])
    before_s, after_s = q.finish_s[i] - q.start_s[i], m.compute_s[i, to]
    slack_s = q.latest_s[i] - q.finish_s[i]
    ready_s = look_at_inputs(m, a, p, q, device, i, home, to)
    latest_s = look_at_outputs(m, a, p, q, device, i, home, to)
    slack_to_s = latest_s - ready_s - after_s
    end_s = max(latest_s, ready_s + after_s)
    fit_s = idle_s(q, to, ready_s, end_s) - after_s
    x[OPS] += 1.0
    x[COMPUTE] += before_s
    x[COMPUTE_TO] += after_s
    x[LEAST_SLACK] = min(x[LEAST_SLACK], slack_s)
    x[SLACK] += slack_s
    x[LEAST_SLACK_TO] = min(x[LEAST_SLACK_TO], slack_to_s)
    x[SLACK_TO] += slack_to_s
    x[CRITICAL] += slack_s < 1e-3 * q.span_s[1]
    x[WAIT] += q.start_s[i] - q.ready_s[i]
    x[GAP] += q.gap_s[i]
    x[LONGEST_GAP] = max(x[LONGEST_GAP], q.gap_s[i])
    x[FIT] += fit_s
    x[LEAST_FIT] = min(x[LEAST_FIT], fit_s)
    x[READY_EARLIER] += q.start_s[i] - ready_s
    x[WANTED_LATER] += latest_s - q.finish_s[i]
    x[BEGINS] = min(x[BEGINS], q.start_s[i])
    x[ENDS] = max(x[ENDS], q.finish_s[i])


@numba.njit(**INNER)
@no_type_check
def describe(m, a, p, q, device):
    """Leave the features of the move in `p` in `q.x`. O(degrees of `LOOKED_AT` groups)."""
    x, size = q.x, p.size[0]
    x[:] = 0.0
    x[LEAST_SLACK] = x[LEAST_SLACK_TO] = x[LEAST_FIT] = x[BEGINS] = np.inf
    for k in range(size):
        q.new_device[p.group[k]] = p.device[k]
        q.stamp[p.group[k]] = p.number[0]
    step = max(1, size // LOOKED_AT)
    for k in range(0, size, step):
        g = p.group[k]
        for y in range(m.group_start[g], m.group_start[g + 1]):
            look_at_op(m, a, p, q, device, m.group_op[y], np.int64(p.device[k]))
        for y in range(m.group_weight_start[g], m.group_weight_start[g + 1]):
            x[BYTES] += m.weight_bytes[m.group_weight[y]]
    home = np.int64(device[m.group_op[m.group_start[p.group[0]]]])
    share = np.float64((size + step - 1) // step) / size  # of the groups that were looked at
    finish_features(a, q, home, np.int64(p.device[0]), size, share)


@numba.njit(**INNER)
@no_type_check
def finish_features(a, q, home, to, size, share):
    """Make features of the sums over ops."""
    x, n, op_s, latency_s = q.x, q.x[OPS], q.span_s[1], q.span_s[0]
    x[CONSTANT] = 1.0
    x[GROUPS] = log2_lines(np.float64(size))
    x[OPS] = log2_lines(n / share)
    x[IDLE] = idle_s(q, home, x[BEGINS], x[ENDS])
    x[IDLE_TO] = idle_s(q, to, x[BEGINS], x[ENDS])
    x[COMPUTE_MORE] = x[COMPUTE_TO] - x[COMPUTE]
    x[IDLE_TO_SPARE] = x[IDLE_TO] - x[COMPUTE_TO]
    x[LEAST_SLACK_GAINED] = x[LEAST_SLACK_TO] - x[LEAST_SLACK]
    x[TRANSFER_MORE] = x[RECEIVE_TO] + x[SEND_TO] - x[RECEIVE] - x[SEND]
    x[LATENCY] = latency_s
    memory_features(a, q, home, to, share)
    x[BEGINS] /= latency_s
    x[ENDS] /= latency_s
    x[LOAD] = q.busy_s[home] / latency_s
    x[LOAD_TO] = q.busy_s[to] / latency_s
    x[DEVICES] = np.float64(q.busy_s.shape[0])
    degree = max(x[DEGREE], 1.0)
    x[NEAR] /= degree
    x[NEAR_TO] /= degree
    x[DEGREE] = log2_lines(x[DEGREE] / n)
    x[CRITICAL] /= n
    x[CRITICAL_CUTS] /= n
    for k in (SLACK, SLACK_TO, WAIT, GAP, FIT, READY_EARLIER, WANTED_LATER):
        x[k] /= n
    for k in (
        COMPUTE, COMPUTE_TO, COMPUTE_MORE, LEAST_SLACK, SLACK, LEAST_SLACK_TO, SLACK_TO,
        LEAST_SLACK_GAINED, RECEIVE, RECEIVE_TO, SEND, SEND_TO, TRANSFER_MORE, QUEUED, QUEUED_TO,
        WAIT, GAP, LONGEST_GAP, FIT, LEAST_FIT, READY_EARLIER, WANTED_LATER, IDLE, IDLE_TO,
        IDLE_TO_SPARE, LATENCY,
    ):  # fmt: skip
        x[k] = log2_lines(x[k] / op_s)


@numba.njit(**INNER)
@no_type_check
def memory_features(a, q, home, to, share):
    """Bytes that would move and the room that they find and leave; zero where all fits anyway."""
    x, count = q.x, q.held_bytes.shape[1]
    size = x[BYTES] / share
    x[BYTES] = 0.0
    if not a.memory_binds:
        return
    first = min(count - 1, np.int64(x[BEGINS] / q.span_s[0] * count))
    last = min(count - 1, np.int64(x[ENDS] / q.span_s[0] * count))
    held, held_to = q.held_bytes[home, first], q.held_bytes[to, first]
    for b in range(first + 1, last + 1):
        held = max(held, q.held_bytes[home, b])
        held_to = max(held_to, q.held_bytes[to, b])
    capacity, capacity_to = np.float64(a.capacity_bytes[home]), np.float64(a.capacity_bytes[to])
    unit, unit_to = max(capacity / 64.0, 1.0), max(capacity_to / 64.0, 1.0)
    x[PEAK_ROOM] = log2_lines((capacity - q.peak_bytes[home]) / unit)
    x[PEAK_ROOM_TO] = log2_lines((capacity_to - q.peak_bytes[to]) / unit_to)
    x[BYTES] = log2_lines(size / unit_to)
    x[ROOM] = log2_lines((capacity - held) / unit)
    x[ROOM_TO] = log2_lines((capacity_to - held_to - size) / unit_to)


@numba.njit(**INNER)
@no_type_check
def score_of(q, x, kind):
    """The score of features: higher is more likely to improve, and by more."""
    total = 0.0
    for k in range(NUM_FEATURES):
        z = (x[k] - q.mean[k]) * q.per_scale[k]
        total += q.weight[kind, k] * min(max(z, -CLIP), CLIP)
    return total


@numba.njit(**INNER)
@no_type_check
def mark_of(p, q):
    """A hash of the move in `p` from the placement at hand, whatever the order of its groups."""
    total = np.uint64(q.number[VERSION]) * np.uint64(0x9E3779B97F4A7C15)
    for k in range(p.size[0]):
        z = np.uint64(p.group[k]) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(p.device[k] + 1) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
        total += z ^ (z >> np.uint64(29))
    return total


@numba.njit(**INNER)
@no_type_check
def begin_step(q, p):
    """Forget the moves drawn before; True if this step's move shall be scored."""
    q.best_score[0] = -np.inf
    q.number[SIZE] = q.number[SCORED] = 0
    return q.draws > 1 and q.number[USABLE] == 1 and uniform(p.random) >= q.unscored


@numba.njit(**INNER)
@no_type_check
def consider(m, a, p, q, device, kind):
    """Score the move in `p`, unless it has just been rejected, and keep it if it is the best."""
    if p.size[0] == 0:
        return
    mark = mark_of(p, q)
    if q.rejected[np.int64(mark % np.uint64(q.rejected.shape[0]))] == mark:
        return
    describe(m, a, p, q, device)
    score = score_of(q, q.x, kind)
    if score > q.best_score[0]:
        q.best_score[0] = score
        q.number[SIZE], q.number[KIND], q.mark[0] = p.size[0], kind, mark
        q.number[SCORED] = 1
        for k in range(p.size[0]):
            q.group[k], q.device[k] = p.group[k], p.device[k]
        for k in range(NUM_FEATURES):
            q.best_x[k] = q.x[k]


@numba.njit(**INNER)
@no_type_check
def take_best(p, q):
    """Make the best move considered the proposal; its kind."""
    p.size[0] = q.number[SIZE]
    for k in range(p.size[0]):
        p.group[k], p.device[k] = q.group[k], q.device[k]
    return q.number[KIND]


@numba.njit(**INNER)
@no_type_check
def settle(p, q, kind, rise, accepted):
    """Note and remember what became of the move in `p`; `rise` of the energy."""
    if accepted:
        q.number[ACCEPTED] += 1
        q.number[VERSION] += 1
    elif q.draws > 1 and p.size[0] > 0:
        mark = q.mark[0] if q.number[SCORED] == 1 else mark_of(p, q)
        q.rejected[np.int64(mark % np.uint64(q.rejected.shape[0]))] = mark
    if q.number[SCORED] == 0:
        return
    row = q.number[LOGGED]
    if row < q.log_x.shape[0]:
        for k in range(NUM_FEATURES):
            q.log_x[row, k] = q.best_x[k]
        q.log_outcome[row, OUT_KIND] = kind
        q.log_outcome[row, OUT_RISE] = rise
        q.log_outcome[row, OUT_ACCEPTED] = accepted
        q.number[LOGGED] = row + 1
