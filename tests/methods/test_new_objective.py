"""An objective that gdp does not have, added in this one file: the rent of a run.

Every op takes its seconds times its device's price, every byte moved 1 ct; no priorities matter.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import Float, Int
from tiny import plain_graph, unit_cluster

import gdp
from gdp.bounds.best import best_bound
from gdp.graph.file import save_graph
from gdp.methods.base import Search
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.priorities import evaluate_rules
from gdp.methods.table import METHODS
from gdp.placement.placement import save_placement
from gdp.problem.problem import Problem, make_problem
from gdp.sim.objectives import OBJECTIVES, Objective, Score, Values
from gdp.sim.score import score, values

PRICES = np.array([1.0, 3.0, 0.4])
SEARCH = Search(seed=1, seconds=None, evaluations=1500)


def moved_bytes(problem: Problem, devices: Int[np.ndarray, "B N"]) -> Int[np.ndarray, "B"]:
    """Each tensor once to each device that reads it and did not make it."""
    graph = problem.graph
    made_on = devices[:, graph.producer]
    read_on = np.zeros((len(devices), graph.num_tensors, problem.num_devices), dtype=bool)
    rows = np.arange(len(devices))[:, None]
    read_on[rows, graph.use_tensor, devices[:, graph.use_op]] = True
    read_on[rows, np.arange(graph.num_tensors), made_on] = False
    return read_on.sum(axis=2) @ graph.tensor_bytes


def rents(
    problem: Problem,
    devices: Int[np.ndarray, "B N"],
    ranks: Int[np.ndarray, "..."] | None = None,
) -> Values:
    """Rent of each placement, and the overflow of a single run."""
    seconds = problem.compute_s * problem.unit.seconds
    rent_of_op = seconds * PRICES[: problem.num_devices]
    rent = rent_of_op[np.arange(problem.num_ops), devices].sum(axis=1)
    rent = rent + moved_bytes(problem, devices)
    return rent, OBJECTIVES["latency"].values(problem, devices, ranks)[1]


def rent_score(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Int[np.ndarray, "N"] | None = None
) -> Score:
    """The score of one run, whose value is its rent."""
    run = OBJECTIVES["latency"].score(problem, device, rank)
    return replace(run, value_s=float(rents(problem, device[None])[0][0]))


@pytest.fixture(autouse=True)
def rent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new row of the table."""
    row = Objective(values=rents, score=rent_score, quantity="rent", unit="ct")
    monkeypatch.setitem(OBJECTIVES, "rent", row)


def problem_of(seed: int, num_ops: int = 6, num_devices: int = 3, **fields) -> Problem:
    """Ops of a random graph whose best device differs from op to op."""
    rng = np.random.default_rng(seed)
    edges = [(i, j) for j in range(num_ops) for i in range(j) if rng.random() < 0.3]
    graph = plain_graph(
        num_ops, edges, rng.integers(1, 4, num_ops).tolist(), weight_bytes=[2] * num_ops
    )
    compute_s = rng.uniform(0.5, 12.0, (num_ops, num_devices))
    return make_problem(graph, unit_cluster(num_devices, **fields), compute_s, "rent")


def least_rent(problem: Problem) -> float:
    """The optimum over all placements that fit."""
    every = itertools.product(range(problem.num_devices), repeat=problem.num_ops)
    rent, overflow = rents(problem, np.array(list(every)))
    return float(rent[overflow == 0].min())


@pytest.mark.parametrize("method", ["local_search", "auto"])
@pytest.mark.parametrize("memory_bytes", [1 << 40, 14])
def test_a_search_finds_the_placement_of_least_rent(method: str, memory_bytes: int) -> None:
    for seed in range(2):
        problem = problem_of(seed, memory_bytes=memory_bytes)
        answer = METHODS[method](problem, SEARCH)
        assert answer.assignment is not None
        judged = score(problem, answer.assignment.device, answer.assignment.rank)
        assert judged.feasible
        least = least_rent(problem)
        assert judged.value_s == pytest.approx(least, rel=1e-12)
        assert (least > least_rent(problem_of(seed))) == (memory_bytes == 14)  # memory binds


@pytest.mark.parametrize(
    "method",
    [*dict(HEURISTICS), "pipeline_dp"],
)
def test_every_heuristic_answers_and_is_judged_by_rent(method: str) -> None:
    problem = problem_of(4)
    answer = METHODS[method](problem, SEARCH)
    assert answer.assignment is not None
    device = answer.assignment.device
    assert score(problem, device).value_s == values(problem, device[None])[0][0]
    assert score(problem, device).value_s >= least_rent(problem)
    assert not answer.proven_optimal
    assert answer.bound_s == 0.0


def test_candidates_state_their_rent_and_the_best_is_kept() -> None:
    problem = problem_of(5)
    answer = METHODS["auto"](problem, SEARCH)
    rent = [c.value_s for c in answer.candidates if c.value_s is not None]
    assert len(rent) == len(answer.candidates)
    assert answer.assignment is not None
    assert score(problem, answer.assignment.device).value_s == min(rent)


