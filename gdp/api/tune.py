"""The command `tune`: place, run, learn what the machine costs, place again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gdp.api.answer import planned
from gdp.api.ask import ask
from gdp.api.run import Executor
from gdp.base.errors import ArgumentError, GdpError, InfeasibleError
from gdp.base.interrupts import Interrupts, StopRequestError
from gdp.base.rows import imported
from gdp.cluster.file import Machine
from gdp.costs import machine
from gdp.costs.adapt import Adaptation, AdaptedCosts, Run, lessons
from gdp.costs.base import CostModel
from gdp.costs.default import SHIPPED, resolve_costs
from gdp.graph.groups import first_members
from gdp.learn.tuning import (
    UNMEASURABLE,
    Checked,
    Measurement,
    Planned,
    Trial,
    Verdict,
    judge_lessons,
    tuning_loop,
)
from gdp.measure.measuring import Measuring
from gdp.measure.observe import observed_run
from gdp.measure.report import SINGLE, Row, RunReport, speed
from gdp.measure.statistics import Estimate
from gdp.methods.base import Assignment, Search
from gdp.placement.constraints import Constraints
from gdp.placement.placement import Placement, make_placement
from gdp.problem.problem import Problem
from gdp.question import solve
from gdp.question.models import Model, with_dims
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question
from gdp.sim.objectives import find_objective
from gdp.sim.prediction import Prediction

TUNED, FIRST, ONE_DEVICE = "tuned plan", "first plan", "one device"
ROUND_SECONDS = 2.0
"""Of measuring in a round, at most; finalists get `Measuring.seconds` together."""
PLACE_SECONDS = 2.0
MOST_OUTLIERS = 3
"""Outliers that a note names."""


@dataclass(frozen=True)
class Round:
    """Prediction, measurement and lessons of a round."""

    predicted_s: float
    measured_s: float
    best_s: float
    pieces: int
    learned: tuple[str, ...]

    @property
    def off(self) -> float:
        """Share by which the prediction missed."""
        return abs(self.predicted_s / self.measured_s - 1.0)


class Unmeasured(NamedTuple):
    """A measurement that was refused or contradicted itself."""

    stage: str  # "a plan after round 2", "the final contest"
    reason: str


@dataclass(frozen=True, eq=False)
class Tuned:
    """The best measured placement, and the costs learned from the runs."""

    placement: Placement
    answer: str  # "tuned plan", "first plan" or "one device"
    objective: str
    model: str
    cluster: str
    rounds: tuple[Round, ...]
    report: RunReport | None  # of the finalists, measured in turn; None where there was no contest
    record: machine.MachineRecord
    costs: AdaptedCosts  # learned from all that is known
    verdict: Verdict  # on the lessons: only where they are better anything is remembered
    record_file: str = ""  # empty: nothing is remembered
    notes: tuple[str, ...] = ()
    unmeasured: tuple[Unmeasured, ...] = ()
    interrupted: bool = False  # by Ctrl-C, after at least one round

    @property
    def value_s(self) -> float:
        """Measured seconds of the answer, of the objective."""
        if self.report is None:
            return min(r.measured_s for r in self.rounds)
        return 1.0 / speed(self.objective, _finalists(self.report)[self.answer]).value

    def rates(self) -> dict[str, Estimate]:
        """Samples per second of the objective, with intervals, of all that was measured
        round-robin."""
        if self.report is None:
            return {}
        rows = _finalists(self.report) | {
            name: row for name, row in self.report.baselines.items() if name != SINGLE
        }
        return {name: speed(self.objective, row) for name, row in rows.items()}

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values; the placement is in the file that is written."""
        return {
            "model": self.model, "cluster": self.cluster, "objective": self.objective,
            "answer": self.answer, "value_s": self.value_s, "off_before": self.record.off_before,
            "off": self.record.off,
            "rounds": [
                {"predicted_s": r.predicted_s, "measured_s": r.measured_s, "best_s": r.best_s,
                 "pieces": r.pieces, "learned": list(r.learned)}
                for r in self.rounds
            ],
            "finals": None if self.report is None else self.report.to_json(),
            "verdict": self.verdict.to_json(), "remembered_in": self.record_file or None,
            "not_measured": [one._asdict() for one in self.unmeasured],
            "interrupted": self.interrupted, "notes": list(self.notes),
        }  # fmt: skip


def _finalists(report: RunReport) -> dict[str, Row]:
    """The placements among those measured round-robin."""
    rows = {TUNED: report.placed} | dict(report.rivals)
    return rows | ({ONE_DEVICE: report.baselines[SINGLE]} if SINGLE in report.baselines else {})


