"""Layers of the corpus's models: plain functions over JAX arrays, with parameters by shape alone.

A model is a function `(Params, batch) -> output`. It runs twice, both times on abstract values:
once to record the shapes of its parameters, once to be traced. No weight is ever allocated.
Axes: B batch, S sequence, H W image, C channels, F features.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Model = Callable[["Params", Any], jax.Array]
ShapeDtype = jax.ShapeDtypeStruct


class Params:
    """The parameters of a model by name: recorded while `values` is None, looked up otherwise."""

    def __init__(self, values: dict[str, jax.Array] | None = None) -> None:
        self.values = values
        self.shapes: dict[str, ShapeDtype] = {}
        self._path: list[str] = []
        self._count: dict[str, int] = {}

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """A module of the model: prefixes parameter names and names the traced ops."""
        self._path.append(name)
        with jax.named_scope(name):
            yield
        self._path.pop()

    def __call__(self, kind: str, *shape: int) -> jax.Array:
        """The next parameter of this kind in this scope."""
        stem = "/".join([*self._path, kind])
        index = self._count.get(stem, 0)
        self._count[stem] = index + 1
        name = f"{stem}.{index}"
        if self.values is not None:
            return self.values[name]
        self.shapes[name] = ShapeDtype(shape, jnp.float32)
        return jnp.zeros(shape, jnp.float32)


def parameter_shapes(model: Model, batch: Any) -> dict[str, ShapeDtype]:
    """The shapes of a model's parameters for a batch of shapes."""
    params = Params()
    jax.eval_shape(lambda b: model(params, b), batch)
    return params.shapes


def floats(*shape: int) -> ShapeDtype:
    """A float32 input by shape."""
    return ShapeDtype(shape, jnp.float32)


def ids(*shape: int) -> ShapeDtype:
    """An int32 input by shape."""
    return ShapeDtype(shape, jnp.int32)


def dense(p: Params, x: jax.Array, features: int, *, bias: bool = True) -> jax.Array:
    """x W + b over the last axis."""
    y = x @ p("kernel", x.shape[-1], features)
    return y + p("bias", features) if bias else y


def embed(p: Params, tokens: jax.Array, vocabulary: int, features: int) -> jax.Array:
    """Rows of an embedding table."""
    return jnp.take(p("embedding", vocabulary, features), tokens, axis=0)


def conv(
    p: Params, x: jax.Array, channels: int, size: int | tuple[int, int] = 3, *,
    stride: int = 1, groups: int = 1, dilation: int = 1, bias: bool = False,
) -> jax.Array:  # fmt: skip
    """A 2-D convolution, NHWC, same padding."""
    height, width = (size, size) if isinstance(size, int) else size
    kernel = p("kernel", height, width, x.shape[-1] // groups, channels)
    y = lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", rhs_dilation=(dilation, dilation),
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip
    return y + p("bias", channels) if bias else y


def conv1d(
    p: Params, x: jax.Array, channels: int, size: int, *, dilation: int = 1, groups: int = 1
) -> jax.Array:
    """A causal 1-D convolution over [B, S, C]."""
    kernel = p("kernel", size, x.shape[-1] // groups, channels)
    return lax.conv_general_dilated(
        x, kernel, (1,), [((size - 1) * dilation, 0)], rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups,
    )  # fmt: skip


def upsample(x: jax.Array) -> jax.Array:
    """Twice the height and width, by repetition."""
    return jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)


def batch_norm(p: Params, x: jax.Array) -> jax.Array:
    """Normalised by the batch's statistics, scaled and shifted."""
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes, keepdims=True)
    variance = jnp.square(x - mean).mean(axes, keepdims=True)
    y = (x - mean) * lax.rsqrt(variance + 1e-5)
    return y * p("scale", x.shape[-1]) + p("shift", x.shape[-1])


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    """Normalised over the last axis, scaled and shifted."""
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    y = (x - mean) * lax.rsqrt(variance + 1e-5)
    return y * p("scale", x.shape[-1]) + p("shift", x.shape[-1])


