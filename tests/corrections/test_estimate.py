"""Factors of passes with their intervals, and how they stand with the evidence."""

import math

import msgspec
import numpy as np
import pytest

from gdp.corrections import estimate, records
from gdp.corrections.estimate import Range, corrected_by, correction_of, is_near, lessons_of
from gdp.corrections.features import EngineStack
from gdp.corrections.process import Lesson, shipped_corrections
from gdp.corrections.records import RunRecord
from tests.corrections.made_up import BOTH, H100, a_pass, drawn_process, made_up_meta

META = made_up_meta()
APPLE = EngineStack("vllm", "apple-m3-max", 4e11, 2.8e13, "", "metal", "")
T4 = msgspec.structs.replace(H100, card="t4", bytes_per_s=3.2e11, flop_per_s=6.5e13)
ELSEWHERE = {
    "an engine": (msgspec.structs.replace(H100, engine="llamacpp"), 16.0),
    "a card": (T4, 16.0),
    "a card with other arithmetic": (msgspec.structs.replace(H100, flop_per_s=3e14), 16.0),
    "a backend": (msgspec.structs.replace(H100, backend="rocm"), 16.0),
    "an Apple chip": (APPLE, 16.0),
    "a format": (H100, 4.5),
}


def a_run(
    residual: float = 0.4, phases: tuple[int, ...] = (0, 1), prompt: float = 1.0
) -> RunRecord:
    """A run that shows passes this much longer."""
    lessons = tuple(Lesson(BOTH[i], residual) for i in phases)
    return RunRecord("2026", "x", H100, "m", "", "costs", prompt, 1.0, 1.0, {}, {}, lessons)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("residuals", [[], [-1.5], [0.0, 0.3], [1.5, -1.5, 0.7]])
def test_intervals_hold_their_factor(seed: int, residuals: list[float]) -> None:
    runs = [a_run(r, prompt=float(i)) for i, r in enumerate(residuals)]
    found = corrected_by(drawn_process(seed), META, H100, BOTH, runs)
    for own in (found.prefill, found.decode):
        assert 0 < own.low < own.factor < own.high
        assert own.low * own.high == pytest.approx(own.factor**2)
        low, high = own.of(own.factor * 3.0)
        assert (low, high) == pytest.approx((own.low * 3.0, own.high * 3.0))
    assert found.runs == len(residuals)


def test_factors_are_those_of_the_process_and_widths_those_of_the_left_out_runs() -> None:
    process = drawn_process(1)
    for runs, widths in (([], (3.0, 2.0)), ([a_run()], (2.5, 1.5)), ([a_run()] * 4, (2.0, 1.2))):
        found = corrected_by(process, META, H100, BOTH, runs)
        rows = process.residuals(BOTH, lessons_of(runs))
        for own, row, width in zip((found.prefill, found.decode), rows, widths, strict=True):
            assert math.log(own.factor) == pytest.approx(row.mean)
            assert math.log(own.high / own.factor) == pytest.approx(width * row.deviation)


def test_a_run_makes_intervals_narrower_and_more_runs_no_wider() -> None:
    process = drawn_process(2)
    found = [corrected_by(process, META, H100, BOTH, [a_run()] * n) for n in range(6)]
    for phase in ("prefill", "decode"):
        widths = [getattr(f, phase).high / getattr(f, phase).low for f in found]
        assert widths[1] < 0.8 * widths[0]
        assert all(np.diff(widths) <= 0)


def test_a_run_of_one_phase_leaves_the_width_of_the_other() -> None:
    process = drawn_process(2)
    none = corrected_by(process, META, H100, BOTH, [])
    found = corrected_by(process, META, H100, BOTH, [a_run(phases=(1,))] * 3)
    assert found.decode.high / found.decode.low < none.decode.high / none.decode.low
    deviation = process.residuals(BOTH, lessons_of([a_run(phases=(1,))] * 3))[0].deviation
    assert math.log(found.prefill.high / found.prefill.factor) == pytest.approx(3.0 * deviation)


@pytest.mark.parametrize(("stack", "bits"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_far_from_all_that_was_measured_the_prediction_stays(
    stack: EngineStack, bits: float
) -> None:
    passes = (a_pass(True, bits=bits), a_pass(bits=bits))
    assert not is_near(META, stack, bits)
    found = corrected_by(drawn_process(3), META, stack, passes, [])
    far = 40.0 if stack.engine == "llamacpp" else 50.0
    assert found.prefill == found.decode == pytest.approx(Range(1.0, 1 / far, far))
    assert found.far == far
    assert found.text == f"no measurement near this; within a factor of {far:.1f}"


def test_what_was_measured_is_near_and_a_run_of_ones_own_nearest() -> None:
    alike = msgspec.structs.replace(H100, card="h200", bytes_per_s=4.8e12)
    assert is_near(META, H100, 16.0)
    assert is_near(META, alike, 8.0)
    edge = msgspec.structs.replace(H100, bytes_per_s=3.35e12 * math.exp(estimate.NEAR + 0.01))
    assert not is_near(META, edge, 16.0)
    found = corrected_by(drawn_process(3), META, APPLE, BOTH, [a_run()])
    assert found.far == 0.0
    assert found.decode.factor > 1.1
    assert found.text == "1 measured run of this stack"
    assert corrected_by(drawn_process(3), META, APPLE, BOTH, [a_run()] * 2).text.startswith("2 me")
    near = corrected_by(drawn_process(3), META, H100, BOTH, [])
    assert near.text.startswith("no run of this stack yet (gdp learn)")
    assert near.stack == H100.key


def test_the_shipped_correction_is_by_remembered_runs_of_the_stack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path))
    before = correction_of(H100, BOTH, "costs")
    assert before is not None
    assert (before.runs, before.far) == (0, 0.0)
    records.remember([a_run(0.9)])
    after = correction_of(msgspec.structs.replace(H100, version=""), BOTH, "costs")
    assert after is not None
    assert (after.runs, after.stack) == (1, H100.key)
    assert after.decode.factor > 1.3 * before.decode.factor
    assert after.decode.high / after.decode.low < before.decode.high / before.decode.low
    assert correction_of(H100, BOTH, "other costs") == before


def test_nothing_is_corrected_where_nothing_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "shipped_corrections", lambda: None)
    assert correction_of(H100, BOTH, "costs") is None


def test_apple_chips_are_far_from_all_that_ships() -> None:
    shipped = shipped_corrections()
    assert shipped is not None
    assert not is_near(shipped[1], APPLE, 16.0)
    assert is_near(shipped[1], H100, 16.0)
