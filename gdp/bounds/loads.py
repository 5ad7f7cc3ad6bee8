"""Loads as a linear program: the share of each group on each device, and the tensors sent for it.

    minimise T                                                       x, y, o, h, sent in [0, 1]
    sum over d of x(g, d) = 1                                           each group g
    sum of op_s x(., d) + dispatch o(., d)                    <= T      each device d
    sum of send_s(t, s, d) y(t, s, d) over the channel        <= T      each channel
    sum of both over devices of one processor and within      <= T      each processor
    sum of launch_s x(., d) + dispatch o(., d) over d         <= T      each thread that launches
    x(v, d) - x(u, d) <= sum over s of y(t, s, d)                       u makes t, which v reads
    x(u, s) - x(v, s) <= sum over d of y(t, s, d)                       likewise, seen from u
    y(t, s, d) <= x(u, s)                                               more than two devices
    x(v, d) - x(u, d) <= o(v, d)                                        v opens a segment

Whole x give the period of the simulator exactly (memory aside, of which it is a part), so the
program, and the same with some x whole, bounds it from below: after Archer, Fahrbach, Liu and
Prabhu 2024, arXiv 2311.03703, here with channels that work in parallel with the devices. A latency
is at least the busy time of any device or channel, so this bounds latency, too, without buffers.

Memory, where it can bind: weights are held throughout, each once per device. A full pipeline also
holds, on each device, two buffers of each tensor received; and while op p of a sample would run
there (`gdp.sim.memory`) each tensor t that the device makes with

    producer of t <= p <= last reader of t,   in topological order, wherever the readers are:

a reader there after p keeps it, a reader elsewhere keeps it to the end of the sample, as it does
every tensor that was sent. So for every device d and op p (a separation point)

    weights + sum of 2 b(t) y(t, s, d) + sum over t alive at p of b(t) x(maker of t, d)
            + sum over t with last reader before p of b(t) sent(t, d)  <=  memory of d

with sent(t, d) >= x(maker, d) - x(v, d) for each reader v; with whole x that is exactly what an
inference pipeline holds. Nearly all of these N D rows are slack: those are added that a solution
breaks most (row generation), and it is solved again.

Devices that share a memory together have one more row of weights and buffers.

Where the program is too large, only the heaviest tensors have columns y and sent. What is left out
are rows that limit such columns from below and, in the other rows, terms y >= 0 and sent >= 0 with
coefficients >= 0, on the side that must be at most T or the memory. Dropping either only admits
more solutions, so the program stays a relaxation and its value a bound: x, the work and the weights
are there in any case, and so are tensors that are alive where they were made, as they need x alone.

Axes: G groups, Q classes of groups, D devices, M machines or held weights, C columns, T tensors, K
tensors between groups, U distinct (tensor, reading group), P separation points, X owners of
weights, O ops that may open a segment, A arcs into them, Z entries.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.bounds.linear_program import LinearProgram, RowBuilder
from gdp.graph.groups import distinct
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem, stored_bytes
from gdp.problem.ticks import send_time
from gdp.sim.objectives import memory_binds, objective_of


class SeparationPoints(NamedTuple):
    """Ops at which the memory of a device is checked."""

    device: Int[np.ndarray, "P"]
    op: Int[np.ndarray, "P"]


NO_POINTS = SeparationPoints(np.zeros(0, np.int64), np.zeros(0, np.int64))
NO_OPENINGS = np.zeros(0, np.int64), np.zeros((2, 0), np.int64), np.zeros(0, np.int64)


class CutTensors(NamedTuple):
    """Tensors that may be sent."""

    tensor: Int[np.ndarray, "K"]
    maker: Int[np.ndarray, "K"]  # group
    use_cut: Int[np.ndarray, "U"]  # which of these tensors
    use_group: Int[np.ndarray, "U"]


class Sends(NamedTuple):
    """Columns y and seconds of each cut tensor on each link. Axes: K cut tensors, L links."""

    source: Int[np.ndarray, "L"]
    target: Int[np.ndarray, "L"]
    y: Int[np.ndarray, "K L"]
    seconds: Float[np.ndarray, "K L"]  # in the program's unit of time


NO_SENDS = Sends(NO_POINTS.op, NO_POINTS.op, np.zeros((0, 0), np.int64), np.zeros((0, 0)))


def cut_tensors(problem: Problem, most_entries: float = np.inf) -> CutTensors:
    """Every tensor read outside its producer's group, with the groups that read it.

    Args:
        problem: Of any objective.
        most_entries: Of a matrix of loads: the heaviest tensors whose rows have no more of them.
    """
    graph, group = problem.graph, problem.group
    src, dst = graph.edges
    across = group[src] != group[dst]
    g = problem.num_groups
    key = distinct(graph.use_tensor[across] * g + group[dst[across]])
    tensor, use_cut = np.unique(key // g, return_inverse=True)
    if np.isfinite(most_entries):
        readers = np.bincount(use_cut, minlength=len(tensor))
        heaviest = np.argsort(-problem.sent_bytes[tensor], kind="stable")
        entries = np.cumsum(readers[heaviest]) * _entries_per_use(problem.num_devices)
        kept = np.zeros(len(tensor), dtype=bool)
        kept[heaviest[: int((entries <= most_entries).sum())]] = True
        key = key[kept[use_cut]]
        tensor, use_cut = np.unique(key // g, return_inverse=True)
    return CutTensors(tensor, group[graph.producer[tensor]], use_cut, key % g)


def least_group_seconds(
    problem: Problem, op_s: Float[np.ndarray, "N D"] | None = None
) -> Float[np.ndarray, "G D"]:
    """Seconds of each group, unavoidable dispatch included; inf where it cannot go. O(N D)."""
    a = arrays_of(problem)
    op_s = a.compute_s if op_s is None else op_s
    opening = np.where(a.opens[:, None] & ~a.is_io[:, None], a.segment_s[None, :], 0.0)
    seconds = np.zeros((problem.num_groups, problem.num_devices))
    finite = np.where(problem.allowed, op_s + opening, 0.0)
    np.add.at(seconds, problem.group, finite)
    return np.where(problem.group_allowed, seconds, np.inf)


def least_launches(problem: Problem) -> tuple[float, int]:
    """(Least seconds in which threads of the host launch all ops, how many threads do); ops that
    may go to a device that launches its own take none."""
    a = arrays_of(problem)
    launched = (a.serial >= 0) & (problem.cluster.processor < 0)
    if not launched.any():
        return 0.0, 0
    seconds = np.where(launched, least_group_seconds(problem, a.serial_s), 0.0)
    least_s = np.where(problem.group_allowed, seconds, np.inf).min(axis=1)
    return float(least_s.sum()), len(np.unique(a.serial[launched]))


def machine_seconds(problem: Problem) -> tuple[Float[np.ndarray, "G M"], tuple[str, ...]]:
    """(Least seconds of each group on each machine, their names): a machine computes one op at a
    time, so the devices of one processor are one machine, each group on its fastest device."""
    seconds, own = least_group_seconds(problem), problem.cluster.processor
    names = [device.name for device in problem.cluster.devices]
    if (own < 0).all():
        return seconds, tuple(names)
    shared = [np.flatnonzero(own == k) for k in range(int(own.max()) + 1)]
    alone = np.flatnonzero(own < 0)
    columns = [seconds[:, alone], *(seconds[:, d].min(axis=1)[:, None] for d in shared)]
    named = [*(names[d] for d in alone), *(processor_name(problem, k) for k in range(len(shared)))]
    return np.concatenate(columns, axis=1), tuple(named)


def processor_name(problem: Problem, serial: int) -> str:
    """Name of a serial resource (`Arrays.serial`), such as "processor of cpu0, cpu1" or "host
    thread of gpu0, gpu1"."""
    members = arrays_of(problem).serial == serial
    names = [n for n, here in zip(problem.cluster.device_names, members, strict=True) if here]
    is_processor = serial <= int(problem.cluster.processor.max())
    return f"{'processor' if is_processor else 'host thread'} of {', '.join(names)}"


