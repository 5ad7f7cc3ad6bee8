"""Loads as a linear program: which share of each group goes where, and what must be sent.

    minimise T                                                          x, y, o, h in [0, 1]
    sum over d of x(g, d) = 1                                           each group g
    sum of op_s x(., d) + dispatch o(., d)                    <= T      each device d
    sum of send_s(t, s, d) y(t, s, d) over the channel        <= T      each channel
    x(v, d) - x(u, d) <= sum over s of y(t, s, d)                       u makes t, which v reads
    x(u, s) - x(v, s) <= sum over d of y(t, s, d)                       likewise, seen from u
    y(t, s, d) <= x(u, s)                                               more than two devices
    x(v, d) - x(u, d) <= o(v, d)                                        v opens a segment
    what d holds <= memory of d                                         where memory can bind

Whole x give the period of the simulator exactly (memory aside, of which it is a part), so the
program, and the same with some x whole, bounds it from below: after Archer, Fahrbach, Liu and
Prabhu 2024, arXiv 2311.03703, here with channels that work beside the devices. A latency is at
least the busy time of any device or channel, so it bounds latency, too, without the buffers.

Axes: G groups, D devices, R rows, Q columns, K tensors between groups.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.bounds.linear_program import Solution, solve_whole
from gdp.bounds.load_memory import NO_MARKS, Marks, memory_rows
from gdp.bounds.load_rows import Cuts, Rows, cuts
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.problem.ticks import send_time


class LoadModel(NamedTuple):
    """Rows of `a z <= b` over z in [0, 1], of which the first are `a z <= b + T`, beside sum x = 1.

    Columns are x (group by group), then the others. Seconds are in units of `unit_s`.
    """

    a: Any  # scipy.sparse.csr_array [R, Q]
    b: Float[np.ndarray, "R"]
    num_loads: int  # rows that are loads
    shape: tuple[int, int]  # G, D
    possible: Bool[np.ndarray, "Q"]  # False: 0 in any solution
    unit_s: float
    load_names: tuple[str, ...]


def group_seconds(problem: Problem) -> Float[np.ndarray, "G D"]:
    """What each group takes on each device, unavoidable dispatch included; inf where it cannot go.

    O(N D).
    """
    a = arrays_of(problem)
    opening = np.where(a.opens[:, None] & ~a.is_io[:, None], a.segment_s[None, :], 0.0)
    seconds = np.zeros((problem.num_groups, problem.num_devices))
    finite = np.where(problem.allowed, a.compute_s + opening, 0.0)
    np.add.at(seconds, problem.group, finite)
    return np.where(problem.group_allowed, seconds, np.inf)


def model_size(problem: Problem) -> int:
    """About how many entries the matrix has."""
    d = problem.num_devices
    per_use = 4 if d == 2 else 2 * d * (d + 1)
    return problem.num_groups * d + problem.graph.num_uses * per_use


def build(problem: Problem, unit_s: float, marks: Marks = NO_MARKS) -> LoadModel:
    """The linear program of a problem, with memory at the marks. O(N D + E D^2)."""
    a = arrays_of(problem)
    g, d = problem.num_groups, problem.num_devices
    seconds = group_seconds(problem)
    possible = [np.isfinite(seconds).reshape(-1)]
    rows = Rows(g * d)
    cut = cuts(problem)
    links = [(s, to) for s in range(d) for to in range(d) if s != to]
    first_y = rows.more_columns(len(cut.tensor) * len(links))
    maker_may = problem.group_allowed[cut.maker]
    possible.append(np.stack([maker_may[:, s] for s, _ in links], axis=1).reshape(-1)
                    if links else np.zeros(0, bool))  # fmt: skip
    opens = _openings(problem)
    first_o = rows.more_columns(len(opens[0]) * d)
    possible.append(np.ones(len(opens[0]) * d, dtype=bool))
    # Loads of devices, then of channels.
    finite = np.where(np.isfinite(seconds), seconds, 0.0) / unit_s
    columns = np.concatenate([np.arange(g * d), first_o + np.arange(len(opens[0]) * d)])
    values = np.concatenate([finite.reshape(-1), np.tile(a.segment_s / unit_s, len(opens[0]))])
    rows.add(np.tile(np.arange(d), g + len(opens[0])), columns, values, np.zeros(d))
    names = [f"device {name}" for name in problem.cluster.device_names]
    if links and len(cut.tensor):
        # Links on which nothing queues are no load.
        loaded = [(k, *link) for k, link in enumerate(links) if a.channel[link] >= 0]
        used, number = np.unique([a.channel[s, to] for _, s, to in loaded], return_inverse=True)
        size = a.tensor_bytes[cut.tensor].astype(np.float64)
        send_s = np.array(
            [
                send_time(a.latency_s[s, to], size, a.bytes_per_s[s, to], a.round_to)
                for _, s, to in loaded
            ]
        )
        column = first_y + np.arange(len(cut.tensor))[:, None] * len(links)
        column = (column + np.array([k for k, _, _ in loaded], dtype=np.int64)).reshape(-1)
        rows.add(np.tile(number, len(cut.tensor)), column, send_s.T.reshape(-1) / unit_s,
                 np.zeros(len(used)))  # fmt: skip
        names += [_channel_name(problem, int(c)) for c in used]
    num_loads = rows.count
    _cut_rows(rows, cut, links, first_y, d)
    _opening_rows(rows, opens, first_o, d)
    extra = memory_rows(rows, problem, cut, links, first_y, marks)
    possible.append(np.ones(extra, dtype=bool))
    matrix, b = rows.matrix()
    return LoadModel(matrix, b, num_loads, (g, d), np.concatenate(possible), unit_s, tuple(names))


def _channel_name(problem: Problem, channel: int) -> str:
    a, names = arrays_of(problem), problem.cluster.device_names
    d = problem.num_devices
    lanes = [(s, t) for s in range(d) for t in range(d) if s != t and a.channel[s, t] == channel]
    if len(lanes) == 1:
        return f"link {names[lanes[0][0]]} to {names[lanes[0][1]]}"
    if len({s for s, _ in lanes}) == 1:
        return f"link out of {names[lanes[0][0]]}"
    return f"channel of {names[lanes[0][0]]} and {len(lanes) - 1} more"


def _cut_rows(rows: Rows, cut: Cuts, links: list[tuple[int, int]], first_y: int, d: int) -> None:
    """Tensors are sent where a reader is elsewhere."""
    uses = len(cut.use_cut)
    if uses == 0 or not links:
        return
    maker = cut.maker[cut.use_cut]
    r = np.arange(uses)
    base = first_y + cut.use_cut * len(links)
    for i in range(d):
        into = [k for k, (_, to) in enumerate(links) if to == i]
        out = [k for k, (s, _) in enumerate(links) if s == i]
        one = np.ones(uses)
        row = np.concatenate([r, r, *[r] * len(into)])
        column = np.concatenate([cut.use_group * d + i, maker * d + i, *[base + k for k in into]])
        rows.add(row, column, np.concatenate([one, -one, *[-one] * len(into)]), np.zeros(uses))
        if d > 2:
            column = np.concatenate(
                [maker * d + i, cut.use_group * d + i, *[base + k for k in out]]
            )
            rows.add(row, column, np.concatenate([one, -one, *[-one] * len(out)]), np.zeros(uses))
    if d > 2:
        tensors = np.arange(len(cut.tensor))
        one = np.ones(len(tensors))
        for k, (s, _) in enumerate(links):
            column = np.concatenate([first_y + tensors * len(links) + k, cut.maker * d + s])
            rows.add(np.tile(tensors, 2), column, np.concatenate([one, -one]), np.zeros(len(one)))


def _openings(
    problem: Problem,
) -> tuple[Int[np.ndarray, "O"], Int[np.ndarray, "2 A"], Int[np.ndarray, "O"]]:
    """(ops that may open a segment, arcs into them (position, producer's group), their groups)."""
    a = arrays_of(problem)
    none = np.zeros(0, np.int64)
    if not (a.segment_s > 0).any():
        return none, np.zeros((2, 0), np.int64), none
    src, dst = problem.graph.edges
    counts = ~a.opens[dst] & ~a.is_io[dst] & (problem.group[src] != problem.group[dst])
    ops, position = np.unique(dst[counts], return_inverse=True)
    pairs = np.unique(np.stack([position, problem.group[src[counts]]]), axis=1)
    return ops, pairs, problem.group[ops]


def _opening_rows(rows: Rows, opens: tuple[Any, Any, Any], first_o: int, d: int) -> None:
    ops, pairs, group = opens
    if len(ops) == 0:
        return
    position, maker = pairs
    r = np.arange(len(position))
    one = np.ones(len(r))
    for i in range(d):
        column = np.concatenate(
            [group[position] * d + i, maker * d + i, first_o + position * d + i]
        )
        rows.add(np.tile(r, 3), column, np.concatenate([one, -one, -one]), np.zeros(len(r)))


def least_whole(
    model: LoadModel,
    between: tuple[float, float],
    seconds: float | None,
    relative_gap: float,
    nodes: int | None = None,
) -> Solution:
    """HiGHS's answer for whole x and a period between two values, all in the model's units."""
    program, num_whole = linear_arguments(model), model.shape[0] * model.shape[1]
    column = len(program["c"]) - 1
    return solve_whole(program, num_whole, column, between, seconds, relative_gap, nodes)


def linear_arguments(model: LoadModel) -> dict[str, Any]:
    """The arguments of `linprog`; the last column is T."""
    from scipy.sparse import coo_array, csr_array, hstack

    rows, columns = model.a.shape
    g, d = model.shape
    loads = np.arange(model.num_loads)
    t = coo_array((-np.ones(len(loads)), (loads, np.zeros_like(loads))), shape=(rows, 1))
    x = np.arange(g * d)
    one = coo_array((np.ones(g * d), (x // d, x)), shape=(g, columns + 1))
    upper = np.append(model.possible.astype(float), np.inf)
    return {
        "c": np.append(np.zeros(columns), 1.0),
        "A_ub": csr_array(hstack([model.a, t])),
        "b_ub": model.b,
        "A_eq": csr_array(one),
        "b_eq": np.ones(g),
        "bounds": np.stack([np.zeros(columns + 1), upper], axis=1),
    }
