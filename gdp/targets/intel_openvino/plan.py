"""Placing for OpenVINO, whose HETERO compiles one subgraph a device and runs each at one go: a plan
enters each device once."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from gdp.base.errors import InfeasibleError, PlacementError
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Candidate
from gdp.placement.constraints import allowed_mask
from gdp.placement.placement import Placement, check, make_placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.targets.intel_openvino.export import hetero_plan
from gdp.targets.modules import with_whole_modules
from gdp.targets.rows import MEMORY_SHARES, layer_costs

MAX_CUTS = 256
"""Places between ops where a row of pieces may be cut: those over which the fewest bytes pass."""
PIPELINE_METHODS = ("blocks", "pipeline_dp")
"""Their plans enter most devices once."""


def plan_openvino(question: Question) -> Result:
    """The best plan with one piece a device: each device alone, the shortest row of pieces along
    the ops' order (a dynamic program over the cuts), and the plans of pipeline methods.

    Raises:
        InfeasibleError: if no such plan fits.
    """
    started_s, question = time.perf_counter(), with_whole_modules(question)
    rows: list[Candidate] = []
    best: tuple[float, Placement] | None = None
    for name, placement in _plans(question):
        since_s = time.perf_counter()
        if reason := _refusal(question, placement):
            rows.append(Candidate(name, None, None, None, False, 0.0, reason))
            continue
        score = solve.simulate(question, placement)
        rows.append(
            Candidate(name, score.latency_s, score.period_s, score.value_s, score.feasible,
                      time.perf_counter() - since_s, "" if score.feasible else str(score))
        )  # fmt: skip
        if score.feasible and (best is None or score.value_s < best[0]):
            best = score.value_s, placement
    if best is None:
        raise InfeasibleError(
            f"{question.graph.name!r} does not fit on cluster {question.cluster.name!r} with one "
            "piece a device"
        )
    return replace(
        solve.evaluate(question, best[1]), method="openvino", candidates=tuple(rows),
        seed=question.search.seed, evaluations=len(rows),
        seconds=time.perf_counter() - started_s,
    )  # fmt: skip


def _refusal(question: Question, placement: Placement) -> str:
    """Why OpenVINO cannot follow a plan, or the constraints forbid it; "" where neither is so."""
    graph, cluster = question.graph, question.cluster
    if faults := check(placement, graph, cluster):
        return faults[0]
    allowed = allowed_mask(question.constraints, graph, cluster)
    if not allowed[np.arange(graph.num_ops), placement.device].all():
        return "the constraints forbid it"
    try:
        hetero_plan(graph, placement.device, placement.device_names)
    except PlacementError:
        return "it enters a device twice"
    return ""


def _plans(question: Question) -> Iterator[tuple[str, Placement]]:
    """Plans by name that mostly have one piece a device."""
    graph, cluster, constraints = question.graph, question.cluster, question.constraints
    for d, device in enumerate(cluster.devices):
        alone = np.where(graph.is_io, cluster.host, d)
        yield f"all on {device.name}", make_placement(graph, cluster, alone, made_by="gdp openvino")
    if not (constraints.whole or constraints.together):
        for k, devices in enumerate(_rows(question)):
            placement = make_placement(graph, cluster, devices, made_by="gdp openvino")
            yield f"row of pieces {k + 1}", placement
    for method in PIPELINE_METHODS:
        try:
            result = solve.solve(replace(question, objective="throughput", method=method))
        except InfeasibleError:
            continue
        yield method, replace(result.placement, made_by="gdp openvino")


def _rows(question: Question) -> Iterator[Int[np.ndarray, "N"]]:
    """Devices of the rows of least latency, and of least period, with less and less memory."""
    ops = np.arange(question.graph.num_ops)
    blocks = layer_costs(question, np.searchsorted(_cuts(question.graph), ops, side="right"))
    seen: set[bytes] = set()
    for join, share in itertools.product((np.add, np.maximum), MEMORY_SHARES):
        row = blocks.best_of_orders(share, join)[1]
        devices = blocks.devices(row)
        if row and (key := devices.tobytes()) not in seen:
            seen.add(key)
            yield devices


def _cuts(graph: OpGraph) -> Int[np.ndarray, "C"]:
    """Ops before which a row may be cut: those over which the fewest bytes pass, ascending."""
    last = np.full(graph.num_tensors, -1)
    np.maximum.at(last, graph.use_tensor, graph.use_op)
    change = np.zeros(graph.num_ops + 1)
    read = last >= 0
    np.add.at(change, graph.producer[read] + 1, graph.tensor_bytes[read])
    np.add.at(change, last[read] + 1, -graph.tensor_bytes[read])
    passing = change.cumsum()[1 : graph.num_ops]
    return np.sort(1 + np.argsort(passing, kind="stable")[:MAX_CUTS])
