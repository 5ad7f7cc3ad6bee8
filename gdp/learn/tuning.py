"""The closed loop: place, measure, learn the machine's costs from the pieces, place again; and the
verdict on the lessons."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from gdp.base.errors import GdpError, MeasurementError, ModelError, PlacementError
from gdp.costs.adapt import Adaptation, Run, adapt

LOG = logging.getLogger(__name__)
PATIENCE = 2
"""Rounds without a gain after which the loop ends."""
LEAST_GAIN = 0.01
"""Share of the best value that counts as a gain where the noise is not known to be larger."""

DRAWS = 3
"""Of costs from the posterior, where the likeliest ones lead to a placement that was measured."""
SEED_STRIDE = 1000
"""Distance of the seeds of one round's draws."""

UNMEASURABLE = (PlacementError, MeasurementError, ModelError)
"""Errors that say that a placement cannot be measured; all others are faults."""

P = TypeVar("P")


@dataclass(frozen=True)
class Planned(Generic[P]):
    """A placement to measure."""

    placement: P
    key: bytes  # equal for placements that run the same
    predicted_s: float


@dataclass(frozen=True)
class Measurement:
    """Seconds of the objective of an executed placement, and what the run says about costs."""

    value_s: float
    run: Run
    noise: float = 0.0  # half width of the interval, a share of the value


@dataclass(frozen=True)
class Trial(Generic[P]):
    """One round: what was predicted before, measured, and known after."""

    planned: Planned[P]
    measured: Measurement
    best_s: float  # lowest measured so far
    adaptation: Adaptation  # after this round


Place = Callable[[Adaptation, P | None, int], Planned[P]]
"""The best placement under an adaptation: from scratch, or from another one; with a seed."""


def tuning_loop(
    place: Place[P],
    measure: Callable[[P], Measurement],
    runs: int,
    *,
    known: Sequence[Run] = (),
    patience: int | None = PATIENCE,
    seed: int = 0,
    refit: bool = True,
    unmeasured: Callable[[GdpError], None] | None = None,
) -> Iterator[Trial[P]]:
    """Rounds of placing, measuring and learning, until they are spent or gain nothing.

    The next placement is the better, as predicted, of one searched from the best measured
    placement and one from scratch. Where both were measured already, costs drawn from the posterior
    decide (Thompson 1933).

    Args:
        place: Finds a placement under an adaptation.
        measure: Executes one.
        runs: Placements to execute at most.
        known: Runs of other models on this machine.
        patience: Rounds without a gain after which the loop ends; None: all runs are spent.
        seed: Of searches and draws.
        refit: False keeps the costs as they were, for comparison.
        unmeasured: Called with the reason why a placement could not be measured; None: it is
            logged.

    Yields:
        A trial for every executed placement; one that the runtime refuses, or whose measurement
        contradicts itself, costs a run and is left out.

    Raises:
        PlacementError, MeasurementError, ModelError: if the first placement is not measured.
    """
    seen: list[Run] = []
    trials: list[Trial[P]] = []
    refused: set[bytes] = set()
    adaptation, idle = adapt(known), 0
    while len(trials) + len(refused) < runs:
        planned = _next(place, trials, refused, adaptation, seed)
        if planned is None:
            return
        try:
            measured = measure(planned.placement)
        except UNMEASURABLE as error:
            if not trials:
                raise
            if unmeasured is None:
                LOG.warning("not measured: %s", error)
            else:
                unmeasured(error)
            refused.add(planned.key)
            continue
        seen.append(measured.run)
        if refit:
            adaptation = adapt([*known, *seen])
        before_s = trials[-1].best_s if trials else np.inf
        trials.append(Trial(planned, measured, min(before_s, measured.value_s), adaptation))
        yield trials[-1]
        gain = 1.0 - measured.value_s / before_s if trials[1:] else 1.0
        idle = 0 if gain > max(LEAST_GAIN, measured.noise) else idle + 1
        if patience is not None and idle >= patience:
            return


def _next(
    place: Place[P], trials: Sequence[Trial[P]], refused: set[bytes], adaptation: Adaptation,
    seed: int,
) -> Planned[P] | None:  # fmt: skip
    """A placement that was not executed yet; None where none is found."""
    number = len(trials) + len(refused)
    if not trials:
        return place(adaptation, None, seed)
    best = min(trials, key=lambda trial: trial.measured.value_s).planned.placement
    measured = refused | {trial.planned.key for trial in trials}
    candidates = [place(adaptation, start, seed + number) for start in (best, None)]
    for planned in sorted(candidates, key=lambda one: one.predicted_s):
        if planned.key not in measured:
            return planned
    for draw in range(DRAWS):
        drawn = adaptation.sampled(seed + number + draw * SEED_STRIDE)
        planned = place(drawn, best, seed + number)
        if planned.key not in measured:
            return planned
    return None


class Checked(NamedTuple):
    """Seconds of a placement measured round-robin with others, and two predictions of them."""

    measured_s: float
    interval_s: tuple[float, float]  # 95%
    before_s: float  # predicted without the lessons in question
    after_s: float  # with them


@dataclass(frozen=True)
class Verdict:
    """Judgement of lessons: mean shares by which predictions missed, and the reason."""

    is_better: bool
    reason: str  # one line
    off_before: float | None = None  # without the lessons; None: nothing was measured to judge by
    off: float | None = None  # with them

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def judge_lessons(rows: Sequence[Checked], noise: str = "") -> Verdict:
    """Verdict by a final contest: lessons are better where predictions with them are nearer to the
    measured seconds, wherever in their intervals these lie.

    Args:
        rows: The contenders whose costs were learned.
        noise: The reason why the contest has no verdict of its own, in a few words: lessons of a
            machine that was busy are not kept, however well they predict it.

    >>> judge_lessons([Checked(1.0, (0.9, 1.1), before_s=2.0, after_s=1.05)]).reason
    'predictions are 5% off as learned, 100% without'
    """
    if not rows:
        return Verdict(False, "no final contest was measured, so nothing says that it is right")
    predicted = np.array([(row.before_s, row.after_s) for row in rows])
    # All contenders at once: they take turns, so that a busy machine slows all of them.
    cases = [
        np.abs(predicted / np.array(seconds)[:, None] - 1.0).mean(axis=0)
        for seconds in zip(*((row.measured_s, *row.interval_s) for row in rows), strict=True)
    ]
    off_before, off = map(float, cases[0])
    gains = [before - after for before, after in cases]
    both = f"predictions are {off:.0%} off as learned, {off_before:.0%} without"
    if noise:
        return Verdict(False, f"{noise}, so nothing is kept: {both}", off_before, off)
    if min(gains) > 0:
        return Verdict(True, both, off_before, off)
    noisy = "too noisy to tell whether it is right: " if max(gains) > 0 else ""
    return Verdict(False, noisy + both, off_before, off)
