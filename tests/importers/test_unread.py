"""Weights that no op reads take memory where their module lies, and no time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import gdp
from gdp.costs.offload import read_bytes
from gdp.graph.op_graph import UNREAD, OpGraph, make_graph
from gdp.importers.huggingface.model import huggingface_model
from gdp.importers.pytorch.unread import graph_holding
from tests.generating_configs import generating_config


def imported(folder: Path, query: str, **fields: Any) -> tuple[OpGraph, Any]:
    config = generating_config("llava") | fields
    (folder / "config.json").write_text(json.dumps(config))
    spec = f"hf:{folder}?{query}"
    return gdp.load(spec), huggingface_model(spec).model


def held_bytes(graph: OpGraph) -> int:
    first = np.unique(graph.weight_id, return_index=True)[1]
    return int((graph.weight_bytes - graph.cache_bytes)[first].sum())


@pytest.mark.parametrize("query", ["sequence=9", "sequence=9&decode", "prompt=9&new=4"])
def test_a_vision_tower_is_held_where_a_prompt_is_text(query: str, tmp_path: Path) -> None:
    graph, module = imported(tmp_path, query)
    parameters = sum(w.nbytes for w in module.parameters())
    assert parameters <= held_bytes(graph) <= parameters + sum(b.nbytes for b in module.buffers())
    unread = [op for op, kind in enumerate(graph.op_types) if kind == UNREAD]
    assert {graph.scope[op].split(".")[1] for op in unread} == {
        "vision_tower", "multi_modal_projector",
    }  # fmt: skip
    assert graph.rests[unread].all()
    assert read_bytes(graph)[unread].sum() == 0


def test_quantised_towers_are_held_as_they_are_stored(tmp_path: Path) -> None:
    dense, _ = imported(tmp_path, "sequence=9")
    stored, _ = imported(tmp_path, "sequence=9&quantize=int8")
    at = dense.op_index["model.vision_tower.encoder.layers.0.mlp.fc1/unread"]
    own = stored.op_index[dense.op_names[at]]
    # 48 rows of 32 and a bias, in float32; then in 8 bits with a scale of each row.
    assert dense.weight_bytes[at] == 4 * (48 * 32 + 48)
    assert stored.weight_bytes[own] == 48 * 32 + 4 * 48 + 4 * 48


def test_what_rests_takes_memory_and_no_time() -> None:
    """One product and a tower of two layers and a norm: the makespan is that of the product."""
    graph = make_graph("g", ["a"], ["linear"], [], [], flop=[1e9], weight_bytes=[10])
    held = {"tower.layers.0.fc": 100, "tower.layers.0.out": 50, "tower.norm": 7}
    whole = graph_holding(graph, held, "float32")
    assert whole.rests.tolist() == [name.endswith("/unread") for name in whole.op_names]
    fc, out, norm = (whole.op_index[f"{path}/unread"] for path in held)
    assert whole.colocate[fc] == whole.colocate[out] != whole.colocate[norm]
    alone, beside = (gdp.place(g, "t4", method="single") for g in (graph, whole))
    assert beside.value_s == alone.value_s > 0
    assert sum(beside.score.peak_bytes) - sum(alone.score.peak_bytes) == 157
    assert graph_holding(graph, {}, "float32") is graph
