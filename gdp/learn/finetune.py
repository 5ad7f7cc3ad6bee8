"""Fine-tuning: a pre-trained policy adapted to one problem, gates first, then all weights.

GDP (arXiv 1910.01578) adapts a policy that was pre-trained over many graphs to one graph through
its superposition network, in fewer than 50 updates. The reward is the simulator or a measured run.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from gdp.learn.ppo import Weights, advantages, gradient, optimiser, rows, step
from gdp.methods.base import Assignment
from gdp.policy.advice import Advice, advice, with_incumbent
from gdp.policy.compilation import use_cache
from gdp.policy.decode import DecodeProblem, decode, priority
from gdp.policy.evaluate import judge
from gdp.policy.network import Params
from gdp.policy.policy import Policy, default_checkpoint, load_policy, save_policy
from gdp.policy.repair import fitting_greedy
from gdp.sim.problem import Problem

log = logging.getLogger(__name__)

Reward = Callable[[Assignment], float]
"""Seconds of one placement, however they are found; inf where it does not run."""

Freedom = Literal["gates_first", "gates", "all"]
"""What may change: gates then all weights, gates alone, or all weights from the start."""


@dataclass(frozen=True)
class FinetuneConfig:
    """How a policy is adapted to one problem. Evaluations: updates * samples, and the advisers'."""

    updates: int = 50
    samples: int = 16  # placements per update; with a measured reward each is a run
    epochs: int = 3  # optimiser steps per update
    gate_updates: int = 10  # updates in which only gates change
    freedom: Freedom = "gates_first"
    rate: float = 1e-3
    rate_end: float = 2e-4
    clip: float = 0.2
    entropy: float = 3e-4
    imitate: float = 0.3  # weight of the best placement so far, followed as a label

    def __post_init__(self) -> None:
        if self.samples < 3:
            raise ValueError(f"samples must be at least 3, got {self.samples}")
        if self.updates < 1:
            raise ValueError(f"updates must be at least 1, got {self.updates}")


@dataclass(frozen=True, eq=False)
class Finetuned:
    """The adapted policy and the best placement met on the way."""

    policy: Policy
    assignment: Assignment
    value_s: float
    evaluations: int
    history: list[dict[str, float]] = field(default_factory=list)


def finetune(
    problem: Problem,
    checkpoint: str | os.PathLike[str] | Policy | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    reward: Reward | None = None,
    config: FinetuneConfig | None = None,
    seed: int = 0,
    progress: Callable[[int, dict[str, float]], None] | None = None,
) -> Finetuned:
    """Adapt a policy to one problem; with `out`, write the checkpoint that `gdp place` takes.

    `checkpoint` is a folder, a policy, or None for the shipped one. Without `reward` the simulator
    judges; a reward is called once per distinct placement.
    """
    use_cache()
    config = config or FinetuneConfig()
    policy = _policy(checkpoint)
    tuner = _Tuner(problem, policy, config, reward, seed)
    history = []
    for at in range(config.updates):
        numbers = tuner.update(at)
        history.append(numbers)
        if progress is not None:
            progress(at, numbers)
    tuned = Policy(policy.config, tuner.params, f"{policy.name}, fine-tuned")
    if out is not None:
        save_policy(tuned, Path(out), updates=config.updates, start=policy.name)
    best = Assignment(tuner.best, priority(problem))
    return Finetuned(tuned, best, tuner.best_s, tuner.evaluations, history)


def _policy(checkpoint: str | os.PathLike[str] | Policy | None) -> Policy:
    if isinstance(checkpoint, Policy):
        return checkpoint
    return load_policy(default_checkpoint() if checkpoint is None else checkpoint)


