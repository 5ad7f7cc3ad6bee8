"""Convolutional networks of the corpus. Each builder returns a model and its batch of shapes."""

from typing import Any

import jax
import jax.numpy as jnp

from pretrain.corpus import layers as nn
from pretrain.corpus.layers import Model, Params

Built = tuple[Model, Any]


def _classifier(p: Params, x: jax.Array, classes: int = 1000) -> jax.Array:
    with p.scope("head"):
        return nn.dense(p, x.mean((1, 2)), classes)


def vgg(depth: int = 16, width: int = 64, batch: int = 8, image: int = 224) -> Built:
    """VGG of 11, 13, 16 or 19 layers: Simonyan and Zisserman 2015."""
    counts = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}

    def model(p: Params, x: jax.Array) -> jax.Array:
        for stage, count in enumerate(counts[depth]):
            with p.scope(f"stage{stage}"):
                for _ in range(count):
                    channels = width * min(2**stage, 8)
                    x = jax.nn.relu(nn.conv(p, x, channels, bias=True))
                x = nn.max_pool(x)
        x = x.reshape(x.shape[0], -1)
        with p.scope("head"):
            x = jax.nn.relu(nn.dense(p, x, 64 * width))
            x = jax.nn.relu(nn.dense(p, x, 64 * width))
            return nn.dense(p, x, 1000)

    return model, nn.floats(batch, image, image, 3)


def resnet(depth: int = 50, width: int = 64, batch: int = 8, image: int = 224) -> Built:
    """ResNet with bottlenecks (basic blocks below 50 layers): He et al. 2016."""
    counts = {
        18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3),
        152: (3, 8, 36, 3),
    }  # fmt: skip

    def block(p: Params, x: jax.Array, channels: int, stride: int) -> jax.Array:
        if depth < 50:
            y = nn.conv_bn_relu(p, x, channels, 3, stride)
            y = nn.batch_norm(p, nn.conv(p, y, channels))
        else:
            y = nn.conv_bn_relu(p, x, channels, 1)
            y = nn.conv_bn_relu(p, y, channels, 3, stride)
            y = nn.batch_norm(p, nn.conv(p, y, 4 * channels, 1))
        if x.shape != y.shape:
            x = nn.batch_norm(p, nn.conv(p, x, y.shape[-1], 1, stride=stride))
        return jax.nn.relu(x + y)

    def model(p: Params, x: jax.Array) -> jax.Array:
        with p.scope("stem"):
            x = nn.max_pool(nn.conv_bn_relu(p, x, width, 7, 2), 3)
        for stage, count in enumerate(counts[depth]):
            for index in range(count):
                with p.scope(f"stage{stage}_{index}"):
                    x = block(p, x, width * 2**stage, 2 if index == 0 and stage > 0 else 1)
        return _classifier(p, x)

    return model, nn.floats(batch, image, image, 3)


