"""Requests to language models: first token, tokens per second, memory, and what limits them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.errors import ArgumentError, ModelError
from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.costs.offload import is_sent, offloads
from gdp.graph.generation import cached_share
from gdp.graph.op_graph import SAMPLING_OPS, OpGraph
from gdp.graph.request import DECODE
from gdp.ops.llamacpp import DRAFT
from gdp.placement.placement import DraftModel, Placement
from gdp.question import solve
from gdp.question.corrected import corrected
from gdp.question.models import spec_of
from gdp.question.prepare import once_of, prepare_placement, requests_in_flight
from gdp.question.question import Question
from gdp.question.result import (
    CAUSES,
    DeviceMemory,
    GenerationAnswer,
    MeanPower,
    Result,
    RunEnergy,
    TimePart,
)
from gdp.sim.energy import run_power
from gdp.sim.latency import simulate
from gdp.sim.objectives import Score, find_objective
from gdp.sim.plain import serial_seconds
from gdp.sim.prediction import Prediction
from gdp.splits.members import held_graphs
from gdp.targets.contexts import cache_bytes_on, longest_of_plan, weights_once
from gdp.targets.llamacpp.flags import draft_of
from gdp.targets.llamacpp.pipeline import saved_s
from gdp.targets.vllm.draft import beside

LAUNCHED = 0.15
"""Share of an op's seconds that arithmetic or bytes account for: below, it waits for its launch."""


def generation_of(question: Question, placement: Placement) -> GenerationAnswer:
    """The answer of a placement that was made before.

    Raises:
        ArgumentError: The placement is of no generation.
    """
    answer = generation_answer(question, placement, solve.simulate(question, placement))
    if answer is None:
        raise ArgumentError(
            "the placement is of no request (--generate): give --op GLOB or --scope MODULE"
        )
    return answer


def generation_answer(
    question: Question, placement: Placement, score: Score, *, corrections: bool = True
) -> GenerationAnswer | None:
    """Seconds and bytes of a request under a placement and its score; None for one phase. With
    `corrections` times are those that measured runs of the stack let expect.

    The prompt and one step are simulated with the links as they are; the score is that of the whole
    request. R requests of L seconds each that take turns on the devices, the busiest of which needs
    P seconds for each, finish max(P, L / R) seconds apart at best, and so they do where every step
    passes each device once: the larger mean of two cycles, the busiest device and the whole way.
    """
    graph, cluster = question.graph, question.cluster
    request = graph.request
    if request is None:
        return None
    once = once_of(question)
    predicted = prepare_placement(replace(question, graph=once, objective="latency"), placement)
    problem, placed = predicted
    group_of = problem.origin.group_of
    first = int(group_of[once.op_index[SAMPLING_OPS[0]]])
    first_s, token_s = phases_s(predicted, once)
    stepping = np.zeros(problem.num_ops, dtype=bool)
    stepping[group_of[graph.repeats > 1]] = True
    stepping[first] = False  # it takes the first token, too
    saved = _saved_s(predicted, graph)
    shares = _shares(predicted, ~stepping, first_s + saved), _shares(predicted, stepping, token_s)
    cached = np.flatnonzero(stepping & (problem.graph.cache_bytes > 0))
    caches_s = float(problem.compute_s[cached, placed.device[cached]].sum())
    count = requests_in_flight(graph, cluster, question.objective)
    busiest_s = min(score.period_s, score.latency_s)
    useful = max(1, math.ceil(score.latency_s / busiest_s * (1 - 1e-9))) if busiest_s else 1
    flight = count if request.requests else min(count, useful)
    copies = max((len(team) for team in placement.teams), default=1)
    is_pipeline = find_objective(question.objective).pipelined or count > 1
    flight = flight if is_pipeline else copies  # else one each
    apart_s = max(busiest_s, score.latency_s / flight)
    memory = _memory(graph, placement, cluster, score, count)
    homes = placement.homes
    holding = {homes.get(d, d) for d, row in enumerate(memory) if row.cache_bytes}
    answer = GenerationAnswer(
        request=request, first_token_s=first_s, token_s=token_s,
        caches_s=min(caches_s, token_s), request_s=score.latency_s - saved,
        in_flight=flight, useful=useful, room=_room(memory, count),
        all_tokens_per_s=request.new * request.batch / apart_s if apart_s else math.inf,
        shares=shares,
        limits=(
            _limit(shares[0], "prefill", "TTFT"),
            _limit(shares[1], "decode", "an iteration"),
        ),
        memory=memory, is_pipeline=is_pipeline,
        context=request.held,
        longest_context=longest_of_plan(question, placement, score),
        stages=max(1, len(holding)), copies=copies,
        full_tokens_per_s=_full_tokens_per_s(graph, token_s, min(caches_s, token_s)),
        draft=draft_of(graph),
    )  # fmt: skip
    try:
        power = _mean_power(predicted, stepping, cached, (first_s + saved, answer.token_s))
        answer = replace(answer, power=power)
    except ArgumentError as error:
        answer = replace(answer, no_power=str(error))
    if corrections:
        answer = corrected(question, placement, answer)
    if question.draft is None:
        return answer
    _, small = draft_answer(question, placement)
    return with_draft_memory(answer, small, question.draft, count)


