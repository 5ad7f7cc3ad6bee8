"""The loop of `gdp tune` on made-up machines: what is refused, kept, told, and ended by Ctrl-C."""

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_up_machine
import numpy as np
import pytest
from click.testing import CliRunner, Result
from golden.models import FILES

import gdp
from gdp.api import tune as tuning
from gdp.base.errors import MeasurementError, RefusedError
from gdp.cli.main import cli
from gdp.costs import machine
from gdp.costs.adapt import Piece, Run, Share, adapt
from gdp.measure.request import RunRequest
from gdp.placement.placement import make_placement
from gdp.question.question import Question
from gdp.question.result import Result as PlacingResult

CLUSTER = "2xcpu-core"
SHORT = gdp.Measuring(seconds=0.2)


@pytest.fixture
def towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path / "data"))
    FILES["towers.onnx"](tmp_path / "towers.onnx")
    return str(tmp_path / "towers.onnx")


@pytest.fixture(autouse=True)
def searches(monkeypatch: pytest.MonkeyPatch) -> list[gdp.Placement]:
    """Searches that answer another cut each time; a list of their answers."""
    answers: list[gdp.Placement] = []

    def solve(question: Question, planners: object) -> PlacingResult:
        del planners
        graph, cluster = question.graph, question.cluster
        cut = graph.num_ops - 2 - len(answers)
        late = (np.arange(graph.num_ops) >= cut) & ~graph.is_io
        answers.append(make_placement(graph, cluster, late.astype(np.int64)))
        return PlacingResult(
            question=question, placement=answers[-1],
            score=tuning.solve.simulate(question, answers[-1]), objective=question.objective,
            method="made up", bound_s=0.0, bound_by="", proven_optimal=False, candidates=(),
            evaluations=0, seconds=0.0, seed=0, costs="",
        )  # fmt: skip

    monkeypatch.setattr(tuning.solve, "solve", solve)
    return answers


def tune(model: str, **more: Any) -> tuning.Tuned:
    given = {"runs": 3, "measuring": SHORT, "dims": ["batch=64"]} | more
    return gdp.tune(model, CLUSTER, **given)


def command(model: str, *more: str) -> Result:
    arguments = ["tune", model, "--dim", "batch=64", "--cluster", CLUSTER, "--runs", "3",
                 *more]  # fmt: skip
    return CliRunner().invoke(cli, arguments)


def is_final(request: RunRequest) -> bool:
    return request.baselines


