"""Configurations as vLLM computes them: fused attention, prompts in chunks, logits once."""

import json
from pathlib import Path
from typing import Any

import pytest

import gdp
from gdp.base.errors import ModelError
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph
from gdp.graph.serving import Served, served
from gdp.importers.huggingface.spec import parse_config_spec
from gdp.question.models import Generation, load
from gdp.targets.vllm.plan import vllm_defaults, vllm_model
from tests.generating_configs import DENSE, generating_config
from tests.tiny import plain_graph

GIB = 1 << 30
TOKENS, WORDS = 2048, 100


def _cluster(*gpus: tuple[str, int]) -> Cluster:
    devices = [
        Device(f"g{i}", kind, {"default": 1e12}, 1e12, size) for i, (kind, size) in enumerate(gpus)
    ]
    return make_cluster("c", [Device("cpu", "cpu", {"default": 1e11}, 1e10, 8 * GIB), *devices])


@pytest.mark.parametrize(
    ("gpus", "tokens"),
    [
        ([("h100", 80 * GIB)], 8192),
        ([("h100", 80 * GIB), ("rtx4090", 24 * GIB)], 2048),
        ([("a100", 80 * GIB)], 2048),
        ([("b200", 180 * GIB)], 16384),
        ([("b200", 180 * GIB), ("h100", 80 * GIB)], 8192),
        ([("dgx-spark", 119 * GIB)], 2048),
        ([], 2048),
    ],
)
def test_a_pass_has_the_tokens_of_vllms_defaults(tmp_path: Path, gpus: Any, tokens: int) -> None:
    cluster, path = _cluster(*gpus), tmp_path / "config.json"
    path.write_text(json.dumps({**DENSE, "model_type": "llama", "dtype": "bfloat16"}))
    spec = f"hf:{path}?prompt=8&new=2&max_num_batched_tokens={tokens}"
    assert str(vllm_model(f"hf:{path}?prompt=8&new=2", cluster)) == spec
    # `get_batch_defaults` of vLLM 0.33: 1,024 requests at once from 70 GiB.
    assert vllm_defaults(cluster).sequences == (1024 if tokens > 2048 else 256)
    request = Generation(path, prompt=8, new=2)
    assert str(vllm_model(request, cluster)).endswith(f"&max_num_batched_tokens={tokens}")
    given = f"hf:{path}?max_num_batched_tokens=64"
    assert str(vllm_model(given, cluster)) == given
    assert vllm_model("m.gguf?prompt=8&new=2", cluster) == "m.gguf?prompt=8&new=2"


def test_the_option_is_a_whole_number() -> None:
    assert parse_config_spec("hf:a?max_num_batched_tokens=64").max_num_batched_tokens == 64
    with pytest.raises(ModelError, match="max_num_batched_tokens must be a positive whole number"):
        parse_config_spec("hf:a?max_num_batched_tokens=0")


