"""The best value per device: how much the first answer loses under a limit per token."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

import numpy as np

from benchmarks.measured_world.serving_runs import LOOKED_AT, Predicted, Run
from benchmarks.tables import head


def value(run: Run, times: Run | Predicted) -> float:
    """Tokens a second that a GPU writes, of requests with such times."""
    request_s = times.first_s + (run.new - 1) * times.token_s
    return run.batch * run.new / request_s / run.tensor


class Choice(NamedTuple):
    """One load, and the row that is worth most by prediction."""

    load: tuple[object, ...]
    limit_s: float  # for a token
    regret: float  # of value without the limit
    broken: bool
    loss: float  # with the limit: 1 where it is broken
    most_gpus_loss: float  # of the largest layout with most requests

    @property
    def looked_at(self) -> bool:
        """Of a model that was looked at."""
        return self.load[0] in LOOKED_AT


def choices(runs: list[Run], answers: list[Predicted]) -> Iterator[Choice]:
    """The best value of each load of at least four rows, without and with a limit for the seconds
    of a token, the median of the measured ones; where no row is predicted to keep it the fastest.
    A measured token within 5% of the limit keeps it."""
    loads: dict[tuple[object, ...], list[tuple[Run, Predicted]]] = defaultdict(list)
    for run, answer in zip(runs, answers, strict=True):
        if answer.batch:
            loads[run.load].append((run, answer))
    for load_, rows in loads.items():
        if len(rows) < 4:
            continue
        limit_s = median(run.token_s for run, _ in rows)
        best = max(value(run, run) for run, _ in rows if run.token_s <= limit_s)

        def loss(run: Run, limit_s: float = limit_s, best: float = best) -> float:
            if run.token_s > 1.05 * limit_s:
                return 1.0
            return max(0.0, 1 - value(run, run) / best)

        first, _ = max(rows, key=lambda row: value(*row))
        keeps = [row for row in rows if row[1].token_s <= limit_s]
        chosen, _ = (
            max(keeps, key=lambda row: value(*row))
            if keeps
            else min(rows, key=lambda row: row[1].token_s)
        )
        largest, _ = max(rows, key=lambda row: (row[0].tensor, row[0].batch))
        yield Choice(
            load_, limit_s, 1 - value(first, first) / max(value(run, run) for run, _ in rows),
            chosen.token_s > 1.05 * limit_s, loss(chosen), loss(largest),
        )  # fmt: skip


def told_per_device(runs: list[Run], answers: list[Predicted]) -> Iterator[str]:
    """A line for each load, then means."""
    found = sorted(choices(runs, answers), key=lambda choice: [str(x) for x in choice.load])
    yield head(
        "model | GPU | engine | weights | prompt | new | limit ms | loss with the limit | "
        "without | most GPUs",
        left=4,
    )
    for choice in found:
        names = [str(x).rpartition("/")[2] or "16" for x in choice.load]
        lost = "broken" if choice.broken else f"{choice.loss:.0%}"
        yield (
            f"| {' | '.join(names)} | {1e3 * choice.limit_s:.1f} | {lost} | {choice.regret:.1%} | "
            f"{choice.most_gpus_loss:.0%} |"
        )
    yield ""
    groups = {
        "all": found,
        "looked at": [choice for choice in found if choice.looked_at],
        "not looked at": [choice for choice in found if not choice.looked_at],
        **{str(key): [c for c in found if key in c.load] for key in _keys(found)},
    }
    for name, own in groups.items():
        if own:
            yield (
                f"{name}: {len(own)} loads; with the limit {_mean(c.broken for c in own)} break "
                f"it, loss {_mean(c.loss for c in own)}; most GPUs "
                f"{_mean(c.most_gpus_loss for c in own)}; without a limit "
                f"{_mean(c.regret for c in own)} in the mean, "
                f"{max(c.regret for c in own):.1%} at worst"
            )


def _keys(found: list[Choice]) -> list[object]:
    """Models, GPUs and engines."""
    return [key for column in range(3) for key in sorted({str(c.load[column]) for c in found})]


def _mean(values: Iterable[float]) -> str:
    return f"{np.mean(list(values)):.1%}"
