"""Fine-tuning: a pre-trained policy adapted to one problem, gates first, then all weights.

GDP (arXiv 1910.01578) adapts a policy that was pre-trained over many graphs to one graph through
its superposition network, in fewer than 50 updates. The simulator gives the rewards.
With simulated rewards it starts from the answer of `auto` with as many evaluations, explores other
gates (`gdp.learn.gates`) before the gradient changes any weight, and ends with a local search.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from gdp.base.clock import Clock
from gdp.base.errors import ArgumentError, of_kind
from gdp.base.files.disk_cache import use_xla_cache
from gdp.base.files.reading import read_toml, shipped
from gdp.base.files.writing import OverwritePolicy, check_folder_writable
from gdp.base.interrupts import Interrupts
from gdp.learn.evaluator import PlacementEvaluator
from gdp.learn.gates import Explorer
from gdp.learn.ppo import (
    ChoiceRows,
    Weights,
    advantages,
    gradient,
    optimiser,
    rows,
    step,
    with_old,
)
from gdp.learn.recipe import RECIPE_KIND, require_moderate
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.portfolio import auto
from gdp.methods.priorities import RULES, rules_of
from gdp.methods.scoring import Evaluated, score_all
from gdp.methods.search.local_search import local_search
from gdp.methods.shares import REFERENCE_SHARE
from gdp.policy.advice import advice
from gdp.policy.decode import DecodeProblem, decode
from gdp.policy.method import load, policy_methods
from gdp.policy.model.config import Head, Params
from gdp.policy.model.network import Batch
from gdp.policy.policy import Policy, default_checkpoint, keep_placement, save_policy
from gdp.policy.propose import fitting_greedy
from gdp.problem.problem import Problem

Freedom = Literal["gates_first", "gates", "all"]
"""Trainable weights: gates first and then all, gates only, or all from the start."""


@dataclass(frozen=True)
class FinetuneConfig:
    """Settings of a fine-tuning."""

    updates: int = 50  # at most
    seconds: float | None = None  # after which no round or update begins; None: no limit
    evaluations: int = 800  # simulations of placements not evaluated before, at most
    samples: int = 16  # placements per update
    explore: float = 0.5  # share of the evaluations that tries other gates first
    portfolio: bool = True  # start from the answer of `auto` with as many evaluations
    search: float = 0.4  # share of the evaluations for a local search at the end
    epochs: int = 3  # optimiser steps per update
    gate_updates: int = 3  # updates in which only gates change
    freedom: Freedom = "gates_first"
    rate: float = 1e-3
    rate_end: float = 2e-4
    clip: float = 0.2
    entropy: float = 3e-4
    hottest: float = 4.0  # temperature of samples, at most; 1 unless too few of them are new
    imitate: float = 0.3  # weight of the best placement so far, followed as a label

    def __post_init__(self) -> None:
        if self.samples < 3:
            raise ArgumentError(f"samples must be at least 3, got {self.samples}")
        if self.evaluations < 1:
            raise ArgumentError(f"evaluations must be at least 1, got {self.evaluations}")
        if self.seconds is not None and not self.seconds > 0:
            raise ArgumentError(f"seconds must be positive, got {self.seconds}")
        if self.updates < 1:
            raise ArgumentError(f"updates must be at least 1, got {self.updates}")
        if self.hottest < 1.0:
            raise ArgumentError(f"hottest must be at least 1, got {self.hottest}")
        if min(self.explore, self.search) < 0.0 or self.explore + self.search > 1.0:
            raise ArgumentError(
                "explore and search must be at least 0 and at most 1 together, got "
                f"{self.explore} and {self.search}"
            )


def load_finetune(path: str | os.PathLike[str]) -> FinetuneConfig:
    """The settings of a fine-tuning from a TOML file; what it leaves out is as by default."""
    config = read_toml(shipped(path), RECIPE_KIND, FinetuneConfig)
    require_moderate(config, os.fspath(path))
    return config


STALE = 8
"""Consecutive updates without a new placement, the last at the hottest temperature, after which
learning ends and the remaining evaluations go to the search.
"""


@dataclass(frozen=True, eq=False)
class Finetuned:
    """The adapted policy and the best placement found."""

    policy: Policy
    assignment: Assignment
    value_s: float
    start_s: float  # the best before anything was learned: of `auto`, or of the advisers
    start_evaluations: int  # that `auto` took, on top of the budget
    evaluations: int  # all, those of `auto` included
    history: list[dict[str, float]] = field(default_factory=list)
    interrupted: bool = False


def finetune(
    problem: Problem,
    checkpoint: str | os.PathLike[str] | Policy | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    start: Assignment | None = None,
    config: FinetuneConfig | None = None,
    seed: int = 0,
    progress: Callable[[int, dict[str, float]], None] | None = None,
) -> Finetuned:
    """Adapt a policy to one problem.

    Args:
        problem: Problem to adapt to.
        checkpoint: Folder or policy to start from; None is the shipped policy.
        out: Folder for the checkpoint, which `gdp place` takes, with the settings (`recipe.toml`)
            and the log (`metrics.jsonl`).
        force: Write `out` among files that gdp did not write.
        start: Placement to begin with, instead of the answer of `auto`.
        config: Settings; None is `FinetuneConfig()`.
        seed: Seed of all random numbers.
        progress: Called after every round and update with its number, from 0, and its log entry.

    Returns:
        The adapted policy and the best placement, never worse than `start`, or than the answer of
        `auto` with the same seed, evaluations and policy. Ctrl-C ends the training early with the
        best so far, which is written and returned.

    Raises:
        TargetError: if `out` holds anything but a policy, or is the checkpoint itself.
    """
    if out is not None:
        check_checkpoint_writable(out, checkpoint, force=force)
    use_xla_cache()
    config = of_kind(config, FinetuneConfig, "config")
    with Interrupts() as interrupts:
        return _finetuned(
            problem, load(checkpoint), config, start, seed,
            progress=progress or (lambda at, numbers: None),
            out=None if out is None else Path(out), interrupts=interrupts,
        )  # fmt: skip


def check_checkpoint_writable(
    out: str | os.PathLike[str], start: str | os.PathLike[str] | Policy | None, *, force: bool
) -> None:
    """Raise `TargetError` where a folder holds anything but a policy, or is the start itself."""
    given = [] if isinstance(start, Policy) else [start or default_checkpoint()]
    check_folder_writable(out, "policy", OverwritePolicy(lambda: map(Path, given), force))


def _finetuned(
    problem: Problem, policy: Policy, config: FinetuneConfig, given: Assignment | None, seed: int,
    *, progress: Callable[[int, dict[str, float]], None], out: Path | None,
    interrupts: Interrupts,
) -> Finetuned:  # fmt: skip
    """The fine-tuning of `finetune`, which ends early on an interrupt."""
    clock, judge = Clock(config.seconds), PlacementEvaluator(problem, config.evaluations)
    if policy.config.advice:
        advice(problem, clock=clock.part(REFERENCE_SHARE))
    tuner = _Tuner(problem, policy, config, judge, seed)
    start_answer = None
    if given is not None:
        start_answer = Answer(given)
    elif config.portfolio:
        # The answer of `auto` with this policy, as many evaluations, and a share of the seconds.
        limit = _limit(config, clock.part(REFERENCE_SHARE))
        search = Search(seed, None, config.evaluations, clock=limit)
        sampled = ("policy", policy_methods(policy)["policy_samples"])
        start_answer = auto(problem, search, extra=[sampled])
        if start_answer.assignment is not None:
            judge.judge(start_answer.assignment.device[None], rules_of(problem))
    start = _better(problem, start_answer, judge.answer())
    start_s = start.value_s
    history: list[dict[str, float]] = []
    with interrupts.held():
        for update in () if interrupts.requested else tuner.rounds(clock):
            history.append(update)
            start_s = start_s if np.isfinite(start_s) else judge.best_s
            progress(len(history) - 1, update)
            if interrupts.requested:
                break
    tuned = Policy(policy.config, tuner.params, f"{policy.name}, fine-tuned")
    best = judge.answer()
    if start.value_s < best.value_s:
        best = start
    start_evaluations = 0 if start_answer is None else start_answer.evaluations
    spent = start_evaluations + judge.evaluations
    if config.search > 0.0 and judge.left >= 1 and not interrupts.requested:
        first = best.assignment if np.isfinite(best.value_s) else None
        search = Search(seed, None, judge.left, first, clock=_limit(config, clock))
        answer = local_search(problem, search)
        spent += answer.evaluations
        best = _better(problem, answer, best)
    if np.isfinite(best.value_s):
        tuned = replace(tuned, placed=keep_placement(problem, best.assignment))
    with interrupts.held():
        if out is not None:
            save_finetuned(tuned, out, config, history, policy.name)
    return Finetuned(
        tuned, best.assignment, best.value_s, start_s, start_evaluations, spent, history,
        interrupts.requested,
    )  # fmt: skip


def _limit(config: FinetuneConfig, clock: Clock) -> Clock | None:
    """The clock, if there is a limit of seconds beside that of evaluations."""
    return None if config.seconds is None else clock


def _better(problem: Problem, answer: Answer | None, best: Evaluated) -> Evaluated:
    """The answer's placement where it is faster, else the best so far."""
    if answer is None or answer.assignment is None:
        return best
    (other,) = score_all(problem, [answer.assignment])
    return other if other.value_s < best.value_s else best


