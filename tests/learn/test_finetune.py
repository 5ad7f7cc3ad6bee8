"""Fine-tuning: better on its problem, within its budget."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import pytest
from tiny import fork_join, random_problem, with_memory

from gdp.learn.finetune import STALE, FinetuneConfig, finetune, free, load_finetune
from gdp.learn.gates import ELITE, LAYERS, Explorer, fold, scaled
from gdp.learn.instances import Instance, make, random_graph
from gdp.learn.recipe import RecipeError
from gdp.methods.base import Answer, Search
from gdp.methods.portfolio import auto
from gdp.methods.priorities import RULES
from gdp.policy.advice import advice
from gdp.policy.decode import decode
from gdp.policy.method import policy_methods
from gdp.policy.model.config import NetworkConfig
from gdp.policy.model.network import init
from gdp.policy.policy import Policy, load_policy
from gdp.problem.problem import Problem
from gdp.sim.score import score, values

CONFIG = NetworkConfig(
    width=8, heads=2, sage_layers=1, attention_layers=0, head_width=8, segment=64
)
QUICK = FinetuneConfig(updates=8, samples=6, gate_updates=3)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(CONFIG, init(CONFIG, 3), "fresh")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_problem(5, num_ops=30, num_devices=3)


@pytest.mark.slow
def test_gates_alone_leave_all_other_weights(policy: Policy, problem: Problem) -> None:
    config = FinetuneConfig(updates=2, samples=4, freedom="gates", explore=0.0)
    found = finetune(problem, policy, config=config, seed=1)
    moved, kept = 0, 0
    before = jax.tree_util.tree_leaves_with_path(policy.params)
    after = jax.tree.leaves(found.policy.params)
    for (path, old), new in zip(before, after, strict=True):
        gate = any(getattr(key, "key", "") == "conditioning" for key in path)
        same = bool((np.asarray(old) == np.asarray(new)).all())
        moved += gate and not same
        kept += not gate
        assert gate or same
    assert moved > 0
    assert kept > 0


def test_free_keeps_every_gradient_after_the_gates(policy: Policy) -> None:
    assert free(policy.params, "all") is policy.params


def test_fine_tuning_begins_with_a_given_placement(policy: Policy) -> None:
    """It is no worse than that, and `auto` is not asked."""
    problem = make(Instance("layered-40-1", 3), random_graph)
    search = Search(seed=1, seconds=None, evaluations=2000)
    start = auto(problem, search).assignment
    assert start is not None
    start_s = values(problem, start.device[None], start.rank)[0][0]
    config = FinetuneConfig(updates=1, samples=4, evaluations=20)
    found = finetune(problem, policy, start=start, config=config, seed=0)
    assert found.start_s == start_s
    assert found.value_s <= start_s
    assert found.start_evaluations == 0


def test_fine_tuning_ends_where_nothing_new_is_met(policy: Policy) -> None:
    """Three ops on two devices have eight placements: soon all of them are known."""
    problem = with_memory(random_problem(7, num_ops=3, num_devices=2), 1 << 40)
    config = FinetuneConfig(updates=50, samples=4, evaluations=400, explore=0.0, search=0.0)
    found = finetune(problem, policy, config=config, seed=0)
    assert STALE <= len(found.history) < STALE + 10


@pytest.mark.slow
def test_fine_tuning_stays_within_its_evaluations(policy: Policy) -> None:
    problem = random_problem(7, num_ops=30, num_devices=3)
    config = FinetuneConfig(updates=30, samples=6, gate_updates=2, evaluations=60)
    found = finetune(problem, policy, config=config, seed=0)
    per_update = config.samples + len(RULES)
    learned = found.evaluations - found.start_evaluations
    assert config.evaluations <= learned < config.evaluations + per_update
    value_s = values(problem, found.assignment.device[None], found.assignment.rank)[0][0]
    assert value_s == pytest.approx(found.value_s)
    steps = [numbers["best_s"] for numbers in found.history]
    assert steps == sorted(steps, reverse=True)
    assert found.value_s <= advice(problem).cost_s.min()


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_fine_tuning_is_never_worse_than_auto_with_as_many_evaluations(
    policy: Policy, objective: Literal["latency", "throughput"]
) -> None:
    """It starts where auto ends; without it, from what the policy reads, which is no better."""
    placed = policy_methods(policy)["policy_samples"]
    for seed in range(2):
        instance = Instance(f"layered-40-{seed}", seed, objective)
        problem = make(instance, random_graph)
        config = FinetuneConfig(updates=1, samples=4, evaluations=20, explore=0.0)
        search = Search(seed=seed, seconds=None, evaluations=config.evaluations)
        answer = auto(problem, search, extra=[("policy", placed)])
        assert answer.assignment is not None
        auto_s = score(problem, answer.assignment.device, answer.assignment.rank).value_s
        found = finetune(problem, policy, config=config, seed=seed)
        assert found.value_s <= found.start_s <= auto_s * (1 + 1e-12)
        assert found.start_evaluations == answer.evaluations
        alone = finetune(problem, policy, config=replace(config, portfolio=False), seed=seed)
        assert alone.start_evaluations == 0
        assert alone.value_s <= alone.start_s
        assert alone.evaluations <= config.evaluations + config.samples + len(RULES)
        assert alone.start_s >= found.start_s


def test_seconds_end_fine_tuning_with_what_auto_found(policy: Policy) -> None:
    """No round begins after them; the answer fits and is no worse than the start."""
    problem = make(Instance("layered-40-1", 3), random_graph)
    found = finetune(problem, policy, config=replace(QUICK, seconds=1e-6), seed=0)
    assert found.history == []
    assert found.value_s <= found.start_s < np.inf
    assert found.start_s <= advice(problem).cost_s.min()


@pytest.mark.parametrize("name", ["simulated", "gradient"])
def test_shipped_recipes_are_read(name: str) -> None:
    config = load_finetune(Path(__file__).parents[2] / "finetune" / "recipes" / f"{name}.toml")
    assert isinstance(config, FinetuneConfig)
    assert (config == FinetuneConfig()) == (name == "simulated")


def test_a_misspelt_setting_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("sampels = 8\n")
    with pytest.raises(
        RecipeError,
        match=r"r\.toml is not a recipe: unknown key 'sampels' - at `\$`; known are updates",
    ):
        load_finetune(path)
    with pytest.raises(RecipeError, match="no recipe "):
        load_finetune(tmp_path / "none.toml")
    path.write_text("samples = 2\n")
    with pytest.raises(RecipeError, match="samples must be at least 3, got 2"):
        load_finetune(path)


def test_what_was_written_says_how_and_what_came_of_it(policy: Policy, tmp_path: Path) -> None:
    config = FinetuneConfig(updates=2, samples=4, evaluations=40)
    found = finetune(fork_join(), policy, config=config, out=tmp_path / "tuned")
    assert load_finetune(tmp_path / "tuned" / "recipe.toml") == config
    lines = (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == found.history
    assert load_policy(tmp_path / "tuned").name == "fresh, fine-tuned"


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_with_the_best_so_far_and_writes_it(
    policy: Policy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    problem = random_problem(7, num_ops=30, num_devices=3)
    seen: list[dict[str, float]] = []

    def second(at: int, numbers: dict[str, float]) -> None:
        seen.append(numbers)
        if at == 1:
            interrupt()

    before = signal.getsignal(signal.SIGINT)
    found = finetune(problem, policy, out=tmp_path / "out", config=QUICK, progress=second)
    assert signal.getsignal(signal.SIGINT) is before
    assert len(seen) == len(found.history) == 2
    assert found.value_s <= min(seen[-1]["best_s"], found.start_s)
    seconds, overflow = values(problem, found.assignment.device[None], found.assignment.rank)
    assert (seconds[0], overflow[0]) == (found.value_s, 0)
    assert load_policy(tmp_path / "out").placed is not None
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert [r.getMessage() for r in caplog.records if "interrupted" in r.getMessage()] == [
        "interrupted: ends with the best so far; once more to stop without it"
    ]


def test_ctrl_c_in_the_portfolio_skips_all_that_comes_after(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` answers its best so far, as it does for `place`."""
    problem = random_problem(7, num_ops=30, num_devices=3)

    def interrupted(*given: object, **named: object) -> Answer:
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        return auto(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("gdp.learn.finetune.auto", interrupted)
    found = finetune(problem, policy, config=QUICK)
    assert found.history == []
    assert found.value_s == found.start_s < np.inf


def test_ctrl_c_twice_stops_at_once(policy: Policy) -> None:
    problem = random_problem(7, num_ops=30, num_devices=3)
    # A shell starts what it runs in the background with the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def twice(at: int, numbers: dict[str, float]) -> None:
        interrupt()
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        finetune(problem, policy, config=QUICK, progress=twice)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Exploration in the gates: what is tried is what is kept, and the best of it wins.


def test_a_scaled_head_is_what_the_scaled_weights_encode(policy: Policy, problem: Problem) -> None:
    rng = np.random.default_rng(0)
    head = policy.head(problem)
    factor = {name: rng.normal(size=len(getattr(head, name))) for name in LAYERS}
    moved = Policy(CONFIG, fold(policy.params, factor)).head(problem)
    assert not np.allclose(moved.feature, head.feature)
    for a, b in zip(scaled(head, factor), moved, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_first_policy_tried_is_the_one_given(policy: Policy, problem: Problem) -> None:
    view, head = policy.view(problem), policy.head(problem)
    drawn = Explorer(policy.params, 0).draw(view, head, 3)
    greedy = decode(view, head, samples=1, seed=0, greedy_first=True).device[0]
    np.testing.assert_array_equal(drawn[0], greedy)


def test_the_best_policies_are_kept_and_adapted_places_as_the_best(
    policy: Policy, problem: Problem
) -> None:
    view, head = policy.view(problem), policy.head(problem)
    explorer = Explorer(policy.params, 0)
    rng = np.random.default_rng(1)
    placed: dict[float, np.ndarray] = {}
    for _ in range(3):
        drawn = explorer.draw(view, head, 6)
        cost_s = rng.random(6)
        placed |= dict(zip(cost_s.tolist(), drawn, strict=True))
        explorer.learn(cost_s)
    assert [rated.cost_s for rated in explorer.elite] == sorted(placed)[:ELITE]
    adapted = Policy(CONFIG, explorer.adapted())
    found = decode(view, adapted.head(problem), samples=1, seed=0, greedy_first=True)
    np.testing.assert_array_equal(found.device[0], placed[min(placed)])


def test_equal_costs_are_one_policy(policy: Policy, problem: Problem) -> None:
    explorer = Explorer(policy.params, 0)
    explorer.draw(policy.view(problem), policy.head(problem), 4)
    explorer.learn(np.array([2.0, 1.0, 1.0, 2.0]))
    assert [rated.cost_s for rated in explorer.elite] == [1.0, 2.0]
    assert explorer.elite[1].factor is explorer.drawn[0]


@pytest.mark.slow
def test_exploring_lowers_the_best_and_stays_within_its_share(policy: Policy) -> None:
    problem = make(Instance(graph="layered-60-3", cluster=5), random_graph)
    config = FinetuneConfig(
        updates=50, evaluations=200, samples=8, explore=0.5, search=0.0, portfolio=False
    )
    found = finetune(problem, policy, config=config, seed=1)
    explored = [numbers for numbers in found.history if "explore" in numbers]
    best = [numbers["best_s"] for numbers in explored]
    assert best == sorted(best, reverse=True)
    assert best[-1] < best[0]
    assert explored[-2]["evaluations"] < 100
    assert found.value_s <= best[-1]
    assert found.evaluations <= 200


def test_shares_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"explore and search .* got 0.7 and 0.4"):
        FinetuneConfig(explore=0.7, search=0.4)
