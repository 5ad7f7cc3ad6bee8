"""Packing of several models on one box: branch and bound over options and swap groups.

Models are placed one after the other, those whose limits break first. A child is an option in a
slot of its own, or in the slot of models that may be unloaded. All parts of the value grow
with every model that is placed, so that those of a part of the packing bound all that begin with
it; the load is bounded by linear programming, too: with duals pi of devices (sum 1) and mu of
memories, and loads without weights, which are no larger,

    load >= sum over models of min over options of (pi . device load + mu . bytes) - mu . memory

(Lagrange), each model's term that of its option once it is placed. Of options that differ by unused
interchangeable devices alone one is tried. The first packing is a dive with local search.
"""

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from gdp.base.kernels.twin import compiled, is_worth_compiling
from gdp.box.branch import BranchState, Incumbent, Options, explore
from gdp.box.table import TOLERANCE, Box, Packing, PackingValue, Place, Tenant, slot_work, slowdown
from gdp.box.table import value_of as rated

EXACT_DEVICES, EXACT_MODELS = 6, 8
"""Sizes up to which a search of `LONG_S` or more goes on for `PROOF_S`, as a proof is near."""
LONG_S, PROOF_S = 10.0, 60.0
MOST_SUBSETS = 4096
"""Sets of models that are tried, the lightest ones left out first."""
PLAIN_CHILDREN, CHILDREN = 5_000, 2_000_000
"""Children that are rated before the search is compiled, and between two looks at the clock."""


@dataclass(frozen=True)
class PackingResult:
    """The best packing that was found, and the bound on its load."""

    packing: Packing
    value: PackingValue
    bound: float  # least load of any packing of these models
    proven: bool  # no packing is better
    children: int  # that were rated
    seconds: float


def solve(box: Box, seconds: float = 10.0) -> PackingResult:
    """The best packing of a box.

    Args:
        box: Models with at least one option each, or none where they fit nowhere.
        seconds: After which the best packing known is returned; see `EXACT_MODELS`.
    """
    began = time.perf_counter()
    small = box.num_devices <= EXACT_DEVICES and len(box.tenants) <= EXACT_MODELS
    deadline = began + (PROOF_S if small and seconds >= LONG_S else seconds)
    kept = [_undominated(t) for t in box.tenants]
    slim = replace(box, tenants=tuple(_only(t, k) for t, k in zip(box.tenants, kept, strict=True)))
    total = sum((t.weight for t in box.tenants), start=0.0)
    best: Packing = (None,) * len(box.tenants)
    value, bound, children, proven = PackingValue(total, *[0.0] * 5), 0.0, 0, True
    for dropped, chosen in itertools.islice(_subsets(slim), MOST_SUBSETS):
        if not chosen or dropped > value.dropped * (1 + TOLERANCE):
            break
        if (terms := _terms(slim, chosen)) is None:
            continue
        run = _Run(slim, chosen, dropped, deadline, terms, value, best)
        bound = max(bound, run.bound)
        value, best = run.value, run.best
        children, proven = children + run.children, proven and run.ended
    packing = tuple(
        None if place is None else Place(int(kept[i][place.option]), place.slot)
        for i, place in enumerate(best)
    )
    least = value.load if proven else min(bound, value.load)
    return PackingResult(packing, value, least, proven, children, time.perf_counter() - began)


