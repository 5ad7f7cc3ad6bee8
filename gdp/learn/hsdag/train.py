"""REINFORCE over episodes on one problem, or on several in turn.

Equations 12 to 14 of arXiv 2405.14185: the reward of a placement is 1 / seconds, and the gradient
sums advantage x grad log p(placement) over the steps of an episode. The published advantage is the
discounted reward itself, always positive; centred, the default, is by mean and deviation of the
episode. Not simulated placements can be rewarded too: the reward is a function.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
import optax
from jaxtyping import Float, Int

from gdp.clock import Clock
from gdp.learn.hsdag.config import HsdagConfig
from gdp.learn.hsdag.episodes import (
    Step,
    draw,
    episode_loss,
    first_state,
    legal_of,
    node_devices,
    parse_state,
)
from gdp.learn.hsdag.network import init, view_of
from gdp.learn.hsdag.nodes import make_nodes
from gdp.learn.judge import Judge, Reward
from gdp.learn.ppo import advantages
from gdp.methods.base import Assignment
from gdp.policy.compilation import use_cache
from gdp.policy.model.config import Params
from gdp.problem.problem import Problem

EVALUATIONS = 2000
"""Placements judged where neither evaluations nor seconds are given: the paper's 100 x 20."""
_ROOM = 6  # evaluations kept back: what comes close to the best is tried under every rule


@dataclass(frozen=True, eq=False)
class Trained:
    """What one training leaves."""

    params: Params
    assignment: Assignment
    value_s: float  # inf where nothing that fits was met
    evaluations: int
    first_s: float  # of the first placement drawn
    groups: Int[np.ndarray, "N"]  # of every op, as the trained network parses the graph
    last: Int[np.ndarray, "N"]  # devices of the most probable placement


class Learner:
    """Weights, optimiser and judge of one problem."""

    def __init__(
        self, problem: Problem, config: HsdagConfig, judge: Judge, seed: int, params: Params
    ) -> None:
        self.config, self.judge, self.params = config, judge, params
        self.rng = np.random.default_rng(seed)
        self.nodes = make_nodes(problem, config)
        self.view = view_of(self.nodes, config.max_devices)
        self.transform = _optimiser(config.rate)
        self.state = self.transform.init(params)

    def episode(self, samples: int) -> tuple[Step, Int[np.ndarray, "S K O"]]:
        """One episode's steps, stacked, and the devices of every op in each placement."""
        state = first_state(self.config, self.params, self.view)
        steps, devices = [], []
        for _ in range(self.config.steps):
            parsed = parse_state(self.config, self.params, self.view, state, self.nodes.count)
            legal = legal_of(parsed.part, self.view.legal)
            action = draw(parsed, legal, samples, self.rng)
            steps.append(Step(np.asarray(state), parsed.passes, legal, action))
            devices.append(node_devices(parsed, action, self.nodes))
            state = parsed.next
        return jax.tree.map(lambda *rows: np.stack(rows), *steps), np.stack(devices)

    def update(self, steps: Step, advantage: Float[np.ndarray, "S K"]) -> None:
        """A few optimiser steps on one episode."""
        for _ in range(self.config.epochs):
            self.params, self.state = _descend(
                self.transform, self.config, self.params, self.state, self.view, steps,
                advantage.astype(np.float32),
            )  # fmt: skip

    def learn(self) -> Float[np.ndarray, "S K"]:
        """Draw, judge and update once; returns the seconds of the placements."""
        steps, devices = self.episode(self.config.samples)
        cost_s = self.judge.judge(devices.reshape(-1, devices.shape[-1]))
        cost_s = cost_s.reshape(devices.shape[:2])
        self.update(steps, self.advantage(cost_s))
        return cost_s

    def advantage(self, cost_s: Float[np.ndarray, "S K"]) -> Float[np.ndarray, "S K"]:
        """What a placement's log-probability is weighted by; 0 where it does not run."""
        runs = np.isfinite(cost_s)
        found = np.zeros_like(cost_s)
        if self.config.advantage == "published":
            found[runs] = 1.0 / cost_s[runs]
        elif runs.any():
            found[runs] = advantages(cost_s[runs])
        return found * self.config.discount ** np.arange(len(cost_s))[:, None]

    def greedy(self) -> Int[np.ndarray, "S O"]:
        """The most probable placement of every step of an episode."""
        return self.episode(0)[1][:, 0]

    def groups(self) -> Int[np.ndarray, "O"]:
        """The learned group of every op: the parsing of the first state."""
        state = first_state(self.config, self.params, self.view)
        parsed = parse_state(self.config, self.params, self.view, state, self.nodes.count)
        return parsed.part[self.nodes.node_of].astype(np.int64)

    def warm_up(self) -> None:
        """Compile what a training calls; nothing is judged, and nothing changes."""
        params, rng, state = self.params, self.rng, self.state
        self.rng = np.random.default_rng(0)
        steps, devices = self.episode(self.config.samples)
        self.update(steps, np.zeros(devices.shape[:2]))
        self.params, self.rng, self.state = params, rng, state


