"""Simulated annealing of one placement, for the objectives of the event simulator.

An `Annealer` holds the state of one run; the loops are in `gdp.methods.annealing.annealer_kernels`.
Steps are deterministic: how they are cut into calls, and so the clock, changes only where they end.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from gdp.base.clock import Clock
from gdp.base.rows import imported
from gdp.graph.groups import inverse
from gdp.methods.base import Assignment
from gdp.methods.scoring import OP_S, Evaluated, score_all
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.sim.objectives import memory_binds, objective_of
from gdp.sim.score import values

if TYPE_CHECKING:  # the kernels load numba
    from gdp.methods.annealing.annealer_kernels import CoolingSchedule
    from gdp.methods.annealing.move_score_kernels import Scorer

# Seconds between two looks at the clock, at most: what Ctrl-C waits for.
_SLICE_S = 0.05
# Of an idle core, for a step that costs what its move changes, and for each op where memory binds.
_MOVE_S, _PEAK_S = 1.5e-6, 1.2e-8
_BUCKET_OPS, _BUCKETS = 4, (64, 1024)  # ops a bucket of time, and how few and many buckets
_REJECTED = 1 << 12  # rejected moves remembered

_SCORED: ContextVar[bool] = ContextVar("moves are scored", default=True)


@dataclass(frozen=True)
class AnnealConfig:
    """Temperatures (shares of the start's value), rounds and kinds of steps."""

    hot: float = 1e-3
    cold: float = 1e-4
    first_steps: int = 2000  # of the first round; every round is longer than the one before
    growth: float = 2.0
    overflow_price: float = 10.0  # of all of one device's memory, in values of the start
    # Shares of steps: single, neighbour, chain, window, swap, cut, cluster, exchange of priorities
    shares: tuple[float, ...] = (0.10, 0.15, 0.15, 0.15, 0.10, 0.10, 0.15, 0.10)
    guide: float = 0.01  # of the mean square of all loads, beside the largest: throughput only
    price_rise: float = 1.0  # over a round, by which the price is multiplied: throughput only
    fit: bool = False  # minimise the overflow, and stop where there is none

    def __post_init__(self) -> None:
        if not 0.0 < self.cold <= self.hot:
            raise ValueError(f"cold must lie in (0, hot], got {self.cold} with hot {self.hot}")
        if self.first_steps < 1 or self.growth < 1.0:
            raise ValueError(
                f"first_steps and growth must be at least 1, got {self.first_steps}, {self.growth}"
            )
        if len(self.shares) != 8 or min(self.shares) < 0.0 or sum(self.shares) <= 0.0:
            raise ValueError(f"shares must be 8 numbers >= 0 of positive sum, got {self.shares}")


FIT = AnnealConfig(hot=1e-2, cold=1e-5, fit=True)
"""For placements that overflow memory."""


class Annealer:
    """One annealing run: the state and operations that all annealers share."""

    simulates = True  # a step costs a simulation
    default = AnnealConfig()

    def __init__(self, problem: Problem, start: Evaluated, seed: int) -> None:
        from gdp.methods.annealing.annealer_kernels import NUM_STEPS, AnnealState
        from gdp.methods.annealing.moves_kernels import Proposal
        from gdp.sim.engine import arrays, workspace

        self.problem = problem
        self.start = start
        self.methods = arrays_of(problem)
        self.engine = arrays(problem)
        self.work = workspace(problem)
        groups, ops = problem.num_groups, problem.num_ops
        now = [start.value_s, float(start.overflow_bytes)] * 2
        self.chain = AnnealState(
            device=start.assignment.device.astype(np.int32),
            best_device=start.assignment.device.astype(np.int32),
            order=np.arange(ops),
            movable=np.flatnonzero(problem.group_allowed.sum(axis=1) > 1),
            undo=np.zeros(groups, np.int32),
            value=np.array(now),
            count=np.zeros(3, np.int64),
            kind_share=np.zeros(NUM_STEPS),
            tried=np.zeros(NUM_STEPS, np.int64),
            gained=np.zeros(NUM_STEPS, np.int64),
        )
        self.proposal = Proposal(
            group=np.zeros(groups, np.int64),
            device=np.zeros(groups, np.int64),
            size=np.zeros(1, np.int64),
            stamp=np.zeros(groups, np.int64),
            seen=np.zeros(ops, np.int64),
            number=np.zeros(1, np.int64),
            queue=np.zeros(ops, np.int64),
            random=np.array([seed], dtype=np.uint64),
        )

    def run(self, steps: int, of: int, config: AnnealConfig) -> bool:
        """Do some of a round of `of` steps; True where the search is over before that."""
        raise NotImplementedError

    @property
    def step_s(self) -> float:
        """Seconds of an idle core for a step, roughly: counted, never measured."""
        if self.simulates:
            return OP_S * self.problem.num_ops
        return _MOVE_S + _PEAK_S * self.problem.num_ops * memory_binds(self.problem)

    def plan(self, steps: int, config: AnnealConfig) -> "CoolingSchedule":
        """The schedule of a round of so many steps."""
        from gdp.methods.annealing.annealer_kernels import CoolingSchedule

        shares = np.array(config.shares)
        self.chain.kind_share[:] = np.cumsum(shares) / shares.sum()
        graph = self.problem.graph
        total = float(graph.weight_bytes.sum() + graph.held_bytes.sum())
        memory = self.problem.cluster.memory_bytes.astype(float)
        return CoolingSchedule(
            hot=config.hot,
            cold=config.cold,
            steps=steps,
            value0_s=max(self.start.value_s, 1e-30),
            bytes0=max(1.0, min(float(memory.mean()), total)),
            weight_s=1e-3 if config.fit else 1.0,
            weight_bytes=1.0 if config.fit else config.overflow_price,
            until_fits=config.fit,
            price_rise=config.price_rise,
        )

    def set_order(self, order: Int[np.ndarray, "N"]) -> None:
        """Make an order of the ops the priorities."""
        self.work.by_position[:] = order
        self.work.position[order] = np.arange(len(order))

    def restart(self) -> None:
        """Go on from the best placement."""
        from gdp.methods.annealing import annealer_kernels as rows

        c = self.chain
        c.device[:] = c.best_device
        c.value[[rows.NOW_S, rows.NOW_BYTES]] = c.value[[rows.BEST_S, rows.BEST_BYTES]]
        c.count[rows.STEP] = 0

    def best(self) -> Evaluated:
        """The best placement so far, with the priorities of the start."""
        return self.best_with(self.start.assignment.rank)

    def best_with(self, rank: Int[np.ndarray, "N"] | None) -> Evaluated:
        """The best placement so far, with these priorities."""
        from gdp.methods.annealing.annealer_kernels import BEST_BYTES, BEST_S

        return Evaluated(
            Assignment(self.chain.best_device.astype(np.int64), rank),
            int(self.chain.value[BEST_BYTES]),
            float(self.chain.value[BEST_S]),
            self.evaluations,
        )

    @property
    def evaluations(self) -> int:
        """Placements simulated so far."""
        from gdp.methods.annealing.annealer_kernels import EVALUATIONS

        return int(self.chain.count[EVALUATIONS])


def annealer_of(problem: Problem) -> type[Annealer]:
    """The annealer of the problem's objective: compiled, or else one that simulates each step."""
    name = objective_of(problem).annealer
    return imported(name) if name else SimulatingAnnealer


def make_annealer(problem: Problem, start: Evaluated, seed: int) -> Annealer:
    """An annealer for the problem's objective."""
    return annealer_of(problem)(problem, start, seed)


def anneal(
    annealer: Annealer, steps: int, config: AnnealConfig, clock: Clock, evaluations: int | None
) -> bool:
    """One round; True where it ended early, by the clock, the budget or the first fit."""
    annealer.restart()
    before, done, at_once = annealer.evaluations, 0, 1
    try:
        while done < steps:
            left = steps - done
            if evaluations is not None:
                left = min(left, evaluations - (annealer.evaluations - before))
            if left <= 0 or clock.is_over():
                return True
            count = min(at_once, left)
            began_s = time.perf_counter()
            if annealer.run(count, steps, config):
                return True
            took_s = time.perf_counter() - began_s
            done += count
            slice_s = min(_SLICE_S, max(clock.remaining_s(), 0.0))
            at_once = max(1, min(4 * at_once, int(count * slice_s / max(took_s, 1e-9))))
        return False
    finally:
        # At once: how steps are cut into calls depends on time, what is counted must not.
        clock.charge((annealer.evaluations - before) * annealer.step_s)


def side_by_side(calls: Sequence[Callable[[Clock], None]], clock: Clock) -> None:
    """Make calls concurrently, one thread each; an interrupt ends them at their next clock check.

    Kernels hold no lock, so that each has a core.
    """
    if len(calls) == 1:
        calls[0](clock)
        return
    shared = clock.part(1.0)
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call, shared) for call in calls]
        try:
            for future in futures:
                future.result()
        except BaseException:
            shared.seconds = 0.0
            raise


