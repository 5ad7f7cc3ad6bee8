"""Chains of down-sets with every stage below a target: the best one.

Axes as in `gdp.methods.pipeline.lattice`.
"""

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt

from gdp.base.clock import Clock
from gdp.methods.pipeline.lattice import (
    DownSets,
    Lattice,
    PairScratch,
    StageProgram,
    open_edges_scratch,
    pair_scratch,
)
from gdp.methods.pipeline.stage_costs import StageCosts

_log = logging.getLogger(__name__)

_WALK_STEPS = 20_000_000  # between two looks at the clock, in prices of states
_PAIR_STEPS = 50_000_000  # the same, in pairs that are evaluated
_PAIR_S, _SET_S = 5e-9, 5e-7  # of an idle core, counted: a pair that is evaluated, a down-set
_MOST_KEPT = 400_000  # their pairs take minutes


class PipelineStage(NamedTuple):
    """One stage, with its devices and cost."""

    elements: Int[np.ndarray, "X"]
    group: int  # of the program's groups
    cost_s: float


@dataclass(frozen=True)
class Limits:
    """Limits of a run."""

    clock: Clock
    most_seen: int  # down-sets of the graph
    most_bytes: int  # for the down-sets that are kept, and the values of their states


@dataclass(frozen=True)
class DownSetsAnswer:
    """The stages of a run, and how certain they are."""

    stages: list[PipelineStage] | None  # stages below the target, first to last; None: none found
    is_certain: bool  # no limit was met: None means that there are none, and the best is the best
    seen: int  # down-sets


def cost_of(stages: list[PipelineStage] | None) -> float:
    """Seconds of the dearest stage; inf without any pipeline."""
    return np.inf if stages is None else max((stage.cost_s for stage in stages), default=0.0)


