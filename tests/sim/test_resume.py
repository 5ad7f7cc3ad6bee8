"""Simulations that go on from a kept state equal full ones, to the last bit."""

import numpy as np
import pytest
from tiny import random_devices, random_problem, without_processors

from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.sim.latency import arrays, latencies, workspace

KINDS = ("single", "several", "window", "swap", "ranks")


def moved(
    rng: np.random.Generator, problem: Problem, device: np.ndarray, order: np.ndarray, kind: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Another placement and order, and the ops in which they differ from what was given."""
    n, d = problem.num_ops, problem.num_devices
    device, order = device.copy(), order.copy()
    if kind == "ranks":
        places = rng.choice(n, size=2, replace=False)
        order[places] = order[places[::-1]]
        return device, order, order[places]
    if kind == "window":
        first = int(rng.integers(n))
        ops = np.arange(first, min(n, first + int(rng.integers(1, 9))))
    else:
        ops = rng.choice(n, size={"single": 1, "swap": 2}.get(kind, 5), replace=False)
    device[ops] = device[ops[::-1]] if kind == "swap" else rng.integers(d, size=len(ops))
    return device, order, ops


def place_of_first_sender(problem: Problem, place: np.ndarray, ops: np.ndarray) -> int:
    """How many ops had ended when the first one ended that sends to one of the ops."""
    a = arrays_of(problem)
    first = problem.num_ops
    for op in ops:
        senders = a.producer[a.in_tensor[a.in_start[op] : a.in_start[op + 1]]]
        first = min(first, int(place[senders].min()) if len(senders) else 0)
    return first


def state_before(states, first: int) -> int:
    """The last kept state in which at most `first` ops are done."""
    return int(np.flatnonzero(states.kept & (states.done <= first))[-1])


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5])
def test_a_move_simulated_from_a_kept_state_equals_the_full_simulation(num_devices: int) -> None:
    """Clusters have ties, zero latencies, shared channels, dispatch per segment, barred devices."""
    from gdp.sim.kernels.resume import go_on, record_run, snapshots

    skipped = 0
    for seed in range(24):
        problem = random_problem(
            seed, num_devices=num_devices, num_ops=6 + 3 * seed, runs=seed % 2 == 1
        )
        problem = without_processors(problem)  # a run alone is gone on with
        rng = np.random.default_rng(seed)
        flat, work = arrays(problem), workspace(problem)
        device = problem.compute_s.argmin(axis=1)
        order = rng.permutation(problem.num_ops)

        def use(order: np.ndarray, work=work) -> np.ndarray:
            work.by_position[:] = order
            work.position[order] = np.arange(len(order))
            return work.position.copy()

        states = snapshots(problem, work, int(rng.integers(1, 12)))
        rank = use(order)
        base_s = record_run(flat, work, states, device.astype(np.int32), 0)
        assert base_s == latencies(problem, device[None], rank)[0][0]
        place = np.empty(problem.num_ops, np.int64)
        place[work.done_op] = np.arange(problem.num_ops)
        for kind in KINDS * 3:
            other, other_order, ops = moved(rng, problem, device, order, kind)
            first = place_of_first_sender(problem, place, ops)
            k = state_before(states, first)
            skipped += int(states.done[k] > 0)
            rank = use(other_order)
            found_s = go_on(flat, work, states, other.astype(np.int32), k, ops)
            wanted_s = latencies(problem, other[None], rank)[0][0]
            assert found_s == wanted_s, (seed, kind)
    assert skipped > 30, "some runs began late"


def test_a_state_with_too_many_arrivals_under_way_is_passed_over() -> None:
    from gdp.sim.kernels.resume import go_on, record_run, snapshots

    problem = random_problem(3, num_devices=3, num_ops=60)
    flat, work = arrays(problem), workspace(problem)
    states = snapshots(problem, work, 6)
    states = states._replace(entry_s=states.entry_s[:, :1].copy())
    device = random_devices(problem, 1)[0]
    record_run(flat, work, states, device.astype(np.int32), 0)
    assert not states.kept[1:].all()
    last = int(work.done_op[-1])
    place = np.empty(problem.num_ops, np.int64)
    place[work.done_op] = np.arange(problem.num_ops)
    ops = np.array([last])
    other = device.copy()
    other[last] = (device[last] + 1) % 3
    first = place_of_first_sender(problem, place, ops)
    k = state_before(states, first)
    found_s = go_on(flat, work, states, other.astype(np.int32), k, ops)
    assert found_s == latencies(problem, other[None], work.position)[0][0]
