"""The network of `gdp.policy.model.network` as a NumPy function: placing needs no JAX.

The layers have the names they have there; a test holds both equal over all configurations. Ops are
in decode order, without padding, but for attention: its segments are those of the padded graph.
Axes: N ops, P pairs, D devices, S segments, L ops of a segment, M keys, H heads, C whole,
F features in, O out.
"""

import math
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int

from gdp.graph.index import inverse
from gdp.policy.model.config import MAX_SUMMARIES, Head, NetworkConfig, Params
from gdp.policy.view.features import OP_SIZES, Features, bucket

NORM_EPSILON = 1e-6  # flax's
ONE_CORE = 1 << 18
"""Multiplications up to which OpenBLAS starts no threads: those that wait for each other spin,
which on a busy machine took ten times the CPU seconds of the work itself."""


def dense(p: Params, x: Float[np.ndarray, "... F"]) -> Float32[np.ndarray, "... O"]:
    """A linear layer with bias, as flax stores it: kernel [F, O]."""
    return product(x, np.asarray(p["kernel"])) + np.asarray(p["bias"])


def product(
    x: Float[np.ndarray, "... F"], kernel: Float[np.ndarray, "F O"]
) -> Float[np.ndarray, "... O"]:
    """x @ kernel, so few rows at once that BLAS stays on this core."""
    rows, at_once = x.reshape(-1, x.shape[-1]), max(1, ONE_CORE // max(1, kernel.size))
    whole = len(rows) // at_once * at_once
    out = np.empty((len(rows), kernel.shape[1]), np.result_type(x, kernel))
    stack = (-1, at_once, kernel.shape[1])
    if whole:
        first = rows[:whole].reshape(-1, at_once, x.shape[-1])
        np.matmul(first, kernel, out=out[:whole].reshape(stack))
    np.matmul(rows[whole:], kernel, out=out[whole:])
    return out.reshape(*x.shape[:-1], kernel.shape[1])


def norm(p: Params, x: Float32[np.ndarray, "N F"]) -> Float32[np.ndarray, "N F"]:
    """Layer norm, with flax's formula of the variance."""
    mean = x.mean(axis=-1, keepdims=True)
    variance = np.maximum((x * x).mean(axis=-1, keepdims=True) - mean * mean, 0.0)
    scale = np.asarray(p["scale"]) / np.sqrt(variance + np.float32(NORM_EPSILON))
    return (x - mean) * scale + np.asarray(p["bias"])


FEW = 8
"""Neighbours per op that are gathered for all ops at once."""


def encode(config: NetworkConfig, params: Params, features: Features) -> Head:
    """The network's result for one problem, in the problem's own order of ops."""
    position = inverse(features.order)
    h, whole = _embed(config, params, features, position)
    for i in range(config.attention_layers):
        h = _block(config, params["attention"][i], h, whole)
    h = norm(params["leave"], h)
    h = h[position]
    device = np.maximum(dense(params["device_in"], features.device), 0.0)
    device = device + device.mean(axis=0)
    return Head(
        node=_gated(params["node_head"], h, whole),
        device=dense(params["device_out"], device),
        feature=_kernel(params["feature_head"], whole),
        mixing=_kernel(params["mixing"], whole),
        bias=np.asarray(params["mixing"]["dense"]["bias"]),
        out=_kernel(params["out_head"], whole)[:, 0],
    )


def _embed(
    config: NetworkConfig, params: Params, features: Features, position: Int[np.ndarray, "N"]
) -> tuple[Float32[np.ndarray, "N F"], Float32[np.ndarray, "C"]]:
    """Embeddings of the ops in decode order, and the representation of the whole."""
    order, n = features.order, len(features.order)
    table = np.asarray(params["type_embedding"]["embedding"])
    parts = [features.op[order], table[features.op_type[order]]]
    if config.features == "full":
        parts.append(np.broadcast_to(features.whole, (n, len(features.whole))))
    h = dense(params["enter"], np.concatenate(parts, axis=1))
    src, dst = position[features.src], position[features.dst]
    into, out_of = _Neighbours(dst, src, n), _Neighbours(src, dst, n)
    layer = _directed if config.pooling == "directed" else _published
    for i in range(config.sage_layers):
        h = layer(params["sage"][i], h, into, out_of)
    return h, np.concatenate([h.mean(axis=0), features.whole])


class _Neighbours:
    """The element-wise maximum over each op's neighbours; zero where it has none."""

    def __init__(self, to: Int[np.ndarray, "P"], by: Int[np.ndarray, "P"], count: int) -> None:
        order = np.argsort(to, kind="stable")
        self.by, self.count = by[order], count
        self.ops, self.first, self.degree = np.unique(
            to[order], return_index=True, return_counts=True
        )

    def __call__(self, message: Float32[np.ndarray, "N F"]) -> Float32[np.ndarray, "N F"]:
        pooled = np.zeros((self.count, message.shape[1]), np.float32)
        for k in range(min(FEW, int(self.degree.max(initial=0)))):
            # All ops' k-th neighbours at once: several times as fast as `reduceat`.
            more = self.degree > k
            ops = self.ops[more]
            pooled[ops] = np.maximum(pooled[ops], message[self.by[self.first[more] + k]])
        for at in np.flatnonzero(self.degree > FEW):
            rest = self.by[self.first[at] + FEW : self.first[at] + self.degree[at]]
            pooled[self.ops[at]] = np.maximum(pooled[self.ops[at]], message[rest].max(axis=0))
        return pooled


def _published(
    p: Params, h: Float32[np.ndarray, "N F"], into: _Neighbours, out_of: _Neighbours
) -> Float32[np.ndarray, "N F"]:
    sent = _sigmoid(dense(p["message"], h))
    pooled = np.maximum(into(sent), out_of(sent))
    return dense(p["combine"], np.concatenate([h, pooled], axis=1))


def _directed(
    p: Params, h: Float32[np.ndarray, "N F"], into: _Neighbours, out_of: _Neighbours
) -> Float32[np.ndarray, "N F"]:
    normed = norm(p["norm"], h)
    down, up = np.split(np.maximum(dense(p["message"], normed), 0.0), 2, axis=1)
    parts = [normed, into(down), out_of(up)]
    return h + np.maximum(dense(p["combine"], np.concatenate(parts, axis=1)), 0.0)


def _block(
    config: NetworkConfig, p: Params, h: Float32[np.ndarray, "N F"], whole: Float[np.ndarray, "C"]
) -> Float32[np.ndarray, "N F"]:
    """Attention and feed-forward, each behind its residual connection."""
    branch = np.asarray(p["strength"]) if config.residual_gate else np.ones(2, np.float32)
    h = h + branch[0] * _attend(config, p, norm(p["norm"], h), whole)
    inner = np.maximum(_gated(p["widen"], norm(p["norm_after"], h), whole), 0.0)
    return h + branch[1] * _gated(p["narrow"], inner, whole)


def _attend(
    config: NetworkConfig, p: Params, x: Float32[np.ndarray, "N F"], whole: Float[np.ndarray, "C"]
) -> Float32[np.ndarray, "N F"]:
    """Attention of every op to its own segment, the memory and the summaries.

    One segment at a time, which stays in the processor's cache and needs no mask.
    """
    n, width = x.shape
    wide = bucket(n + 1, OP_SIZES)
    length = min(config.segment, wide)
    means = _summaries(x, length, wide // length) if config.summaries else x[:0]

    def split(name: str, of: Float32[np.ndarray, "M F"]) -> Float32[np.ndarray, "H M f"]:
        deep = width // config.heads
        return _gated(p[name], of, whole).reshape(-1, config.heads, deep).transpose(1, 0, 2)

    query = split("query", x) / np.float32(math.sqrt(width // config.heads))
    keys, values = ([split(name, x), split(name, means)] for name in ("key", "value"))
    mixed = np.empty((n, config.heads, width // config.heads), np.float32)
    for first in range(0, n, length):
        last = min(first + length, n)
        seen = slice(max(0, first - config.memory * length), last)
        key, value = (np.concatenate([own[:, seen], far], axis=1) for own, far in (keys, values))
        at_once = max(1, ONE_CORE // (key.shape[1] * key.shape[2]))
        for low in range(first, last, at_once):
            rows = slice(low, min(low + at_once, last))
            share = query[:, rows] @ key.swapaxes(1, 2)
            share -= share.max(axis=-1, keepdims=True)
            np.exp(share, out=share)
            total = share.sum(axis=-1, keepdims=True)
            mixed[rows] = ((share @ value) / total).transpose(1, 0, 2)
    return _gated(p["out"], mixed.reshape(n, width), whole)


def _summaries(
    x: Float32[np.ndarray, "N F"], length: int, segments: int
) -> Float32[np.ndarray, "Q F"]:
    """The mean of each segment, of several together where the padded graph has too many; none of
    a single segment."""
    if segments < 2:
        return x[:0]
    span = length * -(-segments // MAX_SUMMARIES)
    firsts = np.arange(0, len(x), span)
    count = np.minimum(span, len(x) - firsts).astype(np.float32)
    return np.add.reduceat(x, firsts, axis=0) / count[:, None]


def _factor(p: Params, whole: Float[np.ndarray, "C"]) -> Any:
    """The gate's value, one without a gate."""
    if "gate" not in p:
        return np.float32(1.0)
    return np.float32(2.0) * _sigmoid(dense(p["gate"]["conditioning"], whole))


def _gated(
    p: Params, x: Float[np.ndarray, "... F"], whole: Float[np.ndarray, "C"]
) -> Float32[np.ndarray, "... O"]:
    return dense(p["dense"], x * _factor(p, whole))


def _kernel(p: Params, whole: Float[np.ndarray, "C"]) -> Float32[np.ndarray, "F O"]:
    """The weights with the gate folded in."""
    kernel = np.asarray(p["dense"]["kernel"])
    return kernel * np.broadcast_to(_factor(p, whole), len(kernel))[:, None]


def _sigmoid(x: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    # By tanh, which does not overflow.
    return np.float32(0.5) * (np.float32(1.0) + np.tanh(np.float32(0.5) * x))
