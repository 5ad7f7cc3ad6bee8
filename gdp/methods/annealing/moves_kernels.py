"""Moves of the local search: sets of groups and the device that each would go to.

A proposal is left in `Proposal.group[:n]` and `Proposal.device[:n]`, each group at most once and
never to the device it is on. Axes as in `gdp.problem.arrays`.
"""

from typing import NamedTuple, no_type_check

import numba
import numpy as np

from gdp.base.kernels.options import INNER, INNER_INLINE
from gdp.base.kernels.struct import as_struct
from gdp.problem.arrays import Arrays

SINGLE, NEIGHBOUR, CHAIN, WINDOW, SWAP, CUT, CLUSTER = 0, 1, 2, 3, 4, 5, 6
NUM_KINDS = 7
SMALL_OPS = 8


class Proposal(NamedTuple):
    """The proposal at hand and the scratch to make the next one."""

    group: np.ndarray  # [G]
    device: np.ndarray  # [G] where each would go
    size: np.ndarray  # [1]
    stamp: np.ndarray  # [G] the number of the last proposal that holds the group
    seen: np.ndarray  # [N] the same, for ops visited
    number: np.ndarray  # [1] of this proposal
    queue: np.ndarray  # [N]
    random: np.ndarray  # [1] uint64, the state of splitmix64 (Steele, Lea and Flood 2014)


as_struct(Arrays, Proposal)


@numba.njit(**INNER_INLINE)
@no_type_check
def uniform(random):
    """A float in [0, 1). The state is an argument: numba's own is shared by a thread's kernels."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    z = random[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@numba.njit(**INNER_INLINE)
@no_type_check
def below(random, n):
    """An integer in 0..n-1."""
    return min(np.int64(uniform(random) * n), n - 1)


@numba.njit(**INNER_INLINE)
@no_type_check
def length_up_to(random, longest):
    """A length in 1..longest, uniform in its logarithm: short moves are as likely as long ones."""
    return max(1, min(longest, np.int64(np.exp(uniform(random) * np.log(longest + 1.0)))))


@numba.njit(**INNER_INLINE)
@no_type_check
def longest_move(reach_ops, parts):
    """The longest move: a part of the ops in reach, but of few ops all, as a tensor with its
    readers may be most of a small graph."""
    return max(1, reach_ops // parts, min(reach_ops, SMALL_OPS))


@numba.njit(**INNER_INLINE)
@no_type_check
def any_group(p, movable):
    """A random group with a choice."""
    return movable[below(p.random, movable.shape[0])]


@numba.njit(**INNER_INLINE)
@no_type_check
def other_device(m, p, g, home):
    """A random allowed device other than home; home where there is none."""
    num_devices = m.group_allowed.shape[1]
    first = below(p.random, num_devices)
    for k in range(num_devices):
        d = (first + k) % num_devices
        if d != home and m.group_allowed[g, d]:
            return d
    return home


@numba.njit(**INNER_INLINE)
@no_type_check
def add(m, p, device, g, to):
    """Put a group into the proposal, once, unless it is there already or may not go there."""
    if p.stamp[g] == p.number[0]:
        return
    p.stamp[g] = p.number[0]
    if m.group_allowed[g, to] and device[m.group_op[m.group_start[g]]] != to:
        k = p.size[0]
        p.group[k], p.device[k] = g, to
        p.size[0] = k + 1


@numba.njit(**INNER)
@no_type_check
def random_neighbour(m, p, i):
    """A random producer or reader of op i; i itself where it has none."""
    num_in = m.in_start[i + 1] - m.in_start[i]
    num_out = m.out_start[i + 1] - m.out_start[i]
    if num_in + num_out == 0:
        return i
    k = below(p.random, num_in + num_out)
    if k < num_in:
        return m.producer[m.in_tensor[m.in_start[i] + k]]
    t = m.out_tensor[m.out_start[i] + k - num_in]
    num_uses = m.use_start[t + 1] - m.use_start[t]
    if num_uses == 0:
        return i
    return m.use_op[m.use_start[t] + below(p.random, num_uses)]


@numba.njit(**INNER)
@no_type_check
def wanted_device(m, p, device, i):
    """The device of a neighbour of op i's group on another device, else any other."""
    g = m.group[i]
    for _ in range(4):
        k = m.group_start[g] + below(p.random, m.group_start[g + 1] - m.group_start[g])
        to = np.int64(device[random_neighbour(m, p, m.group_op[k])])
        if to != device[i] and m.group_allowed[g, to]:
            return to
    return other_device(m, p, g, np.int64(device[i]))