def load_program_size(problem: Problem) -> int:
    """About how many entries the matrix has."""
    d = problem.num_devices
    return problem.num_groups * d + problem.graph.num_uses * _entries_per_use(d)


def _entries_per_use(d: int) -> int:
    return 4 if d == 2 else 2 * d * (d + 1)


def build_work(problem: Problem, unit_s: float) -> LinearProgram:
    """The rows of devices alone: busy times, and weights within each device's memory. O(N D).

    A part of the rows of `build_loads`, so what it proves holds for period and latency. Groups of
    equal weights, devices and seconds, such as the layers of a language model, are one class with
    one column per device: the mean x(c, d) of their shares. Take any solution of the rows of all
    groups. The k members of c have seconds of min(s) or more each, so that k min(s) x(c, d) is at
    most the sum of s x over them; their weights are k times those of one; shares that sum to 1 have
    a mean that does. So the means solve the rows of classes with no larger T: the program stays a
    relaxation, and loses only what the seconds of one class differ by, here below 1e-6. Weights
    that groups share keep these groups apart.

    The entries are few, however large the model is. Of weights
    that stream, as accelerate offloads them, it proves: let accelerators of memory M in all hold
    weights at rest, W > M be the bytes of all weights, and let weights elsewhere arrive at r bytes
    per second at most, so that an op on an offload device takes at least (its bytes) / r. Bytes on
    the accelerators are M at most, so at least W - M are on offload devices. One of those is busy
    for (W - M) / r seconds; several of them share it. A host that may compute is one more device
    that holds weights, at its own speed: the program takes the cheaper of both.
    """
    rows = RowBuilder()
    seconds, serial_s, of_group = _classes(problem)
    rows.columns(seconds.size)
    values = _finite(seconds) / unit_s, _finite(serial_s) / unit_s
    names = _add_device_loads(rows, problem, np.arange(seconds.size), *values, NO_SENDS)
    add_weights(rows, problem, of_group)
    return _largest_load(rows, seconds, unit_s, names)


