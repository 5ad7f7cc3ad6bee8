"""The numba kernel of the critical-path scheduler: ops in an order, each where it ends first.

As in `list_schedule_kernels`, over a `Plan`; what it adds are lots between equals, and ops that
wait for their first reader before they are placed.
"""

from typing import no_type_check

import numba
import numpy as np

from gdp.kernels.options import BARE, INNER
from gdp.methods.heuristics.list_schedule_kernels import (
    earliest_gap,
    excess_bytes,
    new_plan,
    place_op,
    ready_seconds,
    run_seconds,
    send_seconds,
)

SAME = 1e-9  # ends that are this close, in shares, are equal


@numba.njit(**INNER)
@no_type_check
def waiting_seconds(a, plan, i, d):
    """Seconds of the ops that wait for their first reader, where that is op i on device d."""
    seconds = 0.0
    for x in range(a.in_start[i], a.in_start[i + 1]):
        source = a.producer[a.in_tensor[x]]
        if plan.device[source] == a.compute_s.shape[1]:
            seconds += a.compute_s[source, d]
    return seconds


@numba.njit(**INNER)
@no_type_check
def waiting_bytes(a, plan, i, d):
    """What the ops that wait for op i would hold on device d: their weights and tensors."""
    held = 0
    for x in range(a.in_start[i], a.in_start[i + 1]):
        source = a.producer[a.in_tensor[x]]
        if plan.device[source] < a.compute_s.shape[1]:
            continue
        g = a.group[source]
        for y in range(a.group_weight_start[g], a.group_weight_start[g + 1]):
            if not plan.holds[a.group_weight[y], d]:
                held += a.weight_bytes[a.group_weight[y]]
    return held


@numba.njit(**INNER)
@no_type_check
def sent_seconds(a, plan, i, d):
    """Seconds on links of what op i would have sent to device d."""
    seconds = 0.0
    for x in range(a.in_start[i], a.in_start[i + 1]):
        t = a.in_tensor[x]
        source = plan.device[a.producer[t]]
        if source < a.compute_s.shape[1] and plan.arrival_s[t, d] == np.inf:
            seconds += send_seconds(a, t, source, d)
    return seconds


@numba.njit(**INNER)
@no_type_check
def device_of_first_end(a, plan, i, price, lot, channel_s):
    """The allowed device where op i fits and ends first, of equals by lot; else of least excess.

    Seconds on links count `price` times beside: what is sent delays what follows.
    """
    num_devices = a.compute_s.shape[1]
    g = a.group[i]
    if plan.group_device[g] < num_devices:
        return plan.group_device[g]
    best, best_excess, best_s = -1, 0, np.inf
    for d in range(num_devices):
        if not a.group_allowed[g, d]:
            continue
        excess = excess_bytes(a, plan, i, d, waiting_bytes(a, plan, i, d))
        before_s = waiting_seconds(a, plan, i, d)
        ready_s = ready_seconds(a, plan, i, d, np.bool_(True), channel_s)
        seconds = run_seconds(a, plan, i, d)
        start_s = max(ready_s, plan.free_s[d] + before_s)
        if before_s == 0.0:
            start_s, _ = earliest_gap(plan, d, ready_s, seconds)
        cost_s = start_s + seconds + price * sent_seconds(a, plan, i, d)
        if abs(cost_s - best_s) <= SAME * best_s:
            better = lot[i, d] < lot[i, best]
        else:
            better = cost_s < best_s
        if best < 0 or excess < best_excess or (excess == best_excess and better):
            best, best_excess, best_s = d, excess, cost_s
    return best


@numba.njit(**BARE)
@no_type_check
def run_critical(a, plan, order, waits, price, lot, channel_s):
    """Place each op of `order`; one that waits goes with its first reader. O(E D + N D gaps)."""
    num_devices = a.compute_s.shape[1]
    for i in order:
        if waits[i]:
            continue
        d = device_of_first_end(a, plan, i, price, lot, channel_s)
        for x in range(a.in_start[i], a.in_start[i + 1]):
            source = a.producer[a.in_tensor[x]]
            if plan.device[source] == num_devices:
                place_op(a, plan, source, d, np.bool_(True), np.bool_(True))
        place_op(a, plan, i, d, np.bool_(True), np.bool_(True))


def critical_plan(a, order, waits, price, lot):
    """The plan in which each op of `order` (a topological one) goes where it ends first.

    `lot` [N, D] decides between devices that are equally good. `waits` [N] are ops that read
    nothing, may be anywhere and have readers; each is placed with the first of these.
    """
    plan = new_plan(a)
    run_critical(a, plan, order, waits, price, lot, np.empty_like(plan.channel_s))
    return plan
