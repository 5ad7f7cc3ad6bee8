"""What the decoder takes devices to hold: hand-made cases, and the simulator's peaks."""

from dataclasses import replace

import numpy as np
import pytest
from jaxtyping import Int
from tiny import cpu, plain_graph, random_problem, unit_cluster

from gdp.cluster.types import make_cluster
from gdp.methods.heuristics.list_schedule import heft_assignments
from gdp.policy.decode import decode, prepare
from gdp.policy.decode_kernels import DecodeState, SeenChoices, new_scratch, new_state, rollout
from gdp.policy.model.config import Head
from gdp.policy.view.decode_problem import NUM_PAIR_FEATURES, PAIR
from gdp.problem.problem import Problem, make_problem
from gdp.sim.memory import weights_held
from gdp.sim.objectives import peaks
from gdp.sim.score import score


def liking(problem: Problem, feature: int, weight: float) -> Head:
    """logit = weight * relu(feature)."""
    n, d, zeros = problem.num_ops, problem.num_devices, np.zeros
    chosen = zeros((NUM_PAIR_FEATURES, 1), np.float32)
    chosen[feature] = 1.0
    return Head(
        zeros((n, 1), np.float32), zeros((d, 1), np.float32), chosen,
        np.eye(1, dtype=np.float32), zeros(1, np.float32), np.full(1, weight, np.float32),
    )  # fmt: skip


def counted(problem: Problem, device: list[int] | Int[np.ndarray, "N"]) -> DecodeState:
    """What the decoder takes the devices to hold, ops placed in order."""
    n, d = problem.num_ops, problem.num_devices
    view = prepare(problem, mask_memory=False)._replace(order=np.arange(n))
    state = new_state(view)
    rollout(
        view, state, new_scratch(d, 1), liking(problem, PAIR.end, 0.0), np.array(device),
        np.zeros(n), True, 1.0, np.zeros(n, np.int64),
        SeenChoices(
            np.zeros(1, bool), np.zeros((1, 1), bool),
            np.zeros((1, 1, NUM_PAIR_FEATURES), np.float32),
        ), False,
    )  # fmt: skip
    return state


def late_weights() -> Problem:
    """A chain of three; the first tensor has 8 bytes, the last op 5 bytes of weights; 10 a device.

    When o2 is placed beside o0 and o1, the 8 bytes are gone; but its weights were there all along.
    """
    graph = plain_graph(3, [(0, 1), (1, 2)], [8, 1, 1], weight_bytes=[0, 0, 5])
    return make_problem(graph, unit_cluster(2, memory_bytes=10), np.ones((3, 2)))


def test_weights_fit_beside_the_fullest_moment() -> None:
    problem = late_weights()
    found = decode(prepare(problem), liking(problem, PAIR.fair_load, 100.0), samples=4, seed=0)
    assert (found.device[:, 0] == found.device[:, 1]).all()
    assert (found.device[:, 1] != found.device[:, 2]).all()
    assert all(score(problem, device).overflow_bytes == 0 for device in found.device)
    state = counted(problem, [0, 0, 0])
    assert (state.weight_bytes + state.fullest_bytes).tolist() == [14.0, 0.0]


