"""Requests to language models: first token, tokens per second, memory, and which of them fit."""

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float

from gdp import solve
from gdp.api.place import ask, planned, quantisation_note
from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.types import UNLIMITED_BYTES, Cluster, fullness
from gdp.costs.base import CostModel, launch_floors_s
from gdp.costs.measured.graph import graph_kernels
from gdp.costs.measured.kernels import KINDS
from gdp.costs.offload import is_offload
from gdp.costs.op_offload import offloads, sent_bytes
from gdp.errors import ArgumentError, InfeasibleError
from gdp.graph.generation import NEXT_TOKEN, Request, request_of, run_once
from gdp.graph.groups import sum_per_group
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Search
from gdp.models import Generation, with_options
from gdp.placement import Placement, check, make_placement
from gdp.prepare import prepare_placement, requests_in_flight
from gdp.problem.problem import Problem
from gdp.question import Question
from gdp.result import Result
from gdp.sim.latency import simulate
from gdp.sim.objectives import Score, find_objective
from gdp.sim.prediction import Prediction
from gdp.splits.members import held_graphs
from gdp.targets.contexts import cache_bytes_on, longest_of_plan, plan_longest, weights_once
from gdp.targets.free import plan_freely

FOUR_BITS = 4.5
"""Bits of a weight in blocks of 4 bits, their scales included."""
LAUNCHED = 0.15
"""Share of an op's seconds that arithmetic or bytes account for: below, it waits for its launch."""
WEIGHTED = tuple(KINDS.index(name) for name in ("product", "experts"))
"""Classes of kernels whose second factor may be weights."""
CAUSES = {
    "bandwidth": "reading weights and caches",
    "arithmetic": "computing",
    "sending": "sending weights to a GPU and computing there",
    "dispatch": "launching kernels",
    "streaming": "streaming weights",
    "transfers": "moving tensors between devices",
    "collectives": "adding up parts of ops",
}
"""Parts of the time of a phase, and their words."""


