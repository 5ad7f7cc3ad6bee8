"""Several models on one box, as numbers: options of each model, packings, and their value.

An option is one model on one set of devices with one share of their memory; it was priced before,
alone. A packing chooses an option of each model and a slot: models of one slot take turns (a swap
group, of which one is loaded), all other models are loaded together. Axes: O options of a model,
D devices, M memories, N models.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

TOLERANCE = 1e-9
"""Relative difference of two loads below which they are equal."""


@dataclass(frozen=True, eq=False)
class Tenant:
    """A model, its demand, and its options."""

    name: str
    held_bytes: Int[np.ndarray, "O M"]  # weights, caches, buffers and context of its engine
    busy: Float[np.ndarray, "O D"]  # share of the engine's time in which each device computes
    capacity: Float[np.ndarray, "O"]  # requests/s at most, alone
    ttft_s: Float[np.ndarray, "O"]  # alone, under its own traffic
    tpot_s: Float[np.ndarray, "O"]
    load_s: Float[np.ndarray, "O"]  # of loading the weights
    loaded_bytes: Float[np.ndarray, "O"]
    demand: float = 0.0  # requests/s
    weight: float = 1.0
    swaps: bool = False  # it may be unloaded while it is idle
    ttft_limit_s: float = np.inf
    tpot_limit_s: float = np.inf

    @property
    def num_options(self) -> int:
        """O."""
        return len(self.capacity)

    @functools.cached_property
    def uses(self) -> Bool[np.ndarray, "O D"]:
        """True where the engine computes on a device."""
        return self.busy > 0

    @functools.cached_property
    def share(self) -> Float[np.ndarray, "O"]:
        """Share of its engine's time that the demand takes; above 1 it cannot be served."""
        return self.demand / self.capacity

    @functools.cached_property
    def device_load(self) -> Float[np.ndarray, "O D"]:
        """Share of each device's time that the demand takes."""
        return self.share[:, None] * self.busy

    @functools.cached_property
    def allowed(self) -> Float[np.ndarray, "2 O"]:
        """Slowdown up to which the limits are kept: [0] with a slot of its own, [1] in a swap
        group, where a first token waits for the weights. Below 1 they are broken alone."""
        with np.errstate(divide="ignore", invalid="ignore"):
            decode = np.where(self.tpot_s > 0, self.tpot_limit_s / self.tpot_s, np.inf)
            first = [(self.ttft_limit_s - wait) / self.ttft_s for wait in (0.0, self.load_s)]
        # An endless TTFT is within no limit, unless that is endless, too.
        first = np.nan_to_num(np.array(first), nan=np.inf, posinf=np.inf)
        return np.minimum(decode, first) * (1 + TOLERANCE)


@dataclass(frozen=True, eq=False)
class Box:
    """Models and the memories that they share."""

    tenants: tuple[Tenant, ...]
    memory_bytes: Int[np.ndarray, "M"]
    memory_of: Int[np.ndarray, "D"]  # memory of each device; several may share one

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.memory_of)

    @functools.cached_property
    def weights(self) -> tuple[float, ...]:
        """The weights that models have, the largest first."""
        return tuple(sorted({t.weight for t in self.tenants}, reverse=True))

    def load_of(self, work: Float[np.ndarray, "*P W"]) -> Float[np.ndarray, "*P"]:
        """Load of a device, or of a slot, whose time demands of each weight take a share of.

        The served part of a demand of weight w is min(1, t w / least weight): all of it at t = 1.
        The load is 1 / t for the largest t <= 1 that leaves no more work than time; where all
        demands are served, the share of the time that they take.

        >>> table = Box((), np.array([1]), np.array([0]))
        >>> table.__dict__["weights"] = (3.0, 1.0)
        >>> table.load_of(np.array([[0.5, 1.0], [0.3, 0.3]]))  # 0.5 + t = 1; 0.6
        array([2. , 0.6])
        """
        scale = np.array(self.weights) / min(self.weights, default=1.0)
        rest = np.cumsum((work * scale)[..., ::-1], axis=-1)[..., ::-1]
        load, served = work.sum(axis=-1), np.zeros(work.shape[:-1])
        open_ = load > 1.0
        for k, w in enumerate(scale):
            with np.errstate(divide="ignore", invalid="ignore"):
                level = (1.0 - served) / rest[..., k]
            here = open_ & (level * w <= 1.0)
            load = np.where(here, 1.0 / np.where(here, level, 1.0), load)
            open_ = open_ & ~here
            served = served + work[..., k]
        return np.asarray(load)

    @functools.cached_property
    def classes(self) -> Int[np.ndarray, "D"]:
        """Class of each device: exchanging two of one class, with their memories, leaves the
        options of every model as they are."""
        label = np.arange(self.num_devices)
        for a, b in itertools.combinations(range(self.num_devices), 2):
            if label[b] == b and self._exchangeable(a, b):
                label[b] = label[a]
        return label

    def _exchangeable(self, a: int, b: int) -> bool:
        own = [int(self.memory_of[d]) for d in (a, b)]
        if own[0] == own[1] or any((self.memory_of == m).sum() > 1 for m in own):
            return False
        if self.memory_bytes[own[0]] != self.memory_bytes[own[1]]:
            return False
        devices, memories = np.arange(self.num_devices), np.arange(len(self.memory_bytes))
        devices[[a, b]], memories[own] = [b, a], own[::-1]
        return all(
            _rows(t, t.busy, t.held_bytes)
            == _rows(t, t.busy[:, devices], t.held_bytes[:, memories])
            for t in self.tenants
        )


