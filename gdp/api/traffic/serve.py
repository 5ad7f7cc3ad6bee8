"""The call `serve`: the best plan for vLLM under traffic, of those with one copy of the model, with
several, and disaggregated ones."""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gdp.api.answer import answer
from gdp.api.traffic.disaggregated import Asked, plan_disaggregated
from gdp.api.traffic.drafting import Draft, with_draft
from gdp.api.traffic.plan import PLANS, model_bytes, near, on_its_passes, require_context, with_ends
from gdp.base.clock import Phases
from gdp.base.errors import ArgumentError, InfeasibleError
from gdp.cluster.file import Machine, load_cluster
from gdp.costs.base import CostModel
from gdp.importers.huggingface.model import longest_named
from gdp.importers.spec import ModelSpec
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.question.models import Generation
from gdp.question.question import Kept, Question
from gdp.question.result import ComparedPlan, ServedPlan
from gdp.sim.traffic import Traffic
from gdp.sim.traffic_text import NO_LIMITS, TrafficLimits, parse_limits, parse_traffic
from gdp.targets.vllm.plan import vllm_cluster

FIRST_BATCH = 8
"""Requests at once for which traffic with a rate is planned before it is simulated."""
SIZES = {
    "task": "task", "batch": "batch", "sequence": "sequence", "decode": "decode",
    "prompt": "generate", "new": "generate", "context": "context",
}  # fmt: skip
"""Options of a model that say its tokens or sequences, and their names on the command line."""
WORTH = 0.1
"""Least gain for which prefill gets GPUs of its own: several servers and a proxy are more to run,
and no measurement of such plans stands behind their seconds."""


def serve(
    model: str | Path,
    cluster: Machine,
    traffic: Traffic | str,
    *,
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    constraints: Constraints | None = None,
    objective: str = "latency",
    requests_at_once: int | None = None,
    within: TrafficLimits | str = NO_LIMITS,
    disaggregated: bool = True,
    draft: Draft | None = None,
) -> ServedPlan:
    """Place a language model for vLLM, and simulate the traffic that it serves.

    Args:
        model: A configuration of transformers, with or without "hf:".
        cluster: As `gdp.place` takes it.
        traffic: Requests, or text such as "concurrency=32,prompt=2048,new=256" or
            "rate=2.5,prompt=512..2048,new=256" (`gdp.sim.traffic_text.parse_traffic`).
        costs: As `gdp.place` takes them.
        search: As `gdp.place` takes it.
        constraints: As `gdp.place` takes them.
        objective: As `gdp.place` takes it.
        requests_at_once: Requests that run at once at most (`--max-num-seqs` of vLLM); None for
            vLLM's own default.
        within: Seconds that 95% of the requests are to keep, such as "first=500ms,token=30ms": TTFT
            and TPOT. Default: no limits.
        disaggregated: Prefill may get GPUs of its own.
        draft: A draft model for speculative decoding, where that is faster.

    Returns:
        The plan for as many requests at once as the traffic has or memory allows, with TTFT
        and TPOT. Times are seconds.

    Raises:
        InfeasibleError: Not even one request fits.
        ArgumentError: The traffic or the limits have another form, or the longest request has no
            room.

    Example:
        >>> import gdp
        >>> traffic = "rate=2,prompt=512,new=128"
        >>> plan = gdp.serve("llama/config.json", "cpu+h100", traffic)  # doctest: +SKIP
        >>> plan.served.tokens_per_s  # doctest: +SKIP
    """
    parts = {
        "cluster": cluster, "target": "vllm", "costs": costs, "search": search,
        "constraints": constraints, "objective": objective,
    }  # fmt: skip
    return served_plan(
        parts, model, traffic, requests_at_once=requests_at_once, within=within,
        disaggregated=disaggregated, draft=draft,
    )  # fmt: skip


