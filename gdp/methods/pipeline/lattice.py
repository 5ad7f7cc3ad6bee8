"""Arrays of the kernels over down-sets: the graph, the stages' costs, windows of the states.

Windows say which down-sets can lie between the stages of a good pipeline, by LP duality. Prices
y_c >= 0 of the classes measure the work of an element as min over c of y_c work_s(c). If all stages
end within the target T, the devices used so far, u_c of each class, hold at most
T * sum of y_c u_c of that work, and the others must be able to hold the rest. (A stage that several
devices share is split among them, which the same sum allows.) So each state reaches few down-sets
when the target is close to the optimum, whatever their number in all.

Axes: M elements, A arcs, W words of 64 elements, H hyperedges, P pins, C classes of devices,
K device groups (the first C are single devices, one of each class), R rows of payments, L lanes,
Z weights that elements share, S states (devices used of each class), V words of 64 states, Q prices
of the classes, I down-sets.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from gdp.bounds.loads import owned_weights
from gdp.graph.groups import lists, starts
from gdp.methods.pipeline.elements import Contraction
from gdp.methods.pipeline.stage_costs import Lane, StageCosts, largest_groups
from gdp.problem.problem import Problem

_RATIOS = (0.0, 0.1, 0.5, 0.9, 1.0)  # quantiles of the classes' relative speeds to price at
_SLACK = 1.0 + 1e-9  # rounding must not exclude the optimum
_UNLIMITED = np.int64(1) << np.int64(62)


class Lattice(NamedTuple):
    """A contracted graph and its stages' costs."""

    num_elements: int
    num_words: int
    num_rows: int
    missing: Int[np.ndarray, "M"]  # predecessors of each element
    next_start: Int[np.ndarray, "M+1"]
    next: Int[np.ndarray, "A"]
    element_start: Int[np.ndarray, "M+1"]
    element_edge: Int[np.ndarray, "P"]  # the hyperedges of an element
    pin_start: Int[np.ndarray, "H+1"]
    pin: Int[np.ndarray, "P"]  # ascending for each hyperedge
    pins_of: Int[np.ndarray, "H"]  # pins, with those outside the lattice
    low: Int[np.ndarray, "H"]  # 1 where a graph input makes the tensor: below every down-set
    high: Int[np.ndarray, "H"]  # 1 where a graph output reads it: in no down-set
    tail: Int[np.ndarray, "H"]  # -1 for a graph input
    row: Int[np.ndarray, "H"]
    w_in: Float[np.ndarray, "H"]
    w_out: Float[np.ndarray, "H"]
    held_bytes: Int[np.ndarray, "M"]
    shared: UInt[np.ndarray, "Z W"]  # the elements that hold a shared weight
    shared_bytes: Int[np.ndarray, "Z"]
    capacity_bytes: Int[np.ndarray, "K"]
    lane_start: Int[np.ndarray, "K+1"]
    lane_works: Bool[np.ndarray, "L"]
    lane_row: Int[np.ndarray, "L"]
    lane_share: Float[np.ndarray, "L"]  # of the samples: what each of the group is busy with
    group_class: Int[np.ndarray, "K"]  # whose costs a group has
    group_share: Float[np.ndarray, "K"]  # of the samples that each of a group serves
    most: int  # devices of the largest group
    count: Int[np.ndarray, "C"]  # pyright: ignore[reportIncompatibleMethodOverride] # devices
    following: Int[np.ndarray, "S K"]  # the state with one more group, or -1
    previous: Int[np.ndarray, "S K"]


class StateWindows(NamedTuple):
    """Limits of the down-sets that a state may reach in a target time; see `window_bits`."""

    words: int
    phi: Float[np.ndarray, "Q M"]  # work at the cheapest class, at these prices
    phi_total: Float[np.ndarray, "Q"]
    used_cap: Float[np.ndarray, "S Q"]  # what the devices used can do, inf where prices do not say
    rest_cap: Float[np.ndarray, "S Q"]
    used_row: Float[np.ndarray, "S Q R"]  # price of all that must have been paid
    rest_row: Float[np.ndarray, "S Q R"]
    used_bytes: Int[np.ndarray, "S"]
    rest_bytes: Int[np.ndarray, "S"]
    total_bytes: int


class DownSets(NamedTuple):
    """Down-sets, sorted so that subsets come first: the empty one first, the full one last."""

    bits: UInt[np.ndarray, "I W"]
    window: UInt[np.ndarray, "I V"]  # bit s: state s may be reached
    base: Float[np.ndarray, "I R"]
    least_s: Float[np.ndarray, "I"]  # work at every element's fastest class
    work_s: Float[np.ndarray, "I C"]
    barred: Int[np.ndarray, "I C"]  # elements that may not be on the class
    held: Int[np.ndarray, "I"]
    first: Int[np.ndarray, "S"]  # the first and last down-set of each state's window
    last: Int[np.ndarray, "S"]


