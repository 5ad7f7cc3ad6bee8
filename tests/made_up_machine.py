"""A runtime that executes nothing: its machine takes the shipped costs times a factor."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from gdp.costs.default import SHIPPED
from gdp.graph.groups import first_members
from gdp.measure.compare import Comparison
from gdp.measure.plan import make_plan
from gdp.measure.report import DEFAULT, PLACED, SINGLE, Row, RunReport, SegmentTime
from gdp.measure.request import RunRequest
from gdp.placement.placement import make_placement
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
from gdp.sim.prediction import Prediction
from gdp.sim.score import score
from gdp.sim.segments import segment_problem
from gdp.targets.table import RUNTIMES

Slowness = Callable[[RunRequest, int], float]
"""Factor on the shipped costs in a request, the so-manieth; it may raise instead."""

slowness: list[Slowness] = []
"""Of the machine in use; one."""
requests: list[RunRequest] = []
"""All that were executed."""
WIDTH = [0.02]
"""Width of the intervals, as a share of the value."""


def use(monkeypatch: pytest.MonkeyPatch, factor: Slowness, width: float = 0.02) -> None:
    """Let ONNX models be executed by a machine of this slowness."""
    row = dataclasses.replace(RUNTIMES["onnxruntime"], function=f"{__name__}:execute")
    monkeypatch.setitem(RUNTIMES, "onnxruntime", row)  # type: ignore[arg-type]
    slowness[:], requests[:], WIDTH[:] = [factor], [], [width]


def true_s(request: RunRequest, prediction: Prediction) -> tuple[float, list[float]]:
    """Seconds of a sample and of every segment of a placement, by the shipped costs."""
    plan = make_plan(prediction, request.objective)
    origin = prediction.problem.origin
    device = origin.expand(prediction.assignment.device)
    placed = make_placement(request.graph, request.cluster, device)
    problem = prepare_placement(
        Question(request.graph, request.cluster, objective=request.objective, costs=SHIPPED), placed
    ).problem
    cut = segment_problem(problem, plan.segment[first_members(origin.group_of)])
    dispatch_s = np.array([d.dispatch_s for d in cut.cluster.devices])[plan.segment_device]
    seconds = cut.compute_s[np.arange(len(plan.segment_device)), plan.segment_device] + dispatch_s
    return score(cut, plan.segment_device, None).latency_s, seconds.tolist()


def row(seconds: float) -> Row:
    half = WIDTH[0] / 2
    interval = (seconds * (1 - half), seconds * (1 + half))
    rates = (1 / interval[1], 1 / interval[0])
    return Row(seconds, interval, 1 / seconds, rates, 100, False, 10)


def execute(request: RunRequest) -> RunReport:
    """A report of made-up seconds."""
    requests.append(request)
    factor = slowness[0](request, len(requests))
    latency_s, segment_s = true_s(request, request.prediction)
    rows = {PLACED: row(latency_s * factor)}
    for name, rival in request.rivals.items():
        rows[name] = row(true_s(request, rival)[0] * factor)
    if request.baselines:
        # One device is never the answer, so that tests look at plans alone.
        rows |= {SINGLE: row(99 * latency_s * factor), DEFAULT: row(99 * latency_s * factor)}
    segments = tuple(
        SegmentTime(request.cluster.device_names[d], 1, 0, 0, predicted_s, s * factor, number)
        for number, (d, predicted_s, s) in enumerate(
            zip(request.plan.segment_device, request.plan.segment_s, segment_s, strict=True)
        )
    )
    return request.report(
        request.plan, rows, Comparison(True, 0.0, 0.0, "", 1), random_weights=False,
        segments=segments, samples_in_flight=1, cores=(0, 1), pinned=False, note="", versions={},
    )  # fmt: skip
