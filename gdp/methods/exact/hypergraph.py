"""Max-load as nodes and hyperedges: the form that is searched, reduced and solved.

A group of ops that must share a device is one node. Every tensor is a hyperedge over the nodes of
its producer and readers; a paying device that holds some, but not all, of them is busy for it.
Nodes can be merged: then they share a device.

Axes: G groups, V nodes, D devices, H hyperedges, P pins, K weights that nodes share.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.bounds.loads import owned_weights
from gdp.problem.problem import Problem
from gdp.problem.symmetry import classes_of, same
from gdp.sim.host_load import is_cpu


@dataclass(frozen=True, eq=False)
class LoadHypergraph:
    """A max-load problem over nodes."""

    node: Int[np.ndarray, "G"]  # of each group
    work_s: Float[np.ndarray, "V D"]  # inf where barred
    pays: Bool[np.ndarray, "D"]  # devices that pay for transfers
    pins: tuple[tuple[int, ...], ...]  # of each hyperedge, ascending, at least two
    weight_s: Float[np.ndarray, "H"]  # > 0
    held_bytes: Int[np.ndarray, "V"]  # weights that no other node shares
    shared: tuple[tuple[int, tuple[int, ...]], ...]  # (bytes, nodes) of each shared weight
    memory_bytes: Int[np.ndarray, "D"]

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.work_s)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.pays)

    def edges_of(self) -> list[list[int]]:
        """The hyperedges of each node."""
        edges: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for h, pins in enumerate(self.pins):
            for v in pins:
                edges[v].append(h)
        return edges

    def weighs(self) -> Bool[np.ndarray, "V"]:
        """Nodes that may not go where they like: they hold bytes and some device could overflow."""
        total = int(self.held_bytes.sum()) + sum(size for size, _ in self.shared)
        if total <= int(self.memory_bytes.min()):
            return np.zeros(self.num_nodes, dtype=bool)
        heavy = self.held_bytes > 0
        for size, nodes in self.shared:
            heavy[list(nodes)] |= size > 0
        return heavy


def load_model(problem: Problem) -> LoadHypergraph:
    """The model of a problem with `tensor_s`, with one node per group."""
    if problem.tensor_s is None:
        raise ValueError(f"objective {problem.objective} needs tensor_s; give it to make_problem")
    graph, group = problem.graph, problem.group
    work_s = np.zeros((problem.num_groups, problem.num_devices))
    np.add.at(work_s, group, np.where(problem.allowed, problem.compute_s, 0.0))
    touched: list[set[int]] = [{int(g)} for g in group[graph.producer]]
    for t, g in zip(graph.use_tensor.tolist(), group[graph.use_op].tolist(), strict=True):
        touched[t].add(g)
    held_bytes, shared = owned_weights(problem, group, problem.num_groups)
    model = LoadHypergraph(
        node=np.arange(problem.num_groups),
        work_s=np.where(problem.group_allowed, work_s, np.inf),
        pays=~is_cpu(problem),
        pins=tuple(tuple(sorted(known)) for known in touched),
        weight_s=np.array(problem.tensor_s, dtype=float),
        held_bytes=held_bytes,
        shared=shared,
        memory_bytes=np.array(problem.cluster.memory_bytes, dtype=np.int64),
    )
    return merge(model, np.arange(model.num_nodes))


def merge(model: LoadHypergraph, target: Int[np.ndarray, "V"]) -> LoadHypergraph:
    """The model with nodes of equal target as one node, and hyperedges of equal pins as one."""
    kept, number = np.unique(target, return_inverse=True)
    work_s = np.zeros((len(kept), model.num_devices))
    np.add.at(work_s, number, model.work_s)
    weight: dict[tuple[int, ...], float] = {}
    for pins, seconds in zip(model.pins, model.weight_s.tolist(), strict=True):
        moved = tuple(sorted({int(number[v]) for v in pins}))
        if len(moved) > 1 and seconds > 0:
            weight[moved] = weight.get(moved, 0.0) + seconds
    held = np.zeros(len(kept), dtype=np.int64)
    np.add.at(held, number, model.held_bytes)
    shared = []
    for size, nodes in model.shared:
        moved = tuple(sorted({int(number[v]) for v in nodes}))
        if len(moved) > 1:
            shared.append((size, moved))
        else:
            held[moved[0]] += size
    return replace(
        model,
        node=number[model.node].astype(np.int64),
        work_s=work_s,
        pins=tuple(weight),
        weight_s=np.array(list(weight.values()), dtype=float),
        held_bytes=held,
        shared=tuple(shared),
    )


def shares(
    work_s: Float[np.ndarray, "V D"],
) -> tuple[Float[np.ndarray, "V"], Float[np.ndarray, "D"]]:
    """(seconds of each node where it is fastest, seconds that each device takes for one of those).

    Device d does at most seconds / price(d) of fastest work, whatever it is given; inf: none.
    """
    fastest_s = work_s.min(axis=1)
    works = fastest_s > 0
    ratio = work_s[works] / fastest_s[works, None]
    return fastest_s, ratio.min(axis=0) if works.any() else np.ones(work_s.shape[1])


def work_bound_s(work_s: Float[np.ndarray, "V D"]) -> float:
    """A bound of the largest load: work over the speed of all devices, and the dearest node."""
    fastest_s, price = shares(work_s)
    return max(float(fastest_s.sum()) / float((1.0 / price).sum()), float(fastest_s.max()))


def equal_devices(model: LoadHypergraph) -> list[list[int]]:
    """Classes of devices that may be exchanged for one another."""
    return classes_of(same(model.work_s, model.pays, model.memory_bytes))
