"""Datasheet costs: the slower of an op's arithmetic and its memory traffic."""

import numpy as np
from jaxtyping import Float

from gdp.cluster.types import Cluster
from gdp.costs.base import can_run
from gdp.graph.op_graph import OpGraph


def roofline(graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
    """max(flop / flop_per_s, traffic / bytes_per_s); Williams, Waterman and Patterson 2009,
    doi 10.1145/1498765.1498785. Graph inputs and outputs cost nothing. O(N D)."""
    dtypes = [detail.dtype for detail in graph.detail]
    kinds, which = np.unique(np.array(dtypes), return_inverse=True)
    seconds = np.empty((graph.num_ops, cluster.num_devices))
    for d, device in enumerate(cluster.devices):
        speed = np.array([device.speed(str(kind)) for kind in kinds])[which]
        seconds[:, d] = np.maximum(
            graph.flop / speed, graph.memory_traffic_bytes / device.bytes_per_s
        )
    seconds[graph.is_io] = 0.0
    return np.where(can_run(graph, cluster), seconds, np.inf)
