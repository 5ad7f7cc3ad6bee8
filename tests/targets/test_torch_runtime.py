"""Cut PyTorch programs compute what whole modules do, however they are cut."""

from typing import Any

import numpy as np
import pytest

from gdp.cluster.presets import cluster_preset
from gdp.importers.pytorch.model import TorchModel
from gdp.measure.measuring import Measuring
from gdp.measure.request import RunRequest
from gdp.placement.placement import make_placement
from gdp.question.question import Question
from gdp.sim.segments import segments

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn


class Net(nn.Module):
    """Views across cuts, an op with several results, a tied weight, a constant without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Linear(8, 16)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids) + torch.arange(5, dtype=torch.float32)[None, :, None]
        left, right = self.mix(x).chunk(2, dim=-1)
        top, where = (left * right.sigmoid()).topk(3, dim=1)
        return self.head(top.transpose(1, 2).reshape(-1, 8)[:6]), where.float().mean()


def model() -> TorchModel:
    torch.manual_seed(0)
    return TorchModel("net", Net().eval(), (torch.arange(10).reshape(2, 5),))


@pytest.mark.parametrize("seed", range(4))
def test_any_placement_computes_the_same(seed: int) -> None:
    from gdp.targets.pytorch.run import SegmentedTorchProgram, Workers, output_nodes, pieces, values

    net = model()
    recorded = net.record()
    graph = recorded.graph
    device = np.random.default_rng(seed).integers(2, size=graph.num_ops)
    segment = segments(graph, device)
    where = [int(device[segment == s][0]) for s in range(segment.max() + 1)]
    cpu = torch.device("cpu")
    made = pieces(recorded, segment, where, range(len(where)), [cpu, cpu])
    assert len(made) > 1
    given, drawn = values(recorded, 0)
    assert not drawn
    given |= {n: net.args[0] for n in given if n.name == "ids"}
    workers = Workers([cpu, cpu], [None, None])
    try:
        found = SegmentedTorchProgram(made, workers, given, output_nodes(recorded), 0).run()
    finally:
        workers.close()
    expected = net.module(*net.args)
    assert len(found) == 2
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted.detach())


def test_a_run_reports_what_was_executed() -> None:
    from gdp.targets.pytorch.run import run_torch

    net = model()
    graph = net.trace().graph
    device = (np.arange(graph.num_ops) > graph.num_ops // 2).astype(np.int64)
    device[graph.is_io] = 0
    try:
        report = run_torch(
            RunRequest(net, graph, cluster_preset("2xcpu-core"), device, measuring=Measuring(1.0))
        )
    except Exception as error:
        if "cores" in str(error):
            pytest.skip("this machine has one core")
        raise
    assert report.outputs_equal
    assert {row.device for row in report.segments} == {"core0", "core1"}
    assert set(report.baselines) == {"single_device", "runtime_default"}
    assert not report.random_weights


def test_pieces_are_timed_where_each_device_has_what_it_reads() -> None:
    """The device `meta` stands for an accelerator."""
    from dataclasses import replace

    from gdp.measure.plan import make_plan
    from gdp.question.prepare import prepare_placement
    from gdp.targets.pytorch.run import (
        SegmentedTorchProgram,
        Workers,
        _segments,
        output_nodes,
        pieces,
        values,
    )

    recorded = model().record()
    graph, cluster = recorded.graph, cluster_preset("2xcpu-core")
    device = (np.arange(graph.num_ops) > graph.num_ops // 2).astype(np.int64)
    question = Question(graph, cluster)
    placement = make_placement(graph, cluster, np.where(graph.is_io, 0, device))
    plan = make_plan(prepare_placement(question, placement), "latency")
    devices = [torch.device("cpu"), torch.device("meta")]
    made = pieces(recorded, plan.segment, plan.segment_device.tolist(), plan.order, devices)

    def checked(piece: Any) -> Any:
        def call(*arguments: Any) -> Any:
            assert {x.device.type for x in arguments} <= {devices[piece.device].type}
            return piece.call(*arguments)

        return replace(piece, call=call)

    workers = Workers(devices, [None, None])
    try:
        program = SegmentedTorchProgram(
            [checked(piece) for piece in made],
            workers,
            values(recorded, 0)[0],
            output_nodes(recorded),
            0,
        )
        rows = _segments(program, plan, cluster)
    finally:
        workers.close()
    assert {row.device for row in rows} == {"core0", "core1"}
    assert any(row.input_bytes for row in rows if row.device == "core1")


def test_inputs_that_a_module_branches_on_are_those_that_it_is_run_with() -> None:
    from gdp.targets.pytorch.run import (
        SegmentedTorchProgram,
        Workers,
        output_nodes,
        values,
        whole_piece,
    )

    class Branches(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[x > 2] * 3 if x.sum() > 0 else x - 1

    x = torch.arange(5.0)
    recorded = TorchModel("m", Branches(), (x,)).record()
    cpu = torch.device("cpu")
    workers = Workers([cpu], [None])
    try:
        whole = whole_piece(recorded, cpu)
        given, _ = values(recorded, 0)
        (found,) = SegmentedTorchProgram([whole], workers, given, output_nodes(recorded), 0).run()
    finally:
        workers.close()
    assert found.tolist() == [9.0, 12.0]


def test_what_asks_for_its_device_is_traced_for_one_that_computes() -> None:
    from gdp.targets.pytorch.profile import profile_module
    from gdp.targets.pytorch.run import run_torch

    class Counts(nn.Module):
        """As in mixtures of experts: a kernel that the CPU has for floats alone."""

        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            kind = torch.float32 if x.device.type == "cpu" else torch.int32
            return self.mix(x) + torch.histc(x.to(kind), bins=4, min=0, max=3)

    with torch.device("meta"):
        model = TorchModel("counts", Counts().eval(), (torch.empty(2, 4),))
    graph = model.trace().graph
    assert all(p.is_meta for p in model.module.parameters())  # as before
    made = profile_module(model, "counts", "", torch.device("cpu"), rounds=1, seconds=0.01)
    assert made.latency_s > 0
    cluster = cluster_preset("1xcpu-core")
    device = np.zeros(graph.num_ops, np.int64)
    report = run_torch(RunRequest(model, graph, cluster, device, measuring=Measuring(1.0)))
    assert report.outputs_equal


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int64"])
def test_outputs_are_compared_in_their_own_type(kind: str) -> None:
    """One unit in the last place of a type is no difference, four percent are one."""
    from gdp.measure.compare import compare
    from gdp.targets.torch_devices import named_arrays

    own = named_arrays([torch.ones(2, 3).to(getattr(torch, kind))])
    assert own["output 0"].dtype.name == kind
    if kind != "int64":
        next_up = own["output 0"] + own["output 0"] * float(torch.finfo(getattr(torch, kind)).eps)
        assert compare(own, {"output 0": next_up.astype(own["output 0"].dtype)}).equal
        if kind != "float8_e4m3fn":
            off = own["output 0"].astype(np.float32) * 1.04
            assert not compare(own, {"output 0": off.astype(own["output 0"].dtype)}).equal
