"""Simulated annealing on max-load. Loads numba: import it inside functions.

A move of one node changes the loads of two devices, by its work and by the hyperedges whose pins it
takes from one to the other: O(degree). Axes as in `gdp.methods.host_memory.hypergraph`; S weights
that nodes share, R moves of one step.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, no_type_check

import numba
import numpy as np
from jaxtyping import Int

from gdp.base.clock import Clock
from gdp.base.kernels.options import BARE, INLINE
from gdp.base.kernels.struct import as_struct
from gdp.graph.groups import lists, starts
from gdp.methods.annealing.moves_kernels import below, length_up_to, uniform
from gdp.methods.host_memory.hypergraph import LoadHypergraph

_STEPS_PER_NODE = 6000
_MOST_STEPS = 1_000_000  # of the first rounds
_ROUNDS_PER_DOUBLING = 4
_MOST_DOUBLINGS = 4
# Shares of the largest load: from half of the moves pass to those alone that change little; at last
# hardly any. Each is best on some graphs.
_HOT = (0.05, 0.02, 0.005, 0.001)
_COLD = 1e-5
LONGEST = 32
"""Nodes that one step moves at most."""


class HypergraphArrays(NamedTuple):
    """A load model as flat arrays."""

    work_s: np.ndarray  # [V, D]
    pays: np.ndarray  # [D]
    edge_start: np.ndarray  # [V + 1] the hyperedges of a node
    edge: np.ndarray
    pin_start: np.ndarray  # [H + 1]
    pin: np.ndarray
    weight_s: np.ndarray  # [H]
    held_bytes: np.ndarray  # [V, K]
    share_start: np.ndarray  # [V + 1] the shared weights of a node
    share: np.ndarray
    share_bytes: np.ndarray  # [S]
    share_kind: np.ndarray  # [S]
    held_on: np.ndarray  # [K, D] of `Problem`: device that holds each kind
    memory_bytes: np.ndarray  # [D]


class LoadState(NamedTuple):
    """An assignment, its loads and bytes, and the scratch of a step."""

    device: np.ndarray  # [V]
    load_s: np.ndarray  # [D]
    held: np.ndarray  # [D]
    pins: np.ndarray  # [H, D] pins of a hyperedge on a device
    holders: np.ndarray  # [S, D] nodes on a device that hold a shared weight
    moved: np.ndarray  # [R] the nodes that the step at hand moved
    source: np.ndarray  # [R] where each of them was
    best: np.ndarray  # [V] the best assignment so far
    random: np.ndarray  # [1] of `uniform`


as_struct(HypergraphArrays, LoadState)


def search_loads(
    model: LoadHypergraph,
    starts: list[Int[np.ndarray, "V"]],
    clock: Clock,
    seed: int,
    rounds: int = 24,
) -> tuple[Int[np.ndarray, "V"], float, int]:
    """(device of each node, largest load in seconds, overflow in bytes) of the best assignment.

    Rounds go through the starts in turn, then most are from the best so far; they grow longer.

    Args:
        model: To be placed.
        starts: Assignments to begin with, at least one.
        clock: Only ends the search.
        seed: Equal seeds and rounds give equal answers.
        rounds: Of annealing.
    """
    nodes = flat_nodes(model)
    state = new_state(nodes, starts[0], seed)
    rng = np.random.default_rng(seed)
    best, best_key = starts[0], (np.inf, np.inf)
    for round_number, start in enumerate(_starts(model, starts, rng, rounds)):
        if round_number and clock.is_over():
            break
        again = round_number >= len(starts) and round_number % 3 > 0
        steps = min(_MOST_STEPS, _STEPS_PER_NODE * model.num_nodes)
        steps <<= min(_MOST_DOUBLINGS, round_number // _ROUNDS_PER_DOUBLING)
        state.device[:] = best if again else start
        load_s, over = anneal(nodes, state, steps, _HOT[round_number % len(_HOT)], _COLD)
        if (over, load_s) < best_key:
            best, best_key = state.best.copy(), (over, load_s)
    return best, float(best_key[1]), int(best_key[0])


def flat_nodes(model: LoadHypergraph) -> HypergraphArrays:
    """The model as the flat arrays of the kernels."""
    edge_start, edge, pin_start, pin = _incidence(model.pins, model.num_nodes)
    share_start, share, _, _ = _incidence([nodes for _, nodes, _ in model.shared], model.num_nodes)
    return HypergraphArrays(
        work_s=np.ascontiguousarray(model.work_s),
        pays=model.pays,
        edge_start=edge_start,
        edge=edge,
        pin_start=pin_start,
        pin=pin,
        weight_s=model.weight_s,
        held_bytes=model.held_bytes,
        share_start=share_start,
        share=share,
        share_bytes=np.array([size for size, _, _ in model.shared], dtype=np.int64),
        share_kind=np.array([kind for _, _, kind in model.shared], dtype=np.int64),
        held_on=model.held_on,
        memory_bytes=model.memory_bytes,
    )


def new_state(nodes: HypergraphArrays, device: Int[np.ndarray, "V"], seed: int) -> LoadState:
    """The state of an assignment, not yet filled."""
    num_devices = len(nodes.pays)
    return LoadState(
        device=np.array(device, dtype=np.int64),
        load_s=np.zeros(num_devices),
        held=np.zeros(num_devices, dtype=np.int64),
        pins=np.zeros((len(nodes.weight_s), num_devices), dtype=np.int32),
        holders=np.zeros((len(nodes.share_bytes), num_devices), dtype=np.int32),
        moved=np.zeros(LONGEST, dtype=np.int64),
        source=np.zeros(LONGEST, dtype=np.int64),
        best=np.zeros(len(device), dtype=np.int64),
        random=np.array([seed], dtype=np.uint64),
    )


def _incidence(
    sets: Sequence[tuple[int, ...]], num_nodes: int
) -> tuple[Int[np.ndarray, "_"], Int[np.ndarray, "P"], Int[np.ndarray, "_"], Int[np.ndarray, "P"]]:
    """(start, sets of each node, start, nodes of each set)."""
    pin = np.array([v for nodes in sets for v in nodes], dtype=np.int64)
    owner = np.repeat(np.arange(len(sets)), [len(nodes) for nodes in sets]).astype(np.int64)
    sizes = np.array([len(nodes) for nodes in sets], dtype=np.int64)
    start, index = lists(pin, num_nodes)
    return start, owner[index], starts(sizes), pin


def _starts(
    model: LoadHypergraph,
    starts: list[Int[np.ndarray, "V"]],
    rng: np.random.Generator,
    rounds: int,
) -> Iterator[Int[np.ndarray, "V"]]:
    yield from starts
    for _ in range(rounds - len(starts)):
        chance = np.where(np.isfinite(model.work_s), rng.random(model.work_s.shape), -1.0)
        yield chance.argmax(axis=1)


@numba.njit(**BARE)
@no_type_check
def fill(nodes, state):
    """Compute loads, bytes and pins of the state from its devices."""
    num_devices = nodes.work_s.shape[1]
    state.load_s[:] = 0.0
    state.held[:] = 0
    state.pins[:] = 0
    state.holders[:] = 0
    for v in range(state.device.size):
        d = state.device[v]
        state.load_s[d] += nodes.work_s[v, d]
        for kind in range(nodes.held_on.shape[0]):
            state.held[nodes.held_on[kind, d]] += nodes.held_bytes[v, kind]
        for i in range(nodes.edge_start[v], nodes.edge_start[v + 1]):
            state.pins[nodes.edge[i], d] += 1
        for i in range(nodes.share_start[v], nodes.share_start[v + 1]):
            k = nodes.share[i]
            at = nodes.held_on[nodes.share_kind[k], d]
            if state.holders[k, at] == 0:
                state.held[at] += nodes.share_bytes[k]
            state.holders[k, at] += 1
    for h in range(nodes.weight_s.size):
        size = nodes.pin_start[h + 1] - nodes.pin_start[h]
        for d in range(num_devices):
            if nodes.pays[d] and 0 < state.pins[h, d] < size:
                state.load_s[d] += nodes.weight_s[h]


@numba.njit(**INLINE)
@no_type_check
def move(nodes, state, v, to):
    """Move node v; everything in the state follows. Moving it back restores it, up to rounding."""
    home = state.device[v]
    leaves, enters = -nodes.work_s[v, home], nodes.work_s[v, to]
    for i in range(nodes.edge_start[v], nodes.edge_start[v + 1]):
        h = nodes.edge[i]
        size = nodes.pin_start[h + 1] - nodes.pin_start[h]
        before, after = state.pins[h, home], state.pins[h, to]
        if nodes.pays[home]:
            leaves += nodes.weight_s[h] * ((before > 1) - (before < size))
        if nodes.pays[to]:
            enters += nodes.weight_s[h] * ((after + 1 < size) - (after > 0))
        state.pins[h, home] -= 1
        state.pins[h, to] += 1
    for i in range(nodes.share_start[v], nodes.share_start[v + 1]):
        k = nodes.share[i]
        source, target = (
            nodes.held_on[nodes.share_kind[k], home],
            nodes.held_on[nodes.share_kind[k], to],
        )
        if source == target:
            continue
        state.holders[k, source] -= 1
        state.holders[k, target] += 1
        if state.holders[k, source] == 0:
            state.held[source] -= nodes.share_bytes[k]
        if state.holders[k, target] == 1:
            state.held[target] += nodes.share_bytes[k]
    state.load_s[home] += leaves
    state.load_s[to] += enters
    for kind in range(nodes.held_on.shape[0]):
        state.held[nodes.held_on[kind, home]] -= nodes.held_bytes[v, kind]
        state.held[nodes.held_on[kind, to]] += nodes.held_bytes[v, kind]
    state.device[v] = to


@numba.njit(**INLINE)
@no_type_check
def _energy(nodes, state, scale_s):
    """A smooth largest load, and a steep price for bytes over memory."""
    total, over = 0.0, 0.0
    for d in range(state.load_s.size):
        square = (state.load_s[d] / scale_s) ** 2
        total += square * square * square * square * square * square
        if state.held[d] > nodes.memory_bytes[d]:
            over += (state.held[d] - nodes.memory_bytes[d]) / nodes.memory_bytes[d]
    return total ** (1.0 / 12.0) + 3.0 * over


@numba.njit(**INLINE)
@no_type_check
def _copy(source, into):
    """Copy in a loop, since a slice allocates."""
    for i in range(source.size):
        into[i] = source[i]


@numba.njit(**INLINE)
@no_type_check
def _largest(state):
    load_s = 0.0
    for d in range(state.load_s.size):
        load_s = max(load_s, state.load_s[d])
    return load_s


@numba.njit(**BARE)
@no_type_check
def overflow(nodes, state):
    """Bytes over the devices' memories, summed."""
    over = np.int64(0)
    for d in range(state.held.size):
        over += max(0, state.held[d] - nodes.memory_bytes[d])
    return over


