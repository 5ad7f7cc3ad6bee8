"""Shardings for JAX: specs of every parameter, and a function whose results stay."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from generating_configs import generating_config

import gdp
from gdp.base.errors import PlacementError
from gdp.placement.placement import Placement, Split, make_placement
from gdp.question.models import load
from gdp.targets.named_sharding.export import sharding_plan

CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96,
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip


def placed(config: dict[str, Any], folder: Path, count: int, shares: tuple[int, ...] = ()) -> tuple[
    str, gdp.OpGraph, Placement, gdp.Cluster
]:  # fmt: skip
    """A model whose ops so many cores divide."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    spec, cluster = f"hf:{folder}?sequence=6", gdp.Cluster.load(f"{count}xcpu-core")
    graph = load(spec)
    split = Split(tuple(range(count)), shares=shares)
    device = np.zeros(graph.num_ops, dtype=np.int64)
    return spec, graph, make_placement(graph, cluster, device, splits=(split,)), cluster


def test_columns_and_rows_lie_along_the_mesh(tmp_path: Path) -> None:
    plan = sharding_plan(*placed(CONFIG, tmp_path, 2))
    specs = {k.removeprefix("model.layers.0."): v["spec"] for k, v in plan["parameters"].items()}
    assert plan["mesh"] == {"tensor": 2}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"):
        assert specs[f"{name}.weight"] == ["tensor", None]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert specs[f"{name}.weight"] == [None, "tensor"]
    assert specs["model.embed_tokens.weight"] == specs["lm_head.weight"] == ["tensor", None]
    assert specs["input_layernorm.weight"] == [None]
    assert plan["parameters"]["lm_head.weight"]["shape"] == (96, 48)


def test_heads_of_keys_that_devices_copy_are_whole(tmp_path: Path) -> None:
    plan = sharding_plan(*placed(CONFIG, tmp_path, 4))
    specs = {k: v["spec"] for k, v in plan["parameters"].items()}
    assert specs["model.layers.1.self_attn.k_proj.weight"] == [None, None]
    assert specs["model.layers.1.self_attn.q_proj.weight"] == ["tensor", None]


def test_what_jax_cannot_divide_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"equal parts, and .* has shares 3:1.*--to"):
        sharding_plan(*placed(CONFIG | {"num_key_value_heads": 4}, tmp_path, 2, (3, 1)))
    odd = CONFIG | {"vocab_size": 97}
    with pytest.raises(PlacementError, match=r"97 of '.*weight' are not 2 equal"):
        sharding_plan(*placed(odd, tmp_path, 2))
    with pytest.raises(PlacementError, match=r"experts\.gate_up_proj' has several"):
        sharding_plan(*placed(generating_config("mixtral"), tmp_path, 2))


def run_shard(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).resolve().parents[1]
    command = [sys.executable, str(folder / "shard.py"), "jax_llama:from_checkpoint", "--rounds=1"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(tests), "JAX_PLATFORMS": "cpu", **environment},
    )  # fmt: skip


@pytest.mark.slow
def test_a_divided_function_has_the_results_of_the_uncut_one(tmp_path: Path) -> None:
    """The example is transformers' own model; it runs on two devices forced on the processor."""
    from jax_llama import from_checkpoint
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    model.save_pretrained(tmp_path / "weights")
    spec, _, placement, cluster = placed(CONFIG, tmp_path / "model", 2)
    gdp.export(placement, spec, "named-sharding", tmp_path / "shards", cluster)
    os.environ["JAX_LLAMA"] = weights = str(tmp_path / "weights")
    try:
        function, (parameters, ids) = from_checkpoint()
        with torch.no_grad():
            wanted = model(torch.from_numpy(ids)[None]).logits[0].numpy()
        np.testing.assert_allclose(function(parameters, ids), wanted, atol=1e-4)
    finally:
        del os.environ["JAX_LLAMA"]
    done = run_shard(tmp_path / "shards", JAX_LLAMA=weights)
    told = json.loads(done.stdout) if done.stdout else pytest.fail(done.stderr[-1000:])
    assert told["outputs_equal"]
    assert told["max_relative_diff"] < 1e-5
    assert len(told["devices"]) == 2

    path = tmp_path / "shards" / "sharding.json"
    plan = json.loads(path.read_text())
    plan["parameters"]["lm_head.weight"]["shape"] = [48, 96]
    path.write_text(json.dumps(plan))
    refused = run_shard(tmp_path / "shards", JAX_LLAMA=weights)
    assert refused.returncode == 1
    assert "'lm_head.weight' has shape (96, 48), and the plan is of (48, 96)" in refused.stderr
