"""Fine-tuning and guided search: better on their problem, within their budget."""

import jax
import numpy as np
import pytest
from tiny import fork_join, random_problem

from gdp.learn.finetune import FinetuneConfig, finetune, free
from gdp.learn.instances import Instance, make, random_graph
from gdp.methods.base import Assignment, Search
from gdp.policy.evaluate import judge
from gdp.policy.guided import guided_search
from gdp.policy.network import NetworkConfig, init
from gdp.policy.policy import Policy

CONFIG = NetworkConfig(
    width=8, heads=2, sage_layers=1, attention_layers=0, head_width=8, segment=64
)
QUICK = FinetuneConfig(updates=8, samples=6, gate_updates=3)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(CONFIG, init(CONFIG, 3), "fresh")


def test_gates_alone_leave_all_other_weights(policy: Policy) -> None:
    problem = random_problem(5, num_ops=30, num_devices=3)
    config = FinetuneConfig(updates=2, samples=4, freedom="gates")
    found = finetune(problem, policy, config=config, seed=1)
    moved, kept = 0, 0
    before = jax.tree_util.tree_leaves_with_path(policy.params)
    after = jax.tree.leaves(found.policy.params)
    for (path, old), new in zip(before, after, strict=True):
        gate = any(getattr(key, "key", "") == "conditioning" for key in path)
        same = bool((np.asarray(old) == np.asarray(new)).all())
        moved += gate and not same
        kept += not gate
        assert gate or same
    assert moved > 0
    assert kept > 0


def test_free_keeps_every_gradient_after_the_gates(policy: Policy) -> None:
    assert free(policy.params, "all") is policy.params


def test_a_measured_reward_is_asked_once_per_placement(policy: Policy) -> None:
    problem = fork_join()
    asked: list[bytes] = []

    def measure(assignment: Assignment) -> float:
        asked.append(assignment.device.tobytes())
        return 1.0 + float(assignment.device.sum())  # everything on device 0 is best

    found = finetune(problem, policy, reward=measure, config=QUICK, seed=0)
    assert len(asked) == len(set(asked))
    assert found.value_s == 1.0
    assert found.assignment.device.tolist() == [0, 0, 0, 0]


def test_guided_search_is_never_worse_than_its_start(policy: Policy) -> None:
    problem = make(Instance(graph="layered-40-1", cluster=3), random_graph)
    start = Assignment(problem.group_allowed.argmax(axis=1)[problem.group])
    before = judge(problem, start.device[None])[0][0]
    for uniform in (False, True):
        search = Search(seed=1, seconds=None, evaluations=200, start=start)
        answer = guided_search(problem, policy, search, uniform=uniform)
        assert answer.assignment is not None
        assert answer.evaluations == 200
        assert judge(problem, answer.assignment.device[None])[0][0] <= before
