"""Prompts of an engine that serves: passes of so many tokens, one call of experts, their pace."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tiny import plain_graph

from gdp.cluster.presets import device_preset
from gdp.cluster.types import make_cluster
from gdp.costs.measured.costs import PROMPT_PACE, MeasuredCosts
from gdp.costs.measured.graph import PASS_TOKENS, graph_kernels
from gdp.costs.measured.host import HOSTS
from gdp.costs.measured.kernels import KINDS
from gdp.graph.op_graph import OpDetail, OpGraph
from gdp.graph.request import DECODE, PREFILL, SINGLE, Request
from tests.costs.test_kernel_network import random_network

PASS = int(PASS_TOKENS)
CLUSTER = make_cluster("one", [device_preset("h100")])


def seconds(graph: OpGraph, *, served: bool = True) -> float:
    """Kernel seconds of a graph on an H100, under random weights of the network."""
    costs = MeasuredCosts(random_network(5), served=served)
    found = graph_kernels(graph, served=served)
    return float(costs.kernel_seconds(found, CLUSTER.devices[0]).sum())


def product(rows: int, n: int = 512, k: int = 256) -> OpGraph:
    """Rows times a matrix in 16 bits."""
    return plain_graph(
        1, [], op_types=["linear"], flop=[2.0 * rows * n * k],
        memory_traffic_bytes=[2.0 * (n * k + rows * (n + k))],
        detail=[OpDetail("bfloat16", ((rows, k), (n, k)), ((rows, n),))],
    )  # fmt: skip


def attention(sequences: int, length: int) -> OpGraph:
    """Prompts that attend: two heads of queries, one of keys."""
    query, keys = (sequences, 2, length, 64), (sequences, 1, length, 64)
    return plain_graph(
        1, [], op_types=["scaled_dot_product_attention"],
        flop=[4.0 * sequences * 2 * length**2 * 64],
        memory_traffic_bytes=[2.0 * sequences * length * 64 * (2 + 2 + 2)],
        detail=[OpDetail("bfloat16", (query, keys, keys), (query,))],
    )  # fmt: skip


def mixture(tokens: int, top: int, scope: str = "experts", hidden: int = 64) -> OpGraph:
    """Tokens that meet `top` of 16 experts each: gathered, multiplied twice, summed."""
    inner, experts, rows = 32, 16, tokens * top
    shapes = [
        (((tokens, hidden), (rows,)), ((rows, hidden),)),
        (((rows, hidden), (experts, hidden, 2 * inner)), ((rows, 2 * inner),)),
        (((rows, inner), (experts, inner, hidden)), ((rows, hidden),)),
        (((tokens, top, hidden),), ((tokens, hidden),)),
    ]  # fmt: skip
    used = min(experts, rows)
    return plain_graph(
        4, [(0, 1), (1, 2), (2, 3)], op_types=["index", "_grouped_mm", "_grouped_mm", "sum"],
        flop=[0.0, 4.0 * rows * hidden * inner, 2.0 * rows * hidden * inner, 1.0 * rows * hidden],
        memory_traffic_bytes=[
            4.0 * rows * hidden, 2.0 * (used * 2 * hidden * inner + rows * (hidden + 2 * inner)),
            2.0 * (used * hidden * inner + rows * (hidden + inner)), 2.0 * rows * hidden,
        ],
        scope=[scope] * 4, detail=[OpDetail("bfloat16", *own) for own in shapes],
    )  # fmt: skip


def test_rows_beyond_a_pass_take_several_passes() -> None:
    """Each reads the weights again: by hand three times the product of one pass. Outside of an
    engine it is one product."""
    assert seconds(product(3 * PASS)) == pytest.approx(3 * seconds(product(PASS)))
    assert seconds(product(PASS // 2)) < seconds(product(PASS))
    kernels = graph_kernels(product(3 * PASS), served=False)
    assert kernels.passes.tolist() == [1.0]
    eager = seconds(product(3 * PASS), served=False)
    assert eager != pytest.approx(3 * seconds(product(PASS), served=False), rel=1e-3)


def test_sequences_attend_in_the_pass_that_reads_them() -> None:
    """32 of 1,024 tokens fill four passes of eight; one that is longer than a pass is one kernel,
    and so is each of several."""
    assert seconds(attention(32, 1024)) == pytest.approx(4 * seconds(attention(8, 1024)))
    assert graph_kernels(attention(1, 4 * PASS), served=True).passes.tolist() == [1.0]
    assert seconds(attention(3, 2 * PASS)) == pytest.approx(3 * seconds(attention(1, 2 * PASS)))


@pytest.mark.parametrize("make", [product, lambda rows: attention(rows // 1024, 1024)])
def test_a_request_says_the_tokens_of_a_pass(make: Callable[[int], OpGraph]) -> None:
    """Four times as many take four times the seconds of one; without a number passes are those of
    vLLM on an H100."""
    one, four = (_asked(make(rows), 2048) for rows in (2048, 8192))
    assert graph_kernels(four, served=True).passes.tolist() == [4.0]
    assert seconds(four) == pytest.approx(4 * seconds(one))
    assert seconds(_asked(make(2 * PASS), 0)) == seconds(_asked(make(2 * PASS), PASS))


def _asked(graph: OpGraph, pass_tokens: int) -> OpGraph:
    return replace(graph, request=Request(8, 4, is_served=True, pass_tokens=pass_tokens))


@pytest.mark.parametrize("top", [1, 2, 8])
def test_a_call_of_experts_moves_each_token_once(top: int) -> None:
    """As in the tables that the network learned: 100 tokens of 64 numbers, read and written in 16
    bits, whatever the number of experts that they meet."""
    kernels = graph_kernels(mixture(100, top), served=True).kernels
    assert kernels.moved_bytes[1:3].tolist() == [0.0, (2 + 2) * 100 * 64]
    eager = graph_kernels(mixture(100, top), served=False).kernels
    assert eager.moved_bytes[1:3].tolist() == [2.0 * 100 * top * 128, 2.0 * 100 * top * 96]


def test_experts_of_no_scope_are_no_call() -> None:
    """Those of several layers would be one."""
    found = graph_kernels(mixture(100, 2, scope=""), served=True)
    assert found.block.tolist() == [-1] * 4
    assert found.kernels.moved_bytes[1] == 2.0 * 200 * 128


def test_experts_count_tokens_not_the_rows_that_they_meet() -> None:
    assert seconds(mixture(2 * PASS, 4)) == pytest.approx(2 * seconds(mixture(PASS, 4)))
    assert graph_kernels(mixture(PASS // 2, 4), served=True).passes.max() == 1.0
    assert graph_kernels(mixture(2 * PASS, 4), served=True).passes.max() == 2.0


@pytest.mark.parametrize(
    ("gpu", "tokens", "factor"),
    [("h100", 16, 1.0), ("h100", 17, 1.4), ("b200", 16, 1.4), ("b200", 17, 1.96)],
)
def test_an_old_engine_multiplies_experts_in_large_tiles(
    gpu: str, tokens: int, factor: float
) -> None:
    """vLLM 0.11, where a pass has more tokens than the 16 experts, and on Blackwell."""
    found = graph_kernels(mixture(tokens, 2), served=True)
    network, device = random_network(5), device_preset(gpu)
    new, old = (
        MeasuredCosts(network, served=True, host=HOSTS[name]).kernel_seconds(found, device)
        for name in ("vllm", "vllm-0.11")
    )
    assert old.sum() == pytest.approx(factor * new.sum())
    dense = graph_kernels(product(tokens), served=True)
    new, old = (
        MeasuredCosts(network, served=True, host=HOSTS[name]).kernel_seconds(dense, device)
        for name in ("vllm", "vllm-0.11")
    )
    assert (old == new).all()


def test_tiles_go_by_the_format_of_experts() -> None:
    """8 bits by block whatever the tokens, 8 bits by channel and 4 bits as they were measured."""
    one = graph_kernels(mixture(100, 2), served=True).kernels
    one = one.take(np.flatnonzero(one.kind == KINDS.index("experts"))[:1])
    tiles = HOSTS["vllm-0.11"].experts
    for bits, scaled, factor in (
        (8.0, 1.0, 1.9),
        (8.0, 0.0, 1.0),
        (4.0, 1.0, 1.0),
        (16.0, 0.0, 1.4),
    ):
        kernels = replace(one, stored_bits=np.array([bits]), block_scaled=np.array([scaled]))
        assert tiles.factors(kernels, np.array([True]), False) == [factor]
    assert tiles.factors(kernels, np.array([False]), False) == [1.0]
    dense = replace(kernels, kind=np.array([KINDS.index("product")]))
    assert tiles.factors(dense, np.array([False]), True) == [1.0]


@pytest.mark.parametrize(
    ("phase", "served", "pace"),
    [(PREFILL, True, PROMPT_PACE), (SINGLE, True, 1.0), (DECODE, True, 1.0), (PREFILL, False, 1.0)],
)
def test_prompts_of_an_engine_have_a_pace(phase: int, served: bool, pace: float) -> None:
    graph = replace(product(64), phase=np.array([phase], dtype=np.int8))
    costs = MeasuredCosts(random_network(5), served=served)
    cluster = make_cluster("one", [replace(CLUSTER.devices[0], dispatch_s=0.0)])
    own = float(costs(graph, cluster)[0, 0])
    assert own == pytest.approx(pace * seconds(product(64), served=served))
