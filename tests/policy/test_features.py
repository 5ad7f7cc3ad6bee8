"""Static features of the policy: dimensionless, exact levels, published form."""

import numpy as np
from tiny import fork_join, plain_graph, random_problem, unit_cluster

from gdp.cluster.types import Cluster, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpDetail
from gdp.policy.view.features import features, timing
from gdp.problem.problem import make_problem


def slower(cluster: Cluster, factor: float) -> Cluster:
    """The same cluster with every time multiplied."""
    from dataclasses import replace

    devices = [
        replace(
            x,
            flop_per_s={k: v / factor for k, v in x.flop_per_s.items()},
            bytes_per_s=x.bytes_per_s / factor,
            dispatch_s=x.dispatch_s * factor,
        )
        for x in cluster.devices
    ]
    return Cluster(
        cluster.name,
        tuple(devices),
        cluster.link_bytes_per_s / factor,
        cluster.link_latency_s * factor,
        cluster.channel,
        cluster.host,
    )


def test_features_do_not_depend_on_the_unit_of_time() -> None:
    graph = plain_graph(4, [(0, 1), (0, 2), (1, 3), (2, 3)], 3, flop=[1.0, 2.0, 3.0, 1.0])
    cluster = unit_cluster(3, latency_s=0.5)
    slow = slower(cluster, 1e-3)
    fast, other = (make_problem(graph, c, roofline(graph, c)) for c in (cluster, slow))
    for a, b in zip(features(fast), features(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_order_is_topological_and_by_longest_path() -> None:
    """a -> b (2 s), c (3 s) -> d: c's path is longer than b's, so the order is a c b d."""
    assert timing(fork_join()).order.tolist() == [0, 2, 1, 3]


def test_order_is_topological_on_random_problems() -> None:
    for seed in range(8):
        problem = random_problem(seed)
        position = np.argsort(timing(problem).order)
        src, dst = problem.graph.edges
        assert (position[src] < position[dst]).all()


def test_published_features_hold_shape_and_neighbours_only() -> None:
    detail = [OpDetail(output_shapes=((2, 3),))] * 2
    graph = plain_graph(2, [(0, 1)], 6, flop=[1.0, 1.0], detail=detail)
    cluster = make_cluster("c", list(unit_cluster(2).devices))
    problem = make_problem(graph, cluster, roofline(graph, cluster))
    op = features(problem, "published").op
    np.testing.assert_allclose(op[0, 1:5], [np.log(3) / 5, np.log(4) / 5, 0, 0], rtol=1e-6)
    # Op 1 has one neighbour, op 0, at position 0 of 2; op 0 has op 1, at position 1 of 2.
    np.testing.assert_allclose(op[:, 5], [0.5, 0.0])
    assert (op[:, 6:11] == -1).all()
    assert (op[:, 11:] == 0).all()
