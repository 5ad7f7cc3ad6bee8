"""JAX functions as graphs, traced from shapes alone: inference, and whole training steps.

Each primitive is an op. Calls (jit, custom derivatives, rematerialisation) are entered; a scan is
unrolled on request or kept as one op that costs its length times its body; while and cond stay
one op. Nothing is executed and no array is allocated: arguments may be
`jax.ShapeDtypeStruct`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdp.errors import ModelError
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph
from gdp.importers.jax.jaxpr import (
    LoopOptions,
    TraceContext,
    TracedProgram,
    add_arrays,
    add_op,
    closed_constants,
    new_weight,
    record_step,
    rows_of,
    value_of,
    walk,
    whole,
)
from gdp.importers.program import Results, Stacked, Traced, Value, build, report, users_code
from gdp.ops.rule import OpCost


def trace(
    fn: Callable[..., Any],
    *args: Any,
    weight_argnums: int | Sequence[int] = (),
    name: str | None = None,
    unroll_scan: bool | int = False,
    trip_count: int | None = None,
) -> OpGraph:
    """The graph of `fn(*args)`, traced by JAX; estimates and assumptions are logged.

    Args:
        fn: a function of arrays. Arrays that it closes over are weights.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees; nothing is computed.
        weight_argnums: positions of the arguments that are weights, which the ops hold; the others
            are graph inputs.
        name: of the graph; without it, the function's.
        unroll_scan: True, or the greatest length of the scans to unroll; others are one op each.
        trip_count: of while loops; without it, 1 is assumed.

    Returns:
        The graph; equations that a transposition made are backward ops.

    Raises:
        ModelError: JAX cannot trace the function, or it has no ops.
        ValueError: `weight_argnums` name arguments that do not exist.
    """
    held = {weight_argnums} if isinstance(weight_argnums, int) else set(weight_argnums)
    held = {i + len(args) if i < 0 else i for i in held}
    if not held <= set(range(len(args))):
        raise ValueError(f"weight_argnums {sorted(held)} do not fit {len(args)} arguments")
    program = TracedProgram(options=LoopOptions(unroll_scan, trip_count, mark_transposed=True))
    label = name or getattr(fn, "__name__", "traced")
    result = traced(list_call(fn, args, held, label, program))
    report(result)
    return result.graph


def trace_training_step(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    microbatches: int = 1,
    has_aux: bool = False,
    name: str | None = None,
    unroll_scan: bool | int = False,
    trip_count: int | None = None,
) -> OpGraph:
    """The graph of one training step: `loss_fn(params, batch)`, its gradients, an optax update.

    Parameters and optimizer state are weights that never move: all ops that read a parameter, and
    those that update it or its state, share a colocation id. Leaves of `batch` are graph inputs,
    the loss is the output. Ops that depend on the gradient of the loss are backward, as are
    rematerialised ones (which wait for that gradient) and the optimizer.

    Args:
        loss_fn: a function of parameters and batch to one number.
        params: a pytree of arrays or `jax.ShapeDtypeStruct`.
        batch: likewise.
        optimizer: of optax; without it the gradients stay where they are made.
        microbatches: parts that the leading axis of the batch is cut into; their gradients are
            added up, and the update runs once.
        has_aux: `loss_fn` returns (loss, anything).
        name: of the graph; without it, the function's with "_step".
        unroll_scan: True, or the greatest length of the scans to unroll; others are one op each.
        trip_count: of while loops; without it, 1 is assumed.

    Raises:
        ModelError: JAX cannot trace the loss, or it is not one number.
        ValueError: the batch does not divide into `microbatches`.
    """
    label = name or getattr(loss_fn, "__name__", "loss") + "_step"
    program = TracedProgram(options=LoopOptions(unroll_scan, trip_count))
    result = traced(
        list_training_step(loss_fn, params, batch, optimizer, microbatches, has_aux, label, program)
    )
    report(result)
    return result.graph


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A program with the values that go in and come out."""

    label: str
    program: TracedProgram
    results: Results
    # Leaves in order. Of a function: its arguments. Of a training step: parameters, optimizer
    # state, then the leaves of the batch, microbatch by microbatch.
    arguments: list[Value]
    # Of a function: its results. Of a training step: the loss, then parameters and optimizer state,
    # or, without an optimizer, the gradients.
    outputs: list[Value | Stacked]


