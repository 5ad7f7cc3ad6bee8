"""Whole modules: which ops are one, the plans, and placements with known optima."""

import itertools

import numpy as np
import pytest
from tiny import fork_join, plain_graph, unit_cluster

from gdp.methods.base import Search
from gdp.methods.heuristics.modules import (
    MOST,
    _plans,
    _stretches,
    levels,
    module_assignments,
    modules,
    path_of,
)
from gdp.methods.portfolio import auto
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import score

SEARCH = Search(seconds=None)


def unrolled(layers: int, steps: int, scope: str = "layer{layer}", **fields) -> Problem:
    """A recurrent model of 1 s an op in step-major order, tensors empty, a device per layer.

    Step t of layer k waits for step t - 1 and for layer k - 1: steps + layers - 1 s is the longest
    path, and what one device per layer takes; fewer devices take longer.
    """
    ops = [(t, k) for t in range(steps) for k in range(layers)]
    number = {op: i for i, op in enumerate(ops)}
    edges = [(number[t - 1, k], number[t, k]) for t, k in ops if t]
    edges += [(number[t, k - 1], number[t, k]) for t, k in ops if k]
    scopes = [scope.format(step=t, layer=k) for t, k in ops]
    graph = plain_graph(len(ops), sorted(edges), 0, scope=scopes, **fields)
    return make_problem(graph, unit_cluster(layers), np.ones((len(ops), layers)))


@pytest.mark.parametrize(("layers", "steps"), [(2, 5), (3, 6), (4, 3)])
def test_layers_of_a_recurrent_model_run_at_once(layers: int, steps: int) -> None:
    problem = unrolled(layers, steps)
    answer = modules(problem, SEARCH)
    assert answer.assignment is not None
    device = answer.assignment.device.reshape(steps, layers)
    assert (device == device[0]).all()
    assert len(set(device[0].tolist())) == layers
    assert score(problem, device.reshape(-1), answer.assignment.rank).value_s == steps + layers - 1
    best = auto(problem, Search(seconds=None, evaluations=1))
    assert best.assignment is not None
    assert (
        score(problem, best.assignment.device, best.assignment.rank).value_s <= steps + layers - 1
    )


def test_steps_of_a_layer_are_one_module_by_their_weights() -> None:
    """`step0/layer1` shares weights with `step1/layer1`: at one part of the path all is tied, at
    two parts there are the layers."""
    tied = np.array([k for _ in range(4) for k in range(3)])
    problem = unrolled(3, 4, "step{step}/layer{layer}", colocate=tied)
    (level,) = levels(problem)
    assert level.module.tolist() == tied.tolist()
    assert [family.tolist() for family in level.families] == [[0, 0, 0], [0, 0, 0]]


def test_backward_ops_are_of_their_forward_module_and_what_has_no_path_joins_its_input() -> None:
    """a, b forward, the loss without a path, then the gradients of b and a."""
    scopes = ["a", "b", "", "b", "a"]
    edges = [(0, 1), (0, 4), (1, 2), (2, 3), (3, 4)]
    backward = np.array([False, False, False, True, True])
    graph = plain_graph(5, edges, 1, scope=scopes, is_backward=backward)
    (level,) = levels(make_problem(graph, unit_cluster(2), np.ones((5, 2))))
    assert level.module.tolist() == [0, 1, 1, 1, 0]


def test_members_of_larger_modules_lie_side_by_side() -> None:
    """Two layers of an encoder, two of a decoder: the first of each together is one of the plans,
    and so are the encoder on one device and the decoder on the other, and all in turn."""
    scopes = ["encoder/l0", "encoder/l1", "decoder/l0", "decoder/l1"]
    graph = plain_graph(4, [(0, 1), (1, 2), (2, 3)], 1, scope=scopes)
    problem = make_problem(graph, unit_cluster(2), np.ones((4, 2)))
    coarse, fine = levels(problem)
    assert coarse.module.tolist() == [0, 0, 1, 1]
    plans = {tuple(plan.tolist()) for plan in _plans(problem, fine)}
    assert {(0, 0, 1, 1), (0, 1, 0, 1)} <= plans


def test_stretches_have_the_least_sum_of_squares() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        seconds = rng.integers(0, 9, (6, 3)).astype(float)
        order = rng.permutation(3)
        cuts = itertools.combinations_with_replacement(range(7), 2)
        least = min(
            sum(seconds[a:b, d].sum() ** 2 for a, b, d in zip((0, *c), (*c, 6), order, strict=True))
            for c in cuts
        )
        device = _stretches(seconds, np.zeros(6, dtype=np.int64), order)
        assert (np.diff(np.argsort(order)[device]) >= 0).all()
        assert sum(seconds[device == d, d].sum() ** 2 for d in range(3)) == least


def test_annealing_of_modules_goes_beyond_the_plans() -> None:
    """Modules without edges of 4, 1, 1, 1, 5, 4 s in this order, on two devices: 8 s each is best,
    which neither a stretch nor dealing in turn reaches."""
    seconds = np.array([4.0, 1.0, 1.0, 1.0, 5.0, 4.0])
    graph = plain_graph(6, [], 0, scope=[f"m{i}" for i in range(6)])
    problem = make_problem(graph, unit_cluster(2), np.repeat(seconds[:, None], 2, axis=1))

    def value_s(assignment) -> float:
        return score(problem, assignment.device, assignment.rank).value_s

    assert min(map(value_s, module_assignments(problem))) > 8.0
    answer = modules(problem, SEARCH)
    assert answer.assignment is not None
    assert value_s(answer.assignment) == 8.0
    again = modules(problem, SEARCH)
    assert (again.evaluations, value_s(again.assignment)) == (answer.evaluations, 8.0)


def test_without_names_every_op_is_a_module_and_too_many_are_refused() -> None:
    """fork_join: 6 s is the optimum."""
    answer = modules(fork_join(), SEARCH)
    assert answer.assignment is not None
    assert score(fork_join(), answer.assignment.device, answer.assignment.rank).value_s == 6.0
    many = plain_graph(MOST + 1, [], 0, scope=[f"m{i}" for i in range(MOST + 1)])
    problem = make_problem(many, unit_cluster(2), np.ones((MOST + 1, 2)))
    assert "no level of 2 to" in modules(problem, SEARCH).reason


def test_paths_are_joined_by_dots_or_slashes() -> None:
    assert path_of("/encoder/layer.0") == ("encoder", "layer", "0")
    assert path_of("") == ()
