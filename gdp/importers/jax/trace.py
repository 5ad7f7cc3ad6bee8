"""JAX functions as graphs, traced from shapes alone: inference, and whole training steps.

Each primitive is an op. Calls (jit, custom derivatives, rematerialisation) are entered; a scan over
stacked weights is unrolled, another one on request, or kept as one op that costs its length times
its body; while and cond stay one op. Nothing is executed and no array is allocated: arguments may
be `jax.ShapeDtypeStruct`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gdp.base.errors import ModelError, reason_of
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph
from gdp.importers.jax.jaxpr import (
    JaxStep,
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
from gdp.importers.program import (
    Results,
    Stacked,
    Traced,
    Value,
    build,
    positions,
    report,
    users_code,
)
from gdp.ops.rule import OpCost


def trace(
    fn: Callable[..., Any],
    *args: Any,
    weight_argnums: int | Sequence[int] | None = None,
    name: str | None = None,
    unroll_scan: bool | int | None = None,
    trip_count: int | None = None,
) -> OpGraph:
    """The graph of `fn(*args)`, traced by JAX; estimates and assumptions are logged.

    Args:
        fn: a function of arrays. Arrays that it closes over are weights.
        args: arrays or `jax.ShapeDtypeStruct`, in pytrees; nothing is computed.
        weight_argnums: positions of the arguments that are weights, which the ops hold; the others
            are graph inputs. By default every argument but the last that is a tree of several
            arrays, such as a dict of parameters, with a note; `()` for none.
        name: of the graph; without it, the function's.
        unroll_scan: True, False, or the greatest length of the scans to unroll; others are one op
            each. By default scans over stacked weights are unrolled, so that their layers may lie
            on different devices.
        trip_count: of while loops; without it, 1 is assumed.

    Returns:
        The graph; equations that a transposition made are backward ops.

    Raises:
        ModelError: JAX cannot trace the function, it has no ops, or `weight_argnums` name arguments
            that do not exist.
    """
    options = {
        "weight_argnums": weight_argnums, "unroll_scan": unroll_scan, "trip_count": trip_count,
    }  # fmt: skip
    return _reported(JaxModel(name or getattr(fn, "__name__", "traced"), fn, args, options))


def trace_training_step(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    microbatches: int = 1,
    has_aux: bool = False,
    name: str | None = None,
    unroll_scan: bool | int | None = None,
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
        unroll_scan: True, False, or the greatest length of the scans to unroll; others are one op
            each. By default scans over stacked weights are unrolled, so that their layers may lie
            on different devices.
        trip_count: of while loops; without it, 1 is assumed.

    Raises:
        ModelError: JAX cannot trace the loss, or it is not one number.
        ValueError: the batch does not divide into `microbatches`.
    """
    options = {
        "optimizer": optimizer, "microbatches": microbatches, "has_aux": has_aux,
        "unroll_scan": unroll_scan, "trip_count": trip_count,
    }  # fmt: skip
    label = name or getattr(loss_fn, "__name__", "loss") + "_step"
    return _reported(JaxModel(label, loss_fn, (params, batch), options))


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


_CALL_OPTIONS = ("name", "weight_argnums", "unroll_scan", "trip_count")
_STEP_OPTIONS = ("name", "optimizer", "microbatches", "has_aux", "unroll_scan", "trip_count")


@dataclass(frozen=True, eq=False)
class RecordedJax:
    """A graph of a JAX function, and the steps that execute it."""

    graph: OpGraph
    steps: tuple[JaxStep, ...]  # in an order that computes every value before it is read
    op_of: Mapping[int, int]  # the graph's op of each maker in the steps
    arguments: Sequence[Value]  # as `TracedCall` orders them
    outputs: Sequence[Value | Stacked]


