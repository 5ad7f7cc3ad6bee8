"""The corpus: its split is by whole families, its graphs are reproducible, its files are intact."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gdp.api.corpus import compact
from gdp.base.files.writing import TargetError
from gdp.graph.file import load_graph
from gdp.graph.op_graph import INPUT, OUTPUT
from gdp.learn.instances import load_problems
from pretrain.corpus.__main__ import main
from pretrain.corpus.build import build, build_missing, read_manifest, traced
from pretrain.corpus.families import FAMILIES, TEST, VALIDATION, corpus_graphs, models
from pretrain.corpus.layers import parameter_shapes
from pretrain.corpus.synthetic import TILED, layered, series_parallel, tiled_chain

CORPUS = Path(__file__).parents[1] / "data" / "corpus"


def test_the_split_is_by_whole_families() -> None:
    assert not TEST & VALIDATION
    assert {*FAMILIES, *TILED} >= TEST | VALIDATION
    split_of: dict[str, set[str]] = {}
    for item in corpus_graphs():
        split_of.setdefault(item.family, set()).add(item.split)
    assert all(len(splits) == 1 for splits in split_of.values())


def test_names_are_unique_and_the_corpus_is_large() -> None:
    names = [item.name for item in corpus_graphs()]
    assert len(set(names)) == len(names) >= 400
    assert len({item.family for item in corpus_graphs()}) >= 25


def test_resnet_50_has_its_published_size() -> None:
    """25.6 million parameters and 4.1 billion multiply-adds a picture: He et al. 2016."""
    builder, _ = FAMILIES["resnet"]
    model, batch = builder(depth=50, batch=1)
    count = sum(np.prod(s.shape) for s in parameter_shapes(model, batch).values())
    assert count == pytest.approx(25.6e6, rel=0.01)
    variant = next(v for v in models() if v.name == "resnet-depth50-forward")
    graph = traced(variant)
    assert graph.flop.sum() / 8 == pytest.approx(2 * 4.1e9, rel=0.06)


def test_a_training_step_knows_its_backward_part() -> None:
    steps = {v.kind: v for v in models() if v.name.startswith("dit-layers2-")}
    forward, training, micro = (
        compact(traced(steps[kind])) for kind in ("forward", "training", "microbatched")
    )
    assert not forward.is_backward.any()
    assert training.is_backward.any()
    assert training.flop.sum() > 2.5 * forward.flop.sum()
    assert micro.num_ops > 2 * training.num_ops


def test_the_same_model_is_built_to_the_same_file(tmp_path: Path) -> None:
    item = next(i for i in corpus_graphs() if i.name == "dit-layers2-forward")
    first, second = build(item, tmp_path / "a"), build(item, tmp_path / "b")
    assert first == second
    assert load_graph(tmp_path / "a" / first.file).num_ops == first.num_ops


@pytest.mark.parametrize("builder", [layered, series_parallel])
def test_random_graphs_depend_on_their_seed_alone(builder) -> None:  # type: ignore[no-untyped-def]
    assert builder(3).digest == builder(3).digest
    assert builder(3).digest != builder(4).digest


def test_tiles_add_up_to_the_matrices_they_are_cut_from() -> None:
    """x A B + x C D over 2 x 2 tiles of 8: four products of 8 small ones and 4 sums each."""
    graph = tiled_chain(grid=2, products=4, side=8)
    count = {kind: graph.op_types.count(kind) for kind in set(graph.op_types)}
    assert count == {
        INPUT: 1, "tile": 16, "tile_product": 32, "tile_sum": 16, "add": 4, OUTPUT: 1,
    }  # fmt: skip
    matrix = 16  # two tiles
    assert graph.flop.sum() == 4 * 2 * matrix**3 + (16 + 4) * 2 * 8**2
    assert graph.weight_bytes.sum() == 4 * 4 * matrix**2
    # Every tile of x and of a weight is read by two products, as a tile of either factor.
    reads = np.bincount(graph.use_tensor, minlength=graph.num_tensors)
    made_by = [graph.op_types[op] for op in graph.producer]
    assert all(reads[t] == 4 for t in range(graph.num_tensors) if made_by[t] == INPUT)
    assert all(reads[t] == 2 for t in range(graph.num_tensors) if made_by[t] == "tile")


@pytest.mark.parametrize("family", TILED)
def test_tiled_graphs_have_some_hundred_ops(family: str) -> None:
    builder, sizes = TILED[family]
    for arguments in sizes:
        assert 100 <= compact(builder(**arguments)).num_ops <= 500, arguments


def test_shipped_files_are_those_of_the_manifest() -> None:
    graphs = read_manifest(CORPUS).graphs
    assert len({entry.split for entry in graphs}) == 3
    for entry in graphs:
        data = (CORPUS / entry.file).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry.sha256, entry.name


@pytest.mark.slow
def test_a_corpus_is_built_until_it_is_whole_and_nothing_twice(tmp_path: Path) -> None:
    command = ["-o", str(tmp_path), "--family", "series_parallel"]
    first = CliRunner().invoke(main, [*command, "--limit", "2"])
    assert first.exit_code == 0, first.output
    told: list[str] = []
    build_missing(tmp_path, ["series_parallel"], 1, progress=lambda *at: told.append(at[2].name))
    graphs = read_manifest(tmp_path).graphs
    assert len(told) == 1
    assert len({entry.name for entry in graphs}) == len(graphs) == 3
    assert all(load_graph(tmp_path / entry.file).num_ops == entry.num_ops for entry in graphs)
    problems = load_problems(str(tmp_path), random_graphs=0, min_ops=1, max_ops=10**6)
    assert sorted(problems.train) == sorted(entry.name for entry in graphs)


def test_a_corpus_goes_into_no_other_folder_and_families_are_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no family 'resnets'; there are .*resnet"):
        build_missing(tmp_path / "new", ["resnets"])
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match="holds something else than a corpus"):
        build_missing(tmp_path)
