"""Small JAX models, forward and training, whose times tell how fast XLA's kernels are here."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from gdp.importers.jax.model import JaxModel

Shapes = tuple[int, ...]


def small_models() -> Iterator[tuple[str, JaxModel]]:
    """(family, model): dense layers, attention, convolutions, recurrences, element-wise chains and
    tables, from microseconds to some tens of milliseconds."""
    makers = (
        ("dense", dense, ((4, 16, 2), (16, 64, 6), (64, 128, 4), (32, 512, 3), (256, 256, 6),
                          (512, 512, 3), (128, 1024, 4))),
        ("attention", attention, ((16, 32, 2), (64, 64, 2), (128, 128, 2), (128, 256, 3))),
        ("convolution", convolution, ((8, 4, 2), (16, 16, 3), (32, 16, 3), (32, 64, 2))),
        ("recurrence", recurrence, ((4, 32, 6), (16, 128, 8), (64, 256, 4))),
        ("chain", chain, ((64, 64, 4), (256, 256, 6), (1024, 512, 4))),
        ("table", table, ((64, 32, 500), (512, 64, 4000))),
    )  # fmt: skip
    for family, make, sizes in makers:
        for size, trains in itertools.product(sizes, (False, True)):
            yield family, _model(family, make, size, trains=trains)


def _model(
    family: str, make: Callable[..., tuple[Any, Any, Any]], size: Shapes, *, trains: bool
) -> JaxModel:
    import optax

    loss, params, batch = make(*size)
    name = f"{family}-{'x'.join(map(str, size))}"
    if trains:
        return JaxModel(f"{name}-step", loss, (params, batch), {"optimizer": optax.adam(1e-3)})
    return JaxModel(name, loss, (params, batch), {"weight_argnums": 0})


def _f32(*shape: int) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, jnp.float32)


def dense(rows: int, width: int, layers: int) -> tuple[Any, Any, Any]:
    """Dense layers with a bias and an activation each."""
    import jax.numpy as jnp

    def loss(params: Any, x: Any) -> Any:
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return jnp.mean(jnp.square(x))

    return loss, [(_f32(width, width), _f32(width))] * layers, _f32(rows, width)


def attention(steps: int, width: int, layers: int) -> tuple[Any, Any, Any]:
    """Blocks of attention with four heads, normalised, and two dense layers each."""
    import jax
    import jax.numpy as jnp

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
    import jax
    import jax.numpy as jnp

    def loss(kernels: Any, x: Any) -> Any:
        for kernel in kernels:
            y = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = x + jax.nn.relu(y)
        return jnp.mean(jnp.square(x.mean((1, 2))))

    return loss, [_f32(3, 3, channels, channels)] * layers, _f32(4, size, size, channels)


def recurrence(rows: int, width: int, steps: int) -> tuple[Any, Any, Any]:
    """A gated recurrent layer, unrolled."""
    import jax
    import jax.numpy as jnp

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
    import jax.numpy as jnp

    def loss(params: Any, x: Any) -> Any:
        for scale in params:
            x = jnp.exp(-jnp.square(x)) * scale + jnp.sin(x)
            x = x - x.sum(axis=1, keepdims=True) / width + x.max(axis=0)
        return jnp.mean(x * x)

    return loss, [_f32(width)] * layers, _f32(rows, width)


def table(rows: int, width: int, words: int) -> tuple[Any, Any, Any]:
    """Rows of a table, multiplied with a matrix, and the loss of choosing among words."""
    import jax
    import jax.numpy as jnp

    def loss(params: Any, batch: Any) -> Any:
        x = jnp.tanh(params["table"][batch] @ params["dense"])
        scores = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(scores[jnp.arange(rows), batch])

    params = {"table": _f32(words, width), "dense": _f32(width, width)}
    return loss, params, jax.ShapeDtypeStruct((rows,), jnp.int32)