class OpenEdges(NamedTuple):
    """Scratch: the hyperedges that are open at one down-set."""

    row: Int[np.ndarray, "H"]
    never_closes: Bool[np.ndarray, "H"]
    w_in: Float[np.ndarray, "H"]
    w_out: Float[np.ndarray, "H"]
    tail_word: Int[np.ndarray, "H"]
    tail_mask: UInt[np.ndarray, "H"]  # 0 where the tail is inside
    start: Int[np.ndarray, "H+1"]
    word: Int[np.ndarray, "P"]  # the pins that are not in the down-set
    mask: UInt[np.ndarray, "P"]


class PairScratch(NamedTuple):
    """Scratch for the pairs of one down-set with those that contain it."""

    found: Int[np.ndarray, "I"]
    paid: Float[np.ndarray, "I R"]
    live: Int[np.ndarray, "S"]
    moves: Int[np.ndarray, "SK 3"]
    wanted: UInt[np.ndarray, "V"]


def make_lattice(problem: Problem, contraction: Contraction, costs: StageCosts) -> Lattice:
    """The flat arrays of a contracted problem. O((N + E) log)."""
    m = contraction.num_elements
    pins = [edge.pins for edge in costs.edges]
    pin_edge = np.repeat(np.arange(len(pins)), [len(p) for p in pins])
    pin = np.array([e for p in pins for e in p], dtype=np.int64)
    element_start, order = lists(pin, m)
    next_start, arc = lists(contraction.src, m)
    counts = [len(devices) for devices in costs.devices]
    groups = costs.groups
    following, previous = state_moves(counts, [group.counts for group in groups])
    # (lane, share of the samples that it sees) of the devices of each group, each once.
    lanes: list[list[tuple[Lane, float]]] = []
    for group in groups:
        own = [lane for c, count in enumerate(group.counts) if count for lane in costs.lanes[c]]
        shares = [(lane, 1.0 if lane.shared else 1.0 / group.size) for lane in own]
        lanes.append(list(dict.fromkeys(shares)))
    every = [lane for own in lanes for lane in own]
    held, shared = owned_weights(problem, contraction.element, m)
    holds = np.zeros((len(shared), m), dtype=bool)
    for k, (_, elements) in enumerate(shared):
        holds[k, list(elements)] = True
    low = np.array([edge.tail < 0 for edge in costs.edges], dtype=np.int64)
    high = np.array([edge.read_outside for edge in costs.edges], dtype=np.int64)
    size = np.array([len(p) for p in pins], dtype=np.int64)
    return Lattice(
        num_elements=m,
        num_words=(m + 63) // 64,
        num_rows=costs.num_rows,
        missing=np.bincount(contraction.dst, minlength=m).astype(np.int64),
        next_start=next_start,
        next=contraction.dst[arc],
        element_start=element_start,
        element_edge=pin_edge[order],
        pin_start=starts(size),
        pin=pin,
        pins_of=size + low + high,
        low=low,
        high=high,
        tail=np.array([edge.tail for edge in costs.edges], dtype=np.int64),
        row=np.array([edge.row for edge in costs.edges], dtype=np.int64),
        w_in=np.array([edge.w_in for edge in costs.edges], dtype=float),
        w_out=np.array([edge.w_out for edge in costs.edges], dtype=float),
        held_bytes=held,
        shared=as_bits(holds),
        shared_bytes=np.array([size for size, _ in shared], dtype=np.int64),
        capacity_bytes=costs.memory_bytes[[group.like for group in groups]],
        lane_start=starts(np.array([len(own) for own in lanes])),
        lane_works=np.array([lane.works for lane, _ in every], dtype=bool),
        lane_row=np.array([lane.row for lane, _ in every], dtype=np.int64),
        lane_share=np.array([share for _, share in every], dtype=float),
        group_class=np.array([group.like for group in groups], dtype=np.int64),
        group_share=np.array([1.0 / group.size for group in groups]),
        most=max(group.size for group in groups),
        count=np.array(counts, dtype=np.int64),
        following=following,
        previous=previous,
    )


