"""Each kind of step alone, never uphill, finds what only it can find.

Every case starts where all other kinds are stuck: any other step makes it worse.
"""

from typing import NamedTuple

import numpy as np
import pytest
from tiny import all_devices, plain_graph, random_problem, unit_cluster

from gdp.base.clock import Clock
from gdp.cluster.types import make_cluster
from gdp.methods.annealing.annealer import (
    FIT,
    AnnealConfig,
    LatencyAnnealer,
    anneal,
    anneal_to_fit,
    make_annealer,
    moves_as_drawn,
)
from gdp.methods.base import Assignment, Search
from gdp.methods.heuristics.multilevel import coarse_problem
from gdp.methods.scoring import score_all
from gdp.methods.search.local_search import SearchConfig, improve, local_search
from gdp.problem.problem import Problem, make_problem
from gdp.sim.score import score, values

KINDS = ("single", "neighbour", "chain", "window", "swap", "cut", "cluster", "ranks")
FOREVER = Clock(None)


class Case(NamedTuple):
    """A start and the value that one kind of step reaches from it."""

    problem: Problem
    start: list[int]
    best_s: float
    found_by: str


def only(kind: str) -> AnnealConfig:
    """Steps of one kind, at a temperature at which nothing goes uphill."""
    shares = tuple(float(k == kind) for k in KINDS)
    return AnnealConfig(hot=1e-12, cold=1e-12, shares=shares, guide=0.0)


def free_links(num_devices: int, **fields):
    """Devices between which small tensors cost next to nothing."""
    devices = unit_cluster(num_devices, **fields).devices
    return make_cluster("free", devices, default_bytes_per_s=1.0, default_latency_s=0.0)


def third_device() -> Case:
    """p -> x -> q, with p and q on d1, where x is slower; it is fastest on d2, beside no one."""
    compute_s = np.array([[np.inf, 1.0, np.inf], [2.0, 9.0, 1.0], [np.inf, 1.0, np.inf]])
    problem = make_problem(plain_graph(3, [(0, 1), (1, 2)], 0), free_links(3), compute_s)
    return Case(problem, [1, 0, 1], 3.0, "single")


def interleaved_chain() -> Case:
    """a0 -> a2 -> a4 belongs to d1, 1 s each instead of 3; b1 and b3, which it reads, to d0.

    Parts of the chain pay 20 s to send; what lies between in the order, or nearer in the graph,
    is slow on d1.
    """
    edges = [(0, 2), (1, 2), (2, 4), (3, 4)]
    graph = plain_graph(5, edges, [20, 0, 20, 0, 0])
    compute_s = np.array([[3.0, 1.0], [1.0, 90.0], [3.0, 1.0], [1.0, 90.0], [3.0, 1.0]])
    problem = make_problem(graph, free_links(2), compute_s)
    return Case(problem, [0] * 5, 3.0, "chain")


def tied_weights() -> Case:
    """u and v share a weight that overfills d0, and are next to each other in no more than order.

    Only without both is d0 rid of it; each of them makes d1, which is the busier one, later.
    """
    graph = plain_graph(6, [], 0, weight_bytes=[0, 6, 6, 6, 0, 0], weight_id=[0, 1, 2, 2, 4, 5])
    compute_s = np.array([[np.inf, 10.0], [1.0, np.inf]] + [[1.0, 1.5]] * 2 + [[1.0, np.inf]] * 2)
    problem = make_problem(graph, free_links(2, memory_bytes=10), compute_s)
    return Case(problem, [1, 0, 0, 0, 0, 0], 13.0, "window")


def exchange() -> Case:
    """x and y are on each other's fast device, and no device holds both weights."""
    graph = plain_graph(2, [], 0, weight_bytes=[4, 4])
    problem = make_problem(graph, free_links(2, memory_bytes=4), np.array([[5.0, 1.0], [1.0, 5.0]]))
    return Case(problem, [0, 1], 1.0, "swap")


def star() -> Case:
    """h with its two readers belongs to d1; the ops between them in the order do not."""
    graph = plain_graph(9, [(1, 3), (1, 5)], [0, 20, *[0] * 7])
    compute_s = np.array([[1.0, 90.0], [4.0, 1.0]] * 3 + [[1.0, 90.0]] * 3)
    problem = make_problem(graph, free_links(2), compute_s)
    return Case(problem, [0] * 9, 6.0, "cluster")


def order() -> Case:
    """o1 of 1 s feeds 5 s on d1 and should run before o0 of 3 s: 6 s instead of 9."""
    graph = plain_graph(3, [(1, 2)], 0)
    compute_s = np.array([[3.0, np.inf], [1.0, np.inf], [np.inf, 5.0]])
    problem = make_problem(graph, free_links(2), compute_s)
    return Case(problem, [0, 0, 1], 6.0, "ranks")