def anneal_to_fit(
    problem: Problem, start: Assignment, clock: Clock, seed: int, evaluations: int
) -> Evaluated:
    """The first placement that fits, or the one of least overflow after `evaluations`."""
    scored = score_all(problem, [start])[0]
    chain = make_annealer(problem, scored, seed)
    steps = FIT.first_steps
    while chain.evaluations < evaluations and not clock.is_over():
        before = chain.evaluations
        anneal(chain, steps, FIT, clock, evaluations - chain.evaluations)
        if chain.best().overflow_bytes == 0 or chain.evaluations == before:
            break
        steps = int(steps * FIT.growth)
    return chain.best()


class SimulatingAnnealer(Annealer):
    """Every step asks the objective for its value, whatever it is; priorities stay the start's."""

    def run(self, steps: int, of: int, config: AnnealConfig) -> bool:
        """Do some of a round of `of` steps; True where the search is over before that."""
        from gdp.methods.annealing.annealer_kernels import propose_step, settle_step

        rank, order = self.start.assignment.rank, np.arange(self.problem.num_ops)
        plan = self.plan(of, config)
        for _ in range(steps):
            if plan.until_fits and self.best().overflow_bytes == 0:
                return True
            kind = propose_step(self.methods, self.chain, self.proposal, plan, order)
            if kind < 0:
                continue
            value_s, overflow = values(self.problem, self.chain.device[None].astype(np.int64), rank)
            over_bytes = float(overflow[0])
            settle_step(
                self.methods, self.chain, self.proposal, plan, kind, float(value_s[0]), over_bytes
            )
        return False


