"""Every library call takes a model, a cluster and a placement in every form there is."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gdp
from gdp.api.report import report, trace
from gdp.cluster.file import load_cluster, write_cluster
from gdp.costs.base import roofline
from gdp.graph.file import save_graph
from gdp.graph.op_graph import INPUT, OUTPUT, make_graph
from gdp.importers.jax.trace import Traced
from gdp.placement.placement import load_placement
from gdp.question.models import load
from gdp.question.question import question_about

HOW: dict[str, Any] = {"costs": roofline}
QUICK = gdp.Search(seconds=None, evaluations=20)


def model() -> gdp.OpGraph:
    return make_graph(
        "four", ["x", "a", "b", "y"], [INPUT, "MatMul", "MatMul", OUTPUT],
        [(i, 1000) for i in range(3)], [(0, 1), (1, 2), (2, 3)], flop=[0, 1e9, 1e9, 0],
        scope=["", "net.first", "net.second.inner", ""],
    )  # fmt: skip


class Followed:
    """A traced model, as those of JAX and PyTorch are."""

    name = "followed"

    def trace(self) -> Traced:
        return Traced(model(), (), ())


@pytest.fixture
def forms(tmp_path: Path) -> dict[str, list[Any]]:
    """The same model, cluster and placement in all their forms."""
    graph, cluster = model(), gdp.Cluster.load("2xt4-pcie3")
    save_graph(graph, tmp_path / "g.json")
    write_cluster(cluster, tmp_path / "c.toml")
    result = gdp.place(graph, cluster, method="single", search=QUICK, **HOW)
    gdp.save_placement(result.placement, tmp_path / "p.json")
    paths = [tmp_path / name for name in ("g.json", "c.toml", "p.json")]
    models, clusters, placements = ([str(path), path] for path in paths)
    return {
        "model": [*models, graph, Followed()],
        "cluster": [*clusters, "2xt4-pcie3", cluster],
        "placement": [*placements, result.placement, result],
    }


@pytest.mark.parametrize("i", range(4))
def test_every_call_takes_every_form(forms: dict[str, list[Any]], i: int, tmp_path: Path) -> None:
    m, c, p = (forms[name][i] for name in ("model", "cluster", "placement"))
    result = gdp.place(m, c, method="single", search=QUICK, **HOW)
    assert result.value_s == gdp.simulate(m, p, c, **HOW).latency_s > 0
    rows = gdp.compare(m, c, names=["single"], search=QUICK, **HOW)
    assert isinstance(rows["single"], gdp.Result)
    assert gdp.explain(m, p, c, op="a", **HOW)["devices"]
    report(m, p, c, tmp_path / "r.html", **HOW)
    trace(*question_about(p, m, c, **HOW), tmp_path / "t.json")
    assert (tmp_path / "r.html").exists()
    assert (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    ("read", "kind", "message"),
    [
        (load, gdp.ModelError, "a model is a path, .* not of type int"),
        (load_cluster, gdp.ClusterError, "a cluster is a TOML file, .* not of type int"),
        (load_placement, gdp.PlacementError, "a placement is a file, .* not of type int"),
    ],
)
def test_what_is_none_of_these_is_told(read: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        getattr(read, "__wrapped__", read)(3)


WRONG_TYPES = """
import gdp, sys
sys.path.insert(0, sys.argv[1])
from test_even import CALLS, OPTIONS, QUICK, model

graph, cluster = model(), gdp.Cluster.load("2xt4-pcie3")
placement = gdp.make_placement(graph, cluster, {"": cluster.device_names[0]})
right = {"model": graph, "cluster": cluster, "placement": placement}
for name, (call, arguments, more) in CALLS.items():
    for wanted in [*arguments, *OPTIONS.get(name, ())]:
        for wrong in (3, [], object()):
            given = [wrong if x == wanted else right[x] for x in arguments]
            options = more | ({} if wanted in arguments else {wanted: wrong})
            try:
                call(*given, **options)
                said = "nothing"
            except (gdp.GdpError, ValueError) as error:
                said = str(error)
            print(name, wanted, type(wrong).__name__, said, sep="|")
