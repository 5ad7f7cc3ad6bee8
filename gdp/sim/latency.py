"""Latency of one run, by events, and period of a pipeline; many placements at once, over the cores.

Each thread simulates in a workspace of its own. Devices of one processor (`Device.processor`)
compute one at a time: a latency and a period are at least the seconds of all their ops and of the
copies between them, in the simulator as in every search and bound. So they are at least the seconds
in which one thread of the host launches the ops of several devices (`Problem.launches`).
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.cores import num_cores
from gdp.cluster.types import overflow_bytes as cluster_overflow
from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks, seconds_per_unit
from gdp.sim.engine import Workspace, arrays, workspace
from gdp.sim.memory import pipeline_peaks
from gdp.sim.schedule import Schedule, Transfers

_SMALL = 20_000
"""Ops simulated below which a thread costs more than it saves (about half a millisecond)."""

PLAIN_OPS = 250_000
"""Ops that a process simulates in plain Python, about a second, before kernels are worth loading:
0.5 s where they were compiled before, else 15 s of compilation."""
_plain_ops = 0

_LOCK = threading.Lock()
_IDLE: WeakKeyDictionary[Problem, list[Workspace]] = WeakKeyDictionary()
"""Workspaces that no thread uses; guarded by the lock."""


def in_plain(problem: Problem, placements: int) -> bool:
    """True if `count` placements are to be simulated in plain Python, with equal answers: until the
    process has simulated `PLAIN_OPS`, or loaded the kernels for a search."""
    global _plain_ops
    if "gdp.sim.kernels.evaluate" in sys.modules:
        return False
    _plain_ops += placements * problem.num_ops
    return _plain_ops <= PLAIN_OPS


def simulate(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Int[np.ndarray, "N"] | None = None
) -> Schedule:
    """The schedule of one placement; see `latencies` for ranks. O((N + E) D)."""
    whole, unit_s = in_ticks(problem), seconds_per_unit(problem)
    placed = checked_devices(problem, device[None], None)
    orders, ranked = orders_of(rank_rows(problem, rank, 1))
    if in_plain(problem, 1):
        from gdp.sim.plain import simulated

        return simulated(whole, placed[0], orders[0] if ranked.any() else None).in_seconds(unit_s)
    from gdp.sim.kernels.evaluate import evaluate_all

    latency_s, overflow_bytes = np.empty(1), np.empty(1, dtype=np.int64)
    with borrowed(whole) as work:
        evaluate_all(arrays(whole), work, placed, orders, ranked, True, latency_s, overflow_bytes)
        count = int(work.num_sent[0])
        lane = work.sent_lane[:count]
        transfers = Transfers(
            tensor=work.sent_tensor[:count].copy(),
            source=lane % problem.num_devices,
            destination=lane // problem.num_devices,
            start_s=work.sent_start_s[:count],
            arrive_s=work.sent_arrive_s[:count],
        )
        return Schedule(
            start_s=work.start_s,
            finish_s=work.finish_s,
            transfers=transfers,
            busy_s=work.busy_s,
            peak_bytes=work.peak_bytes.copy(),
            latency_s=float(latency_s[0]),
        ).in_seconds(unit_s)


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
    whole, unit_s = in_ticks(problem), seconds_per_unit(problem)
    placed = checked_devices(problem, devices, threads)
    count = len(placed)
    rows = rank_rows(problem, ranks, count)
    flat = arrays(whole)
    latency_s, overflow_bytes = np.empty(count), np.zeros(count, dtype=np.int64)
    if in_plain(problem, count):
        from gdp.sim.plain import simulated

        orders, ranked = orders_of(rows)
        for b, device in enumerate(placed):
            row = min(b, len(rows) - 1)
            order = orders[row] if row >= 0 and ranked[row] else None
            run = simulated(whole, device, order)
            latency_s[b] = run.latency_s
            if flat.memory_binds:
                overflow_bytes[b] = cluster_overflow(whole.cluster, run.peak_bytes)
        return latency_s * unit_s, overflow_bytes
    from gdp.sim.kernels.evaluate import evaluate_all

    shared = orders_of(rows[:1])

    def evaluate(work: Workspace, first: int, end: int) -> None:
        orders, ranked = shared if len(rows) <= 1 else orders_of(rows[first:end])
        evaluate_all(
            flat, work, placed[first:end], orders, ranked, False,
            latency_s[first:end], overflow_bytes[first:end],
        )  # fmt: skip

    split(whole, count, threads, evaluate)
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
    del ranks  # a full pipeline has no order
    whole, unit_s = in_ticks(problem), seconds_per_unit(problem)
    placed = checked_devices(problem, devices, threads)
    flat = arrays(whole)
    period_s, overflow_bytes = np.empty(len(placed)), np.zeros(len(placed), dtype=np.int64)
    if in_plain(problem, len(placed)):
        from gdp.sim import plain

        for b, device in enumerate(placed):
            busy = plain.busy_seconds(whole, device)
            period_s[b] = max(float(part.max(initial=0.0)) for part in busy)
            if flat.pipeline_memory_binds:
                overflow_bytes[b] = cluster_overflow(whole.cluster, pipeline_peaks(whole, device))
        return period_s * unit_s, overflow_bytes
    from gdp.sim.kernels.evaluate import evaluate_periods

    def run(work: Workspace, first: int, end: int) -> None:
        evaluate_periods(flat, work, placed, first, end, period_s, overflow_bytes)

    split(whole, len(placed), threads, run)
    return period_s * unit_s, overflow_bytes


def busy_ticks(
    problem: Problem, device: Int[np.ndarray, "N"]
) -> tuple[Float[np.ndarray, "D"], Float[np.ndarray, "C"], Float[np.ndarray, "Q"]]:
    """Busy time per sample of each device, of each channel on which transfers queue, and of each
    processor that devices share or thread that launches their ops; of a problem in ticks, in
    ticks."""
    placed = checked_devices(problem, device[None], None)
    if in_plain(problem, 1):
        from gdp.sim.plain import busy_seconds

        return busy_seconds(problem, placed[0])
    from gdp.sim.kernels.evaluate import evaluate_periods

    flat, value, over = arrays(problem), np.empty(1), np.empty(1, dtype=np.int64)
    with borrowed(problem) as work:
        evaluate_periods(flat, work, placed, 0, 1, value, over)
        # The last channel is that of links on which nothing queues.
        return work.busy_s.copy(), work.channel_s[:-1].copy(), work.serial_s.copy()


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
    """The ops by rank, ties by id; and whether some ranks differ.

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
