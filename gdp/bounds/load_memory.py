"""Rows of memory in the linear program of loads: what a device holds fits.

Weights are held throughout, each once per device. A full pipeline holds besides, on each device,
two buffers of each tensor received; and while op p of a sample would run there (`gdp.sim.memory`)
each tensor t that the device makes with

    producer of t <= p <= last reader of t,   in topological order, wherever the readers are:

a reader there after p keeps it, a reader elsewhere keeps it to the end of the sample, as it does
every tensor that was sent. So for every device d and op p (a mark)

    weights + sum of 2 b(t) y(t, s, d) + sum over t alive at p of b(t) x(maker of t, d)
            + sum over t with last reader before p of b(t) sent(t, d)  <=  memory of d

with sent(t, d) >= x(maker, d) - x(v, d) for each reader v; with whole x that is what an inference
pipeline holds, exactly. There are N D such rows, nearly all of them slack: those are added that a
solution breaks most, and it is solved again.

Axes: G groups, D devices, T tensors, K tensors between groups, A marks, Z entries.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.bounds.load_rows import Cuts, Rows
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem
from gdp.sim.objectives import memory_binds, objective_of

Links = list[tuple[int, int]]


class Marks(NamedTuple):
    """Ops at which the memory of a device is looked at."""

    device: Int[np.ndarray, "A"]
    op: Int[np.ndarray, "A"]


NO_MARKS = Marks(np.zeros(0, np.int64), np.zeros(0, np.int64))


def last_readers(a: Arrays) -> Int[np.ndarray, "T"]:
    """The last reader of each tensor in topological order; its producer where nobody reads it."""
    last = a.producer.copy()
    np.maximum.at(last, np.repeat(np.arange(len(last)), np.diff(a.use_start)), a.use_op)
    return last


def memory_rows(
    rows: Rows, problem: Problem, cut: Cuts, links: Links, first_y: int, marks: Marks
) -> int:
    """Add the rows of every device, and of every mark; how many columns more there are."""
    a, d = arrays_of(problem), problem.num_devices
    if not memory_binds(problem):
        return 0
    buffers = objective_of(problem).memory == "pipeline"
    group, weight, size = held_weights(problem)
    sharers = np.bincount(weight)
    shared = np.flatnonzero(sharers > 1)
    # Where groups disagree on the size of a weight, any of them may be the one that holds it.
    least = np.full(len(sharers), np.inf)
    np.minimum.at(least, weight, size)
    place = np.full(len(sharers), -1)
    place[shared] = np.arange(len(shared))
    first_h = rows.more_columns(len(shared) * d)
    first_sent = _sent_columns(rows, problem, cut) if len(marks.op) and buffers else 0
    extra = len(shared) * d + (len(cut.tensor) * d if len(marks.op) and buffers else 0)
    tied = sharers[weight] > 1
    for i in range(d):
        limit = max(1.0, float(a.memory_bytes[i]))
        column = [group[~tied] * d + i, first_h + np.arange(len(shared)) * d + i]
        value = [size[~tied] / limit, least[shared] / limit]
        if buffers and len(cut.tensor):
            for k in (k for k, (_, to) in enumerate(links) if to == i):
                column.append(first_y + np.arange(len(cut.tensor)) * len(links) + k)
                value.append(2.0 * a.tensor_bytes[cut.tensor] / limit)
        _add(rows, column, value)
        for op in marks.op[marks.device == i].tolist() if buffers else ():
            columns, held = _at_mark(problem, cut, first_sent, i, op)
            _add(rows, [*column, columns], [*value, held / limit])
        if tied.any():
            r = np.arange(int(tied.sum()))
            columns = np.concatenate([group[tied] * d + i, first_h + place[weight[tied]] * d + i])
            one = np.ones(len(r))
            rows.add(np.tile(r, 2), columns, np.concatenate([one, -one]), np.zeros(len(r)))
    return extra


def _add(rows: Rows, column: list[np.ndarray], value: list[np.ndarray]) -> None:
    """One row: the sum of values times columns is at most 1."""
    columns = np.concatenate(column)
    rows.add(np.zeros(len(columns), np.int64), columns, np.concatenate(value), np.ones(1))


def _sent_columns(rows: Rows, problem: Problem, cut: Cuts) -> int:
    """New columns sent(t, d), tensor by tensor, and the rows that raise them; the first of them."""
    d = problem.num_devices
    first = rows.more_columns(len(cut.tensor) * d)
    uses = len(cut.use_cut)
    r, one = np.arange(uses), np.ones(uses)
    for i in range(d):
        maker, sent = cut.maker[cut.use_cut] * d + i, first + cut.use_cut * d + i
        columns = np.concatenate([maker, cut.use_group * d + i, sent])
        rows.add(np.tile(r, 3), columns, np.concatenate([one, -one, -one]), np.zeros(uses))
    return first


def _at_mark(
    problem: Problem, cut: Cuts, first_sent: int, device: int, op: int
) -> tuple[Int[np.ndarray, "Z"], Float[np.ndarray, "Z"]]:
    """Columns and bytes of what a device holds at an op: made there and alive, or sent before."""
    a, d = arrays_of(problem), problem.num_devices
    last = last_readers(a)
    alive = (a.producer <= op) & (op <= last)
    held = np.zeros(problem.num_groups)
    np.add.at(held, problem.group[a.producer[alive]], a.tensor_bytes[alive].astype(np.float64))
    groups = np.flatnonzero(held > 0.0)
    sent = np.flatnonzero(last[cut.tensor] < op)
    return (
        np.concatenate([groups * d + device, first_sent + sent * d + device]),
        np.concatenate([held[groups], a.tensor_bytes[cut.tensor[sent]].astype(np.float64)]),
    )


def worst_marks(
    problem: Problem, x: Float[np.ndarray, "G D"], sent: Float[np.ndarray, "T D"] | None = None
) -> Marks:
    """For each device the op at which it holds most of what is made there, for shares x. O(T D).

    With `sent`, the share of each tensor that leaves each device, what was sent is kept.
    """
    a = arrays_of(problem)
    last = last_readers(a)
    change = np.zeros((problem.num_ops + 1, problem.num_devices))
    held = a.tensor_bytes[:, None] * x[problem.group[a.producer]]
    np.add.at(change, a.producer, held)
    np.add.at(change, last + 1, -held if sent is None else a.tensor_bytes[:, None] * sent - held)
    devices = np.arange(problem.num_devices)
    return Marks(devices, np.cumsum(change, axis=0)[:-1].argmax(axis=0).astype(np.int64))


def placed_marks(problem: Problem, device: Int[np.ndarray, "N"]) -> Marks:
    """For each device the op at which it is fullest in a placement of whole groups."""
    a, devices = arrays_of(problem), np.arange(problem.num_devices)
    x = np.zeros((problem.num_groups, problem.num_devices))
    x[problem.group, device] = 1.0
    maker = device[a.producer]
    away = np.zeros(len(maker), dtype=bool)
    tensor = np.repeat(np.arange(len(maker)), np.diff(a.use_start))
    np.logical_or.at(away, tensor, device[a.use_op] != maker[tensor])
    sent = (away[:, None] & (maker[:, None] == devices)).astype(np.float64)
    return worst_marks(problem, x, sent)


def more_marks(marks: Marks, new: Marks) -> Marks:
    """Those of both, each once."""
    pairs = np.unique(
        np.stack([np.append(marks.device, new.device), np.append(marks.op, new.op)]), axis=1
    )
    return Marks(pairs[0], pairs[1])


def held_weights(
    problem: Problem,
) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "M"], Float[np.ndarray, "M"]]:
    """(group, weight, bytes) of every weight of every group, each once."""
    graph = problem.graph
    heavy = np.flatnonzero(graph.weight_bytes > 0)
    weight = np.unique(graph.weight_id[heavy], return_inverse=True)[1]
    pairs, which = np.unique(np.stack([problem.group[heavy], weight]), axis=1, return_inverse=True)
    size = np.zeros(pairs.shape[1])
    np.maximum.at(size, which, graph.weight_bytes[heavy].astype(np.float64))
    return pairs[0], pairs[1], size
