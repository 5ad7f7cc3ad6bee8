"""The placement that the tests of pages and traces show."""

from dataclasses import replace
from typing import Any

import numpy as np
from tiny import plain_graph, unit_cluster

from gdp.graph.op_graph import INPUT
from gdp.problem.problem import Origin, make_problem
from gdp.reports.view import PlacementView
from gdp.sim.latency import simulate

NASTY = "a<script>alert('x')</script>&\"b"
DEVICE = np.array([0, 0, 1, 0])
RESULT: dict[str, Any] = {
    "objective": "latency", "value": 9e-3, "unit": "s", "latency_s": 9e-3, "period_s": 7e-3,
    "bound_s": 6e-3, "bound_by": "critical path of <4> ops", "proven_optimal": False, "gap": 0.25,
    "method": "auto", "seed": 7, "costs": "datasheet", "feasible": True,
    "overflow_bytes": 0, "evaluations": 1234,
    "seconds": 1.5, "notes": ["mind <this>"], "peak_bytes": {"d0": 8, "d1": 5},
    "curve": [[0.5, 12e-3], [0.75, 10e-3], [1.0, 9e-3]],
    "candidates": [
        {"method": "single", "latency_s": 18e-3, "period_s": 8e-3, "value_s": 18e-3,
         "feasible": True, "seconds": 0.125, "reason": ""},
        {"method": "heft", "latency_s": 13.5e-3, "period_s": 8e-3, "value_s": 13.5e-3,
         "feasible": True, "seconds": 0.125, "reason": ""},
        {"method": "policy", "latency_s": 9e-3, "period_s": 8e-3, "value_s": 9e-3,
         "feasible": True, "seconds": 0.125, "reason": ""},
        {"method": "metis", "latency_s": None, "period_s": None, "value_s": None,
         "feasible": False, "seconds": 0.5, "reason": "<b>over memory</b>"},
    ],
}  # fmt: skip


def shown_view() -> PlacementView:
    """in -> a -> b on d1 -> c: a 1 s, 1 s to send, b 2 s, 1 s to send, c 3 s; weights 2, 3, 4.

    The model has five ops, two of which are fused to c. Modules: m.one holds a, m.two b and c.
    """
    fields = {"op_types": [INPUT, "Conv", NASTY, "Conv"], "weight_bytes": [0, 2, 3, 4]}
    scope = ["", "m.one", "m.two", "m.two"]
    fused = plain_graph(4, [(0, 1), (1, 2), (2, 3)], 1, flop=[0.0, 1e9, 2e9, 3e9], scope=scope,
                        **fields)  # fmt: skip
    fused = replace(fused, op_names=("in", "a", NASTY, "c"))
    model = plain_graph(5, [(0, 1), (1, 2), (2, 3), (3, 4)], op_types=[INPUT, *["Op"] * 4])
    compute_s = np.array([[0.0, np.inf], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    origin = Origin(np.array([0, 1, 2, 3, 3]))
    problem = make_problem(fused, unit_cluster(2, memory_bytes=10), compute_s, origin=origin)
    return PlacementView(model, problem, simulate(problem, DEVICE), DEVICE)
