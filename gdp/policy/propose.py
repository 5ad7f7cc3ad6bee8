"""Proposals of a policy for a problem: greedy decodes from several incumbents, then samples.

A policy that reads advice improves on an incumbent. So it is decoded once from every reference
placement, and the samples start from the best placement so far.

The decoder's running estimate of memory is not the simulator's peak. Where they differ the
simulator decides, and the decoder tries again under limits lowered by the missing bytes.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from gdp.base.clock import Clock
from gdp.base.cores import num_cores
from gdp.methods.base import Assignment, inner_seed
from gdp.methods.heuristics.list_schedule import lowered, missing_bytes, pool_limits
from gdp.methods.priorities import (
    RULES,
    RatedPlacements,
    concatenated,
    evaluate_rules,
    rank_under,
    rules_of,
)
from gdp.policy.advice import Advice, advice, incumbents, with_incumbent
from gdp.policy.decode import DecodeProblem, decode, in_threads
from gdp.policy.model.config import Head
from gdp.policy.policy import Policy
from gdp.problem.problem import Problem

TIGHTER = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Shares of all limits that are tried next."""
ROUNDS = 7  # of limits lowered by the missing bytes, device by device


def fitting_greedy(
    problem: Problem, view: DecodeProblem, head: Head, clock: Clock | None = None
) -> tuple[DecodeProblem, Int[np.ndarray, "N"], int]:
    """(the view, its limits lowered as far as needed; the greedy placement under them; simulations
    it took).

    First each limit is lowered by its own device's missing bytes, then all by the same share. Where
    nothing will do until the clock is over, the view as it is and the placement that overflows.
    """
    clock, rules = clock or Clock(None), len(rules_of(problem))

    def greedy(limit: Float[np.ndarray, "D"]) -> tuple[DecodeProblem, Int[np.ndarray, "N"]]:
        under = under_limits(problem, view, limit)
        return under, decode(under, head, samples=1, seed=0, greedy_first=True).device[0]

    first = greedy(view.memory_bytes)
    if not view.mask_memory:
        return *first, 0
    capacity = view.memory_bytes.astype(float)
    (under, device), limit, missing, spent = first, capacity, np.zeros_like(capacity), 0
    for attempt in range(ROUNDS):
        if attempt:
            limit = lowered(limit, missing, capacity, attempt - 1)
            under, device = greedy(limit)
        rated = evaluate_rules(problem, device[None])
        spent += rules
        if rated.overflow[0] == 0:
            return under, device, spent
        if clock.is_over():
            return *first, spent
        rank = rank_under(problem, device, RULES[int(rated.rule[0])])
        missing = missing_bytes(problem, Assignment(device, rank))
        spent += 1
    for share in TIGHTER:
        if clock.is_over():
            break
        under, device = greedy(capacity * share)
        spent += rules
        if evaluate_rules(problem, device[None]).overflow[0] == 0:
            return under, device, spent
    return *first, spent


def under_limits(
    problem: Problem, view: DecodeProblem, limit: Float[np.ndarray, "D"]
) -> DecodeProblem:
    """The view with lower memory limits, of the memories that devices share as well."""
    return view._replace(memory_bytes=limit, pool_bytes=pool_limits(problem, limit))


TEMPERATURES = (0.3, 0.7, 1.0)
"""Temperatures of a round of samples: cool ones are better on average, warm ones more diverse."""
ROUND = 6
"""Samples between two evaluations by the simulator."""


def propose(
    policy: Policy,
    problem: Problem,
    count: int,
    seed: int,
    clock: Clock | None = None,
    most: int | None = None,
) -> RatedPlacements:
    """`count` placements, fewer where the clock or `most` evaluations end them; the greedy one from
    the best adviser comes first, always.

    Where the greedy one overflows, all are decoded under the memory limits, tightened, under which
    it fits.
    """
    work = _Work(policy, problem, seed, clock or Clock(None), most)
    work.greedy()
    given = incumbents(problem) if policy.config.advice else None
    advised = None if given is None else evaluate_rules(problem, given[:1])
    if given is not None and advised is not None:
        work.spent += advised.evaluations
        work.greedy_around(given[1 : min(count, 1 + work.most_of(2))])
    while (num_missing := min(ROUND, count - work.count)) > 0 and work.may_sample():
        around = None
        if given is not None and advised is not None:
            proposals = work.found()
            device = proposals.device[proposals.best]
            if advised.overflow[0] == 0 and advised.seconds[0] < proposals.value_s[proposals.best]:
                device = given[0]
            around = work.around(device)
        work.sample(around, max(1, min(num_missing, work.most_of(1))))
    return work.found()


