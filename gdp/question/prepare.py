"""Prepare the problem of a model on a cluster: fused ops, costs, constraints, placements."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.errors import PlacementError, of_kind
from gdp.base.rows import imported
from gdp.cluster.machines import machines
from gdp.cluster.types import Cluster
from gdp.costs.adapt import AdaptedCosts
from gdp.costs.base import CostModel, RuntimeOverheads, launch_floors_s
from gdp.costs.measured.host import host_of
from gdp.graph.fuse import Fused, class_parts, fuse, group_seconds
from gdp.graph.generation import single_step, steps_of
from gdp.graph.groups import alike, all_per_group, first_members, joined, merge_ids, sum_per_group
from gdp.graph.op_graph import OpGraph
from gdp.placement.constraints import Constraints, allowed_mask, together_ids, whole_borders
from gdp.placement.placement import Assignment, Placement
from gdp.problem.problem import Launches, Origin, Problem, make_problem
from gdp.question.question import Question
from gdp.sim.objectives import find_objective
from gdp.sim.prediction import Prediction
from gdp.splits.members import Divided, divided

OWN_PROCESSES = ("pipelining", "tensor-parallel")
"""Runtimes of PyTorch that start a process for every device, each of which launches its own ops."""


def prepare_problem(
    question: Question, *, keep_apart: Int[np.ndarray, "N"] | None = None, replicas: bool = False,
    parts: Divided | None = None,
) -> Problem:  # fmt: skip
    """Placement problem of a question, with the ops that runtimes fuse merged.

    Args:
        question: Of its parts graph, cluster, objective, costs and constraints count.
        keep_apart: Ops of different labels are not merged.
        replicas: A pipeline may have replicated stages, unless the constraints forbid it.
        parts: The graph as it is divided inside its ops; with it, `keep_apart` is given.

    Raises:
        InfeasibleError: The constraints leave an op, or ops that must share a device, no device.
    """
    cluster, objective, constraints = question.cluster, question.objective, question.constraints
    allowed = allowed_mask(constraints, question.graph, cluster)
    together = together_ids(constraints, question.graph)
    labels = _apart(question, allowed, keep_apart)
    graph = _with_all_caches(question if parts is None else replace(question, graph=parts.graph))
    kernels = fused = fused_of(question, graph, labels)
    if keep_apart is None and (graph.repeats != 1).any():
        apart = class_parts(graph, fused, merge_ids(graph.colocate, together))
        fused = fused if apart is None else fuse(graph, apart=apart)
    model, label = costs_of(question)
    if isinstance(model, AdaptedCosts):
        are_busy = find_objective(objective).pipelined and cluster.num_devices > 1
        model = replace(model, together=are_busy)
    seconds = _fused_seconds(question, model, fused)
    exchange_s, members = None, dict[int, OpGraph]()
    if parts is not None:
        exchange_s = sum_per_group(parts.exchange_s, fused.group_of)
        seconds, members = _of_members(question, parts, model, fused, seconds)
        seconds = parts.of_slowest(seconds, fused.graph.is_io) + exchange_s
    kernel_s = seconds if kernels is fused else _fused_seconds(question, model, kernels)
    ties = None if together is None else joined(fused.group_of, together)
    if isinstance(model, RuntimeOverheads):
        cluster = model.with_runtime_overheads(cluster)
    sent_s = _sent_s(fused.graph, cluster, objective)
    machine, seconds = _all_runs(fused.graph, cluster, seconds)
    launches, slack_s = _launches(question, model, fused, cluster), 0.0
    if kernels is not fused:
        whole_s = _all_runs(kernels.graph, cluster, kernel_s)[1]
        kernel_of = kernels.group_of[first_members(fused.group_of)]
        seconds, slack_s = _as_one_kernel(seconds, whole_s, kernel_of, cluster)
        if launches is not None:
            whole = _launches(question, model, kernels, cluster) or launches
            cut = _as_one_kernel(launches.seconds, whole.seconds, kernel_of, cluster)
            launches, slack_s = launches._replace(seconds=cut[0]), max(slack_s, cut[1])
    return make_problem(
        fused.graph,
        machine,
        seconds,
        objective,
        allowed=all_per_group(allowed, fused.group_of),
        together=ties,
        sent_s=sent_s,
        replicas=replicas and constraints.replicas,
        origin=Origin(
            fused.group_of, label, model, kernels is not fused, slack_s, exchange_s, members
        ),
        within_s=question.within_s,
        launches=launches,
    )


def problem_of(
    question: Question, *, keep_apart: Int[np.ndarray, "N"] | None = None, replicas: bool = False,
    parts: Divided | None = None,
) -> Problem:  # fmt: skip
    """The prepared problem of a question, made once; see `prepare_problem`."""
    q, labels = question, b"" if keep_apart is None else alike(keep_apart)[1].tobytes()
    texts = q.objective, repr(q.constraints), repr(q.within_s), labels
    key = q.graph, q.cluster, q.costs, *texts, replicas, parts
    return question.kept.once("problem", key, lambda: prepare_problem(
        question, keep_apart=keep_apart, replicas=replicas, parts=parts
    ))  # fmt: skip


def once_of(question: Question) -> OpGraph:
    """The graph of a request that runs each phase once."""
    return question.kept.once("single", (question.graph,), lambda: single_step(question.graph))


def costs_of(question: Question) -> tuple[CostModel, str]:
    """The cost model of a question on its machine, and a line with its name and reason."""
    from gdp.costs.default import resolve_costs

    parts = question.costs, question.cluster, question.graph
    return question.kept.once("costs", parts, lambda: resolve_costs(*parts))


def _apart(
    question: Question, allowed: Bool[np.ndarray, "N D"],
    keep_apart: Int[np.ndarray, "N"] | None = None,
) -> Int[np.ndarray, "N"]:  # fmt: skip
    """Labels of ops that are not merged across: allowed devices, whole modules, `keep_apart`."""
    whole = question.constraints.whole
    # Ops fused across the border of two such modules would tie the modules together.
    borders = whole_borders(question.constraints, question.graph) if whole else None
    more = [labels for labels in (borders, keep_apart) if labels is not None]
    return alike(*np.packbits(allowed, axis=1).T, *more)[1]


def _of_members(
    question: Question, parts: Divided, model: CostModel, fused: Fused,
    seconds: Float[np.ndarray, "M D"],
) -> tuple[Float[np.ndarray, "M D"], dict[int, OpGraph]]:  # fmt: skip
    """(seconds, further members each by its own share; the fused graphs as these hold them)."""
    seconds, members = seconds.copy(), dict[int, OpGraph]()
    for d, graph in parts.others.items():
        own = _with_all_caches(replace(question, graph=graph))
        as_member = Fused(own, fused.group_of)
        seconds[:, d] = _fused_seconds(question, model, as_member)[:, d]
        members[d] = as_member.graph
    return seconds, members


def drawn_problems(question: Question, problem: Problem, seeds: Iterable[int]) -> Iterator[Problem]:
    """The problem of a question under draws of the costs that were learned; empty where none were.

    Base costs are computed once; a draw is a multiplication.
    """
    model, cluster = problem.origin.model, question.cluster
    if not isinstance(model, AdaptedCosts):
        return
    unfused = model.reads_unfused
    rows = _with_all_caches(question) if unfused else problem.graph
    base_s = model.base(rows, cluster)
    for seed in seeds:
        draw = replace(model, adaptation=model.adaptation.sampled(seed))
        seconds = base_s * draw.factors(rows, cluster)
        seconds = sum_per_group(seconds, problem.origin.group_of) if unfused else seconds
        machine = draw.with_runtime_overheads(cluster)
        sent_s = _sent_s(problem.graph, machine, problem.objective)
        machine, seconds = _all_runs(problem.graph, machine, seconds)
        yield replace(problem, cluster=machine, compute_s=seconds, sent_s=sent_s)


def fused_of(question: Question, graph: OpGraph, labels: Int[np.ndarray, "N"]) -> Fused:
    """The graph as runtimes fuse it, where ops of different labels are not merged."""
    apart = alike(labels)[1]
    return question.kept.once("fused", (graph, apart.tobytes()), lambda: fuse(graph, apart=apart))


def _fused_seconds(
    question: Question, model: CostModel, fused: Fused
) -> Float[np.ndarray, "M D"]:  # fmt: skip
    """Seconds of fused ops: sums of learned times of the parts, a roofline of the whole."""
    graph, cluster = fused.of, question.cluster
    if not getattr(model, "reads_unfused", False):
        return model(fused.graph, cluster)
    parts = model, graph, cluster
    return group_seconds(fused, question.kept.once("seconds", parts, lambda: model(graph, cluster)))


def _launches(
    question: Question, model: CostModel, fused: Fused, cluster: Cluster
) -> Launches | None:
    """Host threads that launch the ops of several devices: one on each machine, where an eager
    runtime calls op after op in one process (`benchmarks.launch_threads`: two threads of Python
    take no less, as they hold one lock). None in training, for which autograd has a thread for each
    device.

    `cluster` has the overheads of the runtime.
    """
    graph = fused.of
    if question.target in OWN_PROCESSES or cluster.num_devices < 2 or graph.is_backward.any():
        return None
    parts = model, graph, question.cluster
    floor_s = question.kept.once("launches", parts, lambda: launch_floors_s(*parts))
    if floor_s is None:
        return None
    seconds = _all_runs(fused.graph, cluster, sum_per_group(floor_s, fused.group_of))[1]
    thread = np.where((floor_s > 0).any(axis=0), machines(cluster), -1)
    alone = np.bincount(1 + thread)[1 + thread] < 2
    return Launches(seconds, np.where(alone, -1, thread))


def _as_one_kernel(
    part_s: Float[np.ndarray, "M D"],
    kernel_s: Float[np.ndarray, "K D"],
    kernel_of: Int[np.ndarray, "M"],
    cluster: Cluster,
) -> tuple[Float[np.ndarray, "M D"], float]:
    """(seconds of the parts of cut kernels, seconds by which those of all may be too many).

    Parts on one device are to take what their kernel takes there, its dispatch once; cut apart they
    take more than that, so that no placement is said to take longer than it does. A part pays its
    dispatch beside these seconds, so none may have less than none: the excess is `slack_s`.
    """
    dispatch_s = cluster.op_dispatch_s
    cut = np.bincount(kernel_of)[kernel_of] > 1
    together_s = sum_per_group(part_s + dispatch_s, kernel_of)
    share = np.ones_like(together_s)
    known = np.isfinite(together_s) & (together_s > 0)
    share[known] = np.minimum((kernel_s + dispatch_s)[known] / together_s[known], 1.0)
    scaled_s = (part_s + dispatch_s) * share[kernel_of] - dispatch_s
    seconds = np.where(cut[:, None], np.maximum(scaled_s, 0.0), part_s)
    short_s = np.where(cut[:, None], np.maximum(-scaled_s, 0.0), 0.0)
    return seconds, float(short_s.max(axis=1).sum())


def requests_in_flight(graph: OpGraph, cluster: Cluster, objective: str) -> int:
    """Requests whose caches a placement has memory for: the requested number, otherwise one, and in
    a pipeline one for every device that computes."""
    if graph.request is not None and graph.request.requests:
        return graph.request.requests
    if not find_objective(objective).pipelined:
        return 1
    return max(1, int((cluster.computes & ~cluster.streams).sum()))


def _with_all_caches(question: Question) -> OpGraph:
    """The graph with the caches of all requests in flight."""
    graph = question.graph
    count = requests_in_flight(graph, question.cluster, question.objective)
    if count < 2 or not graph.cache_bytes.any():
        return graph
    more = (count - 1) * graph.cache_bytes
    held = {"weight_bytes": graph.weight_bytes + more, "cache_bytes": graph.cache_bytes + more}
    return question.kept.once("graph", (graph, str(count)), lambda: replace(graph, **held))


def _all_runs(
    graph: OpGraph, cluster: Cluster, seconds: Float[np.ndarray, "M D"]
) -> tuple[Cluster, Float[np.ndarray, "M D"]]:
    """Cluster and seconds in which every op stands for all of its runs in one sample.

    An op takes the seconds and the dispatch of all runs. Links carry its tensors in all of them,
    by `OpGraph.sent_bytes`; memory holds those of one run. Every border between devices is crossed
    by the prompt once and by each step: the latency of a link is the mean of both, so that their
    sum is that of all crossings; so is the dispatch of a segment.
    """
    repeats = graph.repeats
    if (repeats == 1).all():
        return cluster, seconds
    more = np.where(graph.is_io, 0, repeats - 1)[:, None] * cluster.op_dispatch_s
    mean = float(1 + steps_of(graph)) / 2
    machine = cluster.with_dispatch(cluster.op_dispatch_s + cluster.segment_dispatch_s * mean)
    return (
        replace(machine, link_latency_s=cluster.link_latency_s * mean),
        seconds * repeats[:, None] + more,
    )


def room_bytes(cluster: Cluster, constraints: Constraints | None = None) -> int:
    """Memory of all devices that may hold weights, a shared one once: no model whose weights take
    more has a placement. Of the constraints, those on every op ("*") are heeded."""
    constraints = of_kind(constraints, Constraints, "constraints")
    barred = {name for pin in constraints.forbid if pin.match == "*" for name in pin.devices}
    usable = set(cluster.device_names) - barred
    for pin in constraints.pins:
        if pin.match == "*":
            usable &= set(pin.devices)
    free = np.array([name in usable for name in cluster.device_names])
    return cluster.room_bytes(free & cluster.computes)


def _sent_s(graph: OpGraph, cluster: Cluster, objective: str) -> Float[np.ndarray, "T"] | None:
    """Seconds of transfers where the objective states them; None: those of the cluster's links."""
    stated = find_objective(objective).sent_s
    return imported(stated)(graph, cluster) if stated else None


