"""A placement as split points for torch.distributed.pipelining, with a program that runs it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gdp.base.errors import PlacementError
from gdp.base.files.writing import OWN_FILES_ONLY, OverwritePolicy, indented_json, new_contents
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement
from gdp.targets.torch_devices import torch_names
from gdp.targets.torchrun import torchrun_lines

_RUNNER = Path(__file__).with_name("runner.py")
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
IDLE = 0.2
"""Share of the time that filling and draining may take with the advised microbatches."""


@dataclass(frozen=True)
class RankStage:
    """One rank's part of the program."""

    begins_at: str  # module path, whose call begins the stage; empty for the first
    device: str  # of the cluster
    torch_device: str
    ops: int
    weight_bytes: int


def stages_of(
    graph: OpGraph, placement: Placement, cluster: Cluster, cuts: Mapping[int, str]
) -> list[RankStage]:
    """Stages of a placement in order.

    Args:
        graph: Graph of the module.
        placement: Its placement.
        cluster: Cluster of the placement.
        cuts: Ops where stages may begin, with the path of the module that is called there.

    Raises:
        PlacementError: if split points cannot express the placement.
    """
    names = torch_names(cluster)
    ops = np.flatnonzero(~graph.is_io)
    device = placement.device[ops]
    starts = np.flatnonzero(np.diff(device, prepend=-1))
    stages: list[RankStage] = []
    used: set[int] = set()
    for start, stop in zip(starts, [*starts[1:], len(ops)], strict=True):
        op, where = int(ops[start]), int(device[start])
        if start and op not in cuts:
            raise _cannot(
                f"op {graph.op_names[op]!r} begins on {cluster.device_names[where]!r} inside of "
                f"module {graph.scope[op]!r}, or where the pipeline cannot be fed or answer"
            )
        if where in used:
            raise _cannot(f"{cluster.device_names[where]!r} has two stretches of the program")
        used.add(where)
        own = ops[start:stop]
        stages.append(
            RankStage(cuts[op] if start else "", cluster.device_names[where], names[where],
                  len(own), int(graph.weight_bytes[graph.weight_holders(own)].sum()))
        )  # fmt: skip
    if len(stages) < 2:
        where = f"everything is on {stages[0].device!r}, there is nothing to split"
        if placement.question is None or placement.question.target != "pipelining":
            raise _cannot(where)
        raise PlacementError(f"{where}: no pipeline that was tried is worth its cuts")
    return stages


def idle_share(stages: int, microbatches: int) -> float:
    """Of the time of a batch, the share in which a device of an even pipeline waits for others
    (GPipe, arXiv 1811.06965, section 2.3).

    >>> idle_share(4, 12)
    0.2
    """
    return (stages - 1) / (microbatches + stages - 1)


def _cannot(why: str) -> PlacementError:
    return PlacementError(
        f"a pipeline of torch cannot follow this: {why}; place the model again with --for "
        "pipelining --objective throughput"
    )


def export_pipelining(
    model: str,
    graph: OpGraph,
    placement: Placement,
    cluster: Cluster,
    cuts: Mapping[int, str],
    output: Path,
    overwrite: OverwritePolicy = OWN_FILES_ONLY,
) -> list[Path]:
    """Write `pipeline.json` (split points, the device of each stage, how many microbatches) and
    `run.py`, which executes and checks it; see `gdp.base.files.writing` for `overwrite`."""
    stages = stages_of(graph, placement, cluster, cuts)
    count, where = len(stages), [cluster.device_names.index(stage.device) for stage in stages]
    lines = torchrun_lines(cluster, where, "run.py")
    plan = {
        "model": model,
        "split_spec": {stage.begins_at: "BEGINNING" for stage in stages[1:]},
        "stages": stages,
        "microbatches": next(n for n in range(1, 1 << 20) if idle_share(count, n) <= IDLE),
        "idle_share": {str(n): round(idle_share(count, n), 3) for n in _COUNTS},
    }  # fmt: skip
    plan |= {"torchrun": lines} if lines else {}
    with new_contents(output, "export to pipelining", overwrite) as folder:
        (folder / "pipeline.json").write_bytes(indented_json(plan) + b"\n")
        (folder / "run.py").write_text(_RUNNER.read_text())
    return [output / "pipeline.json", output / "run.py"]
