"""Annealing of one window of a schedule: a step simulates that window and no more.

The groups that may move, and all that sends to them, end between two states of a recorded run. A
step begins at the first, stops some states after the second, and is judged by when the run would
end were the rest to follow the record (`expected_end`). What the steps lead to is then simulated to
the end: only that decides.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.base.kernels.options import BARE, INNER
from gdp.base.kernels.struct import as_struct
from gdp.methods.annealing.annealer_kernels import (
    EVALUATIONS,
    RANK_SWAP,
    draw_kind,
    put,
    swap_places,
    take_back,
)
from gdp.methods.annealing.move_score_kernels import (
    begin_step,
    consider,
    read_schedule,
    remember,
    take_best,
)
from gdp.methods.annealing.moves_kernels import NUM_KINDS, below, propose, uniform
from gdp.sim.kernels.evaluate import serial
from gdp.sim.kernels.events import run_until
from gdp.sim.kernels.resume import begin, expected_end, find_tails, go_on, place, record_run

# Rows of Window.number
FROM, UNTIL, STOP, OPS, GROUPS = 0, 1, 2, 3, 4
# Rows of Window.value
NOW_S, BEST_S, HOT_S, COLD_S = 0, 1, 2, 3


class Window(NamedTuple):
    """A recorded run and the part of it that is searched. Axes: N ops, G groups."""

    place: np.ndarray  # [N] of an op in the order of ends
    first: np.ndarray  # [G] the place of the first op that sends to the group; 0: it reads nothing
    last: np.ndarray  # [G] the place of its last op
    group: np.ndarray  # [G] the groups that may move: the first number[GROUPS]
    op: np.ndarray  # [N] ops inside the window, of those groups and of others
    best_device: np.ndarray  # [N] int32, of those ops
    best_position: np.ndarray  # [N] the same for priorities
    number: np.ndarray  # [5]: state it begins at, ops done before it ends, state it stops at, ...
    value: np.ndarray  # [4] expected seconds, now and best; temperatures in seconds, first and last


as_struct(Window)


@numba.njit(**BARE)
@no_type_check
def record(m, a, w, s, t, h, q, device, k):
    """Simulate from state k and keep everything that windows need; the latency.

    From k > 0, the ops of the window are all that has moved since the last record.
    """
    if k > 0:
        ops = h.op[: h.number[OPS]]
        for x in range(len(ops)):
            for state in range(1, k):
                place(s.state[state], ops[x], device[ops[x]])
        begin(a, w, s, device, k, ops)
    latency_s = record_run(a, w, s, device, k)
    find_tails(a, w, s, t, device)
    if q.draws > 1:
        read_schedule(m, w, q, device, latency_s)
    for x in range(device.shape[0]):
        h.place[w.done_op[x]] = x
    for g in range(h.first.shape[0]):
        first, last = device.shape[0], 0
        for x in range(m.group_start[g], m.group_start[g + 1]):
            op = m.group_op[x]
            last = max(last, h.place[op])
            if m.in_start[op] == m.in_start[op + 1]:
                first = 0
            for y in range(m.in_start[op], m.in_start[op + 1]):
                first = min(first, h.place[m.producer[m.in_tensor[y]]])
        h.first[g], h.last[g] = first, last
    return latency_s


@numba.njit(**INNER)
@no_type_check
def inside(s, h, g):
    """True for a group whose ops have received nothing before the window and end inside it."""
    return h.first[g] >= s.done[h.number[FROM]] and h.last[g] < h.number[UNTIL]


@numba.njit(**BARE)
@no_type_check
def open_window(m, a, w, s, t, h, c, k, until, stop):
    """Make the groups between state k and `until` ops the ones to move; how many there are.

    Ops of groups that may not move are among `op`: their priorities change with the others'.
    """
    h.number[FROM], h.number[UNTIL], h.number[STOP] = k, until, stop
    groups, ops, movable = 0, 0, 0
    for g in range(h.first.shape[0]):
        moves = movable < c.movable.shape[0] and c.movable[movable] == g
        movable += moves
        if inside(s, h, g):
            if moves:
                h.group[groups] = g
                groups += 1
            for y in range(m.group_start[g], m.group_start[g + 1]):
                h.op[ops] = m.group_op[y]
                ops += 1
    h.number[OPS], h.number[GROUPS] = ops, groups
    if groups > 0:
        h.value[NOW_S] = expected(a, w, s, t, h, c)
        keep_window(w, h, c)
    return groups


@numba.njit(**BARE)
@no_type_check
def expected(a, w, s, t, h, c):
    """The seconds that the placement is expected to take, by simulating the window alone."""
    stop = h.number[STOP]
    end = c.device.shape[0]
    if stop < len(s.goal):
        end = s.goal[stop]
    begin(a, w, s, c.device, h.number[FROM], h.op[: h.number[OPS]])
    now_s = run_until(a, w, np.bool_(True), np.bool_(False), np.uint64(end))
    if stop == len(s.goal):
        return now_s
    return expected_end(w, t, stop, now_s)


@numba.njit(**INNER)
@no_type_check
def keep_window(w, h, c):
    """Make the placement at hand the best of the window."""
    h.value[BEST_S] = h.value[NOW_S]
    for x in range(h.number[OPS]):
        op = h.op[x]
        h.best_device[x] = c.device[op]
        h.best_position[x] = w.position[op]


@numba.njit(**INNER)
@no_type_check
def use_kept(w, h, c):
    """Restore the best state of the window."""
    for x in range(h.number[OPS]):
        op = h.op[x]
        c.device[op] = h.best_device[x]
        w.position[op] = h.best_position[x]
        w.by_position[h.best_position[x]] = op


@numba.njit(**INNER)
@no_type_check
def keep_inside(s, h, p):
    """Drop ops from the proposal that are fixed here."""
    kept = 0
    for k in range(p.size[0]):
        if inside(s, h, p.group[k]):
            p.group[kept], p.device[kept] = p.group[k], p.device[k]
            kept += 1
    p.size[0] = kept


@numba.njit(**INNER)
@no_type_check
def window_swap(m, w, s, h, c, p):
    """Two places of the priorities whose ops are in the window and share a device, or j and j."""
    j = w.position[h.op[below(p.random, h.number[OPS])]]
    for _ in range(8):
        k = min(c.device.shape[0] - 1, j + 1 + below(p.random, np.int64(64)))
        op = w.by_position[k]
        if c.device[w.by_position[j]] == c.device[op] and inside(s, h, m.group[op]):
            return j, k
    return j, j


@numba.njit(**INNER)
@no_type_check
def draw_inside(m, w, s, h, c, p, q, kind):
    """Leave a move inside the window in `p`, or the best of several by score; its kind."""
    kind = min(kind, NUM_KINDS - 1)
    if not begin_step(q, p):
        g = h.group[below(p.random, h.number[GROUPS])]
        propose(m, p, c.device, w.done_op, h.place, kind, g, h.number[OPS])
        keep_inside(s, h, p)
        return kind
    for draw in range(q.draws):
        if draw > 0:
            kind = min(draw_kind(c, p.random), NUM_KINDS - 1)
        g = h.group[below(p.random, h.number[GROUPS])]
        propose(m, p, c.device, w.done_op, h.place, kind, g, h.number[OPS])
        keep_inside(s, h, p)
        consider(m, p, q, c.device, kind)
    return take_best(p, q)


@numba.njit(**BARE)
@no_type_check
def anneal_window(m, a, w, s, t, h, c, p, q, done, steps, of):
    """Do `steps` steps of `of` in all, after `done`; the ops simulated."""
    size = s.goal[min(h.number[STOP], len(s.goal) - 1)] - s.done[h.number[FROM]]
    work = 0
    for step in range(done, done + steps):
        kind = draw_kind(c, p.random)
        j, k = 0, 0
        p.size[0] = 0
        if kind == RANK_SWAP:
            begin_step(q, p)
            j, k = window_swap(m, w, s, h, c, p)
            swap_places(w, j, k)
        else:
            kind = draw_inside(m, w, s, h, c, p, q, kind)
            put(m, c, p)
        if p.size[0] == 0 and j == k:
            continue
        c.tried[kind] += 1
        work += size
        value_s = expected(a, w, s, t, h, c)
        rise_s = value_s - h.value[NOW_S]
        heat_s = h.value[HOT_S] * (h.value[COLD_S] / h.value[HOT_S]) ** (step / of)
        accepted = rise_s <= 0.0 or uniform(p.random) < np.exp(-rise_s / heat_s)
        remember(p, q, accepted)
        if accepted:
            h.value[NOW_S] = value_s
            if value_s < h.value[BEST_S]:
                keep_window(w, h, c)
        elif p.size[0] > 0:
            take_back(m, c, p)
        else:
            swap_places(w, j, k)
    return work


@numba.njit(**BARE)
@no_type_check
def close_window(a, w, s, h, c):
    """Take the best of the window and simulate it to the end; the exact latency."""
    use_kept(w, h, c)
    c.count[EVALUATIONS] += 1
    latency_s = go_on(a, w, s, c.device, h.number[FROM], h.op[: h.number[OPS]])
    return max(latency_s, serial(a, w, c.device)) if a.is_serial else latency_s
