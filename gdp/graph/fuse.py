"""Fewer, larger ops: what runtimes fuse anyway, and coarse groups for huge graphs.

Both are contractions of the graph: they keep it acyclic, and a placement of the result expands to
one of the original.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.kernels.twin import PLAIN_OPS, compiled
from gdp.graph.generation import joined_caches
from gdp.graph.groups import alike, distinct, joined, sum_per_group
from gdp.graph.merge import Edges, MergeLimits, MergeState, contract, extend_to_longest_paths
from gdp.graph.op_graph import OpGraph, make_graph, picked
from gdp.ops.table import ELEMENTWISE_OPS, REDUCTIONS, VIEWS

# A device of today, to weigh FLOPs against bytes where no device is known; only ratios matter.
_FLOP_PER_S, _BYTES_PER_S = 1e13, 1e12
_MAX_CLASSES = 8.0  # colocation classes (of several ops each) that fusion may tie together
_MAX_PASSES = 12  # a chain of n ops needs one pass; more are for shapes that close on themselves
_JOIN_BYTES = 4096  # smaller tensors are no reason to tie two colocation classes together
_MOST_KNOWN = 4  # fusions of a graph that are kept, of different `apart`
_CHEAP = VIEWS | ELEMENTWISE_OPS


@dataclass(frozen=True, eq=False)
class Fused:
    """A contraction of a graph. Axes: N original ops, M groups."""

    of: OpGraph
    group_of: Int[np.ndarray, "N"]

    def __post_init__(self) -> None:
        self.group_of.setflags(write=False)

    @functools.cached_property
    def graph(self) -> OpGraph:
        """Of the groups: each has the name, type and detail of its costliest op."""
        return contracted(self.of, self.group_of)


def group_seconds(fused: Fused, seconds: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "M D"]:
    """Seconds of every group: the sum over its ops, inf where a device lacks one of them."""
    return sum_per_group(seconds, fused.group_of)


def fuse(graph: OpGraph, *, apart: Int[np.ndarray, "N"] | None = None) -> Fused:
    """Cheap ops merged into the op that makes or reads their data, as runtimes and compilers do.

    Views and element-wise ops join a producer or, where they blow data up, their only reader;
    reductions join element-wise ops. A group holds one heavy op at most. Graph inputs and outputs
    stay alone, and forward and backward ops apart, as do ops whose `apart` ids differ (for pins
    and for ops that some device lacks). Tensors inside a group cost no memory traffic.
    O((N + E) log N) a pass, a few passes.
    """
    label, known = _labels(graph, apart), graph.fusions
    key = np.unique(label, return_inverse=True)[1].tobytes()
    if key not in known:  # costs, bounds and problems ask for the same fusions of a graph
        if len(known) == _MOST_KNOWN:
            del known[next(iter(known))]
        known[key] = Fused(graph, _fused_groups(graph, label))
    return known[key]


def class_parts(
    graph: OpGraph, fused: Fused, classes: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "N"] | None:
    """Labels that keep fused ops from tying colocation classes that hold weights together.

    A fused op that holds ops of two such classes is cut between them; its other ops go with the one
    that they read from, else with the first. None where no fused op ties any.
    """
    holding = distinct(classes[graph.weight_bytes > 0])
    part = np.where(np.isin(classes, holding), classes, -1)
    pairs = np.unique(np.stack([fused.group_of, part])[:, part >= 0], axis=1)
    ids, counts = np.unique(pairs[0], return_counts=True)
    if not (counts > 1).any():
        return None
    first = np.full(int(fused.group_of.max()) + 1, -1)
    first[ids] = pairs[1][np.searchsorted(pairs[0], ids)]
    src, dst = graph.edges
    inside = np.flatnonzero(fused.group_of[src] == fused.group_of[dst])
    for edge in inside[np.argsort(src[inside], kind="stable")]:
        if part[dst[edge]] < 0:  # ops are in topological order, so the maker has its part
            part[dst[edge]] = part[src[edge]]
    part = np.where(part < 0, first[fused.group_of], part)
    return alike(fused.group_of, part)[1]


def coarsen(
    graph: OpGraph,
    max_ops: int,
    *,
    apart: Int[np.ndarray, "N"] | None = None,
    near: Float[np.ndarray, "V"] | None = None,
) -> Fused:
    """At most `max_ops` groups where possible: fused, then chains, heavy edges, siblings, blocks.

    `near` says how much the maker and the reader of every use belong together: where it is given,
    the edges with the highest mean of it come first, of equals the heaviest. Groups are kept
    balanced: their work and weights are capped, and the caps doubled while there are too many
    groups. Graph inputs and outputs and the borders between labels (see `fuse`) can
    leave more than `max_ops`. Acyclic contraction in the manner of Herrmann et al. 2019,
    doi 10.1137/18M1176865, but with exact cycle checks of bounded depth.
    """
    if max_ops < 1:
        raise ValueError(f"max_ops must be at least 1, got {max_ops}")
    label = _labels(graph, apart)
    group_of = _fused_groups(graph, label)
    load = np.column_stack([_work_s(graph), graph.weight_bytes, _weight_load(graph)])
    total = np.maximum(load.sum(axis=0), 1e-30)
    classes = np.unique(graph.colocate, return_inverse=True)[1]
    class_work = np.where(_class_counts(graph) > 0, _sum(load[:, 0], classes)[classes], 0.0)
    cap_share = 1.0 / max_ops
    while group_of.max() >= max_ops and cap_share < 4.0:
        cap = np.array([total[0] * cap_share, 4 * total[1] * cap_share, 1.0])
        groups = _groups(graph, group_of, graph.sent_bytes)
        close = None if near is None else _mean_near(graph, groups, near)
        pairs = np.concatenate(list(_coarse_pairs(groups, cap_share > 1.0, close)))
        limits = _Limits(load, cap, class_work, 16 * cap[0])
        anywhere = np.ones(len(pairs), bool)
        merged = _contract(graph, groups, pairs, anywhere, label, limits, max_ops)
        # A pass that still finds much to do may go on with the same caps.
        if merged.max() > 0.9 * group_of.max():
            cap_share *= 2
        group_of = merged
    return Fused(graph, group_of)


def _labels(graph: OpGraph, apart: Int[np.ndarray, "N"] | None) -> Int[np.ndarray, "N"]:
    """Ops merge only with ops of their own label; a negative label never merges."""
    ids = np.zeros(graph.num_ops, np.int64) if apart is None else apart
    # The prompt is read once, in parts, and what writes tokens runs for each.
    label = alike(ids, graph.repeats, graph.chunks, graph.is_backward)[1]
    return np.where(graph.is_io, -1, label)


@dataclass(frozen=True)
class _Groups:
    """The graph of the groups as it stands. Axes: G groups in topological order, U edges."""

    group_of: Int[np.ndarray, "N"]
    src: Int[np.ndarray, "U"]  # distinct edges, sorted by (src, dst)
    dst: Int[np.ndarray, "U"]
    edge_bytes: Float[np.ndarray, "U"]
    in_bytes: Float[np.ndarray, "G"]  # from other groups, each tensor once
    out_bytes: Float[np.ndarray, "G"]  # read by other groups, each tensor once
    out_degree: Int[np.ndarray, "G"]
    in_degree: Int[np.ndarray, "G"]
    use_group: Int[np.ndarray, "V"]  # (group, tensor) of the uses across groups, sorted
    use_tensor: Int[np.ndarray, "V"]
    tensor_group: Int[np.ndarray, "T"]


def _groups(graph: OpGraph, group_of: Int[np.ndarray, "N"], size: Int[np.ndarray, "T"]) -> _Groups:
    """The groups, with so many bytes for each tensor: held by memory, or sent over links."""
    num, t = int(group_of.max()) + 1, max(graph.num_tensors, 1)
    maker = group_of[graph.producer]
    across = maker[graph.use_tensor] != group_of[graph.use_op]
    key = distinct(group_of[graph.use_op][across] * t + graph.use_tensor[across])
    use_group, use_tensor = key // t, key % t
    use_bytes = size[use_tensor].astype(float)
    edges, inverse = np.unique(maker[use_tensor] * num + use_group, return_inverse=True)
    src, dst = edges // num, edges % num
    sent = distinct(use_tensor)
    return _Groups(
        group_of=group_of, src=src, dst=dst,
        edge_bytes=_sum(use_bytes, inverse, len(edges)),
        in_bytes=_sum(use_bytes, use_group, num),
        out_bytes=_sum(size[sent], maker[sent], num),
        out_degree=np.bincount(src, minlength=num), in_degree=np.bincount(dst, minlength=num),
        use_group=use_group, use_tensor=use_tensor, tensor_group=maker,
    )  # fmt: skip


def _fused_groups(graph: OpGraph, label: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    cheap, reduction = graph.has_type(_CHEAP), graph.has_type(REDUCTIONS)
    # At most one heavy op, or any number of reductions, but not both.
    work = np.where(cheap, 0.0, np.where(reduction, 1e-3, 1.0))
    load = np.column_stack([work, _weight_load(graph)])
    limits = _Limits(load, np.ones(2), _class_counts(graph), _MAX_CLASSES)
    group_of = np.arange(graph.num_ops)
    # Producers first: an op joins its reader only when no producer has taken it.
    for readers in (False, True):
        for _ in range(_MAX_PASSES):
            groups = _groups(graph, group_of, graph.tensor_bytes)
            light = _sum(load[:, 0], group_of) < 1.0
            pairs, wide = _fusible_pairs(groups, light, _sum(_work_s(graph), group_of), readers)
            merged = _contract(graph, groups, pairs, wide, label, limits)
            if merged.max() == group_of.max():
                break
            group_of = merged
    return group_of


def _fusible_pairs(
    groups: _Groups,
    cheap: Bool[np.ndarray, "G"],
    work_s: Float[np.ndarray, "G"],
    readers: bool,
) -> tuple[Int[np.ndarray, "C 2"], Bool[np.ndarray, "C"]]:
    """Edges worth fusing, largest data first, and whether they may tie two classes together."""
    src, dst, size = groups.src, groups.dst, groups.edge_bytes
    # Small tensors (counters, learning rates, masks of one row) are never worth a detour.
    blows_up = groups.out_bytes > 2 * groups.in_bytes + 64
    shrinks = 2 * groups.out_bytes + 64 < groups.in_bytes
    # Only the producer that finishes last: an earlier one would wait for the others' data.
    work_s = work_s + 1e-9
    finish_s = work_s.copy()
    if len(finish_s) <= PLAIN_OPS:
        ends_s = finish_s.tolist()
        extend_to_longest_paths(src.tolist(), dst.tolist(), work_s.tolist(), ends_s)
        finish_s = np.array(ends_s)
    else:
        compiled(extend_to_longest_paths)(src, dst, work_s, finish_s)
    last_s = np.zeros(len(cheap))
    np.maximum.at(last_s, dst, finish_s[src])
    main = (size >= 0.25 * groups.in_bytes[dst]) & (finish_s[src] >= 0.999 * last_s[dst])
    joins_producer = cheap[dst] & ~blows_up[dst]
    unsure = np.flatnonzero(joins_producer & ~main)
    main[unsure] = _reads_nothing_else(groups, src[unsure], dst[unsure])
    joins_producer &= main
    joins_reader = cheap[src] & (groups.out_degree[src] == 1)
    joins_reader &= ~shrinks[src] if readers else blows_up[src]
    chosen = np.flatnonzero(joins_producer | joins_reader)
    chosen = chosen[np.lexsort((dst[chosen], -size[chosen]))]
    return np.column_stack([src[chosen], dst[chosen]]), size[chosen] >= _JOIN_BYTES


def _reads_nothing_else(
    groups: _Groups, maker: Int[np.ndarray, "C"], reader: Int[np.ndarray, "C"]
) -> Bool[np.ndarray, "C"]:
    """True where the maker makes, or also reads, all inputs of the reader."""
    tensors = len(groups.tensor_group)
    pairs = groups.use_group * tensors + groups.use_tensor  # sorted
    at, end = (np.searchsorted(groups.use_group, reader, side) for side in ("left", "right"))
    answer, left = np.ones(len(reader), dtype=bool), np.arange(len(reader))
    while len(left):  # the next input of those that may still be so, which few are
        tensor = groups.use_tensor[at[left]]
        pair = maker[left] * tensors + tensor
        near = np.minimum(np.searchsorted(pairs, pair), len(pairs) - 1)
        known = (groups.tensor_group[tensor] == maker[left]) | (pairs[near] == pair)
        answer[left[~known]] = False
        at[left] += 1
        left = left[known & (at[left] < end[left])]
    return answer


def _mean_near(
    graph: OpGraph, groups: _Groups, near: Float[np.ndarray, "V"]
) -> Float[np.ndarray, "U"]:
    """The mean over the uses that each edge between groups stands for."""
    num = len(groups.out_degree)
    maker = groups.group_of[graph.producer[graph.use_tensor]]
    reader = groups.group_of[graph.use_op]
    across = maker != reader
    edge = np.searchsorted(groups.src * num + groups.dst, (maker * num + reader)[across])
    size = len(groups.src)
    return _sum(near[across], edge, size) / np.bincount(edge, minlength=size)


def _coarse_pairs(
    groups: _Groups, blocks: bool, near: Float[np.ndarray, "U"] | None
) -> Iterator[Int[np.ndarray, "C 2"]]:
    """Candidate pairs, the best first."""
    src, dst = groups.src, groups.dst
    if near is None:
        heavy_first = np.argsort(-groups.edge_bytes, kind="stable")
        chain = (groups.out_degree[src] == 1) & (groups.in_degree[dst] == 1)
        first = np.concatenate([heavy_first[chain[heavy_first]], heavy_first[~chain[heavy_first]]])
    else:
        first = np.lexsort((-groups.edge_bytes, -near))
    yield np.column_stack([src[first], dst[first]])
    # Siblings: groups that read the same maker, and makers with the same reader.
    same = np.flatnonzero(src[1:] == src[:-1])
    yield np.column_stack([dst[same], dst[same + 1]])
    by_reader = np.lexsort((src, dst))
    makers, readers = src[by_reader], dst[by_reader]
    same = np.flatnonzero(readers[1:] == readers[:-1])
    yield np.column_stack([makers[same], makers[same + 1]])
    if blocks:
        every = np.arange(len(groups.out_degree))
        yield np.column_stack([every[:-1], every[1:]])


class _Limits(NamedTuple):
    """Loads of the ops, and the most that a group, and a class tied together, may hold."""

    load: Float[np.ndarray, "N K"]
    cap: Float[np.ndarray, "K"]
    class_load: Float[np.ndarray, "N"]
    class_cap: float


def _contract(
    graph: OpGraph,
    groups: _Groups,
    pairs: Int[np.ndarray, "C 2"],
    may_join: Bool[np.ndarray, "C"],
    label: Int[np.ndarray, "N"],
    limits: _Limits,
    target: int = 1,
) -> Int[np.ndarray, "N"]:
    """The group of every op after one pass over the pairs; groups in topological order."""
    group_of, num = groups.group_of, len(groups.out_degree)
    first = np.full(num, graph.num_ops)
    np.minimum.at(first, group_of, np.arange(graph.num_ops))
    classes, class_of = _group_classes(graph, group_of)
    # Each original class counts once in the class that holds it now.
    _, one = np.unique(graph.colocate, return_index=True)
    klass_load = np.bincount(class_of[one], limits.class_load[one], int(classes.max()) + 1)
    by_dst = np.lexsort((groups.src, groups.dst))
    every = np.arange(num + 1)
    summed = np.column_stack([_sum(column, group_of) for column in limits.load.T])
    edges = (
        np.searchsorted(groups.src, every), groups.dst,
        np.searchsorted(groups.dst[by_dst], every), groups.src[by_dst],
    )  # fmt: skip
    merge_limits = label[first], limits.cap, classes, limits.class_cap, target
    state = (
        np.arange(num), np.arange(num), summed.reshape(-1), np.arange(len(klass_load)), klass_load,
        *np.zeros((8, num), dtype=np.int64),
    )  # fmt: skip
    left, right = pairs[:, 0].copy(), pairs[:, 1].copy()
    # Coarse groups are searched longer for circles.
    if num <= (PLAIN_OPS if target == 1 else PLAIN_OPS // 20):
        merged = MergeState(*map(np.ndarray.tolist, state))
        contract(
            Edges(*map(np.ndarray.tolist, edges)), left.tolist(), right.tolist(), may_join.tolist(),
            MergeLimits(*(np.asarray(part).tolist() for part in merge_limits)), merged,
        )  # fmt: skip
    else:
        merged = MergeState(*state)
        compiled(contract, Edges, MergeLimits, MergeState)(
            Edges(*edges), left, right, may_join, MergeLimits(*merge_limits),
            merged,
        )  # fmt: skip
    root, pos = np.asarray(merged.parent), np.asarray(merged.pos)
    roots = np.flatnonzero(root == np.arange(num))
    number = np.empty(num, dtype=np.int64)
    number[roots[np.argsort(pos[roots])]] = np.arange(len(roots))
    return number[root][group_of]


def _group_classes(
    graph: OpGraph, group_of: Int[np.ndarray, "N"]
) -> tuple[Int[np.ndarray, "G"], Int[np.ndarray, "N"]]:
    """Colocation class of every group and of every op: a group ties its ops' classes together."""
    classes = joined(group_of, graph.colocate)
    return classes, classes[group_of]