def _subsets(box: Box) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Sets of models that are placed, by the weight of those left out; models without an option are
    in none."""
    able = [i for i, t in enumerate(box.tenants) if t.num_options]
    always = sum((t.weight for t in box.tenants if not t.num_options), start=0.0)
    heap: list[tuple[float, tuple[int, ...]]] = [(always, ())]
    by_weight = sorted(able, key=lambda i: box.tenants[i].weight)
    while heap:
        dropped, out = heapq.heappop(heap)
        yield dropped, tuple(i for i in able if i not in out)
        last = by_weight.index(out[-1]) if out else -1
        for i in by_weight[last + 1 :]:
            heapq.heappush(heap, (dropped + box.tenants[i].weight, (*out, i)))


_NUMBERS = ("held_bytes", "busy", "capacity", "ttft_s", "tpot_s", "load_s", "loaded_bytes")


def _only(tenant: Tenant, keep: Int[np.ndarray, "K"]) -> Tenant:
    """The model with some of its options, in this order."""
    return replace(tenant, **{name: getattr(tenant, name)[keep] for name in _NUMBERS})


def _undominated(tenant: Tenant) -> Int[np.ndarray, "K"]:
    """Options that no other one equals or beats in every number."""
    costs = np.column_stack([
        tenant.held_bytes, tenant.busy, tenant.device_load, tenant.uses, tenant.share,
        -np.minimum(tenant.allowed.T, 1e300), tenant.load_s, tenant.loaded_bytes,
    ])  # fmt: skip
    keep: list[int] = []
    for o in np.lexsort(costs.T[::-1]).tolist():
        if not (costs[keep] <= costs[o]).all(axis=1).any():
            keep.append(o)
    return np.array(sorted(keep), dtype=np.int64)


@dataclass(frozen=True)
class _Terms:
    """Terms of each option of each model in the bound, and what is taken from their sum."""

    of: dict[int, Float[np.ndarray, "_"]]
    offset: float


def _terms(box: Box, chosen: tuple[int, ...]) -> _Terms | None:
    """Prices of options by the duals of the linear program; None where no packing of these models
    has room."""
    from scipy.optimize import linprog

    tenants, d = box.tenants, box.num_devices
    sizes = [tenants[i].num_options for i in chosen]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    columns = int(starts[-1]) + 1
    rows = [np.zeros((d, columns))]
    rows[0][:, -1] = -1.0
    for k, i in enumerate(chosen):
        rows[0][:, starts[k] : starts[k + 1]] = tenants[i].device_load.T
    # Models that may be unloaded may all share a slot, so that each alone has to fit.
    room = np.maximum(box.memory_bytes, 1).astype(float)
    for alone in [k for k, i in enumerate(chosen) if tenants[i].swaps] or [-1]:
        memory = np.zeros((len(room), columns))
        for k, i in enumerate(chosen):
            if not tenants[i].swaps or k == alone:
                memory[:, starts[k] : starts[k + 1]] = tenants[i].held_bytes.T / room[:, None]
        rows.append(memory)
    once = np.zeros((len(chosen), columns))
    for k in range(len(chosen)):
        once[k, starts[k] : starts[k + 1]] = 1.0
    aim, matrix = np.zeros(columns), np.vstack(rows)
    aim[-1] = 1.0
    limit = np.concatenate([np.zeros(d), np.ones(len(matrix) - d)])
    solved = linprog(aim, matrix, limit, once, np.ones(len(chosen)), (0, None), method="highs")
    if solved.status == 2:
        return None
    dual = np.zeros(len(matrix))
    if solved.status == 0:  # any duals whose devices add up to at most 1 bound the load
        dual = np.maximum(-solved.ineqlin.marginals, 0.0)
        dual = dual / max(1.0, dual[:d].sum())
    prices = dual @ matrix[:, :-1]
    of = {i: prices[starts[k] : starts[k + 1]] for k, i in enumerate(chosen)}
    return _Terms(of, float(dual @ limit))


class _Run:
    """The search over the packings of one set of models, which goes on from the best one known."""

    def __init__(
        self, box: Box, chosen: tuple[int, ...], dropped: float, deadline: float, terms: _Terms,
        value: PackingValue, best: Packing,
    ) -> None:  # fmt: skip
        self.box, self.deadline, self.value, self.best = box, deadline, value, best
        room = np.maximum(box.memory_bytes, 1)
        need = {i: float((box.tenants[i].held_bytes / room).sum(axis=1).min()) for i in chosen}
        self.order = sorted(chosen, key=lambda i: (box.tenants[i].swaps, -need[i], i))
        self.bound = max(0.0, sum(float(terms.of[i].min()) for i in chosen) - terms.offset)
        self.children, self.ended = 0, False
        self._start()
        self._explore(dropped, terms)

    def _take(self, packing: Packing) -> PackingValue | None:
        """Rate a packing, which is kept where it is the best one."""
        value = rated(self.box, packing)
        if value is not None and value.less(self.value):
            self.value, self.best = value, packing
        return value

    def _start(self) -> None:
        """First packings: of options that are best at once, and of those that keep limits with the
        least memory, which leave room for the models that follow."""
        for small in (False, True):
            packing: Packing | None = (None,) * len(self.box.tenants)
            for i in self.order:
                packing = packing and self._with(packing, i, small)
            if packing is not None:
                self._improve(self._improve(packing, True) if small else packing, False)

    def _improve(self, packing: Packing, small: bool) -> Packing:
        """Models are taken out and put back where that is better."""
        value = self._take(packing)
        pairs = [(i,) for i in self.order] + list(itertools.combinations(self.order, 2))
        rng, improved = np.random.default_rng(0), value is not None
        while improved and time.perf_counter() < self.deadline:
            improved = False
            for k in rng.permutation(len(pairs)).tolist():
                other: Packing | None = tuple(
                    None if i in pairs[k] else place for i, place in enumerate(packing)
                )
                for i in pairs[k]:
                    other = None if other is None else self._with(other, i, small)
                found = None if other is None else self._take(other)
                if other and found is not None and value is not None and found.less(value):
                    packing, value, improved = other, found, True
        return packing

    def _with(self, packing: Packing, i: int, small: bool) -> Packing | None:
        """The packing with one model more, where that is best, or (`small`) takes the least memory
        of those that break as few limits; None where it has no room."""
        tenant, tenants = self.box.tenants[i], self.box.tenants
        slots: dict[int, list[int]] = {}
        for j, place in enumerate(packing):
            if place is not None:
                slots.setdefault(place.slot, []).append(j)
        held = {
            s: np.max([tenants[j].held_bytes[_option(packing, j)] for j in own], axis=0)
            for s, own in slots.items()
        }
        uses = {
            s: np.any([tenants[j].uses[_option(packing, j)] for j in own], axis=0)
            for s, own in slots.items()
        }
        rows: list[tuple[tuple[tuple[float, ...], int], int]] = []
        for s in [max(slots, default=-1) + 1, *slots]:
            if s in slots and not (tenant.swaps and tenants[slots[s][0]].swaps):
                continue
            rest = [x for x in slots if x != s]
            taken = sum((held[x] for x in rest), start=np.zeros_like(self.box.memory_bytes))
            own = np.maximum(tenant.held_bytes, held.get(s, 0))
            fits = np.flatnonzero((taken + own <= self.box.memory_bytes).all(axis=1))
            if not len(fits):
                continue
            engines = sum((uses[x] * 1.0 for x in rest), start=np.zeros(self.box.num_devices))
            engines = engines + (tenant.uses[fits] | uses.get(s, False))
            rows.append((self._best_of(packing, i, s, fits, engines, small), s))
        if not rows:
            return None
        (_, o), s = min(rows)
        return tuple(Place(o, s) if j == i else place for j, place in enumerate(packing))

    def _best_of(
        self, packing: Packing, i: int, slot: int, fits: Int[np.ndarray, "K"],
        engines: Float[np.ndarray, "K D"], small: bool,
    ) -> tuple[tuple[float, ...], int]:  # fmt: skip
        """(value without what is left out, option) of a model's best option in a slot, of those
        that fit, with so many engines on each device."""
        box, count = self.box, len(fits)
        slots: dict[int, list[tuple[Tenant, Any]]] = {slot: [(box.tenants[i], fits)]}
        for t, place in zip(box.tenants, packing, strict=True):
            if place is not None:
                slots.setdefault(place.slot, []).append((t, place.option))
        work = np.zeros((count, box.num_devices, len(box.weights)))
        broken, crowded, load, moved, waited = np.zeros((5, count))
        for members in slots.values():
            shares, loads = slot_work(members)
            of_slot, moved = np.zeros((count, len(box.weights))), moved + loads
            for (t, o), share in zip(members, shares, strict=True):
                allowed, k = t.allowed[int(len(members) > 1), o], box.weights.index(t.weight)
                slow = slowdown(t.busy[o], engines)
                broken = broken + t.weight * (allowed < 1.0)
                crowded = crowded + t.weight * (allowed < slow)
                waited = waited + t.weight * t.share[o] * slow
                work[:, :, k] += t.device_load[o]
                of_slot[:, k] += share
            load = np.maximum(load, box.load_of(of_slot))
        load = np.maximum(load, box.load_of(work).max(axis=1))
        need = box.tenants[i].held_bytes[fits] @ (1.0 / np.maximum(box.memory_bytes, 1))
        fields = (broken, crowded, need * small, load, moved, waited)
        best = int(np.lexsort(fields[::-1])[0])
        value = [field[best] for field in fields]
        return tuple(map(float, value)), int(fits[best])

    def _explore(self, dropped: float, terms: _Terms) -> None:
        """All packings that may be better than the best one."""
        tenants, n = self.box.tenants, len(self.order)
        # Limits that the fewest engines beside it break come first, so that branches end early.
        most = {i: min(float(tenants[i].allowed[0].max()), n) for i in self.order}
        chosen = sorted(self.order, key=lambda i: (tenants[i].swaps, most[i]))
        order = {i: np.argsort(terms.of[i], kind="stable") for i in chosen}
        options = _options(self.box, chosen, order, dropped, terms)
        walk = _walk(n, self.box)
        slots = np.zeros(n, np.int64)
        incumbent = Incumbent(np.array(self.value, dtype=float), slots - 1, slots)
        args, run, count = (options, walk, incumbent), explore, PLAIN_CHILDREN
        while walk.level[0] >= 0 and time.perf_counter() < self.deadline:
            self.children += run(*args, count)
            if run is explore and is_worth_compiling(self.children, PLAIN_CHILDREN - 1):
                run = compiled(explore, Options, BranchState, Incumbent)
                count = CHILDREN
        self.ended = int(walk.level[0]) < 0
        if incumbent.option[0] < 0:
            return
        places: list[Place | None] = [None] * len(self.box.tenants)
        for k, i in enumerate(chosen):
            o = int(order[i][incumbent.option[k] - options.start[k]])
            places[i] = Place(o, int(incumbent.slot[k]))
        self._take(tuple(places))


def _option(packing: Packing, i: int) -> int:
    """Option of a model that is placed."""
    place = packing[i]
    assert place is not None
    return place.option


def _options(
    box: Box, chosen: list[int], order: dict[int, Int[np.ndarray, "_"]], dropped: float,
    terms: _Terms,
) -> Options:  # fmt: skip
    """The tables of the search."""
    own = [_only(box.tenants[i], order[i]) for i in chosen]
    prices = [terms.of[i][order[i]] for i in chosen]
    ends = range(len(chosen) + 1)
    return Options(
        start=np.concatenate([[0], np.cumsum([t.num_options for t in own])]).astype(np.int64),
        held=np.concatenate([t.held_bytes for t in own]),
        device_load=np.concatenate([t.device_load for t in own]),
        busy=np.concatenate([t.busy for t in own]),
        allowed=np.concatenate([t.allowed for t in own], axis=1),
        share=np.concatenate([t.share for t in own]),
        load_s=np.concatenate([t.load_s for t in own]),
        loaded=np.concatenate([t.loaded_bytes for t in own]),
        term=np.concatenate(prices),
        weight=np.array([t.weight for t in own]),
        kind=np.array([box.weights.index(t.weight) for t in own]),
        scale=np.array(box.weights) / min(box.weights),
        demand=np.array([t.demand for t in own]),
        swaps=np.array([t.swaps for t in own]),
        memory=box.memory_bytes, memory_of=box.memory_of, classes=box.classes,
        rest_term=np.array([sum(float(p[0]) for p in prices[k:]) for k in ends], dtype=float),
        rest_load=np.array([
            max((float(t.share.min()) for t in own[k:]), default=0.0) for k in ends
        ]),
        rest_broken=np.array([
            sum(t.weight for t in own[k:] if (t.allowed[0] < 1.0).all()) for k in ends
        ], dtype=float),
        rest_waited=np.array([
            sum(t.weight * float(t.share.min()) for t in own[k:]) for k in ends
        ], dtype=float),
        fixed=np.array([dropped, terms.offset]),
    )  # fmt: skip


def _walk(n: int, box: Box) -> BranchState:
    """The start of a search."""
    d, m = box.num_devices, len(box.memory_bytes)

    def whole(*shape: int) -> Int[np.ndarray, "..."]:
        return np.zeros(shape, np.int64)

    levels = n + 1
    return BranchState(
        whole(1), whole(levels), whole(levels) - 1, whole(levels), whole(levels, m),
        np.zeros((levels, d, len(box.weights))), whole(levels, d), np.zeros(levels), whole(levels),
        whole(levels, n, m), whole(levels, n, d), np.zeros((levels, n)), np.zeros((levels, n)),
        whole(levels, n), whole(d), np.zeros(levels), np.zeros(len(box.weights)),
    )  # fmt: skip
