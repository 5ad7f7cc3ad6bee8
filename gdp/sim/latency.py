"""Latency of one run, by events, and period of a pipeline; many placements at once, over the cores.

Each thread simulates in a workspace of its own. Devices of one processor (`Device.processor`)
compute one at a time: a latency and a period are at least the seconds of all their ops and of the
copies between them, in the simulator as in every search and bound.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.cores import num_cores
from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks, seconds_per_unit
from gdp.sim.engine import Workspace, arrays, workspace

_SMALL = 20_000
"""Ops simulated below which a thread costs more than it saves (about half a millisecond)."""

_LOCK = threading.Lock()
_IDLE: WeakKeyDictionary[Problem, list[Workspace]] = WeakKeyDictionary()
"""Workspaces that no thread uses; guarded by the lock."""


@dataclass(frozen=True, eq=False)
class Transfers:
    """Every tensor sent, in the order of requests. Axis: X transfers."""

    tensor: Int[np.ndarray, "X"]
    source: Int[np.ndarray, "X"]  # device
    destination: Int[np.ndarray, "X"]
    start_s: Float[np.ndarray, "X"]  # when its channel takes it
    arrive_s: Float[np.ndarray, "X"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Times of all ops and transfers.

    Where an op cannot run on its device, it and what waits for it end at inf.
    """

    start_s: Float[np.ndarray, "N"]
    finish_s: Float[np.ndarray, "N"]
    transfers: Transfers
    busy_s: Float[np.ndarray, "D"]
    peak_bytes: Int[np.ndarray, "D"]  # weights alone where the latency is inf
    latency_s: float  # the end of the run, or what devices of one processor take in all, if longer


def simulate(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Int[np.ndarray, "N"] | None = None
) -> Schedule:
    """The schedule of one placement; see `latencies` for ranks. O((N + E) D)."""
    from gdp.sim.kernels.evaluate import evaluate_all

    problem, unit_s = in_ticks(problem), seconds_per_unit(problem)
    placed = checked_devices(problem, device[None], None)
    orders, ranked = orders_of(rank_rows(problem, rank, 1))
    flat = arrays(problem)
    latency_s, overflow_bytes = np.empty(1), np.empty(1, dtype=np.int64)
    with borrowed(problem) as work:
        evaluate_all(flat, work, placed, orders, ranked, True, latency_s, overflow_bytes)
        count = int(work.num_sent[0])
        lane = work.sent_lane[:count]
        transfers = Transfers(
            tensor=work.sent_tensor[:count].copy(),
            source=lane % problem.num_devices,
            destination=lane // problem.num_devices,
            start_s=work.sent_start_s[:count] * unit_s,
            arrive_s=work.sent_arrive_s[:count] * unit_s,
        )
        return Schedule(
            start_s=work.start_s * unit_s,
            finish_s=work.finish_s * unit_s,
            transfers=transfers,
            busy_s=work.busy_s * unit_s,
            peak_bytes=work.peak_bytes.copy(),
            latency_s=float(latency_s[0]) * unit_s,
        )


def latencies(
    problem: Problem,
    devices: Int[np.ndarray, "B N"],
    ranks: Int[np.ndarray, "N"] | Int[np.ndarray, "B N"] | None = None,
    threads: int | None = None,
) -> tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """Latency in seconds and overflow in bytes of each placement, over all cores by default.

    A device takes the ready op of smallest rank, ties by op id; without ranks, or where all of a
    placement's ranks are equal, the op that was ready first, ties by op id.
    """
    from gdp.sim.kernels.evaluate import evaluate_all

    whole, unit_s = in_ticks(problem), seconds_per_unit(problem)
    placed = checked_devices(problem, devices, threads)
    count = len(placed)
    rows = rank_rows(problem, ranks, count)
    shared = orders_of(rows[:1])
    flat = arrays(whole)
    latency_s, overflow_bytes = np.empty(count), np.empty(count, dtype=np.int64)

    def run(work: Workspace, first: int, end: int) -> None:
        orders, ranked = shared if len(rows) <= 1 else orders_of(rows[first:end])
        evaluate_all(
            flat, work, placed[first:end], orders, ranked, False,
            latency_s[first:end], overflow_bytes[first:end],
        )  # fmt: skip

    split(whole, count, threads, run)
    return latency_s * unit_s, overflow_bytes