def add_weights(
    rows: RowBuilder, problem: Problem, of_group: Int[np.ndarray, "G"] | None = None
) -> None:
    """Fit weights into every device and shared memory, where any can overflow; the first columns
    are those of the groups, or of their classes, device by device."""
    if memory_binds(problem):
        weights = HeldWeights(rows, problem, of_group)
        terms = [weights.terms(i) for i in range(problem.num_devices)]
        for i, (columns, values) in enumerate(terms):
            rows.add_row(columns, values, 1.0)
            weights.add_ties(i)
        _add_pools(rows, problem, weights, terms)


def _finite(seconds: Float[np.ndarray, "G D"]) -> Float[np.ndarray, "G*D"]:
    return np.where(np.isfinite(seconds), seconds, 0.0).reshape(-1)


def _classes(
    problem: Problem,
) -> tuple[Float[np.ndarray, "Q D"], Float[np.ndarray, "Q D"], Int[np.ndarray, "G"]]:
    """(Least seconds of all members of each class of equal groups, on devices and on their serial
    resources; class of each group)."""
    seconds = least_group_seconds(problem)
    group, weight, size, kind = held_weights(problem)
    held = np.zeros((len(problem.held_on), problem.num_groups))
    np.add.at(held, (kind, group), size)
    own = np.zeros(problem.num_groups)  # a class of its own for groups that share weights
    sharing = distinct(group[np.bincount(weight)[weight] > 1])
    own[sharing] = 1 + sharing
    # In single precision, as sums of equal seconds in other orders differ.
    key = np.column_stack([seconds.astype(np.float32), *held, own])
    _, of_group, count = np.unique(key, axis=0, return_inverse=True, return_counts=True)
    of_group = of_group.reshape(-1)
    least, serial_s = (np.full((len(count), problem.num_devices), np.inf) for _ in range(2))
    np.minimum.at(least, of_group, seconds)
    np.minimum.at(serial_s, of_group, least_group_seconds(problem, arrays_of(problem).serial_s))
    return least * count[:, None], serial_s * count[:, None], of_group


