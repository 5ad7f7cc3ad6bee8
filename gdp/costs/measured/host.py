"""The host's part of a step of engines that serve, and their sampler.

A step takes longer than the kernels of its model and their collectives:

    step + rank * (GPUs of a group - 1) + sequence * sequences + logit * logits of all sequences

seconds. Steps of a draft model lie within those of another one and have none of it. The
first is for the scheduler, the inputs and the launch of a recorded graph; the second
as members of a group wait for the latest; the third is done for each sequence by Python. Where an
engine prepares a pass while the one before it runs, little of these is left. The last is the
sampler on the GPU, of which no table of kernels tells: top-p of requests, as most checkpoints ask
for in `generation_config.json`. Each indexer of sparse attention takes the engine's own small
kernels besides, in every pass.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from gdp.cluster.presets import presets
from gdp.cluster.types import Device
from gdp.costs.measured.kernels import KINDS, Kernels
from gdp.graph.op_graph import SAMPLING_OPS, OpGraph
from gdp.graph.sparse import INDEXER


def _family(device: Device) -> str:
    preset = presets().get(device.kind)
    return preset.family if preset is not None else ""


def is_blackwell(device: Device) -> bool:
    """True for a preset of the family whose libraries are further from its fastest kernels."""
    return _family(device) == "Blackwell"


class Tiles(NamedTuple):
    """Factors of the seconds of experts, where an engine multiplies them in tiles of 64 rows unless
    somebody tuned the shape, over those of the newer kernels that were measured."""

    half: float = 1.0  # 16 bits, where a pass has more tokens than the GPU has experts
    blocks: float = 1.0  # 8 bits with a scale for each block
    blackwell: float = 1.0  # 16 bits there, beside the first

    def factors(
        self, kernels: Kernels, exceeds: Bool[np.ndarray, "K"], blackwell: bool
    ) -> Float[np.ndarray, "K"]:
        """Of kernels, those of experts among them."""
        experts = kernels.kind == KINDS.index("experts")
        half = np.where(exceeds, self.half, 1.0) * (self.blackwell if blackwell else 1.0)
        own = np.where(kernels.stored_bits == 16, half, 1.0)
        own = np.where((kernels.stored_bits == 8) & (kernels.block_scaled > 0), self.blocks, own)
        return np.where(experts, own, 1.0)


class Host(NamedTuple):
    """Seconds of a step of one engine."""

    step_s: float
    sequence_s: float
    logit_s: float
    experts: Tiles = Tiles()
    indexer_s: float = 0.12e-3  # of each, in a pass
    all_reduce: str = "vllm"  # one of `gdp.costs.measured.kernels.ENGINES`
    is_bounded: bool = False  # NCCL adds up what is larger than `own_reduce_bytes`

    def seconds(self, sequences: int, logits: float) -> float:
        """Seconds of a step of so many sequences, with so many logits of all of them."""
        return self.step_s + self.sequence_s * sequences + self.logit_s * logits


OWN_REDUCE_BYTES: Mapping[tuple[str, int], int] = {
    ("Hopper", 8): 2**18, ("Blackwell", 2): 2**21, ("Blackwell", 4): 2**21, ("Blackwell", 8): 2**20
}  # fmt: skip
"""Bytes from which on vLLM's own all-reduce gives way, by family of GPUs and their number:
`CUSTOM_ALL_REDUCE_MAX_SIZES` of its `all_reduce_utils.py`; 8 MiB elsewhere (`CustomAllreduce`)."""
RANK_S = 0.05e-3
"""Seconds for each further GPU of a group. From two to eight H100, steps of Qwen3 32B miss 0.1 ms
more in vLLM 0.12, 1.0 ms in SGLang and 0.4 ms in TensorRT-LLM; in vLLM 0.19 nothing more."""
ENGINE = "vllm"
"""Default row of plans."""
HOSTS: Mapping[str, Host] = {
    ENGINE: Host(0.9e-3, 5e-6, 1e-11),
    "vllm-0.11": Host(1.3e-3, 0.0, 1.4e-10, Tiles(1.4, 1.9, 1.4), is_bounded=True),
    "vllm-sync": Host(1.9e-3, 34e-6, 1.4e-10),
    "sglang": Host(0.8e-3, 5e-6, 0.0, indexer_s=0.01e-3, all_reduce="sglang"),
    "trtllm": Host(0.0, 0.0, 0.0, indexer_s=0.03e-3, all_reduce="trtllm"),
    "trtllm-1.0": Host(0.7e-3, 18e-6, 0.0, indexer_s=0.03e-3, all_reduce="trtllm"),
}  # fmt: skip
"""Engines, by their names in `--costs`, with the rows of measured steps that they are fitted to
(residuals beside gdp's kernels and collectives; 2026-11-28):

- vllm: 0.16 to 0.19 with asynchronous scheduling, the default since 0.14; 20 rows of MiniMax M2.5
  under 4 and 64 requests, which sample greedily. Logits: FlashInfer's sampler, 0.14 ms for 128 x
  131,072 (vllm-project/vllm#40376).
- vllm-0.11: with `--async-scheduling`; 22 rows of ML.ENERGY of Gemma 3 12B and 27B and gpt-oss-120b
  on one and two H100 and B200. Logits fit 1.4e-10 s, and sorting them takes 2.32 ms for 128 x
  131,072 by that pull request: 1.38e-10 s. Experts: chosen by hand on 22 rows of Qwen3 235B-A22B
  in 16 bits, up to 512 requests, and 23 in 8; `get_default_config` of its `fused_moe.py` takes the
  tiles. On B200 16-bit experts of vLLM 0.19 and 0.22 take 1.3 to 1.8 times those of 0.24 (tables of
  AIConfigurator 0.12).
- vllm-sync: 0.12 without it; six rows of Qwen3 32B on two, four and eight H100 under 16 and 128
  requests.
- sglang: seven rows of the same model, 0.5.1 and 0.5.8. trtllm-1.0: eight, 1.0.0rc3.
- trtllm: later ones; steps of Llama 3.1 70B leave nothing (189 rows).

Indexers: chosen by hand by modules of GLM-5 with 8 heads a GPU beside gdp's other kernels of them,
1 to 256 sequences (AIConfigurator 0.12). vLLM 0.24 takes 0.10 to 0.19 ms more on B200 and 0.04 to
0.15 on H200, SGLang 0.5.14 next to nothing on either, TensorRT-LLM 1.3 0.02 to 0.06 on B200 and 0.2
on H200.
"""


def host_of(costs: object) -> Host:
    """The row that a question's costs name, else that of `ENGINE`."""
    return HOSTS[costs if isinstance(costs, str) and costs in HOSTS else ENGINE]


def own_reduce_bytes(device: Device, count: int) -> int:
    """Bytes from which on so many of these GPUs add up by NCCL, see `OWN_REDUCE_BYTES`."""
    return OWN_REDUCE_BYTES.get((_family(device), count), 2**23)


def host_s(graph: OpGraph, host: Host) -> Float[np.ndarray, "N"]:
    """Seconds that an engine adds to each op of a request: to the sampling op of a step, and to
    indexers in every pass."""
    request, last = graph.request, graph.op_index.get(SAMPLING_OPS[1])
    if request is None or last is None:
        return np.zeros(graph.num_ops)
    indexes = np.array([INDEXER in detail.attributes for detail in graph.detail])
    (tensor, *_) = graph.use_tensor[graph.use_op == last]
    wide = graph.detail[int(graph.producer[tensor])].dtype == "float32"
    logits = float(graph.tensor_bytes[tensor]) / (4 if wide else 2)
    of_step = _at_sampling(graph, host.seconds(request.batch, logits))
    return of_step + host.indexer_s * indexes * graph.chunks


def ranks_s(graph: OpGraph, ranks: int) -> Float[np.ndarray, "N"]:
    """Seconds that it adds more where so many GPUs compute each op together."""
    return _at_sampling(graph, RANK_S * (ranks - 1))


def _at_sampling(graph: OpGraph, seconds: float) -> Float[np.ndarray, "N"]:
    """Seconds at the sampling op of a step."""
    found, last = np.zeros(graph.num_ops), graph.op_index.get(SAMPLING_OPS[1])
    if last is not None and not (graph.request is not None and graph.request.is_draft):
        found[last] = seconds
    return found
