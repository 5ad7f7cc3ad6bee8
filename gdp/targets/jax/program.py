"""Recorded JAX programs cut into jitted functions, one per segment.

A value that no op of the graph makes (a view of weights or constants) is computed in every segment
that reads it, from weights that lie on that segment's device. All calls and transfers are issued
from one thread; JAX runs them when their arguments exist, so devices work side by side. Arguments
that are given as shapes are made up, and results must agree within `tolerance`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OUTPUT, OpGraph
from gdp.importers.jax.jaxpr import JaxStep, stack_rows
from gdp.importers.jax.trace import JaxModel, RecordedJax
from gdp.importers.program import Stacked, Value
from gdp.measure.async_execution import ProgramSegment
from gdp.measure.plan import ExecutionPlan

RELATIVE_TOLERANCE = 1e-4
"""Of the largest magnitude in an array: other fusions add up in another order."""
_TF32 = 2.0**-10  # accelerators multiply float32 with ten bits of mantissa unless told otherwise


@dataclass(frozen=True, eq=False)
class Layout:
    """Devices and order of segments. Axes: N ops, S segments."""

    segment: Int[np.ndarray, "N"]
    segment_device: Int[np.ndarray, "S"]  # index into the devices
    order: Sequence[int]
    devices: Sequence[Any]  # JAX devices
    host: int  # holds inputs and receives outputs

    @classmethod
    def of(cls, plan: ExecutionPlan, devices: Sequence[Any], host: int) -> "Layout":
        """The layout of a plan on JAX's devices."""
        return cls(plan.segment, plan.segment_device, plan.order, devices, host)


_Send = tuple[int, int, Any]  # (slot, slot of the copy, JAX device of the copy)


@dataclass(frozen=True)
class _Call:
    """A piece with the slots that its arrays are kept in during a run."""

    function: Callable[..., Sequence[Any]]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    sends: tuple[_Send, ...]  # when it has been issued
    drops: tuple[int, ...] = ()  # slots that nothing reads any more


class Given(NamedTuple):
    """Arguments of a run, and their arrays where the pieces read them."""

    arguments: Mapping[Value, Any]  # a stacked weight may be the list of its rows
    arrays: Mapping[int, Any]  # by slot

    def with_inputs(self, inputs: "Given") -> "Given":
        """These and others together."""
        return Given({**self.arguments, **inputs.arguments}, {**self.arrays, **inputs.arrays})


