"""Traffic on one plan: the engine that a plan for vLLM is, and what clients see of it."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from gdp.api.generation import generation_answer, rooms
from gdp.base.errors import ArgumentError, GdpError
from gdp.costs.measured.costs import prompt_launch_s
from gdp.graph.op_graph import OpGraph
from gdp.importers.pytorch.config_spec import parse_config_spec
from gdp.importers.spec import ModelSpec
from gdp.placement.placement import Placement, make_placement
from gdp.question import solve
from gdp.question.models import load, spec_of
from gdp.question.prepare import requests_in_flight
from gdp.question.question import Question
from gdp.question.result import GenerationAnswer, Result
from gdp.sim.serving import ServingEngine, in_steady_state, serve
from gdp.sim.traffic import ServedTraffic, Spread, Traffic
from gdp.sim.traffic_text import NO_LIMITS, TrafficLimits, parse_traffic
from gdp.targets.table import TARGETS
from gdp.targets.target import imported
from gdp.targets.vllm.layouts import Degrees
from gdp.targets.vllm.plan import beyond, stages_of, vllm_cluster, vllm_defaults

NEAR = 1.5
"""Requests at once that differ by no more than this factor have the same seconds of a pass."""
PLANS = 4
"""Plans that are made at most until as many requests run as they were made for."""


@dataclass(frozen=True)
class ComparedPlan:
    """Traffic on one of the plans that were compared; no seconds where it has none."""

    layout: str  # such as "tensor 2 x data 2"
    request_s: float | None = None  # from the arrival of a request to its last token, mean
    first_token: Spread | None = None
    token: Spread | None = None
    tokens_per_s: float | None = None
    reason: str = ""  # for which it serves none of it


@dataclass(frozen=True, eq=False)
class PrefillGroup:
    """The prefill GPUs of disaggregated serving."""

    result: Result
    generation: GenerationAnswer
    engine: ServingEngine
    sent_bytes: int  # of the caches of a prompt of mean length
    transfer_s: float  # to send them over an idle link
    sent: Spread  # from the end of a prompt until its caches are sent

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "layout": layout_of(self.result, self.generation), "sent_bytes": self.sent_bytes,
            "transfer_s": self.transfer_s, "sent": asdict(self.sent),
            "engine": engine_json(self.engine),
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class ServedPlan:
    """A plan and the traffic on it; disaggregated, that of the decode GPUs."""

    result: Result
    generation: GenerationAnswer  # of as many requests side by side as run at once
    engine: ServingEngine
    served: ServedTraffic
    passes_of: int  # requests side by side, whose passes the engine's seconds are
    prefill: PrefillGroup | None = None
    within: TrafficLimits = NO_LIMITS
    compared_with: tuple[ComparedPlan, ...] = ()  # itself among them; () where there was one plan

    @property
    def layout(self) -> str:
        """Sizes of its layout in words."""
        own = layout_of(self.result, self.generation)
        if self.engine.drafting is not None:
            own += f", {self.engine.drafting.tokens} tokens drafted"
        if self.prefill is None:
            return own
        others = layout_of(self.prefill.result, self.prefill.generation)
        return f"prefill on {others}, decode on {own}"

    @property
    def value(self) -> tuple[float, float]:
        """Smaller is better: by how much it exceeds its limits, then mean seconds of a request."""
        return self.within.excess(self.served), self.served.request.mean_s

    def compared(self) -> ComparedPlan:
        """Its row among the plans that are compared."""
        served = self.served
        return ComparedPlan(
            self.layout, served.request.mean_s, served.first_token, served.token,
            served.tokens_per_s,
        )  # fmt: skip

    @property
    def side_by_side(self) -> int:
        """Requests that run in one pass of a copy, in the mean."""
        engine = self.engine
        return max(1, round(self.served.running / (engine.stages * engine.copies)))

    @property
    def room(self) -> int | None:
        """Requests of mean length whose caches memory has room for; None: no limit."""
        request, held = self.generation.request, self.engine.cache_tokens
        of_copy = None if math.isinf(held) else int(held // (request.prompt + request.new))
        return None if of_copy is None else self.engine.copies * of_copy

    def to_json(self) -> dict[str, Any]:
        """Plain data: that of a placement, with `generation` and `traffic`."""
        return self.result.to_json() | {
            "generation": self.generation.to_json(), "traffic": self.traffic_json()
        }  # fmt: skip

    def traffic_json(self) -> dict[str, Any]:
        """The traffic as plain data, with its engine."""
        within = {k: None if math.isinf(s) else s for k, s in self.within._asdict().items()}
        return asdict(self.served) | {
            "room": self.room, "layout": self.layout, "within": within,
            "prefill": None if self.prefill is None else self.prefill.to_json(),
            "compared": [asdict(row) for row in self.compared_with],
            "engine": engine_json(self.engine), "passes_of": self.passes_of,
        }  # fmt: skip


def layout_of(result: Result, generation: GenerationAnswer) -> str:
    """Sizes of the layout of a plan in words."""
    splits = result.placement.splits
    tensor, experts = (len(splits[0].devices), splits[0].experts) if splits else (1, False)
    return str(Degrees(tensor, generation.stages, generation.copies, experts))


def engine_json(engine: ServingEngine) -> dict[str, Any]:
    """An engine as plain data; without a limit its `cache_tokens` are None."""
    drafting = None if engine.drafting is None else engine.drafting._asdict()
    plain = engine._asdict() | {
        "scheduler": asdict(engine.scheduler), "drafting": drafting
    }  # fmt: skip
    return plain | ({"cache_tokens": None} if math.isinf(engine.cache_tokens) else {})


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
            step_s=passes.step_s, token_s=passes.token_s, context_s=passes.context_s
        )
        served = serve(in_steady_state(traffic, engine), engine)
        plan = replace(plan, engine=engine, served=served, passes_of=count)
    return plan


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
    generation, engine = engine_on(result, requests_at_once)
    served = serve(in_steady_state(traffic, engine), engine)
    batch = generation.request.batch
    return ServedPlan(result, generation, engine, served, batch, within=within)


def model_bytes(graph: OpGraph) -> int:
    """Bytes of the weights of a model, tied ones once."""
    return int((graph.weight_bytes - graph.cache_bytes)[graph.weight_holders()].sum())


def require_context(longest: int, traffic: Traffic) -> None:
    """Raise `ArgumentError` if a request has more tokens than the maximum context length (0:
    unknown); it names the line of the request's table."""
    most = max(traffic.requests, key=lambda request: request.prompt + request.new)
    if refusal := beyond(longest, most.prompt + most.new):
        raise ArgumentError((f"line {most.line} of the table: " if most.line else "") + refusal)


