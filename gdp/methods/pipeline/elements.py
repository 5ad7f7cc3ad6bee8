"""The graph that a pipeline is cut from: ops that must go together, as one element.

Contiguity concerns the forward part alone. The backward part of a training step follows by
colocation, so an element holds forward ops and the backward ops that share their device. The rules
are those of Tarnawski et al. 2020 (arXiv 2006.16423, section 5 and the authors' program):

1. ops of one group are one element;
2. a group of backward ops alone gets arcs against the direction of its backward edges, because the
   backward pass runs through the pipeline in reverse;
3. elements on a cycle of the forward graph are merged;
4. an element without work and with one neighbour is merged into that neighbour, over and over.

Axes: N ops, T tensors, E uses, G groups, M elements, A arcs.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from gdp.problem.problem import Problem

NO_WORK_S = 1e-9
"""Elements that take less on every device count as free: what rule 4 merges."""


@dataclass(frozen=True, eq=False)
class Contraction:
    """Elements in topological order, and the arcs between them."""

    element: Int[np.ndarray, "N"]  # of each op; graph inputs and outputs have none: M
    num_elements: int
    src: Int[np.ndarray, "A"]  # arcs of the contracted forward graph, each once
    dst: Int[np.ndarray, "A"]


def contract(problem: Problem) -> Contraction:
    """The contracted forward graph of a problem.

    Groups that hold a graph input or output are no elements: these are fixed to the host, which
    feeds the first stage and reads the last one.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = problem.graph
    outside = np.zeros(problem.num_groups, dtype=bool)
    outside[problem.group[graph.is_io]] = True
    group_src, group_dst = _forward_arcs(problem)
    inside = ~outside[group_src] & ~outside[group_dst]
    src, dst = group_src[inside], group_dst[inside]
    arcs = coo_array((np.ones(len(src)), (src, dst)), shape=(problem.num_groups,) * 2)
    merged = connected_components(arcs, directed=True, connection="strong")[1].astype(np.int64)
    merged = _merge_idle(problem, merged, merged[src], merged[dst])
    return _number(problem, merged, outside, src, dst)


def linear_orders(contraction: Contraction) -> list[Int[np.ndarray, "M"]]:
    """Some topological orders of the elements: as given, depth first, depth first from the end."""
    m, src, dst = contraction.num_elements, contraction.src, contraction.dst
    orders = [np.arange(m), _depth_first(m, src, dst), _depth_first(m, dst, src)[::-1]]
    return list({order.tobytes(): np.ascontiguousarray(order) for order in orders}.values())


def random_order(contraction: Contraction, rng: np.random.Generator) -> Int[np.ndarray, "M"]:
    """A topological order, depth first: the most recently ready element next, ties at random."""
    m, name = contraction.num_elements, rng.permutation(contraction.num_elements)
    by_name = np.lexsort((name[contraction.dst], contraction.src))
    return _depth_first(m, contraction.src[by_name], contraction.dst[by_name], name)


def _forward_arcs(problem: Problem) -> tuple[Int[np.ndarray, "A"], Int[np.ndarray, "A"]]:
    """Arcs between groups: forward edges, and backward edges of backward-only groups reversed."""
    graph, group = problem.graph, problem.group
    src, dst = graph.edges
    has_forward = np.zeros(problem.num_groups, dtype=bool)
    has_forward[group[~graph.is_backward]] = True
    forward = ~graph.is_backward[src] & ~graph.is_backward[dst]
    backward = graph.is_backward[src] & graph.is_backward[dst]
    backward &= ~(has_forward[group[src]] & has_forward[group[dst]])
    a = np.concatenate([group[src[forward]], group[dst[backward]]])
    b = np.concatenate([group[dst[forward]], group[src[backward]]])
    return a[a != b], b[a != b]