def _rows(
    tenant: Tenant, busy: Float[np.ndarray, "O D"], held: Int[np.ndarray, "O M"]
) -> list[bytes]:
    """The options in an order of their own."""
    numbers = (
        tenant.capacity, tenant.ttft_s, tenant.tpot_s, tenant.load_s, tenant.loaded_bytes
    )  # fmt: skip
    table = np.column_stack([*numbers, busy, held])
    return sorted(row.tobytes() for row in table)


class Place(NamedTuple):
    """Option and slot of a model in a packing."""

    option: int
    slot: int  # models of one slot take turns


Packing = tuple[Place | None, ...]
"""Place of each model; None: it is left out."""


class PackingValue(NamedTuple):
    """Value of a packing; the least is best, an earlier field before the next.

    A load up to 1 serves all demands; beyond, each model is served at least weight / (least weight)
    / load of its demand, at most all (`Box.load_of`).
    """

    dropped: float  # weight of the models that are left out
    broken: float  # weight of those whose limits are broken even while the others are idle
    crowded: float  # weight of those whose limits are broken while all others are busy
    load: float  # of the busiest device or slot
    moved: float  # bytes/s of weights that swapping loads
    waited: float  # weighted shares of the engines' time that demands take while all are busy

    def less(self, other: "PackingValue") -> bool:
        """True where this one is better, beyond the rounding of sums."""
        for mine, theirs in zip(self, other, strict=True):
            slack = TOLERANCE * max(1.0, abs(theirs) if theirs < np.inf else 1.0)
            if mine < theirs - slack:
                return True
            if mine > theirs + slack:
                return False
        return False


def slowdown(
    busy: Float[np.ndarray, "*#P D"], engines: Float[np.ndarray, "*#P D"]
) -> Float[np.ndarray, "..."]:
    """Factor of an engine's seconds while so many engines are busy on each device, itself among
    them.

    A GPU gives processes equal slices of its time, so that k of them take k times as long where
    they compute. Devices that the engine uses one after the other wait by their own shares of its
    time; devices that compute each op together wait for the slowest: at most the largest k.

    >>> float(slowdown(np.array([0.5, 0.5]), np.array([3.0, 1.0])))
    2.0
    >>> float(slowdown(np.array([1.0, 1.0]), np.array([2.0, 2.0])))
    2.0
    """
    waits = 1.0 + ((engines - 1.0) * busy).sum(axis=-1)
    most = np.where(busy > 0, engines, 1.0).max(axis=-1)
    return np.asarray(np.minimum(waits, most))


def slot_work(tenants: "Sequence[tuple[Tenant, Any]]") -> tuple[list[Any], Any]:
    """(share of the time of each, bytes/s that are loaded) of models that take turns, each with its
    option, or of one by itself; an array of options gives arrays.

    Requests come independently of each other, so that one finds another model than its own loaded
    with the share of the others in all requests; it waits for its weights then.
    """
    rates = sum(t.demand for t, _ in tenants)
    shares, moved = [], 0.0
    for t, o in tenants:
        swaps = t.demand * (1.0 - t.demand / rates) if rates and len(tenants) > 1 else 0.0
        shares.append(t.share[o] + swaps * t.load_s[o])
        moved = moved + swaps * t.loaded_bytes[o]
    return shares, moved


