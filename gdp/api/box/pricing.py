"""Prices of one model alone: on each set of devices, with each share of their memory, once.

A price is the answer of the planner of the model's engine: what `gdp place --for` says on a machine
of these devices alone. Sets of devices that differ by interchangeable ones alone share a price. A
llama.cpp engine that has less of a card moves layers and experts to the processor; one of vLLM has
a share of each card, filled with caches beyond weights and buffers.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.api.answer import answer
from gdp.api.ask import ask
from gdp.api.box.models import OTHER, BoxModel
from gdp.api.traffic.serve import served_plan
from gdp.base.errors import ArgumentError, InfeasibleError, PlacementError
from gdp.cluster.file import with_max_memory
from gdp.cluster.machines import machines
from gdp.cluster.reserve import default_reserve
from gdp.cluster.types import ALONE, UNLIMITED_BYTES, Cluster, Device
from gdp.costs.offload import DISK_BYTES_PER_S
from gdp.methods.base import Search
from gdp.question.models import Generation
from gdp.question.question import Kept
from gdp.question.result import GenerationAnswer, Result, ServedPlan
from gdp.sim.serving import ServingEngine, in_steady_state, serve
from gdp.sim.traffic import Arrival, ServedTraffic, Spread, Traffic
from gdp.targets.table import TARGETS
from gdp.targets.target import imported

SHARES = (0.75, 0.5, 0.25)
"""Shares of the memory of a single card that are priced beside all of it, where the plan takes
more; the rest of the model is on the processor."""
SPREAD, ON_HOST = 2, 0.1
"""Times the least number of cards that hold a model that it is spread over, by engines without
copies of it; of vLLM and SGLang, on more than `ALL_SUBSETS` cards, of those that serve its traffic
within its limits. And the part of its weights that may be on the processor for that."""
NEGLIGIBLE = 0.02
"""Share of an engine's time below which a device is not one that others wait for."""
SLOTS = 4
"""Requests that llama-server computes at once by default."""
BATCH = 2048
"""Tokens that llama-server computes at once by default (`--batch-size`)."""
MOST_SATURATING = 256
"""Clients at most by which the capacity of an engine is found."""
ALL_SUBSETS = 6
"""Accelerators up to which every set of them is priced; of more, sets of a power of two that
follow each other, and all."""


class EngineMemory(NamedTuple):
    """Bytes of one engine on one device."""

    device: str
    weights_bytes: int
    cache_bytes: int  # room for keys, values and states
    buffer_bytes: int
    context_bytes: int  # the engine's own: driver context, allocator, kernels

    @property
    def all_bytes(self) -> int:
        """Their sum."""
        return sum(self[1:])


@dataclass(frozen=True, eq=False)
class Priced:
    """A model alone on some devices."""

    devices: tuple[int, ...]  # of the box, with the host
    held: tuple[EngineMemory, ...]  # of each of these
    busy: tuple[float, ...]  # share of the engine's time in which each of these computes
    served: ServedTraffic
    capacity: float  # requests/s at most
    load_s: float
    loaded_bytes: int
    slots: int  # requests that it computes at once, at most
    cache_tokens: float  # of all requests
    share: float = 0.0  # of the memory of each card, of engines that are given one
    layout: str = ""
    result: Result | None = None  # None of engine "other"


