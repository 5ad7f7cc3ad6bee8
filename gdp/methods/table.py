"""Every method by its command-line name. `gdp.question.solve` adds the trained policy and HSDAG."""

import functools
from collections.abc import Mapping

from gdp.methods.base import Answer, Method, Search
from gdp.methods.exact.method import exact
from gdp.methods.pipeline.method import pipeline_dp
from gdp.methods.portfolio import HEURISTICS, auto
from gdp.methods.scoring import refusal
from gdp.methods.search.local_search import local_search
from gdp.problem.problem import Problem
from gdp.sim.objectives import general_objectives, objective_of


def for_general(methods: Mapping[str, Method]) -> dict[str, Method]:
    """The methods, which refuse objectives that only programs of their own know."""

    def guarded(name: str, method: Method) -> Method:
        @functools.wraps(method)
        def answered(problem: Problem, search: Search) -> Answer:
            if objective_of(problem).general:
                return method(problem, search)
            return refusal(problem, name, general_objectives())

        return answered

    return {name: guarded(name, method) for name, method in methods.items()}


METHODS: dict[str, Method] = {
    **for_general(dict(HEURISTICS)),
    "pipeline_dp": pipeline_dp,
    "exact": exact,
    **for_general(
        {
            "local_search": local_search,
            "auto": auto,
        }
    ),
}