def inception(blocks: int = 9, width: int = 32, batch: int = 8, image: int = 224) -> Built:
    """Inception blocks of four branches with factorised filters: Szegedy et al. 2016."""

    def block(p: Params, x: jax.Array, c: int, stride: int) -> jax.Array:
        with p.scope("b1"):
            a = nn.conv_bn_relu(p, x, 2 * c, 1, stride)
        with p.scope("b5"):
            b = nn.conv_bn_relu(p, nn.conv_bn_relu(p, x, c, 1), 2 * c, 5, stride)
        with p.scope("b7"):
            d = nn.conv_bn_relu(p, x, c, 1)
            d = nn.conv_bn_relu(p, nn.conv_bn_relu(p, d, c, (1, 7)), c, (7, 1))
            d = nn.conv_bn_relu(p, d, 2 * c, 3, stride)
        with p.scope("pool"):
            e = nn.conv_bn_relu(p, nn.max_pool(x, 3, stride), c, 1)
        return jnp.concatenate([a, b, d, e], axis=-1)

    def model(p: Params, x: jax.Array) -> jax.Array:
        with p.scope("stem"):
            x = nn.conv_bn_relu(p, x, width, 3, 2)
            x = nn.max_pool(nn.conv_bn_relu(p, x, 2 * width, 3), 3)
        for index in range(blocks):
            with p.scope(f"block{index}"):
                x = block(p, x, width * (1 + index // 3), 2 if index % 3 == 2 else 1)
        return _classifier(p, x)

    return model, nn.floats(batch, image, image, 3)


def densenet(
    counts: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32, batch: int = 8, image: int = 224
) -> Built:
    """DenseNet: every layer reads all before it in its block: Huang et al. 2017."""

    def model(p: Params, x: jax.Array) -> jax.Array:
        with p.scope("stem"):
            x = nn.max_pool(nn.conv_bn_relu(p, x, 2 * growth, 7, 2), 3)
        for stage, count in enumerate(counts):
            made = [x]
            for index in range(count):
                with p.scope(f"dense{stage}_{index}"):
                    y = jnp.concatenate(made, axis=-1)
                    y = nn.conv(p, jax.nn.relu(nn.batch_norm(p, y)), 4 * growth, 1)
                    made.append(nn.conv(p, jax.nn.relu(nn.batch_norm(p, y)), growth))
            x = jnp.concatenate(made, axis=-1)
            if stage < len(counts) - 1:
                with p.scope(f"transition{stage}"):
                    x = nn.conv(p, jax.nn.relu(nn.batch_norm(p, x)), x.shape[-1] // 2, 1)
                    x = nn.avg_pool(x)
        return _classifier(p, x)

    return model, nn.floats(batch, image, image, 3)


def mobilenet(width: int = 16, repeat: int = 1, batch: int = 8, image: int = 224) -> Built:
    """Inverted residuals with depthwise convolutions, MobileNetV2: Sandler et al. 2018."""
    stages = ((1, 1, 1, 1), (6, 1.5, 2, 2), (6, 2, 3, 2), (6, 4, 4, 2), (6, 6, 3, 1), (6, 10, 3, 2))
    return _mobile_blocks(stages, width, repeat, batch, image, excite=False)


def efficientnet(width: int = 16, repeat: int = 1, batch: int = 8, image: int = 224) -> Built:
    """MobileNet blocks with squeeze and excitation, EfficientNet: Tan and Le 2019."""
    stages = (
        (1, 1, 1, 1), (6, 1.5, 2, 2), (6, 2.5, 2, 2), (6, 5, 3, 2), (6, 7, 3, 1), (6, 12, 4, 2),
        (6, 20, 1, 1),
    )  # fmt: skip
    return _mobile_blocks(stages, width, repeat, batch, image, excite=True)


def _mobile_blocks(
    stages: tuple[tuple[float, ...], ...], width: int, repeat: int, batch: int, image: int, *,
    excite: bool,
) -> Built:  # fmt: skip
    def block(p: Params, x: jax.Array, expand: int, channels: int, stride: int) -> jax.Array:
        y, hidden = x, x.shape[-1] * expand
        if expand > 1:
            y = jax.nn.relu6(nn.batch_norm(p, nn.conv(p, y, hidden, 1)))
        y = nn.conv(p, y, hidden, 3, stride=stride, groups=hidden)
        y = jax.nn.relu6(nn.batch_norm(p, y))
        if excite:
            gate = jax.nn.silu(nn.dense(p, y.mean((1, 2)), max(1, x.shape[-1] // 4)))
            gate = jax.nn.sigmoid(nn.dense(p, gate, hidden))
            y = y * gate[:, None, None, :]
        y = nn.batch_norm(p, nn.conv(p, y, channels, 1))
        return x + y if x.shape == y.shape else y

    def model(p: Params, x: jax.Array) -> jax.Array:
        with p.scope("stem"):
            x = nn.conv_bn_relu(p, x, 2 * width, 3, 2)
        for stage, (expand, scale, count, stride) in enumerate(stages):
            for index in range(int(count) * repeat):
                with p.scope(f"stage{stage}_{index}"):
                    channels = int(width * scale)
                    x = block(p, x, int(expand), channels, int(stride) if index == 0 else 1)
        return _classifier(p, nn.conv_bn_relu(p, x, 80 * width, 1))

    return model, nn.floats(batch, image, image, 3)


def unet(depth: int = 4, width: int = 32, batch: int = 4, image: int = 128) -> Built:
    """U-Net: an encoder whose stages the decoder reads again: Ronneberger et al. 2015."""

    def model(p: Params, x: jax.Array) -> jax.Array:
        skips = []
        for level in range(depth):
            with p.scope(f"down{level}"):
                x = nn.conv_bn_relu(p, nn.conv_bn_relu(p, x, width * 2**level), width * 2**level)
            skips.append(x)
            x = nn.max_pool(x)
        with p.scope("middle"):
            x = nn.conv_bn_relu(p, nn.conv_bn_relu(p, x, width * 2**depth), width * 2**depth)
        for level in reversed(range(depth)):
            with p.scope(f"up{level}"):
                x = nn.conv(p, nn.upsample(x), width * 2**level, 2)
                x = jnp.concatenate([skips[level], x], axis=-1)
                x = nn.conv_bn_relu(p, nn.conv_bn_relu(p, x, width * 2**level), width * 2**level)
        return nn.conv(p, x, 3, 1)

    return model, nn.floats(batch, image, image, 3)


def nas_cells(
    cells: int = 6, width: int = 32, batch: int = 8, image: int = 64, amoeba: bool = False
) -> Built:
    """Cells that read the two before them, five pairs of operations each.

    The pairs are those of NASNet-A (Zoph et al. 2018) or, with `amoeba`, AmoebaNet-A (Real et al.
    2019), with separable convolutions reduced to one pass.
    """
    nasnet = (("s5", 0, "s3", 1), ("s5", 1, "s3", 1), ("a3", 0, "id", 1), ("a3", 1, "a3", 1),
              ("s3", 0, "id", 0))  # fmt: skip
    amoebanet = (("a3", 0, "m3", 1), ("s3", 1, "id", 0), ("s3", 2, "s5", 1), ("a3", 3, "id", 1),
                 ("s3", 4, "s3", 2))  # fmt: skip

    def operation(p: Params, name: str, x: jax.Array, channels: int) -> jax.Array:
        if name[0] == "s":
            x = nn.conv(p, jax.nn.relu(x), channels, int(name[1]), groups=channels)
            return nn.batch_norm(p, nn.conv(p, x, channels, 1))
        if name[0] == "a":
            return nn.avg_pool(x, 3, 1)
        return nn.max_pool(x, 3, 1) if name[0] == "m" else x

    def fit(p: Params, x: jax.Array, channels: int, size: int) -> jax.Array:
        stride = x.shape[1] // size
        return nn.batch_norm(p, nn.conv(p, jax.nn.relu(x), channels, 1, stride=stride))

    def model(p: Params, x: jax.Array) -> jax.Array:
        before = last = nn.conv_bn_relu(p, x, width)
        for cell in range(cells):
            reduce = cell % 3 == 2
            channels = width * 2 ** ((cell + 1) // 3)
            size = last.shape[1] // (2 if reduce else 1)
            with p.scope(f"cell{cell}"):
                states = [fit(p, before, channels, size), fit(p, last, channels, size)]
                for left, i, right, j in amoebanet if amoeba else nasnet:
                    states.append(
                        operation(p, left, states[i], channels)
                        + operation(p, right, states[j], channels)
                    )
                before, last = last, jnp.concatenate(states[2:], axis=-1)
        return _classifier(p, jax.nn.relu(last))

    return model, nn.floats(batch, image, image, 3)
