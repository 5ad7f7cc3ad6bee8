"""Random networks in which layouts matter: joined branches normalised before each convolution, and
attention over windows of an image."""

import numpy as np
import onnx

from pretrain.profile_corpus.sequences import attention, feed_forward, norm
from pretrain.profile_corpus.synthetic import Builder, activation, conv, normalised


def random_joined(seed: int) -> onnx.ModelProto:
    """Blocks in which every layer reads all that was made before it, normalised and scaled in one
    of several ways, none of which folds into a convolution."""
    b = Builder(seed)
    batch = b.pick(1, 1, 1, 2)
    size = b.pick(48, 64, 80, 96, 128, 144, 176, 208) if batch == 1 else b.pick(48, 64, 96)
    width = 8 * int(b.rng.integers(2, 13))
    x = activation(b, conv(b, b.input(batch, 3, size, size), width, b.pick(3, 5, 7), 2))
    form = b.pick("norm", "norm", "norm scale", "norm scale", "scale", "bare", "late norm")
    growth = b.pick(8, 16, 16, 24, 32, 32, 40, 48, 12, 20)
    inner = growth * b.pick(0, 2, 4)
    for block in range(int(b.rng.integers(2, 4))):
        if block:
            n, c, h, w = b.shape[x]
            x = conv(b, _prepared(b, x, form), max(8, c // 16 * 8), 1)
            x = _halved(b, x)
        for _ in range(int(b.rng.integers(2, 6))):
            y = _prepared(b, x, form)
            if inner:
                y = conv(b, y, inner, 1)
                y = b.same("Relu", normalised(b, y) if b.rng.random() < 0.8 else y)
            y = conv(b, y, growth, b.pick(3, 3, 3, 1, 5))
            n, c, h, w = b.shape[x]
            x = b.op("Concat", x, y, shape=(n, c + growth, h, w), axis=1)
    n, c, _, _ = b.shape[x]
    b.op("GlobalAveragePool", _prepared(b, x, form), shape=(n, c, 1, 1))
    return b.model(f"joined{seed}")


def _prepared(b: Builder, x: str, form: str) -> str:
    """Normalised, scaled and cut off at zero, as the form says."""
    c = b.shape[x][1]
    if form == "late norm":
        return normalised(b, b.same("Relu", x))
    if form in ("norm", "norm scale"):
        x = normalised(b, x)
    if form in ("scale", "norm scale"):
        factor = b.constant(np.full((c, 1, 1), 1.5), np.float32)
        x = b.same("Add", b.same("Mul", x, factor), b.weight(c, 1, 1, scale=0.1))
    return b.same("Relu", x)


def _halved(b: Builder, x: str) -> str:
    n, c, h, w = b.shape[x]
    kind, kernel = b.pick("AveragePool", "MaxPool"), b.pick(2, 2, 3)
    sides = [(s - kernel) // 2 + 1 for s in (h, w)]
    return b.op(kind, x, shape=(n, c, *sides), kernel_shape=[kernel] * 2, strides=[2, 2])


def random_windows(seed: int) -> onnx.ModelProto:
    """Two stages of attention within windows, shifted every other time, with a merging of
    neighbours between the stages."""
    b = Builder(seed)
    part = b.pick(4, 5, 7, 7, 8)
    heads, head = b.pick(2, 3, 4, 5, 6), b.pick(16, 24, 32, 32, 48)
    side = part * b.pick(2, 4, 4, 6, 8)
    while side * side * heads * head > 500_000 and side > 2 * part:
        side -= 2 * part
    style = {"norm": "op", "gelu": b.pick("op", "erf"), "gated": False,
             "mask": b.rng.random() < 0.6, "dense": b.pick("add", "gemm", "none")}  # fmt: skip
    x = b.input(1, side, side, heads * head)
    for stage in range(2):
        width = b.shape[x][-1]
        for shift in (0, part // 2):
            y = _shifted(b, norm(b, x, "op"), shift)
            y = attention(b, _split(b, y, part), heads, style)
            y = _shifted(b, _joined(b, y, part, b.shape[x]), -shift)
            x = b.same("Add", x, y)
            x = b.same("Add", x, feed_forward(b, norm(b, x, "op"), style))
        if stage == 0 and b.shape[x][1] % (2 * part) == 0:
            x = _merged(b, x)
            made = b.pick(1, 2)
            x = b.op("MatMul", norm(b, x, "op"), b.weight(4 * width, made * width),
                     shape=(*b.shape[x][:-1], made * width))  # fmt: skip
            heads *= made
    return b.model(f"windows{seed}")


def _slice(b: Builder, x: str, axis: int, start: int, stop: int, step: int = 1) -> str:
    shape = list(b.shape[x])
    shape[axis] = (stop - start + step - 1) // step
    numbers = (b.constant([v]) for v in (start, stop, axis, step))
    return b.op("Slice", x, *numbers, shape=shape)


def _shifted(b: Builder, x: str, shift: int) -> str:
    """Rolled along both sides of the image."""
    for axis in (1, 2):
        size, at = b.shape[x][axis], shift % b.shape[x][axis]
        if at:
            ends = _slice(b, x, axis, at, size), _slice(b, x, axis, 0, at)
            x = b.op("Concat", *ends, shape=b.shape[x], axis=axis)
    return x


def _split(b: Builder, x: str, part: int) -> str:
    n, h, w, c = b.shape[x]
    grid = (n, h // part, part, w // part, part, c)
    y = b.op("Reshape", x, b.constant(grid), shape=grid)
    y = b.op("Transpose", y, shape=[grid[i] for i in (0, 1, 3, 2, 4, 5)], perm=[0, 1, 3, 2, 4, 5])
    flat = (n * (h // part) * (w // part), part * part, c)
    return b.op("Reshape", y, b.constant(flat), shape=flat)


def _joined(b: Builder, x: str, part: int, whole: tuple[int, ...]) -> str:
    n, h, w, c = whole
    grid = (n, h // part, w // part, part, part, c)
    y = b.op("Reshape", x, b.constant(grid), shape=grid)
    y = b.op("Transpose", y, shape=[grid[i] for i in (0, 1, 3, 2, 4, 5)], perm=[0, 1, 3, 2, 4, 5])
    return b.op("Reshape", y, b.constant(whole), shape=whole)


def _merged(b: Builder, x: str) -> str:
    """Four neighbours side by side."""
    n, h, w, c = b.shape[x]
    parts = [
        _slice(b, _slice(b, x, 1, i, h, 2), 2, j, w, 2) for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))
    ]
    return b.op("Concat", *parts, shape=(n, h // 2, w // 2, 4 * c), axis=3)
