"""Chains of single operators of every common kind, on sequences and on images."""

import numpy as np
import onnx

from pretrain.profile_corpus.random_networks import Builder, activation, conv

UNARY = (
    "Abs", "Neg", "Exp", "Log", "Sqrt", "Erf", "Tanh", "Sigmoid", "Relu", "Gelu", "HardSwish",
    "HardSigmoid", "LeakyRelu", "Elu", "Softplus", "Reciprocal", "Floor", "Sin", "Cos",
)  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min")
REDUCE = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceSumSquare", "ReduceL2")


def random_ops(seed: int) -> onnx.ModelProto:
    """Some thirty single operators, each behind a `Neg` that leaves its input in the caches."""
    b = Builder(seed)
    for _ in range(30):
        shape = _shape(b)
        x = b.same("Neg", b.input(*shape))
        SWEEPS[int(b.rng.integers(len(SWEEPS)))](b, x)
    return b.model(f"ops{seed}")


def _shape(b: Builder) -> tuple[int, ...]:
    """Two to four axes, log-uniform in size from 64 to a million elements."""
    elements = float(np.exp(b.rng.uniform(np.log(64), np.log(1e6))))
    rank = int(b.rng.integers(2, 5))
    shares = b.rng.dirichlet(np.ones(rank))
    sizes = [max(1, round(elements ** float(share))) for share in shares]
    if rank > 2:
        sizes[0] = min(sizes[0], 8)
    return tuple(8 * round(s / 8) if s > 16 and b.rng.random() < 0.6 else s for s in sizes)


def _unary(b: Builder, x: str) -> None:
    kind = b.pick(*UNARY)
    b.same(kind, b.same("Abs", x) if kind in ("Log", "Sqrt") else x)


def _binary(b: Builder, x: str) -> None:
    shape = b.shape[x]
    form = b.pick("same", "same", "scalar", "last", "column", "constant")
    if form == "same":
        other = b.same("Abs", x)
    elif form == "scalar":
        other = b.constant(2.0, np.float32)
    elif form == "last":
        other = b.weight(shape[-1], scale=1.0)
    elif form == "column":
        other = b.op("ReduceMax", x, b.constant([-1]), shape=(*shape[:-1], 1), keepdims=1)
    else:
        other = b.weight(*shape, scale=1.0)
    b.same(b.pick(*BINARY), x, other)


def _reduce(b: Builder, x: str) -> None:
    shape = b.shape[x]
    axis = int(b.rng.integers(len(shape)))
    made = tuple(1 if i == axis else size for i, size in enumerate(shape))
    b.op(b.pick(*REDUCE), x, b.constant([axis]), shape=made, keepdims=1)


def _softmax(b: Builder, x: str) -> None:
    axis = -1 if b.rng.random() < 0.7 else int(b.rng.integers(len(b.shape[x])))
    b.same(b.pick("Softmax", "Softmax", "LogSoftmax"), x, axis=axis)


def _normalise(b: Builder, x: str) -> None:
    shape = b.shape[x]
    form = b.pick("layer", "layer", "group", "instance", "batch")
    if form == "layer" or len(shape) < 3:
        ones = b.constant(np.ones(shape[-1]), np.float32)
        b.same("LayerNormalization", x, ones, b.weight(shape[-1], scale=0.1))
        return
    ones, zeros = (b.constant(np.full(shape[1], v), np.float32) for v in (1.0, 0.0))
    if form == "instance":
        b.same("InstanceNormalization", x, ones, zeros)
    elif form == "group":
        groups = next(g for g in (8, 4, 2, 1) if shape[1] % g == 0)
        b.same("GroupNormalization", x, *(b.constant(np.full(groups, v), np.float32)
                                          for v in (1.0, 0.0)), num_groups=groups)  # fmt: skip
    else:
        b.same("BatchNormalization", x, ones, zeros, zeros, ones)


