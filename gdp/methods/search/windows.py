"""Large-neighbourhood search of large graphs, window by window of their schedule.

A step of annealing that simulates everything costs O(N); here it costs what a window of the
schedule holds. Where a window ends the rest is taken to follow as it did, and what the steps led
to is kept only if the exact simulation of all of it says so.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gdp.base.clock import Clock
from gdp.graph.groups import inverse
from gdp.methods.annealing.annealer import (
    AnnealConfig,
    LatencyAnnealer,
    anneal,
    annealer_of,
    side_by_side,
)
from gdp.methods.base import Assignment, inner_seed
from gdp.methods.scoring import Evaluated
from gdp.methods.search.budget import Budget
from gdp.problem.problem import Problem
from gdp.sim.latency import simulate
from gdp.sim.score import values


@dataclass(frozen=True)
class WindowConfig:
    """Length of the windows and of the annealing in each."""

    state_ops: int = 200  # between two states, where that makes no more than `most_states`
    most_states: int = 96
    states: tuple[int, ...] = (1, 2, 4, 8)  # lengths of a window, drawn anew for each
    after: int = 1  # states simulated beyond a window before the record is believed
    steps: int = 150  # for each window
    hot: float = 1e-4  # temperatures, as shares of the latency
    cold: float = 1e-6


WHOLE = AnnealConfig(hot=1e-5, cold=1e-6)
"""Steps between windows that simulate everything: they keep what the windows have won."""

TURN = 100
"""Simulations of the whole graph in one turn of either kind of step."""

MISSES = 20
"""Windows in a row in which nothing may move, after which a turn ends."""


class WindowSearch:
    """One search by windows; `step` searches one of them."""

    def __init__(
        self, problem: Problem, start: Evaluated, seed: int, config: WindowConfig | None = None
    ) -> None:
        from gdp.methods.search.window_kernels import Window
        from gdp.sim.kernels.resume import new_tails, snapshots

        self.problem, self.config = problem, config or WindowConfig()
        start = _ranked(problem, start)
        self.chain = LatencyAnnealer(problem, start, seed)
        self.value_s, self.rng = start.value_s, np.random.default_rng(seed)
        n, groups = problem.num_ops, problem.num_groups
        count = int(np.clip(n // self.config.state_ops, 2, self.config.most_states))
        self.states = snapshots(problem, self.chain.work, count)
        self.tails = new_tails(self.chain.work, self.states)
        self.window = Window(
            place=np.zeros(n, np.int64),
            first=np.zeros(groups, np.int64),
            last=np.zeros(groups, np.int64),
            group=np.zeros(groups, np.int64),
            op=np.zeros(n, np.int64),
            best_device=np.zeros(n, np.int32),
            best_position=np.zeros(n, np.int64),
            number=np.zeros(5, np.int64),
            value=np.zeros(4),
        )
        self.chain.plan(1, self.chain.default)  # the shares of the kinds of steps
        self._ops = 0  # simulated in windows
        self._record(0)

    @staticmethod
    def supports(problem: Problem) -> bool:
        """True where this search is for the problem: of latency, and devices compute at once.

        Devices of one processor add up to a bound that no window of the schedule shows. Only the
        judgement of a whole schedule knows of launches, which mostly take less than the run.
        """
        shared = (problem.cluster.processor >= 0).any()
        return annealer_of(problem) is LatencyAnnealer and not shared

    @property
    def evaluations(self) -> int:
        """Simulations so far, in simulations of the whole graph."""
        return self._ops // self.problem.num_ops + self.chain.evaluations

    def _record(self, k: int) -> float:
        from gdp.methods.search.window_kernels import record

        c = self.chain
        self._ops += self.problem.num_ops - int(self.states.done[k])
        return record(
            c.methods, c.engine, c.work, self.states, self.tails, self.window, c.scorer,
            c.chain.device, k,
        )  # fmt: skip

    def step(self, clock: Clock, left: int | None = None) -> bool:
        """Search one window, and keep the result where the whole schedule is no worse for it.

        False where nothing may move in it, or where `left` evaluations are too few.
        """
        from gdp.methods.annealing.annealer_kernels import BEST_S, NOW_S
        from gdp.methods.annealing.move_score_kernels import VERSION
        from gdp.methods.search import window_kernels as kernels

        c, config, s = self.chain, self.config, self.states
        count = len(s.goal)
        length = int(self.rng.choice(config.states))
        k = int(self.rng.integers(1 - length, count))
        until_state, k = min(k + length, count), max(k, 0)
        while not s.kept[k]:
            k -= 1
        until = self.problem.num_ops if until_state == count else int(s.goal[until_state])
        stop = min(count, until_state + config.after)
        steps = config.steps
        if left is not None:
            # The window, then all of it once to judge, once to record and once for the memory.
            size = self.problem.num_ops // count * (stop - k)
            steps = min(steps, (left - 4) * self.problem.num_ops // size)
        if steps < 1:
            return False
        given = c.methods, c.engine, c.work, s, self.tails, self.window
        if kernels.open_window(*given, c.chain, k, until, stop) == 0:
            return False
        c.scorer.number[VERSION] += 1  # moves that were rejected elsewhere may do here
        value = self.window.value
        start_s = float(value[kernels.NOW_S])
        value[[kernels.HOT_S, kernels.COLD_S]] = (
            config.hot * self.value_s,
            config.cold * self.value_s,
        )
        done, at_once = 0, 10
        while done < steps and not clock.is_over():
            at_once = min(at_once, steps - done)
            self._ops += kernels.anneal_window(
                *given, c.chain, c.proposal, c.scorer, done, at_once, steps
            )
            done += at_once
        if value[kernels.BEST_S] >= start_s:
            self._back()
            return True
        value_s = kernels.close_window(c.engine, c.work, s, self.window, c.chain)
        self._ops += self.problem.num_ops - int(s.done[k])
        if value_s > self.value_s or not self._fits():
            self._back()
            return True
        self.value_s = value_s
        c.chain.best_device[:] = c.chain.device
        c.chain.order[:] = c.work.by_position
        c.chain.value[[NOW_S, BEST_S]] = value_s
        self._record(k)
        return True

    def window_turn(self, clock: Clock, left: int | None) -> None:
        """Search windows for as long as `TURN` simulations of everything take."""
        before, missed = self.evaluations, 0
        while (spent := self.evaluations - before) < TURN and missed < MISSES:
            if clock.is_over():
                break
            searched = self.step(clock, None if left is None else left - spent)
            missed = 0 if searched else missed + 1

    def full_turn(self, clock: Clock, left: int | None) -> None:
        """Annealing steps on the whole schedule, for moves that no window contains."""
        if left is not None:
            left = max(0, left - 1)  # the record takes one
        anneal(self.chain, TURN, WHOLE, clock, left)
        self._restart()

    def adopt(self, other: "WindowSearch") -> None:
        """Continue from another search's best placement."""
        mine, best = self.chain.chain, other.chain.chain
        mine.best_device[:] = best.best_device
        mine.order[:] = best.order
        mine.value[:] = best.value
        self._restart()

    def _restart(self) -> None:
        self._back()
        self.value_s = self.chain.best().value_s
        self._record(0)

    def _fits(self) -> bool:
        c = self.chain
        if not c.engine.memory_binds:
            return True
        self._ops += self.problem.num_ops
        best = c.best_with(inverse(c.work.by_position)).assignment
        device = c.chain.device.astype(np.int64)
        return int(values(self.problem, device[None], best.rank)[1][0]) <= c.start.overflow_bytes

    def _back(self) -> None:
        c = self.chain
        c.chain.device[:] = c.chain.best_device
        c.set_order(c.chain.order)

    def best(self) -> Evaluated:
        """The best placement so far."""
        rank = inverse(self.chain.chain.order)
        device = self.chain.chain.best_device.astype(np.int64)
        overflow = self.chain.start.overflow_bytes
        return Evaluated(Assignment(device, rank), overflow, self.value_s, self.evaluations)


