"""HSDAG as a placement method: trained from scratch on the problem at hand."""

from gdp.clock import Clock
from gdp.learn.hsdag.config import HsdagConfig
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.repair import settle
from gdp.methods.scoring import unsupported
from gdp.policy.model.config import Params
from gdp.problem.problem import Problem


def hsdag(
    problem: Problem,
    search: Search,
    config: HsdagConfig | None = None,
    params: Params | None = None,
) -> Answer:
    """The best placement met while HSDAG is trained on the problem (arXiv 2405.14185).

    From fresh weights, or from `params` of `gdp.learn.hsdag.train.pretrain`; evaluations and
    seconds are those of the training here. `search.start` is not read. Where memory overflows
    everywhere, its best placement is repaired.
    """
    if (refusal := unsupported(problem, "hsdag")) is not None:
        return refusal
    from gdp.learn.hsdag.train import train

    clock = Clock(search.seconds)
    told = search.progress

    def progress(drawn: int, best_s: float) -> None:
        if told is not None:
            told(_share(search, clock, drawn), best_s)

    found = train(
        problem, config, seed=search.seed, evaluations=search.evaluations, seconds=search.seconds,
        params=params, progress=progress,
    )  # fmt: skip
    if found.value_s == float("inf"):
        answer = settle(problem, search, [Assignment(found.last)], "hsdag")
        spent = answer.evaluations + found.evaluations
        return Answer(answer.assignment, reason=answer.reason, evaluations=spent)
    return Answer(
        found.assignment,
        reason=f"hsdag: first {problem.unit.text(found.first_s)}, best "
        f"{problem.unit.text(found.value_s)}, {found.groups.max() + 1} groups",
        evaluations=found.evaluations,
    )


def _share(search: Search, clock: Clock, drawn: int) -> float:
    """The share of the budget that is used."""
    shares = [0.0]
    if search.seconds:
        shares.append(clock.elapsed_s() / search.seconds)
    if search.evaluations:
        shares.append(drawn / search.evaluations)
    return min(1.0, max(shares))
