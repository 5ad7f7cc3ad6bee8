"""Seconds of training plans: what a row says, and how the parts of a plan are put together."""

from pathlib import Path

import pytest

from benchmarks.measured_world import sailor
from benchmarks.measured_world.sailor import Plan, Predictor, Stage

COLUMNS = (
    "plan,stage_devices,micro_batch,global_batch,measured_seconds_per_iteration,"
    "gradient_reduce_seconds,suspect\n"
)
TWO_STAGES = (
    "mit/M/N4_D2,12 layers on RTX-3090:2(tp2) | RTX-2080:2(tp2) || 14 layers on Titan-RTX:2(tp2) "
    "| RTX-2080:2(tp2),2,64,60,7,\n"
)


def test_pipelines_of_a_row_are_its_stages_of_one_copy(tmp_path: Path) -> None:
    path = tmp_path / "plans.csv"
    path.write_text(COLUMNS + TWO_STAGES)
    (plan,) = sailor.plans(path)
    # Embedding and head are no layers; 64 sequences by twos through two pipelines.
    assert plan.pipelines == (
        (Stage(11, True, False, "RTX-3090", 2), Stage(13, False, True, "Titan-RTX", 2)),
        (Stage(11, True, False, "RTX-2080", 2), Stage(13, False, True, "RTX-2080", 2)),
    )
    assert (plan.micro_batches, plan.is_mixed, plan.is_looked_at) == (16, True, False)


def _plan(*copies: tuple[Stage, ...], name: str = "mit/M/N4_D1", seconds: float = 10.0) -> Plan:
    return Plan(name, copies, 2, 8, seconds, 1.0, "")


def test_the_slowest_stage_of_the_slowest_pipeline_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {"RTX-3090": 0.1, "RTX-2080": 0.2}
    monkeypatch.setattr(sailor, "compute_s", lambda node, *_: (speed[node], 0.05))
    fast, slow = (
        (Stage(3, True, False, node, 1), Stage(1, False, True, node, 1)) for node in speed
    )  # fmt: skip
    network = {"mit": 1e15}
    alone = Predictor("shipped", network).iteration_s(_plan(fast))
    # Four micro-batches: 0.3 + 0.15, and three times 0.3.
    assert alone == pytest.approx(0.45 + 0.9, rel=0.01)
    both = Predictor("shipped", network).iteration_s(_plan(fast, slow))
    # Two micro-batches each: 0.6 + 0.25, and once 0.6.
    assert both == pytest.approx(0.85 + 0.6, rel=0.01)


def test_a_slow_network_takes_activations_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sailor, "compute_s", lambda *_: (1.0, 0.0))
    plan = _plan((Stage(1, True, False, "RTX-3090", 1), Stage(1, False, True, "RTX-3090", 1)))
    sent_s = 2 * sailor.TOKENS * sailor.HIDDEN * sailor.ITEM / 1e6
    stages = Predictor("shipped", {"mit": 1e6}).iteration_s(plan)
    assert stages == pytest.approx(5 * (1.0 + sent_s), rel=0.01)
    stage = Stage(1, True, True, "RTX-3090", 1)
    reduced = sailor.gradients_s([1, 1], sailor.size_bytes(stage), 1e6)
    # Two copies send half of it twice.
    assert reduced == pytest.approx(sailor.size_bytes(stage) / 1e6, rel=0.01)


def test_constants_are_those_of_looked_at_plans_alone() -> None:
    stage = Stage(1, True, True, "RTX-3090", 1)
    looked = _plan((stage,), (stage,), name="mit/M/N2_D2", seconds=6.0)
    asked = [looked, _plan((stage,), seconds=1e9)]
    assert sailor.network_of(asked) == {"mit": pytest.approx(sailor.size_bytes(stage))}
    assert sailor.factors(asked, {plan.name: 3.0 for plan in asked}) == {"mit": pytest.approx(2.0)}
    lines = list(sailor.told(asked, {"predicted": {plan.name: 3.0 for plan in asked}}))
    assert any("(-50%)" in line and "| yes |" in line for line in lines)


def test_a_rank_computes_its_part_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(sailor, "TOKENS", 64)
    made = sailor.graph(4, 1, 1)
    layer = 12 * sailor.HIDDEN**2 + 2 * 64 * sailor.HIDDEN
    ends = 50688 * sailor.HIDDEN
    # A product for each number forward, two backward.
    assert made.flop.sum() == pytest.approx(3 * 2 * 64 * (layer + ends) / 4, rel=0.05)