def test_lessons_that_predict_the_final_contest_better_are_remembered(
    towers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is three times slower than its costs, always."""
    made_up_machine.use(monkeypatch, lambda request, number: 3.0)
    tuned = tune(towers)
    assert tuned.verdict.is_better
    assert tuned.verdict.off_before == pytest.approx(2 / 3, abs=0.01)
    assert tuned.verdict.off == tuned.record.off < 0.3
    assert [r.off for r in machine.records()] == [tuned.record.off]
    assert tuned.record_file
    assert tuned.to_json()["verdict"]["is_better"] is True
    # A second time nothing is learned that was not known: the first lessons stay.
    again = tune(towers)
    assert again.verdict.off_before < 0.3
    assert len(machine.records()) == 1


def test_a_machine_that_is_as_its_costs_say_teaches_nothing(
    towers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are their ops and their dispatch, to the last of it."""
    made_up_machine.use(monkeypatch, lambda request, number: 1.0)
    tuned = tune(towers)
    pieces = [piece for run in tuned.record.runs for piece in run.pieces]
    assert pieces
    for piece in pieces:
        assert sum(s.seconds for s in piece.shares) == pytest.approx(piece.measured_s)
        assert [s.seconds > 0 for s in piece.shares if not s.op_type] == [True]


@pytest.mark.parametrize("noisy", [False, True])
def test_lessons_of_a_load_that_is_gone_or_of_noise_are_not_remembered(
    noisy: bool, towers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds are measured beside other programs, or the contest cannot tell who is right."""
    if noisy:
        made_up_machine.use(monkeypatch, lambda request, number: 1.1, width=0.4)
    else:
        made_up_machine.use(monkeypatch, lambda request, n: 1.0 if is_final(request) else 3.0)
    tuned = tune(towers)
    assert not tuned.verdict.is_better
    assert (machine.records(), tuned.record_file) == ([], "")
    if noisy:
        assert tuned.verdict.reason.startswith("too noisy to tell whether it is right: ")
    else:
        assert tuned.verdict.off_before == pytest.approx(0.0, abs=0.01)
        assert tuned.verdict.off == tuned.record.off > 0.5


def test_lessons_of_another_model_are_what_new_ones_are_compared_with(
    towers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_machine.use(monkeypatch, lambda request, number: 3.0)
    assert tune(towers).record_file
    FILES["attention.onnx"](tmp_path / "attention.onnx")
    other = gdp.tune(str(tmp_path / "attention.onnx"), CLUSTER, runs=1, measuring=SHORT)
    assert other.verdict.off_before < 0.4  # 0.67 by the shipped costs


@pytest.mark.slow
def test_the_answer_says_what_is_kept_and_costs_are_written_only_then(
    towers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "costs.json"
    made_up_machine.use(monkeypatch, lambda request, n: 1.0 if is_final(request) else 3.0)
    told = command(towers, "--write-costs", str(out))
    (line,) = [one for one in told.stdout.splitlines() if one.startswith("costs: ")]
    assert line.startswith(f"costs: not remembered, {out} not written; predictions are ")
    assert not out.exists()
    made_up_machine.use(monkeypatch, lambda request, number: 3.0)
    told = command(towers, "--write-costs", str(out), "--no-keep")
    (line,) = [one for one in told.stdout.splitlines() if one.startswith("costs: ")]
    assert line.startswith(f"costs: written to {out}; predictions are ")
    assert machine.read_record(out).model == "towers"
    assert machine.records() == []


def refusing(
    error: Callable[[], Exception], when: Callable[[RunRequest, int], bool]
) -> made_up_machine.Slowness:
    def slowness(request: RunRequest, number: int) -> float:
        if when(request, number):
            raise error()
        return 3.0 - 0.5 * number  # better plans keep the loop going

    return slowness


def second(request: RunRequest, number: int) -> bool:
    return number == 2


def contest(request: RunRequest, number: int) -> bool:
    return is_final(request)


@pytest.mark.slow
@pytest.mark.parametrize("error", [RefusedError, MeasurementError])
def test_a_plan_that_is_not_measured_is_told_with_its_reason(
    error: type[Exception], towers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = refusing(lambda: error("no room"), second)
    made_up_machine.use(monkeypatch, refused)
    stages: list[str] = []
    measuring = gdp.Measuring(seconds=0.5, progress=lambda stage, share: stages.append(stage))
    tuned = tune(towers, measuring=measuring)
    assert tuned.unmeasured == (tuning.Unmeasured("a plan after round 1", "no room"),)
    assert "a plan after round 1 was not measured: no room" in stages
    assert tuned.to_json()["not_measured"] == [
        {"stage": "a plan after round 1", "reason": "no room"}
    ]
    assert tuned.report is not None
    made_up_machine.use(monkeypatch, refused)
    assert "not measured: a plan after round 1: no room" in command(towers).stdout


def test_a_fault_is_no_refusal(towers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_machine.use(monkeypatch, refusing(lambda: RuntimeError("a fault of gdp"), second))
    with pytest.raises(RuntimeError, match="a fault of gdp"):
        tune(towers)
    assert machine.records() == []


def test_a_first_plan_that_is_refused_ends_it(towers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_machine.use(monkeypatch, refusing(lambda: RefusedError("no room"), lambda r, n: True))
    with pytest.raises(RefusedError, match="no room"):
        tune(towers)


def test_without_a_final_contest_the_best_round_is_the_answer_and_nothing_is_kept(
    towers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_machine.use(monkeypatch, refusing(lambda: RefusedError("no room for two"), contest))
    tuned = tune(towers)
    assert tuned.report is None
    assert tuned.value_s == min(r.measured_s for r in tuned.rounds)
    assert tuned.unmeasured == (tuning.Unmeasured("the final contest", "no room for two"),)
    assert tuned.verdict.reason.startswith("no final contest was measured")
    assert machine.records() == []


def test_the_seed_of_a_search_draws_the_inputs_of_a_given_placement_too(
    towers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_machine.use(monkeypatch, lambda request, number: 1.0)
    graph = gdp.load(towers, {"batch": 64})
    placed = make_placement(graph, gdp.Cluster.load(CLUSTER), np.zeros(graph.num_ops, np.int64))
    search = gdp.Search(seed=7)
    gdp.run(towers, CLUSTER, placed, dims=["batch=64"], search=search)
    assert [request.measuring.seed for request in made_up_machine.requests] == [7]


def interrupt_search(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """Let Ctrl-C come in a search, which catches it as searches do."""
    solve, begun = tuning.solve.solve, []

    def searched(question: Question, planners: Any) -> Any:
        begun.append(question)
        if len(begun) == which:
            with contextlib.suppress(KeyboardInterrupt):  # the best so far is its answer
                signal.raise_signal(signal.SIGINT)
        return solve(question, planners)

    monkeypatch.setattr(tuning.solve, "solve", searched)


def test_ctrl_c_in_a_search_ends_the_loop_with_the_best_so_far(
    towers: str, searches: list[gdp.Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_machine.use(monkeypatch, lambda request, number: 3.0)
    before = signal.getsignal(signal.SIGINT)
    interrupt_search(monkeypatch, which=2)
    tuned = tune(towers)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(searches) == len(made_up_machine.requests) == len(tuned.rounds) == 1
    assert tuned.interrupted
    assert tuned.report is None
    assert tuned.value_s == tuned.rounds[0].measured_s
    assert "interrupted: the best placement so far" in tuned.notes
    assert not tuned.verdict.is_better
    assert machine.records() == []


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_tells_the_best_so_far_and_ends_with_130(
    as_json: bool, towers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_machine.use(monkeypatch, lambda request, number: 3.0)
    interrupt_search(monkeypatch, which=2)
    out = tmp_path / "p.json"
    told = command(towers, "-o", str(out), *(["--json"] if as_json else []))
    assert told.exit_code == 130
    assert gdp.load_placement(out).device_names == ("core0", "core1")
    if as_json:
        found = json.loads(told.stdout)
        assert (found["interrupted"], found["remembered_in"]) == (True, None)
    else:
        assert "note: interrupted: the best placement so far" in told.stdout
        assert "costs: not remembered; no final contest was measured" in told.stdout
        assert "answer: the tuned plan, " in told.stdout


def test_ctrl_c_before_a_round_has_ended_or_twice_has_no_answer(
    towers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_machine.use(monkeypatch, lambda request, number: 3.0)
    with monkeypatch.context() as patched:
        interrupt_search(patched, which=1)
        with pytest.raises(KeyboardInterrupt):
            tune(towers)
    assert made_up_machine.requests == []
    with monkeypatch.context() as patched:
        seen: list[str] = []

        def slow(request: RunRequest, number: int) -> float:
            if number == 2:
                try:
                    signal.raise_signal(signal.SIGINT)
                finally:  # the second one comes while the first is obeyed
                    seen.append("closing")
                    signal.raise_signal(signal.SIGINT)
            return 3.0 / number

        made_up_machine.use(patched, slow)
        with pytest.raises(KeyboardInterrupt):
            tune(towers)
        assert seen == ["closing"]
    assert machine.records() == []


@pytest.mark.parametrize("when", [second, contest])
def test_ctrl_c_while_it_measures_ends_the_loop_too(
    when: Callable[[RunRequest, int], bool], towers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(request: RunRequest, number: int) -> float:
        if when(request, number):
            signal.raise_signal(signal.SIGINT)
        return 3.0 / number

    made_up_machine.use(monkeypatch, slow)
    tuned = tune(towers)
    assert (tuned.interrupted, tuned.report, machine.records()) == (True, None, [])


def test_outliers_are_named() -> None:
    """Nine measurements agree, one was made while the machine was paused."""
    once = Piece("core0", "cpu-core", (Share("Gemm", 4, "Gemm", 1e-3),), 2e-3, False)
    paused = Piece("core0", "cpu-core", once.shares, 0.3, False)
    runs = [Run("towers", (once,) * 9), Run("towers", (paused,))]
    assert tuning._notes(adapt(runs), interrupted=False) == [
        "1 of 10 measured pieces and links teach nothing, as they contradict all others: "
        "Gemm on core0 in towers took 1.5e+02 times what all others say"
    ]
