"""Cost models, seconds of each op on each device: their protocol, and the one of datasheets."""

from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

import msgspec
import numpy as np
from jaxtyping import Bool, Float

from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""Seconds of anything that is measured in one run: at most twelve days."""
MeasuredSeconds = Annotated[float, msgspec.Meta(ge=1e-12, le=1e6)]
"""Seconds that a clock can count: not finer than a picosecond."""


@runtime_checkable
class CostModel(Protocol):
    """Seconds of each op on each device [N, D], dispatch excluded; inf where it cannot run."""

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]: ...


@runtime_checkable
class RuntimeOverheads(Protocol):
    """Costs that also measured a runtime's overheads of dispatch and transfers."""

    def with_runtime_overheads(self, cluster: Cluster) -> Cluster:
        """The cluster with those overheads."""
        ...


@runtime_checkable
class KnowsLaunches(Protocol):
    """Costs that also know how long a host takes to launch an op."""

    def launch_floor_s(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"] | None:
        """Host launch time contained in the predicted seconds; None if not modelled."""
        ...


@dataclass(frozen=True)
class DerivedCosts:
    """Costs that a subclass derives from those of a base model."""

    base: CostModel

    @property
    def reads_unfused(self) -> bool:
        """True where the base model needs the graph before fusion."""
        return bool(getattr(self.base, "reads_unfused", False))

    def with_runtime_overheads(self, cluster: Cluster) -> Cluster:
        """The cluster with the overheads of the base model, if it measured any."""
        if isinstance(self.base, RuntimeOverheads):
            return self.base.with_runtime_overheads(cluster)
        return cluster


def launch_floors_s(
    model: CostModel, graph: OpGraph, cluster: Cluster
) -> Float[np.ndarray, "N D"] | None:
    """Launch seconds of a model or of the one that it is based on; None if neither has any."""
    if isinstance(model, KnowsLaunches):
        return model.launch_floor_s(graph, cluster)
    base = getattr(model, "base", None)
    return None if base is None else launch_floors_s(base, graph, cluster)


def can_run(graph: OpGraph, cluster: Cluster) -> Bool[np.ndarray, "N D"]:
    """True where an op may run: graph inputs and outputs on the host, others where supported."""
    allowed = np.ones((graph.num_ops, cluster.num_devices), dtype=bool)
    for d, device in enumerate(cluster.devices):
        if device.supported is not None:
            allowed[:, d] = graph.has_type(device.supported)
    allowed[graph.is_io] = False
    allowed[graph.is_io, cluster.host] = True
    return allowed


def roofline(graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
    """max(flop / flop_per_s, traffic / bytes_per_s); Williams, Waterman and Patterson 2009,
    doi 10.1145/1498765.1498785. Graph inputs and outputs cost nothing. O(N D)."""
    kinds, which = graph.kinds
    seconds = np.empty((graph.num_ops, cluster.num_devices))
    for d, device in enumerate(cluster.devices):
        speed = np.array([device.speed(detail.dtype) for _, detail in kinds])[which]
        seconds[:, d] = np.maximum(
            graph.flop / speed, graph.memory_traffic_bytes / device.bytes_per_s
        )
    seconds[graph.is_io] = 0.0
    return np.where(can_run(graph, cluster), seconds, np.inf)