class TimePart(NamedTuple):
    """A part of the time of a phase."""

    cause: str  # of `CAUSES`
    device: str  # "" for tensors between devices
    share: float
    together: tuple[str, ...] = ()  # devices that compute each op with it, itself among them

    @property
    def text(self) -> str:
        """Work and place in words."""
        return CAUSES[self.cause] + (f" on {self.place}" if self.device else "")

    @property
    def place(self) -> str:
        """The device, or all of the group that computes each op together."""
        return " and ".join(self.together) or self.device


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device; `free_bytes` is None where it has no limit."""

    device: str
    weights_bytes: int
    cache_bytes: int  # at the end of the request, of all requests in flight
    activations_bytes: int  # the most at once, beside weights and caches
    reserve_bytes: int  # kept beside all these for the system, drivers and runtimes
    free_bytes: int | None


@dataclass(frozen=True)
class GenerationAnswer:
    """Seconds and bytes of one request. Times are predictions of the simulator."""

    request: Request
    first_token_s: float  # from the prompt to the first token
    token_s: float  # of one step at the mean context
    caches_s: float  # of it, in ops that read caches
    request_s: float  # the prompt and all steps
    in_flight: int  # requests at once
    all_tokens_per_s: float  # written by all of them
    useful: int  # requests at once from which on more are no faster: some device never waits
    room: int | None  # requests whose caches the memory has room for; None: no limit
    shares: tuple[tuple[TimePart, ...], tuple[TimePart, ...]]  # of the prompt and of a step
    limits: tuple[str, str]  # what most of the time of the prompt and of the steps goes to
    memory: tuple[DeviceMemory, ...]
    is_pipeline: bool  # requests at once were asked for
    context: int  # tokens of each sequence that caches are reserved for
    longest_context: int | None  # that these devices have room for; None where that is not known
    stages: int  # devices with caches, or groups of them that compute each op together
    copies: int  # of the model, each with a batch of its own

    @property
    def tokens_per_s(self) -> float:
        """Tokens of one request per second while it decodes, those of its batch together."""
        return self.request.batch / self.token_s if self.token_s > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        plain = asdict(self) | {"request": self.request.asked()}
        for name in ("limits", "shares"):
            plain[name] = dict(zip(("prompt", "decode"), plain[name], strict=True))
        plain["shares"] = {
            phase: [share._asdict() | {"text": share.text} for share in rows]
            for phase, rows in plain["shares"].items()
        }
        return plain | {"tokens_per_s": self.tokens_per_s}


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
    question: Question, placement: Placement, score: Score
) -> GenerationAnswer | None:
    """Seconds and bytes of a request under a placement and its score; None for one phase.

    The prompt and one step are simulated with the links as they are; the score is that of the whole
    request. R requests of L seconds each that take turns on the devices, the busiest of which needs
    P seconds for each, finish max(P, L / R) seconds apart at best, and so they do where every step
    passes each device once: the larger mean of two cycles, the busiest device and the whole way.
    """
    graph, cluster = question.graph, question.cluster
    request = request_of(graph)
    if request is None:
        return None
    once = run_once(graph)
    predicted = prepare_placement(replace(question, graph=once, objective="latency"), placement)
    problem, placed = predicted
    group_of = problem.origin.group_of
    first = int(group_of[once.op_index[NEXT_TOKEN]])
    first_s, token_s = _phases_s(predicted, once)
    stepping = np.zeros(problem.num_ops, dtype=bool)
    stepping[group_of[graph.repeats > 1]] = True
    stepping[first] = False  # it takes the first token, too
    shares = _shares(predicted, ~stepping, first_s), _shares(predicted, stepping, token_s)
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
    return GenerationAnswer(
        request=request, first_token_s=first_s, token_s=token_s,
        caches_s=min(caches_s, token_s), request_s=score.latency_s,
        in_flight=flight, useful=useful, room=_room(memory, count),
        all_tokens_per_s=request.new * request.batch / apart_s if apart_s else math.inf,
        shares=shares,
        limits=(
            _limit(shares[0], "the prompt", "the time to the first token"),
            _limit(shares[1], "decode", "a step"),
        ),
        memory=memory, is_pipeline=is_pipeline,
        context=request.held,
        longest_context=longest_of_plan(question, placement, score),
        stages=max(1, len(holding)), copies=copies,
    )  # fmt: skip


def _causes_s(predicted: Prediction) -> dict[str, Float[np.ndarray, "M"]]:
    """Seconds of each op on its device by cause: of `CAUSES` without transfers."""
    problem, device = predicted.problem, predicted.assignment.device
    graph, devices = problem.graph, problem.cluster.devices
    ops, work = np.arange(problem.num_ops), ~graph.is_io
    op_s = np.where(work, problem.compute_s[ops, device], 0.0)
    exchange_s = np.zeros(len(ops))
    if problem.origin.exchange_s is not None:
        exchange_s[work] = problem.origin.exchange_s[ops, device][work]
    op_s = op_s - exchange_s
    streams = np.array([is_offload(entry) for entry in devices])[device]
    on_cpu = np.array([entry.is_cpu for entry in devices])[device]
    sends = (sent_bytes(graph) > 0) & offloads(graph, problem.cluster) & on_cpu & ~streams
    own = work & ~streams & ~sends
    rate = np.array([entry.bytes_per_s for entry in devices])[device]
    speed = np.array([devices[device[op]].speed(graph.detail[op].dtype) for op in ops])
    moved_s, worked_s = np.zeros((2, len(ops)))
    moved_s[own] = graph.memory_traffic_bytes[own] / rate[own]
    worked_s[own] = graph.flop[own] / speed[own]
    waits = own & (np.maximum(moved_s, worked_s) < LAUNCHED * op_s)
    reads = moved_s >= worked_s
    launch_s = np.array([e.dispatch_s if e.dispatch_per == "op" else 0.0 for e in devices])[device]
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
    causes, device = _causes_s(predicted), predicted.assignment.device
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


@dataclass(frozen=True)
class Faster:
    """Seconds of a request, were its machine twice as fast in one thing, or its weights smaller."""

    what: str  # in words, such as "memory of gpu0 twice as fast"
    first_token_s: float
    token_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        return asdict(self)


def faster_machines(question: Question, placement: Placement) -> tuple[Faster, ...]:
    """Predictions for the placement as it is, with links, or the memory or the arithmetic of one
    device (of a group that computes each op together: of all its members) twice as fast; and with
    weights of products in 4 bits where they have more.

    Only those that make the prompt or a step at least 1% faster, the fastest step first. No op gets
    faster than its launch, where the costs know how long the host takes for that.
    """
    once = run_once(question.graph)
    predicted = prepare_placement(replace(question, graph=once, objective="latency"), placement)
    problem, placed = predicted
    names, ops = problem.cluster.device_names, np.arange(problem.num_ops)
    causes = _causes_s(predicted)
    half_s, all_s = _savings_s(question, once, predicted)
    first_s, token_s = _phases_s(predicted, once)
    links = replace(
        problem.cluster, link_bytes_per_s=2 * problem.cluster.link_bytes_per_s,
        link_latency_s=problem.cluster.link_latency_s / 2,
    )  # fmt: skip
    saved = [
        ("links twice as fast", links, causes["collectives"] / 2),
        (
            f"weights in {FOUR_BITS:g} bits",
            problem.cluster,
            np.minimum(_saved_in_four_bits_s(problem, causes), all_s),
        ),
    ]
    groups = {s.devices[0]: [names[d] for d in s.devices] for s in placed.splits}
    for d in np.unique(placed.device).tolist():
        name = " and ".join(groups.get(d, [names[d]]))
        for cause, word in (("bandwidth", "memory"), ("arithmetic", "arithmetic")):
            mine = (placed.device == d) & (causes[cause] > 0)
            less_s = np.where(mine, np.minimum(causes[cause] / 2, half_s), 0.0)
            saved.append((f"{word} of {name} twice as fast", problem.cluster, less_s))
    rows = []
    for what, cluster, less_s in saved:
        compute_s = problem.compute_s.copy()
        compute_s[ops, placed.device] -= less_s
        other = replace(problem, cluster=cluster, compute_s=compute_s)
        row = Faster(what, *_phases_s(predicted._replace(problem=other), once))
        if row.first_token_s < 0.99 * first_s or row.token_s < 0.99 * token_s:
            rows.append(row)
    return tuple(sorted(rows, key=lambda row: row.token_s))


def _savings_s(
    question: Question, once: OpGraph, predicted: Prediction
) -> tuple[Float[np.ndarray, "M"], Float[np.ndarray, "M"]]:
    """(seconds that each op saves on a device twice as fast, and on any): all that it takes beyond
    the launches of the model's ops that are merged in it."""
    problem, device = predicted.problem, predicted.assignment.device
    model, group_of = problem.origin.model, problem.origin.group_of
    op_s = problem.compute_s[np.arange(problem.num_ops), device]
    if problem.origin.exchange_s is not None:
        op_s = op_s - problem.origin.exchange_s[np.arange(problem.num_ops), device]
    floors = None if model is None else launch_floors_s(model, once, question.cluster)
    if model is None or floors is None:
        return op_s / 2, op_s
    ops, at = np.arange(once.num_ops), device[group_of]
    floor_s = floors[ops, at]
    if predicted.assignment.splits:  # of members only the fused ops' seconds are known
        beyond_s = np.maximum(op_s - sum_per_group(floor_s, group_of), 0.0)
        return np.minimum(op_s / 2, beyond_s), beyond_s
    own_s = model(once, question.cluster)[ops, at]
    beyond_s = np.maximum(own_s - floor_s, 0.0)
    # A processor waits for each call, then computes; other devices compute meanwhile.
    waits = np.array([entry.is_cpu for entry in question.cluster.devices])[at]
    half_s = np.where(waits, beyond_s / 2, np.minimum(own_s / 2, beyond_s))
    return sum_per_group(half_s, group_of), sum_per_group(beyond_s, group_of)


