"""A placement remembers its question: later commands need its file, and disagreement is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gdp
from gdp.api.run import Executor
from gdp.base.units import format_seconds
from gdp.cli.main import cli
from gdp.cluster.file import with_max_memory, write_cluster
from gdp.cluster.reserve import with_reserve
from gdp.graph.file import save_graph
from gdp.placement.placement import digest_of
from tests.generating_configs import generating_config
from tests.test_even import model

QUICK = gdp.Search(seconds=None, evaluations=20)
BOX = ["--cluster", "cpu+2xt4"]
SMALL = ["--max-memory", "t4:1=1GiB"]


def ran(*command: object, code: int = 0) -> str:
    done = CliRunner().invoke(cli, [str(part) for part in command])
    assert (done.exit_code != 0) == (code != 0), done.output
    return done.stdout if done.exit_code == 0 else f"{done.output}{done.exception}"


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A placement of `g.json` for throughput, with limits and a pin, made beside the model."""
    monkeypatch.chdir(tmp_path)
    save_graph(model(), tmp_path / "g.json")
    ran("place", "g.json", *BOX, *SMALL, "--objective", "throughput", "--pin", "b=t4:1",
        "--no-replicas", "--seconds", 0.1, "-o", "p.json")  # fmt: skip
    return tmp_path / "p.json"


def test_every_verb_needs_the_file_alone(placed: Path) -> None:
    told = json.loads(ran("simulate", placed, "--json"))
    assert told["objective"] == "throughput"
    again = json.loads(
        ran("simulate", "g.json", placed, *BOX, *SMALL, "--objective", "throughput", "--json")
    )
    assert again == told
    explained = json.loads(ran("explain", placed, "--op", "b", "--json"))
    reasons = [row["reason"] for row in explained["devices"] if row["reason"]]
    assert any("a constraint keeps 'b' off cpu" in reason for reason in reasons)
    assert explained["objective"] == "throughput"
    ran("report", placed, "-o", "r.html")
    assert "t4:1" in Path("r.html").read_text()


def test_the_library_needs_the_placement_alone(placed: Path) -> None:
    placement = gdp.load_placement(placed)
    question = placement.question
    assert question is not None
    assert (question.model, question.objective) == ("g.json", "throughput")
    assert question.constraints.pins == (gdp.Pin("b", ("t4:1",)),)
    machine = question.machine()
    assert machine is not None
    assert machine.memory_bytes[2] == 1 << 30
    own = gdp.simulate(None, placement)
    assert own.value_s == gdp.simulate(model(), placed, machine).value_s == own.period_s
    assert gdp.explain(None, placed, op="b")["ops"] == 1
    found = gdp.place("g.json", "cpu+2xt4", search=QUICK)
    gdp.save_placement(found.placement, "q.json")
    again = gdp.load_placement("q.json").question
    assert again == found.placement.question
    assert gdp.simulate(None, "q.json").latency_s == pytest.approx(found.score.latency_s)


def test_the_model_is_found_beside_the_placement(
    placed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    ran("simulate", placed)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--cluster", "small.toml"], "made for another cluster: memory of t4:1 differs"),
        (["--cluster", "2xt4"], "devices cpu, t4:0, t4:1, not"),
        (["--cluster", "cpu+2xt4-pcie4", *SMALL], "made for another cluster"),
    ],
)
def test_another_cluster_is_refused(placed: Path, more: list[str], said: str) -> None:
    small = with_max_memory(gdp.Cluster.load("cpu+2xt4"), {1: "1MiB"})
    write_cluster(small, "small.toml")
    for command in (("simulate", placed), ("explain", placed, "--op", "b")):
        assert said in ran(*command, *more, code=2)


def test_limits_are_the_placements_own_unless_others_are_given(placed: Path) -> None:
    """t4:1 has 1 GiB in the placement's question, and 16 in the preset."""
    for more in ([], BOX, ["--max-memory", "t4:1=1GiB"]):
        ran("explain", placed, "--op", "b", *more)
    ran("simulate", placed, "--max-memory", "t4:1=1B", code=1)
    question = gdp.load_placement(placed).question
    assert question is not None
    question.require_cluster(gdp.Cluster.load("cpu+2xt4"))


def test_another_model_and_other_demands_are_refused(placed: Path, tmp_path: Path) -> None:
    from gdp.graph.op_graph import make_graph

    save_graph(make_graph("o", ["a"], ["Conv"], [], []), tmp_path / "other.json")
    assert "another graph" in ran("simulate", "other.json", placed, code=2)
    told = ran("explain", placed, "--op", "b", "--pin", "a=t4:0", code=2)
    assert "made with other constraints" in told
    ran("explain", placed, "--op", "b", "--pin", "b=t4:1", "--no-replicas")
    assert "is no placement" in ran("simulate", "g.json", code=2)
    assert "need --model" in ran("explain", placed, "--op", "b", "--batch", 2, code=2)


def test_changed_costs_are_told(placed: Path, tmp_path: Path) -> None:
    """The question holds the digest of the folder of costs."""
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "meta.json").write_text("1")
    first = digest_of(str(folder))
    document: dict[str, Any] = json.loads(placed.read_text())
    document["question"] |= {"costs": str(folder), "costs_sha256": first}
    placed.write_text(json.dumps(document))
    (folder / "meta.json").write_text("2")
    assert digest_of(str(folder)) != first
    assert "with other costs than" in ran("simulate", placed, code=2)


