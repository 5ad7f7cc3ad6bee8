"""Which down-sets can lie between the stages of a good pipeline, by LP duality.

Prices y_c >= 0 of the classes measure the work of an element as min over c of y_c work_s(c). If all
stages end within the target T, the devices used so far, u_c of each class, hold at most
T * sum of y_c u_c of that work, and the others must be able to hold the rest. So each state reaches
few down-sets when the target is close to the optimum, whatever their number in all.

Axes as in `gdp.methods.lattice`.
"""

import itertools

import numpy as np
from jaxtyping import Float

from gdp.methods.lattice import Lattice, Windows, state_counts
from gdp.methods.stage_costs import StageCosts

_RATIOS = (0.0, 0.1, 0.5, 0.9, 1.0)  # quantiles of the classes' relative speeds to price at
_SLACK = 1.0 + 1e-9  # rounding must not exclude the optimum
_UNLIMITED = np.int64(1) << np.int64(62)


def class_prices(costs: StageCosts) -> Float[np.ndarray, "Q C"]:
    """Prices worth trying: every set of classes, at a few ratios of their speeds; inf: left out."""
    num_classes = len(costs.devices)
    found: list[tuple[float, ...]] = []
    for size in range(1, min(num_classes, 3) + 1):
        for chosen in itertools.combinations(range(num_classes), size):
            for quantile in _RATIOS if size > 1 else (0.5,):
                prices = np.full(num_classes, np.inf)
                for c in chosen:
                    prices[c] = _ratio(costs, chosen[0], c, quantile)
                if tuple(prices) not in found and (prices > 0).all():
                    found.append(tuple(prices.tolist()))
    if num_classes > 3:
        found.append(tuple(_ratio(costs, 0, c, 0.5) for c in range(num_classes)))
    return np.array(found)


def _ratio(costs: StageCosts, reference: int, c: int, quantile: float) -> float:
    """How much faster class c is than the reference, at a quantile of the reference's work."""
    a, b = costs.work_s[reference], costs.work_s[c]
    known = (a > 0) & (b > 0) & ~costs.barred[reference] & ~costs.barred[c]
    if not known.any():
        return 1.0
    ratio, weight = a[known] / b[known], a[known]
    order = np.argsort(ratio)
    share = np.cumsum(weight[order]) / weight.sum()
    return float(ratio[order][min(np.searchsorted(share, quantile), len(order) - 1)])


def priced_work(costs: StageCosts, prices: Float[np.ndarray, "Q C"]) -> Float[np.ndarray, "Q M"]:
    """min over c of y_c work_s(c), over the classes that have a price; 0 where none may run it."""
    work = np.where(costs.barred, np.inf, costs.work_s)
    phi = np.empty((len(prices), work.shape[1]))
    for q, row in enumerate(prices):
        chosen = np.isfinite(row)
        phi[q] = (row[chosen, None] * work[chosen]).min(axis=0)
    return np.where(np.isfinite(phi), phi, 0.0)


def work_bound_s(costs: StageCosts) -> float:
    """No pipeline has a lower dearest stage: work over speed, and the dearest single element."""
    prices = class_prices(costs)
    counts = np.array([len(devices) for devices in costs.devices])
    phi = priced_work(costs, prices).sum(axis=1)
    everywhere = np.isfinite(prices).all(axis=1)
    bound = float((phi[everywhere] / (prices[everywhere] @ counts)).max(initial=0.0))
    work = np.where(costs.barred, np.inf, costs.work_s).min(axis=0)
    dearest = float(work[np.isfinite(work)].max(initial=0.0))
    return max(bound, dearest)


def make_windows(lat: Lattice, costs: StageCosts, target_s: float) -> Windows:
    """The windows of every state for stages that take less than `target_s`."""
    counts = [len(devices) for devices in costs.devices]
    used = state_counts(counts)
    rest = np.array(counts) - used
    prices = class_prices(costs)
    phi = priced_work(costs, prices)
    return Windows(
        words=(len(used) + 63) // 64,
        phi=phi,
        phi_total=phi.sum(axis=1),
        used_cap=_capacity(used, prices, phi, target_s),
        rest_cap=_capacity(rest, prices, phi, target_s),
        used_row=_payments(lat, used, prices),
        rest_row=_payments(lat, rest, prices),
        used_bytes=_memory(used, lat.capacity_bytes),
        rest_bytes=_memory(rest, lat.capacity_bytes),
        total_bytes=int(lat.held_bytes.sum()),
    )


def _capacity(
    have: np.ndarray, prices: np.ndarray, phi: np.ndarray, target_s: float
) -> Float[np.ndarray, "S Q"]:
    """Priced work that these devices can do in the target; inf where a device has no price."""
    finite = np.where(np.isfinite(prices), prices, 0.0)
    speed = have @ finite.T
    capacity = np.zeros_like(speed)
    capacity[speed > 0] = speed[speed > 0] * target_s * _SLACK  # the target may be inf
    capacity += phi.sum(axis=1) * 1e-12
    without_price = (have[:, None, :] > 0) & ~np.isfinite(prices)[None]
    return np.where(without_price.any(axis=2), np.inf, capacity)


def _payments(lat: Lattice, have: np.ndarray, prices: np.ndarray) -> Float[np.ndarray, "S Q R"]:
    """The least price of a paid second in each row: positive where all devices add it to work."""
    payments = np.zeros((len(have), len(prices), lat.num_rows))
    pays = np.zeros((have.shape[1], lat.num_rows), dtype=bool)
    for c in range(have.shape[1]):
        for lane in range(lat.lane_start[c], lat.lane_start[c + 1]):
            if lat.lane_works[lane] and lat.lane_row[lane] >= 0:
                pays[c, lat.lane_row[lane]] = True
    for s, row in enumerate(have):
        chosen = row > 0
        if chosen.any():
            least = np.where(np.isfinite(prices[:, chosen]), prices[:, chosen], 0.0).min(axis=1)
            payments[s] = least[:, None] * np.all(pays[chosen], axis=0, keepdims=True)
    return payments


def _memory(have: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Bytes that these devices can hold, capped so that the sum cannot overflow."""
    total = [sum(int(n) * int(b) for n, b in zip(row, capacity, strict=True)) for row in have]
    return np.array([min(t, int(_UNLIMITED)) for t in total], dtype=np.int64)
