"""Chains of down-sets with every stage below a target: whether there is one, and the best one.

The same loop over pairs runs in two forms. One asks only whether stages below a target exist: a bit
per state (devices used of each class), and that is usually all there is to ask, because no pipeline
is better than the best along some linear order. The other finds the least dearest stage.

Axes as in `gdp.methods.lattice`.
"""

import logging
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt

from gdp.methods.base import Clock
from gdp.methods.lattice import Lattice, Sets, as_bits, scratch
from gdp.methods.stage_costs import StageCosts
from gdp.methods.windows import make_windows

_log = logging.getLogger(__name__)

_CHUNK = 512  # down-sets between two looks at the clock
_EVERY_STATE = ~np.uint64(0)


class Span(NamedTuple):
    """One stage."""

    elements: Int[np.ndarray, "X"]
    device_class: int
    cost_s: float


@dataclass(frozen=True)
class Limits:
    """When to give up."""

    clock: Clock
    most_seen: int  # down-sets of the graph
    most_bytes: int  # for the down-sets that are kept, and the values of their states


@dataclass(frozen=True)
class Found:
    """What a run found."""

    spans: list[Span] | None  # stages below the target, first to last; None: none found
    is_certain: bool  # no limit was met: None means that there are none
    seen: int  # down-sets
    pairs: int  # stages whose cost was computed


def chain_below(lat: Lattice, costs: StageCosts, target_s: float, limits: Limits) -> Found:
    """Any stages that each take less than the target."""
    from gdp.methods.reach_kernels import push_states

    sets, found = _collect(lat, costs, target_s, limits)
    if sets is None:
        return found
    opened, pairs = scratch(lat), 0
    reached, missing = np.zeros_like(sets.window), sets.window.copy()
    reached[0] = _EVERY_STATE
    for first in range(0, len(sets.bits), _CHUNK):
        if limits.clock.is_over():
            return Found(None, False, found.seen, pairs)
        pairs += push_states(lat, sets, opened, target_s, first, first + _CHUNK, reached, missing)
        if reached[-1].any():
            spans = _trace(lat, sets, target_s, reached)
            return Found(spans, True, found.seen, pairs)
    return Found(None, True, found.seen, pairs)


def best_chain(lat: Lattice, costs: StageCosts, target_s: float, limits: Limits) -> Found:
    """The stages of least dearest stage, if that is below the target."""
    from gdp.methods.stage_kernels import push_values

    sets, found = _collect(lat, costs, target_s, limits)
    if sets is None:
        return found
    opened, pairs = scratch(lat), 0
    best = np.full((len(sets.bits), len(lat.following)), np.inf)
    best[0, 0] = 0.0
    for first in range(0, len(sets.bits), _CHUNK):
        if limits.clock.is_over():
            return Found(None, False, found.seen, pairs)
        pairs += push_values(lat, sets, opened, target_s, first, first + _CHUNK, best)
    least_s = float(best[-1].min())
    if not least_s < target_s:
        return Found(None, True, found.seen, pairs)
    spans = _trace(lat, sets, float(np.nextafter(least_s, np.inf)), as_bits(best <= least_s))
    return Found(spans, True, found.seen, pairs)


def _collect(
    lat: Lattice, costs: StageCosts, target_s: float, limits: Limits
) -> tuple[Sets | None, Found]:
    """The down-sets that stages below the target can meet, or what to answer without them."""
    from gdp.methods.lattice_kernels import enumerate_down_sets

    windows = make_windows(lat, costs, target_s)
    words = lat.num_words + 3 * windows.words + 3 * lat.num_rows + 2 * len(costs.devices) + 8
    most_kept = limits.most_bytes // (8 * (words + len(lat.following)))
    status, seen, *arrays = enumerate_down_sets(lat, windows, limits.most_seen, most_kept)
    if status:
        return None, Found(None, False, seen, 0)
    sets = _sort(lat, costs, *arrays)
    _log.debug("target %.6g s: %d of %d down-sets", target_s, len(arrays[0]), seen)
    return sets, Found(None, True, seen, 0)


def _sort(
    lat: Lattice,
    costs: StageCosts,
    bits: UInt[np.ndarray, "n W"],
    window: UInt[np.ndarray, "n V"],
    base: np.ndarray,
    size: Int[np.ndarray, "n"],
) -> Sets | None:
    """Down-sets by work, then size: a subset has at most as much of both, to the last bit."""
    from gdp.methods.stage_kernels import totals

    if len(bits) == 0:
        return None
    fastest_s = np.where(costs.barred, np.inf, costs.work_s).min(axis=0)
    least_s = totals(bits, fastest_s[None])[:, 0]
    order = np.lexsort((size, least_s))
    if size[order[0]] != 0 or size[order[-1]] != lat.num_elements:
        return None
    bits, window = bits[order], window[order]
    states = np.arange(len(lat.following))
    of_state = window[:, states >> 6] >> (states & 63).astype(np.uint64) & np.uint64(1)
    first = np.where(of_state.any(axis=0), of_state.argmax(axis=0), len(bits))
    last = np.where(of_state.any(axis=0), len(bits) - 1 - of_state[::-1].argmax(axis=0), -1)
    return Sets(
        bits=bits,
        window=window,
        base=base[order],
        least_s=least_s[order],
        work_s=totals(bits, costs.work_s),
        barred=totals(bits, costs.barred.astype(np.int64)),
        held=totals(bits, lat.held_bytes[None])[:, 0],
        first=first,
        last=last,
    )


def _trace(
    lat: Lattice, sets: Sets, target_s: float, reached: UInt[np.ndarray, "n V"]
) -> list[Span]:
    """The stages that lead to the full down-set."""
    from gdp.methods.stage_kernels import trace_back

    ends, classes, costs = trace_back(lat, sets, scratch(lat), target_s, reached)
    element = np.arange(lat.num_elements)
    shift = (element & 63).astype(np.uint64)
    spans: list[Span] = []
    before = np.zeros(lat.num_elements, dtype=bool)
    for end, c, cost_s in zip(ends[::-1], classes[::-1], costs[::-1], strict=True):
        inside = (sets.bits[end][element >> 6] >> shift & np.uint64(1)).astype(bool)
        spans.append(Span(element[inside & ~before], int(c), float(cost_s)))
        before = inside
    return spans