@dataclass(eq=False)
class _Tuning:
    """A model that is tuned, and all that was measured of it."""

    executor: Executor
    base: CostModel
    label: str
    problem: Problem
    measuring: Measuring
    predicted: dict[bytes, Prediction] = field(default_factory=dict)
    unmeasured: list[Unmeasured] = field(default_factory=list)
    scouts: list[Run] = field(default_factory=list)
    trials: list[Trial[Placement]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    final: RunReport | None = None  # None where an interrupt or a refusal came before
    interrupted: bool = False

    @property
    def best(self) -> Planned[Placement]:
        """The plan of the fastest round."""
        return min(self.trials, key=lambda trial: trial.measured.value_s).planned

    def skip(self, stage: str, error: GdpError) -> None:
        """Record and report that something was not measured."""
        self.unmeasured.append(Unmeasured(stage, str(error)))
        self.measuring.say(f"{stage} was not measured: {error}")

    def place(self, adaptation: Adaptation, start: Placement | None, seed: int) -> Planned:
        """The best placement under an adaptation, predicted as it is executed."""
        question, runtime = self.executor.question, self.executor.runtime
        search, method = replace(question.search, seed=seed), question.method
        if start is not None and method == "auto" and not runtime.planner:
            first = first_members(self.problem.origin.group_of)
            begin = Assignment(start.device[first], start.rank[first], start.teams)
            search, method = replace(search, start=begin), "local_search"
        costs = AdaptedCosts(self.base, adaptation)
        question = replace(question, search=search, method=method, costs=costs)
        return self.planned(planned(question).placement, adaptation)

    def planned(self, placed: Placement, adaptation: Adaptation) -> Planned:
        """A placement with its prediction."""
        key = _key(placed)
        predicted = self.executor.predict(placed, AdaptedCosts(self.base, adaptation))
        self.predicted[key] = predicted
        plan = self.executor.plan(predicted)
        full = find_objective(self.executor.question.objective).pipelined
        return Planned(placed, key, plan.period_s if full else plan.latency_s)

    def measure(self, placed: Placement) -> Measurement:
        """Execute a placement, without baselines."""
        prediction, question = self.predicted[_key(placed)], self.executor.question
        measuring = Measuring(ROUND_SECONDS, question.search.seed)
        report = self.executor.run(placed, prediction, measuring, baselines=False)
        estimate = speed(question.objective, report.placed)
        run = observed_run(
            question.graph, question.cluster, self.base, prediction,
            self.executor.plan(prediction), report,
        )  # fmt: skip
        return Measurement(1.0 / estimate.value, run, estimate.width / 2)


def _key(placed: Placement) -> bytes:
    """Key of placements with equal execution."""
    return placed.device.tobytes() + repr(placed.teams).encode()


def tune(
    model: Model,
    cluster: Machine,
    *,
    objective: str = "latency",
    runs: int = 10,
    dims: Sequence[str] = (),
    costs: CostModel | str | Path | None = None,
    method: str = "auto",
    search: Search | None = None,
    checkpoint: str | Path | None = None,
    constraints: Constraints | None = None,
    runtime: str | None = None,
    measuring: Measuring | None = None,
    keep: bool = True,
    refit: bool = True,
    progress: Callable[[Round], None] | None = None,
) -> Tuned:
    """Place a model, run it, learn this machine's real costs, and place it again.

    Args:
        model: ONNX or GGUF file, JAX function or PyTorch module.
        cluster: File, preset or `Cluster` whose devices exist on this machine.
        objective: "latency" or "throughput".
        runs: Placements to execute at most; fewer where two in a row gain nothing. Of llama.cpp
            the first, where nothing is known of this machine, has a part on every device.
        dims: Bindings of symbolic dimensions, "NAME=VALUE"; ONNX models.
        costs: Costs to start from; None for the shipped ones and what is remembered of this
            machine.
        method: As in `gdp.place`.
        search: Budget of each of the two searches of a round; 2 seconds by default.
        checkpoint: As in `gdp.place`.
        constraints: As in `gdp.place`.
        runtime: Name of the runtime; None for the first that executes such models.
        measuring: Of the finalists; its progress is told of stages.
        keep: Remember what was learned for `gdp.place` and `gdp.run` on this machine, if it
            predicts the finalists better than the costs so far.
        refit: False keeps the costs as they were, for comparison.
        progress: Called after every round.

    Returns:
        The best measured placement, which remembers this question and is never slower than the
        first plan or one device where these were measured, with the rounds, the finalists' report,
        the record of the machine and the verdict on it. Ctrl-C ends the loop with the best of the
        rounds so far, of which nothing is remembered.

    Raises:
        ModelError: if no runtime, or not the one given, executes the model.
        PlacementError: if the runtime refuses the first placement.
        KeyboardInterrupt: if Ctrl-C comes before the first round has ended, or twice.
        ValueError: if `runs` is not positive.

    Example:
        >>> import gdp
        >>> tuned = gdp.tune("onnx:light_squeezenet", "2xcpu-core", runs=3)  # doctest: +SKIP
        >>> gdp.save_placement(tuned.placement, "p.json")  # doctest: +SKIP
    """
    question = ask(
        model, cluster, dims=with_dims(dims), objective=objective, costs=costs, method=method,
        search=search or Search(seconds=PLACE_SECONDS), checkpoint=checkpoint,
        constraints=constraints,
    )  # fmt: skip
    return tuned_answer(
        question, runs=runs, runtime=runtime, measuring=measuring, keep=keep, refit=refit,
        progress=progress,
    )  # fmt: skip


def tuned_answer(
    question: Question,
    *,
    runs: int = 10,
    runtime: str | None = None,
    measuring: Measuring | None = None,
    keep: bool = True,
    refit: bool = True,
    progress: Callable[[Round], None] | None = None,
) -> Tuned:
    """Answer a question by measured placements; see `tune`."""
    if runs < 1:
        raise ArgumentError(f"runs must be at least 1, got {runs}")
    executor = Executor.of(question, runtime)
    asked, question, target = question, executor.question, question.cluster
    shipped = SHIPPED if question.costs is None else question.costs
    base, label = resolve_costs(shipped, target, question.graph)
    problem = prepare_problem(replace(question, costs=base), replicas=True)
    measuring = measuring or Measuring(seed=question.search.seed)
    tuning = _Tuning(executor, base, label, problem, measuring)
    known = machine.Knowledge()
    if question.costs is None:
        known = machine.knowledge(target, executor.runtime.distribution, label)
    _measure(tuning, runs, known.runs, refit, progress)
    answer, placement = _answer(tuning)
    placement = replace(placement, question=asked.record())
    record, verdict = _judged(tuning, known)
    learned = tuning.trials[-1].adaptation
    path, notes = "", _notes(learned, tuning.interrupted)
    if keep and verdict.is_better:
        try:
            path = str(machine.remember(record))
        except OSError as error:
            notes.append(f"what was learned is not kept: {error}")
    return Tuned(
        placement, answer, question.objective, question.graph.name, target.name,
        tuple(tuning.rounds), tuning.final, record, AdaptedCosts(base, learned), verdict, path,
        tuple(notes),
        tuple(tuning.unmeasured), tuning.interrupted,
    )  # fmt: skip


def _measure(
    tuning: _Tuning, runs: int, known: Sequence[Run], refit: bool,
    progress: Callable[[Round], None] | None,
) -> None:  # fmt: skip
    """Measure all rounds, then the finalists round-robin; end early on Ctrl-C."""
    with Interrupts(StopRequestError) as interrupts:
        try:
            if not known and refit and runs > 1:
                _scout(tuning)
            _run_rounds(tuning, runs - len(tuning.scouts), known, refit, progress)
            _run_finals(tuning)
        except (KeyboardInterrupt, StopRequestError):
            if not tuning.trials or interrupts.requests > 1:
                raise KeyboardInterrupt from None
            tuning.interrupted = True


def _scout(tuning: _Tuning) -> None:
    """Run a plan with a part of the model on every device, for runtimes whose plans may leave one
    out for good."""
    question, scout = tuning.executor.question, tuning.executor.runtime.scout
    if not scout or question.cluster.num_devices < 2:
        return
    tuning.measuring.say("running a plan with a part on every device")
    try:
        plan = imported(scout)(question.graph, question.cluster)
        tuning.planned(plan, Adaptation())
        tuning.scouts.append(tuning.measure(plan).run)
    except UNMEASURABLE as error:
        tuning.skip("a plan with a part on every device", error)


def _run_rounds(
    tuning: _Tuning, runs: int, known: Sequence[Run], refit: bool,
    progress: Callable[[Round], None] | None,
) -> None:  # fmt: skip
    """Run rounds until they are spent or gain nothing."""
    say, known = tuning.measuring.say, [*known, *tuning.scouts]

    def unmeasured(error: GdpError) -> None:
        tuning.skip(f"a plan after round {len(tuning.trials)}", error)

    say("placing the first plan")
    for trial in tuning_loop(
        tuning.place, tuning.measure, runs, known=known,
        seed=tuning.executor.question.search.seed, refit=refit, unmeasured=unmeasured,
    ):  # fmt: skip
        tuning.trials.append(trial)
        run = trial.measured.run
        tuning.rounds.append(
            Round(
                trial.planned.predicted_s, trial.measured.value_s, trial.best_s, len(run.pieces),
                tuple(lessons(trial.adaptation, [*known, run])),
            )
        )  # fmt: skip
        if progress is not None:
            progress(tuning.rounds[-1])
        say(f"round {len(tuning.trials)} of at most {runs}", len(tuning.trials) / runs)


def _run_finals(tuning: _Tuning) -> None:
    """Measure the best plan, the first one and the baselines round-robin."""
    adaptation = tuning.trials[-1].adaptation
    best, first = tuning.best, tuning.trials[0].planned
    tuning.measuring.say("measuring the finalists and the baselines in turn")
    rivals = {}
    if first.key != best.key:
        tuning.planned(first.placement, adaptation)
        rivals[FIRST] = tuning.predicted[first.key]
    tuning.planned(best.placement, adaptation)
    try:
        tuning.final = tuning.executor.run(
            best.placement, tuning.predicted[best.key], tuning.measuring, rivals=rivals
        )
    except UNMEASURABLE as error:
        tuning.skip("the final contest", error)


def _notes(learned: Adaptation, interrupted: bool) -> list[str]:
    """Remarks on how the loop ended, and on measurements that taught nothing."""
    notes = ["interrupted: the best placement so far"] if interrupted else []
    if count := len(learned.outliers):
        named = "; ".join(learned.outliers[:MOST_OUTLIERS])
        more = "; ..." if count > MOST_OUTLIERS else ""
        notes.append(
            f"{count} of {learned.observations} measured pieces and links teach nothing, as they "
            f"contradict all others: {named}{more}"
        )
    return notes


def _answer(tuning: _Tuning) -> tuple[str, Placement]:
    """The fastest of the finalists."""
    best, final = tuning.best.placement, tuning.final
    if final is None:
        return TUNED, best
    question = tuning.executor.question
    rows = _finalists(final)
    fastest = max(rows, key=lambda name: speed(question.objective, rows[name]).value)
    if fastest == FIRST:
        return FIRST, tuning.trials[0].planned.placement
    if fastest == TUNED:
        return TUNED, best
    graph, cluster = question.graph, question.cluster
    if tuning.executor.runtime.planner:
        return ONE_DEVICE, make_placement(graph, cluster, np.full(graph.num_ops, cluster.host))
    costs = AdaptedCosts(tuning.base, tuning.trials[-1].adaptation)
    try:
        alone = solve.solve(replace(question, method="single", costs=costs)).placement
    except InfeasibleError:
        return TUNED, best
    return ONE_DEVICE, alone


def _judged(tuning: _Tuning, known: machine.Knowledge) -> tuple[machine.MachineRecord, Verdict]:
    """The record of the machine, and the verdict: its lessons have to predict the final contest
    better than the costs so far."""
    record, final = _record(tuning), tuning.final
    if final is None:
        return record, judge_lessons([])
    before, after = known.adaptation(), known.after(record).adaptation()
    finalists, checked = _finalists(final), []
    plans = {TUNED: tuning.best.placement, FIRST: tuning.trials[0].planned.placement}
    for name, placement in plans.items():
        if name in finalists:
            rate = speed(tuning.executor.question.objective, finalists[name])
            predicted = [tuning.planned(placement, a).predicted_s for a in (before, after)]
            interval_s = (1.0 / rate.high, 1.0 / rate.low)
            checked.append(Checked(1.0 / rate.value, interval_s, predicted[0], predicted[1]))
    noise = "" if final.prefer else "the machine was too noisy to tell which plan is fastest"
    verdict = judge_lessons(checked, noise)
    shares = {"off_before": verdict.off_before, "off": verdict.off}
    return msgspec.structs.replace(record, **shares), verdict


def _record(tuning: _Tuning) -> machine.MachineRecord:
    """The record of the machine, with the errors of the rounds."""
    question, rounds = tuning.executor.question, tuning.rounds
    unadapted = tuning.planned(tuning.trials[0].planned.placement, Adaptation()).predicted_s
    # Predictions were made before their placement was run, the last three after learning most.
    checked = [r.off for r in rounds[1:] or rounds][-3:]
    name = tuning.executor.runtime.distribution
    return machine.MachineRecord(
        schema=machine.SCHEMA, date=machine.now(), model=question.graph.name,
        digest=question.graph.digest, runtime=name, versions=machine.runtime_versions(name),
        costs=tuning.label, devices=machine.measured_devices(question.cluster),
        runs=(*tuning.scouts, *(trial.measured.run for trial in tuning.trials)),
        off_before=abs(unadapted / rounds[0].measured_s - 1.0), off=float(np.mean(checked)),
    )  # fmt: skip
