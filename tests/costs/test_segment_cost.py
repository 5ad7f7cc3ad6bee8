"""What a further piece of a cut model costs: measured, kept in the cost file, and planned with."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gdp.cluster.types import Cluster
from gdp.costs.calibrate import recharge, segment_s
from gdp.costs.cost_file import load_costs, save_costs
from gdp.costs.default import shipped
from gdp.costs.learned import LearnedCosts
from gdp.costs.profile import Overheads, Profile, ProfileError
from gdp.graph.op_graph import OpGraph, make_graph
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question
from gdp.sim.latency import periods


def profile(overheads: Overheads) -> Profile:
    device = shipped()[0].device
    return Profile(device, "onnxruntime", 1, "all", {}, "2026-11-22", (), overheads)


def chain(ops: int) -> OpGraph:
    """Layers of the same size, one after the other."""
    return make_graph(
        "chain", [f"m{i}" for i in range(ops)], ["MatMul"] * ops,
        [(i, 64_000) for i in range(ops - 1)], [(i, i + 1) for i in range(ops - 1)],
        flop=np.full(ops, 1e8), memory_traffic_bytes=np.full(ops, 100_000),
    )  # fmt: skip


def test_a_segment_costs_its_call_and_what_the_cut_does_to_kernels() -> None:
    assert segment_s(Overheads(session_s=5e-6, cut_s=4e-5)) == pytest.approx(4.5e-5)
    assert segment_s(Overheads(session_s=5e-6)) == 5e-6
    assert segment_s(Overheads(handover_s=1.0)) is None


def test_devices_that_pay_for_segments_are_charged_what_was_measured() -> None:
    calibration = replace(shipped()[0], segment_s=7e-5)
    costs = LearnedCosts((calibration,))
    charged = costs.with_runtime_overheads(Cluster.load("2xcpu-core+a100"))
    assert [d.dispatch_s for d in charged.devices] == [7e-5, 7e-5, 5e-6]
    problem = prepare_problem(
        Question(chain(4), Cluster.load("2xcpu-core"), objective="throughput", costs=costs)
    )
    assert {d.dispatch_s for d in problem.cluster.devices} == {7e-5}
    before = Cluster.load("2xcpu-core")
    assert LearnedCosts((replace(calibration, segment_s=None),)).with_runtime_overheads(
        before
    ).devices == (before.devices)


def test_two_large_pieces_are_worth_more_than_eight_small_ones() -> None:
    """Sixteen equal layers balance two cores either way; each further cut costs both something."""
    costs = LearnedCosts((replace(shipped()[0], segment_s=7e-5),))
    problem = prepare_problem(
        Question(chain(16), Cluster.load("2xcpu-core"), objective="throughput", costs=costs)
    )
    assert problem.num_ops == 16
    halves, eighths = (np.arange(16) // run % 2 for run in (8, 2))
    two_s, eight_s = periods(problem, np.stack([halves, eighths]))[0]
    assert eight_s - two_s == pytest.approx(3 * 7e-5)


def test_the_shipped_costs_charge_for_cuts() -> None:
    assert all(c.segment_s is not None and 1e-5 < c.segment_s < 2e-4 for c in shipped())


def test_recharged_costs_keep_their_fit(tmp_path: Path) -> None:
    found = recharge(shipped()[0], profile(Overheads(session_s=1e-6, cut_s=2e-6)))
    save_costs(found, tmp_path / "costs")
    again = load_costs(tmp_path / "costs")
    assert again.segment_s == pytest.approx(3e-6)
    for name, layer in shipped()[0].networks.ensemble.layers.items():
        np.testing.assert_array_equal(again.networks.ensemble.layers[name], layer)


def test_overheads_of_another_kind_or_none_are_refused() -> None:
    with pytest.raises(ProfileError, match="holds no overheads"):
        recharge(shipped()[0], profile(Overheads()))
    other = msgspec.structs.replace(profile(Overheads(session_s=1e-6)), runtime="jax")
    with pytest.raises(ProfileError, match="cpu-core with jax cannot be charged to costs of"):
        recharge(shipped()[0], other)
