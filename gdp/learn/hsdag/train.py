"""REINFORCE over episodes of HSDAG on one problem, or on several in turn.

At each step of an episode the graph is parsed anew, placed, and the state goes on. Equations 12 to
14 of arXiv 2405.14185: the reward of a placement is 1 / seconds, and the gradient sums advantage x
grad log p(placement) over the steps of an episode. The published advantage is the discounted
reward itself, always positive; centred, the default, is by mean and deviation of the episode.
Axes: S steps, K placements per step, N nodes with padding, M nodes, P edges.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from gdp.base.clock import Clock
from gdp.base.files.disk_cache import use_xla_cache
from gdp.graph.groups import best_edges, components
from gdp.learn.evaluator import PlacementEvaluator
from gdp.learn.hsdag.network import (
    HsdagConfig,
    HsdagNetwork,
    PaddedNodes,
    Parsing,
    init,
    make_nodes,
    network,
    run,
    view_of,
)
from gdp.learn.ppo import advantages
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.repair import repair_and_select
from gdp.methods.scoring import Evaluated
from gdp.policy.model.config import Params
from gdp.policy.view.features import DEVICE_SIZES, bucket
from gdp.problem.problem import Problem
from gdp.sim.objectives import value_text

LEAST_GROUPS = 2
"""Fewest groups of a parsing; one with fewer is not taken."""


class EpisodeStep(NamedTuple):
    """State read and actions chosen in one step of an episode."""

    state: Float[Any, "N H"]
    parsing: Parsing
    legal: Bool[Any, "N D"]  # where some member of a group may go; nothing for rows without one
    action: Int[Any, "K N"]  # the device drawn for each group


class Parsed(NamedTuple):
    """The groups of one step, their logits and the next state."""

    parsing: Parsing
    logits: Float[np.ndarray, "N D"]
    next: Float[Array, "N H"]


def parse_state(
    config: HsdagConfig, params: Params, view: PaddedNodes, state: Float[Array, "N H"], count: int
) -> Parsed:
    """Encode, parse and pool a state, of which the first `count` nodes are real."""
    h, score = run(HsdagNetwork.embed, config, params, view, state)
    parsing = _parse(np.asarray(score), view, count)
    last = view, state, h, score, parsing
    logits, following = run(HsdagNetwork.finish, config, params, *last)
    return Parsed(parsing, np.asarray(logits), following)


def _parse(score: Float[np.ndarray, "P"], view: PaddedNodes, count: int) -> Parsing:
    """The trees of every node's best edge; each node by itself where that leaves too few."""
    real = np.flatnonzero(view.edge)
    ties = np.zeros(len(score), dtype=bool)
    ties[real] = best_edges(score[real].astype(np.float64), view.src[real], view.dst[real])
    label = components(view.src[ties], view.dst[ties], count)
    if label.max() + 1 < min(LEAST_GROUPS, count):
        ties[:], label = False, np.arange(count)
    part = np.full(len(view.feature), len(view.feature) - 1, dtype=np.int32)
    part[:count] = label
    return Parsing(part, ties)


def draw(
    parsed: Parsed, legal: Bool[np.ndarray, "N D"], samples: int, rng: np.random.Generator
) -> Int[np.ndarray, "K N"]:
    """Devices of the groups, drawn from the policy; the best one of each with `samples` 0."""
    logits = np.where(legal, parsed.logits, -np.inf)
    logits[~legal.any(axis=1)] = 0.0
    if samples == 0:
        return logits.argmax(axis=1)[None]
    return (logits + rng.gumbel(size=(samples, *logits.shape))).argmax(axis=2)


def legal_of(part: Int[np.ndarray, "N"], legal: Bool[np.ndarray, "N D"]) -> Bool[np.ndarray, "N D"]:
    """Devices that some node of each group may use."""
    group_legal = np.zeros_like(legal)
    np.logical_or.at(group_legal, part, legal)
    return group_legal


