"""One question: this graph, on this cluster, at these costs, for this objective."""

import functools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.cluster.types import Cluster
from gdp.errors import InfeasibleError
from gdp.graph.op_graph import OpGraph


@dataclass(frozen=True, eq=False)
class Problem:
    """What every method is given. Axes: N ops, T tensors, E uses, D devices."""

    graph: OpGraph
    cluster: Cluster
    compute_s: Float[np.ndarray, "N D"]  # inf where the device cannot run the op
    objective: str  # a name of `gdp.sim.objectives.OBJECTIVES`
    allowed: Bool[np.ndarray, "N D"]  # kernel support and the user's pins, both hard
    group: Int[np.ndarray, "N"]  # ops of one group share a device; ids 0..G-1
    # Time to move a tensor between an accelerator and host memory, whatever the devices; only
    # max_load and block_latency have it, the event simulator uses the cluster's links.
    tensor_s: Float[np.ndarray, "T"] | None = None

    @property
    def num_ops(self) -> int:
        return self.graph.num_ops

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @property
    def num_groups(self) -> int:
        return int(self.group.max()) + 1

    @functools.cached_property
    def group_allowed(self) -> Bool[np.ndarray, "G D"]:
        """Where each group may go: where all of its ops may."""
        allowed = np.ones((self.num_groups, self.num_devices), dtype=bool)
        np.logical_and.at(allowed, self.group, self.allowed)
        return allowed


def make_problem(
    graph: OpGraph,
    cluster: Cluster,
    compute_s: Float[np.ndarray, "N D"],
    objective: str = "latency",
    *,
    allowed: Bool[np.ndarray, "N D"] | None = None,
    together: Int[np.ndarray, "N"] | None = None,
    tensor_s: Float[np.ndarray, "T"] | None = None,
) -> Problem:
    """A problem; `allowed` and `together` (ids, ops of one id share a device) are the user's.

    Raises `InfeasibleError` when some op, or some group that must share a device, can run on no
    device at all; the message names it.
    """
    possible = np.isfinite(compute_s)
    homeless = np.flatnonzero(~possible.any(axis=1))
    if homeless.size:
        op = int(homeless[0])
        raise InfeasibleError(
            f"{homeless.size} of {graph.num_ops} ops run on no device of cluster "
            f"{cluster.name!r}, first {graph.op_names[op]!r} ({graph.op_types[op]}); "
            "add a device that supports it"
        )
    if allowed is not None:
        possible = possible & allowed
        barred = np.flatnonzero(~possible.any(axis=1))
        if barred.size:
            op = int(barred[0])
            raise InfeasibleError(
                f"the constraints leave no device for {barred.size} of {graph.num_ops} ops, "
                f"first {graph.op_names[op]!r}; relax a pin or a forbidden device"
            )
    group = merge_ids(graph.colocate, together)
    problem = Problem(graph, cluster, compute_s, objective, possible, group, tensor_s)
    torn = np.flatnonzero(~problem.group_allowed.any(axis=1))
    if torn.size:
        members = np.flatnonzero(group == torn[0])
        raise InfeasibleError(
            f"{len(members)} ops must share a device but no device is allowed for all of them, "
            f"first {graph.op_names[members[0]]!r} and {graph.op_names[members[-1]]!r}"
        )
    return problem


def merge_ids(
    first: Int[np.ndarray, "N"], second: Int[np.ndarray, "N"] | None
) -> Int[np.ndarray, "N"]:
    """Group ids 0..G-1 such that ops sharing an id in either array share a group.

    >>> merge_ids(np.array([5, 5, 7, 9]), np.array([0, 1, 1, 2]))
    array([0, 0, 0, 1])
    """
    labels = np.unique(first, return_inverse=True)[1]
    if second is not None:
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        other = np.unique(second, return_inverse=True)[1] + len(first)
        size = 2 * len(first)
        links = coo_array((np.ones(len(first)), (labels, other)), shape=(size, size))
        labels = connected_components(links, directed=False)[1][labels]
    # Ids in order of first appearance, so that equal problems get equal ids.
    _, where, ids = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(where))[ids]
