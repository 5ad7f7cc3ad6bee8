"""The placement of least period: the linear program of loads with whole placements.

The program is that of `gdp.bounds.load_program`, which is the simulator's period exactly. Memory is
there row by row (`gdp.bounds.load_memory`): where a solution overflows a device, the row that it
breaks is added and the program solved again, until a solution fits. What a training pipeline keeps
for the stages that follow has no row, so there the program stays a relaxation.

Axes: G groups, D devices.
"""

import numpy as np
from jaxtyping import Bool, Float

from gdp.bounds.load_memory import NO_MARKS, Marks
from gdp.bounds.load_program import build, group_seconds, least_whole
from gdp.methods.period.solution import UNIT, LoadSolution, read_solution
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.problem.symmetry import classes_of, links_alike, same

MOST_VARIABLES = 150_000
"""Above this the linear relaxation alone takes minutes."""


def too_large(problem: Problem) -> str:
    """How many variables, where they are too many; nothing where a solver gets through."""
    d = problem.num_devices
    count = problem.num_groups * d + problem.graph.num_tensors * d * (d - 1)
    return f"{count} variables" if count > MOST_VARIABLES else ""


def solve_period(
    problem: Problem,
    upper_s: float,
    seconds: float | None,
    marks: Marks = NO_MARKS,
    *,
    may: Bool[np.ndarray, "G D"] | None = None,
    relative_gap: float = 1e-6,
    nodes: int | None = None,
) -> LoadSolution:
    """The devices of the groups with the least period below `upper_s`, memory at the marks kept.

    With `may` groups go where it says; else anywhere that renaming devices does not make needless.
    """
    work_s = group_seconds(problem)
    finite = np.isfinite(upper_s)
    unit_s = (upper_s if finite else _any_upper_s(problem, work_s)) / UNIT
    model = build(problem, unit_s, marks)
    may = ~_renamed(problem, work_s) if may is None else may
    may = may & np.isfinite(work_s) & (work_s <= upper_s)
    possible = model.possible.copy()
    possible[: may.size] &= may.reshape(-1)
    model = model._replace(possible=possible)
    solution = least_whole(model, (0.0, upper_s / unit_s), seconds, relative_gap, nodes)
    return read_solution(solution, np.arange(may.size).reshape(may.shape), upper_s, 1.0 / unit_s)


def _any_upper_s(problem: Problem, work_s: Float[np.ndarray, "G D"]) -> float:
    """No period is longer than all work and all transfers on the slowest devices and links."""
    a = arrays_of(problem)
    most_s = np.where(np.isfinite(work_s), work_s, 0.0).max(axis=1).sum()
    openings = float(a.segment_s.max(initial=0.0)) * problem.num_ops
    sent_s = a.latency_s.max() + a.tensor_bytes / a.bytes_per_s.min()
    return float(most_s + openings + sent_s.sum() * problem.num_devices) or 1.0


def _renamed(problem: Problem, work_s: Float[np.ndarray, "G D"]) -> Bool[np.ndarray, "G D"]:
    """What exchanging equal devices makes needless: of the groups in order of work, the i-th is on
    one of the first i of them."""
    order = np.argsort(-np.where(np.isfinite(work_s), work_s, 0.0).max(axis=1), kind="stable")
    a, needless = arrays_of(problem), np.zeros(work_s.shape, dtype=bool)
    alike = links_alike(problem) & same(work_s, a.memory_bytes, a.segment_s)
    for devices in classes_of(alike):
        inside = [g for g in order.tolist() if np.isfinite(work_s[g, devices[0]])]
        for i, g in enumerate(inside[: len(devices)]):
            needless[g, devices[i + 1 :]] = True
    return needless
