"""Answers about language models as measured runs correct them."""

import math
from dataclasses import replace

from gdp.corrections.estimate import Correction, correction_of
from gdp.costs.default import SHIPPED, resolve_costs
from gdp.costs.measured.host import HOSTS
from gdp.placement.placement import Placement
from gdp.question.passes import engine_name, passes_of, stack_of
from gdp.question.question import Question
from gdp.question.result import GenerationAnswer


def costs_label(question: Question) -> str:
    """The line of a question's costs, which runs are compared by."""
    return resolve_costs(question.costs, question.cluster, question.graph)[1]


def corrected(
    question: Question, placement: Placement, answer: GenerationAnswer
) -> GenerationAnswer:
    """An answer with its times as runs of its stack correct them, and their 90% intervals; as it is
    where costs of the user's own are asked for, or no engine computes the model."""
    engine = engine_name(question)
    if not engine or not (question.costs in (None, SHIPPED) or question.costs in HOSTS):
        return answer
    passes = passes_of(question, answer, placement)
    found = correction_of(stack_of(question, engine), passes, costs_label(question))
    return answer if found is None else with_correction(answer, found)


def with_correction(answer: GenerationAnswer, found: Correction) -> GenerationAnswer:
    """An answer whose prefill and decode take other times."""
    prefill, decode = found.prefill.factor, found.decode.factor
    request = answer.request
    more_s = (prefill - 1.0) * answer.first_token_s
    more_s += (decode - 1.0) * answer.token_s * request.steps
    request_s = max(answer.request_s + more_s, 1e-12)
    faster = answer.request_s / request_s
    full = answer.full_tokens_per_s
    return replace(
        answer, first_token_s=answer.first_token_s * prefill, token_s=answer.token_s * decode,
        caches_s=answer.caches_s * decode, request_s=request_s,
        all_tokens_per_s=answer.all_tokens_per_s * (1.0 if math.isinf(faster) else faster),
        full_tokens_per_s=None if full is None else full / decode, correction=found,
    )  # fmt: skip
