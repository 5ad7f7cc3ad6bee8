"""A longest path whose weights do not fit where it runs fastest must change devices.

Memory is priced: with a price c_d >= 0 for each byte of device d, any placement that fits takes at
least

    min over devices of the path's ops of (time along the path + sum of c_d * weights on d)
        - sum over d of c_d * memory_d

(Lagrangian relaxation of a shortest path with resources: Handler and Zang 1980,
doi 10.1002/net.3230100403). The minimum is a dynamic program over the path; prices follow the
overflow of its solution.

Axes: L steps of the path, D devices.
"""

import numpy as np
from jaxtyping import Float, Int

from gdp.bounds.bound import Bound
from gdp.bounds.effort import Effort
from gdp.bounds.paths import Arcs, Spans, send_s
from gdp.problem.problem import Problem
from gdp.units import format_bytes

MAX_OPS = 10_000  # the path is followed step by step in Python
_ROUNDS = 100
_SHRINK = 0.92  # of the steps: a sum of 12 first ones is in reach


def memory_bound(
    problem: Problem,
    arcs: Arcs,
    spans: Spans,
    head_s: Float[np.ndarray, "V D"],
    effort: Effort,
) -> Bound | None:
    """The bound of the path behind the largest head; None where its weights fit anywhere.

    O(L D^2) a round.
    """
    memory = problem.cluster.memory_bytes.astype(np.float64)
    if problem.graph.weight_bytes.sum() <= memory.min() or problem.num_ops > MAX_OPS:
        return None
    steps_s, path = _path(arcs, spans, head_s)
    weight = _weights(problem, path)
    if weight.sum() <= memory.min():
        return None
    price = np.zeros(problem.num_devices)
    best_s = 0.0
    # Prices are of the order of the slowest way along the path for the bytes that a device holds.
    slowest_s = float(np.where(np.isfinite(steps_s), steps_s, 0.0).max(axis=(1, 2)).sum())
    step = 0.5 * slowest_s / memory
    for _ in range(_ROUNDS):
        if effort.is_over():
            break
        value_s, device = _cheapest(steps_s, weight[:, None] * price)
        best_s = max(best_s, value_s - float(price @ memory))
        load = np.bincount(device, weight, minlength=len(price))
        over = load / memory - 1.0
        over = np.where((price > 0.0) | (over > 0.0), over, 0.0)
        if not over.any():
            break
        price = np.maximum(0.0, price + step * over / np.abs(over).max())
        step = step * _SHRINK
    return Bound(
        best_s,
        f"memory: {format_bytes(weight.sum())} of weights along the critical path do not fit where "
        f"it is fastest; spread over devices it takes at least {problem.unit.text(best_s)}",
    )


def _path(
    arcs: Arcs, spans: Spans, head_s: Float[np.ndarray, "V D"]
) -> tuple[Float[np.ndarray, "L D D"], Int[np.ndarray, "L"]]:
    """(seconds from step to step by devices, its ops) of a path that leads to the end of the run.

    Backwards from the end, each time over the arc or span that makes the op wait longest. The first
    step comes from nowhere and has equal rows.
    """
    num_devices = arcs.op_s.shape[1]
    v = len(arcs.op_s) - 1
    steps, ops = [], []
    while v >= 0:
        ops.append(v)
        longest_s, step_s, u = -1.0, np.tile(arcs.op_s[v], (num_devices, 1)), -1
        for k in range(arcs.first_input[v], arcs.first_input[v + 1]):
            along_s = _along_s(arcs, k, v) + arcs.op_s[v]
            end_s = float((head_s[arcs.source[k]][:, None] + along_s).min())
            if end_s > longest_s:
                longest_s, step_s, u = end_s, along_s, int(arcs.source[k])
        for k in np.flatnonzero((spans.target == v) & (spans.source >= 0)).tolist():
            end_s = float((head_s[spans.source[k]][:, None] + spans.span_s[k]).min())
            if end_s > longest_s:
                longest_s, step_s, u = end_s, spans.span_s[k], int(spans.source[k])
        steps.append(step_s)
        v = u
    return np.array(steps[::-1]), np.array(ops[::-1], dtype=np.int64)


def _along_s(arcs: Arcs, k: int, v: int) -> Float[np.ndarray, "D D"]:
    """Seconds of arc k into op v from device to device, dispatch included."""
    along_s = send_s(arcs, np.array([k]))[0] + arcs.opens_s[v][None, :]
    if arcs.group[arcs.source[k]] == arcs.group[v]:
        along_s = np.full_like(along_s, np.inf)
    np.fill_diagonal(along_s, 0.0)
    return along_s


def _weights(problem: Problem, path: Int[np.ndarray, "L"]) -> Float[np.ndarray, "L"]:
    """Bytes of each op of the path; a weight of several ops counts with the first of them."""
    graph = problem.graph
    ops = path[:-1]  # the last one is the end of the run
    held = graph.weight_bytes[ops].astype(np.float64)
    _, first = np.unique(graph.weight_id[ops], return_index=True)
    counted = np.zeros(len(ops), dtype=bool)
    counted[first] = True
    return np.append(np.where(counted, held, 0.0), 0.0)


def _cheapest(
    steps_s: Float[np.ndarray, "L D D"], price_s: Float[np.ndarray, "L D"]
) -> tuple[float, Int[np.ndarray, "L"]]:
    """(least time plus prices, the devices that take it)."""
    count, num_devices = price_s.shape
    total_s = np.zeros(num_devices)
    came_from = np.zeros((count, num_devices), dtype=np.int64)
    for k in range(count):
        ways_s = total_s[:, None] + steps_s[k]
        came_from[k] = ways_s.argmin(axis=0)
        total_s = ways_s.min(axis=0) + price_s[k]
    device = np.zeros(count, dtype=np.int64)
    device[-1] = int(total_s.argmin())
    for k in range(count - 1, 0, -1):
        device[k - 1] = came_from[k, device[k]]
    return float(total_s.min()), device
