"""One signature for every method: `(Problem, Search) -> Answer`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from gdp.base.clock import Clock, WorkClock
from gdp.base.cores import num_cores
from gdp.base.errors import ArgumentError
from gdp.placement.placement import Assignment as Assignment
from gdp.problem.problem import Problem

SEEDS = 1 << 63
"""Seeds lie in 0..SEEDS - 1."""
MOST_CHAINS = 4
"""Of a search that a clock ends, where nothing else is asked for."""


@dataclass(frozen=True, eq=False)
class Search:
    """Budget and start of a search.

    With `evaluations` all work is counted and no clock enters an answer: equal arguments, equal
    answers. `seconds` are for searches without them.
    """

    seed: int = 0
    # Wall clock, after imports and compilation; None: no limit. Not heeded beside `evaluations`.
    seconds: float | None = 5.0
    evaluations: int | None = None  # simulated placements; None: as many as the seconds allow
    start: Assignment | None = None
    # Share of the best value that fewer transfers and cuts may cost (`gdp.methods.simplify`).
    # `gdp.question.solve.solve` applies it to a method's answer; methods know nothing of it.
    # None: that of the question (`gdp.question.question.Question.simplicity`).
    simplicity: float | None = None
    # Concurrent searches, one core each, that exchange the best. None: where a clock
    # ends the search one a core, at most `MOST_CHAINS`; else one, so that answers know no machine.
    chains: int | None = None
    prior_answers: Mapping[str, "Answer"] = field(default_factory=dict)  # by method
    progress: Callable[[float, float], None] | None = field(default=None)
    # called with (fraction of the budget used, best value so far in seconds)
    clock: Clock | None = None  # of the call that this search is a part of, instead of `seconds`

    def __post_init__(self) -> None:
        if not 0 <= self.seed < SEEDS:
            raise ArgumentError(f"seed must lie in 0..2**63 - 1, got {self.seed}")
        if self.seconds is not None and not self.seconds >= 0:
            raise ArgumentError(f"seconds must be >= 0, got {self.seconds}")
        if self.chains is not None and self.chains < 1:
            raise ArgumentError(f"chains must be at least 1, got {self.chains}")
        if self.evaluations is not None and self.evaluations < 0:
            raise ArgumentError(f"evaluations must be >= 0, got {self.evaluations}")
        if self.simplicity is not None and not 0 <= self.simplicity < 1:
            raise ArgumentError(f"simplicity must lie in [0, 1), got {self.simplicity}")

    @property
    def num_chains(self) -> int:
        """Number of concurrent searches."""
        if self.chains is not None:
            return self.chains
        if self.evaluations is not None:
            return 1
        timed = self.seconds is not None
        if self.clock is not None:
            timed = not self.clock.is_counted and self.clock.seconds is not None
        return min(MOST_CHAINS, num_cores()) if timed else 1

    def budget(self, work_s: float | None = None) -> Clock:
        """The clock of the whole call if there is one, else a new one.

        Of `seconds` where no evaluations are given; else of counted work, without limit or as much
        as an idle core does in `work_s` seconds.
        """
        if self.clock is not None:
            return self.clock
        return Clock(self.seconds) if self.evaluations is None else WorkClock(work_s)


def inner_seed(seed: int, number: int, stride: int = 64) -> int:
    """The seed of one of up to `stride` searches inside another, which is again a seed.

    >>> inner_seed(3, 1), inner_seed(SEEDS - 1, 2) < SEEDS
    (193, True)
    """
    return (seed * stride + number) % SEEDS


class MethodNote(str):
    """A note on how an answer was found or proven, which terminals show with `--verbose`; other
    notes tell a user what to do."""


@dataclass(frozen=True)
class Candidate:
    """One method's answer inside another's. Seconds hold even where memory does not fit."""

    method: str
    latency_s: float | None  # None where the method has no answer; `reason` says why
    period_s: float | None
    value_s: float | None  # of the problem's objective
    feasible: bool
    seconds: float
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Answer:
    """Result of a method. `assignment` is None only where nothing fits, with the reason."""

    assignment: Assignment | None
    reason: str = ""  # why there is no assignment, or what limits the answer (heuristic, cut short)
    bound_s: float = 0.0  # proven lower bound of the objective in seconds
    bound_by: str = ""  # the argument that proves it
    proven_optimal: bool = False
    evaluations: int = 0
    candidates: tuple[Candidate, ...] = ()  # what the answer was chosen from
    evaluated: tuple[Assignment, ...] = ()  # their placements, of those that fit
    notes: tuple[str, ...] = ()  # what is worth telling the user
    simplicity_cost: float = 0.0  # share of the best value that fewer cuts cost
    closest: Assignment | None = None  # without an assignment, the one that overflows least
    proven_misfit: bool = False  # no placement at all fits, as `reason` proves

    @property
    def messages(self) -> tuple[str, ...]:
        """The notes, or where there are none the reason."""
        return self.notes or ((MethodNote(self.reason),) if self.reason else ())

    def in_seconds(self, unit_s: float, value_unit: float) -> "Answer":
        """Convert all times of an answer to a problem in units of `unit_s` seconds, and its values
        by `Objective.scale` of them."""

        def scaled(value: float | None, unit: float) -> float | None:
            return None if value is None else value * unit

        rows = [
            replace(
                row, latency_s=scaled(row.latency_s, unit_s),
                period_s=scaled(row.period_s, unit_s), value_s=scaled(row.value_s, value_unit),
            )
            for row in self.candidates
        ]  # fmt: skip
        return replace(self, bound_s=self.bound_s * value_unit, candidates=tuple(rows))


@runtime_checkable
class Method(Protocol):
    """Raises `InfeasibleError` only for problems that no method can solve; otherwise says so in
    `reason`."""

    def __call__(self, problem: Problem, search: Search, /) -> Answer: ...
