"""A corpus of one's own models: families, split, labels, and the training that reads it."""

import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper
from tiny import SMALL_NETWORK

from gdp.api.corpus import CorpusConfig, CorpusSummary, _split, build_corpus, find_models
from gdp.base.checkpoint import CheckpointError
from gdp.base.errors import GdpError
from gdp.cli.main import cli
from gdp.learn.instances import CorpusEntry, CorpusManifest, Instance
from gdp.learn.labels import load_labels
from gdp.learn.metrics import ValidationPoint, curve_text, validation_points
from gdp.learn.pretrain import Outcome, pretrain, quality_of
from gdp.learn.recipe import parse_recipe
from gdp.policy.policy import load_policy

QUICK = CorpusConfig(label_seconds=0.0, problems=1)
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "pretraining.md"
TINY = f"""
name = "tiny"
{SMALL_NETWORK}[imitation]
updates = 2
graphs = 1
[ppo]
updates = 3
graphs = 1
samples = 3
[run]
validate_every = 2
[data]
min_ops = 1
random_graphs = 0
"""


def mlp(path: Path, layers: int, width: int = 16) -> None:
    """Products of matrices with an activation each."""
    nodes, weights, last = [], [], "x"
    for k in range(layers):
        weight = np.zeros(width * width, np.float32)
        weights.append(helper.make_tensor(f"w{k}", TensorProto.FLOAT, [width, width], weight))
        nodes += [
            helper.make_node("MatMul", [last, f"w{k}"], [f"m{k}"]),
            helper.make_node("Relu", [f"m{k}"], [f"r{k}"]),
        ]
        last = f"r{k}"
    read, made = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, width]) for name in ("x", last)
    )
    graph = helper.make_graph(nodes, path.stem, [read], [made], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three families of two models, in the working directory."""
    return in_new_folder(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def first_build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CorpusSummary]:
    """A folder of models and a corpus of them, and what building it returned."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("corpus")
        models = in_new_folder(folder, monkeypatch)
        return folder, build_corpus([str(models)], Path("corpus"), QUICK)


@pytest.fixture
def built(
    first_build: tuple[Path, CorpusSummary], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CorpusSummary:
    """A copy of `first_build`, in the working directory."""
    shutil.copytree(first_build[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return first_build[1]


def in_new_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder the working directory, with three families of two models."""
    monkeypatch.chdir(folder)
    for width, family in ((8, "thin"), (16, "deep"), (32, "wide")):
        for layers in (3, 9):
            mlp(Path("models", family, f"mlp{layers}.onnx"), layers, width)
    return Path("models")


def test_families_are_folders_and_what_is_named(models: Path) -> None:
    found = {m.spec: m.family for m in find_models([str(models), "other=onnx:light_squeezenet"])}
    assert found["models/thin/mlp3.onnx"] == found["models/thin/mlp9.onnx"] == "thin"
    assert found["models/wide/mlp3.onnx"] == "wide"
    assert found["onnx:light_squeezenet"] == "other"
    assert len(found) == 7
    flat = find_models(["models/thin", "python:my.nets:small", "hf:configs/bert/config.json"])
    assert [m.family for m in flat] == ["mlp3", "mlp9", "my.nets", "bert"]
    Path("models/none").mkdir()
    Path("models/none/tokenizer.json").write_text("{}")
    with pytest.raises(GdpError, match="no models in models/none: give files"):
        find_models(["models/none"])


@pytest.mark.slow
def test_a_corpus_holds_out_whole_families_and_grows(built: CorpusSummary) -> None:
    split = {e.family: e.split for e in built.manifest.graphs}
    assert all(e.split == split[e.family] for e in built.manifest.graphs)
    assert sorted(split.values()) == ["train", "train", "validation"]
    for entry in built.manifest.graphs:
        data = Path("corpus", entry.file).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry.sha256
        assert entry.arguments["from"].startswith("models/")
    before = {k.instance.key: k.value_s for k in load_labels("corpus/labels.jsonl").all()}
    assert len(before) == built.labels > 0
    recipe = Path("corpus/recipe.toml")
    recipe.write_text(recipe.read_text() + "# mine\n")
    mlp(Path("models/tall/mlp5.onnx"), 5)
    again = build_corpus(["models"], Path("corpus"), QUICK)
    assert {e.family: e.split for e in again.manifest.graphs} == split | {"tall": "train"}
    after = {k.instance.key: k.value_s for k in load_labels("corpus/labels.jsonl").all()}
    assert all(after[key] <= value for key, value in before.items())
    assert len(after) > len(before)
    assert recipe.read_text().endswith("# mine\n")


def test_models_that_cannot_serve_are_named(models: Path) -> None:
    small = CorpusConfig(label_seconds=0.0, problems=1, max_ops=8)
    built = build_corpus([str(models / "thin"), "gone.onnx"], Path("corpus"), small)
    assert [e.name for e in built.manifest.graphs] == ["mlp3"]
    assert "more than --max-ops 8" in built.left_out["models/thin/mlp9.onnx"]
    assert "no such file" in built.left_out["gone.onnx"]
    with pytest.raises(GdpError, match=r"no model is left to learn from: gone\.onnx: "):
        build_corpus(["gone.onnx"], Path("other"), QUICK)


def test_a_graph_that_was_changed_and_a_manifest_that_is_not_there_are_named(
    built: CorpusSummary,
) -> None:
    recipe = parse_recipe(TINY + 'corpus = "corpus"\nlabels = "corpus/labels.jsonl"')
    other = next(e for e in built.manifest.graphs if e.family == "thin")
    for entry in built.manifest.graphs:
        if entry is not other:
            Path("corpus", entry.file).write_bytes(Path("corpus", other.file).read_bytes())
    with pytest.raises(GdpError, match="is not the file of its manifest"):
        pretrain(recipe, "run")
    missing = parse_recipe(TINY + 'corpus = "nowhere"')
    with pytest.raises(GdpError, match=r"no manifest .*gdp corpus build --from MODEL"):
        pretrain(missing, "other")


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_a_run_ends_with_a_curve_and_its_best_weights() -> None:
    Path("tiny.toml").write_text(TINY + 'corpus = "corpus"\nlabels = "corpus/labels.jsonl"\n')
    command = ["pretrain", "tiny.toml", "-o", "run"]
    printed = json.loads(CliRunner().invoke(cli, [*command, "--json"]).output)
    assert printed["validated_on"] == "2 problems of 1 family held out"
    assert [point["update"] for point in printed["curve"]] == [2, 4, 5]  # the last one, too
    least = min(printed["curve"], key=lambda p: p["greedy"] * p["best"])
    assert printed["best"] == {k: v for k, v in least.items() if k != "update"}
    meta = json.loads(Path("run/best/meta.json").read_text())
    assert meta["updates"] == least["update"]
    load_policy("run/best")
    assert Path("run/curve.png").read_bytes().startswith(b"\x89PNG")
    text = CliRunner().invoke(cli, command).output  # nothing is left to do
    assert text.count("<- best") == 1
    assert f"policy {Path('run', 'best')}" in text


@pytest.mark.slow
def test_a_run_without_labels_and_one_that_is_stopped_are_validated(tmp_path: Path) -> None:
    """On problems that are labelled for it: the same ones when it goes on."""
    recipe = parse_recipe(
        TINY.replace("updates = 2", "updates = 0").replace("_graphs = 0", "_graphs = 2")
        + "max_ops = 60\n"
    )
    stopped = pretrain(recipe, tmp_path / "run", stop=lambda: True)
    assert np.isfinite(stopped.best.best)
    assert stopped.best.best >= 0.9
    assert stopped.validated_on == "4 problems held out"
    assert json.loads((tmp_path / "run" / "best" / "meta.json").read_text())["updates"] == 1
    whole = pretrain(recipe, tmp_path / "run")
    assert (whole.updates, whole.validated_on) == (3, stopped.validated_on)


def test_the_text_of_a_curve_marks_the_best_and_stays_short() -> None:
    points = [ValidationPoint(25 * k, 2.0 - 0.01 * k, 1.5 - 0.001 * k, 1.0) for k in range(1, 101)]
    points[40] = ValidationPoint(1025, 1.01, 1.0, 0.5)
    lines = curve_text(points).splitlines()
    assert 16 <= len(lines) - 1 <= 17
    (best,) = [line for line in lines if line.endswith("<- best")]
    assert best.split()[:4] == ["1025", "1.010", "1.000", "50%"]
    assert lines[1].count("#") == 40  # the longest bar
    assert curve_text([]) == ""


def test_the_curve_has_the_standard_error_of_its_problems() -> None:
    """Costs of 1.0 and e**0.2: the mean logarithm is 0.1, its standard error 0.1."""
    outcomes = [
        Outcome(Instance("g", 0, "latency"), 9, cost, cost, True) for cost in (1.0, np.exp(0.2))
    ]
    quality = quality_of(outcomes)
    assert quality.best == pytest.approx(np.exp(0.1))
    assert quality.best_error == quality.greedy_error == pytest.approx(0.1)
    assert np.isnan(quality_of(outcomes[:1]).best_error)
    numbers = {f"val_{key}": value for key, value in quality._asdict().items()}
    (point,) = validation_points([{"step": 0, **numbers}])
    cells = curve_text([point]).splitlines()[1].split()
    assert cells[:5] == ["1", "1.105", "1.105", "10.0%", "100%"]


@pytest.mark.parametrize(("families", "held"), [(2, 1), (12, 6), (20, 8), (60, 12)])
def test_families_are_held_out_until_there_are_sixteen_problems(families: int, held: int) -> None:
    """Of one graph with two problems each: at most half of the families, at least a fifth."""
    entries = [
        CorpusEntry(f"g{k}", f"f{k}/g.json.gz", 1, "train", f"f{k}") for k in range(families)
    ]
    manifest = CorpusManifest(graphs=entries)
    _split(manifest, CorpusConfig(seed=0))
    chosen = {e.family for e in manifest.graphs if e.split == "validation"}
    assert len(chosen) == held
    _split(manifest, CorpusConfig(seed=1))  # what is held out stays so, and no more is
    assert {e.family for e in manifest.graphs if e.split == "validation"} == chosen


def test_a_recipe_starts_from_what_ships_outside_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped policy is found there: its network is another one than this recipe's."""
    monkeypatch.chdir(tmp_path)
    recipe = parse_recipe(
        'start = "checkpoints/default"\n'
        + TINY.replace("_graphs = 0", "_graphs = 2") + "max_ops = 60\n"
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="has another network than the recipe"):
        pretrain(recipe, "run")


@pytest.mark.slow
def test_the_commands_of_the_page_work(models: Path) -> None:
    """As written, in less time."""
    block = re.search(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    for line in block[1].strip().splitlines():
        shorter = re.sub(r"(--label-seconds|--stop-after) \d+", r"\1 1", line)
        program, *arguments = shlex.split(shorter)
        assert program == "gdp"
        CliRunner().invoke(cli, arguments, catch_exceptions=False, standalone_mode=False)
    assert Path("placement.json").exists()
