"""Random networks: convolutional, transformer-like, densely joined, and over windows of images.

They cover shapes that no published architecture has. Operators follow one another, so that each
finds the caches as it would inside a network, and weights are read once per run.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET, IR_VERSION = 20, 9


class Builder:
    """An ONNX graph that grows at its end."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[str] = []
        self.shape: dict[str, tuple[int, ...]] = {}

    def input(self, *shape: int) -> str:
        name = f"in{len(self.inputs)}"
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        self.shape[name] = shape
        return name

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """A normal weight that keeps activations in range."""
        name = f"w{len(self.weights)}"
        fan_in = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
        deviation = float(1.0 / np.sqrt(max(fan_in, 1))) if scale is None else scale
        values = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(deviation)
        self.weights.append(numpy_helper.from_array(values, name))
        self.shape[name] = shape
        return name

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        name = f"w{len(self.weights)}"
        array = np.array(values, dtype=dtype)
        self.weights.append(numpy_helper.from_array(array, name))
        self.shape[name] = array.shape
        return name

    def op(self, kind: str, *inputs: str, shape: Sequence[int], **attributes: Any) -> str:
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        self.shape[name] = tuple(int(size) for size in shape)
        return name

    def same(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """An op whose output has the first input's shape."""
        return self.op(kind, *inputs, shape=self.shape[inputs[0]], **attributes)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def model(self, name: str) -> onnx.ModelProto:
        read = {value for node in self.nodes for value in node.input}
        outputs = [node.output[0] for node in self.nodes if node.output[0] not in read]
        graph = helper.make_graph(
            self.nodes, name, self.inputs,
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, self.shape[n]) for n in outputs],
            self.weights,
        )  # fmt: skip
        del graph.value_info[:]
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets)


def activation(b: Builder, x: str) -> str:
    """One of the usual activations, or none."""
    kind = b.pick("Relu", "Relu", "Relu6", "Silu", "HardSwish", "Gelu", "LeakyRelu", "Sigmoid", "")
    if kind == "Relu6":
        low, high = b.constant(0.0, np.float32), b.constant(6.0, np.float32)
        return b.same("Clip", x, low, high)
    if kind == "Silu":
        return b.same("Mul", x, b.same("Sigmoid", x))
    return b.same(kind, x) if kind else x


