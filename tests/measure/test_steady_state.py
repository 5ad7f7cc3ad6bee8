"""The picture of a full pipeline: no device does two things at once, and what is read is there."""

from itertools import pairwise

import numpy as np
import pytest
from tiny import plain_graph, unit_cluster

from gdp.graph.op_graph import INPUT
from gdp.measure.cycle import Bar, SteadyState, steady_state
from gdp.placement.placement import Assignment
from gdp.problem.problem import make_problem
from gdp.sim.prediction import Prediction


def shown(device: list[int], seconds: list[float], teams=(), devices: int = 2) -> SteadyState:
    """An input, then ops in a chain, with these seconds on these devices."""
    ops = len(device)
    graph = plain_graph(
        ops + 1, [(i, i + 1) for i in range(ops)], 1, op_types=[INPUT, *["Op"] * ops]
    )
    compute_s = np.tile(np.array([0.0, *seconds])[:, None], (1, devices))
    problem = make_problem(graph, unit_cluster(devices), compute_s, "throughput")
    found = steady_state(Prediction(problem, Assignment(np.array([0, *device]), None, teams)))
    assert found is not None
    return found


def inside_s(bar: Bar, span_s: float) -> float:
    return min(bar.start_s + bar.seconds, span_s) - max(bar.start_s, 0.0)


def test_every_device_is_as_busy_as_its_load_says_and_does_one_thing_at_a_time() -> None:
    """Device 0 runs ops of 1 s and 3 s: a sample every 4 s. Device 1 is busy for 2 of them."""
    found = shown([0, 1, 0], [1.0, 2.0, 3.0])
    assert (found.period_s, found.span_s) == (4.0, 12.0)
    for device, share in ((0, 1.0), (1, 0.5)):
        own = [bar for bar in found.bars if bar.device == device]
        assert sum(inside_s(bar, 12.0) for bar in own) == pytest.approx(12.0 * share)
        assert all(a.start_s + a.seconds <= b.start_s + 1e-9 for a, b in pairwise(own))


def test_a_sample_runs_through_its_segments_in_order() -> None:
    found = shown([0, 1, 0], [1.0, 2.0, 3.0])
    whole = [
        sorted((b for b in found.bars if b.sample == sample), key=lambda b: b.start_s)
        for sample in range(3)
    ]
    complete = [own for own in whole if len(own) == 3]
    assert complete, "no sample is shown from its first to its last segment"
    for own in complete:
        assert [(bar.device, bar.seconds) for bar in own] == [(0, 1.0), (1, 2.0), (0, 3.0)]
        assert all(a.start_s + a.seconds <= b.start_s + 1e-9 for a, b in pairwise(own))
    # By their places in a cycle of 4 s the segments run at 0 to 1, 4 to 6 and 9 to 12 s.
    assert found.in_flight == 3


def test_replicas_take_samples_in_turn() -> None:
    found = shown([0, 0], [1.0, 2.0], teams=((0, 1),))
    assert found.period_s == pytest.approx(1.5)
    by_device = [{b.sample % 2 for b in found.bars if b.device == d} for d in (0, 1)]
    assert sorted(map(len, by_device)) == [1, 1]
    assert by_device[0] != by_device[1]


def test_a_slow_link_sets_the_period_where_it_is_the_bottleneck() -> None:
    ops = [INPUT, "Op", "Op"]
    graph = plain_graph(3, [(0, 1), (1, 2)], [1, 5, 1], op_types=ops)
    compute_s = np.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    problem = make_problem(graph, unit_cluster(2), compute_s, "throughput")
    found = steady_state(Prediction(problem, Assignment(np.array([0, 0, 1]))))
    assert found is not None
    assert found.period_s == pytest.approx(5.0)
    own = [bar for bar in found.bars if bar.device == 0]
    assert [bar.start_s for bar in own] == pytest.approx([0.0, 5.0, 10.0])


def test_nothing_is_drawn_of_what_takes_no_time() -> None:
    graph = plain_graph(2, [(0, 1)], 1, op_types=[INPUT, "Op"])
    problem = make_problem(graph, unit_cluster(1), np.zeros((2, 1)), "throughput")
    assert steady_state(Prediction(problem, Assignment(np.zeros(2, int)))) is None
