"""Times and memory of a placement, predicted."""

from pathlib import Path

from gdp.cluster.file import Machine
from gdp.costs.base import CostModel
from gdp.placement.placement import Placed
from gdp.question import solve
from gdp.question.models import Model
from gdp.question.question import question_about
from gdp.sim.objectives import Score


def simulate(
    model: Model | None,
    placement: Placed,
    cluster: Machine | None = None,
    *,
    objective: str | None = None,
    costs: CostModel | str | Path | None = None,
) -> Score:
    """Simulate a placement.

    Args:
        model: As in `place`; None for the one that the placement was made for.
        placement: A `Placement`, its file, or a map from op names or module paths to devices, such
            as a `device_map` of accelerate.
        cluster: As in `place`; None for the one that the placement was made for.
        objective: The objective whose value `Score.value_s` gives; None for that of the placement,
            else latency.
        costs: As in `place`; None for those that the placement was made with.

    Returns:
        Makespan and period in seconds, peak bytes of each device, and whether it is feasible.

    Raises:
        PlacementError: The placement is of another model or cluster.
    """
    return solve.simulate(
        *question_about(placement, model, cluster, objective=objective, costs=costs)
    )
