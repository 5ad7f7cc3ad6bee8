"""Memory that vLLM takes inside its share of a GPU beside weights, caches and activations.

`--gpu-memory-utilization` is a share of the memory that CUDA reports. Before vLLM gives the rest of
it to caches, it takes away what it measured (`determine_available_memory` of
`vllm/v1/worker/gpu_worker.py`, 0.33): weights and what is not PyTorch's, the peak of a pass of
`max_num_batched_tokens` tokens and of the sampler after it (`profile_run`), and the CUDA graphs,
whose memory two captures of each kind estimate (`profile_cudagraph_memory`, since 0.21).
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Int

from gdp.base.errors import PlacementError
from gdp.cluster.reserve import GIB, LEAST_BYTES
from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.graph.op_graph import OpGraph
from gdp.methods.chain import layer_row
from gdp.ops.vllm import sequences_of
from gdp.question.models import HF_PREFIX, spec_of
from gdp.question.question import Question

UNSEEN_BYTES = GIB // 2
"""Less that CUDA reports than the driver does: 0.42 to 0.75 GiB on cards of 24 to 141 GB (logs of
`benchmarks/measured/kv_room.csv`; 79.18 of 79.65 GiB on an H100)."""
CONTEXT_BYTES = int(0.25 * GIB)
"""Kernels and workspaces that are loaded after the context: 0.13 to 0.3 GiB on one GPU there."""
SEVERAL_BYTES = int(0.5 * GIB)
"""Buffers of NCCL and of vLLM's own all-reduce, where GPUs work together."""
LOGIT_BYTES = 12
"""Bytes of one logit of one sequence in the sampler: of the model's type, in 32 bits, as a
probability and in part as a copy. 10 to 14 by the attention backend and the sampler; the PyTorch
sampler of versions before 0.16 took 38."""
GRAPH_BYTES = int(0.2 * (1 << 20))
"""Of one layer in one captured graph: 0.17 to 0.28 MiB in logs that name the number of graphs."""


def captured_graphs(sequences: int) -> int:
    """CUDA graphs that vLLM captures: one for each size of mixed passes, and one for each of
    decoding alone (`FULL_AND_PIECEWISE`; `_set_cudagraph_sizes` of `vllm/config/vllm.py`).

    >>> captured_graphs(256), captured_graphs(1024), captured_graphs(128)
    (86, 102, 54)
    """
    most = min(2 * sequences, 512)
    sizes = [1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16)]
    return len(sizes) + sum(size <= sequences for size in sizes)


def kept_bytes(question: Question, gpus: int, stages: int = 1) -> int:
    """Bytes that vLLM takes of each GPU inside its share, beside what a plan counts; 0 for models
    that are no configurations.

    Args:
        question: Of a model as vLLM computes it.
        gpus: GPUs that may work together.
        stages: Stages that the layers are in: a GPU captures those of its own.
    """
    spec = spec_of(question.model or "")
    if not spec.startswith(HF_PREFIX):
        return 0
    from gdp.importers.huggingface.dtype import loaded_config

    read = loaded_config(spec)
    document, at_once = read.document, read.spec.max_num_batched_tokens
    words = (document.get("text_config") or document).get("vocab_size")
    if not at_once or not isinstance(words, int):
        return 0
    sequences = sequences_of(at_once)
    sampler = LOGIT_BYTES * sequences * words
    try:
        layers = layer_row(question.graph).num_layers
    except PlacementError:
        layers = 0
    graphs = GRAPH_BYTES * captured_graphs(sequences) * -(-layers // stages)
    apart = CONTEXT_BYTES + (SEVERAL_BYTES if gpus > 1 else 0)
    return UNSEEN_BYTES + apart + graphs + max(0, sampler - _most_at_once(question.graph))


def kept_by_device(question: Question, cluster: Cluster, stages: int = 1) -> Int[np.ndarray, "D"]:
    """Bytes that vLLM takes inside its share of each device of a cluster: of GPUs that compute, but
    for limits set by hand of so little that nothing else is kept of them either."""
    kept = np.zeros(cluster.num_devices, np.int64)
    room = kept_bytes(question, len(cluster.gpus), stages)
    for d in cluster.gpus:
        if LEAST_BYTES < cluster.devices[d].total_bytes < UNLIMITED_BYTES:
            kept[d] = room
    return kept


def without_kept(cluster: Cluster, question: Question, stages: int = 1) -> Cluster:
    """The cluster whose GPUs have the memory that vLLM leaves for a plan of `stages` stages."""
    kept, devices = kept_by_device(question, cluster, stages).tolist(), list(cluster.devices)
    for d, device in enumerate(devices):
        less = min(kept[d], device.memory_bytes - 1)
        devices[d] = replace(
            device, memory_bytes=device.memory_bytes - less,
            reserve_bytes=device.reserve_bytes + less,
        )  # fmt: skip
    return replace(cluster, devices=tuple(devices))


def _most_at_once(graph: OpGraph) -> int:
    """The most bytes of tensors that one op reads and writes: passes hold no less, and the sampler
    takes its memory after them."""
    made = np.bincount(graph.producer, graph.held_bytes, graph.num_ops)
    read = np.bincount(graph.use_op, graph.held_bytes[graph.use_tensor], graph.num_ops)
    return int((made + read)[~graph.is_io].max(initial=0))