class LatencyAnnealer(Annealer):
    """Every step is one exact simulation, with priorities where the start has some.

    Which move a step makes is chosen by a score, see
    `gdp.methods.annealing.move_score_kernels`.
    """

    def __init__(self, problem: Problem, start: Evaluated, seed: int) -> None:
        super().__init__(problem, start, seed)
        rank = start.assignment.rank
        self._by_rank = rank is not None and bool((rank != rank[0]).any())
        # Without priorities the order still serves to draw windows from.
        order = np.arange(problem.num_ops) if rank is None else np.argsort(rank, kind="stable")
        self.set_order(order)
        self.chain.order[:] = self.work.by_position
        self.scorer = new_scorer(problem)

    def run(self, steps: int, of: int, config: AnnealConfig) -> bool:
        """Do some of a round of `of` steps; True where the search is over before that."""
        from gdp.methods.annealing.annealer_kernels import anneal_latency

        plan = self.plan(of, config)
        given = self.methods, self.engine, self.work, self.chain, self.proposal, self.scorer
        return bool(anneal_latency(*given, plan, self._by_rank, steps))

    def restart(self) -> None:
        """Begin a round, from the best placement so far."""
        super().restart()
        self.set_order(self.chain.order)
        restart_scorer(self.scorer)

    def best(self) -> Evaluated:
        """The best placement so far, with its priorities."""
        return self.best_with(inverse(self.chain.order) if self._by_rank else None)