def slots_of(box: Box, packing: Packing) -> dict[int, list[tuple[Tenant, int]]]:
    """Models of each slot with their options."""
    slots: dict[int, list[tuple[Tenant, int]]] = {}
    for tenant, place in zip(box.tenants, packing, strict=True):
        if place is not None:
            slots.setdefault(place.slot, []).append((tenant, place.option))
    return slots


def held_bytes(box: Box, packing: Packing) -> Int[np.ndarray, "M"]:
    """Bytes of each memory: of a slot the most that one of its models takes."""
    held = np.zeros_like(box.memory_bytes)
    for members in slots_of(box, packing).values():
        held += np.max([t.held_bytes[o] for t, o in members], axis=0)
    return held


def engines_on(box: Box, packing: Packing) -> Int[np.ndarray, "D"]:
    """Engines that may be busy at once on each device: one of each slot."""
    count = np.zeros(box.num_devices, np.int64)
    for members in slots_of(box, packing).values():
        count += np.any([t.uses[o] for t, o in members], axis=0)
    return count


def value_of(box: Box, packing: Packing) -> PackingValue | None:
    """The value of a packing; None where a memory overflows, or a model that has to stay loaded
    takes turns."""
    slots = slots_of(box, packing)
    if (held_bytes(box, packing) > box.memory_bytes).any():
        return None
    if any(len(m) > 1 and not all(t.swaps for t, _ in m) for m in slots.values()):
        return None
    engines = engines_on(box, packing).astype(float)
    dropped = sum(t.weight for t, p in zip(box.tenants, packing, strict=True) if p is None)
    work = np.zeros((box.num_devices, len(box.weights)))
    broken = crowded = moved = load = waited = 0.0
    for members in slots.values():
        shares, loads = slot_work(members)
        of_slot, moved = np.zeros(len(box.weights)), moved + float(loads)
        for (t, o), share in zip(members, shares, strict=True):
            allowed = t.allowed[int(len(members) > 1), o]
            slow = float(slowdown(t.busy[o], engines))
            broken += t.weight * (allowed < 1.0)
            crowded += t.weight * (allowed < slow)
            waited += t.weight * float(t.share[o]) * slow
            k = box.weights.index(t.weight)
            work[:, k] += t.device_load[o]
            of_slot[k] += float(share)
        load = max(load, float(box.load_of(of_slot)))
    load = max(load, float(box.load_of(work).max(initial=0.0)))
    return PackingValue(dropped, broken, crowded, load, moved, waited)


def served_shares(box: Box, packing: Packing) -> tuple[float, ...]:
    """Part of each demand that is served, at most 1, by water filling: all rise in proportion to
    their weights until their demand is met or a device, or a slot, is busy all the time."""
    count = len(box.tenants)
    slots, rows = slots_of(box, packing), np.zeros((box.num_devices, count))
    of_slot = np.zeros((len(slots), count))
    for i, place in enumerate(packing):
        if place is not None:
            t = box.tenants[i]
            rows[:, i] = t.device_load[place.option]
    for s, members in enumerate(slots.values()):
        for (t, _), own in zip(members, slot_work(members)[0], strict=True):
            of_slot[s, box.tenants.index(t)] = own
    work = np.vstack([rows, of_slot])
    weight = np.array([t.weight for t in box.tenants])
    share = np.zeros(count)
    rising = np.array([place is not None for place in packing])
    while rising.any():
        speed = np.where(rising, weight, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.where(work @ speed > 1e-15, (1.0 - work @ share) / (work @ speed), np.inf)
            full = np.where(rising, (1.0 - share) / weight, np.inf)
        step = max(0.0, min(float(level.min(initial=np.inf)), float(full.min())))
        share = share + step * speed
        tight = work[level <= step + 1e-12].sum(axis=0) > 0
        rising &= ~tight & (share < 1.0 - 1e-12)
    return tuple(np.minimum(share, 1.0).tolist())
