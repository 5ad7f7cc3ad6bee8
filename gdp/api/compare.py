"""Several methods beside each other."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gdp.api.answer import compile_once
from gdp.api.ask import ask, require_answerable
from gdp.base.errors import InfeasibleError, MissingExtraError
from gdp.cluster.file import Machine
from gdp.costs.base import CostModel
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.question import solve
from gdp.question.models import Model
from gdp.question.question import Question
from gdp.question.result import Result, with_best_bound


def compare(
    model: Model,
    cluster: Machine,
    *,
    objective: str = "latency",
    names: Sequence[str] | None = None,
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    checkpoint: str | Path | None = None,
    constraints: Constraints | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Result | str]:
    """Place a model by several methods, each with the same budget.

    Args:
        model: As in `place`.
        cluster: As in `place`.
        objective: As in `place`.
        names: Methods to compare. Default: all.
        costs: As in `place`.
        search: Budget and seed of each method. Its simplicity is ignored: values are compared, and
            none is traded for fewer transfers.
        checkpoint: As in `place`.
        constraints: As in `place`.
        progress: Called with the name of each method before it runs.

    Returns:
        By method, its `Result`, or the reason (a string) why it has none. All results carry the
        best of the bounds, since a bound holds for every placement.

    Raises:
        ModelError, ClusterError, ValueError: As `place` does.
    """
    question = ask(
        model, cluster, objective=objective, costs=costs, search=search, checkpoint=checkpoint,
        constraints=constraints,
    )  # fmt: skip
    return compared(question, names, progress)


def compared(
    question: Question, names: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Result | str]:  # fmt: skip
    """Answers to a question by several methods; see `compare`."""
    search = replace(question.search, simplicity=0.0)
    questions = {
        name: replace(question, method=name, search=search)
        for name in names or solve.methods(question.checkpoint)
    }
    for asked in questions.values():
        require_answerable(asked)
    compile_once("auto", question.objective)
    rows: dict[str, Result | str] = {}
    for name, asked in questions.items():
        if progress is not None:
            progress(name)
        try:
            rows[name] = solve.solve(asked)
        except (InfeasibleError, MissingExtraError) as error:
            rows[name] = str(error)
    return with_best_bound(rows)