def _mean_power(
    predicted: Prediction, stepping: Bool[np.ndarray, "M"], cached: Int[np.ndarray, "K"],
    phases_s: tuple[float, float],
) -> MeanPower:  # fmt: skip
    """Mean watts of prefill and of a decode step, whose ops are `stepping` and among them `cached`,
    which read caches; raises `ArgumentError` where watts are unknown."""
    problem, placed = predicted
    power = run_power(problem, placed)
    devices, idle_w = power.devices(problem.cluster), power.idle_w
    op_s = problem.compute_s[np.arange(problem.num_ops), placed.device]
    first_s, token_s = phases_s
    caches_j, caches_s = float(power.op_j[cached].sum()), float(op_s[cached].sum())
    first_j, token_j = (float(power.op_j[mine].sum()) for mine in (~stepping, stepping))

    def mean_w(joules: float, seconds: float) -> float:
        return idle_w + joules / seconds if seconds > 0 else idle_w

    return MeanPower(
        devices, idle_w, power.limit_w, mean_w(first_j, first_s), mean_w(token_j, token_s),
        mean_w(token_j - caches_j, token_s - caches_s), mean_w(caches_j, caches_s),
    )  # fmt: skip


def with_energy(result: Result) -> Result:
    """The result with the energy of one run, or of a sample of its full pipeline."""
    question, score = result.question, result.score
    power = run_power(*prepare_placement(question, result.placement))
    pipelined = find_objective(question.objective).pipelined
    seconds = score.period_s if pipelined else score.latency_s
    try:
        devices = power.devices(question.cluster)
    except ArgumentError as error:
        return replace(result, no_energy=str(error))
    joules = power.joules(seconds)
    watts = joules / seconds if seconds > 0 else power.idle_w
    return replace(result, energy=RunEnergy(devices, joules, watts))


def _full_tokens_per_s(graph: OpGraph, token_s: float, caches_s: float) -> float | None:
    """Decode tokens per second at the reserved context length: ops that read caches take seconds in
    proportion to the caches' bytes. None if the request has as many tokens, or the growth of caches
    is unknown."""
    request = graph.request
    if request is None or request.held <= request.prompt + request.new or not graph.growth.is_known:
        return None
    mean = cached_share(graph, round(request.prompt + request.new / 2))
    grown_s = token_s + caches_s * (1 / mean - 1) if mean > 0 else token_s
    written = request.batch * request.new / request.steps
    return written / grown_s if grown_s > 0 else math.inf


def draft_answer(question: Question, placement: Placement) -> tuple[Question, GenerationAnswer]:
    """The request to the draft model on the GPUs of the target model: its question and its answer.

    Raises:
        ArgumentError: vLLM has no small model beside this placement, or it does not divide as the
            large one, or writes no tokens.
    """
    small, placed = beside(question, placement)
    try:
        score = solve.simulate(small, placed)
    except ModelError as error:
        raise ArgumentError(
            f"vLLM divides the model that drafts as the other one: {error}"
        ) from None
    answer = generation_answer(small, placed, score)
    if answer is None:
        raise ArgumentError(f"--draft {spec_of(small.model)} is no model that writes tokens")
    return small, answer


