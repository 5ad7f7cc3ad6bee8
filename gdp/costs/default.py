"""Which cost model a placement uses when the user names none."""

from pathlib import Path

from gdp.cluster import Cluster
from gdp.costs.base import CostModel
from gdp.costs.roofline import roofline


def resolve_costs(costs: CostModel | str | Path | None, cluster: Cluster) -> tuple[CostModel, str]:
    """The cost model to use, and a line that says which and why."""
    if costs is None:
        kinds = ", ".join(sorted({device.kind for device in cluster.devices}))
        return roofline, f"roofline from datasheet numbers ({kinds})"
    if isinstance(costs, str | Path):
        raise ValueError(f"cost files cannot be read yet: {costs}")
    return costs, getattr(costs, "__name__", type(costs).__name__)
