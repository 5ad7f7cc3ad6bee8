"""Weights that llama.cpp sends from a processor to a GPU for a prompt: seconds by hand."""

import numpy as np

from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.offload import SENT_BYTES, OpOffloadCosts, offloads, sends_weights
from gdp.graph.op_graph import OpDetail, OpGraph, make_graph

INF = np.inf


def box(*kinds: str, copied: float = 0.0) -> Cluster:
    """A processor of 1 FLOP/s and quick devices behind links of 1 byte/s and half a second; copies
    in its memory may be slower."""
    devices = [Device("cpu", "cpu", {"default": 1.0}, 1e9, copy_bytes_per_s=copied)]
    devices += [Device(f"d{i}", kind, {"default": 1e9}, 1e9) for i, kind in enumerate(kinds)]
    return make_cluster("box", devices, default_bytes_per_s=1.0, default_latency_s=0.5)


def products(flop: tuple[float, float, float], kept: int | None = None) -> OpGraph:
    """A dense product of 10 bytes of weights, experts of 20 bytes, and one more that is dense; each
    makes 4 bytes for the next. One may be kept on the processor."""
    scopes = ("blk.0", "blk.0.experts", "blk.1")
    return make_graph(
        "products", [*"abc"], ["MatMul"] * 3, [(i, 4) for i in range(3)], [(0, 1), (1, 2)],
        flop=flop, weight_bytes=[10, 20, 10], scope=scopes,
        detail=[
            OpDetail(attributes={} if i == kept else {SENT_BYTES: float(size)})
            for i, size in enumerate((10, 20, 10))
        ],
    )  # fmt: skip


def test_weights_and_tensors_cross_the_link_and_come_back() -> None:
    """On the GPU the dense product takes 1 s, and its 10 bytes of weights and two latencies; the
    experts 2 s, 20 bytes and two latencies: tensors between them stay there. What the processor
    may not compute it may not send."""
    graph, seconds = products((1e3, 1e3, 1e3)), np.array([[50.0, 1.0], [70.0, 2.0], [INF, 3.0]])
    found = OpOffloadCosts(lambda *_: seconds)(graph, box("gpu"))
    assert found.tolist() == [[1 + 10 + 1, 1], [2 + 20 + 1, 2], [INF, 3]]


def test_tensors_that_the_processor_makes_are_sent_but_for_those_of_experts() -> None:
    seconds = np.array([[50.0, 1.0], [70.0, 2.0], [50.0, 3.0]])
    costs = OpOffloadCosts(lambda *_: seconds)
    after_dense = costs(products((1e3, 1e3, 1e3), kept=0), box("gpu"))
    assert after_dense[:, 0].tolist() == [50, 2 + 20 + 4 + 1, 3 + 10 + 1]
    unpinned = costs(products((1e3, 1e3, 1e3), kept=0), box("gpu", copied=0.5))
    assert unpinned[:, 0].tolist() == [50, 2 + 2 * 20 + 4 + 1, 3 + 2 * 10 + 1]  # weights alone
    after_experts = costs(products((1e3, 1e3, 1e3), kept=1), box("gpu"))
    assert after_experts[:, 0].tolist() == [1 + 10 + 1, 70, 3 + 10 + 1]


def test_experts_decide_where_there_are_any() -> None:
    """Sending 20 bytes pays for experts of 1000 s, and not for those of 1 s."""
    assert offloads(products((1.0, 1e3, 1.0)), box("gpu"))
    assert not offloads(products((1e3, 1.0, 1e3)), box("gpu"))


def test_lent_cores_are_sent_nothing() -> None:
    assert not sends_weights(box("rpc-core"))
    assert sends_weights(box("rpc-core", "gpu"))
    seconds = np.array([[50.0, 9.0, 1.0], [70.0, 9.0, 2.0], [50.0, 9.0, 3.0]])
    found = OpOffloadCosts(lambda *_: seconds)(products((1e3, 1e3, 1e3)), box("rpc-core", "gpu"))
    assert found[:, 0].tolist() == [1 + 10 + 1, 2 + 20 + 1, 3 + 10 + 1]
