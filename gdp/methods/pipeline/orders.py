"""The best pipelines along given orders of the elements: the linearised program (DPL).

Tarnawski et al., NeurIPS 2020, arXiv 2006.16423, section 5.1.2: with an arc between neighbours of
an order there are only M + 1 down-sets, in a chain:

    best(i, u) = min over j < i and groups k of max(best(j, u - k), cost_k(order[j:i]))

From each j the stage grows by one element at a time, and its payments change only for that
element's tensors. Long orders are cut at some places first, evenly by work and by length, then at
all places near the cuts of the best pipeline, then everywhere if time is left, so that there is an
answer early. Loads numba: import it inside functions.

Axes: M elements, X cuts, S states.
"""

from collections.abc import Iterable
from typing import NamedTuple, no_type_check

import numba
import numpy as np
from jaxtyping import Int

from gdp.base.clock import Clock
from gdp.base.kernels.options import BARE, INLINE
from gdp.base.kernels.struct import as_struct
from gdp.graph.groups import inverse
from gdp.methods.pipeline.down_sets import PipelineStage, cost_of
from gdp.methods.pipeline.lattice import StageProgram
from gdp.methods.pipeline.lattice_kernels import (
    ZERO,
    add_element,
    busiest_lane_s,
    element_bit,
    open_at_empty,
    window_bits,
)

_TARGETS = (1.02, 1.1, 1.5, 3.0)  # over the work bound: narrow windows first
_QUICK_STEPS = 2e7  # so few are run without asking the clock before
_STEPS_PER_S = 2e8
_FEWEST_CUTS = 32
_REFINEMENTS = 4
_CHUNK_STEPS = 2e7  # between two looks at the clock


class OrderTable(NamedTuple):
    """The program along an order, and its scratch. Axes: M elements, X cuts, S states."""

    order: np.ndarray  # [M]
    cut: np.ndarray  # [X + 1] prefixes after which a stage may end: ascending from 0 to M, M + 1
    window: np.ndarray  # [X, V] the states that each may be reached in
    best: np.ndarray  # [X, S] the least dearest stage
    origin: np.ndarray  # [X, S] the cut before the last stage, -1 where a device is left unused
    taken: np.ndarray  # [X, S] the group of the last stage, or the class of the unused device
    live: np.ndarray  # [S]
    count: np.ndarray  # pyright: ignore[reportIncompatibleMethodOverride] # [H] pins in the stage
    tail_in: np.ndarray  # [H]
    has_shared: np.ndarray  # [K]
    work: np.ndarray  # [C]
    is_barred: np.ndarray  # [C]
    paid: np.ndarray  # [R]
    rest: np.ndarray  # [R]
    phi: np.ndarray  # [Q]


as_struct(OrderTable)


def best_linear(
    program: StageProgram,
    orders: Iterable[Int[np.ndarray, "M"]],
    bound_s: float,
    clock: Clock,
    best: list[PipelineStage] | None = None,
    whole_steps: float = np.inf,
) -> list[PipelineStage] | None:
    """The best of `best` and the best pipelines along the orders; None where none fits.

    Args:
        program: Of the problem.
        orders: Of the elements; at least one is tried, however little time there is.
        bound_s: No pipeline's dearest stage is cheaper.
        clock: Ends the search.
        best: Known stages.
        whole_steps: An order is cut everywhere where that takes at most so many inner steps.
    """
    for n, order in enumerate(orders):
        if n and clock.is_over():
            break
        best = _Order(program, order, bound_s, clock).improve(best, whole_steps)
    return best


