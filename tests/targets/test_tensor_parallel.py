"""Ops divided in PyTorch: spans of every parameter, ranks that compute the uncut model's logits."""

import concurrent.futures
import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from generating_configs import generating_config

import gdp
from gdp.base.errors import MeasurementError, ModelError, PlacementError
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph
from gdp.measure.measuring import Measuring
from gdp.measure.request import RunRequest
from gdp.placement.placement import Placement, Split, make_placement
from gdp.question import solve
from gdp.question.models import load
from gdp.question.question import Question
from gdp.splits.sharding import in_whole_units
from gdp.targets.table import PLANNERS
from gdp.targets.tensor_parallel import runner
from gdp.targets.tensor_parallel.export import planned
from gdp.targets.tensor_parallel.shards import divided_evenly, tp_plan
from tests.decoders import Sizes, decoder

TEN_HEADS: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100,
    "hidden_size": 40, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 4,
    "num_attention_heads": 10, "num_key_value_heads": 10, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


def cores(slow: float = 1.0) -> Cluster:
    """Two cores, of which the second may be slower."""
    pair = [
        Device(f"core{i}", "cpu-core" if i == 0 else "cpu-slow", {"default": 1e11 / by}, 1e10 / by,
               1 << 34)
        for i, by in enumerate((1.0, slow))
    ]  # fmt: skip
    return make_cluster("pair", pair, default_bytes_per_s=1e12, default_latency_s=1e-7)


def written(config: dict[str, Any], folder: Path, request: str = "prompt=6&new=2") -> str:
    """The spec of a request to a configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}?{request}"


def split_of(graph: OpGraph, cluster: Cluster, shares: tuple[int, ...]) -> Placement:
    device = np.zeros(graph.num_ops, dtype=np.int64)
    return make_placement(graph, cluster, device, splits=(Split((0, 1), shares=shares),))


def plan_of(
    config: dict[str, Any], folder: Path, shares: tuple[int, ...], request: str = "sequence=6"
) -> dict[str, Any]:
    """The contents of shards.json, as it is read."""
    spec, cluster = written(config, folder, request), cores()
    graph = load(spec)
    plan, _, document = planned(spec, graph, split_of(graph, cluster, shares), cluster)
    (folder / "config.json").write_text(json.dumps(document))
    return json.loads(json.dumps(plan))


def test_shares_of_seven_and_three_tenths_are_whole_heads(tmp_path: Path) -> None:
    """Ten heads of 4, 80 columns, 100 tokens: all divide by tens."""
    plan = plan_of(TEN_HEADS, tmp_path, (7, 3), "prompt=6&new=2")
    spans = {
        name.removeprefix("model.layers.1."): (part["axis"], part["spans"])
        for name, part in plan["parameters"].items()
    }
    heads, columns = [[[0, 28]], [[28, 40]]], [[[0, 56]], [[56, 80]]]
    for name in "qkv":
        assert spans[f"self_attn.{name}_proj.weight"] == (0, heads)
    assert spans["self_attn.o_proj.weight"] == (1, heads)
    assert spans["mlp.gate_proj.weight"] == spans["mlp.up_proj.weight"] == (0, columns)
    assert spans["mlp.down_proj.weight"] == (1, columns)
    assert spans["lm_head.weight"] == spans["model.embed_tokens.weight"]
    assert spans["lm_head.weight"] == (0, [[[0, 70]], [[70, 100]]])
    assert plan["heads"]["model.layers.0.self_attn"] == [[7, 7], [3, 3]]
    assert plan["sums"][:2] == ["model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"]
    assert [rank["share"] for rank in plan["ranks"]] == [7, 3]


class Threads:
    """Collectives of ranks that are threads."""

    def __init__(self, count: int) -> None:
        self.barrier, self.count = threading.Barrier(count, timeout=20), count
        self.sent: dict[int, torch.Tensor] = {}
        self.rank = threading.local()

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.sent[self.rank.number] = tensor.clone()
        self.barrier.wait()
        everything = [self.sent[r] for r in range(self.count)]
        self.barrier.wait()
        return everything

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def all_gather(self, parts: list[torch.Tensor], tensor: torch.Tensor) -> None:
        for part, sent in zip(parts, self._exchange(tensor), strict=True):
            part.copy_(sent)


def computed(
    plan: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of the uncut model, and those of every rank, of two steps behind a prompt."""
    count = len(plan["ranks"])
    threads = Threads(count)
    monkeypatch.setattr(runner, "dist", threads)
    monkeypatch.setattr(runner, "FOLDER", folder)
    ids = torch.arange(6)[None] + 3
    tokens = [torch.tensor([[5]]), torch.tensor([[9]])]

    def filled(rank: int | None) -> Any:
        model = runner.build()
        runner.fill(model, runner.Drawn(), "cpu", None if rank is None else plan, rank or 0)
        return model

    def logits(model: Any, rank: int | None = None) -> torch.Tensor:
        if rank is not None:
            threads.rank.number = rank
            runner.divide(model, plan, rank, count)
        with torch.inference_mode():
            return runner.generate(model, ids, 2, tokens)[0]

    wanted, parts = logits(filled(None)), [filled(rank) for rank in range(count)]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return wanted, list(pool.map(logits, parts, range(count)))


