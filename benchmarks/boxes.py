"""Language models on boxes that people own, each answer beside arithmetic by hand.

    python -m benchmarks.boxes [NAME ...]

A prompt of 2048 tokens is read and 256 are written. What is by hand shares no code with gdp: bytes
of weights from the sizes of the model and the bits of their types, seconds from bytes over the
bandwidth that the maker of a device names. Of a plan it takes what each device holds. Told are

- bytes of all weights, by gdp and by hand,
- a step, by gdp, and the least that reading weights (of experts those that a token chooses) and
  caches takes by hand: of devices one after the other, or all at once where they divide each op,
- what a network between two machines adds to a step: the numbers of a token, and its logits back.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

import gdp
from benchmarks.measured_world.llama import size_of, write_header
from gdp.api.generation import generation_answer
from gdp.base.errors import InfeasibleError
from gdp.question.result import GenerationAnswer

PROMPT, NEW = 2048, 256
GB_PER_S: Mapping[str, float] = {
    "rtx4090": 1008, "rtx3090": 936, "rtx3060": 360, "h100": 3350, "h200": 4800, "cpu": 89.6,
}  # fmt: skip
"""Bandwidth of memory as makers name it; of the processor two channels of DDR5-5600."""
Q4_K, Q6_K = 144 / 256, 210 / 256  # bytes of a weight: blocks of 256
NETWORKS = {"10-gbit": 1.25e9, "1-gbit": 1.25e8}
MACHINES = """
host = "a-cpu"
default_bytes_per_s = {}
default_latency_s = 100e-6
device = [{{name = "a-cpu", preset = "cpu"}}, {{name = "a-gpu", preset = "rtx4090"}},
          {{name = "b-cpu", preset = "cpu"}}, {{name = "b-gpu", preset = "rtx3090"}}]
link = [{{src = "a-cpu", dst = "a-gpu", bytes_per_s = 25e9}},
        {{src = "b-cpu", dst = "b-gpu", bytes_per_s = 25e9}}]
"""
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "llama-405b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
        "num_attention_heads": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "dtype": "bfloat16"},
    "deepseek-v3": {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "max_position_embeddings": 163840, "rope_theta": 10000, "dtype": "bfloat16"},
}  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """Bytes of a model by hand."""

    always: float  # that every token meets, the output among them
    embedding: float  # of which a token reads a row
    cache: float  # of one token, keys and values
    experts: float = 0.0
    used: float = 0.0  # share of the experts that a token chooses

    @property
    def all(self) -> float:
        """Of the whole model."""
        return self.always + self.embedding + self.experts


def llama_70b() -> Weights:
    """Q4_K_M: values and what leads down are finer in half of the layers."""
    attention, inner = 2 * 8192 * 8192 + 2 * 8192 * 1024, 8192 * 28672
    finer = 40 * (8192 * 1024 + inner)
    layers = 80 * (attention + 3 * inner) * Q4_K + finer * (Q6_K - Q4_K)
    words = 128256 * 8192
    return Weights(layers + words * Q6_K, words * Q4_K, 80 * 2 * 1024 * 2)


def qwen_30b() -> Weights:
    """Q4_K_M, 128 experts of which a token chooses 8; routers stay in 32 bits."""
    attention, inner = 2 * 2048 * 4096 + 2 * 2048 * 512, 128 * 2048 * 768
    always = 48 * (attention * Q4_K + 128 * 2048 * 4) + 24 * 2048 * 512 * (Q6_K - Q4_K)
    experts = 48 * 3 * inner * Q4_K + 24 * inner * (Q6_K - Q4_K)
    words = 151936 * 2048
    return Weights(always + words * Q6_K, words * Q4_K, 48 * 2 * 512 * 2, experts, 8 / 128)


def llama_405b() -> Weights:
    """8 bits; embedding and output in 16."""
    layer = 2 * 16384 * 16384 + 2 * 16384 * 1024 + 3 * 16384 * 53248
    words = 2 * 128256 * 16384
    return Weights(126 * layer + words, words, 126 * 2 * 1024 * 2)


def deepseek_v3() -> Weights:
    """8 bits; embedding and output in 16. Queries and keys are made of latents of 1536 and 512
    numbers, for 128 heads of 128 with 64 for positions; the first 3 layers have no experts."""
    queries = 7168 * 1536 + 1536 * 128 * 192
    attention = queries + 7168 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 7168
    expert, words = 3 * 7168 * 2048, 2 * 129280 * 7168
    always = 61 * attention + 58 * (expert + 2 * 7168 * 256) + 3 * 3 * 7168 * 18432 + words
    return Weights(always, words, 61 * (512 + 64) * 2, 58 * 256 * expert, 8 / 256)


@dataclass(frozen=True)
class Box:
    """A model on a machine."""

    model: str  # of `CONFIGS`, or of the table of GGUF models
    weights: Weights
    cluster: str  # a preset, or a key of `NETWORKS`


BOXES: Mapping[str, Box] = {
    "70b-two-cards": Box("llama 3 70B", llama_70b(), "cpu+rtx4090+rtx3090"),
    "experts-small-card": Box("Qwen3-30B", qwen_30b(), "cpu+rtx3060"),
    "70b-two-machines-10-gbit": Box("llama 3 70B", llama_70b(), "10-gbit"),
    "70b-two-machines-1-gbit": Box("llama 3 70B", llama_70b(), "1-gbit"),
    "405b-eight-h100": Box("llama-405b", llama_405b(), "cpu+8xh100-nvlink"),
    "deepseek-eight-h100": Box("deepseek-v3", deepseek_v3(), "cpu+8xh100-nvlink"),
    "deepseek-eight-h200": Box("deepseek-v3", deepseek_v3(), "cpu+8xh200-nvlink"),
}


def placed(box: Box, folder: Path) -> gdp.Result:
    """gdp's answer; the model and the machine are written to a folder."""
    machine = folder / f"{box.cluster}.toml"
    if box.cluster in NETWORKS:
        machine.write_text(MACHINES.format(NETWORKS[box.cluster]))
    cluster = machine if box.cluster in NETWORKS else box.cluster
    if box.model in CONFIGS:
        (folder / box.model).mkdir(exist_ok=True)
        (folder / box.model / "config.json").write_text(json.dumps(CONFIGS[box.model]))
        asked = gdp.Generation(f"hf:{folder / box.model}?quantize=fp8", PROMPT, NEW)
        return gdp.place(asked, cluster, target="vllm")
    size, path = size_of(box.model), folder / f"{box.model}.gguf"
    assert size is not None
    if not path.exists():
        write_header(path, size, "Q4_K_M")
    return gdp.place(gdp.Generation(path, PROMPT, NEW), cluster, target="llamacpp")


