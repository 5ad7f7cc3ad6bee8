"""Spans: the least time from the end of one op to the end of another, whatever lies between.

Models are made of modules that branch and join again. All that lies on the paths from u to v runs
after the end of u and before the start of v, so with u on device e and v on d

    end(v) - end(u) >= least time in which devices and channels can do that part of the graph.

For small parts this minimum over all placements is found by branch and bound, where each placement
counts with the one-machine bounds of its devices and channels (Carlier 1982); for larger ones it is
at least the work between u and v shared over all devices. What else uses the devices meanwhile, and
inputs from outside, are left out: they can only prolong it. Added up along the graph
(`bounds_paths`), spans show that on slow links it does not pay to spread a module over devices,
which neither the critical path nor the work alone can show.

Axes: M ops of a part, the last of them v; K tensors read in it; P arcs; D devices; S spans.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from gdp.bounds.effort import Effort
from gdp.bounds.paths import Arcs, Spans
from gdp.bounds.work import shared_work_s
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.problem.symmetry import links_alike, same

MAX_DEVICES = 64
MAX_OPS = 10_000  # bit sets of ancestors take N * N / 8 bytes, pairs N * N / 2 steps
_MAX_INNER = 18  # larger parts count with their work alone
_MANY_INNER = 10  # branching over more may be cut short
_PAIR = 20  # what a pair takes beside branching, in branches
_FEW = 8  # devices; with more of them a branch takes longer
_MAX_BRANCHES = 20_000  # of one part with one pair of end devices


class Module(NamedTuple):
    """The ops on the paths from u to v that take any time; u = -1 is the start, v = N the end."""

    source: int
    target: int
    inner: Int[np.ndarray, "I"]


class Part(NamedTuple):
    """A part of a graph. Source -1 is u, or the start where there is no u."""

    op_s: Float[np.ndarray, "M D"]
    opens_s: Float[np.ndarray, "M D"]
    tied: Int[np.ndarray, "M"]  # an earlier op, or u (-1), that shares its device; -2: none
    tied_to_target: Bool[np.ndarray, "M"]
    first_input: Int[np.ndarray, "M+1"]
    source: Int[np.ndarray, "P"]
    tensor: Int[np.ndarray, "P"]  # -1: nothing is sent, wherever the op runs
    tensor_bytes: Float[np.ndarray, "K"]
    latency_s: Float[np.ndarray, "D D"]
    s_per_byte: Float[np.ndarray, "D D"]
    channel: Int[np.ndarray, "D D"]
    num_channels: int
    alike: Int[np.ndarray, "D"]  # devices of one number can be renamed into each other


class Work(NamedTuple):
    """What the branch and bound over a part writes; X nodes."""

    head_s: Float[np.ndarray, "X"]
    busy_s: Float[np.ndarray, "X"]
    tail_s: Float[np.ndarray, "X"]
    machine: Int[np.ndarray, "X"]
    before: UInt[np.ndarray, "X"]  # the nodes that a node waits for, as bits
    path_s: Float[np.ndarray, "X X"]  # [y, x]: least time from the end of x to the start of y
    node_tensor: Int[np.ndarray, "X"]  # what a transfer sends; -1 for ops
    node_to: Int[np.ndarray, "X"]
    chosen: Int[np.ndarray, "X"]
    sent: Int[np.ndarray, "K D"]  # the transfer of a tensor to a device; -1: none
    users: Int[np.ndarray, "D"]  # ops on each device
    node: Int[np.ndarray, "M"]
    device: Int[np.ndarray, "M"]
    after_s: Float[np.ndarray, "M D"]
    choice: Int[np.ndarray, "M D"]
    choice_s: Float[np.ndarray, "M D"]
    num_choices: Int[np.ndarray, "M"]
    next_choice: Int[np.ndarray, "M"]
    start_node: Int[np.ndarray, "M"]
    end_node: Int[np.ndarray, "M"]


def find_spans(problem: Problem, arcs: Arcs, modules: list[Module], effort: Effort) -> Spans:
    """The spans of a problem that branching within the effort gives, smallest parts first."""
    d = problem.num_devices
    left = effort.branches * _FEW // max(_FEW, d)
    pairs = sorted(modules, key=lambda module: len(module.inner))
    known: dict[bytes, Float[np.ndarray, "D D"]] = {}
    found: list[tuple[int, int, Float[np.ndarray, "D D"]]] = []
    for k, (u, v, inner) in enumerate(pairs):
        if left <= 0 or effort.is_over():
            break
        part = _part(problem, arcs, u, v, inner)
        span_s = np.tile(arcs.op_s[v], (d, 1))
        if part is None or len(inner) > _MANY_INNER:
            span_s = span_s + shared_work_s(arcs.op_s[inner])[0]
        if part is not None:
            key = b"".join(np.ascontiguousarray(x).tobytes() for x in part)
            if key not in known:
                limit = min(left // min(8, len(pairs) - k), _MAX_BRANCHES)
                known[key], used = _span_s(part, u >= 0, v < problem.num_ops, limit)
                left -= used
            span_s = np.maximum(span_s, known[key])
        left -= _PAIR
        found.append((u, v, span_s))
    found.sort(key=lambda entry: entry[1])
    return Spans(
        np.array([u for u, _, _ in found], dtype=np.int64),
        np.array([v for _, v, _ in found], dtype=np.int64),
        np.array([s for _, _, s in found], dtype=np.float64).reshape(-1, d, d),
    )


def find_modules(problem: Problem, arcs: Arcs, head_s: Float[np.ndarray, "V D"]) -> list[Module]:
    """For every op v that more than a chain leads to: what lies between it and a gate of its."""
    from gdp.bounds.spans_kernels import ancestors, between, gates

    count = len(arcs.op_s)
    above = np.zeros((count, (count + 63) // 64), dtype=np.uint64)
    ancestors(arcs.first_input, arcs.source, above)
    reads = np.diff(arcs.first_input)
    is_idle = (reads == 0) & (arcs.op_s.min(axis=1) <= 0.0)
    gate, depth = np.full(count, -1, np.int64), np.zeros(count, np.int64)
    partial = np.zeros(count, bool)
    gates(arcs.first_input, arcs.source, is_idle, head_s.min(axis=1), above, gate, depth, partial)
    inner = np.empty(count, np.int64)
    modules = []
    for v in np.flatnonzero(reads > 0).tolist():
        for u in (int(gate[v]), -1) if partial[v] and gate[v] >= 0 else (int(gate[v]),):
            size = between(above, u, v, inner)
            busy = inner[:size][~is_idle[inner[:size]]]
            small = len(busy) <= _MAX_INNER
            if len(busy) > 1 and (u == gate[v] or small):
                modules.append(Module(u, v, busy.copy()))
    return modules


def _part(problem: Problem, arcs: Arcs, u: int, v: int, inner: Int[np.ndarray, "I"]) -> Part | None:
    """The ops between u and v, and v, as a problem of their own; None where there are too many."""
    from gdp.bounds.spans_kernels import MAX_NODES, NO_TIE, TIED_TO_SOURCE

    if len(inner) > _MAX_INNER:
        return None
    a = arrays_of(problem)
    ops = [*inner.tolist(), v]
    index = {op: k for k, op in enumerate(ops)}
    if u >= 0:
        index[u] = -1
    first, source, tensor = [0], [], []
    tensors: dict[int, int] = {}
    for op in ops:
        if op < problem.num_ops:
            for t in a.in_tensor[a.in_start[op] : a.in_start[op + 1]].tolist():
                maker = int(a.producer[t])
                if maker in index:
                    source.append(index[maker])
                    tensor.append(tensors.setdefault(t, len(tensors)))
        else:
            ends = arcs.source[arcs.first_input[op] : arcs.first_input[op + 1]].tolist()
            source += [index[e] for e in ends if e in index]
            tensor += [-1] * sum(e in index for e in ends)
        first.append(len(source))
    if len(ops) + len(source) > MAX_NODES:
        return None
    group = arcs.group[ops]
    tied = np.full(len(ops), NO_TIE)
    for k in range(len(ops)):
        earlier = np.flatnonzero(group[:k] == group[k])
        if u >= 0 and arcs.group[u] == group[k]:
            tied[k] = TIED_TO_SOURCE
        elif len(earlier):
            tied[k] = earlier[0]
    op_s, opens_s = arcs.op_s[ops], arcs.opens_s[ops]
    return Part(
        op_s=op_s,
        opens_s=opens_s,
        tied=tied,
        tied_to_target=group == group[-1],
        first_input=np.array(first, np.int64),
        source=np.array(source, np.int64),
        tensor=np.array(tensor, np.int64),
        tensor_bytes=a.tensor_bytes[list(tensors)].astype(np.float64),
        latency_s=arcs.latency_s,
        s_per_byte=arcs.s_per_byte,
        channel=a.channel,
        num_channels=problem.cluster.num_channels,
        alike=(links_alike(problem) & same(op_s, opens_s)).argmax(axis=1),
    )


def _span_s(
    part: Part, has_source: bool, has_target: bool, limit: int
) -> tuple[Float[np.ndarray, "D D"], int]:
    """(least seconds for each device of u and of v, branches), renamed devices computed once."""
    from gdp.bounds.spans_kernels import least_span
    from gdp.kernels.struct import as_struct

    as_struct(Part, Work)
    d = part.op_s.shape[1]
    work = _work(part)
    span_s = np.full((d, d), np.inf)
    known: dict[tuple[int, int, bool], float] = {}
    used = 0
    for e in range(d) if has_source else [-1]:
        for to in range(d) if has_target else [0]:
            if not np.isfinite(part.op_s[-1, to]):
                continue
            key = (int(part.alike[e]) if e >= 0 else -1, int(part.alike[to]), e == to)
            if key not in known:
                known[key], branches = least_span(part, work, e, to, limit)
                used += int(branches)
            span_s[e if e >= 0 else slice(None), to if has_target else slice(None)] = known[key]
    return span_s, used


def _work(part: Part) -> Work:
    from gdp.bounds.spans_kernels import MAX_NODES

    n, d = part.op_s.shape
    x = MAX_NODES

    def ints(*shape: int) -> Int[np.ndarray, "..."]:
        return np.zeros(shape, np.int64)

    return Work(
        np.zeros(x), np.zeros(x), np.zeros(x), ints(x), np.zeros(x, np.uint64), np.zeros((x, x)),
        ints(x), ints(x), ints(x), ints(max(1, len(part.tensor_bytes)), d), ints(d), ints(n),
        ints(n), np.zeros((n, d)), ints(n, d), np.zeros((n, d)), ints(n), ints(n), ints(n), ints(n),
    )  # fmt: skip