def state_moves(
    counts: Sequence[int], groups: Sequence[Sequence[int]]
) -> tuple[Int[np.ndarray, "S K"], Int[np.ndarray, "S K"]]:
    """(state with the devices of one group more, with those of one less), -1 where there is none.

    States are numbered so that one device more is a larger number.

    >>> state_moves([1, 2], [[1, 0], [0, 1], [0, 2]])[0].tolist()
    [[3, 1, 2], [4, 2, -1], [5, -1, -1], [-1, 4, 5], [-1, 5, -1], [-1, -1, -1]]
    """
    used, needed = state_counts(counts), np.array(groups, dtype=np.int64)
    sizes = np.array([*counts, 0], dtype=np.int64) + 1
    number, step = np.arange(len(used))[:, None], needed @ np.cumprod(sizes[::-1])[-2::-1]
    can_add = (used[:, None, :] + needed <= np.array(counts)).all(axis=2)
    can_drop = (used[:, None, :] >= needed).all(axis=2)
    following = np.where(can_add, number + step, -1)
    previous = np.where(can_drop, number - step, -1)
    return following.astype(np.int64), previous.astype(np.int64)


def state_counts(counts: Sequence[int]) -> Int[np.ndarray, "S C"]:
    """The devices used of each class in each state."""
    every = list(itertools.product(*[range(count + 1) for count in counts]))
    return np.array(every, dtype=np.int64).reshape(len(every), len(counts))


def open_edges_scratch(lat: Lattice) -> OpenEdges:
    """Empty arrays for the hyperedges that are open at one down-set."""
    h, p = len(lat.low), len(lat.pin)
    return OpenEdges(
        row=np.zeros(h, dtype=np.int64),
        never_closes=np.zeros(h, dtype=bool),
        w_in=np.zeros(h),
        w_out=np.zeros(h),
        tail_word=np.zeros(h, dtype=np.int64),
        tail_mask=np.zeros(h, dtype=np.uint64),
        start=np.zeros(h + 1, dtype=np.int64),
        word=np.zeros(p + 1, dtype=np.int64),
        mask=np.zeros(p + 1, dtype=np.uint64),
    )


