"""Room for caches that vLLM logged at its start, against plans of the same configuration.

    python -m benchmarks.kv_room

`benchmarks/measured/kv_room.csv` holds a row for each public log: model, GPUs,
`--gpu-memory-utilization`, tokens of a pass and "Available KV cache memory" of a GPU. The model is
asked for through the public interface, with a `config.json` of its published sizes. Rows of
`develop` were used to choose the constants of `gdp/targets/vllm/memory.py`; those of `judge` were
not. Graphs are inside the share since 0.21, outside it in older logs. Versions before 0.16 sort all
logits where FlashInfer is not installed, which takes 38 bytes of each instead of 12: these rows
(`sorted`) stand apart.
"""

import csv
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gdp
from gdp.cluster.file import load_cluster
from gdp.cluster.reserve import GIB, with_reserve

ROWS = Path(__file__).resolve().parent / "measured" / "kv_room.csv"
_QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "dtype": "bfloat16", "tie_word_embeddings": False,
    },
    "Qwen2-7B": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064,
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        "dtype": "bfloat16", "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": _QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "Qwen3-8B": _QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "Qwen3-32B": _QWEN3 | {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088,
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072,
        "tie_word_embeddings": False, "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                       "model.embed_tokens", "lm_head"],
        },
    },
}  # fmt: skip
"""Sizes of published configurations; gpt-oss names no type, as published."""


class Room(NamedTuple):
    """A row and what a plan has."""

    row: dict[str, str]
    predicted_gib: float
    layout: str

    @property
    def ratio(self) -> float:
        """Predicted over logged."""
        return self.predicted_gib / float(self.row["kv_gib"])


def predicted(row: dict[str, str]) -> Room:
    """The room for caches of a GPU in the plan of a row."""
    cluster = load_cluster(row["cluster"])
    left = 1 - float(row["utilization"])
    kept = {d.name: int(left * d.total_bytes) for d in cluster.devices if not d.is_cpu}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[row["model"]]))
        request = gdp.Generation(
            f"hf:{folder}?max_num_batched_tokens={row['batched_tokens']}", prompt=2048, new=256
        )
        result = gdp.place(request, with_reserve(cluster, kept), target="vllm")
    answer = result.generation
    assert answer is not None
    free = [
        m.free_bytes + m.growing_bytes
        for m in answer.memory
        if m.growing_bytes and m.free_bytes is not None
    ]
    splits = result.placement.splits
    return Room(row, min(free) / GIB, f"tensor {len(splits[0].devices)}" if splits else "whole")


def rooms() -> Iterator[Room]:
    """Every row of the table."""
    with ROWS.open(newline="") as file:
        for row in csv.DictReader(file):
            yield predicted(row)


def main() -> None:
    """Print predicted over logged for each row, and by group the median and the worst."""
    print(f"{'model':14}{'GPUs':24}{'share':>7}{'logged':>8}{'plan':>8}{'ratio':>7}  rows, layout")
    groups: dict[str, list[float]] = {}
    for room in rooms():
        row = room.row
        group = f"{row['sampler']} {row['split']}"
        groups.setdefault(group, []).append(room.ratio)
        print(
            f"{row['model']:14}{row['cluster']:24}{row['utilization']:>7}{row['kv_gib']:>8}"
            f"{room.predicted_gib:8.2f}{room.ratio:7.3f}  {group}, {room.layout}"
        )
    for group, ratios in groups.items():
        worst = max(ratios, key=lambda ratio: abs(ratio - 1))
        print(f"{group}: median {statistics.median(ratios):.3f}, worst {worst:.3f}")


if __name__ == "__main__":
    main()
