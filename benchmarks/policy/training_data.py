"""What a recipe trains and validates on: graphs, families, and labels with their evaluations.

python -m benchmarks.policy.training_data [pretrain/recipes/base.toml ...]
"""

from collections import Counter
from collections.abc import Sequence

import click
import numpy as np

from gdp.learn.labels import Label, LabelStore, load_labels
from gdp.learn.problems import is_random, load_problems
from gdp.learn.recipe import load_recipe

RANDOM = ("layered", "series", "random_layered", "series_parallel")


def counts(path: str) -> list[str]:
    """What the recipe reads, as lines of text."""
    recipe, _ = load_recipe(path)
    data = recipe.data
    problems = load_problems(
        data.corpus, random_graphs=data.random_graphs, seed=data.graph_seed,
        min_ops=data.min_ops, max_ops=data.max_ops,
    )  # fmt: skip
    store = load_labels(data.labels)
    usable = set(data.graphs or problems.train)
    validation = set(problems.validation)
    graphs = len(usable)
    if data.random_graphs and not data.graphs:
        usable |= {i.graph for i in store.instances() if is_random(i.graph)}
    learnt = _of(store, usable - validation)
    held = _of(load_labels(data.held), validation) if data.held else _of(store, validation)
    held = held if data.held else held[: data.validation]
    models = [
        name for name in usable
        if name.split("-")[0] not in RANDOM and not name.startswith("tiled")
    ]  # fmt: skip
    families = {name.split("-")[0] for name in models}
    return [
        path,
        f"  graphs trained on: {graphs}, of them {len(models)} of models, {len(families)} families",
        f"  validation: {len(validation)} graphs of {len({n.split('-')[0] for n in validation})} "
        "families",
        f"  labels in {data.labels}: {len(store)}, {len(learnt)} used to train, "
        f"{len(held)} to validate",
        f"  evaluations a training label: {_spread(learnt)}",
        f"  evaluations a validation label: {_spread(held)}",
    ]


def _of(store: LabelStore, graphs: set[str]) -> list[Label]:
    found = [store.get(i) for i in store.instances() if i.graph in graphs]
    return [label for label in found if label is not None]


def _spread(labels: Sequence[Label]) -> str:
    if not labels:
        return "none"
    spent = np.array([label.evaluations for label in labels])
    counts = Counter("under 10,000" if n < 10_000 else "under 100,000" if n < 100_000 else
                     "100,000 or more" for n in spent.tolist())  # fmt: skip
    parts = ", ".join(f"{n} {word}" for word, n in sorted(counts.items()))
    return f"{spent.min():,} to {spent.max():,} ({parts})"


@click.command(help=__doc__)
@click.argument("recipes", nargs=-1)
def main(recipes: tuple[str, ...]) -> None:
    """Print the counts of each recipe."""
    for path in recipes or ("pretrain/recipes/base.toml", "pretrain/recipes/default.toml"):
        click.echo("\n".join(counts(path)))


if __name__ == "__main__":
    main()
