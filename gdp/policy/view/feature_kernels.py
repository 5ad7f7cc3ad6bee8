"""Numba kernel of the static features, over `problem.arrays.Arrays`."""

import typing

import numba

from gdp.base.kernels.options import BARE
from gdp.base.kernels.struct import as_struct
from gdp.problem.arrays import Arrays

as_struct(Arrays)


@numba.njit(**BARE)
@typing.no_type_check
def slacks(a, s_per_byte, device, order, start_s, finish_s, latest_s, waited_s, idle_s, due_s):
    """Fill, for a schedule that was run, what each op of it could spare and what it waited for.

    latest_s: the start that delays nothing while devices keep their order and links are free;
    waited_s: start minus when the inputs could have been there; idle_s: how long the device stood
    idle before the op. `order` are the ops by start, `due_s` [D] is scratch. Axes: N ops, D
    devices.
    """
    n, end = order.shape[0], 0.0
    for op in range(n):
        end = max(end, finish_s[op])
    for i in range(due_s.shape[0]):
        due_s[i] = 0.0
    for step in range(n):
        op = order[step]
        here, ready = device[op], 0.0
        for m in range(a.in_start[op], a.in_start[op + 1]):
            t = a.in_tensor[m]
            there = device[a.producer[t]]
            at = finish_s[a.producer[t]]
            if there != here:
                at += a.latency_s[there, here] + a.sent_bytes[t] * s_per_byte[there, here]
            ready = max(ready, at)
        waited_s[op] = start_s[op] - ready
        idle_s[op] = start_s[op] - due_s[here]
        due_s[here] = max(due_s[here], finish_s[op])
    for i in range(due_s.shape[0]):
        due_s[i] = end
    for back in range(n):
        op = order[n - 1 - back]
        here, due = device[op], end
        works = finish_s[op] > start_s[op]
        if works:
            due = due_s[here]
        for q in range(a.out_start[op], a.out_start[op + 1]):
            t = a.out_tensor[q]
            for m in range(a.use_start[t], a.use_start[t + 1]):
                there, seconds = device[a.use_op[m]], 0.0
                if there != here:
                    seconds = a.latency_s[here, there]
                    seconds += a.sent_bytes[t] * s_per_byte[here, there]
                due = min(due, latest_s[a.use_op[m]] - seconds)
        latest_s[op] = due - (finish_s[op] - start_s[op])
        if works:
            due_s[here] = latest_s[op]
