"""A small model that drafts tokens for a large one (speculative decoding), beside it on its GPUs.

vLLM divides the small model as the large one (for the method `draft_model` both must have one
`tensor_parallel_size`), so that both are on all GPUs of a copy, and keep caches of a token there.
Whether drafting pays depends on how many requests run side by side: checking k + 1 tokens costs
nothing while a pass waits for weights, and k + 1 times as much once it waits for arithmetic.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from gdp import solve
from gdp.api.generation import GenerationAnswer, generation_answer
from gdp.api.traffic.disaggregated import PlanMaker
from gdp.api.traffic.plan import ServedPlan, engine_of
from gdp.errors import ArgumentError, ModelError
from gdp.models import Generation
from gdp.placement import Split, make_placement
from gdp.prepare import requests_in_flight
from gdp.sim.traffic import Drafting, ServingEngine, Traffic, in_steady_state, serve
from gdp.units import format_bytes, whole_number

MOST_TOKENS = 64
"""Proposed in a pass, at most."""


@dataclass(frozen=True)
class Draft:
    """A small model, the tokens that it proposes in a pass, and the probability that the large one
    accepts a token behind accepted ones (`acceptance`): the first of vLLM's acceptance rates per
    position, not their mean."""

    model: str | Path
    tokens: int
    acceptance: float

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise ArgumentError(f"draft tokens must be from 1 to {MOST_TOKENS}, got {self.tokens}")
        if not 0.0 <= self.acceptance < 1.0:
            raise ArgumentError(
                f"acceptance must be at least 0 and below 1, got {self.acceptance:g}"
            )


_FORM = "MODEL,tokens=4,acceptance=0.7"


def parse_draft(text: str) -> Draft:
    """A draft from its text, as `gdp place --draft` takes it.

    Raises:
        ArgumentError: The text has another form.

    >>> parse_draft("hf:small,tokens=4,acceptance=0.7")
    Draft(model='hf:small', tokens=4, acceptance=0.7)
    """
    model, *parts = text.split(",")
    given: dict[str, str] = {}
    for part in parts:
        name, _, value = part.strip().partition("=")
        given[name] = value
    if not model or given.keys() != {"tokens", "acceptance"}:
        raise ArgumentError(f"{text!r} must look like {_FORM}")
    tokens = whole_number(given["tokens"])
    try:
        acceptance = float(given["acceptance"])
    except ValueError:
        acceptance = math.nan
    if tokens is None or not math.isfinite(acceptance):
        raise ArgumentError(f"{text!r} must look like {_FORM}, with numbers")
    return Draft(model, tokens, acceptance)


def with_draft(planner: PlanMaker, traffic: Traffic, plan: ServedPlan, draft: Draft) -> ServedPlan:
    """The plan with a small model beside it: other seconds of a pass, and less room for caches.

    Args:
        planner: Asks for plans of the large model.
        traffic: Requests.
        plan: Of the large model alone, in which all GPUs serve prompts and tokens.
        draft: The small model.

    Raises:
        ArgumentError: The plan has stages, which vLLM does not draft for; the small model does not
            divide as the large one, or has no room beside it.
    """
    if plan.engine.stages > 1:
        raise ArgumentError("vLLM drafts for no pipeline of stages")
    small, engine = _beside(planner, plan, draft)
    drafting = Drafting.of(draft.tokens, draft.acceptance, engine)
    own = plan.engine._replace(
        cache_tokens=_room(plan, small), drafting=drafting,
        launch_s=plan.engine.launch_s + engine.launch_s,
    )  # fmt: skip
    served = serve(in_steady_state(traffic, own), own)
    placed, text = plan.result.placement, f"{draft.tokens} {draft.model}"
    record = placed.question
    remembered = None if record is None else msgspec.structs.replace(record, draft=text)
    result = replace(
        plan.result, question=replace(plan.result.question, draft=text),
        placement=replace(placed, question=remembered),
    )  # fmt: skip
    return replace(plan, result=result, engine=own, served=served)


def _beside(
    planner: PlanMaker, plan: ServedPlan, draft: Draft
) -> tuple[GenerationAnswer, ServingEngine]:
    """The request of the small model on the GPUs of one copy of the large one, divided alike, and
    its engine."""
    request, placed = plan.generation.request, plan.result.placement
    cluster = plan.result.question.cluster
    small = Generation(draft.model, request.prompt, request.new, request.batch)
    question = replace(planner.asked(small), cluster=cluster)
    graph = question.graph
    counts = np.bincount(placed.device[~plan.result.question.graph.is_io])
    lead = int(counts.argmax())
    splits = tuple(Split(s.devices) for s in placed.splits if s.devices[0] == lead)
    device = np.where(graph.is_io, cluster.host, lead)
    placement = make_placement(graph, cluster, device, made_by="gdp vllm, draft", splits=splits)
    try:
        score = solve.simulate(question, placement)
    except ModelError as error:
        raise ArgumentError(
            f"vLLM divides the model that drafts as the other one: {error}"
        ) from None
    answer = generation_answer(question, placement, score)
    if answer is None:
        raise ArgumentError(f"--draft {draft.model} is no model that writes tokens")
    return answer, engine_of(answer, question)


def _room(plan: ServedPlan, small: GenerationAnswer) -> float:
    """Tokens that caches of both models have room for on the fullest GPU of a copy."""
    question = plan.result.question
    count = requests_in_flight(question.graph, question.cluster, question.objective)
    own, other = (answer.request.batch * answer.request.held for answer in (plan.generation, small))
    rooms, missing = [], 0
    for row, beside in zip(plan.generation.memory, small.memory, strict=True):
        if row.free_bytes is None or not row.cache_bytes or not beside.weights_bytes:
            continue
        left = row.free_bytes + row.cache_bytes - beside.weights_bytes
        of_token = row.cache_bytes / (count * own) + beside.cache_bytes / other
        rooms.append(left / of_token)
        missing = max(missing, -left)
    if missing:
        raise ArgumentError(
            f"the model that drafts has no room: {format_bytes(missing)} are missing on a GPU"
        )
    return min(rooms, default=math.inf)