@numba.njit(**INLINE)
@no_type_check
def _neighbour(nodes, state, v):
    """A random pin of a hyperedge of v, preferably a heavy one; v itself where it has none."""
    start, stop = nodes.edge_start[v], nodes.edge_start[v + 1]
    if stop == start:
        return v
    h = nodes.edge[start + below(state.random, stop - start)]
    # The heavier of two: what is dear to cut is to be moved together.
    other = nodes.edge[start + below(state.random, stop - start)]
    if nodes.weight_s[other] > nodes.weight_s[h]:
        h = other
    size = nodes.pin_start[h + 1] - nodes.pin_start[h]
    return nodes.pin[nodes.pin_start[h] + below(state.random, size)]


@numba.njit(**INLINE)
@no_type_check
def _step(nodes, state):
    """Move one node, swap two, move a connected set or a chain of nodes; the number of moves."""
    num_nodes, num_devices = state.device.size, state.load_s.size
    v = below(state.random, num_nodes)
    home = state.device[v]
    to = below(state.random, num_devices)
    if uniform(state.random) < 0.6:
        to = state.device[_neighbour(nodes, state, v)]
    if to == home or not np.isfinite(nodes.work_s[v, to]):
        return 0
    state.moved[0], state.source[0] = v, home
    move(nodes, state, v, to)
    count = 1
    kind = uniform(state.random)
    if kind < 0.25:
        w = below(state.random, num_nodes)
        if state.device[w] == to and w != v and np.isfinite(nodes.work_s[w, home]):
            state.moved[1], state.source[1] = w, to
            move(nodes, state, w, home)
            count = 2
    elif kind < 0.45:
        wanted = length_up_to(state.random, LONGEST)
        for _ in range(2 * wanted):
            if count >= wanted:
                break
            w = _neighbour(nodes, state, state.moved[below(state.random, count)])
            if state.device[w] == home and np.isfinite(nodes.work_s[w, to]):
                state.moved[count], state.source[count] = w, home
                move(nodes, state, w, to)
                count += 1
    elif kind < 0.7:
        count = _relay(nodes, state, to)
    return count