def _class_counts(graph: OpGraph) -> Float[np.ndarray, "N"]:
    """1 for ops that share a colocation class with another op, else 0."""
    _, inverse, counts = np.unique(graph.colocate, return_inverse=True, return_counts=True)
    return (counts[inverse] > 1).astype(float)


def _weight_load(graph: OpGraph) -> Float[np.ndarray, "N"]:
    """1 for ops whose weight is tied across colocation classes, almost 0 for other weights.

    With a cap of 1 a tied weight never shares a group with another weight, so that "counted once
    per device" stays expressible by one id per group.
    """
    holds = graph.weight_bytes > 0
    one = alike(graph.weight_id[holds], graph.colocate[holds])[0]
    ids, counts = np.unique(graph.weight_id[holds][one], return_counts=True)
    tied = holds & np.isin(graph.weight_id, ids[counts > 1])
    return np.where(tied, 1.0, np.where(holds, 1e-9, 0.0))


def _work_s(graph: OpGraph) -> Float[np.ndarray, "N"]:
    return np.maximum(graph.flop / _FLOP_PER_S, graph.memory_traffic_bytes / _BYTES_PER_S)


def _sum(
    values: np.ndarray, index: Int[np.ndarray, "N"], size: int | None = None
) -> Float[np.ndarray, "G"]:
    """The values summed per index."""
    # An empty bincount forgets that its weights are floats.
    return np.bincount(index, values, int(index.max()) + 1 if size is None else size).astype(float)


