"""Placing without restriction: ONNX Runtime can follow any placement of ops."""

from contextlib import suppress
from functools import partial

from gdp.base.errors import PlacementError
from gdp.question import solve
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.targets.llamacpp.flags import slots_of
from gdp.targets.llamacpp.plan import candidate_placements
from gdp.targets.modules import with_whole_modules


def plan_freely(question: Question) -> Result:
    """The best placement of all."""
    question = with_whole_modules(question)
    constraints, planners = question.constraints, {}
    if not (constraints.together or constraints.whole) and question.objective == "latency":
        # Plans of this program a free search knows, too, to be never behind.
        with suppress(PlacementError):  # no row of blocks that llama.cpp knows: nothing to tell
            slots_of(question.graph)
            planners = {"llamacpp": partial(candidate_placements, question)}
    return solve.solve(question, planners)