def test_a_placement_without_a_question_says_what_is_missing(placed: Path) -> None:
    cluster = gdp.Cluster.load("cpu+2xt4")
    by_hand = gdp.make_placement(model(), cluster, np.array([0, 1, 1, 0]))
    gdp.save_placement(by_hand, placed)
    assert "give the model" in ran("simulate", placed, *BOX, code=2)
    with pytest.raises(gdp.ArgumentError, match="give the cluster"):
        gdp.simulate(model(), by_hand)
    ran("simulate", "g.json", placed, *BOX)


def test_a_damaged_question_is_one_line(placed: Path) -> None:
    document = json.loads(placed.read_text())
    document["question"]["cluster"] = "[[device]]\nname = 3"
    placed.write_text(json.dumps(document))
    told = ran("simulate", placed, code=2)
    assert "is not a cluster file" in told
    document["question"] = {"colour": 1}
    placed.write_text(json.dumps(document))
    assert "unknown field" in ran("simulate", placed, code=2)


def test_python_has_the_options_of_the_command_line(placed: Path) -> None:
    """Granularity, dimensions and target are arguments; options of `hf:` models are, too."""
    found = gdp.place("onnx:light_squeezenet", "cpu+arc-a770", target="openvino")
    assert found.method == "openvino"
    assert found.placement.question is not None
    assert found.placement.question.target == "openvino"
    whole = gdp.place("g.json", "cpu+2xt4", granularity="module", search=QUICK)
    assert whole.placement.question is not None
    assert whole.placement.question.granularity == "module"
    assert gdp.Cluster.load().device_names == gdp.Cluster.local().device_names
    with pytest.raises(gdp.ArgumentError, match="--task is for hf:CONFIG models"):
        gdp.load("onnx:light_squeezenet", task="causal-lm")


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "speed"}, {"method": "magic"}, {"target": "cuda"}, {"granularity": "atom"},
        {"offload": "cpu"}, {"target": "accelerate", "granularity": "op"},
        {"target": "accelerate", "offload": "tape"},
        {"target": "openvino", "method": "heft"}, {"costs": "nowhere"},
    ],
)  # fmt: skip
def test_wrong_arguments_are_gdp_errors_and_value_errors(options: dict[str, Any]) -> None:
    with pytest.raises(gdp.GdpError) as caught:
        gdp.place(model(), "cpu+2xt4", **options)
    assert "\n" not in str(caught.value)
    with pytest.raises(gdp.GdpError):
        gdp.Search(seconds=-1)


def test_reserves_are_remembered_and_need_not_be_said_again(placed: Path) -> None:
    """A cluster of which no reserve is said is the same; one with less room is not."""
    ran("place", "g.json", *BOX, "--reserve", 0, "--seconds", 0.1, "-o", "all.json")
    question = gdp.load_placement("all.json").question
    assert question is not None
    machine = question.machine()
    assert machine is not None
    assert [d.reserve_bytes for d in machine.devices] == [0 if "t4" in d.name else
        d.reserve_bytes for d in gdp.Cluster.load("cpu+2xt4").devices]  # fmt: skip
    ran("simulate", "all.json", *BOX)
    less = with_reserve(gdp.Cluster.load("cpu+2xt4"), {"t4:0": "8GiB"})
    write_cluster(less, "less.toml")
    assert "memory of t4:0 differs" in ran("simulate", "all.json", "--cluster", "less.toml", code=2)
    ran("simulate", "all.json", "--reserve", "t4:0=8GiB")


def test_a_request_and_its_quantisation_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file alone is enough for a model of transformers that generates, stored in four bits."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(generating_config("llama")))
    words = ("hf:.", "--generate", "prompt=8,new=6,batch=2", "--quantize", "nf4")
    ran("place", *words, *BOX, "--seconds", 0.1, "-o", "p.json")
    question = gdp.load_placement("p.json").question
    assert question is not None
    assert question.model == "hf:.?quantize=nf4&prompt=8&new=6&batch=2"
    alone = json.loads(ran("simulate", "p.json", "--json"))
    model = gdp.load("hf:.?prompt=8&new=6&batch=2", quantize="nf4")
    assert alone["latency_s"] == gdp.simulate(model, "p.json", "cpu+2xt4").latency_s
    ran("export", "p.json", "--to", "accelerate", "-o", "map")
    assert "another graph" in ran("simulate", "hf:.", "p.json", code=2)
    with pytest.raises(gdp.ArgumentError, match="--quantize is for hf:CONFIG models"):
        gdp.load("onnx:light_squeezenet", quantize="nf4")


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_place_says_where_run_predicts_another_time(objective: str) -> None:
    model, cluster = "onnx:light_inception_v2", "4xcpu-core"
    search = gdp.Search(seconds=None, evaluations=100, simplicity=0)
    found = gdp.place(model, cluster, objective=objective, costs="shipped", search=search)
    executor = Executor.of(found.question)
    plan = executor.plan(executor.predict(found.placement))
    executed_s = plan.latency_s if objective == "latency" else plan.period_s
    told = [note for note in found.notes if note.startswith("as gdp run executes it")]
    assert bool(told) == (abs(executed_s / found.value_s - 1) > 0.01)
    assert all(note.endswith(format_seconds(executed_s)) for note in told)
    assert bool(told) == (objective == "latency")
