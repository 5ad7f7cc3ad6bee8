"""Fine-tuning: a pre-trained policy adapted to one problem, gates first, then all weights.

GDP (arXiv 1910.01578) adapts a policy that was pre-trained over many graphs to one graph through
its superposition network, in fewer than 50 updates. The reward is the simulator or a measured run.
Where simulations are the reward, it starts from what `auto` finds with as many evaluations; other
gates are tried before the gradient moves any weight, and a local search has the last word.
"""

import contextlib
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from gdp.clock import Clock
from gdp.errors import of_kind
from gdp.files.writing import OverwritePolicy, check_folder_writable
from gdp.learn.explore import Explorer
from gdp.learn.judge import Judge, Reward
from gdp.learn.ppo import (
    Rows,
    Weights,
    advantages,
    gap_advantages,
    gap_weights,
    gradient,
    optimiser,
    rows,
    step,
)
from gdp.learn.rollout import with_gaps
from gdp.learn.tuning import FinetuneConfig, Freedom
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.portfolio import auto
from gdp.methods.priorities import RULES, rules_of
from gdp.methods.search.local_search import local_search
from gdp.policy.advice import Advice, advice, advise, incumbents, with_incumbent
from gdp.policy.compilation import use_cache
from gdp.policy.decode import DecodeProblem, Rollout, decode
from gdp.policy.method import policy_candidate
from gdp.policy.model.config import Params
from gdp.policy.model.head import Head
from gdp.policy.placed import keep
from gdp.policy.policy import Policy, default_checkpoint, load_policy, save_policy
from gdp.policy.repair import fitting_greedy
from gdp.policy.view.batching import Batch
from gdp.problem.problem import Problem
from gdp.sim.score import values

log = logging.getLogger(__name__)

PORTFOLIO_SHARE = 0.3
"""Of the seconds, for advisers; and of those left, for `auto`."""
STALE = 8
"""Updates in a row that meet no new placement, the last of them at the hottest temperature: then
learning is over, and what is left of the evaluations is the search's."""


@dataclass(frozen=True, eq=False)
class Finetuned:
    """The adapted policy and the best placement met on the way."""

    policy: Policy
    assignment: Assignment
    value_s: float
    start_s: float  # the best before anything was learned: of `auto`, or of what the policy reads
    start_evaluations: int  # that `auto` took, on top of the budget
    evaluations: int  # all, those of `auto` included
    history: list[dict[str, float]] = field(default_factory=list)


def finetune(
    problem: Problem,
    checkpoint: str | os.PathLike[str] | Policy | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    reward: Reward | None = None,
    config: FinetuneConfig | None = None,
    seed: int = 0,
    progress: Callable[[int, dict[str, float]], None] | None = None,
) -> Finetuned:
    """Adapt a policy to one problem; with `out`, write the checkpoint that `gdp place` takes.

    `checkpoint` is a folder, a policy, or None for the shipped one. Without `reward` the simulator
    judges, and the result is never worse than what `auto` answers with the same seed, evaluations
    and policy. A reward is called once per distinct placement, again for the best few at the end.
    `progress` is called after every round and update with its number, from 0, and what the log says
    of it. In the folder `out` are also the config (`recipe.toml`) and the log (`metrics.jsonl`).
    Raises `TargetError` where `out` holds anything but a policy, or the checkpoint itself; `force`
    writes among what is there. Ctrl-C ends it with the best so far, which is written and returned.
    """
    if out is not None:
        given = [] if isinstance(checkpoint, Policy) else [checkpoint or default_checkpoint()]
        check_folder_writable(out, "policy", OverwritePolicy(lambda: map(Path, given), force))
    use_cache()
    config = of_kind(config, FinetuneConfig, "config")
    with Interrupts() as interrupts:
        return _finetuned(
            problem, _policy(checkpoint), config, reward, seed,
            progress=progress or (lambda at, numbers: None),
            out=None if out is None else Path(out), interrupts=interrupts,
        )  # fmt: skip


