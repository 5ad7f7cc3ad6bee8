"""Walks a jaxpr and lists its ops: calls are entered, loops unrolled or kept as one op.

Where a program is to be executed, steps are listed too: equations that are evaluated one by one, as
functions of arrays that JAX can trace, so that a runtime may jit any run of them together.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from gdp.graph.op_graph import Attribute
from gdp.importers.program import Op, ProgramOps, Stacked, Value, attributes_of
from gdp.ops.rule import OpCost, Shape, names
from gdp.ops.table import ELEMENTWISE_OPS, jax_cost

_CALLS = names(
    "jit pjit closed_call core_call call core_closed_call custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr custom_lin remat remat2 checkpoint xla_call named_call shard_map "
    "custom_transpose_call"
)
_REMAT = names("remat remat2 checkpoint")
_ROWWISE = ELEMENTWISE_OPS | names("convert_element_type copy copy_p stop_gradient imag zeros_like")
_WEIGHT_VIEWS = names(
    "reshape squeeze expand_dims transpose broadcast_in_dim convert_element_type copy copy_p "
    "stop_gradient slice"
)
"""Applied to a weight alone these make no op: the reader holds the weight itself."""


MOST_LAYERS = 512
"""Length of the longest scan over layers that is unrolled unless a length is asked for."""

Run = Callable[..., Sequence[Any]]
"""From the arrays of a step's `ins` to those of its `outs`."""


@dataclass(frozen=True, eq=False, slots=True)
class JaxStep:
    """Computes values. The op that it belongs to is the maker of its outputs; -1: a view of weights
    or of constants, which the graph does not count as an op."""

    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    run: Run

    @property
    def maker(self) -> int:
        """Index of the op that it belongs to; -1 also where nothing is made."""
        return self.outs[0].maker if self.outs else -1


class TraceContext(NamedTuple):
    """Scope and dependencies of an equation, which all ops that it becomes share."""

    scope: str = ""  # module path
    waits_for: Sequence[Value] = ()  # made before any of these ops may start
    backward: bool = False  # depends on the gradient of the loss


@dataclass(frozen=True)
class LoopOptions:
    """Treatment of the loops and gradients of a jaxpr."""

    # True, or the greatest length that is unrolled; None: scans over layers (`_over_layers`).
    unroll_scan: bool | int | None = None
    trip_count: int | None = None  # of while loops; None: 1 is assumed, with a note
    mark_transposed: bool = False  # transposed equations are backward


@dataclass
class TracedProgram(ProgramOps):
    """A jaxpr during its traversal."""

    options: LoopOptions = field(default_factory=LoopOptions)
    constants: dict[int, tuple[Value, Any]] = field(default_factory=dict)  # by id, kept alive
    backward: bool = False  # all that is listed from now on
    steps: list[JaxStep] | None = None  # what to compute, where that is asked for


def new_weight(program: TracedProgram, aval: Any) -> Value:
    """A new weight leaf with the shape of `aval`."""
    value = value_of(aval)
    # A single number is a constant to a device, not something that ties ops together.
    if math.prod(value.dims) > 1:
        value.weight = (len(program.weights),)
    program.weights.append(value)
    return value


def weight_nbytes(program: TracedProgram, value: Value) -> int:
    """Bytes of the weight, or of the rows of it, behind a value."""
    leaf, *rows = value.weight or (0,)
    whole = program.weights[leaf]
    return whole.nbytes * (rows[1] - rows[0]) // whole.dims[0] if rows else whole.nbytes


def value_of(aval: Any) -> Value:
    """A value with the shape and type of a JAX abstract value."""
    dtype = getattr(aval, "dtype", None)
    # Keys of random numbers have no NumPy type: two words each.
    itemsize = int(getattr(dtype, "itemsize", 0) or 0) if dtype is not None else 0
    name = str(getattr(dtype, "name", dtype))
    if name.startswith("key<"):
        itemsize = 8
    return Value(tuple(int(d) for d in getattr(aval, "shape", ())), name, itemsize)


