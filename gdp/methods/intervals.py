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

import numpy as np
from jaxtyping import Shaped

Join = Callable[[np.ndarray, np.ndarray], np.ndarray]
Row = list[tuple[int, int, int]]
"""(first element, element behind the last, device) of every interval."""


def best_row(
    order: Sequence[int],
    stage: Callable[[int], Shaped[np.ndarray, "C C"]],
    link: Shaped[np.ndarray, "D D C"] | None = None,
    join: Join = np.add,
) -> tuple[complex, Row]:
    """The value of the best cover and its intervals; none where no cover is finite. O(D C^2 + D^2
    C). Of equal covers one that ends on an early device, then one whose last interval is longest.

    Args:
        order: The devices. One may be left out, and one that stands twice may have two intervals.
        stage: Cost of the interval from a place to a later one on a device, infinite elsewhere;
            complex numbers are ordered by their real parts first.
        link: Cost of going over from one device to another at a place; None: nothing.
        join: The sum of the costs, or their maximum.

    >>> work = np.array([[np.inf, 2.0, 5.0], [np.inf, np.inf, 3.0], [np.inf] * 3])
    >>> best_row([0, 1], lambda device: work, join=np.maximum)
    ((3+0j), [(0, 1, 0), (1, 2, 1)])
    """
    return next(best_rows([order], stage, link, join))


def best_rows(
    orders: Iterable[Sequence[int]],
    stage: Callable[[int], Shaped[np.ndarray, "C C"]],
    link: Shaped[np.ndarray, "D D C"] | None = None,
    join: Join = np.add,
    every: bool = False,
) -> Iterator[tuple[complex, Row]]:
    """`best_row` of each order in turn, of those in which `every` device has an interval if asked;
    what one begins with as the one before is kept, so that orders are best sorted."""
    best: list[np.ndarray] = []  # of each device as the last: cost of the elements before j
    back: list[tuple[np.ndarray, np.ndarray]] = []  # where its interval begins; the device before
    known: list[int] = []
    for order in orders:
        pairs = enumerate(zip(known, order, strict=False))
        shared = next((k for k, (a, b) in pairs if a != b), min(len(known), len(order)))
        del best[shared:], back[shared:]
        known = list(order)
        for k in range(shared, len(order)):
            stage_s = stage(order[k])
            begins = 0.0 if not every or k == 0 else np.inf
            heads = [np.where(np.arange(len(stage_s)) == 0, begins, np.inf)]
            heads += [
                np.full(len(stage_s), np.inf) if every and b < k - 1
                else best[b] if link is None else join(best[b], link[order[b], order[k]])
                for b in range(k)
            ]  # fmt: skip
            head, before = np.min(heads, axis=0), np.argmin(heads, axis=0) - 1
            values = join(head[:, None], stage_s)
            best.append(values.min(axis=0))
            back.append((values.argmin(axis=0), before))
        yield _traced(order, best, back, every)


def _traced(
    order: Sequence[int], best: list[np.ndarray], back: list[tuple[np.ndarray, np.ndarray]],
    every: bool,
) -> tuple[complex, Row]:  # fmt: skip
    """The value of the best cover under an order, and its intervals."""
    k = len(best) - 1 if every else int(np.argmin([values[-1] for values in best]))
    value, j = complex(best[k][-1]), len(best[k]) - 1
    row: Row = []
    while k >= 0 and np.isfinite(value):
        start = int(back[k][0][j])
        row.append((start, j, order[k]))
        j, k = start, int(back[k][1][start])
    return value, row[::-1]
