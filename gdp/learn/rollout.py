"""Placements drawn from a policy and judged by the simulator.

Axes: K placements, N ops, D devices; wide N and D are those of the padded network.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gdp.policy.decode import Head, Rollout, decode
from gdp.policy.evaluate import judge
from gdp.policy.network import NUM_PAIR_FEATURES
from gdp.policy.policy import Policy
from gdp.sim.problem import Problem


@dataclass(frozen=True, eq=False)
class Episode:
    """What one update learns from, of one problem."""

    problem: Problem
    rollout: Rollout
    cost_s: Float[np.ndarray, "K"]  # value of the objective, raised where memory overflows
    feasible: np.ndarray  # [K] bool


def sample(
    policy: Policy,
    problem: Problem,
    *,
    samples: int,
    seed: int,
    label: Int[np.ndarray, "N"] | None = None,
    threads: int = 1,
) -> Episode:
    """`samples` placements with all that was seen; the last follows the label, if there is one."""
    batch = policy.batch(problem)
    rollout = decode(
        policy.view(problem),
        policy.head(problem),
        samples=samples,
        seed=seed,
        forced=None if label is None else label[None],
        keep=True,
        pad=(len(batch.op_mask), len(batch.device_mask)),
        threads=threads,
    )
    cost_s, feasible = judge(problem, rollout.device)
    return Episode(problem, rollout, cost_s, feasible)


def follow(policy: Policy, problem: Problem, labels: Int[np.ndarray, "K N"]) -> Rollout:
    """What the decoder sees when it is made to follow the placements given."""
    batch = policy.batch(problem)
    return decode(
        policy.view(problem),
        blank_head(policy, problem),
        samples=len(labels),
        seed=0,
        forced=labels,
        keep=True,
        pad=(len(batch.op_mask), len(batch.device_mask)),
    )


def blank_head(policy: Policy, problem: Problem) -> Head:
    """A head of zeros: following a label needs no scores."""
    n, d, width = problem.num_ops, problem.num_devices, 1
    return Head(
        prior=np.zeros((n, d), np.float32),
        node=np.zeros((n, width), np.float32),
        device=np.zeros((d, width), np.float32),
        feature=np.zeros((NUM_PAIR_FEATURES, width), np.float32),
        mixing=np.zeros((width, width), np.float32),
        bias=np.zeros(width, np.float32),
        out=np.zeros(width, np.float32),
        dynamic=policy.config.decode == "autoregressive",
    )
