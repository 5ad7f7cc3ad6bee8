"""Packing of several models on one box: branch and bound over options and swap groups.

Models are placed one after the other, the ones that take most memory first. A child is an option
in a slot of its own, or in the slot of models that may be unloaded. All parts of the value grow
with every model that is placed, so that those of a part of the packing bound all that begin with
it; the load is bounded by linear programming, too: with duals pi of devices (sum 1) and mu of
memories,

    load >= sum over models of min over options of (pi . device load + mu . bytes) - mu . memory

(Lagrange), each model's term that of its option once it is placed. Devices that no model uses yet
and that are interchangeable give one child. The first packing is a dive with local search.
"""

import heapq
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.box.table import TOLERANCE, Box, Packing, Place, Tenant, Value, slot_work, slowdown

EXACT_DEVICES, EXACT_MODELS = 6, 8
"""Sizes up to which a packing is proven to be best, whatever time it takes."""
MOST_SUBSETS = 4096
"""Sets of models that are tried, the lightest ones left out first."""


@dataclass(frozen=True)
class Solution:
    """The best packing that was found, and the bound on its load."""

    packing: Packing
    value: Value
    bound: float  # least load of any packing of these models
    proven: bool  # no packing is better
    nodes: int
    seconds: float


def solve(box: Box, seconds: float = 10.0) -> Solution:
    """The best packing of a box.

    Args:
        box: Models with at least one option each, or none where they fit nowhere.
        seconds: After which the best packing known is returned, for boxes beyond `EXACT_DEVICES`
            and `EXACT_MODELS`.
    """
    began = time.perf_counter()
    small = box.num_devices <= EXACT_DEVICES and len(box.tenants) <= EXACT_MODELS
    deadline = np.inf if small else began + seconds
    kept = [_undominated(t) for t in box.tenants]
    slim = replace(box, tenants=tuple(_only(t, k) for t, k in zip(box.tenants, kept, strict=True)))
    best, nodes, proven, bound = _Best(), 0, True, 0.0
    for dropped, chosen in itertools.islice(_subsets(slim), MOST_SUBSETS):
        if best.value is not None and dropped > best.value.dropped * (1 + TOLERANCE):
            break
        run = _Branch(slim, chosen, dropped, best, deadline)
        if run.feasible:
            run.start()
            run.explore(_State.empty(slim), 0)
            bound = min(bound, run.root_bound) if bound else run.root_bound
        nodes, proven = nodes + run.nodes, proven and not run.stopped
        if run.stopped and best.value is not None:
            break
    if best.value is None:  # not even one model fits
        total = sum(t.weight for t in box.tenants)
        best.value, best.packing = Value(total, 0.0, 0.0, 0.0, 0.0), (None,) * len(box.tenants)
    packing = tuple(
        None if place is None else Place(int(kept[i][place.option]), place.slot)
        for i, place in enumerate(best.packing)
    )
    bound = best.value.load if proven else min(bound, best.value.load)
    return Solution(packing, best.value, bound, proven, nodes, time.perf_counter() - began)


