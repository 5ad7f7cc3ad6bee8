"""Pairs of ops contracted without making a cycle. Axes: G groups, C candidates.

Plain functions over lists, which are compiled for large graphs (`gdp.base.kernels.twin`).
"""

from typing import Any, NamedTuple, no_type_check

import numpy as np

FORWARD, BACKWARD = np.bool_(True), np.bool_(False)
MAX_STEPS = 512
"""A safety check that looks at more edges than this gives up: the pair is then left alone."""


@no_type_check
def _find(parent, x):
    while parent[x] != x:
        parent[x] = parent[parent[x]]
        x = parent[x]
    return x


class Edges(NamedTuple):
    """Edges between the original groups, as CSR lists in both directions."""

    out_ptr: Any
    out_adjacent: Any
    in_ptr: Any
    in_adjacent: Any


class MergeLimits(NamedTuple):
    """Sums that a merged group, and the colocation classes that it ties together, must keep to."""

    label: Any  # [G] groups merge with their own label only; negative: never
    cap: Any  # [K] of the summed load of a group
    class_of: Any  # [G]
    class_cap: float
    target: int  # groups at which to end


class MergeState(NamedTuple):
    """The groups as they merge; each array is written in place."""

    parent: Any  # [G] union-find: the group that a group has become part of
    pos: Any  # [G] a topological position
    load: Any  # [G * K]
    class_parent: Any  # union-find of the classes
    class_load: Any
    head: Any  # [G] the first member of each group; `following` leads to the others
    tail: Any
    following: Any
    stamp: Any  # [G] the last search that met a group
    after: Any  # [G] the result of a forward search
    before: Any  # [G] the result of a backward search
    slots: Any
    keys: Any


@no_type_check
def _search(start, other, forward, edges, state, mark, out):
    """Groups reached from `start` before `other` in topological order, written to `out`.

    Returns their number; -1 when `other` is reached by more than the direct edge, -2 when the
    search gives up. `forward`: whether edges are followed so, or backwards.
    """
    ptr = edges.out_ptr if forward else edges.in_ptr
    adjacent = edges.out_adjacent if forward else edges.in_adjacent
    pos, stamp = state.pos, state.stamp
    count, top, steps = 0, 0, 0
    current = start
    while True:
        member = state.head[current]
        while member >= 0:
            for e in range(ptr[member], ptr[member + 1]):
                steps += 1
                near = _find(state.parent, adjacent[e])
                if near == other:
                    if current != start:
                        return -1
                elif near != start and stamp[near] != mark and (pos[near] < pos[other]) == forward:
                    stamp[near] = mark
                    out[count] = near
                    count += 1
                if steps > MAX_STEPS:
                    return -2
            member = state.following[member]
        if top == count:
            return count
        current = out[top]
        top += 1


@no_type_check
def _sort_by(keys, values, count):
    """Sort the first values and their keys, which may be the same array. Shell's method: compiling
    numba's own sorts takes several seconds of the first run."""
    gap = count // 2
    while gap > 0:
        for i in range(gap, count):
            key, value, k = keys[i], values[i], i
            while k >= gap and keys[k - gap] > key:
                keys[k], values[k] = keys[k - gap], values[k - gap]
                k -= gap
            keys[k], values[k] = key, value
        gap //= 2


@no_type_check
def _exceeds(load, a, b, cap):
    kinds = len(cap)
    exceeds = False
    for k in range(kinds):
        exceeds |= load[a * kinds + k] + load[b * kinds + k] > cap[k]
    return exceeds


@no_type_check
def _reorder(a, b, num_before, num_after, state):
    """Keep `pos` topological: what b needs comes first, then the merged group a, then a's readers.

    The rule of Pearce and Kelly 2007, doi 10.1145/1187436.1210590: the affected groups are
    rearranged over the positions that they hold already.
    """
    pos, slots, keys = state.pos, state.slots, state.keys
    num = 0
    for groups, count in ((state.before, num_before), (state.after, num_after)):
        for i in range(count):
            keys[i] = slots[num] = pos[groups[i]]
            num += 1
        _sort_by(keys, groups, count)
    slots[num], slots[num + 1] = pos[a], pos[b]
    _sort_by(slots, slots, num + 2)
    for i in range(num_before):
        pos[state.before[i]] = slots[i]
    pos[a] = slots[num_before]
    for i in range(num_after):
        pos[state.after[i]] = slots[num_before + 2 + i]


@no_type_check
def contract(edges, first, second, may_join, limits, state):
    """Merge the candidate pairs `first`, `second` [C] in the order given, where that is safe.

    Groups are numbered in topological order. A pair merges when its labels agree and are not
    negative, its summed load stays within the cap, its colocation classes are one, or are joined
    without exceeding their cap (only where `may_join` [C]), and no path joins the two beside the
    direct edge. Ends at `limits.target` groups. Writes the merged group of each to `state.parent`
    and its position to `state.pos`; both, and `class_parent`, come in counting from 0.
    """
    parent, pos, klass_load = state.parent, state.pos, state.class_load
    num = len(parent)
    for g in range(num):
        state.head[g] = state.tail[g] = g
        state.following[g], state.stamp[g] = -1, 0
    num_groups, mark = num, 0
    for c in range(len(first)):
        if num_groups <= limits.target:
            break
        a, b = _find(parent, first[c]), _find(parent, second[c])
        if a == b or limits.label[a] < 0 or limits.label[a] != limits.label[b]:
            continue
        if _exceeds(state.load, a, b, limits.cap):
            continue
        if pos[a] > pos[b]:
            a, b = b, a
        ca = _find(state.class_parent, limits.class_of[a])
        cb = _find(state.class_parent, limits.class_of[b])
        several = ca != cb and klass_load[ca] > 0 and klass_load[cb] > 0
        if several and not (may_join[c] and klass_load[ca] + klass_load[cb] <= limits.class_cap):
            continue
        mark += 1
        num_after = _search(a, b, FORWARD, edges, state, mark, state.after)
        if num_after == -1:
            continue
        mark += 1
        num_before = 0
        if num_after != 0:
            num_before = _search(b, a, BACKWARD, edges, state, mark, state.before)
        # One empty side is proof enough, however large the other.
        if num_before < 0 or (num_after < 0 and num_before > 0):
            continue
        if num_after == 0:
            pos[a] = pos[b]
        elif num_before > 0:
            _reorder(a, b, num_before, num_after, state)
        _merge(a, b, len(limits.cap), state)
        if ca != cb:
            state.class_parent[cb] = ca
            klass_load[ca] += klass_load[cb]
        num_groups -= 1
    for g in range(num):
        parent[g] = _find(parent, g)


@no_type_check
def _merge(a, b, kinds, state):
    """Let group a take over the members and the load of b."""
    state.parent[b] = a
    state.following[state.tail[a]] = state.head[b]
    state.tail[a] = state.tail[b]
    for k in range(kinds):
        state.load[a * kinds + k] += state.load[b * kinds + k]


@no_type_check
def extend_to_longest_paths(src, dst, work_s, finish_s):
    """From work to `finish_s` [G]: when each group finishes if all run as early as they can; edges
    are sorted by source."""
    for e in range(len(src)):
        # Sources come in topological order, so the source's own value is final here.
        finish_s[dst[e]] = max(finish_s[dst[e]], finish_s[src[e]] + work_s[dst[e]])
