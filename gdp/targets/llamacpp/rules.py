"""Rules of llama.cpp, read in the source that llama-cpp-python carries: what it refuses to load."""

import itertools
from collections.abc import Sequence

import numpy as np

from gdp.cluster.types import Cluster
from gdp.graph.op_graph import ARCHITECTURE, OpGraph

VERSION = "llama-cpp-python 0.3.36"
"""Package whose `vendor/llama.cpp` was read."""
NO_TENSOR_SPLIT = frozenset((
    "bailingmoe3", "bitnet", "deepseek2", "deepseek32", "dots3note", "falcon-h1", "gemma3n",
    "glm-dsa", "glm5-next", "granitehybrid", "grok", "hy_v4", "jamba", "kimi-k3", "kimi-linear",
    "mamba", "mamba2", "minicpm3", "minimax-01", "minimax-m2", "minimax-m3", "mistral4", "mpt",
    "nemotron_h", "nemotron_h_moe", "olmo2", "olmoe", "plamo2", "qwen3tts", "qwen4exp", "t5",
))  # fmt: skip
"""`general.architecture` of files that it does not load with `--split-mode tensor`
(`llm_arch_supports_sm_tensor` of `src/llama-arch.cpp`)."""
MOST_GPUS = 15
"""Entries of `--tensor-split`: as many as `llama_max_devices()`, 16, are refused (`common/arg.cpp`,
`src/llama.cpp`)."""
RPC_SERVER = "ggml-rpc-server"
"""Program that lends GPUs (`tools/rpc/CMakeLists.txt`); `rpc-server` before."""


def no_tensor_split(graph: OpGraph) -> str:
    """Why llama.cpp does not load a model with a tensor split, in a sentence; "" where it does."""
    names = (detail.attributes.get(ARCHITECTURE) for detail in graph.detail)
    architecture = next((str(name) for name in names if name), "")
    if architecture not in NO_TENSOR_SPLIT:
        return ""
    return (
        f"llama.cpp ({VERSION}) loads no {architecture!r} with --split-mode tensor "
        "(llm_arch_supports_sm_tensor)"
    )


def leaves_one_without(parts: Sequence[int], keys: int) -> bool:
    """True where shares leave a GPU without a head of keys in some layer: llama.cpp cuts attention
    behind whole groups of the queries of one head, rounded down, and turns the shares by a GPU from
    layer to layer (`get_split_granularity`, `rotation` of `src/llama-model.cpp`). Its other ops
    would be there, and the attention of that layer on fewer GPUs.

    >>> leaves_one_without((1, 1), 2), leaves_one_without((1, 1, 1, 1), 2)
    (False, True)
    """
    for first in range(len(parts)):
        turned = [*parts[first:], *parts[:first]]
        ends = [0, *(keys * end // sum(parts) for end in itertools.accumulate(turned))]
        if any(a >= b for a, b in itertools.pairwise(ends)):
            return True
    return False


def with_known_gpus(cluster: Cluster) -> Cluster:
    """The cluster in which GPUs beyond those that flags can name compute nothing."""
    beyond = np.array([(n or 0) >= MOST_GPUS for n in cluster.accelerator_numbers])
    return cluster.idling(beyond) if beyond.any() else cluster
