"""Seconds that a tensor from another device costs PyTorch beyond its bytes.

One host calls op after op, and a copy between devices is more of its work than a launch: memory is
pinned, streams join. On an H200 (docs/benchmarks/accelerators.md) a small tensor
took 46 us to the host's memory and 135 us from it; of two accelerators nothing was measured, and
the lesser is taken, as no memory is pinned. The device that reads the tensor, or its thread on the
host, is busy for `PIECE_S` of them; the rest is the latency of the link.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from gdp.cluster.links import PCIE_LATENCY_S, has_own_latency
from gdp.cluster.types import Cluster
from gdp.costs.base import DerivedCosts, launch_floors_s
from gdp.graph.fuse import fuse
from gdp.graph.groups import first_members
from gdp.graph.op_graph import OpGraph

TO_HOST_S, FROM_HOST_S = 46e-6, 135e-6
PIECE_S = TO_HOST_S - PCIE_LATENCY_S
COPIES = (
    f"copies of PyTorch from {TO_HOST_S * 1e6:.0f} us (to the host) to {FROM_HOST_S * 1e6:.0f} "
    "(from it)"
)
"""Part of the line of costs that says so."""


@dataclass(frozen=True)
class CrossingCosts(DerivedCosts):
    """Costs of PyTorch whose pieces pay for the tensors that they read from other devices.

    Links whose latency somebody gave or measured keep it, and devices with such links alone pay for
    no piece. Devices pay for pieces or for ops, so that the dispatch of ops is in their seconds.
    """

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        return self.base(graph, cluster) + self._dispatch_s(graph, cluster)

    def launch_floor_s(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"] | None:
        """Launches of the other model and the dispatch of ops; see `KnowsLaunches`."""
        floor_s = launch_floors_s(self.base, graph, cluster)
        return None if floor_s is None else floor_s + self._dispatch_s(graph, cluster)

    def _dispatch_s(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        first = np.ones(graph.num_ops, dtype=bool)
        if self.reads_unfused:  # the simulator adds it once for fused ops
            first[:] = False
            first[first_members(fuse(graph).group_of)] = True
        pays = first & ~graph.is_io & ~graph.rests
        return pays[:, None] * np.where(_pays_for_pieces(cluster), cluster.dispatch_s, 0.0)

    def with_runtime_overheads(self, cluster: Cluster) -> Cluster:
        """The other model's cluster, whose devices pay for pieces; copies from a processor to an
        accelerator start later than those back."""
        latency_s = cluster.link_latency_s.copy()
        for i, j in np.argwhere(cluster.is_cpu[:, None] & ~cluster.is_cpu).tolist():
            if not has_own_latency(cluster, i, j):
                latency_s[i, j] = max(latency_s[i, j], FROM_HOST_S - PIECE_S)
        devices = tuple(
            replace(device, dispatch_per="segment", dispatch_s=PIECE_S) if pays else device
            for device, pays in zip(cluster.devices, _pays_for_pieces(cluster), strict=True)
        )
        cluster = replace(cluster, devices=devices, link_latency_s=latency_s)
        return super().with_runtime_overheads(cluster)


def _pays_for_pieces(cluster: Cluster) -> Bool[np.ndarray, "D"]:
    """Devices with an incoming link of unmeasured latency."""
    size = range(cluster.num_devices)
    return np.array([
        launches and any(i != d and not has_own_latency(cluster, i, d) for i in size)
        for d, launches in enumerate(cluster.launches_ops)
    ])  # fmt: skip
