"""Search guided by the policy: parts of a placement are forgotten and decoded again.

Large neighbourhood search (Shaw 1998, doi 10.1007/3-540-49481-2_30): a window of the decode
order is freed, everything else stays forced, and the policy fills the gap knowing
both what came before and, through its features, where the fixed readers are. Acceptance by
simulated annealing.
"""

import os

import numpy as np
from jaxtyping import Int

from gdp.methods.base import Answer, Assignment, Clock, Search
from gdp.policy.decode import DecodeProblem, Head, decode, num_threads, priority
from gdp.policy.evaluate import best_row, evaluate
from gdp.policy.features import timing
from gdp.policy.policy import Policy, default_checkpoint, load_policy
from gdp.sim.problem import Problem

BATCH = 16
"""Proposals decoded and simulated together."""
HOT, COLD = 2e-3, 1e-4
"""Temperatures at the start and the end, over the value of the start."""


def guided_search(
    problem: Problem,
    checkpoint: str | os.PathLike[str] | Policy | None,
    search: Search,
    *,
    uniform: bool = False,
    temperature: float = 1.0,
) -> Answer:
    """The best placement found by decoding parts again, from `search.start` or the greedy one.

    With `uniform`, gaps are filled at random instead: what the guidance is worth.
    """
    if isinstance(checkpoint, Policy):
        policy = checkpoint
    else:
        policy = load_policy(default_checkpoint() if checkpoint is None else checkpoint)
    clock = Clock(search.seconds)
    view, head = policy.view(problem), policy.head(problem)
    if uniform:
        head = flat(head)
    if search.start is not None:
        device = search.start.device.copy()
    else:
        device = decode(
            view, policy.head(problem), samples=1, seed=search.seed, greedy_first=True
        ).device[0]
    seconds, overflow = evaluate(problem, device[None])
    if search.seconds is None and search.evaluations is None:
        raise ValueError("guided search needs a limit: give seconds or evaluations")
    state = _State(device, float(seconds[0]), int(overflow[0]))
    spent = 1
    rng = np.random.default_rng([search.seed, 11])
    while not clock.is_over():
        left = BATCH if search.evaluations is None else search.evaluations - spent
        if left <= 0:
            break
        share = _share(clock, spent, search)
        proposals = _propose(problem, view, head, state.device, min(BATCH, left), rng, temperature)
        seconds, overflow = evaluate(problem, proposals)
        spent += len(proposals)
        state.accept(proposals, seconds, overflow, share, rng)
        if search.progress is not None:
            search.progress(share, state.best_s)
    if state.best_overflow > 0:
        return Answer(None, reason="guided search found no placement that fits", evaluations=spent)
    return Answer(Assignment(state.best, priority(problem)), evaluations=spent)


def flat(head: Head) -> Head:
    """A head that finds all devices equally good."""
    return head._replace(prior=np.zeros_like(head.prior), out=np.zeros_like(head.out))


class _State:
    """The placement at hand and the best one."""

    def __init__(self, device: Int[np.ndarray, "N"], seconds: float, overflow: int) -> None:
        self.device, self.seconds, self.overflow = device, seconds, overflow
        self.best, self.best_s, self.best_overflow = device, seconds, overflow
        self.scale_s = seconds

    def accept(
        self,
        proposals: Int[np.ndarray, "B N"],
        seconds: np.ndarray,
        overflow: np.ndarray,
        share: float,
        rng: np.random.Generator,
    ) -> None:
        """Take the best of a batch, or now and then a worse one, the less so the later."""
        row = best_row(seconds, overflow)
        found = (int(overflow[row]), float(seconds[row]))
        if found < (self.best_overflow, self.best_s):
            self.best, self.best_s, self.best_overflow = proposals[row], found[1], found[0]
        heat = self.scale_s * HOT * (COLD / HOT) ** share
        worse = (found[1] - self.seconds) / heat
        if found[0] < self.overflow or (
            found[0] == self.overflow and (worse <= 0 or rng.random() < np.exp(-worse))
        ):
            self.device, self.seconds, self.overflow = proposals[row], found[1], found[0]


def _share(clock: Clock, spent: int, search: Search) -> float:
    """How much of the budget is used, in [0, 1]."""
    used = 0.0
    if clock.seconds:
        used = clock.elapsed_s() / clock.seconds
    if search.evaluations:
        used = max(used, spent / search.evaluations)
    return min(1.0, used)


def _propose(
    problem: Problem,
    view: DecodeProblem,
    head: Head,
    device: Int[np.ndarray, "N"],
    count: int,
    rng: np.random.Generator,
    temperature: float,
) -> Int[np.ndarray, "B N"]:
    """Copies with a gap each, filled by the decoder."""
    forced = np.repeat(device[None], count, axis=0)
    for row in forced:
        row[_gap(problem, rng)] = -1
    threads = num_threads() if problem.num_ops > 2000 else 1
    return decode(
        view, head, samples=count, seed=int(rng.integers(1 << 31)), temperature=temperature,
        forced=forced, threads=threads,
    ).device  # fmt: skip


def _gap(problem: Problem, rng: np.random.Generator) -> Int[np.ndarray, "M"]:
    """Ops to place anew: a window of the decode order, its length uniform in its logarithm.

    Groups are freed whole, so that the gap is not closed by a member that stays.
    """
    order = timing(problem).order
    n = problem.num_ops
    length = int(np.exp(rng.uniform(0.0, np.log(max(n / 4.0, 2.0)))))
    first = int(rng.integers(max(1, n - length + 1)))
    groups = np.unique(problem.group[order[first : first + length]])
    return np.flatnonzero(np.isin(problem.group, groups))
