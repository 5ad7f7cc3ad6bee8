"""The cores that this process may use: fewer than the machine has, where an affinity says so."""

import os


def usable_cores() -> list[int]:
    """Ids of the cores that this process may run on, in order; never none."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))  # macOS and Windows know no affinity


def num_cores() -> int:
    """The cores that this process may run on, counted."""
    return len(usable_cores())
