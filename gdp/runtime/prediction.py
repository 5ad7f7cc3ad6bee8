"""What an execution is predicted with, whatever the runtime."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from gdp.cluster.types import Cluster
from gdp.costs.roofline import roofline
from gdp.graph.op_graph import OpGraph
from gdp.placement import Teams
from gdp.problem.problem import Problem, make_problem
from gdp.sim.segments import segment_values


class Prediction(NamedTuple):
    """What to predict with: a problem over fused ops, and the fused op of every op."""

    problem: Problem
    device: Int[np.ndarray, "M"]
    group_of: Int[np.ndarray, "N"]
    teams: Teams = ()  # of the stages that several devices serve in turn


def roofline_prediction(
    graph: OpGraph, cluster: Cluster, device: Int[np.ndarray, "N"], objective: str
) -> Prediction:
    """Datasheet costs of the ops as the runtime fuses them."""
    from gdp.graph.fuse import fuse

    fused = fuse(graph, apart=device)
    problem = make_problem(fused.graph, cluster, roofline(fused.graph, cluster), objective)
    return Prediction(problem, segment_values(device, fused.group_of), fused.group_of)