def engine_on(
    result: Result, requests_at_once: int | None = None
) -> tuple[GenerationAnswer, ServingEngine]:
    """Seconds of the request of a plan, and its engine, with at most `most` concurrent requests.

    Raises:
        ArgumentError: The plan is of no request or not for vLLM.
    """
    generation = result.generation
    if generation is None:  # of a placement that was read from its file
        generation = generation_answer(result.question, result.placement, result.score)
    if generation is None:
        raise ArgumentError("traffic is for placements of a request (--generate), for vllm")
    engine = engine_of(generation, result.question)
    if requests_at_once is not None:
        engine = engine._replace(requests_at_once=requests_at_once)
    return generation, engine


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
    return ServingEngine(
        step_s=answer.token_s - answer.caches_s,
        token_s=answer.first_token_s / (request.batch * request.prompt),
        context_s=answer.caches_s / (request.batch * mean_context),
        tokens_at_once=at_once,
        requests_at_once=vllm_defaults(question.cluster).sequences,
        cache_tokens=room * sequences * request.held,
        stages=answer.stages,
        copies=answer.copies,
        launch_s=prompt_launch_s(question.graph) / answer.stages,
        scheduler=imported(TARGETS["vllm"].scheduler)(),
    )


def _tokens_at_once(question: Question) -> int:
    """Tokens of one pass of the engine that a model is computed by."""
    spec = spec_of(question.model or "")
    at_once = parse_config_spec(spec).max_num_batched_tokens if spec.startswith("hf:") else 0
    if not at_once:
        raise ArgumentError("traffic is for plans of hf: models for vllm (--for vllm)")
    return at_once
