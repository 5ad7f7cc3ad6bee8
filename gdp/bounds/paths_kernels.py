"""Heads and tails of all ops, and branch and bound over small blocks.

The recurrences and parts are those of `gdp.bounds.paths`. A node of a part is an op on a device or
a transfer on a channel; devices and channels are machines that serve one node at a time. Plain
functions, which are compiled where there is much to do (`gdp.base.kernels.twin`).
"""

import typing

import numpy as np

MAX_NODES = 64  # ops and transfers of a part: a set of them is one word
NO_TIE, TIED_TO_SOURCE = -2, -1
EVERYTHING = np.uint64(0xFFFFFFFFFFFFFFFF)
NOTHING, FIRST = np.uint64(0), np.uint64(1)  # no node, the first


@typing.no_type_check
def _send_s(a, k, v, e, d):
    """Seconds from the end of arc k's source on e until v can start on d, dispatch included."""
    if e == d:
        return 0.0
    if a.group[a.source[k]] == a.group[v]:
        return np.inf
    tensors, size = a.tensors[k], a.size_bytes[k]
    if not a.queues[e][d]:
        tensors, size = min(tensors, 1.0), a.largest_bytes[k]
    return tensors * a.latency_s[e][d] + size * a.s_per_byte[e][d] + a.opens_s[v][d]


@typing.no_type_check
def heads(a, spans, head_s):
    """Fill `head_s` [V, D]: the earliest end of op v on device d."""
    num_ops, num_devices = len(a.op_s), len(a.op_s[0])
    at = 0
    for v in range(num_ops):
        for d in range(num_devices):
            start_s = 0.0
            for k in range(a.first_input[v], a.first_input[v + 1]):
                first_s = np.inf
                for e in range(num_devices):
                    first_s = min(first_s, head_s[a.source[k]][e] + _send_s(a, k, v, e, d))
                start_s = max(start_s, first_s)
            head_s[v][d] = start_s + a.op_s[v][d]
        while at < len(spans.target) and spans.target[at] == v:
            for d in range(num_devices):
                first_s = np.inf
                for e in range(num_devices):
                    begin_s = head_s[spans.source[at]][e] if spans.source[at] >= 0 else 0.0
                    first_s = min(first_s, begin_s + spans.span_s[at][e][d])
                head_s[v][d] = max(head_s[v][d], first_s)
            at += 1


@typing.no_type_check
def tails(a, spans, tail_s):
    """Raise `tail_s` [V, D] from zeros: the least time from op u's end on device e to the end."""
    num_ops, num_devices = len(a.op_s), len(a.op_s[0])
    at = len(spans.target) - 1
    for v in range(num_ops - 1, -1, -1):
        for k in range(a.first_input[v], a.first_input[v + 1]):
            for e in range(num_devices):
                least_s = np.inf
                for d in range(num_devices):
                    after_s = a.op_s[v][d] + tail_s[v][d]
                    least_s = min(least_s, _send_s(a, k, v, e, d) + after_s)
                tail_s[a.source[k]][e] = max(tail_s[a.source[k]][e], least_s)
        while at >= 0 and spans.target[at] == v:
            u = spans.source[at]
            for e in range(num_devices):
                least_s = np.inf
                for d in range(num_devices):
                    least_s = min(least_s, spans.span_s[at][e][d] + tail_s[v][d])
                if u >= 0:
                    tail_s[u][e] = max(tail_s[u][e], least_s)
            at -= 1


@typing.no_type_check
def _lowest_bit(word):
    """The index of the lowest set bit of a nonzero uint64."""
    index = 0
    while not (word >> np.uint64(index)) & FIRST:
        index += 1
    return index


@typing.no_type_check
def _one_machine(chosen, count, head_s, busy_s, tail_s):
    """The least end of nodes on one machine: max over tails q of (end of those with tail >= q) + q.

    Jackson's preemptive schedule: Carlier 1982, doi 10.1016/S0377-2217(82)80007-6. `chosen` holds
    the nodes in order of their heads.
    """
    longest_s = 0.0
    for i in range(count):
        least_tail_s = tail_s[chosen[i]]
        end_s = 0.0
        for j in range(count):
            x = chosen[j]
            if tail_s[x] >= least_tail_s:
                end_s = max(end_s, head_s[x]) + busy_s[x]
        longest_s = max(longest_s, end_s + least_tail_s)
    return longest_s