"""
CALLS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "place": (gdp.place, ("model", "cluster"), {"method": "single", "search": QUICK}),
    "compare": (gdp.compare, ("model", "cluster"), {"names": ["single"], "search": QUICK}),
    "simulate": (gdp.simulate, ("model", "placement", "cluster"), {}),
    "explain": (gdp.explain, ("model", "placement", "cluster"), {"op": "a"}),
    "report": (gdp.report, ("model", "placement", "cluster"), {"path": "never.html"}),
    "run": (gdp.run, ("model", "cluster"), {}),
    "export": (gdp.export, ("placement", "model"), {"target": "jax", "output": "never"}),
    "finetune": (gdp.finetune, ("model", "cluster"), {}),
}
OPTIONS = {
    "place": ("search", "constraints", "costs", "objective"),
    "compare": ("search", "costs", "objective"),
    "simulate": ("costs", "objective"),
    "explain": ("constraints", "costs", "objective"),
    "report": ("costs", "objective"),
    "finetune": ("constraints", "config", "costs", "objective"),
}


def test_a_wrong_type_is_told_by_every_call(tmp_path: Path) -> None:
    """In a process of its own: here every function is wrapped in a check of types."""
    done = subprocess.run(
        [sys.executable, "-c", WRONG_TYPES, str(Path(__file__).parent)], cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = [line.split("|") for line in done.stdout.splitlines()]
    assert len(rows) == 3 * sum(len(CALLS[c][1]) + len(OPTIONS.get(c, ())) for c in CALLS)
    for call, wanted, kind, said in rows:
        known = {"objective": "objective must be one of"}
        tells = rf"{wanted} (is|must be) .*(not of type|got) {kind}$"
        assert re.search(known.get(wanted, tells), said), (call, wanted, kind, said)
    assert not list(tmp_path.iterdir())


def test_a_graph_cannot_be_executed_and_is_called_by_its_name() -> None:
    with pytest.raises(gdp.ModelError, match="'four' holds a graph only"):
        gdp.run(model(), "2xcpu-core")


def test_a_device_map_goes_out_and_in() -> None:
    graph, cluster = model(), gdp.Cluster.load("2xt4-pcie3")
    first, second = cluster.device_names
    placement = gdp.make_placement(graph, cluster, np.array([0, 0, 1, 0]))
    out = placement.device_map()
    assert out == {"x": first, "a": first, "b": second, "y": first}
    again = gdp.make_placement(graph, cluster, out)
    assert again.device.tolist() == placement.device.tolist()
    by_module = gdp.make_placement(graph, cluster, {"": first, "net.second": second})
    assert by_module.device.tolist() == [0, 0, 1, 0]
    deeper = gdp.make_placement(graph, cluster, {"net": second, "net.second": first})
    assert deeper.device.tolist() == [0, 1, 0, 0], "the longest path counts; x and y stay home"


@pytest.mark.parametrize(
    ("device_of", "message"),
    [
        ({"": "tpu"}, "the map names device 'tpu'; cluster '2xt4-pcie3' has"),
        ({"net.first": "t4-0"}, "leaves out op 'b' of module 'net.second.inner'"),
        ({"": "t4-0", "nett": "t4-0"}, "names 'nett', which graph 'four' does not have"),
    ],
)
def test_a_device_map_that_does_not_fit_is_refused(device_of: dict[str, str], message: str) -> None:
    cluster = gdp.Cluster.load("2xt4-pcie3")
    first = cluster.device_names[0]
    named = {k: first if v == "t4-0" else v for k, v in device_of.items()}
    with pytest.raises(gdp.PlacementError, match=message):
        gdp.make_placement(model(), cluster, named)


def test_results_and_placements_are_short_to_look_at() -> None:
    result = gdp.place(model(), "2xt4-pcie3", method="single", search=QUICK, **HOW)
    assert repr(result.placement).startswith("<Placement of 4 ops: ")
    assert repr(result).startswith("<Result of single: latency ")
    assert len(repr(result)) < 200
    name = gdp.Cluster.load("2xt4-pcie3").device_names[0]
    assert f"<td>{name}</td><td>{result.counts.ops[0]}</td>" in result._repr_html_()
    assert sum(result.counts.ops) == 2, "inputs and outputs are no ops, as in the terminal"
    assert sum(result.placement.ops_on.values()) == 4
    assert "<table>" in result.placement._repr_html_()
