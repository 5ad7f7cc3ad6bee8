"""JAX functions and training steps that run on the devices of a placement."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gdp.base.errors import ArgumentError, ModelError
from gdp.importers.jax.trace import JaxModel, RecordedJax, jax_model
from gdp.importers.program import Value
from gdp.measure.plan import make_plan, roofline_prediction
from gdp.placement.placement import Placement
from gdp.question.question import Question
from gdp.targets.jax.program import Layout, SegmentedJaxProgram, array_on, whole_array
from gdp.targets.jax.run import jax_devices


def traced(returned: tuple[Any, ...]) -> tuple[JaxModel, RecordedJax]:
    """A JAX function with its arguments and options, and its record; raises `ModelError`."""
    model = jax_model(returned, getattr(returned[0], "__name__", "traced") if returned else "()")
    if model.trains and model.options["optimizer"] is None:
        raise ModelError(f"{model.name}: a step with no optimizer has no state to keep; give one")
    return model, model.record()


def placed_callable(
    model: JaxModel, recorded: RecordedJax, question: Question, placement: Placement
) -> "PlacedFunction | PlacedStep":
    """A traced function or training step on the devices of a placement of the question."""
    graph, machine = question.graph, question.cluster
    plan = make_plan(roofline_prediction(graph, machine, placement.device, "latency"), "latency")
    layout = Layout.of(plan, jax_devices(machine), machine.host)
    return (PlacedStep if model.trains else PlacedFunction)(model, recorded, layout)


class PlacedFunction:
    """A JAX function whose weights are on the devices of its placement.

    Called with the arguments that are not weights, it returns the results of the function, on the
    device that is the host of the cluster. It does not wait: results may still be computed, as
    those of any function of JAX. What the function closes over was copied when it was placed.
    """

    def __init__(self, model: JaxModel, recorded: RecordedJax, layout: Layout) -> None:
        import jax

        self._program = SegmentedJaxProgram(recorded, layout)
        self._host = layout.devices[layout.host]
        held = model.held
        self._form = jax.tree.structure(
            tuple(argument for i, argument in enumerate(model.args) if i not in held)
        )
        self._result = jax.tree.structure(jax.eval_shape(model.fn, *model.args))
        leaves = [
            (leaf, i in held) for i, tree in enumerate(model.args) for leaf in jax.tree.leaves(tree)
        ]
        weights: dict[Value, Any] = {}
        self._inputs: list[Value] = []
        for value, (leaf, is_weight) in zip(recorded.arguments, leaves, strict=True):
            if is_weight:
                weights[value] = leaf
            else:
                self._inputs.append(value)
        _require_arrays(model.name, weights.values())
        self._weights = self._program.given(weights)

    def __call__(self, *arguments: Any) -> Any:
        """The results of the function.

        Args:
            *arguments: Those that are not weights, as the function takes them, of the shapes that
                were placed.

        Raises:
            ArgumentError: Their number, form or shapes are others.
        """
        import jax

        given = _checked(arguments, self._form, self._inputs)
        results = self._program.results(self._weights.with_inputs(self._program.given(given)))
        return jax.tree.unflatten(self._result, [array_on(self._host, leaf) for leaf in results])


class PlacedState(NamedTuple):
    """Parameters and optimizer state of a placed training step; a tree of JAX: its leaves are
    arrays on their devices, where a stacked weight is the list of its rows."""

    parameters: list[Any]
    optimizer: list[Any]


class PlacedStep:
    """A training step that runs on the devices of its placement, where its state stays.

    Example:
        >>> step = gdp.on_devices((loss, (params, batch), {"optimizer": adam}), result)
        ... # doctest: +SKIP
        >>> state = step.init(params)  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     state, value = step(state, batch)
        >>> params = step.parameters(state)  # doctest: +SKIP
    """

    def __init__(self, model: JaxModel, recorded: RecordedJax, layout: Layout) -> None:
        import jax

        self._model = model
        self._program = SegmentedJaxProgram(recorded, layout)
        self._host = layout.devices[layout.host]
        params, batch = model.args
        self._form = jax.tree.structure(params)
        self._batch = jax.tree.structure((batch,) * model.microbatches)
        self._count = self._form.num_leaves
        weights = sum(value.maker < 0 for value in recorded.arguments)
        self._held = list(recorded.arguments[:weights])
        self._inputs = list(recorded.arguments[weights:])

    def init(self, params: Any = None) -> PlacedState:
        """The state that training starts from.

        Args:
            params: Parameters; by default those of the model that was placed.

        Raises:
            ModelError: Parameters are shapes without values.
            ArgumentError: They have another form.
        """
        import jax

        params = self._model.args[0] if params is None else params
        if jax.tree.structure(params) != self._form:
            raise ArgumentError(
                f"parameters have the form {self._form}, got {jax.tree.structure(params)}"
            )
        _require_arrays(self._model.name, jax.tree.leaves(params))
        optimizer = self._model.options["optimizer"]
        state = () if optimizer is None else jax.jit(optimizer.init)(params)
        return PlacedState(jax.tree.leaves(params), jax.tree.leaves(state))

    def __call__(self, state: PlacedState, batch: Any) -> tuple[PlacedState, Any]:
        """One step of the optimizer.

        Args:
            state: Of `init`, or of the step before.
            batch: Of the form and shapes that were placed.

        Returns:
            The next state, and the loss, on the host device of the cluster.

        Raises:
            ArgumentError: The batch has another form or other shapes.
        """
        import jax

        leaves = [*state.parameters, *state.optimizer]
        if len(leaves) != len(self._held):
            raise ArgumentError(f"the state has {len(leaves)} arrays, {len(self._held)} are needed")
        pieces = [self._model.piece(batch, k) for k in range(self._model.microbatches)]
        inputs = _checked(pieces, self._batch, self._inputs)
        given = self._program.given({**dict(zip(self._held, leaves, strict=True)), **inputs})
        loss, *new = self._program.results(given)
        return PlacedState(new[: self._count], new[self._count :]), jax.device_put(loss, self._host)

    def parameters(self, state: PlacedState) -> Any:
        """The parameters in the form of the model, as NumPy arrays on the host: to save them."""
        import jax

        return jax.tree.unflatten(self._form, [whole_array(leaf) for leaf in state.parameters])


def _require_arrays(name: str, leaves: Any) -> None:
    import jax

    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ModelError(
            f"{name}: weights are shapes without values; give the function with its real weights, "
            "(function, arguments), whose other arguments may be shapes"
        )


def _checked(arguments: Sequence[Any], form: Any, values: Sequence[Value]) -> dict[Value, Any]:
    """Arguments by value; raises `ArgumentError` where they are not those that were placed."""
    import jax

    leaves, found = jax.tree.flatten(tuple(arguments))
    if found != form:
        raise ArgumentError(f"arguments of the form {form} were placed, got {found}")
    for value, leaf in zip(values, leaves, strict=True):
        if np.shape(leaf) != value.dims:
            raise ArgumentError(
                f"an argument of shape {value.dims} was placed, got {np.shape(leaf)}; place again "
                "for other shapes"
            )
    return dict(zip(values, leaves, strict=True))