@typing.no_type_check
def _take_machine(machine_of, head_s, chosen, left):
    """Leave in `chosen` the nodes of a set that are on the machine of its first, in order of heads;
    (how many, the rest of the set)."""
    first = _lowest_bit(left)
    machine = machine_of[first]
    found, rest = np.int64(0), NOTHING
    while left != NOTHING:
        x = _lowest_bit(left)
        bit = left & (~left + FIRST)
        left ^= bit
        if machine_of[x] != machine:
            rest |= bit
            continue
        k = found
        while k > 0 and head_s[chosen[k - 1]] > head_s[x]:
            chosen[k] = chosen[k - 1]
            k -= 1
        chosen[k] = x
        found += 1
    return found, rest


@typing.no_type_check
def _follow(head_s, busy_s, before, path_s, node, after):
    """Let a node wait for another one, or for the start with -1."""
    if after < 0:
        return
    head_s[node] = max(head_s[node], head_s[after] + busy_s[after])
    bit = np.uint64(1) << np.uint64(after)
    fresh = (before[after] | bit) & ~before[node]
    for x in range(after + 1):
        if (fresh >> np.uint64(x)) & np.uint64(1):
            path_s[node, x] = 0.0
    before[node] |= before[after] | bit
    for x in range(after):
        if (before[after] >> np.uint64(x)) & np.uint64(1):
            path_s[node, x] = max(path_s[node, x], path_s[after, x] + busy_s[after])


@typing.no_type_check
def _place(p, w, op, d, count, home):
    """Put op on device d after the nodes so far: (number of nodes, bound of the rest)."""
    num_devices = p.op_s.shape[1]
    num_machines = num_devices + p.num_channels
    opened = False
    for k in range(p.first_input[op], p.first_input[op + 1]):
        u, tensor = p.source[k], p.tensor[k]
        e = w.device[u] if u >= 0 else home
        if e == d or tensor < 0 or w.sent[tensor, d] >= 0:
            opened |= e != d and tensor >= 0
            continue
        opened = True
        w.sent[tensor, d] = count
        w.node_tensor[count], w.node_to[count] = tensor, d
        w.head_s[count], w.before[count] = 0.0, 0
        _follow(w.head_s, w.busy_s, w.before, w.path_s, count, w.node[u] if u >= 0 else -1)
        seconds = p.latency_s[e, d] + p.sent_bytes[tensor] * p.s_per_byte[e, d]
        # Where nothing queues a transfer is on a machine that is never looked at.
        channel = p.channel[e, d] if p.channel[e, d] >= 0 else p.num_channels
        w.machine[count], w.busy_s[count] = num_devices + channel, seconds
        w.tail_s[count] = p.op_s[op, d] + w.after_s[op, d]
        count += 1
    w.node_tensor[count] = -1
    w.head_s[count], w.before[count] = 0.0, 0
    for k in range(p.first_input[op], p.first_input[op + 1]):
        u, tensor = p.source[k], p.tensor[k]
        e = w.device[u] if u >= 0 else home
        if e == d or tensor < 0:
            _follow(w.head_s, w.busy_s, w.before, w.path_s, count, w.node[u] if u >= 0 else -1)
        else:
            _follow(w.head_s, w.busy_s, w.before, w.path_s, count, w.sent[tensor, d])
    left = w.before[count]
    while left != NOTHING:
        found, left = _take_machine(w.machine, w.head_s, w.chosen, left)
        if found > 1 and w.machine[w.chosen[0]] < num_machines:
            end_s = _one_machine(w.chosen, found, w.head_s, w.busy_s, w.path_s[count])
            w.head_s[count] = max(w.head_s[count], end_s)
    w.machine[count] = d
    w.busy_s[count] = p.op_s[op, d] + (p.opens_s[op, d] if opened else 0.0)
    w.tail_s[count] = w.after_s[op, d]
    w.node[op] = count
    count += 1
    bound_s = w.head_s[count - 1] + w.busy_s[count - 1] + w.tail_s[count - 1]
    left = EVERYTHING >> np.uint64(64 - count)
    while left != NOTHING:
        found, left = _take_machine(w.machine, w.head_s, w.chosen, left)
        machine = w.machine[w.chosen[0]]
        # Other devices have nothing new on them.
        if found > 1 and (machine == d or num_devices <= machine < num_machines):
            end_s = _one_machine(w.chosen, found, w.head_s, w.busy_s, w.tail_s)
            bound_s = max(bound_s, end_s)
    return count, bound_s