def known_value(aval: Any, array: Any) -> Value:
    """A constant that no op makes."""
    value = value_of(aval)
    value.known = array
    return value


def record_step(
    program: TracedProgram, ins: Sequence[Value], outs: Sequence[Value], run: Run
) -> None:
    """Record the function from some values to others, where the program is to be executed."""
    if program.steps is not None:
        program.steps.append(JaxStep(tuple(ins), tuple(outs), run))


def walk(
    program: TracedProgram,
    jaxpr: Any,
    consts: Sequence[Value | Stacked],
    args: Sequence[Value | Stacked],
    context: TraceContext = TraceContext(),  # noqa: B008  # frozen
) -> list[Value | Stacked]:
    """The outputs of an open jaxpr on `args`; its ops are appended to the program."""
    env: dict[Any, Value | Stacked] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Value | Stacked:
        # A literal has a `val` and is made by nobody.
        return known_value(atom.aval, atom.val) if hasattr(atom, "val") else env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(atom) for atom in eqn.invars]
        where, transposed = _scope(context.scope, eqn)
        marked = context.backward or (transposed and program.options.mark_transposed)
        outs = _equation(program, eqn, ins, TraceContext(where, context.waits_for, marked))
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def closed_constants(program: TracedProgram, closed: Any) -> list[Value | Stacked]:
    """Arrays that a program closes over: weights, each once however often it is met."""
    values: list[Value | Stacked] = []
    for const in closed.consts:
        aval = getattr(const, "aval", const)
        if id(const) not in program.constants:
            small = getattr(const, "size", 1) <= 1
            value = value_of(aval) if small else new_weight(program, aval)
            value.known = const
            program.constants[id(const)] = (value, const)
        values.append(program.constants[id(const)][0])
    return values


def _equation(
    program: TracedProgram, eqn: Any, ins: list[Value | Stacked], context: TraceContext
) -> Sequence[Value | Stacked]:
    name, params = eqn.primitive.name, eqn.params
    body = _called(name, params)
    if body is not None:
        jaxpr, closed = body
        consts = closed_constants(program, closed) if closed is not None else []
        if name in _REMAT and any(v.backward for v in _flat_values(ins)):
            # Rematerialisation starts when the gradient arrives, not before: that is its purpose.
            gradients = [v for v in _flat_values(ins) if v.backward and v.maker >= 0]
            return walk(
                program, jaxpr, consts, ins, TraceContext(context.scope, gradients[:1], True)
            )
        return walk(program, jaxpr, consts, ins, context)
    if name == "scan" and _unrolls(program.options, eqn, ins):
        return _unrolled_scan(program, eqn, ins, context)
    rows = _row_count(name, ins, eqn.outvars)
    if rows:
        pieces = [
            _emit(program, eqn, [_row(program, v, i, context.scope) for v in ins], context, True)
            for i in range(rows)
        ]
        return [Stacked([piece[k] for piece in pieces]) for k in range(len(eqn.outvars))]
    arrays = [whole(program, v, context.scope) for v in ins]
    return _emit(program, eqn, arrays, context)