def _finetuned(
    problem: Problem, policy: Policy, config: FinetuneConfig, reward: Reward | None, seed: int,
    *, progress: Callable[[int, dict[str, float]], None], out: Path | None,
    interrupts: "Interrupts",
) -> Finetuned:  # fmt: skip
    """The fine-tuning of `finetune`, which ends early where it is interrupted."""
    clock, judge = Clock(config.seconds), Judge(problem, config.evaluations, reward)
    if policy.config.advice:
        advise(problem, {}, clock.left_s(PORTFOLIO_SHARE))
    tuner = _Tuner(problem, policy, config, judge, seed)
    first, simulated = None, reward is None
    if simulated and config.portfolio:
        first = _portfolio(problem, policy, config, clock, seed)
        if first.assignment is not None:
            judge.judge(first.assignment.device[None], rules_of(problem))
    start, start_s = _better(problem, first, judge.answer(), judge.best_s)
    history: list[dict[str, float]] = []
    with interrupts.held():
        for update in () if interrupts.asked else tuner.rounds(clock, simulated):
            history.append(update)
            start_s = start_s if np.isfinite(start_s) else judge.best_s
            progress(len(history) - 1, update)
            if interrupts.asked:
                break
    tuned = Policy(policy.config, tuner.params, f"{policy.name}, fine-tuned")
    best, value_s = (judge.answer(), judge.best_s) if interrupts.asked else judge.confirmed()
    if start_s < value_s:
        best, value_s = start, start_s
    before = 0 if first is None else first.evaluations
    spent = before + judge.evaluations
    if simulated and config.search > 0.0 and judge.left >= 1 and not interrupts.asked:
        start = best if np.isfinite(value_s) else None
        search = Search(seed=seed, seconds=clock.left_s(), evaluations=judge.left, start=start)
        answer = local_search(problem, search)
        spent += answer.evaluations
        best, value_s = _better(problem, answer, best, value_s)
    if np.isfinite(value_s):
        tuned = replace(tuned, placed=keep(problem, best))
    with interrupts.held():
        if out is not None:
            _save(tuned, out, config, history, policy.name)
    return Finetuned(tuned, best, value_s, start_s, before, spent, history)


class Interrupts:
    """Ctrl-C as a request to end with the best so far.

    Searches end where `KeyboardInterrupt` is raised. While it is `held`, a request only sets
    `asked`: the update at hand is finished first, as JAX may not outlive an exception in the midst
    of its work. A second one is raised at once.
    """

    def __init__(self) -> None:
        self.asked = False
        self._is_held = False
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        # Signals reach the main thread alone, and nobody else may ask for them.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within, the first request is not raised."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def _handle(self, number: int, frame: object) -> None:
        again, self.asked = self.asked, True
        if not again:
            log.warning("interrupted: ends with the best so far; once more to stop without it")
        if again or not self._is_held:
            raise KeyboardInterrupt


def _portfolio(
    problem: Problem, policy: Policy, config: FinetuneConfig, clock: Clock, seed: int
) -> Answer:
    """What `auto` answers with this policy and as many evaluations; of the seconds, it has a share
    alone."""
    seconds = clock.left_s(PORTFOLIO_SHARE)
    search = Search(seed=seed, seconds=seconds, evaluations=config.evaluations)
    return auto(problem, search, extra=[("policy", policy_candidate(policy))])


def _better(
    problem: Problem, answer: Answer | None, best: Assignment, value_s: float
) -> tuple[Assignment, float]:
    """The answer's placement and its seconds if they are fewer, or what was best."""
    if answer is None or answer.assignment is None:
        return best, value_s
    seconds, _ = values(problem, answer.assignment.device[None], answer.assignment.rank)
    return (answer.assignment, float(seconds[0])) if seconds[0] < value_s else (best, value_s)


def _save(
    tuned: Policy, out: Path, config: FinetuneConfig, history: list[dict[str, float]], start: str
) -> None:
    """The checkpoint, and beside it how it was made and what the log says."""
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


def _policy(checkpoint: str | os.PathLike[str] | Policy | None) -> Policy:
    if isinstance(checkpoint, Policy):
        return checkpoint
    return load_policy(default_checkpoint() if checkpoint is None else checkpoint)


