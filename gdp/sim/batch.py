"""Many placements at once, over the cores: threads, each with a workspace of its own."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Int

from gdp.problem.problem import Problem, derived
from gdp.sim.engine import Workspace, workspace

_SMALL = 20_000
"""Ops simulated below which a thread costs more than it saves (about half a millisecond)."""

_LOCK = threading.Lock()


@derived
def _idle(problem: Problem) -> list[Workspace]:
    """The workspaces that no thread uses; guarded by the lock."""
    del problem
    return []


@contextlib.contextmanager
def borrowed(problem: Problem) -> Iterator[Workspace]:
    """A workspace that no other thread uses meanwhile; made when none is idle."""
    with _LOCK:
        idle = _idle(problem)
        work = idle.pop() if idle else None
    if work is None:
        work = workspace(problem)
    try:
        yield work
    finally:
        with _LOCK:
            idle.append(work)


def num_threads() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
    problem: Problem,
    count: int,
    threads: int | None,
    run: Callable[[Workspace, int, int], None],
) -> None:
    """Call `run(workspace, first, end)` over 0..count, in as many threads as pay.

    Placements differ in cost, so each thread takes many small pieces.
    """
    threads = num_threads() if threads is None else threads
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
