"""GDP's policy network: GraphSAGE, segment-recurrent attention, superposition, pair head.

Encoder (arXiv 1910.01578, equations 2 and 3), GraphSAGE with max pooling:
    h_N(v) = max over neighbours u of sigmoid(W h_u + b),   h_v' = FC([h_v ; h_N(v)])
Placer: segment-recurrent attention over the ops in decode order, without positional embedding
(Transformer-XL, Dai et al. 2019, arXiv 1901.02860). Each segment attends to itself and to the
hidden states of the segments before it, gradient-stopped.
Parameter superposition (equation 5): x' = g(c(x0) * x), a dense layer g behind a gate c that the
representation x0 of the whole graph conditions; after Cheung et al. 2019, arXiv 1902.05522.

`Network` computes in NumPy, so that placing needs no JAX; `gdp.policy.model.network` takes what
differs in JAX, for learning: padding, neighbours, attention. Ops are in decode order.
Axes: N ops, P pairs, D devices, S segments, L ops of a segment, M keys, H heads, C whole,
F features in, O out.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Int

from gdp.graph.groups import inverse
from gdp.policy.model.config import MAX_SUMMARIES, Head, NetworkConfig, Params
from gdp.policy.view.features import OP_SIZES, Features, bucket

NORM_EPSILON = 1e-6
ONE_CORE = 1 << 18
"""Multiplications up to which OpenBLAS starts no threads: those that wait for each other spin,
which on a busy machine took ten times the CPU seconds of the work itself."""
FEW = 8
"""Neighbours per op that are gathered for all ops at once."""


def encode(config: NetworkConfig, params: Params, features: Features) -> Head:
    """The network's result for one problem, in the problem's own order of ops."""
    return Network(config, params, features)()


class Network:
    """The network on one problem."""

    xp: Any = np
    op_mask: Any = None
    device_mask: Any = None
    context: Any  # representation of the whole, on which gates depend
    into: Callable[[Any], Any]  # maximum over the ops that each op reads; zero where there is none
    out_of: Callable[[Any], Any]  # maximum over each op's readers

    def __init__(self, config: NetworkConfig, params: Params, features: Features) -> None:
        order, n = features.order, len(features.order)
        self.config, self.params, self.whole = config, params, features.whole
        self.op, self.op_type = features.op[order], features.op_type[order]
        self.device, self.place = features.device, inverse(order)
        src, dst = self.place[features.src], self.place[features.dst]
        self.into, self.out_of = _Neighbours(dst, src, n), _Neighbours(src, dst, n)

    def __call__(self) -> Head:
        params = self.params
        h = self._embed()
        self.context = self.xp.concatenate([self.mean(h, self.op_mask), self.whole])
        for i in range(self.config.attention_layers):
            h = self.block(params["attention"][i], h)
        h = self.norm(params["leave"], h)[self.place]
        device = self.relu(self.dense(params["device_in"], self.device))
        device = device + self.mean(device, self.device_mask)
        return Head(
            node=self.gated(params["node_head"], h),
            device=self.dense(params["device_out"], device),
            feature=self.kernel(params["feature_head"]),
            mixing=self.kernel(params["mixing"]),
            bias=self.xp.asarray(params["mixing"]["dense"]["bias"]),
            out=self.kernel(params["out_head"])[:, 0],
        )

    def _embed(self) -> Float[Any, "N F"]:
        table, xp = self.xp.asarray(self.params["type_embedding"]["embedding"]), self.xp
        parts = [self.op, table[self.op_type]]
        if self.config.features == "full":
            parts.append(xp.broadcast_to(self.whole, (len(self.op), len(self.whole))))
        h = self.dense(self.params["enter"], xp.concatenate(parts, axis=1))
        layer = self.directed if self.config.pooling == "directed" else self.published
        for i in range(self.config.sage_layers):
            h = layer(self.params["sage"][i], h)
        return h

    def published(self, p: Params, h: Float[Any, "N F"]) -> Float[Any, "N F"]:
        """One iteration of equations 2 and 3."""
        sent = self.sigmoid(self.dense(p["message"], h))
        pooled = self.xp.maximum(self.into(sent), self.out_of(sent))
        return self.dense(p["combine"], self.xp.concatenate([h, pooled], axis=1))

    def directed(self, p: Params, h: Float[Any, "N F"]) -> Float[Any, "N F"]:
        """One iteration with separate weights for each direction of the edges."""
        normed = self.norm(p["norm"], h)
        down, up = self.xp.split(self.relu(self.dense(p["message"], normed)), 2, axis=1)
        parts = [normed, self.into(down), self.out_of(up)]
        return h + self.relu(self.dense(p["combine"], self.xp.concatenate(parts, axis=1)))

    def block(self, p: Params, h: Float[Any, "N F"]) -> Float[Any, "N F"]:
        """Attention and feed-forward, each behind a residual connection.

        `residual_gate` multiplies both branches by a learned strength that starts at zero, so that
        the untrained block passes its input through (Bachlechner et al. 2020, arXiv 2003.04887);
        without it the block is the published one.
        """
        gate = self.config.residual_gate
        branch = self.xp.asarray(p["strength"] if gate else np.ones(2, np.float32))
        h = h + branch[0] * self.attend(p, self.norm(p["norm"], h))
        inner = self.relu(self.gated(p["widen"], self.norm(p["norm_after"], h)))
        return h + branch[1] * self.gated(p["narrow"], inner)

    def attend(self, p: Params, x: Float[Any, "N F"]) -> Float[Any, "N F"]:
        """Attention of every op to its own segment, the memory and the summaries.

        One segment at a time, which stays in the processor's cache and needs no mask.
        """
        n, width = x.shape
        wide = bucket(n + 1, OP_SIZES)
        length = min(self.config.segment, wide)
        means = _summaries(x, length, wide // length) if self.config.summaries else x[:0]

        def split(name: str, of: Float32[np.ndarray, "M F"]) -> Float32[np.ndarray, "H M f"]:
            deep = width // self.config.heads
            return self.gated(p[name], of).reshape(-1, self.config.heads, deep).transpose(1, 0, 2)

        query = split("query", x) / np.float32(math.sqrt(width // self.config.heads))
        keys, values = ([split(name, x), split(name, means)] for name in ("key", "value"))
        mixed = np.empty((n, self.config.heads, width // self.config.heads), np.float32)
        for first in range(0, n, length):
            last = min(first + length, n)
            seen = slice(max(0, first - self.config.memory * length), last)
            key, value = (
                np.concatenate([ops[:, seen], far], axis=1) for ops, far in (keys, values)
            )
            at_once = max(1, ONE_CORE // (key.shape[1] * key.shape[2]))
            for low in range(first, last, at_once):
                rows = slice(low, min(low + at_once, last))
                share = query[:, rows] @ key.swapaxes(1, 2)
                share -= share.max(axis=-1, keepdims=True)
                np.exp(share, out=share)
                total = share.sum(axis=-1, keepdims=True)
                mixed[rows] = ((share @ value) / total).transpose(1, 0, 2)
        return self.gated(p["out"], mixed.reshape(n, width))

    def dense(self, p: Params, x: Float[Any, "... F"]) -> Float[Any, "... O"]:
        """A linear layer with bias: kernel [F, O]."""
        return self.product(x, self.xp.asarray(p["kernel"])) + self.xp.asarray(p["bias"])

    def norm(self, p: Params, x: Float[Any, "N F"]) -> Float[Any, "N F"]:
        """Layer norm over features."""
        mean = x.mean(axis=-1, keepdims=True)
        variance = (x * x).mean(axis=-1, keepdims=True) - mean * mean
        variance = self.xp.maximum(variance, 0.0)
        scale = self.xp.asarray(p["scale"]) / self.xp.sqrt(variance + np.float32(NORM_EPSILON))
        return (x - mean) * scale + self.xp.asarray(p["bias"])

    def factor(self, p: Params) -> Any:
        """Gate c: a positive factor per input feature, initially one; one without a gate."""
        if "gate" not in p:
            return np.float32(1.0)
        return np.float32(2.0) * self.sigmoid(self.dense(p["gate"]["conditioning"], self.context))

    def gated(self, p: Params, x: Float[Any, "... F"]) -> Float[Any, "... O"]:
        """A dense layer behind its gate."""
        return self.dense(p["dense"], x * self.factor(p))

    def kernel(self, p: Params) -> Float[Any, "F O"]:
        """The weights with the gate folded in: (c * x) W = x (c W)."""
        kernel = self.xp.asarray(p["dense"]["kernel"])
        return kernel * self.xp.broadcast_to(self.factor(p), len(kernel))[:, None]

    def sigmoid(self, x: Float[Any, "..."]) -> Float[Any, "..."]:
        """By tanh, which does not overflow."""
        return np.float32(0.5) * (np.float32(1.0) + self.xp.tanh(np.float32(0.5) * x))

    def relu(self, x: Any) -> Any:
        """Rectifier."""
        return np.maximum(x, 0.0)

    def mean(self, rows: Float[Any, "N F"], mask: Any) -> Float[Any, "F"]:
        """Mean over the rows that are not padding."""
        del mask
        return rows.mean(axis=0)

    def product(self, x: Float[Any, "... F"], kernel: Float[Any, "F O"]) -> Float[Any, "... O"]:
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