@dataclass
class Pricer:
    """Prices of the models of a box, each made once."""

    cluster: Cluster
    costs: Any = None
    search: Any = None
    progress: Callable[[str], None] | None = None
    kept: Kept = field(default_factory=Kept)
    known: dict[Any, list[Priced]] = field(default_factory=dict)
    plans: int = 0

    def options(self, model: BoxModel) -> tuple[list[Priced], str]:
        """Options of a model on the box, and the reason of the last set that has none.

        Raises:
            ArgumentError: No set of devices can answer what was asked.
        """
        options: list[Priced] = []
        reason, least, misfits = "", 0, False
        large = len(self.cluster.gpus) > ALL_SUBSETS
        for devices in self._sets(model):
            cards = [self.cluster.devices[d] for d in devices if not self.cluster.devices[d].is_cpu]
            if 0 < SPREAD * least < len(cards) and (model.target != "vllm" or large):
                continue
            # All of a model that its price depends on.
            asked = (
                model.spec, model.engine, model.traffic, model.within, model.context,
                model.memory_bytes, model.seconds,
            )  # fmt: skip
            key = (asked, _signature(self.cluster, devices))
            if key not in self.known:
                try:
                    self.known[key] = list(self._on(model, devices))
                except (InfeasibleError, PlacementError, ArgumentError) as error:
                    self.known[key], reason = [], str(error)
                    misfits = misfits or not isinstance(error, ArgumentError)
            if not least and any(self._is_enough(model, own) for own in self.known[key]):
                least = len(cards)
            # The price is of devices that were looked at first: interchangeable ones. A plan that
            # leaves a card empty is one of fewer cards.
            names = [self.cluster.device_names[d] for d in devices]
            options += [
                replace(own, devices=devices, held=tuple(
                    h._replace(device=name) for h, name in zip(own.held, names, strict=True)
                ))
                for own in self.known[key]
                if all(h.all_bytes or self.cluster.devices[d].is_cpu
                       for d, h in zip(devices, own.held, strict=True))
            ]  # fmt: skip
        if reason and not options and not misfits:
            raise ArgumentError(f"model {model.name!r}: {reason}")
        return options, reason

    def _is_enough(self, model: BoxModel, own: Priced) -> bool:
        """True where cards hold a model, apart from parts that its engine keeps on the host; of
        vLLM and SGLang where they serve its traffic within its limits."""
        if model.target == "vllm":
            return own.capacity >= model.rate and model.within.excess(own.served) <= 1.0
        on_host = sum(
            h.weights_bytes
            for d, h in zip(own.devices, own.held, strict=True)
            if self.cluster.devices[d].is_cpu
        )
        return on_host <= ON_HOST * max(own.loaded_bytes, 1)

    def _sets(self, model: BoxModel) -> Iterator[tuple[int, ...]]:
        """Sets of devices that a model may be on, the host in all of them."""
        cluster = self.cluster
        at, host = machines(cluster), cluster.host
        cards = [d for d in cluster.gpus if at[d] == at[host]]
        if unknown := next((n for n in model.devices if n not in cluster.device_names), ""):
            raise ArgumentError(
                f"model {model.name!r}: no device {unknown!r}; there are "
                f"{', '.join(cluster.device_names)}"
            )
        on_host = not model.devices or cluster.device_names[host] in model.devices
        cards = [d for d in cards if not model.devices or cluster.device_names[d] in model.devices]
        counts = range(1, len(cards) + 1)
        if len(cards) <= ALL_SUBSETS:
            sets = list(itertools.chain(*(itertools.combinations(cards, k) for k in counts)))
        else:
            sizes = [k for k in counts if k & (k - 1) == 0]
            sets = [tuple(cards[i : i + k]) for k in sizes for i in range(0, len(cards), k)]
            sets = list(dict.fromkeys([*sets, tuple(cards)]))
        if model.engine == OTHER:
            sets = [one for one in sets if len(one) == 1]
        # A server that gdp does not plan is on the processor where that is said.
        if model.engine == "llamacpp" or (model.engine == OTHER and (model.devices or not cards)):
            sets = [(), *sets] if on_host else sets
        for own in sets:
            yield tuple(sorted({host, *own}))

    def _on(self, model: BoxModel, devices: tuple[int, ...]) -> Iterator[Priced]:
        """Prices with all memory of the devices, and with less where the plan would take it."""
        if model.engine == OTHER:
            yield _in_the_long_run(model, self._given(model, devices))
            return
        part = self.cluster.part(devices)
        if self.progress is not None:
            cards = ", ".join(d.name for d in part.devices if not d.is_cpu) or "the processor"
            self.progress(f"pricing {model.name} on {cards}")
        price = self._by_share if model.target == "vllm" else self._by_limit
        for own in price(model, part):
            self.plans += 1
            yield _in_the_long_run(model, replace(own, devices=devices))

    def _by_limit(self, model: BoxModel, part: Cluster) -> Iterator[Priced]:
        """Of engines that follow a plan: all memory, then shares of it that the plan exceeds."""
        whole = self._planned(model, part, part)
        yield whole
        least = whole
        for share in SHARES if len(part.gpus) == 1 else ():
            most = {
                d.name: max(1, int(share * d.total_bytes) - _context(d, model.target))
                for d in (part.devices[g] for g in part.gpus)
            }
            taken = {h.device: h.all_bytes for h in least.held}
            totals = {d.name: d.total_bytes for d in part.devices}
            if all(taken[name] <= share * totals[name] for name in most):
                continue
            try:
                least = self._planned(model, with_max_memory(part, most), part)
            except (InfeasibleError, PlacementError):
                return
            yield least

    def _planned(self, model: BoxModel, limited: Cluster, part: Cluster) -> Priced:
        """One plan of llama.cpp, or of transformers with accelerate."""
        clients = model.traffic.concurrency or SLOTS
        slots = clients if model.engine == "llamacpp" else 1
        longest = max(r.prompt + r.new for r in model.traffic.requests)
        request = Generation(
            model.spec, model.traffic.prompt, model.traffic.new, slots,
            context=model.context or longest,
        )  # fmt: skip
        # llama.cpp's program needs no search; with seconds it would try other caches, too.
        search = Search(seconds=0.0) if model.engine == "llamacpp" else self.search
        parts = {"costs": self.costs, "search": search, "kept": self.kept}
        extra = {} if model.engine == "llamacpp" else {"offload": "none"}
        result = answer(ask(request, limited, target=model.target, **extra, **parts))
        if not result.score.feasible:
            raise InfeasibleError(str(result.score))
        found = result.of_request()
        engine = _engine_of(found, slots)
        traffic = in_steady_state(model.traffic, engine)
        served = serve(traffic, engine)
        held = []
        for row, device in zip(found.memory, part.devices, strict=False):
            used = row.weights_bytes + row.cache_bytes + row.activations_bytes + row.draft_bytes
            held.append(EngineMemory(
                device.name, row.weights_bytes + row.draft_bytes - row.draft_cache_bytes,
                row.growing_bytes, row.activations_bytes,
                _context(device, model.target) if used else 0,
            ))  # fmt: skip
        return self._priced(model, part, result, served, engine, held, slots)

    def _by_share(self, model: BoxModel, part: Cluster) -> Iterator[Priced]:
        """Of vLLM and SGLang: the default share, the share that the traffic needs, the least."""
        gpus = [part.devices[d] for d in part.gpus]
        most = _served(model, part, self)
        yield most
        of_one = max(*(r.prompt + r.new for r in model.traffic.requests), model.context, 1)
        for tokens in (_needed_tokens(model, most), of_one):
            share = _share_for(most, tokens, gpus)
            if share >= most.share:
                continue
            limits = {d.name: math.ceil(share * d.total_bytes) + 1024 for d in gpus}
            try:
                yield _served(model, with_max_memory(part, limits), self)
            except (InfeasibleError, PlacementError, ArgumentError):
                continue

    def _given(self, model: BoxModel, devices: tuple[int, ...]) -> Priced:
        """A server whose memory and seconds are given: on one card, or on the processor."""
        part = self.cluster.part(devices)
        at = list(part.gpus) or [part.host]
        held = tuple(
            EngineMemory(d.name, model.memory_bytes if k in at else 0, 0, 0,
                 _context(d, "") if k in at else 0)
            for k, d in enumerate(part.devices)
        )  # fmt: skip
        prompt, new = model.traffic.prompt, model.traffic.new
        engine = ServingEngine(
            model.seconds / (new + 1), model.seconds / (new + 1) / prompt, 0.0, prompt, 1, math.inf
        )
        served = serve(in_steady_state(model.traffic, engine), engine)
        busy = tuple(1.0 if k in at else 0.0 for k in range(len(part.devices)))
        load_s = _load_s(part, [h.weights_bytes for h in held])
        return Priced(
            devices, held, busy, served, 1.0 / model.seconds, load_s, model.memory_bytes, 1,
            math.inf, layout="as given",
        )  # fmt: skip

    def _priced(
        self, model: BoxModel, part: Cluster, result: Result, served: ServedTraffic,
        engine: ServingEngine, held: Sequence[EngineMemory], slots: int, share: float = 0.0,
    ) -> Priced:  # fmt: skip
        found, names = result.of_request(), result.placement.device_names
        busy = dict(zip(names, _busy(result, found).tolist(), strict=True))
        weights = [h.weights_bytes for h in held]
        return Priced(
            (), tuple(held), tuple(busy.get(h.device, 0.0) for h in held), served,
            _capacity(model, engine, served), _load_s(part, weights), sum(weights), slots,
            engine.copies * engine.cache_tokens, share,
            result.layout if result.generation is not None else "", result,
        )  # fmt: skip