def build_loads(
    problem: Problem,
    unit_s: float,
    points: SeparationPoints = NO_POINTS,
    most_entries: float = np.inf,
) -> LinearProgram:
    """The linear program of a problem. O(N D + E D^2).

    Args:
        problem: Any of the event simulator's.
        unit_s: The program's unit of time.
        points: Where the memory of a pipeline is checked.
        most_entries: Rows of so many entries are built for the heaviest tensors, and none for
            segments; all of them by default.
    """
    a = arrays_of(problem)
    g, d = problem.num_groups, problem.num_devices
    seconds = least_group_seconds(problem)
    rows = RowBuilder()
    rows.columns(g * d)
    cut = cut_tensors(problem, most_entries)
    source, target = np.nonzero(~np.eye(d, dtype=bool))
    shape = len(cut.tensor), len(source)
    first_y = rows.columns(shape[0] * shape[1])
    size = a.sent_bytes[cut.tensor, None].astype(np.float64)
    latency_s, speed = a.latency_s[source, target], a.bytes_per_s[source, target]
    send_s = send_time(latency_s, size, speed, a.round_to) / unit_s
    y = first_y + np.arange(shape[0] * shape[1]).reshape(shape)
    sends = Sends(source, target, y, send_s)
    opens = _openings(problem) if np.isinf(most_entries) else NO_OPENINGS
    first_o = rows.columns(len(opens[0]) * d)
    columns = np.append(np.arange(g * d), first_o + np.arange(len(opens[0]) * d))
    opening = np.tile(a.segment_s / unit_s, len(opens[0]))
    serial_s = least_group_seconds(problem, a.serial_s)
    values, serial = (np.append(_finite(s) / unit_s, opening) for s in (seconds, serial_s))
    names = _add_device_loads(rows, problem, columns, values, serial, sends)
    _add_cuts(rows, cut, sends, d)
    _, (position, maker), group = opens
    one = np.ones(len(position))
    for i in range(d if len(position) else 0):
        opened = first_o + position * d + i
        rows.add_rows([group[position] * d + i, maker * d + i, opened], [one, -one, -one])
    if memory_binds(problem):
        _add_memory(rows, problem, cut, sends, points)
    program = _largest_load(rows, seconds, unit_s, names)
    program.high[first_y:first_o] = problem.group_allowed[cut.maker][:, source].reshape(-1)
    return program


def _add_device_loads(
    rows: RowBuilder, problem: Problem, columns: Int[np.ndarray, "C"],
    values: Float[np.ndarray, "C"], serial_values: Float[np.ndarray, "C"], sends: Sends,
) -> list[str]:  # fmt: skip
    """Add a row of seconds for every device, channel that transfers queue on, processor that
    devices share and thread that launches their ops; their names.

    `columns` are those of seconds on devices, device by device: `values`, and `serial_values` on
    their serial resources.
    """
    d, own, (source, target, y, send_s) = problem.num_devices, problem.cluster.processor, sends
    serial = arrays_of(problem).serial
    device = np.arange(len(columns)) % d
    rows.add(device, columns, values, np.zeros(d))
    names = [f"device {name}" for name in problem.cluster.device_names]
    channel = arrays_of(problem).channel[source, target]
    queues = channel >= 0
    if queues.any() and len(y):
        used, row = np.unique(channel[queues], return_inverse=True)
        row = np.tile(row, len(y))
        rows.add(row, y[:, queues].ravel(), send_s[:, queues].ravel(), np.zeros(len(used)))
        names += [_channel_name(problem, int(c)) for c in used]
    for k in range(int(serial.max()) + 1):
        mine, inside = serial[device] == k, (own[source] == k) & (own[target] == k)
        rows.add_row(
            [columns[mine], y[:, inside].ravel()],
            [serial_values[mine], send_s[:, inside].ravel()],
        )
        names.append(processor_name(problem, k))
    return names


def _largest_load(
    rows: RowBuilder, seconds: Float[np.ndarray, "Q D"], unit_s: float, names: list[str]
) -> LinearProgram:
    """The program of all rows, of which the first, one for each name, are at most the objective."""
    largest = rows.columns(1, np.inf)
    rows.parts.append((np.arange(len(names)), np.full(len(names), largest), -np.ones(len(names))))
    matrix, _, b = rows.matrix()
    high = np.array(rows.limits)
    high[: seconds.size] = np.isfinite(seconds).reshape(-1)
    return LinearProgram(matrix, b, seconds.shape, largest, high, unit_s, tuple(names))


