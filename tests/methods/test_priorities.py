"""Priorities beside devices: each rule by a slow reference, and the best of them counts."""

import numpy as np
import pytest
from tiny import fork_join, random_problem

from gdp.methods.priorities import (
    RULES,
    evaluate_rules,
    links,
    priority,
    rank_under,
    ranks,
    rules_of,
    timing,
)
from gdp.policy.advice import advice, judge
from gdp.policy.model.config import NetworkConfig
from gdp.policy.model.network import init
from gdp.policy.policy import Policy
from gdp.policy.propose import ROUNDS, TIGHTER, propose
from gdp.policy.view.feature_kernels import slacks
from gdp.policy.view.features import advised_features
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.sim.latency import simulate
from gdp.sim.score import values

CONFIG = NetworkConfig(
    width=8, heads=2, sage_layers=1, attention_layers=0, head_width=8, segment=64
)


def random_devices(problem: Problem, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weight = rng.random((count, *problem.group_allowed.shape)) * problem.group_allowed
    return weight.argmax(axis=2)[:, problem.group]


def paths(problem: Problem, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(longest path from each op's start to the end, and before its start), by recursion."""
    graph, cluster, cost_s = problem.graph, problem.cluster, timing(problem).cost_s

    def sent_s(use: int) -> float:
        t = graph.use_tensor[use]
        a, b = device[graph.producer[t]], device[graph.use_op[use]]
        if a == b:
            return 0.0
        seconds = float(graph.tensor_bytes[t] / cluster.link_bytes_per_s[a, b])
        return float(cluster.link_latency_s[a, b]) + seconds

    def up(op: int) -> float:
        after = [
            sent_s(use) + up(int(graph.use_op[use]))
            for use in range(graph.num_uses)
            if graph.producer[graph.use_tensor[use]] == op
        ]
        return float(cost_s[op, device[op]]) + max(after, default=0.0)

    def down(op: int) -> float:
        before = [0.0]
        for use in np.flatnonzero(graph.use_op == op):
            maker = int(graph.producer[graph.use_tensor[use]])
            before.append(down(maker) + float(cost_s[maker, device[maker]]) + sent_s(int(use)))
        return max(before)

    ops = range(problem.num_ops)
    return np.array([up(op) for op in ops]), np.array([down(op) for op in ops])


def test_rules_by_recursion() -> None:
    for seed in range(4):
        problem = random_problem(seed, num_ops=9, num_devices=3)
        device = random_devices(problem, 1, seed)[0]
        up_s, down_s = paths(problem, device)
        found = dict(zip(RULES, ranks(problem, device[None], RULES)[:, 0], strict=True))
        np.testing.assert_array_equal(found["upward"], priority(problem))
        np.testing.assert_array_equal(found["program"], np.arange(problem.num_ops))
        assert (found["arrival"] == 0).all()
        for name, key in (("placed", up_s), ("critical", up_s + down_s)):
            assert sorted(found[name]) == list(range(problem.num_ops))
            by_rank = key[np.argsort(found[name])]
            assert (np.diff(by_rank) <= 1e-9 * key.max()).all(), name


def test_the_best_rule_counts() -> None:
    for seed in range(6):
        problem = random_problem(seed, num_ops=30, num_devices=3)
        devices = random_devices(problem, 5, seed)
        rated = evaluate_rules(problem, devices)
        by_rule = []
        for rule in rules_of(problem):
            rows = [values(problem, d[None], rank_under(problem, d, rule)) for d in devices]
            by_rule.append([(int(over[0]), float(seconds[0])) for seconds, over in rows])
        for k, found in enumerate(zip(rated.overflow, rated.seconds, strict=True)):
            assert found == min(row[k] for row in by_rule)
        assert rated.evaluations == len(rules_of(problem)) * len(devices)
        rank = rank_under(problem, devices[0], RULES[int(rated.rule[0])])
        seconds, overflow = values(problem, devices[:1], rank)
        assert (seconds[0], overflow[0]) == (rated.seconds[0], rated.overflow[0])


def test_a_period_has_no_priorities() -> None:
    problem = random_problem(1, num_ops=20, num_devices=3, objective="throughput")
    devices = random_devices(problem, 3, 0)
    assert evaluate_rules(problem, devices).evaluations == 3
    np.testing.assert_array_equal(
        evaluate_rules(problem, devices).seconds, values(problem, devices)[0]
    )


def test_slack_of_a_schedule_by_hand() -> None:
    """a 0-1, c 1-4, d 4-5 on device 0; b on device 1 reads a at 2, runs 2-4, is there at 5.

    d waits for b until 5: the latency is 6. c could start 1 s later; nothing else could.
    """
    problem = fork_join()
    device = np.array([0, 1, 0, 0])
    run = simulate(problem, device, None)
    assert run.latency_s == 6.0
    order = np.lexsort((np.argsort(timing(problem).order), run.start_s))
    latest_s, waited_s, idle_s = np.zeros(4), np.zeros(4), np.zeros(4)
    slacks(
        arrays_of(problem), links(problem)[1], device, order, run.start_s, run.finish_s, latest_s,
        waited_s, idle_s, np.zeros(2),
    )  # fmt: skip
    np.testing.assert_allclose(latest_s - run.start_s, [0.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(waited_s, 0.0)
    np.testing.assert_allclose(idle_s, [0.0, 2.0, 0.0, 1.0])


def test_critical_ops_of_an_incumbent_have_no_slack() -> None:
    for seed in range(4):
        problem = random_problem(seed, num_ops=30, num_devices=3)
        told = advised_features(problem, advice(problem))
        assert np.isfinite(told.op).all()
        assert told.op[:, 4].min() == pytest.approx(0.0, abs=1e-9)
        assert (told.op[:, 3] >= 0).all()
        assert (told.op[:, 3] + told.op[:, 4] <= 1.0 + 1e-9).all()


def test_proposals_are_the_greedy_placement_and_samples_and_are_counted() -> None:
    problem = random_problem(3, num_ops=30, num_devices=3)
    policy = Policy(CONFIG, init(CONFIG, 0))
    found = propose(policy, problem, 12, seed=0)
    assert len(found.device) == 12
    rules = len(rules_of(problem))
    assert found.overflow[0] > 0, "greedy is tried under all lower limits"
    lowered = ROUNDS * (rules + 1)  # rated, and once more for what each device misses
    assert found.evaluations == lowered + (len(TIGHTER) + 12) * rules
    np.testing.assert_array_equal(judge(problem, found.device)[1], found.overflow == 0)
    again = propose(policy, problem, 12, seed=0)
    np.testing.assert_array_equal(found.device, again.device)
    np.testing.assert_array_equal(propose(policy, problem, 2, seed=0).device, found.device[:2])