def _served(model: BoxModel, cluster: Cluster, pricer: Pricer) -> Priced:
    """One plan of vLLM or SGLang under the model's traffic, with its memory on each card."""
    parts = {
        "cluster": cluster, "target": "vllm", "costs": pricer.costs, "search": pricer.search,
        "constraints": None, "objective": "latency", "kept": pricer.kept,
    }  # fmt: skip
    plan = served_plan(parts, model.spec, model.traffic, within=model.within, disaggregated=False)
    engine, served = plan.engine, plan.served
    if model.engine == "sglang":
        engine = engine._replace(scheduler=imported(TARGETS["sglang"].scheduler)())
        served = serve(in_steady_state(model.traffic, engine), engine)
    tokens = engine.cache_tokens
    if model.context > tokens:
        raise InfeasibleError(
            f"caches hold {int(tokens)} tokens, and the context is {model.context}"
        )
    held, shares = [], []
    for row, device in zip(plan.generation.memory, cluster.devices, strict=True):
        own = row.weights_bytes + row.activations_bytes
        if device.is_cpu or not own:
            held.append(EngineMemory(device.name, row.weights_bytes, 0, row.activations_bytes, 0))
            continue
        shares.append(math.floor(100 * device.memory_bytes / device.total_bytes) / 100)
        of_share = shares[-1] * device.total_bytes
        left = row.free_bytes if row.free_bytes is not None else 0
        cache = row.growing_bytes + max(0, left)
        kept = max(0, math.ceil(of_share) - own - cache)
        held.append(
            EngineMemory(device.name, row.weights_bytes, cache, row.activations_bytes, kept)
        )
    at_once = min(engine.requests_at_once, plan.room or engine.requests_at_once)
    return pricer._priced(  # noqa: SLF001
        model, cluster, replace(plan.result, traffic=plan), served, engine, held,
        engine.copies * at_once, max(shares, default=0.0),
    )  # fmt: skip


