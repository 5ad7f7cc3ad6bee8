"""Latency as a linear program: the share of each group on each device, and the end of each op.

    minimise e(end)                                              x, y, s, h, w in [0, 1], e >= 0
    sum over d of x(g, d) = 1                                          each group g
    x(v, d) = x(u, d) + sum of y(u, v, ., d) - sum of y(u, v, d, .)    v reads what u makes
    e(v) >= e(u) + sum of op_s x(v, .) + sum of send_s y(u, v, ., .)   likewise
    e(v) >= e(u) + sum of span_s over the devices of u and v           spans (`gdp.bounds.paths`)
    e(v) >= e(u) + work of the block between on d + op_s x(v, .)       blocks, each device d
    e(v) >= e(u) + transfers of the block between + op_s x(v, .)       blocks, each channel
    y(u, v, i, j) <= s(t, i, j)                                        t is sent once, for all
    weights on d <= w(d), w(d) + b(v) x(v, d) <= 1                     where memory can bind

y(u, v, i, j) is the share in which u is on i and v on j, so that a path is a flow through its
devices. A block holds all ops on paths from u to v: it runs after u has ended and before v starts,
so neither a device nor a channel has less time for it. b(v) is the bytes that an op reads and
makes, in units of the device's memory: if the op takes any time, they are there besides all
weights. Each row holds for every schedule of a placement that fits, so the program bounds the
latency from below, and so does the same with whole x. Here memory meets paths, work and transfers
in one argument.

Axes: G groups, D devices, L links between devices, V = N + 1: the ops and the end; P arcs, Q pairs
of groups, K tensors between groups, R rows, C columns.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.bounds.budget import WorkBudget
from gdp.bounds.linear_program import LinearProgram, RowBuilder
from gdp.bounds.loads import HeldWeights, cut_tensors
from gdp.bounds.paths import (
    MAX_DEVICES,
    MAX_OPS,
    Arcs,
    SeriesParallelBlock,
    Spans,
    arcs_of,
    find_blocks,
    find_spans,
    heads_and_tails,
    longest_s,
    no_spans,
    send_s,
)
from gdp.graph.groups import distinct
from gdp.problem.arrays import arrays_of, touched_bytes
from gdp.problem.problem import Problem
from gdp.problem.ticks import send_time


class TimingGraph(NamedTuple):
    """Arcs, spans and blocks of a problem: everything that takes time one after the other."""

    arcs: Arcs
    spans: Spans
    blocks: list[SeriesParallelBlock]


def timing_graph(problem: Problem, budget: WorkBudget) -> TimingGraph:
    """The arcs, the spans that the budget allows, and the blocks of a problem."""
    arcs = arcs_of(problem)
    spans, blocks = no_spans(problem.num_devices), []
    if problem.num_ops <= MAX_OPS and 1 < problem.num_devices <= MAX_DEVICES:
        head_s, _ = heads_and_tails(arcs, spans)
        blocks = find_blocks(arcs, head_s)
        spans = find_spans(problem, arcs, blocks, budget)
    return TimingGraph(arcs, spans, blocks)


def path_program_size(problem: Problem) -> int:
    """About how many entries the matrix has."""
    d = problem.num_devices
    return problem.num_ops * 3 * d + problem.graph.num_uses * (2 * d + 8 * d * (d - 1))


def rows_bind(problem: Problem) -> bool:
    """True where all weights and the largest op do not fit on one device."""
    held = arrays_of(problem).weight_bytes.sum() + _touched_bytes(problem).max(axis=0)
    return bool((held > problem.cluster.memory_bytes).any())


def build_paths(problem: Problem, unit_s: float, timing: TimingGraph) -> LinearProgram:
    """The linear program of a problem. O(N D + E D^2 + the blocks' ops and tensors).

    Args:
        problem: Any of the event simulator's.
        unit_s: The program's unit of time.
        timing: Of the problem.
    """
    builder = _Builder(problem, unit_s, timing)
    builder.add_flows()
    builder.add_arcs()
    builder.add_spans()
    builder.add_sends()
    builder.add_blocks()
    if rows_bind(problem):
        builder.add_memory()
    matrix, _, b = builder.rows.matrix()
    high = np.ones(matrix.shape[1])
    high[: problem.group_allowed.size] = problem.group_allowed.reshape(-1)
    end = builder.first_e + problem.num_ops
    high[builder.first_e : end + 1] = longest_s(timing.arcs) / unit_s
    return LinearProgram(matrix, b, problem.group_allowed.shape, end, high, unit_s)


class _Builder:
    """The program under construction."""

    def __init__(self, problem: Problem, unit_s: float, timing: TimingGraph) -> None:
        self.problem, self.unit_s, self.timing = problem, unit_s, timing
        self.arrays = arrays_of(problem)
        self.d = problem.num_devices
        self.rows = RowBuilder()
        self.rows.columns(problem.num_groups * self.d)
        self.first_e = self.rows.columns(problem.num_ops + 1)
        op_s = timing.arcs.op_s[:-1]
        self.op = np.where(np.isfinite(op_s), op_s, 0.0) / unit_s
        self.source, self.target = np.nonzero(~np.eye(self.d, dtype=bool))  # of each link
        first = timing.arcs.first_input
        self.arc_target = np.repeat(np.arange(len(first) - 1), np.diff(first))

    def _ends(self, u: int, v: int) -> tuple[list[Any], list[Any]]:
        """Columns and values of e(u) - e(v), where u = -1 is the start."""
        columns, values = [[self.first_e + v], [self.first_e + u]], [[-1.0], [1.0]]
        return (columns, values) if u >= 0 else (columns[:1], values[:1])

    def add_flows(self) -> None:
        """Columns y of each pair of groups between which there is an arc or a span."""
        n, groups = self.problem.num_ops, self.problem.num_groups
        arcs, spans, links = self.timing.arcs, self.timing.spans, len(self.source)
        group, inner = arcs.group, self.arc_target < n
        u, v = group[arcs.source[inner]], group[self.arc_target[inner]]
        among = (spans.source >= 0) & (spans.target < n)
        jumps = group[spans.source[among]] * groups + group[spans.target[among]]
        self.keys = distinct(np.concatenate([u * groups + v, jumps]))
        self.keys = self.keys[self.keys // groups != self.keys % groups]
        count = len(self.keys)
        self.first_y = self.rows.columns(count * links)
        tail, head = self.keys // groups * self.d, self.keys % groups * self.d
        y = self.first_y + np.arange(count * links).reshape(count, links)
        one = np.ones(count)
        held = self.d > 2 or len(jumps) > 0
        for i in range(self.d if count else 0):
            into, out = y[:, self.target == i].T, y[:, self.source == i].T
            # Over all devices these add up to 1 <= 1, so each of them is an equation.
            columns = [head + i, tail + i, *into, *out]
            values = [one, -one, *[-one] * len(into), *[one] * len(out)]
            self.rows.add_rows(columns, values)
            if held:
                self.rows.add_rows([tail + i, *out], [-one, *[one] * len(out)])

    def _y(self, u: Any, v: Any) -> Int[np.ndarray, "..."]:
        """First column y of pairs of groups; negative where both are one."""
        groups = self.problem.num_groups
        if len(self.keys) == 0:
            return np.full(np.shape(u), -1)
        at = np.minimum(np.searchsorted(self.keys, u * groups + v), len(self.keys) - 1)
        return np.where(u == v, -1, self.first_y + at * len(self.source))

    def add_arcs(self) -> None:
        """Rows of arcs: an op ends its own time after the end of each of its inputs."""
        n, arcs = self.problem.num_ops, self.timing.arcs
        u, v = arcs.source, self.arc_target
        works = np.flatnonzero(v < n)
        r, one = np.arange(len(u)), np.ones(len(u))
        row, column, value = [r, r], [self.first_e + v, self.first_e + u], [-one, one]
        for i in range(self.d):
            row.append(works)
            column.append(arcs.group[v[works]] * self.d + i)
            value.append(self.op[v[works], i])
        sent = works[arcs.group[u[works]] != arcs.group[v[works]]]
        y, along_s = self._y(arcs.group[u[sent]], arcs.group[v[sent]]), send_s(arcs, sent)
        for k, (i, j) in enumerate(zip(self.source, self.target, strict=True)):
            row.append(sent)
            column.append(y + k)
            value.append((along_s[:, i, j] + arcs.opens_s[v[sent], j]) / self.unit_s)
        zeros = np.zeros(len(u))
        self.rows.add(np.concatenate(row), np.concatenate(column), np.concatenate(value), zeros)
        first = np.flatnonzero(np.diff(arcs.first_input)[:n] == 0)
        columns = [self.first_e + first, *(arcs.group[first] * self.d + i for i in range(self.d))]
        self.rows.add_rows(columns, [-np.ones(len(first)), *self.op[first].T])

    def add_spans(self) -> None:
        """Rows of spans: time between the ends of two ops, by their devices."""
        n, group, spans = self.problem.num_ops, self.timing.arcs.group, self.timing.spans
        devices = np.arange(self.d)
        ends = spans.source.tolist(), spans.target.tolist()
        for u, v, span_s in zip(*ends, spans.span_s / self.unit_s, strict=True):
            if u < 0 and v == n:
                self.rows.add_row([[self.first_e + v]], [[-1.0]], -float(span_s.min()))
                continue
            columns, values = self._ends(u, v)
            # Seconds by the device of one end; for both ends, with y for tensors that change
            # devices.
            by = span_s.min(axis=0) if u < 0 else span_s.min(axis=1) if v == n else np.diag(span_s)
            by = np.where(np.isfinite(by), by, 0.0)
            home = group[v] if u < 0 else group[u]
            columns.append(home * self.d + devices)
            values.append(by)
            y = self._y(group[u], group[v]) if u >= 0 and v < n else -1
            if y >= 0:
                across = span_s[self.source, self.target]
                columns.append(y + np.arange(len(self.source)))
                values.append(np.where(np.isfinite(across), across - by[self.source], 0.0))
            self.rows.add_row(columns, values)

    def add_sends(self) -> None:
        """Columns s: a tensor that several groups read is sent to each device once."""
        cut, count = cut_tensors(self.problem), len(self.source)
        a = self.arrays
        readers = np.bincount(cut.use_cut, minlength=len(cut.tensor))
        y = self._y(cut.maker[cut.use_cut], cut.use_group)
        many = np.flatnonzero(readers > 1)
        first_s = self.rows.columns(len(many) * count)
        self.sent = np.zeros(len(a.producer), np.int64)  # first column, of tensors that may be sent
        self.sent[cut.tensor[cut.use_cut]] = y
        self.sent[cut.tensor[many]] = first_s + np.arange(len(many)) * count
        self.readers = np.zeros(len(a.producer), np.int64)
        self.readers[cut.tensor] = readers
        shared = readers[cut.use_cut] > 1
        s = self.sent[cut.tensor[cut.use_cut[shared]]]
        one = np.ones(len(s))
        for k in range(count if len(s) else 0):
            self.rows.add_rows([y[shared] + k, s + k], [one, -one])

    def add_blocks(self) -> None:
        """Time of each block on each device and channel, small blocks first."""
        n = self.problem.num_ops
        everything = SeriesParallelBlock(-1, n, np.arange(n))
        left = 4 * sum(len(part[0]) for part in self.rows.parts)  # entries
        for block in [everything, *sorted(self.timing.blocks, key=lambda m: len(m.inner))]:
            left -= len(block.inner) * 2 * self.d
            if left < 0:
                return
            self._add_block(block)

    def _add_block(self, block: SeriesParallelBlock) -> None:
        n, group, a = self.problem.num_ops, self.timing.arcs.group, self.arrays
        u, v, inner = block
        columns, values = self._ends(u, v)
        if v < n:
            columns.append(group[v] * self.d + np.arange(self.d))
            values.append(self.op[v])
        makers, uses = {int(u), *inner.tolist()}, {}
        for op in [*inner.tolist(), *([v] if v < n else [])]:
            for t in a.in_tensor[a.in_start[op] : a.in_start[op + 1]].tolist():
                if self.readers[t] and int(a.producer[t]) in makers:
                    uses.setdefault(t, set()).add(int(group[op]))
        for i in range(self.d):
            row = [*columns, group[inner] * self.d + i], [*values, self.op[inner, i]]
            if u >= 0 and v < n and uses:
                self._add_visit(block, i, int(a.sent_bytes[list(uses)].min()), row)
            self.rows.add_row(*row)
        if not uses:
            return
        column = np.full(len(uses), -1)
        for k, (t, readers) in enumerate(uses.items()):
            maker = self.problem.group[a.producer[t]]
            away = sorted(readers - {int(maker)})
            # Sent to one of the groups if not to all.
            if len(away) == self.readers[t]:
                column[k] = self.sent[t]
            elif away:
                column[k] = self._y(maker, np.int64(away[0]))
        keep = column >= 0
        size, column = a.sent_bytes[list(uses)][keep], column[keep]
        link = self.source, self.target
        send_s = (
            send_time(a.latency_s[link], size[:, None], a.bytes_per_s[link], a.round_to)
            / self.unit_s
        )
        for channel in np.unique(a.channel[link]):
            on = np.flatnonzero((a.channel[link] == channel) & (channel >= 0))
            if len(on):
                more = [column + k for k in on]
                self.rows.add_row([*columns, *more], [*values, *send_s[:, on].T])

    def _add_visit(
        self,
        block: SeriesParallelBlock,
        i: int,
        least_bytes: int,
        row: tuple[list[Any], list[Any]],
    ) -> None:
        """Add the least transfers in and out of a block whose source or sink is not on device i."""
        a, group = self.arrays, self.timing.arcs.group
        seconds = send_time(a.latency_s, least_bytes, a.bytes_per_s, a.round_to) / self.unit_s
        into_s, out_s = np.delete(seconds[:, i], i).min(), np.delete(seconds[i], i).min()
        used = self.rows.columns(1)
        inner = np.unique(group[block.inner])
        one = np.ones(len(inner))
        self.rows.add_rows([inner * self.d + i, np.full(len(inner), used)], [one, -one])
        u, v = group[block.source], group[block.target]
        row[0].append([used, u * self.d + i, v * self.d + i])
        row[1].append([into_s + out_s, -into_s, -out_s])

    def add_memory(self) -> None:
        """Limit a device's weights together with the inputs and outputs of an op there."""
        touched = _touched_bytes(self.problem)
        weights = HeldWeights(self.rows, self.problem)
        first_w = self.rows.columns(self.d)
        for i in range(self.d):
            columns, values = weights.terms(i)
            self.rows.add_row([*columns, [first_w + i]], [*values, [-1.0]])
            weights.add_ties(i)
            busy = np.flatnonzero(touched[:, i] > 0)
            r, one = np.arange(len(busy)), np.ones(len(busy))
            column = np.concatenate([np.full(len(busy), first_w + i), busy * self.d + i])
            value = np.concatenate([one, touched[busy, i] / weights.memory[i]])
            self.rows.add(np.tile(r, 2), column, value, one)


def _touched_bytes(problem: Problem) -> Float[np.ndarray, "G D"]:
    """The most that any op of each group reads and makes on a device on which it takes any time."""
    a, size = arrays_of(problem), touched_bytes(problem).astype(np.float64)
    takes = np.isfinite(a.compute_s) & (a.compute_s > 0.0)
    most = np.zeros((problem.num_groups, problem.num_devices))
    np.maximum.at(most, problem.group, np.where(takes, size[:, None], 0.0))
    return most
