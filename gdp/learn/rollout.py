"""Placements drawn from a policy and judged by the simulator.

Axes: K placements, N ops, D devices; wide N and D are those of the padded network.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.policy.advice import Advice, advice, with_incumbent
from gdp.policy.decode import Rollout, decode
from gdp.policy.evaluate import judge
from gdp.policy.gaps import gap
from gdp.policy.model.head import Head
from gdp.policy.policy import Policy
from gdp.policy.view.batching import Batch
from gdp.policy.view.pair_features import NUM_PAIR_FEATURES
from gdp.problem.problem import Problem


@dataclass(frozen=True, eq=False)
class Episode:
    """What one update learns from, of one problem."""

    problem: Problem
    batch: Batch  # what the network read: the gradient needs it again
    rollout: Rollout
    free: Bool[np.ndarray, "K M"]  # where a choice was not forced; of labels, everywhere
    gaps: slice  # the rows that are the incumbent with a gap decoded again
    incumbent_s: float  # cost of the incumbent
    cost_s: Float[np.ndarray, "K"]  # value of the objective, raised where memory overflows
    feasible: np.ndarray  # [K] bool
    labelled: bool = False  # whether the last row follows a label


def sample(
    policy: Policy,
    problem: Problem,
    *,
    samples: int,
    seed: int,
    told: Advice | None = None,
    gaps: int = 0,
    threads: int = 1,
) -> Episode:
    """`samples` placements with all that was seen.

    `told` is advice around another incumbent than the best adviser. The last `gaps` rows are the
    incumbent with a gap each that is decoded again.
    """
    batch = policy.batch(problem, told)
    forced = np.zeros((0, problem.num_ops), dtype=np.int64)
    incumbent_s = np.nan
    if gaps:
        found = told or advice(problem)
        incumbent_s = float(found.cost_s[0])
        forced = with_gaps(problem, found.device[0], gaps, np.random.default_rng([seed, 5]))
    rollout = decode(
        policy.view(problem, told),
        policy.head_of(problem, batch),
        samples=samples,
        seed=seed,
        forced=forced,
        keep=True,
        pad=(len(batch.op_mask), len(batch.device_mask)),
        threads=threads,
    )
    cost_s, feasible = judge(problem, rollout.device)
    first = samples - len(forced)
    free = np.ones((samples, len(batch.op_mask)), dtype=bool)
    free[first : first + gaps, : problem.num_ops] = forced[:gaps] < 0
    rows = slice(first, first + gaps)
    return Episode(problem, batch, rollout, free, rows, incumbent_s, cost_s, feasible)


def with_label(
    policy: Policy, episode: Episode, label: Int[np.ndarray, "N"], told: Advice | None
) -> Episode:
    """The episode with one more row, which follows a label."""
    batch, followed = follow(policy, episode.problem, label[None], told, episode.batch)
    cost_s, feasible = judge(episode.problem, followed.device)
    old = episode.rollout
    return replace(
        episode,
        batch=batch,
        rollout=Rollout(
            *(np.concatenate(pair) for pair in zip(_parts(old), _parts(followed), strict=True))
        ),
        free=np.concatenate([episode.free, np.ones_like(episode.free[:1])]),
        cost_s=np.concatenate([episode.cost_s, cost_s]),
        feasible=np.concatenate([episode.feasible, feasible]),
        labelled=True,
    )


def _parts(rollout: Rollout) -> tuple[np.ndarray, ...]:
    """The arrays of a rollout that was kept, in the order of its fields."""
    kept = (rollout.taken, rollout.legal, rollout.feats)
    return (rollout.device, rollout.log_probability, *(part for part in kept if part is not None))


def with_gaps(
    problem: Problem, device: Int[np.ndarray, "N"], count: int, rng: np.random.Generator
) -> Int[np.ndarray, "K N"]:
    """Copies of a placement with a gap each: -1 where the policy is to choose."""
    table = np.repeat(device[None], count, axis=0)
    for row in table:
        row[gap(problem, device, rng)] = -1
    return table


def advance(policy: Policy, problem: Problem, told: Advice, *, samples: int, seed: int) -> Advice:
    """The same advice around the best of some samples, if that is better than the incumbent."""
    drawn = decode(
        policy.view(problem, told), policy.head(problem, told), samples=samples, seed=seed
    ).device
    cost_s, _ = judge(problem, drawn)
    row = int(np.argmin(cost_s))
    if cost_s[row] >= told.cost_s[0]:
        return told
    return with_incumbent(told, problem, drawn[row])


def follow(
    policy: Policy,
    problem: Problem,
    labels: Int[np.ndarray, "K N"],
    told: Advice | None = None,
    batch: Batch | None = None,
) -> tuple[Batch, Rollout]:
    """What the network reads and the decoder sees when it is made to follow placements."""
    batch = policy.batch(problem, told) if batch is None else batch
    return batch, decode(
        policy.view(problem, told),
        blank_head(problem),
        samples=len(labels),
        seed=0,
        forced=labels,
        keep=True,
        pad=(len(batch.op_mask), len(batch.device_mask)),
    )


def blank_head(problem: Problem) -> Head:
    """A head of zeros: following a label needs no scores."""
    n, d, width = problem.num_ops, problem.num_devices, 1
    return Head(
        node=np.zeros((n, width), np.float32),
        device=np.zeros((d, width), np.float32),
        feature=np.zeros((NUM_PAIR_FEATURES, width), np.float32),
        mixing=np.zeros((width, width), np.float32),
        bias=np.zeros(width, np.float32),
        out=np.zeros(width, np.float32),
    )
