"""Repair: from a placement that overflows device memory to one that fits, near it if possible.

Whether any placement fits is bin packing, so this can fail where one exists. It tries, in this
order and until something fits: other priorities, which change what is alive together; one device of
those that share a memory, instead of several; moving groups off overfull devices and memories;
packing from scratch, in topological order and by size; and annealing that minimises the overflow
first.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from gdp.base.clock import Clock
from gdp.methods.annealing.annealer import anneal_to_fit
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.priorities import ranks_to_try
from gdp.methods.scoring import (
    Evaluated,
    as_answer,
    best_of,
    best_priority_rule,
    best_two,
    expand,
    group_held_bytes,
    proven_misfit,
)
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.sim.memory import weights_held
from gdp.sim.objectives import peaks

# Rounds of shedding and packing; each simulates a few placements.
_ROUNDS = 12
# Simulations of the annealing at most, and ops simulated in them: a hopeless case ends without a
# clock as well, after seconds on any graph.
_ANNEALED = 20_000
_ANNEALED_OPS = 20_000_000


def repair_and_select(
    problem: Problem,
    search: Search,
    assignments: Iterable[Assignment],
    name: str,
    clock: Clock | None = None,
) -> Answer:
    """The best assignment as an answer, under the priorities that suit it best.

    Repaired where memory overflows, None where that fails.
    """
    clock = clock or search.budget()
    best, over = best_two(problem, assignments, clock)
    best = best_priority_rule(problem, best)
    if over is not None and not clock.is_over():  # under another rule it may fit, and be faster
        other = best_priority_rule(problem, replace(over, evaluations=best.evaluations))
        best = replace(min(best, other), evaluations=other.evaluations)
    if best.overflow_bytes == 0:
        return Answer(best.assignment, evaluations=best.evaluations)
    if (proof := proven_misfit(problem)) is not None:
        return Answer(None, reason=proof, evaluations=best.evaluations, proven_misfit=True)
    fixed = best_priority_rule(problem, repair(problem, best, clock, search.seed))
    if fixed.overflow_bytes == 0:
        return Answer(
            fixed.assignment,
            reason=f"{name} overflowed device memory; its placement was repaired",
            evaluations=fixed.evaluations,
        )
    return as_answer(problem, fixed, name)


def repair(
    problem: Problem, start: Evaluated, clock: Clock, seed: int, annealed: int = _ANNEALED
) -> Evaluated:
    """The first placement found that fits, or the one of least overflow; the same for one seed.

    Annealing, the last resort, simulates at most `annealed` placements.
    """
    best, count = start, start.evaluations
    for proposals in _stages(problem, start):
        for batch in proposals:
            candidate = best_of(problem, batch, clock)
            count += candidate.evaluations
            best = min(best, candidate)
            if best.overflow_bytes == 0 or clock.is_over():
                return replace(best, evaluations=count)
    most = min(annealed, max(1, _ANNEALED_OPS // problem.num_ops))
    candidate = anneal_to_fit(problem, best.assignment, clock, seed, most)
    return replace(min(best, candidate), evaluations=count + candidate.evaluations)


def _stages(problem: Problem, start: Evaluated) -> Iterator[Iterator[list[Assignment]]]:
    """Generators of batches of proposals; later ones cost more of the start's structure."""
    ranks = ranks_to_try(problem)
    a = arrays_of(problem)
    group_device = start.assignment.device[a.group_op[a.group_start[:-1]]]
    yield iter([[Assignment(start.assignment.device, rank) for rank in ranks]])
    yield _together(problem, group_device, ranks)
    yield _shedding(problem, group_device, [start.assignment.rank, *ranks])
    yield _packing(problem, ranks)


def _together(
    problem: Problem, group_device: Int[np.ndarray, "G"], ranks: list[Int[np.ndarray, "N"] | None]
) -> Iterator[list[Assignment]]:
    """Put all that devices of one memory hold on one of them, which saves copies between them."""
    pool, groups = problem.cluster.pool, np.arange(problem.num_groups)
    for to in np.flatnonzero(pool >= 0).tolist():
        moves = (pool[group_device] == pool[to]) & problem.group_allowed[groups, to]
        device = expand(problem, np.where(moves, to, group_device))
        yield [Assignment(device, rank) for rank in ranks]


def _shedding(
    problem: Problem, group_device: Int[np.ndarray, "G"], ranks: list[Int[np.ndarray, "N"] | None]
) -> Iterator[list[Assignment]]:
    """Move groups off devices that the simulator finds overfull, again and again."""
    from gdp.methods.repair_kernels import shed

    a = arrays_of(problem)
    size, cache = _group_bytes(problem)
    near = np.zeros(problem.num_devices)
    capacity, shares = problem.cluster.memory_bytes.astype(float), a.pool >= 0
    for rank in ranks[:2]:
        now = group_device.copy()
        for attempt in range(_ROUNDS):
            peak = peaks(problem, expand(problem, now), rank).astype(float)
            # Every attempt sheds more than is strictly over: what moves brings copies with it.
            more = 1.0 + 0.1 * attempt
            excess = np.maximum(peak - capacity, 0.0) * more
            slack = np.maximum(capacity - peak, 0.0)
            shared = np.bincount(a.pool[shares], peak[shares], len(a.pool_bytes)) - a.pool_bytes
            over, room = np.maximum(shared, 0.0) * more, np.maximum(-shared, 0.0)
            order = np.arange(problem.num_groups) if attempt % 2 else np.argsort(-size)
            if not shed(a, now, size, cache, order, excess, slack, over, room, near):
                break
            yield [Assignment(expand(problem, now), r) for r in ranks]


def _packing(
    problem: Problem, ranks: list[Int[np.ndarray, "N"] | None]
) -> Iterator[list[Assignment]]:
    """Pack from scratch into the room that the activations of the last packing left."""
    from gdp.methods.repair_kernels import pack

    a = arrays_of(problem)
    size, cache = _group_bytes(problem)
    capacity, shares = problem.cluster.memory_bytes.astype(float), a.pool >= 0
    in_all = float(problem.cluster.room_bytes(np.ones(problem.num_devices, dtype=bool)))
    topological = np.arange(problem.num_groups)
    large = size > 0.02 * capacity.min()
    by_size = np.argsort(-size, kind="stable")
    mixed = np.concatenate([by_size[large[by_size]], topological[~large]])
    for order in (topological, mixed, by_size):
        # Weights spread evenly first: each device gets the same share of its memory.
        share = min(1.0, float((size + cache).sum()) / in_all)
        room, shared = capacity * share, a.pool_bytes * share
        for _ in range(_ROUNDS // 2):
            device = expand(problem, pack(a, order, room, shared))
            yield [Assignment(device, rank) for rank in ranks]
            peak = peaks(problem, device, ranks[-1]).astype(float)
            other = peak - weights_held(problem, device)
            room = np.maximum(capacity - other, 0.05 * capacity)
            others = np.bincount(a.pool[shares], other[shares], len(a.pool_bytes))
            shared = np.maximum(a.pool_bytes - others, 0.05 * a.pool_bytes)


def _group_bytes(problem: Problem) -> tuple[Float[np.ndarray, "G"], Float[np.ndarray, "G"]]:
    """(bytes freed at least by moving each group, its weights and outputs; remote caches)."""
    a, held = arrays_of(problem), group_held_bytes(problem).astype(float)
    size = held[0].copy()
    np.add.at(size, a.group[a.producer], a.held_bytes)
    return size, held[1:].sum(axis=0)
