"""Explanation of a placement: times of ops on every device, and the effect of moving them; seconds
of a request on a machine that is faster in one thing, or with smaller weights."""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.api.generation import causes_s, generation_of, phases_s
from gdp.base.errors import ArgumentError, InfeasibleError
from gdp.base.units import format_bytes
from gdp.cluster.file import Machine
from gdp.cluster.links import links_line
from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.costs.base import CostModel, launch_floors_s
from gdp.costs.measured.graph import graph_kernels
from gdp.costs.measured.kernels import KINDS
from gdp.graph.generation import single_step
from gdp.graph.groups import merge_ids, sum_per_group
from gdp.graph.op_graph import OpGraph
from gdp.placement.constraints import Constraints, Names, allowed_mask, together_ids
from gdp.placement.placement import Placed, Placement, make_placement
from gdp.problem.problem import Problem
from gdp.question import solve
from gdp.question.models import Model
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question, question_about
from gdp.reports.view import PlacementView, module_path, op_label
from gdp.sim.objectives import Score
from gdp.sim.prediction import Prediction

NEARLY_FULL = 0.8
"""Share of a device's memory from which it is mentioned."""
NOTABLE = 1e-3
"""Changes of the value by a smaller share are neglected."""
FOUR_BITS = 4.5
"""Bits of a weight in blocks of 4 bits, their scales included."""
WEIGHTED = tuple(KINDS.index(name) for name in ("product", "experts"))
"""Classes of kernels whose second factor may be weights."""


def explain(
    model: Model | None,
    placement: Placed,
    cluster: Machine | None = None,
    *,
    op: str | None = None,
    scope: str | None = None,
    objective: str | None = None,
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
) -> dict[str, Any]:
    """Explain the devices of some ops of a placement, or the times of a placed generation.

    Args:
        model: Model that the placement is of; None for the one that it was made for.
        placement: Placement, result, device map, or file of one.
        cluster: Cluster of the placement; None for the one that it was made for.
        op: Glob of the names or scopes of the ops; at most one of `op` and `scope` is given.
        scope: Module whose ops are explained.
        objective: Objective whose value is compared; None for that of the placement, else latency.
        costs: Cost model or file; None for the shipped one.
        constraints: Constraints that the model was placed with; None for those it remembers.

    Returns:
        For every device, the seconds of these ops there, and the simulated value, change and memory
        of the placement with them alone moved there (with ops that must share their device; ranks
        stay); also the transfers that their kernels cause, and the limits that bind them. Without
        ops, of a generation: under "generation" seconds, tokens per second, the parts of both
        phases and the bytes of every device, as `gdp place --json` has them, and under "faster"
        the seconds with links, or one device's memory or arithmetic, twice as fast, or weights in 4
        bits.

    Raises:
        ArgumentError: if no op matches, or none is asked for and the placement is of no generation.
    """
    question, placement = question_about(
        placement, model, cluster, objective=objective, costs=costs, constraints=constraints
    )
    if op is None and scope is None:
        return {
            "generation": generation_of(question, placement).to_json(),
            "faster": [row.to_json() for row in faster_machines(question, placement)],
            "links": links_line(question.cluster),
        }
    return explained(question, placement, op, scope)


