"""GDP as published (arXiv 1910.01578): GDP-one, on one graph, and GDP-batch, on several.

Its features (types, shapes, neighbours), GraphSAGE with max pooling, attention over segments
without positions, superposition, one shot of independent decisions, PPO with reward
-sqrt(step time), -10 where nothing fits, minus the mean of all trials before: the network and the
settings of `pretrain/recipes/gdp_one.toml`, from fresh weights, without advice, labels or masks.
Decisions are independent because what the ops before decided is zero when drawn and when learned
from, and devices are told apart by their index alone. Differs: as many updates as the evaluations
allow, where the recipe has 800 of 16 placements.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.published.baselines.common import RESERVED, Arena, Found, one_device_s
from gdp.learn.ppo import (
    ChoiceRows,
    Weights,
    gradient,
    optimiser,
    published_advantages,
    rows,
    sample,
    step,
)
from gdp.learn.recipe import Recipe, load_recipe
from gdp.policy.model.config import Params
from gdp.policy.model.network import Batch, init, on_device, pad
from gdp.policy.policy import Policy
from gdp.policy.view.features import Features
from gdp.problem.problem import Problem

RECIPE = Path(__file__).resolve().parents[3] / "pretrain" / "recipes" / "gdp_one.toml"


def gdp_one(problem: Problem, evaluations: int, seed: int) -> Found:
    """The best placement met in training on one problem."""
    return gdp_batch([problem], evaluations, seed)[0]


def gdp_batch(problems: Sequence[Problem], evaluations: int, seed: int) -> list[Found]:
    """The best placement of each problem met in training one network on all, an update each in
    turn: GDP-batch. Evaluations are each problem's own; CPU seconds are shared out evenly."""
    began_s = time.process_time()
    recipe, _ = load_recipe(RECIPE)
    learners = [_Learner(problem, recipe, evaluations, seed) for problem in problems]
    config, updates = recipe.ppo, learners[0].updates
    params = averaged = blind(init(recipe.network, seed))
    transform = optimiser(config.rate, config.rate_end, updates * config.epochs * len(problems))
    state = transform.init(params)
    weights = Weights(config.clip, config.entropy, 0.0)
    while True:
        for learner in learners:
            batch, made = learner.draw(ByIndex(recipe.network, params))
            for epoch in range(config.epochs):
                grads, metrics = gradient(recipe.network, params, batch, made, weights)
                if epoch == 0:
                    made = made._replace(old=metrics.old, fresh=~made.fresh)
                params, state, averaged = step(transform, params, state, averaged, grads, 0.0)
        if any(learner.arena.left < learner.samples for learner in learners):
            break
    spent = (time.process_time() - began_s) / len(problems)
    return [replace(learner.arena.found(), cpu_s=spent) for learner in learners]


def blind(params: Params) -> Params:
    """The weights without those that read what the ops before have decided."""
    head = params["feature_head"]
    kernel = np.zeros_like(head["dense"]["kernel"])
    return params | {"feature_head": head | {"dense": head["dense"] | {"kernel": kernel}}}


class ByIndex(Policy):
    """A policy that knows of each device only which one it is."""

    def features(self, problem: Problem) -> Features:
        """The features, with one column per device; 17 devices at most."""
        plain = super().features(problem)
        return plain._replace(device=np.eye(*plain.device.shape, dtype=np.float32))

    def batch(self, problem: Problem) -> Batch:
        """The features padded and as JAX arrays."""
        return on_device(pad(self.features(problem)))


class _Learner:
    """One problem with its judge and its past rewards."""

    def __init__(self, problem: Problem, recipe: Recipe, evaluations: int, seed: int) -> None:
        self.arena, self.seed = Arena(problem, evaluations), seed
        self.samples = min(recipe.ppo.samples, max(3, evaluations - RESERVED))
        self.updates = max(1, (evaluations - RESERVED) // self.samples)
        self.past = (0.0, 0)

    def draw(self, policy: Policy) -> tuple[Batch, ChoiceRows]:
        """Placements that one update learns from."""
        arena, seed = self.arena, self.seed * self.updates + self.arena.drawn
        episode = sample(policy, arena.problem, samples=self.samples, seed=seed)
        arena.rate(episode.rollout.device)
        gain, self.past = published_advantages(
            episode.cost_s, episode.feasible, self.past, one_device_s(arena.problem)
        )
        made = rows(episode.rollout, gain, 1.0 + 0.0 * gain, 0.0 * gain)
        # No gradient reaches the zero weights, so that they stay zero.
        return episode.batch, made._replace(feats=jnp.zeros_like(made.feats))