def _subsets(box: Box) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Sets of models that are placed, by the weight of those left out; models without an option are
    in none."""
    able = [i for i, t in enumerate(box.tenants) if t.num_options]
    always = sum(t.weight for t in box.tenants if not t.num_options)
    heap: list[tuple[float, tuple[int, ...]]] = [(always, ())]
    by_weight = sorted(able, key=lambda i: box.tenants[i].weight)
    while heap:
        dropped, out = heapq.heappop(heap)
        yield dropped, tuple(i for i in able if i not in out)
        last = by_weight.index(out[-1]) if out else -1
        for i in by_weight[last + 1 :]:
            heapq.heappush(heap, (dropped + box.tenants[i].weight, (*out, i)))


def _only(tenant: Tenant, keep: Int[np.ndarray, "K"]) -> Tenant:
    """The model with some of its options."""
    names = (
        "held_bytes", "busy", "capacity", "ttft_s", "tpot_s", "load_s", "loaded_bytes"
    )  # fmt: skip
    return replace(tenant, **{name: getattr(tenant, name)[keep] for name in names})


def _undominated(tenant: Tenant) -> Int[np.ndarray, "K"]:
    """Options that no other one equals or beats in every number."""
    costs = np.column_stack([
        tenant.held_bytes, tenant.busy, tenant.device_load, tenant.uses, tenant.share,
        -np.minimum(tenant.allowed.T, 1e300), tenant.load_s, tenant.loaded_bytes,
    ])  # fmt: skip
    keep: list[int] = []
    for o in np.lexsort(costs.T[::-1]).tolist():
        if not any((costs[k] <= costs[o]).all() for k in keep):
            keep.append(o)
    return np.array(sorted(keep), dtype=np.int64)


@dataclass
class _Best:
    """The best packing known, shared by all sets of models."""

    value: Value | None = None
    packing: Packing = ()

    def take(self, value: Value, packing: Packing) -> None:
        if self.value is None or value.less(self.value):
            self.value, self.packing = value, packing


class _Slot(NamedTuple):
    members: tuple[tuple[Tenant, int], ...]
    held: Int[np.ndarray, "M"]
    uses: Bool[np.ndarray, "D"]
    load: float
    moved: float


@dataclass(frozen=True, eq=False)
class _State:
    """Some models of a packing."""

    held: Int[np.ndarray, "M"]
    device_load: Float[np.ndarray, "D"]
    engines: Float[np.ndarray, "D"]
    slots: tuple[_Slot, ...] = ()
    placed: tuple[tuple[int, Place], ...] = ()
    priced: float = 0.0  # sum of the terms of the bound

    @classmethod
    def empty(cls, box: Box) -> "_State":
        zeros = np.zeros(box.num_devices)
        return cls(np.zeros_like(box.memory_bytes), zeros, zeros)

    def packing(self, count: int) -> Packing:
        places = dict(self.placed)
        return tuple(places.get(i) for i in range(count))


class _Child(NamedTuple):
    bound: Value
    option: int
    slot: int


@dataclass(eq=False)
class _Branch:
    """Branch and bound over the packings of one set of models."""

    box: Box
    chosen: tuple[int, ...]
    dropped: float
    best: _Best
    deadline: float
    nodes: int = 0
    stopped: bool = False
    feasible: bool = True
    root_bound: float = 0.0
    order: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        tenants = self.box.tenants
        room = np.maximum(self.box.memory_bytes, 1)
        need = {i: float((tenants[i].held_bytes / room).sum(axis=1).min()) for i in self.chosen}
        self.order = sorted(self.chosen, key=lambda i: (tenants[i].swaps, -need[i], i))
        self._price()
        ends = range(len(self.order) + 1)
        rest = [[tenants[i] for i in self.order[k:]] for k in ends]
        self.rest_priced = [sum(float(self.terms[i].min()) for i in self.order[k:]) for k in ends]
        self.rest_load = [
            max((float(t.weight * t.share.min()) for t in own), default=0.0) for own in rest
        ]
        self.rest_broken = [
            sum(t.weight for t in own if (t.allowed[0] < 1.0).all()) for own in rest
        ]

    def _price(self) -> None:
        """Terms of each option in the bound, by the duals of the linear program."""
        from scipy.optimize import linprog

        tenants, chosen = self.box.tenants, self.order
        sizes = [tenants[i].num_options for i in chosen]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        columns, d = int(starts[-1]) + 1, self.box.num_devices
        swapping = [k for k, i in enumerate(chosen) if tenants[i].swaps]
        rows, limits = [np.zeros((d, columns))], [np.zeros(d)]
        rows[0][:, -1] = -1.0
        for k, i in enumerate(chosen):
            rows[0][:, starts[k] : starts[k + 1]] = tenants[i].device_load.T
        # Models that may be unloaded may all share a slot, so that each alone has to fit.
        room = np.maximum(self.box.memory_bytes, 1).astype(float)
        for alone in swapping or [None]:
            memory = np.zeros((len(room), columns))
            for k, i in enumerate(chosen):
                if not tenants[i].swaps or k == alone:
                    part = tenants[i].held_bytes.T / room[:, None]
                    memory[:, starts[k] : starts[k + 1]] = part
            rows.append(memory)
            limits.append(np.ones(len(room)))
        once = np.zeros((len(chosen), columns))
        for k in range(len(chosen)):
            once[k, starts[k] : starts[k + 1]] = 1.0
        aim = np.zeros(columns)
        aim[-1] = 1.0
        matrix, limit = np.vstack(rows), np.concatenate(limits)
        solved = linprog(aim, matrix, limit, once, np.ones(len(chosen)), (0, None), method="highs")
        self.feasible = solved.status != 2
        dual = np.zeros(len(matrix))
        if solved.status == 0:
            dual = np.maximum(-solved.ineqlin.marginals, 0.0)
            if dual[:d].sum() > 0:  # any duals whose devices add up to at most 1 bound the load
                dual = dual / max(1.0, dual[:d].sum())
        # Equal to the reduced prices of the program's columns, without their model's own dual.
        prices = dual @ matrix[:, :-1]
        self.offset = float(dual @ limit)
        self.terms = {i: prices[starts[k] : starts[k + 1]] for k, i in enumerate(chosen)}
        least = sum(float(self.terms[i].min()) for i in chosen)
        self.root_bound = max(0.0, least - self.offset)

    def start(self) -> None:
        """A first packing: a dive, then models are taken out and put back where that is better."""
        state = _State.empty(self.box)
        for k, i in enumerate(self.order):
            children = self.children(state, i, k + 1)
            if not children:
                return
            state = self.after(state, i, children[0])
        rng = np.random.default_rng(0)
        value = self.take(state)
        pairs = [(i,) for i in self.order] + list(itertools.combinations(self.order, 2))
        improved = True
        while improved and time.perf_counter() < self.deadline:
            improved = False
            for out in rng.permutation(len(pairs)).tolist():
                other = self._put_back(state, pairs[out])
                if other is not None and (found := self.take(other)).less(value):
                    state, value, improved = other, found, True

    def _put_back(self, state: _State, out: tuple[int, ...]) -> _State | None:
        """The packing with some models taken out, and placed again one by one."""
        other = _State.empty(self.box)
        numbers: dict[int, int] = {}
        for i, place in state.placed:
            if i not in out:
                slot = numbers.setdefault(place.slot, len(numbers))
                other = self.after(other, i, _Child(_NONE, place.option, slot))
        for i in out:
            children = self.children(other, i, len(self.order))
            if not children:
                return None
            other = self.after(other, i, children[0])
        return other

    def take(self, state: _State) -> Value:
        """The value of a whole packing, which is kept where it is best."""
        value = self.value(state)
        self.best.take(value, state.packing(len(self.box.tenants)))
        return value

    def value(self, state: _State) -> Value:
        """Value of the models that are placed."""
        broken = crowded = 0.0
        for slot in state.slots:
            for t, o in slot.members:
                allowed = t.allowed[int(len(slot.members) > 1), o]
                broken += t.weight * (allowed < 1.0)
                crowded += t.weight * (allowed < float(slowdown(t.busy[o], state.engines)))
        load = max([float(state.device_load.max()), *(slot.load for slot in state.slots)])
        return Value(self.dropped, broken, crowded, load, sum(s.moved for s in state.slots))

    def explore(self, state: _State, k: int) -> None:
        """All packings that begin with these models, as far as they may be better."""
        if k == len(self.order):
            self.take(state)
            return
        i = self.order[k]
        for child in self.children(state, i, k + 1):
            if self.best.value is not None and not child.bound.less(self.best.value):
                break  # the others have no smaller bound
            self.nodes += 1
            if self.nodes % 256 == 0 and time.perf_counter() > self.deadline:
                self.stopped = True
            if self.stopped:
                return
            self.explore(self.after(state, i, child), k + 1)

    def after(self, state: _State, i: int, child: _Child) -> _State:
        """The packing with one model more."""
        tenant, o = self.box.tenants[i], child.option
        held, uses = tenant.held_bytes[o], tenant.uses[o]
        slots = list(state.slots)
        if child.slot == len(slots):
            work = slot_work([(tenant, o)])
            slots.append(_Slot(((tenant, o),), held, uses, *work))
            more, engines = held, uses
        else:
            old = slots[child.slot]
            members = (*old.members, (tenant, o))
            slots[child.slot] = _Slot(
                members, np.maximum(old.held, held), old.uses | uses, *slot_work(members)
            )
            more, engines = np.maximum(held - old.held, 0), uses & ~old.uses
        return _State(
            state.held + more, state.device_load + tenant.device_load[o], state.engines + engines,
            tuple(slots), (*state.placed, (i, Place(o, child.slot))),
            state.priced + float(self.terms[i][o]),
        )  # fmt: skip

    def children(self, state: _State, i: int, then: int) -> list[_Child]:
        """Options and slots of the next model that fit, the least bound first."""
        tenant = self.box.tenants[i]
        joined = [len(state.slots)]
        if tenant.swaps:
            joined += [s for s, slot in enumerate(state.slots) if slot.members[0][0].swaps]
        rows = [row for s in joined for row in self._into(state, i, s, then)]
        best = self.best.value
        rows = [r for r in rows if best is None or r.bound.less(best) or then == len(self.order)]
        return sorted(_one_of_each(self.box, state, tenant, rows))

    def _into(self, state: _State, i: int, s: int, then: int) -> Iterator[_Child]:
        """Children with one slot; bounds of all options are computed together."""
        tenant = self.box.tenants[i]
        old = state.slots[s] if s < len(state.slots) else None
        more = tenant.held_bytes if old is None else np.maximum(tenant.held_bytes - old.held, 0)
        fits = np.flatnonzero((state.held + more <= self.box.memory_bytes).all(axis=1))
        if not len(fits):
            return
        uses = tenant.uses[fits] if old is None else tenant.uses[fits] & ~old.uses
        engines = state.engines + uses
        device_load = (state.device_load + tenant.device_load[fits]).max(axis=1)
        others = [
            (t, o, int(len(x.members) > 1 or x is old)) for x in state.slots for t, o in x.members
        ]
        broken, crowded = np.full((2, len(fits)), float(self.rest_broken[then]))
        for t, o, shared in others:
            broken += t.weight * (t.allowed[shared, o] < 1.0)
            crowded += t.weight * (t.allowed[shared, o] < slowdown(t.busy[o], engines))
        moved = sum(x.moved for x in state.slots if x is not old)
        apart = max((x.load for x in state.slots if x is not old), default=0.0)
        relaxed = state.priced + self.terms[i][fits] + self.rest_priced[then] - self.offset
        least = np.maximum(np.maximum(device_load, relaxed), max(apart, self.rest_load[then]))
        allowed = tenant.allowed[int(old is not None), fits]
        for n, o in enumerate(fits.tolist()):
            own = tenant.weight * (allowed[n] < 1.0)
            late = tenant.weight * (allowed[n] < float(slowdown(tenant.busy[o], engines[n])))
            work = slot_work([*(old.members if old else ()), (tenant, o)])
            bound = Value(
                self.dropped, broken[n] + own, crowded[n] + late, max(least[n], work.load),
                moved + work.moved,
            )  # fmt: skip
            yield _Child(bound, o, s)


_NONE = Value(0.0, 0.0, 0.0, 0.0, 0.0)


def _one_of_each(
    box: Box, state: _State, tenant: Tenant, rows: Sequence[_Child]
) -> Iterator[_Child]:
    """The first of the children that differ by unused interchangeable devices alone."""
    seen: set[tuple[object, ...]] = set()
    own = box.memory_of
    free = (state.engines == 0) & (state.held[own] == 0)
    groups = [np.flatnonzero(free & (box.classes == c)) for c in np.unique(box.classes)]
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        yield from rows
        return
    fixed = np.setdiff1d(np.arange(box.num_devices), np.concatenate(groups))
    memories = np.unique(own[fixed])
    for row in rows:
        o = row.option
        busy, held = tenant.busy[o], tenant.held_bytes[o]
        key = (
            row.slot, row.bound, busy[fixed].tobytes(), held[memories].tobytes(),
            tenant.allowed[:, o].tobytes(), float(tenant.load_s[o]),
            *(tuple(sorted(zip(busy[g].tolist(), held[own[g]].tolist(), strict=True)))
              for g in groups),
        )  # fmt: skip
        if key not in seen:
            seen.add(key)
            yield row
