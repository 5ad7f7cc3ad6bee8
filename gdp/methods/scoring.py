"""Hard constraints, for every method: evaluation of candidates, missing memory, allowed devices.

A method proposes assignments and hands them to `repair_and_select`, which has the simulator
evaluate them and, where memory overflows, repairs the best one (`gdp.methods.repair`).
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.clock import COMPILE, Clock, waiting_for
from gdp.base.units import format_bytes
from gdp.cluster.types import Device, make_cluster, shared_overflow
from gdp.graph.groups import distinct
from gdp.graph.op_graph import OpGraph, make_graph
from gdp.methods.base import Answer, Assignment, Method, Search
from gdp.methods.priorities import RULES, rank_under
from gdp.problem.arrays import arrays_of, touched_bytes
from gdp.problem.problem import Problem, cached_on_problem, make_problem
from gdp.sim.objectives import general_objectives, objective_of
from gdp.sim.score import score_of

# Ops simulated between two looks at the clock: about 50 ms.
_OPS_PER_LOOK = 200_000
OP_S = 2.5e-7
"""Seconds of an idle core in which one op of a placement is simulated, roughly."""


@dataclass(frozen=True, eq=False)
class Evaluated:
    """An assignment with its value and overflow by the simulator."""

    assignment: Assignment
    overflow_bytes: int
    value_s: float
    evaluations: int = 1  # simulations that led to it
    # Counted by `gdp.methods.simplify`:
    transfers: int = 0  # tensors sent, once per device that they are sent to
    pieces: int = 0  # sub-models that a runtime cuts the model into

    @property
    def key(self) -> tuple[int, float]:
        """Sort key, smaller is better: feasible first, then seconds."""
        return self.overflow_bytes, self.value_s

    def __lt__(self, other: "Evaluated") -> bool:
        """The better of two comes first: `min` and `sorted` need no key."""
        return self.key < other.key


def refusal(problem: Problem, name: str, known: Iterable[str]) -> Answer:
    """The answer of a method that does not know the problem's objective, but the known ones."""
    row = objective_of(problem)
    hint = "" if row.general else f"; use {' or '.join(row.programs)}"
    return Answer(
        None,
        reason=f"method {name!r} does not know objective {problem.objective!r}, only "
        f"{' and '.join(known)}{hint}",
    )


def score_all(problem: Problem, assignments: list[Assignment]) -> list[Evaluated]:
    """Evaluate each assignment, in order."""
    scored: dict[int, Evaluated] = {}
    for ranked in (False, True):
        chosen = [i for i, x in enumerate(assignments) if (x.rank is not None) == ranked]
        if not chosen:
            continue
        devices = np.stack([assignments[i].device for i in chosen])
        ranks = [x for i in chosen if (x := assignments[i].rank) is not None]
        value_s, overflow = objective_of(problem).values(
            problem, devices, np.stack(ranks) if ranked else None
        )
        for k, i in enumerate(chosen):
            scored[i] = Evaluated(assignments[i], int(overflow[k]), float(value_s[k]))
    return [scored[i] for i in range(len(assignments))]


def best_priority_rule(problem: Problem, scored: Evaluated) -> Evaluated:
    """Keep the devices, under their own ranks or the best rule: never worse."""
    if not objective_of(problem).ordered:
        return scored
    device = scored.assignment.device
    tried = [Assignment(device, rank_under(problem, device, rule)) for rule in RULES]
    best = min(scored, *score_all(problem, tried))
    return replace(best, evaluations=scored.evaluations + len(tried))


def best_of(
    problem: Problem, assignments: Iterable[Assignment], clock: Clock | None = None
) -> Evaluated:
    """The best of at least one assignment; when the clock runs out, of those scored by then."""
    return best_two(problem, assignments, clock)[0]


