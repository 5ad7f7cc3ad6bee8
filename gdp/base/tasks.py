"""Independent tasks over processes of this machine, or over a Ray cluster: the same results.

Builders of the corpus and of labels, best known values, and tables are thousands of searches that
know nothing of each other. `each` maps a function over them; a worker that dies loses nothing but
its time. What a task needs comes with it, and what it makes goes back: only the process that asked
writes files. Ray: Moritz et al. 2018 (arXiv 1712.05889).
"""

import functools
import hashlib
import logging
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gdp.base.cores import num_cores
from gdp.base.errors import GdpError, MissingExtraError
from gdp.base.version import install_command

T = TypeVar("T")
R = TypeVar("R")
Found = Generator[tuple[int, R], None, None]

_ROOT = Path(__file__).parents[2]
SOURCES = (_ROOT / "gdp", _ROOT / "pretrain", _ROOT / "benchmarks")
ATTEMPTS = 4
"""Deaths of a worker on the same task after which the run ends: the task kills it."""


class Engine(NamedTuple):
    """Workers that run tasks: processes of this machine, or a Ray cluster."""

    processes: int = 1  # on this machine; one is this process itself
    ray: str | None = None  # a cluster instead: HOST:PORT, "auto", or "local" for one made here


def engine_of(processes: int | None, ray: str | None) -> Engine:
    """Workers by the options of a command; by default a process for each core."""
    return Engine(processes or num_cores(), ray)


HERE = Engine()
"""One task after another, in this process."""


def each(work: Callable[[T], R], tasks: Iterable[T], engine: Engine = HERE) -> Found[R]:
    """(task number, result of `work`) of each task as it finishes.

    Tasks are taken from the iterator only as workers come free, so that it may end early. `work`
    is a function of a module, and depends on nothing but its task. Raises what `work` raises, and
    `GdpError` for a task whose worker died `ATTEMPTS` times; what was yielded before stands.
    """
    numbered = enumerate(tasks)
    if engine.ray is not None:
        return _on_ray(work, numbered, engine.ray)
    if engine.processes == 1:
        return ((number, work(task)) for number, task in numbered)
    return _in_processes(work, numbered, engine.processes)


def end_with_parent() -> None:
    """Let this process end with the one that started it, however that one ends: a worker waits on a
    queue of which it holds both ends, and would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


class _Task(NamedTuple):
    number: int
    task: Any
    attempts: int = 0  # before this one


def _in_processes(
    work: Callable[[T], R], numbered: Iterator[tuple[int, T]], processes: int
) -> Found[R]:
    """Run on a process pool; when a process dies, restart the pool and rerun its tasks."""
    context = multiprocessing.get_context("spawn")  # JAX has threads: it does not survive a fork
    pool = ProcessPoolExecutor(processes, context, end_with_parent)
    running: dict[Future[R], _Task] = {}
    again: list[_Task] = []
    try:
        while True:
            free = max(0, processes - len(running) - len(again))
            again += (_Task(*entry) for entry in islice(numbered, free))
            if not again and not running:
                return
            broken = False
            try:
                while again:
                    running[pool.submit(work, again[0].task)] = again[0]
                    del again[0]
            except BrokenProcessPool:
                broken = True
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                if isinstance(future.exception(), BrokenProcessPool):
                    broken = True
                else:
                    yield running.pop(future).number, future.result()
            if broken:
                pool.shutdown()
                pool = ProcessPoolExecutor(processes, context, end_with_parent)
                again += [old._replace(attempts=old.attempts + 1) for old in running.values()]
                running.clear()
            for entry in again:
                if entry.attempts == ATTEMPTS:
                    raise GdpError(_killer(entry.number, entry.task))
    finally:
        pool.shutdown(cancel_futures=True)


def _on_ray(work: Callable[[T], R], numbered: Iterator[tuple[int, T]], address: str) -> Found[R]:
    """On a Ray cluster, which runs the tasks of dead workers and machines again."""
    ray = _connected(address)
    remote = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_checked)
    running: dict[Any, tuple[int, T]] = {}
    try:
        while True:
            # Twice what runs at once: nobody waits for work, and a cluster that grows is seen to.
            space = 2 * max(1, int(ray.cluster_resources().get("CPU", 1))) - len(running)
            for number, task in islice(numbered, max(0, space)):
                running[remote.remote(work, task, code_digest())] = number, task
            if not running:
                return
            (finished,), _ = ray.wait(list(running), num_returns=1)
            number, task = running.pop(finished)
            try:
                result = ray.get(finished)
            except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
                raise GdpError(_killer(number, task)) from error
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            yield number, result
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def _connected(address: str) -> Any:
    """Ray, connected; raises `MissingExtraError` without it, `GdpError` where nothing answers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster made here reports to nobody
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            f"--ray needs Ray: {install_command('cluster')}, here and on every machine"
        ) from error
    if not ray.is_initialized():
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if host:  # Ray itself would try for minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise GdpError(f"no Ray cluster answers at {address!r}: {error}") from error
    return ray


def _checked(work: Callable[[T], R], task: T, digest: str) -> R:
    """The task on another machine, if that runs the same code."""
    if code_digest() != digest:
        raise GdpError(
            f"{socket.gethostname()} has another version of gdp than the machine that asks: "
            "install the same one, or put the same checkout at the same path, on every machine"
        )
    return work(task)


@functools.cache
def code_digest() -> str:
    """SHA-256 of the sources of gdp on this machine, and in a checkout of the folders beside."""
    total = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted(folder.rglob("*.py")):
            total.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def _killer(number: int, task: object) -> str:
    return f"task {number} ended its worker {ATTEMPTS} times: {str(task)[:200]}"
