"""The vector of a new device from a few of its kernels."""

import numpy as np
from jaxtyping import Float

from gdp.costs.measured.kernels import DeviceDescriptor, Kernels
from gdp.costs.measured.network import VECTOR, KernelNetwork

VECTOR_STD = 1.0
"""Prior deviation of the entries of a vector."""
KERNEL_STD = 0.35
"""Deviation of the log seconds of one kernel of a new device from the network."""


def fit_vector(
    network: KernelNetwork,
    kernels: Kernels,
    silicon: DeviceDescriptor,
    seconds: Float[np.ndarray, "K"],
    start: Float[np.ndarray, "V"] | None = None,
    steps: int = 8,
) -> Float[np.ndarray, "V"]:
    """The vector of a device from a few of its kernels: a maximum a posteriori.

    Gauss-Newton steps on log seconds with the prior N(start, VECTOR_STD^2); each is halved until
    the objective falls.
    """
    prior = np.zeros(VECTOR) if start is None else np.asarray(start, dtype=float)
    device = np.zeros(len(kernels), dtype=np.int64)
    target = np.log(seconds)

    def residual(vector: np.ndarray) -> np.ndarray:
        return network.log_seconds(kernels, [silicon], vector[None], device) - target

    def objective(vector: np.ndarray, off: np.ndarray) -> float:
        return float((off**2).sum() / KERNEL_STD**2 + ((vector - prior) ** 2).sum() / VECTOR_STD**2)

    vector, off = prior.copy(), residual(prior)
    for _ in range(steps):
        slope = np.stack([(residual(vector + 1e-4 * e) - off) / 1e-4 for e in np.eye(VECTOR)], 1)
        # One kernel that is far off (preempted, cached) must not lead all others.
        weight = 1.0 / np.maximum(1.0, np.abs(off) / (2 * KERNEL_STD))
        left = slope.T @ (weight[:, None] * slope) / KERNEL_STD**2 + np.eye(VECTOR) / VECTOR_STD**2
        right = -slope.T @ (weight * off) / KERNEL_STD**2 - (vector - prior) / VECTOR_STD**2
        move, before = np.linalg.solve(left, right), objective(vector, off)
        for _ in range(6):
            if objective(vector + move, (tried := residual(vector + move))) < before:
                vector, off = vector + move, tried
                break
            move = move / 2
        else:
            break
    return vector
