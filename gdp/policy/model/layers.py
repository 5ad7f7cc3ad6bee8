"""Layers of the network in NumPy, as flax defines them. Axes: F features in, O out."""

import numpy as np
from jaxtyping import Float, Float32

from gdp.policy.model.config import Params

NORM_EPSILON = 1e-6  # flax's


def dense(p: Params, x: Float[np.ndarray, "... F"]) -> Float32[np.ndarray, "... O"]:
    """A linear layer with bias, as flax stores it: kernel [F, O]."""
    return x @ np.asarray(p["kernel"]) + np.asarray(p["bias"])


def norm(p: Params, x: Float32[np.ndarray, "N F"]) -> Float32[np.ndarray, "N F"]:
    """Layer norm, with flax's formula of the variance."""
    mean = x.mean(axis=-1, keepdims=True)
    variance = np.maximum((x * x).mean(axis=-1, keepdims=True) - mean * mean, 0.0)
    scale = np.asarray(p["scale"]) / np.sqrt(variance + np.float32(NORM_EPSILON))
    return (x - mean) * scale + np.asarray(p["bias"])
