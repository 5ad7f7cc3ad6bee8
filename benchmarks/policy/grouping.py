"""Which ops belong together, learned or not: `python -m benchmarks.policy.grouping`.

Graphs of 5,000 ops and more of the validation families on random clusters, latency, coarsened to
groups in which is joined first what has the heaviest edges, what most advisers leave together (by
their share of the votes), or what a learned score would leave together: a layer of 32 over the
shipped policy's embeddings of both ends, their products and the votes, fitted to the edges that the
labels of the training families leave on one device. Of each, over the best known of the problem (a
search of so many evaluations from the policy's answer), geometric means:

    kept      that best placement with every group where most of its work is
    placed    the best of what the policy places group by group, tried on the whole graph

and the CPU seconds of coarsening and placing. First how well each tells edges of the labels of the
validation families apart: the share that is told rightly, equal weight for each label.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float

from benchmarks.policy.instances import geomean
from benchmarks.policy.large_starts import graphs
from gdp.cli.program import run
from gdp.clock import Clock
from gdp.learn.instances import Instance, make
from gdp.learn.labels import load_labels
from gdp.learn.problems import Problems, load_problems
from gdp.methods.base import Search
from gdp.methods.coarse import coarsened
from gdp.methods.priorities import rate
from gdp.methods.scoring import best_of
from gdp.methods.search.local_search import improve
from gdp.policy.advice import advice
from gdp.policy.method import load, place_with_policy
from gdp.policy.propose import propose
from gdp.problem.problem import Problem
from gdp.resources import shipped

Near = Callable[[Problem], Float[np.ndarray, "V"] | None]
SIZES = (2048, 512)
KEPT = 8  # of what the policy places, tried on the whole graph
EDGES = 1500  # of each label, at most
VOTES = -4  # of the inputs, the column
WIDTH, STEPS, BATCH, RATE = 32, 4000, 2048, 1e-3


def votes(problem: Problem) -> Float[np.ndarray, "V"]:
    """The advisers' share of the votes that leaves maker and reader of each use together."""
    told, graph = advice(problem), problem.graph
    maker = graph.producer[graph.use_tensor]
    return told.weight @ (told.device[:, maker] == told.device[:, graph.use_op])


def inputs(problem: Problem) -> Float[np.ndarray, "V F"]:
    """What the learned score reads of each use."""
    graph, node = problem.graph, load(None).head(problem).node
    ends = node[graph.producer[graph.use_tensor]], node[graph.use_op]
    seconds = np.where(problem.allowed, problem.compute_s, 0.0).mean(axis=1)
    share = np.log(seconds / seconds.sum() + 1e-9) / 10
    rest = [votes(problem), np.log1p(graph.tensor_bytes[graph.use_tensor]) / 20]
    rest += [share[graph.producer[graph.use_tensor]], share[graph.use_op]]
    return np.column_stack([*ends, ends[0] * ends[1], *rest]).astype(np.float32)


