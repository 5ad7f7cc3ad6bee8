"""Result of a placement: the placement, its score, and how far from the optimum it can be."""

import html
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int

from gdp.base.errors import ArgumentError
from gdp.base.rows import imported
from gdp.base.terminal import html_table
from gdp.base.units import format_bytes
from gdp.cluster.links import links_line
from gdp.corrections.estimate import Correction
from gdp.graph.groups import first_members
from gdp.graph.request import Request
from gdp.methods.base import Candidate as Candidate
from gdp.placement.placement import DraftModel, Placement
from gdp.question.prepare import fused_of
from gdp.question.question import Question
from gdp.sim.objectives import Score, find_objective
from gdp.sim.serving import ServingEngine, TwoGroups
from gdp.sim.traffic import ServedTraffic, Spread
from gdp.sim.traffic_text import NO_LIMITS, TrafficLimits


class Counts(NamedTuple):
    """Ops and kernels of each device, without the model's inputs and outputs. D: devices."""

    ops: tuple[int, ...]  # of the model
    kernels: tuple[int, ...]  # that a runtime fuses them to


def counts_of(question: Question, placement: Placement) -> Counts:
    """Ops and kernels of each device, fused per device as in runtimes."""
    graph = question.graph

    def per_device(devices: Int[np.ndarray, "K"]) -> tuple[int, ...]:
        """Ops of a replica group, or of a split, count on each of its devices."""
        led = np.bincount(devices, minlength=len(placement.device_names))
        counts = led.copy()
        for d, home in placement.homes.items():
            counts[d] = led[home]
        return tuple(counts.tolist())

    works = ~graph.is_io
    lead = first_members(fused_of(question, graph, placement.device).group_of)
    return Counts(*(per_device(placement.device[ops]) for ops in (works, lead[works[lead]])))


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


class MeanPower(NamedTuple):
    """Mean watts of the devices that compute, together, and those that are counted in words."""

    devices: str  # such as "GPUs alone"
    idle_w: float  # with the model loaded and nothing computed
    limit_w: float  # that they draw at most
    prefill_w: float
    decode_w: float
    weights_w: float  # of decode, while ops run that read no caches
    caches_w: float  # while ops run that read caches

    def joules(self, seconds: float, prefill_s: float, decode_s: float) -> float:
        """Joules of so many seconds, of which so many are prefill and decode."""
        above_j = (self.prefill_w - self.idle_w) * prefill_s + (
            self.decode_w - self.idle_w
        ) * decode_s
        return self.idle_w * seconds + above_j