class SegmentedJaxProgram:
    """The pieces of a program, the weights on their devices, and every transfer between them.

    Rows of a stacked weight, as the layers of a scan read them, lie on the devices of their layers;
    the whole weight only where an op reads it whole.
    """

    def __init__(self, recorded: RecordedJax, layout: Layout) -> None:
        self.arguments = tuple(recorded.arguments)
        self.outputs = tuple(recorded.outputs)
        self._layout = layout
        self._row_step = _row_steps(recorded)
        first = {row.weight: row for row in reversed(self._row_step)}
        self._same: dict[Value, Value] = {row: first[row.weight] for row in self._row_step}
        self.pieces = _pieces(recorded, layout, set(self.arguments), self._row_step.keys())
        self._slot: dict[tuple[Value, int], int] = {}
        self._home = {value: piece.device for piece in self.pieces for value in piece.makes}
        inputs = [value for value in self.arguments if value.maker >= 0]
        self._held = {
            (self._one(value), piece.device): None
            for piece in self.pieces
            for value in piece.reads
            if value not in self._home and value.maker < 0
        }
        leaving = _leaving(recorded)
        sends = self._transfers(inputs, leaving)
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
        self._result_at = {
            value: self._at(value, layout.host if value in leaving else self._home[value])
            for value in dict.fromkeys(_flat(self.outputs))
            if value in self._home
        }
        self._calls = _dropping(self._calls, set(self._result_at.values()))

    def _at(self, value: Value, device: int) -> int:
        """The slot of a value on a device."""
        return self._slot.setdefault((self._one(value), device), len(self._slot))

    def _one(self, value: Value) -> Value:
        """One value for all that are the same row of a weight."""
        return self._same.get(value, value)

    def given(self, arguments: Mapping[Value, Any]) -> Given:
        """Some arguments where they are read: inputs on the host, weights on every device that
        reads them; constants with the weights."""
        import jax

        rows: dict[JaxStep, Sequence[Any]] = {}
        devices, host = self._layout.devices, self._layout.host
        places = dict.fromkeys((v, host) for v in self.arguments if v.maker >= 0) | self._held
        arrays = {}
        for value, device in places:
            array = self._array(value, arguments, rows)
            if array is not None:
                arrays[self._at(value, device)] = jax.device_put(array, devices[device])
        # Others are not kept: the caller may let go of arrays whose copies lie on their devices.
        passed = set(_flat(self.outputs))
        passed |= {self._row_step[value].ins[0] for value in passed & self._row_step.keys()}
        return Given({v: a for v, a in arguments.items() if v in passed}, arrays)

    def _array(
        self, value: Value, given: Mapping[Value, Any], rows: dict[JaxStep, Sequence[Any]]
    ) -> Any:
        """An argument, a constant, or a row of one, all `rows` of a step at once; None for an
        argument that is not given."""
        step = self._row_step.get(value)
        if step is None:
            found = given.get(value, value.known)
            return stack_rows(*found)[0] if isinstance(found, list) else found
        source = given.get(step.ins[0], step.ins[0].known)
        if isinstance(source, list):
            return source[(value.weight or (0, 0))[1]]
        if step not in rows and source is not None:
            rows[step] = step.run(source)
        return None if source is None else rows[step][step.outs.index(value)]

    def _transfers(
        self, inputs: Sequence[Value], leaving: set[Value]
    ) -> dict[Value, tuple[_Send, ...]]:
        """To each other device that reads a value, once."""
        host, devices = self._layout.host, self._layout.devices
        home = dict.fromkeys(inputs, host) | self._home
        readers: dict[Value, dict[int, None]] = {}
        for piece in self.pieces:
            for value in piece.reads:
                if home.get(value, piece.device) != piece.device:
                    readers.setdefault(value, {})[piece.device] = None
        for value in leaving & set(self._home):
            if home[value] != host:
                readers.setdefault(value, {})[host] = None
        return {
            value: tuple(
                (self._at(value, home[value]), self._at(value, device), devices[device])
                for device in destinations
            )
            for value, destinations in readers.items()
        }

    def issue(self, given: Given) -> list[Any]:
        """Starts one run; returns the results, which may still be computed. Does not wait."""
        arrays = self._issue(given)
        return [arrays[slot] for slot in self._result_at.values()]

    def _issue(self, given: Given, *, keeping: bool = False) -> list[Any]:
        """Arrays by slot. Those that no later piece reads are let go, so that devices hold what the
        simulator says; JAX frees them when they have been read."""
        import jax

        arrays: list[Any] = [None] * len(self._slot)
        for slot, array in given.arrays.items():
            arrays[slot] = array
        for source, target, device in self._first:
            arrays[target] = jax.device_put(arrays[source], device)
        for call in self._calls:
            results = call.function(*[arrays[slot] for slot in call.reads])
            for k, slot in enumerate(call.makes):
                arrays[slot] = results[k]
            del results
            for source, target, device in call.sends:
                arrays[target] = jax.device_put(arrays[source], device)
            for slot in () if keeping else call.drops:
                arrays[slot] = None
        return arrays

    def results(self, given: Given) -> list[Any]:
        """The leaves of the results of one run, each where it is made or, if it leaves the model,
        on the host; a stacked one as the list of its rows. Does not wait."""
        arrays = self._issue(given)
        rows: dict[JaxStep, Sequence[Any]] = {}

        def found(value: Value) -> Any:
            if value in self._result_at:
                return arrays[self._result_at[value]]
            if value in given.arguments or value in self._row_step:
                return self._array(value, given.arguments, rows)
            return np.asarray(value.known, dtype=value.dtype)

        return [
            [found(row) for row in out.rows] if isinstance(out, Stacked) else found(out)
            for out in self.outputs
        ]

    def run(self, given: Given) -> list[np.ndarray]:
        """The leaves of the results of one run, on the host."""
        return [whole_array(leaf) for leaf in self.results(given)]

    def arguments_of_pieces(self, given: Given) -> list[list[Any]]:
        """Arguments of every segment in one complete run, to time it alone."""
        arrays = self._issue(given, keeping=True)
        return [[arrays[slot] for slot in call.reads] for call in self._calls]


def _dropping(calls: Sequence[_Call], results: Collection[int]) -> list[_Call]:
    """The calls with the slots that each is the last to use, but for results."""
    last: dict[int, int] = {}
    for k, call in enumerate(calls):
        sources = [source for source, _, _ in call.sends]
        last |= dict.fromkeys((*call.reads, *call.makes, *sources), k)
    drops: list[list[int]] = [[] for _ in calls]
    for slot, k in last.items():
        if slot not in results:
            drops[k].append(slot)
    return [replace(call, drops=tuple(own)) for call, own in zip(calls, drops, strict=True)]


