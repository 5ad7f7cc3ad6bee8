"""Placements drawn from a policy and evaluated by the simulator, whole or with a gap decoded again.

A gap is a set of ops that is freed while everything else stays: large neighbourhood search, Shaw
1998, doi 10.1007/3-540-49481-2_30. Axes: K placements, N ops, D devices; wide N and D are those of
the padded network.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.methods.priorities import timing
from gdp.policy.advice import Advice, advice, with_incumbent
from gdp.policy.decode import Rollout, decode
from gdp.policy.evaluate import judge
from gdp.policy.model.config import Head
from gdp.policy.policy import Policy
from gdp.policy.view.batching import Batch
from gdp.policy.view.decode_problem import NUM_PAIR_FEATURES
from gdp.problem.arrays import Arrays, arrays_of
from gdp.problem.problem import Problem


def gap(
    problem: Problem, device: Int[np.ndarray, "N"], rng: np.random.Generator
) -> Int[np.ndarray, "M"]:
    """Ops to place anew; how many is uniform in its logarithm, up to a quarter of the graph.

    One in three: a window of the decode order, the part of a window on one device, or the ops
    nearest to one in the graph. Groups are freed whole, so that no member closes the gap.
    """
    n = problem.num_ops
    length = int(np.exp(rng.uniform(0.0, np.log(max(n / 4.0, 2.0)))))
    kind = int(rng.integers(3))
    if kind == 2:
        ops = _near(arrays_of(problem), int(rng.integers(n)), length)
    else:
        first = int(rng.integers(max(1, n - length + 1)))
        ops = timing(problem).order[first : first + length]
        if kind == 1:
            ops = ops[device[ops] == device[ops[int(rng.integers(len(ops)))]]]
    return np.flatnonzero(np.isin(problem.group, problem.group[ops]))


def _near(a: Arrays, op: int, length: int) -> Int[np.ndarray, "M"]:
    """The ops nearest to one, breadth first over producers and readers."""
    found, queue = {op}, [op]
    for here in queue:
        if len(found) >= length:
            break
        tensors = a.out_tensor[a.out_start[here] : a.out_start[here + 1]]
        makers = a.producer[a.in_tensor[a.in_start[here] : a.in_start[here + 1]]].tolist()
        readers = [r for t in tensors for r in a.use_op[a.use_start[t] : a.use_start[t + 1]]]
        for other in (*makers, *readers):
            if other not in found and len(found) < length:
                found.add(int(other))
                queue.append(int(other))
    return np.fromiter(found, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Episode:
    """Sampled placements of one problem, for one update."""

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
    """Advice with the best of some samples as the incumbent, if it is better."""
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
    """Inputs of the network and the decoder when a placement is forced."""
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