def _add_pools(
    rows: RowBuilder, problem: Problem, weights: "HeldWeights",
    terms: Sequence[tuple[list[Any], list[Any]]],
) -> None:  # fmt: skip
    """Add a row for every shared memory, from the (columns, shares) of each device."""
    cluster = problem.cluster
    for k, size in enumerate(np.maximum(1.0, cluster.pool_bytes.astype(np.float64)).tolist()):
        members = np.flatnonzero(cluster.pool == k).tolist()
        columns = [column for i in members for column in terms[i][0]]
        values = [x * (weights.memory[i] / size) for i in members for x in terms[i][1]]
        rows.add_row(columns, values, 1.0)


def _channel_name(problem: Problem, channel: int) -> str:
    a, names = arrays_of(problem), problem.cluster.device_names
    d = problem.num_devices
    lanes = [(s, t) for s in range(d) for t in range(d) if s != t and a.channel[s, t] == channel]
    if len(lanes) == 1:
        return f"link {names[lanes[0][0]]} to {names[lanes[0][1]]}"
    if len({s for s, _ in lanes}) == 1:
        return f"link out of {names[lanes[0][0]]}"
    return f"channel of {names[lanes[0][0]]} and {len(lanes) - 1} more"


def _add_cuts(rows: RowBuilder, cut: CutTensors, sends: Sends, d: int) -> None:
    """Send a tensor to every device of a reader that is not its maker's."""
    used = sends.y[cut.use_cut]
    one = np.ones(len(used))
    for i in range(d if used.size else 0):
        into, out = used[:, sends.target == i].T, used[:, sends.source == i].T
        reader, maker = cut.use_group * d + i, cut.maker[cut.use_cut] * d + i
        rows.add_rows([reader, maker, *into], [one, -one, *[-one] * len(into)])
        if d > 2:
            rows.add_rows([maker, reader, *out], [one, -one, *[-one] * len(out)])
    one = np.ones(len(cut.tensor))
    for y, s in zip(sends.y.T, sends.source, strict=True) if d > 2 and used.size else ():
        rows.add_rows([y, cut.maker * d + s], [one, -one])


def _openings(
    problem: Problem,
) -> tuple[Int[np.ndarray, "O"], Int[np.ndarray, "2 A"], Int[np.ndarray, "O"]]:
    """(ops that may open a segment, arcs into them (position, producer's group), their groups)."""
    a = arrays_of(problem)
    if not (a.segment_s > 0).any():
        return NO_OPENINGS
    src, dst = problem.graph.edges
    counts = ~a.opens[dst] & ~a.is_io[dst] & (problem.group[src] != problem.group[dst])
    ops, position = np.unique(dst[counts], return_inverse=True)
    pairs = np.unique(np.stack([position, problem.group[src[counts]]]), axis=1)
    return ops, pairs, problem.group[ops]


