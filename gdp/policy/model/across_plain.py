"""`gdp.policy.model.across` in NumPy, in stretches of ops so that memory stays small.

Axes: N ops (in decode order), D devices, S bins, W head width.
"""

import math

import numpy as np
from jaxtyping import Float32, Int

from gdp.policy.model.config import NetworkConfig, Params
from gdp.policy.model.layers import dense, norm
from gdp.policy.view.features import NUM_BINS, Features

STRETCH = 4096
"""Ops at once."""


def across(
    config: NetworkConfig,
    p: Params,
    h: Float32[np.ndarray, "N F"],
    features: Features,
    position: Int[np.ndarray, "N"],
) -> Float32[np.ndarray, "N D"]:
    """A score of each pair of op and device from what the incumbent has there. O(N D S W)."""
    n, d = len(h), len(features.device)
    x, bins = norm(p["norm"], h), features.bin[features.order]
    home = (features.home[features.order][:, None] == np.arange(d)).astype(np.float32)
    tokens = _tokens(p, x, home, bins) if config.device_attention else None
    homes = _diffused(home, features, position, config.diffusion) if config.diffusion else None
    from_op, from_device = dense(p["from_op"], x), dense(p["from_device"], features.device)
    prior = np.zeros((n, d), np.float32)
    for first in range(0, n, STRETCH):
        rows = slice(first, first + STRETCH)
        hidden = from_op[rows, None] + from_device
        if tokens is not None:
            hidden = hidden + dense(p["from_bins"], _attend(p, x[rows], bins[rows], tokens))
        if homes is not None:
            hidden = hidden + dense(p["from_homes"], homes[rows])
        prior[rows] = dense(p["last"], np.maximum(hidden, 0.0))[..., 0]
    return prior


def _tokens(
    p: Params,
    x: Float32[np.ndarray, "N F"],
    home: Float32[np.ndarray, "N D"],
    bins: Int[np.ndarray, "N"],
) -> Float32[np.ndarray, "S D W2"]:
    """What the incumbent has on each device in each bin."""
    d = home.shape[1]
    value, placed = dense(p["value"], x), home.any(axis=1)
    cell = bins * d + home.argmax(axis=1)
    total = np.zeros((NUM_BINS * d, value.shape[1]), np.float32)
    np.add.at(total, cell[placed], value[placed])
    total = total.reshape(NUM_BINS, d, -1)
    count = np.bincount(cell[placed], minlength=NUM_BINS * d).reshape(NUM_BINS, d)
    mean = total / np.maximum(count, 1)[..., None].astype(np.float32)
    ops = np.maximum(np.bincount(bins, minlength=NUM_BINS), 1)
    share = (count / ops[:, None])[..., None].astype(np.float32)
    return np.concatenate([mean, share, (count > 0)[..., None].astype(np.float32)], axis=-1)


def _attend(
    p: Params,
    x: Float32[np.ndarray, "N F"],
    bins: Int[np.ndarray, "N"],
    tokens: Float32[np.ndarray, "S D W2"],
) -> Float32[np.ndarray, "N D W2"]:
    """The mixture over the bins of each device."""
    key = dense(p["key"], tokens[..., :-2]).transpose(1, 2, 0)
    score = (dense(p["query"], x) @ key).transpose(1, 0, 2)
    score /= np.float32(math.sqrt(key.shape[1]))
    between = np.arange(NUM_BINS)[None] - bins[:, None] + NUM_BINS - 1
    score += np.asarray(p["relative"])[between][:, None]
    share = np.exp(score - score.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    return (share.transpose(1, 0, 2) @ tokens.transpose(1, 0, 2)).transpose(1, 0, 2)


def _diffused(
    home: Float32[np.ndarray, "N D"],
    features: Features,
    position: Int[np.ndarray, "N"],
    hops: int,
) -> Float32[np.ndarray, "N D C"]:
    """The devices of an op, and of its readers and producers up to so many edges away."""
    from scipy.sparse import csr_array

    n = len(home)
    src, dst = position[features.src], position[features.dst]

    def mean(to: Int[np.ndarray, "P"], by: Int[np.ndarray, "P"]) -> csr_array:
        weight = 1.0 / np.maximum(np.bincount(to, minlength=n), 1)
        return csr_array((weight[to].astype(np.float32), (to, by)), shape=(n, n))

    readers, producers = mean(src, dst), mean(dst, src)
    ahead, behind, parts = home, home, [home]
    for _ in range(hops):
        ahead, behind = readers @ ahead, producers @ behind
        parts += [ahead, behind]
    return np.stack(parts, axis=-1)
