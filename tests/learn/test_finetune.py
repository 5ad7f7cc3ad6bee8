"""Fine-tuning and guided search: better on their problem, within their budget."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import pytest
from tiny import fork_join, random_problem, with_memory

from gdp.api import methods
from gdp.learn.finetune import STALE, FinetuneConfig, finetune, free
from gdp.learn.instances import Instance, make, random_graph
from gdp.learn.judge import FINALISTS, turns_of
from gdp.learn.recipe import RecipeError, load_finetune
from gdp.methods.annealing.annealer import AnnealConfig, make_annealer
from gdp.methods.base import Assignment, Search
from gdp.methods.portfolio import auto
from gdp.methods.priorities import RULES
from gdp.methods.scoring import best_of
from gdp.methods.search.local_search import local_search
from gdp.policy.advice import advice, with_incumbent
from gdp.policy.decode import decode
from gdp.policy.evaluate import judge
from gdp.policy.gaps import gap
from gdp.policy.guided import guided_search, wanted
from gdp.policy.method import policy_candidate, search_with_policy
from gdp.policy.model.config import NetworkConfig
from gdp.policy.model.network import init
from gdp.policy.policy import Policy, load_policy
from gdp.sim.score import score, values

CONFIG = NetworkConfig(
    width=8, heads=2, sage_layers=1, attention_layers=0, head_width=8, segment=64
)
QUICK = FinetuneConfig(updates=8, samples=6, gate_updates=3)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(CONFIG, init(CONFIG, 3), "fresh")


def test_gates_alone_leave_all_other_weights(policy: Policy) -> None:
    problem = random_problem(5, num_ops=30, num_devices=3)
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


def test_a_measured_reward_is_asked_once_per_placement_then_for_the_best_few(
    policy: Policy,
) -> None:
    problem = fork_join()
    asked: list[bytes] = []

    def measure(assignment: Assignment) -> float:
        asked.append(assignment.device.tobytes())
        return 1.0 + float(assignment.device.sum())  # everything on device 0 is best

    found = finetune(problem, policy, reward=measure, config=QUICK, seed=0)
    assert found.evaluations == len(asked) <= QUICK.evaluations
    first = list(dict.fromkeys(asked))
    assert asked[: len(first)] == first
    again = asked[len(first) :]
    turns = turns_of(QUICK.evaluations)
    assert turns > 0
    assert {again.count(key) for key in again} == {turns}
    assert len(set(again)) == min(FINALISTS, len(first))
    assert found.value_s == 1.0
    assert found.assignment.device.tolist() == [0, 0, 0, 0]


def test_guided_search_is_never_worse_than_its_start(policy: Policy) -> None:
    problem = make(Instance(graph="layered-40-1", cluster=3), random_graph)
    start = Assignment(problem.group_allowed.argmax(axis=1)[problem.group])
    before = judge(problem, start.device[None])[0][0]
    for share in (0.5, 0.0):
        search = Search(seed=1, seconds=None, evaluations=200, start=start)
        answer = guided_search(problem, policy, search, share=share)
        assert answer.assignment is not None
        assert answer.evaluations == 200
        assert judge(problem, answer.assignment.device[None])[0][0] <= before


def test_unguided_is_the_local_search(policy: Policy) -> None:
    problem = make(Instance(graph="layered-40-1", cluster=3), random_graph)
    start = Assignment(problem.group_allowed.argmax(axis=1)[problem.group])
    search = Search(seed=1, seconds=None, evaluations=200, start=start)
    answers = [guided_search(problem, policy, search, share=0.0), local_search(problem, search)]
    devices = [answer.assignment.device for answer in answers if answer.assignment]
    np.testing.assert_array_equal(*devices)


def test_what_is_wanted_are_the_probabilities_of_the_decoder(policy: Policy) -> None:
    """The sum of the logarithms along the placement is what the decoder gives it."""
    problem = random_problem(5, num_ops=30, num_devices=3)
    device = problem.group_allowed.argmax(axis=1)[problem.group]
    table = wanted(policy, problem, device)
    np.testing.assert_allclose(table.sum(axis=1), 1.0, rtol=1e-6)
    told = with_incumbent(advice(problem), problem, device)
    told = told._replace(device=np.concatenate([device[None], told.device[1:]]))
    view = policy.view(problem, told)._replace(mask_alike=False)
    forced = decode(view, policy.head(problem, told), samples=1, seed=0, forced=device[None])
    groups = np.arange(problem.num_groups)
    home = np.zeros(problem.num_groups, dtype=int)
    home[problem.group] = device
    assert np.log(table[groups, home]).sum() == pytest.approx(forced.log_probability[0], rel=1e-4)


def test_a_guide_is_followed() -> None:
    """All weight on one group and one device: the guided half of the moves is that one move."""
    problem = make(Instance(graph="layered-40-1", cluster=3), random_graph)
    device = problem.group_allowed.argmax(axis=1)[problem.group]
    table = np.zeros((problem.num_groups, problem.num_devices))
    table[problem.group, device] = 1.0
    group = int(np.flatnonzero(problem.group_allowed.sum(axis=1) > 1)[3])
    to = int(np.flatnonzero(problem.group_allowed[group] & (table[group] == 0))[-1])
    table[group, to] = 1.0
    scored = best_of(problem, [Assignment(device)])
    only_single = AnnealConfig(shares=(1.0, 0, 0, 0, 0, 0, 0, 0), hot=1e-9, cold=1e-9)
    moved = []
    for share in (0.0, 1.0):
        chain = make_annealer(problem, scored, 0)
        if share:
            chain.guide(table, share)
        chain.restart()
        chain.run(100, 100, only_single)
        moved.append(np.flatnonzero(chain.best().assignment.device != device))
    assert set(problem.group[moved[1]]) <= {group}
    assert len(moved[0]) > len(moved[1])


def test_gaps_free_whole_groups() -> None:
    problem = make(Instance(graph="series-60-2", cluster=3), random_graph)
    device = problem.group_allowed.argmax(axis=1)[problem.group]
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(60):
        ops = gap(problem, device, rng)
        freed = np.isin(problem.group, problem.group[ops])
        assert freed.sum() == len(ops)
        sizes.append(len(ops))
    assert min(sizes) <= 2
    assert max(sizes) > 8


def test_fine_tuning_ends_where_nothing_new_is_met(policy: Policy) -> None:
    """Three ops on two devices have eight placements: soon all of them are known."""
    problem = with_memory(random_problem(7, num_ops=3, num_devices=2), 1 << 40)
    config = FinetuneConfig(updates=50, samples=4, evaluations=400, explore=0.0, search=0.0)
    found = finetune(problem, policy, config=config, seed=0)
    assert STALE <= len(found.history) < STALE + 10


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


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_fine_tuning_is_never_worse_than_auto_with_as_many_evaluations(
    policy: Policy, objective: Literal["latency", "throughput"]
) -> None:
    """It starts where auto ends; without it, from what the policy reads, which is no better."""
    placed = policy_candidate(policy)
    for seed in range(4):
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


def test_guided_as_a_method_goes_on_from_the_policy_within_the_budget() -> None:
    problem = make(Instance(graph="layered-40-1", cluster=3), random_graph)
    search = Search(seed=1, seconds=None, evaluations=600)
    first, found = policy_candidate()(problem, search), methods()["guided"](problem, search)
    assert first.assignment is not None
    assert found.assignment is not None
    assert first.evaluations < found.evaluations <= 600
    value_s = [
        values(problem, a.device[None], a.rank)[0][0] for a in (found.assignment, first.assignment)
    ]
    assert value_s[0] <= value_s[1]


def test_guided_as_a_method_says_which_objectives_it_does_not_know() -> None:
    problem = random_problem(1, num_ops=12, num_devices=2, objective="max_load")
    answer = search_with_policy(problem, None, Search(seconds=None, evaluations=10))
    assert answer.assignment is None
    assert "max_load" in answer.reason


@pytest.mark.parametrize("name", ["simulated", "gradient", "measured"])
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
