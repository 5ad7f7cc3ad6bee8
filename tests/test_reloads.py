"""What a later command loads again is the question's: its dimensions, its folder, its names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

import gdp
from gdp.base.checkpoint import CheckpointError
from gdp.cli.main import cli
from gdp.learn.instances import random_graph
from gdp.learn.metrics import METRICS, MetricsLog, read_metrics, validation_points
from gdp.learn.recipe import RecipeError, parse_recipe
from gdp.measure.measuring import Measuring
from gdp.policy.policy import default_checkpoint, load_policy

OPEN = """<ir_version: 9, opset_import: ["" : 18]> g (float[N, 8] x) => (float[N, 8] y)
    { a = MatMul (x, w)  b = Relu (a)  y = MatMul (b, w) }"""


HOW = ("--dim", "N=2", "--cluster", "2xcpu-core", "--method", "heft")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A placement of a model with an open axis, in two pieces."""
    monkeypatch.chdir(tmp_path)
    proto = onnx.parser.parse_model(OPEN)
    for i, node in enumerate(proto.graph.node):
        node.name = f"n{i}"
    weights = np.eye(8, dtype=np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(proto, "m.onnx")
    pins = ("--pin", "n0=core0", "--pin", "n2=core1")
    _ran("place", "m.onnx", *HOW, *pins, "-o", "p.json")
    return "p.json"


def _ran(*command: str) -> str:
    done = CliRunner().invoke(cli, list(command))
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_a_model_with_an_open_axis_is_exported(target: str, opened: str) -> None:
    _ran("export", opened, "--to", target, "-o", "cut")
    assert any(Path("cut").iterdir())


def test_a_model_that_is_named_again_has_the_dimensions_of_its_placement(opened: str) -> None:
    alone = json.loads(_ran("simulate", opened, "--json"))
    assert json.loads(_ran("simulate", "./m.onnx", opened, "--json")) == alone
    _ran("explain", opened, "--model", "./m.onnx", "--op", "n0")
    _ran("report", opened, "--model", "./m.onnx", "-o", "r.html")
    assert gdp.simulate("./m.onnx", opened).latency_s == alone["latency_s"]
    _ran("run", "./m.onnx", opened, "--measure-seconds", "0.1")


def test_the_number_of_ways_is_that_of_the_rows(opened: str) -> None:
    said: list[str] = []
    measuring = Measuring(0.1, progress=lambda text, *share: said.append(text))
    report = gdp.run(None, None, opened, measuring=measuring)
    rows = 1 + len(report["baselines"])
    assert any(text.startswith(f"measuring {rows} ways") for text in said), said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="names are Unicode there")
def test_names_of_files_survive_any_locale(opened: str, tmp_path: Path) -> None:
    """A C locale, in which Python would hold half a name as surrogates."""
    env = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    Path("m.onnx").rename("caf\u00e9.onnx")
    command = [sys.executable, "-m", "gdp"]
    place = ["place", "caf\u00e9.onnx", *HOW]
    root = Path(gdp.__file__).resolve().parent.parent
    env["PYTHONPATH"] = str(root)
    for arguments in ([*place, "-o", "\u00e9.json"], ["simulate", "\u00e9.json"]):
        done = subprocess.run(
            [*command, *arguments], env=env, capture_output=True, text=True, encoding="utf-8",
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    question = gdp.load_placement("\u00e9.json").question
    assert question is not None
    assert question.model == "caf\u00e9.onnx"


def test_names_that_are_no_text_are_no_obstacle(opened: str) -> None:
    """A file's name may be any bytes."""
    name = os.fsdecode(b"caf\xe9.onnx")
    Path("m.onnx").rename(name)
    _ran("place", name, *HOW, "-o", "q.json")
    question = gdp.load_placement("q.json").question
    assert question is not None
    assert question.model == "caf?.onnx"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[data]\nmax_ops = 9000000000000000000", "data.max_ops must lie within"),
        ("[data]\nmin_ops = 0", "min_ops and max_ops must be at least 1"),
        ("[data]\nmin_ops = 9\nmax_ops = 8", "min_ops and max_ops must be at least 1"),
        ("[run]\nvalidate_every = 9223372036854775807", "run.validate_every must lie within"),
        ("seed = -9223372036854775807", "seed must lie within"),
    ],
)
def test_numbers_that_nothing_can_count_are_refused(line: str, said: str) -> None:
    text = line if line.startswith("seed") else f"\n{line}"
    with pytest.raises(RecipeError, match=said):
        parse_recipe(f'name = "x"\n{text}')


@pytest.mark.parametrize("name", ["layered-999999999-1", "series-1-2-3", "resnet", "layered-x-1"])
def test_names_of_random_graphs_are_checked(name: str) -> None:
    with pytest.raises(gdp.GdpError, match="no graph"):
        random_graph(name)


def test_the_folder_of_a_training_run_stands_for_its_best_policy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_policy(tmp_path)
    (tmp_path / "last").symlink_to(default_checkpoint())
    assert load_policy(tmp_path).config == load_policy(default_checkpoint()).config


def test_lines_of_metrics_are_json(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log(0, {"loss": float("nan"), "val_greedy": float("inf"), "val_best": 1.5, "val_feasible": 1.0})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    (line,) = (tmp_path / METRICS).read_text().splitlines()
    assert json.loads(line, parse_constant=refuse) == {
        "step": 0, "val_best": 1.5, "val_feasible": 1.0,
    }  # fmt: skip
    assert [point.best for point in validation_points(read_metrics(tmp_path / METRICS))] == [1.5]