@numba.njit(**INNER)
@no_type_check
def only_reader(m, i):
    """The one op that reads anything of op i; -1 where there is none or more than one."""
    found = -1
    for x in range(m.out_start[i], m.out_start[i + 1]):
        t = m.out_tensor[x]
        for y in range(m.use_start[t], m.use_start[t + 1]):
            if found >= 0 and m.use_op[y] != found:
                return -1
            found = m.use_op[y]
    return found


@numba.njit(**INNER)
@no_type_check
def add_chain(m, p, device, i, to, longest):
    """Op i, its only reader, the only reader of that, and so on."""
    for _ in range(longest):
        add(m, p, device, m.group[i], to)
        i = only_reader(m, i)
        if i < 0:
            return


@numba.njit(**INNER)
@no_type_check
def add_window(m, p, device, order, first, end, home, to):
    """The ops at places first..end of an order that are on `home`, or all where home is -1."""
    for k in range(max(first, 0), min(end, order.shape[0])):
        i = np.int64(order[k])
        if home < 0 or device[i] == home:
            add(m, p, device, m.group[i], to)


@numba.njit(**INNER)
@no_type_check
def add_cut_shift(m, p, device, order, place, i, longest):
    """Move a border: ops next to one that crosses devices go over to the other side with it."""
    home = np.int64(device[i])
    for x in range(m.in_start[i], m.in_start[i + 1]):
        to = np.int64(device[m.producer[m.in_tensor[x]]])
        if to != home:
            add_window(m, p, device, order, place, place + longest, home, to)
            return
    for x in range(m.out_start[i], m.out_start[i + 1]):
        t = m.out_tensor[x]
        for y in range(m.use_start[t], m.use_start[t + 1]):
            to = np.int64(device[m.use_op[y]])
            if to != home:
                add_window(m, p, device, order, place - longest + 1, place + 1, home, to)
                return


@numba.njit(**INNER)
@no_type_check
def add_cluster(m, p, device, i, to, longest):
    """Op i and the ops on its device nearest to it in the graph, breadth first."""
    home, number = device[i], p.number[0]
    p.queue[0] = i
    p.seen[i] = number
    first, end = 0, 1
    while first < end and first < longest:
        j = p.queue[first]
        first += 1
        add(m, p, device, m.group[j], to)
        for x in range(m.in_start[j], m.in_start[j + 1]):
            k = m.producer[m.in_tensor[x]]
            if device[k] == home and p.seen[k] != number:
                p.seen[k] = number
                p.queue[end] = k
                end += 1
        for x in range(m.out_start[j], m.out_start[j + 1]):
            t = m.out_tensor[x]
            for y in range(m.use_start[t], m.use_start[t + 1]):
                k = m.use_op[y]
                if device[k] == home and p.seen[k] != number:
                    p.seen[k] = number
                    p.queue[end] = k
                    end += 1
            if end > longest + 64:  # a tensor with thousands of readers would swamp the rest
                break


@numba.njit(**INNER)
@no_type_check
def propose(m, p, device, order, place, kind, g, reach_ops):
    """Leave a proposal of a kind around group g; `order` orders all ops, `place` is its inverse.

    The longest moves are a share of `reach_ops`: of all ops, or of those that may be moved.
    """
    p.number[0] += 1
    p.size[0] = 0
    num_ops = device.shape[0]
    i = m.group_op[m.group_start[g] + below(p.random, m.group_start[g + 1] - m.group_start[g])]
    home = np.int64(device[i])
    if kind == SINGLE:
        add(m, p, device, g, other_device(m, p, g, home))
        return
    to = wanted_device(m, p, device, i)
    if kind == NEIGHBOUR:
        add(m, p, device, g, to)
    elif kind == CHAIN:
        add_chain(m, p, device, i, to, length_up_to(p.random, min(64, reach_ops)))
    elif kind == WINDOW:
        longest = length_up_to(p.random, longest_move(reach_ops, 3))
        start = np.int64(place[i]) - below(p.random, longest)
        only = home if uniform(p.random) < 0.5 else -1
        add_window(m, p, device, order, start, start + longest, only, to)
    elif kind == SWAP:
        add(m, p, device, g, to)
        # The partner is near in the order, so that it competes for the same time.
        reach = length_up_to(p.random, reach_ops)
        for _ in range(8):
            k = np.int64(place[i]) - reach + below(p.random, 2 * reach + 1)
            if 0 <= k < num_ops and device[np.int64(order[k])] == to:
                add(m, p, device, m.group[np.int64(order[k])], home)
                break
    elif kind == CUT:
        longest = length_up_to(p.random, longest_move(reach_ops, 4))
        add_cut_shift(m, p, device, order, np.int64(place[i]), i, longest)
    else:
        add_cluster(
            m, p, device, i, to, length_up_to(p.random, min(longest_move(reach_ops, 3), 4096))
        )
