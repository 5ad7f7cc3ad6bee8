"""What profiles teach of this machine, and what is refused."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from golden.models import FILES

import gdp
from gdp.api import calibrate as calibration
from gdp.cli.main import cli
from gdp.cluster.detect import cpu_model
from gdp.costs import machine
from gdp.costs.calibrate import Predicted
from gdp.costs.profile import (
    DeviceRecord,
    Kernel,
    Profile,
    ProfiledModel,
    ProfileError,
    save_profile,
)
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data" / "machine"


def one_core(model: str) -> gdp.Cluster:
    cluster = gdp.Cluster.load("1xcpu-core")
    return replace(cluster, devices=(replace(cluster.devices[0], model=model),))


def profiled(path: Path, name: str, slower: float, busy: float = 1.0) -> ProfiledModel:
    """A model whose every kernel takes a multiple of what shipped costs predict."""
    FILES[name](path / name)
    graph = gdp.load(str(path / name), {"batch": 64} if name == "towers.onnx" else {})
    problem = prepare_problem(Question(graph, one_core(cpu_model()), costs="shipped"))
    seconds, group_of = problem.compute_s[:, 0] * slower, problem.origin.group_of
    kernels = tuple(
        Kernel(f"k{g}", "Op", tuple(np.flatnonzero(group_of == g).tolist()), float(s), 0.0)
        for g, s in enumerate(seconds)
        if s > 0
    )
    return ProfiledModel(name, name, graph, float(seconds.sum()) * busy, kernels, 10, 5)


def profile(path: Path, slower: float = 2.0, busy: float = 1.0) -> Profile:
    return Profile(
        DeviceRecord("cpu-core", cpu_model()), "onnxruntime", 1, "all",
        machine.runtime_versions("onnxruntime"), "2026-01-01",
        tuple(profiled(path, name, slower, busy) for name in ("towers.onnx", "attention.onnx")),
    )  # fmt: skip


def test_a_profile_teaches_the_machine_what_its_kernels_take(tmp_path: Path, folder: Path) -> None:
    """Kernels twice as slow as shipped costs: a model alike is predicted at nearly twice."""
    given = profile(tmp_path)
    found = calibration.remember_profile(given)
    assert len(found.files) == len(list(folder.iterdir())) >= 2
    off_before, off = found.off
    assert off_before == pytest.approx(0.5, abs=0.02)
    assert off < 0.2
    measured_s = given.models[0].latency_s
    for name in (cpu_model(), ""):
        problem = prepare_problem(Question(given.models[0].graph, one_core(name)))
        assert "tuned on 2 models" in problem.origin.costs
        assert problem.compute_s[:, 0].sum() == pytest.approx(measured_s, rel=0.15)


def test_a_profile_of_a_busy_machine_is_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ProfileError, match=r"busy: whole models took 1\.5 times their kernels"):
        calibration.remember_profile(profile(tmp_path, busy=1.5))
    assert not folder.exists()


def test_a_profile_of_another_machine_is_refused(tmp_path: Path) -> None:
    other = msgspec.structs.replace(
        profile(tmp_path), device=DeviceRecord("cpu-core", "Another Processor")
    )
    with pytest.raises(ProfileError, match="is of Another Processor, this machine is"):
        calibration.remember_profile(other)


def test_models_that_contradict_each_other_teach_nothing(tmp_path: Path, folder: Path) -> None:
    """One model is four times slower than predicted, one four times faster."""
    given = profile(tmp_path)
    models = tuple(
        profiled(tmp_path, m.name, s) for m, s in zip(given.models, (4.0, 0.25), strict=True)
    )
    with pytest.raises(ProfileError, match=r"nothing is remembered\. Learn from whole runs"):
        calibration.remember_profile(msgspec.structs.replace(given, models=models))
    assert not folder.exists()


def test_a_calibration_worse_than_before_is_refused_with_the_reason(tmp_path: Path) -> None:
    models = profile(tmp_path, busy=1.4).models

    def predicted(share: float) -> list[Predicted]:
        return [Predicted(m.name, m.family, m.latency_s, share * m.latency_s, 1.0) for m in models]

    calibration.require_better(predicted(0.8), predicted(1.1), models)
    with pytest.raises(ProfileError, match=r"44% off, without it 20%: the machine was busy: whole"):
        calibration.require_better(predicted(0.8), predicted(0.56), models)


def test_the_command_remembers_without_an_output(tmp_path: Path, folder: Path) -> None:
    from click.testing import CliRunner

    save_profile(profile(tmp_path), tmp_path / "p.json")
    told = CliRunner().invoke(cli, ["calibrate", str(tmp_path / "p.json")])
    assert told.exit_code == 0, told.output
    assert "remembered for this machine: predictions were 50% off, now" in told.stdout
    assert len(list(folder.iterdir())) >= 2