class _Tuner:
    """Weights and optimiser, and what the network reads."""

    def __init__(
        self,
        problem: Problem,
        policy: Policy,
        config: FinetuneConfig,
        judge: Judge,
        seed: int,
    ) -> None:
        self.problem, self.config, self.judge, self.seed = problem, config, judge, seed
        self.network, self.params = policy.config, policy.params
        self.transform = optimiser(config.rate, config.rate_end, config.updates * config.epochs)
        self.state = self.transform.init(self.params)
        self.explorer = Explorer(policy.params, seed)
        self.explored: tuple[Advice | None, Head] | None = None  # what was encoded last
        self.before_s = np.inf  # the best before the update at hand
        self.temperature = 1.0
        self.limits: Float[np.ndarray, "D"] | None = None
        self.advised: Advice | None = None
        if self.network.advice:
            # What the policy reads is judged first: with a measured reward nobody else has.
            rules = rules_of(problem)
            judge.judge(incumbents(problem)[: max(1, judge.left // len(rules))], rules)

    def rounds(self, clock: Clock, simulated: bool) -> Iterator[dict[str, float]]:
        """Exploration, then updates, as far as evaluations and the clock reach; what each says.

        Search, which only a simulated reward has, gets the share that the config leaves it.
        """
        config = self.config
        budget = (1.0 - config.search * simulated) * config.evaluations - self.judge.reserved
        if simulated and config.search == 0.0:
            budget -= config.samples + len(RULES)  # no update is cut, and none exceeds the rest
        phases = [(self.update, budget)]
        if simulated:
            phases.insert(0, (self.explore, min(config.explore * config.evaluations, budget)))
        for phase, until in phases:
            stale = 0
            for at in range(config.updates):
                if self.judge.evaluations >= until or clock.is_over() or stale == STALE:
                    break
                known = len(self.judge.known)
                yield phase(at)
                stale = 0 if len(self.judge.known) > known else stale + 1

    def explore(self, at: int) -> dict[str, float]:
        """One round of policies with other gates; the weights are then those of the best."""
        start = Policy(self.network, self.explorer.params)
        known = self.advice()
        if self.explored is None or self.explored[0] is not known:
            self.explored = known, start.head(self.problem, known)
        view, head = self.view(start, known), self.explored[1]
        drawn = self.explorer.draw(view, head, self.config.samples)
        cost_s = self.judge.judge(drawn)
        self.explorer.learn(cost_s)
        self.params = self.explorer.adapted()
        return {"explore": float(at), **self.numbers(cost_s)}

    def update(self, at: int) -> dict[str, float]:
        """One update: sample, judge, and a few optimiser steps."""
        config = self.config
        policy = Policy(self.network, self.params)
        known = self.advice()
        batch = policy.batch(self.problem, known)
        forced = self.forced(at)
        drawn = self.draw(policy, batch, known, forced, at)
        # The last row is not judged again; in the first update there is no label, and it is idle.
        count = config.samples
        self.before_s, before = self.judge.best_s, len(self.judge.known)
        temperature = self.temperature
        cost_s = self.judge.judge(drawn.device[:count])
        self.warm(len(self.judge.known) - before)
        follow = forced is not None and config.imitate > 0
        own = np.append(np.isfinite(cost_s), False).astype(float)
        label = np.append(np.zeros(count), float(follow))
        whole = count if forced is None else count + 1 - len(forced)
        made = rows(drawn, self.advantage(cost_s, whole), own, label, temperature)
        if forced is not None:
            chosen = self.free(forced, made.taken.shape)
            taken = np.asarray(made.taken)
            own[whole:count] *= gap_weights(chosen[whole:count], taken[whole:count])
            made = made._replace(
                taken=jnp.asarray(taken & chosen), surrogate=jnp.asarray(own, jnp.float32)
            )
        entropy = self.learn(at, batch, made)
        return {"update": float(at), **self.numbers(cost_s), "entropy": entropy}

    def numbers(self, cost_s: Float[np.ndarray, "K"]) -> dict[str, float]:
        """What a log says of a round or an update."""
        finite = cost_s[np.isfinite(cost_s)]
        return {
            "mean_s": float(finite.mean()) if len(finite) else float("inf"),
            "best_s": float(self.judge.best_s),
            "evaluations": float(self.judge.evaluations),
        }

    def draw(
        self,
        policy: Policy,
        batch: Batch,
        known: Advice | None,
        forced: Int[np.ndarray, "K N"] | None,
        at: int,
    ) -> Rollout:
        """Samples, and behind them the rows that are given; of more samples than are run with a
        measured reward, those that the simulator finds worth it."""
        view, head = self.view(policy, known), policy.head_of(self.problem, batch)
        pad = (len(batch.op_mask), len(batch.device_mask))
        count, seed = self.config.samples + 1, self.seed * 100_003 + at
        if self.judge.reward is not None and self.config.screen > 1:
            drawn = decode(
                view, head, samples=self.config.samples * self.config.screen, seed=seed, pad=pad,
                temperature=self.temperature, greedy_first=at == 0,
            ).device  # fmt: skip
            best = drawn[self.judge.pick(drawn, count - (0 if forced is None else len(forced)))]
            forced = best if forced is None else np.concatenate([best, forced])
        return decode(
            view, head, samples=count, seed=seed, temperature=self.temperature,
            greedy_first=at == 0, forced=forced, keep=True, pad=pad,
        )  # fmt: skip

    def warm(self, new: int) -> None:
        """Sample hotter after an update that met few new placements, cooler after the others."""
        factor = 1.3 if new < 0.6 * self.config.samples else 0.9
        self.temperature = float(np.clip(self.temperature * factor, 1.0, self.config.hottest))

    def forced(self, at: int) -> Int[np.ndarray, "K N"] | None:
        """Rows with gaps around the best placement, -1 where free, and the best as the label."""
        if np.isinf(self.judge.best_s):
            return None
        rng = np.random.default_rng([self.seed, at, 5])
        count = int(self.config.gaps * self.config.samples)
        best = self.judge.best
        return np.concatenate([with_gaps(self.problem, best, count, rng), best[None]])

    def free(self, forced: Int[np.ndarray, "K N"], shape: tuple[int, ...]) -> np.ndarray:
        """Where a choice was the policy's own, or the label's."""
        own = np.ones(shape, dtype=bool)
        own[shape[0] - len(forced) : shape[0] - 1, : forced.shape[1]] = forced[:-1] < 0
        return own

    def advantage(self, cost_s: Float[np.ndarray, "K"], whole: int) -> Float[np.ndarray, "L"]:
        """Advantages: whole placements and gaps each among themselves, and 0 for the label."""
        found = np.zeros(len(cost_s) + 1)
        drawn, gaps = np.flatnonzero(np.isfinite(cost_s[:whole])), np.arange(whole, len(cost_s))
        if len(drawn) > 1:
            found[drawn] = advantages(cost_s[drawn])
        gaps = gaps[np.isfinite(cost_s[gaps])]
        found[gaps] = gap_advantages(cost_s[gaps], self.before_s)
        return found

    def learn(self, at: int, batch: Batch, made: Rows) -> float:
        """A few optimiser steps on one batch; returns the entropy."""
        config = self.config
        weights = Weights(config.clip, config.entropy, config.imitate)
        entropy = 0.0
        for epoch in range(config.epochs):
            grads, metrics = gradient(self.network, self.params, batch, made, weights)
            entropy = float(metrics.entropy)
            if epoch == 0:
                made = made._replace(old=metrics.old, fresh=jnp.asarray(False))
            grads = free(grads, self.freedom(at))
            self.params, self.state, _ = step(
                self.transform, self.params, self.state, self.params, grads, 0.0
            )
        return entropy

    def view(self, policy: Policy, known: Advice | None) -> DecodeProblem:
        """What is decoded under: memory limits tightened as far as the start policy needs."""
        plain = policy.view(self.problem, known)
        if self.limits is None:
            tight, _, _ = fitting_greedy(self.problem, plain, policy.head(self.problem, known))
            self.limits = tight.memory_bytes
        return plain._replace(memory_bytes=self.limits)

    def advice(self) -> Advice | None:
        """What the policy is to read: the best placement so far is the incumbent."""
        if not self.network.advice:
            return None
        if np.isinf(self.judge.best_s):
            return advice(self.problem)
        if self.advised is None or (self.advised.device[0] != self.judge.best).any():
            self.advised = with_incumbent(advice(self.problem), self.problem, self.judge.best)
        return self.advised

    def freedom(self, at: int) -> Freedom:
        """What may change in an update."""
        if self.config.freedom != "gates_first":
            return self.config.freedom
        return "gates" if at < self.config.gate_updates else "all"


def free(grads: Params, what: Freedom) -> Params:
    """The gradient with everything but the gates at zero, or as it is."""
    if what != "gates":
        return grads

    def keep(path: tuple, leaf: jax.Array) -> jax.Array:
        names = [str(getattr(key, "key", key)) for key in path]
        return leaf if "conditioning" in names else jnp.zeros_like(leaf)

    return jax.tree_util.tree_map_with_path(keep, grads)
