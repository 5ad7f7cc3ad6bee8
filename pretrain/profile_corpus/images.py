"""Chains of single operators on images, behind convolutions and behind plain operators."""

import numpy as np
import onnx

from pretrain.profile_corpus.synthetic import Builder, activation, conv


def random_image_ops(seed: int) -> onnx.ModelProto:
    """Some twenty operators, each on an image of its own."""
    b = Builder(seed)
    for _ in range(20):
        batch, channels = b.pick(1, 1, 1, 2, 4), 8 * int(b.rng.integers(1, 33))
        limit = int(np.sqrt(8e5 / (batch * channels)))
        size = int(b.rng.integers(4, max(6, min(limit, 112))))
        x = b.input(batch, channels, size, size)
        if b.rng.random() < 0.5:
            x = activation(b, conv(b, x, 8 * int(b.rng.integers(1, 25)), 1))
        else:
            x = b.same("Neg", x)
        IMAGE_OPS[int(b.rng.integers(len(IMAGE_OPS)))](b, x)
    return b.model(f"image_ops{seed}")


def _lrn(b: Builder, x: str) -> None:
    b.same("LRN", x, size=5, alpha=1e-4, beta=0.75, bias=1.0)


def _pool(b: Builder, x: str) -> None:
    n, c, h, w = b.shape[x]
    kernel, stride = b.pick((2, 2), (3, 2), (3, 2), (3, 1), (5, 1), (7, 7), (5, 3))
    if min(h, w) < kernel:
        return
    sides = [(s - kernel) // stride + 1 for s in (h, w)]
    b.op(b.pick("MaxPool", "MaxPool", "AveragePool"), x, shape=(n, c, *sides),
         kernel_shape=[kernel] * 2, strides=[stride] * 2)  # fmt: skip


def _global_pool(b: Builder, x: str) -> None:
    n, c, _, _ = b.shape[x]
    if b.rng.random() < 0.5:
        b.op("GlobalAveragePool", x, shape=(n, c, 1, 1))
    else:
        b.op("ReduceMean", x, b.constant([2, 3]), shape=(n, c, 1, 1), keepdims=1)


def _batch_norm(b: Builder, x: str) -> None:
    c = b.shape[x][1]
    ones, zeros = (b.constant(np.full(c, v), np.float32) for v in (1.0, 0.0))
    y = b.same("BatchNormalization", b.same("Abs", x), ones, zeros, zeros, ones)
    if b.rng.random() < 0.6:
        b.same("Relu", y)


def _channel_scale(b: Builder, x: str) -> None:
    """Scale, shift or gate by channel, with constants or with computed values."""
    n, c, _, _ = b.shape[x]
    if b.rng.random() < 0.5:
        gate = b.op("GlobalAveragePool", x, shape=(n, c, 1, 1))
        b.same("Mul", x, b.same("Sigmoid", gate))
        return
    y = b.same("Mul", b.same("Abs", x), b.constant(np.ones((c, 1, 1)), np.float32))
    b.same("Relu", b.same("Add", y, b.constant(np.ones((c, 1, 1)), np.float32)))


def _join(b: Builder, x: str) -> None:
    n, c, h, w = b.shape[x]
    count = int(b.rng.integers(2, 5))
    plain = b.rng.random() < 0.5
    parts = [x if i == 0 else b.same("Abs", x) if plain else conv(b, x, c, 1)
             for i in range(count)]  # fmt: skip
    joined = b.op("Concat", *parts, shape=(n, c * count, h, w), axis=1)
    if b.rng.random() < 0.5:
        conv(b, joined, 32, 1)


def _shuffle(b: Builder, x: str) -> None:
    n, c, h, w = b.shape[x]
    groups = b.pick(2, 4, 8)
    split = (n, groups, c // groups, h, w)
    y = b.op("Reshape", x, b.constant(split), shape=split)
    turned = (n, c // groups, groups, h, w)
    y = b.op("Transpose", y, shape=turned, perm=[0, 2, 1, 3, 4])
    y = b.op("Reshape", y, b.constant([n, c, h, w]), shape=(n, c, h, w))
    conv(b, y, c, 1, 1, groups)


def _scaled_conv(b: Builder, x: str) -> None:
    """A normalised convolution with a scale and a shift of its own, as some frameworks write it."""
    c = 8 * int(b.rng.integers(1, 25))
    ones, zeros = (b.constant(np.full(c, v), np.float32) for v in (1.0, 0.0))
    y = b.same("BatchNormalization", conv(b, x, c, b.pick(1, 3)), ones, zeros, zeros, ones)
    y = b.same("Mul", y, b.constant(np.full((c, 1, 1), 1.5), np.float32))
    b.same("Relu", b.same("Add", y, b.constant(np.full((c, 1, 1), 0.5), np.float32)))


def _residual(b: Builder, x: str) -> None:
    y = b.same("Add", x, b.same("Abs", x))
    b.same("Relu", y)


def _tokens(b: Builder, x: str) -> None:
    """An image as a sequence, normalised."""
    n, c, h, w = b.shape[x]
    flat = b.op("Reshape", x, b.constant([n, c, h * w]), shape=(n, c, h * w))
    turned = b.op("Transpose", flat, shape=(n, h * w, c), perm=[0, 2, 1])
    ones = b.constant(np.ones(c), np.float32)
    b.same("LayerNormalization", turned, ones, b.weight(c, scale=0.1), axis=-1)


def _channels_last(b: Builder, x: str) -> None:
    n, c, h, w = b.shape[x]
    turned = b.op("Transpose", x, shape=(n, h, w, c), perm=[0, 2, 3, 1])
    ones = b.constant(np.ones(c), np.float32)
    y = b.same("LayerNormalization", turned, ones, b.weight(c, scale=0.1), axis=-1)
    b.op("Transpose", y, shape=(n, c, h, w), perm=[0, 3, 1, 2])


def _windows(b: Builder, x: str) -> None:
    """Windows of an image, as attention over windows cuts them."""
    n, c, h, w = b.shape[x]
    part = next((p for p in (7, 8, 4, 2) if h % p == 0 and h > p), 1)
    if part == 1:
        return
    last = b.op("Transpose", x, shape=(n, h, w, c), perm=[0, 2, 3, 1])
    split = (n, h // part, part, w // part, part, c)
    y = b.op("Reshape", last, b.constant(split), shape=split)
    b.op("Transpose", y, shape=[split[i] for i in (0, 1, 3, 2, 4, 5)], perm=[0, 1, 3, 2, 4, 5])


IMAGE_OPS = (
    _lrn, _lrn, _pool, _pool, _pool, _global_pool, _batch_norm, _batch_norm, _channel_scale,
    _channel_scale, _scaled_conv, _scaled_conv, _join, _join, _join, _shuffle, _residual, _tokens,
    _channels_last, _windows,
)  # fmt: skip
