"""What vLLM takes inside its share of a GPU, by hand; one share for all; even stages."""

import json
from pathlib import Path
from typing import Any

import pytest

import gdp
from gdp.base.errors import InfeasibleError
from gdp.cluster.file import load_cluster, with_max_memory
from gdp.cluster.reserve import with_reserve
from gdp.question.question import Question
from gdp.targets.vllm.memory import captured_graphs, kept_bytes

GIB, MIB = 1 << 30, 1 << 20
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "dtype": "bfloat16",
}  # fmt: skip


def _request(folder: Path, **more: Any) -> gdp.Generation:
    (folder / "config.json").write_text(json.dumps(LLAMA | more))
    return gdp.Generation(f"hf:{folder}", prompt=64, new=8)


@pytest.mark.parametrize(
    ("sequences", "count"),
    # Logs of vLLM 0.21 and 0.22: PIECEWISE=51, FULL=35 at 256 requests; 35 and 19 at 128; of 8
    # requests 1, 2, 4, 8, 16 and 1, 2, 4, 8.
    [(256, 51 + 35), (128, 35 + 19), (1024, 51 + 51), (8, 5 + 4)],
)
def test_graphs_are_those_that_logs_count(sequences: int, count: int) -> None:
    assert captured_graphs(sequences) == count


@pytest.mark.parametrize(
    ("kind", "tokens", "requests", "graphs"),
    [("l4", 2048, 256, 86), ("h100", 8192, 1024, 102), ("b200", 16384, 1024, 102)],
)
def test_room_is_what_the_share_leaves(
    tmp_path: Path, kind: str, tokens: int, requests: int, graphs: int
) -> None:
    """Of a card: half of its memory, less what CUDA does not report, context, graphs, sampler."""
    pytest.importorskip("transformers")
    cluster = load_cluster(f"cpu+1x{kind}")
    total = cluster.devices[1].total_bytes
    cluster = with_reserve(cluster, {"": total // 2})
    result = gdp.place(_request(tmp_path), cluster, target="vllm")
    assert f"max_num_batched_tokens={tokens}" in str(result.placement.question.model)  # type: ignore[union-attr]
    answer = result.generation
    assert answer is not None
    row = answer.memory[1]
    used = row.free_bytes + row.growing_bytes + row.weights_bytes + row.activations_bytes  # type: ignore[operator]
    share = int(total * (50 if total % 2 == 0 else 49) / 100)
    taken = share - used
    sampler, of_graphs = 12 * requests * 128256, graphs * 4 * MIB // 5
    whole = 0.75 * GIB + of_graphs + sampler
    # A pass of 64 tokens takes its part of what the sampler takes after it.
    assert whole - 2 * row.activations_bytes - MIB < taken <= whole + MIB


def test_more_of_each_takes_more_and_stages_capture_their_own_layers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def kept(gpus: int = 1, stages: int = 1, tokens: int = 2048, **more: Any) -> int:
        request = _request(tmp_path, **more)
        spec = f"{request.__fspath__()}&max_num_batched_tokens={tokens}"
        graph = gdp.load(spec)
        return kept_bytes(Question(graph, load_cluster("cpu+1xl4"), spec), gpus, stages)

    plain = kept()
    assert kept(gpus=2) - plain == GIB // 2
    assert plain - kept(stages=4) == 86 * 3 * int(0.2 * MIB)
    assert kept(num_hidden_layers=6) - plain == 86 * 2 * int(0.2 * MIB)
    assert kept(vocab_size=256512) - plain > 11 * 256 * 128256
    assert kept(tokens=8192) - plain > 11 * 768 * 128256


def test_one_share_is_named_where_limits_differ(tmp_path: Path) -> None:
    """9 of 80 GB is a share of 0.11 of each; 21 GiB of weights fit both limits, not both shares."""
    pytest.importorskip("transformers")
    # 20 x (4 x 4096^2 + 3 x 4096 x 28672) + 2 x 32000 x 4096 numbers of two bytes: 16.1 GiB.
    request = _request(
        tmp_path, vocab_size=32000, hidden_size=4096, intermediate_size=28672,
        num_hidden_layers=20, num_attention_heads=32, num_key_value_heads=32,
    )  # fmt: skip
    cluster = with_max_memory(load_cluster("cpu+2xa100"), {"a100:0": "6GiB", "a100:1": "14GiB"})
    with pytest.raises(InfeasibleError) as refused:
        gdp.place(request, cluster, target="vllm")
    text = str(refused.value)
    assert "one share for all GPUs: the 6.00 GiB of a100:0 make it 0.07, so 5.60 GiB" in text
    assert (
        "accelerate (--for accelerate) and SGLang take a limit of each card and have room" in text
    )
    assert "in 8 bits (--quantize fp8) about" in text
    alike = with_max_memory(load_cluster("cpu+2xa100"), {"a100:0": "6GiB", "a100:1": "6GiB"})
    with pytest.raises(InfeasibleError) as refused:
        gdp.place(request, alike, target="vllm")
    assert "one share" not in str(refused.value)


def test_the_line_of_throughput_points_to_traffic(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    request = _request(tmp_path)
    told = {
        objective: gdp.place(request, "cpu+2xl4", target="vllm", objective=objective).notes
        for objective in ("latency", "throughput")
    }
    assert [any("--traffic" in n for n in notes) for notes in told.values()] == [False, True]