def least_step_s(weights: Weights, result: gdp.Result, answer: GenerationAnswer) -> float:
    """Seconds of reading in a step, by hand, where each device holds what it does."""
    held = {row.device: float(row.weights_bytes) for row in answer.memory if row.weights_bytes}
    caches = {row.device: float(row.cache_bytes) for row in answer.memory}
    # llama.cpp keeps the embedding on the processor, in vLLM each GPU has its part of it.
    cluster = result.question.cluster
    devices = dict(zip(cluster.device_names, cluster.devices, strict=True))
    home = next((d for d in held if devices[d].is_cpu), "")
    if home:
        held[home] -= weights.embedding
    read: dict[str, float] = {}
    in_experts = dict.fromkeys(held, 0.0)
    if home and weights.experts:
        in_experts = {d: b if d == home else weights.experts - held[home] for d, b in held.items()}
    elif weights.experts:
        in_experts = {d: weights.experts / len(held) for d in held}
    for device, nbytes in held.items():
        dense = nbytes - in_experts[device]
        if not home:
            dense *= weights.always / (weights.always + weights.embedding)
        # A step sees the mean context.
        seen = caches[device] * (PROMPT + NEW / 2) / (PROMPT + NEW)
        read[device] = dense + in_experts[device] * weights.used + seen
    seconds = [read[d] / (1e9 * GB_PER_S[devices[d].kind]) for d in read]
    return max(seconds) if result.placement.splits else sum(seconds)


def network_s(rate: float) -> float:
    """Seconds of a step over the network, by hand: 8192 numbers of 32 bits there, 128256 back."""
    return (8192 + 128256) * 4 / rate + 2 * 100e-6


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    if unknown := set(names) - set(BOXES):
        raise click.UsageError(f"no box {min(unknown)!r}; there are {', '.join(BOXES)}")
    steps: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="boxes-") as root:
        for name in names or BOXES:
            box = BOXES[name]
            try:
                result = placed(box, Path(root))
            except InfeasibleError as error:
                click.echo(f"{name}: {box.weights.all / 2**30:.0f} GiB by hand\n  {error}")
                continue
            answer = generation_answer(result.question, result.placement, result.score)
            assert answer is not None
            steps[box.cluster] = answer.token_s
            told = sum(row.weights_bytes for row in answer.memory)
            least_s = least_step_s(box.weights, result, answer)
            click.echo(
                f"{name}: weights {told / 1e9:.2f} GB, by hand {box.weights.all / 1e9:.2f}; "
                f"step {answer.token_s * 1e3:.1f} ms ({answer.tokens_per_s:.1f} tokens/s), "
                f"by hand at least {least_s * 1e3:.1f}: {answer.token_s / least_s:.2f} times; "
                f"first token {answer.first_token_s:.2f} s\n  {answer.limits[0]}\n"
                f"  {answer.limits[1]}"
            )
    if set(NETWORKS) <= set(steps):
        told_s = steps["1-gbit"] - steps["10-gbit"]
        by_hand_s = network_s(NETWORKS["1-gbit"]) - network_s(NETWORKS["10-gbit"])
        click.echo(f"slower network: {told_s * 1e3:.2f} ms a step, by hand {by_hand_s * 1e3:.2f}")


if __name__ == "__main__":
    main()
