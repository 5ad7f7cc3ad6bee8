"""`gdp tune`, with every runtime: rounds, finalists, what is written, kept and refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from golden.models import FILES

import gdp
from gdp.api.run import Executor
from gdp.costs import machine
from gdp.costs.default import SHIPPED, resolve_costs
from gdp.learn import tuning
from gdp.learn.tuning import Verdict
from gdp.measure.observe import observed_run
from gdp.placement.placement import make_placement
from gdp.question.question import Question

CLUSTER = "2xcpu-core"
SHORT = gdp.Measuring(seconds=0.5)
QUICK = gdp.Search(seconds=None, evaluations=60)


BETTER = Verdict(True, "predictions are 5% off as learned, 60% without", 0.6, 0.05)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr("gdp.api.tune.ROUND_SECONDS", 0.3)
    return tmp_path / "data" / "machine"


@pytest.fixture
def towers(tmp_path: Path) -> str:
    FILES["towers.onnx"](tmp_path / "towers.onnx")
    return str(tmp_path / "towers.onnx")


def models(towers: str) -> dict[str, dict]:
    chain = str(Path(towers).with_name("attention.onnx"))
    FILES["attention.onnx"](Path(chain))
    return {
        "onnxruntime": {"model": towers, "dims": ["batch=64"]},
        "openvino": {"model": chain, "runtime": "openvino"},
        "torch": {"model": "python:golden.models:torch_row"},
        "jax": {"model": "python:golden.models:jax_cnn", "cluster": "1xcpu-core"},
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino", "torch", "jax"])
def test_every_runtime_teaches_its_costs(runtime: str, objective: str, towers: str) -> None:
    if runtime != "jax":
        pytest.importorskip(runtime, reason=f"{runtime} is not installed")
    given = {"cluster": CLUSTER} | models(towers)[runtime]
    tuned = gdp.tune(**given, objective=objective, runs=3, search=QUICK, measuring=SHORT)
    assert 1 <= len(tuned.rounds) <= 3
    assert tuned.record.runtime == runtime
    for run in tuned.record.runs:
        assert run.pieces
        assert all(p.measured_s > 0 and sum(s.seconds for s in p.shares) > 0 for p in run.pieces)
    assert tuned.report is not None
    rates = tuned.rates()
    assert rates[tuned.answer].value == max(
        rates[name].value for name in rates if name in ("tuned plan", "first plan", "one device")
    )
    assert tuned.value_s == pytest.approx(1 / rates[tuned.answer].value)


def test_replicas_teach_what_each_of_their_devices_takes(towers: str) -> None:
    graph, cluster = gdp.load(towers, {"batch": 64}), gdp.Cluster.load(CLUSTER)
    executor = Executor.of(
        Question(graph, cluster, towers, {"batch": 64}, objective="throughput", costs=SHIPPED)
    )
    placed = make_placement(graph, cluster, np.zeros(graph.num_ops, int), teams=((0, 1),))
    predicted = executor.predict(placed)
    report = executor.run(placed, predicted, SHORT, baselines=False)
    plan = executor.plan(predicted)
    base, _ = resolve_costs(SHIPPED, cluster, graph)
    run = observed_run(graph, cluster, base, predicted, plan, report)
    assert [piece.device for piece in run.pieces] == ["core0", "core1"]
    assert all(piece.together for piece in run.pieces)
    assert run.pieces[0].shares == run.pieces[1].shares


@pytest.mark.slow
def test_the_command_writes_a_placement_costs_and_a_page_and_remembers(
    towers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    from click.testing import CliRunner

    from gdp.cli.main import cli

    # Whether a busy machine teaches anything that is right is not for a test to say.
    monkeypatch.setattr("gdp.api.tune.judge_lessons", lambda rows, noise: BETTER)
    out = {name: tmp_path / name for name in ("p.json", "costs.json", "page.html")}
    arguments = [
        "tune", towers, "--dim", "batch=64", "--cluster", CLUSTER, "--runs", "2",
        "--place-seconds", "0.2", "--measure-seconds", "0.5", "-o", out["p.json"],
        "--write-costs", out["costs.json"], "--report", out["page.html"],
    ]  # fmt: skip
    told = CliRunner().invoke(cli, [str(x) for x in arguments])
    assert told.exit_code == 0, told.output
    assert "round" in told.stdout
    assert "answer: the " in told.stdout
    placement = gdp.load_placement(out["p.json"])
    assert placement.device_names == ("core0", "core1")
    assert placement.question is not None
    assert (placement.question.model, placement.question.dims) == (towers, {"batch": 64})
    alone = CliRunner().invoke(cli, ["simulate", str(out["p.json"])])
    assert alone.exit_code == 0, alone.output
    assert machine.read_record(out["costs.json"]).model == "towers"
    assert "What the machine taught" in out["page.html"].read_text()
    assert len(list(folder.glob("*.json"))) == 1
    placed = CliRunner().invoke(
        cli, ["place", towers, "--dim", "batch=64", "--cluster", CLUSTER, "--evaluations", "50"]
    )
    assert "this machine, tuned on 1 model" in placed.stdout
    assert "one standard deviation" in placed.stdout
    forgot = CliRunner().invoke(cli, ["tune", "--forget"])
    assert forgot.stdout.startswith("forgot 1 tuned model in ")
    assert not list(folder.glob("*.json"))


def test_json_holds_rounds_and_finals(towers: str) -> None:
    tuned = gdp.tune(
        towers, CLUSTER, dims=["batch=64"], runs=1, search=QUICK, measuring=SHORT, keep=False
    )
    found = json.loads(json.dumps(tuned.to_json()))
    assert found["rounds"][0]["predicted_s"] > 0
    assert found["finals"]["measured_latency_s"] > 0
    assert found["remembered_in"] is None
    assert machine.records() == []


def test_an_interrupted_loop_keeps_its_best(towers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments, **options):
        yield next(tuning.tuning_loop(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr("gdp.api.tune.tuning_loop", interrupted)
    tuned = gdp.tune(towers, CLUSTER, dims=["batch=64"], runs=3, search=QUICK, measuring=SHORT)
    assert tuned.report is None
    assert tuned.notes == ("interrupted: the best placement so far",)
    assert tuned.value_s == tuned.rounds[0].measured_s
    assert machine.records() == []


def test_what_cannot_be_tuned_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs must be at least 1, got 0"):
        gdp.tune("onnx:light_squeezenet", CLUSTER, runs=0)
    with pytest.raises(gdp.ModelError):
        gdp.tune(str(tmp_path / "none.onnx"), CLUSTER)
