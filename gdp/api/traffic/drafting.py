"""Plans with a small model that drafts tokens for a large one (speculative decoding).

Whether drafting pays depends on how many requests run side by side: checking k + 1 tokens costs
nothing while a pass waits for weights, and k + 1 times as much once it waits for arithmetic.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from gdp.api.generation import draft_answer, with_draft_memory
from gdp.api.traffic.plan import engine_of
from gdp.base.errors import ArgumentError
from gdp.base.units import format_bytes, whole_number
from gdp.placement.placement import MOST_DRAFT_TOKENS, DraftModel
from gdp.question.models import is_gguf
from gdp.question.models import with_draft as with_draft_file
from gdp.question.prepare import requests_in_flight
from gdp.question.result import GenerationAnswer, ServedPlan
from gdp.sim.serving import Drafting, in_steady_state, serve
from gdp.sim.traffic import Traffic


@dataclass(frozen=True)
class Draft:
    """A small model, the tokens that it proposes in a pass, and the probability that the large one
    accepts a token behind accepted ones (`acceptance`): the first of vLLM's acceptance rates per
    position, not their mean."""

    model: str | Path
    tokens: int
    acceptance: float

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= MOST_DRAFT_TOKENS:
            raise ArgumentError(
                f"draft tokens must be from 1 to {MOST_DRAFT_TOKENS}, got {self.tokens}"
            )
        if not 0.0 <= self.acceptance < 1.0:
            raise ArgumentError(
                f"acceptance must be at least 0 and below 1, got {self.acceptance:g}"
            )

    def require_config(self) -> None:
        """Raise `ArgumentError` for a model that vLLM does not read."""
        if is_gguf(os.fspath(self.model)):
            raise ArgumentError(
                f"a model that drafts beside vLLM is a configuration (hf:CONFIG), got {self.model}"
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
        if name in given:
            raise ArgumentError(f"{text!r} must look like {_FORM}: {name} is given twice")
        given[name] = value
    if not model or given.keys() != {"tokens", "acceptance"}:
        raise ArgumentError(f"{text!r} must look like {_FORM}")
    tokens = whole_number(given["tokens"])
    try:
        acceptance = float(given["acceptance"])
    except ValueError:
        acceptance = math.nan
    if tokens is None or not math.isfinite(acceptance):
        raise ArgumentError(
            f"{text!r} must look like {_FORM}, with a whole number of tokens from 1 to "
            f"{MOST_DRAFT_TOKENS} and an acceptance of at least 0 and below 1"
        )
    return Draft(model, tokens, acceptance)


def drafted(spec: str, draft: Draft) -> str:
    """The spec of a .gguf model with a draft model, for llama.cpp; raises `ArgumentError` where
    one of the two is none."""
    if not is_gguf(spec):
        raise ArgumentError(
            "--draft is for .gguf models with --generate (--for llamacpp), and for requests of "
            "--traffic to hf: models (--for vllm)"
        )
    return with_draft_file(spec, draft.model, draft.tokens, draft.acceptance)


def with_draft(traffic: Traffic, plan: ServedPlan, draft: Draft) -> ServedPlan:
    """The plan with a draft model: other seconds of a pass, and less memory for caches.

    Args:
        traffic: Requests.
        plan: Of the large model alone, in which all GPUs serve prompts and tokens.
        draft: The small model.

    Raises:
        ArgumentError: The plan has stages, which vLLM does not draft for; the small model does not
            divide as the large one, or has no room beside it.
    """
    model = DraftModel(os.fspath(draft.model), draft.tokens)
    question, placed = replace(plan.result.question, draft=model), plan.result.placement
    small_question, small = draft_answer(question, placed)
    count = requests_in_flight(question.graph, question.cluster, question.objective)
    generation = with_draft_memory(plan.generation, small, model, count)
    _require_room(generation)
    engine = engine_of(small, small_question)
    own = plan.engine._replace(
        cache_tokens=engine_of(generation, question).cache_tokens,
        drafting=Drafting.of(draft.tokens, draft.acceptance, engine),
        launch_s=plan.engine.launch_s + engine.launch_s,
    )
    served = serve(in_steady_state(traffic, own), own)
    record = placed.question
    remembered = None if record is None else msgspec.structs.replace(record, draft=model)
    result = replace(
        plan.result, question=question, placement=replace(placed, question=remembered),
        generation=generation,
    )  # fmt: skip
    return replace(plan, result=result, engine=own, served=served)


def _require_room(answer: GenerationAnswer) -> None:
    """Raise `ArgumentError` where weights leave no room for a single token."""
    missing = max(
        -(row.free_bytes + row.growing_bytes) if row.free_bytes is not None else 0
        for row in answer.memory
    )
    if missing > 0:
        raise ArgumentError(
            f"the model that drafts has no room: {format_bytes(missing)} are missing on a GPU"
        )