@pytest.mark.parametrize(
    ("name", "shares"),
    [("ten heads", (7, 3)), ("llama", (1, 1)), ("qwen2", (1, 1)), ("qwen3", (1, 1)),
     ("gemma3", (1, 1)), ("mistral", (1, 1)), ("mixtral", (1, 1)),
     ("qwen3_moe", (1, 1))],
)  # fmt: skip
def test_ranks_compute_the_logits_of_the_uncut_model(
    name: str, shares: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, tied tables, norms of heads, windows, groups of heads, experts by columns."""
    config = TEN_HEADS if name == "ten heads" else generating_config(name)
    if name == "qwen3_moe":  # rows of 16 bytes, as kernels of experts want them
        config["moe_intermediate_size"] = 32
    plan = plan_of(config, tmp_path, shares)
    wanted, found = computed(plan, tmp_path, monkeypatch)
    assert float(wanted.std()) > 0.1
    for logits in found:
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)


def test_a_bias_of_rows_is_added_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TEN_HEADS | {"attention_bias": True, "mlp_bias": True}
    plan = plan_of(config, tmp_path, (7, 3))
    assert "model.layers.0.mlp.down_proj.bias" in plan["first_only"]
    wanted, found = computed(plan, tmp_path, monkeypatch)
    torch.testing.assert_close(found[1], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "why"),
    [("phi3", "queries, keys and values in one product"), ("olmo2", "or reads all of them"),
     ],
)  # fmt: skip
def test_modules_of_other_forms_are_refused_by_name(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=rf"'model\.layers\.\d.*{why}"):
        plan_of(generating_config(name), tmp_path, (1, 1))


def test_placements_that_no_group_of_ranks_computes_are_refused(tmp_path: Path) -> None:
    spec, cluster = written(TEN_HEADS, tmp_path), cores()
    graph = load(spec)
    whole = split_of(graph, cluster, (7, 3))
    device = np.where(np.arange(graph.num_ops) == graph.num_ops // 2, 1, 0)
    cases = [
        (replace(whole, splits=()), "0 groups of devices"),
        (replace(whole, splits=(Split((0, 1), experts=True),)), "whole experts"),
        (make_placement(graph, cluster, device, splits=whole.splits), "is on 'core1' alone"),
    ]
    for placement, why in cases:
        with pytest.raises(PlacementError, match=why):
            planned(spec, graph, placement, cluster)
    step = written(TEN_HEADS, tmp_path, "sequence=8&decode")
    with pytest.raises(PlacementError, match="one step alone"):
        planned(step, load(step), split_of(load(step), cluster, (1, 1)), cluster)


def test_equal_parts_have_the_styles_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM
    from transformers.models.llama.configuration_llama import LlamaConfig

    from gdp.importers.huggingface.model import huggingface_model
    from gdp.targets.tensor_parallel.shards import shards_of

    spec = written(TEN_HEADS, tmp_path)
    graph, model = load(spec), huggingface_model(spec, whole=False).model
    even, uneven = (shards_of(graph, Split((0, 1), shares=s), model) for s in ((), (7, 3)))
    own = {f"model.{k}": v for k, v in (LlamaConfig().base_model_tp_plan or {}).items()}
    theirs = own | (LlamaForCausalLM._tp_plan or {})
    theirs["model.embed_tokens"] = "embedding_rowwise"
    assert tp_plan(even) == theirs
    assert divided_evenly(even)
    assert not divided_evenly(uneven)


def test_the_planner_gives_the_faster_core_more_heads() -> None:
    graph = decoder(Sizes(heads=10, keys=10, head=32, hidden=320, inner=640, vocabulary=1000))
    cluster = cores(slow=2.3)
    question = Question(graph, cluster, costs=roofline, target="tensor-parallel")
    result = PLANNERS["tensor-parallel"].plan(question)
    found = {
        heads: solve.simulate(question, split_of(graph, cluster, (heads, 10 - heads))).value_s
        for heads in range(1, 10)
    }
    assert result.placement.splits[0].parts == (min(found, key=lambda h: found[h]), 3)
    assert result.value_s == min(found.values())
    assert "core0+core1 as 7:3" in result.notes[-1]


def test_heads_move_until_memory_holds_them() -> None:
    """Cores are alike, but one holds three heads at most: 7:3, where equal shares do not fit."""
    graph = decoder(Sizes(heads=10, keys=10, head=32, hidden=320, inner=640, vocabulary=1000))
    cluster = cores()
    held = solve.simulate(
        Question(graph, cluster, costs=roofline), split_of(graph, cluster, (7, 3))
    ).peak_bytes
    first, second = cluster.devices
    cluster = replace(cluster, devices=(first, replace(second, memory_bytes=int(held[1]))))
    small = replace(cluster.devices[0], memory_bytes=int(held[0]))
    cluster = replace(cluster, devices=(small, cluster.devices[1]))
    result = PLANNERS["tensor-parallel"].plan(Question(graph, cluster, costs=roofline))
    assert result.placement.splits[0].parts == (7, 3)


def test_where_links_are_slow_one_device_has_everything() -> None:
    graph = decoder(Sizes(heads=10, keys=10))
    slow = replace(cores(), link_latency_s=np.array([[0.0, 1.0], [1.0, 0.0]]))
    result = PLANNERS["tensor-parallel"].plan(Question(graph, slow, costs=roofline))
    assert result.placement.splits == ()
    assert "no division among devices is faster" in result.notes[-1]


@pytest.mark.parametrize("host", [0, 1])
def test_each_device_alone_is_a_candidate(host: int) -> None:
    graph = decoder(Sizes(heads=10, keys=10))
    question = Question(graph, replace(cores(), host=host), costs=roofline)
    names = {row.method for row in PLANNERS["tensor-parallel"].plan(question).candidates}
    assert names >= {"all on core0", "all on core1"}


def test_a_model_too_large_for_each_device_is_divided() -> None:
    graph = decoder(Sizes(heads=10, keys=10))
    held = int(graph.weight_bytes[graph.weight_holders()].sum())
    cluster = cores()
    small = [replace(d, memory_bytes=int(0.8 * held)) for d in cluster.devices]
    cluster = replace(cluster, devices=tuple(small))
    result = PLANNERS["tensor-parallel"].plan(Question(graph, cluster, costs=roofline))
    assert result.placement.splits
    assert "no device alone has memory" in result.notes[-1]


def test_a_row_of_fit_says_the_shares_and_no_gap_without_a_bound(tmp_path: Path) -> None:
    from gdp.api.fit import fit
    from gdp.cli.fit import fit_text

    spec = written(TEN_HEADS | {"hidden_size": 320, "head_dim": 32}, tmp_path).partition("?")[0]
    (row,) = fit(spec, [cores(2.3)], prompts=(64,), new=2, target="tensor-parallel", costs=roofline)
    assert row.layout == "tensor 2 (7:3)"
    assert row.gap is None
    assert " -  " in fit_text([row])


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (5.0, 1.0, 1.0), (1e9, 1.0, 1.0)])
def test_heads_are_dealt_out_whole_and_everyone_has_one(speeds: tuple[float, ...]) -> None:
    for heads in (3, 4, 8, 13):
        own = in_whole_units(speeds, heads)
        assert sum(own) == heads
        assert min(own) >= 1
        assert list(own) == sorted(own, reverse=True)


def test_unlike_shares_are_executed_with_equal_outputs(tmp_path: Path) -> None:
    """`gdp run`: two processes on a core each, with 7 and 3 heads."""
    spec, cluster = written(TEN_HEADS, tmp_path), gdp.Cluster.load("2xcpu-core")
    graph = load(spec)
    report = gdp.run(
        spec, cluster, split_of(graph, cluster, (7, 3)), measuring=Measuring(seconds=0.2)
    )
    assert report["outputs_equal"]
    assert 0 < report["max_relative_diff"] < 1e-4
    assert [row["device"] for row in report["segments"]] == ["core0, core1"] * 2
    assert report["predicted_latency_s"] > 0
    assert "an all-reduce of 160 B takes" in report["note"]
    assert set(report["baselines"]) == {"single_device", "runtime_default"}


def run_script(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
    """The JSON line that a program of an export prints."""
    command = [sys.executable, *launcher, str(folder / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-2000:]
    return json.loads(lines[-1])


@pytest.mark.slow
def test_exported_programs_run_a_checkpoint(tmp_path: Path) -> None:
    """run.py of unlike shares, and both programs of equal ones, from one checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TEN_HEADS)).save_pretrained(tmp_path / "weights")
    spec, cluster = written(TEN_HEADS, tmp_path), gdp.Cluster.load("2xcpu-core")
    graph, weights = load(spec), str(tmp_path / "weights")
    tokens = []
    for name, shares in (("unlike", (7, 3)), ("equal", ())):
        files = gdp.export(
            split_of(graph, cluster, shares), spec, "tensor-parallel", tmp_path / name, cluster
        )
        names = {path.name for path in files}
        assert ("tp_plan.json" in names) == (name == "equal")
        told = run_script(tmp_path / name, "run.py", "--weights", weights, "--rounds", "1")
        assert told["outputs_equal"]
        tokens.append(told["tokens"])
    assert tokens[0] == tokens[1]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    told = run_script(tmp_path / "equal", "tp_run.py", "--weights", weights, launcher=torchrun)
    assert told["outputs_equal"]


