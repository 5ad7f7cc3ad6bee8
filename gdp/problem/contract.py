"""A problem over groups of ops, each of which becomes one op."""

import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.types import Cluster
from gdp.graph.groups import all_per_group, joined, sum_per_group
from gdp.graph.op_graph import OpGraph
from gdp.problem.problem import Problem, make_problem


def contracted(
    problem: Problem,
    graph: OpGraph,
    part: Int[np.ndarray, "N"],
    *,
    compute_s: Float[np.ndarray, "N D"] | None = None,
    cluster: Cluster | None = None,
) -> Problem:
    """The problem over `graph`, whose op m stands for the ops of part m and takes their time.

    A part may go where all of its ops may, and shares a device with the parts that any of its ops
    are tied to. Costs and cluster are the problem's own unless given. For the objectives of the
    event simulator, which need no `tensor_s`. Raises `InfeasibleError` where parts that are tied
    have no device in common.
    """
    return make_problem(
        graph,
        problem.cluster if cluster is None else cluster,
        sum_per_group(problem.compute_s if compute_s is None else compute_s, part),
        problem.objective,
        allowed=all_per_group(problem.allowed, part),
        together=joined(part, problem.group),
        unit=problem.unit,
    )
