"""The closed loop on machines made up of numbers."""

import itertools

import numpy as np
import pytest

from gdp.base.errors import GdpError, MeasurementError, ModelError, PlacementError, RefusedError
from gdp.costs.adapt import Adaptation, Piece, Run, Share, op_effects
from gdp.learn.tuning import Checked, Measurement, Planned, judge_lessons, tuning_loop

TRUE = {"A": 3.0, "B": 0.5, "C": 1.0, "D": 2.0}
"""Multipliers of a machine with one second of each type by its costs."""
PLANS = ["A", "AB", "BC", "B", "CD", "BD"]


def plan(adaptation: Adaptation, start: str | None, seed: int) -> Planned[str]:
    """The plan of the fewest seconds as far as is known; fresh searches shuffle ties."""
    del seed

    def seconds(name: str) -> float:
        factors = [
            np.exp(adaptation.log_factor(op_effects(t, 4, t, "core0", "cpu-core"))) for t in name
        ]
        # B is believed to be slow at first.
        return sum(f * (1.2 if t == "B" else 1.0) for t, f in zip(name, factors, strict=True))

    best = min(PLANS, key=seconds)
    return Planned(best, best.encode(), seconds(best))


def measure(name: str) -> Measurement:
    shares = [Share(t, 4, t, 1.2 if t == "B" else 1.0) for t in name]
    pieces = tuple(
        Piece("core0", "cpu-core", (s,), s.seconds * TRUE[s.op_type], False) for s in shares
    )
    return Measurement(sum(p.measured_s for p in pieces), Run("m", pieces))


def test_the_loop_finds_what_the_machine_likes() -> None:
    trials = list(tuning_loop(plan, measure, 6, patience=None))
    assert trials[0].planned.placement == "A"  # by the costs
    assert min(trials, key=lambda t: t.measured.value_s).planned.placement == "B"
    assert [t.best_s for t in trials] == sorted((t.best_s for t in trials), reverse=True)


def test_without_refit_it_stays_where_the_costs_lead() -> None:
    trials = list(tuning_loop(plan, measure, 6, patience=None, refit=False))
    assert [t.planned.placement for t in trials] == ["A"]


def test_nothing_is_measured_twice_and_never_more_than_allowed() -> None:
    for runs in (1, 2, 6):
        keys = [t.planned.key for t in tuning_loop(plan, measure, runs, patience=None)]
        assert len(keys) == len(set(keys)) <= runs


def test_the_same_seed_takes_the_same_path() -> None:
    paths = [[t.planned.key for t in tuning_loop(plan, measure, 6, seed=3)] for _ in range(2)]
    assert paths[0] == paths[1]


def test_what_other_models_taught_counts_before_the_first_run() -> None:
    known = [measure("AB").run] * 4
    first = next(tuning_loop(plan, measure, 1, known=known))
    assert first.planned.placement != "A"


def counted(values: list[float], **more: object) -> int:
    """Rounds of a loop whose placements measure so, each another one."""
    turns, starts = iter(values), []

    def place(adaptation: Adaptation, start: int | None, seed: int) -> Planned[int]:
        starts.append(start)
        return Planned(len(starts), bytes([len(starts)]), 1.0)

    def run(placement: int) -> Measurement:
        return Measurement(next(turns), Run("m", ()), 0.02)

    return len(list(tuning_loop(place, run, len(values), **more)))


def test_two_rounds_without_a_gain_end_it() -> None:
    assert counted([1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 1.0]) == 5
    assert counted([1.0, 0.99, 0.98, 0.5]) == 3  # gains within the noise are none
    assert counted([1.0] * 5, patience=None) == 5
    assert counted([1.0, 0.9, 0.8, 0.7, 0.6]) == 5


def test_the_better_of_a_search_from_the_best_and_one_from_scratch_is_measured() -> None:
    starts: list[int | None] = []
    values = iter([3.0, 1.0, 2.0, 4.0])

    def place(adaptation: Adaptation, start: int | None, seed: int) -> Planned[int]:
        starts.append(start)
        number = len(starts)
        # From scratch is worse, but for the second time.
        worse = start is None and number != 5
        return Planned(number, bytes([number]), 2.0 if worse else 1.0 + 0.1 * (start is not None))

    measured = [
        t.planned.placement
        for t in tuning_loop(
            place, lambda p: Measurement(next(values), Run("m", ())), 4, patience=None
        )
    ]
    assert starts == [None, 1, None, 2, None, 2, None]
    assert measured == [1, 2, 5, 6]


