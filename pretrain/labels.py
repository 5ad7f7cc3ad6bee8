"""Searches labels for training and validation: `python -m pretrain.labels --help`."""

from pathlib import Path

import click
import numpy as np

from gdp.base.tasks import engine_of
from gdp.cli import options
from gdp.cli.program import run
from gdp.learn.instances import Instance, Problems, draw
from gdp.learn.labels import Corpus, Task, label_all, load_labels


def drawn(
    problems: Problems, per_graph: int, held_per_graph: int, seed: int, limited: float,
    memory: tuple[float, float],
) -> list[Instance]:  # fmt: skip
    """Random instances over the training and validation graphs, validation first."""
    rng = np.random.default_rng([seed, 5])
    names = [name for name in problems.validation for _ in range(held_per_graph)]
    names += problems.train * per_graph
    return [draw(rng, [name], limited=limited, memory=memory) for name in names]


@click.command()
@click.option("--corpus", default="data/corpus", show_default=True)
@click.option("--out", type=Path, default=Path("data/labels/train.jsonl"), show_default=True)
@click.option("--evaluations", default=20_000, show_default=True, help="Per instance.")
@click.option("--per-graph", default=2, show_default=True, help="Training instances per graph.")
@click.option("--held-per-graph", default=2, show_default=True, help="Validation ones.")
@click.option("--max-ops", default=1000, show_default=True)
@click.option("--random-graphs", default=40, show_default=True)
@click.option("--limited", default=0.3, show_default=True, help="Share with limited memory.")
@click.option(
    "--memory",
    type=(float, float),
    default=(1.15, 2.5),
    show_default=True,
    help="Range of the limit, over the fair share.",
)
@click.option("--seconds", default=1e9, help="Stop after so long.")
@click.option("--seed", default=0, show_default=True)
@options.stack(*options.ENGINE)
def main(
    corpus: str,
    out: Path,
    evaluations: int,
    per_graph: int,
    held_per_graph: int,
    max_ops: int,
    random_graphs: int,
    limited: float,
    memory: tuple[float, float],
    seconds: float,
    seed: int,
    processes: int | None,
    ray: str | None,
) -> None:
    """Search labels and keep the best of what is known."""
    source = Corpus(str(Path(corpus).resolve()) if corpus else "", random_graphs, 30, max_ops)
    todo = drawn(source.problems(), per_graph, held_per_graph, seed, limited, memory)
    tasks = [Task(source, instance, None, evaluations, seed) for instance in todo]

    def say(done: int, count: int, key: str) -> None:
        click.echo(f"{done} of {count}: {key}", err=True)

    done = label_all(out, tasks, seconds, engine_of(processes, ray), say)
    click.echo(f"{done} instances labelled, {len(load_labels(out))} in {out}")


if __name__ == "__main__":
    run(main)