def save_finetuned(
    tuned: Policy, out: Path, config: FinetuneConfig, history: list[dict[str, float]], start: str
) -> None:
    """Write the checkpoint with its settings and log."""
    settings = {key: value for key, value in asdict(config).items() if value is not None}
    recipe = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    # JSON has no infinity: the cost where nothing fits.
    rows = [{k: v if np.isfinite(v) else None for k, v in row.items()} for row in history]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    # Forced: whether this may be written was asked before the work, which shall not be lost now.
    save_policy(
        tuned, out, recipe=recipe, updates=len(history), start=start, force=True,
        beside={"metrics.jsonl": lines.encode()},
    )  # fmt: skip


class _Tuner:
    """State of a fine-tuning: weights, optimiser, exploration, the inputs of the network."""

    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        config: FinetuneConfig,
        judge: PlacementEvaluator,
        seed: int,
    ) -> None:
        self.problem, self.config, self.judge, self.seed = problem, config, judge, seed
        self.network, self.params = policy.config, policy.params
        self.transform = optimiser(config.rate, config.rate_end, config.updates * config.epochs)
        self.state = self.transform.init(self.params)
        self.explorer = Explorer(policy.params, seed)
        self.temperature = 1.0
        if self.network.advice:
            # What the policy reads is judged first.
            rules = rules_of(problem)
            judge.judge(advice(problem).device[: max(1, judge.left // len(rules))], rules)

    def rounds(self, clock: Clock) -> Iterator[dict[str, float]]:
        """Exploration, then updates, within the evaluations and the clock; yields log entries.

        The search at the end keeps its share of the evaluations.
        """
        config = self.config
        budget = (1.0 - config.search) * config.evaluations
        if config.search == 0.0:
            budget -= config.samples + len(RULES)  # no update is cut, and none exceeds the rest
        explored = min(config.explore * config.evaluations, budget)
        for phase, until in ((self.explore, explored), (self.update, budget)):
            stale = 0
            for at in range(config.updates):
                if self.judge.evaluations >= until or clock.is_over() or stale == STALE:
                    break
                num_evaluated = len(self.judge.known)
                yield phase(at)
                stale = 0 if len(self.judge.known) > num_evaluated else stale + 1

    @functools.cached_property
    def head(self) -> Head:
        """The problem as the start encodes it."""
        return Policy(self.network, self.explorer.params).head(self.problem)

    @functools.cached_property
    def view(self) -> DecodeProblem:
        """Decoder input with memory limits tightened as far as the start needs."""
        plain = Policy(self.network, self.explorer.params).view(self.problem)
        return fitting_greedy(self.problem, plain, self.head)[0]

    def explore(self, at: int) -> dict[str, float]:
        """One round of policies with other gates; the best ones become the weights."""
        drawn = self.explorer.draw(self.view, self.head, self.config.samples)
        cost_s = self.judge.judge(drawn)
        self.explorer.learn(cost_s)
        self.params = self.explorer.adapted()
        return {"explore": float(at), **self.numbers(cost_s)}

    def update(self, at: int) -> dict[str, float]:
        """One update: sample placements, evaluate them, a few optimiser steps."""
        config = self.config
        policy = Policy(self.network, self.params)
        batch = policy.batch(self.problem)
        # The best placement is the last row, a label; where there is none yet, the row is idle.
        forced = None if np.isinf(self.judge.best_s) else self.judge.best[None]
        count, before, temperature = config.samples, len(self.judge.known), self.temperature
        drawn = decode(
            self.view, policy.head_of(self.problem, batch), samples=count + 1,
            seed=self.seed * 100_003 + at, temperature=temperature, greedy_first=at == 0,
            forced=forced, keep=batch.size,
        )  # fmt: skip
        cost_s = self.judge.judge(drawn.device[:count])
        self.warm(len(self.judge.known) - before)
        follow = forced is not None and config.imitate > 0
        surrogate = np.append(np.isfinite(cost_s), False).astype(float)
        label = np.append(np.zeros(count), float(follow))
        finite, advantage = np.flatnonzero(np.isfinite(cost_s)), np.zeros(count + 1)
        if len(finite) > 1:
            advantage[finite] = advantages(cost_s[finite])
        entropy = self.learn(at, batch, rows(drawn, advantage, surrogate, label, temperature))
        return {"update": float(at), **self.numbers(cost_s), "entropy": entropy}

    def numbers(self, cost_s: Float[np.ndarray, "K"]) -> dict[str, float]:
        """Log entry of a round or an update."""
        finite = cost_s[np.isfinite(cost_s)]
        return {
            "mean_s": float(finite.mean()) if len(finite) else float("inf"),
            "best_s": float(self.judge.best_s),
            "evaluations": float(self.judge.evaluations),
        }

    def warm(self, new: int) -> None:
        """Raise the temperature after an update with few new placements, lower it otherwise."""
        factor = 1.3 if new < 0.6 * self.config.samples else 0.9
        self.temperature = float(np.clip(self.temperature * factor, 1.0, self.config.hottest))

    def learn(self, at: int, batch: Batch, drawn: ChoiceRows) -> float:
        """A few optimiser steps on one batch; returns the entropy."""
        config = self.config
        weights = Weights(config.clip, config.entropy, config.imitate)
        entropy = 0.0
        for epoch in range(config.epochs):
            grads, metrics = gradient(self.network, self.params, batch, drawn, weights)
            entropy = float(metrics.entropy)
            if epoch == 0:
                drawn = with_old(drawn, metrics)
            grads = free(grads, self.freedom(at))
            self.params, self.state, _ = step(
                self.transform, self.params, self.state, self.params, grads, 0.0
            )
        return entropy

    def freedom(self, at: int) -> Freedom:
        """Trainable weights of an update."""
        if self.config.freedom != "gates_first":
            return self.config.freedom
        return "gates" if at < self.config.gate_updates else "all"


def free(grads: Params, what: Freedom) -> Params:
    """The gradient, zero except for gates where only those are trained."""
    if what != "gates":
        return grads

    def keep(path: tuple, leaf: jax.Array) -> jax.Array:
        names = [str(getattr(key, "key", key)) for key in path]
        return leaf if "conditioning" in names else jnp.zeros_like(leaf)

    return jax.tree_util.tree_map_with_path(keep, grads)
