"""Max-load as nodes and hyperedges: the form that is searched, reduced and solved.

A group of ops that must share a device is one node. Every tensor is a hyperedge over the nodes of
its producer and readers; a paying device that holds some, but not all, of them is busy for it.
Nodes can be merged: then they share a device.

`reduce_model` keeps an assignment below a known value, if there is any. Absorption: a node moves to
a neighbour for good where it never costs more there.
1. The two-pin hyperedge that joins them weighs at least all its other hyperedges and its work.
2. A node without work on one hyperedge alone goes with any other pin of it.

Proof: the least busy time of a device that holds some nodes is a minimum cut, whatever else it
holds. Load is submodular: with u, and without v, a device is busy for at least

    min over S with u in S, v not in S of  sum of work over S + weight of the hyperedges cut by S

3. Two nodes that cannot be apart below the known value are one: because that makes one of their
   devices too busy, or because it takes more transfers than the work leaves time for. The devices
   have so much time below the known value; work takes its share of it, transfers get the rest.
4. Nodes of which no two can be together sit on devices of their own; among equal devices, which is
   free. Then a node is barred from a device where it cannot be with the nodes that are there for
   sure.

Axes: G groups, V nodes, D devices, H hyperedges, P pins, K kinds of weights.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.clock import Clock
from gdp.bounds.loads import owned_weights
from gdp.bounds.work import fastest_work
from gdp.methods.host_memory.load import is_cpu, sent_s
from gdp.problem.problem import Problem
from gdp.problem.symmetry import classes_of, same


@dataclass(frozen=True, eq=False)
class LoadHypergraph:
    """A max-load problem over nodes."""

    node: Int[np.ndarray, "G"]  # of each group
    work_s: Float[np.ndarray, "V D"]  # inf where barred
    pays: Bool[np.ndarray, "D"]  # devices that pay for transfers
    pins: tuple[tuple[int, ...], ...]  # of each hyperedge, ascending, at least two
    weight_s: Float[np.ndarray, "H"]  # > 0
    held_bytes: Int[np.ndarray, "V K"]  # weights that no other node shares, by kind
    shared: tuple[tuple[int, tuple[int, ...], int], ...]  # (bytes, nodes, kind) of shared weights
    held_on: Int[np.ndarray, "K D"]  # of `Problem`: device that holds each kind
    memory_bytes: Int[np.ndarray, "D"]
    processor: Int[np.ndarray, "D"]  # of devices that add up to one load; below zero alone

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
        if self.stored_bytes <= int(self.memory_bytes.min()):
            return np.zeros(self.num_nodes, dtype=bool)
        heavy = self.held_bytes.sum(axis=1) > 0
        for size, nodes, _ in self.shared:
            heavy[list(nodes)] |= size > 0
        return heavy

    @property
    def stored_bytes(self) -> int:
        """Weights and caches of all nodes, each once."""
        return int(self.held_bytes.sum()) + sum(size for size, _, _ in self.shared)


def load_model(problem: Problem) -> LoadHypergraph:
    """The model of a problem, with one node per group."""
    graph, group = problem.graph, problem.group
    work_s = np.zeros((problem.num_groups, problem.num_devices))
    np.add.at(work_s, group, np.where(problem.allowed, problem.compute_s, 0.0))
    touched: list[set[int]] = [{int(g)} for g in group[graph.producer]]
    for t, g in zip(graph.use_tensor.tolist(), group[graph.use_op].tolist(), strict=True):
        touched[t].add(g)
    kinds = range(len(problem.held_on))
    owned = [owned_weights(problem, group, problem.num_groups, kind) for kind in kinds]
    model = LoadHypergraph(
        node=np.arange(problem.num_groups),
        work_s=np.where(problem.group_allowed, work_s, np.inf),
        pays=~is_cpu(problem),
        pins=tuple(tuple(sorted(known)) for known in touched),
        weight_s=sent_s(problem),
        held_bytes=np.stack([held for held, _ in owned], axis=1),
        shared=tuple((*share, kind) for kind in kinds for share in owned[kind][1]),
        held_on=problem.held_on,
        memory_bytes=np.array(problem.cluster.memory_bytes, dtype=np.int64),
        processor=problem.cluster.processor,
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
    held, shared = np.zeros((len(kept), len(model.held_on)), dtype=np.int64), []
    np.add.at(held, number, model.held_bytes)
    for size, nodes, kind in model.shared:
        moved = tuple(sorted({int(number[v]) for v in nodes}))
        if len(moved) > 1:
            shared.append((size, moved, kind))
        else:
            held[moved[0], kind] += size
    return replace(
        model,
        node=number[model.node].astype(np.int64),
        work_s=work_s,
        pins=tuple(weight),
        weight_s=np.array(list(weight.values()), dtype=float),
        held_bytes=held,
        shared=tuple(shared),
    )


def equal_devices(model: LoadHypergraph) -> list[list[int]]:
    """Classes of devices that may be exchanged for one another."""
    traits = [model.work_s, model.pays, model.memory_bytes, model.processor]
    if len(model.held_on) > 1:
        traits.append(np.arange(model.num_devices))
    return classes_of(same(*traits))


_UNIT = 1 << 26  # the known value as an integer; flows are 32 bit
_MOST_ANCHORS = 40  # heaviest nodes that are looked at for being apart


def reduce_model(
    model: LoadHypergraph, upper_s: float, clock: Clock, name_devices: bool = True
) -> LoadHypergraph | None:
    """A smaller model with an assignment of load below `upper_s` if any has; None if none has.

    Args:
        model: To be reduced.
        upper_s: A known value, or a target below it.
        clock: Ends the proofs by minimum cuts; the reductions so far hold.
        name_devices: Without, rule 4 is left out: equal devices stay so.

    The rules look at one device at a time: a model whose devices share a processor stays as it is.
    """
    if (model.processor >= 0).any():
        return model
    while True:
        before = model.num_nodes, int(np.isfinite(model.work_s).sum())
        model = _bar_heavy(absorb(model, upper_s), upper_s)
        if _is_barred(model):
            return None
        if np.isfinite(upper_s) and not clock.is_over():
            fewer = _join_dear(model, upper_s, clock)
            if fewer is None:
                return None
            model = _join(fewer, upper_s, clock)
            if name_devices:
                model = _spread(model, upper_s, clock)
            model = _bar(model, upper_s, clock)
        model = merge(model, _settled_together(model))
        if (model.num_nodes, int(np.isfinite(model.work_s).sum())) == before:
            return None if _is_barred(model) else model


def absorb(model: LoadHypergraph, upper_s: float) -> LoadHypergraph:
    """The model after rules 1 and 2, over and over."""
    while True:
        target = _absorbed(model, upper_s)
        if np.array_equal(target, np.arange(model.num_nodes)):
            return model
        model = merge(model, target)


def _bar_heavy(model: LoadHypergraph, upper_s: float) -> LoadHypergraph:
    too_slow = np.isfinite(model.work_s) & (model.work_s >= upper_s)
    return replace(model, work_s=np.where(too_slow, np.inf, model.work_s))


def _is_barred(model: LoadHypergraph) -> bool:
    return bool((~np.isfinite(model.work_s)).all(axis=1).any())


def _settled_together(model: LoadHypergraph) -> Int[np.ndarray, "V"]:
    """A target for merging all nodes that can be on one device only, per device."""
    target = np.arange(model.num_nodes)
    can = np.isfinite(model.work_s)
    for d in range(model.num_devices):
        settled = np.flatnonzero(can[:, d] & (can.sum(axis=1) == 1))
        if len(settled):
            target[settled] = settled[0]
    return target


def _absorbed(model: LoadHypergraph, upper_s: float) -> Int[np.ndarray, "V"]:
    """Merge target of each node by rules 1 and 2: itself, or a neighbour that stays."""
    edges_of = model.edges_of()
    target = np.arange(model.num_nodes)
    fixed = model.weighs()
    settled = np.zeros(model.num_nodes, dtype=bool)
    for v in np.flatnonzero(~fixed).tolist():
        if settled[v]:
            continue
        total_s = sum(float(model.weight_s[h]) for h in edges_of[v])
        for h in edges_of[v]:
            if len(model.pins[h]) > 2 and len(edges_of[v]) > 1:
                continue
            spare_s = 2.0 * float(model.weight_s[h]) - total_s if len(model.pins[h]) == 2 else 0.0
            into = next(u for u in model.pins[h] if u != v)
            if target[into] == into and _may_move(model, v, into, spare_s, upper_s):
                target[v] = into
                settled[[v, into]] = True
                break
    return target


def _may_move(model: LoadHypergraph, v: int, into: int, spare_s: float, upper_s: float) -> bool:
    """Test that v costs no more on any device where `into` can be, given the cut saved there."""
    if spare_s < 0:
        return False
    homes = model.work_s[into] < upper_s
    # A device that pays saves the joining hyperedge; one that does not must get v for nothing.
    limit_s = np.where(model.pays, spare_s, 0.0)
    return bool((model.work_s[v] <= limit_s)[homes].all())


@dataclass(frozen=True, eq=False)
class _Network:
    """The cut problem of a model as arcs; a hyperedge is an arc between two additional nodes."""

    model: LoadHypergraph
    upper_s: float
    tail: Int[np.ndarray, "A"]
    head: Int[np.ndarray, "A"]
    room: Int[np.ndarray, "A"]

    def exceeds(self, d: int, inside: list[int], outside: Bool[np.ndarray, "V"]) -> bool:
        """Test if device d, with some nodes and without others, is busy for `upper_s` or longer."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_flow

        model = self.model
        work_s = model.work_s[:, d]
        if outside[inside].any() or not np.isfinite(work_s[inside]).all():
            return True
        if not model.pays[d]:
            return bool(work_s[inside].sum() >= self.upper_s * (1 + 1e-12))
        size = model.num_nodes + 2 * len(model.pins)
        source, sink, start = size, size + 1, size + 2
        barred = outside | ~np.isfinite(work_s)
        to_sink = np.where(barred, self.upper_s, np.minimum(work_s, self.upper_s))
        nodes, room = np.arange(model.num_nodes), _whole(to_sink, self.upper_s)
        room[barred] = 2 * _UNIT
        # One arc limits the whole flow, so that it stays within 32 bits.
        tail = np.concatenate([self.tail, nodes, np.full(len(inside), source), [start]])
        head = np.concatenate([self.head, np.full(len(nodes), sink), inside, [source]])
        room = np.concatenate([self.room, room, np.full(len(inside) + 1, 2 * _UNIT)])
        graph = csr_array((room.astype(np.int32), (tail, head)), shape=(size + 3, size + 3))
        # Two units for the rounding of the divisions.
        return int(maximum_flow(graph, start, sink).flow_value) >= _UNIT + 2


