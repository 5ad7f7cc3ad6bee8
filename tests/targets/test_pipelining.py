"""Pipelines of torch: the plan is the best that split points can say, and ranks follow it."""

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import plain_graph, unit_cluster

import gdp
from gdp import targets
from gdp.api.answer import answer
from gdp.base.errors import InfeasibleError, PlacementError
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Search
from gdp.methods.chain import LayerCosts
from gdp.placement.placement import make_placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.targets.pipelining.export import export_pipelining, idle_share, stages_of
from gdp.targets.pipelining.plan import best_pipeline

SCRIPTS = (
    "pipelining/runner.py", "onnxruntime/runner_template.py", "tensor_parallel/runner.py",
    "tensor_parallel/tp_runner.py", "named_sharding/runner.py",
)  # fmt: skip
"""Modules that exports copy into users' folders."""


def defined_names(path: Path) -> set[str]:
    """Names of all functions of a file, but for special methods."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = (node.name for node in nodes if isinstance(node, ast.FunctionDef))
    return {name for name in names if not name.startswith("__")}


def box(*memory_bytes: int, bytes_per_s: float = 1e9) -> Cluster:
    """GPUs of which each is half as fast as the one before it, and a CPU."""
    gpus = [
        Device(f"gpu{i}", f"kind{i}", {"default": 1e9 / 2**i}, 1e12, size)
        for i, size in enumerate(memory_bytes)
    ]
    cpu = Device("cpu", "cpu", {"default": 1e12}, 1e12)
    return make_cluster(
        "box", [cpu, *gpus], default_latency_s=1e-6, default_bytes_per_s=bytes_per_s
    )


def chain(seed: int, num_ops: int = 9) -> OpGraph:
    rng = np.random.default_rng(seed)
    edges = [(i, i + 1) for i in range(num_ops - 1)]
    return plain_graph(
        num_ops, edges, rng.integers(1, 1 << 20, num_ops).tolist(),
        op_types=["MatMul"] * num_ops,
        flop=rng.integers(1, 1 << 21, num_ops).astype(float).tolist(),
        memory_traffic_bytes=[0.0] * num_ops, weight_bytes=[100] * num_ops,
    )  # fmt: skip


def every_plan(graph: OpGraph, cluster: Cluster, cuts: Sequence[int]) -> list[float]:
    """Periods of all ways to cut at some of the ops, on some of the GPUs in any order."""
    found = []
    gpus = range(1, cluster.num_devices)
    for count in range(1, len(gpus) + 1):
        for starts in itertools.combinations(cuts, count - 1):
            stage = np.searchsorted(np.array(starts), np.arange(graph.num_ops), side="right")
            for order in itertools.permutations(gpus, count):
                placement = make_placement(graph, cluster, np.array(order)[stage])
                score = solve.simulate(
                    Question(graph, cluster, objective="throughput", costs=roofline), placement
                )
                found.append(score.period_s if score.feasible else np.inf)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("room", [1 << 30, (1 << 22) + 400])
def test_the_plan_is_the_best_of_all_legal_ones(seed: int, room: int) -> None:
    graph, cluster, cuts = chain(seed), box(room, room, 1 << 30), [2, 3, 5, 8]
    found = best_pipeline(
        Question(
            graph, cluster, search=Search(simplicity=0.0), objective="throughput", costs=roofline
        ),
        cuts,
    )
    best = min(every_plan(graph, cluster, cuts))
    assert found.score.period_s == pytest.approx(best)
    loose = best_pipeline(
        Question(
            graph, cluster, search=Search(simplicity=0.5), objective="throughput", costs=roofline
        ),
        cuts,
    )
    assert loose.score.period_s <= 1.5 * best
    stages_of(graph, found.placement, cluster, dict.fromkeys(cuts, "module"))


def even_chain(sizes: list[int]) -> OpGraph:
    """Ops of 1 ms on the first GPU, 2 ms on the second, with tensors of these bytes between."""
    n = len(sizes) + 1
    return plain_graph(
        n, [(i, i + 1) for i in range(n - 1)], [*sizes, 1], op_types=["MatMul"] * n,
        flop=[1e6] * n, memory_traffic_bytes=[0.0] * n, weight_bytes=[100] * n,
    )  # fmt: skip


def test_within_what_simplicity_may_cost_the_fewest_bytes_are_sent() -> None:
    """Six ops on GPUs of 1 and 2 ms an op: four and two take 4 ms, five and one 5 ms, and there
    the cut sends little. Six on one take 6 ms and send nothing."""
    graph, cluster = even_chain([1000, 1000, 1000, 1000, 10]), box(1 << 30, 1 << 30)
    for simplicity, wanted in ((0.0, 4), (0.1, 4), (0.3, 5), (0.6, 6)):
        found = best_pipeline(
            Question(
                graph,
                cluster,
                search=Search(simplicity=simplicity),
                objective="throughput",
                costs=roofline,
            ),
            [1, 2, 3, 4, 5],
        )
        assert np.bincount(found.placement.device, minlength=2)[1] == wanted
    # Here the cut of four and two sends little, and the tensor behind it crosses the next cut.
    graph = even_chain([1000, 1000, 1000, 10, 1000])
    found = best_pipeline(
        Question(
            graph, cluster, search=Search(simplicity=0.3), objective="throughput", costs=roofline
        ),
        [1, 2, 3, 4, 5],
    )
    assert np.bincount(found.placement.device, minlength=2)[1] == 4


def test_a_stage_pays_for_its_launch() -> None:
    """The second GPU needs 5 ms to begin a stage: the first takes all of 6 ms alone, not four."""
    graph, cluster = even_chain([10] * 5), box(1 << 30, 1 << 30)
    cpu, first, second = cluster.devices
    late = replace(second, dispatch_s=5e-3, dispatch_per="segment")
    for last, wanted in ((second, [1] * 4 + [2] * 2), (late, [1] * 6)):
        machine = replace(cluster, devices=(cpu, first, last))
        found = best_pipeline(
            Question(
                graph,
                machine,
                search=Search(simplicity=0.0),
                objective="throughput",
                costs=roofline,
            ),
            [1, 2, 3, 4, 5],
        )
        assert found.placement.device.tolist() == wanted


def test_every_tensor_that_crosses_a_cut_pays_the_latency() -> None:
    """Six ops of 1 and 2 ms on the GPUs, and a latency of 2.5 ms: where one tensor crosses, four
    and two ops take 4 ms; two of them take 5 ms, as five and one do, whose cut only one crosses."""
    edges = [(i, i + 1) for i in range(5)]
    cluster = replace(box(1 << 30, 1 << 30), link_latency_s=2.5e-3 * (1 - np.eye(3)))
    for more, wanted in (([], 4), ([(2, 4)], 5)):
        graph = plain_graph(
            6, edges + more, [1] * 6, op_types=["MatMul"] * 6, flop=[1e6] * 6,
            memory_traffic_bytes=[0.0] * 6, weight_bytes=[100] * 6,
        )  # fmt: skip
        cuts = [4, 5]
        found = best_pipeline(
            Question(
                graph,
                cluster,
                search=Search(simplicity=0.0),
                objective="throughput",
                costs=roofline,
            ),
            cuts,
        )
        assert np.bincount(found.placement.device, minlength=2)[1] == wanted
        assert found.score.period_s == pytest.approx(min(every_plan(graph, cluster, cuts)))


def test_devices_of_one_kind_with_different_memory_are_tried_in_both_orders() -> None:
    """Two ops and then one, of 100 bytes each: only the second GPU holds two."""
    graph, machine = even_chain([1, 1]), box(150, 250)
    cpu, first, second = machine.devices
    cluster = replace(machine, devices=(cpu, first, replace(second, kind=first.kind)))
    found = best_pipeline(Question(graph, cluster, objective="throughput", costs=roofline), [2])
    assert found.placement.device.tolist() == [2, 2, 1]


def test_what_would_be_one_kernel_is_cut_where_a_stage_begins() -> None:
    """A product and its activation would be fused; here the cut between them is the best."""
    graph = plain_graph(
        4, [(0, 1), (1, 2), (2, 3)], [1] * 4, op_types=["Relu", "MatMul", "Relu", "Relu"],
        flop=[1e6, 1e6, 1e6, 0.0], memory_traffic_bytes=[0.0] * 4, weight_bytes=[0, 100, 0, 0],
    )  # fmt: skip
    cluster, cuts = box(1 << 30, 1 << 30), [1, 2, 3]
    found = best_pipeline(
        Question(
            graph, cluster, search=Search(simplicity=0.0), objective="throughput", costs=roofline
        ),
        cuts,
    )
    assert found.placement.device.tolist() == [1, 1, 2, 2]
    assert found.score.period_s == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("share", "fill", "fits"),
    [(0.0, 1.0, True), (0.5, 1.0, True), (1.0, 1.0, False), (0.5, 0.9, False)],
)
def test_tensors_and_an_even_row_leave_less_memory_to_weights(
    share: float, fill: float, fits: bool
) -> None:
    """Of 30 bytes the tensors take 10, so that half of them leave just the 25 of the weights."""
    stretch = np.array([[0, 1], [0, 0]])
    blocks = LayerCosts(
        plain_graph(1, []), unit_cluster(1, memory_bytes=30), np.zeros(1, np.int64),
        stretch[:, :, None] * 1.0, stretch * 25, *np.zeros((2, 2), np.int64), np.array([10]),
    )  # fmt: skip
    assert np.isfinite(blocks.fitting_s(share, fill)[0, 1, 0]) == fits


def test_a_slow_link_leaves_all_on_one_device() -> None:
    cluster = box(1 << 30, 1 << 30, bytes_per_s=1.0)
    found = best_pipeline(
        Question(chain(0), cluster, objective="throughput", costs=roofline), [3, 6]
    )
    assert set(found.placement.device) == {1}
    with pytest.raises(PlacementError, match="everything is on 'gpu0', there is nothing to split"):
        stages_of(chain(0), found.placement, cluster, {3: "a", 6: "b"})


def test_too_little_memory_is_said() -> None:
    with pytest.raises(InfeasibleError, match="does not fit on cluster 'box'"):
        best_pipeline(
            Question(chain(0), box(200, 200), objective="throughput", costs=roofline), [3, 6]
        )
    with pytest.raises(ValueError, match="add --objective throughput"):
        best_pipeline(Question(chain(0), box(200), objective="latency"), [3])


def test_stages_are_stretches_that_begin_where_modules_do(tmp_path: Path) -> None:
    graph, cluster = chain(0), box(1 << 30, 1 << 30)

    def stages(device: list[int]) -> Any:
        return stages_of(graph, make_placement(graph, cluster, np.array(device)), cluster, cuts)

    cuts = {3: "layers.1", 6: "head"}
    found = stages([2] * 6 + [1] * 3)
    assert [(s.begins_at, s.device, s.torch_device, s.ops, s.weight_bytes) for s in found] == [
        ("", "gpu1", "cuda:1", 6, 600), ("head", "gpu0", "cuda:0", 3, 300),
    ]  # fmt: skip
    with pytest.raises(PlacementError, match="op 'o4' begins on 'gpu0'"):
        stages([2] * 4 + [1] * 5)
    with pytest.raises(PlacementError, match="'gpu0' has two stretches"):
        stages([1] * 3 + [2] * 3 + [1] * 3)
    placement = make_placement(graph, cluster, np.array([2] * 6 + [1] * 3))
    export_pipelining("python:m:f", graph, placement, cluster, cuts, tmp_path / "out")
    plan = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    assert plan["split_spec"] == {"head": "BEGINNING"}
    assert plan["microbatches"] == 4
    assert idle_share(2, 4) == idle_share(4, 12) == 0.2


@pytest.mark.slow
def test_scripts_that_users_get_share_no_name_with_the_methods() -> None:
    """They hold code of their own: a name of the package in them is a mistaken rename."""
    scripts = [Path(targets.__file__).parent / name for name in SCRIPTS]
    own = {name for path in scripts for name in defined_names(path)}
    others = {
        name
        for path in Path(gdp.__file__).parent.rglob("*.py")
        if path not in scripts and path.parent.name != "openvino"
        for name in defined_names(path)
    }
    assert "bind_to_device" in own
    assert not {name for name in own & others if "_" in name}


def test_a_tied_weight_is_held_once_in_a_stage() -> None:
    """Four ops of 100 bytes; the first and the third are one weight. Three of them fit on the first
    GPU only as two weights, and the second holds one: there is one plan."""
    graph = replace(chain(0, 4), weight_id=np.array([0, 1, 0, 3]), tensor_bytes=np.ones(4, int))
    cuts = {1: "b", 2: "c", 3: "d"}
    cluster = box(250, 150)
    found = best_pipeline(
        Question(graph, cluster, objective="throughput", costs=roofline), list(cuts)
    )
    assert found.placement.device.tolist() == [1, 1, 1, 2]
    assert found.score.feasible
    stages = stages_of(graph, found.placement, cluster, cuts)
    assert [stage.weight_bytes for stage in stages] == [200, 100]
    apart = make_placement(graph, cluster, np.array([1, 1, 2, 2]))
    assert [s.weight_bytes for s in stages_of(graph, apart, cluster, cuts)] == [200, 200]


def test_a_weight_that_three_ops_share_is_held_once_in_every_stretch() -> None:
    """Six ops of 100 bytes; the second, fourth and fifth are one weight: four weights in all, of
    which the second to fifth op hold two and the first five three."""
    graph = replace(chain(0, 6), weight_id=np.array([0, 1, 2, 1, 1, 5]),
                    tensor_bytes=np.ones(6, int))  # fmt: skip
    for room, wanted in (((350, 150), [1] * 5 + [2]), ((450,), [1] * 6)):
        found = best_pipeline(
            Question(graph, box(*room), objective="throughput", costs=roofline), [1, 2, 3, 4, 5]
        )
        assert found.placement.device.tolist() == wanted
    with pytest.raises(InfeasibleError):
        best_pipeline(
            Question(graph, box(350), objective="throughput", costs=roofline), [1, 2, 3, 4, 5]
        )
    # The last four hold three weights; without the first reader, two of them still share one.
    found = best_pipeline(
        Question(graph, box(250, 350), objective="throughput", costs=roofline), [2]
    )
    assert found.placement.device.tolist() == [1] * 2 + [2] * 4


MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x, mask):
        return x + torch.relu(self.mix(x)) * mask

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.shared = nn.Embedding(11, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight  # tied across the pipeline

    def forward(self, ids, scale=1.0):
        x = self.shared(self.shared(self.embed(ids)))
        mask = (ids > 0)[:, :, None].expand(-1, -1, 16)  # crosses every cut, not contiguous
        for layer in self.layers:
            x = layer(x, mask)
        return {"logits": self.head(x) * scale, "scale": scale}

def net():
    torch.manual_seed(0)
    return Net().eval(), {"ids": torch.zeros(2, 5, dtype=torch.long), "scale": 0.5}

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.early, self.once, self.twice = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        y = self.early(x * 2) + x
        return torch.relu(self.once(self.twice(self.twice(y))))

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.head = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, y):
        seen = self.encoder(x)
        return seen, self.head(self.decoder(y) + seen)

def pair():
    return Pair().eval(), {"x": torch.zeros(2, 16), "y": torch.zeros(2, 16)}

def late():
    return Late().eval(), {"x": torch.zeros(2, 16)}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "pipelined_net.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pipelined_net", raising=False)
    return "python:pipelined_net:net"


def test_boundaries_are_calls_that_happen_once(spec: str) -> None:
    from gdp.importers.pytorch.model import boundaries
    from gdp.question.models import traced_model

    recorded: Any = traced_model(spec)
    recorded = recorded.record()
    found = boundaries(recorded)
    # Not `shared`, which is called twice, nor anything before the mask reads the input.
    assert list(found.values()) == [
        "layers.0", "layers.1", "layers.2", "layers.3", "head"
    ]  # fmt: skip
    assert all(recorded.graph.scope[op].startswith(path) for op, path in found.items())


def test_no_boundary_is_before_a_read_of_the_input_or_at_a_second_call(spec: str) -> None:
    """`early` is called before the input is read for the last time, `twice` behind it."""
    from gdp.importers.pytorch.model import boundaries
    from gdp.question.models import traced_model

    recorded: Any = traced_model(spec.replace(":net", ":late"))
    assert list(boundaries(recorded.record()).values()) == ["once"]


def test_why_a_module_stays_on_one_device_is_said(spec: str, tmp_path: Path) -> None:
    """The encoder's result is an output, and the decoder's input is read behind it; and a slow link
    is dearer than any cut is worth. No advice is the command that was just run."""
    cores = [Device(f"core{i}", "cpu", {"default": 1e6}, 1e12) for i in range(2)]
    pair, fast = spec.replace(":net", ":pair"), make_cluster("cores", cores)
    slow = make_cluster("cores", cores, default_bytes_per_s=1.0)
    for model, cluster, why, refusal in (
        (pair, fast, r"output '\w+' is made \(op 'encoder/.*'\) before input 'y' is read",
         "^there is nothing to export: a pipeline of torch is fed at its first .* behind it$"),
        (spec, slow, "of the pipelines over 5 places where calls of modules begin none is faster",
         "^everything is on 'core0', .* no pipeline that was tried is worth its cuts$"),
    ):  # fmt: skip
        found = gdp.place(
            model, cluster, target="pipelining", objective="throughput", costs=roofline
        )
        (note,) = [note for note in found.notes if note.startswith("all on one device: ")]
        assert re.search(why, note)
        with pytest.raises(PlacementError, match=refusal):
            gdp.export(found, model, "pipelining", tmp_path / "out")


def test_two_ranks_compute_what_the_module_does(spec: str, tmp_path: Path) -> None:
    from gdp.api.run import export
    from gdp.question.models import load

    torch: Any = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed")
    graph = load(spec)
    cores = [Device(f"core{i}", "cpu", {"default": 1e6}, 1e12) for i in range(2)]
    cluster = make_cluster("cores", cores, default_latency_s=1e-9)
    found = answer(
        Question(
            graph, cluster, target="pipelining", model=spec, objective="throughput", costs=roofline
        )
    )
    assert set(found.placement.device) == {0, 1}
    export(found, spec, "pipelining", tmp_path / "out", cluster)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "out" / "run.py"), "--rounds", "1"],
        capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert (report["stages"], report["microbatches"]) == (2, 4)
    assert report["outputs_equal"]
    assert report["max_abs_diff"] < 1e-5
