"""Better max-load assignments from a good one: a solver moves the nodes near the borders.

The nodes that are not free stay where they are and become one node per device. What is left is
small, and the solver balances all devices at once, which single moves cannot (large neighbourhood
search: Shaw 1998, doi 10.1007/3-540-49481-2_30).

Axes: V nodes.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int

from gdp.clock import Clock
from gdp.methods.exact.hypergraph import LoadModel, merge
from gdp.methods.exact.load_program import solve_loads

_FREE = 40  # nodes that one round may move
_SHARE = 0.3  # of the seconds left, for one round
_BETTER = 1.0 - 1e-4
_MOST_FAILURES = 16  # rounds in a row without a better assignment


def polish(
    model: LoadModel, device: Int[np.ndarray, "V"], value_s: float, clock: Clock, seed: int
) -> Int[np.ndarray, "V"]:
    """The best assignment found by freeing nodes near borders, others in every round."""
    rng = np.random.default_rng(seed)
    failures = 0
    while failures < _MOST_FAILURES and not clock.is_over():
        free = _near_borders(model, device, rng)
        stays = ~free[:, None] & (np.arange(model.num_devices) != device[:, None])
        held = replace(model, work_s=np.where(stays, np.inf, model.work_s))
        target = np.arange(model.num_nodes)
        for d in range(model.num_devices):
            fixed = np.flatnonzero((device == d) & ~free)
            target[fixed] = fixed.min(initial=model.num_nodes)
        number = np.unique(target, return_inverse=True)[1]
        seconds = None if clock.seconds is None else _SHARE * clock.remaining_s()
        solution = solve_loads(merge(held, target), value_s * _BETTER, seconds, 1e-3)
        if solution.device is None:
            failures += 1
            continue
        device, failures = solution.device[number], 0
        value_s = load_s(model, device)
    return device


def load_s(model: LoadModel, device: Int[np.ndarray, "V"]) -> float:
    """The largest load of an assignment."""
    on = device[:, None] == np.arange(model.num_devices)
    loads = np.where(on, model.work_s, 0.0).sum(axis=0)
    for pins, seconds in zip(model.pins, model.weight_s.tolist(), strict=True):
        part = on[list(pins)]
        loads += seconds * (part.any(axis=0) & ~part.all(axis=0) & model.pays)
    return float(loads.max())


def _near_borders(
    model: LoadModel, device: Int[np.ndarray, "V"], rng: np.random.Generator
) -> Bool[np.ndarray, "V"]:
    """Some nodes: those of random cut hyperedges, then what shares hyperedges with them."""
    edges_of = model.edges_of()
    cut = [h for h, pins in enumerate(model.pins) if len({int(device[v]) for v in pins}) > 1]
    found: dict[int, None] = {}
    waiting = [v for h in rng.permutation(cut).astype(int).tolist() for v in model.pins[h]]
    while waiting and len(found) < _FREE:
        following = []
        for v in waiting:
            if v not in found and len(found) < _FREE:
                found[v] = None
                following += [u for h in edges_of[v] for u in model.pins[h] if len(edges_of[v]) < 9]
        waiting = rng.permutation(following).astype(int).tolist()
    free = np.zeros(model.num_nodes, dtype=bool)
    free[list(found)] = True
    return free