class HeldWeights:
    """Weights and caches of groups, and columns h(w, d) of those that several groups share.

    Where groups disagree on the size of a weight, any of them may be the one that holds it. With
    `of_group`, the classes of the groups have the columns (`build_work`). A cache is on device d
    where its group is on any device that keeps its caches there (`Problem.held_on`): the sum of
    these shares, which is at most 1, takes the place of x(g, d).
    """

    def __init__(
        self, rows: RowBuilder, problem: Problem, of_group: Int[np.ndarray, "G"] | None = None
    ) -> None:
        self.rows, self.d = rows, problem.num_devices
        self.memory = np.maximum(1.0, arrays_of(problem).memory_bytes.astype(np.float64))
        self.group, weight, self.size, self.kind = held_weights(problem)
        self.held_on = problem.held_on
        if of_group is not None:
            self.group = of_group[self.group]
        sharers = np.bincount(weight)
        shared = np.flatnonzero(sharers > 1)
        least = np.full(len(sharers), np.inf)
        np.minimum.at(least, weight, self.size)
        place = np.full(len(sharers), -1)
        place[shared] = np.arange(len(shared))
        self.least, self.tied, self.place = least[shared], sharers[weight] > 1, place[weight]
        self.first = rows.columns(len(shared) * self.d)

    def terms(self, i: int) -> tuple[list[Any], list[Any]]:
        """Columns and shares of memory of all weights on device i."""
        columns = [self.first + np.arange(len(self.least)) * self.d + i]
        values = [self.least / self.memory[i]]
        for kind, d in np.argwhere(self.held_on == i).tolist():
            alone = ~self.tied & (self.kind == kind)
            columns.append(self.group[alone] * self.d + d)
            values.append(self.size[alone] / self.memory[i])
        return columns, values

    def add_ties(self, i: int) -> None:
        """Hold each shared weight on device i where any of its groups is on a device that keeps
        weights of its kind there."""
        for kind, home in enumerate(self.held_on):
            tied, devices = self.tied & (self.kind == kind), np.flatnonzero(home == i)
            if tied.any() and len(devices):
                one = np.ones(int(tied.sum()))
                held = self.first + self.place[tied] * self.d + i
                on = [self.group[tied] * self.d + d for d in devices]
                self.rows.add_rows([*on, held], [*[one] * len(on), -one])


def held_weights(
    problem: Problem,
) -> tuple[
    Int[np.ndarray, "M"], Int[np.ndarray, "M"], Float[np.ndarray, "M"], Int[np.ndarray, "M"]
]:
    """(Group, weight, bytes, kind of `Problem.held_on`) of all weights of each group, each once."""
    stored = stored_bytes(problem)
    weight = np.unique(stored.id, return_inverse=True)[1]
    count = int(weight.max(initial=0)) + 1
    pairs, which = np.unique(problem.group[stored.op] * count + weight, return_inverse=True)
    size, kind = np.zeros(len(pairs)), np.zeros(len(pairs), dtype=np.int64)
    np.maximum.at(size, which, stored.size_bytes.astype(np.float64))
    kind[which] = stored.kind
    return pairs // count, pairs % count, size, kind


def owned_weights(
    problem: Problem, owner: Int[np.ndarray, "N"], num_owners: int, kind: int = 0
) -> tuple[Int[np.ndarray, "X"], tuple[tuple[int, tuple[int, ...]], ...]]:
    """(bytes of weights of each owner alone, (bytes, owners) of each weight that owners share).

    Args:
        problem: With the weights of its ops.
        owner: Of each op, such as its group; `num_owners` for none.
        num_owners: X.
        kind: Of `Problem.held_on`.
    """
    stored = stored_bytes(problem)
    chosen = np.flatnonzero(stored.kind == kind)
    chosen = chosen[np.argsort(stored.op[chosen], kind="stable")]
    holders: dict[int, set[int]] = {}
    largest: dict[int, int] = {}
    entries = (stored.op[chosen], stored.id[chosen], stored.size_bytes[chosen])
    for op, w, size in zip(*(part.tolist() for part in entries), strict=True):
        if owner[op] < num_owners:
            holders.setdefault(w, set()).add(int(owner[op]))
            largest[w] = max(largest.get(w, 0), size)
    held = np.zeros(num_owners, dtype=np.int64)
    shared = []
    for w, owners in holders.items():
        if len(owners) == 1:
            held[next(iter(owners))] += largest[w]
        else:
            shared.append((largest[w], tuple(sorted(owners))))
    return held, tuple(shared)