def _transpose(b: Builder, x: str) -> None:
    """Up to six axes: windows of images are cut so."""
    shape = b.shape[x]
    while len(shape) < 6 and b.rng.random() < 0.4:
        even = [i for i, size in enumerate(shape) if size % 2 == 0 and size > 2]
        if not even:
            break
        i = int(b.pick(*even))
        part = next(p for p in (7, 8, 4, 2) if shape[i] % p == 0)
        shape = (*shape[:i], shape[i] // part, part, *shape[i + 1 :])
    if shape != b.shape[x]:
        x = b.op("Reshape", x, b.constant(shape), shape=shape)
    order = b.rng.permutation(len(shape)).tolist()
    if b.rng.random() < 0.5:
        i = int(b.rng.integers(len(shape) - 1))
        order = list(range(len(shape)))
        order[i], order[i + 1] = order[i + 1], order[i]
    b.op("Transpose", x, shape=[shape[i] for i in order], perm=order)


def _concat(b: Builder, x: str) -> None:
    shape = b.shape[x]
    axis = int(b.rng.integers(len(shape)))
    parts = [x, *(b.same("Abs", x) for _ in range(int(b.rng.integers(1, 4))))]
    made = tuple(size * len(parts) if i == axis else size for i, size in enumerate(shape))
    b.op("Concat", *parts, shape=made, axis=axis)


def _slice(b: Builder, x: str) -> None:
    shape = b.shape[x]
    axis = int(np.argmax(shape)) if b.rng.random() < 0.5 else int(b.rng.integers(len(shape)))
    size = shape[axis]
    if size < 2:
        return
    step = b.pick(1, 1, 1, 2)
    start, stop = size // 4 // step * step, size
    made = tuple((stop - start + step - 1) // step if i == axis else s
                 for i, s in enumerate(shape))  # fmt: skip
    numbers = (b.constant([v]) for v in (start, stop, axis, step))
    b.op("Slice", x, *numbers, shape=made)


def _gather(b: Builder, x: str) -> None:
    rows, width = int(b.pick(500, 2000, 10000)), int(b.pick(64, 128, 256, 512, 768))
    count = int(b.pick(1, 16, 64, 128, 256))
    del x
    indices = b.constant(b.rng.integers(rows, size=(1, count)))
    scaled = b.same("Neg", b.input(rows // 10, width))
    table = b.shape[scaled][0]
    few = b.constant(b.rng.integers(table, size=(1, count)))
    del indices
    b.op("Gather", scaled, few, shape=(1, count, width), axis=0)


def _expand(b: Builder, x: str) -> None:
    shape = b.shape[x]
    row = b.op("ReduceMax", x, b.constant([-1]), shape=(*shape[:-1], 1), keepdims=1)
    b.op("Expand", row, b.constant(shape), shape=shape)


def _where(b: Builder, x: str) -> None:
    condition = b.same("Greater", x, b.constant(0.0, np.float32))
    b.same("Where", condition, x, b.same("Abs", x))


def _pad(b: Builder, x: str) -> None:
    shape = b.shape[x]
    before, after = ([0] * (len(shape) - 1) + [p] for p in (1, 2))
    b.op("Pad", x, b.constant([*before, *after]), shape=(*shape[:-1], shape[-1] + 3))


def _split(b: Builder, x: str) -> None:
    """Halves along the last axis; one output is used, as the runtime computes both anyway."""
    shape = b.shape[x]
    if shape[-1] % 2 == 0:
        half = (*shape[:-1], shape[-1] // 2)
        numbers = (b.constant([v]) for v in (0, half[-1], -1))
        first = b.op("Slice", x, *numbers, shape=half)
        b.same("Exp", first)


def _matmul(b: Builder, x: str) -> None:
    """Products of random sizes with constant and with computed right sides."""
    del x
    rows = int(np.exp(b.rng.uniform(0, np.log(700))))
    inner = int(8 * np.exp(b.rng.uniform(0, np.log(256))))
    columns = int(8 * np.exp(b.rng.uniform(0, np.log(384))))
    if rows * inner * columns > 3e8:
        rows = max(1, int(3e8 / inner / columns))
    left = b.same("Neg", b.input(rows, inner))
    if b.rng.random() < 0.7:
        made = b.op("MatMul", left, b.weight(inner, columns), shape=(rows, columns))
        activation(b, b.same("Add", made, b.weight(columns, scale=0.1)))
        return
    batch = int(b.pick(1, 2, 4, 8, 12))
    rows, inner, columns = min(rows, 256), min(inner, 128), min(columns, 256)
    left = b.same("Neg", b.input(batch, rows, inner))
    right = b.same("Neg", b.input(batch, inner, columns))
    b.op("MatMul", left, right, shape=(batch, rows, columns))


def _conv1d(b: Builder, x: str) -> None:
    """Convolutions over one axis, as speech models have them."""
    del x
    c, length = int(b.pick(64, 80, 128, 256, 384)), int(b.pick(100, 200, 400, 800))
    channels, kernel = int(b.pick(64, 128, 256, 384)), int(b.pick(1, 3, 3, 10))
    stride = int(b.pick(1, 2))
    left = b.same("Neg", b.input(1, c, length))
    size = (length - kernel) // stride + 1
    made = b.op("Conv", left, b.weight(channels, c, kernel, scale=0.05), shape=(1, channels, size),
                kernel_shape=[kernel], strides=[stride])  # fmt: skip
    activation(b, made)


def _resize(b: Builder, x: str) -> None:
    del x
    c, size = int(b.pick(16, 64, 128)), int(b.pick(7, 14, 28, 56))
    left = b.same("Neg", b.input(1, c, size, size))
    scales = b.constant([1.0, 1.0, 2.0, 2.0], np.float32)
    b.op("Resize", left, "", scales, shape=(1, c, 2 * size, 2 * size),
         mode=b.pick("nearest", "linear"))  # fmt: skip


SWEEPS = (
    _unary, _unary, _unary, _binary, _binary, _binary, _reduce, _reduce, _softmax, _softmax,
    _normalise, _normalise, _transpose, _transpose, _transpose, _concat, _slice, _gather, _expand,
    _where, _pad, _split, _matmul, _matmul, _matmul, _matmul, _conv1d, _resize,
)  # fmt: skip


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
