"""Answers about language models as measured runs correct them."""

from dataclasses import replace

from gdp.corrections.estimate import Correction, correction_of
from gdp.costs.default import SHIPPED, resolve_costs
from gdp.costs.measured.host import HOSTS
from gdp.graph.request import DECODE, PREFILL
from gdp.placement.placement import Placement
from gdp.question.passes import engine_name, passes_of, stack_of
from gdp.question.question import Question
from gdp.question.result import GenerationAnswer


def costs_label(question: Question) -> str:
    """The line of a question's costs, which runs are compared by."""
    return resolve_costs(question.costs, question.cluster, question.graph)[1]


def has_shipped_costs(question: Question) -> bool:
    """True for the costs of gdp itself, which runs correct, with the host's part of any engine."""
    costs = question.costs
    return costs is None or (isinstance(costs, str) and (costs == SHIPPED or costs in HOSTS))


def corrected(
    question: Question, placement: Placement, answer: GenerationAnswer
) -> GenerationAnswer:
    """An answer with its times as runs of its stack correct them, and their 90% intervals; as it is
    where costs of the user's own are asked for, or no engine computes the model."""
    engine = engine_name(question)
    if not engine or not has_shipped_costs(question):
        return answer
    passes = passes_of(question, answer, placement)
    found = correction_of(stack_of(question, engine), passes, costs_label(question))
    if found is None:
        return answer
    return with_correction(answer, _above(found, _least_s(question, answer), answer))


def _least_s(question: Question, answer: GenerationAnswer) -> tuple[float, float]:
    """Seconds below which prefill and decode cannot be: FLOP over the peaks of all devices that
    hold weights, bytes of a step over their bandwidths."""
    graph = question.graph
    holding = {row.device for row in answer.memory if row.weights_bytes}
    devices = [d for d in question.cluster.devices if d.name in holding] or question.cluster.devices
    flop = float(graph.flop[graph.phase == PREFILL].sum())
    moved = float(graph.memory_traffic_bytes[graph.phase == DECODE].sum())
    peak = sum(max(device.flop_per_s.values()) for device in devices)
    return flop / peak, moved / sum(device.bytes_per_s for device in devices)


def _above(found: Correction, least_s: tuple[float, float], answer: GenerationAnswer) -> Correction:
    """A correction whose intervals end where no device is fast enough; its factors stay."""
    ranges = [
        own._replace(low=min(own.factor, max(own.low, least / max(seconds, 1e-12))))
        for own, least, seconds in zip(
            (found.prefill, found.decode), least_s, (answer.first_token_s, answer.token_s),
            strict=True,
        )
    ]  # fmt: skip
    return found._replace(prefill=ranges[0], decode=ranges[1])


def with_correction(answer: GenerationAnswer, found: Correction) -> GenerationAnswer:
    """An answer whose prefill and decode take other times."""
    prefill, decode = found.prefill.factor, found.decode.factor
    phases_s = answer.first_token_s, answer.token_s * answer.request.steps
    before_s = sum(phases_s)
    longer = (prefill * phases_s[0] + decode * phases_s[1]) / before_s if before_s else 1.0
    full = answer.full_tokens_per_s
    return replace(
        answer, first_token_s=answer.first_token_s * prefill, token_s=answer.token_s * decode,
        caches_s=answer.caches_s * decode, request_s=answer.request_s * longer,
        all_tokens_per_s=answer.all_tokens_per_s / longer,
        full_tokens_per_s=None if full is None else full / decode, correction=found,
    )  # fmt: skip
