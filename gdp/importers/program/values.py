"""What flows between the ops of a traced program, and the ops, before they are a graph."""

import math
from dataclasses import dataclass, field
from typing import Any

from gdp.graph.op_graph import Attribute

Key = tuple[int, ...]
"""A weight: (leaf,), or (leaf, start, stop) for rows of it."""


@dataclass(eq=False, slots=True)
class Value:
    """An array of the program. Made by an op, or held as a weight, or neither: a constant."""

    dims: tuple[int, ...]
    dtype: str
    itemsize: int
    maker: int = -1  # op index
    out: int = 0  # which of the op's outputs
    weight: Key | None = None
    backward: bool = False  # depends on the gradient of the loss
    known: Any = None  # a literal or an array that the function closes over

    @property
    def nbytes(self) -> int:
        """Bytes as a dense array."""
        return math.prod(self.dims) * self.itemsize


@dataclass(eq=False, slots=True)
class Stacked:
    """An array whose rows along axis 0 exist one by one: the inputs and outputs of a loop."""

    rows: list[Value]
    whole: Value | None = None  # once something has read it as one array

    @property
    def dims(self) -> tuple[int, ...]:
        """Of the whole array: rows first."""
        return (len(self.rows), *self.rows[0].dims)


@dataclass(eq=False, slots=True)
class Op:
    """One op before dead code is removed."""

    op_type: str
    scope: str
    ins: list[Value]
    outs: list[Value]
    flop: float
    traffic_bytes: float
    backward: bool
    dtype: str
    in_dims: tuple[tuple[int, ...], ...] = ()
    attributes: dict[str, Attribute] = field(default_factory=dict)
    name: str = ""
    waits_for: list[Value] = field(default_factory=list)  # read for their order in time only


@dataclass
class Listed:
    """Ops in the order of evaluation. Not frozen: an importer appends to it."""

    ops: list[Op] = field(default_factory=list)
    weights: list[Value] = field(default_factory=list)  # the leaves
    estimated: set[str] = field(default_factory=set)  # op types costed by the fallback
    assumptions: list[str] = field(default_factory=list)
    optimizer_starts: int | None = None  # index of the first op that updates weights


def attributes_of(params: dict[str, Any]) -> dict[str, Attribute]:
    """The parameters of a primitive that are plain numbers, texts or tuples of integers."""
    found: dict[str, Attribute] = {}
    for key, value in params.items():
        if isinstance(value, bool):
            found[key] = int(value)
        elif isinstance(value, int | float | str):
            found[key] = value
        elif isinstance(value, tuple | list) and value:
            flat = _flat(value)
            if flat is not None:
                found[key] = flat
    return found


def _flat(value: object) -> tuple[int, ...] | None:
    if isinstance(value, tuple | list):
        parts = [_flat(part) for part in value]
        return None if None in parts else tuple(i for part in parts for i in part or ())
    try:
        return (int(value),) if value == int(value) else None  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None
