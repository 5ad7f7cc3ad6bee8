"""Path relinking: parts of other placements replace parts of the best one where that is faster.

A placement that is decoded op by op goes wrong somewhere, and so does everything after it: as a
whole it may be twice as slow as its start, and still be right about half of the ops. So parts are
simulated. Glover, Laguna and Martí 2000, Control and Cybernetics 29(3); Resende et al. 2010, doi
10.1007/978-1-4419-1665-5_4. Axes: K placements, P parts, N ops, M of them.
"""

import numpy as np
from jaxtyping import Bool, Int

from gdp.base.clock import Clock
from gdp.methods.base import Assignment
from gdp.methods.priorities import RULES, RatedPlacements, evaluate_rules, rules_of, timing
from gdp.methods.scoring import Evaluated
from gdp.problem.problem import Problem

STAGES = ((1, 8), (16, 4), (32, 3))
"""(parts, placements): number of best other placements, and of parts of each."""
SIMULATED_OPS = 6_000_000
"""Most ops simulated by all parts: about a second on any graph."""


def relink(
    problem: Problem,
    rated: RatedPlacements,
    *,
    most: int | None = None,
    clock: Clock | None = None,
) -> Evaluated:
    """The best of the placements with parts of the others, never worse under its rule of priority.

    What the others place elsewhere is cut by where it is and where it would be, and along the order
    of decoding. Every part is tried by itself; those that do no harm are then taken together, the
    best first, as far as that is best. At most `most` simulations, and until the clock is over. The
    answer has no ranks: its value and overflow are those under its rule of priority.
    """
    devices, order = rated.device, np.lexsort((rated.seconds, rated.overflow))
    limit, clock = SIMULATED_OPS // problem.num_ops, clock or Clock(None)
    first = order[0]
    key = int(rated.overflow[first]), float(rated.seconds[first])
    best = Evaluated(Assignment(devices[first]), *key, evaluations=0)
    most = limit if most is None else min(limit, most)
    if most < len(rules_of(problem)):
        return best
    work = _Relinking(problem, devices[first], most)
    for parts, others in STAGES:
        for k in order[1 : 1 + others]:
            if not clock.is_over():
                work.take_from(devices[k], parts)
    return Evaluated(Assignment(work.device), *work.key, work.spent)


class _Relinking:
    """The placement so far."""

    def __init__(self, problem: Problem, device: Int[np.ndarray, "N"], most: int) -> None:
        self.problem, self.device, self.most = problem, device, most
        rated = evaluate_rules(problem, device[None])
        self.rules = (RULES[int(rated.rule[0])],)
        self.key = (int(rated.overflow[0]), float(rated.seconds[0]))
        self.spent = rated.evaluations

    def take_from(self, other: Int[np.ndarray, "N"], parts: int) -> None:
        """Adopt improving parts of another placement, unless they exceed the simulations."""
        masks = parts_of(self.problem, self.device, other, parts)
        if not len(masks) or self.spent + 2 * len(masks) > self.most:
            return
        keys = self._keys(np.where(masks, other, self.device))
        harmless = [
            k for k in sorted(range(len(masks)), key=keys.__getitem__) if keys[k] <= self.key
        ]
        if not harmless:
            return
        together = np.where(np.logical_or.accumulate(masks[harmless]), other, self.device)
        keys = self._keys(together)
        best = min(range(len(harmless)), key=keys.__getitem__)
        if keys[best] < self.key:
            self.device, self.key = together[best], keys[best]

    def _keys(self, devices: Int[np.ndarray, "P N"]) -> list[tuple[int, float]]:
        rated = evaluate_rules(self.problem, devices, self.rules)
        self.spent += rated.evaluations
        return list(zip(rated.overflow.tolist(), rated.seconds.tolist(), strict=True))


def parts_of(
    problem: Problem, device: Int[np.ndarray, "N"], other: Int[np.ndarray, "N"], count: int
) -> Bool[np.ndarray, "P N"]:
    """The ops of each part of the difference to another placement; whole groups.

    At least one part for each pair of devices that ops would leave and come to, each pair's ops cut
    along the order of decoding, so that there are about `count`.
    """
    order = timing(problem).order
    moved = order[device[order] != other[order]]
    pair = device[moved] * problem.num_devices + other[moved]
    pieces: list[Int[np.ndarray, "M"]] = []
    for each in np.unique(pair):
        ops = moved[pair == each]
        cuts = round(count * len(ops) / len(moved))
        pieces += np.array_split(ops, min(len(ops), max(1, cuts)))
    masks = np.zeros((len(pieces), problem.num_groups), dtype=bool)
    for mask, piece in zip(masks, pieces, strict=True):
        mask[problem.group[piece]] = True
    return masks[:, problem.group]