def train(
    problem: Problem,
    config: HsdagConfig | None = None,
    *,
    seed: int = 0,
    evaluations: int | None = None,
    seconds: float | None = None,
    reward: Reward | None = None,
    params: Params | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Trained:
    """Train on one problem, from `params` or from fresh weights; the best placement met.

    Ends after so many placements drawn or seconds, `EVALUATIONS` without either; a placement drawn
    twice is judged once. Without `reward` the simulator judges. `progress` is called with the
    placements drawn and the best seconds. Seconds begin after compilation.
    """
    use_cache()
    config = fitting(config or HsdagConfig(), problem.num_devices)
    if evaluations is None:
        evaluations = EVALUATIONS if seconds is None else 1 << 40
    judge = Judge(problem, evaluations, reward)
    learner = Learner(
        problem, config, judge, seed, init(config, seed) if params is None else params
    )
    if seconds is not None:
        learner.warm_up()
    clock = Clock(seconds)
    first_s = _go(learner, evaluations - judge.reserved, clock, progress)
    best, value_s = judge.confirmed()
    return Trained(
        learner.params, best, value_s, judge.evaluations, first_s, learner.groups(),
        learner.greedy()[0],
    )  # fmt: skip


def _go(
    learner: Learner, budget: int, clock: Clock, progress: Callable[[int, float], None] | None
) -> float:
    """Learn until the budget or the clock ends it, then judge what is most probable."""
    judge, batch = learner.judge, learner.config.steps * learner.config.samples
    last = learner.config.steps + _ROOM
    drawn, first_s = 0, np.inf
    while drawn == 0 or not clock.is_over():
        if drawn and max(drawn, judge.evaluations) + batch + last + _ROOM > budget:
            break
        if budget < batch:  # too few for one update: only draw
            devices = learner.episode(1)[1][: max(1, budget), 0]
            return float(judge.judge(devices)[0])
        cost_s = learner.learn()
        first_s = float(cost_s[0, 0]) if drawn == 0 else first_s
        drawn += batch
        if progress is not None:
            progress(drawn, judge.best_s)
    if judge.left >= last:
        judge.judge(learner.greedy())
    return first_s


def pretrain(
    problems: Sequence[Problem],
    config: HsdagConfig | None = None,
    *,
    seed: int = 0,
    updates: int = 100,
) -> Params:
    """Weights trained on several problems in turn, one update each; the paper trains on one.

    To be given to `train` as `params`, under the same configuration.
    """
    use_cache()
    wide = max(problem.num_devices for problem in problems)
    config = fitting(config or HsdagConfig(), wide)
    params = init(config, seed)
    learners = [
        Learner(problem, config, Judge(problem, 1 << 40, None), seed + k, params)
        for k, problem in enumerate(problems)
    ]
    state = learners[0].state
    for at in range(updates):
        learner = learners[at % len(learners)]
        learner.params, learner.state = params, state
        learner.learn()
        params, state = learner.params, learner.state
    return params


def fitting(config: HsdagConfig, num_devices: int) -> HsdagConfig:
    """The configuration with a head for at least so many devices."""
    from dataclasses import replace

    from gdp.policy.view.buckets import DEVICE_SIZES, bucket

    if num_devices <= config.max_devices:
        return config
    return replace(config, max_devices=bucket(num_devices, DEVICE_SIZES))


@functools.cache
def _optimiser(rate: float) -> optax.GradientTransformation:
    return optax.adam(rate)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _descend(
    transform: optax.GradientTransformation,
    config: HsdagConfig,
    params: Params,
    state: Any,
    view: Any,
    steps: Step,
    advantage: Any,
) -> tuple[Params, Any]:
    """(weights, optimiser state) after one step."""
    grads = jax.grad(episode_loss)(params, config, view, steps, advantage)
    updates, state = transform.update(grads, state, params)
    return cast(Params, optax.apply_updates(params, updates)), state
