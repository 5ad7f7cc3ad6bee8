"""The passes and the stack of an answer about a language model, as corrections read them."""

import numpy as np

from gdp.corrections.features import ENGINES, EngineStack, Pass
from gdp.costs.llama_backends import backend_of
from gdp.costs.measured.host import ENGINE
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import PREFILL
from gdp.placement.placement import Placement
from gdp.question.question import Question
from gdp.question.result import GenerationAnswer, TimePart

_PACKED = 4.2
"""Most bytes of a weight; ops with more for each multiplication leave some weights unused."""


def engine_name(question: Question) -> str:
    """Row of the engines whose runs a question is like; "" where no engine computes it."""
    if question.graph.source == "gguf":
        return "llamacpp"
    if question.target != "vllm":
        return ""
    named = question.costs if isinstance(question.costs, str) else ENGINE
    return next((name for name in ENGINES if named.startswith(name)), ENGINE)


def stack_of(question: Question, engine: str, version: str = "") -> EngineStack:
    """The stack of a question's machine under an engine: its accelerator, else its processor."""
    devices = question.cluster.devices
    card = max(devices, key=lambda device: (not device.is_cpu, device.bytes_per_s))
    host = next((device.kind for device in devices if device.is_cpu), "")
    return EngineStack(
        engine, card.kind, float(card.bytes_per_s), float(card.speed("float16")),
        version, "cpu" if card.is_cpu else backend_of(card), host,
    )  # fmt: skip


def passes_of(
    question: Question, answer: GenerationAnswer, placement: Placement
) -> tuple[Pass, Pass]:
    """The prefill pass and the decode step of an answer.

    Args:
        question: Of the answer, with the graph.
        answer: Its seconds and their parts.
        placement: Whose splits divide the layers.
    """
    graph, request = question.graph, answer.request
    processors = {device.name for device in question.cluster.devices if device.is_cpu}
    splits = placement.splits
    tensor, experts = (len(splits[0].devices), splits[0].experts) if splits else (1, False)
    weights = sum(row.weights_bytes for row in answer.memory) / answer.copies
    at_once = request.pass_tokens  # 0: whole prompts are one
    bytes_each, active = weight_sizes(graph, request.batch * request.prompt)
    read = request.prompt * request.batch
    share = min(1.0, at_once / read) if at_once else 1.0
    phases = (True, answer.first_token_s * share, answer.shares[0], read * share), (
        False, answer.token_s, answer.shares[1], request.batch,
    )  # fmt: skip
    return tuple(  # pyright: ignore[reportReturnType]
        Pass(
            prefill=prefill, parts_s=_parts(shares, seconds, processors), tokens=tokens,
            sequences=request.batch, context=request.prompt + request.new / 2,
            ops=graph.num_ops, weight_bytes=weights / tensor, active_bytes=active,
            bits=8 * bytes_each, tensor=tensor, experts=experts,
        )
        for prefill, seconds, shares, tokens in phases
    )  # fmt: skip


def _parts(shares: tuple[TimePart, ...], seconds: float, processors: set[str]) -> dict[str, float]:
    """Seconds by cause, those of processors apart."""
    found: dict[str, float] = {}
    for part in shares:
        apart = part.device in processors and part.cause in ("bandwidth", "arithmetic")
        cause = f"processor {part.cause}" if apart else part.cause
        found[cause] = found.get(cause, 0.0) + part.share * seconds
    return found


def weight_sizes(graph: OpGraph, tokens: int) -> tuple[float, float]:
    """(bytes of a weight, all bytes of weights for each weight that a token meets).

    A product of t tokens with K x N weights has 2 t K N FLOP. Where an op holds more bytes than any
    format has for these, as the experts of a mixture do, a token meets only some of its weights.

    Args:
        graph: Of a request.
        tokens: Of all its prompts.
    """
    weights = graph.weight_bytes - graph.cache_bytes
    mine = (graph.phase == PREFILL) & (weights > 0) & (graph.flop > 0) & ~graph.is_io
    held, met = weights[mine].astype(float), graph.flop[mine] / (2.0 * tokens)
    each = held / np.maximum(met, 1.0)
    dense = np.flatnonzero(each <= _PACKED)
    if not len(dense):
        return 2.0, float(held.sum() / met.sum()) if met.sum() else 2.0
    order = dense[np.argsort(each[dense])]
    share = np.cumsum(held[order])
    middle = each[order][np.searchsorted(share, share[-1] / 2)]
    return float(middle), float(held.sum() / met.sum())