def policy_loss(
    logits: Float[Array, "N D"],
    legal: Bool[Array, "N D"],
    action: Int[Array, "K N"],
    advantage: Float[Array, "K"],
    entropy: float | Float[Array, ""],
) -> Float[Array, ""]:
    """Minus the mean over placements of advantage x log-probability, minus the entropy bonus.

    log p(placement) is the sum over its groups (equation 14); groups without a choice add nothing.
    """
    free = legal.sum(axis=1) > 1
    logp = jax.nn.log_softmax(jnp.where(legal, logits, -1e9), axis=-1)
    chosen = jnp.take_along_axis(logp[None], action[..., None], axis=-1)[..., 0]
    total = jnp.where(free, chosen, 0.0).sum(axis=1)
    spread = -jnp.where(legal, jnp.exp(logp) * logp, 0.0).sum(axis=-1)
    bonus = jnp.where(free, spread, 0.0).sum()
    return -(advantage * total).mean() - entropy * bonus


def episode_loss(
    params: Params,
    config: HsdagConfig,
    view: PaddedNodes,
    steps: EpisodeStep,
    advantage: Float[Array, "S K"],
) -> Float[Array, ""]:
    """The mean of `policy_loss` over the steps of an episode, with the groups as they were."""
    net = network(config, params)

    def of_step(step: EpisodeStep, advantage: Float[Array, "K"]) -> Float[Array, ""]:
        logits = net.replay(view, step.state, step.parsing)
        return policy_loss(logits, step.legal, step.action, advantage, config.entropy)

    return jax.vmap(of_step)(steps, advantage).mean()


EVALUATIONS = 2000
"""Default number of evaluations: the 100 x 20 of the paper."""
_ROOM = 6  # evaluations kept back: what comes close to the best is tried under every rule


@dataclass(frozen=True, eq=False)
class HsdagResult:
    """Result of one training."""

    params: Params
    best: Evaluated  # value inf where nothing that fits was met
    first_s: float  # of the first placement drawn
    groups: Int[np.ndarray, "N"]  # of every op, as the trained network parses the graph
    last: Int[np.ndarray, "N"]  # devices of the most probable placement


class Learner:
    """Weights, optimiser and evaluator of one problem."""

    def __init__(
        self,
        problem: Problem,
        config: HsdagConfig,
        judge: PlacementEvaluator,
        seed: int,
        params: Params,
    ) -> None:
        self.config, self.judge, self.params = config, judge, params
        self.rng = np.random.default_rng(seed)
        self.nodes = make_nodes(problem, config)
        self.view = view_of(self.nodes, config.max_devices)
        self.transform = _optimiser(config.rate)
        self.state = self.transform.init(params)

    def first(self) -> Float[Array, "N H"]:
        """The state that every episode begins with."""
        return run(HsdagNetwork.start, self.config, self.params, self.view)

    def episode(self, samples: int) -> tuple[EpisodeStep, Int[np.ndarray, "S K O"]]:
        """One episode's steps, stacked, and the devices of every op in each placement."""
        state, steps, devices = self.first(), [], []
        for _ in range(self.config.steps):
            parsed = parse_state(self.config, self.params, self.view, state, self.nodes.count)
            part = parsed.parsing.part
            legal = legal_of(part, self.view.legal)
            action = draw(parsed, legal, samples, self.rng)
            steps.append(EpisodeStep(np.asarray(state), parsed.parsing, legal, action))
            devices.append(self.nodes.devices(action[:, part[: self.nodes.count]]))
            state = parsed.next
        return jax.tree.map(lambda *rows: np.stack(rows), *steps), np.stack(devices)

    def update(self, steps: EpisodeStep, advantage: Float[np.ndarray, "S K"]) -> None:
        """A few optimiser steps on one episode."""
        for _ in range(self.config.epochs):
            self.params, self.state = _descend(
                self.transform, self.config, self.params, self.state, self.view, steps,
                advantage.astype(np.float32),
            )  # fmt: skip

    def learn(self) -> Float[np.ndarray, "S K"]:
        """Draw, evaluate and update once; returns the seconds of the placements."""
        steps, devices = self.episode(self.config.samples)
        cost_s = self.judge.judge(devices.reshape(-1, devices.shape[-1]))
        cost_s = cost_s.reshape(devices.shape[:2])
        self.update(steps, self.advantage(cost_s))
        return cost_s

    def advantage(self, cost_s: Float[np.ndarray, "S K"]) -> Float[np.ndarray, "S K"]:
        """Weight of a placement's log-probability; 0 where it does not run."""
        runs = np.isfinite(cost_s)
        weight = np.zeros_like(cost_s)
        if self.config.advantage == "published":
            weight[runs] = 1.0 / cost_s[runs]
        elif runs.any():
            weight[runs] = advantages(cost_s[runs])
        return weight * self.config.discount ** np.arange(len(cost_s))[:, None]

    def greedy(self) -> Int[np.ndarray, "S O"]:
        """The most probable placement of every step of an episode."""
        return self.episode(0)[1][:, 0]

    def groups(self) -> Int[np.ndarray, "O"]:
        """The learned group of every op: the parsing of the first state."""
        state = self.first()
        parsed = parse_state(self.config, self.params, self.view, state, self.nodes.count)
        return parsed.parsing.part[self.nodes.node_of].astype(np.int64)

    def warm_up(self) -> None:
        """Compile the functions that training calls, without any effect on it."""
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
    params: Params | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> HsdagResult:
    """Train on one problem and return the best placement found.

    Args:
        problem: Problem to place.
        config: Settings; None is `HsdagConfig()`.
        seed: Seed of weights and samples.
        evaluations: Most placements drawn; a placement drawn twice is evaluated once. `EVALUATIONS`
            where neither this nor `seconds` is given.
        seconds: Time limit, which begins after compilation.
        params: Weights to start from, such as those of `pretrain`; None draws fresh ones.
        progress: Called with the number of placements drawn and the best seconds.
    """
    use_xla_cache()
    config = fitting(config or HsdagConfig(), problem.num_devices)
    if evaluations is None:
        evaluations = EVALUATIONS if seconds is None else 1 << 40
    judge = PlacementEvaluator(problem, evaluations)
    learner = Learner(
        problem, config, judge, seed, init(config, seed) if params is None else params
    )
    if seconds is not None:
        learner.warm_up()
    clock = Clock(seconds)
    first_s = _go(learner, evaluations, clock, progress)
    return HsdagResult(
        learner.params, judge.answer(), first_s, learner.groups(), learner.greedy()[0],
    )  # fmt: skip