def _whole(seconds: np.ndarray, upper_s: float) -> Int[np.ndarray, "..."]:
    """Seconds as whole units, rounded down, so that proofs hold."""
    return np.floor(np.minimum(seconds / upper_s, 2.0) * _UNIT).astype(np.int64)


def _network(model: LoadHypergraph, upper_s: float) -> _Network:
    tail, head, room = [], [], []
    whole = _whole(model.weight_s, upper_s)
    for h, pins in enumerate(model.pins):
        enter = model.num_nodes + 2 * h
        tail.append(enter)
        head.append(enter + 1)
        room.append(int(whole[h]))
        for v in pins:
            tail += [v, enter + 1]
            head += [enter, v]
            room += [2 * _UNIT, 2 * _UNIT]
    arcs = (np.array(ends, dtype=np.int64) for ends in (tail, head, room))
    return _Network(model, upper_s, *arcs)


def _incident_s(model: LoadHypergraph) -> Float[np.ndarray, "V"]:
    """Weight of all hyperedges of each node."""
    weight = np.zeros(model.num_nodes)
    for pins, seconds in zip(model.pins, model.weight_s.tolist(), strict=True):
        weight[list(pins)] += seconds
    return weight


def _alone_s(model: LoadHypergraph) -> np.ndarray:
    """Seconds of each node alone on a paying device: where this is small, nothing is proven."""
    work_s = np.where(np.isfinite(model.work_s) & model.pays, model.work_s, np.inf).min(axis=1)
    return work_s + _incident_s(model)


