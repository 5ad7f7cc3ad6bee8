"""The solvers against every assignment of tiny problems."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from host_memory import assignments, load_problem
from tiny import plain_graph, random_problem

from gdp.base.clock import Clock
from gdp.base.rows import imported
from gdp.bounds.linear_program import PlacementSolution
from gdp.bounds.work import work_over_speed_s
from gdp.cluster.types import Device, make_cluster
from gdp.methods.base import Answer, Search
from gdp.methods.exact.targets import ProofState, close_gap
from gdp.methods.host_memory import load as host_load
from gdp.methods.host_memory.blocks import (
    contiguous_start,
    ladder_positions,
    least_block_latency,
    solve_blocks,
)
from gdp.methods.host_memory.hypergraph import LoadHypergraph, absorb, load_model, reduce_model
from gdp.methods.host_memory.program import (
    load_s,
    polish,
    solve_loads,
)
from gdp.methods.host_memory.search import _step, fill, flat_nodes, new_state, search_loads
from gdp.problem.problem import Problem, make_problem
from gdp.sim.objectives import objective_of

FOREVER = Clock(None)
SEARCH = Search(seconds=None, evaluations=100)


def solved(problem: Problem) -> Answer:
    """The answer of the objective's program, one device for each stage."""
    program = imported(objective_of(problem).programs["exact"])
    return program.solve(replace(problem, replicas=False), SEARCH)


def least_load_s(problem: Problem) -> float:
    """The optimum over all assignments; inf where nothing fits."""
    value_s, overflow = host_load.values(problem, np.array(list(assignments(problem))))
    return float(value_s[overflow == 0].min(initial=np.inf))


def least_of(model: LoadHypergraph) -> float:
    """The least largest load of all assignments of the nodes that fit; inf where none does."""
    choices = [np.flatnonzero(np.isfinite(row)) for row in model.work_s]
    if not all(len(row) for row in choices):
        return np.inf
    chosen = np.array(list(itertools.product(*choices)))  # [B, V]
    on = chosen[:, :, None] == np.arange(model.num_devices)  # [B, V, D]
    load_s = (on * np.where(np.isfinite(model.work_s), model.work_s, 0.0)).sum(axis=1)
    held = (on * model.held_bytes[:, None]).sum(axis=1)
    for pins, seconds in zip(model.pins, model.weight_s, strict=True):
        part = on[:, list(pins)]
        load_s += seconds * (part.any(axis=1) & ~part.all(axis=1) & model.pays)
    for size, nodes in model.shared:
        held += size * on[:, list(nodes)].any(axis=1)
    fits = (held <= model.memory_bytes).all(axis=1)
    return float(load_s.max(axis=1)[fits].min(initial=np.inf))


def problems(seed: int, count: int, num_ops: int = 6) -> Iterator[Problem]:
    """Random problems of all sorts: CPUs or none, memory that binds or not, training or not."""
    rng = np.random.default_rng(seed)
    shapes = itertools.cycle([(2, 1), (3, 0), (2, 0), (1, 2), (3, 1)])
    for i, (accelerators, cpus) in zip(range(count), shapes, strict=False):
        memory_bytes = (1 << 40, 6)[i % 2]
        yield load_problem(
            rng, num_ops, accelerators, cpus, training=i % 3 == 2, memory_bytes=memory_bytes
        )


@pytest.mark.slow
def test_the_least_load_is_found_and_proven() -> None:
    misfits = 0
    for problem in problems(0, 20):
        best_s = least_load_s(problem)
        answer = solved(problem)
        if not np.isfinite(best_s):
            misfits += 1
            assert answer.assignment is None
            assert "proven" in answer.reason
            continue
        assert answer.assignment is not None
        value_s, overflow = host_load.values(problem, answer.assignment.device[None])
        assert overflow[0] == 0
        assert value_s[0] == pytest.approx(best_s, rel=1e-9, abs=1e-12)
        assert answer.bound_s <= best_s * (1 + 1e-9)
        assert answer.proven_optimal
    assert misfits


