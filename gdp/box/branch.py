"""Branch and bound over options and swap groups, in plain loops that may be compiled.

Axes: N models in the order in which they are placed, O options of all models, D devices, M
memories, S = N slots, L = N + 1 levels, W weights of models, the largest first. Nothing is
allocated, and a run goes on where the last one stopped.
"""

from typing import NamedTuple, no_type_check

import numpy as np
from jaxtyping import Bool, Float, Int


class Options(NamedTuple):
    """Options of all models, those of one after the other, each by its term in the bound."""

    start: Int[np.ndarray, "L"]  # first option of each model
    held: Int[np.ndarray, "O M"]
    device_load: Float[np.ndarray, "O D"]
    busy: Float[np.ndarray, "O D"]
    allowed: Float[np.ndarray, "2 O"]
    share: Float[np.ndarray, "O"]
    load_s: Float[np.ndarray, "O"]
    loaded: Float[np.ndarray, "O"]
    term: Float[np.ndarray, "O"]
    weight: Float[np.ndarray, "N"]
    kind: Int[np.ndarray, "N"]  # of the weight
    scale: Float[np.ndarray, "W"]  # weights over the least one
    demand: Float[np.ndarray, "N"]
    swaps: Bool[np.ndarray, "N"]
    memory: Int[np.ndarray, "M"]
    memory_of: Int[np.ndarray, "D"]
    classes: Int[np.ndarray, "D"]
    rest_term: Float[np.ndarray, "L"]  # least of the models from each on
    rest_load: Float[np.ndarray, "L"]
    rest_broken: Float[np.ndarray, "L"]
    rest_waited: Float[np.ndarray, "L"]
    fixed: Float[np.ndarray, "2"]  # weight that is left out, and the offset of the bound


class BranchState(NamedTuple):
    """Position of the search; rows of a level are the state before its model is placed."""

    level: Int[np.ndarray, "1"]
    slot: Int[np.ndarray, "L"]  # that is tried: 0 a new one, s + 1 an old one
    option: Int[np.ndarray, "L"]  # that is tried
    at: Int[np.ndarray, "L"]  # slot of each placed model
    held: Int[np.ndarray, "L M"]
    work: Float[np.ndarray, "L D W"]  # shares of the time of devices
    engines: Int[np.ndarray, "L D"]
    priced: Float[np.ndarray, "L"]
    slots: Int[np.ndarray, "L"]
    slot_held: Int[np.ndarray, "L S M"]
    slot_uses: Int[np.ndarray, "L S D"]
    slot_load: Float[np.ndarray, "L S"]
    slot_moved: Float[np.ndarray, "L S"]
    slot_size: Int[np.ndarray, "L S"]
    more: Int[np.ndarray, "D"]  # engines with the child
    ahead: Float[np.ndarray, "L"]  # `_ahead` of each level
    slot_work: Float[np.ndarray, "W"]  # of the slot at hand


class Incumbent(NamedTuple):
    """The best packing."""

    value: Float[np.ndarray, "6"]
    option: Int[np.ndarray, "N"]
    slot: Int[np.ndarray, "N"]


@no_type_check
def _beats(dropped, broken, crowded, load, moved, waited, value):
    """True where these are better than a value, beyond rounding."""
    for k in range(6):
        mine = dropped
        if k == 1:
            mine = broken
        elif k == 2:
            mine = crowded
        elif k == 3:
            mine = load
        elif k == 4:
            mine = moved
        elif k == 5:
            mine = waited
        slack = 1e-9 * max(1.0, min(abs(value[k]), 1e300))
        if mine < value[k] - slack:
            return True
        if mine > value[k] + slack:
            return False
    return False


@no_type_check
def _slow(a, o, engines):
    """Slowdown of an option while so many engines are busy."""
    waits, most = 1.0, 1
    for d in range(a.memory_of.shape[0]):
        if a.busy[o, d] > 0.0:
            waits += (engines[d] - 1) * a.busy[o, d]
            most = max(most, engines[d])
    return min(waits, most)


@no_type_check
def _load(a, work, kind, more):
    """Load of work by weight, with so much more of one; see `Box.load_of`."""
    count, whole, rest = a.scale.shape[0], more, more * a.scale[kind]
    for c in range(count):
        whole += work[c]
        rest += work[c] * a.scale[c]
    if whole <= 1.0:
        return whole
    served = 0.0
    for c in range(count):
        level = (1.0 - served) / rest
        if level * a.scale[c] <= 1.0:
            return 1.0 / level
        own = work[c] + (more if c == kind else 0.0)
        served += own
        rest -= own * a.scale[c]
    return whole


@no_type_check
def _repeats(a, w, k, o):
    """True where an option puts more on a later of two unused devices that may be exchanged."""
    count = a.memory_of.shape[0]
    for d in range(count):
        if w.engines[k, d] or w.held[k, a.memory_of[d]]:
            continue
        for e in range(d + 1, count):
            if a.classes[e] != a.classes[d] or w.engines[k, e] or w.held[k, a.memory_of[e]]:
                continue
            if a.busy[o, e] > a.busy[o, d]:
                return True
            more = a.held[o, a.memory_of[e]] > a.held[o, a.memory_of[d]]
            if a.busy[o, e] == a.busy[o, d] and more:
                return True
            break
    return False


