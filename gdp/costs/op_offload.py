"""Weights on the processor that llama.cpp sends to a GPU for the tokens of a prompt.

A product whose weights lie on the processor is computed on the first GPU of its machine where at
least `OFFLOAD_TOKENS` tokens are computed at once: the weights go over the link for each
micro-batch, of experts those that the tokens chose (`--op-offload`, on by default). So are the ops
between such products, with flash attention and without: ggml's scheduler assigns them by no weight,
or offloads them as it does products, and expands the GPU over them
(`ggml_backend_sched_split_graph`); tensors stay there in between. Keys and values lie in the
processor's memory, so that each micro-batch copies those so far to the GPU, and its own ones back.

`--no-op-offload` computes all that on the processor, which is faster where the link is slow: the
flag is for all products of a model, so that the quicker of the two is told for all.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from gdp.cluster.machines import machine_of
from gdp.cluster.types import Cluster
from gdp.costs.base import DerivedCosts, roofline
from gdp.costs.offload import unpinned_bytes_per_s
from gdp.graph.op_graph import OpGraph

SENT_BYTES = "sent_weight_bytes"
"""Attribute of an op that a GPU computes if it lies on a processor: bytes of weights and caches
that go over the link for it in one pass."""
LENT = "rpc-core"
"""Begins the kinds of cores that stand for GPUs over RPC, to which no weights are sent so."""
_NO_GPUS = (LENT, "npu")
"""Begin the kinds of devices to which no weights are sent so: op offload is one of GPU backends."""


@dataclass(frozen=True)
class OpOffloadCosts(DerivedCosts):
    """Costs of llama.cpp, whose processor sends weights to a GPU for a prompt where that is
    faster."""

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        seconds = self.base(graph, cluster)
        return _offloaded(graph, cluster, seconds) if offloads(graph, cluster) else seconds


def offloads(graph: OpGraph, cluster: Cluster) -> bool:
    """True where weights of a prompt are computed sooner on a GPU that they are sent to, by the
    roofline: of experts where there are any, as these are the weights that lie on a processor."""
    sends = is_sent(graph)
    experts = _of_experts(graph)
    moved = sends & experts if (sends & experts).any() else sends
    plain_s = roofline(graph, cluster)
    sent_s = _offloaded(graph, cluster, plain_s)
    here = [d for d, device in enumerate(cluster.devices) if device.is_cpu]
    return bool(sent_s[moved][:, here].sum() < plain_s[moved][:, here].sum())


def applies(cluster: Cluster) -> bool:
    """True where a processor has a GPU to send weights to."""
    return any(
        _gpu(cluster, d) is not None for d, device in enumerate(cluster.devices) if device.is_cpu
    )


def sent_bytes(graph: OpGraph) -> Float[np.ndarray, "N"]:
    """Weights of each op that llama.cpp would send from a processor to a GPU in one pass."""
    return np.array([float(d.attributes.get(SENT_BYTES, 0)) for d in graph.detail])  # pyright: ignore[reportArgumentType]


def is_sent(graph: OpGraph) -> Bool[np.ndarray, "N"]:
    """True for ops that a GPU computes where they lie on a processor."""
    return np.array([SENT_BYTES in d.attributes for d in graph.detail], dtype=bool)


def _of_experts(graph: OpGraph) -> Bool[np.ndarray, "N"]:
    return np.array([scope.endswith(".experts") for scope in graph.scope], dtype=bool)


def _gpu(cluster: Cluster, cpu: int) -> int | None:
    """The first GPU that a processor sends weights to."""
    return next(
        (
            d
            for d, device in enumerate(cluster.devices)
            if not device.is_cpu
            and not device.kind.startswith(_NO_GPUS)
            and machine_of(cluster, d) == cpu
        ),
        None,
    )


def _offloaded(
    graph: OpGraph, cluster: Cluster, seconds: Float[np.ndarray, "N D"]
) -> Float[np.ndarray, "N D"]:
    """Seconds of ops where processors send the weights of long batches away: the weights, the GPU's
    seconds and launch, and tensors that are made on the processor."""
    sent, goes, result = sent_bytes(graph), is_sent(graph), seconds.copy()
    made_here = ~goes[graph.producer] & ~_of_experts(graph)[graph.producer]
    tensors = np.bincount(
        graph.use_op, (graph.tensor_bytes * made_here)[graph.use_tensor], graph.num_ops
    )
    for cpu, device in enumerate(cluster.devices):
        gpu = _gpu(cluster, cpu) if device.is_cpu else None
        if gpu is not None:
            once_s = 2 * cluster.link_latency_s[cpu, gpu] + cluster.devices[gpu].dispatch_s
            each_s = np.where(sent > 0, once_s * graph.chunks, 0.0)
            # Weights lie where the file was read to; tensors of the scheduler in pinned memory.
            way_s = sent / unpinned_bytes_per_s(cluster, cpu, gpu)
            way_s += tensors / cluster.link_bytes_per_s[cpu, gpu]
            away_s = seconds[:, gpu] + way_s + each_s
            sends = goes & np.isfinite(seconds[:, cpu])
            result[:, cpu] = np.where(sends, away_s, seconds[:, cpu])
    return result
