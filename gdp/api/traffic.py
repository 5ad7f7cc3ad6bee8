"""The call `serve`: a plan for vLLM under traffic, and the seconds of its requests."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gdp import solve
from gdp.api.fit import GenerationAnswer, generation_answer
from gdp.api.place import answer, ask
from gdp.cluster.file import Machine
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.costs.measured.costs import prompt_launch_s
from gdp.errors import ArgumentError, GdpError, InfeasibleError
from gdp.importers.pytorch.config_spec import parse_config_spec
from gdp.methods.base import Search
from gdp.models import Generation, load, spec_of
from gdp.ops.vllm import SEQUENCES, SEQUENCES_LARGE
from gdp.placement import make_placement
from gdp.prepare import requests_in_flight
from gdp.question import Question
from gdp.result import Result
from gdp.sim.traffic import (
    Scheduling,
    ServedTraffic,
    ServingEngine,
    Traffic,
    in_steady_state,
    parse_traffic,
)
from gdp.sim.traffic import serve as served_by
from gdp.targets.vllm.layouts import Degrees, usable_gpus
from gdp.targets.vllm.plan import has_large_gpus, vllm_cluster
from gdp.units import format_seconds

FIRST_BATCH = 8
"""Requests at once for which traffic with a rate is planned before it is simulated."""
NEAR = 1.5
"""Requests at once that differ by no more than this factor have the same seconds of a pass."""
VLLM = Scheduling(ahead=True, request_s=0.02)
"""Scheduling of vLLM: `--async-scheduling` is its default since 0.14. The host takes 20 ms for a
request beside the engine (HTTP, tokenisation, the way between processes, and back): of 1, 10, 20
and 30 ms that by which first tokens of Llama 3.1 70B on four kinds of GPU are off least in the
median (16.8%, 12.5%, 10.9%, 11.3%; `benchmarks.measured_world serving`, 2026-11-27)."""
PLANS = 4
"""Plans that are made at most until as many requests run as they were made for."""


@dataclass(frozen=True)
class ComparedPlan:
    """Traffic on one of the plans that were compared; no seconds where it has none."""

    layout: str  # such as "tensor 2 x data 2"
    request_s: float | None = None  # from the arrival of a request to its last token, mean
    first_token_s: float | None = None
    token_s: float | None = None
    tokens_per_s: float | None = None
    reason: str = ""  # for which it serves none of it

    def __str__(self) -> str:
        if self.request_s is None or self.tokens_per_s is None:
            return f"{self.layout}: {self.reason}"
        seconds = format_seconds(self.request_s)
        return f"{self.layout}: {seconds} a request, {self.tokens_per_s:.1f} tokens/s"


@dataclass(frozen=True, eq=False)
class ServedPlan:
    """A plan and the traffic on it."""

    result: Result
    generation: GenerationAnswer  # of as many requests side by side as run at once
    engine: ServingEngine
    served: ServedTraffic
    passes_of: int  # requests side by side, whose passes the engine's seconds are
    compared_with: tuple[ComparedPlan, ...] = ()  # itself among them; () where there was one plan

    @property
    def layout(self) -> str:
        """Sizes of its layout in words."""
        splits, answer = self.result.placement.splits, self.generation
        tensor, experts = (len(splits[0].devices), splits[0].experts) if splits else (1, False)
        return str(Degrees(tensor, answer.stages, answer.copies, experts))

    def compared(self) -> ComparedPlan:
        """Its row among the plans that are compared."""
        served = self.served
        return ComparedPlan(
            self.layout, served.request.mean_s, served.first_token.mean_s, served.token.mean_s,
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
        engine = self.engine._asdict() | {"scheduling": self.engine.scheduling._asdict()}
        if math.isinf(self.engine.cache_tokens):
            engine["cache_tokens"] = None
        compared = [asdict(row) for row in self.compared_with]
        return asdict(self.served) | {
            "room": self.room, "layout": self.layout, "compared": compared, "engine": engine,
            "passes_of": self.passes_of,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Text of the traffic."""
        served, engine = self.served, self.engine
        first, token = served.first_token, served.token
        lines = [
            f"traffic  first token after {format_seconds(first.mean_s)} "
            f"(95% within {format_seconds(first.p95_s)}), {format_seconds(token.mean_s)} a token "
            f"(95% within {format_seconds(token.p95_s)})",
            f"in all   {served.tokens_per_s:.1f} tokens/s, {served.running:.1f} requests at once"
            + ("" if self.room is None else f" (memory has room for {self.room})")
            + f"; {served.requests} requests in {format_seconds(served.seconds)}",
        ]
        if served.waiting_s > first.mean_s / 2:
            room = "no limit" if math.isinf(engine.cache_tokens) else int(engine.cache_tokens)
            each = f" of each of {engine.copies} copies" if engine.copies > 1 else ""
            lines.append(
                f"queue    requests wait {format_seconds(served.waiting_s)} before they start: "
                f"caches{each} hold {room} tokens, and {engine.requests_at_once} requests run at "
                "most"
            )
        if not _near(self.side_by_side, self.passes_of):
            lines.append(
                f"passes   are those of {self.passes_of} requests side by side, where "
                f"{self.side_by_side} run: one request alone is told too slow, many too fast"
            )
        if self.compared_with:
            lines.append("plans    " + "; ".join(map(str, self.compared_with)))
        return lines


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
) -> ServedPlan:
    """Place a language model for vLLM, and simulate the traffic that it serves.

    Args:
        model: A configuration of transformers, with or without "hf:".
        cluster: As `gdp.place` takes it.
        traffic: Requests, or text such as "concurrency=32,prompt=2048,new=256" or
            "rate=2.5,prompt=512..2048,new=256" (`gdp.sim.traffic.parse_traffic`).
        costs: As `gdp.place` takes them.
        search: As `gdp.place` takes it.
        constraints: As `gdp.place` takes them.
        objective: As `gdp.place` takes it.
        requests_at_once: Requests that run at once at most (`--max-num-seqs` of vLLM); None for
            vLLM's own default.

    Returns:
        The plan for as many requests at once as the traffic has or memory allows, with times to the
        first token and between tokens. Times are seconds.

    Raises:
        InfeasibleError: Not even one request fits.
        ArgumentError: The traffic has another form, or its longest request has no room.

    Example:
        >>> import gdp
        >>> traffic = "rate=2,prompt=512,new=128"
        >>> gdp.serve("llama/config.json", "cpu+h100", traffic).lines()  # doctest: +SKIP
    """

    def asked(request: Generation) -> Question:
        return ask(
            request, cluster, target="vllm", costs=costs, search=search, constraints=constraints,
            objective=objective,
        )  # fmt: skip

    if isinstance(traffic, str):
        traffic = parse_traffic(traffic)
    return served_plan(asked, model, traffic, requests_at_once=requests_at_once)