def test_list_schedules_keep_weights_beside_the_fullest_moment() -> None:
    """The first plan, before any limit is lowered."""
    problem = late_weights()
    first = next(iter(heft_assignments(problem)))
    assert score(problem, first.device, first.rank).overflow_bytes == 0


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [1, 0, 2, 3, 4]])
def test_what_is_sent_is_held_before_it_is_read(order: list[int]) -> None:
    """Of o0 and o3, which share d1, the second reads 8 bytes that o1 makes on d0 at once: o2, which
    runs meanwhile and makes 5 bytes, has no room there."""
    graph = plain_graph(5, [(0, 2), (1, 3), (2, 4), (0, 3)], [1, 8, 5, 1, 1])
    cluster = make_cluster(
        "two", [cpu("d0", memory_bytes=100), cpu("d1", memory_bytes=10)],
        default_bytes_per_s=1.0, default_latency_s=0.0,
    )  # fmt: skip
    allowed = np.array([[False, True], [True, False], [True, True], [False, True], [True, False]])
    seconds = np.repeat(np.array([[1.0], [9.0], [1.0], [1.0], [1.0]]), 2, axis=1)
    problem = make_problem(
        graph, cluster, seconds, allowed=allowed, together=np.array([0, 1, 2, 0, 4])
    )
    head = liking(problem, PAIR.host, -100.0)
    view = prepare(problem)._replace(order=np.array(order))
    assert (decode(view, head, samples=3, seed=0).device[:, 2] == 0).all()
    free = prepare(problem, mask_memory=False)._replace(order=np.array(order))
    assert (decode(free, head, samples=3, seed=0).device[:, 2] == 1).all(), "but for memory there"


def test_nothing_is_made_where_its_reader_has_no_room_to_receive_it() -> None:
    """o2, on d1 with o0, reads 8 bytes of o1: two buffers of them, 16 bytes, or 8 if made there."""
    graph = plain_graph(3, [(0, 2), (1, 2)], [1, 8, 1])
    cluster = make_cluster("two", [cpu("d0", memory_bytes=100), cpu("d1", memory_bytes=12)])
    allowed = np.array([[False, True], [True, True], [False, True]])
    problem = make_problem(
        graph, cluster, np.ones((3, 2)), "throughput",
        allowed=allowed, together=np.array([0, 1, 0]),
    )  # fmt: skip
    head = liking(problem, PAIR.host, 100.0)
    order = np.arange(3)
    found = decode(prepare(problem)._replace(order=order), head, samples=3, seed=0).device
    assert (found == 1).all()
    assert score(problem, found[0]).overflow_bytes == 0
    free = prepare(problem, mask_memory=False)._replace(order=order)
    assert (decode(free, head, samples=3, seed=0).device[:, 1] == 0).all()


def test_training_pipelines_keep_what_is_read_back_for_every_later_stage() -> None:
    """f0, f1, b1, b0: of 4 bytes of f0, d0 holds a second set, since one stage follows.

    d0: 2 x 4, two buffers of b1's byte and b0's byte; d1: two buffers of 4, f1's 4 and b1's byte.
    """
    edges = [(0, 1), (1, 2), (2, 3), (0, 3)]
    graph = plain_graph(4, edges, [4, 4, 1, 1], is_backward=[False, False, True, True])
    problem = make_problem(graph, unit_cluster(2), np.ones((4, 2)), "throughput")
    assert counted(problem, [0, 1, 1, 0]).fullest_bytes.tolist() == [11.0, 13.0]
    np.testing.assert_array_equal(peaks(problem, np.array([0, 1, 1, 0]), None), [11, 13])


@pytest.mark.parametrize("seed", range(30))
def test_pipelines_hold_what_the_simulator_says(seed: int) -> None:
    """But that what is received has its buffers from the first, not once it is sent."""
    problem = random_problem(seed, num_ops=12, num_devices=3, objective="throughput")
    graph = replace(problem.graph, is_backward=np.zeros(problem.num_ops, dtype=bool))
    problem, rng = replace(problem, graph=graph), np.random.default_rng(seed)
    for _ in range(5):
        chosen = np.where(problem.group_allowed, rng.random(problem.group_allowed.shape), -1.0)
        device = chosen.argmax(axis=1)[problem.group]
        held = counted(problem, device).fullest_bytes
        peak = peaks(problem, device, None) - weights_held(problem, device)
        pairs = {(t, device[r]) for t, r in zip(graph.use_tensor, graph.use_op, strict=True)}
        received = np.zeros(problem.num_devices)
        for t, i in pairs:
            received[i] += 2 * graph.tensor_bytes[t] * (device[graph.producer[t]] != i)
        assert (held <= peak).all()
        assert (peak <= held + received).all()
