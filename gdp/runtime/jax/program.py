"""Recorded JAX programs cut into jitted functions, one per segment.

A value that no op of the graph makes (a view of weights or constants) is computed in every segment
that reads it, from weights that lie on that segment's device. All calls and transfers are issued
from one thread; JAX runs them when their arguments exist, so devices work side by side.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.errors import ModelError
from gdp.graph.op_graph import OUTPUT
from gdp.importers.jax.jaxpr import JaxStep
from gdp.importers.jax.trace import RecordedJax
from gdp.importers.program import Stacked, Value
from gdp.runtime.async_execution import ProgramSegment
from gdp.runtime.jax.values import as_numpy, stacked


@dataclass(frozen=True, eq=False)
class Layout:
    """Devices and order of segments. Axes: N ops, S segments."""

    segment: Int[np.ndarray, "N"]
    segment_device: Int[np.ndarray, "S"]  # index into the devices
    order: Sequence[int]
    devices: Sequence[Any]  # JAX devices
    host: int  # holds inputs and receives outputs


_Send = tuple[int, int, Any]  # (slot, slot of the copy, JAX device of the copy)


@dataclass(frozen=True)
class _Call:
    """A piece with the slots that its arrays are kept in during a run."""

    function: Callable[..., Sequence[Any]]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    sends: tuple[_Send, ...]  # when it has been issued


class SegmentedJaxProgram:
    """The pieces of a program, the weights on their devices, and every transfer between them."""

    def __init__(self, recorded: RecordedJax, layout: Layout, arguments: Sequence[Any]) -> None:
        self._given = dict(zip(recorded.arguments, arguments, strict=True))
        self.outputs = tuple(recorded.outputs)
        self.pieces = _pieces(recorded, layout, set(self._given))
        self._slot: dict[tuple[Value, int], int] = {}
        self._home = {value: piece.device for piece in self.pieces for value in piece.makes}
        inputs = [value for value in self._given if value.maker >= 0]
        self._fixed = self._placed(inputs, layout)
        leaving = _leaving(recorded)
        sends = self._transfers(inputs, leaving, layout)
        self._first = tuple(send for value in inputs for send in sends.get(value, ()))
        self._calls = [
            _Call(
                piece.call,
                tuple(self._at(value, piece.device) for value in piece.reads),
                tuple(self._at(value, piece.device) for value in piece.makes),
                tuple(send for value in piece.makes for send in sends.get(value, ())),
            )
            for piece in self.pieces
        ]
        self._results = [
            self._at(value, layout.host if value in leaving else self._home[value])
            for value in dict.fromkeys(_flat(self.outputs))
            if value in self._home
        ]

    def _at(self, value: Value, device: int) -> int:
        """The slot of a value on a device."""
        return self._slot.setdefault((value, device), len(self._slot))

    def _placed(self, inputs: Sequence[Value], layout: Layout) -> dict[int, Any]:
        """Inputs on the host, weights and constants on every device that reads them."""
        import jax

        wanted = {(value, layout.host) for value in inputs}
        for piece in self.pieces:
            mine = (v for v in piece.reads if v not in self._home and v.maker < 0)
            wanted |= {(value, piece.device) for value in mine}
        return {
            self._at(value, device): jax.device_put(
                self._given.get(value, value.known), layout.devices[device]
            )
            for value, device in wanted
        }

    def _transfers(
        self, inputs: Sequence[Value], leaving: set[Value], layout: Layout
    ) -> dict[Value, tuple[_Send, ...]]:
        """To each other device that reads a value, once."""
        home = dict.fromkeys(inputs, layout.host) | self._home
        readers: dict[Value, dict[int, None]] = {}
        for piece in self.pieces:
            for value in piece.reads:
                if home.get(value, piece.device) != piece.device:
                    readers.setdefault(value, {})[piece.device] = None
        for value in leaving & set(self._home):
            if home[value] != layout.host:
                readers.setdefault(value, {})[layout.host] = None
        return {
            value: tuple(
                (self._at(value, home[value]), self._at(value, device), layout.devices[device])
                for device in destinations
            )
            for value, destinations in readers.items()
        }

    def issue(self) -> list[Any]:
        """Starts one run; returns the results, which may still be computed. Does not wait."""
        return self._issue()[1]

    def _issue(self) -> tuple[list[Any], list[Any]]:
        import jax

        arrays: list[Any] = [None] * len(self._slot)
        for slot, array in self._fixed.items():
            arrays[slot] = array
        for source, target, device in self._first:
            arrays[target] = jax.device_put(arrays[source], device)
        for call in self._calls:
            results = call.function(*[arrays[slot] for slot in call.reads])
            for slot, array in zip(call.makes, results, strict=True):
                arrays[slot] = array
            for source, target, device in call.sends:
                arrays[target] = jax.device_put(arrays[source], device)
        return arrays, [arrays[slot] for slot in self._results]

    def run(self) -> list[np.ndarray]:
        """The leaves of the results of one run, on the host."""
        arrays, _ = self._issue()

        def fetch(value: Value) -> np.ndarray:
            if value in self._home:
                return as_numpy(arrays[self._at(value, self._home[value])])
            if value in self._given:
                return as_numpy(self._given[value])
            return np.asarray(value.known, dtype=value.dtype)

        return [
            stacked([fetch(row) for row in out.rows]) if isinstance(out, Stacked) else fetch(out)
            for out in self.outputs
        ]

    def arguments_of_pieces(self) -> list[list[Any]]:
        """Arguments of every segment in one complete run, to time it alone."""
        arrays, _ = self._issue()
        return [[arrays[slot] for slot in call.reads] for call in self._calls]


def _flat(outputs: Iterable[Value | Stacked]) -> list[Value]:
    return [row for out in outputs for row in (out.rows if isinstance(out, Stacked) else [out])]


def _leaving(recorded: RecordedJax) -> set[Value]:
    """The results that go to the host: those that an Output op reads."""
    src, dst = recorded.graph.edges
    types = recorded.graph.op_types
    makers = {int(a) for a, b in zip(src, dst, strict=True) if types[b] == OUTPUT}
    return {v for v in _flat(recorded.outputs) if recorded.op_of.get(v.maker, -1) in makers}


def _pieces(recorded: RecordedJax, layout: Layout, given: set[Value]) -> list[ProgramSegment]:
    """The pieces in the order in which they run; views that are results come last, on the host."""
    maker = {value: step for step in recorded.steps for value in step.outs}
    wanted = [value for value in _flat(recorded.outputs) if value in maker]
    live = _live(wanted, maker)
    steps_of: dict[int, list[JaxStep]] = {}
    for step in recorded.steps:
        if step in live and step.maker >= 0:
            steps_of.setdefault(int(layout.segment[recorded.op_of[step.maker]]), []).append(step)
    views = dict.fromkeys(value for value in wanted if maker[value].maker < 0)
    made_by = {v: s for s, steps in steps_of.items() for step in steps for v in step.outs}
    crossing = {value for value in wanted if value not in views}
    for s, steps in steps_of.items():
        crossing |= {v for step in steps for v in step.ins if made_by.get(v, s) != s}
    pieces = []
    for s in layout.order:
        steps = steps_of.get(s)
        if steps:
            makes = [v for step in steps for v in step.outs if v in crossing]
            where = int(layout.segment_device[s])
            pieces.append(_piece(s, where, steps, makes, maker, layout, given))
    if views:
        steps = list(dict.fromkeys(maker[value] for value in views))
        pieces.append(_piece(-1, layout.host, steps, list(views), maker, layout, given))
    return pieces


def _live(wanted: Iterable[Value], maker: Mapping[Value, JaxStep]) -> set[JaxStep]:
    todo, seen = [maker[value] for value in wanted], set()
    while todo:
        step = todo.pop()
        if step not in seen:
            seen.add(step)
            todo += [maker[value] for value in step.ins if value in maker]
    return seen


def _piece(
    segment: int,
    device: int,
    steps: Sequence[JaxStep],
    makes: Sequence[Value],
    maker: Mapping[Value, JaxStep],
    layout: Layout,
    given: set[Value],
) -> ProgramSegment:
    """The function of some steps, with the views that they read."""
    inside: dict[JaxStep, None] = {}
    reads: dict[Value, None] = {}
    own = set(steps)

    def include(step: JaxStep) -> None:
        for value in step.ins:
            source = maker.get(value)
            if source is not None and source.maker < 0:
                if source not in inside:
                    include(source)
            elif (source is None or source not in own) and not _is_literal(value, given):
                reads[value] = None
        inside[step] = None

    for step in steps:
        if step not in inside:
            include(step)
    function = _jitted(tuple(inside), tuple(reads), tuple(makes), layout.devices[device])
    ops = len({step.maker for step in steps} - {-1})
    return ProgramSegment(segment, device, ops, function, tuple(reads), tuple(makes))


def _is_literal(value: Value, given: set[Value]) -> bool:
    """True if a value that nothing makes is a number to compile in, not an array to hold."""
    if value in given or value.maker >= 0:
        return False
    if value.known is None:
        raise ModelError(f"a value of shape {value.dims} is read but nothing makes it")
    return getattr(value.known, "size", 1) <= 1


def _jitted(
    steps: Sequence[JaxStep], reads: Sequence[Value], makes: Sequence[Value], device: Any
) -> Callable[..., Sequence[Any]]:
    import jax
    import jax.numpy as jnp

    def literal(value: Value) -> Any:
        constant = value.known
        if hasattr(constant, "dtype"):
            return constant
        return np.asarray(constant, jnp.dtype(value.dtype))

    def piece(*arrays: Any) -> list[Any]:
        env = dict(zip(reads, arrays, strict=True))
        for step in steps:
            ins = [env[v] if v in env else literal(v) for v in step.ins]
            env.update(zip(step.outs, step.run(*ins), strict=True))
        return [env[value] for value in makes]

    # A piece without arguments would run on JAX's default device.
    return jax.jit(piece, out_shardings=jax.sharding.SingleDeviceSharding(device))
