"""The Gaussian process of corrections against one that is written down directly."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from gdp.corrections.features import EngineStack, Pass
from gdp.corrections.process import (
    CONSTANTS,
    MOST,
    CorrectionProcess,
    Lesson,
    Residual,
    shipped_corrections,
)
from tests.corrections.made_up import BOTH, H100, STACKS, a_pass, drawn_pass, drawn_process


class _Place(NamedTuple):
    """A pass of the reference."""

    shown: list[float]
    told: list[float]
    prefill: bool
    group: object  # of a model on a stack: of public runs, or the user's own


def reference(
    process: CorrectionProcess, stack: EngineStack, passes: Sequence[Pass],
    lessons: Sequence[Lesson],
) -> list[Residual]:  # fmt: skip
    """The joint Gaussian of all passes, entry by entry, conditioned on the measured ones."""
    points, c = process.points, CONSTANTS
    places = [
        _Place(s.tolist(), t.tolist(), s[0] > 0.5, int(g))
        for s, t, g in zip(points.shown, points.told, points.group, strict=True)
    ]
    centre, scale = [], []
    for rows in (points.shown, points.told):
        centre.append([sum(column) / len(column) for column in rows.T.tolist()])
        scale.append([max(0.2, math.sqrt(np.var(column))) for column in rows.T.tolist()])
    for one in [*(x.asked for x in lessons), *passes]:
        told = stack.features(one.bits).tolist()
        places.append(_Place(one.features().tolist(), told, one.prefill, "own"))

    def at(place: _Place, kind: int) -> list[float]:
        values = zip((place.shown, place.told)[kind], centre[kind], scale[kind], strict=True)
        return [min(max((x - m) / s, -4.0), 4.0) for x, m, s in values]

    def covariance(a: _Place, b: _Place) -> float:
        apart = sum((0.6 * (x - y)) ** 2 for x, y in zip(at(a, 0), at(b, 0), strict=True))
        apart += sum((x - y) ** 2 for x, y in zip(at(a, 1), at(b, 1), strict=True))
        shared = c.alike * math.exp(-apart / (2 * 3.0**2))
        shared = shared + c.phase if a.prefill == b.prefill else c.across * shared
        shared *= math.sqrt((c.prefill if a.prefill else 1) * (c.prefill if b.prefill else 1))
        return shared + (c.own if a.group == b.group and a.prefill == b.prefill else 0.0)

    joint = np.array([[covariance(a, b) for b in places] for a in places])
    measured = [*points.residual, *(min(max(x.residual, -MOST), MOST) for x in lessons)]
    for i, weight in enumerate([*points.weight, *(x.shown for x in lessons)]):
        noise = c.noise if i < len(points.weight) else c.repeated
        joint[i, i] += noise * (c.prefill_noise if places[i].prefill else 1) / max(weight, 0.05)
    assert np.linalg.eigvalsh(joint).min() > -1e-10
    n = len(measured)
    gain = joint[n:, :n] @ np.linalg.inv(joint[:n, :n])
    mean, left = gain @ measured, joint[n:, n:] - gain @ joint[:n, n:]
    return [Residual(m, math.sqrt(v + c.floor)) for m, v in zip(mean, np.diag(left), strict=True)]


def drawn_lessons(rng: np.random.Generator, count: int) -> list[Lesson]:
    """Any measured passes, some beyond what counts."""
    return [
        Lesson(drawn_pass(rng), float(rng.normal(0, 1.5)), float(rng.uniform(0, 1)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(18))
def test_the_posterior_is_the_conditional_of_the_joint_gaussian(seed: int) -> None:
    lessons, stack = seed % 6, STACKS[seed % 4]
    rng, process = np.random.default_rng(seed), drawn_process(seed)
    seen, asked = drawn_lessons(rng, lessons), [drawn_pass(rng) for _ in range(3)]
    found = process.residuals(stack, asked, seen)
    wanted = reference(process, stack, asked, seen)
    assert np.allclose(found, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_lessons_count_in_any_order_and_make_no_deviation_larger(seed: int) -> None:
    rng, process = np.random.default_rng(seed), drawn_process(seed)
    seen, asked = drawn_lessons(rng, 5), [drawn_pass(rng) for _ in range(3)]
    found = process.residuals(H100, asked, seen)
    assert np.allclose(found, process.residuals(H100, asked, seen[::-1]), rtol=1e-8)
    told = [process.residuals(H100, asked, seen[:n]) for n in range(6)]
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
        process.residuals(H100, [asked], [Lesson(asked, residual)] * n)[0].mean
        for n in (0, 1, 2, 8, 64)
    ]
    way = [(mean - means[0]) * np.sign(residual - means[0]) for mean in means]
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(way))
    assert way[-1] <= abs(residual - means[0]) + 1e-9
    if abs(residual - means[0]) > 0.01:
        assert way[1] > 0
        assert way[-1] > 0.95 * abs(residual - means[0])


def test_without_anything_learned_a_prediction_stays() -> None:
    process = drawn_process(1)
    silent = CorrectionProcess(process.points._replace(residual=np.zeros(12)))
    assert [row.mean for row in silent.residuals(H100, BOTH)] == [0.0, 0.0]
    known = process.residuals(H100, BOTH)
    assert all(abs(row.mean) > 1e-6 for row in known)


def test_a_pass_that_times_hardly_show_teaches_less() -> None:
    process, asked = drawn_process(3), a_pass()
    at = process.residuals(H100, [asked])[0].mean
    clear, hidden = (
        process.residuals(H100, [asked], [Lesson(asked, at + 1.0, shown)])[0].mean - at
        for shown in (1.0, 0.1)
    )
    assert 0 < hidden < 0.7 * clear


def test_lessons_of_one_phase_hardly_tell_of_the_other() -> None:
    process = drawn_process(3)
    before = process.residuals(H100, BOTH)
    after = process.residuals(H100, BOTH, [Lesson(BOTH[1], before[1].mean + 1.0)])
    assert abs(after[0].mean - before[0].mean) < 0.1
    assert after[1].mean - before[1].mean > 0.8


def test_a_residual_beyond_all_counts_as_the_largest() -> None:
    process, asked = drawn_process(5), a_pass()
    found = [process.residuals(H100, [asked], [Lesson(asked, r)])[0] for r in (MOST, 40.0)]
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
    rows = process.residuals(H100, asked, [Lesson(BOTH[1], 0.5)] * count)
    assert np.isfinite(rows).all()
    assert all(abs(row.mean) < 3 * MOST for row in rows)
    assert all(row.deviation >= 0.09 for row in rows)
    assert meta.far > 1
    assert all(width > 0 for both in meta.quantiles for width in both)
