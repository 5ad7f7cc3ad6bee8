"""What `auto` finds against the heuristics it contains: light models on four clusters.

    python benchmarks/methods.py [--seconds 5] [--models A,B] [--json]

Prints, per model and cluster, the best single heuristic, the trained policy, `auto`, the proven
bound, and the ratio of auto to the best heuristic, which is never above 1.
"""

import json
from typing import Any

import click

CLUSTERS = ("2xcpu-core", "4xcpu-core", "cpu+t4", "4xa100-nvlink")
MODELS = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet",
    "squeezenet", "vgg19", "zfnet512",
)  # fmt: skip


def row(model: str, cluster: str, objective: str, seconds: float) -> dict[str, Any]:
    """One model on one cluster."""
    import gdp

    result = gdp.place(
        gdp.load(f"onnx:light_{model}"),
        gdp.Cluster.load(cluster),
        objective="throughput" if objective == "throughput" else "latency",
        search=gdp.Search(seconds=seconds, simplicity=0.0),
        # Methods place single devices; how stages are replicated is no choice of theirs.
        constraints=gdp.Constraints(replicas=False),
    )
    key = "latency_s" if objective == "latency" else "period_s"
    values = {c.method: getattr(c, key) for c in result.candidates if c.feasible}
    heuristics = {n: v for n, v in values.items() if n not in ("local_search", "policy")}
    best = min(heuristics, key=lambda name: heuristics[name])
    return {
        "model": model,
        "cluster": cluster,
        "heuristic": best,
        "heuristic_s": heuristics[best],
        "policy_s": values.get("policy"),
        "auto_s": result.value_s,
        "bound_s": result.bound_s,
        "ratio": result.value_s / heuristics[best],
        "seconds": result.seconds,
    }


@click.command()
@click.option("--seconds", type=float, default=5.0, show_default=True)
@click.option("--objective", default="latency", show_default=True)
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(seconds: float, objective: str, models: str, as_json: bool) -> None:
    """Print the table."""
    rows = [row(m, c, objective, seconds) for m in models.split(",") for c in CLUSTERS]
    if as_json:
        click.echo(json.dumps({"objective": objective, "seconds": seconds, "rows": rows}))
        return
    click.echo("| model | cluster | best heuristic | ms | policy ms | auto ms | auto / heuristic |"
               " bound ms | took s |")  # fmt: skip
    click.echo("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for r in rows:
        policy = "-" if r["policy_s"] is None else f"{r['policy_s'] * 1e3:.3f}"
        click.echo(
            f"| {r['model']} | {r['cluster']} | {r['heuristic']} | {r['heuristic_s'] * 1e3:.3f} | "
            f"{policy} | {r['auto_s'] * 1e3:.3f} | {r['ratio']:.3f} | {r['bound_s'] * 1e3:.3f} | "
            f"{r['seconds']:.1f} |"
        )


if __name__ == "__main__":
    main()
