"""Which cost model a placement uses when the user names none."""

import functools
from pathlib import Path

from gdp.cluster.types import Cluster
from gdp.costs.base import CostModel
from gdp.costs.cost_file import load_costs
from gdp.costs.learned import Calibration, LearnedCosts
from gdp.costs.roofline import roofline
from gdp.resources import data_path


def resolve_costs(costs: CostModel | str | Path | None, cluster: Cluster) -> tuple[CostModel, str]:
    """The cost model to use, and a line that says which and why.

    None takes the shipped calibrations for the devices they match and datasheet numbers for the
    others. A path is a cost file, and is used for all devices of its kind, whatever their model.
    """
    if costs is None:
        return _described(LearnedCosts(shipped()), cluster)
    if isinstance(costs, str | Path):
        return _described(LearnedCosts((load_costs(costs),), any_model=True), cluster)
    if not callable(costs):
        raise ValueError(
            "costs must be a cost model (a callable of graph and cluster), a cost file or None, "
            f"got {type(costs).__name__}"
        )
    return costs, getattr(costs, "__name__", type(costs).__name__)


@functools.cache
def shipped() -> tuple[Calibration, ...]:
    """The calibrations that travel with gdp."""
    folder = data_path("checkpoints", "costs")
    if not folder.is_dir():
        return ()
    return tuple(load_costs(path.parent) for path in sorted(folder.glob("*/meta.json")))


def _described(model: LearnedCosts, cluster: Cluster) -> tuple[CostModel, str]:
    by_label: dict[str, list[str]] = {}
    for device in cluster.devices:
        found = model.of(device)
        label = "roofline from datasheet numbers"
        if found is not None:
            label = found.label()
            if found.mean_error is not None:
                label += f", whole models held out {found.mean_error:.1%} off in the mean"
        names = by_label.setdefault(label, [])
        if device.kind not in names:
            names.append(device.kind)
    text = "; ".join(f"{label} ({', '.join(kinds)})" for label, kinds in by_label.items())
    learned = any(model.of(device) is not None for device in cluster.devices)
    return (model if learned else roofline), text
