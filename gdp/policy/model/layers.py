"""Layers of the network in NumPy, as flax defines them. Axes: F features in, O out."""

import numpy as np
from jaxtyping import Float, Float32

from gdp.policy.model.config import Params

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
