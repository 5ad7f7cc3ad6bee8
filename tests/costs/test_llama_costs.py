"""Kernels of llama.cpp: which there are in an op, and their seconds by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster
from gdp.costs.base import RuntimeOverheads, roofline
from gdp.costs.default import resolve_costs
from gdp.costs.llama_backends import READ, Memory
from gdp.costs.llamacpp import (
    BEFORE_JULY_2024,
    BOUNDARY_S,
    NEWEST,
    LlamaCosts,
    Style,
    graph_kernels,
)
from gdp.costs.measured.network import shipped_network
from gdp.graph.fuse import fuse, group_seconds
from gdp.graph.op_graph import OpGraph
from gdp.question.models import load
from tests.gguf_models import HEADS, INNER, KEY_HEADS, WIDTH, write_gguf

KEYS = WIDTH * KEY_HEADS // HEADS
PACKED = WIDTH * INNER // 256 * 144  # bytes of a feed-forward's matrix in Q4_K


def model(folder: Path, query: str, **sizes: int) -> OpGraph:
    """A model of small blocks."""
    return load(f"{write_gguf(folder / 'm.gguf', **sizes)}?{query}")  # pyright: ignore[reportArgumentType]


def op_seconds(graph: OpGraph, cluster: Cluster, costs: LlamaCosts) -> np.ndarray:
    """Seconds of fused ops on the last device, dispatch included."""
    fused = fuse(graph)
    seconds = group_seconds(fused, costs(graph, cluster))[:, -1]
    works = ~fused.graph.is_io
    return seconds + np.where(works, cluster.devices[-1].dispatch_s, 0.0)


def test_a_token_reads_packed_weights_once(tmp_path: Path) -> None:
    """The gate of a feed-forward: a kernel packs its input, a second one reads the weights; the
    last product also reads gate and up, and the residual stream is added."""
    graph = model(tmp_path, "decode&sequence=64")
    rows = dict(zip(graph.op_names, graph_kernels(graph, NEWEST, Style.INTEGERS), strict=True))
    assert rows["blk.0.ffn_gate"].moved == (WIDTH * 5.125, PACKED + 4 * (WIDTH + INNER))
    assert rows["blk.0.ffn_down"].moved[0] == 3 * 4 * INNER
    assert not any(row.products for row in rows.values())
    assert len(rows["blk.0.attn_q"].moved) == len(rows["blk.0.attn_k"].moved) == 3
    old = graph_kernels(graph, BEFORE_JULY_2024, Style.UNPACKED)
    count = {name: len(row.moved) for name, row in zip(graph.op_names, old, strict=True)}
    assert [count[f"blk.0.{op}"] for op in ("attn_norm", "attn_k", "attention", "ffn_down")] == [
        2, 4, 4, 4,
    ]  # fmt: skip


def test_a_token_takes_launches_and_bytes(tmp_path: Path) -> None:
    """By hand, where launches are free and where only they count."""
    graph, cluster = model(tmp_path, "decode&sequence=64"), cluster_preset("cpu+rtx3090")
    costs = LlamaCosts(None, roofline)
    gpu = cluster.devices[-1]
    seconds = dict(zip(fuse(graph).graph.op_names, op_seconds(graph, cluster, costs), strict=True))
    assert seconds["blk.0.ffn_gate"] == pytest.approx(2 * gpu.dispatch_s)  # both are tiny
    rows = graph_kernels(graph, NEWEST, Style.INTEGERS)
    at = graph.op_names.index("output")
    slow = replace(gpu, bytes_per_s=1e6, dispatch_s=0.0)
    (own,) = costs.kernel_seconds([rows[at]], slow)
    assert own == pytest.approx(sum(rows[at].moved) / (READ[Memory.GDDR] * 1e6))


def test_every_micro_batch_multiplies_again(tmp_path: Path) -> None:
    """Tokens of two micro-batches take twice the products of one; attention of the second one sees
    the keys of both."""
    one, two = (model(tmp_path, f"sequence={n}") for n in (512, 1024))
    cluster, costs = cluster_preset("cpu+a6000"), LlamaCosts(None, roofline)
    once, twice = (
        dict(zip(fuse(g).graph.op_names, op_seconds(g, cluster, costs), strict=True))
        for g in (one, two)
    )
    assert twice["blk.0.ffn_gate"] == pytest.approx(2 * once["blk.0.ffn_gate"])
    first, second = (g.detail[g.op_names.index("blk.0.attention")] for g in (one, two))
    assert first.input_shapes[1][2] == 512
    assert second.input_shapes[1][2] == (512 + 1024) // 2


@pytest.mark.parametrize(
    ("preset", "style", "per_flop"),
    [
        # int8 at 284 TFLOP/s, and four instructions of 35.6 TFLOP/s for 32 products
        ("rtx3090", Style.INTEGERS, 1 / 284e12 + 4 / 32 / 35.6e12),
        ("v100", Style.UNPACKED, 1 / 125e12),
        ("m3-max", Style.DIRECT, None),
    ],
)
def test_packed_weights_meet_a_prompt_in_the_way_of_the_device(
    preset: str, style: Style, per_flop: float | None, tmp_path: Path
) -> None:
    graph = model(tmp_path, "sequence=512", layers=1)
    costs = LlamaCosts(None, roofline)
    gpu = cluster_preset(preset).devices[-1]
    assert costs.style_of(gpu) == style
    row = graph_kernels(graph, NEWEST, style)[graph.op_names.index("blk.0.ffn_up")]
    (product,) = row.products
    assert (product.m, product.n, product.k) == (512, INNER, WIDTH)
    if style == Style.UNPACKED:  # once for reading packed and writing 16 bits, then read as these
        assert PACKED + 2 * WIDTH * INNER in row.moved
        assert product.held_bytes == 2 * WIDTH * INNER
    else:
        assert product.held_bytes == PACKED
    if per_flop is not None:
        wide = product._replace(m=1e6)  # so that arithmetic binds
        free = replace(gpu, dispatch_s=0.0)
        (own,) = costs.kernel_seconds([row._replace(moved=(), products=(wide,))], free)
        assert own == pytest.approx(2e6 * INNER * WIDTH * per_flop)


def test_experts_are_read_by_every_micro_batch(tmp_path: Path) -> None:
    graph = model(tmp_path, "sequence=1024", experts=4)
    row = graph_kernels(graph, NEWEST, Style.INTEGERS)[graph.op_names.index("blk.0.ffn_up_exps")]
    (product,) = row.products
    assert (product.kind, product.b, product.n, product.k) == ("experts", 4, INNER, WIDTH)
    assert product.b * product.m == 512 * 2  # two experts for each token
    assert product.held_bytes == pytest.approx(4 * PACKED, rel=1e-3)


@pytest.mark.parametrize("preset", ["rtx3060", "a100", "mi300x", "m2-max", "rtx5090"])
@pytest.mark.parametrize("query", ["decode&sequence=65536", "sequence=700"])
def test_no_op_is_faster_than_its_memory(preset: str, query: str, tmp_path: Path) -> None:
    """Whatever the network says: weights and caches are read at the device's bandwidth at most."""
    graph, shipped = model(tmp_path, query), shipped_network()
    assert shipped is not None
    alone = preset.startswith("m2")  # a GPU that shares its processor's memory
    cluster = cluster_preset(preset if alone else f"cpu+{preset}")
    fused = fuse(graph).graph
    seconds = op_seconds(graph, cluster, LlamaCosts(shipped[0], roofline))
    computes = np.array([kind in ("MatMul", "Attention") for kind in fused.op_types])
    least_s = fused.weight_bytes / cluster.devices[-1].bytes_per_s
    assert computes.sum() > 9
    assert (seconds >= least_s)[computes].all()
    assert np.isfinite(seconds[computes]).all()