def conv(
    b: Builder, x: str, channels: int, kernel: int, stride: int = 1, groups: int = 1,
    dilation: int = 1,
) -> str:  # fmt: skip
    n, c, h, w = b.shape[x]
    pad = dilation * (kernel - 1) // 2
    weight = b.weight(channels, c // groups, kernel, kernel)
    size = [(s + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for s in (h, w)]
    return b.op(
        "Conv", x, weight, b.weight(channels, scale=0.1), shape=(n, channels, *size),
        kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, group=groups,
        dilations=[dilation] * 2,
    )  # fmt: skip


def normalised(b: Builder, x: str) -> str:
    c = b.shape[x][1]
    one = b.constant(np.ones(c), np.float32)
    zero = b.constant(np.zeros(c), np.float32)
    return b.same("BatchNormalization", x, one, zero, zero, one)


def squeeze_excite(b: Builder, x: str) -> str:
    n, c, _, _ = b.shape[x]
    pooled = b.op("GlobalAveragePool", x, shape=(n, c, 1, 1))
    inner = b.same("Relu", conv(b, pooled, max(8, c // 4), 1))
    gate = b.same("Sigmoid", conv(b, inner, c, 1))
    return b.same("Mul", x, gate)


def random_cnn(seed: int) -> onnx.ModelProto:
    """Blocks of many kinds at falling resolution."""
    b = Builder(seed)
    batch = b.pick(1, 1, 1, 2, 4)
    size = b.pick(56, 64, 96, 112, 128, 160, 192, 224) if batch == 1 else b.pick(32, 56, 64, 96)
    width = 8 * int(b.rng.integers(1, 9)) if b.rng.random() < 0.85 else int(b.rng.integers(9, 70))
    x = conv(b, b.input(batch, 3, size, size), width, b.pick(3, 5, 7, 4), b.pick(1, 2, 2, 4))
    x = activation(b, normalised(b, x) if b.rng.random() < 0.5 else x)
    for _ in range(int(b.rng.integers(6, 13))):
        x = BLOCKS[int(b.rng.integers(len(BLOCKS)))](b, x)
        n, c, h, w = b.shape[x]
        if min(h, w) > 14 and b.rng.random() < 0.45:
            x = _downsample(b, x)
        if c * h * w * n > 3_000_000:
            x = conv(b, x, max(8, c // 4), 1)
    n, c, _, _ = b.shape[x]
    pooled = b.op("GlobalAveragePool", x, shape=(n, c, 1, 1))
    flat = b.op("Flatten", pooled, shape=(n, c))
    out = b.pick(10, 100, 1000)
    b.op("Gemm", flat, b.weight(c, out), b.weight(out, scale=0.1), shape=(n, out))
    return b.model(f"cnn{seed}")


def _downsample(b: Builder, x: str) -> str:
    n, c, h, w = b.shape[x]
    kind = b.pick("MaxPool", "AveragePool", "conv", "conv", "patch")
    if kind == "conv":
        return activation(b, conv(b, x, _wider(b, c), b.pick(1, 3, 3, 5), 2))
    if kind == "patch" and h % 2 == 0:
        channels = _wider(b, c)
        return b.op(
            "Conv", x, b.weight(channels, c, 2, 2), shape=(n, channels, h // 2, w // 2),
            kernel_shape=[2, 2], strides=[2, 2],
        )  # fmt: skip
    kernel = b.pick(2, 3)
    pad = kernel // 2 if kernel == 3 else 0
    size = [(s + 2 * pad - kernel) // 2 + 1 for s in (h, w)]
    return b.op(
        "MaxPool" if kind == "patch" else kind, x, shape=(n, c, *size), kernel_shape=[kernel] * 2,
        strides=[2, 2], pads=[pad] * 4,
    )  # fmt: skip


def _wider(b: Builder, channels: int) -> int:
    factor = b.pick(1, 1.5, 2, 2, 3)
    return max(8, min(1024, int(channels * factor) // 8 * 8))


def _plain(b: Builder, x: str) -> str:
    c = _wider(b, b.shape[x][1]) if b.rng.random() < 0.5 else b.shape[x][1]
    x = conv(b, x, c, b.pick(1, 1, 3, 3, 3, 5), 1, 1, b.pick(1, 1, 1, 1, 2))
    return activation(b, normalised(b, x) if b.rng.random() < 0.5 else x)


def _bottleneck(b: Builder, x: str) -> str:
    c = b.shape[x][1]
    y = activation(b, conv(b, x, max(8, c // b.pick(1, 2, 4)), 1))
    groups = b.pick(1, 1, 2, 4)
    inner = b.shape[y][1]
    y = activation(b, conv(b, y, inner, 3, 1, groups if inner % groups == 0 else 1))
    return b.same(b.pick("Relu", "Relu", "Gelu"), b.same("Add", conv(b, y, c, 1), x))


def _inverted(b: Builder, x: str) -> str:
    c = b.shape[x][1]
    inner = c * b.pick(1, 2, 4, 6) if c < 200 else c
    y = activation(b, conv(b, x, inner, 1))
    y = activation(b, conv(b, y, inner, b.pick(3, 3, 5, 7), 1, inner))
    y = squeeze_excite(b, y) if b.rng.random() < 0.3 else y
    return b.same("Add", conv(b, y, c, 1), x)


def _branches(b: Builder, x: str) -> str:
    n, c, h, w = b.shape[x]
    widths = [8 * int(b.rng.integers(1, 13)) for _ in range(int(b.rng.integers(2, 5)))]
    ends = [activation(b, conv(b, x, width, b.pick(1, 1, 3, 5))) for width in widths]
    if b.rng.random() < 0.3:
        ends, widths = [*ends, x], [*widths, c]
    return b.op("Concat", *ends, shape=(n, sum(widths), h, w), axis=1)


def _separable(b: Builder, x: str) -> str:
    c = b.shape[x][1]
    y = conv(b, x, c, b.pick(3, 3, 5, 7), 1, c)
    y = activation(b, normalised(b, y))
    return activation(b, conv(b, y, _wider(b, c), 1))


def _pooled(b: Builder, x: str) -> str:
    kernel = b.pick(3, 3, 5)
    return b.same(
        b.pick("MaxPool", "AveragePool"), x, kernel_shape=[kernel] * 2, strides=[1, 1],
        pads=[kernel // 2] * 4,
    )  # fmt: skip


def _pre_activated(b: Builder, x: str) -> str:
    """Normalisation and activation before the convolution, which no fusion folds away."""
    c = b.shape[x][1]
    y = conv(b, b.same("Relu", normalised(b, x)), c, b.pick(1, 3))
    return b.same("Add", y, x) if b.rng.random() < 0.5 else y


BLOCKS: tuple[Callable[[Builder, str], str], ...] = (
    _plain, _plain, _bottleneck, _bottleneck, _inverted, _inverted, _branches, _separable, _pooled,
    _pre_activated,
)  # fmt: skip


def save(model: onnx.ModelProto, path: Path) -> Path:
    """Write a model whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


# Transformers


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


# Layouts: branches normalised before each convolution, attention over windows of an image


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