def pair_scratch(lat: Lattice, num_sets: int) -> PairScratch:
    """Empty arrays for the pairs of one down-set with all others."""
    num_states = len(lat.following)
    return PairScratch(
        found=np.zeros(num_sets, dtype=np.int64),
        paid=np.zeros((num_sets, lat.num_rows)),
        live=np.zeros(num_states, dtype=np.int64),
        moves=np.zeros((lat.following.size, 3), dtype=np.int64),
        wanted=np.zeros((num_states + 63) // 64, dtype=np.uint64),
    )


def as_bits(flags: Bool[np.ndarray, "X S"]) -> UInt[np.ndarray, "X V"]:
    """Rows of flags as bit vectors.

    >>> as_bits(np.array([[True, False, True]]))
    array([[5]], dtype=uint64)
    """
    rows, size = flags.shape
    packed = np.zeros((rows, (size + 63) // 64), dtype=np.uint64)
    for s in range(size):
        packed[flags[:, s], s >> 6] |= np.uint64(1 << (s & 63))
    return packed


def class_prices(costs: StageCosts) -> Float[np.ndarray, "Q C"]:
    """Prices worth trying, at a few ratios of speeds; inf: left out.

    Of up to three classes every set, of more each alone and all together.
    """
    num_classes = len(costs.devices)
    tried: list[tuple[float, ...]] = []
    for size in range(1, num_classes + 1) if num_classes <= 3 else (1, num_classes):
        for chosen in itertools.combinations(range(num_classes), size):
            for quantile in _RATIOS if size > 1 else (0.5,):
                prices = np.full(num_classes, np.inf)
                for c in chosen:
                    prices[c] = _ratio(costs, chosen[0], c, quantile)
                if tuple(prices) not in tried and (prices > 0).all():
                    tried.append(tuple(prices.tolist()))
    return np.array(tried)


def _ratio(costs: StageCosts, reference: int, c: int, quantile: float) -> float:
    """Speed of class c over that of the reference, at a quantile of the reference's work."""
    a, b = costs.work_s[reference], costs.work_s[c]
    known = (a > 0) & (b > 0) & ~costs.barred[reference] & ~costs.barred[c]
    if not known.any():
        return 1.0
    ratio, weight = a[known] / b[known], a[known]
    order = np.argsort(ratio)
    share = np.cumsum(weight[order]) / weight.sum()
    return float(ratio[order][min(np.searchsorted(share, quantile), len(order) - 1)])


def priced_work(costs: StageCosts, prices: Float[np.ndarray, "Q C"]) -> Float[np.ndarray, "Q M"]:
    """min over c of y_c work_s(c), over the classes that have a price; 0 where none may run it."""
    work = np.where(costs.barred, np.inf, costs.work_s)
    phi = np.empty((len(prices), work.shape[1]))
    for q, row in enumerate(prices):
        chosen = np.isfinite(row)
        phi[q] = (row[chosen, None] * work[chosen]).min(axis=0)
    return np.where(np.isfinite(phi), phi, 0.0)


def work_bound_s(costs: StageCosts, of_any_group: bool = False) -> float:
    """Lower bound of the dearest stage: work over speed, and the dearest single element on
    the largest group that may take it; work over speed alone also holds `of_any_group`."""
    prices = class_prices(costs)
    counts = np.array([len(devices) for devices in costs.devices])
    phi = priced_work(costs, prices).sum(axis=1)
    everywhere = np.isfinite(prices).all(axis=1)
    bound = float((phi[everywhere] / (prices[everywhere] @ counts)).max(initial=0.0))
    if of_any_group:
        return bound
    shared_s = costs.work_s / largest_groups(costs.groups, len(costs.devices))[:, None]
    work = np.where(costs.barred, np.inf, shared_s).min(axis=0)
    dearest = float(work[np.isfinite(work)].max(initial=0.0))
    return max(bound, dearest)


@dataclass(frozen=True, eq=False)
class StageProgram:
    """The program over down-sets: lattice, costs of stages, windows of any target."""

    lat: Lattice
    costs: StageCosts
    _prices: Float[np.ndarray, "Q C"]
    _used: Int[np.ndarray, "S C"]  # devices of each state
    _rest: Int[np.ndarray, "S C"]
    _any: StateWindows

    def windows(self, target_s: float) -> StateWindows:
        """The windows of every state for stages that take less than `target_s`."""
        phi = self._any.phi
        return self._any._replace(
            used_cap=_capacity(self._used, self._prices, phi, target_s),
            rest_cap=_capacity(self._rest, self._prices, phi, target_s),
        )


def make_stage_program(lat: Lattice, costs: StageCosts) -> StageProgram:
    """The program of a lattice."""
    counts = [len(devices) for devices in costs.devices]
    used = state_counts(counts)
    rest = np.array(counts) - used
    prices = class_prices(costs)
    phi = priced_work(costs, prices)
    unknown = np.zeros((len(used), len(prices)))
    windows = StateWindows(
        words=(len(used) + 63) // 64,
        phi=phi,
        phi_total=phi.sum(axis=1),
        used_cap=unknown,
        rest_cap=unknown,
        used_row=_payments(lat, used, prices),
        rest_row=_payments(lat, rest, prices),
        used_bytes=_memory(used, costs.memory_bytes),
        rest_bytes=_memory(rest, costs.memory_bytes),
        total_bytes=int(lat.held_bytes.sum()),
    )
    return StageProgram(lat, costs, prices, used, rest, windows)


def _capacity(
    have: np.ndarray, prices: np.ndarray, phi: np.ndarray, target_s: float
) -> Float[np.ndarray, "S Q"]:
    """Priced work of these devices within the target; inf where a device has no price."""
    finite = np.where(np.isfinite(prices), prices, 0.0)
    speed = have @ finite.T
    capacity = np.zeros_like(speed)
    capacity[speed > 0] = speed[speed > 0] * target_s * _SLACK  # the target may be inf
    capacity += phi.sum(axis=1) * 1e-12
    without_price = (have[:, None, :] > 0) & ~np.isfinite(prices)[None]
    return np.where(without_price.any(axis=2), np.inf, capacity)


def _payments(lat: Lattice, have: np.ndarray, prices: np.ndarray) -> Float[np.ndarray, "S Q R"]:
    """The least price of a paid second in each row: positive where all devices add it to work."""
    pays = np.zeros((have.shape[1], lat.num_rows), dtype=bool)
    for c in range(have.shape[1]):
        for lane in range(lat.lane_start[c], lat.lane_start[c + 1]):
            if lat.lane_works[lane] and lat.lane_row[lane] >= 0:
                pays[c, lat.lane_row[lane]] = True
    chosen = have > 0
    known = np.where(np.isfinite(prices), prices, 0.0)
    least = np.where(chosen[:, None, :], known[None], np.inf).min(axis=2)
    all_pay = np.all(pays[None] | ~chosen[:, :, None], axis=1)
    # Without any device nothing is paid: the least price would be inf.
    least[~chosen.any(axis=1)] = 0.0
    return least[:, :, None] * all_pay[:, None, :]


def _memory(have: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Bytes that these devices can hold, capped so that the sum cannot overflow."""
    total = [sum(int(n) * int(b) for n, b in zip(row, capacity, strict=True)) for row in have]
    return np.array([min(t, int(_UNLIMITED)) for t in total], dtype=np.int64)