def list_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    held: Collection[int],
    label: str,
    program: TracedProgram,
) -> TracedCall:
    """The ops of `fn(*args)`; arguments in `held` are weights."""
    closed, _ = make_jaxpr(fn, label, *args)
    values: list[Value] = []
    for i, argument in enumerate(args):
        for path, leaf in leaves(argument):
            values.append(
                new_weight(program, leaf)
                if i in held
                else _input(program, f"input{i}{path}", value_of(leaf))
            )
    outs = walk(program, closed.jaxpr, closed_constants(program, closed), values)
    results = [_output(program, f"output{i}", out) for i, out in enumerate(outs)]
    return TracedCall(label, program, Results(), values, [*results])


def list_training_step(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    optimizer: Any,
    microbatches: int,
    has_aux: bool,
    label: str,
    program: TracedProgram,
) -> TracedCall:
    """The ops of one step: the loss of every microbatch, gradients added up, and an update."""
    closed, num_params = _gradient_jaxpr(loss_fn, params, batch, microbatches, has_aux, label)
    weights = [new_weight(program, leaf) for _, leaf in leaves(params)]
    consts = closed_constants(program, closed)
    total: list[Value | Stacked] = []
    inputs: list[Value] = []
    for k in range(microbatches):
        suffix = f".{k}" if microbatches > 1 else ""
        mine = [
            _input(program, f"batch{path}{suffix}", value_of(leaf))
            for path, leaf in leaves(cut_batch(batch, microbatches))
        ]
        inputs += mine
        seed = value_of(closed.jaxpr.invars[-1].aval)
        seed.backward, seed.known = True, np.ones((), np.float32)
        outs = walk(program, closed.jaxpr, consts, [*weights, *mine, seed])
        total = [_add(program, a, b) for a, b in zip(total, outs, strict=True)] if total else outs
    loss, gradients = total[0], total[1 : 1 + num_params]
    loss_output = [_output(program, "loss", loss)]
    if optimizer is None:
        state = [(gradient, weight) for gradient, weight in zip(gradients, weights, strict=True)]
        arguments = [*weights, *inputs]
    else:
        state, states = _update(program, optimizer, params, gradients, weights, label)
        arguments = [*weights, *states, *inputs]
    outputs = [*loss_output, *(new for new, _ in state)]
    return TracedCall(label, program, Results(state=state, together=True), arguments, outputs)


def _gradient_jaxpr(
    loss_fn: Callable[..., Any], params: Any, batch: Any, microbatches: int, has_aux: bool,
    label: str,
) -> tuple[Any, int]:  # fmt: skip
    """The program (params, batch, seed) -> (loss, gradients), and the number of gradients."""
    import jax

    def step(params: Any, batch: Any, seed: Any) -> Any:
        # The seed is an argument, so that all that depends on it is known to be backward.
        loss, pull, *aux = jax.vjp(lambda p: loss_fn(p, batch), params, has_aux=has_aux)
        del aux
        return loss, pull(seed)[0]

    piece = cut_batch(batch, microbatches)
    loss = evaluated(lambda: jax.eval_shape(loss_fn, params, piece), label)
    loss = loss[0] if has_aux else loss
    if getattr(loss, "shape", None) != ():
        raise ModelError(f"{label}: the loss must be one number, got {loss}")
    closed, shapes = make_jaxpr(step, label, params, piece, jax.ShapeDtypeStruct((), loss.dtype))
    return closed, len(jax.tree.leaves(shapes[1]))