class _Tuner:
    """Weights, optimiser and the best placement so far."""

    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        config: FinetuneConfig,
        reward: Reward | None,
        seed: int,
    ) -> None:
        self.problem, self.config, self.reward, self.seed = problem, config, reward, seed
        self.network, self.params = policy.config, policy.params
        self.transform = optimiser(config.rate, config.rate_end, config.updates * config.epochs)
        self.state = self.transform.init(self.params)
        self.best = np.zeros(problem.num_ops, dtype=np.int64)
        self.best_s = np.inf
        self.evaluations = 0
        self.known: dict[bytes, float] = {}
        self.limits: Float[np.ndarray, "D"] | None = None
        self.advised: Advice | None = None
        if self.network.advice:
            # What the policy reads is judged first: with a measured reward nobody else has.
            self.judge(np.unique(advice(problem).device, axis=0))

    def update(self, at: int) -> dict[str, float]:
        """One update: sample, judge, and a few optimiser steps."""
        config = self.config
        policy = Policy(self.network, self.params)
        known = self.advice()
        batch = policy.batch(self.problem, known)
        follow = np.isfinite(self.best_s) and config.imitate > 0
        drawn = decode(
            self.view(policy, known),
            policy.head(self.problem, known),
            samples=config.samples + 1,
            seed=self.seed * 100_003 + at,
            greedy_first=at == 0,
            forced=self.best[None] if follow else None,
            keep=True,
            pad=(len(batch.op_mask), len(batch.device_mask)),
        )
        # The last row is not judged again; in the first update there is no label, and it is idle.
        count = config.samples
        cost_s = self.judge(drawn.device[:count])
        finite = np.isfinite(cost_s)
        own = np.zeros(config.samples + 1)
        own[:count] = finite
        advantage = np.zeros(config.samples + 1)
        if finite.sum() > 1:
            advantage[:count][finite] = advantages(cost_s[finite])
        label = np.zeros(config.samples + 1)
        label[-1] = float(follow)
        made = rows(drawn, advantage, own, label)
        weights = Weights(config.clip, config.entropy, config.imitate)
        entropy = 0.0
        for epoch in range(config.epochs):
            grads, metrics = gradient(self.network, self.params, batch, made, weights)
            entropy = float(metrics.entropy)
            if epoch == 0:
                made = made._replace(old=metrics.log_probability, fresh=jnp.asarray(False))
            grads = free(grads, self.freedom(at))
            self.params, self.state, _ = step(
                self.transform, self.params, self.state, self.params, grads, 0.0
            )
        mean = float(cost_s[finite].mean()) if finite.any() else float("inf")
        return {
            "update": float(at),
            "mean_s": mean,
            "best_s": float(self.best_s),
            "entropy": entropy,
            "evaluations": float(self.evaluations),
        }

    def view(self, policy: Policy, known: Advice | None) -> DecodeProblem:
        """What is decoded under: memory limits tightened as far as the start policy needs."""
        plain = policy.view(self.problem, known)
        if self.limits is None:
            tight, _ = fitting_greedy(self.problem, plain, policy.head(self.problem, known))
            self.limits = tight.memory_bytes
        return plain._replace(memory_bytes=self.limits)

    def advice(self) -> Advice | None:
        """What the policy is to read: the best placement so far is the incumbent."""
        if not self.network.advice:
            return None
        if np.isinf(self.best_s):
            return advice(self.problem)
        if self.advised is None or (self.advised.device[0] != self.best).any():
            self.advised = with_incumbent(advice(self.problem), self.problem, self.best)
        return self.advised

    def freedom(self, at: int) -> Freedom:
        """What may change in an update."""
        if self.config.freedom != "gates_first":
            return self.config.freedom
        return "gates" if at < self.config.gate_updates else "all"

    def judge(self, devices: Int[np.ndarray, "K N"]) -> Float[np.ndarray, "K"]:
        """Seconds of each placement, and the best kept; what does not fit never is the best."""
        self.evaluations += len(devices)
        cost_s, feasible = judge(self.problem, devices)
        if self.reward is not None:
            cost_s = np.array([self._measured(device) for device in devices])
        key = np.where(feasible, cost_s, np.inf)
        row = int(np.argmin(key))
        if key[row] < self.best_s:
            self.best, self.best_s = devices[row].copy(), float(key[row])
        return cost_s

    def _measured(self, device: Int[np.ndarray, "N"]) -> float:
        assert self.reward is not None
        key = device.tobytes()
        if key not in self.known:
            self.known[key] = self.reward(Assignment(device, priority(self.problem)))
        return self.known[key]


def free(grads: Params, what: Freedom) -> Params:
    """The gradient with everything but the gates at zero, or as it is."""
    if what != "gates":
        return grads

    def keep(path: tuple, leaf: jax.Array) -> jax.Array:
        names = [str(getattr(key, "key", key)) for key in path]
        return leaf if "conditioning" in names else jnp.zeros_like(leaf)

    return jax.tree_util.tree_map_with_path(keep, grads)
