"""gdp decides on which device each operator of a neural network runs.

    import gdp
    result = gdp.place(gdp.load("model.onnx"), gdp.Cluster.load("2xcpu-core"))

Names are resolved when they are first used, so that importing gdp loads none of the libraries
behind them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdp.api.box.place import place_models as place_models
    from gdp.api.diffusion.place import place_pipeline as place_pipeline
    from gdp.api.explain import explain as explain
    from gdp.api.finetune import finetune as finetune
    from gdp.api.measured.kernels import learn_kernels as learn_kernels
    from gdp.api.measured.learn import learn_runs as learn_runs
    from gdp.api.on_devices import on_devices as on_devices
    from gdp.api.place import compare as compare
    from gdp.api.place import place as place
    from gdp.api.place import simulate as simulate
    from gdp.api.report import report as report
    from gdp.api.run import export as export
    from gdp.api.run import run as run
    from gdp.api.traffic.serve import serve as serve
    from gdp.api.tune import tune as tune
    from gdp.base.errors import ArgumentError as ArgumentError
    from gdp.base.errors import ClusterError as ClusterError
    from gdp.base.errors import GdpError as GdpError
    from gdp.base.errors import InfeasibleError as InfeasibleError
    from gdp.base.errors import ModelError as ModelError
    from gdp.base.errors import PlacementError as PlacementError
    from gdp.cluster.types import Cluster as Cluster
    from gdp.cluster.types import Device as Device
    from gdp.cluster.types import Link as Link
    from gdp.cluster.types import make_cluster as make_cluster
    from gdp.graph.op_graph import OpGraph as OpGraph
    from gdp.importers.jax.trace import trace as trace
    from gdp.importers.pytorch.model import trace_torch as trace_torch
    from gdp.measure.measuring import Measuring as Measuring
    from gdp.methods.base import Search as Search
    from gdp.placement.constraints import Constraints as Constraints
    from gdp.placement.constraints import Pin as Pin
    from gdp.placement.placement import Placement as Placement
    from gdp.placement.placement import Split as Split
    from gdp.placement.placement import load_placement as load_placement
    from gdp.placement.placement import make_placement as make_placement
    from gdp.placement.placement import save_placement as save_placement
    from gdp.problem.problem import Problem as Problem
    from gdp.question.models import Generation as Generation
    from gdp.question.models import load as load
    from gdp.question.result import Result as Result
    from gdp.sim.traffic import Traffic as Traffic

    __version__: str

_WHERE = {
    "ArgumentError": "gdp.base.errors",
    "Cluster": "gdp.cluster.types",
    "ClusterError": "gdp.base.errors",
    "Constraints": "gdp.placement.constraints",
    "Device": "gdp.cluster.types",
    "GdpError": "gdp.base.errors",
    "Generation": "gdp.question.models",
    "InfeasibleError": "gdp.base.errors",
    "Link": "gdp.cluster.types",
    "Measuring": "gdp.measure.measuring",
    "ModelError": "gdp.base.errors",
    "OpGraph": "gdp.graph.op_graph",
    "Pin": "gdp.placement.constraints",
    "Placement": "gdp.placement.placement",
    "PlacementError": "gdp.base.errors",
    "Problem": "gdp.problem.problem",
    "Result": "gdp.question.result",
    "Search": "gdp.methods.base",
    "Split": "gdp.placement.placement",
    "Traffic": "gdp.sim.traffic",
    "compare": "gdp.api.place",
    "explain": "gdp.api.explain",
    "export": "gdp.api.run",
    "finetune": "gdp.api.finetune",
    "learn_kernels": "gdp.api.measured.kernels",
    "learn_runs": "gdp.api.measured.learn",
    "load": "gdp.question.models",
    "load_placement": "gdp.placement.placement",
    "make_cluster": "gdp.cluster.types",
    "make_placement": "gdp.placement.placement",
    "on_devices": "gdp.api.on_devices",
    "place": "gdp.api.place",
    "place_models": "gdp.api.box.place",
    "place_pipeline": "gdp.api.diffusion.place",
    "report": "gdp.api.report",
    "run": "gdp.api.run",
    "save_placement": "gdp.placement.placement",
    "serve": "gdp.api.traffic.serve",
    "simulate": "gdp.api.place",
    "trace": "gdp.importers.jax.trace",
    "trace_torch": "gdp.importers.pytorch.model",
    "tune": "gdp.api.tune",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from gdp.base.version import gdp_version

        return gdp_version()
    if name not in _WHERE:
        raise AttributeError(f"module 'gdp' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_WHERE, "__version__"]
