"""One update of pre-training, by imitation or by PPO, and the problems and labels it draws from.

An update is a function of the state and of its number alone: whatever is random in update k comes
from (seed, k), so that a resumed run draws what the first would have.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from gdp.learn.instances import Instance, Problems, draw, parse_key
from gdp.learn.labels import LabelStore
from gdp.learn.ppo import (
    ChoiceRows,
    Episode,
    Metrics,
    Weights,
    advantages,
    gap_advantages,
    gap_weights,
    gradient,
    imitation_rows,
    optimiser,
    published_advantages,
    rows,
    sample,
    step,
    with_label,
    with_old,
)
from gdp.learn.processes import ProcessGroup
from gdp.learn.recipe import Recipe, RecipeError
from gdp.methods.priorities import timing
from gdp.policy.model.config import Params
from gdp.policy.model.network import Batch
from gdp.policy.policy import Policy
from gdp.problem.problem import Problem


class TrainState(NamedTuple):
    """All that a checkpoint holds beside the labels."""

    params: Params
    averaged: Params  # exponential mean of the weights: what is validated and shipped
    optimiser: Any
    step: np.ndarray  # [] updates done


@dataclass
class Trainer:
    """A recipe with its problems and labels; `update` takes the state one step on."""

    recipe: Recipe
    problems: Problems
    labels: LabelStore
    team: ProcessGroup = field(default_factory=ProcessGroup)
    threads: int = 1
    past: dict[str, tuple[float, int]] = field(default_factory=dict)  # for the published advantage

    def __post_init__(self) -> None:
        imitation, ppo = self.recipe.imitation, self.recipe.ppo
        for name, phase in (("imitation", imitation), ("ppo", ppo)):
            if phase.updates and phase.graphs < self.team.size:
                raise RecipeError(
                    f"{self.team.size} processes share {phase.graphs} problems per update; raise "
                    f"graphs of [{name}] to at least {self.team.size}"
                )
        self.transforms = (
            optimiser(imitation.rate, imitation.rate_end, imitation.updates),
            optimiser(ppo.rate, ppo.rate_end, ppo.updates * ppo.epochs),
        )

    @property
    def total(self) -> int:
        """Updates of both phases."""
        return self.recipe.imitation.updates + self.recipe.ppo.updates

    def imitates(self, at: int) -> bool:
        """True for updates of the first phase, imitation."""
        return at < self.recipe.imitation.updates

    def fresh(self, params: Params) -> TrainState:
        """The state before the first update."""
        params = jax.tree.map(np.asarray, params)
        return TrainState(params, params, self.transforms[0].init(params), np.zeros((), np.int64))

    def update(self, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """One update, and its metrics."""
        at = int(state.step)
        if at == self.recipe.imitation.updates:
            state = state._replace(optimiser=self.transforms[1].init(state.params))
        do = self._imitate if self.imitates(at) else self._reinforce
        state, numbers = do(state, np.random.default_rng([self.recipe.seed, at]))
        return state._replace(step=np.asarray(at + 1)), numbers

    def _imitate(
        self, state: TrainState, rng: np.random.Generator
    ) -> tuple[TrainState, dict[str, float]]:
        config = self.recipe.imitation
        labelled = self.labels.instances()
        chosen = [labelled[int(k)] for k in rng.integers(len(labelled), size=config.graphs)]
        seeds = rng.integers(1 << 31, size=config.graphs)
        policy = Policy(self.recipe.network, state.params)

        def followed() -> Iterator[tuple[Batch, ChoiceRows]]:
            for k, instance in self.team.mine(chosen):
                problem, seed = self.problems.get(instance), int(seeds[k])
                label = self.labels.get(instance, problem)
                if label is not None:
                    yield imitation_rows(policy, problem, label.placement(), config.noise, seed)

        total, metrics = self._gradients(state, followed(), Weights(0.2, 0.0, 1.0))
        state = self._apply(state, total, len(metrics), self.transforms[0], config.average)
        losses = [float(m.cross_entropy) for m in metrics]
        return state, {"cross_entropy": float(np.mean(losses)) if losses else float("nan")}

    def _reinforce(
        self, state: TrainState, rng: np.random.Generator
    ) -> tuple[TrainState, dict[str, float]]:
        config = self.recipe.ppo
        chosen = [self._choose(rng) for _ in range(config.graphs)]
        seeds = rng.integers(1 << 31, size=config.graphs)
        policy = Policy(self.recipe.network, state.params)
        episodes = [
            self._episode(policy, instance, int(seeds[k])) for k, instance in self.team.mine(chosen)
        ]
        every = [(episode, self._rows(instance, episode)) for instance, episode in episodes]
        # Without advantages and a label nothing is left but the bonus for entropy.
        batches = [
            (episode.batch, choices)
            for episode, choices in every
            if episode.labelled or choices.advantage.any()
        ]
        progress = (int(state.step) - self.recipe.imitation.updates) / max(config.updates, 1)
        weights = Weights(
            config.clip,
            config.entropy + (config.entropy_end - config.entropy) * progress,
            config.imitate,
        )
        metrics: list[Metrics] = []
        for epoch in range(config.epochs):
            total, latest = self._gradients(state, batches, weights)
            if epoch == 0:
                batches = [
                    (batch, with_old(choices, numbers))
                    for (batch, choices), numbers in zip(batches, latest, strict=True)
                ]
            metrics += latest
            state = self._apply(state, total, len(batches), self.transforms[1], config.average)
        idle = len(episodes) - len(batches)
        return state, self._numbers(episodes, metrics) | {"without_signal": float(idle)}

    def _gradients(
        self, state: TrainState, batches: Iterable[tuple[Batch, ChoiceRows]], weights: Weights
    ) -> tuple[Params | None, list[Metrics]]:
        """(sum of the gradients, None where there are none; metrics of each)."""
        total, metrics = None, []
        for batch, choices in batches:
            grads, numbers = gradient(self.recipe.network, state.params, batch, choices, weights)
            total = grads if total is None else jax.tree.map(np.add, total, grads)
            metrics.append(numbers)
        return total, metrics

    def _choose(self, rng: np.random.Generator) -> Instance:
        if only := self.recipe.data.instances:
            return parse_key(only[int(rng.integers(len(only)))])
        labelled = self.labels.instances()
        if not labelled or rng.random() < self.recipe.data.fresh:
            data = self.recipe.data
            return draw(rng, self.problems.train, limited=data.limited, memory=data.memory)
        return labelled[int(rng.integers(len(labelled)))]

    def _episode(self, policy: Policy, instance: Instance, seed: int) -> tuple[Instance, Episode]:
        """Sampled placements of one problem; the label rides along as the last row."""
        problem, config = self.problems.get(instance), self.recipe.ppo
        label = self.labels.get(instance, problem)
        follows = config.imitate > 0 and label is not None
        # There are as many rows with a label as without, so that both share one compiled gradient.
        episode = sample(
            policy, problem, samples=config.samples - follows, seed=seed,
            gaps=int(config.gaps * config.samples) if policy.config.advice else 0,
            threads=self.threads,
        )  # fmt: skip
        best = episode.rollout.device[int(np.argmin(episode.cost_s))]
        if label is not None:
            label = self.labels.improve(
                instance, problem, best,
                evaluations=len(episode.cost_s), found_by="policy",
            )  # fmt: skip
            best = label.placement()
        return instance, with_label(policy, episode, best) if follows else episode

    def _rows(self, instance: Instance, episode: Episode) -> ChoiceRows:
        samples = len(episode.cost_s)
        labelled = np.zeros(samples)
        labelled[-1] = float(episode.labelled)
        free = labelled == 0
        whole = free.copy()
        whole[episode.gaps] = False
        advantage = np.zeros(samples)
        weight = free.astype(float)
        if self.recipe.ppo.advantage == "normalised":
            advantage[whole] = advantages(episode.cost_s[whole])
            gaps = episode.gaps
            advantage[gaps] = gap_advantages(episode.cost_s[gaps], episode.incumbent_s)
            weight[gaps] = gap_weights(episode.free[gaps], episode.rollout.taken[gaps])
        else:
            advantage[free], self.past[instance.key] = published_advantages(
                episode.cost_s[free], episode.feasible[free],
                self.past.get(instance.key, (0.0, 0)), single_device_s(episode.problem),
            )  # fmt: skip
        choices = rows(episode.rollout, advantage, weight, labelled)
        return choices._replace(taken=choices.taken & jax.numpy.asarray(episode.free))

    def _apply(
        self,
        state: TrainState,
        total: Any,
        count: int,
        transform: optax.GradientTransformation,
        average: float,
    ) -> TrainState:
        if total is None:
            total = jax.tree.map(np.zeros_like, state.params)
        grads = self.team.mean(total, count)
        params, opt, averaged = step(
            transform, state.params, state.optimiser, state.averaged, grads, average
        )
        return state._replace(params=params, optimiser=opt, averaged=averaged)

    def _numbers(
        self, episodes: list[tuple[Instance, Episode]], metrics: list[Metrics]
    ) -> dict[str, float]:
        """Means over this process's problems; ratios are to the labels, where there are any."""
        ratios, bests, gains = [], [], []
        for instance, episode in episodes:
            label = self.labels.get(instance, episode.problem)
            drawn = episode.cost_s[: episode.gaps.start]
            if episode.labelled:
                gains.append(np.log(drawn.min() / episode.cost_s[-1]))
            if label is not None:
                ratios.append(np.log(drawn / label.value_s).mean())
                bests.append(np.log(drawn.min() / label.value_s))
        costs = np.concatenate([e.cost_s for _, e in episodes]) if episodes else np.full(1, np.nan)
        mean = {
            "mean_s": costs.mean(),
            "best_s": costs.min(),
            "entropy": np.mean([float(m.entropy) for m in metrics]) if metrics else np.nan,
            "clipped": np.mean([float(m.clipped) for m in metrics]) if metrics else np.nan,
            "feasible": np.mean([e.feasible.mean() for _, e in episodes]) if episodes else np.nan,
        }
        if ratios:
            mean |= {"sample_ratio": np.exp(np.mean(ratios)), "best_ratio": np.exp(np.mean(bests))}
        if gains:
            mean["label_gain"] = np.exp(np.mean(gains))
        return {name: float(value) for name, value in mean.items()}


def single_device_s(problem: Problem) -> float:
    """Seconds of all ops on the best single device; elsewhere what may not run there."""
    cost_s = np.where(problem.allowed, timing(problem).cost_s, np.inf)
    alone = np.where(problem.allowed, cost_s, cost_s.min(axis=1, keepdims=True)).sum(axis=0)
    return max(float(alone.min()), 1e-12)