def _go(
    learner: Learner, budget: int, clock: Clock, progress: Callable[[int, float], None] | None
) -> float:
    """Learn until the budget or the clock ends, then evaluate the greedy placements."""
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
    """Weights trained round-robin on several problems, one update each; the paper trains on one.

    To pass to `train` as `params`, under the same configuration.
    """
    use_xla_cache()
    wide = max(problem.num_devices for problem in problems)
    config = fitting(config or HsdagConfig(), wide)
    params = init(config, seed)
    learners = [
        Learner(problem, config, PlacementEvaluator(problem, 1 << 40), seed + k, params)
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
    """The configuration with a head for at least `num_devices` devices."""
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
    steps: EpisodeStep,
    advantage: Any,
) -> tuple[Params, Any]:
    """(weights, optimiser state) after one step."""
    grads = jax.grad(episode_loss)(params, config, view, steps, advantage)
    updates, state = transform.update(grads, state, params)
    return cast(Params, optax.apply_updates(params, updates)), state


def hsdag(
    problem: Problem,
    search: Search,
    config: HsdagConfig | None = None,
    params: Params | None = None,
) -> Answer:
    """The best placement met while HSDAG is trained on the problem (arXiv 2405.14185).

    From fresh weights, or from `params` of `gdp.learn.hsdag.train.pretrain`; evaluations and
    seconds are those of the training here. `search.start` is not read. Where memory overflows
    everywhere, its best placement is repaired.
    """
    clock = search.budget()
    report = search.progress

    def progress(drawn: int, best_s: float) -> None:
        if report is not None:
            report(_share(search, clock, drawn), best_s)

    trained = train(
        problem, config, seed=search.seed, evaluations=search.evaluations, seconds=clock.left_s(),
        params=params, progress=progress,
    )  # fmt: skip
    best = trained.best
    if best.value_s == float("inf"):
        answer = repair_and_select(problem, search, [Assignment(trained.last)], "hsdag")
        spent = answer.evaluations + best.evaluations
        return Answer(answer.assignment, reason=answer.reason, evaluations=spent)
    return Answer(
        best.assignment,
        reason=f"hsdag: first {value_text(problem, trained.first_s)}, best "
        f"{value_text(problem, best.value_s)}, {trained.groups.max() + 1} groups",
        evaluations=best.evaluations,
    )


def _share(search: Search, clock: Clock, drawn: int) -> float:
    """Share of the budget that is spent."""
    shares = [0.0]
    if clock.seconds:
        shares.append(clock.elapsed_s() / clock.seconds)
    if search.evaluations:
        shares.append(drawn / search.evaluations)
    return min(1.0, max(shares))
