"""gdp's device maps beside accelerate's own, under the same offload semantics, predicted.

    python -m benchmarks.runtimes.accelerate_maps [--evaluations 200] [--json]

BERT-base, a Llama of 12 layers and a small Mixtral, from configurations, on three boxes of which
each has too little accelerator memory for some of them. Times are simulated, of datasheet costs.
"""

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from gdp.api import simulate
from gdp.cluster.file import with_max_memory
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.costs.offload import Streamed
from gdp.costs.roofline import roofline
from gdp.errors import InfeasibleError
from gdp.exporters.accelerate import hugging_face_names
from gdp.graph.op_graph import OpGraph
from gdp.importers.pytorch.model import TorchModel
from gdp.methods.base import Search
from gdp.placement import make_placement
from gdp.verbs.accelerate import kept_modules, offload_cluster, place_for_accelerate

SEQUENCE = 128
BOXES = (("cpu+rtx4090+t4", 1.2), ("cpu+2xt4", 0.6), ("cpu+rtx4090+t4", 0.5))
"""A preset, and the accelerators' memory together as a share of the model's weights."""


def models() -> dict[str, Any]:
    """The three models on the meta device."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    import transformers as hf

    llama: dict[str, Any] = {
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "hidden_size": 1024,
    }
    with torch.device("meta"):
        return {
            "bert-base": hf.AutoModelForMaskedLM.from_config(hf.BertConfig()).eval(),
            "llama-12": hf.AutoModelForCausalLM.from_config(
                hf.LlamaConfig(**llama, intermediate_size=2816, num_hidden_layers=12)
            ).eval(),
            "mixtral-4": hf.AutoModelForCausalLM.from_config(
                hf.MixtralConfig(**llama, intermediate_size=1792, num_hidden_layers=4)
            ).eval(),
        }


def traced(name: str, module: Any) -> OpGraph:
    """One prompt of `SEQUENCE` tokens."""
    import torch

    inputs: dict[str, Any] = {"input_ids": torch.zeros(1, SEQUENCE, dtype=torch.long)}
    if not name.startswith("bert"):
        inputs["use_cache"] = False
    return TorchModel(name, module, (), inputs).trace().graph


def their_map(module: Any, box: Cluster) -> dict[str, Any]:
    """What `infer_auto_device_map` answers for the limits of a box."""
    from accelerate import infer_auto_device_map

    limits: dict[int | str, int | str] = {}
    for device, name in zip(box.devices, hugging_face_names(box), strict=True):
        limits[name] = device.memory_bytes
    return infer_auto_device_map(
        module, max_memory=limits, no_split_module_classes=list(module._no_split_modules or ())
    )


def of_map(
    found: Mapping[str, Any], graph: OpGraph, machine: Cluster, costs: CostModel
) -> tuple[float, bool]:
    """Predicted seconds of a device map, and whether it fits as gdp counts memory; `machine` has an
    offload device. Ops without weights follow the module that they belong to, or the op before."""
    names = hugging_face_names(machine)
    index: dict[Any, int] = {name: i for i, name in enumerate(names)}  # the last "cpu": rests
    device = np.full(graph.num_ops, machine.host)
    last = index[0]
    for op, scope in enumerate(graph.scope):
        if graph.is_io[op]:
            continue
        paths = [p for p in found if not p or scope == p or scope.startswith(f"{p}.")]
        last = index[found[max(paths, key=len)]] if paths else last
        device[op] = last
    placement = make_placement(graph, machine, device)
    score = simulate(graph, placement, machine, costs=Streamed(costs))
    return score.latency_s, score.feasible


def row(name: str, module: Any, graph: OpGraph, box: Cluster, search: Search) -> dict[str, Any]:
    """One model on one box."""
    whole = tuple(kept_modules(module))
    constraints = Constraints(whole=whole)
    machine, _ = offload_cluster(graph, box, constraints, "cpu")
    found: dict[str, Any] = {"model": name, "box": box.name}
    try:
        ours = place_for_accelerate(graph, box, whole=whole, costs=roofline, search=search)
        found |= {"gdp_ms": ours.result.score.latency_s * 1e3,
                  "bound_ms": ours.result.bound_s * 1e3,
                  "streams": "cpu offload" in ours.cluster.device_names}  # fmt: skip
    except InfeasibleError as error:
        found |= {"gdp_ms": None, "reason": str(error)}
    seconds, fits = of_map(their_map(module, box), graph, machine, roofline)
    return found | {"accelerate_ms": seconds * 1e3, "accelerate_fits": fits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    search = Search(seed=0, seconds=None, evaluations=options.evaluations)
    rows = []
    for name, module in models().items():
        graph = traced(name, module)
        weights = sum(p.numel() * p.element_size() for p in module.parameters())
        for preset, share in BOXES:
            box = cluster_preset(preset)
            each = int(share * weights / 2)
            box = with_max_memory(box, {"0": each, "1": each})
            rows.append(row(name, module, graph, box, search) | {"memory_share": share})
            if not options.json:
                print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
