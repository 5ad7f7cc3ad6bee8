"""Numba kernels that contract pairs of ops without making a cycle. Axes: G groups, C candidates."""

import typing

import numba
import numpy as np

from gdp.kernels.options import BARE, INNER

MAX_STEPS = 512
"""A safety check that looks at more edges than this gives up: the pair is then left alone."""


@numba.njit(**INNER)
@typing.no_type_check
def _find(parent, x):
    while parent[x] != x:
        parent[x] = parent[parent[x]]
        x = parent[x]
    return x


@numba.njit(**INNER)
@typing.no_type_check
def _search(
    start, max_steps, other, sign, ptr, adjacent, head, following, parent, pos, stamp, mark, out
):
    """Groups reached from `start` before `other` in topological order, written to `out`.

    Returns their number; -1 when `other` is reached by more than the direct edge, -2 when the
    search gives up. `sign` is 1 to follow edges forwards, -1 backwards.
    """
    count, top, steps = 0, 0, 0
    current = start
    while True:
        member = head[current]
        while member >= 0:
            for e in range(ptr[member], ptr[member + 1]):
                steps += 1
                near = _find(parent, adjacent[e])
                if near == other:
                    if current != start:
                        return -1
                elif near != start and stamp[near] != mark and sign * pos[near] < sign * pos[other]:
                    stamp[near] = mark
                    out[count] = near
                    count += 1
                if steps > max_steps:
                    return -2
            member = following[member]
        if top == count:
            return count
        current = out[top]
        top += 1


@numba.njit(**INNER)
@typing.no_type_check
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


@numba.njit(**INNER)
@typing.no_type_check
def _exceeds(load, a, b, cap):
    found = False
    for k in range(len(cap)):
        found |= load[a, k] + load[b, k] > cap[k]
    return found


@numba.njit(**INNER)
@typing.no_type_check
def _reorder(a, b, before, num_before, after, num_after, pos, slots, keys):
    """Keep `pos` topological: what b needs comes first, then the merged group a, then a's readers.

    The rule of Pearce and Kelly 2007, doi 10.1145/1187436.1210590: the affected groups are
    rearranged over the positions that they hold already.
    """
    num = 0
    for groups, count in ((before, num_before), (after, num_after)):
        for i in range(count):
            keys[i] = slots[num] = pos[groups[i]]
            num += 1
        _sort_by(keys, groups, count)
    slots[num], slots[num + 1] = pos[a], pos[b]
    _sort_by(slots, slots, num + 2)
    for i in range(num_before):
        pos[before[i]] = slots[i]
    pos[a] = slots[num_before]
    for i in range(num_after):
        pos[after[i]] = slots[num_before + 2 + i]


@numba.njit(**BARE)
@typing.no_type_check
def contract(
    out_ptr, out_adjacent, in_ptr, in_adjacent, pairs, may_join, label, load, cap, klass,
    klass_load, klass_cap, target, class_parent, parent, pos, scratch,
):  # fmt: skip
    """Merge the candidate pairs [C, 2] in the order given, where that is safe.

    Groups are numbered in topological order; edges come as two CSR lists. A pair merges when its
    labels agree and are not negative, its summed `load` [G, K] stays within `cap` [K], its
    colocation classes are one, or are joined without exceeding `klass_cap` (only where
    `may_join` [C]), and no path joins the two beside the direct edge. Ends at `target` groups.
    Writes the merged group [G] of each to `parent` and a topological position [G] to `pos`; both,
    and `class_parent`, come in counting from 0, `scratch` [8, G] with anything.
    """
    head, tail, following, stamp = scratch[0], scratch[1], scratch[2], scratch[3]
    after, before, slots, keys = scratch[4], scratch[5], scratch[6], scratch[7]
    num = len(parent)
    for g in range(num):
        head[g] = tail[g] = g
        following[g], stamp[g] = -1, 0
    left, mark = num, 0
    for c in range(len(pairs)):
        if left <= target:
            break
        a, b = _find(parent, pairs[c, 0]), _find(parent, pairs[c, 1])
        if a == b or label[a] < 0 or label[a] != label[b] or _exceeds(load, a, b, cap):
            continue
        if pos[a] > pos[b]:
            a, b = b, a
        ca, cb = _find(class_parent, klass[a]), _find(class_parent, klass[b])
        several = ca != cb and klass_load[ca] > 0 and klass_load[cb] > 0
        if several and not (may_join[c] and klass_load[ca] + klass_load[cb] <= klass_cap):
            continue
        mark += 1
        num_after = _search(
            a, MAX_STEPS, b, np.int64(1), out_ptr, out_adjacent, head, following, parent, pos,
            stamp, mark, after,
        )  # fmt: skip
        if num_after == -1:
            continue
        mark += 1
        num_before = 0
        if num_after != 0:
            num_before = _search(
                b, MAX_STEPS, a, np.int64(-1), in_ptr, in_adjacent, head, following, parent, pos,
                stamp, mark, before,
            )  # fmt: skip
        # One empty side is proof enough, however large the other.
        if num_before < 0 or (num_after < 0 and num_before > 0):
            continue
        if num_after == 0:
            pos[a] = pos[b]
        elif num_before > 0:
            _reorder(a, b, before, num_before, after, num_after, pos, slots, keys)
        _merge(a, b, parent, head, tail, following, load)
        if ca != cb:
            class_parent[cb] = ca
            klass_load[ca] += klass_load[cb]
        left -= 1
    for g in range(num):
        parent[g] = _find(parent, g)


@numba.njit(**INNER)
@typing.no_type_check
def _merge(a, b, parent, head, tail, following, load):
    """Let group a take over the members and the load of b."""
    parent[b] = a
    following[tail[a]] = head[b]
    tail[a] = tail[b]
    for k in range(load.shape[1]):
        load[a, k] += load[b, k]


@numba.njit(**BARE)
@typing.no_type_check
def reads_nothing_else(reader, maker, in_ptr, in_tensor, tensor_maker, answer):
    """Whether [C] all that the reader reads is made by the maker or read by it too."""
    for c in range(len(reader)):
        end = in_ptr[maker[c] + 1]
        answer[c] = True
        for e in range(in_ptr[reader[c]], in_ptr[reader[c] + 1]):
            t = in_tensor[e]
            if tensor_maker[t] == maker[c]:
                continue
            at, high = in_ptr[maker[c]], end
            while at < high:
                middle = (at + high) // 2
                if in_tensor[middle] < t:
                    at = middle + 1
                else:
                    high = middle
            if at == end or in_tensor[at] != t:
                answer[c] = False
                break


@numba.njit(**BARE)
@typing.no_type_check
def extend_to_longest_paths(src, dst, work_s, finish_s):
    """From work to `finish_s` [G]: when each group finishes if all run as early as they can; edges
    are sorted by source."""
    for e in range(len(src)):
        # Sources come in topological order, so the source's own value is final here.
        finish_s[dst[e]] = max(finish_s[dst[e]], finish_s[src[e]] + work_s[dst[e]])
