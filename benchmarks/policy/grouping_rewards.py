"""Groups learned from what they are worth: `python -m benchmarks.policy.grouping_rewards`.

The score of `benchmarks.policy.grouping` is a start: its last layer, what it says of every use of a
tensor from 32 features, is trained on by rewards of the whole procedure. The graph is coarsened by
the score to 512 groups, the shipped policy places the groups, its best are tried on the whole
graph; the reward is the logarithm of the seconds of the best. Large graphs of the training
families on random clusters, latency. The gradient is of evolution strategies (Salimans et al. 2017,
arXiv 1703.03864): each problem is placed by the layer plus and minus a random vector, and the
difference of both rewards says how far to go along it. Nothing between score and seconds need be
smooth, so that joining is trained as it is used.

Printed at the start and after every so many updates: what is placed on large graphs of the
validation families over what comes of joining what the advisers leave together, geometric mean,
beside CPU seconds so far; first the same of the heaviest edges, and of a layer drawn at random.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from benchmarks.policy.grouping import Score, examples, fitted, inputs, votes
from benchmarks.policy.instances import geomean
from gdp.cli.program import run
from gdp.learn.instances import Instance, make
from gdp.learn.problems import Problems, load_problems
from gdp.methods.coarse import coarsened
from gdp.methods.priorities import rate
from gdp.policy.method import load
from gdp.policy.propose import propose
from gdp.problem.problem import Problem
from gdp.resources import shipped

GROUPS = 512
PROPOSED, KEPT = 5, 4  # placements of the groups, and of these tried on the whole graph
LEAST, MOST = 2000, 12_000  # ops of what is trained on
PAIRS = 12  # problems of an update, each placed twice
SPREAD, RATE = 0.3, 0.05  # of the random vectors, over the layer's own; of Adam, times the same


def placed_s(problem: Problem, near: Float[np.ndarray, "V"] | None) -> float:
    """Seconds of the best that the policy makes of the groups."""
    coarse = coarsened(problem, GROUPS, near)
    if coarse is None:
        return float("nan")
    found = propose(load(None), coarse.problem, PROPOSED, 0)
    best = np.lexsort((found.seconds, found.overflow))[:KEPT]
    return float(rate(problem, found.device[best][:, coarse.part_of]).seconds.min())


@dataclass
class Held:
    """Problems of the validation families, and what the votes make of them."""

    problems: list[Problem]
    features: list[np.ndarray]
    votes_s: list[float]

    def ratio(self, nears: Iterator[Float[np.ndarray, "V"] | None]) -> float:
        """What is placed over what comes of the votes, geometric mean."""
        pairs = zip(self.problems, nears, self.votes_s, strict=True)
        return geomean([placed_s(problem, near) / votes_s for problem, near, votes_s in pairs])

    def of_layer(self, outer: np.ndarray) -> float:
        """The same of the layer."""
        return self.ratio(x @ outer for x in self.features)


def held_of(score: Score, clusters: int) -> Held:
    """Large graphs of the validation families."""
    from benchmarks.policy.large_starts import graphs

    large = graphs()
    instances = [Instance(g, c + 1, "latency") for g in large.validation for c in range(clusters)]
    problems = [make(instance, large.graph) for instance in instances]
    features = [np.asarray(score.hidden(inputs(problem))) for problem in problems]
    return Held(problems, features, [placed_s(problem, votes(problem)) for problem in problems])


@dataclass
class Training:
    """The layer, and the problems it is trained on."""

    score: Score
    known: Problems
    rng: np.random.Generator
    outer: np.ndarray
    rule: Any
    state: Any
    seen: dict[str, tuple[Problem, np.ndarray]] = field(default_factory=dict)

    def draw(self) -> tuple[Problem, np.ndarray]:
        """A problem and its features: one of three clusters for every graph."""
        graphs = self.known.train
        graph, cluster = graphs[int(self.rng.integers(len(graphs)))], int(self.rng.integers(3))
        instance = Instance(graph, 1000 + cluster, "latency")
        if instance.key not in self.seen:
            problem = self.known.get(instance)
            self.seen[instance.key] = problem, np.asarray(self.score.hidden(inputs(problem)))
        return self.seen[instance.key]

    def update(self) -> float:
        """One step; the root mean square of what the random vectors changed."""
        unit = SPREAD * float(np.std(self.score.params["outer"]))
        gradient, changes = np.zeros_like(self.outer), []
        for _ in range(PAIRS):
            problem, features = self.draw()
            way = self.rng.standard_normal(len(self.outer)).astype(np.float32)
            up, down = (
                placed_s(problem, features @ (self.outer + s * unit * way)) for s in (1, -1)
            )
            if np.isfinite(up) and np.isfinite(down):
                changes.append(float(np.log(up / down)))
                gradient += changes[-1] * way / (2 * PAIRS)
        change, self.state = self.rule.update(jnp.asarray(gradient), self.state)
        self.outer = self.outer + np.asarray(change)
        return float(np.sqrt(np.mean(np.square(changes))))


@click.command(help=__doc__)
@click.option("--updates", default=100, show_default=True)
@click.option("--every", default=10, show_default=True, help="Updates between two validations.")
@click.option("--clusters", default=2, show_default=True, help="For each graph to validate with.")
@click.option("--seed", default=0, show_default=True)
def main(updates: int, every: int, clusters: int, seed: int) -> None:
    """Train, and print the curve."""
    corpus, rng = shipped("data/corpus"), np.random.default_rng(seed)
    small = load_problems(corpus, random_graphs=0, seed=seed, min_ops=1, max_ops=MOST)
    score = fitted(examples("data/labels/train.jsonl", small, seed), seed)
    held = held_of(score, clusters)
    outer = score.params["outer"]
    drawn = rng.standard_normal(len(outer)).astype(np.float32)
    click.echo(
        f"{len(held.problems)} problems, over the votes: heaviest edges "
        f"{held.ratio(None for _ in held.problems):.4f}, a layer drawn at random "
        f"{held.of_layer(drawn):.4f}"
    )
    rule = optax.adam(RATE * float(np.std(outer)))
    known = load_problems(corpus, random_graphs=0, seed=seed, min_ops=LEAST, max_ops=MOST)
    training = Training(score, known, rng, outer, rule, rule.init(jnp.asarray(outer)))
    begin_s, change, mean = time.process_time(), [], outer
    for update in range(updates + 1):
        if update % every == 0:
            now, smooth = held.of_layer(training.outer), held.of_layer(mean)
            click.echo(
                f"update {update}: {now:.4f}, mean of the layers so far {smooth:.4f}, a pair "
                f"differs by {100 * np.mean(change or [0]):.1f}%, "
                f"{time.process_time() - begin_s:.0f} CPU s"
            )
            change = []
        if update < updates:
            change.append(training.update())
            mean = mean + (training.outer - mean) / (update + 2)


if __name__ == "__main__":
    run(main)