@pytest.fixture(params=["llama", "eager", "gpt_oss"])
def saved(request: Any, tmp_path: Path) -> Path:
    """A small decoder: fused attention, spelled out, and with sinks and windows."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 4 * TOKENS, "dtype": "bfloat16",
    }  # fmt: skip
    if request.param == "gpt_oss":
        more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
        config = transformers.GptOssConfig(**sizes, **more)
    else:
        config = transformers.LlamaConfig(**sizes)
    config.save_pretrained(tmp_path)
    if request.param == "eager":
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_implementation": "eager"}))
    return tmp_path


def _most(graph: OpGraph) -> int:
    return int(graph.held_bytes.max())


@pytest.mark.slow
def test_no_tensor_of_tokens_squared_and_no_logits_of_a_prompt(saved: Path) -> None:
    spec = f"hf:{saved}?task=causal-lm&prompt={TOKENS}&new=8"
    plain, whole, parts = (
        load(f"{spec}{more}")
        for more in ("", f"&max_num_batched_tokens={TOKENS}", "&max_num_batched_tokens=256")
    )
    for graph in (whole, parts):
        assert _most(graph) < TOKENS * TOKENS
        held = [graph.weight_bytes - graph.cache_bytes, graph.cache_bytes]
        before = [plain.weight_bytes - plain.cache_bytes, plain.cache_bytes]
        assert [h.sum() for h in held] == [b.sum() for b in before]
    assert set(whole.chunks.tolist()) == {1}
    assert set(parts.chunks.tolist()) == {1, 8}
    assert _most(parts) <= -(-_most(whole) // 8) + WORDS * 4
    # A step reads its caches once, and no copy of them is written.
    moved = [g.memory_traffic_bytes[g.repeats > 1].sum() for g in (parts, plain)]
    assert moved[0] < moved[1] - 2 * 0.8 * parts.cache_bytes.sum()


def test_a_pass_is_of_all_sequences_together() -> None:
    """Three prompts of 8 tokens, 6 tokens at once: 4 chunks; of one prompt 2."""
    kinds = [INPUT, "relu", OUTPUT]
    graph = plain_graph(3, [(0, 1), (1, 2)], 24, op_types=kinds)
    for batch, chunks in ((3, 4), (1, 2)):
        assert served(graph, Served(8, batch, 6)).chunks.tolist() == [1, chunks, 1]
    assert served(graph, Served(8, 3, 24)).chunks.tolist() == [1, 1, 1]


def test_a_plan_for_vllm_remembers_how_it_computes(tmp_path: Path) -> None:
    from tests.torch_models import config

    config("llama").save_pretrained(tmp_path)
    spec = f"hf:{tmp_path}?task=causal-lm&prompt=64&new=8"
    cluster = _cluster(("g", GIB))
    result = gdp.place(spec, cluster, target="vllm")
    assert result.placement.question is not None
    assert result.placement.question.model == f"{spec}&max_num_batched_tokens=2048"
    simulated = gdp.simulate(None, result.placement)
    assert simulated.latency_s == pytest.approx(result.value_s)
    gdp.export(result.placement, None, "vllm", tmp_path / "serve")
    arguments = (tmp_path / "serve" / "arguments.txt").read_text()
    assert "--max-num-batched-tokens 2048" in arguments
    said = json.loads((tmp_path / "serve" / "vllm.json").read_text())["why"]
    assert "chunks" in said["--max-num-batched-tokens"]


@pytest.mark.slow
def test_caches_have_the_bits_that_a_checkpoint_is_made_for(tmp_path: Path) -> None:
    from tests.torch_models import config

    config("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
    scheme = {
        "quant_method": "compressed-tensors", "config_groups": {"a": group},
        "kv_cache_scheme": {"num_bits": 8, "dynamic": False},
    }  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": scheme}))
    spec = f"hf:{tmp_path}?task=causal-lm&prompt=16&new=4"
    # transformers stores them as it computes them, in 32 bits.
    computed, stored = load(spec), load(f"{spec}&max_num_batched_tokens=16")
    assert stored.cache_bytes.sum() * 4 == computed.cache_bytes.sum()


def test_a_model_as_an_engine_computes_it_is_not_executed(tmp_path: Path) -> None:
    from tests.torch_models import config

    config("llama").save_pretrained(tmp_path)
    from gdp.importers.huggingface.model import huggingface_model

    spec = f"hf:{tmp_path}?task=causal-lm&sequence=16&max_num_batched_tokens=16"
    graph = load(spec)
    (logits,) = graph.sent_bytes[graph.use_tensor[graph.use_op == graph.op_index["output"]]]
    assert logits == WORDS * 2  # vLLM computes a checkpoint in float32 in 16 bits
    with pytest.raises(ModelError, match="as vLLM computes it, which is placed, not executed"):
        huggingface_model(spec).record()


@pytest.mark.slow
@pytest.mark.parametrize(("rope", "longest"), [
    ({}, 256), ({"rope_type": "linear", "factor": 4.0}, 1024),
    ({"rope_type": "dynamic", "factor": 2.0}, 512),
    ({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 256),
])  # fmt: skip
def test_the_longest_context_is_that_of_scaled_rotations(
    tmp_path: Path, rope: dict[str, Any], longest: int
) -> None:
    pytest.importorskip("transformers")
    config = generating_config("llama")
    config |= {"rope_scaling": rope | {"rope_theta": 1e4}} if rope else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    graph = load(Generation(f"hf:{tmp_path}", prompt=8, new=4))
    assert graph.growth.longest == longest