class PeriodAnnealer(Annealer):
    """Every step costs what its move changes: O(degree) for each op moved."""

    simulates = False
    default = AnnealConfig(first_steps=20_000)

    def __init__(self, problem: Problem, start: Evaluated, seed: int) -> None:
        from gdp.methods.annealing.annealer_kernels import make_loads, new_loads

        super().__init__(problem, start, seed)
        self._loads = new_loads(self.methods)
        make_loads(self.methods, self._loads, self.chain.device)
        total = 0.0  # in this order, as the kernel sums: the search must not depend on rounding
        for seconds in (*self._loads.busy_s.tolist(), *self._loads.channel_s.tolist()):
            total += seconds * seconds
        value0_s = self.plan(1, AnnealConfig()).value0_s
        self._guides = np.full(2, total / (value0_s * problem.num_devices))  # of `anneal_period`
        self._order = np.arange(problem.num_ops)

    def run(self, steps: int, of: int, config: AnnealConfig) -> bool:
        """Do some of a round of `of` steps; True where the search is over before that."""
        from gdp.methods.annealing.annealer_kernels import anneal_period

        plan = self.plan(of, config)
        given = self.methods, self.engine, self.work, self.chain, self.proposal
        orders = self._order, self._order
        loads = self._loads, self._guides
        return bool(anneal_period(*given, *loads, plan, *orders, config.guide, steps))

    def restart(self) -> None:
        """Begin a round, from the best placement so far."""
        from gdp.methods.annealing.annealer_kernels import make_loads

        super().restart()
        make_loads(self.methods, self._loads, self.chain.device)
        self._guides[0] = self._guides[1]


@contextmanager
def moves_as_drawn() -> Iterator[None]:
    """Let searches inside the block simulate every move they draw, without a score."""
    token = _SCORED.set(False)
    try:
        yield
    finally:
        _SCORED.reset(token)


def new_scorer(problem: Problem) -> "Scorer":
    """A scorer that has seen no schedule."""
    from gdp.methods.annealing import move_score_kernels as rows

    n, d, groups = problem.num_ops, problem.num_devices, problem.num_groups
    buckets = int(np.clip(n // _BUCKET_OPS, *_BUCKETS))
    scorer = rows.Scorer(
        draws=rows.DRAWS if _SCORED.get() else 1,
        unscored=rows.UNSCORED,
        start_s=np.zeros(n),
        finish_s=np.zeros(n),
        latest_s=np.zeros(n),
        busy_until_s=np.zeros((d, buckets + 1)),
        next_s=np.zeros(d),
        number=np.zeros(6, np.int64),
        span_s=np.zeros(2),
        best_score=np.zeros(1),
        group=np.zeros(groups, np.int64),
        device=np.zeros(groups, np.int64),
        new_device=np.zeros(groups, np.int64),
        stamp=np.zeros(groups, np.int64),
        rejected=np.zeros(_REJECTED, np.uint64),
        mark=np.zeros(1, np.uint64),
    )
    restart_scorer(scorer)
    return scorer


def restart_scorer(scorer: "Scorer") -> None:
    """Take note that the placement at hand is another: its schedule is not known."""
    from gdp.methods.annealing.move_score_kernels import ACCEPTED, RENEW, USABLE, VERSION

    scorer.number[ACCEPTED] = RENEW
    scorer.number[USABLE] = 0
    scorer.number[VERSION] += 1
