"""Trains the score of moves: `python -m pretrain.moves pretrain/moves.toml -o FOLDER`.

Searches on the training families tell which moves improve; the weights fitted to that are written
as a checkpoint with their curve. Validation families choose the step; test families are not used.

A search chooses among moves of one problem, so pairs are learned from: of a move that improves
and one of the same problem that does not, the first shall score higher (the logistic loss of the
difference, as in RankNet, Burges et al. 2005, doi 10.1145/1102351.1102363). The score is one linear
function of the features for each kind of move, drawn together by a penalty on what sets them apart.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from jaxtyping import Bool, Float, Int

from benchmarks.policy.regimes import tiled_cluster
from gdp.checkpoint import save
from gdp.clock import Clock
from gdp.errors import GdpError
from gdp.files.reading import Kind, read_toml
from gdp.learn.instances import Instance, Problems, load_problems, make
from gdp.methods.annealing.annealer import LatencyAnnealer, anneal
from gdp.methods.annealing.move_score import MoveScoring, score_by_hand, using, without_scores
from gdp.methods.annealing.move_score_kernels import CLIP, LOGGED, OUT_KIND, OUT_RISE
from gdp.methods.annealing.moves_kernels import NUM_KINDS
from gdp.methods.base import Search
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.scoring import Evaluated, best_of
from gdp.methods.search.budget import SearchConfig
from gdp.methods.search.windows import TURN, WindowSearch
from gdp.problem.problem import Problem

RECIPE_KIND = Kind("recipe", GdpError, "pretrain/moves.toml is one")
TILED_CLUSTERS = 6
_FEW, _PARTNERS = 3, 64  # moves that improve, and pairs of each, at least and at most


@dataclass(frozen=True)
class Counts:
    """Problems of each regime."""

    ample: int = 24
    tight: int = 24
    tiled: int = 8
    large: int = 8


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


@dataclass(frozen=True)
class MoveRecipe:
    """Everything that decides the weights."""

    seed: int = 0
    corpus: str = "data/corpus"
    evaluations: int = 6000
    large_evaluations: int = 1500
    count: Counts = field(default_factory=Counts)
    fit: MoveFitConfig = field(default_factory=MoveFitConfig)


@dataclass(frozen=True)
class Case:
    """One problem to learn from; `cluster` as in the regimes of `benchmarks.policy`."""

    regime: str
    graph: str
    cluster: int
    memory: float = 0.0

    def problem(self, graphs: Problems) -> Problem:
        """The problem that the case names."""
        instance = Instance(self.graph, self.cluster, "latency", self.memory)
        tiled = self.regime == "tiled"
        cluster = tiled_cluster(self.cluster, graphs.graph(self.graph)) if tiled else None
        return make(instance, graphs.graph, cluster)


def spread(names: list[str], count: int, rng: np.random.Generator) -> list[str]:
    """So many names, family by family in turn."""
    families: dict[str, list[str]] = {}
    for name in rng.permutation(sorted(names)):
        families.setdefault(str(name).split("-")[0], []).append(str(name))
    found: list[str] = []
    while len(found) < count and any(families.values()):
        for family in rng.permutation(sorted(families)):
            if families[family] and len(found) < count:
                found.append(families[family].pop())
    return found


def cases(names: list[str], graphs: Problems, count: Counts, seed: int) -> list[Case]:
    """Problems of all regimes over the graphs named."""
    rng = np.random.default_rng(seed)
    size = {name: graphs.graph(name).num_ops for name in names}
    plain = [n for n in names if not n.startswith("tiled")]
    small = [n for n in plain if 80 <= size[n] <= 1000]
    tiled = [n for n in names if n.startswith("tiled") and 60 <= size[n] <= 3000]
    large = [n for n in plain if 1500 <= size[n] <= 9000]
    drawn = [Case("ample", n, int(rng.integers(1 << 20))) for n in spread(small, count.ample, rng)]
    for n in spread(small, count.tight, rng):
        memory = round(float(rng.uniform(1.1, 1.6)), 2)
        drawn.append(Case("tight", n, int(rng.integers(1 << 20)), memory))
    for n in spread(tiled, count.tiled, rng):
        drawn.append(Case("tiled", n, int(rng.integers(TILED_CLUSTERS))))
    for n in spread(large, count.large, rng):
        drawn.append(Case("large", n, int(rng.integers(1 << 20))))
    return drawn


def start_of(problem: Problem) -> Evaluated | None:
    """The best heuristic's placement; None where none fits."""
    search = Search(seconds=None)
    found = [
        answer.assignment
        for _, method in HEURISTICS
        if (answer := method(problem, search)).assignment is not None
    ]
    if not found:
        return None
    start = best_of(problem, found)
    return None if start.overflow_bytes > 0 else start


