"""accelerate takes the maps as they are, and dispatched models compute what whole ones do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gdp.cluster.presets import cluster_preset
from gdp.importers.pytorch.model import TorchModel
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.question.models import summary
from gdp.question.question import Question
from gdp.targets.hf_accelerate.device_map import device_map
from gdp.targets.hf_accelerate.plan import plan_accelerate

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
accelerate: Any = pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning:accelerate")
@pytest.mark.parametrize("family", ["bert", "llama", "mixtral"])
def test_maps_are_legal_and_outputs_equal(family: str, tmp_path: Path) -> None:
    from gdp.targets.modules import kept_modules
    from tests.torch_models import build

    model, inputs = build(family, "cpu")
    expected = model(**inputs).logits.detach()
    graph = TorchModel(family, model, (), inputs).trace().graph
    # Two accelerators that hold two thirds of the weights together.
    share = int(summary(graph)["weight_bytes"] / 3) + 40_000
    preset = cluster_preset("cpu+rtx4090+t4")
    cluster = replace(
        preset,
        devices=tuple(d if d.is_cpu else replace(d, memory_bytes=share) for d in preset.devices),
    )
    whole = tuple(kept_modules(model))
    placed = plan_accelerate(
        Question(
            graph,
            cluster,
            constraints=Constraints(whole=whole),
            costs="datasheet",  # by which the second accelerator is worth its way
            method="local_search",
            search=Search(seconds=None, evaluations=60),
        )
    )
    found = device_map(graph, placed.placement, placed.question.cluster, model)
    assert "cpu" in found.values()
    assert {0, 1} & set(found.values())
    accelerate.utils.check_device_map(model, found)
    kept = set(getattr(model, "_no_split_modules", None) or ())
    for path, part in model.named_modules():
        if type(part).__name__ in kept:
            assert not [key for key in found if key.startswith(f"{path}.")]
    # Here accelerators are the CPU, and what is offloaded lies on disk.
    here = {path: "disk" if where == "cpu" else "cpu" for path, where in found.items()}
    dispatched = accelerate.dispatch_model(model, here, main_device="cpu", offload_dir=tmp_path)
    torch.testing.assert_close(dispatched(**inputs).logits.detach(), expected)
    meta = [name for name, p in dispatched.named_parameters() if p.device.type == "meta"]
    assert meta  # offloaded weights are not resident
