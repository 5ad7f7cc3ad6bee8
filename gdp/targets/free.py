"""Placing without restriction: ONNX Runtime can follow any placement of ops."""

from collections.abc import Callable, Iterable
from functools import partial

from gdp.base.errors import PlacementError
from gdp.placement.placement import Placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.targets.llamacpp.flags import slots_of
from gdp.targets.llamacpp.plan import candidate_placements
from gdp.targets.modules import with_whole_modules


def plan_freely(question: Question) -> Result:
    """The best placement of all."""
    question = with_whole_modules(question)
    return solve.solve(question, _planners(question))


def _planners(question: Question) -> dict[str, Callable[[], Iterable[Placement]]]:
    """Programs of planning targets whose plans a free search knows, too, to be never behind."""
    constraints = question.constraints
    if constraints.together or constraints.whole or question.objective != "latency":
        return {}
    try:
        slots_of(question.graph)
    except PlacementError:  # no row of blocks that llama.cpp knows: nothing to tell of it
        return {}
    return {"llamacpp": partial(candidate_placements, question)}