def with_draft_memory(
    answer: GenerationAnswer, small: GenerationAnswer, draft: DraftModel, count: int
) -> GenerationAnswer:
    """The answer with the weights and caches of a draft model, and the remaining memory.

    Where caches of the requests that were planned for have no room beside it, `free_bytes` is
    negative: fewer of them run at once.

    Args:
        answer: Of the large model.
        small: Of the same request to the small one, on the same devices.
        draft: The small one.
        count: Requests whose caches both have.
    """
    memory = []
    for row, other in zip(answer.memory, small.memory, strict=True):
        more = other.weights_bytes + other.cache_bytes
        left = None if row.free_bytes is None else row.free_bytes - more
        memory.append(
            replace(row, free_bytes=left, draft_bytes=more, draft_cache_bytes=other.cache_bytes)
        )
    rows, longest = tuple(memory), answer.longest_context
    if longest is not None:
        longest = min(longest, int(min(rooms(rows), default=math.inf) * answer.context))
    return replace(
        answer, memory=rows, room=_room(rows, count), longest_context=longest, draft=draft
    )


def rooms(memory: Sequence[DeviceMemory]) -> list[float]:
    """By device with caches and a limit, the room for caches in multiples of those planned for."""
    return [
        (row.free_bytes + row.growing_bytes) / row.growing_bytes
        for row in memory
        if row.growing_bytes and row.free_bytes is not None
    ]


def causes_s(predicted: Prediction) -> dict[str, Float[np.ndarray, "M"]]:
    """Seconds of each op on its device by cause: of `CAUSES` without transfers."""
    problem, device = predicted.problem, predicted.assignment.device
    graph, devices = problem.graph, problem.cluster.devices
    ops, work = np.arange(problem.num_ops), ~graph.is_io
    op_s = np.where(work, problem.compute_s[ops, device], 0.0)
    exchange_s = np.zeros(len(ops))
    if problem.origin.exchange_s is not None:
        exchange_s[work] = problem.origin.exchange_s[ops, device][work]
    op_s = op_s - exchange_s
    streams = problem.cluster.streams[device]
    on_cpu = problem.cluster.is_cpu[device]
    sends = is_sent(graph) & offloads(graph, problem.cluster) & on_cpu & ~streams
    own = work & ~streams & ~sends
    rate = np.array([entry.bytes_per_s for entry in devices])[device]
    speed = np.array([devices[device[op]].speed(graph.detail[op].dtype) for op in ops])
    moved_s, worked_s = np.zeros((2, len(ops)))
    moved_s[own] = graph.memory_traffic_bytes[own] / rate[own]
    worked_s[own] = graph.flop[own] / speed[own]
    waits = own & (np.maximum(moved_s, worked_s) < LAUNCHED * op_s)
    reads = moved_s >= worked_s
    launch_s = problem.cluster.op_dispatch_s[device]
    return {
        "collectives": exchange_s,
        "dispatch": np.where(work, launch_s, 0.0) + np.where(waits, op_s, 0.0),
        "streaming": np.where(streams, op_s, 0.0),
        "sending": np.where(sends, op_s, 0.0),
        "bandwidth": np.where(own & reads & ~waits, op_s, 0.0),
        "arithmetic": np.where(own & ~reads & ~waits, op_s, 0.0),
    }


