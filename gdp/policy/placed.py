"""The placement that a policy was fine-tuned to: kept with its weights, for when it is asked again.

A decode begins from what advisers propose; what a fine-tuning found after that is not found again
for free.
"""

import base64
import zlib

import msgspec
import numpy as np
from jaxtyping import Int

from gdp.methods.base import Assignment
from gdp.sim.problem import Problem

WIDE = "<i4"
"""As packed: device numbers and priorities of any graph fit."""
MAX_PACKED_BYTES = 1 << 26
"""Of a row unpacked: 16 million ops."""


class Placed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One placement of one graph; it may serve on another cluster with as many devices."""

    digest: str  # of the graph
    device: str  # base64 of zlib of 32-bit integers, one per op
    rank: str | None = None  # priorities, alike

    def __post_init__(self) -> None:
        """Raises `ValueError` on what `pack` cannot have written."""
        for text in (self.device, self.rank or ""):
            unpack(text, WIDE)


def keep(problem: Problem, assignment: Assignment) -> Placed:
    """The assignment as it is written."""
    rank = None if assignment.rank is None else pack(assignment.rank, WIDE)
    return Placed(problem.graph.digest, pack(assignment.device, WIDE), rank)


def recalled(placed: Placed | None, problem: Problem) -> Assignment | None:
    """The assignment, if it is of this graph and the problem allows it."""
    if placed is None or placed.digest != problem.graph.digest:
        return None
    device = unpack(placed.device, WIDE)
    rank = None if placed.rank is None else unpack(placed.rank, WIDE)
    if len(device) != problem.num_ops or (rank is not None and len(rank) != problem.num_ops):
        return None
    if not len(device) or device.min() < 0 or device.max() >= problem.num_devices:
        return None
    lead = np.zeros(problem.num_groups, dtype=np.int64)
    lead[problem.group] = device
    together = (lead[problem.group] == device).all()
    if not together or not problem.allowed[np.arange(len(device)), device].all():
        return None
    return Assignment(device, rank)


def pack(row: Int[np.ndarray, "N"], kind: str) -> str:
    """Base64 of zlib of integers of a NumPy type."""
    return base64.b64encode(zlib.compress(row.astype(kind).tobytes(), 9)).decode()


def unpack(text: str, kind: str) -> Int[np.ndarray, "N"]:
    """The integers of `pack`, none of an empty text; raises `ValueError` on anything else."""
    if not text:
        return np.zeros(0, np.int64)
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text, validate=True), MAX_PACKED_BYTES)
    except zlib.error as error:
        raise ValueError(f"{text[:16]!r}... is no packed placement: {error}") from None
    if not stream.eof or len(data) % np.dtype(kind).itemsize:
        raise ValueError(f"{text[:16]!r}... is no packed placement: it is cut off, or too long")
    return np.frombuffer(data, dtype=kind).astype(np.int64)
