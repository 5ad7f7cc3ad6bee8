"""Imitation: the decoder is made to follow the best placements known, and told to choose likewise.

With noise, some ops are sent elsewhere on the way, so that the policy also sees states in which
something went wrong, and learns to go on from there (after Ross et al. 2011, arXiv 1011.0686).
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from gdp.learn.ppo import Rows, rows
from gdp.learn.rollout import follow
from gdp.policy.advice import Advice
from gdp.policy.policy import Policy
from gdp.policy.view.batching import Batch
from gdp.problem.problem import Problem


@dataclass(frozen=True)
class ImitationConfig:
    """How a policy learns from labels before it learns from rewards."""

    updates: int = 500
    graphs: int = 4  # problems per update
    rate: float = 1e-3
    rate_end: float = 5e-4
    noise: float = 0.05  # share of ops sent elsewhere in the second of the two rows
    average: float = 0.99  # of the averaged weights, per step

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise < 1.0:
            raise ValueError(f"noise must lie in [0, 1), got {self.noise}")


def imitation_rows(
    policy: Policy,
    problem: Problem,
    label: Int[np.ndarray, "N"],
    noise: float,
    seed: int,
    told: Advice | None = None,
) -> tuple[Batch, Rows]:
    """Two rows: the label followed exactly, and followed with some ops astray."""
    astray = perturb(problem, label, noise, seed)
    batch, rollout = follow(policy, problem, np.stack([label, astray]), told)
    made = rows(rollout, np.zeros(2), np.zeros(2), np.ones(2))
    n = problem.num_ops
    action = np.array(made.action)
    action[:, :n] = label
    assert rollout.legal is not None
    # Where the label's device is no longer legal there is nothing to imitate.
    still = np.take_along_axis(rollout.legal, action[..., None].astype(np.int64), axis=-1)[..., 0]
    return batch, made._replace(action=jnp.asarray(action), taken=made.taken & jnp.asarray(still))


def perturb(
    problem: Problem, label: Int[np.ndarray, "N"], noise: float, seed: int
) -> Int[np.ndarray, "N"]:
    """The label with a share of the ops on a random allowed device."""
    rng = np.random.default_rng(seed)
    weight = rng.random(problem.allowed.shape) * problem.allowed
    elsewhere = weight.argmax(axis=1)
    return np.where(rng.random(problem.num_ops) < noise, elsewhere, label)