def _join(model: LoadHypergraph, upper_s: float, clock: Clock) -> LoadHypergraph:
    """Rule 3, for nodes that share a hyperedge."""
    network = _network(model, upper_s)
    classes = equal_devices(model)
    alone_s = _alone_s(model)
    target = np.arange(model.num_nodes)
    pairs = {
        (u, v) if alone_s[u] >= alone_s[v] else (v, u)
        for pins in model.pins
        for i, u in enumerate(pins)
        for v in pins[i + 1 :]
        if max(alone_s[u], alone_s[v]) >= upper_s
    }
    for u, v in sorted(pairs, key=lambda pair: -alone_s[pair[0]]):
        if clock.is_over():
            break
        if _root(target, u) != _root(target, v) and _never_apart(network, classes, u, v):
            target[_root(target, u)] = _root(target, v)
    return _merge_roots(model, target)


def _merge_roots(model: LoadHypergraph, target: Int[np.ndarray, "V"]) -> LoadHypergraph:
    return merge(model, np.array([_root(target, v) for v in range(model.num_nodes)]))


def _root(target: Int[np.ndarray, "V"], v: int) -> int:
    while target[v] != v:
        v = int(target[v])
    return v


def _never_apart(network: _Network, classes: list[list[int]], u: int, v: int) -> bool:
    """Test that on any two devices, one is too busy with one node and without the other."""
    without = np.zeros((2, network.model.num_nodes), dtype=bool)
    without[0, v] = without[1, u] = True
    u_fails = [network.exceeds(devices[0], [u], without[0]) for devices in classes]
    if all(u_fails):
        return True
    v_fails = [network.exceeds(devices[0], [v], without[1]) for devices in classes]
    return all(
        u_fails[i] or v_fails[j]
        for i, devices in enumerate(classes)
        for j in range(len(classes))
        if i != j or len(devices) > 1
    )


