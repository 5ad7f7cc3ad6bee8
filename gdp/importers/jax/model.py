"""A JAX function with its example arguments, as a user's Python function returns it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdp.errors import ModelError
from gdp.graph.op_graph import OpGraph
from gdp.importers.jax.jaxpr import JaxStep, LoopOptions, TracedProgram
from gdp.importers.jax.trace import (
    TracedCall,
    cut_batch,
    list_call,
    list_training_step,
    traced,
)
from gdp.importers.program import Stacked, Traced, Value, positions

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
        wanted = self.options.get("weight_argnums", ())
        indices = [wanted] if isinstance(wanted, int) else list(wanted)
        held = frozenset(i + len(self.args) if i < 0 else i for i in indices)
        if not held <= set(range(len(self.args))):
            raise ModelError(
                f"{self.name}: weight_argnums {sorted(held)} do not fit {len(self.args)} arguments"
            )
        return held

    @property
    def microbatches(self) -> int:
        """Pieces that a training step cuts its batch into."""
        return int(self.options.get("microbatches", 1))

    def trace(self) -> Traced:
        """The graph, with what was estimated or assumed."""
        return traced(self._listing(record=False))

    def record(self) -> RecordedJax:
        """The graph, and the steps that compute its values."""
        listing = self._listing(record=True)
        graph = traced(listing).graph
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
            chosen.get("unroll_scan", False), chosen.get("trip_count"),
            mark_transposed=not self.trains,
        )  # fmt: skip
        program = TracedProgram(options=options, steps=[] if record else None)
        label = str(chosen.get("name") or self.name)
        if not self.trains:
            return list_call(self.fn, self.args, self.held, label, program)
        params, batch = self.args
        return list_training_step(
            self.fn, params, batch, chosen["optimizer"], self.microbatches,
            bool(chosen.get("has_aux", False)), label, program,
        )  # fmt: skip

    def leaves(self, args: Sequence[Any]) -> list[Any]:
        """Values of the arguments in the order of `TracedCall.arguments`; the optimizer's state is
        what it starts from."""
        import jax

        if not self.trains:
            return jax.tree.leaves(tuple(args))
        params, batch = args
        optimizer = self.options["optimizer"]
        state = () if optimizer is None else jax.jit(optimizer.init)(params)
        pieces = [self._piece(batch, k) for k in range(self.microbatches)]
        return jax.tree.leaves((params, state, pieces))

    def uncut(self) -> Callable[..., list[Any]]:
        """A function from `leaves` to the leaves of the results, in the order of
        `TracedCall.outputs`: what a placement of the graph must compute."""
        import jax

        if not self.trains:
            form = jax.tree.structure(self.args)
            return lambda *leaves: jax.tree.leaves(self.fn(*jax.tree.unflatten(form, leaves)))
        params, batch = self.args
        optimizer = self.options["optimizer"]
        state = () if optimizer is None else jax.eval_shape(optimizer.init, params)
        piece = cut_batch(batch, self.microbatches)
        form = jax.tree.structure((params, state, [piece] * self.microbatches))
        return lambda *leaves: jax.tree.leaves(self._step(*jax.tree.unflatten(form, leaves)))

    def _step(self, params: Any, state: Any, pieces: Sequence[Any]) -> Any:
        """Gradients and losses of microbatches are added up, then the optimizer runs once."""
        import jax

        has_aux, optimizer = bool(self.options.get("has_aux", False)), self.options["optimizer"]
        gradient = jax.value_and_grad(self.fn, has_aux=has_aux)
        results = [gradient(params, piece) for piece in pieces]
        losses = [loss[0] if has_aux else loss for loss, _ in results]
        total = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *(g for _, g in results))
        loss = sum(losses[1:], losses[0])
        if optimizer is None:
            return loss, total
        import optax

        updates, state = optimizer.update(total, state, params)
        return loss, optax.apply_updates(params, updates), state

    def _piece(self, batch: Any, k: int) -> Any:
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
