"""Moves of the local search drawn by a score: facts of a move, and the best of several.

Most moves do not improve a placement (91 to 99.5% of those that are simulated), and which do can
be seen in the schedule of the placement they start from: ops that have slack where they would go,
idle time of that device then, less to send. So a step draws several moves, scores each by a linear
function of such facts, and simulates the best alone. The schedule is simulated anew only after
some moves were accepted: facts may be a little old.

Scores use sums, products and `log2_lines`, and no function of a mathematical library: they are
equal on every machine. Axes as in `gdp.problem.arrays`; B buckets of time.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.base.kernels.options import INNER, INNER_INLINE
from gdp.base.kernels.struct import as_struct
from gdp.methods.annealing.moves_kernels import uniform
from gdp.sim.kernels.events import sending_s

DRAWS = 4  # moves drawn for each that is simulated
UNSCORED = 0.3  # share of steps whose move is drawn without a score
RENEW = 16  # accepted moves, after which the schedule is simulated anew

# Weights of the score. Each fact is in seconds of an average op, then `log2_lines` and cut at
# `MOST`. Slack gained: how much later the ops could end at no loss, where they go against where
# they are; fit: idle time of the device, between the ops' inputs and the latest end, beyond their
# own.
SLACK, SLACK_GAINED, SENT_MORE, FIT = -0.3, 1.0, -0.5, 0.5
MOST = 16.0

LOOKED_AT = 6  # groups of a move that are looked at, at equal distances
READERS = 8  # of a tensor that are looked at

# Rows of Scorer.number
ACCEPTED, VERSION, USABLE, SIZE, KIND, SCORED = 0, 1, 2, 3, 4, 5


class Scorer(NamedTuple):
    """The incumbent's schedule, and the best move drawn so far.

    Times in seconds from the start of the schedule.
    """

    draws: int  # moves drawn for each that is simulated; 1: no scores
    unscored: float  # share of steps whose move is drawn without a score
    start_s: np.ndarray  # [N]
    finish_s: np.ndarray  # [N]
    latest_s: np.ndarray  # [N] an op may end by then at no loss, all else in the same order
    busy_until_s: np.ndarray  # [D, B+1] busy seconds before the bucket
    next_s: np.ndarray  # [D] scratch of `find_latest`
    number: np.ndarray  # [6]
    span_s: np.ndarray  # [2] latency, seconds of an average op
    best_score: np.ndarray  # [1]
    group: np.ndarray  # [G] the best move so far
    device: np.ndarray  # [G]
    new_device: np.ndarray  # [G] of the move at hand, where `stamp` is its number
    stamp: np.ndarray  # [G]
    rejected: np.ndarray  # [H] uint64, marks of moves rejected
    mark: np.ndarray  # [1] uint64, of the best move so far


as_struct(Scorer)


@numba.njit(**INNER_INLINE)
@no_type_check
def log2_lines(z):
    """Logarithm of 1 + |z| to base 2, with the sign of z, by lines between powers of two: what the
    bits of a float say when read as an integer."""
    bits = np.float64(1.0 + abs(z)).view(np.int64)
    value = np.float64(bits) * (1.0 / 4503599627370496.0) - 1023.0
    return value if z >= 0.0 else -value


@numba.njit(**INNER)
@no_type_check
def read_schedule(m, w, q, device, latency_s):
    """Take the schedule that `w` recorded, in the order of `w.done_op`. O(N + E + D B)."""
    n = m.compute_s.shape[0]
    q.number[ACCEPTED] = 0
    q.number[USABLE] = 1 if 0.0 < latency_s < np.inf else 0
    if q.number[USABLE] == 0:
        return
    total_s = 0.0
    for i in range(n):
        q.start_s[i], q.finish_s[i] = w.start_s[i], w.finish_s[i]
        total_s += w.finish_s[i] - w.start_s[i]
    q.span_s[0] = latency_s
    q.span_s[1] = max(total_s / n, 1e-30)
    find_latest(m, w, q, device, latency_s)
    fill_buckets(q, device, latency_s)


@numba.njit(**INNER)
@no_type_check
def find_latest(m, w, q, device, latency_s):
    """Latest finish of each op that keeps the latency (order on devices fixed, links ignored)."""
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
def fill_buckets(q, device, latency_s):
    """Busy seconds of each device by time."""
    d, count = q.busy_until_s.shape[0], q.busy_until_s.shape[1] - 1
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


@numba.njit(**INNER_INLINE)
@no_type_check
def idle_s(q, d, from_s, to_s):
    """Idle seconds of a device between two times, as if evenly spread inside a bucket."""
    return (to_s - from_s) - (busy_before_s(q, d, to_s) - busy_before_s(q, d, from_s))


@numba.njit(**INNER_INLINE)
@no_type_check
def busy_before_s(q, d, time_s):
    count = q.busy_until_s.shape[1] - 1
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
def inputs_after(m, p, q, device, i, to):
    """Seconds at which an op's inputs would be on a device, and seconds of sending more."""
    home, ready_s, more_s = np.int64(device[i]), 0.0, 0.0
    for y in range(m.in_start[i], m.in_start[i + 1]):
        t = m.in_tensor[y]
        j = m.producer[t]
        source, after = np.int64(device[j]), device_after(m, p, q, device, j)
        arrive_s = q.finish_s[j]
        if source != home:
            more_s -= sending_s(m, t, source, home)
        if after != to:
            seconds = sending_s(m, t, after, to)
            more_s += seconds
            arrive_s += seconds
        ready_s = max(ready_s, arrive_s)
    return ready_s, more_s


