"""Trains the score of moves: `python -m pretrain.moves pretrain/moves.toml -o FOLDER`.

Searches on the training families tell which moves improve; the weights fitted to that are written
as a checkpoint with their curve. Validation families choose the step; test families are not used.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
import numpy as np

from benchmarks.policy.regimes import tiled_cluster
from gdp.checkpoint import save
from gdp.errors import GdpError
from gdp.files.reading import Kind, read_toml
from gdp.learn.instances import Instance, Problems, load_problems, make
from gdp.learn.moves import MoveFitConfig, Outcomes, fit, log_outcomes, sample, unscored_moves
from gdp.methods.annealing.move_score import MoveScoring, using, without_scores
from gdp.methods.base import Search
from gdp.methods.portfolio import HEURISTICS
from gdp.methods.scoring import Evaluated, best_of
from gdp.problem.problem import Problem

_KIND = Kind("recipe", GdpError, "pretrain/moves.toml is one")
TILED_CLUSTERS = 6


@dataclass(frozen=True)
class Counts:
    """Problems of each regime."""

    ample: int = 24
    tight: int = 24
    tiled: int = 8
    large: int = 8


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
    recipe = read_toml(str(recipe_file), _KIND, MoveRecipe)
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