@dataclass(frozen=True, eq=False)
class JaxModel:
    """A function and its arguments, or a loss with parameters and a batch to make a training step
    of. Arguments may be arrays or `jax.ShapeDtypeStruct`."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = _STEP_OPTIONS if self.trains else _CALL_OPTIONS
        unknown = sorted(set(self.options) - set(known))
        if unknown:
            raise ModelError(
                f"{self.name}: no option {unknown[0]!r}; there are {', '.join(_CALL_OPTIONS)}, and "
                f"with 'optimizer' {', '.join(_STEP_OPTIONS[2:4])}"
            )
        if self.trains and len(self.args) != 2:
            raise ModelError(
                f"{self.name}: a training step needs (loss, (parameters, batch)), got "
                f"{len(self.args)} arguments"
            )

    @property
    def trains(self) -> bool:
        """True where the function is a loss that a training step is made of."""
        return "optimizer" in self.options

    @property
    def held(self) -> frozenset[int]:
        """The arguments that are weights."""
        if self.trains:
            return frozenset({0})
        wanted = self.options.get("weight_argnums")
        if wanted is None:
            return self._trees()
        indices = [wanted] if isinstance(wanted, int) else list(wanted)
        held = frozenset(i + len(self.args) if i < 0 else i for i in indices)
        if not held <= set(range(len(self.args))):
            raise ModelError(
                f"{self.name}: weight_argnums {sorted(held)} do not fit {len(self.args)} arguments"
            )
        return held

    def _trees(self) -> frozenset[int]:
        """The arguments but the last that are trees of several arrays: JAX programs pass their
        parameters so, before the data."""
        import jax

        return frozenset(
            i for i, tree in enumerate(self.args[:-1]) if len(jax.tree.leaves(tree)) > 1
        )

    @property
    def microbatches(self) -> int:
        """Pieces that a training step cuts its batch into."""
        return int(self.options.get("microbatches", 1))

    @property
    def has_aux(self) -> bool:
        """True where the loss returns (loss, anything)."""
        return bool(self.options.get("has_aux", False))

    def trace(self) -> Traced:
        """The graph, with its estimates and assumptions."""
        return _traced(self._listing(record=False))

    def record(self) -> RecordedJax:
        """The graph, and the steps that compute its values."""
        listing = self._listing(record=True)
        graph = _traced(listing).graph
        return RecordedJax(
            graph=graph,
            steps=tuple(listing.program.steps or ()),
            op_of=positions(graph, listing.program, listing.results),
            arguments=listing.arguments,
            outputs=listing.outputs,
        )

    def _listing(self, *, record: bool) -> TracedCall:
        chosen = self.options
        options = LoopOptions(
            chosen.get("unroll_scan"), chosen.get("trip_count"),
            mark_transposed=not self.trains,
        )  # fmt: skip
        program = TracedProgram(options=options, steps=[] if record else None)
        label = str(chosen.get("name") or self.name)
        return (_list_training_step if self.trains else _list_call)(self, label, program)

    def leaves(self, args: Sequence[Any]) -> list[Any]:
        """Values of the arguments in the order of `TracedCall.arguments`; the optimizer's state is
        what it starts from."""
        import jax

        if not self.trains:
            return jax.tree.leaves(tuple(args))
        params, batch = args
        optimizer = self.options["optimizer"]
        state = () if optimizer is None else jax.jit(optimizer.init)(params)
        pieces = [self.piece(batch, k) for k in range(self.microbatches)]
        return jax.tree.leaves((params, state, pieces))

    def uncut(self) -> Callable[..., list[Any]]:
        """A function from `leaves` to the leaves of the results, in the order of
        `TracedCall.outputs`: the reference for executed placements."""
        import jax

        if not self.trains:
            form = jax.tree.structure(self.args)
            return lambda *leaves: jax.tree.leaves(self.fn(*jax.tree.unflatten(form, leaves)))
        params, batch = self.args
        optimizer = self.options["optimizer"]
        state = () if optimizer is None else jax.eval_shape(optimizer.init, params)
        piece = _cut_batch(batch, self.microbatches)
        form = jax.tree.structure((params, state, [piece] * self.microbatches))
        return lambda *leaves: jax.tree.leaves(self._step(*jax.tree.unflatten(form, leaves)))

    def _step(self, params: Any, state: Any, pieces: Sequence[Any]) -> Any:
        """Gradients and losses of microbatches are added up, then the optimizer runs once."""
        import jax

        optimizer = self.options["optimizer"]
        gradient = jax.value_and_grad(self.fn, has_aux=self.has_aux)
        results = [gradient(params, piece) for piece in pieces]
        losses = [loss[0] if self.has_aux else loss for loss, _ in results]
        total = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *(g for _, g in results))
        loss = sum(losses[1:], losses[0])
        if optimizer is None:
            return loss, total
        import optax

        updates, state = optimizer.update(total, state, params)
        return loss, optax.apply_updates(params, updates), state

    def piece(self, batch: Any, k: int) -> Any:
        """Microbatch `k`; numbers without axes are the same in each."""
        import jax

        if self.microbatches == 1:
            return batch

        def cut(leaf: Any) -> Any:
            if not leaf.shape:
                return leaf
            rows = leaf.shape[0] // self.microbatches
            return leaf[k * rows : (k + 1) * rows]

        return jax.tree.map(cut, batch)


def jax_model(returned: Any, name: str) -> JaxModel:
    """The model that a user's function returned: (function, arguments) or (function, arguments,
    options). Raises `ModelError` for anything else."""
    well = isinstance(returned, tuple) and len(returned) in (2, 3) and callable(returned[0])
    if not well or not isinstance(returned[1], tuple | list):
        raise ModelError(
            f"{name!r} must return (function, arguments) or (function, arguments, options) with a "
            f"tuple of example arguments, or an OpGraph; got {type(returned).__name__}"
        )
    options = returned[2] if len(returned) == 3 else {}
    if not isinstance(options, Mapping):
        raise ModelError(
            f"{name!r}: options must be a dict such as {{'weight_argnums': 0}}, "
            f"got {type(options).__name__}"
        )
    return JaxModel(name.rpartition(":")[2], returned[0], tuple(returned[1]), options)


def _reported(model: JaxModel) -> OpGraph:
    result = model.trace()
    report(result)
    return result.graph


def _list_call(model: JaxModel, label: str, program: TracedProgram) -> TracedCall:
    """The ops of the function; arguments that are held are weights."""
    closed, _ = _make_jaxpr(model.fn, label, *model.args)
    held = model.held
    if held and model.options.get("weight_argnums") is None:
        numbers = ", ".join(map(str, sorted(held)))
        program.assumptions.append(
            f"argument {numbers}, a tree of arrays, is taken for weights that stay on the devices "
            "of their ops; give weight_argnums, () for none"
        )
    values: list[Value] = []
    for i, argument in enumerate(model.args):
        for path, leaf in _leaves(argument):
            values.append(
                new_weight(program, leaf)
                if i in held
                else _input(program, f"input{i}{path}", value_of(leaf))
            )
    outs = walk(program, closed.jaxpr, closed_constants(program, closed), values)
    results = [_output(program, f"output{i}", out) for i, out in enumerate(outs)]
    return TracedCall(label, program, Results(), values, [*results])


def _list_training_step(model: JaxModel, label: str, program: TracedProgram) -> TracedCall:
    """The ops of one step: the loss of every microbatch, gradients added up, and an update."""
    params, batch = model.args
    optimizer, microbatches = model.options["optimizer"], model.microbatches
    closed, num_params = _gradient_jaxpr(model, label)
    weights = [new_weight(program, leaf) for _, leaf in _leaves(params)]
    consts = closed_constants(program, closed)
    total: list[Value | Stacked] = []
    inputs: list[Value] = []
    for k in range(microbatches):
        suffix = f".{k}" if microbatches > 1 else ""
        mine = [
            _input(program, f"batch{path}{suffix}", value_of(leaf))
            for path, leaf in _leaves(_cut_batch(batch, microbatches))
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


def _gradient_jaxpr(model: JaxModel, label: str) -> tuple[Any, int]:
    """The program (params, batch, seed) -> (loss, gradients), and the number of gradients."""
    import jax

    def step(params: Any, batch: Any, seed: Any) -> Any:
        # The seed is an argument, so that all that depends on it is known to be backward.
        loss, pull, *aux = jax.vjp(lambda p: model.fn(p, batch), params, has_aux=model.has_aux)
        del aux
        return loss, pull(seed)[0]

    params, batch = model.args
    piece = _cut_batch(batch, model.microbatches)
    loss = _evaluated(lambda: jax.eval_shape(model.fn, params, piece), label)
    loss = loss[0] if model.has_aux else loss
    if getattr(loss, "shape", None) != ():
        raise ModelError(f"{label}: the loss must be one number, got {loss}")
    closed, shapes = _make_jaxpr(step, label, params, piece, jax.ShapeDtypeStruct((), loss.dtype))
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

    state = _evaluated(lambda: jax.eval_shape(optimizer.init, params), label)
    closed, _ = _make_jaxpr(update, label, params, state, params)
    states = [new_weight(program, leaf) for _, leaf in _leaves(state)]
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
        sums = (_add(program, a, b) for a, b in pairs)
        return Stacked([s.rows[0] if isinstance(s, Stacked) else s for s in sums])
    a, b = whole(program, one, "accumulate"), whole(program, two, "accumulate")
    if a.maker < 0 or b.maker < 0:
        return b if a.maker < 0 else a
    out = Value(a.dims, a.dtype, a.itemsize)
    record_step(program, [a, b], [out], add_arrays)
    cost = OpCost(a.nbytes / max(a.itemsize, 1), 3.0 * a.nbytes)
    return add_op(program, "add", TraceContext("accumulate"), [a, b], [out], cost)[0]


def _cut_batch(batch: Any, microbatches: int) -> Any:
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
    """Add an output op, unless the result is a constant or a weight."""
    result = whole(program, value, "")
    if result.maker >= 0:
        add_op(program, OUTPUT, TraceContext(), [result], [])
        program.ops[-1].name = name
    return result


def _make_jaxpr(fn: Callable[..., Any], label: str, *args: Any) -> tuple[Any, Any]:
    """The closed jaxpr and the shapes of the results."""
    import jax

    return _evaluated(lambda: jax.make_jaxpr(fn, return_shape=True)(*args), label)


def _evaluated(call: Callable[[], Any], label: str) -> Any:
    """The result of tracing user code, whose own errors become one line."""
    try:
        with users_code():
            return call()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{label} cannot be traced by JAX: {reason_of(error)}") from error


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """(path, leaf) of a pytree; Python numbers become arrays of no axes."""
    import jax

    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (jax.tree_util.keystr(path), leaf if hasattr(leaf, "shape") else jax.typeof(leaf))
        for path, leaf in pairs
    ]


def _traced(listing: TracedCall) -> Traced:
    """The graph of a listing, with its estimates and assumptions."""
    program = listing.program
    return Traced(
        build(listing.label, program, listing.results, "jax"),
        tuple(sorted(program.estimated)),
        tuple(dict.fromkeys(program.assumptions)),
    )