def test_a_placement_that_the_runtime_refuses_costs_a_run_and_is_left_out() -> None:
    """The first plan has to run; a later one may be refused."""

    def executed(refused: int) -> list[int]:
        names = itertools.count(1)

        def place(adaptation: Adaptation, start: int | None, seed: int) -> Planned[int]:
            name = next(names)
            return Planned(name, bytes([name]), 1.0)

        def run(name: int) -> Measurement:
            asked.append(name)
            if len(asked) == refused:
                raise PlacementError("HETERO cannot follow it")
            return Measurement(1.0 / name, Run("m", ()))

        asked: list[int] = []
        trials = list(tuning_loop(place, run, 4, patience=None))
        assert len(asked) == 4
        assert len({*asked}) == 4
        return [t.planned.placement for t in trials]

    assert len(executed(refused=9)) == 4
    assert len(executed(refused=2)) == 3
    with pytest.raises(PlacementError, match="HETERO"):
        executed(refused=1)


def loop_with(error: Exception, told: list[GdpError]) -> int:
    """Rounds of a loop whose second measurement raises."""
    names, measured = itertools.count(1), []

    def place(adaptation: Adaptation, start: int | None, seed: int) -> Planned[int]:
        name = next(names)
        return Planned(name, bytes([name]), 1.0)

    def run(name: int) -> Measurement:
        measured.append(name)
        if len(measured) == 2:
            raise error
        return Measurement(1.0 / name, Run("m", ()))

    return len(list(tuning_loop(place, run, 4, unmeasured=told.append)))


@pytest.mark.parametrize("kind", [RefusedError, PlacementError, MeasurementError, ModelError])
def test_reasons_why_a_placement_is_not_measured_are_told(kind: type[GdpError]) -> None:
    told: list[GdpError] = []
    error = kind("no room")
    assert loop_with(error, told) == 3
    assert told == [error]


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), KeyError("x"), GdpError("another")])
def test_faults_end_the_loop(fault: Exception) -> None:
    told: list[GdpError] = []
    with pytest.raises(type(fault)):
        loop_with(fault, told)
    assert told == []


def checked(measured_s: float, width: float, before_s: float, after_s: float) -> Checked:
    half = measured_s * width / 2
    return Checked(measured_s, (measured_s - half, measured_s + half), before_s, after_s)


@pytest.mark.parametrize(
    ("rows", "better", "reason"),
    [
        ([checked(1.0, 0.1, 2.0, 1.1)], True, "predictions are 10% off as learned, 100% without"),
        ([checked(1.0, 0.1, 1.04, 1.5)], False, "predictions are 50% off as learned, 4% without"),
        ([checked(1.0, 0.1, 1.2, 1.2)], False, "predictions are 20% off as learned, 20% without"),
        # Shares are of all contenders: one that is predicted worse may be outweighed.
        ([checked(1.0, 0.1, 1.0, 1.1), checked(4.0, 0.1, 8.0, 4.0)], True, "predictions are 5% "),
        # Nearer at 1.0, farther at 1.2.
        ([checked(1.0, 0.4, 1.15, 0.9)], False, "too noisy to tell whether it is right: predict"),
        # Farther at 1.0, nearer at 0.8.
        ([checked(1.0, 0.4, 1.09, 0.9)], False, "too noisy to tell whether it is right: predict"),
        ([], False, "no final contest was measured"),
    ],
)
def test_lessons_are_judged_by_the_final_contest(
    rows: list[Checked], better: bool, reason: str
) -> None:
    verdict = judge_lessons(rows)
    assert verdict.is_better == better
    assert verdict.reason.startswith(reason)
    assert (verdict.off is None) == (verdict.off_before is None) == (not rows)


def test_lessons_of_a_busy_machine_are_not_kept_however_well_they_predict_it() -> None:
    rows = [checked(1.0, 0.1, 2.0, 1.0)]
    assert judge_lessons(rows).is_better
    verdict = judge_lessons(rows, "too noisy")
    assert not verdict.is_better
    off = "predictions are 0% off as learned, 100% without"
    assert verdict.reason == f"too noisy, so nothing is kept: {off}"
