"""Searches of several annealing chains, for problems whose memory limits leave many pockets.

Where memory is short, placements that fit lie apart: annealing enters the limits somewhere and
cannot always leave that corner, so that of the chains from one start some end several times slower
than the others.

Axes: N ops, G groups, D devices.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from gdp.base.clock import Clock
from gdp.bounds.work import shared_work_s
from gdp.methods.annealing.annealer import AnnealConfig, anneal, annealer_of, make_annealer
from gdp.methods.base import SEEDS, Assignment, Search, inner_seed
from gdp.methods.scoring import Evaluated, best_of, group_seconds, is_compiling
from gdp.methods.search.local_search import improve
from gdp.problem.problem import Problem
from gdp.problem.symmetry import classes_of, interchangeable

RESTART_FACTOR = 2.0
"""Times what the devices take for the work alone: beyond that `multi_restart` searches again."""
CHAINS = 3
"""Searches of `multi_restart`, at most."""
_STRIDE = 7919
"""Between the seeds of two chains."""
HOT_PERIOD = tuple(
    AnnealConfig(hot=0.4, cold=1e-3, first_steps=50_000, overflow_price=price, price_rise=rise)
    for price, rise in ((1.8, 2.0), (1.2, 5.0))
)
"""Of the chains of `anneal_from_hot_starts`, cyclically: temperatures and prices as shares of the
best value."""
_LATENCY_HEAT = (0.1, 0.03)  # as `AnnealConfig.hot`, of the chains, cyclically
_LATENCY_PRICE = 1.5  # as `AnnealConfig.overflow_price`; it stays as it is
_LATENCY_OPS = 2_000_000  # simulated by one chain of a large graph
_STEPS_PER_OP, _LEAST_STEPS = 100, 300  # of a chain, for small graphs and any
_FRESH = 12  # chains from the first placement; then children of the best
_PARENTS = 6
_CHILD_HEAT = 0.1  # of the temperature that a fresh chain begins with


@dataclass(frozen=True)
class ChainLimits:
    """Maximum number of chains, and of consecutive chains without an improvement."""

    chains: int = 8
    misses: int = 3


def hot_configs(problem: Problem) -> tuple[AnnealConfig, ...]:
    """Settings of the chains of `anneal_from_hot_starts`, cyclically."""
    if not annealer_of(problem).simulates:
        return HOT_PERIOD
    n = problem.num_ops
    steps = max(_LEAST_STEPS, min(_LATENCY_OPS // n, _STEPS_PER_OP * n))
    return tuple(
        AnnealConfig(hot=hot, cold=1e-3, first_steps=steps, overflow_price=_LATENCY_PRICE)
        for hot in _LATENCY_HEAT
    )


def anneal_from_hot_starts(
    problem: Problem,
    first: Evaluated,
    seed: int,
    clock: Clock,
    limits: ChainLimits = ChainLimits(),
) -> Evaluated:
    """The best of several chains that begin hot, at a low price of overflow.

    A chain that pays ten values for a device's memory never leaves its own pocket, and one that
    pays little to the end seldom fits; so the price of a period rises. After the first chains, all
    from `first`, others begin cooler from children of the best ends.

    Args:
        problem: To be placed.
        first: Placement that the fresh chains begin from.
        seed: Of the chains.
        clock: No chain begins once it is over.
        limits: Of the chains.
    """
    configs, rng = hot_configs(problem), np.random.default_rng(seed)
    best, spent, missed = first, first.evaluations, 0
    ends: list[Evaluated] = []
    for k in range(0 if is_compiling() else limits.chains):
        if clock.is_over() or missed == limits.misses:
            break
        start, heat = replace(first, evaluations=0), 1.0
        if k >= _FRESH and len(parents := best_ends(ends)) > 1:
            start, heat = crossover(problem, parents, rng), _CHILD_HEAT
        config = configs[k % len(configs)]
        # Shares of the start's value, though the chain is to end near the best.
        scale = best.value_s / max(start.value_s, 1e-30) if best.overflow_bytes == 0 else 1.0
        config = replace(
            config,
            hot=max(config.cold, config.hot * heat * scale),
            overflow_price=config.overflow_price * scale,
        )
        chain = make_annealer(problem, start, inner_seed(seed, k))
        anneal(chain, config.first_steps, config, clock, config.first_steps)
        spent += chain.evaluations + start.evaluations
        end = chain.best()
        if end.overflow_bytes == 0:
            ends.append(replace(end, evaluations=0))
        missed = 0 if end < best else missed + 1
        best = min(best, end)
    return replace(best, evaluations=spent)


def best_ends(ends: list[Evaluated]) -> list[Evaluated]:
    """The best few of the ends of chains, no two of one value."""
    distinct = {end.value_s: end for end in reversed(ends)}
    return sorted(distinct.values())[:_PARENTS]


def crossover(problem: Problem, parents: list[Evaluated], rng: np.random.Generator) -> Evaluated:
    """Each group on the device that one or the other of two parents has it on.

    Devices of a kind are renamed first so that the parents agree on as many ops as they can.

    Args:
        problem: To be placed.
        parents: Two at least; two of them are drawn.
        rng: Draws the parents and the groups.
    """
    mother, father = (parents[k] for k in rng.choice(len(parents), 2, replace=False))
    device = mother.assignment.device
    other = align_device_names(problem, father.assignment.device, device)
    taken = (rng.random(problem.num_groups) < 0.5)[problem.group]
    mixed = np.where(taken, other, device)
    return best_of(problem, [Assignment(mixed, mother.assignment.rank)])


def align_device_names(
    problem: Problem, device: Int[np.ndarray, "N"], like: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "N"]:
    """A placement, its devices of a kind renamed to agree with another one on most ops."""
    from scipy.optimize import linear_sum_assignment

    shared = np.zeros((problem.num_devices, problem.num_devices))
    np.add.at(shared, (device, like), 1.0)
    name = np.arange(problem.num_devices)
    for kind in classes_of(interchangeable(problem)):
        row, column = linear_sum_assignment(shared[np.ix_(kind, kind)], maximize=True)
        name[np.array(kind)[row]] = np.array(kind)[column]
    return name[device]


def multi_restart(problem: Problem, first: Evaluated, search: Search, clock: Clock) -> Evaluated:
    """The best of up to `CHAINS` searches from one placement, each with all of the evaluations.

    Another is begun while the best takes over `RESTART_FACTOR` times as long as all work, shared
    out at will, and the clock is not over. For objectives whose value is a period or a load.
    """
    least_s = shared_work_s(group_seconds(problem))[0]
    best, spent = first, 0
    for k in range(CHAINS):
        chain = replace(search, seed=(search.seed + k * _STRIDE) % SEEDS)
        candidate = improve(problem, [replace(first, evaluations=0)], chain, clock)
        spent += candidate.evaluations
        best = min(best, candidate)
        if clock.is_over() or (
            best.overflow_bytes == 0 and best.value_s <= RESTART_FACTOR * least_s
        ):
            break
    return replace(best, evaluations=first.evaluations + spent)
