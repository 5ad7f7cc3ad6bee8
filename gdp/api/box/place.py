"""The call `place_models`: several models on one box."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gdp.api.box.advice import advice
from gdp.api.box.answer import BoxAnswer, DeviceUse, PlacedModel
from gdp.api.box.models import BoxModel, read_models
from gdp.api.box.pricing import EngineMemory, Priced, Pricer, memories
from gdp.api.box.start import is_nvidia, started
from gdp.base.errors import InfeasibleError
from gdp.base.units import format_bytes
from gdp.box.solve import PackingResult, solve
from gdp.box.table import (
    Box,
    Packing,
    PackingValue,
    Tenant,
    engines_on,
    held_bytes,
    served_shares,
    slots_of,
    slowdown,
)
from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.machines import several_machines
from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.costs.base import CostModel
from gdp.costs.offload import DISK_BYTES_PER_S
from gdp.methods.base import Search

PACKING_S, ADVICE_S = 10.0, 2.0
"""Seconds of the search for a packing where a proof is not near (a tenth of those of prices, where
that is more), and after a change that may be advised."""


def place_models(
    models: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    cluster: Machine,
    *,
    costs: CostModel | str | os.PathLike[str] | None = None,
    search: Search | None = None,
    progress: Callable[[str], None] | None = None,
) -> BoxAnswer:
    """Place several models on one box: each one's devices, share of memory and engine, and which
    take turns.

    Each model is planned alone on every set of devices, as `gdp.place` does; a packing chooses one
    of these plans for each. Best is the packing that leaves out the least weight, then breaks the
    fewest limits, first alone and then while all others are busy, then serves the largest part of
    the demands, then moves the fewest bytes of weights, then takes the least of the engines' time.

    Args:
        models: A TOML file with a `[[model]]` each, or mappings with the same keys: `spec`, and
            `name`, `engine` ("llamacpp", "vllm", "sglang", "transformers" or "other"), `context`,
            `traffic`, `within` (`ttft`, `tpot`), `residence` ("always", "on demand" or "idle after
            5 min"), `weight`, `devices`; of "other" `memory`, `seconds` and `command`.
        cluster: As `gdp.place` takes it.
        costs: As `gdp.place` takes them.
        search: Of plans for transformers. Default: one second each.
        progress: Called with each price that is made.

    Returns:
        A `BoxAnswer`; times are seconds.

    Raises:
        ArgumentError: The models have another form, or a name stands twice.
        InfeasibleError: A model fits on no set of devices, or its traffic is more than the whole
            box can serve.

    Example:
        >>> import gdp
        >>> chat = {"spec": "chat.gguf", "context": 8192, "weight": 3}
        >>> embedder = {"spec": "embed.gguf", "residence": "on demand"}
        >>> answer = gdp.place_models([chat, embedder], "cpu+2xrtx3090")  # doctest: +SKIP
        >>> answer.models[0].commands  # doctest: +SKIP
    """
    asked, machine = read_models(models), load_cluster(cluster)
    pricer = Pricer(machine, costs, search or Search(seconds=1.0), progress)
    began = time.perf_counter()
    priced = [_options(pricer, model) for model in asked]
    pricing_s = time.perf_counter() - began
    box = box_of(machine, asked, priced)
    solution = solve(box, max(PACKING_S, pricing_s / 10))
    placed = _placed(machine, box, asked, priced, solution)
    answer = _answer(machine, box, placed, solution, pricer, pricing_s)
    if answer.feasible:
        return answer
    troubled = [
        m.model.name for m in placed if m.busy is None or m.excess(m.busy) > 1 + 1e-9
    ]  # fmt: skip

    def rate(other: Cluster, models: Sequence[BoxModel]) -> PackingValue | None:
        # The first box's prices hold on it; a larger one has its own.
        own = pricer if other is machine else replace(pricer, cluster=other)
        try:
            options = [_options(own, model) for model in models]
        except InfeasibleError:
            return None
        return solve(box_of(other, models, options), ADVICE_S).value

    return replace(answer, advice=tuple(advice(machine, asked, troubled, solution.value, rate)))


def _options(pricer: Pricer, model: BoxModel) -> list[Priced]:
    """Options of a model; raises `InfeasibleError` where it has none, or none serves its rate."""
    options, reason = pricer.options(model)
    room, of = memories(pricer.cluster)
    options = [own for own in options if _fits(own, room, of)]
    where = f"model {model.name!r}"
    if not options:
        sizes = ", ".join(
            f"{device.name} has {format_bytes(int(room[of[d]]))}"
            for d, device in enumerate(pricer.cluster.devices)
            if room[of[d]] < UNLIMITED_BYTES
        )
        why = reason or f"it needs {format_bytes(model.memory_bytes)} and its engine's context"
        raise InfeasibleError(f"{where} fits nowhere, alone on the box: {why}; {sizes}")
    most = max(own.capacity for own in options)
    if model.rate > most:
        raise InfeasibleError(
            f"{where}: {model.rate:.3g} requests/s are more than the {most:.3g} that the whole box "
            "serves of it; ask for fewer, or give it more or faster devices"
        )
    return options


def _fits(priced: Priced, room: Any, of: Any) -> bool:
    held = np.zeros(len(room), np.int64)
    for d, own in zip(priced.devices, priced.held, strict=True):
        held[of[d]] += own.all_bytes
    return bool((held <= room).all())


def box_of(cluster: Cluster, models: Sequence[BoxModel], priced: Sequence[Sequence[Priced]]) -> Box:
    """The models and their options as numbers."""
    room, of = memories(cluster)
    tenants = []
    for model, options in zip(models, priced, strict=True):
        held = np.zeros((len(options), len(room)), np.int64)
        busy = np.zeros((len(options), cluster.num_devices))
        for o, own in enumerate(options):
            for d, h, share in zip(own.devices, own.held, own.busy, strict=True):
                held[o, of[d]] += h.all_bytes
                busy[o, d] = share

        def column(values: Sequence[float]) -> Any:
            return np.array(values, dtype=float)

        tenants.append(Tenant(
            model.name, held, busy, column([o.capacity for o in options]),
            column([max(o.served.first_token.p95_s, 1e-9) for o in options]),
            column([o.served.token.p95_s for o in options]),
            column([o.load_s for o in options]), column([float(o.loaded_bytes) for o in options]),
            model.rate or max((o.capacity for o in options), default=0.0), model.weight,
            model.swaps, model.within.first_s, model.within.token_s,
        ))  # fmt: skip
    return Box(tuple(tenants), room, of)


def _placed(
    cluster: Cluster, box: Box, models: Sequence[BoxModel],
    priced: Sequence[Sequence[Priced]], solution: PackingResult,
) -> list[PlacedModel]:  # fmt: skip
    """The models of a packing, with their commands."""
    packing = solution.packing
    sizes = {s: len(members) for s, members in slots_of(box, packing).items()}
    turns = sorted(s for s, size in sizes.items() if size > 1)
    engines = engines_on(box, packing).astype(float)
    shares, percents = served_shares(box, packing), sm_percents(cluster, box, packing)
    placed = []
    for i, (model, place) in enumerate(zip(models, packing, strict=True)):
        tenant = box.tenants[i]
        if place is None:
            reason = "beside the others it has no room"
            placed.append(PlacedModel(model, None, demand=tenant.demand, reason=reason))
            continue
        own = priced[i][place.option]
        start = started(cluster, model, own, i, percents[i])
        placed.append(PlacedModel(
            model, own, turns.index(place.slot) if place.slot in turns else None,
            float(slowdown(tenant.busy[place.option], engines)), shares[i], tenant.demand,
            start.commands, start.environment, sm_percent=percents[i],
        ))  # fmt: skip
    return placed


def sm_percents(cluster: Cluster, box: Box, packing: Packing) -> list[int]:
    """Most SMs of each engine, in percent: equal parts of the cards that it shares with others.

    NVIDIA MPS runs kernels of several processes at once. An engine with the k-th part of the SMs is
    at most k times slower whatever the others do, but its prompts are, too, while they are idle. So
    SMs are shared where all engines of a card have limits and keep them with the k-th part of
    everything; 0 for time slices, and for an engine by itself.
    """
    engines, kept = engines_on(box, packing), np.array([is_nvidia(d) for d in cluster.devices])
    slots, most = slots_of(box, packing), dict[int, int]()
    for i, (t, place) in enumerate(zip(box.tenants, packing, strict=True)):
        if place is not None:
            uses = t.uses[place.option] & np.array([not d.is_cpu for d in cluster.devices])
            most[i] = int(engines[uses].max(initial=1))
            allowed = t.allowed[int(len(slots[place.slot]) > 1), place.option]
            kept[uses] &= bool(most[i] <= allowed < np.inf)
    return [
        100 // most[i]
        if place is not None and most[i] > 1 and kept[t.uses[place.option]].all() else 0
        for i, (t, place) in enumerate(zip(box.tenants, packing, strict=True))
    ]  # fmt: skip


def _answer(
    cluster: Cluster, box: Box, placed: Sequence[PlacedModel], solution: PackingResult,
    pricer: Pricer, pricing_s: float,
) -> BoxAnswer:  # fmt: skip
    taken = held_bytes(box, solution.packing)
    uses = []
    for d, device in enumerate(cluster.devices):
        engines = [(m.model.name, _held_on(m, d)) for m in placed if m.priced is not None]
        here = tuple((name, held) for name, held in engines if held is not None)
        room = int(box.memory_bytes[box.memory_of[d]])
        if here or not device.is_cpu:
            loaded = int(taken[box.memory_of[d]])
            limit = room if room < UNLIMITED_BYTES else None
            uses.append(DeviceUse(device.name, here, loaded, limit))
    disk = cluster.disk_bytes_per_s
    said = "by the machine's file" if disk else "assumed: the machine's file says none"
    notes = []
    if any(m.sm_percent for m in placed):
        notes.append(
            "engines that share a card have parts of its SMs (NVIDIA MPS): start "
            "nvidia-cuda-mps-control -d before them, and all of them as one user"
        )
    if several_machines(cluster):
        notes.append("a box is one machine: devices of others than the host's are left out")
    if any(m.priced is not None and m.model.engine == "transformers" for m in placed):
        notes.append("transformers has no server of its own here: its file of devices is exported")
    return BoxAnswer(
        cluster, tuple(placed), tuple(uses), solution.value.load, solution.bound,
        solution.proven, solution.value.moved,
        sum(t.num_options for t in box.tenants), pricer.plans, pricing_s, solution.seconds,
        f"{(disk or DISK_BYTES_PER_S) / 1e9:.3g} GB/s, {said} (disk_bytes_per_s)",
        notes=tuple(notes),
    )  # fmt: skip


def _held_on(placed: PlacedModel, d: int) -> EngineMemory | None:
    priced = placed.priced
    if priced is None or d not in priced.devices:
        return None
    held = priced.held[priced.devices.index(d)]
    return held if held.all_bytes else None
