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
from gdp.methods.pipeline.method import PipelineResult, best_pipeline, plain_pipeline
from gdp.methods.pipeline.stage_costs import (
    Hyperedge,
    Lane,
    StageCosts,
    costs_of_lanes,
    device_classes,
    tensor_pins,
)
from gdp.problem.problem import Problem
from gdp.sim.objectives import objective_of


def pipelines(problem: Problem, search: Search) -> Answer:
    """The best contiguous pipeline, and whether that is certain."""
    return plain_pipeline(without_links(problem), search, costs_of=stage_costs)


def best(
    problem: Problem, search: Search, linear_only: bool = False, memory_share: float = 1.0
) -> PipelineResult:
    """The contiguous pipeline whose dearest stage costs least."""
    problem = without_links(problem)
    return best_pipeline(problem, search, linear_only, memory_share, costs_of=stage_costs)


def without_links(problem: Problem) -> Problem:
    """The problem with free links and dispatch: transfers take the seconds of `Problem.sent_s`."""
    cluster, free = problem.cluster, np.zeros_like(problem.cluster.link_latency_s)
    devices = tuple(replace(device, dispatch_s=0.0) for device in cluster.devices)
    bare = replace(cluster, devices=devices, link_latency_s=free, link_bytes_per_s=free + np.inf)
    return replace(problem, cluster=bare)


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