def examples(labels: str, known: Problems, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(inputs, whether the label leaves the ends together) of some uses of every label."""
    store, rng, found = load_labels(shipped(labels)), np.random.default_rng(seed), []
    for instance in store.instances():
        problem = known.get(instance)
        label = store.get(instance, problem)
        if label is None or (label.placement() == label.placement()[0]).all():
            continue
        graph, device = problem.graph, label.placement()
        together = device[graph.producer[graph.use_tensor]] == device[graph.use_op]
        some = rng.permutation(graph.num_uses)[:EDGES]
        found.append((inputs(problem)[some], together[some].astype(np.float32)))
    return found


@dataclass(frozen=True, eq=False)
class Score:
    """A layer of 32 over what is read of each use: the logit that its ends are left together."""

    mean: Float[np.ndarray, "F"]
    scale: Float[np.ndarray, "F"]
    params: dict[str, Any]

    def hidden(self, x: Float[np.ndarray, "V F"], params: Any = None) -> Any:
        """The layer of 32."""
        params = self.params if params is None else params
        return jax.nn.relu((x - self.mean) / self.scale @ params["inner"] + params["bias"])

    def logit(self, x: Float[np.ndarray, "V F"], params: Any = None) -> Any:
        """The logit of every use; of other parameters where given."""
        params = self.params if params is None else params
        return self.hidden(x, params) @ params["outer"]

    def __call__(self, problem: Problem) -> Float[np.ndarray, "V"]:
        """The logit of every use of a problem."""
        return np.asarray(self.logit(inputs(problem)))


def fitted(train: list[tuple[np.ndarray, np.ndarray]], seed: int) -> Score:
    """The score that tells best which uses the labels leave together."""
    x, y = (np.concatenate(column) for column in zip(*train, strict=True))
    rng = np.random.default_rng(seed)
    params: Any = {
        "inner": rng.standard_normal((x.shape[1], WIDTH)).astype(np.float32) / x.shape[1] ** 0.5,
        "bias": np.zeros(WIDTH, np.float32),
        "outer": rng.standard_normal(WIDTH).astype(np.float32) / WIDTH**0.5,
    }
    score = Score(x.mean(axis=0), x.std(axis=0) + 1e-6, params)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return optax.sigmoid_binary_cross_entropy(score.logit(x, params), y).mean()

    rule = optax.adamw(RATE, weight_decay=1e-3)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        change, state = rule.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, change), state

    state = rule.init(params)
    for _ in range(STEPS):
        some = rng.integers(len(x), size=BATCH)
        params, state = step(params, state, jnp.asarray(x[some]), jnp.asarray(y[some]))
    return replace(score, params=jax.tree.map(np.asarray, params))


def accuracy(said: np.ndarray, together: np.ndarray) -> float:
    """The share of one label's uses that are told rightly."""
    return float((said == (together > 0.5)).mean())


def best_known(problem: Problem, evaluations: int) -> tuple[np.ndarray, float]:
    """(devices, seconds) of the best that is found from the policy's answer on."""
    answer = place_with_policy(problem, None, Search(seconds=None), polish=False)
    assert answer.assignment is not None
    start = replace(best_of(problem, [answer.assignment]), evaluations=0)
    search = Search(seconds=None, evaluations=evaluations)
    found = improve(problem, [start], search, Clock(None))
    return found.assignment.device, found.value_s


def measure(problem: Problem, near: Near, size: int, device: np.ndarray) -> tuple[float, ...]:
    """(seconds of the kept placement, of what the policy places, CPU seconds)."""
    begin_s = time.process_time()
    coarse = coarsened(problem, size, near(problem))
    assert coarse is not None
    found = propose(load(None), coarse.problem, 17, 0)
    best = np.lexsort((found.seconds, found.overflow))[:KEPT]
    placed = rate(problem, found.device[best][:, coarse.part_of])
    took_s = time.process_time() - begin_s
    kept = rate(problem, coarse.project(problem, device)[coarse.part_of][None])
    return float(kept.seconds[0]), float(placed.seconds.min()), took_s


@click.command(help=__doc__)
@click.option("--clusters", default=3, show_default=True, help="Random clusters for each graph.")
@click.option("--evaluations", default=5000, show_default=True, help="For the best known.")
@click.option("--seed", default=0, show_default=True)
def main(clusters: int, evaluations: int, seed: int) -> None:
    """Print both tables."""
    corpus = shipped("data/corpus")
    known = load_problems(corpus, random_graphs=0, seed=seed, min_ops=1, max_ops=12_000)
    score = fitted(examples("data/labels/train.jsonl", known, seed), seed)
    held = examples("data/labels/held.jsonl", known, seed)
    by_votes = [accuracy(x[:, VOTES] > 0.5, y) for x, y in held]
    by_score = [accuracy(np.asarray(score.logit(x)) > 0, y) for x, y in held]
    click.echo(
        f"{len(held)} labels: votes {np.mean(by_votes):.3f}, learned {np.mean(by_score):.3f}"
    )
    ways: dict[str, Near] = {
        "heaviest edges": lambda problem: None,
        "advisers' votes": votes,
        "learned": score,
    }
    table: dict[tuple[str, int], list[tuple[float, ...]]] = {}
    large = graphs()
    for graph in large.validation:
        for cluster in range(1, clusters + 1):
            problem = make(Instance(graph, cluster, "latency"), large.graph)
            device, best_s = best_known(problem, evaluations)
            for name, near in ways.items():
                for size in SIZES:
                    kept_s, placed_s, took_s = measure(problem, near, size, device)
                    row = table.setdefault((name, size), [])
                    row.append((kept_s / best_s, placed_s / best_s, took_s))
    for (name, size), rows in table.items():
        kept, placed, took_s = (list(column) for column in zip(*rows, strict=True))
        click.echo(
            f"{name}, {size} groups: kept {geomean(kept):.3f}, placed {geomean(placed):.3f} "
            f"({np.mean(took_s):.1f} CPU s), {len(rows)} problems"
        )


if __name__ == "__main__":
    run(main)
