"""Random transformer-like networks, and chains of single operators of every common kind."""

import numpy as np
import onnx

from pretrain.profile_corpus.synthetic import Builder, activation


def random_transformer(seed: int) -> onnx.ModelProto:
    """Two or three blocks of attention and feed-forward layers, written in one of several ways."""
    b = Builder(seed)
    heads, head = b.pick(2, 3, 4, 6, 8, 12), b.pick(32, 32, 48, 64, 64, 80, 128)
    width = heads * head
    length = b.pick(1, 8, 16, 32, 49, 64, 77, 100, 128, 196, 197, 256)
    batch = b.pick(1, 1, 1, 2, 4) if length * width < 60_000 else 1
    style = {
        "norm": b.pick("op", "op", "parts", "rms"),
        "gelu": b.pick("op", "erf", "tanh", "relu", "silu"),
        "gated": b.rng.random() < 0.3,
        "mask": b.rng.random() < 0.5,
        "dense": b.pick("add", "add", "gemm", "none"),
    }
    x = b.input(batch, length, width)
    for _ in range(2 if width > 700 else 3):
        x = b.same("Add", x, attention(b, norm(b, x, style["norm"]), heads, style))
        x = b.same("Add", x, feed_forward(b, norm(b, x, style["norm"]), style))
    norm(b, x, style["norm"])
    return b.model(f"transformer{seed}")


def _dense(b: Builder, x: str, width: int, form: str) -> str:
    *lead, inner = b.shape[x]
    if form == "gemm":
        rows = int(np.prod(lead))
        flat = b.op("Reshape", x, b.constant([rows, inner]), shape=(rows, inner))
        made = b.op("Gemm", flat, b.weight(width, inner), b.weight(width, scale=0.1),
                    shape=(rows, width), transB=1)  # fmt: skip
        return b.op("Reshape", made, b.constant([*lead, width]), shape=(*lead, width))
    made = b.op("MatMul", x, b.weight(inner, width), shape=(*lead, width))
    return b.same("Add", made, b.weight(width, scale=0.1)) if form == "add" else made


def norm(b: Builder, x: str, form: str) -> str:
    width = b.shape[x][-1]
    scale = b.constant(np.ones(width), np.float32)
    row = (*b.shape[x][:-1], 1)
    if form == "op":
        return b.same("LayerNormalization", x, scale, b.weight(width, scale=0.1), axis=-1)
    axes, eps = b.constant([-1]), b.constant(1e-5, np.float32)
    centred = x
    if form == "parts":
        centred = b.same("Sub", x, b.op("ReduceMean", x, axes, shape=row, keepdims=1))
    square = b.same("Pow", centred, b.constant(2.0, np.float32))
    variance = b.op("ReduceMean", square, axes, shape=row, keepdims=1)
    root = b.op("Sqrt", b.same("Add", variance, eps), shape=row)
    made = b.same("Mul", b.same("Div", centred, root), scale)
    return b.same("Add", made, b.weight(width, scale=0.1)) if form == "parts" else made


def _heads(b: Builder, x: str, heads: int, last: bool = False) -> str:
    n, s, width = b.shape[x]
    split = b.op("Reshape", x, b.constant([n, s, heads, width // heads]),
                 shape=(n, s, heads, width // heads))  # fmt: skip
    if last:
        return b.op("Transpose", split, shape=(n, heads, width // heads, s), perm=[0, 2, 3, 1])
    return b.op("Transpose", split, shape=(n, heads, s, width // heads), perm=[0, 2, 1, 3])


def attention(b: Builder, x: str, heads: int, style: dict) -> str:
    n, s, width = b.shape[x]
    form = str(style["dense"])
    query = _heads(b, _dense(b, x, width, form), heads)
    key = _heads(b, _dense(b, x, width, form), heads, last=True)
    value = _heads(b, _dense(b, x, width, form), heads)
    scores = b.op("MatMul", query, key, shape=(n, heads, s, s))
    scores = b.same(b.pick("Mul", "Div"), scores, b.constant(8.0, np.float32))
    if style["mask"]:
        scores = b.same("Add", scores, b.weight(1, 1, s, s, scale=1.0))
    shares = b.same("Softmax", scores, axis=-1)
    mixed = b.op("MatMul", shares, value, shape=(n, heads, s, width // heads))
    back = b.op("Transpose", mixed, shape=(n, s, heads, width // heads), perm=[0, 2, 1, 3])
    joined = b.op("Reshape", back, b.constant([n, s, width]), shape=(n, s, width))
    return _dense(b, joined, width, form)


def feed_forward(b: Builder, x: str, style: dict) -> str:
    width = b.shape[x][-1]
    inner = int(width * b.pick(2, 3, 4, 4))
    hidden = _curve(b, _dense(b, x, inner, str(style["dense"])), str(style["gelu"]))
    if style["gated"]:
        hidden = b.same("Mul", hidden, _dense(b, x, inner, "none"))
    return _dense(b, hidden, width, str(style["dense"]))


def _curve(b: Builder, x: str, form: str) -> str:
    """An activation as exporters write it."""

    def number(value: float) -> str:
        return b.constant(value, np.float32)

    if form == "op":
        return b.same("Gelu", x)
    if form == "erf":
        erf = b.same("Erf", b.same("Div", x, number(2.0**0.5)))
        return b.same("Mul", b.same("Mul", x, b.same("Add", erf, number(1.0))), number(0.5))
    if form == "tanh":
        cube = b.same("Mul", b.same("Pow", x, number(3.0)), number(0.044715))
        inner = b.same("Mul", b.same("Add", x, cube), number(0.7978845608))
        half = b.same("Mul", x, number(0.5))
        return b.same("Mul", half, b.same("Add", b.same("Tanh", inner), number(1.0)))
    if form == "silu":
        return b.same("Mul", x, b.same("Sigmoid", x))
    return b.same("Relu", x)


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
