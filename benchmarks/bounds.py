"""Proven bounds over the best placement found.

    python -m benchmarks.bounds [--seconds 3] [--bound-seconds 3] [--models A,B] [--clusters C,D]
                                [--objective latency|throughput|both]

Models are the nine light ONNX models (batch 1) and the traced training step of a transformer of
four layers; clusters are two and four T4 over PCIe, a CPU with a T4, and two unequal GPUs. Costs
are the roofline's. "best" is what `auto` finds in --seconds, so a ratio below 1 is the sum of what
the bound misses and of what the search misses; where the last column says so, a program with whole
placements was solved and the search alone is to blame.
"""

import time
from typing import Any

import click

import gdp
from benchmarks.tables import head, line
from gdp.bounds.best import all_bounds
from gdp.cluster.types import Cluster
from gdp.costs.base import roofline
from gdp.methods.base import Search
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question
from gdp.question.solve import solve

MODELS = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet",
    "squeezenet", "vgg19", "zfnet512", "transformer_step",
)  # fmt: skip
CLUSTERS = ("2xt4-pcie3", "4xt4-pcie3", "cpu-server+t4-pcie3", "v100+t4-pcie3")
TARGETS = {"latency": 0.85, "throughput": 0.95}


def transformer_step() -> Any:
    """A training step with Adam: 4 layers of 512 features, 8 heads, 8 sequences of 128 words."""
    import jax
    import jax.numpy as jnp
    import optax

    from gdp.importers.jax.trace import trace_training_step

    layers, features, heads, words, batch, steps = 4, 512, 8, 8192, 8, 128

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer = {
        "q": f32(features, features), "k": f32(features, features), "v": f32(features, features),
        "out": f32(features, features), "up": f32(features, 4 * features),
        "down": f32(4 * features, features), "scale": f32(2, features),
    }  # fmt: skip
    params = {"table": f32(words, features), "layers": [layer] * layers}

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale

    def loss(params: Any, tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
        inputs, wanted = tokens
        x = params["table"][inputs]
        for p in params["layers"]:
            y = norm(x, p["scale"][0])
            q, k, v = ((y @ p[key]).reshape(batch, steps, heads, -1) for key in ("q", "k", "v"))
            scores = jnp.einsum("bshd,bthd->bhst", q, k) / (features / heads) ** 0.5
            mixed = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), v)
            x = x + mixed.reshape(x.shape) @ p["out"]
            x = x + jax.nn.gelu(norm(x, p["scale"][1]) @ p["up"]) @ p["down"]
        picked = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.take_along_axis(picked, wanted[..., None], axis=-1).mean()

    tokens = jax.ShapeDtypeStruct((batch, steps), jnp.int32)
    return trace_training_step(loss, params, (tokens, tokens), optimizer=optax.adam(1e-3))


def row(graph: Any, cluster: str, objective: str, seconds: float, bound_s: float) -> dict[str, Any]:
    """One model on one cluster."""
    machine = Cluster.load(cluster)
    problem = prepare_problem(Question(graph, machine, objective=objective, costs=roofline))
    began_s = time.perf_counter()
    bound = max(all_bounds(problem, bound_s), key=lambda b: b.value_s)
    took_s = time.perf_counter() - began_s
    search = Search(seconds=seconds, simplicity=0.0)
    best = solve(Question(graph, machine, objective=objective, costs=roofline, search=search))
    return {
        "objective": objective, "best_s": best.value_s, "bound_s": bound.value_s,
        "ratio": min(1.0, bound.value_s / best.value_s), "seconds": took_s,
        "argument": bound.argument,
    }  # fmt: skip


@click.command()
@click.option("--seconds", type=float, default=3.0, show_default=True, help="for auto")
@click.option("--bound-seconds", type=float, default=3.0, show_default=True)
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--clusters", default=",".join(CLUSTERS), show_default=True)
@click.option("--objective", default="both", show_default=True)
def main(seconds: float, bound_seconds: float, models: str, clusters: str, objective: str) -> None:
    """Print the table and the averages."""
    rows = []
    click.echo(head("model | cluster | objective | best ms | bound ms | ratio | s | argument", 3))
    for model in models.split(","):
        graph = transformer_step() if model == MODELS[-1] else gdp.load(f"onnx:light_{model}")
        for cluster in clusters.split(","):
            for goal in TARGETS if objective == "both" else (objective,):
                r = row(graph, cluster, goal, seconds, bound_seconds)
                rows.append(r)
                cells = [f"{r[name] * 1e3:.4f}" for name in ("best_s", "bound_s")]
                cells += [f"{r['ratio']:.4f}", f"{r['seconds']:.2f}", r["argument"]]
                click.echo(line(model, cluster, goal, *cells))
    for goal, target in TARGETS.items():
        if ratios := [r["ratio"] for r in rows if r["objective"] == goal]:
            click.echo(
                f"{goal}: average {sum(ratios) / len(ratios):.4f} of the best found "
                f"(target {target}), worst {min(ratios):.4f}"
            )


if __name__ == "__main__":
    main()