class RunEnergy(NamedTuple):
    """Energy of one run, or of a sample of a full pipeline."""

    devices: str  # that are counted, in words
    joules: float
    watts: float  # mean


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device; `free_bytes` is None where it has no limit."""

    device: str
    weights_bytes: int
    cache_bytes: int  # at the end of the request, of all requests in flight
    activations_bytes: int  # the most at once, beside weights and caches
    reserve_bytes: int  # kept beside all these for the system, drivers and runtimes
    free_bytes: int | None
    draft_bytes: int = 0  # weights and caches of a small model that drafts
    draft_cache_bytes: int = 0  # its caches, a part of these

    @property
    def growing_bytes(self) -> int:
        """All that grows with the tokens that requests hold."""
        return self.cache_bytes + self.draft_cache_bytes


@dataclass(frozen=True)
class GenerationAnswer:
    """Seconds and bytes of one request. Times are predictions of the simulator."""

    request: Request
    first_token_s: float  # from the prompt to the first token
    token_s: float  # of one step at the mean context, which writes several tokens of drafts
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
    draft: DraftModel | None = None  # whose bytes are in `memory`
    # Of decode once all tokens of the context are used, where these are more than the request's.
    full_tokens_per_s: float | None = None
    correction: Correction | None = None  # that its times have, by runs of the stack
    power: MeanPower | None = None  # None where watts are unknown
    no_power: str = ""  # the reason

    @property
    def joules_per_request(self) -> float | None:
        """Joules of a request, all its sequences together, while as many as are in flight share the
        devices; None where watts are unknown."""
        if self.power is None:
            return None
        return self.power.joules(
            self._apart_s, self.first_token_s, self.token_s * self.request.steps
        )

    @property
    def joules_per_token(self) -> float | None:
        """Joules of a request over the tokens that it writes; None where watts are unknown."""
        joules, request = self.joules_per_request, self.request
        return None if joules is None else joules / (request.new * request.batch)

    @property
    def watts(self) -> float | None:
        """Mean watts of the devices that compute; None where they are unknown."""
        joules, seconds = self.joules_per_request, self._apart_s
        return None if joules is None or not seconds else joules / seconds

    @property
    def _apart_s(self) -> float:
        """Seconds between the ends of two requests."""
        written = self.request.new * self.request.batch
        return self.request_s if self.in_flight == 1 else written / self.all_tokens_per_s

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """90% intervals of its times and rate by name; empty where nothing is known of them."""
        if self.correction is None:
            return {}
        low_s, high_s = self.correction.decode.of(self.token_s)
        rate = self.tokens_per_s * self.token_s
        return {
            "first_token_s": self.correction.prefill.of(self.first_token_s),
            "token_s": (low_s, high_s),
            "tokens_per_s": (rate / high_s, rate / low_s) if low_s > 0 else (0.0, math.inf),
        }

    @property
    def tokens_per_s(self) -> float:
        """Tokens of one request per second while it decodes, those of its batch together."""
        written = self.request.batch * self.request.new / self.request.steps
        return written / self.token_s if self.token_s > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        draft = None if self.draft is None else msgspec.structs.asdict(self.draft)
        plain = asdict(self) | {"request": self.request.sizes(), "draft": draft}
        del plain["correction"]
        if self.correction is not None:
            plain["correction"] = correction_json(self.correction)
            plain["intervals"] = {name: list(ends) for name, ends in self.intervals.items()}
        for name in ("limits", "shares"):
            plain[name] = dict(zip(("prompt", "decode"), plain[name], strict=True))
        plain["shares"] = {
            phase: [share._asdict() | {"text": share.text} for share in rows]
            for phase, rows in plain["shares"].items()
        }
        plain["power"] = None if self.power is None else self.power._asdict()
        derived = ("tokens_per_s", "joules_per_token", "joules_per_request", "watts")
        return plain | {name: getattr(self, name) for name in derived}


def correction_json(found: Correction) -> dict[str, Any]:
    """A correction as plain data."""
    ranges = {name: getattr(found, name)._asdict() for name in ("prefill", "decode")}
    return found._asdict() | ranges | {"text": found.text}


class Degrees(NamedTuple):
    """Sizes of the layout of a language model on its GPUs."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    experts: bool = False  # each GPU of a group holds whole experts

    def __str__(self) -> str:
        named = [("tensor", self.tensor), ("pipeline", self.pipeline), ("data", self.data)]
        sizes = " x ".join(f"{name} {size}" for name, size in named if size > 1)
        return (sizes or "one GPU") + (" with whole experts" if self.experts else "")


WHOLE_OPS, DIVIDED_OPS = "whole ops", "ops, divided or whole,"
"""Pieces of placements that a bound holds for."""