def test_a_checkpoint_without_a_parameter_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"other": torch.zeros(2)}, tmp_path / "model.safetensors")
    held = runner.Checkpoint(tmp_path)
    with pytest.raises(SystemExit, match=r"no parameter 'model\.norm\.weight'"):
        held.read(["model.norm.weight"], torch.zeros(2), None)
    with pytest.raises(SystemExit, match=r"holds no \.safetensors file"):
        runner.Checkpoint(tmp_path / "nothing")


def test_python_models_are_not_divided_by_gdp_run() -> None:
    from types import SimpleNamespace

    from gdp.targets.tensor_parallel.run import run_divided

    graph = decoder()
    request = RunRequest(
        SimpleNamespace(name="python:m:f"), graph, cores(), np.zeros(graph.num_ops, np.int64),
        splits=(Split((0, 1)),),
    )  # fmt: skip
    with pytest.raises(ModelError, match="python:m:f: only models of a configuration"):
        run_divided(request)


def test_a_rank_that_ends_is_told_with_its_last_line(tmp_path: Path) -> None:
    from gdp.targets.tensor_parallel.run import Ranks

    (tmp_path / "run.py").write_text("import sys\nsys.exit('no memory for the weights')\n")
    ranks = Ranks(tmp_path, 2, [[0], [0]])
    try:
        with pytest.raises(MeasurementError, match=r"exit code 1: no memory for the weights"):
            ranks.start()
    finally:
        ranks.close()