def _saved_in_four_bits_s(
    problem: Problem, causes: Mapping[str, Float[np.ndarray, "M"]]
) -> Float[np.ndarray, "M"]:
    """Seconds of each op that go to bytes of weights beyond `FOUR_BITS` each, whatever way the
    bytes come; unpacking is not counted."""
    kernels = graph_kernels(problem.graph, served=False).kernels
    traffic = np.maximum(problem.graph.memory_traffic_bytes, 1.0)
    weights = np.where(np.isin(kernels.kind, WEIGHTED), kernels.held_bytes / traffic, 0.0)
    beyond = np.maximum(1.0 - FOUR_BITS / kernels.stored_bits, 0.0)
    moved_s = causes["bandwidth"] + causes["streaming"] + causes["sending"]
    return moved_s * np.minimum(weights, 1.0) * beyond


def _phases_s(predicted: Prediction, once: OpGraph) -> tuple[float, float]:
    """Seconds to the first token and of one step, of a graph that runs each phase once."""
    problem, placed = predicted
    schedule = simulate(problem, placed.device, placed.rank)
    first_s = float(schedule.finish_s[int(problem.origin.group_of[once.op_index[NEXT_TOKEN]])])
    return first_s, max(schedule.latency_s - first_s, 0.0)


def _limit(shares: tuple[TimePart, ...], phase: str, whole: str) -> str:
    """The largest part of the time of a phase, in a sentence."""
    if not shares:
        return f"nothing limits {phase}: it takes no time"
    cause, device, share = shares[0].cause, shares[0].place, shares[0].share
    what = {
        "transfers": "the way between devices", "collectives": f"exchange between {device}",
        "streaming": f"the way of weights on {device}",
        "sending": f"the way of weights from {device}",
    }  # fmt: skip
    limit = what.get(cause, f"{cause} of {device}")
    return f"{limit} limits {phase}: {share:.0%} of {whole} is {CAUSES[cause]}"