@pytest.mark.slow
def test_reductions_keep_what_is_below_the_known_value() -> None:
    """Of all assignments below a value the best survives; None means that there is none."""
    shrunk, refuted = 0, 0
    for problem in problems(1, 15, num_ops=6):
        model = load_model(problem)
        best_s = least_of(model)
        assert best_s == pytest.approx(least_load_s(problem), rel=1e-12)
        if not np.isfinite(best_s) or best_s == 0.0:
            continue
        assert work_over_speed_s(model.work_s) <= best_s * (1 + 1e-12)
        for factor in (1.001, 1.2, 3.0):
            for named in (True, False):
                small = reduce_model(model, best_s * factor, FOREVER, named)
                assert small is not None
                shrunk += model.num_nodes - small.num_nodes
                assert least_of(small) == pytest.approx(best_s, rel=1e-12)
        small = absorb(model, best_s * 1.2)
        assert least_of(small) == pytest.approx(best_s, rel=1e-12)
        for factor in (0.999, 0.8):
            small = reduce_model(model, best_s * factor, FOREVER)
            refuted += small is None
            assert small is None or least_of(small) >= best_s * (1 - 1e-9)
    assert shrunk > 15
    assert refuted > 3


@pytest.mark.slow
def test_a_cutoff_below_the_optimum_is_refuted() -> None:
    for problem in problems(2, 10):
        best_s = least_load_s(problem)
        if np.isfinite(best_s) and best_s > 0.0:
            solution = solve_loads(load_model(problem), 0.99 * best_s, None)
            assert solution.device is None
            assert solution.is_complete
            assert solution.bound_s == pytest.approx(0.99 * best_s)


def test_moves_change_the_state_to_what_it_is_from_scratch() -> None:
    rng = np.random.default_rng(3)
    for problem in problems(3, 6, num_ops=9):
        model = load_model(problem)
        nodes = flat_nodes(model)
        choice = np.where(np.isfinite(model.work_s), rng.random(model.work_s.shape), -1.0)
        state, fresh = (new_state(nodes, choice.argmax(axis=1), 0) for _ in range(2))
        fill(nodes, state)
        for _ in range(60):
            _step(nodes, state)
            fresh.device[:] = state.device
            fill(nodes, fresh)
            assert state.load_s == pytest.approx(fresh.load_s, abs=1e-9)
            for name in ("held", "pins", "holders"):
                assert np.array_equal(getattr(state, name), getattr(fresh, name))
        device = state.device[model.node][problem.group]
        assert state.load_s == pytest.approx(host_load.loads(problem, device), abs=1e-9)


def test_search_finds_the_optimum_of_small_problems_and_repeats_itself() -> None:
    for problem in problems(4, 8):
        model = load_model(problem)
        start = np.isfinite(model.work_s).argmax(axis=1)
        device, load_s, over = search_loads(model, [start], FOREVER, seed=1, rounds=3)
        if np.isfinite(best_s := least_load_s(problem)):
            assert over == 0
            assert load_s == pytest.approx(best_s, rel=1e-9, abs=1e-12)
        again = search_loads(model, [start], FOREVER, seed=1, rounds=3)
        assert np.array_equal(device, again[0])


def test_polishing_never_worsens_and_mostly_finds_the_optimum() -> None:
    rng = np.random.default_rng(7)
    tried, optimal = 0, 0
    for problem in problems(5, 10):
        model = load_model(problem)
        choice = np.where(np.isfinite(model.work_s), rng.random(model.work_s.shape), -1.0)
        start = choice.argmax(axis=1)
        value_s, overflow = host_load.values(problem, start[model.node][problem.group][None])
        assert load_s(model, start) == pytest.approx(value_s[0])
        if overflow[0] > 0:
            continue
        found = polish(model, start, load_s(model, start), FOREVER, 0)
        found_s, overflow = host_load.values(problem, found[model.node][problem.group][None])
        assert overflow[0] == 0
        assert found_s[0] <= value_s[0]
        tried += 1
        optimal += found_s[0] <= least_load_s(problem) * 1.002
    assert tried > 3
    assert optimal > tried / 2