@numba.njit(**INLINE)
@no_type_check
def _relay(nodes, state, to):
    """Ejection chain after a first move: a node at each target moves on; the number of moves."""
    count = 1
    while count < LONGEST:
        w = below(state.random, state.device.size)
        for _ in range(8):
            if state.device[w] == to:
                break
            w = below(state.random, state.device.size)
        onward = state.device[_neighbour(nodes, state, w)]
        fits = state.device[w] == to and onward != to and w != state.moved[count - 1]
        if not fits or not np.isfinite(nodes.work_s[w, onward]):
            break
        state.moved[count], state.source[count] = w, to
        move(nodes, state, w, onward)
        count, to = count + 1, onward
        if uniform(state.random) < 0.4:
            break
    return count


@numba.njit(**BARE)
@no_type_check
def anneal(nodes, state, steps, hot, cold):
    """(largest load, overflow in bytes) of the best of one annealing run, left in `state.best`.

    The temperature falls geometrically from `hot` to `cold`, as shares of the largest load at the
    start.
    """
    fill(nodes, state)
    scale_s = _largest(state) + 1e-300
    energy = _energy(nodes, state, scale_s)
    _copy(state.device, state.best)
    best_load, best_over = _largest(state), overflow(nodes, state)
    temperature, factor = hot, (cold / hot) ** (1.0 / steps)
    for _ in range(steps):
        temperature *= factor
        count = _step(nodes, state)
        if count == 0:
            continue
        after = _energy(nodes, state, scale_s)
        rise = after - energy
        if rise > 0.0 and uniform(state.random) >= np.exp(-rise / temperature):
            for i in range(count - 1, -1, -1):
                move(nodes, state, state.moved[i], state.source[i])
            continue
        energy = after
        load, over = _largest(state), overflow(nodes, state)
        if over < best_over or (over == best_over and load < best_load * (1.0 - 1e-12)):
            _copy(state.device, state.best)
            best_load, best_over = load, over
    _copy(state.best, state.device)
    fill(nodes, state)
    return _largest(state), best_over