def _memory(
    graph: OpGraph, placement: Placement, cluster: Cluster, score: Score, count: int
) -> tuple[DeviceMemory, ...]:
    rows, graphs = [], held_graphs(graph, placement)
    caches = cache_bytes_on(graphs, placement, cluster, count)
    held = weights_once(graphs, placement)
    for d, entry in enumerate(cluster.devices):
        weights = int((graphs[d].weight_bytes - graphs[d].cache_bytes)[held[d]].sum())
        cache = int(caches[d])
        peak = int(score.peak_bytes[d])
        limited = entry.memory_bytes < UNLIMITED_BYTES
        rows.append(
            DeviceMemory(
                entry.name, weights, cache, max(peak - weights - cache, 0), entry.reserve_bytes,
                entry.memory_bytes - peak if limited else None,
            )
        )  # fmt: skip
    return tuple(rows)


def _room(memory: tuple[DeviceMemory, ...], count: int) -> int | None:
    """Requests whose caches fit beside what the devices hold anyway."""
    rooms = [
        (row.free_bytes + row.cache_bytes) * count // row.cache_bytes
        for row in memory
        if row.cache_bytes and row.free_bytes is not None
    ]
    return max(0, min(rooms)) if rooms else None


@dataclass(frozen=True)
class FitRow:
    """One request on one machine; times are None where it does not fit."""

    cluster: str
    prompt: int
    new: int
    batch: int
    fits: bool
    tokens_per_s: float | None = None
    first_token_s: float | None = None
    request_s: float | None = None
    fullest: float | None = None  # share of its memory that the fullest device holds
    limit: str = ""  # what limits decode, or what does not fit
    quantize: str = ""  # scheme that was tried; "" for that of the configuration
    # Share of the request's seconds that no placement is proven to need; None without a bound.
    gap: float | None = None
    context: int | None = None  # tokens of a sequence that caches are reserved for
    longest_context: int | None = None  # that the plan has room for
    note: str = ""  # what a scheme leaves of the weights as they are
    costs: str = ""  # where the seconds come from, and how far off they may be
    layout: str = ""  # of a plan that divides ops, such as "tensor 4"

    @property
    def label(self) -> str:
        """Machine, request and scheme in words."""
        scheme = f", {self.quantize}" if self.quantize else ""
        return f"{self.cluster}, {self.prompt}+{self.new} tokens, batch {self.batch}{scheme}"

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        return asdict(self)