def _in_the_long_run(model: BoxModel, priced: Priced) -> Priced:
    """The price with a TTFT that grows without end where requests come faster than they are served:
    the few that are simulated may all be served before their queue is long."""
    if priced.capacity >= model.rate:
        return priced
    endless = Spread(math.inf, math.inf, math.inf)
    return replace(priced, served=replace(priced.served, first_token=endless))


def _needed_tokens(model: BoxModel, most: Priced) -> float:
    """Tokens in caches that the traffic fills when it has all room."""
    longest = max(r.prompt + r.new for r in model.traffic.requests)
    clients = model.traffic.concurrency or math.ceil(2 * most.served.running + 1)
    return max(clients * longest, model.context)


def _share_for(most: Priced, tokens: float, gpus: Sequence[Device]) -> float:
    """Share of each card, in whole percents, with room for so many tokens; copies of the model have
    a part of them each."""
    shares = [0.0]
    totals = {d.name: d.total_bytes for d in gpus}
    for row in most.held:
        if row.device in totals and row.weights_bytes:
            cache = row.cache_bytes * min(1.0, tokens / max(most.cache_tokens, 1.0))
            taken = row.weights_bytes + row.buffer_bytes + row.context_bytes + cache
            shares.append(taken / totals[row.device])
    return math.ceil(100 * max(shares) + 0.5) / 100


def _engine_of(found: GenerationAnswer, slots: int) -> ServingEngine:
    """An engine of so many slots, whose passes are those of a plan for a batch of as many."""
    request = found.request
    context = request.batch * (request.prompt + request.new / 2)
    return ServingEngine(
        step_s=max(found.token_s - found.caches_s, 1e-9),
        token_s=max(found.first_token_s / (request.batch * request.prompt), 1e-12),
        context_s=found.caches_s / context, tokens_at_once=BATCH, requests_at_once=slots,
        cache_tokens=float(slots * request.held),
    )  # fmt: skip