def _emit(
    program: TracedProgram,
    eqn: Any,
    ins: list[Value],
    context: TraceContext,
    of_row: bool = False,
) -> list[Value]:
    """Append one op, applied to one row of the arrays with `of_row`; its outputs."""
    name, params = eqn.primitive.name, eqn.params
    outs = [value_of(var.aval) for var in eqn.outvars]
    for out in outs if of_row else ():
        out.dims = out.dims[1:]
    if name in _WEIGHT_VIEWS and len(ins) == 1 and ins[0].weight is not None:
        outs[0].weight = _viewed(name, params, ins[0])
        record_step(program, ins, outs, equation(eqn))
        return outs
    if name == "unstack" and ins[0].weight is not None:
        for i, out in enumerate(outs):
            rows = params["axis"] == 0 and len(ins[0].weight) == 1
            out.weight = (ins[0].weight[0], i, i + 1) if rows else ins[0].weight
        record_step(program, ins, outs, equation(eqn))
        return outs
    cost = _cost(program, eqn, name, params, ins, outs)
    # A broadcast weight is read once, at its own size.
    spread = sum(max(0, v.nbytes - weight_nbytes(program, v)) for v in ins if v.weight is not None)
    record_step(program, ins, outs, equation(eqn))
    cost = replace(cost, traffic_bytes=max(0.0, cost.traffic_bytes - spread))
    return add_op(program, name, context, ins, outs, cost, attributes_of(params))


def add_op(
    program: TracedProgram,
    op_type: str,
    context: TraceContext,
    ins: list[Value],
    outs: list[Value],
    cost: OpCost = OpCost(0.0, 0.0),  # noqa: B008  # frozen
    attributes: dict[str, Attribute] | None = None,
) -> list[Value]:
    """Append an op and make it the maker of `outs`."""
    backward = context.backward or program.backward or any(v.backward for v in ins)
    index = len(program.ops)
    for i, out in enumerate(outs):
        out.maker, out.out, out.backward = index, i, backward
    wide = [v for v in ins if v.dims] or ins
    arithmetic = wide[0].dtype if op_type in ("dot_general", "conv_general_dilated") else ""
    program.ops.append(
        Op(
            op_type, context.scope, ins, outs, cost.flop, cost.traffic_bytes, backward,
            arithmetic or (outs[0].dtype if outs else "float32"),
            tuple(v.dims for v in ins), attributes or {}, waits_for=list(context.waits_for),
        )
    )  # fmt: skip
    return outs


def _cost(
    program: TracedProgram, eqn: Any, name: str, params: Any, ins: list[Value], outs: list[Value]
) -> OpCost:
    if name in ("scan", "while", "cond"):
        return _control_cost(program, name, params)
    shapes = [[Shape(v.dims, v.itemsize) for v in values] for values in (ins, outs)]
    cost = jax_cost(name, params, *shapes)
    if not cost.known:
        inner = [b for b in (_open(p) for p in params.values()) if b is not None]
        if inner:
            parts = [_jaxpr_cost(program, jaxpr) for jaxpr in inner]
            return OpCost(sum(p.flop for p in parts), sum(p.traffic_bytes for p in parts))
        program.estimated.add(name)
    return cost


def _control_cost(program: TracedProgram, name: str, params: Any) -> OpCost:
    """A loop costs its trip count times its body, a branch its dearest branch."""
    if name == "scan":
        times, bodies = params["length"], [params["jaxpr"]]
    elif name == "while":
        times, bodies = program.options.trip_count, [params["body_jaxpr"], params["cond_jaxpr"]]
        if times is None:
            times = 1
            program.assumptions.append("a while loop is assumed to run once; give trip_count")
    else:
        branches = [_jaxpr_cost(program, _open(branch)) for branch in params["branches"]]
        return OpCost(max(b.flop for b in branches), max(b.traffic_bytes for b in branches))
    parts = [_jaxpr_cost(program, _open(body)) for body in bodies]
    flop, traffic = sum(p.flop for p in parts), sum(p.traffic_bytes for p in parts)
    return OpCost(times * flop, times * traffic)


def _jaxpr_cost(program: TracedProgram, jaxpr: Any) -> OpCost:
    """The summed cost of all that a jaxpr contains."""
    flop = traffic = 0.0
    for eqn in jaxpr.eqns:
        body = _called(eqn.primitive.name, eqn.params)
        if body is not None:
            part = _jaxpr_cost(program, body[0])
        else:
            ins, outs = ([value_of(a.aval) for a in atoms] for atoms in (eqn.invars, eqn.outvars))
            part = _cost(program, eqn, eqn.primitive.name, eqn.params, ins, outs)
        flop, traffic = flop + part.flop, traffic + part.traffic_bytes
    return OpCost(flop, traffic)


