"""Tensor splits of llama.cpp: shares by hand, plans that are never worse, and their flags."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gdp
from gdp.api.generation import generation_of
from gdp.base.errors import ModelError, PlacementError
from gdp.cli.main import cli
from gdp.cluster.file import write_cluster
from gdp.cluster.types import Cluster
from gdp.costs.base import roofline
from gdp.costs.offload import sent_bytes
from gdp.graph.op_graph import OpGraph
from gdp.placement.constraints import Constraints, parse_pin
from gdp.placement.placement import Placement, Split, load_placement, make_placement
from gdp.question import solve
from gdp.question.models import load
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
from gdp.splits.division import Pieces, division_of
from gdp.splits.sharding import Shares, exchanges, member_graph
from gdp.targets.llamacpp.flags import flags_of, slots_of
from gdp.targets.llamacpp.pipeline import OVERLAPS, saved_s
from gdp.targets.llamacpp.plan import _pipelined, plan_llamacpp
from gdp.targets.llamacpp.tensor import _rounded, why_no_tensor_split
from tests.gguf_models import INNER, MIB, WIDTH, box, quick, sayable, write_gguf


def model(folder: Path, query: str = "decode&sequence=64", **more: object) -> OpGraph:
    """A small model of three blocks."""
    return load(f"{write_gguf(folder / 'm.gguf', **more)}?{query}")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("experts", [0, 4])
def test_members_have_the_whole_between_them(experts: int, tmp_path: Path) -> None:
    """Products and caches add up; embedding, norms and routers are on each; two sums a block."""
    graph = model(tmp_path, experts=experts)
    division = division_of(graph)
    members = [member_graph(division, Shares((5, 3)), rank) for rank in (0, 1)]
    whole = np.array([kind in ("Gather", "RMSNormalization") for kind in graph.op_types])
    whole |= np.array([name.endswith(("gate_inp", ".mask")) for name in graph.op_names])
    held = members[0].weight_bytes + members[1].weight_bytes
    assert (held[~whole] == graph.weight_bytes[~whole]).all()
    assert (members[0].weight_bytes[whole] == graph.weight_bytes[whole]).all()
    assert {unit.kind for unit in division.units} >= {Pieces.HEADS, Pieces.KEYS, Pieces.COLUMNS}
    told = exchanges(division)
    assert [e.operation for e in told].count("all_reduce") == 2 * 3
    assert [graph.op_names[e.op] for e in told if e.operation == "all_gather"] == ["output"]
    up = graph.op_names.index("blk.0.ffn_up" + ("_exps" if experts else ""))
    stack = (experts, WIDTH, 5 * INNER // 8) if experts else (5 * INNER // 8, WIDTH)
    assert members[0].detail[up].input_shapes[1] == stack
    query = graph.op_names.index("blk.0.attn_q")
    assert members[0].detail[query].input_shapes == ((1, WIDTH), (WIDTH // 2, WIDTH))


def test_equal_gpus_halve_a_token(tmp_path: Path) -> None:
    """Where exchanges are free two GPUs take half the time of one, less what stays on the CPU."""
    graph = model(tmp_path)
    one, two = (plan_llamacpp(Question(graph, quick(*[1e11] * n), costs=roofline)) for n in (1, 2))
    assert two.placement.splits == (Split((1, 2)),)
    assert one.value_s / two.value_s == pytest.approx(2, rel=0.05)
    assert any("tensor split 0.50/0.50: " in note for note in two.notes)
    assert two.bound_s <= two.value_s
    assert two.bound_over == "ops, divided or whole,"


def test_shares_follow_bandwidth(tmp_path: Path) -> None:
    found = plan_llamacpp(Question(model(tmp_path, keys=4), quick(1.6e11, 1e11)))
    (split,) = found.placement.splits
    assert split.parts[0] > split.parts[1]
    even = make_placement(
        found.question.graph, found.question.cluster, found.placement.device,
        splits=(Split((1, 2)),),
    )  # fmt: skip
    assert gdp.simulate(found.question.graph, even, found.question.cluster).latency_s > (
        1.1 * found.value_s
    )


@pytest.mark.parametrize("rates", [(4e11, 1e11), (1e11, 2e11, 1e11)])
@pytest.mark.parametrize("link", [1e12, 1e9, 1e6])
@pytest.mark.parametrize("size", [64 * MIB, MIB])
def test_an_answer_is_never_worse_than_whole_layers(
    rates: tuple[float, ...],
    link: float,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole layers are among what is tried, and where a link is slow they are the answer."""
    cluster = quick(*rates, link=link, size=size)
    graph = model(tmp_path, "prompt=64&new=16", experts=4)
    question = Question(graph, cluster)
    with monkeypatch.context() as patch:
        patch.setattr("gdp.targets.llamacpp.plan.tensor_plans", lambda *_: [])
        layers = plan_llamacpp(question)
    found = plan_llamacpp(question)
    assert found.score.feasible
    assert found.value_s <= layers.value_s * (1 + 1e-9)
    if link == 1e6:
        assert not found.placement.splits
    flags_of(graph, found.placement, cluster)


