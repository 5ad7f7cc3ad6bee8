"""Traffic on one plan: the engine that a plan for vLLM is, and what clients see of it."""

import math
from dataclasses import replace

from gdp.api.generation import generation_answer, rooms
from gdp.base.errors import ArgumentError, GdpError
from gdp.corrections.estimate import Range
from gdp.corrections.passes import scaled
from gdp.costs.measured.costs import prompt_launch_s
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import ModelSpec
from gdp.placement.placement import Placement, make_placement
from gdp.question import solve
from gdp.question.models import load
from gdp.question.prepare import requests_in_flight
from gdp.question.question import Question
from gdp.question.result import GenerationAnswer, Result, ServedPlan
from gdp.sim.serving import PassWatts, ServingEngine, in_steady_state, serve, serve_disaggregated
from gdp.sim.traffic import Traffic
from gdp.sim.traffic_text import NO_LIMITS, TrafficLimits, parse_traffic
from gdp.targets.table import TARGETS
from gdp.targets.target import imported
from gdp.targets.vllm.plan import beyond, stages_of, vllm_cluster, vllm_defaults

NEAR = 1.5
"""Requests at once that differ by no more than this factor have the same seconds of a pass."""
PLANS = 4
"""Plans that are made at most until as many requests run as they were made for."""


def on_vllm(question: Question, placement: Placement) -> Question:
    """The question of a placement that is read from its file, with the memory that vLLM takes.

    Raises:
        ArgumentError: The placement is not for vLLM.
    """
    _tokens_at_once(question)
    if question.draft:
        raise ArgumentError(
            "the placement is of a model with a draft model: place it again with "
            "--traffic and --draft"
        )
    if question.role:
        raise ArgumentError(
            f"the placement is of the {question.role} GPUs alone, and traffic is for "
            "a plan of both: place the model again with --traffic"
        )
    return replace(question, cluster=vllm_cluster(question, stages_of(question.graph, placement)))


def served_on(
    result: Result, traffic: Traffic | str, requests_at_once: int | None = None
) -> ServedPlan:
    """Traffic on a plan that was made before. Where it was made for more requests side by side than
    run here, or for fewer, passes are those of its layout with as many as run.

    Raises:
        ArgumentError: The plan is of no request or not for vLLM, or the traffic has another form.
    """
    if isinstance(traffic, str):
        traffic = parse_traffic(traffic)
    plan = on_its_passes(result, traffic, requests_at_once)
    for _ in range(PLANS):
        count = plan.side_by_side
        passes = None if near(count, plan.passes_of) else _passes_of(result, count)
        if passes is None:
            break
        # Room is that of the plan, and so is what runs at once at most.
        own = plan.engine
        engine = own._replace(
            step_s=passes.step_s,
            token_s=passes.token_s,
            context_s=passes.context_s,
            watts=passes.watts,
        )
        served = serve(in_steady_state(traffic, engine), engine)
        plan = replace(plan, engine=engine, served=served, passes_of=count)
    return with_ends(plan, traffic)


def near(requests: int, others: int) -> bool:
    """True for requests at once whose passes take equal seconds."""
    return max(requests, others) <= NEAR * min(requests, others)


def _passes_of(result: Result, batch: int) -> ServingEngine | None:
    """The engine of a plan's layout with other requests side by side; None where the model cannot
    be read, or has other ops then."""
    question, placed = result.question, result.placement
    spec = ModelSpec.of(question.model).having(batch=batch)
    try:
        graph = load(spec)
    except GdpError:
        return None
    if graph.op_names != question.graph.op_names:
        return None
    question = replace(question, graph=graph, model=spec)
    placement = make_placement(
        graph, question.cluster, placed.device, placed.rank, made_by=placed.made_by,
        teams=placed.teams, splits=placed.splits,
    )  # fmt: skip
    answer = generation_answer(question, placement, solve.simulate(question, placement))
    return None if answer is None else engine_of(answer, question)


def on_its_passes(
    result: Result,
    traffic: Traffic,
    requests_at_once: int | None = None,
    within: TrafficLimits = NO_LIMITS,
) -> ServedPlan:
    """Traffic on a plan, by the passes of as many requests as it was made for."""
    require_context(result.question.graph.growth.longest, traffic)
    result, engine = engine_on(result, requests_at_once)
    served = serve(in_steady_state(traffic, engine), engine)
    batch = result.of_request().request.batch
    return ServedPlan(result, engine, served, batch, within=within)


