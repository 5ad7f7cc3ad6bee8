"""How close the proven bounds come to the best placement found: bound / best.

    python benchmarks/bounds.py [--seconds 3] [--bound-seconds 3] [--models A,B] [--clusters C,D]
                                [--objective latency|throughput|both] [--json]

Models are the nine light ONNX models (batch 1) and the traced training step of a transformer of
four layers; clusters are two and four T4 over PCIe, a CPU with a T4, and two unequal GPUs. Costs
are the roofline's. "best" is what `auto` finds in --seconds, so a ratio below 1 is the sum of what
the bound misses and of what the search misses; where the last column says so, a program with whole
placements was solved and the search alone is to blame.
"""

import json
import time
from typing import Any

import click

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


def row(
    graph: Any, model: str, cluster: str, objective: str, seconds: float, bound_seconds: float
) -> dict[str, Any]:
    """One model on one cluster."""
    from gdp.api import place
    from gdp.bounds.best import all_bounds
    from gdp.cluster.types import Cluster
    from gdp.costs.base import roofline
    from gdp.methods.base import Search
    from gdp.prepare import prepare_problem

    machine = Cluster.load(cluster)
    goal: str = "throughput" if objective == "throughput" else "latency"
    problem = prepare_problem(graph, machine, goal, costs=roofline).problem
    began_s = time.perf_counter()
    bounds = all_bounds(problem, bound_seconds)
    took_s = time.perf_counter() - began_s
    best = place(
        graph,
        machine,
        objective=goal,
        costs=roofline,
        search=Search(seconds=seconds, simplicity=0.0),
    )
    bound = max(bounds, key=lambda b: b.value_s)
    return {
        "model": model,
        "cluster": cluster,
        "objective": objective,
        "ops": problem.num_ops,
        "best_s": best.value_s,
        "bound_s": bound.value_s,
        "ratio": min(1.0, bound.value_s / best.value_s),
        "seconds": took_s,
        "argument": bound.argument,
        "bounds": [{"bound_s": b.value_s, "argument": b.argument} for b in bounds],
    }


@click.command()
@click.option("--seconds", type=float, default=3.0, show_default=True, help="for auto")
@click.option("--bound-seconds", type=float, default=3.0, show_default=True)
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--clusters", default=",".join(CLUSTERS), show_default=True)
@click.option("--objective", default="both", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    seconds: float,
    bound_seconds: float,
    models: str,
    clusters: str,
    objective: str,
    as_json: bool,
) -> None:
    """Print the table and the averages."""
    import gdp

    rows = []
    header = ["model", "cluster", "objective", "best ms", "bound ms", "ratio", "s", "argument"]
    if not as_json:
        click.echo(
            f"| {' | '.join(header)} |\n| --- | --- | --- | ---: | ---: | ---: | ---: | --- |"
        )
    for model in models.split(","):
        graph = transformer_step() if model == MODELS[-1] else gdp.load(f"onnx:light_{model}")
        for cluster in clusters.split(","):
            for goal in TARGETS if objective == "both" else (objective,):
                r = row(graph, model, cluster, goal, seconds, bound_seconds)
                rows.append(r)
                if not as_json:
                    click.echo(
                        f"| {model} | {cluster} | {goal} | {r['best_s'] * 1e3:.4f} | "
                        f"{r['bound_s'] * 1e3:.4f} | {r['ratio']:.4f} | {r['seconds']:.2f} | "
                        f"{r['argument']} |"
                    )
    averages = {
        goal: sum(ratios) / len(ratios)
        for goal in TARGETS
        if (ratios := [r["ratio"] for r in rows if r["objective"] == goal])
    }
    if as_json:
        document = {"seconds": seconds, "rows": rows, "averages": averages}
        click.echo(json.dumps(document))
        return
    for goal, average in averages.items():
        worst = min(r["ratio"] for r in rows if r["objective"] == goal)
        click.echo(
            f"{goal}: average {average:.4f} of the best found (target {TARGETS[goal]}), "
            f"worst {worst:.4f}"
        )


if __name__ == "__main__":
    main()