def _merge_idle(
    problem: Problem,
    label: Int[np.ndarray, "G"],
    src: Int[np.ndarray, "A"],
    dst: Int[np.ndarray, "A"],
) -> Int[np.ndarray, "G"]:
    """Rule 4: labels with every idle element of one neighbour merged into it."""
    num_labels = int(label.max()) + 1
    neighbours: list[set[int]] = [set() for _ in range(num_labels)]
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        if a != b:
            neighbours[a].add(b)
            neighbours[b].add(a)
    idle = _idle(problem, label)
    becomes = np.arange(num_labels)
    waiting = [e for e in range(num_labels) if idle[e]]
    while waiting:
        e = waiting.pop()
        if not idle[e] or becomes[e] != e or len(neighbours[e]) != 1:
            continue
        into = next(iter(neighbours[e]))
        becomes[e] = into
        neighbours[into].discard(e)
        # The one neighbour loses a neighbour, and may itself be free to merge now.
        waiting.append(into)
    while not np.array_equal(becomes, becomes[becomes]):
        becomes = becomes[becomes]
    return becomes[label]


def _idle(problem: Problem, label: Int[np.ndarray, "G"]) -> Bool[np.ndarray, "L"]:
    """True for elements that do no work, hold no backward op and touch no backward op."""
    graph = problem.graph
    of_op = label[problem.group]
    num_labels = int(label.max()) + 1
    seconds = np.zeros((num_labels, problem.num_devices))
    np.add.at(seconds, of_op, np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0))
    idle = seconds.max(axis=1) < NO_WORK_S
    idle[of_op[graph.is_backward]] = False
    src, dst = graph.edges
    idle[of_op[src[graph.is_backward[dst]]]] = False
    idle[of_op[dst[graph.is_backward[src]]]] = False
    return idle


def _number(
    problem: Problem,
    label: Int[np.ndarray, "G"],
    outside: Bool[np.ndarray, "G"],
    group_src: Int[np.ndarray, "A"],
    group_dst: Int[np.ndarray, "A"],
) -> Contraction:
    """Elements numbered in topological order, smallest first op first among the ready."""
    from gdp.graph.op_graph import topological_order

    of_op = label[problem.group]
    kept, first_op = np.unique(of_op[~outside[problem.group]], return_index=True)
    by_first = kept[np.argsort(first_op)]
    index = np.full(int(label.max()) + 1, len(kept))
    index[by_first] = np.arange(len(kept))
    src, dst = index[label[group_src]], index[label[group_dst]]
    pairs = np.unique(np.stack([src[src != dst], dst[src != dst]], axis=1), axis=0)
    order = topological_order(len(kept), pairs[:, 0], pairs[:, 1])
    position = np.full(len(kept) + 1, len(kept))
    position[order] = np.arange(len(kept))
    arcs = position[pairs]
    arcs = arcs[np.lexsort((arcs[:, 1], arcs[:, 0]))]
    element = np.where(outside[problem.group], len(kept), position[index[of_op]])
    return Contraction(element, len(kept), arcs[:, 0].copy(), arcs[:, 1].copy())


def _depth_first(
    num_elements: int,
    src: Int[np.ndarray, "A"],
    dst: Int[np.ndarray, "A"],
    name: Int[np.ndarray, "M"] | None = None,
) -> Int[np.ndarray, "M"]:
    """A topological order with the most recently ready element next.

    Elements that become ready together go in the reverse order of their arcs; those that are ready
    from the start in the order of `name`, or of their numbers.
    """
    following: list[list[int]] = [[] for _ in range(num_elements)]
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        following[a].append(b)
    missing = np.bincount(dst, minlength=num_elements).tolist()
    start = np.argsort(np.arange(num_elements) if name is None else name)[::-1]
    stack = [e for e in start.tolist() if missing[e] == 0]
    order: list[int] = []
    while stack:
        e = stack.pop()
        order.append(e)
        for after in following[e]:
            missing[after] -= 1
            if missing[after] == 0:
                stack.append(after)
    return np.array(order, dtype=np.int64)
