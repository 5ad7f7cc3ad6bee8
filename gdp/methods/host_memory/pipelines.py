"""Pipelines whose stages meet in host memory: a stage is busy for its work and all that it cuts.

One lane a device: work, and on accelerators every cut tensor in and out (arXiv 2006.16423, section
4). A stage costs the same wherever the others are, so that for load the program over down-sets is
exact (`gdp.methods.pipeline.method`).
"""

from dataclasses import replace

import numpy as np

from gdp.methods.base import Answer, Search
from gdp.methods.host_memory.load import is_cpu, sent_s
from gdp.methods.pipeline.elements import Contraction
from gdp.methods.pipeline.method import (
    MEMORY_SHARES,
    SAME,
    WORK_S,
    PipelineResult,
    best_pipeline,
    certainty,
    compile_pipelines,
    no_pipeline,
)
from gdp.methods.pipeline.stage_costs import (
    Hyperedge,
    Lane,
    StageCosts,
    costs_of_lanes,
    device_classes,
    tensor_pins,
)
from gdp.methods.scoring import missing_text, score_all
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of


def pipelines(problem: Problem, search: Search) -> Answer:
    """The best contiguous pipeline, and whether that is certain."""
    compile_pipelines()
    search = replace(search, clock=search.budget(WORK_S))
    pipeline, pipelined = best(problem, search), objective_of(problem).pipelined
    # A latency is no load, and knows CPUs without number.
    by = {"bound_s": pipeline.bound_s, "bound_by": "work over the speed of all devices"}
    bound = by if pipelined else {}
    if pipeline.assignment is None:
        return no_pipeline(pipeline, **bound)
    placed, tries = score_all(problem, [pipeline.assignment])[0], 1
    why = certainty(problem, pipeline, placed.value_s)
    optimal = pipelined and placed.value_s <= pipeline.bound_s * SAME
    if placed.overflow_bytes == 0:
        return Answer(placed.assignment, why, proven_optimal=optimal, evaluations=1, **bound)
    # Weights of inputs and outputs fill the host besides.
    why = (
        "heuristic: stages of less memory than devices have, as the host holds more than its stage"
    )
    for share in MEMORY_SHARES:
        quick = search.budget().is_over()
        if placed.overflow_bytes == 0 or (quick and tries > 1):
            break
        other = best(problem, search, quick, share).assignment
        if other is None:
            break
        placed, tries = score_all(problem, [other])[0], tries + 1
    if placed.overflow_bytes == 0:
        return Answer(placed.assignment, why, evaluations=tries, **bound)
    missing = missing_text(problem, placed.assignment)
    return Answer(None, f"pipeline_dp found no pipeline that fits: {missing}", **bound)


def best(
    problem: Problem, search: Search, linear_only: bool = False, memory_share: float = 1.0
) -> PipelineResult:
    """The contiguous pipeline whose dearest stage costs least.

    Transfers take the seconds of `Problem.sent_s`, and nothing is dispatched.
    """
    cluster, free = problem.cluster, np.zeros_like(problem.cluster.link_latency_s)
    devices = tuple(replace(device, dispatch_s=0.0) for device in cluster.devices)
    bare = replace(cluster, devices=devices, link_latency_s=free, link_bytes_per_s=free + np.inf)
    return best_pipeline(
        replace(problem, cluster=bare), search, linear_only, memory_share, costs_of=stage_costs
    )


def stage_costs(problem: Problem, contraction: Contraction, replicas: bool = False) -> StageCosts:
    """Work plus every cut tensor; beside the graph's inputs and outputs, which stay on the host,
    only what is between elements is paid for there."""
    seconds, cpu, host = sent_s(problem), is_cpu(problem), problem.cluster.host
    has_io = bool(problem.graph.is_io.any())
    rows = [1 if has_io and devices[0] == host else 0 for devices in device_classes(problem)]
    lanes = [
        (Lane(True, -1 if cpu[devices[0]] else row),)
        for row, devices in zip(rows, device_classes(problem), strict=True)
    ]
    edges = []
    for t, pins, tail, read_outside in tensor_pins(problem, contraction):
        paid_s = float(seconds[t])
        edges.append(Hyperedge(0, pins, tail, read_outside, paid_s, 0.0 if tail < 0 else paid_s))
        if has_io and len(pins) > 1 and tail >= 0:
            edges.append(Hyperedge(1, pins, tail, False, paid_s, paid_s))
    is_bound = objective_of(problem).pipelined
    return costs_of_lanes(problem, contraction, tuple(lanes), 1 + has_io, edges, is_bound, replicas)
