"""What a policy proposes for a problem: greedy decodes from several incumbents, then samples.

A policy that reads advice improves on an incumbent. So it is decoded once from every adviser's
placement, and the samples start from the best placement met so far.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.clock import Clock
from gdp.methods.priorities import Rated, rate, rules_of
from gdp.policy.advice import Advice, advice, incumbents, with_incumbent
from gdp.policy.decode import DecodeProblem, decode
from gdp.policy.evaluate import best_row
from gdp.policy.model.head import Head
from gdp.policy.policy import Policy
from gdp.policy.repair import fitting_greedy
from gdp.problem.problem import Problem
from gdp.sim.batch import num_threads

TEMPERATURES = (0.3, 0.7, 1.0)
"""Samples of a round are shared out over these; cool ones are better on average, warm ones more
diverse."""
ROUND = 6
"""Samples between two looks at the simulator."""
LARGE = 20_000
"""Ops above which only the best incumbent is read, once: reading one takes seconds there."""


class Proposals(NamedTuple):
    """Placements, the greedy one from the best adviser first, and what the simulator says."""

    device: Int[np.ndarray, "K N"]
    seconds: Float[np.ndarray, "K"]
    overflow: Int[np.ndarray, "K"]
    evaluations: int  # runs of the simulator: of these, of incumbents, and to make greedy fit

    @property
    def best(self) -> int:
        """The row that overflows least, and of those the fastest."""
        return best_row(self.seconds, self.overflow)

    @property
    def value_s(self) -> Float[np.ndarray, "K"]:
        """Seconds, inf where memory overflows."""
        return np.where(self.overflow == 0, self.seconds, np.inf)


def propose(
    policy: Policy,
    problem: Problem,
    count: int,
    seed: int,
    clock: Clock | None = None,
    most: int | None = None,
) -> Proposals:
    """`count` placements, fewer where the clock or `most` evaluations end them; the greedy one
    comes first, always.

    Where the greedy one overflows, all are decoded under the memory limits, tightened, under which
    it fits.
    """
    work = _Work(policy, problem, seed, clock or Clock(None), most)
    work.greedy()
    if not policy.config.advice or problem.num_ops > LARGE:
        work.sample(None, count - 1)
        return work.found()
    given = incumbents(problem)
    advised = rate(problem, given[:1])
    work.spent += advised.evaluations
    for device in given[1:count]:
        if work.may(1):
            work.greedy(work.around(device))
    while (left := min(ROUND, count - work.count)) > 0 and work.may(1):
        found = work.found()
        device = found.device[found.best]
        if advised.overflow[0] == 0 and advised.seconds[0] < found.value_s[found.best]:
            device = given[0]
        left = max(k for k in range(1, left + 1) if k == 1 or work.may(k))
        work.sample(work.around(device), left)
    return work.found()


class _Work:
    """Placements decoded so far."""

    def __init__(
        self, policy: Policy, problem: Problem, seed: int, clock: Clock, most: int | None
    ) -> None:
        self.policy, self.problem, self.seed = policy, problem, seed
        self.clock, self.most = clock, most
        self.spent = 0  # evaluations of what is not among the placements
        self.threads = num_threads() if problem.num_ops > 2000 else 1
        self.limits: Float[np.ndarray, "D"] | None = None
        self.devices: list[Int[np.ndarray, "K N"]] = []
        self.rated: list[Rated] = []

    @property
    def count(self) -> int:
        """Placements so far."""
        return sum(len(rows) for rows in self.devices)

    def may(self, count: int) -> bool:
        """Whether time and evaluations are left for an incumbent and so many placements."""
        if self.clock.is_over():
            return False
        need = (1 + count) * len(rules_of(self.problem))
        return self.most is None or self.evaluations + need <= self.most

    @property
    def evaluations(self) -> int:
        """So far."""
        return self.spent + sum(rated.evaluations for rated in self.rated)

    def found(self) -> Proposals:
        """All so far."""
        return Proposals(
            np.concatenate(self.devices),
            np.concatenate([rated.seconds for rated in self.rated]),
            np.concatenate([rated.overflow for rated in self.rated]),
            self.evaluations,
        )

    def around(self, device: Int[np.ndarray, "N"]) -> Advice:
        """The advice around an incumbent, whose rating counts."""
        self.spent += len(rules_of(self.problem))
        return with_incumbent(advice(self.problem), self.problem, device)

    def greedy(self, told: Advice | None = None) -> None:
        """The greedy placement from one incumbent, without one from the best adviser."""
        view, head = self._scored(told)
        if self.limits is None:
            view, device, spent = fitting_greedy(self.problem, view, head)
            self.limits, self.spent = view.memory_bytes, self.spent + spent
            self._add(device[None])
            return
        self._add(decode(view, head, samples=1, seed=0, greedy_first=True).device)

    def sample(self, told: Advice | None, count: int) -> None:
        """Samples from one incumbent, at all temperatures."""
        if count <= 0:
            return
        view, head = self._scored(told)
        first = self.count
        drawn = [
            decode(
                view, head, samples=len(share), seed=self.seed * 1009 + first + k,
                temperature=TEMPERATURES[k], threads=self.threads,
            ).device
            for k, share in enumerate(np.array_split(np.arange(count), len(TEMPERATURES)))
            if len(share) and not self.clock.is_over()
        ]  # fmt: skip
        if drawn:
            self._add(np.concatenate(drawn))

    def _scored(self, told: Advice | None) -> tuple[DecodeProblem, Head]:
        view, head = self.policy.view(self.problem, told), self.policy.head(self.problem, told)
        return (view if self.limits is None else view._replace(memory_bytes=self.limits)), head

    def _add(self, devices: Int[np.ndarray, "K N"]) -> None:
        self.devices.append(devices)
        self.rated.append(rate(self.problem, devices))
