"""The real llama.cpp, with cores that its RPC server lends in GPUs' place."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import MIB, box, sayable, write_gguf

import gdp
from gdp.base.errors import MeasurementError
from gdp.question.models import load
from gdp.targets.llamacpp.flags import flags_of, slots_of
from gdp.targets.llamacpp.run import Worker
from tests.targets.test_llamacpp_runs import lent_core

pytest.importorskip("llama_cpp", reason="needs the llama-cpp-python package")


def told(path: Path, arguments: list[str], devices: int = 0) -> dict[str, Any]:
    """What llama.cpp did with the flags: layers, moved tensors, logits of the last token."""
    worker = Worker(-1, [-1] * devices)
    try:
        loaded = worker.ask("load", "m", model=str(path), arguments=arguments, ends=[], seed=0)
        worker.ask("sample", "m", tokens=(2, 1, 0))
        return loaded | worker.ask("logits", "m")
    except MeasurementError as error:
        if "built without RPC" in str(error):
            pytest.skip(str(error))
        raise
    finally:
        worker.close()


@pytest.mark.parametrize("experts", [0, 4])
def test_the_program_itself_puts_layers_where_they_were_placed(
    experts: int, tmp_path: Path
) -> None:
    """Every kind of plan for two GPUs: blocks on the CPU, on either GPU, experts away."""
    path = write_gguf(tmp_path / "m.gguf", experts=experts, kind="F16", seed=0)
    graph, cluster = load(f"{path}?decode&sequence=64"), box(MIB, MIB)
    slots, names = slots_of(graph), {"cpu": "CPU", "gpu0": "RPC0", "gpu1": "RPC1"}
    plain = told(path, ["--n-gpu-layers", "0", "--ctx-size", "64"])
    assert np.ptp(plain["logits"]) > 1.0
    plans = {
        tuple(flags_of(graph, found, cluster).arguments()): found
        for found in sayable(graph, cluster)
    }
    for arguments, placement in list(plans.items())[1 :: max(len(plans) // 4, 1)]:
        made = told(path, list(arguments), devices=2)
        where = [names[cluster.device_names[d]] for d in placement.device]
        assert made["layers"] == [where[ops[0]] for ops in slots.layers]
        away = {
            f"{graph.op_names[op]}.weight": where[op]
            for ops, layer in zip(slots.experts, slots.layers, strict=True)
            for op in ops
            if where[op] != where[layer[0]]
        }
        assert made["moved"] == away
        np.testing.assert_allclose(made["logits"], plain["logits"], atol=0.02)


@pytest.mark.parametrize("experts", [0, 4])
def test_a_placement_runs_and_every_piece_is_timed(experts: int, tmp_path: Path) -> None:
    """A block on the processor, the rest on a lent core; of a mixture one block's experts away."""
    path = write_gguf(tmp_path / "m.gguf", layers=3, experts=experts, kind="F16", seed=0)
    spec, cluster = f"{path}?prompt=8&new=4", lent_core()
    graph = load(spec)
    slots, device = slots_of(graph), np.zeros(graph.num_ops, np.int64)
    device[np.concatenate([*slots.layers[1:], *slots.experts[1:]]).astype(np.int64)] = 1
    if experts:
        device[slots.experts[1]] = 0
    placed = gdp.make_placement(graph, cluster, device)
    report = gdp.run(spec, cluster, placed, measuring=gdp.Measuring(seconds=1.0))
    assert report["outputs_equal"]
    assert {s["device"] for s in report["segments"]} == {"core0", "lent"}
    assert all(s["measured_s"] > 0 for s in report["segments"])
    assert set(report["baselines"]) == {"single_device", "runtime_default"}