def served_plan(
    parts: Mapping[str, Any],
    model: str | Path,
    traffic: Traffic | str,
    *,
    requests_at_once: int | None = None,
    within: TrafficLimits | str | None = None,
    disaggregated: bool = True,
    draft: Draft | None = None,
) -> ServedPlan:
    """The plan whose requests take the fewest seconds in the mean, of those that keep the limits;
    where none does, the one that exceeds them least. See `serve`; `parts` are those of its
    questions, as `gdp.api.ask` takes them."""
    traffic = parse_traffic(traffic) if isinstance(traffic, str) else traffic
    within = parse_limits(within) if isinstance(within, str) else within or NO_LIMITS
    if draft is not None:
        draft.require_config()
    asked = asked_under(parts, model, traffic, requests_at_once)
    phases = asked.parts["phases"]
    plans = [plan_of_copies(asked, traffic, 1, within)]
    rows = [plans[0].compared()]

    def compare(name: str, plan: Callable[[], ServedPlan]) -> None:
        try:
            plans.append(plan())
            rows.append(plans[-1].compared())
        except (ArgumentError, InfeasibleError) as error:
            rows.append(ComparedPlan(name, reason=str(error)))

    for copies in numbers_of_copies(plans[0].result.question, traffic):
        compare(f"data {copies}", partial(plan_of_copies, asked, traffic, copies, within))
    if draft is not None:
        for plan in tuple(plans):
            compare(f"{plan.layout} with drafts", partial(with_draft, traffic, plan, draft))
    best = min(plans, key=lambda plan: plan.value)
    apart = plan_disaggregated(asked, traffic, best) if disaggregated and draft is None else None
    if apart is not None:
        rows.append(apart.compared())
        best = apart if is_worth_it(apart, best) else best
    best = with_ends(best, traffic)
    phases.ended("planning")
    waited = replace(best.result, phases=phases.seconds, seconds=sum(phases.seconds.values()))
    return replace(best, result=waited, compared_with=tuple(rows) if len(rows) > 1 else ())


def asked_under(
    parts: Mapping[str, Any], model: str | Path, traffic: Traffic,
    requests_at_once: int | None = None,
) -> Asked:  # fmt: skip
    """The question about a model whose sizes are those of traffic.

    Raises:
        ArgumentError: The model says sizes of its own, or is not made for so long requests.
    """
    if given := next((SIZES[name] for name in ModelSpec.of(model).options if name in SIZES), None):
        raise ArgumentError(f"--traffic says all tokens and requests: leave out --{given}")
    named = os.fspath(Generation(model, traffic.prompt, traffic.new))
    require_context(longest_named(named), traffic)  # before anything is traced
    phases = parts.get("phases") or Phases()
    phases.ended("read")
    own = {"cluster": load_cluster(parts["cluster"]), "phases": phases}
    return Asked(model, {"kept": Kept(), **parts, **own}, requests_at_once)


def is_worth_it(apart: ServedPlan, joint: ServedPlan) -> bool:
    """True where a plan of two groups is quicker by more than `WORTH`, or exceeds limits less."""
    (excess, request_s), (other, other_s) = apart.value, joint.value
    if excess != other:
        return excess < other
    return request_s < other_s * (1 - WORTH)


def numbers_of_copies(question: Question, traffic: Traffic) -> list[int]:
    """Numbers of copies beyond one that GPUs of one kind have room for and requests to share: those
    that leave no GPU over, and powers of two."""
    cluster, graph = vllm_cluster(question), question.graph
    gpus = cluster.gpus
    weights = model_bytes(graph)
    room = sum(cluster.devices[d].memory_bytes for d in gpus)
    alike = max(Counter(cluster.devices[d].kind for d in gpus).values())
    most = min(alike, traffic.concurrency or alike, room // max(1, weights))
    if not question.constraints.replicas:
        return []
    return [n for n in range(2, most + 1) if len(gpus) % n == 0 or n & (n - 1) == 0]


def plan_of_copies(
    asked: Asked, traffic: Traffic, copies: int, within: TrafficLimits
) -> ServedPlan:
    """The plan with so many copies, for as many requests side by side as run on one of them."""
    batch, most = math.ceil((traffic.concurrency or FIRST_BATCH) / copies), math.inf
    plan, made = None, 0
    while plan is None or made < PLANS:
        try:
            question = asked.question(traffic.prompt, traffic.new, batch)
            require_context(question.graph.growth.longest, traffic)
            result = answer(replace(question, copies=copies))
        except InfeasibleError:
            if batch == 1:
                raise
            batch, most = batch // 2, batch - 1
            continue
        made += 1
        plan = on_its_passes(result, traffic, asked.requests_at_once, within)
        wanted = int(min(plan.side_by_side, most))
        if near(wanted, batch):
            break
        batch = wanted
    return plan