@numba.njit(**INNER)
@no_type_check
def outputs_after(m, p, q, device, i, to):
    """Seconds by which an op's readers would want it to end, and seconds of sending more."""
    home, latest_s, more_s = np.int64(device[i]), q.span_s[0], 0.0
    for y in range(m.out_start[i], m.out_start[i + 1]):
        t = m.out_tensor[y]
        first = m.use_start[t]
        for u in range(first, min(m.use_start[t + 1], first + READERS)):
            j = m.use_op[u]
            reader, after = np.int64(device[j]), device_after(m, p, q, device, j)
            wanted_s = q.latest_s[j] - (q.finish_s[j] - q.start_s[j])
            if reader != home:
                more_s -= sending_s(m, t, home, reader)
            if after != to:
                seconds = sending_s(m, t, to, after)
                more_s += seconds
                wanted_s -= seconds
            latest_s = min(latest_s, wanted_s)
    return latest_s, more_s


@numba.njit(**INNER)
@no_type_check
def score_of(m, p, q, device):
    """Score of the move in `p`: higher is more likely to improve, and by more.

    O(degrees of `LOOKED_AT` groups).
    """
    size = p.size[0]
    for k in range(size):
        q.new_device[p.group[k]] = p.device[k]
        q.stamp[p.group[k]] = p.number[0]
    slack_s, slack_to_s, fit_s, more_s = np.inf, np.inf, np.inf, 0.0
    for k in range(0, size, max(1, size // LOOKED_AT)):
        g, to = p.group[k], np.int64(p.device[k])
        for y in range(m.group_start[g], m.group_start[g + 1]):
            i = m.group_op[y]
            after_s = m.compute_s[i, to]
            ready_s, receive_s = inputs_after(m, p, q, device, i, to)
            latest_s, send_s = outputs_after(m, p, q, device, i, to)
            end_s = max(latest_s, ready_s + after_s)
            slack_s = min(slack_s, q.latest_s[i] - q.finish_s[i])
            slack_to_s = min(slack_to_s, latest_s - ready_s - after_s)
            fit_s = min(fit_s, idle_s(q, to, ready_s, end_s) - after_s)
            more_s += receive_s + send_s
    return (
        SLACK * scaled(q, slack_s)
        + SLACK_GAINED * scaled(q, slack_to_s - slack_s)
        + SENT_MORE * scaled(q, more_s)
        + FIT * scaled(q, fit_s)
    )


@numba.njit(**INNER_INLINE)
@no_type_check
def scaled(q, seconds):
    """Seconds in those of an average op, as `log2_lines`, at most `MOST` either way."""
    return min(max(log2_lines(seconds / q.span_s[1]), -MOST), MOST)


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
def consider(m, p, q, device, kind):
    """Score the move in `p`, unless it has just been rejected, and keep it if it is the best."""
    if p.size[0] == 0:
        return
    mark = mark_of(p, q)
    if q.rejected[np.int64(mark % np.uint64(q.rejected.shape[0]))] == mark:
        return
    score = score_of(m, p, q, device)
    if score > q.best_score[0]:
        q.best_score[0] = score
        q.number[SIZE], q.number[KIND], q.mark[0] = p.size[0], kind, mark
        q.number[SCORED] = 1
        for k in range(p.size[0]):
            q.group[k], q.device[k] = p.group[k], p.device[k]


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
def remember(p, q, accepted):
    """Count an accepted move; a rejected one is not drawn again before another is accepted."""
    if accepted:
        q.number[ACCEPTED] += 1
        q.number[VERSION] += 1
    elif q.draws > 1 and p.size[0] > 0:
        mark = q.mark[0] if q.number[SCORED] == 1 else mark_of(p, q)
        q.rejected[np.int64(mark % np.uint64(q.rejected.shape[0]))] = mark