CASES = {
    "single": third_device,
    "chain": interleaved_chain,
    "window": tied_weights,
    "swap": exchange,
    "cluster": star,
    "ranks": order,
}


def searched(problem: Problem, start: list[int], kind: str, steps: int = 600) -> float:
    """The value in seconds that steps of one kind reach; inf where it does not fit."""
    rank = np.arange(problem.num_ops)
    begun = score_all(problem, [Assignment(np.array(start), rank)])[0]
    chain = make_annealer(problem, begun, seed=1)
    anneal(chain, steps, only(kind), FOREVER, None)
    best = chain.best()
    again_s, over = values(problem, best.assignment.device[None], best.assignment.rank)
    assert best.key == (over[0], again_s[0]), "what a search says it found is so"
    return best.value_s if best.overflow_bytes == 0 else np.inf


@pytest.mark.parametrize("name", CASES)
def test_a_kind_of_step_finds_what_no_other_finds(name: str) -> None:
    case = CASES[name]()
    found_s = {kind: searched(case.problem, case.start, kind) for kind in KINDS}
    assert [k for k in KINDS if found_s[k] <= case.best_s] == [case.found_by], found_s


def test_a_neighbour_is_followed_at_once_where_single_steps_guess() -> None:
    """x belongs beside p, on the last of nine devices: one step, against one in eight."""
    compute_s = np.full((2, 9), np.inf)
    compute_s[0, 8], compute_s[1] = 1.0, 3.0
    problem = make_problem(plain_graph(2, [(0, 1)], 9), unit_cluster(9), compute_s)
    begun = score_all(problem, [Assignment(np.array([8, 0]))])[0]
    hits = {}
    for kind in ("neighbour", "single"):
        hits[kind] = 0
        for seed in range(20):
            with moves_as_drawn():
                chain = make_annealer(problem, begun, seed)
            anneal(chain, 1, only(kind), FOREVER, None)
            hits[kind] += chain.best().value_s == 4.0
    assert hits["neighbour"] == 20
    assert 0 < hits["single"] < 10


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_border_moves_by_two_ops_at_once(objective: str) -> None:
    """A chain whose cut carries 9 bytes; two ops on it carries 1, and between them 30."""
    n = 12
    graph = plain_graph(n, [(i, i + 1) for i in range(n - 1)], [1, 1, 1, 9, 30, 1, *[1] * 6])
    compute_s = np.ones((n, 2))
    compute_s[:4, 1] = compute_s[6:, 0] = np.inf
    problem = make_problem(graph, free_links(2), compute_s, objective)
    start = [0] * 4 + [1] * 8
    best_s = {"latency": 13.0, "throughput": 6.0}[objective]
    found_s = {kind: searched(problem, start, kind) for kind in KINDS}
    assert found_s["cut"] == found_s["window"] == best_s
    assert found_s["single"] == found_s["swap"] == values(problem, np.array([start]))[0][0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_improving_reaches_the_best_of_all_placements(objective: str, seed: int) -> None:
    # The first of these problems in which anything fits.
    seeds = range(seed, seed + 400, 4)
    problems = (random_problem(i, objective=objective, num_ops=9, num_devices=2) for i in seeds)
    problem = next(p for p in problems if (values(p, all_devices(p))[1] == 0).any())
    devices = all_devices(problem)
    value_s, overflow = values(problem, devices)
    fits = overflow == 0
    worst = devices[fits][value_s[fits].argmax()]
    begun = score_all(problem, [Assignment(worst)])[0]
    found = improve(problem, [begun], Search(seconds=None, evaluations=8000), FOREVER)
    assert found.overflow_bytes == 0
    assert found.value_s <= value_s[fits].min() * (1 + 1e-12)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_annealing_to_fit_ends_in_a_placement_that_fits(objective: str) -> None:
    """Ten weights of 4 bytes, all on a device of 20: half of them have to go."""
    graph = plain_graph(10, [], 0, weight_bytes=[4] * 10)
    problem = make_problem(graph, unit_cluster(2, memory_bytes=20), np.ones((10, 2)), objective)
    found = anneal_to_fit(problem, Assignment(np.zeros(10, dtype=np.int64)), FOREVER, 0, 5000)
    assert found.overflow_bytes == 0
    assert score(problem, found.assignment.device, found.assignment.rank).feasible
    assert FIT.fit


def all_or_nothing(objective: str) -> Problem:
    """Two ops that send 9 bytes: 3 s each on d0, 1 s each on d1, and worse than either apart."""
    graph = plain_graph(2, [(0, 1)], 9)
    return make_problem(graph, free_links(2), np.array([[3.0, 1.0], [3.0, 1.0]]), objective)


@pytest.mark.parametrize(("objective", "best_s"), [("latency", 2.0), ("throughput", 2.0)])
def test_single_steps_cross_a_ridge_uphill(objective: str, best_s: float) -> None:
    """From 6 s over 9 s or more down to 2 s, from every seed; never uphill stays at 6 s."""
    problem = all_or_nothing(objective)
    begun = score_all(problem, [Assignment(np.zeros(2, np.int64), np.arange(2))])[0]
    assert begun.value_s == 6.0
    single = tuple(float(kind == "single") for kind in KINDS)
    for seed in range(5):
        chain = make_annealer(problem, begun, seed)
        anneal(chain, 2000, AnnealConfig(hot=2.0, cold=0.5, shares=single), FOREVER, None)
        assert chain.best().value_s == best_s


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_round_ends_cold_however_hot_it_began(objective: str) -> None:
    """60 ops of 1 s where they belong and 2 s where they do not. A walk that stays as hot as it
    began never meets all of them right; the largest load may end a few seconds above the least."""
    own = np.arange(60) % 2
    compute_s = np.where(own[:, None] == np.arange(2), 1.0, 2.0)
    graph = plain_graph(60, [(i, i + 1) for i in range(59)], 0)
    problem = make_problem(graph, free_links(2), compute_s, objective)
    begun = score_all(problem, [Assignment(1 - own)])[0]
    start_s, good_s = {"latency": (120.0, 60.0), "throughput": (60.0, 33.0)}[objective]
    assert begun.value_s == start_s
    for seed in range(3):
        with moves_as_drawn():  # the best of several is no walk
            chain = make_annealer(problem, begun, seed)
        anneal(chain, 8000, AnnealConfig(hot=10.0, cold=1e-6), FOREVER, None)
        assert chain.best().value_s <= good_s


def test_a_round_ends_with_its_evaluations() -> None:
    problem = random_problem(3, num_ops=20)
    begun = score_all(problem, [Assignment(all_to_first(problem))])[0]
    chain = LatencyAnnealer(problem, begun, 0)
    anneal(chain, 500, AnnealConfig(), FOREVER, 40)
    assert chain.evaluations == 40


def all_to_first(problem: Problem) -> np.ndarray:
    """Every op on the first device it may use."""
    return problem.group_allowed.argmax(axis=1)[problem.group]


def chains_of(count: int, length: int) -> Problem:
    """Chains of 1 s ops, each chain in a row, 5 s to send: whole chains belong to one device."""
    edges = [(c * length + i, c * length + i + 1) for c in range(count) for i in range(length - 1)]
    n = count * length
    return make_problem(plain_graph(n, edges, 5), unit_cluster(2), np.ones((n, 2)))


def test_a_coarse_problem_keeps_the_work_the_constraints_and_the_way_back() -> None:
    problem = chains_of(4, 16)
    coarse = coarse_problem(problem, 8)
    assert coarse is not None
    assert coarse.problem.num_ops <= 8
    np.testing.assert_allclose(coarse.problem.compute_s.sum(axis=0), problem.compute_s.sum(axis=0))
    device = np.repeat([0, 1, 1, 0], 16)
    small = coarse.project(problem, device)
    assert (small[coarse.part_of] == device).all()
    for fine in coarse.expand_all(problem, Assignment(small, np.arange(len(small)))):
        assert (fine.device == device).all()
    fine_s = values(problem, device[None])[0][0]
    assert values(coarse.problem, small[None])[0][0] == pytest.approx(fine_s)


def test_a_coarse_search_finds_whole_chains_where_a_fine_one_is_lost() -> None:
    """Six chains of 40 ops on one device: three on each take 120 s. Medians over five seeds."""
    problem = chains_of(6, 40)
    begun = score_all(problem, [Assignment(np.zeros(240, dtype=np.int64))])[0]
    coarse_s, fine_s = [], []
    for seed in range(5):
        search = Search(seconds=None, evaluations=150, seed=seed)
        config = SearchConfig(coarse_above=100, coarse_ops=12)
        with moves_as_drawn():
            coarse_s.append(improve(problem, [begun], search, FOREVER, config).value_s)
            fine_s.append(improve(problem, [begun], search, FOREVER, SearchConfig()).value_s)
    assert np.median(coarse_s) == pytest.approx(120.0)
    assert np.median(fine_s) > 120.5


def test_a_search_starts_from_what_it_is_given() -> None:
    problem = random_problem(5, num_ops=20)
    start = Assignment(all_to_first(problem))
    answer = local_search(problem, Search(seconds=None, evaluations=1, start=start))
    if answer.assignment is not None:
        assert (answer.assignment.device == start.device).all()
    else:
        assert "misses" in answer.reason or "no placement can fit" in answer.reason