def with_ends(plan: ServedPlan, traffic: Traffic) -> ServedPlan:
    """The plan with the same traffic at either end of the 90% intervals of its passes."""
    reading = None if plan.prefill is None else plan.prefill.result.of_request().correction
    found = plan.generation.correction
    if found is None or (plan.prefill is not None and reading is None):
        return plan
    ends = []
    for side in ("low", "high"):
        decode = log_ratio(found.decode, side)
        if plan.prefill is None or reading is None:
            engine = scaled(plan.engine, log_ratio(found.prefill, side), decode)
            ends.append(serve(in_steady_state(traffic, engine), engine))
            continue
        groups = plan.prefill.groups
        prefill = scaled(groups.prefill, log_ratio(reading.prefill, side), decode)
        groups = groups._replace(prefill=prefill, decode=scaled(groups.decode, 0.0, decode))
        asked = in_steady_state(traffic, groups.decode)
        ends.append(serve_disaggregated(asked, groups).served)
    return replace(plan, ends=(ends[0], ends[1]))


def log_ratio(found: Range, side: str) -> float:
    """Log of an end of a range over its middle."""
    return math.log(getattr(found, side) / found.factor)


def model_bytes(graph: OpGraph) -> int:
    """Bytes of the weights of a model, tied ones once."""
    return int((graph.weight_bytes - graph.cache_bytes)[graph.weight_holders()].sum())


def require_context(longest: int, traffic: Traffic) -> None:
    """Raise `ArgumentError` if a request has more tokens than the maximum context length (0:
    unknown); it names the line of the request's table."""
    most = max(traffic.requests, key=lambda request: request.prompt + request.new)
    if refusal := beyond(longest, most.prompt + most.new):
        raise ArgumentError((f"line {most.line} of the table: " if most.line else "") + refusal)


def engine_on(result: Result, requests_at_once: int | None) -> tuple[Result, ServingEngine]:
    """A plan with the seconds of its request, and its engine, with so many requests at once at
    most (None: vLLM's own default).

    Raises:
        ArgumentError: The plan is of no request or not for vLLM.
    """
    if result.generation is None:  # of a placement that was read from its file
        answer = generation_answer(result.question, result.placement, result.score)
        result = replace(result, generation=answer)
    engine = engine_of(result.of_request(), result.question)
    if requests_at_once is not None:
        engine = engine._replace(requests_at_once=requests_at_once)
    return result, engine


def engine_of(answer: GenerationAnswer, question: Question) -> ServingEngine:
    """The engine of a plan: seconds of a pass from those of its prompt and its step, room from the
    memory that the plan leaves.

    Raises:
        ArgumentError: The model is not computed as an engine computes it.
    """
    request, at_once = answer.request, _tokens_at_once(question)
    room = min(rooms(answer.memory), default=math.inf)
    count = requests_in_flight(question.graph, question.cluster, question.objective)
    sequences = request.batch * count
    mean_context = request.prompt + request.new / 2
    longer = 1.0 if answer.correction is None else answer.correction.prefill.factor
    return ServingEngine(
        step_s=answer.token_s - answer.caches_s,
        token_s=answer.first_token_s / (request.batch * request.prompt),
        context_s=answer.caches_s / (request.batch * mean_context),
        tokens_at_once=at_once,
        requests_at_once=vllm_defaults(question.cluster).sequences,
        cache_tokens=room * sequences * request.held,
        stages=answer.stages,
        copies=answer.copies,
        launch_s=longer * prompt_launch_s(question.graph) / answer.stages,
        scheduler=imported(TARGETS["vllm"].scheduler)(),
        watts=pass_watts(answer),
    )


def pass_watts(answer: GenerationAnswer) -> PassWatts | None:
    """Watts of one copy of an engine by those of its prompt and its step; None where unknown."""
    power = answer.power
    if power is None:
        return None
    others_w = power.idle_w * (1 - 1 / answer.copies)  # which idle meanwhile
    phases = power.weights_w, power.prefill_w, power.caches_w
    return PassWatts(
        power.idle_w / answer.copies, power.limit_w / answer.copies,
        *(watts - others_w for watts in phases),
    )  # fmt: skip


def _tokens_at_once(question: Question) -> int:
    """Tokens of one pass of the engine that a model is computed by."""
    request = question.graph.request
    if request is None or not request.pass_tokens:
        raise ArgumentError("traffic is for plans of hf: models for vllm (--for vllm)")
    return request.pass_tokens