def least_block_latency_s(problem: Problem, blocks_per_device: int) -> float:
    """The optimum over every (device, call) of every op; inf where nothing fits."""
    cpu = host_load.is_cpu(problem)
    options = [
        [(d, j) for d in np.flatnonzero(row) for j in range(1 if cpu[d] else blocks_per_device)]
        for row in problem.allowed
    ]
    pairs = np.array(list(itertools.product(*options)))
    devices, ranks = pairs[..., 0], pairs[..., 1]
    together = devices == devices[:, [int(np.argmax(problem.group == g)) for g in problem.group]]
    devices, ranks = devices[together.all(axis=1)], ranks[together.all(axis=1)]
    value_s, overflow = host_load.block_values(problem, devices, ranks)
    best_s = np.inf
    for b in np.flatnonzero((overflow == 0) & np.isfinite(value_s)):
        if value_s[b] < best_s and most_blocks(problem, devices[b], ranks[b]) <= blocks_per_device:
            best_s = float(value_s[b])
    return best_s


def most_blocks(problem: Problem, device: np.ndarray, rank: np.ndarray | None) -> int:
    block = host_load.blocks(problem, device, rank)
    counts = [
        len(np.unique(block[device == d])) for d in np.flatnonzero(~host_load.is_cpu(problem))
    ]
    return max(counts, default=0)


@pytest.mark.slow
@pytest.mark.parametrize("blocks_per_device", [1, 2])
def test_the_least_latency_of_calls_is_found(blocks_per_device: int) -> None:
    rng = np.random.default_rng(5)
    for i in range(10):
        shape = [(2, 1), (2, 0), (1, 1)][i % 3]
        memory_bytes = 5 if i % 2 else 1 << 40
        problem = load_problem(rng, 5, *shape, objective="block_latency", memory_bytes=memory_bytes)
        best_s = least_block_latency_s(problem, blocks_per_device)
        answer = least_block_latency(problem, SEARCH, blocks_per_device)
        if not np.isfinite(best_s):
            assert answer.assignment is None
            assert "proven" in answer.reason
            continue
        assert answer.assignment is not None
        device, rank = answer.assignment.device, answer.assignment.rank
        value_s, overflow = host_load.block_values(problem, device[None], rank)
        assert overflow[0] == 0
        assert value_s[0] == pytest.approx(best_s, rel=1e-6, abs=1e-9)
        assert answer.bound_s <= best_s * (1 + 1e-9)
        assert answer.proven_optimal
        assert most_blocks(problem, device, rank) <= blocks_per_device