def _unrolls(options: LoopOptions, eqn: Any, ins: Sequence[Value | Stacked]) -> bool:
    if options.unroll_scan is None:
        return _over_layers(eqn, ins)
    if isinstance(options.unroll_scan, bool):
        return options.unroll_scan
    return eqn.params["length"] <= options.unroll_scan


def _over_layers(eqn: Any, ins: Sequence[Value | Stacked]) -> bool:
    """True for a scan whose steps read rows of stacked weights, or rows made by such a scan: its
    steps are layers, which may be on different devices. A scan over time is one op."""
    if eqn.params["length"] > MOST_LAYERS:
        return False
    rows = ins[sum(scan_parts(eqn)) :]
    return any(isinstance(v, Stacked) or v.weight is not None for v in rows if v.dims)


def _unrolled_scan(
    program: TracedProgram, eqn: Any, ins: list[Value | Stacked], context: TraceContext
) -> Sequence[Value | Stacked]:
    params, length = eqn.params, eqn.params["length"]
    num_consts, num_carry = scan_parts(eqn)
    consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]
    scanned = ins[num_consts + num_carry :]
    closed = params["jaxpr"]
    held = closed_constants(program, closed)
    order = range(length - 1, -1, -1) if params["reverse"] else range(length)
    collected: list[list[Value | Stacked]] = [[] for _ in range(length)]
    for i in order:
        rows = [_row(program, value, i, context.scope) for value in scanned]
        outs = walk(program, closed.jaxpr, held, [*consts, *carry, *rows], context)
        carry, collected[i] = outs[:num_carry], outs[num_carry:]
    stacks: list[Value | Stacked] = []
    for k in range(len(collected[0]) if length else 0):
        stacks.append(Stacked([whole(program, row[k], context.scope) for row in collected]))
    return [*carry, *stacks]


def _row(program: TracedProgram, value: Value | Stacked, i: int, scope: str) -> Value:
    """Row i along axis 0; values without that axis (scalars, constants) are every row."""
    if isinstance(value, Stacked):
        return value.rows[i]
    if not value.dims:
        return value
    row = Value(value.dims[1:], value.dtype, value.itemsize, backward=value.backward)
    record_step(program, [value], [row], row_of(i))
    if value.weight is not None:
        row.weight = (*value.weight[:1], i, i + 1) if len(value.weight) == 1 else value.weight
        return row
    if value.maker < 0:
        return row
    copied = OpCost(0.0, 2.0 * row.nbytes)
    return add_op(program, "slice", TraceContext(scope), [value], [row], copied, {"row": i})[0]


def whole(program: TracedProgram, value: Value | Stacked, scope: str) -> Value:
    """A stacked array as one: its rows are written side by side, once."""
    if isinstance(value, Value):
        return value
    if value.whole is None:
        first = value.rows[0]
        result = Value(value.dims, first.dtype, first.itemsize)
        record_step(program, value.rows, [result], stack_rows)
        if all(row.weight is not None for row in value.rows):
            result.weight = (first.weight or (0,))[:1]
        else:
            copied = OpCost(0.0, 2.0 * result.nbytes)
            add_op(program, "concatenate", TraceContext(scope), value.rows, [result], copied)
        value.whole = result
    return value.whole


def _row_count(name: str, ins: Sequence[Value | Stacked], outvars: Sequence[Any]) -> int:
    """Number of rows that an op is applied to one by one; 0 when it reads whole arrays."""
    stacks = [v for v in ins if isinstance(v, Stacked)]
    if not stacks or name not in _ROWWISE:
        return 0
    dims = stacks[0].dims
    fits = all(not v.dims or v.dims == dims for v in ins)
    return dims[0] if fits and all(tuple(o.aval.shape) == dims for o in outvars) else 0