def periods(
    problem: Problem,
    devices: Int[np.ndarray, "B N"],
    ranks: Int[np.ndarray, "..."] | None = None,
    threads: int | None = None,
) -> tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """Period in seconds and overflow in bytes of each placement, over all cores by default.

    period = max over devices of (compute + dispatch) and over channels of (sum of transfer times),
    per sample: in steady state every device and channel works on some sample, so the busiest one
    sets the pace. A tensor is sent once to each device that reads it; latency occupies the channel.
    Memory is that of `gdp.sim.memory.pipeline_peaks`. O(N + E) a placement.
    """
    from gdp.sim.kernels.evaluate import evaluate_periods

    del ranks  # a full pipeline has no order
    whole, unit_s = in_ticks(problem), seconds_per_unit(problem)
    placed = checked_devices(problem, devices, threads)
    flat = arrays(whole)
    period_s, overflow_bytes = np.empty(len(placed)), np.empty(len(placed), dtype=np.int64)

    def run(work: Workspace, first: int, end: int) -> None:
        evaluate_periods(flat, work, placed, first, end, period_s, overflow_bytes)

    split(whole, len(placed), threads, run)
    return period_s * unit_s, overflow_bytes


def shares_processor(problem: Problem) -> bool:
    """True if two devices are one processor."""
    return bool((problem.cluster.processor >= 0).any())


def rank_rows(
    problem: Problem, ranks: Int[np.ndarray, "N"] | Int[np.ndarray, "B N"] | None, count: int
) -> Int[np.ndarray, "rows N"]:
    """Ranks as no row, one row for all placements, or one row for each."""
    if ranks is None:
        return np.empty((0, problem.num_ops), dtype=np.int64)
    rows = np.ascontiguousarray(np.atleast_2d(ranks), dtype=np.int64)
    if rows.shape[1] != problem.num_ops or len(rows) not in (1, count):
        raise ValueError(
            f"ranks have shape {ranks.shape}, wanted [{problem.num_ops}] "
            f"or [{count}, {problem.num_ops}]"
        )
    return rows


def orders_of(rows: Int[np.ndarray, "K N"]) -> tuple[Int[np.ndarray, "K N"], Bool[np.ndarray, "K"]]:
    """The ops by rank, ties by id; and whether some ranks differ, without which they say nothing.

    >>> orders_of(np.array([[3, 1, 1], [2, 2, 2]]))
    (array([[1, 2, 0],
           [0, 1, 2]]), array([ True, False]))
    """
    return np.argsort(rows, axis=1, kind="stable"), (rows != rows[:, :1]).any(axis=1)


@contextlib.contextmanager
def borrowed(problem: Problem) -> Iterator[Workspace]:
    """A workspace that no other thread uses meanwhile; made when none is idle."""
    with _LOCK:
        idle = _IDLE.setdefault(problem, [])
        work = idle.pop() if idle else None
    if work is None:
        work = workspace(problem)
    try:
        yield work
    finally:
        with _LOCK:
            idle.append(work)


def checked_devices(
    problem: Problem, devices: Int[np.ndarray, "B N"], threads: int | None
) -> Int[np.ndarray, "B N"]:
    """Device indices as kernels want them; raises `ValueError` where they do not fit."""
    if devices.shape[1] != problem.num_ops:
        raise ValueError(f"placements have {devices.shape[1]} ops, the graph {problem.num_ops}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    if devices.size and (devices.min() < 0 or devices.max() >= problem.num_devices):
        raise ValueError(f"device indices must lie in 0..{problem.num_devices - 1}")
    return np.ascontiguousarray(devices, dtype=np.int32)


def split(
    problem: Problem, count: int, threads: int | None, run: Callable[[Workspace, int, int], None]
) -> None:
    """Call `run(workspace, first, end)` over 0..count, in as many threads as pay.

    Placements differ in cost, so each thread takes many small pieces.
    """
    threads = num_cores() if threads is None else threads
    threads = min(threads, count, 1 + count * problem.num_ops // _SMALL)
    if threads <= 1:
        with borrowed(problem) as work:
            run(work, 0, count)
        return
    bounds = np.linspace(0, count, min(count, 8 * threads) + 1).astype(int)
    pieces = iter(list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)))

    def work_off() -> None:
        with borrowed(problem) as work:
            while True:
                with _LOCK:
                    piece = next(pieces, None)
                if piece is None:
                    return
                run(work, *piece)

    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(work_off) for _ in range(threads - 1)]
        work_off()
        for other in others:
            other.result()