# What became of the moves of searches.


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


def outcomes_of(
    drawn: list[tuple[Case, Problem, Evaluated]], recipe: MoveRecipe, chosen: MoveScoring, turn: int
) -> list[Outcomes]:
    """What became of the moves of a search on each problem."""
    kept = []
    for case, problem, start in drawn:
        count = recipe.large_evaluations if problem.num_ops > 1000 else recipe.evaluations
        logged = log_outcomes(problem, start, recipe.seed + turn, count, chosen)
        if len(logged.rise) > 0:
            kept.append(sample(logged, recipe.fit.rows, recipe.seed))
        click.echo(
            f"{case.regime} {case.graph}: {len(logged.rise)} moves, "
            f"{100 * logged.improves.mean():.1f}% improve",
            err=True,
        )
    return kept


# The fit.


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


def draw_curve(curve: list[dict[str, float]]) -> bytes:
    """The curve as a picture."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True)
    for ax, keys in zip(axes, (("auc", "gain_share"), ("lift",)), strict=True):
        for key in keys:
            for side, style in (("train", "--"), ("val", "-")):
                values = [point[f"{side}_{key}"] for point in curve]
                ax.plot([p["step"] for p in curve], values, style, label=f"{side} {key}")
        ax.grid(alpha=0.3)
        ax.legend()
    axes[1].set_xlabel("step of Adam, all moves")
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=90)
    pyplot.close(figure)
    return picture.getvalue()


@click.command(help=__doc__)
@click.argument("recipe_file", type=Path)
@click.option("-o", "--out", type=Path, required=True, help="Folder of the checkpoint.")
def main(recipe_file: Path, out: Path) -> None:
    """Collect outcomes, fit, and again with the moves that the fitted score chooses."""
    recipe = read_toml(str(recipe_file), RECIPE_KIND, MoveRecipe)
    graphs = load_problems(recipe.corpus, random_graphs=0, min_ops=60, max_ops=9000)
    third = Counts(*(-(-n // 3) for n in vars(recipe.count).values()))
    problems = []
    for names, count in ((graphs.train, recipe.count), (graphs.validation, third)):
        with using(without_scores()):
            made = [
                (case, case.problem(graphs)) for case in cases(names, graphs, count, recipe.seed)
            ]
            begun = [(case, problem, start_of(problem)) for case, problem in made]
        problems.append([(c, p, s) for c, p, s in begun if s is not None])
    chosen, curve = unscored_moves(), []
    train: list[Outcomes] = []
    held: list[Outcomes] = []
    for turn in range(recipe.fit.rounds):
        chosen = replace(chosen, renew=recipe.fit.renew)
        train += outcomes_of(problems[0], recipe, chosen, turn)
        held += outcomes_of(problems[1], recipe, chosen, turn)
        chosen, points = fit(train, held, recipe.fit)
        curve += [{"round": turn, **point} for point in points]
        click.echo(json.dumps(points[-1]), err=True)
    tree = {"weight": chosen.weight, "mean": chosen.mean, "scale": chosen.scale}
    lines = "".join(json.dumps(point) + "\n" for point in curve)
    last = [point for point in curve if point["round"] == recipe.fit.rounds - 1]
    best = max(last, key=lambda point: point["val_auc"])
    save(
        out, tree, recipe=recipe_file.read_text(), kind="moves",
        meta={
            "name": "moves",
            "problems": {"train": len(problems[0]), "validation": len(problems[1])},
            "moves": {"train": sum(len(o.rise) for o in train),
                      "validation": sum(len(o.rise) for o in held)},
            "validation": best,
        },
        beside={"metrics.jsonl": lines.encode(), "curve.png": draw_curve(last)},
    )  # fmt: skip
    click.echo(f"wrote {out}: {json.dumps(best)}")


if __name__ == "__main__":
    main()
