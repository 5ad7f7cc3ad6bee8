"""Heads, tails and spans: lower bounds of the time before, after and between ops.

A relaxation of the event simulator: an op waits for each of its inputs, but never for its device or
a channel, and every reader may assume another device for a producer. With ops in topological order

    head(v, d) = op_s(v, d) + max over inputs u of v, min over e of (head(u, e) + send(u, v, e, d))
    tail(u, e) = max over readers v of u, min over d of (send(u, v, e, d) + op_s(v, d) + tail(v, d))

where send is the time of all tensors from u to v on their lane, one after the other (side by side
where nothing queues), and the dispatch of v where it opens a segment because of them; ops of one
group share their device. No run is shorter than head(v, d) + tail(v, d) minimised over d, for any
v. Spans are further arcs: from the end of u on e to the end of v on d it takes at least
`span_s[e, d]`.

Spans come from series-parallel blocks, as models are made of modules that branch and join again.
All ops on the paths from u to v run after the end of u and before the start of v, so with u on
device e and v on d

    end(v) - end(u) >= least time in which devices and channels can do that part of the graph.

For small parts this minimum over all placements is found by branch and bound, where each placement
counts with the one-machine bounds of its devices and channels (Carlier 1982); for larger ones it is
at least the work between u and v shared over all devices. Other uses of the devices meanwhile, and
inputs from outside, are left out: they can only prolong it. Along the graph spans show that on slow
links it does not pay to spread a block over devices, which neither the critical path nor the work
alone can show.

Axes: N ops, V = N + 1: the ops and one more that reads all of them and ends the run; P arcs; D
devices; S spans; I ops inside a block; M ops of a part, the last of them v; K tensors read in it.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from gdp.base.kernels.twin import compiled, is_worth_compiling
from gdp.bounds.budget import WorkBudget
from gdp.bounds.paths_kernels import (
    MAX_NODES,
    NO_TIE,
    TIED_TO_SOURCE,
    heads,
    least_span,
    tails,
)
from gdp.bounds.work import shared_work_s
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.problem.symmetry import links_alike, same

MAX_DEVICES = 64
MAX_OPS = 10_000  # bit sets of ancestors take N * N / 8 bytes, pairs N * N / 2 steps
_MAX_INNER = 18  # larger parts count with their work alone
_MANY_INNER = 10  # branching over more may be cut short
_PAIR = 20  # overhead of a pair, in branches
_FEW = 8  # devices; with more of them a branch takes longer
_MAX_BRANCHES = 20_000  # of one part with one pair of end devices
# Where numba is not loaded: what plain functions do in a quarter of a second. Beyond it the
# compiled twins are worth their compilation.
_PLAIN_STEPS = 200_000  # arcs times pairs of devices
_PLAIN_BRANCHES = 300  # of all parts


class Arcs(NamedTuple):
    """Ops, arcs and links of a problem, with an end that reads all ops."""

    op_s: Float[np.ndarray, "V D"]  # with unavoidable dispatch; inf where the group cannot go
    opens_s: Float[np.ndarray, "V D"]  # dispatch if an input comes from another device
    group: Int[np.ndarray, "V"]
    first_input: Int[np.ndarray, "V+1"]  # the arcs into op v: [v]..[v+1]
    source: Int[np.ndarray, "P"]
    tensors: Float[np.ndarray, "P"]  # how many tensors an arc stands for; 0 into the last op
    size_bytes: Float[np.ndarray, "P"]  # of these tensors
    largest_bytes: Float[np.ndarray, "P"]  # of any of them
    queues: Bool[np.ndarray, "D D"]  # whether one waits for the other on a lane
    latency_s: Float[np.ndarray, "D D"]
    s_per_byte: Float[np.ndarray, "D D"]


class Spans(NamedTuple):
    """Further arcs between distant ops; source -1 is the start of the run."""

    source: Int[np.ndarray, "S"]
    target: Int[np.ndarray, "S"]  # ascending
    span_s: Float[np.ndarray, "S D D"]


class SeriesParallelBlock(NamedTuple):
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
    sent_bytes: Float[np.ndarray, "K"]
    latency_s: Float[np.ndarray, "D D"]
    s_per_byte: Float[np.ndarray, "D D"]
    channel: Int[np.ndarray, "D D"]
    num_channels: int
    alike: Int[np.ndarray, "D"]  # devices of one number can be renamed into each other


class SearchState(NamedTuple):
    """Scratch of the branch and bound over a part. Axis: X nodes (ops and transfers)."""

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


def no_spans(num_devices: int) -> Spans:
    """No further arcs."""
    none = np.zeros(0, np.int64)
    return Spans(none, none, np.zeros((0, num_devices, num_devices)))


def arcs_of(problem: Problem) -> Arcs:
    """The arcs of a problem. O(N D + E log E)."""
    graph, cluster = problem.graph, problem.cluster
    n, d = graph.num_ops, problem.num_devices
    a = arrays_of(problem)
    allowed = problem.group_allowed[problem.group]
    opening = np.where(a.opens[:, None] & ~a.is_io[:, None], a.segment_s[None, :], 0.0)
    op_s = np.zeros((n + 1, d))
    op_s[:n] = np.where(allowed, a.compute_s + opening, np.inf)
    opens_s = np.zeros((n + 1, d))
    opens_s[:n] = np.where((a.opens | a.is_io)[:, None], 0.0, a.segment_s[None, :])
    src, dst = graph.edges
    key, which = np.unique(dst * (n + 1) + src, return_inverse=True)
    count = np.bincount(which, minlength=len(key)).astype(np.float64)
    size = np.bincount(which, problem.sent_bytes[graph.use_tensor], minlength=len(key))
    largest = np.zeros(len(key))
    np.maximum.at(largest, which, problem.sent_bytes[graph.use_tensor].astype(np.float64))
    last = np.flatnonzero(np.bincount(src, minlength=n) == 0)
    source = np.concatenate([key % (n + 1), last])
    target = np.concatenate([key // (n + 1), np.full(len(last), n)])
    none = np.zeros(len(last))
    return Arcs(
        op_s=op_s,
        opens_s=opens_s,
        group=np.append(problem.group, -1),
        first_input=np.searchsorted(target, np.arange(n + 2)),
        source=source,
        tensors=np.concatenate([count, none]),
        size_bytes=np.concatenate([size, none]),
        largest_bytes=np.concatenate([largest, none]),
        queues=a.channel >= 0,
        latency_s=np.array(cluster.link_latency_s, np.float64),
        s_per_byte=1.0 / np.asarray(cluster.link_bytes_per_s, np.float64),
    )


def send_s(arcs: Arcs, k: Int[np.ndarray, "K"]) -> Float[np.ndarray, "K D D"]:
    """Seconds in which arcs k send their tensors from device to device, dispatch aside."""
    tensors, size = arcs.tensors[k, None, None], arcs.size_bytes[k, None, None]
    queued_s = tensors * arcs.latency_s + size * arcs.s_per_byte
    largest = arcs.largest_bytes[k, None, None]
    alone_s = np.minimum(tensors, 1.0) * arcs.latency_s + largest * arcs.s_per_byte
    return np.where(arcs.queues, queued_s, alone_s)


def longest_s(arcs: Arcs) -> float:
    """Upper bound of a run without idling: every op on its slowest device, every use sent."""
    op_s = np.where(np.isfinite(arcs.op_s), arcs.op_s, 0.0)
    sent_s = arcs.tensors * arcs.latency_s.max() + arcs.size_bytes * arcs.s_per_byte.max()
    total_s = op_s.max(axis=1).sum() + arcs.opens_s.max(axis=1).sum() + sent_s.sum()
    return float(total_s) or 1.0


def heads_and_tails(
    arcs: Arcs, spans: Spans
) -> tuple[Float[np.ndarray, "V D"], Float[np.ndarray, "V D"]]:
    """(earliest end of every op on every device, least time from that end to the end of the run).

    Ends are inf where an op cannot run. O(P D^2).
    """
    head_s, tail_s = np.zeros_like(arcs.op_s), np.zeros_like(arcs.op_s)
    if is_worth_compiling(len(arcs.source) * arcs.queues.size, _PLAIN_STEPS):
        compiled(heads, Arcs, Spans)(arcs, spans, head_s)
        compiled(tails, Arcs, Spans)(arcs, spans, tail_s)
        return head_s, tail_s
    lists: Any = Arcs(*(values.tolist() for values in arcs))
    span_lists: Any = Spans(*(values.tolist() for values in spans))
    head_lists, tail_lists = head_s.tolist(), tail_s.tolist()
    heads(lists, span_lists, head_lists)
    tails(lists, span_lists, tail_lists)
    return np.array(head_lists), np.array(tail_lists)


def find_spans(
    problem: Problem, arcs: Arcs, blocks: list[SeriesParallelBlock], budget: WorkBudget
) -> Spans:
    """The spans that branching within the budget gives, smallest blocks first."""
    d = problem.num_devices
    left = budget.branches * _FEW // max(_FEW, d)
    pairs = sorted(blocks, key=lambda block: len(block.inner))
    plain = _PLAIN_BRANCHES
    known: dict[bytes, Float[np.ndarray, "D D"]] = {}
    spans: list[tuple[int, int, Float[np.ndarray, "D D"]]] = []
    for k, (u, v, inner) in enumerate(pairs):
        if left <= 0 or budget.is_over():
            break
        part = _part(problem, arcs, u, v, inner)
        span_s = np.tile(arcs.op_s[v], (d, 1))
        if part is None or len(inner) > _MANY_INNER:
            span_s = span_s + shared_work_s(arcs.op_s[inner])[0]
        if part is not None:
            key = b"".join(np.ascontiguousarray(x).tobytes() for x in part)
            if key not in known:
                limit = min(left // min(8, len(pairs) - k), _MAX_BRANCHES)
                known[key], used = _span_s(part, u >= 0, v < problem.num_ops, limit, plain)
                left, plain = left - used, plain - used
            span_s = np.maximum(span_s, known[key])
        left -= _PAIR
        spans.append((u, v, span_s))
    spans.sort(key=lambda entry: entry[1])
    return Spans(
        np.array([u for u, _, _ in spans], dtype=np.int64),
        np.array([v for _, v, _ in spans], dtype=np.int64),
        np.array([s for _, _, s in spans], dtype=np.float64).reshape(-1, d, d),
    )


def find_blocks(arcs: Arcs, head_s: Float[np.ndarray, "V D"]) -> list[SeriesParallelBlock]:
    """The block between each op v that more than a chain leads to and a gate of v."""
    count = len(arcs.op_s)
    first, source = arcs.first_input.tolist(), arcs.source.tolist()
    inputs = [source[first[v] : first[v + 1]] for v in range(count)]
    above, below = [0] * count, [0] * count  # sets of ops as bits
    for v, reads in enumerate(inputs):
        for u in reads:
            above[v] |= above[u] | 1 << u
    for v in range(count - 1, -1, -1):
        for u in inputs[v]:
            below[u] |= below[v] | 1 << v
    is_idle = (np.diff(arcs.first_input) == 0) & (arcs.op_s.min(axis=1) <= 0.0)
    gate, partial = _gates(inputs, is_idle.tolist(), head_s.min(axis=1).tolist(), above)
    blocks = []
    for v in range(count):
        for u in (gate[v], -1) if partial[v] and gate[v] >= 0 else (gate[v],):
            between = above[v] & below[u] if u >= 0 else above[v]
            bits = np.frombuffer(between.to_bytes((count + 7) // 8, "little"), np.uint8)
            inner = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            busy = inner[~is_idle[inner]]
            if len(busy) > 1 and (u == gate[v] or len(busy) <= _MAX_INNER):
                blocks.append(SeriesParallelBlock(u, v, busy))
    return blocks


def _gates(
    inputs: list[list[int]], is_idle: list[bool], head_s: list[float], above: list[int]
) -> tuple[list[int], list[bool]]:
    """(for each op v a late op on most paths to v, -1 for the start; whether some inputs were left
    out).

    The nearest common dominator of the inputs of v. Left out are inputs that are ancestors of other
    inputs, because paths lead around through these; idle ones, which are there from the start; and
    those that have no gate in common with the input of the largest head, such as masks.
    """
    gate, depth, partial = [-1] * len(inputs), [0] * len(inputs), [False] * len(inputs)
    for v, reads in enumerate(inputs):
        covered, late = 0, -1
        for u in reads:
            covered |= above[u]
            if not is_idle[u] and (late < 0 or head_s[u] >= head_s[late]):
                late = u
        if late < 0 and len(reads) == 1:
            late = reads[0]
        common = late
        for u in reads:
            if common < 0:
                break
            if is_idle[u] or covered >> u & 1:
                continue
            a, b = common, u
            while a != b and a >= 0 and b >= 0:
                if depth[a] >= depth[b]:
                    a = gate[a]
                else:
                    b = gate[b]
            if a == b:
                common = a
            else:
                partial[v] = True
        gate[v] = common
        depth[v] = depth[common] + 1 if common >= 0 else 0
    return gate, partial


def _part(problem: Problem, arcs: Arcs, u: int, v: int, inner: Int[np.ndarray, "I"]) -> Part | None:
    """The ops between u and v, and v, as a problem of their own; None where there are too many."""
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
        sent_bytes=a.sent_bytes[list(tensors)].astype(np.float64),
        latency_s=arcs.latency_s,
        s_per_byte=arcs.s_per_byte,
        channel=a.channel,
        num_channels=problem.cluster.num_channels,
        alike=(links_alike(problem) & same(op_s, opens_s)).argmax(axis=1),
    )


def _span_s(
    part: Part, has_source: bool, has_target: bool, limit: int, plain: int
) -> tuple[Float[np.ndarray, "D D"], int]:
    """(least seconds for each device of u and of v, branches), renamed devices computed once.

    At most `limit` branches for a pair of devices, `plain` of all of them in plain Python.
    """
    d = part.op_s.shape[1]
    work = _search_state(part)
    span_s = np.full((d, d), np.inf)
    known: dict[tuple[int, int, bool], float] = {}
    used = 0
    for e in range(d) if has_source else [-1]:
        for to in range(d) if has_target else [0]:
            if not np.isfinite(part.op_s[-1, to]):
                continue
            key = (int(part.alike[e]) if e >= 0 else -1, int(part.alike[to]), e == to)
            if key not in known:
                few, branching = min(limit, plain - used), least_span
                if is_worth_compiling(1, few):
                    few, branching = limit, compiled(least_span, Part, SearchState)
                known[key], branches = branching(part, work, e, to, few)
                if branches == few < limit:
                    branching = compiled(least_span, Part, SearchState)
                    known[key], branches = branching(part, work, e, to, limit)
                used += int(branches)
            span_s[e if e >= 0 else slice(None), to if has_target else slice(None)] = known[key]
    return span_s, used


def _search_state(part: Part) -> SearchState:
    n, d = part.op_s.shape
    x = MAX_NODES

    def ints(*shape: int) -> Int[np.ndarray, "..."]:
        return np.zeros(shape, np.int64)

    return SearchState(
        np.zeros(x), np.zeros(x), np.zeros(x), ints(x), np.zeros(x, np.uint64), np.zeros((x, x)),
        ints(x), ints(x), ints(x), ints(max(1, len(part.sent_bytes)), d), ints(d), ints(n),
        ints(n), np.zeros((n, d)), ints(n, d), np.zeros((n, d)), ints(n), ints(n), ints(n), ints(n),
    )  # fmt: skip