def contracted(graph: OpGraph, group_of: Int[np.ndarray, "N"]) -> OpGraph:
    """The graph of the groups, numbered in topological order."""
    work = _work_s(graph) + np.where(graph.has_type(_CHEAP), 0.0, 1e3)
    order = np.lexsort((-np.arange(graph.num_ops), work, group_of))
    lead = order[np.append(np.diff(group_of[order]) != 0, True)]  # the costliest op of each
    groups = _groups(graph, group_of, graph.tensor_bytes)
    read = np.zeros(graph.num_tensors, dtype=bool)
    read[graph.use_tensor] = True
    keep = ~read
    keep[groups.use_tensor] = True
    number = np.cumsum(keep) - 1
    traffic = graph.memory_traffic_bytes - _saved_bytes(graph, group_of, keep)
    weight_bytes, weight_id = _group_weights(graph, group_of)
    return make_graph(
        graph.name,
        picked(graph.op_names, lead),
        picked(graph.op_types, lead),
        np.stack([groups.tensor_group[keep], graph.tensor_bytes[keep]], axis=1),
        np.stack([number[groups.use_tensor], groups.use_group], axis=1),
        flop=_sum(graph.flop, group_of),
        memory_traffic_bytes=_sum(traffic, group_of),
        weight_bytes=weight_bytes,
        weight_id=weight_id,
        colocate=_group_classes(graph, group_of)[0],
        is_backward=graph.is_backward[lead],
        scope=picked(graph.scope, lead),
        detail=joined_caches(graph, group_of, lead),
        tensor_names=picked(graph.tensor_names, np.flatnonzero(keep)),
        cache_bytes=np.minimum(_sum(graph.cache_bytes, group_of).astype(np.int64), weight_bytes),
        repeats=graph.repeats[lead],
        chunks=graph.chunks[lead],
        phase=graph.phase[lead],
        source=graph.source,
        request=graph.request,
        growth=graph.growth,
    )


