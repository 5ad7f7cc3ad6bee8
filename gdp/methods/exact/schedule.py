"""The event simulator's latency as a CP-SAT model.

Every op is an interval on the device of its group, no two of which overlap; every tensor that is
read elsewhere is an interval on the channel of the transfer, no two of which overlap; an op starts
when its inputs are there. The simulator's schedule is a solution of this model, so the bound holds
for every placement. The model is a relaxation in that

* devices may idle while an op is ready, and channels may carry transfers in any order;
* an op pays for opening a segment only where it opens one wherever it is;
* memory holds weights alone.

Axes: N ops, G groups, T tensors, D devices.
"""

from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.bounds.linear_program import PlacementSolution
from gdp.bounds.work import earliest_ends
from gdp.graph.groups import inverse
from gdp.methods.exact.cp_sat import (
    TICKS,
    cp_model_library,
    place_groups,
    run_cp,
    ticks,
)
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.problem.ticks import send_time


def solve_schedule(
    problem: Problem,
    upper_s: float,
    seconds: float | None,
    seed: int,
    hint: Int[np.ndarray, "N"] | None = None,
    counted: bool = False,
) -> PlacementSolution:
    """The shortest schedule up to `upper_s`.

    Args:
        problem: Of latency.
        upper_s: Value of a known schedule, or more.
        seconds: For the solver; None: no limit.
        seed: Of the solver.
        hint: Device of each op, where the search starts.
        counted: Limit the solver's work instead of its seconds.
    """
    built = _Model(problem, upper_s / TICKS, hint)
    solution = run_cp(built.model, seconds, seed, counted)
    bound_s = min(max(0.0, solution.bound) * built.unit_s, upper_s)
    if solution.solver is None:
        return PlacementSolution(None, bound_s, solution.is_complete)
    start = np.array([solution.solver.value(s) for s in built.start])
    on = [[solution.solver.value(literal) for literal in row] for row in built.on]
    device = np.array(on).argmax(axis=1)[problem.group]
    rank = inverse(np.argsort(start, kind="stable"))
    return PlacementSolution(device, bound_s, solution.is_complete, rank)


class _Model:
    """The CP-SAT model; the fields are its variables, `on[g][d]` of group g on device d."""

    def __init__(self, problem: Problem, unit_s: float, hint: Int[np.ndarray, "N"] | None) -> None:
        cp_model = cp_model_library()
        self.problem, self.unit_s = problem, unit_s
        self.model = cp_model.CpModel()
        a = self.arrays = arrays_of(problem)
        always = np.where(a.opens & ~a.is_io, 1.0, 0.0)
        work_s = a.compute_s + always[:, None] * a.segment_s
        self.work = ticks(np.where(problem.allowed, work_s, np.inf), unit_s)
        serial_s = a.serial_s + always[:, None] * a.segment_s
        self.serial = ticks(np.where(problem.allowed, serial_s, np.inf), unit_s)
        self.on = place_groups(self.model, problem, hint)
        self._ops()
        self._transfers()

    def _ops(self) -> None:
        model, problem = self.model, self.problem
        n, count = problem.num_ops, problem.num_devices
        fastest = np.minimum(self.work.min(axis=1), TICKS)
        head, tail = self._paths(fastest)
        self.start = [model.new_int_var(int(head[v]), TICKS, "") for v in range(n)]
        self.end = [model.new_int_var(int(head[v] + fastest[v]), TICKS, "") for v in range(n)]
        self.latency = model.new_int_var(int((head + fastest + tail).max()), TICKS, "")
        busy: list[list[Any]] = [[] for _ in range(count)]
        loads: list[list[Any]] = [[] for _ in range(count)]
        in_turn: list[list[Any]] = [[] for _ in range(int(self.arrays.serial.max()) + 1)]
        for v, g in enumerate(problem.group.tolist()):
            for d in range(count):
                if not problem.group_allowed[g, d]:
                    continue
                size, on = int(self.work[v, d]), self.on[g][d]
                if size > TICKS:
                    model.add(on == 0)
                elif size == 0:
                    model.add(self.end[v] >= self.start[v])
                else:
                    interval = (self.start[v], size, self.end[v], on, "")
                    busy[d].append(model.new_optional_interval_var(*interval))
                    loads[d].append(size * on)
                if size <= TICKS and (turn := int(self.arrays.serial[d])) >= 0:
                    in_turn[turn].append(int(self.serial[v, d]) * on)
            model.add(self.latency >= self.end[v] + int(tail[v]))
        for d in range(count):
            model.add_no_overlap(busy[d])
            model.add(self.latency >= sum(loads[d]))
        for terms in in_turn:  # of a processor or a thread, one op at a time over all its devices
            model.add(self.latency >= sum(terms))
        model.minimize(self.latency)

    def _paths(
        self, fastest: Int[np.ndarray, "N"]
    ) -> tuple[Int[np.ndarray, "N"], Int[np.ndarray, "N"]]:
        """(ticks before the earliest start of each op, ticks after its end) at full speed."""
        head = earliest_ends(self.problem, fastest) - fastest
        tail = np.zeros(self.problem.num_ops, dtype=np.int64)
        src, dst = self.problem.graph.edges
        # Later readers first, so that the tail of a reader is complete.
        for e in np.argsort(-src, kind="stable").tolist():
            u, v = int(src[e]), int(dst[e])
            tail[u] = max(tail[u], fastest[v] + tail[v])
        return head, tail

    def _transfers(self) -> None:
        model, a = self.model, self.arrays
        count = self.problem.num_devices
        channels: dict[int, list[Any]] = {}
        loads: dict[int, list[Any]] = {}
        for t in range(len(a.producer)):
            maker = int(a.producer[t])
            readers = a.use_op[a.use_start[t] : a.use_start[t + 1]].tolist()
            for v in readers:
                model.add(self.start[v] >= self.end[maker])
            home = int(a.group[maker])
            far = [v for v in readers if int(a.group[v]) != home]
            for j in range(count if far else 0):
                begin, arrive = (model.new_int_var(0, TICKS, "") for _ in range(2))
                model.add(begin >= self.end[maker])
                for v in far:
                    away = [self.on[int(a.group[v])][j], self.on[home][j].negated()]
                    model.add(self.start[v] >= arrive).only_enforce_if(away)
                for i in range(count):
                    if i == j:
                        continue
                    sent = model.new_bool_var("")
                    seconds = send_time(
                        a.latency_s[i, j], a.sent_bytes[t], a.bytes_per_s[i, j], a.round_to
                    )
                    size = int(ticks(np.array(seconds), self.unit_s))
                    for g in {int(a.group[v]) for v in far}:
                        apart = [self.on[home][i].negated(), self.on[g][j].negated()]
                        model.add_bool_or([*apart, sent])
                    model.add_implication(sent, self.on[home][i])
                    if size > TICKS:
                        model.add(sent == 0)
                    elif size > 0:
                        channel = int(a.channel[i, j])
                        interval = (begin, size, arrive, sent, "")
                        task = model.new_optional_interval_var(*interval)
                        if channel >= 0:
                            channels.setdefault(channel, []).append(task)
                            loads.setdefault(channel, []).append(size * sent)
                    else:
                        model.add(arrive >= begin).only_enforce_if(sent)
        for channel, intervals in channels.items():
            model.add_no_overlap(intervals)
            model.add(self.latency >= sum(loads[channel]))
