"""GDP as published, on one graph and cluster: GDP-one (arXiv 1910.01578).

Its features (types, shapes, neighbours), GraphSAGE with max pooling, attention over segments
without positions, superposition, one shot of independent decisions, PPO with reward
-sqrt(step time), -10 where nothing fits, minus the mean of all trials before: the network and the
settings of `pretrain/recipes/gdp_one.toml`, from fresh weights, without advice, labels or masks.
Differs: as many updates as the evaluations allow, where the recipe has 800 of 16 placements.
"""

from pathlib import Path

from benchmarks.published.baselines.common import RESERVED, Arena, Found, one_device_s
from gdp.learn.ppo import Weights, gradient, optimiser, published_advantages, rows, step
from gdp.learn.recipe import load_recipe
from gdp.learn.rollout import sample
from gdp.policy.model.network import init
from gdp.policy.policy import Policy
from gdp.problem.problem import Problem

RECIPE = Path(__file__).resolve().parents[3] / "pretrain" / "recipes" / "gdp_one.toml"


def gdp_one(problem: Problem, evaluations: int, seed: int) -> Found:
    """The best placement met in training."""
    arena, (recipe, _) = Arena(problem, evaluations), load_recipe(RECIPE)
    config, network = recipe.ppo, recipe.network
    samples = min(config.samples, max(3, evaluations - RESERVED))
    params = averaged = init(network, seed)
    updates = max(1, (evaluations - RESERVED) // samples)
    transform = optimiser(config.rate, config.rate_end, updates * config.epochs)
    state = transform.init(params)
    weights = Weights(config.clip, config.entropy, 0.0)
    past = (0.0, 0)
    while arena.drawn == 0 or arena.left >= samples:
        policy = Policy(network, params)
        episode = sample(policy, problem, samples=samples, seed=seed * updates + arena.drawn)
        arena.rate(episode.rollout.device)
        gain, past = published_advantages(
            episode.cost_s, episode.feasible, past, one_device_s(problem)
        )
        made = rows(episode.rollout, gain, 1.0 + 0.0 * gain, 0.0 * gain)
        for epoch in range(config.epochs):
            grads, metrics = gradient(network, params, episode.batch, made, weights)
            if epoch == 0:
                made = made._replace(old=metrics.old, fresh=~made.fresh)
            params, state, averaged = step(transform, params, state, averaged, grads, 0.0)
    return arena.found()
