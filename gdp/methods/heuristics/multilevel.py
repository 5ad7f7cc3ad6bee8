"""Heuristics on coarser and coarser graphs: what they decide for a group of ops holds for its ops.

A heuristic that decides op by op cannot see that a stretch of the graph belongs together; on the
graph of the stretches it can see nothing else. A coarse problem has groups of ops that are moved
and simulated as one, and the way back. Axes: N ops, M coarse ops, V uses.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from gdp.base.errors import MissingExtraError
from gdp.graph.groups import alike, inverse
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.heuristics.blocks import block_assignments
from gdp.methods.heuristics.list_schedule import (
    critical_path_assignments,
    etf_assignments,
    heft_assignments,
)
from gdp.methods.heuristics.metis import metis_assignments, pymetis_library
from gdp.methods.priorities import evaluate_rules, upward_rank
from gdp.methods.repair import repair_and_select
from gdp.methods.scoring import Evaluated, compile_once, is_compiling, score_all
from gdp.problem.arrays import arrays_of, launches_with_dispatch
from gdp.problem.problem import Problem, cached_on_problem, contracted
from gdp.sim.objectives import memory_binds, objective_of

_MOST_LEFT = 0.75  # a coarse problem has at most this share of the ops


@dataclass(frozen=True, eq=False)
class Coarse:
    """A contraction of a problem. Axes: N ops, M coarse ops."""

    problem: Problem
    part_of: Int[np.ndarray, "N"]  # the coarse op that holds each op
    work_s: Float[np.ndarray, "N"]  # mean compute of each op

    def project(self, problem: Problem, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "M"]:
        """The coarse placement nearest to a fine one: for each group, where most of its work is."""
        group = self.problem.group[self.part_of]
        share = np.zeros((self.problem.num_groups, problem.num_devices))
        np.add.at(share, (group, device), self.work_s + 1e-12)
        share = np.where(self.problem.group_allowed, share, -1.0)
        return share.argmax(axis=1)[self.problem.group]

    def expand_all(self, problem: Problem, assignment: Assignment) -> list[Assignment]:
        """Fine placements of a coarse one, with different priorities."""
        device = assignment.device[self.part_of]
        ranks: list[Int[np.ndarray, "N"] | None] = [None]
        if objective_of(problem).ordered:
            ranks.append(upward_rank(problem))
            if assignment.rank is not None:
                by_part = np.lexsort((np.arange(problem.num_ops), assignment.rank[self.part_of]))
                ranks.append(inverse(by_part))
        return [Assignment(device, rank) for rank in ranks]


def coarsened(
    problem: Problem, max_ops: int, near: Float[np.ndarray, "V"] | None = None
) -> Coarse | None:
    """The problem over at most `max_ops` coarse ops, where possible; None where little is gained.

    `near`, where given, says of every use of a tensor how much its ends belong together. Ops that
    differ in where they may run are kept apart, groups that must share a device stay so. A coarse
    op takes the time of its ops, dispatch included; dispatch per segment is counted once for each
    coarse op that opens a segment. A guide for search, never a score.
    """
    from gdp.graph.fuse import coarsen

    a = arrays_of(problem)
    apart = alike(*np.packbits(problem.group_allowed, axis=1).T)[1][problem.group]
    graph = dataclasses.replace(problem.graph, colocate=problem.group)
    merged = coarsen(graph, max_ops, apart=apart, near=near)
    if merged.graph.num_ops > _MOST_LEFT * problem.num_ops:
        return None
    # Dispatch per op is in the sums already.
    cluster = problem.cluster.with_dispatch(problem.cluster.segment_dispatch_s)
    coarse = contracted(
        problem, merged.graph, merged.group_of, compute_s=a.compute_s, cluster=cluster,
        launches=launches_with_dispatch(problem),
    )  # fmt: skip
    if not (coarse.group_allowed.sum(axis=1) > 1).any():
        return None
    mean_s = np.where(problem.allowed, a.compute_s, 0.0).sum(axis=1) / problem.allowed.sum(axis=1)
    return Coarse(coarse, merged.group_of, mean_s)


def agreement(graph: OpGraph, parents: Sequence[Int[np.ndarray, "N"]]) -> Float[np.ndarray, "V"]:
    """The share of the placements that leave maker and reader of each use on one device."""
    maker, device = graph.producer[graph.use_tensor], np.stack(parents)
    return (device[:, maker] == device[:, graph.use_op]).mean(axis=0)


@cached_on_problem
def coarse_problem(problem: Problem, max_ops: int) -> Coarse | None:
    """`coarsened`, kept in the problem."""
    return coarsened(problem, max_ops)


LEAST = 16
"""Coarse ops of a level, at least."""
KEPT = 8
"""Different placements of each level that are tried on the whole graph."""
TRIALS = 12
"""Plans of `critical_path` on each level."""
FIRST = (2, 8)
"""The finest level has 1/2 of the ops; where placements are recombined, 1/8."""
LEVEL_OP_S = 6e-5
"""Seconds of an idle core in which an op of the graph is placed on the finest level, roughly; where
fewer are left, the first level is the one on which placements are recombined elsewhere."""
RECOMBINED = 1000
"""Ops from which placements are recombined; with fewer it gains where memory is short alone."""


def multilevel(problem: Problem, search: Search) -> Answer:
    """Blocks, HEFT, ETF, critical path and METIS on graphs of 1/2, 1/4, ... of the ops; the best.

    Each graph is the one before with its ops joined in pairs and more (`gdp.graph.fuse.coarsen`),
    as METIS coarsens for cuts (Karypis and Kumar 1998, doi 10.1137/S1064827595287997), but acyclic
    (Herrmann et al. 2019, doi 10.1137/18M1176865) and with the simulator as the judge: of every
    level the `KEPT` best are simulated on the whole graph, under all rules of priority. Where the
    graph is large or memory short, the same once more on graphs of 1/8, 1/16, ... of the ops in
    which what the two best placements leave together is joined first: a recombination, as of
    Sanders and Schulz 2012, doi 10.1137/1.9781611972924.2. METIS only where pymetis is installed.
    As many levels as the clock allows, from the finest on, or from 1/8 where seconds are too few
    for that (`LEVEL_OP_S`); a graph that has no coarser one is its own level.
    """
    compile_once("multilevel", multilevel, problem.objective)
    clock, spent = search.budget(), 0
    least = 1 if is_compiling() else LEAST
    pool: list[Evaluated] = []
    again = problem.num_ops >= RECOMBINED or memory_binds(problem)
    limit_s = clock.limit_s()
    short = limit_s is not None and limit_s < LEVEL_OP_S * problem.num_ops
    for first in FIRST[1:] if short else FIRST if again else FIRST[:1]:
        parents = [scored.assignment.device for scored in pool]
        for small, part_of in levels(problem, problem.num_ops // first, least, parents):
            if parents and small is problem:
                break
            devices, tried = _best_of_level(small, search.seed)
            evaluated = _rated(problem, devices[:, part_of])
            pool = _two_best([*pool, *evaluated])
            spent += tried + evaluated[0].evaluations
            if clock.is_over():
                break
        if clock.is_over() or len(pool) < 2:
            break
    answer = repair_and_select(problem, search, [pool[0].assignment], "multilevel", clock)
    return replace(answer, evaluations=answer.evaluations + spent)


def levels(
    problem: Problem, most: int, least: int, parents: Sequence[Int[np.ndarray, "N"]] = ()
) -> Iterator[tuple[Problem, Int[np.ndarray, "N"]]]:
    """(the coarse problem, the coarse op that holds each op), from `most` to `least` ops.

    The problem itself where nothing is coarser.
    """
    small, part_of = problem, np.arange(problem.num_ops)
    while most >= least:
        near = agreement(small.graph, parents) if parents else None
        coarse = coarsened(small, most, near)
        if coarse is not None:
            parents = [coarse.project(small, device) for device in parents]
            small, part_of = coarse.problem, coarse.part_of[part_of]
            yield small, part_of
        most //= 2
    if small is problem:
        yield small, part_of


def _best_of_level(problem: Problem, seed: int) -> tuple[Int[np.ndarray, "K M"], int]:
    """(the best different placements by the coarse problem itself, simulations)."""
    scored = score_all(problem, list(_assignments(problem, seed)))
    kept: list[Int[np.ndarray, "M"]] = []
    for entry in sorted(scored):
        device = entry.assignment.device
        if len(kept) < KEPT and not any((device == other).all() for other in kept):
            kept.append(device)
    return np.stack(kept), len(scored)


def _assignments(problem: Problem, seed: int) -> Iterator[Assignment]:
    yield from block_assignments(problem)
    yield from heft_assignments(problem)
    yield from etf_assignments(problem)
    yield from critical_path_assignments(problem, seed, TRIALS)
    try:
        yield from metis_assignments(problem, pymetis_library(), seed)
    except MissingExtraError:
        return


def _rated(problem: Problem, devices: Int[np.ndarray, "K N"]) -> list[Evaluated]:
    """Placements under their best rules, the first with the evaluations of all."""
    best = evaluate_rules(problem, devices)
    rows = zip(devices, best.overflow.tolist(), best.seconds.tolist(), strict=True)
    evaluated = [Evaluated(Assignment(device), over, value_s, 0) for device, over, value_s in rows]
    evaluated[0] = replace(evaluated[0], evaluations=best.evaluations)
    return evaluated


def _two_best(pool: list[Evaluated]) -> list[Evaluated]:
    """The best and the next best of another value: devices that are alike can swap names."""
    ranked = sorted(pool)
    others = (scored for scored in ranked if scored.key > ranked[0].key)
    return [ranked[0], *itertools.islice(others, 1)]