def _row_steps(recorded: RecordedJax) -> dict[Value, JaxStep]:
    """The steps that take rows of a stacked weight or constant, by row."""
    given = set(recorded.arguments)
    return {
        row: step
        for step in recorded.steps
        if step.maker < 0 and len(step.ins) == 1
        for row in step.outs
        if len(row.weight or ()) == 3
        and len(step.ins[0].weight or ()) == 1
        and (step.ins[0] in given or step.ins[0].known is not None)
        and row.dims == step.ins[0].dims[1:]
    }


def _flat(outputs: Iterable[Value | Stacked]) -> list[Value]:
    return [row for out in outputs for row in (out.rows if isinstance(out, Stacked) else [out])]


def _leaving(recorded: RecordedJax) -> set[Value]:
    """Results sent to the host: those read by an Output op."""
    src, dst = recorded.graph.edges
    types = recorded.graph.op_types
    makers = {int(a) for a, b in zip(src, dst, strict=True) if types[b] == OUTPUT}
    return {v for v in _flat(recorded.outputs) if recorded.op_of.get(v.maker, -1) in makers}


def _pieces(
    recorded: RecordedJax, layout: Layout, given: set[Value], rows: Collection[Value]
) -> list[ProgramSegment]:
    """The pieces in the order in which they run; views that are results come last, on the host.
    They read `rows` of weights as they read whole ones."""
    steps = recorded.steps
    maker = {value: step for step in steps for value in step.outs if value not in rows}
    given = given.union(rows)
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


def argument_values(model: JaxModel, seed: int) -> list[Any]:
    """The leaves of a model's arguments, in the order of `RecordedJax.arguments`: the arrays that
    were given, random ones where a shape was given."""
    rng = np.random.default_rng(seed)
    held = model.held
    filled = [_filled(argument, i in held, rng) for i, argument in enumerate(model.args)]
    return model.leaves(filled)


def _filled(tree: Any, is_weight: bool, rng: np.random.Generator) -> Any:
    import jax

    def value(leaf: Any) -> Any:
        return _drawn(leaf, is_weight, rng) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(value, tree, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))


def _drawn(leaf: Any, is_weight: bool, rng: np.random.Generator) -> Any:
    """Normal floats; integers 0 or 1, which any vocabulary and mask allow; true booleans.

    Weights are scaled such that products keep their size, and those of one axis are positive: they
    may be variances.
    """
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(int(rng.integers(1 << 30))), leaf.shape)
    if leaf.dtype == jnp.bool_:
        return jnp.ones(leaf.shape, leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jnp.asarray(rng.integers(2, size=leaf.shape), leaf.dtype)
    drawn = rng.standard_normal(leaf.shape, dtype=np.float32)
    if is_weight and len(leaf.shape) == 1:
        drawn = 0.5 + 0.1 * np.abs(drawn)
    elif is_weight and leaf.shape:
        drawn = drawn / np.sqrt(np.prod(leaf.shape[:-1]))
    return jnp.asarray(drawn, leaf.dtype)


def tolerance(graph: OpGraph, devices: Iterable[Any]) -> float:
    """The relative difference that the arithmetic of a graph's ops explains.

    Cut programs round where fused ones need not, so the coarsest type of any op counts.
    """
    import jax
    import jax.numpy as jnp

    coarsest = 0.0
    for dtype in {detail.dtype for detail in graph.detail}:
        if jnp.issubdtype(_dtype(dtype), jnp.floating):
            coarsest = max(coarsest, float(jnp.finfo(_dtype(dtype)).eps))
    exact = getattr(jax.config, "jax_default_matmul_precision", None) in ("float32", "highest")
    if not exact and any(device.platform != "cpu" for device in devices):
        coarsest = max(coarsest, _TF32)
    return max(RELATIVE_TOLERANCE, 4.0 * coarsest)


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    try:
        return jnp.dtype(name)
    except TypeError:  # keys of random numbers
        return jnp.dtype("uint32")


def as_numpy(array: Any) -> np.ndarray:
    """The array on the host; keys of random numbers as the words that they consist of."""
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def whole_array(leaf: Any) -> np.ndarray:
    """A result on the host as one array; the rows of a stacked one may be on different devices."""
    return np.stack([as_numpy(row) for row in leaf]) if isinstance(leaf, list) else as_numpy(leaf)


def array_on(device: Any, leaf: Any) -> Any:
    """A result as one array on a device; does not wait."""
    import jax
    import jax.numpy as jnp

    moved = jax.device_put(leaf, device)  # of a list every row
    return jnp.stack(moved) if isinstance(leaf, list) else moved
