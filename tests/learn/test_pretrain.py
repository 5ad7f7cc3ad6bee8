"""Runs: recipes are strict, a run resumes to the same curve, labels only get better."""

import json
import shutil
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from tiny import SMALL_NETWORK

from gdp.base import checkpoint
from gdp.base.errors import GdpError
from gdp.learn.instances import (
    Instance,
    draw,
    limit_memory,
    load_problems,
    make,
    random_cluster,
    random_graph,
)
from gdp.learn.labels import LabelStore, load_labels
from gdp.learn.metrics import truncate_metrics
from gdp.learn.pretrain import _Run, pretrain
from gdp.learn.processes import ProcessGroup
from gdp.learn.recipe import Recipe, RecipeError, load_recipe, parse_recipe
from gdp.policy.advice import judge
from gdp.policy.model.network import init
from gdp.policy.policy import Policy, load_policy, save_policy

SMALL = f"""
name = "small"
seed = 3
{SMALL_NETWORK}[imitation]
updates = 2
graphs = 2
[ppo]
updates = 2
graphs = 2
samples = 3
[data]
max_ops = 60
random_graphs = 3
[run]
validate_every = 2
"""


def labelled(tmp_path: Path) -> tuple[Recipe, str]:
    """The small recipe with labels: every op where it may go first."""
    problems = load_problems("", random_graphs=3, min_ops=30, max_ops=60)
    store = LabelStore([])
    for name in problems.train + problems.validation[:1]:
        instance = Instance(graph=name, cluster=3)
        problem = problems.get(instance)
        store.improve(
            instance, problem, problem.allowed.argmax(axis=1), evaluations=1, found_by="first"
        )
    path = tmp_path / "labels.jsonl"
    store.save(path)
    text = SMALL.replace("[data]", f'[data]\nlabels = "{path}"')
    return parse_recipe(text), text


def test_unknown_keys_of_a_recipe_are_errors() -> None:
    with pytest.raises(RecipeError, match="unknown key 'clop'"):
        parse_recipe('name = "x"\n[ppo]\nclop = 0.2')
    with pytest.raises(RecipeError, match="clip must lie"):
        parse_recipe('name = "x"\n[ppo]\nclip = 2.0')
    with pytest.raises(RecipeError, match="no recipe "):
        load_recipe("nowhere.toml")


def test_shipped_recipes_parse() -> None:
    folder = Path(__file__).parents[2] / "pretrain" / "recipes"
    found = sorted(folder.glob("*.toml"))
    assert found
    for path in found:
        assert load_recipe(path)[0].name == path.stem


@pytest.mark.slow
def test_a_resumed_run_has_the_same_curve(tmp_path: Path) -> None:
    """Four updates in one go, and stopped after every update: the same losses and weights."""
    recipe, text = labelled(tmp_path)
    whole = pretrain(recipe, tmp_path / "whole", recipe_text=text)
    for _ in range(4):
        parts = pretrain(recipe, tmp_path / "parts", recipe_text=text, stop=lambda: True)
    assert whole.updates == parts.updates == 4
    curves = [
        [
            {k: v for k, v in json.loads(line).items() if k not in ("wall_s", "cpu_s")}
            for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("whole", "parts")
    ]
    assert curves[0] == curves[1]
    assert "val_greedy" in curves[0][1]
    assert "cross_entropy" in curves[0][0]
    assert "entropy" in curves[0][3]
    last = [load_policy(tmp_path / run / "last").params for run in ("whole", "parts")]
    jax.tree.map(np.testing.assert_array_equal, *last)


def test_a_folder_of_another_recipe_is_refused(tmp_path: Path) -> None:
    recipe, text = labelled(tmp_path)
    pretrain(recipe, tmp_path / "run", recipe_text=text, stop=lambda: True)
    other = parse_recipe(text.replace("seed = 3", "seed = 4"))
    with pytest.raises(checkpoint.CheckpointError, match="another recipe"):
        pretrain(other, tmp_path / "run")


@pytest.mark.slow
def test_a_run_killed_while_it_saves_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    """What an unfinished write leaves behind is neither read nor in the way."""
    recipe, text = labelled(tmp_path)
    assert pretrain(recipe, tmp_path / "run", recipe_text=text, stop=lambda: True).updates == 1
    unfinished = tmp_path / "run" / "state" / "2.orbax-checkpoint-tmp" / "tree"
    unfinished.mkdir(parents=True)
    (unfinished / "manifest.ocdbt").write_bytes(b"half")
    assert pretrain(recipe, tmp_path / "run", recipe_text=text, stop=lambda: True).updates == 2
    assert [p.name for p in (tmp_path / "run" / "state").iterdir()] == ["2"]


def test_a_damaged_state_is_told_and_the_run_does_not_begin_anew(tmp_path: Path) -> None:
    recipe, text = labelled(tmp_path)
    pretrain(recipe, tmp_path / "run", recipe_text=text, stop=lambda: True)
    shutil.rmtree(tmp_path / "run" / "state" / "1" / "tree")
    with pytest.raises(checkpoint.CheckpointError, match="is damaged or of another network"):
        pretrain(recipe, tmp_path / "run", recipe_text=text)


def test_a_state_of_an_older_gdp_is_named(tmp_path: Path) -> None:
    recipe, text = labelled(tmp_path)
    checkpoint.save(tmp_path / "run" / "state", {"a": np.zeros(1)})
    with pytest.raises(checkpoint.CheckpointError, match="older gdp"):
        pretrain(recipe, tmp_path / "run", recipe_text=text, force=True)


def test_labels_of_random_graphs_take_part_whatever_the_seed(tmp_path: Path) -> None:
    """The labels were made under seed 0, and the recipe's seed is 3."""
    recipe, text = labelled(tmp_path)
    wanted = set(load_problems("", random_graphs=3, min_ops=30, max_ops=60).train)
    other = parse_recipe(text.replace("max_ops = 60", "max_ops = 50"))  # other sizes, other names
    for one in (recipe, other):
        run = _Run(one, tmp_path / "run", text, ProcessGroup(), 1)
        assert one.seed == 3
        assert {i.graph for i in run.trainer.labels.instances()} >= wanted
    assert len(_Run(recipe, tmp_path / "run", text, ProcessGroup(), 1).held) == 1


def test_a_start_of_another_network_is_refused(tmp_path: Path) -> None:
    network = parse_recipe(SMALL).network
    save_policy(Policy(network, init(network, 0)), tmp_path / "first")
    text = f'start = "{tmp_path / "first"}"\n' + SMALL.replace("width = 8", "width = 4")
    with pytest.raises(checkpoint.CheckpointError, match="another network than the recipe"):
        pretrain(parse_recipe(text), tmp_path / "none")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "held"])