def _saved_bytes(
    graph: OpGraph, group_of: Int[np.ndarray, "N"], kept: Bool[np.ndarray, "T"]
) -> Float[np.ndarray, "N"]:
    """Traffic of each op to and from tensors inside its group, never more than it has at all."""
    size = graph.tensor_bytes.astype(float)
    inside = group_of[graph.producer[graph.use_tensor]] == group_of[graph.use_op]
    saved = _sum(size[graph.use_tensor[inside]], graph.use_op[inside], graph.num_ops)
    saved += _sum(size[~kept], graph.producer[~kept], graph.num_ops)
    return np.minimum(saved, graph.memory_traffic_bytes)


def _group_weights(
    graph: OpGraph, group_of: Int[np.ndarray, "N"]
) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "M"]]:
    """Bytes and id of every group's weights, such that each device still counts a weight once.

    A weight whose holders must share a device is given to the first of them. A weight tied across
    colocation classes keeps one id for all the groups that hold it; they hold no other.
    """
    num = int(group_of.max()) + 1
    classes, _ = _group_classes(graph, group_of)
    holder = np.flatnonzero(graph.weight_bytes > 0)
    # Per (weight, group): the bytes, which agree between the holders of one weight.
    order = holder[np.lexsort((group_of[holder], graph.weight_id[holder]))]
    ids, group = graph.weight_id[order], group_of[order]
    new_pair = np.append(True, (np.diff(ids) != 0) | (np.diff(group) != 0))[: len(order)]
    pair = np.cumsum(new_pair) - 1
    pair_bytes = np.zeros(int(new_pair.sum()), dtype=np.int64)
    np.maximum.at(pair_bytes, pair, graph.weight_bytes[order])
    ids, group = ids[new_pair], group[new_pair]
    _, first, weight = np.unique(ids, return_index=True, return_inverse=True)
    spread = np.zeros(len(first), dtype=bool)
    np.logical_or.at(spread, weight, classes[group] != classes[group[first]][weight])
    most = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(most, weight, pair_bytes)
    weight_bytes = np.zeros(num, dtype=np.int64)
    np.add.at(weight_bytes, group[first][~spread], most[~spread])
    tied = spread[weight]
    weight_bytes[group[tied]] = pair_bytes[tied]
    weight_id = np.arange(num)
    weight_id[group[tied]] = group[first][weight[tied]]
    return weight_bytes, weight_id