@dataclass(frozen=True, eq=False)
class Result:
    """A placement with its score, its proven bound, and how it was found."""

    question: Question  # as it was answered: with the devices, costs and context of a runtime
    placement: Placement
    score: Score
    objective: str
    method: str
    bound_s: float  # proven lower bound of the objective
    bound_by: str  # the argument that proves it
    proven_optimal: bool
    candidates: tuple[Candidate, ...]
    evaluations: int
    seconds: float  # wall clock of all phases
    seed: int
    costs: str  # which cost model, and why it
    notes: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)  # seconds of each, in order
    # Seconds since the start and the best value known then, where the method searches.
    curve: tuple[tuple[float, float], ...] = ()
    counts: Counts = field(default_factory=lambda: Counts((), ()))
    bound_over: str = WHOLE_OPS  # pieces of the placements that the bound holds for
    search_cpu_s: float = 0.0  # CPU seconds of the method, of which `evaluations` are a part
    deviation_s: float | None = None  # standard deviation of the value; None: costs say nothing
    generation: GenerationAnswer | None = None  # of a request to a language model
    traffic: "ServedPlan | None" = None  # that it was planned for; `generation` is of a batch
    energy: RunEnergy | None = None  # None where watts are unknown, and of a request
    no_energy: str = ""  # the reason

    @property
    def value_s(self) -> float:
        """The value that the objective minimises, in its unit: seconds, of most."""
        return self.score.value_s

    @property
    def links(self) -> str:
        """The links of the cluster's accelerators, by kind; "" where there are none."""
        return links_line(self.question.cluster)

    def of_request(self) -> GenerationAnswer:
        """Its `generation`; raises `ArgumentError` where it is of no request."""
        if self.generation is None:
            raise ArgumentError("traffic is for placements of a request (--generate), for vllm")
        return self.generation

    @property
    def layout(self) -> str:
        """Sizes of the layout of a language model in words."""
        splits, generation = self.placement.splits, self.of_request()
        tensor, experts = (len(splits[0].devices), splits[0].experts) if splits else (1, False)
        return str(Degrees(tensor, generation.stages, generation.copies, experts))

    @property
    def gap(self) -> float:
        """(value - bound) / value: how far from the optimum the placement can be at most."""
        return max(0.0, (self.value_s - self.bound_s) / self.value_s) if self.value_s > 0 else 0.0

    @property
    def gap_text(self) -> str:
        """The gap in words."""
        if not self.bound_by:
            return "no bound known"
        return "optimal" if self.proven_optimal else f"gap {self.gap:.1%}"

    def __repr__(self) -> str:
        value = find_objective(self.objective).text(self.value_s)
        about = f"{self.objective} {value}, {self.gap_text}"
        return f"<Result of {self.method}: {about}; {self.placement!r}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        columns = (self.placement.device_names, self.counts.ops, self.score.peak_bytes.tolist())
        rows = [(name, ops, format_bytes(held)) for name, ops, held in zip(*columns, strict=True)]
        value = find_objective(self.objective).text(self.value_s)
        summary = f"{self.method}: {self.objective} {value}, {self.gap_text}"
        return f"<p>{html.escape(summary)}</p>" + html_table(("device", "ops", "peak"), rows)

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        names = self.placement.device_names
        teams = [[names[d] for d in team] for team in self.placement.teams]
        generation, traffic = self.generation, self.traffic
        return {
            "method": self.method,
            "objective": self.objective,
            "value": self.value_s,
            "unit": find_objective(self.objective).unit,
            "latency_s": self.score.latency_s,
            "period_s": self.score.period_s,
            "bound_s": self.bound_s,
            "bound_by": self.bound_by,
            "bound_over": self.bound_over,
            "gap": self.gap,
            "proven_optimal": self.proven_optimal,
            "feasible": self.score.feasible,
            "overflow_bytes": self.score.overflow_bytes,
            "peak_bytes": dict(zip(names, self.score.peak_bytes.tolist(), strict=True)),
            "devices": dict(zip(names, self.counts.ops, strict=False)),
            "kernels": dict(zip(names, self.counts.kernels, strict=False)),
            "teams": teams,
            "splits": [
                {
                    "devices": [names[d] for d in split.devices],
                    "experts": split.experts,
                    "shares": list(split.parts),
                }
                for split in self.placement.splits
            ],
            "seconds": self.seconds,
            "phases": dict(self.phases),
            "evaluations": self.evaluations,
            "search_cpu_s": self.search_cpu_s,
            "seed": self.seed,
            "costs": self.costs,
            "links": self.links,
            "deviation_s": self.deviation_s,
            "candidates": [vars(candidate) for candidate in self.candidates],
            "notes": list(self.notes),
            "curve": [list(point) for point in self.curve],
            "joules": None if self.energy is None else self.energy.joules,
            "watts": None if self.energy is None else self.energy.watts,
            **({} if generation is None else {"generation": generation.to_json()}),
            **({} if traffic is None else {"traffic": traffic.traffic_json()}),
        }


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
    groups: TwoGroups
    sent_bytes: int  # of the caches of a prompt of mean length
    transfer_s: float  # to send them over an idle link
    sent: Spread  # from the end of a prompt until its caches are sent

    @property
    def engine(self) -> ServingEngine:
        """Of these GPUs."""
        return self.groups.prefill

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "layout": self.result.layout, "sent_bytes": self.sent_bytes,
            "transfer_s": self.transfer_s, "sent": asdict(self.sent),
            "engine": _engine_json(self.engine),
            "memory": [asdict(row) for row in self.result.of_request().memory],
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class ServedPlan:
    """A plan and the traffic on it; disaggregated, that of the decode GPUs."""

    result: Result  # for as many requests side by side as run at once
    engine: ServingEngine
    served: ServedTraffic
    passes_of: int  # requests side by side, whose passes the engine's seconds are
    prefill: PrefillGroup | None = None
    within: TrafficLimits = NO_LIMITS
    compared_with: tuple[ComparedPlan, ...] = ()  # itself among them; () where there was one plan
    # The same traffic with passes at either end of their 90% intervals; None: these are not known.
    ends: tuple[ServedTraffic, ServedTraffic] | None = None

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """90% intervals of mean TTFT, mean TPOT and output tokens per second, by name."""
        if self.ends is None:
            return {}
        quick, slow = self.ends
        return {
            "first_token_s": (quick.first_token.mean_s, slow.first_token.mean_s),
            "token_s": (quick.token.mean_s, slow.token.mean_s),
            "tokens_per_s": (slow.tokens_per_s, quick.tokens_per_s),
        }

    @property
    def generation(self) -> GenerationAnswer:
        """The answer of as many requests side by side as run at once."""
        return self.result.of_request()

    @property
    def memory(self) -> tuple[DeviceMemory, ...]:
        """Bytes on each device, on the prefill GPUs by their own plan."""
        own = self.generation.memory
        if self.prefill is None:
            return own
        of_prefill = self.prefill.result.of_request().memory
        pairs = zip(own, of_prefill, strict=True)
        return tuple(prefill if prefill.weights_bytes else row for row, prefill in pairs)

    @property
    def layout(self) -> str:
        """Sizes of its layout in words."""
        own = self.result.layout
        if self.engine.drafting is not None:
            own += f", {self.engine.drafting.tokens} tokens drafted"
        return (
            own
            if self.prefill is None
            else (f"prefill on {self.prefill.result.layout}, decode on {own}")
        )

    @property
    def joules_per_token(self) -> float | None:
        """Joules of each token that is written, prompts included; None where watts are unknown."""
        return self.served.joules_per_token

    @property
    def joules_per_request(self) -> float | None:
        """Joules of a request of the mean number of new tokens; None where watts are unknown."""
        joules = self.joules_per_token
        return None if joules is None else joules * self.generation.request.new

    @property
    def watts(self) -> float | None:
        """Mean watts of the devices that compute; None where they are unknown."""
        return self.served.watts

    @property
    def value(self) -> tuple[float, float]:
        """Smaller is better: by how much it exceeds its limits, then mean seconds of a request, or
        the value that the row of the objective states."""
        served = find_objective(self.result.objective).served
        value = imported(served)(self.served) if served else self.served.request.mean_s
        return self.within.excess(self.served), value

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
        return replace(self.result, traffic=self).to_json()

    def traffic_json(self) -> dict[str, Any]:
        """The traffic as plain data, with its engine."""
        within = {k: None if math.isinf(s) else s for k, s in self.within._asdict().items()}
        return asdict(self.served) | {
            "room": self.room, "layout": self.layout, "within": within,
            "prefill": None if self.prefill is None else self.prefill.to_json(),
            "compared": [asdict(row) for row in self.compared_with],
            "engine": _engine_json(self.engine), "passes_of": self.passes_of,
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "joules_per_token": self.joules_per_token,
            "joules_per_request": self.joules_per_request,
        }  # fmt: skip


