"""Commands of torchrun by which processes on several machines become ranks of one program.

torchrun numbers the ranks machine by machine (`_assign_worker_ranks` of
`torch/distributed/elastic/agent/server/api.py`), so the ranks of a plan go machine by machine.
"""

from collections.abc import Sequence

from gdp.base.errors import PlacementError
from gdp.cluster.machines import in_order_of_machines, machines
from gdp.cluster.types import Cluster

PORT = 29500
"""On the first machine, where all processes meet: torchrun's default."""


def torchrun_lines(cluster: Cluster, ranks: Sequence[int], program: str) -> list[str]:
    """A command for each machine, in their order; none where the ranks are on one.

    Args:
        cluster: The machines.
        ranks: Device of each rank.
        program: File that every rank runs.

    Raises:
        PlacementError: Ranks of a machine do not follow each other.
    """
    at = [machines(cluster)[d] for d in ranks]
    nodes = list(dict.fromkeys(at))
    if not in_order_of_machines(cluster, ranks):
        raise PlacementError(
            "torchrun numbers ranks machine by machine, and those of the plan go back and forth; "
            "place the model again with --for pipelining or --for tensor-parallel"
        )
    names = [cluster.device_names[m] for m in nodes]
    return [
        f"torchrun --nnodes {len(nodes)} --node-rank {rank} --nproc-per-node {at.count(machine)} "
        f"--master-addr {names[0]} --master-port {PORT} {program}"
        for rank, machine in enumerate(nodes)
        if len(nodes) > 1
    ]
