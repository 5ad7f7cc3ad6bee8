"""Fits the score by which a search chooses its moves to the outcomes of moves on many problems.

A search chooses among moves of one problem, so pairs are learned from: of a move that improves
and one of the same problem that does not, the first shall score higher (the logistic loss of the
difference, as in RankNet, Burges et al. 2005, doi 10.1145/1102351.1102363). The score is one linear
function of the features for each kind of move, drawn together by a penalty on what sets them apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.clock import Clock
from gdp.methods.annealing.annealer import LatencyAnnealer, anneal
from gdp.methods.annealing.move_score import MoveScoring, score_by_hand, using
from gdp.methods.scoring import Evaluated
from gdp.methods.search.budget import SearchConfig
from gdp.methods.search.windows import TURN, WindowSearch
from gdp.problem.problem import Problem

_FEW, _PARTNERS = 3, 64  # moves that improve, and pairs of each, at least and at most


@dataclass(frozen=True)
class MoveFitConfig:
    """Data and fitting of a score of moves."""

    rounds: int = 2  # the first learns from moves drawn without a score, later ones from its own
    renew: int = 1  # accepted moves, after which the schedule is simulated anew while collecting
    rows: int = 2500  # moves of a problem and round that are kept
    pairs: int = 6000  # of a problem and round
    steps: int = 300  # of Adam on all pairs
    learning_rate: float = 0.03
    apart: float = 1e-3  # penalty on the squared distance of a kind's weights from the common ones
    small: float = 1e-4  # penalty on squared weights
    validate_every: int = 20


class Outcomes(NamedTuple):
    """Moves of one problem and what became of them. Axes: M moves, F features."""

    x: Float[np.ndarray, "M F"]
    kind: Int[np.ndarray, "M"]
    rise: Float[np.ndarray, "M"]  # of the energy, in shares of the start's value

    @property
    def improves(self) -> Bool[np.ndarray, "M"]:
        """True for moves that lower the energy by more than rounding."""
        return self.rise < -1e-12


def unscored_moves() -> MoveScoring:
    """Moves as they are drawn, described all the same: of two with equal scores the first."""
    hand = score_by_hand()
    zero = np.zeros_like(hand.weight)
    return replace(hand, weight=zero, draws=2, unscored=0.0)


def log_outcomes(
    problem: Problem, start: Evaluated, seed: int, evaluations: int, chosen: MoveScoring
) -> Outcomes:
    """Search for so many evaluations and keep what became of each move described."""
    log_rows = 40 * evaluations if problem.num_ops > SearchConfig().windows_above else evaluations
    with using(replace(chosen, log_rows=log_rows)):
        if problem.num_ops > SearchConfig().windows_above:
            chain = _search_windows(problem, start, seed, evaluations)
        else:
            chain = _search_rounds(problem, start, seed, evaluations)
    from gdp.methods.annealing.move_score_kernels import LOGGED, OUT_KIND, OUT_RISE

    q = chain.scorer
    count = int(q.number[LOGGED])
    outcome = q.log_outcome[:count]
    return Outcomes(
        q.log_x[:count].copy(), outcome[:, OUT_KIND].astype(np.int64), outcome[:, OUT_RISE].copy()
    )


def _search_rounds(
    problem: Problem, start: Evaluated, seed: int, evaluations: int
) -> LatencyAnnealer:
    chain = LatencyAnnealer(problem, start, seed)
    steps = chain.default.first_steps
    while chain.evaluations < evaluations:
        before = chain.evaluations
        anneal(chain, steps, chain.default, Clock(None), evaluations - chain.evaluations)
        if chain.evaluations == before:
            break  # there is nothing to move
        steps = int(steps * chain.default.growth)
    return chain


def _search_windows(
    problem: Problem, start: Evaluated, seed: int, evaluations: int
) -> LatencyAnnealer:
    search = WindowSearch(problem, start, seed)
    clock = Clock(None)
    for turn in range(max(1, evaluations // TURN)):
        if turn % 4 == 3:
            search.full_turn(clock, None)
        else:
            search.window_turn(clock, None)
        if search.evaluations >= evaluations:
            break
    return search.chain


def sample(outcomes: Outcomes, count: int, seed: int) -> Outcomes:
    """At most so many of the moves, at random."""
    total = len(outcomes.rise)
    if total <= count:
        return outcomes
    rows = np.sort(np.random.default_rng(seed).choice(total, count, replace=False))
    return Outcomes(*(column[rows] for column in outcomes))


class Pairs(NamedTuple):
    """Rows of moves of one problem: one that improves and one that does not. Axis: P pairs."""

    better: Int[np.ndarray, "P"]
    worse: Int[np.ndarray, "P"]
    weight: Float[np.ndarray, "P"]  # sums to one over each problem


def pairs_of(train: Sequence[Outcomes], count: int, seed: int) -> Pairs:
    """Up to about so many random pairs of each problem; rows count through all problems."""
    rng = np.random.default_rng(seed)
    columns, first = [], 0
    for outcomes in train:
        good, bad = np.flatnonzero(outcomes.improves), np.flatnonzero(~outcomes.improves)
        if len(good) >= _FEW and len(bad) > 0:
            each = int(np.clip(count // len(good), 1, _PARTNERS))
            better = np.repeat(good, each)
            worse = rng.choice(bad, len(better))
            weight = np.full(len(better), 1.0 / len(better))
            columns.append((first + better, first + worse, weight))
        first += len(outcomes.rise)
    return Pairs(*(np.concatenate(column) for column in zip(*columns, strict=True)))


class ScoreQuality(NamedTuple):
    """Success of a score in telling the moves that improve, in the mean over problems."""

    auc: float  # chance that one that improves scores above one that does not
    lift: float  # share that improves among the tenth that scores highest, over that among all
    gain_share: float  # of all gain, in that tenth


def quality(
    weight: Float[np.ndarray, "K F"], held: Sequence[Outcomes], z: Sequence[np.ndarray]
) -> ScoreQuality:
    """Quality of a score on problems with five moves that improve or more; `z` as `scaled`."""
    rows = []
    for outcomes, x in zip(held, z, strict=True):
        good = outcomes.improves
        if good.sum() < 5 or good.all():
            continue
        order = np.argsort(-(x * weight[outcomes.kind]).sum(axis=1), kind="stable")
        place = np.empty(len(order))
        place[order] = np.arange(len(order))[::-1]
        positives, negatives = good.sum(), (~good).sum()
        auc = (place[good].sum() - positives * (positives - 1) / 2) / (positives * negatives)
        gain = np.where(good, -outcomes.rise, 0.0)
        top = order[: max(1, len(order) // 10)]
        rows.append((auc, good[top].mean() / good.mean(), gain[top].sum() / gain.sum()))
    return ScoreQuality(*np.mean(rows if rows else np.full((1, 3), np.nan), axis=0))


def scaled(
    x: Float[np.ndarray, "M F"], mean: Float[np.ndarray, "F"], scale: Float[np.ndarray, "F"]
) -> Float[np.ndarray, "M F"]:
    """Features as the score takes them."""
    from gdp.methods.annealing.move_score_kernels import CLIP

    return np.clip((x - mean) / scale, -CLIP, CLIP)


def fit(
    train: Sequence[Outcomes], held: Sequence[Outcomes], config: MoveFitConfig
) -> tuple[MoveScoring, list[dict[str, float]]]:
    """(score, curve): the weights that tell moves of held-out problems apart best.

    Args:
        train: Outcomes to fit to, one item a problem.
        held: Outcomes of problems of other families, by which the step is chosen.
        config: Steps, rates and penalties.

    Returns:
        The score, and the curve: loss and `ScoreQuality` on both, by step of Adam.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from gdp.methods.annealing.moves_kernels import NUM_KINDS

    x = np.concatenate([item.x for item in train])
    mean = x.mean(axis=0)
    scale = np.maximum(x.std(axis=0), 1e-6)
    mean[0], scale[0] = 0.0, 1.0  # the constant
    train_z, held_z = ([scaled(o.x, mean, scale) for o in items] for items in (train, held))
    z, kind = np.concatenate(train_z), np.concatenate([o.kind for o in train])
    chosen = pairs_of(train, config.pairs, seed=0)
    better, worse = (jnp.asarray(z[rows], jnp.float32) for rows in (chosen.better, chosen.worse))
    better_kind, worse_kind = jnp.asarray(kind[chosen.better]), jnp.asarray(kind[chosen.worse])
    pair_weight = jnp.asarray(chosen.weight / chosen.weight.sum(), jnp.float32)

    def score(parameters: dict[str, jax.Array], x: jax.Array, kinds: jax.Array) -> jax.Array:
        every = x @ (parameters["common"] + parameters["own"]).T  # [P, K]
        return jnp.take_along_axis(every, kinds[:, None], axis=1)[:, 0]

    def loss(parameters: dict[str, jax.Array]) -> jax.Array:
        ahead = score(parameters, better, better_kind) - score(parameters, worse, worse_kind)
        small = config.small * (parameters["common"] ** 2).sum()
        apart = config.apart * (parameters["own"] ** 2).sum()
        return (pair_weight * jax.nn.softplus(-ahead)).sum() + small + apart

    shape = (NUM_KINDS, x.shape[1])
    parameters = {"common": jnp.zeros(shape[1]), "own": jnp.zeros(shape)}
    optimiser = optax.adam(optax.cosine_decay_schedule(config.learning_rate, config.steps))

    @jax.jit
    def update(parameters: dict, state: optax.OptState) -> tuple[dict, optax.OptState, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(parameters)
        changes, state = optimiser.update(gradient, state)
        return optax.apply_updates(parameters, changes), state, value  # type: ignore[return-value]

    state = optimiser.init(parameters)
    best, best_auc, curve = np.zeros(shape), -1.0, []
    for step in range(1, config.steps + 1):
        parameters, state, value = update(parameters, state)
        if step % config.validate_every and step != config.steps:
            continue
        weight = np.asarray(parameters["common"] + parameters["own"], dtype=np.float64)
        seen, unseen = quality(weight, train, train_z), quality(weight, held, held_z)
        curve.append(
            {"step": step, "loss": float(value)}
            | {f"train_{name}": float(v) for name, v in seen._asdict().items()}
            | {f"val_{name}": float(v) for name, v in unseen._asdict().items()}
        )
        if unseen.auc > best_auc:
            best, best_auc = weight, unseen.auc
    return MoveScoring(best, mean, scale), curve