def explained(
    question: Question, placement: Placement, op: str | None, scope: str | None
) -> dict[str, Any]:
    """The devices of some ops of a placement; see `explain`."""
    if placement.splits:
        raise ArgumentError(
            "several devices compute each op of this placement together, so that none can move "
            "alone; leave out --op and --scope to see what limits the request"
        )
    graph, cluster = question.graph, question.cluster
    chosen = _chosen(graph, op, scope)
    if graph.is_io[chosen].all():
        raise ArgumentError(
            f"{graph.op_names[chosen[0]]!r} is an input or output of the model, which belongs to "
            f"the host {cluster.device_names[cluster.host]}"
        )
    chosen = chosen[~graph.is_io[chosen]]
    # Those that must share a device move along.
    group = merge_ids(graph.colocate, together_ids(question.constraints, graph))
    moving = np.flatnonzero(np.isin(group, group[chosen]) & ~graph.is_io)
    predicted = prepare_placement(question, placement)
    problem, now = predicted.problem, predicted.score()
    lead = placement.homes
    view = solve.view_of(question, placement)
    kernels = np.unique(view.problem.origin.group_of[chosen])
    allowed = _allowed(question)

    def row_of(d: int) -> dict[str, Any]:
        to, row = lead.get(d, d), _stay(problem, kernels, d)
        row["holds"] = int((placement.device[chosen] == to).sum())
        if row["holds"] == len(chosen):
            return row | _change(cluster, now, now)
        if reason := _barred(question, problem, allowed, moving, kernels, d):
            return row | {"reason": reason}
        return row | _change(cluster, _moved(question, placement, moving, to), now)

    rows = [row_of(d) for d in range(cluster.num_devices)]
    return {
        "matches": scope if op is None else op,
        "ops": len(chosen),
        "moved_along": [graph.op_names[i] for i in np.setdiff1d(moving, chosen)],
        "kernels": [op_label(view.problem.graph, k) for k in kernels.tolist()],
        "objective": question.objective,
        "value_s": now.value_s,
        "devices": rows,
        "transfers": _transfers(view, kernels),
        "limits": _limits(rows, cluster, now, len(chosen), placement.simplicity_cost),
        "costs": problem.origin.costs,
        "links": links_line(cluster),
    }


def _chosen(graph: OpGraph, op: str | None, scope: str | None) -> Int[np.ndarray, "K"]:
    if (op is None) == (scope is None):
        raise ArgumentError("give --op GLOB or --scope MODULE, one of them")
    if op is not None:
        return Names(graph).matching(op)
    wanted = module_path(scope or "")
    paths = [module_path(text) for text in graph.scope]
    ops = [i for i, path in enumerate(paths) if wanted and path[: len(wanted)] == wanted]
    if ops:
        return np.array(ops, dtype=np.int64)
    modules = sorted({".".join(path[: len(wanted)]) for path in paths if path})
    if not modules:
        raise ArgumentError(f"graph {graph.name!r} names no modules; use --op GLOB")
    near = difflib.get_close_matches(".".join(wanted), modules, n=3, cutoff=0.0)
    raise ArgumentError(
        f"no module {scope!r} in graph {graph.name!r}; there is {', '.join(near)}; "
        "`gdp inspect --ops` lists all"
    )


def _allowed(question: Question) -> Bool[np.ndarray, "N D"]:
    """Devices that constraints allow for each op; none if they contradict each other."""
    graph, cluster = question.graph, question.cluster
    try:
        return allowed_mask(question.constraints, graph, cluster)
    except InfeasibleError:
        return np.zeros((graph.num_ops, cluster.num_devices), dtype=bool)


def _stay(problem: Problem, kernels: Int[np.ndarray, "K"], d: int) -> dict[str, Any]:
    """A device's row: the seconds of the kernels there, launching them included."""
    from gdp.sim.engine import arrays

    seconds = float(arrays(problem).op_s[kernels, d].sum())
    return {
        "device": problem.cluster.device_names[d], "compute_s": seconds, "value_s": None,
        "change_s": None, "feasible": False, "peak_bytes": None, "reason": "",
    }  # fmt: skip


def _barred(
    question: Question, problem: Problem, allowed: Bool[np.ndarray, "N D"],
    moving: Int[np.ndarray, "L"], kernels: Int[np.ndarray, "K"], d: int,
) -> str:  # fmt: skip
    """Why the ops may not run on a device, whatever its memory; "" where they may."""
    graph, cluster = question.graph, question.cluster
    name, supported = cluster.device_names[d], cluster.devices[d].supported
    alien = [i for i in moving if supported is not None and graph.op_types[i] not in supported]
    if alien:
        return f"{name} does not support {graph.op_types[alien[0]]} ({graph.op_names[alien[0]]!r})"
    pinned = moving[~allowed[moving, d]]
    if pinned.size:
        return f"a constraint keeps {graph.op_names[pinned[0]]!r} off {name}"
    never = kernels[np.isinf(problem.compute_s[kernels, d])]
    if never.size:
        return f"the costs give {problem.graph.op_names[never[0]]!r} no time on {name}"
    return ""


def _moved(question: Question, placement: Placement, moving: Int[np.ndarray, "L"], d: int) -> Score:
    """The score of the placement with these ops on device d; fused anew, as runtimes would."""
    device = placement.device.copy()
    device[moving] = d
    other = make_placement(
        question.graph, question.cluster, device, placement.rank, teams=placement.teams
    )
    return solve.simulate(question, other)