class _Work:
    """Placements decoded so far."""

    def __init__(
        self, policy: Policy, problem: Problem, seed: int, clock: Clock, most: int | None
    ) -> None:
        self.policy, self.problem, self.seed = policy, problem, seed
        self.clock, self.most = clock, most
        self.spent = 0  # evaluations of others than the placements
        self.threads = num_cores() if problem.num_ops > 2000 else 1
        self.limits: Float[np.ndarray, "D"] | None = None
        self.rated: list[RatedPlacements] = []

    @property
    def count(self) -> int:
        """Placements so far."""
        return sum(len(rated.device) for rated in self.rated)

    def may_sample(self) -> bool:
        """True while time and evaluations remain for an incumbent and one placement."""
        return not self.clock.is_over() and self.most_of(1) > 1

    def most_of(self, each: int) -> int:
        """Number of placements in the budget, each evaluated `each` times under every rule."""
        remaining = 1 << 30 if self.most is None else self.most - self.evaluations
        return max(0, remaining // (each * len(rules_of(self.problem))))

    @property
    def evaluations(self) -> int:
        """Evaluations so far."""
        return self.spent + sum(rated.evaluations for rated in self.rated)

    def found(self) -> RatedPlacements:
        """All placements so far, with the runs for incumbents and to make the greedy one fit."""
        return concatenated(self.rated)._replace(evaluations=self.evaluations)

    def around(self, device: Int[np.ndarray, "N"]) -> Advice:
        """The advice around an incumbent, whose rating counts."""
        self.spent += len(rules_of(self.problem))
        return with_incumbent(advice(self.problem), self.problem, device)

    def greedy(self) -> None:
        """The greedy placement from the best adviser, and the limits under which it fits."""
        view, head = self._scored(None)
        view, device, spent = fitting_greedy(self.problem, view, head, self.clock)
        self.limits, self.spent = view.memory_bytes, self.spent + spent
        self._add([device])

    def greedy_around(self, incumbents: Int[np.ndarray, "K N"]) -> None:
        """The greedy placements from incumbents."""

        def one(k: int) -> Int[np.ndarray, "N"]:
            around = with_incumbent(advice(self.problem), self.problem, incumbents[k])
            view, head = self._scored(around)
            return decode(view, head, samples=1, seed=0, greedy_first=True).device[0]

        decoded = self._together(one, len(incumbents))
        self.spent += len(decoded) * len(rules_of(self.problem))  # of the incumbents
        self._add(decoded)

    def sample(self, around: Advice | None, count: int) -> None:
        """Samples from one incumbent, at all temperatures."""
        view, head = self._scored(around)
        first = self.count

        def one(k: int) -> Int[np.ndarray, "N"]:
            seed = inner_seed(self.seed, first + k, 1009)
            temperature = TEMPERATURES[k % len(TEMPERATURES)]
            return decode(view, head, samples=1, seed=seed, temperature=temperature).device[0]

        self._add(self._together(one, count))

    def _together(
        self, make: Callable[[int], Int[np.ndarray, "N"]], count: int
    ) -> list[Int[np.ndarray, "N"]]:
        """Placements decoded in parallel, in order: those that began before the time limit."""

        def one(k: int) -> Int[np.ndarray, "N"] | None:
            return None if self.clock.is_over() else make(k)

        decoded = in_threads(one, range(count), self.threads)
        return [device for device in decoded if device is not None]

    def _scored(self, around: Advice | None) -> tuple[DecodeProblem, Head]:
        view, head = self.policy.view(self.problem, around), self.policy.head(self.problem, around)
        if self.limits is not None:
            view = under_limits(self.problem, view, self.limits)
        return view, head

    def _add(self, devices: Sequence[Int[np.ndarray, "N"]]) -> None:
        if devices:
            self.rated.append(evaluate_rules(self.problem, np.stack(devices)))