def _update(
    program: TracedProgram,
    optimizer: Any,
    params: Any,
    gradients: Sequence[Value | Stacked],
    weights: Sequence[Value],
    label: str,
) -> tuple[list[tuple[Value | Stacked, Value | Stacked]], list[Value]]:
    """Appends the optimizer's ops; the new parameters and states with the ones they replace, and
    the old states."""
    import jax
    import optax

    def update(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = evaluated(lambda: jax.eval_shape(optimizer.init, params), label)
    closed, _ = make_jaxpr(update, label, params, state, params)
    states = [new_weight(program, leaf) for _, leaf in leaves(state)]
    program.backward, program.optimizer_starts = True, len(program.ops)
    # Gradients that come row by row (of a stacked weight in an unrolled loop) are applied so.
    shapes = {g.dims for g in gradients if isinstance(g, Stacked)}
    held = [
        _by_rows(program, value) if value.dims in shapes else value for value in (*weights, *states)
    ]
    kept = held[: len(weights)]
    outs = walk(
        program, closed.jaxpr, closed_constants(program, closed),
        [*gradients, *held[len(weights) :], *kept], TraceContext("optimizer"),
    )  # fmt: skip
    return list(zip(outs, [*kept, *held[len(weights) :]], strict=True)), states


def _by_rows(program: TracedProgram, value: Value) -> Value | Stacked:
    if value.weight is None:
        return value
    leaf = value.weight[0]
    rows = [
        Value(value.dims[1:], value.dtype, value.itemsize, weight=(leaf, i, i + 1))
        for i in range(value.dims[0])
    ]
    record_step(program, [value], rows, rows_of)
    return Stacked(rows)


def _add(program: TracedProgram, one: Value | Stacked, two: Value | Stacked) -> Value | Stacked:
    """The sum of two results of microbatches; a constant (the gradient of nothing) adds nothing."""
    if isinstance(one, Stacked) and isinstance(two, Stacked):
        pairs = zip(one.rows, two.rows, strict=True)
        return Stacked([_rows(_add(program, a, b))[0] for a, b in pairs])
    a, b = whole(program, one, "accumulate"), whole(program, two, "accumulate")
    if a.maker < 0 or b.maker < 0:
        return b if a.maker < 0 else a
    out = Value(a.dims, a.dtype, a.itemsize)
    record_step(program, [a, b], [out], add_arrays)
    cost = OpCost(a.nbytes / max(a.itemsize, 1), 3.0 * a.nbytes)
    return add_op(program, "add", TraceContext("accumulate"), [a, b], [out], cost)[0]


def cut_batch(batch: Any, microbatches: int) -> Any:
    """Shapes of one microbatch; scalars and keys are the same in each."""
    import jax

    def cut(leaf: Any) -> Any:
        if microbatches == 1 or not leaf.shape:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if leaf.shape[0] % microbatches:
            raise ValueError(
                f"a batch leaf of {leaf.shape[0]} rows does not divide into {microbatches} parts"
            )
        return jax.ShapeDtypeStruct((leaf.shape[0] // microbatches, *leaf.shape[1:]), leaf.dtype)

    if microbatches < 1:
        raise ValueError(f"microbatches must be at least 1, got {microbatches}")
    return jax.tree.map(cut, batch)


def _input(program: TracedProgram, name: str, value: Value) -> Value:
    add_op(program, INPUT, TraceContext(), [], [value])
    program.ops[-1].name = name
    return value


def _output(program: TracedProgram, name: str, value: Value | Stacked) -> Value:
    """An output op; what no op makes (a constant, a weight passed through) needs none."""
    result = whole(program, value, "")
    if result.maker >= 0:
        add_op(program, OUTPUT, TraceContext(), [result], [])
        program.ops[-1].name = name
    return result


def _rows(value: Value | Stacked) -> list[Value]:
    return value.rows if isinstance(value, Stacked) else [value]


def make_jaxpr(fn: Callable[..., Any], label: str, *args: Any) -> tuple[Any, Any]:
    """The closed jaxpr and the shapes of the results."""
    import jax

    return evaluated(lambda: jax.make_jaxpr(fn, return_shape=True)(*args), label)


def evaluated(call: Callable[[], Any], label: str) -> Any:
    """The result of tracing user code, whose own errors become one line."""
    try:
        with users_code():
            return call()
    except (Exception, SystemExit) as error:
        first = str(error).strip().splitlines()[:1]
        reason = f"{type(error).__name__}: {first[0] if first else ''}"
        raise ModelError(f"{label} cannot be traced by JAX: {reason}") from error


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of a pytree; Python numbers become arrays of no axes."""
    import jax

    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (jax.tree_util.keystr(path), leaf if hasattr(leaf, "shape") else jax.typeof(leaf))
        for path, leaf in pairs
    ]


def traced(listing: TracedCall) -> Traced:
    """The graph of a listing, with what was estimated or assumed."""
    program = listing.program
    return Traced(
        build(listing.label, program, listing.results),
        tuple(sorted(program.estimated)),
        tuple(dict.fromkeys(program.assumptions)),
    )
