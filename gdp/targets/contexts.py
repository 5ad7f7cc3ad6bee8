"""The longest context of a request: that of a plan, and the longest for which a plan is found.

What is timed stays the same, so that only caches grow, each at its own pace
(`gdp.graph.generation.CacheGrowth`): bytes of a plan at another context are sums, and nothing is
simulated or traced.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from gdp.base.errors import InfeasibleError, ModelError
from gdp.base.terminal import stage
from gdp.cluster.types import Cluster, overflow_bytes
from gdp.graph.generation import with_context
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement, make_placement
from gdp.question import solve
from gdp.question.prepare import requests_in_flight
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.sim.objectives import Score
from gdp.splits.members import held_graphs

STEP = 256
"""Longest contexts are multiples of it, as runtimes reserve caches in blocks."""
UNKNOWN_LONGEST = 1 << 20
"""Tokens of the longest context of a model that names none."""
CLOSE = 64
"""The search ends where a plan is found for all but one in so many tokens of the rest."""


def cache_bytes_on(
    graphs: Sequence[OpGraph], placement: Placement, cluster: Cluster, count: int
) -> Int[np.ndarray, "D"]:
    """Bytes of the caches of so many requests on each device, of the graph as each one holds it
    (`gdp.splits.members.held_graphs`); of an offloaded module they lie where it is computed."""
    held, kept = weights_once(graphs, placement), np.zeros(cluster.num_devices, np.int64)
    for d in np.unique(cluster.runs_on).tolist():
        ops = np.concatenate([held[s] for s in np.flatnonzero(cluster.runs_on == d).tolist()])
        kept[d] = graphs[d].cache_bytes[graphs[d].weight_holders(ops)].sum()
    return count * kept


def weights_once(graphs: Sequence[OpGraph], placement: Placement) -> list[Int[np.ndarray, "_"]]:
    """Of each device, ops whose weights and caches it holds, one for every weight."""
    homes, rows = placement.homes, []
    for d, graph in enumerate(graphs):
        mine = (placement.device == homes.get(d, d)) & (graph.weight_bytes > 0)
        rows.append(graph.weight_holders(np.flatnonzero(mine)))
    return rows


def longest_of_plan(question: Question, placement: Placement, score: Score) -> int | None:
    """Tokens of the longest context that the plan of a request has memory for, at most what the
    model was made for; None where the plan does not fit, or nothing says how caches grow."""
    graph, cluster = question.graph, question.cluster
    request = graph.request
    if request is None or not graph.growth.is_known or not score.feasible:
        return None
    held = held_graphs(graph, placement)
    count = requests_in_flight(graph, cluster, question.objective)
    other_bytes = score.peak_bytes - cache_bytes_on(held, placement, cluster, count)

    def fits(tokens: int) -> bool:
        grown = {id(own): with_context(own, tokens) for own in held}
        caches = cache_bytes_on([grown[id(own)] for own in held], placement, cluster, count)
        return overflow_bytes(cluster, other_bytes + caches) == 0

    least, most = request.held, _most(graph)
    if fits(most):
        return most
    low, high = least // STEP, most // STEP  # fits, and does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(max(middle * STEP, least)) else (low, middle)
    return max(low * STEP, least)


def _most(graph: OpGraph) -> int:
    """Upper limit of the context search."""
    request = graph.request
    longest = (graph.growth.longest or UNKNOWN_LONGEST) // STEP * STEP
    return longest if request is None else max(longest, request.held)


def plan_longest(question: Question, plan: Callable[[Question], Result]) -> Result:
    """The answer with caches for the longest context for which a plan is found; a note says how
    long it is. Arguments and errors are those of `longest_found`."""
    low, known = longest_found(question, plan)
    graph = with_context(question.graph, low)
    try:
        result = plan(replace(question, graph=graph))
    except InfeasibleError:  # a longer search is no promise to find what a short one found
        result = _carried(known, graph)
    most = graph.growth.longest
    note = f"the longest context for which a plan was found is {low} tokens"
    note += f"; the model was made for {most}" if most else ""
    return replace(result, notes=(*result.notes, note))


def longest_found(question: Question, plan: Callable[[Question], Result]) -> tuple[int, Result]:
    """(tokens of the longest context for which a plan is found, that plan).

    Bisection between the context of the request and that of the model, with plans that are made
    without a search. Every plan that is found says how far its own devices go, so that few are
    made.

    Args:
        question: Of a request.
        plan: Answers questions.

    Raises:
        ModelError: The graph is of no request, or does not say how its caches grow.
        InfeasibleError: No plan is found for the tokens of the request alone.
    """
    graph, search = question.graph, question.search
    at_once = replace(search, seconds=0.0, evaluations=None, progress=None)

    def quick(graph: OpGraph) -> Result:
        return plan(replace(question, graph=graph, search=at_once))

    request = graph.request
    if request is None or not graph.growth.is_known:
        raise ModelError("--context max is for requests (--generate) to hf: and .gguf models")
    most = failed = _most(graph)
    try:  # where that is found, no other is asked for
        return most, quick(with_context(graph, most))
    except InfeasibleError:
        known = quick(graph)
    low = _longest_of(known) or request.held
    tried = (low + failed) // 2 // STEP * STEP
    while low < tried and failed - low > max(STEP, (failed - low) // CLOSE, low // CLOSE):
        stage(f"longest context: at least {low} tokens, trying {tried}")
        try:
            known = quick(with_context(graph, tried))
            low = max(tried, _longest_of(known) or tried)
        except InfeasibleError:
            failed = tried
        tried = (low + failed) // 2 // STEP * STEP
    return low, known


def _longest_of(result: Result) -> int | None:
    return longest_of_plan(result.question, result.placement, result.score)


def _carried(result: Result, graph: OpGraph) -> Result:
    """The plan of the same request with other caches; its bound holds where these are larger."""
    question, old = replace(result.question, graph=graph), result.placement
    placement = replace(
        make_placement(graph, question.cluster, old.device, old.rank, made_by=old.made_by),
        teams=old.teams, streamed_bytes=old.streamed_bytes, splits=old.splits,
    )  # fmt: skip
    score = solve.simulate(question, placement)
    return replace(result, question=question, placement=placement, score=score)
