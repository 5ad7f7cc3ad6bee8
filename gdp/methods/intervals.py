"""The best cover of a sequence by intervals, at most one for each device of an order.

    best(k, j) = min over i < j of join(head(k, i), stage(k, i, j))
    head(k, i) = 0 where i = 0, or min over b < k of join(best(b, i), link(b, k, i))

with k the device of the last interval: chains of tasks on chains of processors (Pinar and Aykanat
2004, doi 10.1016/j.jpdc.2004.05.003) with any costs of intervals. Programs that need more than a
table of these costs stand where they are used: `gdp.methods.heuristics.blocks_kernels` stops early
on sums that only grow, `gdp.methods.pipeline.orders` counts the devices used of each class.

Axes: C places to cut, both ends of the sequence among them, D devices.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Shaped

Join = Callable[[np.ndarray, np.ndarray], np.ndarray]
Row = list[tuple[int, int, int]]
"""(first element, element behind the last, device) of every interval."""
T = TypeVar("T")
EVEN_HALVINGS = 8  # of a limit, such as the share of memory that the fullest device may fill
Value = tuple[float, ...]
"""Parts of a cost, the most important first."""


def best_row(
    order: Sequence[int],
    stage: Callable[[int], Shaped[np.ndarray, "C C ..."]],
    link: Shaped[np.ndarray, "D D C ..."] | None = None,
    join: Join = np.add,
) -> tuple[Value, Row]:
    """The value of the best cover and its intervals; none where no cover is finite. O(D C^2 + D^2
    C). Of equal covers one that ends on an early device, then one whose last interval is longest.

    Args:
        order: The devices. One may be left out, and one that stands twice may have two intervals.
        stage: Cost of the interval from a place to a later one on a device, infinite elsewhere; a
            last axis has its parts, which are compared one after the other.
        link: Cost of going over from one device to another at a place; None: nothing.
        join: The sum of the costs, or their maximum.

    >>> work = np.array([[np.inf, 2.0, 5.0], [np.inf, np.inf, 3.0], [np.inf] * 3])
    >>> best_row([0, 1], lambda device: work, join=np.maximum)
    ((3.0,), [(0, 1, 0), (1, 2, 1)])
    """
    return next(best_rows([order], stage, link, join))


def best_rows(
    orders: Iterable[Sequence[int]],
    stage: Callable[[int], Shaped[np.ndarray, "C C ..."]],
    link: Shaped[np.ndarray, "D D C ..."] | None = None,
    join: Join = np.add,
    every: bool = False,
) -> Iterator[tuple[Value, Row]]:
    """`best_row` of each order in turn, of those in which `every` device has an interval if asked;
    what one begins with as the one before is kept, so that orders are best sorted."""
    best: list[np.ndarray] = []  # [C, parts] of each device as the last: cost of all before j
    back: list[tuple[np.ndarray, np.ndarray]] = []  # where its interval begins; the device before
    known: list[int] = []
    links = None if link is None else link.reshape(*link.shape[:3], -1)
    for order in orders:
        pairs = enumerate(zip(known, order, strict=False))
        shared = next((k for k, (a, b) in pairs if a != b), min(len(known), len(order)))
        del best[shared:], back[shared:]
        known = list(order)
        for k in range(shared, len(order)):
            costs = stage(order[k])
            costs = costs.reshape(*costs.shape[:2], -1)
            heads = np.full((k + 1, *costs.shape[1:]), np.inf)
            if not every or k == 0:
                heads[0, 0] = 0.0
            for b in range(k - 1 if every and k else 0, k):
                heads[b + 1] = (
                    best[b] if links is None else join(best[b], links[order[b], order[k]])
                )
            head, before = _least(heads)
            value, begin = _least(join(head[:, None], costs))
            best.append(value)
            back.append((begin, before - 1))
        yield _traced(order, best, back, every)


def _least(costs: Float[np.ndarray, "B C P"]) -> tuple[Float[np.ndarray, "C P"], np.ndarray]:
    """The least cost along the first axis by its first part, of equal ones by the next, and the
    first index that has it."""
    places = np.arange(costs.shape[1])
    index = costs[..., 0].argmin(axis=0)
    for p in range(1, costs.shape[2]):
        tied = (costs[..., :p] == costs[index, places, :p]).all(axis=2)
        index = np.where(tied, costs[..., p], np.inf).argmin(axis=0)
    return costs[index, places], index


def _traced(
    order: Sequence[int], best: list[np.ndarray], back: list[tuple[np.ndarray, np.ndarray]],
    every: bool,
) -> tuple[Value, Row]:  # fmt: skip
    """The value of the best cover under an order, and its intervals."""
    k = len(best) - 1 if every else int(_least(np.array([own[-1:] for own in best]))[1][0])
    value, j = tuple(best[k][-1].tolist()), len(best[k]) - 1
    row: Row = []
    while k >= 0 and np.isfinite(value[0]):
        start = int(back[k][0][j])
        row.append((start, j, order[k]))
        j, k = start, int(back[k][1][start])
    return value, row[::-1]


def tightened(
    most: float, plan_within: Callable[[float], T | None], halvings: int = EVEN_HALVINGS
) -> Iterator[T]:
    """Plans within tighter and tighter limits below `most`, by bisection; None is no plan."""
    least = 0.0
    for _ in range(halvings):
        middle = (least + most) / 2
        plan = plan_within(middle)
        if plan is None:
            least = middle
        else:
            most = middle
            yield plan
