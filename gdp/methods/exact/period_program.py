"""The least period of a pipeline as a mixed-integer program.

    minimise T    subject to
    sum over groups of work(g, d) x(g, d)  +  segment(d) * opened(d)       <=  T   for devices d
    sum over t, (i, j) on channel c of send(t, i, j) y(t, i, j)            <=  T   for channels c
    sum over i of y(t, i, j) >= x(r, j) - x(p, j)     for tensors t of p read by r, devices j
    y(t, i, j) <= x(p, i),    sum over d of x(g, d) = 1

y(t, i, j) is 1 where tensor t is sent from i to j. An op opens a segment on d where it is on d and
the maker of one of its inputs is not. This is the simulator's period exactly. Memory is not: only
weights are counted, so where activations could overflow the program is a relaxation.

Axes: G groups, T tensors, D devices.
"""

import numpy as np
from jaxtyping import Float

from gdp.bounds.linear_program import INTEGRAL, LinearModel
from gdp.methods.exact.hypergraph import group_weights
from gdp.methods.exact.load_program import UNIT, LoadSolution, limit_weights, read_solution
from gdp.methods.scoring import group_seconds
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem
from gdp.problem.symmetry import classes_of, links_alike, same

MOST_VARIABLES = 150_000
"""Above this the linear relaxation alone takes minutes."""


def num_variables(problem: Problem) -> int:
    """How many variables the program has, roughly."""
    d = problem.num_devices
    return problem.num_groups * d + problem.graph.num_tensors * d * (d - 1)


def too_large(problem: Problem) -> str:
    """How many variables, where they are too many; nothing where a solver gets through."""
    count = num_variables(problem)
    return f"{count} variables" if count > MOST_VARIABLES else ""


def solve_period(
    problem: Problem, upper_s: float, seconds: float | None, relative_gap: float = 1e-6
) -> LoadSolution:
    """The devices of the groups with the least period below `upper_s`."""
    a, work_s = arrays_of(problem), _work_s(problem)
    finite = np.isfinite(upper_s)
    scale = UNIT / (upper_s if finite else _any_upper_s(problem, work_s))
    rows = LinearModel()
    period = int(rows.variables(1, 0.0, upper_s * scale if finite else np.inf)[0])
    x = np.asarray(rows.variables(work_s.shape, 0.0, 1.0, INTEGRAL))
    for g in range(problem.num_groups):
        rows.constrain(x[g], np.ones(len(x[g])), 1.0, 1.0)
        for d in np.flatnonzero(~(work_s[g] <= upper_s)):
            rows.fix(x[g, d], 0.0)
    _break_symmetry(problem, work_s, rows, x)
    for d in range(problem.num_devices):
        works = np.isfinite(work_s[:, d]) & (work_s[:, d] > 0)
        opened = _openings(a, rows, x, d) if a.segment_s[d] > 0 else []
        columns = [period, *x[works, d], *opened]
        values = [-1.0, *(work_s[works, d] * scale), *[a.segment_s[d] * scale] * len(opened)]
        rows.constrain(columns, values, high=0.0)
    _limit_channels(a, rows, x, period, scale)
    held, shared = group_weights(problem)
    limit_weights(rows, x, held, shared, problem.cluster.memory_bytes)
    return read_solution(rows.minimise(period, seconds, relative_gap), x, upper_s, scale)


def _work_s(problem: Problem) -> Float[np.ndarray, "G D"]:
    """Compute and dispatch; ops that open a segment wherever they are pay for it."""
    a = arrays_of(problem)
    work_s = group_seconds(problem)
    always = np.bincount(problem.group[a.opens & ~a.is_io], minlength=problem.num_groups)
    return work_s + always[:, None] * a.segment_s


def _any_upper_s(problem: Problem, work_s: Float[np.ndarray, "G D"]) -> float:
    """No period is longer than all work and all transfers on the slowest devices and links."""
    a = arrays_of(problem)
    most_s = np.where(np.isfinite(work_s), work_s, 0.0).max(axis=1).sum()
    openings = float(a.segment_s.max(initial=0.0)) * problem.num_ops
    sent_s = a.latency_s.max() + a.tensor_bytes / a.bytes_per_s.min()
    return float(most_s + openings + sent_s.sum() * problem.num_devices) or 1.0


def _openings(a: Arrays, rows: LinearModel, x: np.ndarray, d: int) -> list[int]:
    """A variable for each op that opens a segment on d where an input comes from elsewhere."""
    opened: list[int] = []
    for op in np.flatnonzero(~a.is_io & ~a.opens).tolist():
        makers = {
            int(a.group[a.producer[t]]) for t in a.in_tensor[a.in_start[op] : a.in_start[op + 1]]
        } - {int(a.group[op])}
        if not makers:
            continue
        opens = int(rows.variables(1, 0.0, 1.0)[0])
        for g in makers:
            rows.constrain([opens, x[a.group[op], d], x[g, d]], [1.0, -1.0, 1.0], low=0.0)
        opened.append(opens)
    return opened


def _limit_channels(a: Arrays, rows: LinearModel, x: np.ndarray, period: int, scale: float) -> None:
    num_devices = x.shape[1]
    columns: list[list[int]] = [[] for _ in range(int(a.channel.max()) + 1)]
    values: list[list[float]] = [[] for _ in columns]
    for t in range(len(a.producer)):
        maker = int(a.group[a.producer[t]])
        readers = {int(g) for g in a.group[a.use_op[a.use_start[t] : a.use_start[t + 1]]]}
        readers.discard(maker)
        for j in range(num_devices if readers else 0):
            others = [i for i in range(num_devices) if i != j and rows.high[x[maker, i]] > 0]
            sent = [int(y) for y in np.asarray(rows.variables(len(others), 0.0, 1.0))]
            for i, y in zip(others, sent, strict=True):
                rows.constrain([x[maker, i], y], [1.0, -1.0], low=0.0)
                seconds = a.latency_s[i, j] + a.tensor_bytes[t] / a.bytes_per_s[i, j]
                columns[a.channel[i, j]].append(y)
                values[a.channel[i, j]].append(float(seconds) * scale)
            for g in readers:
                if rows.high[x[g, j]] > 0:
                    parts = [*sent, int(x[g, j]), int(x[maker, j])]
                    rows.constrain(parts, [1.0] * len(sent) + [-1.0, 1.0], low=0.0)
    for channel, factors in zip(columns, values, strict=True):
        if channel:
            rows.constrain([*channel, period], [*factors, -1.0], high=0.0)


def _break_symmetry(
    problem: Problem, work_s: Float[np.ndarray, "G D"], rows: LinearModel, x: np.ndarray
) -> None:
    """Of the groups in order of work, the i-th is on one of the first i of equal devices."""
    order = np.argsort(-np.where(np.isfinite(work_s), work_s, 0.0).max(axis=1), kind="stable")
    a = arrays_of(problem)
    alike = links_alike(problem) & same(work_s, a.memory_bytes, a.segment_s)
    for devices in classes_of(alike):
        inside = [g for g in order.tolist() if np.isfinite(work_s[g, devices[0]])]
        for i, g in enumerate(inside[: len(devices)]):
            for d in devices[i + 1 :]:
                rows.fix(x[g, d], 0.0)
