"""Small JAX models, forward and training, whose times tell how fast XLA's kernels are here."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from gdp.importers.jax.trace import JaxModel

Shapes = tuple[int, ...]
_WITH_MOMENTUM = ("tapered", "batched", "pyramid", "gates")  # the other families train by Adam


def small_models() -> Iterator[tuple[str, JaxModel]]:
    """(family, model), from microseconds to some tens of milliseconds. Sizes are round and
    odd, since what does not fill a vector is slow. Each is measured forward and as a training
    step."""
    import optax

    makers = (
        ("dense", dense, ((4, 16, 2), (16, 64, 6), (64, 128, 4), (32, 512, 3), (256, 256, 6),
                          (512, 512, 3), (128, 1024, 4), (1, 300, 4), (7, 45, 3), (33, 200, 4),
                          (100, 330, 3))),
        ("tapered", tapered, ((1, 900), (20, 150), (50, 500), (150, 1200))),
        ("batched", batched, ((3, 20, 36, 2), (6, 50, 100, 2), (16, 120, 72, 2))),
        ("attention", attention, ((16, 32, 2), (64, 64, 2), (128, 128, 2), (128, 256, 3),
                                  (30, 40, 2), (90, 120, 2))),
        ("convolution", convolution, ((8, 4, 2), (16, 16, 3), (32, 16, 3), (32, 64, 2))),
        ("pyramid", pyramid, ((18, 6, 2), (30, 10, 3), (56, 20, 3))),
        ("separable", separable, ((14, 12, 2), (28, 36, 3))),
        ("recurrence", recurrence, ((4, 32, 6), (16, 128, 8), (64, 256, 4), (10, 90, 5))),
        ("chain", chain, ((64, 64, 4), (256, 256, 6), (1024, 512, 4))),
        ("gates", gates, ((50, 90, 6), (200, 350, 5), (900, 700, 3))),
        ("statistics", statistics, ((40, 60, 3), (300, 220, 3), (1500, 500, 2))),
        ("table", table, ((64, 32, 500), (512, 64, 4000), (90, 50, 1500))),
    )  # fmt: skip
    for family, make, sizes in makers:
        by = optax.sgd(0.01, 0.9) if family in _WITH_MOMENTUM else optax.adam(1e-3)
        for size in sizes:
            loss, params, batch = make(*size)
            name = f"{family}-{'x'.join(map(str, size))}"
            yield family, JaxModel(name, loss, (params, batch), {"weight_argnums": 0})
            yield family, JaxModel(f"{name}-step", loss, (params, batch), {"optimizer": by})


def _f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dense(rows: int, width: int, layers: int) -> tuple[Any, Any, Any]:
    """Dense layers with a bias and an activation each."""

    def loss(params: Any, x: Any) -> Any:
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return jnp.mean(jnp.square(x))

    return loss, [(_f32(width, width), _f32(width))] * layers, _f32(rows, width)


def tapered(rows: int, width: int) -> tuple[Any, Any, Any]:
    """Layers of 3/5 of the width before, and the loss of choosing among the last ones."""

    def loss(params: Any, batch: Any) -> Any:
        x, wanted = batch
        for w, b in params:
            x = jax.nn.gelu(x @ w + b)
        return -jnp.mean(jax.nn.log_softmax(x)[jnp.arange(rows), wanted])

    widths = [width * 3**i // 5**i for i in range(4)]
    layers = [(_f32(a, b), _f32(b)) for a, b in itertools.pairwise(widths)]
    return loss, layers, (_f32(rows, width), jax.ShapeDtypeStruct((rows,), jnp.int32))


def batched(count: int, rows: int, width: int, layers: int) -> tuple[Any, Any, Any]:
    """Products within each sample, over rows and over columns, normalised between."""

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            y = jnp.einsum("nrw,rs->nsw", x, p["over_rows"])
            x = x + jax.nn.relu(y) / (1e-3 + jnp.abs(y).mean((1, 2), keepdims=True))
            x = x + jnp.einsum("nrw,nsw->nrs", x, jnp.tanh(x @ p["over_columns"])) @ x / rows
        return jnp.mean(jnp.square(x))

    layer = {"over_rows": _f32(rows, rows), "over_columns": _f32(width, width)}
    return loss, [layer] * layers, _f32(count, rows, width)


def attention(steps: int, width: int, layers: int) -> tuple[Any, Any, Any]:
    """Blocks of attention with four heads, normalised, and two dense layers each."""

    def norm(x: Any, scale: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * scale

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            q, k, v = jnp.split(norm(x, p["scale"][0]) @ p["qkv"], 3, axis=-1)
            q, k, v = (a.reshape(steps, 4, -1) for a in (q, k, v))
            weights = jax.nn.softmax(jnp.einsum("shd,thd->hst", q, k) / 8.0, axis=-1)
            x = x + jnp.einsum("hst,thd->shd", weights, v).reshape(x.shape) @ p["out"]
            x = x + jax.nn.gelu(norm(x, p["scale"][1]) @ p["up"]) @ p["down"]
        return jnp.mean(jnp.square(x))

    layer = {
        "qkv": _f32(width, 3 * width), "out": _f32(width, width), "up": _f32(width, 4 * width),
        "down": _f32(4 * width, width), "scale": _f32(2, width),
    }  # fmt: skip
    return loss, [layer] * layers, _f32(steps, width)


def convolution(size: int, channels: int, layers: int) -> tuple[Any, Any, Any]:
    """Convolutions of 3 x 3 with a residual, pooled at the end."""

    def loss(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            y = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = x + jax.nn.relu(y)
        return jnp.mean(jnp.square(x.mean((1, 2))))

    return loss, [_f32(3, 3, channels, channels)] * layers, _f32(4, size, size, channels)


def pyramid(size: int, channels: int, layers: int) -> tuple[Any, Any, Any]:
    """Convolutions of 5 x 5 whose images halve and channels grow by half; a dense head."""

    def loss(params: Any, x: Any) -> Any:
        for kernel, scale in params["kernels"]:
            x = jax.lax.conv_general_dilated(
                x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x * scale)
        return jnp.mean(jnp.square(x.reshape(x.shape[0], -1) @ params["head"]))

    widths = [3, *(channels * 3**i // 2**i for i in range(layers))]
    last = -(-size // 2**layers)
    kernels = [(_f32(5, 5, a, b), _f32(b)) for a, b in itertools.pairwise(widths)]
    params = {"kernels": kernels, "head": _f32(last * last * widths[-1], 12)}
    return loss, params, _f32(6, size, size, 3)


def separable(size: int, channels: int, layers: int) -> tuple[Any, Any, Any]:
    """Convolutions of each channel alone, then of all channels at each point; pooled windows."""

    def loss(params: Any, x: Any) -> Any:
        for own, point in params:
            y = jax.lax.conv_general_dilated(
                x, own, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=channels,
            )  # fmt: skip
            x = x + jax.nn.silu(y) @ point
        window = (1, 2, 2, 1)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
        return jnp.mean(jnp.square(x))

    layer = (_f32(3, 3, 1, channels), _f32(channels, channels))
    return loss, [layer] * layers, _f32(2, size, size, channels)


def recurrence(rows: int, width: int, steps: int) -> tuple[Any, Any, Any]:
    """A gated recurrent layer, unrolled."""

    def loss(params: Any, xs: Any) -> Any:
        state = jnp.zeros((rows, width))
        for x in xs:
            joined = jnp.concatenate([x, state], axis=1)
            gate = jax.nn.sigmoid(joined @ params["gate"])
            state = gate * state + (1 - gate) * jnp.tanh(joined @ params["new"])
        return jnp.mean(jnp.square(state))

    params = {"gate": _f32(2 * width, width), "new": _f32(2 * width, width)}
    return loss, params, [_f32(rows, width)] * steps


def chain(rows: int, width: int, layers: int) -> tuple[Any, Any, Any]:
    """Element-wise arithmetic, sums over rows and columns, and transposes."""

    def loss(params: Any, x: Any) -> Any:
        for scale in params:
            x = jnp.exp(-jnp.square(x)) * scale + jnp.sin(x)
            x = x - x.sum(axis=1, keepdims=True) / width + x.max(axis=0)
        return jnp.mean(x * x)

    return loss, [_f32(width)] * layers, _f32(rows, width)


def gates(rows: int, width: int, layers: int) -> tuple[Any, Any, Any]:
    """Cheap element-wise arithmetic over two streams that mix: no function, few reductions."""

    def loss(params: Any, xs: Any) -> Any:
        x, y = xs
        for scale, shift in params:
            x, y = jnp.where(x > y, x * scale, y + shift), jnp.maximum(x, 0.1 * y) - x * y
        return jnp.mean(x + y)

    return loss, [(_f32(width), _f32(width))] * layers, (_f32(rows, width), _f32(rows, width))


def statistics(rows: int, width: int, layers: int) -> tuple[Any, Any, Any]:
    """Rows and columns alternately normalised to mean zero and variance one, with transposes
    between."""

    def loss(params: Any, x: Any) -> Any:
        for by_row, by_column in params:
            x = (x - x.mean(1, keepdims=True)) * jax.lax.rsqrt(x.var(1, keepdims=True) + 1e-6)
            x = x * by_row
            x = (x - x.mean(0)) / (1e-3 + jnp.sqrt(x.var(0))) * by_column
            x = jax.nn.softmax(x, axis=1).T.reshape(x.shape) + x
        return jax.nn.logsumexp(x, axis=0).mean()

    return loss, [(_f32(width), _f32(width))] * layers, _f32(rows, width)


def table(rows: int, width: int, words: int) -> tuple[Any, Any, Any]:
    """Rows of a table, multiplied with a matrix, and the loss of choosing among words."""

    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(params["table"][batch] @ params["dense"])
        scores = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(scores[jnp.arange(rows), batch])

    params = {"table": _f32(words, width), "dense": _f32(width, width)}
    return loss, params, jax.ShapeDtypeStruct((rows,), jnp.int32)
