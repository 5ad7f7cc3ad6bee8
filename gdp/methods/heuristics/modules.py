"""Whole modules: layers of the model by their module paths, in stretches and round-robin."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.base.clock import Clock
from gdp.graph.groups import inverse, merge_ids, sum_per_group
from gdp.methods.annealing.annealer import AnnealConfig, anneal, make_annealer
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.heuristics.blocks import device_orders, folded_place
from gdp.methods.priorities import rank_under, rules_of
from gdp.methods.repair import repair_and_select
from gdp.methods.scoring import (
    Evaluated,
    best_of,
    compile_once,
    expand,
    group_seconds,
    nearest_allowed,
)
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, cached_on_problem

MOST = 256
"""Modules of a level, at most; a finer level is not tried."""
PLACED = 300_000
"""Ops placed by all plans together, at most, and at least `FEWEST` plans."""
FEWEST = 8
STEPS = 100
"""Of annealing at each level, on graphs of up to `PLACED / STEPS` ops; fewer on larger ones."""


class Level(NamedTuple):
    """Modules of one level, in the order of their first use, and what holds them."""

    module: Int[np.ndarray, "N"]
    families: list[Int[np.ndarray, "M"]]  # larger modules, and first the model as one


def modules(problem: Problem, search: Search) -> Answer:
    """Modules as wholes, forward and backward together; the best of a few plans simulated.

    A module is what shares the first parts of its path, and what shares weights with it: the steps
    of an unrolled layer are one module; in a model without names every op is one. A level is how
    many parts are read; each of at most `MOST` modules is tried, from the coarsest. On D, D / 2,
    ... 2 devices: stretches of modules of most equal seconds (the least sum of squares: exact,
    O(M^2 D)), over the whole model or over the members of each larger module apart (an encoder's
    layers and a decoder's, side by side); and modules round-robin. A short annealing of each level
    follows from the best. Where layers run concurrently, as in recurrent models, people place so.
    """
    if not levels(problem):
        return Answer(None, reason=f"the model has no level of 2 to {MOST} modules")
    compile_once("modules", modules, problem.objective)
    clock = search.budget()
    best = best_of(problem, module_assignments(problem), clock)
    for level in levels(problem):
        best = _searched(problem, level, best, clock, search.seed)
    answer = repair_and_select(problem, search, [best.assignment], "modules", clock)
    return replace(answer, evaluations=answer.evaluations + best.evaluations)


def _searched(
    problem: Problem, level: Level, start: Evaluated, clock: Clock, seed: int
) -> Evaluated:
    """The best of a short annealing that moves modules of one level; at worst the start."""
    steps = min(STEPS, PLACED // problem.num_ops)
    tied = replace(problem, group=merge_ids(problem.group, level.module))
    may = tied.group_allowed.sum(axis=1)
    if not may.all() or (may <= 1).all() or steps < FEWEST:
        return start
    chain = make_annealer(tied, start, seed)
    anneal(chain, steps, AnnealConfig(), clock, steps)
    best = min(start, chain.best())
    return replace(best, evaluations=start.evaluations + chain.evaluations)


def module_assignments(problem: Problem) -> Iterator[Assignment]:
    """The assignments that `modules` chooses from, the coarsest level first, under every rule."""
    seen: set[bytes] = set()
    most = max(FEWEST, PLACED // problem.num_ops)
    plans = ((level, plan) for level in levels(problem) for plan in _plans(problem, level))
    for level, module_device in plans:
        group_device = np.zeros(problem.num_groups, dtype=np.int64)
        group_device[problem.group] = module_device[level.module]
        device = expand(problem, nearest_allowed(problem, group_device))
        key = device.astype(np.uint8).tobytes()
        if key not in seen:
            seen.add(key)
            for rule in rules_of(problem):
                yield Assignment(device, rank_under(problem, device, rule))
        if len(seen) >= most:
            return


@cached_on_problem
def levels(problem: Problem) -> list[Level]:
    """The levels of at most `MOST` modules that differ, coarsest first."""
    paths = [path_of(scope) for scope in problem.graph.scope]
    place, io = folded_place(problem), problem.graph.is_io
    place = np.where(io, np.inf, place)
    kept: list[Level] = []
    for depth in range(1, 1 + max(1, *map(len, paths))):
        module = merge_ids(problem.group, _labels(problem, [path[:depth] for path in paths]))
        first = np.full(module.max() + 1, np.inf)
        np.minimum.at(first, module, place)
        count = int(np.isfinite(first).sum())
        if count > MOST:
            break
        module = inverse(np.argsort(first, kind="stable"))[module]
        if count < 2 or (kept and module.max() == kept[-1].module.max()):
            continue
        order = np.argsort(place, kind="stable")
        leader = order[np.unique(module[order], return_index=True)[1]]
        within = [_numbers([paths[op][:above] for op in leader]) for above in range(depth)]
        kept.append(Level(module, within))
    return kept


def _numbers(paths: list[tuple[str, ...]]) -> Int[np.ndarray, "K"]:
    """A number for each path, the same for equal ones."""
    ids = {path: k for k, path in enumerate(dict.fromkeys(paths))}
    return np.array([ids[path] for path in paths], dtype=np.int64)


def path_of(scope: str) -> tuple[str, ...]:
    """The parts of a module path, which frameworks join by dots or slashes.

    >>> path_of("decoder/layer.0")
    ('decoder', 'layer', '0')
    """
    return tuple(part for part in scope.replace("/", ".").split(".") if part)


def _labels(problem: Problem, paths: list[tuple[str, ...]]) -> Int[np.ndarray, "N"]:
    """A number of every op's path; an op without one joins the maker of its largest input."""
    if not any(paths):
        return np.arange(len(paths))
    a = arrays_of(problem)
    label = _numbers(paths)
    io = np.flatnonzero(problem.graph.is_io)
    label[io] = len(paths) + io
    for op in np.flatnonzero(~problem.graph.is_io & np.array([not path for path in paths])):
        read = a.in_tensor[a.in_start[op] : a.in_start[op + 1]]
        read = read[~problem.graph.is_io[a.producer[read]]]
        if len(read):
            label[op] = label[a.producer[read[a.sent_bytes[read].argmax()]]]
        else:
            label[op] = len(paths) + op
    return label


def _plans(problem: Problem, level: Level) -> Iterator[Int[np.ndarray, "M"]]:
    """A device for every module."""
    count = int(level.module.max()) + 1
    by_group = group_seconds(problem)
    module_of = np.empty(problem.num_groups, dtype=np.int64)
    module_of[problem.group] = level.module
    seconds = sum_per_group(np.where(np.isfinite(by_group), by_group, 0.0), module_of)
    for order in device_orders(problem):
        used = 2 * min(problem.num_devices, count)
        while (used := used // 2) > (problem.num_devices > 1):
            for family in level.families:
                yield _stretches(seconds, family, order[:used])
            yield order[np.arange(count) % used]


def _stretches(
    seconds: Float[np.ndarray, "M D"], family: Int[np.ndarray, "M"], order: Int[np.ndarray, "K"]
) -> Int[np.ndarray, "M"]:
    """The modules of each family in stretches along the devices, of least sum of squared seconds.

    >>> _stretches(np.array([[3.0] * 2, [1.0] * 2, [1.0] * 2]), np.zeros(3, int), np.arange(2))
    array([0, 1, 1])
    """
    device = np.empty(len(family), dtype=np.int64)
    for members in (np.flatnonzero(family == k) for k in np.unique(family)):
        count = len(members)
        sums = np.concatenate(
            [np.zeros((1, len(order))), seconds[members][:, order].cumsum(axis=0)]
        )
        least, cut = np.full(count + 1, np.inf), np.zeros((len(order), count + 1), dtype=np.int64)
        least[0] = 0.0
        for j in range(len(order)):
            load = np.maximum(sums[None, :, j] - sums[:, None, j], 0.0)  # [from, to]
            tried = np.where(np.tri(count + 1).T > 0, least[:, None] + load**2, np.inf)
            cut[j], least = tried.argmin(axis=0), tried.min(axis=0)
        end = count
        for j in range(len(order) - 1, -1, -1):
            begin = int(cut[j, end])
            device[members[begin:end]] = order[j]
            end = begin
    return device
