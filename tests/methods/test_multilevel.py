"""Heuristics on coarser graphs: fork-joins that no heuristic sees op by op, levels, no METIS."""

from collections.abc import Mapping

import numpy as np
import pytest
from tiny import all_devices, plain_graph, random_problem, unit_cluster, with_memory

from gdp.base.clock import Clock
from gdp.base.errors import MissingExtraError
from gdp.methods.base import Assignment, Method, Search
from gdp.methods.heuristics import multilevel as module
from gdp.methods.heuristics.multilevel import LEAST, agreement, coarsened, levels, multilevel
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.scoring import Evaluated
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import score, values

SEARCH = Search(seconds=None)
HEURISTIC = dict(HEURISTICS)
ALONE = {"multilevel": multilevel}


def fork_joins(stages: int, width: int, length: int, size: int, devices: int) -> Problem:
    """Stages in a row: an op that `width` chains read, and one that reads their ends. 1 s an op."""
    edges, n = [], 0
    for stage in range(stages):
        head, chain = n, n + 1 + np.arange(width * length).reshape(length, width)
        join = head + 1 + width * length
        edges += [(head - 1, head)] if stage else []
        edges += [(head, op) for op in chain[0].tolist()]
        edges += [pair for i in range(length - 1) for pair in chain[i : i + 2].T.tolist()]
        edges += [(op, join) for op in chain[-1].tolist()]
        n = join + 1
    edges = sorted((int(u), int(v)) for u, v in edges)
    return make_problem(plain_graph(n, edges, size), unit_cluster(devices), np.ones((n, devices)))


def found_s(problem: Problem, methods: Mapping[str, Method] = HEURISTIC) -> dict[str, float]:
    """Seconds of what each heuristic answers."""
    answers = {name: method(problem, SEARCH) for name, method in methods.items()}
    return {
        name: score(problem, x.assignment.device, x.assignment.rank).value_s
        for name, x in answers.items()
        if x.assignment is not None
    }


def test_chains_are_placed_as_wholes() -> None:
    """Two chains of 20 s, 9 s to send: on two devices each stage takes 1 + 9 + 20 + 1 s where it
    ends on the other device, which is least: on one device it takes 42 s. Three chains of 24 s, 8 s
    to send: the third device sends both ways, 1 + 8 + 24 + 8 + 1 s, against 50 s for two chains in
    turn."""
    for problem, best_s in (
        (fork_joins(8, 2, 20, 9, 2), 8 * 31.0),
        (fork_joins(4, 3, 24, 8, 3), 4 * 42.0),
    ):
        found = found_s(problem)
        assert found.pop("multilevel") == best_s
        assert min(found.values()) > 1.1 * best_s


