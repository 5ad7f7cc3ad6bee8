"""Good max-load assignments, fast: annealing over the nodes of a load model."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from gdp.clock import Clock
from gdp.graph.index import lists, starts
from gdp.methods.exact.hypergraph import LoadModel

if TYPE_CHECKING:
    from gdp.methods.exact.load_search_kernels import Nodes, State

_STEPS_PER_NODE = 6000
_MOST_STEPS = 1_000_000  # of the first rounds
_ROUNDS_PER_DOUBLING = 4
_MOST_DOUBLINGS = 4
# Shares of the largest load: from half of the moves pass to those alone that change little; at last
# hardly any. Each is best on some graphs.
_HOT = (0.05, 0.02, 0.005, 0.001)
_COLD = 1e-5


def search_loads(
    model: LoadModel, starts: list[Int[np.ndarray, "V"]], clock: Clock, seed: int, rounds: int = 24
) -> tuple[Int[np.ndarray, "V"], float, int]:
    """(device of each node, largest load in seconds, overflow in bytes) of the best found.

    Rounds go through the starts in turn, then most are from the best so far; they grow longer. The
    same seed and rounds give the same answer; the clock only ends it.
    """
    from gdp.methods.exact.load_search_kernels import anneal

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


def flat_nodes(model: LoadModel) -> "Nodes":
    """The model as the flat arrays of the kernels."""
    from gdp.methods.exact.load_search_kernels import Nodes

    edge_start, edge, pin_start, pin = _incidence(model.pins, model.num_nodes)
    share_start, share, _, _ = _incidence([nodes for _, nodes in model.shared], model.num_nodes)
    return Nodes(
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
        share_bytes=np.array([size for size, _ in model.shared], dtype=np.int64),
        memory_bytes=model.memory_bytes,
    )


def new_state(nodes: "Nodes", device: Int[np.ndarray, "V"], seed: int) -> "State":
    """The state of an assignment, not yet filled."""
    from gdp.methods.exact.load_search_kernels import LONGEST, State

    num_devices = len(nodes.pays)
    return State(
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
    model: LoadModel,
    starts: list[Int[np.ndarray, "V"]],
    rng: np.random.Generator,
    rounds: int,
) -> Iterator[Int[np.ndarray, "V"]]:
    yield from starts
    for _ in range(rounds - len(starts)):
        chance = np.where(np.isfinite(model.work_s), rng.random(model.work_s.shape), -1.0)
        yield chance.argmax(axis=1)