def test_gguf_files_have_these_costs_on_presets(tmp_path: Path) -> None:
    graph = model(tmp_path, "decode&sequence=64")
    costs, told = resolve_costs(None, cluster_preset("cpu+h100"), graph)
    assert getattr(costs, "reads_unfused", False)
    assert "kernels of llama.cpp" in told
    assert "(h100, cuda)" in told
    _, told = resolve_costs("datasheet", cluster_preset("cpu+h100"), graph)
    assert "kernels of llama.cpp" not in told
    _, told = resolve_costs(None, cluster_preset("cpu"), graph)
    assert "kernels of llama.cpp" not in told


def test_the_scheduler_takes_its_time_between_gpus_of_a_machine(tmp_path: Path) -> None:
    """The way from one GPU to the next is later by a boundary, that to the processor as it was."""
    graph = model(tmp_path, "decode&sequence=64")
    cluster = cluster_preset("cpu+2xh100-pcie4")
    costs, _ = resolve_costs(None, cluster, graph)
    assert isinstance(costs, RuntimeOverheads)
    more = costs.with_runtime_overheads(cluster).link_latency_s - cluster.link_latency_s
    assert more == pytest.approx(np.array([[0, 0, 0], [0, 0, BOUNDARY_S], [0, BOUNDARY_S, 0]]))
    two = LlamaCosts(None, roofline).with_runtime_overheads(cluster_preset("cpu+t4"))
    assert (two.link_latency_s == cluster_preset("cpu+t4").link_latency_s).all()
