"""The best way for each component of a pipeline, by branch and bound.

Components run one after the other, so that the seconds of a request are the sum of their own and
of the tensors between them; what they hold counts in each phase by itself, a phase for each
component: one that rests in host memory while others run leaves them its place on the card.

Axes: P phases, one for each component; M memories.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True, eq=False)
class Way:
    """One way to run a component: where its weights rest, and where it is computed."""

    seconds: float  # of one request: all passes, and the weights that move for them
    held_bytes: Int[np.ndarray, "P M"]
    first: int  # device that reads its inputs
    last: int  # device that makes its results
    moved_bytes: int = 0  # weights over links in one request


class HandOver(NamedTuple):
    """A tensor from one component to another."""

    sender: int
    receiver: int
    seconds: Float[np.ndarray, "D D"]  # of one request, from device i to device j


class Choice(NamedTuple):
    """The best way of each component; None where all together never fit."""

    ways: tuple[int, ...] | None
    seconds: float


def choose(
    ways: Sequence[Sequence[Way]], flows: Sequence[HandOver], memory_bytes: Int[np.ndarray, "M"]
) -> Choice:
    """The ways with the fewest seconds whose bytes fit in every phase; of equally quick ones, that
    which moves the fewest bytes, then holds the fewest.

    Exact: a partial choice is left only where its seconds and the least ones of all components that
    are open exceed those of a whole choice, or its bytes and the least that these hold do not fit.

    Args:
        ways: Of each component, in the order in which they run; one without any makes `None`.
        flows: Tensors between them.
        memory_bytes: Of each memory.
    """
    # The component with most to decide first.
    order = sorted(range(len(ways)), key=lambda c: -max((w.seconds for w in ways[c]), default=0.0))
    least_s = [min((w.seconds for w in ways[c]), default=np.inf) for c in order]
    if not all(ways):
        return Choice(None, np.inf)
    least_held = [np.min([w.held_bytes for w in ways[c]], axis=0) for c in order]
    rest_s = np.append(np.cumsum(least_s[::-1])[::-1], 0.0)
    rest_held = [sum(least_held[i:], np.zeros_like(least_held[0])) for i in range(len(order) + 1)]
    rank = [[(w.seconds, w.moved_bytes, int(w.held_bytes.sum())) for w in ways[c]] for c in order]
    sorted_ways = [sorted(range(len(row)), key=row.__getitem__) for row in rank]
    best, best_ways = (np.inf, 0, 0), tuple[int, ...]()
    chosen: dict[int, int] = {}

    def crossing_s(component: int, way: Way) -> float:
        """Seconds of tensors between a component and those that are chosen."""
        total = 0.0
        for flow in flows:
            if flow.receiver == component and flow.sender in chosen:
                sender = ways[flow.sender][chosen[flow.sender]]
                total += float(flow.seconds[sender.last, way.first])
            elif flow.sender == component and flow.receiver in chosen:
                receiver = ways[flow.receiver][chosen[flow.receiver]]
                total += float(flow.seconds[way.last, receiver.first])
        return total

    def descend(level: int, seconds: float, held: np.ndarray, moved: int) -> None:
        nonlocal best, best_ways
        if level == len(order):
            value = (seconds, moved, int(held.sum()))
            if value < best:
                best, best_ways = value, tuple(chosen[c] for c in range(len(ways)))
            return
        component = order[level]
        for w in sorted_ways[level]:
            way = ways[component][w]
            if seconds + way.seconds + rest_s[level + 1] > best[0] * (1 + 1e-12):
                break  # of more seconds, all that follow
            total = held + way.held_bytes
            if ((total + rest_held[level + 1]) > memory_bytes).any():
                continue
            own_s = seconds + way.seconds + crossing_s(component, way)
            if own_s + rest_s[level + 1] > best[0] * (1 + 1e-12):
                continue
            chosen[component] = w
            descend(level + 1, own_s, total, moved + way.moved_bytes)
            del chosen[component]

    descend(0, 0.0, np.zeros_like(rest_held[0]), 0)
    return Choice(best_ways if best[0] < np.inf else None, best[0])
