"""Random networks: convolutional, transformer-like, and chains of single operators.

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
