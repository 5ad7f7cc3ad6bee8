"""A calibration carried over to a device that was hardly measured.

Devices of one kind run the same kernels at other speeds. The new device's seconds are the known
calibration's times a factor per class of kernel: arithmetic-bound, traffic-bound and launch-bound.
The factors start at the ratio of the datasheets and move towards what k measurements say, the more
the more there are (a Gaussian prior on the logarithm, so k = 0 is the datasheet ratio alone).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from gdp.cluster import Device
from gdp.costs.features import KernelFeatures, shares
from gdp.costs.learned import Calibration
from gdp.costs.profile import DeviceRecord

PRIOR_LOG_STD = 0.5
"""How far a factor may lie from the datasheets' ratio: within 1.6 times, two times in three."""
NOISE_LOG_STD = 0.15
"""How far one kernel lies from its class."""


@dataclass(frozen=True)
class Transfer:
    """Factors on the seconds of another device's calibration, by what bounds a kernel."""

    arithmetic: float
    traffic: float
    launch: float

    @property
    def logs(self) -> Float[np.ndarray, "3"]:
        return np.log([self.arithmetic, self.traffic, self.launch])


def datasheet_transfer(source: Device, target: Device) -> Transfer:
    """Factors by the datasheets alone: the point of no measurements."""
    arithmetic = source.speed("default") / target.speed("default")
    return Transfer(arithmetic, source.bytes_per_s / target.bytes_per_s, 1.0)


def fit_transfer(
    prior: Transfer,
    features: KernelFeatures,
    known_s: Float[np.ndarray, "K"],
    measured_s: Float[np.ndarray, "K"],
) -> Transfer:
    """Factors from k kernels measured on the new device; `known_s` is what the calibration of the
    old device says of them.

    Bayesian linear regression of log(measured / known) on the shares, prior at `prior`: the
    posterior mean solves (X'X / noise^2 + I / prior^2) b = X'y / noise^2 + b0 / prior^2.
    """
    x = shares(features)
    y = np.log(measured_s) - np.log(known_s)
    precision = x.T @ x / NOISE_LOG_STD**2 + np.eye(3) / PRIOR_LOG_STD**2
    right = x.T @ y / NOISE_LOG_STD**2 + prior.logs / PRIOR_LOG_STD**2
    return Transfer(*np.exp(np.linalg.solve(precision, right)).tolist())


def adapt(calibration: Calibration, transfer: Transfer, device: DeviceRecord) -> Calibration:
    """The calibration of the new device."""
    return replace(
        calibration, device=device, factors=(transfer.arithmetic, transfer.traffic, transfer.launch)
    )


def most_telling(features: KernelFeatures, count: int) -> Sequence[int]:
    """The kernels worth measuring first: those that differ most in what bounds them and in type.

    Greedy farthest-point choice over shares and log seconds; the first is the longest.
    """
    point = np.column_stack([3.0 * shares(features), 0.3 * features.size[:, 0]])
    chosen = [int(features.size[:, 0].argmax())]
    distance = np.linalg.norm(point - point[chosen[0]], axis=1)
    while len(chosen) < min(count, len(point)):
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(point - point[chosen[-1]], axis=1))
    return chosen[:count]