def _shares(
    predicted: Prediction, mine: Bool[np.ndarray, "M"], whole_s: float
) -> tuple[TimePart, ...]:
    """Parts of a phase, the largest first: bandwidth, arithmetic, dispatch or streaming of each
    device; the rest is transfers. Where devices work at once, parts of the sum of all work."""
    names = predicted.problem.cluster.device_names
    causes, device = causes_s(predicted), predicted.assignment.device
    together = {
        s.devices[0]: tuple(names[d] for d in s.devices) for s in predicted.assignment.splits
    }
    parts = [
        TimePart(cause, name, float(seconds[mine & (device == d)].sum()), together.get(d, ()))
        for d, name in enumerate(names)
        for cause, seconds in causes.items()
    ]
    all_s = sum(part.share for part in parts)
    parts.append(TimePart("transfers", "", max(whole_s - all_s, 0.0)))
    total_s = max(whole_s, all_s)
    if total_s <= 0:
        return ()
    parts = [part._replace(share=part.share / total_s) for part in parts if part.share > 0]
    return tuple(sorted(parts, key=lambda part: -part.share))


def phases_s(predicted: Prediction, once: OpGraph) -> tuple[float, float]:
    """Seconds of prefill and of one decode step, of a graph that runs each phase once; less the
    seconds that llama.cpp saves by a pipeline of micro-batches."""
    problem, placed = predicted
    schedule, group_of = simulate(problem, placed.device, placed.rank), problem.origin.group_of
    prefill = np.ones(problem.num_ops, dtype=bool)
    prefill[group_of[once.phase == DECODE]] = False
    first_s = max(
        float(schedule.finish_s[int(group_of[once.op_index[SAMPLING_OPS[0]]])]),
        serial_seconds(problem, placed.device, prefill),
    )
    return first_s - _saved_s(predicted, once), max(schedule.latency_s - first_s, 0.0)


def _saved_s(predicted: Prediction, graph: OpGraph) -> float:
    """Seconds that a pipeline of micro-batches saves of a schedule that has one after the other."""
    return saved_s(predicted) if graph.source == "gguf" else 0.0


def _limit(shares: tuple[TimePart, ...], phase: str, whole: str) -> str:
    """The largest part of the time of a phase, in a sentence."""
    if not shares:
        return f"nothing limits {phase}: it takes no time"
    cause, device, share = shares[0].cause, shares[0].place, shares[0].share
    what = {
        "transfers": "transfer between devices", "collectives": f"exchange between {device}",
        "streaming": f"transfer of weights on {device}",
        "sending": f"transfer of weights from {device}",
    }  # fmt: skip
    limit = what.get(cause, f"{cause} of {device}")
    return f"{limit} limits {phase}: {share:.0%} of {whole} is {CAUSES[cause]}"


def _memory(
    graph: OpGraph, placement: Placement, cluster: Cluster, score: Score, count: int
) -> tuple[DeviceMemory, ...]:
    rows, graphs = [], held_graphs(graph, placement)
    caches = cache_bytes_on(graphs, placement, cluster, count)
    held = weights_once(graphs, placement)
    drafting = np.array([scope == DRAFT for scope in graph.scope])
    for d, entry in enumerate(cluster.devices):
        # Buffers that a runtime reserves, such as those of masks, are neither weights nor caches.
        own, room = graphs[d], graphs[d].is_buffer[held[d]]
        weights = int((own.weight_bytes - own.cache_bytes)[held[d][~room]].sum())
        cache = int(caches[d]) - count * int(own.cache_bytes[held[d][room]].sum())
        drafts = held[d][~room & drafting[held[d]]]
        draft_cache = count * int(own.cache_bytes[drafts].sum())
        draft_weights = int((own.weight_bytes - own.cache_bytes)[drafts].sum())
        peak = int(score.peak_bytes[d])
        limited = entry.memory_bytes < UNLIMITED_BYTES
        rows.append(
            DeviceMemory(
                entry.name, weights - draft_weights, cache - draft_cache,
                max(peak - weights - cache, 0), entry.reserve_bytes,
                entry.memory_bytes - peak if limited else None,
                draft_weights + draft_cache, draft_cache,
            )
        )  # fmt: skip
    return tuple(rows)


def _room(memory: tuple[DeviceMemory, ...], count: int) -> int | None:
    """Number of requests whose caches fit in the remaining memory."""
    counts = [
        (row.free_bytes + row.growing_bytes) * count // row.growing_bytes
        for row in memory
        if row.growing_bytes and row.free_bytes is not None
    ]
    return max(0, min(counts)) if counts else None