def rms_norm(p: Params, x: jax.Array) -> jax.Array:
    """Scaled by the root mean square over the last axis."""
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * p("scale", x.shape[-1])


def group_norm(p: Params, x: jax.Array, groups: int = 8) -> jax.Array:
    """Normalised over each group of channels and all positions."""
    shape = x.shape
    y = x.reshape(shape[0], -1, groups, shape[-1] // groups)
    mean = y.mean((1, 3), keepdims=True)
    variance = jnp.square(y - mean).mean((1, 3), keepdims=True)
    y = ((y - mean) * lax.rsqrt(variance + 1e-5)).reshape(shape)
    return y * p("scale", shape[-1]) + p("shift", shape[-1])


def max_pool(x: jax.Array, size: int = 2, stride: int = 2) -> jax.Array:
    """The largest value of each window."""
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, size, size, 1), (1, stride, stride, 1), "SAME"
    )


def avg_pool(x: jax.Array, size: int = 2, stride: int = 2) -> jax.Array:
    """The mean of each window."""
    total = lax.reduce_window(x, 0.0, lax.add, (1, size, size, 1), (1, stride, stride, 1), "SAME")
    return total / (size * size)


def conv_bn_relu(p: Params, x: jax.Array, channels: int, size: int | tuple[int, int] = 3,
                 stride: int = 1, groups: int = 1) -> jax.Array:  # fmt: skip
    """The usual block of a convolutional network."""
    return jax.nn.relu(batch_norm(p, conv(p, x, channels, size, stride=stride, groups=groups)))


def attention(
    p: Params, x: jax.Array, context: jax.Array, heads: int, *, causal: bool = False,
    bias: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """Multi-head attention of x [B, S, F] to a context [B, T, F]; Vaswani et al. 2017."""
    width = x.shape[-1] // heads
    query, key, value = (
        dense(p, source, x.shape[-1]).reshape(*source.shape[:2], heads, width)
        for source in (x, context, context)
    )
    scores = jnp.einsum("bshd,bthd->bhst", query, key) * width**-0.5
    if bias is not None:
        scores = scores + bias
    if causal:
        offset = scores.shape[-1] - scores.shape[-2]
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool), offset)
        scores = jnp.where(mask, scores, -1e9)
    mixed = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, axis=-1), value)
    return dense(p, mixed.reshape(x.shape), x.shape[-1])


def feed_forward(p: Params, x: jax.Array, features: int, *, gated: bool = False) -> jax.Array:
    """Two dense layers with a GELU, or a gated SiLU, between them."""
    if gated:
        hidden = jax.nn.silu(dense(p, x, features, bias=False)) * dense(p, x, features, bias=False)
        return dense(p, hidden, x.shape[-1], bias=False)
    return dense(p, jax.nn.gelu(dense(p, x, features)), x.shape[-1])


def lstm_cell(
    p: Params, x: jax.Array, state: tuple[jax.Array, jax.Array], weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """One step of an LSTM with shared weights (kernel, recurrent kernel, bias)."""
    del p
    hidden, cell = state
    kernel, recurrent, bias = weights
    gates = x @ kernel + hidden @ recurrent + bias
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def lstm_weights(p: Params, inputs: int, hidden: int) -> tuple[jax.Array, ...]:
    """The weights that all steps of an LSTM layer share."""
    return (p("kernel", inputs, 4 * hidden), p("recurrent", hidden, 4 * hidden),
            p("bias", 4 * hidden))  # fmt: skip


def lstm_layer(p: Params, steps: list[jax.Array], hidden: int) -> list[jax.Array]:
    """An unrolled LSTM over a list of [B, F] steps."""
    batch, inputs = steps[0].shape
    weights = lstm_weights(p, inputs, hidden)
    state = (jnp.zeros((batch, hidden)), jnp.zeros((batch, hidden)))
    outputs = []
    for x in steps:
        state = lstm_cell(p, x, state, weights)
        outputs.append(state[0])
    return outputs