def best_two(
    problem: Problem, assignments: Iterable[Assignment], clock: Clock | None = None
) -> tuple[Evaluated, Evaluated | None]:
    """(`best_of`, with the evaluations of all; the least overflowing one, if the best fits)."""
    at_once, clock = max(1, _OPS_PER_LOOK // problem.num_ops), clock or Clock(None)
    best: Evaluated | None = None
    over: Evaluated | None = None
    count, rest = 0, iter(assignments)
    while waiting := list(itertools.islice(rest, at_once)):
        for scored in score_all(problem, waiting):
            if best is None or scored < best:
                best = scored
            if scored.overflow_bytes > 0 and (over is None or scored < over):
                over = scored
        count += len(waiting)
        clock.charge(OP_S * problem.num_ops * len(waiting))
        if clock.is_over():
            break
    if best is None:
        raise ValueError("best_of needs at least one assignment")
    return replace(best, evaluations=count), None if best.overflow_bytes > 0 else over


def expand(problem: Problem, group_device: Int[np.ndarray, "G"]) -> Int[np.ndarray, "N"]:
    """The device of every op from that of its group."""
    return group_device[problem.group]


@cached_on_problem
def group_seconds(problem: Problem) -> Float[np.ndarray, "G D"]:
    """Compute seconds of each group on each device, dispatch per op included; inf where barred."""
    a = arrays_of(problem)
    seconds = np.zeros((problem.num_groups, problem.num_devices))
    np.add.at(seconds, problem.group, a.compute_s)
    seconds[~problem.group_allowed] = np.inf
    seconds.setflags(write=False)
    return seconds


@cached_on_problem
def group_held_bytes(problem: Problem) -> Int[np.ndarray, "K G"]:
    """Bytes of the distinct weights of each group, by kind: those of kind k lie on the device
    `problem.held_on[k]` of the group's one."""
    a = arrays_of(problem)
    held = np.zeros((len(a.held_on), problem.num_groups), dtype=np.int64)
    owner = np.repeat(np.arange(problem.num_groups), np.diff(a.group_weight_start))
    np.add.at(held, (a.weight_kind[a.group_weight], owner), a.weight_bytes[a.group_weight])
    held.setflags(write=False)
    return held


def nearest_allowed(problem: Problem, group_device: Int[np.ndarray, "G"]) -> Int[np.ndarray, "G"]:
    """The wanted devices, and the fastest allowed one where the wanted one is barred."""
    groups = np.arange(problem.num_groups)
    barred = ~problem.group_allowed[groups, group_device]
    if not barred.any():
        return group_device
    fastest = group_seconds(problem).argmin(axis=1)
    return np.where(barred, fastest, group_device)


def missing_text(problem: Problem, assignment: Assignment) -> str:
    """Text of the devices that an assignment overfills and by how much, largest first; of devices
    that share a memory the first that do, where each of them fits.

    For instance "1.20 GiB on gpu0 (needs 3.20 GiB of 2.00 GiB)".
    """
    peak = score_of(problem, assignment).peak_bytes
    excess = peak - problem.cluster.memory_bytes
    parts = [
        f"{format_bytes(int(excess[d]))} on {problem.cluster.devices[d].name} (needs "
        f"{format_bytes(int(peak[d]))} of {format_bytes(problem.cluster.devices[d].memory_bytes)})"
        for d in np.argsort(-excess, kind="stable")
        if excess[d] > 0
    ]
    return ", ".join(parts) or shared_overflow(problem.cluster, peak) or "0 bytes"


def as_answer(problem: Problem, best: Evaluated, name: str) -> Answer:
    """A scored assignment as an answer: None, with the bytes missing, where it does not fit."""
    if best.overflow_bytes == 0:
        return Answer(best.assignment, evaluations=best.evaluations)
    return Answer(
        None,
        reason=f"{name} found no placement that fits; the closest misses "
        f"{missing_text(problem, best.assignment)}",
        evaluations=best.evaluations,
        closest=best.assignment,
    )


def proven_misfit(problem: Problem) -> str | None:
    """Why no placement at all can fit, or None where these arguments do not show it.

    1. An op needs, on one device, the weights of its group, its inputs and its outputs at once;
       where it may take no time, what it reads may be gone when its outputs are made. Caches count
       where the device holds them itself.
    2. Weights whose ops are all confined to some devices need room on those devices together, in
       which a memory that several of them share counts once; their caches where these lie.
    """
    if objective_of(problem).memory == "weights":  # no placement holds inputs and outputs beside
        return None
    graph, own = problem.graph, problem.held_on == np.arange(problem.num_devices)
    held = group_held_bytes(problem).T @ own
    may_use = problem.group_allowed[problem.group]
    at_once = (may_use & (problem.compute_s == 0.0)).any(axis=1)
    need, memory = np.where(at_once, 0, touched_bytes(problem)), problem.cluster.memory_bytes
    left = np.where(problem.group_allowed, memory - held, np.iinfo(np.int64).min // 2)
    short = need - left.max(axis=1)[problem.group]
    if short.max() > 0:
        op = int(short.argmax())
        g, d = problem.group[op], left[problem.group[op]].argmax()
        return (
            f"no placement can fit: op {graph.op_names[op]!r} needs "
            f"{format_bytes(need[op] + held[g, d])} on one device, the largest it may use holds "
            f"{format_bytes(memory[d])}: {format_bytes(short[op])} missing"
        )
    return _confined_weights(problem)


def _confined_weights(problem: Problem) -> str | None:
    """The second argument of `proven_misfit`, for each set of devices that binds some group."""
    a, cluster = arrays_of(problem), problem.cluster
    owner = np.repeat(np.arange(problem.num_groups), np.diff(a.group_weight_start))
    homes = np.unique(problem.group_allowed, axis=0)
    for home in [np.ones(problem.num_devices, dtype=bool), *homes]:
        inside = ~(problem.group_allowed & ~home).any(axis=1)
        weights = distinct(a.group_weight[inside[owner]])
        kind = a.weight_kind[weights]
        # All together, and where there are several kinds, each alone.
        for kinds in dict.fromkeys([tuple(np.unique(kind)), *((k,) for k in np.unique(kind))]):
            ids = weights[np.isin(kind, kinds)]
            where = np.isin(np.arange(problem.num_devices), problem.held_on[list(kinds)][:, home])
            needed, held = int(a.weight_bytes[ids].sum()), cluster.room_bytes(where)
            if needed > held:
                names = [n for n, here in zip(cluster.device_names, where, strict=True) if here]
                return (
                    f"no placement can fit: {_needed(problem, inside, ids, needed)}, "
                    f"{', '.join(names)} hold{'s' if len(names) == 1 else ''} "
                    f"{format_bytes(held)}: {format_bytes(needed - held)} missing"
                )
    return None


def _needed(
    problem: Problem, inside: Bool[np.ndarray, "G"], ids: Int[np.ndarray, "_"], needed: int
) -> str:
    """Bytes that weights and caches need, separately."""
    graph, a = problem.graph, arrays_of(problem)
    ops = np.flatnonzero(inside[problem.group] & (graph.cache_bytes > 0))
    once = ops[np.unique(graph.weight_id[ops], return_index=True)[1]]
    cached = min(int(graph.cache_bytes[once].sum()), needed)
    if len(a.held_on) > 1:
        cached = int(a.weight_bytes[ids[a.weight_kind[ids] > 0]].sum())
    if not cached:
        return f"weights need {format_bytes(needed)}"
    if cached == needed:
        return f"caches need {format_bytes(needed)}"
    return f"weights need {format_bytes(needed - cached)} and caches {format_bytes(cached)}"


_COMPILED: set[tuple[str, str]] = set()
_COMPILING: list[str] = []  # the objectives of the methods that are being compiled, outermost first


def compile_once(name: str, method: Method, objective: str | None = None) -> None:
    """Run a method on a tiny problem, once per process: budgets start after compilation.

    Only for the objective at hand, since compilation is what a first run waits for: the one given,
    that of the method which is being compiled and calls this one, or else all. Memory is so tight
    that repairs are compiled too.
    """
    if objective is None and _COMPILING:
        objective = _COMPILING[-1]
    for known in general_objectives():
        if objective not in (None, known) or (name, known) in _COMPILED:
            continue
        _COMPILED.add((name, known))
        _COMPILING.append(known)
        try:
            with waiting_for(COMPILE):
                method(tiny_problem(known), Search(seconds=None, evaluations=64))
        finally:
            _COMPILING.pop()


def is_compiling() -> bool:
    """True while `compile_once` runs a method: such a run leaves out what is rarely used."""
    return bool(_COMPILING)


def tiny_problem(objective: str) -> Problem:
    """Two chains of three ops that do not fit on one of the two devices together."""
    graph: OpGraph = make_graph(
        "tiny",
        [f"op{i}" for i in range(6)],
        ["X"] * 6,
        [(i, 8) for i in range(6)],
        [(0, 1), (1, 2), (3, 4), (4, 5)],
        flop=[1.0] * 6,
        weight_bytes=[8] * 6,
    )
    devices = [Device(name, "cpu", {"default": 1.0}, 1.0, memory_bytes=48) for name in "ab"]
    cluster = make_cluster("tiny", devices, default_bytes_per_s=1.0, default_latency_s=0.0)
    return make_problem(graph, cluster, np.ones((6, 2)), objective)
