"""A fine-tuned policy answers with the placement that was found for it."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tiny import fork_join, random_problem

from gdp.learn.finetune import FinetuneConfig, finetune
from gdp.learn.instances import Instance, make, random_graph
from gdp.methods.base import Assignment, Search
from gdp.policy.method import place_with_policy
from gdp.policy.model.config import NetworkConfig
from gdp.policy.model.network import init
from gdp.policy.policy import (
    KeptPlacement,
    Policy,
    keep_placement,
    load_policy,
    recall_placement,
    save_policy,
)
from gdp.problem.problem import make_problem
from gdp.sim.score import values

CONFIG = NetworkConfig(
    width=8, heads=2, sage_layers=1, attention_layers=0, head_width=8, segment=64
)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(CONFIG, init(CONFIG, 3), "fresh")


@pytest.mark.parametrize("ranked", [False, True])
def test_what_is_kept_comes_back_from_disk(policy: Policy, tmp_path: Path, ranked: bool) -> None:
    problem = random_problem(5, num_ops=30, num_devices=3)
    device = problem.group_allowed.argmax(axis=1)[problem.group]
    rank = np.random.default_rng(0).permutation(problem.num_ops) if ranked else None
    tuned = replace(policy, placed=keep_placement(problem, Assignment(device, rank)))
    save_policy(tuned, tmp_path / "tuned")
    found = recall_placement(load_policy(tmp_path / "tuned").placed, problem)
    assert found is not None
    np.testing.assert_array_equal(found.device, device)
    assert (found.rank is None) == (rank is None)
    if rank is not None:
        np.testing.assert_array_equal(found.rank, rank)


def test_only_what_the_problem_allows_comes_back() -> None:
    problem = fork_join()
    device = np.ones(problem.num_ops, dtype=np.int64)
    placed = keep_placement(problem, Assignment(device))
    assert recall_placement(placed, problem) is not None
    earlier = msgspec.structs.replace(placed, digest=problem.graph.earlier_digest)
    assert recall_placement(earlier, problem) is not None
    assert recall_placement(None, problem) is None
    assert recall_placement(msgspec.structs.replace(placed, digest="another"), problem) is None
    assert (
        recall_placement(keep_placement(problem, Assignment(device + problem.num_devices)), problem)
        is None
    )
    shorter = KeptPlacement(placed.digest, keep_placement(problem, Assignment(device[:-1])).device)
    assert recall_placement(shorter, problem) is None
    allowed = problem.allowed.copy()
    allowed[0, 1] = False
    narrow = make_problem(
        problem.graph, problem.cluster, problem.compute_s, problem.objective, allowed=allowed
    )
    assert recall_placement(placed, narrow) is None


def test_a_tuned_policy_answers_no_worse_than_it_was_tuned(policy: Policy, tmp_path: Path) -> None:
    problem = make(Instance(graph="layered-60-2", cluster=5), random_graph)
    config = FinetuneConfig(samples=8, evaluations=200)
    found = finetune(problem, policy, config=config, out=tmp_path / "tuned")
    answer = place_with_policy(problem, Search(seconds=None), tmp_path / "tuned")
    assert answer.assignment is not None
    seconds, overflow = values(problem, answer.assignment.device[None], answer.assignment.rank)
    assert overflow[0] == 0
    assert seconds[0] <= found.value_s * (1 + 1e-12)
    save_policy(policy, tmp_path / "plain")
    plain = place_with_policy(problem, Search(seconds=None), tmp_path / "plain", polish=False)
    assert plain.assignment is not None
    before, _ = values(problem, plain.assignment.device[None], plain.assignment.rank)
    assert seconds[0] < before[0]
    assert "fine-tuned" in answer.reason
