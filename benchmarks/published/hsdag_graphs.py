"""The three models that HSDAG places, built in JAX from their published configurations.

Inception-V3 (Szegedy et al. 2016, arXiv 1512.00567, without the auxiliary head), ResNet-50 (He et
al. 2016) and BERT-base (Devlin et al. 2019), one sample each, forward, without weights. Batch
normalisation is what it is at inference: a scale and a shift. HSDAG counts the nodes of OpenVINO's
representation, constants included; these are JAX's primitives, and gdp's ops after fusion.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gdp.graph.op_graph import OpGraph
from gdp.importers.jax.trace import trace
from pretrain.corpus import layers as nn
from pretrain.corpus.layers import Model, Params, parameter_shapes
from pretrain.corpus.transformer import encoder

TOKENS = 8  # of "Hello, my dog is cute", which HSDAG feeds to BERT
Size = int | tuple[int, int]


def conv(p: Params, x: jax.Array, channels: int, size: Size, stride: int = 1, pad: str = "SAME",
         relu: bool = True) -> jax.Array:  # fmt: skip
    """A convolution, a scale and a shift, and a rectifier."""
    height, width = (size, size) if isinstance(size, int) else size
    y = lax.conv_general_dilated(
        x, p("kernel", height, width, x.shape[-1], channels), (stride, stride), pad,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip
    y = y * p("scale", channels) + p("shift", channels)
    return jax.nn.relu(y) if relu else y


def _pool(x: jax.Array, stride: int = 2) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, stride, stride, 1), "VALID")


def _head(p: Params, x: jax.Array) -> jax.Array:
    with p.scope("head"):
        return nn.dense(p, x.mean((1, 2)), 1000)


def _chain(p: Params, x: jax.Array, *steps: tuple[int, Size]) -> jax.Array:
    for channels, size in steps:
        x = conv(p, x, channels, size)
    return x


def _a(p: Params, x: jax.Array, pooled: int) -> jax.Array:
    return jnp.concatenate([
        _chain(p, x, (64, 1)), _chain(p, x, (48, 1), (64, 5)),
        _chain(p, x, (64, 1), (96, 3), (96, 3)), _chain(p, nn.avg_pool(x, 3, 1), (pooled, 1)),
    ], axis=-1)  # fmt: skip


def _c(p: Params, x: jax.Array, c: int) -> jax.Array:
    return jnp.concatenate([
        _chain(p, x, (192, 1)), _chain(p, x, (c, 1), (c, (1, 7)), (192, (7, 1))),
        _chain(p, x, (c, 1), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (192, (1, 7))),
        _chain(p, nn.avg_pool(x, 3, 1), (192, 1)),
    ], axis=-1)  # fmt: skip


def _e(p: Params, x: jax.Array) -> jax.Array:
    b, d = _chain(p, x, (384, 1)), _chain(p, x, (448, 1), (384, 3))
    forked = [_chain(p, y, (384, size)) for y in (b, d) for size in ((1, 3), (3, 1))]
    last = _chain(p, nn.avg_pool(x, 3, 1), (192, 1))
    return jnp.concatenate([_chain(p, x, (320, 1)), *forked, last], axis=-1)


def _reduce(p: Params, x: jax.Array, number: int) -> jax.Array:
    """The two blocks that halve the image."""
    if number == 0:
        a = conv(p, x, 384, 3, 2, "VALID")
        b = conv(p, _chain(p, x, (64, 1), (96, 3)), 96, 3, 2, "VALID")
    else:
        a = conv(p, _chain(p, x, (192, 1)), 320, 3, 2, "VALID")
        b = conv(p, _chain(p, x, (192, 1), (192, (1, 7)), (192, (7, 1))), 192, 3, 2, "VALID")
    return jnp.concatenate([a, b, _pool(x)], axis=-1)


def inception_v3() -> tuple[Model, Any]:
    """Inception-V3 on an image of 299 by 299."""

    def model(p: Params, x: jax.Array) -> jax.Array:
        with p.scope("stem"):
            x = conv(p, conv(p, x, 32, 3, 2, "VALID"), 32, 3, 1, "VALID")
            x = _pool(conv(p, x, 64, 3))
            x = _pool(conv(p, conv(p, x, 80, 1), 192, 3, 1, "VALID"))
        blocks: list[Callable[[Params, jax.Array], jax.Array]] = [
            *(lambda p, x, n=n: _a(p, x, n) for n in (32, 64, 64)),
            lambda p, x: _reduce(p, x, 0),
            *(lambda p, x, n=n: _c(p, x, n) for n in (128, 160, 160, 192)),
            lambda p, x: _reduce(p, x, 1),
            _e,
            _e,
        ]
        for number, block in enumerate(blocks):
            with p.scope(f"block{number}"):
                x = block(p, x)
        return _head(p, x)

    return model, nn.floats(1, 299, 299, 3)


def resnet50() -> tuple[Model, Any]:
    """ResNet-50 on an image of 224 by 224."""

    def block(p: Params, x: jax.Array, c: int, stride: int) -> jax.Array:
        y = conv(p, conv(p, conv(p, x, c, 1), c, 3, stride), 4 * c, 1, relu=False)
        if x.shape != y.shape:
            x = conv(p, x, 4 * c, 1, stride, relu=False)
        return jax.nn.relu(x + y)

    def model(p: Params, x: jax.Array) -> jax.Array:
        with p.scope("stem"):
            x = nn.max_pool(conv(p, x, 64, 7, 2), 3)
        for stage, count in enumerate((3, 4, 6, 3)):
            for index in range(count):
                with p.scope(f"stage{stage}_{index}"):
                    x = block(p, x, 64 * 2**stage, 2 if index == 0 and stage > 0 else 1)
        return _head(p, x)

    return model, nn.floats(1, 224, 224, 3)


def bert_base() -> tuple[Model, Any]:
    """BERT-base on eight tokens, with a head over the vocabulary."""
    return encoder(layers=12, features=768, heads=12, batch=1, steps=TOKENS)


def graph_of(name: str, built: tuple[Model, Any]) -> OpGraph:
    """The traced forward pass of a model."""
    model, batch = built
    return trace(
        lambda values, inputs: model(Params(values), inputs), parameter_shapes(model, batch), batch,
        weight_argnums=0, name=name,
    )  # fmt: skip


PUBLISHED = {"inception-v3": (728, 764), "resnet-50": (396, 411), "bert-base": (1009, 1071)}
"""Nodes and edges of HSDAG's table 1."""
MODELS = {"inception-v3": inception_v3, "resnet-50": resnet50, "bert-base": bert_base}
