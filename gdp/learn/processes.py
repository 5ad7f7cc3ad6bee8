"""Training on several processes: data-parallel over problems, gradients averaged by XLA.

JAX's distributed runtime detects dead processes: its coordinator hears heartbeats from all and
tells the others; a collective operation whose partner was killed fails at once. The runtime then
ends every process with pages of traces and lets Python say nothing. So each process has a small
child that waits on a pipe, and prints one line where the pipe closes before its dismissal.
"""

import atexit
import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree

from gdp.base.errors import GdpError
from gdp.base.terminal import printable

_CHILD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if not sys.stdin.buffer.read():
    os.write(2, ("\\n" + sys.argv[1] + "\\n").encode())
"""
_BYE = b"bye"


class Witness:
    """A child process that writes `line` to standard error unless this process ends in order or
    dismisses it."""

    def __init__(self, line: str) -> None:
        # -I and -S: nothing of the user's is imported, and it starts in a hundredth of a second.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, line],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.dismiss)

    def dismiss(self) -> None:
        """This process ends in order, or has said itself what happened."""
        atexit.unregister(self.dismiss)
        with contextlib.suppress(OSError, ValueError):
            self._child.communicate(_BYE, timeout=5.0)


class DistributedError(GdpError):
    """A process that cannot join, or that lost the others."""


_WITNESS: list[Witness] = []
"""The one of this process, once it has joined others."""


def quit_at_once(error: DistributedError) -> NoReturn:
    """Write the reason to standard error and end the process; an orderly exit would wait for the
    lost ones."""
    sys.stdout.flush()
    sys.stderr.write(f"gdp: {printable(str(error))}\n")
    sys.stderr.flush()
    for witness in _WITNESS:
        witness.dismiss()
    os._exit(1)


@dataclass(frozen=True)
class ProcessGroup:
    """This process among all that train together."""

    rank: int = 0
    size: int = 1

    def mine(self, items: list[Any]) -> list[tuple[int, Any]]:
        """(index, item) of the items that this process handles."""
        return [(k, item) for k, item in enumerate(items) if k % self.size == self.rank]

    def mean(self, tree: Any, count: int) -> Any:
        """The mean over the items of all processes; `tree` sums the `count` items of this one."""
        if self.size == 1:
            return jax.tree.map(lambda x: x / max(count, 1), tree)
        flat, restore = ravel_pytree(tree)
        flat = np.append(np.asarray(flat), float(count))
        with self.together():
            rows, summed = _summing()
            row = jax.make_array_from_process_local_data(rows, flat.astype(np.float32)[None])
            total = np.asarray(summed(row))
        return restore(jnp.asarray(total[:-1] / max(float(total[-1]), 1.0)))

    def agree(self, value: int) -> int:
        """The value of the first process, known to all."""
        if self.size == 1:
            return value
        with self.together():
            return int(multihost_utils.broadcast_one_to_all(np.int32(value)))

    def gather(self, text: bytes) -> list[bytes]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [text]
        with self.together():
            sizes = multihost_utils.process_allgather(np.int64(len(text)))
            row = np.zeros(int(sizes.max()), np.uint8)
            row[: len(text)] = np.frombuffer(text, np.uint8)
            rows = np.asarray(multihost_utils.process_allgather(row))
        return [row[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Context of a collective step, which fails where another process has failed.

        gdp's own errors and those of the system, except for time-outs, pass unchanged.
        """
        try:
            yield
        except Exception as error:
            system = isinstance(error, OSError) and error.errno is not None
            if self.size == 1 or system or isinstance(error, GdpError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DistributedError(
                f"process {self.rank} lost the others ({first[:160]}); start all again, the run "
                "resumes from its checkpoint"
            ) from None


def join(
    coordinator: str,
    processes: int,
    process_id: int,
    *,
    timeout_s: float = 30.0,
    heartbeat_s: int = 30,
) -> ProcessGroup:
    """Join the other processes; raises `DistributedError` within the timeout if that fails.

    The first process opens the coordinator's port, on the interface of that address alone (unless
    `JAX_COORDINATOR_BIND_ADDRESS` names another); the others look for it before they hand over to
    JAX, whose own error for a wrong address is long and late. From then on a process that dies or
    hangs for `heartbeat_s` ends the others.
    """
    if not 0 <= process_id < processes:
        raise ValueError(f"process id {process_id} lies outside 0..{processes - 1}")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"coordinator must be HOST:PORT, got {coordinator!r}")
    if process_id > 0:
        _probe(host, int(port), timeout_s)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process_id,
            initialization_timeout=int(timeout_s),
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=heartbeat_s,
            coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator),
        )
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DistributedError(
            f"process {process_id} cannot join {processes} processes at {coordinator}: {first}"
        ) from None
    _WITNESS.append(
        Witness(
            f"gdp: process {process_id} was ended: it was killed, or lost the others, as JAX says "
            "above; start all again, the run resumes from its checkpoint"
        )
    )
    return ProcessGroup(process_id, processes)


def _probe(host: str, port: int, timeout_s: float) -> None:
    """Wait until something listens at the coordinator's address."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection((host, port), timeout=2.0):
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"no coordinator answers at {host}:{port} within {timeout_s:.0f} s ({error}); "
                    "check the address, and that process 0 runs"
                ) from None
            time.sleep(0.2)


@functools.cache
def _summing() -> tuple[Any, Any]:
    """(sharding over processes, compiled sum over them)."""
    # One device of each process: a process has one row, however many devices it has.
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = jax.sharding.Mesh(np.array([first[rank] for rank in sorted(first)]), ("process",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process"))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return rows, jax.jit(lambda x: x.sum(axis=0), out_shardings=everywhere)
