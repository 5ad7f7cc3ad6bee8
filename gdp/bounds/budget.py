"""A proven lower bound, and the counted work that proving it may take."""

from dataclasses import dataclass

from gdp.base.clock import Clock

PATIENCE = 6.0
"""The clock ends a proof after so many times the seconds of an idle core."""
QUICK_OPS = 5_000
"""Of graphs of so many ops all quick bounds are computed, of larger ones those that the clock
allows beside work and critical path: the others take seconds together at 200,000 ops."""
_LEAST_CAP_S = 2.0
# Work of one idle core in a second.
_BRANCHES_PER_S = 150_000
_ENTRIES = 60_000  # of a matrix that HiGHS solves as a linear program, in about a second
_GROWTH = 1.6  # its seconds grow with this power of the entries: 97,000 take 3 s, 254,000 take 14 s
# Of a mixed-integer program: entries in a second before its first branch, and the share of the
# seconds that this may take. On a busy machine of loads 19,000 to 60,000 take 3 to 7 s, of paths
# 21,000 3 s, 28,000 1 or 8 s, 46,000 7 s, 60,000 over 40 s, 254,000 28 s. These vary more, so their
# share is the smaller one.
_LOADS, _PATHS = (4_000, 2.0), (6_000, 1.0)
_NODE_ENTRIES_PER_S = 300_000  # entries of the matrix times nodes of a search tree


@dataclass(frozen=True)
class Bound:
    """A proof that no placement is faster, in whatever order it runs."""

    value_s: float
    argument: str  # the proof, in words with figures


class WorkBudget:
    """Work in operations, as much as an idle core does in `seconds`, so that equal questions get
    equal bounds whatever the load of this machine."""

    def __init__(self, seconds: float, cap_s: float | None = None) -> None:
        self.seconds = max(0.0, seconds)
        self.clock = Clock(max(_LEAST_CAP_S, PATIENCE * seconds) if cap_s is None else cap_s)
        self.cut_short = False
        self.paths_unsolved = False  # the clock ended the linear program of paths

    @property
    def branches(self) -> int:
        """Branches of a branch and bound over the devices of a few ops."""
        return int(self.seconds * _BRANCHES_PER_S)

    @property
    def entries(self) -> int:
        """Entries of the largest linear program."""
        return int(self.seconds ** (1.0 / _GROWTH) * _ENTRIES)

    def programs(self, entries: int) -> int:
        """Number of linear programs of `entries` entries each."""
        return int((self.entries / max(1, entries)) ** _GROWTH)

    def nodes(self, entries: int, *, paths: bool = False) -> int:
        """Nodes of a mixed-integer program's search tree; 0 where its root alone is too much."""
        per_s, share = _PATHS if paths else _LOADS
        root_s = entries / per_s
        if root_s > share * self.seconds:
            return 0
        return max(1, int((self.seconds - root_s) * _NODE_ENTRIES_PER_S / max(1, entries)))

    def is_over(self) -> bool:
        """True once the clock has ended the proofs; recorded in `cut_short`."""
        self.cut_short |= self.clock.is_over()
        return self.cut_short

    def remaining_s(self) -> float:
        """Seconds before the clock ends it, at least the tenth that solvers take anyway."""
        return max(0.1, self.clock.remaining_s())
