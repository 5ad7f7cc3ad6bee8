"""Predicted against measured seconds of JAX models on the CPU devices that XLA splits a machine in.

    python -m benchmarks.runtimes.jax_devices [--devices 1,2,4] [--costs COSTS] [--models NAME,NAME]

Every model is placed by `auto` and cut in two halves by its ops' order, which is what a placement
on several devices costs at least; both are executed as `gdp run` does it. The models are of shapes
and mixtures that `gdp profile --quick --device jax:cpu` does not measure. JAX fixes its number of
devices when it starts, so each number of devices runs in a process of its own.

A few models of the profile run again before and after every measurement: how much longer than there
they take is what the machine does beside (column `busy`), and the second error has that taken out.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

PROFILE = "data/profiles/cpu-jax.json.gz"
ANCHORS = ("dense-256x256x6-step", "attention-64x64x2-step", "convolution-16x16x3-step")
SPEC = "python:benchmarks.runtimes.jax_devices:"


ROW = (
    "{model:16} {devices:7} {plan:>7} {used:5} {pieces:6} {outputs_equal!s:>5} {predicted_s:9.3f} "
    "{measured_s:9.3f} {plain:+6.0%} {busy:5.2f} {at_rest:+6.0%} {single_s:10.3f}"
)
HEAD = (
    f"{'model':16} devices    plan  used pieces equal predicted  measured  error  busy  error "
    "one device   (milliseconds)"
)


def _f32(*shape: int) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, jnp.float32)


def classifier() -> Any:
    """A training step of a perceptron with shrinking layers: SGD with momentum."""
    import jax
    import jax.numpy as jnp
    import optax

    def loss(params: Any, batch: Any) -> Any:
        x, wanted = batch
        for w, b in params:
            x = jax.nn.relu(x @ w + b)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(x) * wanted, axis=1))

    widths = (784, 384, 192, 96, 10)
    params = [(_f32(a, b), _f32(b)) for a, b in itertools.pairwise(widths)]
    return loss, (params, (_f32(96, 784), _f32(96, 10))), {"optimizer": optax.sgd(0.1, 0.9)}


def two_towers() -> Any:
    """A training step of two towers that meet in a dot product: what two devices could share."""
    import jax.numpy as jnp
    import optax

    def loss(params: Any, batch: Any) -> Any:
        users, items, wanted = batch
        for a, b in zip(params["users"], params["items"], strict=True):
            users, items = jnp.tanh(users @ a), jnp.tanh(items @ b)
        return jnp.mean((jnp.sum(users * items, axis=1) - wanted) ** 2)

    tower = [_f32(320, 320)] * 3
    batch = (_f32(160, 320), _f32(160, 320), _f32(160))
    return loss, ({"users": tower, "items": tower}, batch), {"optimizer": optax.sgd(0.1)}


def language_model() -> Any:
    """A training step of two blocks of attention over a table of words: Adam."""
    import jax
    import jax.numpy as jnp
    import optax

    width, heads, steps, words = 96, 6, 48, 800

    def loss(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        mask = jnp.tril(jnp.ones((steps, steps), bool))
        for p in params["layers"]:
            q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
            q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in (q, k, v))
            scores = jnp.einsum("bshd,bthd->bhst", q, k) / 4.0
            mixed = jnp.einsum(
                "bhst,bthd->bshd", jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1), v
            )
            x = x + mixed.reshape(x.shape) @ p["out"]
            x = x + jax.nn.silu(x @ p["up"]) @ p["down"]
        scores = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], axis=-1))

    layer = {
        "qkv": _f32(width, 3 * width), "out": _f32(width, width), "up": _f32(width, 3 * width),
        "down": _f32(3 * width, width),
    }  # fmt: skip
    params = {"table": _f32(words, width), "layers": [layer] * 2}
    tokens = jax.ShapeDtypeStruct((4, steps), jnp.int32)
    return loss, (params, tokens), {"optimizer": optax.adam(1e-3)}


def image_step() -> Any:
    """A training step of strided convolutions with a dense head: SGD."""
    import jax
    import jax.numpy as jnp
    import optax

    def loss(params: Any, batch: Any) -> Any:
        x, wanted = batch
        for kernel in params["kernels"]:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(
                    x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        return jnp.mean((x.mean((1, 2)) @ params["head"] - wanted) ** 2)

    kernels = [_f32(3, 3, a, b) for a, b in ((3, 24), (24, 48), (48, 96))]
    params = {"kernels": kernels, "head": _f32(96, 10)}
    return loss, (params, (_f32(8, 48, 48, 3), _f32(8, 10))), {"optimizer": optax.sgd(0.1)}


def forward() -> Any:
    """Inference of a mixer: dense layers over rows and columns in turn."""
    import jax
    import jax.numpy as jnp

    def mixer(params: Any, x: Any) -> Any:
        for p in params:
            x = x + jnp.swapaxes(jax.nn.gelu(jnp.swapaxes(x, 1, 2) @ p["a"]) @ p["b"], 1, 2)
            x = x + jax.nn.gelu(x @ p["c"]) @ p["d"]
        return x.mean(axis=1)

    layer = {"a": _f32(64, 96), "b": _f32(96, 64), "c": _f32(144, 288), "d": _f32(288, 144)}
    return mixer, ([layer] * 4, _f32(4, 64, 144)), {"weight_argnums": 0}


MODELS = (classifier, two_towers, language_model, image_step, forward)


def halves(graph: Any, host: int) -> np.ndarray:
    """The first half of the ops on the host, the second on its neighbour; ops that must share a
    device follow the first of them."""
    device = (np.arange(graph.num_ops) * 2 // graph.num_ops + host) % 2
    _, first, group = np.unique(graph.colocate, return_index=True, return_inverse=True)
    return np.where(graph.is_io, host, device[first][group]).astype(np.int64)


class Anchors:
    """Models of the profile, to see how fast the machine is now."""

    def __init__(self) -> None:
        import jax

        from gdp.costs.profile import load_profile
        from gdp.runtime.jax.values import argument_values
        from gdp.runtime.profile.jax_corpus import small_models

        known = {m.name: m.latency_s for m in load_profile(PROFILE).models}
        self.entries = [
            (jax.jit(model.uncut()), jax.device_put(argument_values(model, 0)), known[model.name])
            for _, model in small_models()
            if model.name in ANCHORS
        ]
        self.slowdown()

    def slowdown(self, seconds: float = 0.2) -> float:
        """How much longer than in the profile they take: the geometric mean of medians."""
        import jax

        found = []
        for function, arguments, known_s in self.entries:
            taken: list[float] = []
            while sum(taken) < seconds:
                start_s = time.perf_counter()
                jax.block_until_ready(function(*arguments))
                taken.append(time.perf_counter() - start_s)
            found.append(np.log(np.median(taken) / known_s))
        return float(np.exp(np.mean(found)))


def rows(count: int, names: list[str], costs: str | None, seconds: float) -> list[dict[str, Any]]:
    """What one process with so many devices finds."""
    import gdp
    from gdp.models import load
    from gdp.placement import make_placement
    from gdp.runtime.measure import Measuring
    from gdp.verbs.execute import run

    cluster, anchors, found = gdp.Cluster.load(f"{count}xcpu-core"), Anchors(), []
    for name in names:
        graph = load(SPEC + name)
        search = gdp.Search(seed=0, seconds=None, evaluations=200)
        placed = gdp.place(graph, cluster, costs=costs, search=search).placement
        plans = {"auto": placed}
        if count > 1:
            plans["halves"] = make_placement(
                graph, cluster, halves(graph, cluster.host), made_by="halves"
            )
        for label, plan in plans.items():
            before = anchors.slowdown()
            report = run(
                SPEC + name, cluster, plan, costs=costs, measuring=Measuring(3, seconds)
            )  # fmt: skip
            busy = float(np.sqrt(before * anchors.slowdown()))
            used = {int(d) for d in plan.device[~graph.is_io]}
            found.append(
                {"model": name, "devices": count, "plan": label, "busy": busy, "used": len(used),
                 "pieces": len(report["segments"]), "outputs_equal": report["outputs_equal"],
                 "predicted_s": report["predicted_latency_s"],
                 "measured_s": report["measured_latency_s"],
                 "single_s": report["baselines"]["single_device"]["latency_s"]}
            )  # fmt: skip
    return found


def main() -> None:
    """Print the table, and the share of rows that are within 25%."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", default="1,2,4")
    parser.add_argument("--models", default=",".join(m.__name__ for m in MODELS))
    parser.add_argument("--costs")
    parser.add_argument("--seconds", type=float, default=3.0, help="Of measuring a placement.")
    parser.add_argument("--inner", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.models.split(",")
    if given.inner is not None:
        for row in rows(given.inner, names, given.costs, given.seconds):
            print(json.dumps(row))
        return
    print(HEAD)
    errors: dict[str, list[tuple[float, float]]] = {}
    for count in map(int, given.devices.split(",")):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.runtimes.jax_devices", "--inner", str(count),
                   "--models", given.models, "--seconds", str(given.seconds)]  # fmt: skip
        command += ["--costs", given.costs] if given.costs else []
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(done.returncode)
        for row in map(json.loads, done.stdout.splitlines()):
            plain = row["predicted_s"] / row["measured_s"] - 1.0
            at_rest = row["predicted_s"] * row["busy"] / row["measured_s"] - 1.0
            errors.setdefault(row["plan"], []).append((abs(plain), abs(at_rest)))
            milliseconds = {k: 1e3 * row[k] for k in ("predicted_s", "measured_s", "single_s")}
            print(ROW.format(**row | milliseconds, plain=plain, at_rest=at_rest))
    for plan, own in errors.items():
        for what, each in zip(("as measured", "busy taken out"), np.array(own).T, strict=True):
            print(f"{plan}, {what}: {np.sum(each <= 0.25)} of {len(own)} within 25%, "
                  f"median {np.median(each):.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
