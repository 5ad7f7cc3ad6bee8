"""Choice of the move, of several, that a search simulates.

The score and the loop are in `gdp.methods.annealing.move_score_kernels`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import numpy as np

from gdp.problem.problem import Problem

if TYPE_CHECKING:  # the kernels load numba
    from gdp.methods.annealing.move_score_kernels import Scorer

_BUCKET_OPS, _BUCKETS = 4, (64, 1024)  # ops a bucket of time, and how few and many buckets
_REJECTED = 1 << 12  # rejected moves remembered

_SCORED: ContextVar[bool] = ContextVar("moves are scored", default=True)


@contextmanager
def moves_as_drawn() -> Iterator[None]:
    """Let searches inside the block simulate every move they draw, without a score."""
    token = _SCORED.set(False)
    try:
        yield
    finally:
        _SCORED.reset(token)


def new_scorer(problem: Problem) -> "Scorer":
    """A scorer that has seen no schedule."""
    from gdp.methods.annealing import move_score_kernels as rows

    n, d, groups = problem.num_ops, problem.num_devices, problem.num_groups
    buckets = int(np.clip(n // _BUCKET_OPS, *_BUCKETS))
    scorer = rows.Scorer(
        draws=rows.DRAWS if _SCORED.get() else 1,
        unscored=rows.UNSCORED,
        start_s=np.zeros(n),
        finish_s=np.zeros(n),
        latest_s=np.zeros(n),
        busy_until_s=np.zeros((d, buckets + 1)),
        next_s=np.zeros(d),
        number=np.zeros(6, np.int64),
        span_s=np.zeros(2),
        best_score=np.zeros(1),
        group=np.zeros(groups, np.int64),
        device=np.zeros(groups, np.int64),
        new_device=np.zeros(groups, np.int64),
        stamp=np.zeros(groups, np.int64),
        rejected=np.zeros(_REJECTED, np.uint64),
        mark=np.zeros(1, np.uint64),
    )
    restart_scorer(scorer)
    return scorer


def restart_scorer(scorer: "Scorer") -> None:
    """Take note that the placement at hand is another: its schedule is not known."""
    from gdp.methods.annealing.move_score_kernels import ACCEPTED, RENEW, USABLE, VERSION

    scorer.number[ACCEPTED] = RENEW
    scorer.number[USABLE] = 0
    scorer.number[VERSION] += 1