class _Order:
    """One order, and how finely it is cut."""

    def __init__(
        self, program: StageProgram, order: Int[np.ndarray, "M"], bound_s: float, clock: Clock
    ) -> None:
        self.program, self.order = program, order
        self.lat, self.costs = program.lat, program.costs
        self.bound_s, self.clock = bound_s, clock
        self.barred = np.ascontiguousarray(self.costs.barred)
        self.work_s = np.ascontiguousarray(self.costs.work_s)

    def improve(
        self, best: list[PipelineStage] | None, whole_steps: float
    ) -> list[PipelineStage] | None:
        """The best of `best` and the pipelines along the order."""
        every = np.arange(len(self.order) + 1)
        if self._steps(len(every)) <= _QUICK_STEPS:
            return self._search(every, best)
        few = _FEWEST_CUTS
        while 2 * few <= len(self.order) and self._steps(2 * few) <= _QUICK_STEPS:
            few *= 2
        few = min(few, len(self.order))
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
        m, (num_states, num_groups) = len(self.order), self.lat.following.shape
        degree = len(self.lat.element_edge) / max(1, m)
        num_classes = len(self.lat.count)
        return num_cuts * (m * (degree + num_classes) + num_cuts / 2 * num_states * num_groups)

    def _even(self, few: int) -> Int[np.ndarray, "X"]:
        """Cuts spread evenly, half of them by work and half by length."""
        m = len(self.order)
        work = np.where(self.costs.barred, np.inf, self.costs.work_s).min(axis=0)[self.order]
        total = np.cumsum(np.where(np.isfinite(work), work, 0.0))
        by_work = np.searchsorted(total, np.linspace(0.0, float(total[-1]), few // 2 + 1))
        by_length = np.linspace(0, m, few // 2 + 1).astype(np.int64)
        return np.unique(np.concatenate([[0, m], np.minimum(by_work, m), by_length]))

    def _near(self, best: list[PipelineStage], few: int) -> Int[np.ndarray, "X"]:
        """Even cuts, and as many around the places where the stages of a pipeline end."""
        m = len(self.order)
        position = inverse(self.order)
        ends = np.array([int(position[stage.elements].max(initial=-1)) + 1 for stage in best])
        reach = max(1, few // (2 * max(1, len(ends))))
        around = (ends[:, None] + np.arange(-reach, reach + 1)[None]).ravel()
        return np.unique(np.concatenate([np.clip(around, 0, m), self._even(few)]))

    def _search(
        self, cuts: Int[np.ndarray, "X"], best: list[PipelineStage] | None
    ) -> list[PipelineStage] | None:
        """The best of `best` and the pipelines whose stages end at these cuts."""
        known_s = cost_of(best)
        targets = [f * self.bound_s for f in _TARGETS if f * self.bound_s < known_s]
        for target_s in [*targets, known_s]:
            better = self._below(cuts, target_s)
            if better is not None:
                return better
        return best

    def _below(self, cuts: Int[np.ndarray, "X"], target_s: float) -> list[PipelineStage] | None:
        """The best stages that end at these cuts, if they each take less than the target."""
        lat, num_states, num_classes = self.lat, len(self.lat.following), len(self.lat.count)
        windows = self.program.windows(target_s)
        x, h = len(cuts), len(lat.low)
        chain = OrderTable(
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
            push_cuts(lat, self.work_s, self.barred, chain, target_s, first, first + at_once)
            self.clock.charge(self._steps(x) / _STEPS_PER_S * min(1.0, at_once / x))
            if self.clock.is_over() and self._steps(x) > _QUICK_STEPS:
                break
        return self._stages(chain, cuts) if chain.best[-1].min() < target_s else None

    def _stages(self, chain, cuts: Int[np.ndarray, "X"]) -> list[PipelineStage]:
        """The stages of the best pipeline along the order, first to last."""
        k, s = len(cuts) - 1, int(np.argmin(chain.best[-1]))
        cost_s = float(chain.best[-1, s])
        stages: list[PipelineStage] = []
        while k > 0:
            c, j = int(chain.taken[k, s]), int(chain.origin[k, s])
            if j >= 0:
                stages.append(PipelineStage(self.order[cuts[j] : cuts[k]], c, cost_s))
                k = j
            s = int(self.lat.previous[s, c])
        return stages[::-1]


@numba.njit(**BARE)
@no_type_check
def fill_windows(lat, win, chain):
    """Fill in the window of every cut. Leaves the scratch of stages empty."""
    k, held = 0, 0
    open_at_empty(lat, chain.count, chain.tail_in, chain.paid, chain.rest)
    for q in range(chain.phi.size):
        chain.phi[q] = 0.0
    for i in range(lat.num_elements + 1):
        if chain.cut[k] == i:
            window_bits(win, chain.phi, chain.paid, chain.rest, held, chain.window[k])
            k += 1
        if i < lat.num_elements:
            x = chain.order[i]
            add_element(lat, x, chain.count, chain.tail_in, chain.paid, chain.rest)
            for q in range(chain.phi.size):
                chain.phi[q] += win.phi[q, x]
            held += lat.held_bytes[x]
    for edge in range(chain.count.size):
        chain.count[edge], chain.tail_in[edge] = 0, False


@numba.njit(**INLINE)
@no_type_check
def _grow_stage(lat, x, count, tail_in, paid):
    """Add element x to a stage and update its communication cost."""
    for k in range(lat.element_start[x], lat.element_start[x + 1]):
        edge = lat.element_edge[k]
        row = lat.row[edge]
        if count[edge] > 0:
            paid[row] -= lat.w_out[edge] if tail_in[edge] else lat.w_in[edge]
        count[edge] += 1
        if lat.tail[edge] == x:
            tail_in[edge] = True
        if not tail_in[edge]:
            paid[row] += lat.w_in[edge]
        elif count[edge] < lat.pins_of[edge]:
            paid[row] += lat.w_out[edge]


@numba.njit(**INLINE)
@no_type_check
def _cost(lat, group, work, barred, held, paid):
    """Seconds a sample of the stage on a group; inf where it may not be there."""
    c = lat.group_class[group]
    if barred[c] or held > lat.capacity_bytes[group]:
        return np.inf
    return busiest_lane_s(lat, group, work[c], paid)


@numba.njit(**BARE)
@no_type_check
def _live_states(lat, chain, k, target_s):
    """Fill `live` with the states of a cut that fewer devices do not reach as well; how many."""
    num_live = 0
    for s in range(chain.best.shape[1]):
        dominated = False
        for c in range(lat.count.size):
            before = lat.previous[s, c]
            if before >= 0 and chain.best[k, before] <= chain.best[k, s]:
                chain.best[k, s] = chain.best[k, before]
                chain.origin[k, s], chain.taken[k, s] = -1, c
                dominated = True
        if chain.best[k, s] < target_s and not dominated:
            chain.live[num_live] = s
            num_live += 1
    return num_live


@numba.njit(**BARE)
@no_type_check
def _hold(lat, chain, x, held):
    """The bytes of the stage with element x, which it now holds."""
    held += lat.held_bytes[x]
    for k in range(chain.has_shared.size):
        if not chain.has_shared[k] and lat.shared[k, x >> 6] & element_bit(x):
            chain.has_shared[k] = True
            held += lat.shared_bytes[k]
    return held


@numba.njit(**BARE)
@no_type_check
def _push(lat, chain, origin, end, num_live, held, target_s):
    """Improve the states of cut `end` by the stage that starts at cut `origin`."""
    for c in range(lat.group_class.size):
        cost = _cost(lat, c, chain.work, chain.is_barred, held, chain.paid)
        if cost >= target_s:
            continue
        for n in range(num_live):
            s = lat.following[chain.live[n], c]
            if s < 0 or chain.window[end, s >> 6] & element_bit(s) == ZERO:
                continue
            value = max(chain.best[origin, chain.live[n]], cost)
            if value < chain.best[end, s]:
                chain.best[end, s] = value
                chain.origin[end, s], chain.taken[end, s] = origin, c


@numba.njit(**BARE)
@no_type_check
def push_cuts(lat, work_s, barred, chain, target_s, first, end):
    """Start stages of less than `target_s` at the cuts first..end-1, in order."""
    last = chain.best.shape[0] - 1
    for j in range(first, min(end, last + 1)):
        for s in range(chain.best.shape[1]):  # what is known of the whole is a target for the rest
            target_s = min(target_s, chain.best[last, s])
        num_live = _live_states(lat, chain, j, target_s)
        if num_live == 0 or j == last:
            continue
        for c in range(chain.work.size):
            chain.work[c], chain.is_barred[c] = 0.0, False
        for r in range(chain.paid.size):
            chain.paid[r] = 0.0
        for k in range(chain.has_shared.size):
            chain.has_shared[k] = False
        held, k, stop = 0, j + 1, chain.cut[j]
        for i in range(chain.cut[j], lat.num_elements):
            x, stop = chain.order[i], i + 1
            _grow_stage(lat, x, chain.count, chain.tail_in, chain.paid)
            held = _hold(lat, chain, x, held)
            least = np.inf
            for c in range(chain.work.size):
                chain.work[c] += work_s[c, x]
                chain.is_barred[c] |= barred[c, x]
                if not chain.is_barred[c] and held <= lat.capacity_bytes[c]:
                    least = min(least, chain.work[c])
            if least >= target_s * lat.most:
                break
            if chain.cut[k] == i + 1:
                _push(lat, chain, j, k, num_live, held, target_s)
                k += 1
        for i in range(chain.cut[j], stop):
            x = chain.order[i]
            for k in range(lat.element_start[x], lat.element_start[x + 1]):
                chain.count[lat.element_edge[k]], chain.tail_in[lat.element_edge[k]] = 0, False