@typing.no_type_check
def _unplace(w, count, to):
    """Take back the nodes from `to` on."""
    for x in range(to, count):
        if w.node_tensor[x] >= 0:
            w.sent[w.node_tensor[x], w.node_to[x]] = -1


@typing.no_type_check
def _fill_after(p, w, target_device):
    """Fill `after_s` [n, D]: the least time from the end of an op to that of the last one."""
    n, num_devices = p.op_s.shape
    w.after_s[:] = 0.0
    for op in range(n - 1, -1, -1):
        for k in range(p.first_input[op], p.first_input[op + 1]):
            u, tensor = p.source[k], p.tensor[k]
            if u < 0:
                continue
            for e in range(num_devices):
                least_s = np.inf
                for d in range(num_devices):
                    if op == n - 1 and d != target_device:
                        continue
                    seconds = p.op_s[op, d] + w.after_s[op, d]
                    if e != d and tensor >= 0:
                        seconds += p.latency_s[e, d] + p.opens_s[op, d]
                        seconds += p.sent_bytes[tensor] * p.s_per_byte[e, d]
                    least_s = min(least_s, seconds)
                w.after_s[u, e] = max(w.after_s[u, e], least_s)


@typing.no_type_check
def _may_take(p, w, op, d, home, target_device):
    """True if op may be placed on d: allowed, with its group, no mere renaming of devices."""
    if p.op_s[op, d] == np.inf:
        return False
    if op == len(p.tied) - 1 and d != target_device:
        return False
    if p.tied_to_target[op] and d != target_device:
        return False
    tie = p.tied[op]
    if tie == TIED_TO_SOURCE and d != home:
        return False
    if tie >= 0 and w.device[tie] != d:
        return False
    if w.users[d] > 0:
        return True
    renamed = False
    for other in range(d):
        renamed |= p.alike[other] == p.alike[d] and w.users[other] == 0
    return not renamed


@typing.no_type_check
def _rank_choices(p, w, op, count, parent_s, home, target_device):
    """Fill the choices of op, best bound first; how many there are."""
    found = 0
    for d in range(p.op_s.shape[1]):
        if not _may_take(p, w, op, d, home, target_device):
            continue
        w.device[op] = d
        after, bound_s = _place(p, w, op, d, count, home)
        _unplace(w, after, count)
        bound_s = max(bound_s, parent_s)
        k = found
        while k > 0 and w.choice_s[op, k - 1] > bound_s:
            w.choice_s[op, k], w.choice[op, k] = w.choice_s[op, k - 1], w.choice[op, k - 1]
            k -= 1
        w.choice_s[op, k], w.choice[op, k] = bound_s, d
        found += 1
    return found


@typing.no_type_check
def least_span(p, w, home, target_device, limit):
    """(least seconds from the start to the end of the last op, number of branches).

    Depth first over the devices of the ops in topological order. When `limit` branches are spent,
    open branches count with their bounds, so the answer is a bound in any case.
    """
    n = len(p.tied)
    w.sent[:] = -1
    w.users[:] = 0
    if home >= 0:
        w.users[home] += 1
    w.users[target_device] += 1
    _fill_after(p, w, target_device)
    best_s = np.inf
    op, branches = np.int64(0), 0  # a bare 0 is a literal, for which all is compiled once more
    w.start_node[0] = 0
    fresh, bound_s = True, 0.0  # whether op was just reached, and the bound of the placed ops
    while op >= 0:
        if fresh:
            w.num_choices[op] = _rank_choices(
                p, w, op, w.start_node[op], bound_s, home, target_device
            )
            w.next_choice[op] = 0
            fresh = False
        k = w.next_choice[op]
        if k > 0:
            # Back from below: take the last choice back.
            w.users[w.device[op]] -= 1
            _unplace(w, w.end_node[op], w.start_node[op])
        if k == w.num_choices[op] or w.choice_s[op, k] >= best_s:
            op -= 1
            continue
        if op == n - 1 or branches >= limit:
            best_s = w.choice_s[op, k]
            op -= 1
            continue
        branches += 1
        d = w.choice[op, k]
        w.next_choice[op] = k + 1
        w.device[op] = d
        w.users[d] += 1
        w.end_node[op], _ = _place(p, w, op, d, w.start_node[op], home)
        bound_s = w.choice_s[op, k]
        op += 1
        w.start_node[op] = w.end_node[op - 1]
        fresh = True
    return best_s, branches