def test_levels_halve_and_know_where_each_op_is() -> None:
    problem = fork_joins(8, 2, 20, 9, 2)
    sizes = [problem.num_ops]
    for small, part_of in levels(problem, problem.num_ops // 2, LEAST):
        assert LEAST <= small.num_ops <= 0.75 * sizes[-1]
        sizes.append(small.num_ops)
        assert set(part_of.tolist()) == set(range(small.num_ops))
        seconds = np.bincount(part_of, problem.compute_s[:, 0])
        np.testing.assert_allclose(small.compute_s[:, 0], seconds)
        everywhere = np.arange(2)[:, None].repeat(small.num_ops, axis=1)
        assert (values(small, everywhere)[0] == values(problem, everywhere[:, part_of])[0]).all()
    assert len(sizes) > 3


def test_a_graph_without_a_coarser_one_is_its_own_level() -> None:
    problem = with_memory(random_problem(3, num_ops=8), 1 << 40)
    ((small, part_of),) = levels(problem, problem.num_ops // 2, LEAST)
    assert small is problem
    assert part_of.tolist() == list(range(8))
    answer = multilevel(problem, SEARCH)
    assert answer.assignment is not None
    value_s = score(problem, answer.assignment.device, answer.assignment.rank).value_s
    seconds, overflow = values(problem, all_devices(problem))
    assert value_s <= np.median(seconds[overflow == 0])


def test_it_does_without_pymetis(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingExtraError("no pymetis")

    monkeypatch.setattr(module, "pymetis_library", missing)
    problem = fork_joins(8, 2, 20, 9, 2)
    answer = multilevel(problem, SEARCH)
    assert answer.assignment is not None
    value_s = score(problem, answer.assignment.device, answer.assignment.rank).value_s
    assert value_s < min(s for name, s in found_s(problem).items() if name != "multilevel")


def test_no_further_level_is_begun_when_the_clock_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def counted(problem: Problem, most: int, least: int, parents=()):
        for level in levels(problem, most, least, parents):
            begun.append(level[0].num_ops)
            yield level

    monkeypatch.setattr(module, "levels", counted)
    monkeypatch.setattr(Clock, "is_over", lambda self: True)
    answer = multilevel(fork_joins(8, 2, 20, 9, 2), Search(seconds=1e-3))
    assert answer.assignment is not None
    assert len(begun) == 1


@pytest.mark.parametrize("op_s", [0.0, 1e9])
def test_with_few_seconds_the_finest_level_is_left_out(
    op_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = []

    def counted(problem: Problem, most: int, least: int, parents=()):
        first.append(most)
        return levels(problem, most, least, parents)

    problem = fork_joins(8, 2, 20, 9, 2)
    multilevel(problem, Search(seconds=100.0))  # compiled
    monkeypatch.setattr(module, "levels", counted)
    monkeypatch.setattr(module, "LEVEL_OP_S", op_s)
    answer = multilevel(problem, Search(seconds=100.0))
    assert answer.assignment is not None
    assert first[0] == problem.num_ops // (8 if op_s else 2)
    assert len(multilevel(problem, SEARCH).candidates) == 0  # counted work looks at no clock
    assert first[-1 if op_s else 0] == problem.num_ops // 2


@pytest.mark.slow
def test_more_of_each_level_are_tried_on_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is best on a coarse graph need not be on the whole one: a few count."""
    better = 0
    for seed in range(6):
        problem = with_memory(random_problem(seed, num_ops=120), 1 << 40)
        several_s = found_s(problem, ALONE)["multilevel"]
        with monkeypatch.context() as patch:
            patch.setattr(module, "KEPT", 1)
            one_s = found_s(problem, ALONE)["multilevel"]
        assert several_s <= one_s * (1 + 1e-12)
        better += several_s < one_s * 0.999
    assert better


def cut_chain(seed: int) -> tuple[Problem, np.ndarray]:
    """A chain of 96 ops and a placement that cuts it in a few places."""
    problem = make_problem(
        plain_graph(96, [(i, i + 1) for i in range(95)], 4), unit_cluster(3), np.ones((96, 3))
    )
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, 96), 6, replace=False))
    return problem, np.searchsorted(cuts, np.arange(96), side="right") % 3


def astray(problem: Problem, parents: list[np.ndarray], device: np.ndarray) -> int:
    """Ops that a coarse problem cannot leave where a placement has them."""
    coarse = coarsened(problem, 12, agreement(problem.graph, parents) if parents else None)
    assert coarse is not None
    assert coarse.problem.num_ops <= 12
    return int((coarse.project(problem, device)[coarse.part_of] != device).sum())


def test_what_parents_leave_together_is_joined_first() -> None:
    for seed in range(8):
        problem, device = cut_chain(seed)
        renamed = (device + 1) % 3  # the names of devices do not matter
        assert astray(problem, [device, renamed], device) == 0
        assert astray(problem, [], device) > 0


def test_what_all_parents_leave_comes_before_what_some_leave() -> None:
    both, other_alone = 0, 0
    for seed in range(8):
        problem, one = cut_chain(seed)
        _, other = cut_chain(seed + 100)
        both += astray(problem, [one, other], one)
        other_alone += astray(problem, [other], one)
    assert both < 0.5 * other_alone


@pytest.mark.slow
def test_recombination_is_never_worse_and_sometimes_better(monkeypatch: pytest.MonkeyPatch) -> None:
    better = 0
    for seed in range(6):
        problem = with_memory(random_problem(seed, num_ops=240), 1 << 40)
        with monkeypatch.context() as patch:
            patch.setattr(module, "RECOMBINED", 240)
            twice_s = found_s(problem, ALONE)["multilevel"]
        once_s = found_s(problem, ALONE)["multilevel"]
        assert twice_s <= once_s * (1 + 1e-12)
        better += twice_s < once_s * 0.999
    assert better


def test_small_graphs_are_recombined_where_memory_is_short_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = []

    def counted(problem: Problem, most: int, least: int, parents=()):
        begun.append(most)
        return levels(problem, most, least, parents)

    monkeypatch.setattr(module, "levels", counted)
    problem = random_problem(1, num_ops=240)
    multilevel(with_memory(problem, 1 << 40), SEARCH)
    assert begun == [120]
    weights = int(problem.graph.weight_bytes.sum() + problem.graph.tensor_bytes.sum())
    multilevel(with_memory(problem, weights // 2), SEARCH)
    assert begun == [120, 120, 30]


def test_parents_differ_in_value() -> None:
    """Renamed devices are the same placement."""
    made = [
        Evaluated(Assignment(np.array([k])), 0, value_s) for k, value_s in enumerate((2, 1, 1, 3))
    ]
    assert [int(x.assignment.device[0]) for x in module._two_best(made)] == [1, 0]
    assert len(module._two_best(made[1:3])) == 1