def served_plan(
    asked: Callable[[Generation], Question],
    model: str | Path,
    traffic: Traffic,
    answered: Callable[[Question], Result] = answer,
    requests_at_once: int | None = None,
) -> ServedPlan:
    """The plan whose requests take the fewest seconds in the mean, of plans with one copy of the
    model and with several, each for as many requests side by side as run on it; see `serve`."""

    def planned(copies: int) -> ServedPlan:
        return _of_copies(asked, model, traffic, answered, copies, requests_at_once)

    one = planned(1)
    plans, rows = [one], [one.compared()]
    for copies in _numbers_of_copies(one.result.question, traffic):
        try:
            plans.append(planned(copies))
            rows.append(plans[-1].compared())
        except (ArgumentError, InfeasibleError) as error:
            rows.append(ComparedPlan(f"data {copies}", reason=str(error)))
    best = min(plans, key=lambda plan: plan.served.request.mean_s)
    return replace(best, compared_with=tuple(rows) if len(rows) > 1 else ())


def _numbers_of_copies(question: Question, traffic: Traffic) -> list[int]:
    """Numbers of copies beyond one that some GPUs have room for and requests to share: those that
    leave no GPU over, and powers of two."""
    cluster, graph = vllm_cluster(question.cluster), question.graph
    gpus = usable_gpus(cluster)
    weights = int((graph.weight_bytes - graph.cache_bytes)[graph.weight_holders()].sum())
    room = sum(cluster.devices[d].memory_bytes for d in gpus)
    most = min(len(gpus), traffic.concurrency or len(gpus), room // max(1, weights))
    if not question.constraints.replicas:
        return []
    return [n for n in range(2, most + 1) if len(gpus) % n == 0 or n & (n - 1) == 0]


def _of_copies(
    asked: Callable[[Generation], Question], model: str | Path, traffic: Traffic,
    answered: Callable[[Question], Result], copies: int, requests_at_once: int | None,
) -> ServedPlan:  # fmt: skip
    """The plan with so many copies, for as many requests side by side as run on one of them."""
    batch, most = math.ceil((traffic.concurrency or FIRST_BATCH) / copies), math.inf
    plan, made = None, 0
    while plan is None or made < PLANS:
        try:
            question = asked(Generation(model, traffic.prompt, traffic.new, batch))
            result = answered(replace(question, copies=copies))
        except InfeasibleError:
            if batch == 1:
                raise
            batch, most = batch // 2, batch - 1
            continue
        made += 1
        plan = _on_its_passes(result, traffic, requests_at_once)
        wanted = int(min(plan.side_by_side, most))
        if _near(wanted, batch):
            break
        batch = wanted
    return plan


def _near(requests: int, others: int) -> bool:
    return max(requests, others) <= NEAR * min(requests, others)


def on_vllm(question: Question) -> Question:
    """The question of a placement that is read from its file, with the memory that vLLM takes.

    Raises:
        ArgumentError: The placement is not for vLLM.
    """
    _tokens_at_once(question)
    return replace(question, cluster=vllm_cluster(question.cluster))


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
    plan = _on_its_passes(result, traffic, requests_at_once)
    for _ in range(PLANS):
        count = plan.side_by_side
        passes = None if _near(count, plan.passes_of) else _passes_of(result, count)
        if passes is None:
            break
        # Room is that of the plan, and so is what runs at once at most.
        own = plan.engine
        engine = own._replace(
            step_s=passes.step_s, token_s=passes.token_s, context_s=passes.context_s
        )
        served = served_by(in_steady_state(traffic, engine), engine)
        plan = replace(plan, engine=engine, served=served, passes_of=count)
    return plan


def _passes_of(result: Result, batch: int) -> ServingEngine | None:
    """The engine of a plan's layout with other requests side by side; None where the model cannot
    be read, or has other ops then."""
    question, placed = result.question, result.placement
    path, _, query = spec_of(question.model or "").partition("?")
    others = [part for part in query.split("&") if not part.startswith("batch=")]
    spec = f"{path}?{'&'.join([*others, f'batch={batch}'])}"
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


def _on_its_passes(result: Result, traffic: Traffic, requests_at_once: int | None) -> ServedPlan:
    """Traffic on a plan, by the passes of as many requests as it was made for."""
    generation = generation_answer(result.question, result.placement, result.score)
    if generation is None:
        raise ArgumentError("traffic is for placements of a request (--generate), for vllm")
    engine = engine_of(generation, result.question)
    if requests_at_once is not None:
        engine = engine._replace(requests_at_once=requests_at_once)
    served = served_by(in_steady_state(traffic, engine), engine)
    return ServedPlan(result, generation, engine, served, generation.request.batch)


def engine_of(answer: GenerationAnswer, question: Question) -> ServingEngine:
    """The engine of a plan: seconds of a pass from those of its prompt and its step, room from the
    memory that the plan leaves.

    Raises:
        ArgumentError: The model is not computed as an engine computes it.
    """
    request, at_once = answer.request, _tokens_at_once(question)
    rooms = [
        (row.free_bytes + row.cache_bytes) / row.cache_bytes
        for row in answer.memory
        if row.cache_bytes and row.free_bytes is not None
    ]
    count = requests_in_flight(question.graph, question.cluster, question.objective)
    sequences = request.batch * count
    mean_context = request.prompt + request.new / 2
    return ServingEngine(
        step_s=answer.token_s - answer.caches_s,
        token_s=answer.first_token_s / (request.batch * request.prompt),
        context_s=answer.caches_s / (request.batch * mean_context),
        tokens_at_once=at_once,
        requests_at_once=SEQUENCES_LARGE if has_large_gpus(question.cluster) else SEQUENCES,
        cache_tokens=min(rooms) * sequences * request.held if rooms else math.inf,
        stages=answer.stages,
        copies=answer.copies,
        launch_s=prompt_launch_s(question.graph) / answer.stages,
        scheduling=VLLM,
    )


def _tokens_at_once(question: Question) -> int:
    """Tokens of one pass of the engine that a model is computed by."""
    spec = spec_of(question.model or "")
    at_once = parse_config_spec(spec).max_num_batched_tokens if spec.startswith("hf:") else 0
    if not at_once:
        raise ArgumentError("traffic is for plans of hf: models for vllm (--for vllm)")
    return at_once
