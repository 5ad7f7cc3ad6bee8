"""A placement whose ops devices divide, as a mesh of JAX and a `PartitionSpec` of every parameter.

Paths and axes are those of the checkpoint of transformers. XLA divides the ops between parameters
by itself (GSPMD, Xu et al. 2021, arXiv 2105.04663) and adds the sums: what is divided along heads
and columns needs none but those behind each layer.
"""

from pathlib import Path
from typing import Any

from gdp.base.errors import PlacementError
from gdp.base.files.writing import new_contents
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement
from gdp.targets.target import ExportJob
from gdp.targets.tensor_parallel.export import divided_model, json_by_parameter
from gdp.targets.tensor_parallel.shards import DividedParameter

AXIS = "tensor"
"""Name of the only axis of the mesh."""
_RUNNER = Path(__file__).resolve().with_name("runner.py")


def export(job: ExportJob) -> list[Path]:
    """Write `sharding.json` and `shard.py`, which divides parameters by it and checks a function.

    Raises:
        PlacementError: Shares are not equal, or a parameter does not divide so.
    """
    _, placement, cluster, output, overwrite = job.plan
    plan = sharding_plan(job.spec, job.question.graph, placement, cluster)
    with new_contents(output, "export to named-sharding", overwrite) as folder:
        (folder / "sharding.json").write_text(json_by_parameter(plan), encoding="utf-8")
        (folder / "shard.py").write_bytes(_RUNNER.read_bytes())
    return [output / "shard.py", output / "sharding.json"]


def sharding_plan(
    spec: str, graph: OpGraph, placement: Placement, cluster: Cluster
) -> dict[str, Any]:
    """Mesh, devices, and of every parameter its shape and the mesh's axis of each of its axes; see
    `export`."""
    split, shards, model = divided_model(spec, graph, placement, cluster)
    count = len(split.devices)
    if not split.is_even:
        raise PlacementError(
            f"JAX divides an axis in equal parts, and this placement has shares "
            f'{":".join(map(str, split.parts))}: give the split equal shares ("shares": []), or '
            "export it --to tensor-parallel"
        )
    parameters = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        shape = tuple(map(int, parameter.shape))
        part = shards.parameters.get(path)
        axes: list[str | None] = [None] * len(shape)
        if part is not None and _is_divided(path, part, count):
            axes[part.axis] = AXIS
        parameters[path] = {"shape": shape, "spec": axes}
    devices = [cluster.device_names[d] for d in split.devices]
    cpus = all(cluster.devices[d].is_cpu for d in split.devices)
    return {
        "mesh": {AXIS: count}, "devices": devices, "platform": "cpu" if cpus else "",
        "parameters": parameters,
    }  # fmt: skip


def _is_divided(path: str, part: DividedParameter, count: int) -> bool:
    """True for a parameter of which each device has its own part, False where devices have copies,
    as of heads of keys that are fewer; raises `PlacementError` for other parts."""
    flat = sorted(span for spans in part.spans for span in spans)
    if sum(last - first for first, last in flat) > part.size:
        return False
    if len(flat) > count:
        raise PlacementError(
            f"JAX divides an axis in one stretch a device, and {path!r} has several, such as gate "
            "and up of experts; export it --to tensor-parallel"
        )
    if part.size % count:
        raise PlacementError(
            f"JAX divides an axis in equal parts, and {part.size} of {path!r} are not {count} "
            "equal ones; place the model on another number of devices"
        )
    return True
