"""Choice of the move, of several, that a search simulates: the weights of the score.

The features and the loop are in `gdp.methods.annealing.move_score_kernels`; the weights were fitted
to the outcomes of moves on the training families (`python -m pretrain.moves`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from gdp.checkpoint import load_arrays
from gdp.files.reading import data_path
from gdp.problem.problem import Problem

if TYPE_CHECKING:  # the kernels load numba
    from gdp.methods.annealing.move_score_kernels import Scorer

_BUCKET_OPS, _BUCKETS = 4, (64, 1024)  # ops a bucket of time, and how few and many buckets
_REJECTED = 1 << 12  # rejected moves remembered


@dataclass(frozen=True)
class MoveScoring:
    """Weights of a score of moves, and its use. Axes: K kinds of moves, F features."""

    weight: Float[np.ndarray, "K F"]
    mean: Float[np.ndarray, "F"]  # of the features
    scale: Float[np.ndarray, "F"]  # their standard deviations
    draws: int = 12  # moves drawn for each that is simulated
    unscored: float = 0.1  # share of steps whose move is drawn without a score
    renew: int = 16  # accepted moves, after which the schedule is simulated anew
    log_rows: int = 0  # simulated moves whose features and outcomes are kept, for training

    def __post_init__(self) -> None:
        if self.draws < 1 or self.renew < 1:
            raise ValueError(
                f"draws and renew must be at least 1, got {self.draws} and {self.renew}"
            )
        if not 0.0 <= self.unscored <= 1.0:
            raise ValueError(f"unscored must lie in [0, 1], got {self.unscored}")


_CHOSEN: ContextVar[MoveScoring | None] = ContextVar("move scoring", default=None)


def scoring() -> MoveScoring:
    """Scoring of moves in this context: by the shipped weights, unless `using` says otherwise."""
    return _CHOSEN.get() or shipped_scoring()


@contextmanager
def using(chosen: MoveScoring) -> Iterator[None]:
    """Let searches inside the block choose their moves by another score."""
    token = _CHOSEN.set(chosen)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


@lru_cache(maxsize=1)
def shipped_scoring() -> MoveScoring:
    """The weights that travel with gdp."""
    return load_scoring(data_path("checkpoints", "moves"))


def load_scoring(path: str | os.PathLike[str]) -> MoveScoring:
    """The weights of a checkpoint; raises `CheckpointError`."""
    from gdp.methods.annealing.move_score_kernels import NUM_FEATURES
    from gdp.methods.annealing.moves_kernels import NUM_KINDS

    shapes = {
        "weight": (NUM_KINDS, NUM_FEATURES), "mean": (NUM_FEATURES,), "scale": (NUM_FEATURES,),
    }  # fmt: skip
    arrays = load_arrays(path, shapes)
    return MoveScoring(arrays["weight"], arrays["mean"], arrays["scale"])


def without_scores() -> MoveScoring:
    """Moves as they are drawn."""
    return replace(score_by_hand(), draws=1)


def score_by_hand() -> MoveScoring:
    """A score without learning: slack gained less what is sent more, and idle time to spare."""
    from gdp.methods.annealing import move_score_kernels as rows
    from gdp.methods.annealing.moves_kernels import NUM_KINDS

    weight = np.zeros((NUM_KINDS, rows.NUM_FEATURES))
    weight[:, rows.LEAST_SLACK_GAINED] = 1.0
    weight[:, rows.TRANSFER_MORE] = -0.5
    weight[:, rows.LEAST_FIT] = 0.5
    weight[:, rows.LEAST_SLACK] = -0.3
    scale = np.full(rows.NUM_FEATURES, 4.0)
    return MoveScoring(weight, np.zeros(rows.NUM_FEATURES), scale, draws=8)


def new_scorer(problem: Problem, channels: int, chosen: MoveScoring) -> "Scorer":
    """A scorer that has seen no schedule."""
    from gdp.methods.annealing.move_score_kernels import NUM_FEATURES, Scorer

    n, d, groups = problem.num_ops, problem.num_devices, problem.num_groups
    buckets = int(np.clip(n // _BUCKET_OPS, *_BUCKETS))
    scorer = Scorer(
        draws=chosen.draws,
        unscored=chosen.unscored,
        renew=chosen.renew,
        weight=np.array(chosen.weight, dtype=np.float64),
        mean=np.array(chosen.mean, dtype=np.float64),
        per_scale=1.0 / np.array(chosen.scale, dtype=np.float64),
        start_s=np.zeros(n),
        finish_s=np.zeros(n),
        latest_s=np.zeros(n),
        ready_s=np.zeros(n),
        gap_s=np.zeros(n),
        busy_s=np.zeros(d),
        busy_until_s=np.zeros((d, buckets + 1)),
        next_s=np.zeros(d),
        channel_load=np.zeros(channels),
        held_bytes=np.zeros((d, buckets), np.int64),
        peak_bytes=np.zeros(d, np.int64),
        last_s=np.zeros(d),
        number=np.zeros(7, np.int64),
        span_s=np.zeros(2),
        x=np.zeros(NUM_FEATURES),
        best_x=np.zeros(NUM_FEATURES),
        best_score=np.zeros(1),
        group=np.zeros(groups, np.int64),
        device=np.zeros(groups, np.int64),
        new_device=np.zeros(groups, np.int64),
        stamp=np.zeros(groups, np.int64),
        rejected=np.zeros(_REJECTED, np.uint64),
        mark=np.zeros(1, np.uint64),
        log_x=np.zeros((chosen.log_rows, NUM_FEATURES)),
        log_outcome=np.zeros((chosen.log_rows, 3)),
    )
    restart_scorer(scorer)
    return scorer


def restart_scorer(scorer: "Scorer") -> None:
    """Take note that the placement at hand is another: its schedule is not known."""
    from gdp.methods.annealing.move_score_kernels import ACCEPTED, USABLE, VERSION

    scorer.number[ACCEPTED] = scorer.renew
    scorer.number[USABLE] = 0
    scorer.number[VERSION] += 1
