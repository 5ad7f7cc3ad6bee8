"""Which down-sets can lie between the stages of a good pipeline, by LP duality.

Prices y_c >= 0 of the classes measure the work of an element as min over c of y_c work_s(c). If all
stages end within the target T, the devices used so far, u_c of each class, hold at most
T * sum of y_c u_c of that work, and the others must be able to hold the rest. (A stage that several
devices share is split among them, which the same sum allows.) So each state reaches
few down-sets when the target is close to the optimum, whatever their number in all.

Axes as in `gdp.methods.pipeline.lattice`.
"""

import itertools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from gdp.methods.pipeline.crews import largest
from gdp.methods.pipeline.lattice import Lattice, Windows, state_counts
from gdp.methods.pipeline.stage_costs import StageCosts

_RATIOS = (0.0, 0.1, 0.5, 0.9, 1.0)  # quantiles of the classes' relative speeds to price at
_SLACK = 1.0 + 1e-9  # rounding must not exclude the optimum
_UNLIMITED = np.int64(1) << np.int64(62)


def class_prices(costs: StageCosts) -> Float[np.ndarray, "Q C"]:
    """Prices worth trying, at a few ratios of speeds; inf: left out.

    Of up to three classes every set, of more each alone and all together.
    """
    num_classes = len(costs.devices)
    found: list[tuple[float, ...]] = []
    for size in range(1, num_classes + 1) if num_classes <= 3 else (1, num_classes):
        for chosen in itertools.combinations(range(num_classes), size):
            for quantile in _RATIOS if size > 1 else (0.5,):
                prices = np.full(num_classes, np.inf)
                for c in chosen:
                    prices[c] = _ratio(costs, chosen[0], c, quantile)
                if tuple(prices) not in found and (prices > 0).all():
                    found.append(tuple(prices.tolist()))
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


def work_bound_s(costs: StageCosts, of_any_team: bool = False) -> float:
    """No pipeline has a lower dearest stage: work over speed, and the dearest single element on
    the largest crew that may take it; work over speed alone also holds `of_any_team`."""
    prices = class_prices(costs)
    counts = np.array([len(devices) for devices in costs.devices])
    phi = priced_work(costs, prices).sum(axis=1)
    everywhere = np.isfinite(prices).all(axis=1)
    bound = float((phi[everywhere] / (prices[everywhere] @ counts)).max(initial=0.0))
    if of_any_team:
        return bound
    shared_s = costs.work_s / largest(costs.crews, len(costs.devices))[:, None]
    work = np.where(costs.barred, np.inf, shared_s).min(axis=0)
    dearest = float(work[np.isfinite(work)].max(initial=0.0))
    return max(bound, dearest)


@dataclass(frozen=True, eq=False)
class Program:
    """A problem's lattice and the costs of its stages, and all of windows but the target."""

    lat: Lattice
    costs: StageCosts
    _prices: Float[np.ndarray, "Q C"]
    _used: Int[np.ndarray, "S C"]  # devices of each state
    _rest: Int[np.ndarray, "S C"]
    _any: Windows

    def windows(self, target_s: float) -> Windows:
        """The windows of every state for stages that take less than `target_s`."""
        phi = self._any.phi
        return self._any._replace(
            used_cap=_capacity(self._used, self._prices, phi, target_s),
            rest_cap=_capacity(self._rest, self._prices, phi, target_s),
        )


def make_program(lat: Lattice, costs: StageCosts) -> Program:
    """The program of a lattice."""
    counts = [len(devices) for devices in costs.devices]
    used = state_counts(counts)
    rest = np.array(counts) - used
    prices = class_prices(costs)
    phi = priced_work(costs, prices)
    unknown = np.zeros((len(used), len(prices)))
    windows = Windows(
        words=(len(used) + 63) // 64,
        phi=phi,
        phi_total=phi.sum(axis=1),
        used_cap=unknown,
        rest_cap=unknown,
        used_row=_payments(lat, used, prices),
        rest_row=_payments(lat, rest, prices),
        used_bytes=_memory(used, costs.memory_bytes),
        rest_bytes=_memory(rest, costs.memory_bytes),
        total_bytes=int(lat.held_bytes.sum()),
    )
    return Program(lat, costs, prices, used, rest, windows)


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
    pays = np.zeros((have.shape[1], lat.num_rows), dtype=bool)
    for c in range(have.shape[1]):
        for lane in range(lat.lane_start[c], lat.lane_start[c + 1]):
            if lat.lane_works[lane] and lat.lane_row[lane] >= 0:
                pays[c, lat.lane_row[lane]] = True
    chosen = have > 0
    known = np.where(np.isfinite(prices), prices, 0.0)
    least = np.where(chosen[:, None, :], known[None], np.inf).min(axis=2)
    all_pay = np.all(pays[None] | ~chosen[:, :, None], axis=1)
    # Without any device nothing is paid: the least price would be inf.
    least[~chosen.any(axis=1)] = 0.0
    return least[:, :, None] * all_pay[:, None, :]


def _memory(have: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Bytes that these devices can hold, capped so that the sum cannot overflow."""
    total = [sum(int(n) * int(b) for n, b in zip(row, capacity, strict=True)) for row in have]
    return np.array([min(t, int(_UNLIMITED)) for t in total], dtype=np.int64)