@no_type_check
def _slot_load(a, w, k, o, s):
    """(load, bytes/s) of a slot with one model more."""
    moved, rates = 0.0, a.demand[k]
    if s == w.slots[k]:
        return a.share[o], moved
    for c in range(a.scale.shape[0]):
        w.slot_work[c] = 0.0
    for j in range(k):
        if w.at[j] == s:
            rates += a.demand[j]
    for j in range(k + 1):
        if j < k and w.at[j] != s:
            continue
        x = o if j == k else w.option[j]
        swaps = a.demand[j] * (1.0 - a.demand[j] / rates) if rates > 0.0 else 0.0
        w.slot_work[a.kind[j]] += a.share[x] + swaps * a.load_s[x]
        moved += swaps * a.loaded[x]
    return _load(a, w.slot_work, 0, 0.0), moved


@no_type_check
def _fits(a, w, k, o, s):
    """True where memories have room for an option in a slot."""
    new = s == w.slots[k]
    for m in range(a.memory.shape[0]):
        more = a.held[o, m] if new else max(0, a.held[o, m] - w.slot_held[k, s, m])
        if w.held[k, m] + more > a.memory[m]:
            return False
    return True


@no_type_check
def _is_better(a, w, k, o, s, best):
    """True where packings that begin with this child may be better than the best."""
    if not _fits(a, w, k, o, s):
        return False
    new = s == w.slots[k]
    load, moved = _slot_load(a, w, k, o, s)
    load = max(load, a.rest_load[k + 1])
    load = max(load, w.priced[k] + a.term[o] + a.rest_term[k + 1] - a.fixed[1])
    for d in range(a.memory_of.shape[0]):
        load = max(load, _load(a, w.work[k, d], a.kind[k], a.device_load[o, d]))
        joins = a.busy[o, d] > 0.0 and (new or w.slot_uses[k, s, d] == 0)
        w.more[d] = w.engines[k, d] + (1 if joins else 0)
    for x in range(w.slots[k]):
        if x != s:
            load, moved = max(load, w.slot_load[k, x]), moved + w.slot_moved[k, x]
    broken = crowded = a.rest_broken[k + 1]
    waited = a.rest_waited[k + 1]
    for j in range(k + 1):
        x = o if j == k else w.option[j]
        at = s if j == k else w.at[j]
        shared = 0 if new and at == s else (1 if at == s or w.slot_size[k, at] > 1 else 0)
        allowed, slow = a.allowed[shared, x], _slow(a, x, w.more)
        waited += a.weight[j] * a.share[x] * slow
        if allowed < 1.0:
            broken += a.weight[j]
        if allowed < slow:
            crowded += a.weight[j]
    return _beats(a.fixed[0], broken, crowded, load, moved, waited, best.value)


@no_type_check
def _place(a, w, k, o, s):
    """The state of the next level; the child was checked just before."""
    count, n = a.memory_of.shape[0], k + 1
    new = s == w.slots[k]
    w.slots[n] = w.slots[k] + (1 if new else 0)
    w.priced[n] = w.priced[k] + a.term[o]
    for x in range(w.slots[k]):
        w.slot_load[n, x], w.slot_moved[n, x] = w.slot_load[k, x], w.slot_moved[k, x]
        w.slot_size[n, x] = w.slot_size[k, x]
        for m in range(a.memory.shape[0]):
            w.slot_held[n, x, m] = w.slot_held[k, x, m]
        for d in range(count):
            w.slot_uses[n, x, d] = w.slot_uses[k, x, d]
    load, moved = _slot_load(a, w, k, o, s)
    w.slot_load[n, s], w.slot_moved[n, s] = load, moved
    w.slot_size[n, s] = 1 if new else w.slot_size[k, s] + 1
    for m in range(a.memory.shape[0]):
        before = 0 if new else w.slot_held[k, s, m]
        w.slot_held[n, s, m] = max(before, a.held[o, m])
        w.held[n, m] = w.held[k, m] + w.slot_held[n, s, m] - before
    for d in range(count):
        before = 0 if new else w.slot_uses[k, s, d]
        w.slot_uses[n, s, d] = 1 if before or a.busy[o, d] > 0.0 else 0
        w.engines[n, d] = w.engines[k, d] + w.slot_uses[n, s, d] - before
        for c in range(a.scale.shape[0]):
            w.work[n, d, c] = w.work[k, d, c]
        w.work[n, d, a.kind[k]] += a.device_load[o, d]
    w.at[k] = s


