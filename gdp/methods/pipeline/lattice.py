"""The arrays that the kernels over down-sets read: the graph, the stages' costs, the windows.

Axes: M elements, A arcs, W words of 64 elements, H hyperedges, P pins, C classes of devices,
K crews (the first C are single devices, one of each class), R rows of payments, L lanes, Z weights
that elements share, S states (devices used of each class), Q prices of the classes, I down-sets.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt

from gdp.graph.index import lists, starts
from gdp.methods.pipeline.crews import Crew
from gdp.methods.pipeline.elements import Contraction
from gdp.methods.pipeline.stage_costs import Lane, StageCosts
from gdp.problem.problem import Problem


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
    lane_share: Float[np.ndarray, "L"]  # of the samples: what each of the crew is busy with
    crew_class: Int[np.ndarray, "K"]  # whose costs a crew has
    crew_share: Float[np.ndarray, "K"]  # of the samples that each of a crew serves
    most: int  # devices of the largest crew
    count: Int[np.ndarray, "C"]  # pyright: ignore[reportIncompatibleMethodOverride] # devices
    stride: Int[np.ndarray, "K"]  # what one crew more adds to the number of a state
    can_add: UInt[np.ndarray, "K V"]  # bit s: state s leaves the devices of the crew
    following: Int[np.ndarray, "S K"]  # the state with one more crew, or -1
    previous: Int[np.ndarray, "S K"]


class Windows(NamedTuple):
    """Which down-sets a state may reach within a target time; see `window_bits`."""

    words: int
    phi: Float[np.ndarray, "Q M"]  # work at the cheapest class, at these prices
    phi_total: Float[np.ndarray, "Q"]
    used_cap: Float[np.ndarray, "S Q"]  # what the devices used can do, inf where prices do not say
    rest_cap: Float[np.ndarray, "S Q"]
    used_row: Float[np.ndarray, "S Q R"]  # price of what must have been paid
    rest_row: Float[np.ndarray, "S Q R"]
    used_bytes: Int[np.ndarray, "S"]
    rest_bytes: Int[np.ndarray, "S"]
    total_bytes: int


class Sets(NamedTuple):
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


class Opened(NamedTuple):
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


class Room(NamedTuple):
    """Scratch for the pairs of one down-set with those that contain it."""

    found: Int[np.ndarray, "I"]
    paid: Float[np.ndarray, "I R"]
    live: Int[np.ndarray, "S"]
    moves: Int[np.ndarray, "SK 3"]
    wanted: UInt[np.ndarray, "V"]
    leads: UInt[np.ndarray, "K V"]
    moved: UInt[np.ndarray, "V"]


def make_lattice(problem: Problem, contraction: Contraction, costs: StageCosts) -> Lattice:
    """The flat arrays of a contracted problem. O((N + E) log)."""
    m = contraction.num_elements
    pins = [edge.pins for edge in costs.edges]
    pin_edge = np.repeat(np.arange(len(pins)), [len(p) for p in pins])
    pin = np.array([e for p in pins for e in p], dtype=np.int64)
    element_start, order = lists(pin, m)
    next_start, arc = lists(contraction.src, m)
    counts = [len(devices) for devices in costs.devices]
    crews = costs.crews
    following, previous = state_moves(counts, [crew.counts for crew in crews])
    lanes = [_crew_lanes(costs, crew) for crew in crews]
    every = [lane for own in lanes for lane in own]
    held, shared, shared_bytes = _weights(problem, contraction)
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
        shared=shared,
        shared_bytes=shared_bytes,
        capacity_bytes=costs.memory_bytes[[crew.like for crew in crews]],
        lane_start=starts(np.array([len(own) for own in lanes])),
        lane_works=np.array([lane.works for lane, _ in every], dtype=bool),
        lane_row=np.array([lane.row for lane, _ in every], dtype=np.int64),
        lane_share=np.array([share for _, share in every], dtype=float),
        crew_class=np.array([crew.like for crew in crews], dtype=np.int64),
        crew_share=np.array([1.0 / crew.size for crew in crews]),
        most=max(crew.size for crew in crews),
        count=np.array(counts, dtype=np.int64),
        stride=np.array([crew.counts for crew in crews]) @ _strides(counts),
        can_add=as_bits(following.T >= 0),
        following=following,
        previous=previous,
    )


def _crew_lanes(costs: StageCosts, crew: Crew) -> list[tuple[Lane, float]]:
    """The lanes of the devices of a crew, and the share of the samples that each of them sees."""
    members = [c for c, count in enumerate(crew.counts) if count]
    shares = [(lane, 1.0 if lane.shared else 1.0 / crew.size) for c in members
              for lane in costs.lanes[c]]  # fmt: skip
    return list(dict.fromkeys(shares))


def _strides(counts: Sequence[int]) -> Int[np.ndarray, "C"]:
    """What one device more of each class adds to the number of a state."""
    sizes = np.array(counts, dtype=np.int64) + 1
    return np.array([int(np.prod(sizes[c + 1 :])) for c in range(len(sizes))], dtype=np.int64)


def state_moves(
    counts: Sequence[int], crews: Sequence[Sequence[int]]
) -> tuple[Int[np.ndarray, "S K"], Int[np.ndarray, "S K"]]:
    """(state with the devices of one crew more, with those of one less), -1 where there is none.

    States are numbered so that one device more is a larger number.

    >>> state_moves([1, 2], [[1, 0], [0, 1], [0, 2]])[0].tolist()
    [[3, 1, 2], [4, 2, -1], [5, -1, -1], [-1, 4, 5], [-1, 5, -1], [-1, -1, -1]]
    """
    used, needed = state_counts(counts), np.array(crews, dtype=np.int64)
    number, step = np.arange(len(used))[:, None], needed @ _strides(counts)
    can_add = (used[:, None, :] + needed <= np.array(counts)).all(axis=2)
    can_drop = (used[:, None, :] >= needed).all(axis=2)
    following = np.where(can_add, number + step, -1)
    previous = np.where(can_drop, number - step, -1)
    return following.astype(np.int64), previous.astype(np.int64)


def state_counts(counts: Sequence[int]) -> Int[np.ndarray, "S C"]:
    """The devices used of each class in each state."""
    every = list(itertools.product(*[range(count + 1) for count in counts]))
    return np.array(every, dtype=np.int64).reshape(len(every), len(counts))


def scratch(lat: Lattice) -> Opened:
    """Room for the hyperedges that are open at one down-set."""
    h, p = len(lat.low), len(lat.pin)
    return Opened(
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


def make_room(lat: Lattice, num_sets: int) -> Room:
    """Room for the pairs of one down-set with all others."""
    num_states, num_crews = lat.following.shape
    words = lat.can_add.shape[1]
    return Room(
        found=np.zeros(num_sets, dtype=np.int64),
        paid=np.zeros((num_sets, lat.num_rows)),
        live=np.zeros(num_states, dtype=np.int64),
        moves=np.zeros((lat.following.size, 3), dtype=np.int64),
        wanted=np.zeros(words, dtype=np.uint64),
        leads=np.zeros((num_crews, words), dtype=np.uint64),
        moved=np.zeros(words, dtype=np.uint64),
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


def _weights(
    problem: Problem, contraction: Contraction
) -> tuple[Int[np.ndarray, "M"], UInt[np.ndarray, "Z W"], Int[np.ndarray, "Z"]]:
    """(bytes that an element alone holds, elements of each shared weight, bytes of it)."""
    graph, m = problem.graph, contraction.num_elements
    holders: dict[int, set[int]] = {}
    largest: dict[int, int] = {}
    for op in np.flatnonzero(graph.weight_bytes).tolist():
        if contraction.element[op] < m:
            w = int(graph.weight_id[op])
            holders.setdefault(w, set()).add(int(contraction.element[op]))
            largest[w] = max(largest.get(w, 0), int(graph.weight_bytes[op]))
    held = np.zeros(m, dtype=np.int64)
    shared = [w for w, known in holders.items() if len(known) > 1]
    for w, known in holders.items():
        if len(known) == 1:
            held[next(iter(known))] += largest[w]
    masks = np.zeros((len(shared), (m + 63) // 64), dtype=np.uint64)
    for k, w in enumerate(shared):
        for e in holders[w]:
            masks[k, e >> 6] |= np.uint64(1 << (e & 63))
    return held, masks, np.array([largest[w] for w in shared], dtype=np.int64)
