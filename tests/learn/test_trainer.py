"""One step of training: what is drawn, what is told, what is skipped."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from gdp.learn.instances import Instance, draw, load_problems, make, random_graph
from gdp.learn.labels import LabelStore
from gdp.learn.pretrain import Outcome, by_regime, quality_of
from gdp.learn.processes import ProcessGroup
from gdp.learn.recipe import Recipe, RecipeError, parse_recipe
from gdp.learn.trainer import Trainer, single_device_s
from gdp.policy.model.network import init
from gdp.problem.problem import Problem

INSTANCE = Instance(graph="layered-50-1", cluster=5)
RECIPE = parse_recipe(
    """
name = "step"
[network]
width = 8
heads = 2
sage_layers = 1
attention_layers = 0
head_width = 8
[imitation]
updates = 0
[ppo]
updates = 2
graphs = 2
samples = 4
[data]
max_ops = 60
random_graphs = 3
fresh = 1.0
"""
)


def trainer(recipe: Recipe, **fields) -> Trainer:
    problems = load_problems("", random_graphs=3, min_ops=30, max_ops=60)
    return Trainer(recipe, problems, LabelStore([]), **fields)


@pytest.mark.slow
def test_an_update_moves_the_weights_by_what_the_samples_cost() -> None:
    """Fresh problems have no labels: the samples alone are the signal."""
    made = trainer(RECIPE)
    state, numbers = made.update(made.fresh(init(RECIPE.network, 0)))
    assert int(state.step) == 1
    assert numbers["without_signal"] == 0
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, init(RECIPE.network, 0))
    assert max(jax.tree.leaves(moved["out_head"])) > 0


def test_an_update_without_signal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every placement of every problem costs the same, and there are no labels."""
    recipe = RECIPE

    def same(problem: Problem, devices: np.ndarray, *rules) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(devices)), np.ones(len(devices), dtype=bool)

    monkeypatch.setattr("gdp.learn.ppo.judge", same)
    made = trainer(recipe)
    start = made.fresh(init(recipe.network, 0))
    state, numbers = made.update(start)
    assert numbers["without_signal"] == 2
    jax.tree.map(np.testing.assert_array_equal, state.params, start.params)


def test_more_processes_than_problems_of_an_update_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"3 processes share 2 problems.*\[ppo\] to at least 3"):
        trainer(RECIPE, team=ProcessGroup(0, 3))
    trainer(RECIPE, team=ProcessGroup(1, 2))


def test_the_unit_of_the_published_reward_is_the_best_single_device() -> None:
    problem = make(INSTANCE, random_graph)
    alone = single_device_s(problem)
    assert alone > 0
    doubled = replace(problem, compute_s=2.0 * problem.compute_s)
    assert single_device_s(doubled) > alone


def test_memory_is_limited_as_often_and_as_much_as_told() -> None:
    rng = np.random.default_rng(0)
    drawn = [draw(rng, ["x"], limited=0.5, memory=(1.1, 1.2)) for _ in range(200)]
    limits = [one.memory for one in drawn if one.memory]
    assert 70 < len(limits) < 130
    assert 1.1 <= min(limits) <= max(limits) <= 1.2


def test_regimes_are_judged_apart() -> None:
    """Geometric means by hand: tight sqrt(2 * 8) = 4, large 3, the rest 1."""
    tight, room = Instance("x", 0, memory=1.2), Instance("x", 0)
    found = [
        Outcome(tight, 5000, 2.0, 1.0, True),
        Outcome(tight, 50, 8.0, 1.0, False),
        Outcome(room, 1000, 3.0, 2.0, True),
        Outcome(room, 50, 1.0, 1.0, True),
    ]
    wanted = {
        "tight_greedy": 4.0, "tight_best": 1.0, "large_greedy": 3.0, "large_best": 2.0,
        "ample_greedy": 1.0, "ample_best": 1.0,
    }  # fmt: skip
    assert by_regime(found) == pytest.approx(wanted)
    assert quality_of(found).feasible == 0.75
    assert np.isnan(quality_of([]).greedy)