@no_type_check
def _take(a, w, best):
    """Keep a whole packing where it is the best one."""
    n = a.weight.shape[0]
    load = moved = broken = crowded = waited = 0.0
    for d in range(a.memory_of.shape[0]):
        load = max(load, _load(a, w.work[n, d], 0, 0.0))
    for x in range(w.slots[n]):
        load, moved = max(load, w.slot_load[n, x]), moved + w.slot_moved[n, x]
    for j in range(n):
        x = w.option[j]
        allowed = a.allowed[1 if w.slot_size[n, w.at[j]] > 1 else 0, x]
        slow = _slow(a, x, w.engines[n])
        waited += a.weight[j] * a.share[x] * slow
        if allowed < 1.0:
            broken += a.weight[j]
        if allowed < slow:
            crowded += a.weight[j]
    if _beats(a.fixed[0], broken, crowded, load, moved, waited, best.value):
        best.value[0], best.value[1], best.value[2] = a.fixed[0], broken, crowded
        best.value[3], best.value[4], best.value[5] = load, moved, waited
        for j in range(n):
            best.option[j], best.slot[j] = w.option[j], w.at[j]


@no_type_check
def _pained(a, w, k, extra, best):
    """1 where no packing from here on breaks fewer limits than the best one, 2 where all break
    more; 0 otherwise."""
    broken = crowded = a.rest_broken[k]
    crowded = max(crowded, extra)
    for j in range(k):
        x = w.option[j]
        allowed = a.allowed[1 if w.slot_size[k, w.at[j]] > 1 else 0, x]
        if allowed < 1.0:
            broken += a.weight[j]
        if allowed < _slow(a, x, w.engines[k]):
            crowded += a.weight[j]
    pains = 0
    for n in range(3):
        mine = a.fixed[0] if n == 0 else broken if n == 1 else crowded
        if abs(mine - best.value[n]) > 1e-9:
            pains = 2 if mine > best.value[n] else 0
            break
        pains = 1
    return pains


@no_type_check
def _ahead(a, w, k, pained, best):
    """Weight of the models from k on whose limits break whatever their option, beside those that
    are placed; -1.0 where one of them has no room, or (`pained`) none under the best load."""
    count, memories, extra = a.memory_of.shape[0], a.memory.shape[0], 0.0
    most = best.value[3] * (1.0 + 1e-9) + 1e-9
    for j in range(k, a.weight.shape[0]):
        others = w.priced[k] + a.rest_term[k] - a.term[a.start[j]] - a.fixed[1]
        fits, kept = False, False
        for o in range(a.start[j], a.start[j + 1]):
            if pained and others + a.term[o] > most:
                break
            able = True
            for m in range(memories):
                most_free = a.memory[m] - w.held[k, m]
                if a.swaps[j]:  # whatever a slot that it may join holds
                    for x in range(w.slots[k]):
                        most_free = max(
                            most_free, a.memory[m] - w.held[k, m] + w.slot_held[k, x, m]
                        )
                able = able and a.held[o, m] <= most_free
            waits, worst = 1.0, 1.0
            for d in range(count):
                if a.busy[o, d] > 0.0:
                    engines = max(1, w.engines[k, d] + (0 if a.swaps[j] else 1))
                    waits += (engines - 1) * a.busy[o, d]
                    worst = max(worst, engines)
                    if pained and a.device_load[o, d] > 0.0:
                        load = _load(a, w.work[k, d], a.kind[j], a.device_load[o, d])
                        able = able and load <= most
            if able:
                fits = True
                if a.allowed[0, o] >= min(waits, worst):
                    kept = True
                    break
        if not fits:
            return -1.0
        if not kept:
            extra += a.weight[j]
    return extra


@no_type_check
def explore(a, w, best, most):
    """Rate so many children at most, the next ones; returns how many, fewer at the end."""
    n, rated = a.weight.shape[0], 0
    k = w.level[0]
    while k >= 0 and rated < most:
        if k == n:
            _take(a, w, best)
            k -= 1
            continue
        s, o = w.slot[k], w.option[k] + 1
        if s == 0 and o == a.start[k]:
            w.ahead[k] = _ahead(a, w, k, _pained(a, w, k, 0.0, best) > 0, best)
        pained = 2 if w.ahead[k] < 0.0 else _pained(a, w, k, w.ahead[k], best)
        if pained > 1:
            k -= 1
            continue
        tried = w.slots[k] if s == 0 else s - 1
        last = a.start[k + 1]
        while o < last:
            least = w.priced[k] + a.term[o] + a.rest_term[k + 1] - a.fixed[1]
            if pained > 0 and least > best.value[3] * (1.0 + 1e-9) + 1e-9:
                o = last  # terms ascend, so that no further option is better
                break
            rated += 1
            if not _repeats(a, w, k, o) and _is_better(a, w, k, o, tried, best):
                break
            o += 1
        if o < last:
            w.option[k] = o
            _place(a, w, k, o, tried)
            k += 1
            if k < n:
                w.slot[k], w.option[k] = 0, a.start[k] - 1
            continue
        s += 1
        while a.swaps[k] and s <= w.slots[k] and not _takes(a, w, k, s - 1):
            s += 1
        if a.swaps[k] and s <= w.slots[k]:
            w.slot[k], w.option[k] = s, a.start[k] - 1
        else:
            k -= 1
    w.level[0] = k
    return rated


@no_type_check
def _takes(a, w, k, s):
    """True for a slot of models that may be unloaded."""
    for j in range(k):
        if w.at[j] == s:
            return a.swaps[j]
    return False
