"""The Gaussian process of corrections against one that is written down directly."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from gdp.corrections.features import Pass
from gdp.corrections.process import (
    CONSTANTS,
    LEAST_WEIGHT,
    MOST,
    CorrectionProcess,
    Lesson,
    Residual,
    shipped_corrections,
)
from tests.corrections.made_up import BOTH, a_pass, drawn_pass, drawn_process


def reference(
    process: CorrectionProcess, passes: Sequence[Pass], lessons: Sequence[Lesson],
) -> list[Residual]:  # fmt: skip
    """The joint Gaussian of all passes, entry by entry, conditioned on the measured ones."""
    c, scales = CONSTANTS, process.scales
    all_passes = [*(x.asked for x in lessons), *passes]

    def at(one: Pass) -> list[float]:
        """Features in standard deviations, at most four."""
        found = []
        for name, values in (("shown", one.features()), ("others", one.format_features())):
            rows = zip(values, scales[f"{name}_mean"], scales[f"{name}_scale"], strict=True)
            found += [min(max((x - m) / s, -4.0), 4.0) for x, m, s in rows]
        return found

    def covariance(a: Pass, b: Pass) -> float:
        apart = sum((x - y) ** 2 for x, y in zip(at(a), at(b), strict=True))
        shared = c.alike * math.exp(-apart / (2 * 3.0**2))
        return shared + c.own if a.prefill == b.prefill else c.across * shared

    joint = np.array([[covariance(a, b) for b in all_passes] for a in all_passes])
    for i, lesson in enumerate(lessons):
        joint[i, i] += c.noise / max(lesson.shown, LEAST_WEIGHT)
    n, measured = len(lessons), [min(max(x.residual, -MOST), MOST) for x in lessons]
    assert np.linalg.eigvalsh(joint).min() > -1e-10
    gain = joint[n:, :n] @ np.linalg.inv(joint[:n, :n]) if n else np.zeros((len(passes), 0))
    mean, left = gain @ np.array(measured), joint[n:, n:] - gain @ joint[:n, n:]
    return [Residual(m, math.sqrt(v + c.floor)) for m, v in zip(mean, np.diag(left), strict=True)]


def drawn_lessons(rng: np.random.Generator, count: int) -> list[Lesson]:
    """Any measured passes, some beyond what counts."""
    return [
        Lesson(drawn_pass(rng), float(rng.normal(0, 1.5)), float(rng.uniform(0, 1)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(18))
def test_the_posterior_is_the_conditional_of_the_joint_gaussian(seed: int) -> None:
    lessons = seed % 6
    rng, process = np.random.default_rng(seed), drawn_process(seed)
    seen, asked = drawn_lessons(rng, lessons), [drawn_pass(rng) for _ in range(3)]
    found = process.residuals(asked, seen)
    wanted = reference(process, asked, seen)
    assert np.allclose(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_lessons_count_in_any_order_and_make_no_deviation_larger(seed: int) -> None:
    rng, process = np.random.default_rng(seed), drawn_process(seed)
    seen, asked = drawn_lessons(rng, 5), [drawn_pass(rng) for _ in range(3)]
    found = process.residuals(asked, seen)
    assert np.allclose(found, process.residuals(asked, seen[::-1]), rtol=1e-8)
    told = [process.residuals(asked, seen[:n]) for n in range(6)]
    for fewer, more in itertools.pairwise(told):
        assert all(b.deviation <= a.deviation + 1e-9 for a, b in zip(fewer, more, strict=True))
    assert all(row.deviation >= math.sqrt(CONSTANTS.floor) - 1e-9 for row in told[-1])


@pytest.mark.parametrize("residual", [-MOST, -0.5, 0.0, 0.3, 1.0, MOST])
@pytest.mark.parametrize("seed", range(4))
def test_a_lesson_moves_its_own_pass_towards_it_and_more_of_them_further(
    seed: int, residual: float
) -> None:
    process, asked = drawn_process(seed), a_pass()
    means = [
        process.residuals([asked], [Lesson(asked, residual)] * n)[0].mean for n in (0, 1, 2, 8, 64)
    ]
    way = [(mean - means[0]) * np.sign(residual - means[0]) for mean in means]
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(way))
    assert way[-1] <= abs(residual - means[0]) + 1e-9
    if abs(residual - means[0]) > 0.01:
        assert way[1] > 0
        assert way[-1] > 0.95 * abs(residual - means[0])


def test_without_anything_learned_a_prediction_stays() -> None:
    known = drawn_process(1).residuals(BOTH)
    assert [row.mean for row in known] == [0.0, 0.0]


def test_passes_unlike_all_that_was_measured_nearly_stay() -> None:
    unlike = a_pass(
        parts_s={"streaming": 5.0}, tokens=1e6, sequences=4000, ops=100_000, weight_bytes=1e13,
        active_bytes=100.0, tensor=64, context=1e6,
    )  # fmt: skip
    process, near = drawn_process(1), a_pass()
    near_row, far_row = process.residuals([near, unlike], [Lesson(near, 1.0)])
    assert far_row.mean < 0.35 * near_row.mean


def test_a_pass_that_times_hardly_show_teaches_less() -> None:
    process, asked = drawn_process(3), a_pass()
    at = process.residuals([asked])[0].mean
    clear, hidden = (
        process.residuals([asked], [Lesson(asked, at + 1.0, shown)])[0].mean - at
        for shown in (1.0, 0.1)
    )
    assert 0 < hidden < 0.7 * clear


def test_lessons_of_one_phase_hardly_tell_of_the_other() -> None:
    process = drawn_process(3)
    before = process.residuals(BOTH)
    after = process.residuals(BOTH, [Lesson(BOTH[1], before[1].mean + 1.0)])
    assert abs(after[0].mean - before[0].mean) < 0.1
    assert after[1].mean - before[1].mean > 0.8


def test_a_residual_beyond_all_counts_as_the_largest() -> None:
    process, asked = drawn_process(5), a_pass()
    found = [process.residuals([asked], [Lesson(asked, r)])[0] for r in (MOST, 40.0)]
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [0, 1, 400])
def test_the_shipped_process_is_finite_whatever_is_asked(count: int) -> None:
    shipped = shipped_corrections()
    assert shipped is not None
    process, meta = shipped
    asked = [
        *BOTH, a_pass(parts_s={}), a_pass(parts_s={"bandwidth": 1e6}, tokens=1e16, ops=10**9),
        a_pass(weight_bytes=0.0, active_bytes=0.0, bits=0.1, sequences=10**9, tensor=10**9),
    ]  # fmt: skip
    rows = process.residuals(asked, [Lesson(BOTH[1], 0.5)] * count)
    assert np.isfinite(rows).all()
    assert all(abs(row.mean) < 3 * MOST for row in rows)
    assert all(row.deviation >= 0.09 for row in rows)
    assert all(far > 1 for far in meta.far.values())
    widths = [both for family in meta.quantiles.values() for both in family]
    assert all(width > 0 for both in widths for width in both)
