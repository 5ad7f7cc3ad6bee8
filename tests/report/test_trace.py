"""Traces: one track per channel, and overlapping copies on tracks of their own."""

from dataclasses import replace

import numpy as np
from tiny import plain_graph, unit_cluster

from gdp.cluster.types import NO_CHANNEL
from gdp.problem.problem import make_problem
from gdp.report.trace import trace_events
from gdp.sim.latency import simulate


def test_copies_that_overlap_are_on_tracks_of_their_own() -> None:
    """d0 sends 4 and 2 bytes from 0 s on and 1 byte from 3 s on: two tracks beyond the channels."""
    graph = plain_graph(6, [(0, 3), (1, 4), (2, 5)], [4, 2, 1, 1, 1, 1])
    cluster = unit_cluster(2)
    free = replace(cluster, channel=np.full((2, 2), NO_CHANNEL))
    compute_s = np.repeat([[0.0], [0.0], [3.0], [1.0], [1.0], [1.0]], 2, axis=1)
    device = np.array([0, 0, 0, 1, 1, 1])
    tracks = []
    for machine in (cluster, free):
        problem = make_problem(graph, machine, compute_s)
        events = trace_events(problem, simulate(problem, device), device)
        tracks.append([e["tid"] for e in events if e.get("cat") == "transfer"])
    assert tracks == [[0, 0, 0], [0, 1, 1]]