def test_a_pin_on_a_block_forbids_to_divide_it(tmp_path: Path) -> None:
    """The embedding is on the CPU anyway."""
    graph, cluster = model(tmp_path), quick(1e11, 1e11)
    for pin, divides in (("token_embd=cpu", True), ("blk.0.*=gpu0", False)):
        demands = Constraints(pins=(parse_pin(pin),))
        found = plan_llamacpp(Question(graph, cluster, constraints=demands))
        assert bool(found.placement.splits) == divides


def test_flags_of_some_of_the_gpus(tmp_path: Path) -> None:
    """Of three GPUs the two fast ones divide; llama.cpp is told which."""
    graph, cluster = model(tmp_path, experts=4), quick(1e11, 1e10, 1e11)
    found = plan_llamacpp(Question(graph, cluster))
    assert found.placement.splits == (Split((1, 3)),)
    flags = flags_of(graph, found.placement, cluster)
    told = {option.name: option.value for option in flags.options()}
    assert told["--split-mode"] == "tensor"
    assert told["--tensor-split"] == "1,1"
    assert told["--device"] == "CUDA0,CUDA2"
    assert told["--flash-attn"] == "on"
    assert told["--n-gpu-layers"] == "4"
    assert "--override-tensor" not in told


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": 1}, "divide some of the blocks"), ({"devices": (0, 2)}, "a processor computes"),
        ({"embedding": 1}, "keeps token_embd on the CPU"), ({"experts": True}, "whole experts"),
    ],
)  # fmt: skip
def test_splits_that_the_flags_cannot_say(change: dict, message: str, tmp_path: Path) -> None:
    graph, cluster = model(tmp_path, experts=4), quick(1e11, 1e11)
    slots, first = slots_of(graph), change.get("devices", (1, 2))[0]
    device = np.full(graph.num_ops, first)
    device[graph.is_io] = 0
    device[slots.embedding] = change.get("embedding", 0)
    device[slots.layers[0]] = 0 if "device" in change else first
    split = Split(change.get("devices", (1, 2)), experts=change.get("experts", False))
    placement = make_placement(graph, cluster, device, splits=(split,))
    with pytest.raises(PlacementError, match=message):
        flags_of(graph, placement, cluster)


def test_models_that_llama_cpp_does_not_divide(tmp_path: Path) -> None:
    assert not why_no_tensor_split(model(tmp_path))
    packed = load(f"{tmp_path / 'm.gguf'}?decode&cache=q5_1")
    assert "no cache of q5_1" in why_no_tensor_split(packed)
    latent = model(
        tmp_path, layers=1, kind="F16", extra={"attn_v_b.weight": (4, 64, 64)}
    )  # of each head
    with pytest.raises(ModelError, match="latent attention"):
        division_of(latent)
    assert "latent attention" in why_no_tensor_split(latent)


def test_shares_are_whole_parts() -> None:
    assert _rounded([2.0, 1.0], 8) == (5, 3)
    assert _rounded([100.0, 1.0], 4) == (3, 1)
    assert _rounded([1.0, 1.0, 1.0], 2) == ()


def test_a_split_is_kept_in_files_and_exported(tmp_path: Path) -> None:
    path, cluster = write_gguf(tmp_path / "m.gguf", keys=4), tmp_path / "box.toml"
    write_cluster(quick(1.6e11, 1e11), cluster)
    placed, out = tmp_path / "p.json", tmp_path / "out"
    words = [str(path), "--generate", "prompt=64,new=16", "--cluster", str(cluster)]
    runner = CliRunner()
    done = runner.invoke(cli, ["place", *words, "--for", "llamacpp", "-o", str(placed)])
    assert done.exit_code == 0, done.output
    assert "compute each op together" in done.output
    (split,) = load_placement(placed).splits
    assert split.shares
    done = runner.invoke(
        cli,
        ["export", str(placed), "--model", *words, "--to", "llamacpp", "-o", str(out), "--json"],
    )
    assert done.exit_code == 0, done.output
    shares = ",".join(map(str, split.shares))
    assert f"--split-mode tensor --tensor-split {shares}" in json.loads(done.stdout)["arguments"]
    for told in (
        ["explain", str(placed), "--model", *words],
        ["simulate", words[0], str(placed), *words[1:]],
    ):
        done = runner.invoke(cli, told)
        assert done.exit_code == 0, done.output