def _viewed(name: str, params: Any, source: Value) -> tuple[int, ...] | None:
    """The weight behind a view; rows of a stacked weight are a weight of their own."""
    if name == "slice" and source.weight is not None and len(source.weight) == 1:
        start, stop = params["start_indices"], params["limit_indices"]
        strides = params["strides"] or (1,) * len(start)
        complete = tuple(start[1:]) == (0,) * (len(start) - 1) and stop[1:] == source.dims[1:]
        if complete and set(strides) == {1}:
            return (source.weight[0], int(start[0]), int(stop[0]))
    return source.weight


def _flat_values(values: Sequence[Value | Stacked]) -> list[Value]:
    return [r for v in values for r in (v.rows if isinstance(v, Stacked) else [v])]


def _called(name: str, params: Any) -> tuple[Any, Any] | None:
    """(open jaxpr, closed jaxpr or None) of a call that is to be entered."""
    if name not in _CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in params:
            inner = params[key]
            return (inner.jaxpr, inner) if hasattr(inner, "consts") else (inner, None)
    return None


def _open(param: Any) -> Any | None:
    """The open jaxpr in a parameter, if it is one."""
    inner = getattr(param, "jaxpr", param)
    return inner if hasattr(inner, "eqns") and hasattr(inner, "invars") else None


_WRAPPER = re.compile(r"(?:transpose|jvp|vmap|pjit|jit|checkpoint|remat)\(|\)|rematted_computation")


def _scope(outer: str, eqn: Any) -> tuple[str, bool]:
    """The path of named scopes, and whether the equation comes from a transposition."""
    stack = getattr(getattr(eqn, "source_info", None), "name_stack", None)
    text = "" if stack is None else str(stack)
    if not text:
        return outer, False
    # Transformations leave marks in the path: transpose(jvp(Net))/Dense_0.
    parts = [part for part in _WRAPPER.sub("", text).split("/") if part]
    return "/".join([outer, *parts] if outer else parts), "transpose(" in text


# Steps of an execution


def equation(eqn: Any) -> Run:
    """One equation of a jaxpr. Element-wise ones are applied to rows of their arrays, too."""
    return partial(_evaluated, eqn)


def _evaluated(eqn: Any, *arrays: Any) -> Sequence[Any]:
    from jax.extend import core

    given = {
        variable: array
        for variable, array in zip(eqn.invars, arrays, strict=True)
        if not isinstance(variable, core.Literal)
    }
    wanted = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
    jaxpr = core.Jaxpr(
        constvars=(), invars=list(given), outvars=wanted, eqns=[eqn], effects=eqn.effects,
        debug_info=core.DebugInfo("gdp", "one equation", None, None),
    )  # fmt: skip
    results = iter(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*given.values()))
    return [None if isinstance(v, core.DropVar) else next(results) for v in eqn.outvars]


def row_of(index: int) -> Run:
    """Row `index` along axis 0."""
    return lambda array: [array[index]]


def rows_of(array: Any) -> Sequence[Any]:
    """All rows along axis 0."""
    return [array[i] for i in range(array.shape[0])]


def stack_rows(*rows: Any) -> Sequence[Any]:
    """Rows written side by side along a new axis 0."""
    import jax.numpy as jnp

    return [jnp.stack(rows)]


def add_arrays(one: Any, two: Any) -> Sequence[Any]:
    """The sum of two microbatches' results."""
    return [one + two]


def scan_parts(eqn: Any) -> tuple[int, int]:
    """(inputs of a scan that are constant, values that it carries).

    Read off the shapes, because JAX versions name the parameters differently: only what is scanned
    or collected has an axis more outside of the body than inside.
    """
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])

    def same(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)

    num_carry = same(eqn.outvars, body.outvars)
    return same(eqn.invars, body.invars) - num_carry, num_carry