def test_what_has_no_program_for_it_refuses() -> None:
    answer = METHODS["exact"](problem_of(0), SEARCH)
    assert answer.assignment is None
    assert "method 'exact' does not know objective 'rent', only latency" in answer.reason


def test_no_bound_is_claimed() -> None:
    bound = best_bound(problem_of(0))
    assert bound.value_s == 0.0
    assert bound.argument == "nothing: no bound is known for objective 'rent'"


def test_the_policy_rates_placements_by_rent() -> None:
    problem = problem_of(6)
    devices = np.array([[0] * 6, [2] * 6])
    assert evaluate_rules(problem, devices).seconds.tolist() == rents(problem, devices)[0].tolist()


def test_place_takes_it_and_an_unknown_name_is_refused_with_the_list() -> None:
    graph = plain_graph(6, [(0, 1), (1, 2), (3, 4), (4, 5)], flop=[5.0] * 6)
    result = gdp.place(
        graph, unit_cluster(3), objective="rent", method="auto", costs=seconds, search=SEARCH
    )
    # Everything where a second costs least, and nothing is moved.
    assert result.value_s == pytest.approx(6 * 2.0 * 0.4)
    assert result.objective == "rent"
    assert result.gap == 1.0
    wanted = f"{', '.join(OBJECTIVES)}, got 'watts'"
    with pytest.raises(ValueError, match=f"objective must be one of {wanted}"):
        gdp.place(graph, unit_cluster(3), objective="watts", costs=seconds, search=SEARCH)


def seconds(graph: gdp.OpGraph, cluster: gdp.Cluster) -> Float[np.ndarray, "N D"]:
    """Two seconds for everything."""
    return np.full((graph.num_ops, cluster.num_devices), 2.0)


def test_its_values_are_told_in_its_unit() -> None:
    """No bound is known of it, and none is told."""
    from gdp.cli.text import result_text

    problem = problem_of(1)
    result = gdp.place(
        problem.graph, unit_cluster(3), objective="rent", method="heft", search=SEARCH
    )
    assert f"rent {result.value_s:.4g} ct" in repr(result)
    assert f"rent {result.value_s:.4g} ct" in result._repr_html_()
    assert (result.to_json()["value"], result.to_json()["unit"]) == (result.value_s, "ct")
    lines = result_text(result).splitlines()
    assert f"rent     {result.value_s:.4g} ct" in lines
    assert "bound    none is known of rent" in lines


def test_values_do_not_depend_on_the_unit_of_time() -> None:
    """Ops of 2 ms are whole ticks of a millisecond or so; rent of them and of bytes add up."""
    graph = plain_graph(6, [(0, 1), (1, 2), (3, 4), (4, 5)], flop=[5.0] * 6)

    def briefly(graph: gdp.OpGraph, cluster: gdp.Cluster) -> Float[np.ndarray, "N D"]:
        return 1e-3 * seconds(graph, cluster)

    result = gdp.place(
        graph, unit_cluster(3), objective="rent", method="auto", costs=briefly, search=SEARCH
    )
    assert result.value_s == pytest.approx(6 * 2e-3 * 0.4)
    told = {row.method: row.value_s for row in result.candidates if row.feasible}
    assert min(told.values()) == pytest.approx(result.value_s)
    assert result.curve[-1][1] == pytest.approx(result.value_s)
    from gdp.cli.text import compare_text

    table = compare_text(graph, unit_cluster(3), {"auto": result}).splitlines()
    assert "rent" in table[1]
    assert any(f"{result.value_s:.4g} ct" in line and "no bound known" in line for line in table)


def test_notes_on_simplification_are_in_its_unit() -> None:
    """Two cuts save 0.1% of the rent, and are left out; seconds are not what they are told in."""
    problem = problem_of(1)
    result = gdp.place(
        problem.graph, unit_cluster(3), objective="rent", method="auto",
        costs=lambda *_: problem.compute_s, search=replace(SEARCH, simplicity=0.9),
    )  # fmt: skip
    (note,) = (note for note in result.notes if "simplicity 0 answers" in note)
    assert note.endswith(" ct")


def test_simulate_tells_its_value(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    graph, placed = tmp_path / "g.json", tmp_path / "p.json"
    save_graph(problem_of(1).graph, graph)
    result = gdp.place(str(graph), "2xcpu-core", objective="rent", method="heft", search=SEARCH)
    save_placement(result.placement, placed)
    code, text, _ = run("simulate", placed, "--json")
    assert code == 0
    told = json.loads(text)
    assert (told["value"], told["unit"]) == (pytest.approx(result.value_s), "ct")
    assert run("simulate", placed)[1].startswith(f"rent     {result.value_s:.4g} ct\n")
