"""Measured rewards: real runs, judged as `gdp run` judges them."""

import numpy as np
import pytest

from gdp.cluster.presets import device_preset
from gdp.cluster.types import make_cluster
from gdp.commands.finetuning import MeasuredReward
from gdp.errors import MeasurementError
from gdp.methods.base import Assignment
from gdp.models import load
from gdp.prepare import prepare_problem
from gdp.runtime.ort import pipeline
from gdp.runtime.ort.sessions import usable_cores
from gdp.runtime.statistics import Trace

MODEL = "onnx:light_squeezenet"


def reward(objective: str) -> tuple[MeasuredReward, Assignment]:
    names = [f"core{core}" for core in sorted(usable_cores())[:2]]
    cluster = make_cluster("cores", [device_preset("cpu-core", name) for name in names])
    graph = load(MODEL, {})
    prepared = prepare_problem(graph, cluster, objective)  # type: ignore[arg-type]
    n = prepared.problem.num_ops
    halves = (np.arange(n) >= n // 2) * (len(names) - 1)
    halves[prepared.problem.graph.is_io] = cluster.host
    judge = MeasuredReward(MODEL, graph, prepared, cluster, seconds=0.02)
    return judge, Assignment(halves.astype(np.int64))


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_a_placement_is_executed_and_judged_by_its_objective(objective: str) -> None:
    judge, halves = reward(objective)
    assert 0.0 < judge(halves) < np.inf
    assert judge.count == 1


def test_a_reward_that_physics_forbids_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces whose samples end a microsecond apart, although their stages keep workers busy."""
    judge, halves = reward("throughput")
    real = pipeline.PipelineExecutor.wait

    def wait(pipeline: pipeline.PipelineExecutor) -> Trace:
        found = real(pipeline)
        count = 40 * pipeline.num_slots
        first = found.finish_s[0]
        runs = tuple((r * count)[:count] for r in found.stage_runs)
        finish = tuple(first + 1e-6 * i for i in range(count))
        return Trace((first,) * count, finish, runs, found.worker)

    monkeypatch.setattr(pipeline.PipelineExecutor, "wait", wait)
    with pytest.raises(MeasurementError, match=r"the placement: .* samples/s were counted"):
        judge(halves)
