"""Tensor-parallel plans for PyTorch: choice of devices, and shares in whole key-value heads.

Shares are numbers of heads, so that planned and executed shares are equal. The first ones are
proportional to the speed of each device; then a head moves from one device to another as long as
the simulated value falls.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from gdp.base.errors import ArgumentError, InfeasibleError, ModelError
from gdp.cluster.machines import in_order_of_machines, machines
from gdp.costs.offload import resident
from gdp.placement.constraints import allowed_mask
from gdp.placement.placement import Placement, Split, make_placement
from gdp.question import solve
from gdp.question.prepare import problem_of
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.splits.division import Pieces
from gdp.splits.members import known_division, why_undivided
from gdp.splits.sharding import in_whole_units
from gdp.targets.rows import misfit
from gdp.targets.simulated import Simulated, simulated

MOVES = 32
"""Maximum number of divisions simulated for one set of devices."""


def plan_tensor_parallel(question: Question) -> Result:
    """The best of the whole model on one device, and of divisions among the fastest devices.

    Accelerators alone are considered where there are any, else processors: one library of
    collectives serves one kind.

    Raises:
        InfeasibleError: Nothing fits.
    """
    constraints = question.constraints
    if question.granularity not in (None, "op") or constraints.together or constraints.whole:
        raise ArgumentError(
            "--for tensor-parallel divides every op: leave out --granularity and --together"
        )
    question = replace(question, cluster=resident(question.cluster))
    allowed = allowed_mask(question.constraints, question.graph, question.cluster)
    allowed = allowed[~question.graph.is_io].all(axis=0) & question.cluster.computes
    free = np.flatnonzero(allowed).tolist()
    if not free:
        raise InfeasibleError("the constraints leave no device for all ops; relax a pin")
    usable = [d for d in free if d in question.cluster.gpus] or free
    problem = problem_of(question)
    alone_s = np.where(problem.graph.is_io[:, None], 0.0, problem.compute_s).sum(axis=0)
    at, here = machines(question.cluster), question.cluster.host
    order = sorted(usable, key=lambda d: (alone_s[d], at[d] != at[here], at[d], d))
    tried = [simulated(question, _placed(question, d, ())) for d in order]
    why = why_undivided(question.graph)
    for count in range(2, len(order) + 1) if not why else ():
        if in_order_of_machines(question.cluster, sorted(order[:count])):
            tried += _divided(question, sorted(order[:count]), alone_s)
    fitting = [one for one in tried if one.score.feasible]
    if not fitting:
        raise misfit(question, str(min(tried, key=lambda one: one.score.overflow_bytes).score))
    best = min(fitting, key=lambda one: one.score.value_s)
    result = solve.evaluate(question, best.placement)
    alone = [one for one in fitting if not one.placement.splits]
    return replace(
        result, method="tensor-parallel", notes=(*result.notes, _told(best, alone, why)),
        candidates=tuple(one.candidate(_name(one.placement)) for one in _best_of_each(tried)),
    )  # fmt: skip


def _devices(placement: Placement) -> tuple[int, ...]:
    """Ranks of the group, or the one device that has all."""
    if not placement.splits:
        return (int(np.bincount(placement.device).argmax()),)
    return placement.splits[0].devices


def _name(placement: Placement) -> str:
    """The devices and their shares in words."""
    names = [placement.device_names[d] for d in _devices(placement)]
    if not placement.splits:
        return f"all on {names[0]}"
    return f"{'+'.join(names)} as {':'.join(map(str, placement.splits[0].parts))}"


def _placed(question: Question, lead: int, splits: tuple[Split, ...]) -> Placement:
    graph, cluster = question.graph, question.cluster
    device = np.where(graph.is_io, cluster.host, lead)
    return make_placement(graph, cluster, device, made_by="gdp tensor-parallel", splits=splits)


def _divided(
    question: Question, devices: Sequence[int], alone_s: np.ndarray
) -> Iterator[Simulated]:
    """Divisions among some devices: equal shares, shares by speed, and local moves of one head."""
    heads = min(
        unit.keys for unit in known_division(question.graph).units
        if unit.kind in (Pieces.HEADS, Pieces.KEYS, Pieces.BOTH)
    )  # fmt: skip
    seen: dict[tuple[int, ...], Simulated | None] = {}

    def tried(shares: tuple[int, ...]) -> Simulated | None:
        if shares not in seen:
            split = Split(tuple(devices), shares=shares)
            try:
                seen[shares] = simulated(question, _placed(question, devices[0], (split,)))
            except ModelError:  # a member has no whole piece
                seen[shares] = None
        return seen[shares]

    # More devices than heads of keys have copies of them, which equal shares alone allow.
    each = max(1, heads // len(devices))
    starts = [(each,) * len(devices)]
    if heads >= len(devices):
        starts.append(in_whole_units([1.0 / alone_s[d] for d in devices], heads))
    found = [(one, shares) for shares in starts if (one := tried(shares)) is not None]
    best, shares = min(found, key=lambda pair: pair[0].rank, default=(None, ()))
    while best is not None and len(seen) < MOVES and sum(shares) == heads:
        moved = [(one, own) for own in one_head_moved(shares) if (one := tried(own)) is not None]
        better, own = min(moved, key=lambda pair: pair[0].rank, default=(best, shares))
        if better.rank >= best.rank:
            break
        best, shares = better, own
    yield from filter(None, seen.values())


def one_head_moved(shares: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All shares with one head moved from a device that has several to another."""
    for i, j in itertools.permutations(range(len(shares)), 2):
        if shares[i] > 1:
            moved = list(shares)
            moved[i] -= 1
            moved[j] += 1
            yield tuple(moved)


def _best_of_each(tried: Sequence[Simulated]) -> list[Simulated]:
    """The best of each set of devices, for the table."""
    best: dict[tuple[int, ...], Simulated] = {}
    for one in tried:
        devices = _devices(one.placement)
        best[devices] = min(best.get(devices, one), one, key=lambda one: one.rank)
    return list(best.values())


def _told(best: Simulated, alone: Sequence[Simulated], why: str) -> str:
    """The answer compared with the best of one device, in a sentence."""
    if why:
        return f"ops stay whole on one device: {why}"
    if not best.placement.splits:
        return "no division among devices is faster than one device"
    if not alone:
        return f"{_name(best.placement)}: no device alone has memory for the model"
    gain = min(one.score.value_s for one in alone) / best.score.value_s
    return f"{_name(best.placement)}: {gain:.2f} times as fast as the best device alone"