def test_labels_that_ship_are_of_the_graphs_that_ship(name: str) -> None:
    """Else a recipe learns from none of them, and nothing but a line of the log says so."""
    folder = Path(__file__).parents[2] / "data"
    problems = load_problems(str(folder / "corpus"), random_graphs=0, min_ops=1, max_ops=200)
    labels = load_labels(folder / "labels" / f"{name}.jsonl")
    small = [x for x in labels.instances() if x.graph in problems.files]
    assert len(small) >= 20
    assert [x.key for x in small if labels.get(x, problems.get(x)) is None] == []


def test_labels_of_earlier_versions_of_gdp_serve_and_those_of_other_graphs_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    instance, other = (Instance(f"layered-30-{seed}", 0) for seed in (1, 2))
    problem = make(instance, random_graph)
    store = LabelStore([])
    for one in (instance, other):
        store.improve(one, problem, problem.allowed.argmax(axis=1), evaluations=1, found_by="first")
    earlier = [
        msgspec.structs.replace(label, digest=problem.graph.earlier_digest[:16])
        for label in store.all()
    ]
    store = LabelStore(earlier)
    assert store.get(instance, problem) is not None
    assert not caplog.records
    for _ in range(2):
        assert store.get(other, make(other, random_graph)) is None
    assert [record.args for record in caplog.records] == [(other.key,)]


def test_labels_only_get_better(tmp_path: Path) -> None:
    instance = Instance(graph="layered-50-1", cluster=5)
    problem = make(instance, random_graph)
    rng = np.random.default_rng(0)
    score = rng.random((6, *problem.allowed.shape)) * problem.allowed
    devices = score.argmax(axis=2)
    store = LabelStore([])
    for device in devices:
        store.improve(instance, problem, device, evaluations=2, found_by="random")
    label = store.get(instance, problem)
    assert label is not None
    assert label.value_s == judge(problem, devices)[0].min()
    assert label.evaluations == 12
    assert judge(problem, label.placement()[None])[0][0] == label.value_s
    store.save(tmp_path / "labels.jsonl")
    assert load_labels(tmp_path / "labels.jsonl").get(instance) == label


def test_instances_are_reproducible_and_within_limits() -> None:
    rng = np.random.default_rng(0)
    for _ in range(6):
        instance = draw(rng, ["layered-60-1", "series-60-2"])
        first, second = (make(instance, random_graph) for _ in range(2))
        assert 2 <= first.num_devices <= 8
        np.testing.assert_array_equal(first.compute_s, second.compute_s)
        np.testing.assert_array_equal(
            first.cluster.link_bytes_per_s, second.cluster.link_bytes_per_s
        )
        src, dst = first.graph.edges
        assert (src < dst).all()


def test_limited_memory_is_less_than_one_device_needs() -> None:
    problem = make(Instance(graph="layered-80-1", cluster=1), random_graph)
    tight = limit_memory(problem, 1.2)
    one = np.where(tight.allowed[:, 0], 0, tight.allowed.argmax(axis=1))
    assert not judge(tight, one[None])[1][0]
    assert judge(problem, one[None])[1][0]


def test_random_clusters_vary() -> None:
    found = [random_cluster(seed) for seed in range(40)]
    assert {c.num_devices for c in found} >= {2, 4, 8}
    speeds = [[d.flop_per_s["default"] for d in c.devices] for c in found]
    spread = [max(s) / min(s) for s in speeds]
    assert min(spread) == 1.0
    assert max(spread) > 5.0
    assert any(len(np.unique(c.channel)) < c.num_devices * (c.num_devices - 1) for c in found)


def test_a_log_whose_last_line_is_torn_is_gone_on_with(tmp_path: Path) -> None:
    """A process killed while it wrote leaves half a line, at any byte of it."""
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 0, "loss": 1.5}\n{"step": 1, "loss": 1.25}\n{"step": 2, "loss": 1.0}\n'
    for end in range(len(whole) + 1):
        path.write_text(whole[:end])
        truncate_metrics(path, from_step=2)
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == list(range(min(whole[:end].count("\n"), 2)))


def test_a_log_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in ("half a line", "[]", '{"loss": 1}', '{"step": null}'):
        path.write_text(f'{{"step": 0}}\n{line}\n')
        with pytest.raises(GdpError, match=r"metrics.jsonl, line 2: is not a line of metrics"):
            truncate_metrics(path, from_step=1)
        assert path.read_text().endswith(f"{line}\n")
