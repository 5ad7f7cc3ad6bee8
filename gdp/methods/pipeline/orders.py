"""The best pipelines along given orders of the elements: the linearised program (DPL).

Tarnawski et al., NeurIPS 2020, arXiv 2006.16423, section 5.1.2: with an arc between neighbours of
an order there are only M + 1 down-sets. Long orders are cut at some places first, evenly by work
and by length, then at all places near the cuts of the best pipeline, then everywhere if time is
left, so that there is an answer early.

Axes: M elements, X cuts.
"""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Int

from gdp.clock import Clock
from gdp.graph.index import inverse
from gdp.methods.pipeline.down_sets import Span, cost_of
from gdp.methods.pipeline.pruning import Program

_TARGETS = (1.02, 1.1, 1.5, 3.0)  # over the work bound: narrow windows first
_QUICK_STEPS = 2e7  # so few are run without asking the clock before
_STEPS_PER_S = 2e8
_FEWEST_CUTS = 32
_REFINEMENTS = 4
_CHUNK_STEPS = 2e7  # between two looks at the clock


def best_linear(
    program: Program,
    orders: Iterable[Int[np.ndarray, "M"]],
    bound_s: float,
    clock: Clock,
    best: list[Span] | None = None,
    whole_steps: float = np.inf,
) -> list[Span] | None:
    """The best of `best` and the best pipelines along the orders; None where none fits.

    At least one order is tried, however little time there is. An order is cut everywhere where that
    takes at most `whole_steps` inner steps.
    """
    for n, order in enumerate(orders):
        if n and clock.is_over():
            break
        best = _Order(program, order, bound_s, clock).improve(best, whole_steps)
    return best


class _Order:
    """One order, and how finely it is cut."""

    def __init__(
        self, program: Program, order: Int[np.ndarray, "M"], bound_s: float, clock: Clock
    ) -> None:
        self.program, self.order = program, order
        self.lat, self.costs = program.lat, program.costs
        self.bound_s, self.clock = bound_s, clock
        self.barred = np.ascontiguousarray(self.costs.barred)
        self.work_s = np.ascontiguousarray(self.costs.work_s)

    def improve(self, best: list[Span] | None, whole_steps: float) -> list[Span] | None:
        """The best of `best` and what is found along the order."""
        every = np.arange(len(self.order) + 1)
        if self._steps(len(every)) <= _QUICK_STEPS:
            return self._search(every, best)
        few = self._cuts_for(_QUICK_STEPS)
        best = self._search(self._even(few), best)
        for _ in range(_REFINEMENTS):
            if self.clock.is_over() or best is None:
                break
            better = self._search(self._near(best, few), best)
            if better is best:
                break
            best = better
        if self._steps(len(every)) < min(whole_steps, self.clock.remaining_s() * _STEPS_PER_S):
            best = self._search(every, best)
        return best

    def _steps(self, num_cuts: int) -> float:
        """Roughly the inner steps of a run: stages grow from every cut, and pairs of cuts push."""
        m, (num_states, num_crews) = len(self.order), self.lat.following.shape
        degree = len(self.lat.element_edge) / max(1, m)
        num_classes = len(self.lat.count)
        return num_cuts * (m * (degree + num_classes) + num_cuts / 2 * num_states * num_crews)

    def _cuts_for(self, steps: float) -> int:
        """The most cuts that stay within these steps, but at least a few."""
        few = _FEWEST_CUTS
        while 2 * few <= len(self.order) and self._steps(2 * few) <= steps:
            few *= 2
        return min(few, len(self.order))

    def _even(self, few: int) -> Int[np.ndarray, "X"]:
        """Cuts spread evenly, half of them by work and half by length."""
        m = len(self.order)
        work = np.where(self.costs.barred, np.inf, self.costs.work_s).min(axis=0)[self.order]
        total = np.cumsum(np.where(np.isfinite(work), work, 0.0))
        by_work = np.searchsorted(total, np.linspace(0.0, float(total[-1]), few // 2 + 1))
        by_length = np.linspace(0, m, few // 2 + 1).astype(np.int64)
        return np.unique(np.concatenate([[0, m], np.minimum(by_work, m), by_length]))

    def _near(self, best: list[Span], few: int) -> Int[np.ndarray, "X"]:
        """Even cuts, and as many around the places where the stages of a pipeline end."""
        m = len(self.order)
        position = inverse(self.order)
        ends = np.array([int(position[span.elements].max(initial=-1)) + 1 for span in best])
        reach = max(1, few // (2 * max(1, len(ends))))
        around = (ends[:, None] + np.arange(-reach, reach + 1)[None]).ravel()
        return np.unique(np.concatenate([np.clip(around, 0, m), self._even(few)]))

    def _search(self, cuts: Int[np.ndarray, "X"], best: list[Span] | None) -> list[Span] | None:
        """The best of `best` and the pipelines whose stages end at these cuts."""
        known_s = cost_of(best)
        targets = [f * self.bound_s for f in _TARGETS if f * self.bound_s < known_s]
        for target_s in [*targets, known_s]:
            found = self._below(cuts, target_s)
            if found is not None:
                return found
        return best

    def _below(self, cuts: Int[np.ndarray, "X"], target_s: float) -> list[Span] | None:
        """The best stages that end at these cuts, if they each take less than the target."""
        from gdp.methods.pipeline.orders_kernels import Chain, fill_windows, run_chain

        lat, num_states, num_classes = self.lat, len(self.lat.following), len(self.lat.count)
        windows = self.program.windows(target_s)
        x, h = len(cuts), len(lat.low)
        chain = Chain(
            order=np.ascontiguousarray(self.order, dtype=np.int64),
            cut=np.append(cuts, len(self.order) + 1).astype(np.int64),
            window=np.zeros((x, windows.words), dtype=np.uint64),
            best=np.full((x, num_states), np.inf),
            origin=np.full((x, num_states), -1, dtype=np.int32),
            taken=np.full((x, num_states), -1, dtype=np.int32),
            live=np.zeros(num_states, dtype=np.int64),
            count=np.zeros(h, dtype=np.int64),
            tail_in=np.zeros(h, dtype=bool),
            has_shared=np.zeros(len(lat.shared_bytes), dtype=bool),
            work=np.zeros(num_classes),
            is_barred=np.zeros(num_classes, dtype=bool),
            paid=np.zeros(lat.num_rows),
            rest=np.zeros(lat.num_rows),
            phi=np.zeros(len(windows.phi)),
        )
        chain.best[0, 0] = 0.0
        fill_windows(lat, windows, chain)
        at_once = max(1, int(x * _CHUNK_STEPS / self._steps(x)))
        for first in range(0, x, at_once):
            run_chain(lat, self.work_s, self.barred, chain, target_s, first, first + at_once)
            if self.clock.is_over() and self._steps(x) > _QUICK_STEPS:
                break
        return self._spans(chain, cuts) if chain.best[-1].min() < target_s else None

    def _spans(self, chain, cuts: Int[np.ndarray, "X"]) -> list[Span]:
        """The stages of the best pipeline along the order, first to last."""
        k, s = len(cuts) - 1, int(np.argmin(chain.best[-1]))
        cost_s = float(chain.best[-1, s])
        spans: list[Span] = []
        while k > 0:
            c, j = int(chain.taken[k, s]), int(chain.origin[k, s])
            if j >= 0:
                spans.append(Span(self.order[cuts[j] : cuts[k]], c, cost_s))
                k = j
            s = int(self.lat.previous[s, c])
        return spans[::-1]
