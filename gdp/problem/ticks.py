"""Times as whole ticks, so that their sums are exact.

Sums of floating-point seconds depend on the order of adding and on the unit: where devices and
costs are alike, a last bit decides which of two events comes first, and the schedules part there.
In ticks, every time is a whole number, so that sums are associative, ties are exact, and a
placement has the same schedule in every unit and on every processor. The numbers are multiples of a
power of two (`TimeUnit.grid`) in float64, which adds them exactly while they have at most 53 bits;
the unit is near the longest op, because solvers and tolerances want numbers near 1.

Where all times are multiples of one (such as 0.1, 0.2 and 0.7 s), the tick is a fraction of it, and
they stay what they are to each other. Else rounding changes no value by more than 6e-11 of it for
N D <= 2**12 (N ops, D devices), and by 1e-9 for N D <= 2**16; see `_fine_tick`.
"""

import typing
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from gdp.graph.groups import distinct
from gdp.problem.problem import Problem, TimeUnit, cached_on_problem

_EXACT_BITS = 52  # whole numbers below 2**52, and sums of two of them, are exact
_DIVISOR_BITS = 32  # a common divisor is looked for down to this share of all the work
_NOISE = 2.0**-48  # relative: a few roundings, such as of decimal fractions and of quotients
_SAMPLE = 64  # values that show, mostly, that there is no common divisor


@typing.no_type_check
def send_time(latency, size_bytes, rate, round_to):
    """The time of a transfer, rounded to the grid; for arrays, numbers, and (compiled) in kernels.

    `round_to` is that of `problem.arrays.Arrays`: next to it, numbers of 53 bits are multiples of
    the grid, so that adding and subtracting it rounds. 0 rounds nothing.

    >>> float(send_time(0.25, 10.0, 4.0, 1.5 * 2.0**52)), float(send_time(0.25, 10.0, 4.0, 0.0))
    (3.0, 2.75)
    """
    return (latency + size_bytes / rate + round_to) - round_to


