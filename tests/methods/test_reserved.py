"""Plans under lowered limits fit where the plain ones do not, and no plan is made without need."""

import numpy as np
import pytest
from tiny import plain_graph, random_problem, unit_cluster

from gdp.methods.base import Search
from gdp.methods.heuristics.list_schedule import (
    critical_path_assignments,
    etf_assignments,
    heft,
    heft_assignments,
    reserved_assignments,
)
from gdp.methods.heuristics.list_schedule_kernels import heft_plan
from gdp.methods.priorities import upward_rank
from gdp.methods.scoring import score_all
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import values

FORMS = 8  # that HEFT has where memory is ample


def short_of_memory() -> Problem:
    """o0 (3 bytes of weights) is read by o1 and o3, o1 by o2 (1 byte each): 9 bytes a device.

    Tensors have 2 bytes and take 2 s to send, ops take 1 s. By its own count a plan stays below 9
    bytes, since it takes a tensor to be gone when its last reader is placed; the run needs 10.
    """
    graph = plain_graph(4, [(0, 1), (1, 2), (0, 3)], 2, weight_bytes=[3, 1, 1, 0])
    return make_problem(graph, unit_cluster(2, memory_bytes=9), np.ones((4, 2)))


def test_a_lowered_limit_fits_where_no_form_of_heft_does() -> None:
    problem = short_of_memory()
    found = score_all(problem, list(heft_assignments(problem)))
    assert all(scored.overflow_bytes > 0 for scored in found[:FORMS])
    assert found[-1].overflow_bytes == 0
    answer = heft(problem, Search(seconds=None))
    assert answer.assignment is not None
    assert not answer.reason, "nothing had to be repaired"


def test_plans_end_with_the_first_that_fits() -> None:
    for seed in range(20):
        problem = random_problem(seed, num_ops=16, num_devices=3)
        order = np.argsort(upward_rank(problem))
        made = list(
            reserved_assignments(
                problem, lambda less, order=order: heft_plan(less, order, True, True)
            )
        )
        fits = [values(problem, x.device[None], x.rank)[1][0] == 0 for x in made]
        assert not any(fits[:-1])
        assert len(made) <= 12


@pytest.mark.parametrize(
    "assignments",
    [
        heft_assignments,
        etf_assignments,
        lambda problem: critical_path_assignments(problem, 0),
    ],
)
def test_where_memory_is_ample_no_plan_is_added(assignments) -> None:
    ample = make_problem(
        plain_graph(4, [(0, 1), (1, 2), (0, 3)], 2), unit_cluster(2), np.ones((4, 2))
    )
    counts = [len(list(assignments(problem))) for problem in (ample, short_of_memory())]
    assert counts[1] > counts[0]