def _add_memory(
    rows: RowBuilder,
    problem: Problem,
    cut: CutTensors,
    sends: Sends,
    points: SeparationPoints,
) -> None:
    """The rows of memory of every device, of every pool, and of every separation point."""
    a = arrays_of(problem)
    buffers = objective_of(problem).memory == "pipeline"
    weights = HeldWeights(rows, problem)
    d = problem.num_devices
    first_sent, one = 0, np.ones(len(cut.use_cut))
    if len(points.op) and buffers:  # columns sent(t, d), tensor by tensor, and rows that raise them
        first_sent = rows.columns(len(cut.tensor) * d)
        for i in range(d):
            maker, sent = cut.maker[cut.use_cut] * d + i, first_sent + cut.use_cut * d + i
            rows.add_rows([maker, cut.use_group * d + i, sent], [one, -one, -one])
    terms: list[tuple[list[Any], list[Any]]] = []
    for i in range(d):
        columns, values = weights.terms(i)
        if buffers:
            received = sends.y[:, sends.target == i].T
            columns += [*received]
            values += [2.0 * a.held_bytes[cut.tensor] / weights.memory[i]] * len(received)
        rows.add_row(columns, values, 1.0)
        terms.append((columns, values))
        for op in points.op[points.device == i].tolist() if buffers else ():
            more, held = _held_at(problem, cut, first_sent, i, op)
            rows.add_row([*columns, more], [*values, held / weights.memory[i]], 1.0)
        weights.add_ties(i)
    _add_pools(rows, problem, weights, terms)


def _held_at(
    problem: Problem, cut: CutTensors, first_sent: int, device: int, op: int
) -> tuple[Int[np.ndarray, "Z"], Float[np.ndarray, "Z"]]:
    """Columns and bytes held by a device at an op: made there and alive, or sent before."""
    a, d = arrays_of(problem), problem.num_devices
    last = _last_readers(a)
    alive = (a.producer <= op) & (op <= last)
    held = np.zeros(problem.num_groups)
    np.add.at(held, problem.group[a.producer[alive]], a.held_bytes[alive].astype(np.float64))
    groups = np.flatnonzero(held > 0.0)
    sent = np.flatnonzero(last[cut.tensor] < op)
    return (
        np.concatenate([groups * d + device, first_sent + sent * d + device]),
        np.concatenate([held[groups], a.held_bytes[cut.tensor[sent]].astype(np.float64)]),
    )


def _last_readers(a: Arrays) -> Int[np.ndarray, "T"]:
    """The last reader of each tensor in topological order; its producer if it has none."""
    last = a.producer.copy()
    np.maximum.at(last, np.repeat(np.arange(len(last)), np.diff(a.use_start)), a.use_op)
    return last


def worst_points(
    problem: Problem, x: Float[np.ndarray, "G D"], sent: Float[np.ndarray, "T D"] | None = None
) -> SeparationPoints:
    """For each device the op at which it holds most of its own tensors, for shares x. O(T D).

    With `sent`, the share of each tensor that leaves each device, sent tensors are kept.
    """
    a = arrays_of(problem)
    last = _last_readers(a)
    change = np.zeros((problem.num_ops + 1, problem.num_devices))
    held = a.held_bytes[:, None] * x[problem.group[a.producer]]
    np.add.at(change, a.producer, held)
    np.add.at(change, last + 1, -held if sent is None else a.held_bytes[:, None] * sent - held)
    devices = np.arange(problem.num_devices)
    fullest = np.cumsum(change, axis=0)[:-1].argmax(axis=0).astype(np.int64)
    return SeparationPoints(devices, fullest)


def placed_points(problem: Problem, device: Int[np.ndarray, "N"]) -> SeparationPoints:
    """For each device the op at which it is fullest in a placement of whole groups."""
    a, devices = arrays_of(problem), np.arange(problem.num_devices)
    x = np.zeros((problem.num_groups, problem.num_devices))
    x[problem.group, device] = 1.0
    maker = device[a.producer]
    away = np.zeros(len(maker), dtype=bool)
    tensor = np.repeat(np.arange(len(maker)), np.diff(a.use_start))
    np.logical_or.at(away, tensor, device[a.use_op] != maker[tensor])
    sent = (away[:, None] & (maker[:, None] == devices)).astype(np.float64)
    return worst_points(problem, x, sent)


def more_points(points: SeparationPoints, new: SeparationPoints) -> SeparationPoints:
    """The union of both, each point once."""
    pairs = np.unique(
        np.stack([np.append(points.device, new.device), np.append(points.op, new.op)]), axis=1
    )
    return SeparationPoints(pairs[0], pairs[1])