def _change(cluster: Cluster, after: Score, now: Score) -> dict[str, Any]:
    over = np.flatnonzero(after.peak_bytes > cluster.memory_bytes)
    reason = ", ".join(
        f"{cluster.device_names[d]} would hold {format_bytes(after.peak_bytes[d])} of "
        f"{format_bytes(cluster.memory_bytes[d])}"
        for d in over
    )
    return {
        "value_s": after.value_s, "change_s": after.value_s - now.value_s,
        "feasible": after.feasible, "reason": reason,
        "peak_bytes": dict(zip(cluster.device_names, after.peak_bytes.tolist(), strict=True)),
    }  # fmt: skip


def _transfers(view: PlacementView, kernels: Int[np.ndarray, "K"]) -> list[dict[str, Any]]:
    """The transfers of tensors that these kernels make, or read after them; longest first."""
    graph, names, sent = view.problem.graph, view.problem.cluster.device_names, view.schedule
    mine = np.zeros(graph.num_ops, dtype=bool)
    mine[kernels] = True
    reads = {
        (int(t), int(view.device[i]))
        for t, i in zip(graph.use_tensor, graph.use_op, strict=True)
        if mine[i]
    }
    rows = []
    for k in range(len(sent.transfers.tensor)):
        tensor, to = int(sent.transfers.tensor[k]), int(sent.transfers.destination[k])
        maker = int(graph.producer[tensor])
        if not mine[maker] and (tensor, to) not in reads:
            continue
        rows.append(
            {
                "tensor": graph.tensor_names[tensor], "made_by": op_label(graph, maker),
                "direction": "out" if mine[maker] else "in",
                "source": names[sent.transfers.source[k]], "destination": names[to],
                "bytes": int(view.problem.sent_bytes[tensor]),
                "seconds": float(sent.transfers.arrive_s[k] - sent.transfers.start_s[k]),
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row["seconds"])


def _limits(
    rows: list[dict[str, Any]], cluster: Cluster, now: Score, count: int, simplicity_cost: float
) -> list[str]:
    """Binding limits in words: constraints, memory, or the value; and the cost of simplicity."""
    elsewhere = [row for row in rows if row["holds"] < count]
    limits = [row["reason"] for row in elsewhere if row["reason"]]
    for d, device in enumerate(cluster.devices):
        full = now.peak_bytes[d] / device.memory_bytes
        if device.memory_bytes < UNLIMITED_BYTES and full >= NEARLY_FULL:
            limits.append(f"{device.name} is {full:.0%} full as it is")
    if not elsewhere:
        return [*limits, "there is no other device"]
    fits = [row for row in elsewhere if row["feasible"]]
    better = [row for row in fits if row["change_s"] < -NOTABLE * now.value_s]
    if better:
        best = min(better, key=lambda row: row["change_s"])
        fall = -best["change_s"] / now.value_s
        why = "the placement can be improved"
        if fall <= simplicity_cost + NOTABLE:
            why = (
                f"the placement was given for its fewer cuts, {simplicity_cost:.2%} slower than "
                "the best found, which --simplicity 0 answers"
            )
        limits.append(f"moved alone to {best['device']}, the value would fall by {fall:.1%}: {why}")
    elif fits:
        least = min(row["change_s"] for row in fits)
        slower = f"at least {least / now.value_s:.1%} slower"
        same = "as fast, within 0.1%"
        word = slower if least > NOTABLE * now.value_s else same
        limits.append(f"moved alone to where else they fit, the whole is {word}")
    return limits


@dataclass(frozen=True)
class Faster:
    """Seconds of a request, were its machine twice as fast in one thing, or its weights smaller."""

    what: str  # in words, such as "memory of gpu0 twice as fast"
    first_token_s: float
    token_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        return asdict(self)


def faster_machines(question: Question, placement: Placement) -> tuple[Faster, ...]:
    """Sensitivity: predictions with links, or the memory or the arithmetic of one device (of a
    tensor-parallel group: of all its ranks) twice as fast; and with products' weights in 4 bits if
    they have more.

    Only those that make the prompt or a step at least 1% faster, the fastest step first. No op gets
    faster than its launch, where the costs know how long the host takes for that.
    """
    once = single_step(question.graph)
    predicted = prepare_placement(replace(question, graph=once, objective="latency"), placement)
    problem, placed = predicted
    names, ops = problem.cluster.device_names, np.arange(problem.num_ops)
    causes = causes_s(predicted)
    half_s, all_s = _savings_s(question, once, predicted)
    first_s, token_s = phases_s(predicted, once)
    links = replace(
        problem.cluster, link_bytes_per_s=2 * problem.cluster.link_bytes_per_s,
        link_latency_s=problem.cluster.link_latency_s / 2,
    )  # fmt: skip
    saved = [
        ("links twice as fast", links, causes["collectives"] / 2),
        (
            f"weights in {FOUR_BITS:g} bits",
            problem.cluster,
            np.minimum(_saved_in_four_bits_s(problem, causes), all_s),
        ),
    ]
    groups = {s.devices[0]: [names[d] for d in s.devices] for s in placed.splits}
    for d in np.unique(placed.device).tolist():
        name = " and ".join(groups.get(d, [names[d]]))
        for cause, word in (("bandwidth", "memory"), ("arithmetic", "arithmetic")):
            mine = (placed.device == d) & (causes[cause] > 0)
            less_s = np.where(mine, np.minimum(causes[cause] / 2, half_s), 0.0)
            saved.append((f"{word} of {name} twice as fast", problem.cluster, less_s))
    rows = []
    for what, cluster, less_s in saved:
        compute_s = problem.compute_s.copy()
        compute_s[ops, placed.device] -= less_s
        other = replace(problem, cluster=cluster, compute_s=compute_s)
        row = Faster(what, *phases_s(predicted._replace(problem=other), once))
        if row.first_token_s < 0.99 * first_s or row.token_s < 0.99 * token_s:
            rows.append(row)
    return tuple(sorted(rows, key=lambda row: row.token_s))


def _savings_s(
    question: Question, once: OpGraph, predicted: Prediction
) -> tuple[Float[np.ndarray, "M"], Float[np.ndarray, "M"]]:
    """(seconds that each op saves on a device twice as fast, and on any): all that it takes beyond
    the launches of the model's ops that are merged in it."""
    problem, device = predicted.problem, predicted.assignment.device
    model, group_of = problem.origin.model, problem.origin.group_of
    op_s = problem.compute_s[np.arange(problem.num_ops), device]
    if problem.origin.exchange_s is not None:
        op_s = op_s - problem.origin.exchange_s[np.arange(problem.num_ops), device]
    floors = None if model is None else launch_floors_s(model, once, question.cluster)
    if model is None or floors is None:
        return op_s / 2, op_s
    ops, at = np.arange(once.num_ops), device[group_of]
    floor_s = floors[ops, at]
    if predicted.assignment.splits:  # of members only the fused ops' seconds are known
        beyond_s = np.maximum(op_s - sum_per_group(floor_s, group_of), 0.0)
        return np.minimum(op_s / 2, beyond_s), beyond_s
    own_s = model(once, question.cluster)[ops, at]
    beyond_s = np.maximum(own_s - floor_s, 0.0)
    # A processor waits for each call, then computes; other devices compute meanwhile.
    waits = question.cluster.is_cpu[at]
    half_s = np.where(waits, beyond_s / 2, np.minimum(own_s / 2, beyond_s))
    return sum_per_group(half_s, group_of), sum_per_group(beyond_s, group_of)


def _saved_in_four_bits_s(
    problem: Problem, causes: Mapping[str, Float[np.ndarray, "M"]]
) -> Float[np.ndarray, "M"]:
    """Seconds of each op that go to bytes of weights beyond `FOUR_BITS` each, whatever way the
    bytes come; unpacking is not counted."""
    kernels = graph_kernels(problem.graph, served=False).kernels
    traffic = np.maximum(problem.graph.memory_traffic_bytes, 1.0)
    weights = np.where(np.isin(kernels.kind, WEIGHTED), kernels.held_bytes / traffic, 0.0)
    beyond = np.maximum(1.0 - FOUR_BITS / kernels.stored_bits, 0.0)
    moved_s = causes["bandwidth"] + causes["streaming"] + causes["sending"]
    return moved_s * np.minimum(weights, 1.0) * beyond
