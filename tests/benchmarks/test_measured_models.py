"""Measured whole models: which rows are asked, and how errors of predictions are told."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.measured_world import models
from benchmarks.measured_world.__main__ import main
from benchmarks.measured_world.models import Answer, Label, fitted, labels, told
from gdp.cluster.presets import cluster_preset
from gdp.graph.op_graph import GraphBuilder, OpDetail, OpGraph

HEAD = "device,model,phase,sequence,batch,variant,e2e_ms,architecture,layers,hidden,ffn,heads,vocab"
ROWS = (
    HEAD, "T4,g,inference,64,2,,50,GPT2LMHeadModel,2.0,32.0,,4.0,100.0",
    "P100-PCIE-16GB,b,inference,64,8,,20,BertLMHeadModel,2.0,32.0,128.0,4.0,100.0",
    "P100-PCIE-16GB,b,inference,64,8,fusion,15,BertLMHeadModel,2.0,32.0,128.0,4.0,100.0",
    "P100-PCIE-16GB,b,training,64,8,,60,BertLMHeadModel,2.0,32.0,128.0,4.0,100.0",
    "MI250,b,inference,64,8,,20,BertLMHeadModel,2.0,32.0,128.0,4.0,100.0",
    "T4,s,inference,64,1,,20,SwitchTransformersForConditionalGeneration,2.0,32.0,128.0,4.0,100.0",
)  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "labels.csv"
    path.write_text("\n".join(ROWS) + "\n")
    return path


def product() -> OpGraph:
    """A product of 1,024 x 1,024 matrices."""
    n = 1024
    code = GraphBuilder()
    detail = OpDetail("float32", ((n, n), (n, n)), ((n, n),))
    code.add_op("mm", "mm", flop=2.0 * n**3, traffic_bytes=12.0 * n * n, detail=detail)
    return code.build("product")


def test_inference_without_a_compiler_on_known_gpus_is_asked(rows: Path) -> None:
    first, second, third = labels(rows)
    assert (first.preset, first.sizes, first.seconds) == ("p100-pcie", ("b", 64, 8), 0.02)
    assert first.config["intermediate_size"] == 128
    assert first.config["attn_implementation"] == "eager"
    assert (second.preset, second.config["n_positions"]) == ("t4", 64)
    assert third.config == {}


def test_efficiencies_are_medians_of_the_kernels_that_each_bounds() -> None:
    """By hand: at 1 FLOP/s and 1 B/s products reach 0.5, 0.25 and 0.8, copies 0.4; launches and
    other devices do not count."""
    kernels = SimpleNamespace(
        arithmetic=np.array([0, 0, 0, 0, 0, 0, 1]),
        flop=np.array([1.0, 1.0, 8.0, 0.0, 9e-6, 1.0, 1.0]),
        total_bytes=np.array([0.1, 0.1, 0.1, 2.0, 0.0, 0.0, 0.0]),
    )  # fmt: skip
    table = SimpleNamespace(
        kernels=kernels, device=np.array([0, 0, 0, 0, 0, 1, 0]),
        seconds=np.array([2.0, 4.0, 10.0, 5.0, 1e-5, 1.0, 1.0]),
    )  # fmt: skip
    shares = fitted(table, 0, SimpleNamespace(flop_per_s=(1.0,), bytes_per_s=1.0))
    assert (shares.arithmetic, shares.memory) == (0.5, 0.4)
    cluster, graph = cluster_preset("t4"), product()
    assert shares(graph, cluster)[0, 0] == pytest.approx(2 * 1024**3 / (0.5 * 8.1e12))


def test_errors_are_told_by_costs_and_refusals_apart() -> None:
    label = Label("t4", "m", 64, 2, 0.1, {})
    found = [
        Answer(label, {"shipped": 0.11, "datasheet": 0.05}),
        Answer(label, {"shipped": 0.07, "datasheet": 0.06}),
        Answer(label, why="no"),
    ]
    lines = list(told(found))
    assert "| m | t4 | 2 x 64 | 100.0 | 110.0 (+10%) | 50.0 (-50%) |" in lines
    assert "| all | 2 | 20.0%, 20.0%, 30% | 45.0%, 45.0%, 50% |" in lines
    assert lines[-1] == "m on t4: not answered, no"


def test_the_command_asks_every_model(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(spec: str) -> OpGraph:
        asked.append(spec.rpartition("/")[2])
        return product()

    monkeypatch.setattr(models, "load", load)
    answer = CliRunner().invoke(main, ["models", "--labels", str(rows)])
    assert answer.exit_code == 0, answer.output
    assert asked == ["b?batch=8&sequence=64", "g?batch=2&sequence=64"]
    assert "s on t4: not answered, its experts are called by the tokens" in answer.output
    answer = CliRunner().invoke(main, ["models", "--labels", str(rows), "--unseen", "3"])
    assert answer.exit_code == 2
    assert "--unseen needs --rows" in answer.output