def _engine_json(engine: ServingEngine) -> dict[str, Any]:
    """An engine as plain data; without a limit its `cache_tokens` are None."""
    drafting = None if engine.drafting is None else engine.drafting._asdict()
    plain = engine._asdict() | {
        "scheduler": asdict(engine.scheduler), "drafting": drafting,
        "watts": None if engine.watts is None else engine.watts._asdict(),
    }  # fmt: skip
    return plain | ({"cache_tokens": None} if math.isinf(engine.cache_tokens) else {})


def with_bound(result: Result, bound_s: float, bound_by: str) -> Result:
    """The result with another bound; no more than its value, as both are sums in some order."""
    value_s = result.value_s
    return replace(
        result, bound_s=min(bound_s, value_s), bound_by=bound_by,
        proven_optimal=bound_s >= value_s * (1 - 1e-9),
    )  # fmt: skip


def with_placement(
    result: Result, placement: Placement, score: Score, notes: tuple[str, ...]
) -> Result:
    """The result with another placement of its question, under its bound."""
    other = replace(
        result, placement=placement, score=score, notes=notes, deviation_s=None,
        counts=counts_of(result.question, placement),
    )  # fmt: skip
    return with_bound(other, result.bound_s, result.bound_by)


def with_best_bound(rows: dict[str, Result | str]) -> dict[str, Result | str]:
    """Give every result the largest bound of all, since a bound holds for every placement."""
    results = [row for row in rows.values() if isinstance(row, Result)]
    if not results:
        return rows
    best = max(results, key=lambda row: row.bound_s)
    bounded = dict(rows)
    for name, row in rows.items():
        if isinstance(row, Result):
            other = with_bound(row, best.bound_s, best.bound_by)
            proven = row.proven_optimal or other.proven_optimal
            bounded[name] = replace(other, proven_optimal=proven)
    return bounded