def _capacity(model: BoxModel, engine: ServingEngine, served: ServedTraffic) -> float:
    """Requests/s of an engine that always has as many as it can take; of clients that ask again,
    those that they get."""
    new = model.traffic.new
    if model.traffic.concurrency:
        return served.tokens_per_s / new
    requests = [r._replace(at_s=0.0) for r in model.traffic.requests]
    longest = max(r.prompt + r.new for r in requests)
    most = engine.copies * min(engine.requests_at_once, engine.cache_tokens // longest)
    clients = max(1, int(min(most, MOST_SATURATING)))
    count = max(len(requests), 4 * clients)
    rows = tuple(Arrival(*requests[k % len(requests)]) for k in range(count))
    full = serve(in_steady_state(Traffic(rows, clients), engine), engine)
    return full.tokens_per_s / new


def _busy(result: Result, found: GenerationAnswer) -> Float[np.ndarray, "D"]:
    """Share of a request's seconds in which each device computes; of stages that have batches of
    their own at once, so many times that."""
    names = result.placement.device_names
    seconds = np.zeros(len(names))
    parts = found.first_token_s, found.token_s * found.request.steps
    for phase, whole_s in zip(found.shares, parts, strict=True):
        for part in phase:
            for name in part.together or ((part.device,) if part.device else ()):
                seconds[names.index(name)] += part.share * whole_s
    share = seconds / max(sum(parts), 1e-12)
    for d, home in result.placement.homes.items():
        share[d] = max(share[d], share[home])
    share = np.minimum(1.0, share * (found.stages if result.traffic is not None else 1))
    return np.where(share < NEGLIGIBLE, 0.0, share)


def _load_s(part: Cluster, weights: Sequence[int]) -> float:
    """Seconds of loading weights: from disk, then each card's over its link."""
    disk = part.disk_bytes_per_s or DISK_BYTES_PER_S
    links = part.link_bytes_per_s[part.host]
    sent = sum(w / links[d] for d, w in enumerate(weights) if d != part.host and w)
    return sum(weights) / disk + float(sent)


def _context(device: Device, runtime: str) -> int:
    """Bytes of an engine's own on a card. Of a processor, and of a memory that a GPU shares with
    one, the system's part is left out once for all."""
    return 0 if device.is_cpu or device.is_unified else default_reserve(device, runtime)


def _signature(cluster: Cluster, devices: tuple[int, ...]) -> tuple[Any, ...]:
    """Equal for sets whose devices and links are interchangeable in their order."""
    part = cluster.part(devices)
    own = tuple(int(cluster.alike[d]) for d in devices)
    pools = tuple(cluster.devices[d].memory_pool for d in devices)
    names: dict[int, int] = {}  # of channels, in the order of their first use
    channels = tuple(names.setdefault(int(c), len(names)) for c in part.channel.ravel())
    return (
        own, pools, part.link_bytes_per_s.tobytes(), part.link_latency_s.tobytes(),
        channels, part.host,
    )  # fmt: skip


def memories(cluster: Cluster) -> tuple[Int[np.ndarray, "M"], Int[np.ndarray, "D"]]:
    """(bytes of each memory that engines may take, memory of each device).

    Of a card whose reserve is the default one the engines' own contexts come out of all that it
    reports; a reserve that was set by hand is kept beside them.
    """
    room, of = list[int](), np.zeros(cluster.num_devices, np.int64)
    pools: dict[int, int] = {}
    for d, device in enumerate(cluster.devices):
        pool = int(cluster.pool[d])
        free = 0 < device.reserve_bytes == default_reserve(device) and not device.is_cpu
        size = device.total_bytes if free and not device.is_unified else device.memory_bytes
        if pool != ALONE and pool in pools:
            of[d] = pools[pool]
            room[of[d]] = max(room[of[d]], size)
            continue
        of[d] = len(room)
        pools[pool] = len(room)
        room.append(min(size, UNLIMITED_BYTES))
    return np.array(room, dtype=np.int64), of


def plan_of(priced: Priced) -> ServedPlan | None:
    """The plan of vLLM, of prices that have one."""
    return None if priced.result is None else priced.result.traffic