def prepare_placement(question: Question, placement: Placement) -> Prediction:
    """The problem of a placed model, fused only within devices, and within the modules that the
    question keeps whole, as its plans are; the constraints of the question are not asked.

    Raises:
        PlacementError: The costs give an op no time where it is.
    """
    free, parts = replace(question, constraints=Constraints()), None
    apart = placement.device
    if question.constraints.whole:
        borders = whole_borders(question.constraints, question.graph)
        apart = alike(apart, borders)[1]
    if placement.splits:
        parts = divided(
            question.graph, question.cluster, placement.splits, placement.device,
            host_of(question.costs),
        )  # fmt: skip
    problem = problem_of(free, keep_apart=apart, parts=parts)
    origin, size = problem.origin, problem.num_ops
    device, rank = np.zeros(size, np.int64), np.zeros(size, np.int64)
    device[origin.group_of] = placement.device
    rank[origin.group_of] = placement.rank
    never = np.flatnonzero(np.isinf(problem.compute_s[np.arange(size), device]))
    if never.size:
        op = int(never[0])
        raise PlacementError(
            f"{never.size} ops cannot run where they are placed, first "
            f"{problem.graph.op_names[op]!r} on "
            f"{question.cluster.device_names[device[op]]}: {origin.costs} gives it no time there"
        )
    return Prediction(problem, Assignment(device, rank, placement.teams, placement.splits))
