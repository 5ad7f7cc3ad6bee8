"""The adversary: its problems are plain data, and it finds weaknesses that are planted."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import brute_force_s, random_problem

from benchmarks import adversary
from benchmarks.adversary import Judged, State, evolve, judged, shrunk
from benchmarks.small_changes import changed
from benchmarks.small_optimum import optimum
from benchmarks.small_problems import Small, drawn, is_sound
from gdp.bounds.budget import Bound
from gdp.methods.base import Answer, Search
from gdp.methods.heuristics.simple import round_robin
from gdp.problem.problem import Problem
from gdp.sim.score import may_replicate


def small_ones(count: int, seed: int = 7) -> list[Small]:
    """Random problems after many steps."""
    rng, found = np.random.default_rng(seed), []
    small = drawn(rng, "latency", False, 6)
    for _ in range(count):
        small = changed(small, rng, 6)
        found.append(small)
    return found


def test_problems_survive_json_and_steps_reach_all_that_they_may_hold() -> None:
    many = [small for seed in range(5) for small in small_ones(80, seed)]
    for small in many:
        assert Small.of_json(json.loads(json.dumps(small.to_json()))) == small
        assert is_sound(small)
    assert {op.kind for small in many for op in small.ops} == {"Op", "Input", "Output"}
    assert {way.channel for s in many for row in s.ways for way in row} >= {"own", "free", "bus"}
    places = [place for small in many for place in small.places]
    assert {p.kind for p in places} == {"cpu", "gpu", "offload-cpu"}
    for held in (
        any(p.pool for p in places), any(p.processor for p in places),
        any(p.caches_on >= 0 for p in places), any(s.barred for s in many),
        any(op.repeats > 1 for s in many for op in s.ops),
        any(0.0 in row for s in many for row in s.seconds),
        any(None in row for s in many for row in s.seconds),
    ):  # fmt: skip
        assert held


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_the_optimum_is_that_of_trying_everything(objective: str) -> None:
    """Against the tests' own brute force, which tries all orders, topological or not."""
    tried = 0
    for seed in range(6):
        problem = random_problem(seed, objective=objective, num_ops=5, num_devices=2, varied=True)
        assert not may_replicate(problem)
        least = optimum(problem)
        assert least is not None
        assert least == pytest.approx(brute_force_s(problem), rel=1e-9)
        tried += np.isfinite(least)
    assert tried >= 3


def test_a_weak_auto_is_found_and_its_problem_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dealing ops out in turn is no way to place them."""

    def weak(problem: Problem, search: Search) -> Answer:
        return round_robin(problem, search)

    monkeypatch.setattr(adversary, "auto", weak)
    monkeypatch.setattr(adversary, "pipeline_dp", weak)
    monkeypatch.setattr(adversary, "all_bounds", lambda *_: [])
    rows = [judged(small, 50, proofs=False) for small in small_ones(12)]
    worst = max(rows, key=lambda row: row.key)
    assert worst.ratio > 1.2
    assert worst.by
    smaller = shrunk(worst, 50)
    assert smaller.ratio >= 1 + 0.9 * (worst.ratio - 1)
    assert len(smaller.small.ops) <= len(worst.small.ops)


def test_false_bounds_and_proofs_are_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(r for s in small_ones(8) if (r := judged(s, 50, proofs=False)).optimal_s)
    assert row.faults == ()
    honest = adversary.auto

    def boasting(problem: Problem, search: Search) -> Answer:
        answer = honest(problem, search)
        return replace(answer, bound_s=1e9, proven_misfit=True)

    monkeypatch.setattr(adversary, "auto", boasting)
    monkeypatch.setattr(adversary, "all_bounds", lambda *_: [Bound(1e9, "a wish; no more")])
    assert set(judged(row.small, 50, proofs=False).faults) == {
        "auto proves that nothing fits", "auto has a bound above a value",
        "bound above a value: a wish",
    }  # fmt: skip

    def failing(problem: Problem, search: Search) -> Answer:
        raise ZeroDivisionError("of nothing")

    monkeypatch.setattr(adversary, "auto", failing)
    assert judged(row.small, 50).faults == ("ZeroDivisionError in failing: of nothing",)


def test_a_search_that_goes_on_finds_the_same(tmp_path: Path, monkeypatch) -> None:
    """Three generations at once, or one and then two from the file."""

    def quick(small: Small, *_: object, **__: object) -> Judged:
        return Judged(small, 1.0 + sum(size for _, size in small.tensors), "bytes", 1.0)

    monkeypatch.setattr(adversary, "judged", quick)

    def run(state: State, generations: int) -> State:
        left = iter(range(generations))
        evolve(state, lambda: next(left, None) is None, lambda: state.save(tmp_path / "s.json"))
        return State.load(tmp_path / "s.json")

    at_once = run(State(5, 100, 6), 9)
    halves = run(run(State(5, 100, 6), 4), 5)
    assert [x.population for x in halves.islands] == [x.population for x in at_once.islands]
    assert [len(x.curve) for x in halves.islands] == [3, 3, 3]
    worst = [row[2] for row in halves.islands[0].curve]
    assert worst == sorted(worst)
    assert worst[-1] > worst[0]