def _ranked(problem: Problem, start: Evaluated) -> Evaluated:
    """An equal schedule with priorities: the start's, or the order in which its ops start."""
    if start.assignment.rank is not None:
        return start
    schedule = simulate(problem, start.assignment.device)
    order = np.lexsort((np.arange(problem.num_ops), schedule.finish_s, schedule.start_s))
    return replace(start, assignment=Assignment(start.assignment.device, inverse(order)))


def search_windows(problem: Problem, start: Evaluated, seed: int, budget: Budget) -> Evaluated:
    """Search windows, and the whole graph, in turns, until the budget ends.

    Both kinds of turns cost the same; the one that won more last time is taken three times of four.
    After each turn all searches go on from the best, so that what the others won is lost: there is
    more than one only where that is asked for.
    """
    if (left := budget.left()) is not None and left < 2 * budget.chains_asked:
        return start
    if budget.clock.is_over():
        return start  # a search begins by simulating everything a few times
    searches = [
        WindowSearch(problem, start, inner_seed(seed, k)) for k in range(budget.chains_asked)
    ]
    budget.used += sum(search.evaluations for search in searches)
    best, gains, turn = start, [np.inf, np.inf], 0
    while not budget.is_over():
        kind = int(gains[1] > gains[0])
        if turn % 4 == 3:
            kind = 1 - kind
        before = sum(search.evaluations for search in searches)
        before_s, left = min(search.value_s for search in searches), budget.left()
        share = None if left is None else left // len(searches) - 1  # adopting takes one
        calls = [
            partial(search.full_turn if kind == 1 else search.window_turn, left=share)
            for search in searches
        ]
        side_by_side(calls, budget.clock)
        first = min(searches, key=lambda search: search.value_s)
        for search in searches:
            if search.value_s > first.value_s:
                search.adopt(first)
        turn += 1
        gains[kind] = before_s - first.value_s
        spent = sum(search.evaluations for search in searches) - before
        budget.used += spent
        best = min(best, first.best())
        budget.report(best)
        if spent <= 2 * len(searches) and gains == [0.0, 0.0]:
            break  # there is nothing to move, or too little left
    return best
