"""Turns of devices, for `gdp.sim.segments`. Axes: N ops, D devices, E pairs of ops that work.

Plain functions over lists, which are compiled for large graphs (`gdp.base.kernels.twin`).
"""

from typing import no_type_check

NOTHING = -1


@no_type_check
def fill_hops(start, reader, device, hops):
    """Maximum number of device changes from each op to the exit; ops in topological order."""
    for back in range(len(hops)):
        op = len(hops) - 1 - back
        for x in range(start[op], start[op + 1]):
            here = hops[reader[x]] + (device[op] != device[reader[x]])
            hops[op] = max(hops[op], here)


@no_type_check
def take_turns(start, reader, missing, hops, device, works, first, head, farthest, following, turn):
    """Fill the turn of every op that works, one device a turn; the number of turns.

    `missing` [N], inputs that another op makes, is used up. Ready ops of a device are a list from
    `head` [D] along `following` [N]; `farthest` [D] is the most hops of any of them.
    """
    for d in range(len(head)):
        head[d], farthest[d] = NOTHING, NOTHING
    for op in range(len(turn)):
        if works[op] and missing[op] == 0:
            d = device[op]
            following[op], head[d] = head[d], op
            farthest[d] = max(farthest[d], hops[op])
    count, d = 0, first
    while d != NOTHING:
        while head[d] != NOTHING:
            op = head[d]
            head[d] = following[op]
            turn[op] = count
            for x in range(start[op], start[op + 1]):
                other = reader[x]
                missing[other] -= 1
                if missing[other] == 0:
                    there = device[other]
                    following[other], head[there] = head[there], other
                    farthest[there] = max(farthest[there], hops[other])
        farthest[d] = NOTHING
        count += 1
        d = NOTHING
        for other in range(len(head)):
            if head[other] != NOTHING and (d == NOTHING or farthest[other] > farthest[d]):
                d = other
    return count
