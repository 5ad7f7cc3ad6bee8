"""`gdp profile` and `gdp calibrate`: what is measured is fitted, and used by name."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gdp.base.errors import ClusterError, ModelError
from gdp.base.files.reading import data_path
from gdp.cli.main import cli as gdp_cli
from gdp.cluster.types import Cluster
from gdp.costs.default import resolve_costs
from gdp.costs.learned import LearnedCosts
from gdp.costs.profile import load_profile


@pytest.fixture
def cli() -> click.Group:
    return gdp_cli


QUICK = ["--rounds", "1", "--seconds", "0.01", "--no-overheads"]


def test_a_profile_becomes_costs(cli: click.Group, tmp_path: Path) -> None:
    profile, costs = str(tmp_path / "p.json.gz"), str(tmp_path / "costs")
    args = ["profile", "onnx:light_squeezenet", *QUICK, "-o", profile, "--json"]
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    (row,) = json.loads(result.output)["models"]
    assert row["kernels"] == len(load_profile(profile).models[0].kernels)
    args = ["calibrate", profile, "-o", costs, "--steps", "2"]
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert "nothing was held out" in result.output
    model, label = resolve_costs(costs, Cluster.load("2xcpu-core"))
    assert isinstance(model, LearnedCosts)
    assert label.startswith("calibrated on")


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("cpu:x", ClusterError, "must be cpu:CORE, jax:cpu, jax:gpu, torch:cpu"),
        ("cpu:4096", ClusterError, "core 4096 is not usable"),
        ("jax:cpu", ModelError, r"measures python:package\.module:function"),
    ],
)
def test_what_cannot_be_measured_is_named(
    cli: click.Group, tmp_path: Path, device: str, error: type[Exception], message: str
) -> None:
    args = ["profile", "onnx:light_squeezenet", "--device", device, "-o", str(tmp_path / "p.json")]
    with pytest.raises(error, match=message):
        CliRunner().invoke(cli, args, catch_exceptions=False)


def test_overheads_alone_are_measured_and_charged_to_costs(
    cli: click.Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gdp.costs.profile import Overheads
    from gdp.targets.onnxruntime import overheads

    monkeypatch.setattr(
        overheads, "measure_overheads",
        lambda *cores: Overheads(session_s=5e-6, cut_s=4e-5),
    )  # fmt: skip
    profile, costs = str(tmp_path / "p.json"), str(tmp_path / "costs")
    result = CliRunner().invoke(
        cli, ["profile", "--only-overheads", "-o", profile], catch_exceptions=False
    )
    assert "overheads: session 5.00 us, cut 40.00 us" in result.output
    base = str(data_path("checkpoints", "costs", "cpu-core-avx2"))
    args = ["calibrate", profile, "--base", base, "-o", costs]
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.output == f"{costs}: a segment costs 45.0 us\n"
    model, _ = resolve_costs(costs, Cluster.load("2xcpu-core"))
    assert isinstance(model, LearnedCosts)
    assert model.calibrations[0].segment_s == pytest.approx(4.5e-5)


@pytest.mark.parametrize("args", [[], ["onnx:light_squeezenet", "--only-overheads"]])
def test_a_profile_is_of_models_or_of_overheads(
    cli: click.Group, tmp_path: Path, args: list[str]
) -> None:
    with pytest.raises(ValueError, match="name models to profile, or --quick or --only"):
        CliRunner().invoke(
            cli, ["profile", *args, "-o", str(tmp_path / "p")], catch_exceptions=False
        )
