"""What the shipped intervals and the table of errors rest on: quantiles, and rows left out."""

import itertools
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from benchmarks.measured_world.serving_runs import Run
from gdp.corrections.features import SERVED
from gdp.corrections.passes import Residuals, Times
from gdp.corrections.process import MOST
from pretrain.corrections.contenders import CONTENDERS, OWN_RUNS, chosen
from pretrain.corrections.rows import Row, model_name
from pretrain.corrections.ship import COVERED, far_factor, half_widths, meta_of, quantile
from pretrain.corrections.table import RUNS, Told, folds, predictions
from pretrain.corrections.train import points_of, samples_of
from tests.corrections.made_up import STACKS, drawn_pass

ANY_RUN = Run("x", "m", "h100", "vllm", "16", 100, 10, 1, 1.0, 1.0)
KINDS = ("pair", "model", "gpu", "stack", "group")


def made_up_rows(seed: int, count: int = 40) -> list[Row]:
    """Any measured runs of three models on four stacks."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        stack, model = STACKS[rng.integers(4)], f"m{rng.integers(3)}"
        if rng.random() < 0.3:
            stack = msgspec.structs.replace(stack, version="0.99.0")
        prefill, decode = rng.normal(0.1, 0.4, 2).tolist()
        found = Residuals(prefill, decode, (0.6, float(rng.choice([0.01, 1.0]))))
        rows.append(Row(
            "made up", model, stack, 8e10, "16", (drawn_pass(rng, True), drawn_pass(rng, False)),
            Times(1.0, 1.0), lambda p, d: Times(math.exp(p), math.exp(d)), found, (i,), ANY_RUN,
        ))  # fmt: skip
    return rows


def test_quantiles_cover_a_new_group() -> None:
    """Split conformal: of groups that are drawn alike, nine in ten of new ones lie below, in the
    mean over all that could be measured."""
    rng, covered = np.random.default_rng(0), []
    for _ in range(2000):
        groups = rng.integers(1, 6, 25)
        centre = np.repeat(rng.exponential(size=25), groups)
        values = centre * rng.uniform(0.5, 1.5, len(centre))
        limit = quantile(values.tolist(), np.repeat(np.arange(25), groups).tolist())
        covered.append(rng.exponential() * rng.uniform(0.5, 1.5) <= limit)
    assert np.mean(covered) > COVERED - 3 * math.sqrt(COVERED * (1 - COVERED) / 2000)


@pytest.mark.parametrize("count", [9, 10, 15, 19, 25, 39, 99])
def test_of_single_values_the_quantile_is_that_of_one_more(count: int) -> None:
    """The ceil((n + 1) 0.9)-th of n; where there is none, the largest."""
    values = np.random.default_rng(count).permutation(np.arange(1.0, count + 1)).tolist()
    assert quantile(values, range(count)) == min(math.ceil((count + 1) * 0.9), count)


def test_a_group_weighs_the_same_however_many_rows_it_has() -> None:
    values, groups = [float(i) for i in range(20)], list(range(20))
    many = quantile([*values, *[0.5] * 500], [*groups, *[0] * 500])
    assert many == quantile([0.5, *values[1:]], groups)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_no_fold_learns_from_what_it_tells(seed: int, kind: str) -> None:
    rows, told = made_up_rows(seed), []
    for fold in folds(rows, kind):
        assert not set(fold.train) & set(fold.test)
        test = [rows[i] for i in fold.test]
        models, cards = {r.architecture for r in test}, {r.stack.card for r in test}
        keys, groups = {r.stack.key for r in test}, {r.group for r in test}
        for row in (rows[i] for i in fold.train):
            assert row.group not in groups
            assert row.architecture not in models or kind not in ("pair", "model")
            assert row.stack.card not in cards or kind not in ("pair", "gpu")
            assert row.stack.key not in keys or kind != "stack"
        told += fold.test
    assert sorted(told) == list(range(len(rows)))


@pytest.mark.parametrize("seed", range(5))
def test_predictions_are_by_other_runs_of_the_row_alone(seed: int) -> None:
    """A contender sees the lessons that the table gives it: none is of the row that it tells."""
    rows = made_up_rows(seed)
    samples, seen = samples_of(rows), []

    def spy(samples: object, train: np.ndarray) -> object:
        def predict(row: Row, lessons: list[object]) -> list[object]:
            seen.append((row, lessons))
            return []

        return predict

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONTENDERS, "spy", spy)  # type: ignore[arg-type]
        for fold in folds(rows, "group"):
            list(predictions(rows, samples, fold, "spy", 1))
    for row, lessons in seen:
        own = [x.asked for x in row.lessons]
        assert not any(x.asked is p for x in lessons for p in own)
        others = [x for r in rows if r.group == row.group for x in r.lessons]
        assert all(any(x.asked is o.asked for o in others) for x in lessons)


def test_samples_and_points_hold_the_passes_that_are_shown() -> None:
    rows = made_up_rows(1)
    samples = samples_of(rows)
    assert len(samples.row) == sum(len(row.lessons) for row in rows)
    for i, row in enumerate(samples.row.tolist()):
        phase = 0 if samples.prefill[i] else 1
        assert samples.residual[i] == np.clip(rows[row].found[phase], -MOST, MOST)
        assert samples.weight[i] == rows[row].found.shown[phase] >= 0.05
    marked = chosen(samples, np.ones(len(samples.row), dtype=bool), most=20)
    assert 0 < marked.sum() <= 20
    counts = np.bincount(samples.group[marked], minlength=samples.group.max() + 1)
    assert counts.max() - counts[counts < np.bincount(samples.group)].min(initial=99) <= 1
    assert len(points_of(samples, marked).residual) == marked.sum()


def test_widths_hold_nine_in_ten_groups_that_were_left_out() -> None:
    rows = made_up_rows(4, count=120)
    samples = samples_of(rows)
    told: list[Told] = list(itertools.chain.from_iterable(
        predictions(rows, samples, fold, OWN_RUNS, 1) for fold in folds(rows, "group")
    ))  # fmt: skip
    meta = meta_of(rows, told)
    assert len(meta.quantiles[SERVED]) == len(RUNS)
    for runs, widths in enumerate(meta.quantiles[SERVED]):
        assert widths == half_widths(rows, told, runs, SERVED)
        for phase, width in enumerate(widths):
            own = [t for t in told if t.runs == runs and _counts(rows[t.row], phase)]
            held: dict[object, list[bool]] = {}
            for t in own:
                found = rows[t.row].found
                off = abs((found.prefill, found.decode)[phase] - t.residuals[phase].mean)
                inside = off <= width * t.residuals[phase].deviation * (1 + 1e-9)
                held.setdefault(rows[t.row].group, []).append(inside)
            assert np.mean([np.mean(group) for group in held.values()]) >= COVERED - 1e-9
    assert meta.far[SERVED] == far_factor(rows, told, SERVED) > 1
    assert set(meta.stacks) == {row.stack.key for row in rows}
    assert {engine for engine, *_ in meta.known} == {row.stack.engine for row in rows}


def _counts(row: Row, phase: int) -> bool:
    return row.stack.engine != "tgi" and row.found.shown[phase] >= 0.1


def test_names_of_one_model_are_one() -> None:
    assert model_name("meta-llama/Meta-Llama-3-8B-Instruct") == "Llama-3-8B"
    assert model_name("Qwen/Qwen3-235B-A22B-Instruct-2507-FP8") == "Qwen3-235B-A22B"


def test_a_server_of_r1_is_left_out_with_those_of_v3_and_teaches_none_of_them() -> None:
    first, second, *_ = made_up_rows(0)
    rows = [replace(row, stack=first.stack, model=name) for row, name in (
        (first, "DeepSeek-V3"), (second, "DeepSeek-R1"))]  # fmt: skip
    assert rows[0].group != rows[1].group
    (fold,) = folds(rows, "model")
    assert (fold.train, fold.test) == ([], [0, 1])
