"""List schedulers: HEFT and ETF, memory-constrained, in every form that is cheap to try."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

from gdp.clock import Clock
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.heuristics.reserved import reserved_assignments
from gdp.methods.ranks import as_rank, longest_s, mean_compute_s, upward_rank
from gdp.methods.repair import settle
from gdp.methods.scoring import compile_once, unsupported
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem


def heft(problem: Problem, search: Search) -> Answer:
    """Each op, by upward rank, on the device where it finishes first; the best of four forms.

    rank(i) = mean_d compute(i, d) + max over tensors t of i and their readers j of
    (mean_send(t) + rank(j)). Topcuoglu, Hariri and Wu 2002, doi 10.1109/71.993206. Forms: into idle
    gaps (insertion, as published) or after the last op (append); links always free (as published)
    or first come first served, as the simulator has them. A device on which the weights of an op's
    group and the tensors alive would not fit is passed over (Baechi: Jeon et al. 2020,
    doi 10.1145/3419111.3421302); the first op of a group that is placed decides for the group.
    Every form is simulated, with the order of its starts and with the upward ranks as priorities.
    Where memory is short, the last form is planned again under limits lowered by what its run
    missed, until it fits (`gdp.methods.heuristics.reserved`). O(E D).
    """
    if (refusal := unsupported(problem, "heft")) is not None:
        return refusal
    compile_once("heft", heft, problem.objective)
    clock = Clock(search.seconds)
    return settle(problem, search, heft_assignments(problem), "heft", clock)


def etf(problem: Problem, search: Search) -> Answer:
    """Always the ready op and device with the earliest start; ties by the longest way to the end.

    Hwang, Chow, Anger and Lee 1989, doi 10.1137/0218016, memory-constrained as `heft`. Starts come
    in order of time, so no op could ever use an earlier gap: the insertion form is the append form,
    and the two forms tried are free links (as published) and queueing links. O(E D + N D log N).
    """
    if (refusal := unsupported(problem, "etf")) is not None:
        return refusal
    compile_once("etf", etf, problem.objective)
    clock = Clock(search.seconds)
    return settle(problem, search, etf_assignments(problem), "etf", clock)


def heft_assignments(problem: Problem) -> Iterator[Assignment]:
    """The forms that `heft` chooses from."""
    from gdp.methods.heuristics.list_schedule_kernels import heft_plan

    a = arrays_of(problem)
    rank = upward_rank(problem)
    order = np.argsort(rank)
    for insertion, queues in ((True, False), (False, True), (True, True), (False, False)):
        plan = heft_plan(a, order, insertion, queues)
        yield from _ranked(plan.device, plan.start_s, rank)
    yield from reserved_assignments(problem, lambda less: heft_plan(less, order, True, True))


def etf_assignments(problem: Problem) -> Iterator[Assignment]:
    """The forms that `etf` chooses from."""
    from gdp.methods.heuristics.etf_kernels import etf_plan

    a = arrays_of(problem)
    level_s = longest_s(a, mean_compute_s(a), np.zeros(len(a.tensor_bytes)))
    rank = upward_rank(problem)
    for queues in (False, True):
        plan = etf_plan(a, level_s, queues)
        yield from _ranked(plan.device, plan.start_s, rank)
    yield from reserved_assignments(problem, lambda less: etf_plan(less, level_s, True))


def _ranked(
    device: Int[np.ndarray, "N"], start_s: Float[np.ndarray, "N"], rank: Int[np.ndarray, "N"]
) -> Iterator[Assignment]:
    yield Assignment(device, as_rank(start_s))
    yield Assignment(device, rank)
