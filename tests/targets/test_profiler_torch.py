"""PyTorch modules op by op: every op of the graph is timed once, with its views."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdp.base.errors import ClusterError
from gdp.cluster.presets import cluster_preset
from gdp.costs.calibrate import calibrate
from gdp.costs.fit import FitConfig
from gdp.costs.learned import LearnedCosts
from gdp.costs.profile import load_profile, save_profile
from gdp.importers.pytorch.model import TorchModel

torch: Any = pytest.importorskip("torch", reason="torch is not installed")


class Net(torch.nn.Module):
    """A view of a product, an op with several results, a constant."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.head = torch.nn.Linear(width, width), torch.nn.Linear(width // 2, 3)

    def forward(self, x: Any) -> Any:
        left, right = self.mix(x).reshape(-1, x.shape[-1]).chunk(2, dim=-1)
        top, _ = (left * right + torch.arange(left.shape[-1])).topk(left.shape[-1], dim=1)
        return self.head(top)


def model(width: int = 8) -> TorchModel:
    return TorchModel("net", Net(width).eval(), (torch.zeros(2, 3, width),))


def test_every_op_is_timed_once(tmp_path: Path) -> None:
    from gdp.targets.pytorch.profile import profile_modules

    threads = torch.get_num_threads()
    made = profile_modules([("net", "net", model())], rounds=2, seconds=0.02)
    assert torch.get_num_threads() == threads
    (found,) = made.models
    working = np.flatnonzero(~found.graph.is_io)
    assert sorted(op for kernel in found.kernels for op in kernel.ops) == working.tolist()
    assert {k.type for k in found.kernels} == {found.graph.op_types[op] for op in working}
    assert all(kernel.seconds > 0 for kernel in found.kernels)
    assert made.overheads.session_s is not None
    save_profile(made, tmp_path / "p.json.gz")
    again = load_profile(tmp_path / "p.json.gz").models[0]
    assert [k.ops for k in again.kernels] == [k.ops for k in found.kernels]
    assert [k.seconds for k in again.kernels] == pytest.approx(
        [k.seconds for k in found.kernels], rel=1e-3
    )


def test_a_view_belongs_to_the_op_that_reads_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views take 8 s, ops 1 s, by a clock that says so."""
    from gdp.targets.pytorch import profile as pytorch

    class Viewed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            turned = x.transpose(0, 1)
            return torch.relu(turned * 2.0) + turned

    def seconds(nodes: Any, *_: Any) -> np.ndarray:
        return np.array([8.0 if "transpose" in str(node.target) else 1.0 for node in nodes])

    monkeypatch.setattr(pytorch, "run_nodes", seconds)
    viewed = TorchModel("viewed", Viewed().eval(), (torch.zeros(3, 4),))
    (found,) = pytorch.profile_modules(
        [("viewed", "viewed", viewed)], rounds=1, seconds=0.01, overheads=False
    ).models
    assert {k.type: k.seconds for k in found.kernels} == {"mul": 9.0, "relu": 1.0, "add": 1.0}


def test_costs_are_fitted_to_a_profile_and_answer_for_its_device() -> None:
    from gdp.targets.pytorch.profile import profile_modules

    named = [(f"net{w}", f"net{w}", model(w)) for w in (8, 16)]
    made = profile_modules(named, rounds=1, seconds=0.02)
    config = FitConfig(members=2, steps=2, min_rows=1)
    cluster = cluster_preset("2xcpu-core")
    costs, report = calibrate(made, cluster.devices[0], held_out=["net16"], config=config)
    assert [row.model for row in report.models] == ["net16"]
    graph = model(32).trace().graph
    seconds = LearnedCosts((costs,), any_model=True)(graph, cluster)
    assert (seconds[~graph.is_io] > 0).all()
    assert np.isfinite(seconds[~graph.is_io]).all()


def test_a_device_that_is_not_there_is_named() -> None:
    from gdp.targets.pytorch.profile import torch_device

    with pytest.raises(ClusterError, match="must be cpu or cuda"):
        torch_device("meta")