def best_chain(program: StageProgram, target_s: float, limits: Limits) -> DownSetsAnswer:
    """Find the stages whose dearest is cheapest, if that is below the target.

    Where a limit is met, the best stages by then.
    """
    from gdp.methods.pipeline.down_sets_kernels import push_values

    lat = program.lat
    sets, collected = _collect(program, target_s, limits)
    if sets is None:
        return collected
    n, is_certain = len(sets.bits), True
    opened, room = open_edges_scratch(lat), pair_scratch(lat, n)
    best = np.full((n, len(lat.following)), np.inf)
    best[0, 0] = 0.0
    at_once = max(1, _PAIR_STEPS // n)
    for first in range(0, n, at_once):
        if limits.clock.is_over():
            is_certain = False
            break
        push_values(lat, sets, opened, room, target_s, first, first + at_once, best)
        limits.clock.charge(min(at_once, n - first) * n * _PAIR_S)
    least_s = float(best[-1].min())
    if not least_s < target_s:
        return DownSetsAnswer(None, is_certain, collected.seen)
    stages = _trace(lat, sets, room, float(np.nextafter(least_s, np.inf)), best)
    return DownSetsAnswer(stages, is_certain, collected.seen)


def _collect(
    program: StageProgram, target_s: float, limits: Limits
) -> tuple[DownSets | None, DownSetsAnswer]:
    """The down-sets that stages below the target can meet; None, with the answer, without any."""
    from gdp.methods.pipeline.lattice_kernels import FULL, OVER, KeptSets, start_walk, walk_on

    lat, costs, windows = program.lat, program.costs, program.windows(target_s)
    words = lat.num_words + 3 * windows.words + 3 * lat.num_rows + 2 * len(costs.devices) + 8
    most_kept = min(_MOST_KEPT, limits.most_bytes // (8 * (words + len(lat.following))))
    walk, status = start_walk(lat, windows), FULL
    at_once = max(100, _WALK_STEPS // (100 + windows.used_row.size))
    kept = KeptSets(
        bits=np.zeros((0, lat.num_words), dtype=np.uint64),
        window=np.zeros((0, windows.words), dtype=np.uint64),
        base=np.zeros((0, lat.num_rows)),
        size=np.zeros(0, dtype=np.int64),
    )
    while status != OVER:
        seen, room = int(walk.at[2]), len(kept.size)
        given_up = limits.clock.is_over() or seen > limits.most_seen
        if given_up or (status == FULL and room >= most_kept):
            return None, DownSetsAnswer(None, False, seen)
        if status == FULL:
            more = min(most_kept, max(1024, 2 * room)) - room
            kept = KeptSets(
                *(np.append(x, np.zeros((more, *x.shape[1:]), x.dtype), axis=0) for x in kept)
            )
        status = walk_on(lat, windows, walk, kept, at_once)
        limits.clock.charge((int(walk.at[2]) - seen) * _SET_S)
    count, seen = int(walk.at[3]), int(walk.at[2])
    sets = _sort(lat, costs, *(array[:count] for array in kept))
    _log.debug("target %.6g s: %d of %d down-sets", target_s, count, seen)
    return sets, DownSetsAnswer(None, True, seen)


def _sort(
    lat: Lattice,
    costs: StageCosts,
    bits: UInt[np.ndarray, "I W"],
    window: UInt[np.ndarray, "I V"],
    base: np.ndarray,
    size: Int[np.ndarray, "I"],
) -> DownSets | None:
    """Down-sets by work, then size: a subset has at most as much of both, to the last bit."""
    if len(bits) == 0:
        return None
    fastest_s = np.where(costs.barred, np.inf, costs.work_s).min(axis=0)
    least_s = _totals(bits, fastest_s[None])[:, 0]
    order = np.lexsort((size, least_s))
    if size[order[0]] != 0 or size[order[-1]] != lat.num_elements:
        return None
    bits, window = bits[order], window[order]
    states = np.arange(len(lat.following))
    of_state = window[:, states >> 6] >> (states & 63).astype(np.uint64) & np.uint64(1)
    first = np.where(of_state.any(axis=0), of_state.argmax(axis=0), len(bits))
    last = np.where(of_state.any(axis=0), len(bits) - 1 - of_state[::-1].argmax(axis=0), -1)
    return DownSets(
        bits=bits,
        window=window,
        base=base[order],
        least_s=np.ascontiguousarray(least_s[order]),
        work_s=_totals(bits, costs.work_s),
        barred=_totals(bits, costs.barred.astype(np.int64)),
        held=np.ascontiguousarray(_totals(bits, lat.held_bytes[None])[:, 0]),
        first=first,
        last=last,
    )


def _totals(bits: UInt[np.ndarray, "I W"], values: np.ndarray) -> np.ndarray:
    """Sums of values [K, M] over each down-set: [n, K]."""
    from gdp.methods.pipeline.down_sets_kernels import add_totals

    total = np.zeros((len(bits), len(values)), dtype=values.dtype)
    add_totals(np.ascontiguousarray(bits), np.ascontiguousarray(values), total)
    return total


def _trace(
    lat: Lattice,
    sets: DownSets,
    room: PairScratch,
    target_s: float,
    best: Float[np.ndarray, "I S"],
) -> list[PipelineStage]:
    """The stages that lead to the full down-set."""
    from gdp.methods.pipeline.down_sets_kernels import trace_back

    most = int(lat.count.sum())  # a stage takes a device
    ends, groups = np.zeros(most, dtype=np.int64), np.zeros(most, dtype=np.int64)
    costs_s = np.zeros(most)
    count = trace_back(
        lat, sets, open_edges_scratch(lat), room, target_s, best, ends, groups, costs_s
    )
    if count < 0:
        raise RuntimeError("the stages of a pipeline could not be traced back")
    element = np.arange(lat.num_elements)
    shift = (element & 63).astype(np.uint64)
    stages: list[PipelineStage] = []
    before = np.zeros(lat.num_elements, dtype=bool)
    for k in range(count - 1, -1, -1):
        inside = (sets.bits[ends[k]][element >> 6] >> shift & np.uint64(1)).astype(bool)
        stages.append(PipelineStage(element[inside & ~before], int(groups[k]), float(costs_s[k])))
        before = inside
    return stages
