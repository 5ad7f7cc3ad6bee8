"""Training steps of PyTorch modules: FLOPs by hand, gradients of all parameters, what stays put."""

from typing import Any

import numpy as np
import pytest

from gdp.base.errors import ModelError
from gdp.graph.op_graph import INPUT, OUTPUT
from gdp.importers.pytorch.model import TorchModel, trace_torch_training_step

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn


def mlp() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def squared(y: Any) -> Any:
    return y.pow(2).mean()


X = torch.empty(32, 8, device="meta")


def test_a_step_of_a_small_network_by_hand() -> None:
    graph = trace_torch_training_step(mlp(), (X,), optimizer="sgd", loss=squared)
    products = {"mm", "addmm"}
    flop = sum(f for f, kind in zip(graph.flop, graph.op_types, strict=True) if kind in products)
    # Forward; then weights' and inputs' gradients, of the first layer the weights' alone.
    first, second = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
    assert flop == first + second + 32 * (16 + 4) + first + 2 * second
    updates = [i for i, kind in enumerate(graph.op_types) if kind == "fused_sgd"]
    assert graph.flop[updates].sum() == 2 * (8 * 16 + 16 + 16 * 4 + 4)
    # A gradient is read, and a parameter read and written.
    assert graph.memory_traffic_bytes[updates].sum() == 3 * 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert [graph.op_types.count(t) for t in (INPUT, OUTPUT)] == [1, 1]
    assert graph.weight_bytes.sum() == 4 * (8 * 16 + 16 + 16 * 4 + 4)


def test_the_gradients_of_a_convolution_cost_what_torch_says() -> None:
    """The first layer needs those of its weights alone, the second those of its input too."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3))
    graph = trace_torch_training_step(
        model, (torch.empty(2, 3, 8, 8, device="meta"),), loss=squared
    )
    flop = [f for f, kind in zip(graph.flop, graph.op_types, strict=True)
            if kind == "convolution_backward"]  # fmt: skip
    assert sorted(flop) == [2 * (2 * 4 * 6 * 6) * (3 * 9), 2 * 2 * (2 * 5 * 4 * 4) * (4 * 9)]


@pytest.mark.parametrize(("optimizer", "copies"), [(None, 1), ("momentum", 2), ("adamw", 3)])
def test_optimizer_state_counts_beside_the_parameters(optimizer: Any, copies: int) -> None:
    graph = trace_torch_training_step(mlp(), (X,), optimizer=optimizer, loss=squared)
    assert graph.weight_bytes.sum() == copies * 4 * (8 * 16 + 16 + 16 * 4 + 4)


def test_a_class_of_torch_is_an_optimizer_too() -> None:
    by_name, by_class = (
        trace_torch_training_step(mlp(), (X,), optimizer=o, loss=squared)
        for o in ("adamw", torch.optim.AdamW)
    )
    assert by_name.digest == by_class.digest


def test_what_reads_or_updates_a_parameter_shares_a_device() -> None:
    graph = trace_torch_training_step(mlp(), (X,), optimizer="adamw", loss=squared)
    of_type: dict[str, list[int]] = {}
    for i, kind in enumerate(graph.op_types):
        of_type.setdefault(kind, []).append(i)
    forward = [graph.colocate[i] for i in of_type["addmm"]]
    updates = {graph.colocate[i] for i in of_type["fused_adamw"]}
    assert set(forward) == updates
    assert len(set(forward)) == 2  # the layers are free of each other


def test_gradients_bear_the_module_of_their_forward_ops() -> None:
    graph = trace_torch_training_step(mlp(), (X,), optimizer="sgd", loss=squared)
    backward = np.flatnonzero(graph.is_backward)
    scopes = {graph.op_types[i]: set() for i in backward}
    for i in backward:
        scopes[graph.op_types[i]].add(graph.scope[i])
    assert scopes["mm"] == {"0", "2"}
    assert scopes["threshold_backward"] == {"1"}
    forward = [i for i in range(graph.num_ops) if graph.op_types[i] == "addmm"]
    assert not graph.is_backward[forward].any()


def test_updates_bear_the_module_of_their_parameter() -> None:
    graph = trace_torch_training_step(mlp(), (X,), optimizer="adamw", loss=squared)
    updates = [i for i, kind in enumerate(graph.op_types) if kind == "fused_adamw"]
    assert sorted(graph.scope[i] for i in updates) == ["0", "0", "2", "2"]


def test_a_tied_weight_has_one_gradient_and_one_update() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.embed(ids)).mean()

    ids = torch.zeros(3, dtype=torch.long, device="meta")
    graph = trace_torch_training_step(Tied(), (ids,), optimizer="adamw")
    assert graph.op_types.count("fused_adamw") == 1
    assert graph.weight_bytes.sum() == 3 * 4 * 50 * 8


def test_frozen_parameters_are_not_updated() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    graph = trace_torch_training_step(model, (X,), optimizer="sgd", loss=squared)
    assert graph.op_types.count("fused_sgd") == 3


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the loss must be one number, got \(32, 4\)"):
        trace_torch_training_step(mlp(), (X,))
    with pytest.raises(ModelError, match="no optimizer 'lion'; there are sgd"):
        trace_torch_training_step(mlp(), (X,), optimizer="lion", loss=squared)
    step = TorchModel("m", mlp(), (X,), {}, {"optimizer": None, "loss": squared})
    with pytest.raises(ModelError, match="placed, not executed"):
        step.record()
