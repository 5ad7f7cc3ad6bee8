"""A latency as a linear program: which share of each group goes where, and when each op ends.

    minimise e(end)                                              x, y, s, h, w in [0, 1], e >= 0
    sum over d of x(g, d) = 1                                          each group g
    x(v, d) = x(u, d) + sum of y(u, v, ., d) - sum of y(u, v, d, .)    v reads what u makes
    e(v) >= e(u) + sum of op_s x(v, .) + sum of send_s y(u, v, ., .)   likewise
    e(v) >= e(u) + sum of span_s over the devices of u and v           spans (`gdp.bounds.spans`)
    e(v) >= e(u) + work of what lies between on d + op_s x(v, .)       modules, each device d
    e(v) >= e(u) + transfers of what lies between + op_s x(v, .)       modules, each channel
    y(u, v, i, j) <= s(t, i, j)                                        t is sent once, for all
    weights on d <= w(d), w(d) + b(v) x(v, d) <= 1                     where memory can bind

y(u, v, i, j) is the share in which u is on i and v on j, so that a path is a flow through its
devices. A module is all that lies on paths from u to v: it runs after u has ended and before v
starts, so neither a device nor a channel has less time for it. b(v) is what an op reads and makes,
in units of the device's memory: if the op takes any time, that is there beside all weights. Each
row holds for every schedule of a placement that fits, so the program bounds the latency from below,
and so does the same with whole x. Here memory meets paths, work and transfers in one argument.

Axes: G groups, D devices, L links between devices, V = N + 1: the ops and the end; P arcs, Q pairs
of groups, K tensors between groups, R rows, C columns.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.bounds.effort import Effort
from gdp.bounds.linear_program import Solution, solve_whole
from gdp.bounds.load_memory import held_weights
from gdp.bounds.load_rows import Rows, cuts
from gdp.bounds.paths import Arcs, Spans, arcs_of, heads_and_tails, longest_s, no_spans, send_s
from gdp.bounds.spans import MAX_DEVICES, MAX_OPS, Module, find_modules, find_spans
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.problem.ticks import send_time


class Net(NamedTuple):
    """What of a problem takes time one after the other."""

    arcs: Arcs
    spans: Spans
    modules: list[Module]


class PathModel(NamedTuple):
    """Rows of `a z <= b` over z between 0 and `high`, beside sum x = 1; the end's column is least.

    Columns are x (group by group), then e, then the others. Seconds are in units of `unit_s`.
    """

    a: Any  # scipy.sparse.csr_array [R, C]
    b: Float[np.ndarray, "R"]
    shape: tuple[int, int]  # G, D
    end: int  # column
    high: Float[np.ndarray, "C"]
    unit_s: float


def net_of(problem: Problem, effort: Effort) -> Net:
    """The arcs, the spans that the effort allows, and the modules of a problem."""
    arcs = arcs_of(problem)
    spans, modules = no_spans(problem.num_devices), []
    if problem.num_ops <= MAX_OPS and 1 < problem.num_devices <= MAX_DEVICES:
        head_s, _ = heads_and_tails(arcs, spans)
        modules = find_modules(problem, arcs, head_s)
        spans = find_spans(problem, arcs, modules, effort)
    return Net(arcs, spans, modules)


def path_model_size(problem: Problem) -> int:
    """About how many entries the matrix has."""
    d = problem.num_devices
    return problem.num_ops * 3 * d + problem.graph.num_uses * (2 * d + 8 * d * (d - 1))


def rows_bind(problem: Problem) -> bool:
    """Whether the rows of memory exclude anything: all weights and the largest op on one device."""
    held = arrays_of(problem).weight_bytes.sum() + _touched_bytes(problem).max(axis=0)
    return bool((held > problem.cluster.memory_bytes).any())


def build_paths(problem: Problem, unit_s: float, net: Net) -> PathModel:
    """The linear program of a problem. O(N D + E D^2 + the modules' ops and tensors)."""
    form = _Form(problem, unit_s, net)
    form.flows()
    form.arcs()
    form.spans()
    form.sends()
    form.modules()
    if rows_bind(problem):
        form.memory()
    return form.model()


class _Form:
    """The model under construction."""

    def __init__(self, problem: Problem, unit_s: float, net: Net) -> None:
        self.problem, self.unit_s, self.net = problem, unit_s, net
        self.arrays = arrays_of(problem)
        self.d = problem.num_devices
        self.rows = Rows(problem.num_groups * self.d)
        self.first_e = self.rows.more_columns(problem.num_ops + 1)
        op_s = net.arcs.op_s[:-1]
        self.op = np.where(np.isfinite(op_s), op_s, 0.0) / unit_s
        self.links = [(i, j) for i in range(self.d) for j in range(self.d) if i != j]
        self.source, self.target = (np.array(x, np.int64) for x in zip(*self.links, strict=True))

    def _row(self, columns: Any, values: Any, b: float = 0.0) -> None:
        """One row."""
        column, value = np.concatenate(columns), np.concatenate(values)
        self.rows.add(np.zeros(len(column), np.int64), column, value, np.array([b]))

    def _ends(self, u: int, v: int) -> tuple[list[Any], list[Any]]:
        """Columns and values of e(u) - e(v), where u = -1 is the start."""
        first = self.first_e
        return (
            ([[first + v], [first + u]], [[-1.0], [1.0]]) if u >= 0 else ([[first + v]], [[-1.0]])
        )

    def flows(self) -> None:
        """Columns y of each pair of groups between which there is an arc or a span."""
        n, groups = self.problem.num_ops, self.problem.num_groups
        group, links = self.net.arcs.group, len(self.links)
        inner = self._targets() < n
        u, v = group[self.net.arcs.source[inner]], group[self._targets()[inner]]
        spans = self.net.spans
        among = (spans.source >= 0) & (spans.target < n)
        jumps = group[spans.source[among]] * groups + group[spans.target[among]]
        self.keys = np.unique(np.concatenate([u * groups + v, jumps]))
        self.keys = self.keys[self.keys // groups != self.keys % groups]
        count = len(self.keys)
        self.first_y = self.rows.more_columns(count * links)
        tail, head = self.keys // groups * self.d, self.keys % groups * self.d
        y = self.first_y + np.arange(count) * links
        one = np.ones(count)
        held = self.d > 2 or len(jumps) > 0
        for i in range(self.d if count else 0):
            into = [y + k for k in np.flatnonzero(self.target == i)]
            out = [y + k for k in np.flatnonzero(self.source == i)]
            # Over all devices these add up to 1 <= 1, so each of them is an equation.
            columns = [head + i, tail + i, *into, *out]
            values = [one, -one, *[-one] * len(into), *[one] * len(out)]
            self._rows(columns, values)
            if held:
                self._rows([tail + i, *out], [-one, *[one] * len(out)])

    def _rows(self, columns: list[Any], values: list[Any]) -> None:
        """A row `<= 0` for each entry of the arrays."""
        r = np.arange(len(columns[0]))
        row = np.tile(r, len(columns))
        self.rows.add(row, np.concatenate(columns), np.concatenate(values), np.zeros(len(r)))

    def _targets(self) -> Int[np.ndarray, "P"]:
        first = self.net.arcs.first_input
        return np.repeat(np.arange(len(first) - 1), np.diff(first))

    def _y(self, u: Any, v: Any) -> Int[np.ndarray, "..."]:
        """First column y of pairs of groups; negative where both are one."""
        groups = self.problem.num_groups
        if len(self.keys) == 0:
            return np.full(np.shape(u), -1)
        at = np.minimum(np.searchsorted(self.keys, u * groups + v), len(self.keys) - 1)
        return np.where(u == v, -1, self.first_y + at * len(self.links))

    def arcs(self) -> None:
        """Ops end after those that they read from, and after themselves."""
        n, arcs = self.problem.num_ops, self.net.arcs
        u, v = arcs.source, self._targets()
        works = np.flatnonzero(v < n)
        r, one = np.arange(len(u)), np.ones(len(u))
        row, column, value = [r, r], [self.first_e + v, self.first_e + u], [-one, one]
        for i in range(self.d):
            row.append(works)
            column.append(arcs.group[v[works]] * self.d + i)
            value.append(self.op[v[works], i])
        sent = works[arcs.group[u[works]] != arcs.group[v[works]]]
        y, along_s = self._y(arcs.group[u[sent]], arcs.group[v[sent]]), send_s(arcs, sent)
        for k, (i, j) in enumerate(self.links):
            row.append(sent)
            column.append(y + k)
            value.append((along_s[:, i, j] + arcs.opens_s[v[sent], j]) / self.unit_s)
        zeros = np.zeros(len(u))
        self.rows.add(np.concatenate(row), np.concatenate(column), np.concatenate(value), zeros)
        first = np.flatnonzero(np.diff(arcs.first_input)[:n] == 0)
        columns = [self.first_e + first, *(arcs.group[first] * self.d + i for i in range(self.d))]
        self._rows(columns, [-np.ones(len(first)), *self.op[first].T])

    def spans(self) -> None:
        """Between the ends of some ops it takes so long, depending on their devices."""
        n, group, spans = self.problem.num_ops, self.net.arcs.group, self.net.spans
        devices = np.arange(self.d)
        ends = spans.source.tolist(), spans.target.tolist()
        for u, v, span_s in zip(*ends, spans.span_s / self.unit_s, strict=True):
            if u < 0 and v == n:
                self._row([[self.first_e + v]], [[-1.0]], -float(span_s.min()))
                continue
            columns, values = self._ends(u, v)
            # Seconds by the device of one end; for both ends, with y for what changes devices.
            by = span_s.min(axis=0) if u < 0 else span_s.min(axis=1) if v == n else np.diag(span_s)
            by = np.where(np.isfinite(by), by, 0.0)
            home = group[v] if u < 0 else group[u]
            columns.append(home * self.d + devices)
            values.append(by)
            y = self._y(group[u], group[v]) if u >= 0 and v < n else -1
            if y >= 0:
                across = span_s[self.source, self.target]
                columns.append(y + np.arange(len(self.links)))
                values.append(np.where(np.isfinite(across), across - by[self.source], 0.0))
            self._row(columns, values)

    def sends(self) -> None:
        """Columns s: a tensor that several groups read is sent to each device once."""
        cut, count = cuts(self.problem), len(self.links)
        a = self.arrays
        readers = np.bincount(cut.use_cut, minlength=len(cut.tensor))
        y = self._y(cut.maker[cut.use_cut], cut.use_group)
        many = np.flatnonzero(readers > 1)
        first_s = self.rows.more_columns(len(many) * count)
        self.sent = np.zeros(len(a.producer), np.int64)  # first column, of tensors that may be sent
        self.sent[cut.tensor[cut.use_cut]] = y
        self.sent[cut.tensor[many]] = first_s + np.arange(len(many)) * count
        self.readers = np.zeros(len(a.producer), np.int64)
        self.readers[cut.tensor] = readers
        shared = readers[cut.use_cut] > 1
        s = self.sent[cut.tensor[cut.use_cut[shared]]]
        one = np.ones(len(s))
        for k in range(count if len(s) else 0):
            self._rows([y[shared] + k, s + k], [one, -one])

    def modules(self) -> None:
        """What lies between two ops takes its time on each device and channel; small ones first."""
        n = self.problem.num_ops
        everything = Module(-1, n, np.arange(n))
        left = 4 * sum(len(part[0]) for part in self.rows.parts)  # entries
        for module in [everything, *sorted(self.net.modules, key=lambda m: len(m.inner))]:
            left -= len(module.inner) * 2 * self.d
            if left < 0:
                return
            self._module(module)

    def _module(self, module: Module) -> None:
        n, group, a = self.problem.num_ops, self.net.arcs.group, self.arrays
        u, v, inner = module
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
                self._visit(module, i, int(a.tensor_bytes[list(uses)].min()), row)
            self._row(*row)
        if not uses:
            return
        column = np.array([self._send_column(t, readers) for t, readers in uses.items()])
        keep = column >= 0
        size, column = a.tensor_bytes[list(uses)][keep], column[keep]
        for channel in np.unique(a.channel[self.source, self.target]):
            on = [k for k, link in enumerate(self.links) if a.channel[link] == channel >= 0]
            seconds = [
                send_time(
                    a.latency_s[self.links[k]], size, a.bytes_per_s[self.links[k]], a.round_to
                )
                for k in on
            ]
            if on:
                more = [column + k for k in on], [s / self.unit_s for s in seconds]
                self._row([*columns, *more[0]], [*values, *more[1]])

    def _visit(
        self, module: Module, i: int, least_bytes: int, row: tuple[list[Any], list[Any]]
    ) -> None:
        """Beside the work of a module on device i: the ways there and back, where u or v is not."""
        a, group = self.arrays, self.net.arcs.group
        seconds = send_time(a.latency_s, least_bytes, a.bytes_per_s, a.round_to) / self.unit_s
        into_s, out_s = np.delete(seconds[:, i], i).min(), np.delete(seconds[i], i).min()
        used = self.rows.more_columns(1)
        inner = np.unique(group[module.inner])
        one = np.ones(len(inner))
        self._rows([inner * self.d + i, np.full(len(inner), used)], [one, -one])
        u, v = group[module.source], group[module.target]
        row[0].append([used, u * self.d + i, v * self.d + i])
        row[1].append([into_s + out_s, -into_s, -out_s])

    def _send_column(self, t: int, readers: set[int]) -> int:
        """The first column of how a tensor is sent to groups: to one of them if not to all."""
        maker = self.problem.group[self.arrays.producer[t]]
        away = sorted(readers - {int(maker)})
        if len(away) == self.readers[t]:
            return int(self.sent[t])
        return int(self._y(maker, np.int64(away[0]))) if away else -1

    def memory(self) -> None:
        """What a device holds: its weights, and what an op there reads and makes."""
        a = self.arrays
        group, weight, size = held_weights(self.problem)
        sharers = np.bincount(weight)
        shared = np.flatnonzero(sharers > 1)
        # Where groups disagree on the size of a weight, any of them may be the one that holds it.
        least = np.full(len(sharers), np.inf)
        np.minimum.at(least, weight, size)
        place = np.full(len(sharers), -1)
        place[shared] = np.arange(len(shared))
        tied = sharers[weight] > 1
        touched = _touched_bytes(self.problem)
        first_h = self.rows.more_columns(len(shared) * self.d)
        first_w = self.rows.more_columns(self.d)
        for i in range(self.d):
            limit, w = max(1.0, float(a.memory_bytes[i])), np.array([first_w + i])
            h = first_h + np.arange(len(shared)) * self.d + i
            columns = [group[~tied] * self.d + i, h, w]
            self._row(columns, [size[~tied] / limit, least[shared] / limit, [-1.0]])
            if tied.any():
                one = np.ones(int(tied.sum()))
                held = first_h + place[weight[tied]] * self.d + i
                self._rows([group[tied] * self.d + i, held], [one, -one])
            busy = np.flatnonzero(touched[:, i] > 0)
            r, one = np.arange(len(busy)), np.ones(len(busy))
            column = np.concatenate([np.full(len(busy), first_w + i), busy * self.d + i])
            value = np.concatenate([one, touched[busy, i] / limit])
            self.rows.add(np.tile(r, 2), column, value, one)

    def model(self) -> PathModel:
        matrix, b = self.rows.matrix()
        high = np.ones(matrix.shape[1])
        possible = self.problem.group_allowed.reshape(-1)
        high[: len(possible)] = possible
        end = self.first_e + self.problem.num_ops
        high[self.first_e : end + 1] = longest_s(self.net.arcs) / self.unit_s
        return PathModel(matrix, b, self.problem.group_allowed.shape, end, high, self.unit_s)


def _touched_bytes(problem: Problem) -> Float[np.ndarray, "G D"]:
    """The most that any op of each group reads and makes on a device on which it takes any time."""
    a = arrays_of(problem)
    size = np.zeros(problem.num_ops)
    op = np.repeat(np.arange(problem.num_ops), np.diff(a.in_start))
    reads = np.unique(np.stack([op, a.in_tensor]), axis=1)
    np.add.at(size, reads[0], a.tensor_bytes[reads[1]].astype(np.float64))
    np.add.at(size, a.producer, a.tensor_bytes.astype(np.float64))
    takes = np.isfinite(a.compute_s) & (a.compute_s > 0.0)
    most = np.zeros((problem.num_groups, problem.num_devices))
    np.maximum.at(most, problem.group, np.where(takes, size[:, None], 0.0))
    return most


def linear_arguments(model: PathModel) -> dict[str, Any]:
    """The arguments of `linprog`."""
    cost = np.zeros(len(model.high))
    cost[model.end] = 1.0
    return {
        "c": cost,
        "A_ub": model.a,
        "b_ub": model.b,
        "A_eq": _one_each(model),
        "b_eq": np.ones(model.shape[0]),
        "bounds": np.stack([np.zeros(len(model.high)), model.high], axis=1),
    }


def _one_each(model: PathModel) -> Any:
    """Rows: the shares of each group."""
    from scipy.sparse import csr_array

    g, d = model.shape
    x = np.arange(g * d)
    return csr_array((np.ones(g * d), (x // d, x)), shape=(g, len(model.high)))


def dual_value_s(model: PathModel, weight: Float[np.ndarray, "R"]) -> float:
    """A lower bound of the latency in seconds from any weights >= 0 of the rows.

    sum over groups of min over d of r(g, d) + sum over others of min(0, r high) - weight b, where
    r = cost + weight A: an inexact solver costs tightness, never truth.
    """
    reduced = model.a.T @ weight
    reduced[model.end] += 1.0
    num_x = model.shape[0] * model.shape[1]
    by_group = np.where(model.high[:num_x] > 0, reduced[:num_x], np.inf).reshape(model.shape)
    others = np.minimum(reduced[num_x:] * model.high[num_x:], 0.0)
    return float(by_group.min(axis=1).sum() + others.sum() - weight @ model.b) * model.unit_s


def least_whole(
    model: PathModel,
    between: tuple[float, float],
    seconds: float | None,
    relative_gap: float,
    nodes: int | None = None,
) -> Solution:
    """HiGHS's answer for whole x and a latency between two values, in the model's units."""
    num_whole = model.shape[0] * model.shape[1]
    program = linear_arguments(model)
    return solve_whole(program, num_whole, model.end, between, seconds, relative_gap, nodes)