def spare_s(model: LoadHypergraph, upper_s: float) -> float:
    """Seconds that all devices together have for transfers when none is busy for `upper_s`."""
    fastest_s, price = fastest_work(model.work_s)
    paid = price[model.pays]
    if not np.isfinite(paid).any():
        return 0.0
    # A second of transfers on a device of price p takes 1 / p seconds of fastest work's time.
    left_s = upper_s * float((1.0 / price).sum()) - float(fastest_s.sum())
    return left_s * float(paid[np.isfinite(paid)].max())


def _join_dear(model: LoadHypergraph, upper_s: float, clock: Clock) -> LoadHypergraph | None:
    """Rule 3 by the time that is left for transfers; None where work leaves none."""
    left_s = spare_s(model, upper_s)
    if left_s <= 0 or not model.pays.any():
        return None if left_s < 0 else model
    free = replace(model, work_s=np.zeros_like(model.work_s))
    once, twice = (_network(free, limit_s) for limit_s in (left_s, left_s / 2))
    payer = int(np.flatnonzero(model.pays)[0])
    on_cpu = [bool(np.isfinite(row).any()) for row in model.work_s[:, ~model.pays]]
    weight = _incident_s(model)
    target = np.arange(model.num_nodes)
    for u, v in sorted({(u, v) for p in model.pins for u, v in itertools.combinations(p, 2)}):
        # Two paying devices pay for each tensor between them, of a paying one and a CPU only the
        # first, and two CPUs do not pay.
        if on_cpu[u] and on_cpu[v] and (~model.pays).sum() > 1:
            continue
        network, limit_s = (once, left_s) if on_cpu[u] or on_cpu[v] else (twice, left_s / 2)
        if min(weight[u], weight[v]) <= limit_s or _root(target, u) == _root(target, v):
            continue
        if clock.is_over():
            break
        without = np.zeros(model.num_nodes, dtype=bool)
        without[v] = True
        if network.exceeds(payer, [u], without):
            target[_root(target, u)] = _root(target, v)
    return _merge_roots(model, target)


def _spread(model: LoadHypergraph, upper_s: float, clock: Clock) -> LoadHypergraph:
    """Rule 4: pairwise separated nodes, fixed to identical devices one by one."""
    network = _network(model, upper_s)
    nothing = np.zeros(model.num_nodes, dtype=bool)
    work_s = model.work_s.copy()
    alone_s = _alone_s(model)
    for devices in equal_devices(model):
        if len(devices) < 2 or clock.is_over():
            continue
        elsewhere = np.ones(model.num_devices, dtype=bool)
        elsewhere[devices] = False
        # Nodes that are on devices of the class for sure.
        bound = np.isfinite(model.work_s[:, devices[0]])
        bound &= ~np.isfinite(model.work_s[:, elsewhere]).any(axis=1)
        heavy = sorted(np.flatnonzero(bound).tolist(), key=lambda v: -alone_s[v])
        chosen: list[int] = []
        for v in heavy[:_MOST_ANCHORS]:
            apart = all(network.exceeds(devices[0], [u, v], nothing) for u in chosen)
            if apart and len(chosen) == len(devices):
                work_s[v] = np.inf  # one more than there are devices: none is left
            elif apart:
                chosen.append(v)
        # A single node among equal devices can be on the first of them as well.
        for v, d in zip(chosen, devices, strict=False):
            keep = work_s[v, d]
            work_s[v] = np.inf
            work_s[v, d] = keep
    return replace(model, work_s=work_s)


def _bar(model: LoadHypergraph, upper_s: float, clock: Clock) -> LoadHypergraph:
    """Nodes barred from devices where they cannot be with those that are there for sure."""
    network = _network(model, upper_s)
    nothing = np.zeros(model.num_nodes, dtype=bool)
    work_s = model.work_s.copy()
    can = np.isfinite(work_s)
    sure = can.sum(axis=1) == 1
    done: dict[tuple, Bool[np.ndarray, "V"]] = {}
    for d in range(model.num_devices):
        settled = np.flatnonzero(sure & can[:, d]).tolist()
        key = (work_s[:, d].tobytes(), bool(model.pays[d]))
        if key not in done:
            barred = np.zeros(model.num_nodes, dtype=bool)
            for v in np.flatnonzero(can[:, d]).tolist():
                if clock.is_over():
                    break
                barred[v] = network.exceeds(d, sorted({*settled, v}), nothing)
            done[key] = barred
        work_s[done[key], d] = np.inf
    return replace(model, work_s=work_s)
