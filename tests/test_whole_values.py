"""Plans of whole modules: their value is what `gdp simulate` says, and none beats their bound."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gdp
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import roofline
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.placement.placement import make_placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.targets.modules import whole_modules
from tests.decoders import Sizes, decoder

SEARCH = Search(seconds=None, evaluations=40)


def box(dispatch_s: float) -> Cluster:
    """Two GPUs that launch each kernel in some time; one is faster, the other holds more."""
    devices = [
        Device("g0", "x", {"default": 1e12}, 1e11, 160_000, dispatch_s=dispatch_s),
        Device("g1", "y", {"default": 3e11}, 4e10, 1 << 30, dispatch_s=dispatch_s),
    ]
    return make_cluster("box", devices, default_bytes_per_s=1e9, default_latency_s=1e-6)


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("dispatch_s", [0.0, 4e-6])
def test_no_plan_of_whole_layers_beats_the_bound(new: int, dispatch_s: float) -> None:
    """All plans of a small decoder, simulated."""
    graph, cluster = decoder(Sizes(layers=2), new=new), box(dispatch_s)
    whole = whole_modules(None, graph, "layer")
    question = Question(
        graph, cluster, constraints=Constraints(whole=whole), costs=roofline, search=SEARCH
    )
    result = solve.solve(question)
    assert result.value_s == pytest.approx(
        solve.simulate(question, result.placement).value_s, rel=1e-9
    )
    values = []
    of = [next((i for i, w in enumerate(whole) if s.startswith(w)), -1) for s in graph.scope]
    for chosen in itertools.product(range(2), repeat=len(whole)):
        device = np.where(graph.is_io, cluster.host, np.array([*chosen, cluster.host])[of])
        score = solve.simulate(question, make_placement(graph, cluster, device))
        if score.feasible:
            values.append(score.value_s)
    assert result.bound_s <= min(values) * (1 + 1e-9)
    assert result.value_s <= min(values) * (1 + 0.02)


@pytest.mark.parametrize("source", ["onnx", "torch"])
@pytest.mark.parametrize(("target", "granularity"), [(None, "module"), ("accelerate", "layer")])
def test_a_file_is_worth_what_its_plan_is(
    source: str, target: str | None, granularity: str, tmp_path: Path
) -> None:
    """Kernels reach over modules, where the plan's end: launches were 7% apart on a decoder as
    small as this. The file says which modules were whole."""
    graph = replace(decoder(), source=source)
    cluster = gdp.Cluster.load("cpu+rtx4090+t4")
    result = gdp.place(graph, cluster, target=target, granularity=granularity, search=SEARCH)
    path = tmp_path / "placement.json"
    gdp.save_placement(result.placement, path)
    assert json.loads(path.read_text())["question"]["whole"]
    assert gdp.simulate(graph, path, cluster).value_s == pytest.approx(result.value_s, rel=1e-9)
    assert gdp.explain(graph, path, cluster)["generation"]["request_s"] == pytest.approx(
        result.value_s, rel=1e-9
    )
