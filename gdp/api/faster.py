"""Seconds of a request on a machine that is faster in one thing, or with smaller weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from gdp.api.generation import causes_s, phases_s
from gdp.costs.base import launch_floors_s
from gdp.costs.measured.graph import graph_kernels
from gdp.costs.measured.kernels import KINDS
from gdp.graph.generation import single_step
from gdp.graph.groups import sum_per_group
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement
from gdp.problem.problem import Problem
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
from gdp.sim.prediction import Prediction

FOUR_BITS = 4.5
"""Bits of a weight in blocks of 4 bits, their scales included."""
WEIGHTED = tuple(KINDS.index(name) for name in ("product", "experts"))
"""Classes of kernels whose second factor may be weights."""


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
