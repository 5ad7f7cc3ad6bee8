"""Golden cases that call gdp's public names, with objects that a command line cannot give."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from golden import models
from golden.answers import numbers, shortened

import gdp


class Call(NamedTuple):
    """What is called in the folder where cases run, and the optional modules that it needs."""

    call: Callable[[Path], dict[str, Any]]
    needs: tuple[str, ...] = ()


def _search(evaluations: int = 150, **options: Any) -> gdp.Search:
    return gdp.Search(seconds=None, evaluations=evaluations, **options)


def _summary(result: gdp.Result) -> dict[str, Any]:
    placement = result.placement
    return numbers(result.to_json()) | {
        "value_s": result.value_s,
        "placement": shortened(placement.device.tolist()),
        "simplicity_cost": placement.simplicity_cost,
    }


def _written(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.exists():
        models.FILES[name](path)
    return path


def _pair() -> gdp.Cluster:
    """Two devices on one link, the second one faster; the first holds inputs and outputs."""
    slow = gdp.Device("slow", "cpu", {"default": 5e10}, 2e10, dispatch_s=1e-6)
    fast = gdp.Device("fast", "gpu", {"default": 9e10}, 2e11, 1 << 23, dispatch_s=5e-6)
    link = gdp.Link("slow", "fast", 4e9, 1e-5, channel="bus")
    return gdp.make_cluster("pair", [slow, fast], [link])


def _traced_function(folder: Path) -> dict[str, Any]:
    """A JAX function on devices made in Python."""
    del folder
    function, arguments, options = models.jax_mixers()
    return _summary(
        gdp.place(gdp.trace(function, *arguments, **options), _pair(), search=_search())
    )


def _traced_module(folder: Path) -> dict[str, Any]:
    """A PyTorch module whose modules are pinned, forbidden and kept together."""
    del folder
    graph = gdp.trace_torch(*models.torch_towers())
    constraints = gdp.Constraints(
        pins=(gdp.Pin("head", ("fast",)),), forbid=(gdp.Pin("right*", ("fast",)),),
        together=("left.[0-3]",),
    )  # fmt: skip
    return _summary(gdp.place(graph, _pair(), search=_search(), constraints=constraints))


def _limited(folder: Path) -> dict[str, Any]:
    """Bound dimensions, less memory on every device, one device for each stage."""
    graph = gdp.load(_written(folder, "towers.onnx"), {"batch": 256})
    cluster = gdp.Cluster.load("3xcpu-core")
    devices = tuple(replace(device, memory_bytes=2_200_000) for device in cluster.devices)
    result = gdp.place(
        graph, replace(cluster, devices=devices), objective="throughput", search=_search(),
        constraints=gdp.Constraints(replicas=False),
    )  # fmt: skip
    return _summary(result)


def _own_costs(folder: Path) -> dict[str, Any]:
    """Seconds from a function of the user's, and two searches side by side."""

    def costs(graph: gdp.OpGraph, cluster: gdp.Cluster) -> np.ndarray:
        seconds = 1e-4 + graph.flop[:, None] / np.array([[1e11, 1.5e11]])
        seconds[graph.is_io] = np.inf
        seconds[graph.is_io, cluster.host] = 0.0
        return seconds

    graph = gdp.load(_written(folder, "fork_join.json"))
    search = _search(400, chains=2, seed=5)
    return _summary(gdp.place(graph, _pair(), method="local_search", costs=costs, search=search))


def _max_load(folder: Path) -> dict[str, Any]:
    """The load objective, where devices meet in host memory, as a pipeline."""
    graph = gdp.load(_written(folder, "wide.json"))
    return _summary(
        gdp.place(graph, _pair(), objective="max_load", method="pipeline_dp", search=_search())
    )


def _block_latency(folder: Path) -> dict[str, Any]:
    """The latency of one block for each accelerator."""
    graph = gdp.load(_written(folder, "small.json"))
    result = gdp.place(graph, _pair(), objective="block_latency", method="exact", search=_search())
    return _summary(result)


def _compared(folder: Path) -> dict[str, Any]:
    """Some methods side by side for throughput."""
    rows = gdp.compare(
        _written(folder, "wide.json"), "2xt4-pcie4", objective="throughput",
        names=["single", "blocks", "multilevel", "local_search", "policy"], search=_search(),
    )  # fmt: skip
    return {
        name: {"found": False} if isinstance(row, str) else _summary(row)
        for name, row in rows.items()
    }


def _by_hand(folder: Path) -> dict[str, Any]:
    """A placement from a map of modules, written, read, simulated and explained."""
    graph, cluster = gdp.load(_written(folder, "wide.json")), _pair()
    made = gdp.make_placement(graph, cluster, {"": "slow", "net.block1": "fast"})
    gdp.save_placement(made, folder / "by_hand.json")
    placement = gdp.load_placement(folder / "by_hand.json")
    scores = {
        objective: gdp.simulate(graph, placement, cluster, objective=objective)
        for objective in ("latency", "throughput")
    }
    told = gdp.explain(graph, placement, cluster, scope="net.block1")
    return {
        "placement": shortened(placement.device.tolist()),
        "latency_s": scores["latency"].latency_s, "period_s": scores["latency"].period_s,
        "peak_bytes": scores["latency"].peak_bytes.tolist(),
        "pipelined_bytes": scores["throughput"].peak_bytes.tolist(),
        "moved_value_s": [row["value_s"] for row in told["devices"]],
    }  # fmt: skip


def _exported(folder: Path) -> dict[str, Any]:
    """A result as it is, exported."""
    model, out = _written(folder, "attention.onnx"), folder / "exported"
    result = gdp.place(model, _pair(), method="heft", search=_search())
    files = gdp.export(result, str(model), "onnxruntime", out, force=True)
    return _summary(result) | {"files": sorted(path.name for path in files)}


def _refused(folder: Path) -> dict[str, Any]:
    """Weights that fit on no device."""
    graph, pair = gdp.load(_written(folder, "fork_join.json")), _pair()
    devices = tuple(replace(device, memory_bytes=1 << 20) for device in pair.devices)
    try:
        gdp.place(graph, replace(pair, devices=devices), search=_search())
    except gdp.GdpError as error:
        return {"raised": type(error).__name__}
    return {"raised": None}


CALLS = {
    "call-trace": Call(_traced_function),
    "call-trace-torch": Call(_traced_module, ("torch",)),
    "call-limited": Call(_limited),
    "call-own-costs": Call(_own_costs),
    "call-max-load": Call(_max_load),
    "call-block-latency": Call(_block_latency, ("ortools",)),
    "call-compare": Call(_compared),
    "call-by-hand": Call(_by_hand),
    "call-export": Call(_exported),
    "call-infeasible": Call(_refused),
}
"""By the name of the case."""