def test_micro_batches_go_through_gpus_as_a_pipeline(tmp_path: Path) -> None:
    """Four micro-batches and ops of a second: the slower stage counts for each, the other once."""

    def costs(graph: OpGraph, cluster: Cluster) -> np.ndarray:
        return np.ones((graph.num_ops, cluster.num_devices))

    graph, cluster = model(tmp_path, "sequence=2048"), quick(1e11, 1e11)
    slots, device = slots_of(graph), np.full(graph.num_ops, 2)
    device[graph.is_io] = device[slots.embedding] = 0
    device[slots.layers[0]] = 1

    def saved(where: np.ndarray, splits: tuple[Split, ...] = ()) -> float:
        placement = make_placement(graph, cluster, where, splits=splits)
        return saved_s(prepare_placement(Question(graph, cluster, costs=costs), placement))

    # The embedding, and ten ops of the first block: sums are fused with the products before them.
    assert saved(device) == pytest.approx(OVERLAPS * 3 / 4 * 11)
    assert saved(np.where(device == 1, 2, device)) == 0.0
    assert saved(np.where(device == 1, 0, device)) == 0.0
    whole = np.where(device == 2, 1, device)
    assert saved(whole, (Split((1, 2)),)) == 0.0
    question = Question(graph, cluster)
    result = solve.evaluate(question, make_placement(graph, cluster, device))
    (note,) = _pipelined(result, ()).notes
    assert note.startswith("micro-batches of the prompt go through the GPUs as a pipeline")


def test_a_micro_batch_of_another_size(tmp_path: Path) -> None:
    """Experts go to the GPU once for each; the flags say the size, and a batch that holds it."""
    path = write_gguf(tmp_path / "m.gguf", experts=4)
    small, large = (load(f"{path}?sequence=8192&ubatch={n}") for n in (512, 4096))
    assert small.chunks.max() == 16
    assert large.chunks.max() == 2
    products = np.array([kind == "MatMul" for kind in small.op_types])
    sent = [float(sent_bytes(graph)[products].sum()) for graph in (small, large)]
    assert sent[0] / sent[1] == pytest.approx(8, rel=1e-3)
    cluster = box(256 * MIB)
    flags = flags_of(large, plan_llamacpp(Question(large, cluster)).placement, cluster)
    told = {option.name: option.value for option in flags.options()}
    assert (told["--ubatch-size"], told["--batch-size"]) == ("4096", "4096")
    with pytest.raises(ModelError, match="ubatch must be a positive whole number"):
        load(f"{path}?ubatch=none")


@pytest.mark.parametrize("rates", [(1e11, 1e11), (2e11, 1e11), (1e11, 1e11, 2e11)])
def test_the_plan_is_the_best_as_a_pipeline(rates: tuple[float, ...], tmp_path: Path) -> None:
    """Against every row of whole blocks on GPUs: C micro-batches through stages of s seconds take
    sum(s) / C + (C - 1) / C max(s), steps their sum."""
    path = write_gguf(tmp_path / "m.gguf", layers=6)
    graph, cluster = load(f"{path}?prompt=4096&new=2&ubatch=512"), quick(*rates, size=99 * MIB)
    found = plan_llamacpp(Question(graph, cluster))

    def piped_s(placement: Placement) -> float:
        score = solve.simulate(found.question, placement)
        return score.value_s - saved_s(prepare_placement(found.question, placement))

    blocks = np.concatenate(slots_of(graph).layers)
    rows = [placed for placed in sayable(graph, cluster) if placed.device[blocks].all()]
    best_s = min(map(piped_s, rows))
    taken_s = found.value_s if found.placement.splits else piped_s(found.placement)
    assert taken_s <= best_s * 1.01


def test_the_answer_has_the_seconds_of_the_pipeline(tmp_path: Path) -> None:
    """Its first token and its request end sooner than the schedule by what the pipeline saves."""
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', layers=6)}?prompt=4096&new=2&ubatch=512")
    cluster = quick(1e11, 1e11, size=99 * MIB)
    question, slots = Question(graph, cluster), slots_of(graph)
    device = np.where(graph.is_io, cluster.host, 0)
    for slot, (layer, experts) in enumerate(zip(slots.layers, slots.experts, strict=True)):
        device[layer] = device[experts] = 1 + slot // 4
    placement = make_placement(graph, cluster, device)
    saved = saved_s(prepare_placement(question, placement))
    score, answer = solve.simulate(question, placement), generation_of(question, placement)
    assert saved > 0.2 * score.value_s
    assert answer.request_s == pytest.approx(score.value_s - saved)
    assert answer.request_s == pytest.approx(answer.first_token_s + 2 * answer.token_s, rel=0.01)
    assert all(sum(part.share for part in parts) <= 1 + 1e-9 for parts in answer.shares)