def fit(
    model: str | Path,
    clusters: Sequence[Machine],
    *,
    prompts: Sequence[int] = (2048,),
    batches: Sequence[int] = (1,),
    quantize: Sequence[str] = ("",),
    new: int = 256,
    context: int | str | None = None,
    target: str | None = None,
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> list[FitRow]:
    """Rows of fit and speed, one for every machine, scheme, prompt and batch.

    Every row is a placement of its own, for latency; where the plan of another row is better for
    it, as that of a longer prompt or of a machine with fewer devices may be, it is taken. A request
    that does not fit says what misses; the larger ones of its machine are asked all the same, as
    windows bound caches.

    Args:
        model: A configuration of transformers, with or without "hf:".
        clusters: Presets, files or clusters.
        prompts: Tokens that are read.
        batches: Sequences side by side.
        quantize: Schemes that weights are stored in, such as "nf4"; "none" for none, "" for that of
            the configuration. Only "" for .gguf models.
        new: Tokens that are written.
        context: Tokens of each sequence that caches are reserved for, "max" for the longest that
            fits. Default: those of prompt and new.
        target: Runtime that shall be able to follow, as `gdp.place` takes it. Default: none.
        costs: As `gdp.place` takes them.
        search: Budget of each placement. Default: one second.
        progress: Called with the row that begins and the share of the rows that are done.

    Raises:
        ModelError, ClusterError: A file cannot be read, or a scheme is unknown.
        ArgumentError: A scheme is given for a model of another kind.
    """
    search, plan = search or Search(seconds=1.0), plan_freely if target is None else planned
    machines = [load_cluster(cluster) for cluster in clusters]
    asked = list(itertools.product(quantize, prompts, batches))
    rows: dict[tuple[int, str, int, int], tuple[FitRow, Result | None]] = {}
    for i, (scheme, prompt, batch) in enumerate(asked):
        spec = with_options(os.fspath(model), quantize=scheme) if scheme else model
        request = Generation(spec, prompt=prompt, new=new, batch=batch, context=context)
        for j, machine in enumerate(machines):
            if progress is not None:
                share = (i * len(machines) + j) / (len(asked) * len(machines))
                progress(f"{machine.name}: {prompt} tokens, batch {batch}", share)
            row = FitRow(machine.name, prompt, new, batch, fits=False, quantize=scheme)
            try:
                question = ask(request, machine, target=target, costs=costs, search=search)
                result = plan_longest(question, plan) if question.longest else plan(question)
            except InfeasibleError as error:
                rows[j, scheme, prompt, batch] = replace(row, limit=str(error)), None
                continue
            note = quantisation_note(request, result.question.graph)
            row = replace(row, note=note, costs=result.costs)
            rows[j, scheme, prompt, batch] = row, result
    plans = [result.placement for _, result in rows.values() if result is not None]
    return [
        row if result is None else _told(row, _best_of(result, plans))
        for row, result in (rows[j, *key] for j in range(len(machines)) for key in asked)
    ]


def _best_of(result: Result, plans: Iterable[Placement]) -> Result:
    """The result of a request with the fastest of its own and other requests' plans."""
    best, question = result, result.question
    for plan in plans:
        placement = _carried(plan, question.graph, question.cluster)
        if placement is None or (placement.device == best.placement.device).all():
            continue
        score = solve.simulate(question, placement)
        if score.feasible and score.latency_s < best.score.latency_s:
            best = replace(best, placement=placement, score=score)
    return best


def _told(row: FitRow, result: Result) -> FitRow:
    """The row of a request with its result."""
    answer = generation_answer(result.question, result.placement, result.score)
    if answer is None:
        return row
    full = fullness(result.question.cluster, result.score.peak_bytes.tolist())
    value_s = result.score.latency_s
    return replace(
        row, fits=True, tokens_per_s=answer.tokens_per_s, first_token_s=answer.first_token_s,
        request_s=answer.request_s, fullest=max(full), limit=answer.limits[1],
        context=answer.context, longest_context=answer.longest_context,
        gap=_gap(result, value_s),
        layout=_layout(result.placement, answer.stages),
    )  # fmt: skip


def _gap(result: Result, value_s: float) -> float | None:
    """Share of the seconds above the bound; None where no bound is known."""
    if not result.bound_by:
        return None
    return max(0.0, 1.0 - result.bound_s / value_s) if value_s else 0.0


def _layout(placement: Placement, stages: int) -> str:
    """Sizes of a plan whose ops devices compute together; "" for others."""
    if not placement.splits:
        return ""
    experts = ", whole experts" if placement.splits[0].experts else ""
    pipeline = f" x pipeline {stages}" if stages > 1 else ""
    first = placement.splits[0]
    unlike = "" if first.is_even else f" ({':'.join(map(str, first.parts))})"
    return f"tensor {len(first.devices)}{unlike}{pipeline}{experts}"


def _carried(plan: Placement, graph: OpGraph, machine: Cluster) -> Placement | None:
    """The devices of another request's plan, by name; None where ops or devices are others."""
    known = {name: d for d, name in enumerate(machine.device_names)}
    if plan.op_names != graph.op_names or plan.teams or plan.splits:
        return None
    if not {plan.device_names[d] for d in np.unique(plan.device).tolist()} <= known.keys():
        return None
    # Of devices without ops nothing is asked.
    index = np.array([known.get(name, 0) for name in plan.device_names])
    device = np.where(graph.is_io, machine.host, index[plan.device])
    placement = make_placement(graph, machine, device, plan.rank, made_by=plan.made_by)
    return None if check(placement, graph, machine) else placement


@runtime_checkable
class HasBar(Protocol):
    """A row that has a bar in the picture."""

    @property
    def label(self) -> str:
        """Machine and request in words."""
        ...

    @property
    def tokens_per_s(self) -> float | None:
        """Length of the bar; None where the request does not fit."""
        ...


def fit_picture(rows: Sequence[HasBar]) -> str:
    """An SVG of tokens per second: a bar for every row, a cross where it does not fit."""
    from html import escape

    most = max((row.tokens_per_s or 0.0 for row in rows), default=0.0) or 1.0
    labels = [row.label for row in rows]
    height, bars = 26, 310
    left = 16 + 7 * max(map(len, labels), default=0)  # of letters 12 pixels high
    width = left + bars + 110

    def lines() -> Iterator[str]:
        for i, (row, label) in enumerate(zip(rows, labels, strict=True)):
            y = 20 + i * height
            yield f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>'
            if row.tokens_per_s is None:
                yield f'<text x="{left}" y="{y + 13}" class="no">does not fit</text>'
                continue
            bar = max(1.0, bars * row.tokens_per_s / most)
            yield f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="18" rx="2"/>'
            speed = f"{row.tokens_per_s:.1f} tokens/s"
            yield f'<text x="{left + bar + 6:.1f}" y="{y + 13}">{speed}</text>'

    style = (
        "text{font:12px system-ui,sans-serif;fill:#222}rect{fill:#4c6ef5}.no{fill:#c92a2a}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    )
    whole = height * len(rows) + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" role="img" '
        f'aria-label="tokens per second"><style>{style}</style>{"".join(lines())}</svg>\n'
    )