def test_calls_in_a_row_by_hand() -> None:
    """A chain of four ops of 1 s and 1 byte, one second a transfer, two bytes per accelerator.

    Two calls of two ops each: 1 + 1 + store 1, load 1 + 1 + 1 = 6 s; an accelerator and the CPU,
    at 3 s an op, take at least 1 + 1 + 1 + 3 + 3.
    """
    graph = plain_graph(4, [(0, 1), (1, 2), (2, 3)], weight_bytes=[1] * 4)
    devices = [Device(f"a{i}", "accelerator", {"default": 1.0}, 1.0, 2) for i in range(2)]
    devices += [Device("c", "cpu", {"default": 1.0}, 1.0)]
    problem = make_problem(
        graph, make_cluster("hand", devices), np.array([[1.0, 1.0, 3.0]] * 4), "block_latency",
        sent_s=np.ones(4),
    )  # fmt: skip
    start = contiguous_start(problem, Clock(0.2), 0)
    assert start is not None
    assert host_load.block_values(problem, start[None])[0][0] == 6.0
    answer = solved(problem)
    assert answer.proven_optimal
    assert answer.bound_s == pytest.approx(6.0, rel=1e-6)
    position, homes = ladder_positions(problem, start)
    assert position.tolist() == [1, 1, 3, 3]
    assert len(homes) == 2
    refuted = solve_blocks(problem, 1, 5.9, None, 0)
    assert refuted.device is None
    assert refuted.is_complete


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_the_least_period_is_found_where_memory_cannot_bind() -> None:
    from gdp.sim.latency import periods

    proven = 0
    for seed in range(8):
        problem = random_problem(seed, objective="throughput", num_ops=7, num_devices=2 + seed % 2)
        every = np.array(list(assignments(problem)))
        value_s, overflow = periods(problem, every)
        answer = solved(problem)
        fits = overflow == 0
        if not fits.any():
            assert answer.assignment is None
            continue
        assert answer.assignment is not None
        best_s = float(value_s[fits].min())
        found_s, over = periods(problem, answer.assignment.device[None])
        assert over[0] == 0
        assert answer.bound_s <= best_s * (1 + 1e-9) + 1e-12
        if answer.proven_optimal or not overflow.any():
            proven += 1
            assert found_s[0] == pytest.approx(best_s, rel=1e-5)
        if not overflow.any():
            assert answer.proven_optimal
    assert proven > 2


@pytest.mark.slow
def test_schedules_are_bounded_and_optimal_where_proven() -> None:
    from gdp.sim.latency import latencies

    rng = np.random.default_rng(6)
    proven = 0
    for seed in range(8):
        problem = random_problem(seed, num_ops=6, num_devices=2)
        every = np.array(list(assignments(problem)))
        orders = [None, *(rng.permutation(problem.num_ops) for _ in range(6))]
        best_s = np.inf
        for order in orders:
            value_s, overflow = latencies(problem, every, order)
            best_s = min(best_s, float(value_s[overflow == 0].min(initial=np.inf)))
        answer = solved(problem)
        if answer.assignment is None:
            assert not np.isfinite(best_s)
            continue
        device, rank = answer.assignment.device, answer.assignment.rank
        found_s, over = latencies(problem, device[None], rank)
        assert over[0] == 0
        assert answer.bound_s <= best_s * (1 + 1e-9)
        if answer.proven_optimal:
            proven += 1
            assert found_s[0] <= best_s * (1 + 1e-5)
    assert proven > 2


def test_what_time_cut_short_is_no_proof_that_nothing_fits() -> None:
    """Nothing fits as far as is known; a bound of 2 s and no placement leaves that open."""
    nothing = ProofState(None, np.inf, 1.0, "work")
    cut = nothing.after(PlacementSolution(None, 2.0, False), np.inf, "solver")
    assert (cut.bound_s, cut.by, cut.is_complete) == (2.0, "solver", False)
    proven = nothing.after(PlacementSolution(None, np.inf, True), np.inf, "solver")
    assert proven.is_complete


def test_targets_halve_what_is_open_until_bound_and_value_meet() -> None:
    """The optimum is 3 of a known 8 over a bound of 2; the first look at 8 takes too long."""
    targets: list[float] = []

    def below(known: ProofState, target_s: float, seconds: float | None) -> ProofState:
        targets.append(round(target_s, 3))
        if len(targets) == 1:
            return known.after(PlacementSolution(None, 2.0, False), target_s, "solver")
        if target_s <= 3.0:
            return known.after(PlacementSolution(None, target_s, True), target_s, "solver")
        device = np.zeros(1, dtype=np.int64)
        better = replace(known, best="three", value_s=3.0)
        return better.after(PlacementSolution(device, 3.0, True), target_s, "solver")

    known = close_gap(ProofState("eight", 8.0, 2.0, "work"), below, Clock(60.0), 0.1)
    assert (known.best, known.value_s, known.bound_s) == ("three", 3.0, 3.0)
    assert known.is_complete
    assert targets == [8.0, 5.0]