@cached_on_problem
def in_ticks(problem: Problem) -> Problem:
    """The problem with all its times in whole ticks; `unit` says how long they are.

    Where `problem` is in ticks already it is the answer itself. O(N D + T L) for L different links.
    """
    if problem.unit.grid > 0:
        return problem
    cluster, finite = problem.cluster, problem.compute_s[np.isfinite(problem.compute_s)]
    longest_s = float(finite.max(initial=0.0))
    fastest_s, times = problem.compute_s.min(axis=1), _distinct_times(problem, finite)
    work_s = float(fastest_s[np.isfinite(fastest_s)].sum())
    longest_s = longest_s if longest_s > 0 else float(times.max(initial=0.0)) or 1.0
    work_s = work_s if work_s > 0 else longest_s
    tick_s = common_divisor(times, work_s * 2.0**-_DIVISOR_BITS)
    unit_s = longest_s
    if tick_s is not None:
        unit_s = tick_s * 2.0 ** np.ceil(np.log2(longest_s / tick_s))
    fine = _fine_tick(problem.num_ops * problem.num_devices) * work_s / unit_s
    most = 1.0 if tick_s is None else tick_s / unit_s
    grid = 2.0 ** np.floor(np.log2(min(fine, most)))
    unit = TimeUnit(float(unit_s), float(grid))

    def scaled(values: Float[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        return np.round(values / unit_s / grid) * grid

    # Rates stay what they are: `send_time` rounds each transfer.
    machine = replace(
        cluster.with_dispatch(scaled(cluster.dispatch_s)),
        link_latency_s=scaled(cluster.link_latency_s),
        link_bytes_per_s=cluster.link_bytes_per_s * unit_s,
    )  # fmt: skip
    sent_s = None if problem.sent_s is None else scaled(problem.sent_s)
    launches = problem.launches
    if launches is not None:
        launches = launches._replace(seconds=scaled(launches.seconds))
    return replace(
        problem, cluster=machine, compute_s=scaled(problem.compute_s), sent_s=sent_s, unit=unit,
        launches=launches,
    )  # fmt: skip


def seconds_per_unit(problem: Problem) -> float:
    """The factor from times of `in_ticks(problem)` to times of the problem itself: 1 where both are
    one."""
    return in_ticks(problem).unit.seconds / problem.unit.seconds


def round_to_ticks(
    values: Float[np.ndarray, "*shape"], unit: TimeUnit
) -> Float[np.ndarray, "*shape"]:
    """Times that come of a division, such as shares of a load, as whole ticks again."""
    return values if unit.grid == 0 else np.asarray(np.round(values / unit.grid) * unit.grid)


def _fine_tick(pairs: int) -> float:
    """The tick as a share of all the work, for N ops on D devices with `pairs` = N D.

    No placement takes less than the work's share of a device, work / D. Along a path, or on a
    device, at most 2 N times are rounded by half a tick each, which a tick of work / (N D) 2**-34
    keeps to 2**-34 of that. Sums of up to 64 times the work, a bad placement's, stay below 2**52.
    """
    return 2.0 ** -min(34 + int(np.ceil(np.log2(pairs))), _EXACT_BITS - 6)


def rounding_share(problem: Problem) -> float:
    """The share by which rounding to ticks may change a value at most: N ticks over work / D."""
    pairs = problem.num_ops * problem.num_devices
    return pairs * _fine_tick(pairs)


def _distinct_times(problem: Problem, finite_s: Float[np.ndarray, "M"]) -> Float[np.ndarray, "K"]:
    """All positive times of a problem, each once: of ops, of starting them, of transfers."""
    cluster = problem.cluster
    parts = [finite_s, cluster.dispatch_s]
    if problem.launches is not None:
        parts.append(problem.launches.seconds.reshape(-1))
    if problem.sent_s is None:
        off = ~np.eye(problem.num_devices, dtype=bool)
        links = np.stack([cluster.link_latency_s[off], cluster.link_bytes_per_s[off]], axis=1)
        size = distinct(problem.sent_bytes)
        parts += [latency_s + size / rate for latency_s, rate in np.unique(links, axis=0)]
    else:  # without links
        parts.append(problem.sent_s)
    times = distinct(np.concatenate(parts))
    return times[times > 0]


def common_divisor(times: Float[np.ndarray, "K"], least: float) -> float | None:
    """The largest number, at least `least`, of which all `times` (ascending) are whole multiples.

    None where there is no such number. Euclid's algorithm on all remainders at once, which rounding
    may put off by a few last bits.

    >>> common_divisor(np.array([0.1, 0.2, 0.7]), 1e-6)
    0.1
    >>> common_divisor(np.array([0.1, 2**0.5]), 1e-6) is None
    True
    """
    if times.size > _SAMPLE:
        spread = times[np.linspace(0, times.size - 1, _SAMPLE).astype(int)]
        if common_divisor(spread, least) is None:
            return None
    divisor, error = float(times.min(initial=np.inf)), 0.0
    while least <= divisor < np.inf:
        count = np.round(times / divisor)
        if error * count[-1] > divisor / 4:
            return None
        rest = np.abs(times - count * divisor)
        wrong = rest > times * _NOISE + count * error
        if not wrong.any():
            divisor = float(times[0] / count[0])  # without the error of a remainder
            exact = np.abs(times - count * divisor) <= 4 * _NOISE * times
            return divisor if exact.all() and count.sum() < 2.0**_EXACT_BITS / 4 else None
        k = np.flatnonzero(wrong)[rest[wrong].argmin()]
        divisor, error = float(rest[k]), float(times[k] * _NOISE + count[k] * error)
        parts = np.round(times[0] / divisor)
        if abs(times[0] - parts * divisor) <= parts * error < divisor / 4:
            divisor, error = float(times[0] / parts), 0.0
    return None
