"""A calibration carried over to a device that was hardly measured.

Devices of one kind run the same kernels at other speeds. The logarithm of the ratio of their
seconds is a linear function of what bounds a kernel (arithmetic, traffic, launch), of its class
(products, reductions, the rest) and of its length within the class: threads and caches help long
kernels more.
The coefficients start at the ratio of the datasheets and move towards what k measurements say, the
more the more there are (a Gaussian prior, so k = 0 is the datasheet ratio alone).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from gdp.cluster.types import Device
from gdp.costs.calibrate import segment_s
from gdp.costs.features import TRANSFER_TERMS, KernelFeatures, shares, transfer_design
from gdp.costs.fit import rows_of
from gdp.costs.learned import Calibration, kernel_seconds
from gdp.costs.profile import DeviceRecord, Profile, ProfileError

PRIOR_LOG_STD = (0.5, 0.5, 0.5, 0.3, 0.3, 0.3, 0.5, 0.5, 0.5)
"""How far each coefficient may lie from the datasheets: of bounds, of classes, of slopes."""
NOISE_LOG_STD = 0.15
"""How far one kernel lies from the line."""


@dataclass(frozen=True)
class Transfer:
    """Coefficients of the logarithm of (new device's seconds / known device's seconds)."""

    coefficients: tuple[float, ...]

    def ratio(
        self, features: KernelFeatures, known_s: Float[np.ndarray, "K"]
    ) -> Float[np.ndarray, "K"]:
        """The factor on every kernel's seconds."""
        return np.exp(transfer_design(features, known_s) @ np.array(self.coefficients))


def datasheet_transfer(source: Device, target: Device) -> Transfer:
    """By the datasheets alone: the point of no measurements."""
    arithmetic = np.log(source.speed("default") / target.speed("default"))
    traffic = np.log(source.bytes_per_s / target.bytes_per_s)
    return Transfer((float(arithmetic), float(traffic), *[0.0] * 7))


def fit_transfer(
    prior: Transfer,
    features: KernelFeatures,
    known_s: Float[np.ndarray, "K"],
    measured_s: Float[np.ndarray, "K"],
) -> Transfer:
    """Coefficients from k kernels measured on the new device; `known_s` is what the calibration of
    the old device says of them.

    Bayesian linear regression: the posterior mean solves
    (X'X / noise^2 + P) b = X'y / noise^2 + P b0, with P the prior's precision.
    """
    x = transfer_design(features, known_s)
    y = np.log(measured_s) - np.log(known_s)
    precision = np.diag(np.array(PRIOR_LOG_STD) ** -2.0)
    right = x.T @ y / NOISE_LOG_STD**2 + precision @ np.array(prior.coefficients)
    found = np.linalg.solve(x.T @ x / NOISE_LOG_STD**2 + precision, right)
    return Transfer(tuple(found.tolist()))


def refit(calibration: Calibration, profile: Profile) -> Calibration:
    """A calibration for another processor of its kind, from the kernels of a few models there.

    Nine coefficients are fitted, from none, so that a minute of measuring is enough. What a segment
    costs is the profile's where it was measured. Raises `ProfileError` where the kinds or the
    runtimes differ, or the profile holds no models.
    """
    if (profile.device.kind, profile.runtime) != (calibration.device.kind, calibration.runtime):
        raise ProfileError(
            f"costs of {calibration.device.kind} with {calibration.runtime} cannot be fitted to a "
            f"profile of {profile.device.kind} with {profile.runtime}"
        )
    if not profile.models:
        raise ProfileError("the profile holds no models; make one with `gdp profile --quick`")
    known = replace(calibration, transfer=())
    rows = rows_of(profile.models)
    known_s = kernel_seconds(known, rows.features)
    found = fit_transfer(Transfer((0.0,) * TRANSFER_TERMS), rows.features, known_s, rows.seconds)
    fitted = adapt(known, found, profile.device)
    measured_s = segment_s(profile.overheads)
    return replace(
        fitted, versions=profile.versions, date=profile.date, mean_error=None,
        segment_s=calibration.segment_s if measured_s is None else measured_s,
    )  # fmt: skip


def adapt(calibration: Calibration, transfer: Transfer, device: DeviceRecord) -> Calibration:
    """The calibration of the new device."""
    return replace(calibration, device=device, transfer=transfer.coefficients)


def most_telling(features: KernelFeatures, count: int) -> Sequence[int]:
    """The kernels worth measuring first: those that differ most in what bounds them and in type.

    Greedy farthest-point choice over shares, class and log seconds; the first is the longest.
    """
    classes = transfer_design(features, features.base_s)[:, 3:6]
    point = np.column_stack([2.0 * shares(features), 2.0 * classes, 0.3 * features.size[:, 0]])
    chosen = [int(features.size[:, 0].argmax())]
    distance = np.linalg.norm(point - point[chosen[0]], axis=1)
    while len(chosen) < min(count, len(point)):
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(point - point[chosen[-1]], axis=1))
    return chosen[:count]
