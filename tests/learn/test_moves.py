"""Fitting the score of moves: it finds what decides, by kind, and by the gain."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tiny import random_problem

from gdp.files.reading import read_toml
from gdp.learn.instances import load_problems
from gdp.methods.annealing.move_score import shipped_scoring
from gdp.methods.base import Assignment
from gdp.methods.scoring import score_all
from pretrain.moves import (
    RECIPE_KIND,
    MoveFitConfig,
    MoveRecipe,
    Outcomes,
    cases,
    fit,
    log_outcomes,
    pairs_of,
    quality,
    sample,
    unscored_moves,
)

NUM_KINDS, NUM_FEATURES = shipped_scoring().weight.shape


def made(seed: int, count: int = 1500) -> Outcomes:
    """Feature 5 decides for all kinds but kind 2, where feature 7 does, the other way round."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, NUM_FEATURES))
    x[:, 0] = 1.0
    kind = rng.integers(NUM_KINDS, size=count)
    chance = np.where(kind == 2, -x[:, 7], x[:, 5])
    return Outcomes(x, kind, np.where(chance > 1.2, -rng.uniform(0.1, 1.0, count), 0.01))


def test_fitting_finds_what_decides_by_kind() -> None:
    scoring, curve = fit([made(0), made(1)], [made(2)], MoveFitConfig(steps=200, rows=1500))
    strongest = np.abs(scoring.weight[:, 1:]).argmax(axis=1) + 1
    assert strongest.tolist() == [5, 5, 7, 5, 5, 5, 5]
    assert scoring.weight[0, 5] > 0 > scoring.weight[2, 7]
    assert curve[-1]["val_auc"] > 0.97
    assert curve[-1]["loss"] < curve[0]["loss"]


def test_quality_of_a_perfect_and_of_a_reversed_score() -> None:
    outcomes = Outcomes(
        np.repeat(np.arange(20.0)[:, None], NUM_FEATURES, axis=1),
        np.zeros(20, np.int64),
        np.where(np.arange(20) >= 15, -1.0, 1.0),
    )
    weight = np.zeros((NUM_KINDS, NUM_FEATURES))
    weight[:, 1] = 1.0
    assert quality(weight, [outcomes], [outcomes.x]) == pytest.approx((1.0, 4.0, 0.4))
    assert quality(-weight, [outcomes], [outcomes.x]) == pytest.approx((0.0, 0.0, 0.0))


def test_pairs_are_of_one_problem_and_weigh_alike() -> None:
    """Problems of 4 moves that improve of 10, of 2 (too few) of 5, and of 3 of 6."""
    train = []
    for good, total in ((4, 10), (2, 5), (3, 6)):
        rise = np.where(np.arange(total) < good, -1.0, 1.0)
        train.append(Outcomes(np.zeros((total, 1)), np.zeros(total, np.int64), rise))
    pairs = pairs_of(train, 24, seed=0)
    first = pairs.better < 10
    assert set(pairs.better[first]) == {0, 1, 2, 3}
    assert set(pairs.worse[first]) <= set(range(4, 10))
    assert set(pairs.better[~first]) == {15, 16, 17}
    assert set(pairs.worse[~first]) <= {18, 19, 20}
    assert pairs.weight[first].sum() == pytest.approx(1.0)
    assert pairs.weight.sum() == pytest.approx(2.0)


@pytest.mark.parametrize("num_ops", [40, 3100])
def test_outcomes_of_a_search_are_logged(num_ops: int) -> None:
    """Small graphs whole, large ones by windows; both kinds of outcome are there."""
    problem = random_problem(5, num_ops=num_ops)
    start = score_all(problem, [Assignment(problem.allowed.argmax(axis=1))])[0]
    outcomes = log_outcomes(problem, start, 0, 300 if num_ops < 100 else 20, unscored_moves())
    assert len(outcomes.rise) > 50
    assert 0.0 < outcomes.improves.mean() < 1.0
    assert np.isfinite(outcomes.x).all()
    few = sample(outcomes, 30, 0)
    assert len(few.rise) == 30
    assert few.x.shape == (30, NUM_FEATURES)


def test_the_recipe_learns_from_training_families_of_every_regime() -> None:
    """One problem for each graph, families in turn; the same seed draws the same."""
    recipe = read_toml(
        str(Path(__file__).parents[2] / "pretrain/moves.toml"), RECIPE_KIND, MoveRecipe
    )
    graphs = load_problems("data/corpus", random_graphs=0, min_ops=60, max_ops=9000)
    drawn = cases(graphs.train, graphs, recipe.count, recipe.seed)
    assert drawn == cases(graphs.train, graphs, recipe.count, recipe.seed)
    assert Counter(case.regime for case in drawn) == vars(recipe.count)
    unseen = {name.split("-")[0] for name in graphs.validation + graphs.test}
    assert not unseen & {case.graph.split("-")[0] for case in drawn}
    assert all((case.memory > 1.0) == (case.regime == "tight") for case in drawn)
