"""A PyTorch module with its example inputs, ready to be traced, executed or exported."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OUTPUT, OpGraph
from gdp.importers.program import Results, Traced, Value, build, positions, report
from gdp.importers.pytorch.export import exported, import_torch
from gdp.importers.pytorch.listing import (
    ExportedOps,
    list_call,
    list_inputs,
    list_output,
    module_calls,
    require_function,
)
from gdp.placement.constraints import outermost

_OPTIONS = ("name", "dynamic_shapes", "held", "optimizer", "loss", "stored", "assumed", "offloaded")


@dataclass(frozen=True, eq=False)
class RecordedTorch:
    """A graph of a PyTorch module, and the exported program that executes it."""

    graph: OpGraph
    program: Any  # torch.export.ExportedProgram
    listing: ExportedOps
    op_of: Mapping[int, int]  # the graph's op of each op of the listing that is needed


@dataclass(frozen=True, eq=False)
class TorchModel:
    """A module and its example inputs, or one with a loss that a training step is made of.

    Inputs may be real tensors, or on the meta device, as may the module's parameters. Options:

    - `name` of the graph;
    - `dynamic_shapes`, as `torch.export.export` takes them: sizes are those of the example inputs;
    - `held`, names of inputs that stay on the devices that read them, such as caches;
    - `optimizer`: "sgd", "momentum", "adam", "adamw", a class of `torch.optim` or None, which makes
      it a training step; `loss`: a function from the module's output to the loss;
    - `stored`: how quantised weights are stored, by their path (`gdp.importers.pytorch.quantised`);
      `assumed`: what is said of them, and `offloaded` of maps that keep some off accelerators.
    """

    name: str
    module: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""  # of module paths, where a wrapper stands around the module

    def __post_init__(self) -> None:
        unknown = sorted(set(self.options) - set(_OPTIONS))
        if unknown:
            raise ModelError(
                f"{self.name}: no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}"
            )

    @property
    def trains(self) -> bool:
        """True where the graph is that of a training step."""
        return "optimizer" in self.options

    @property
    def label(self) -> str:
        """Name of the graph: the option `name`, else the module's."""
        return str(self.options.get("name") or self.name)

    @property
    def unwrapped(self) -> Any:
        """The user's module, without a wrapper around it."""
        return getattr(self.module, self.prefix) if self.prefix else self.module

    def trace(self) -> Traced:
        """The graph, with its estimates and assumptions."""
        if self.trains:
            from gdp.importers.pytorch.training import list_training_step

            listing, results = list_training_step(self)
        else:
            listing, results, _ = self._listed()
        return Traced(
            build(self.label, listing, results, "torch"),
            tuple(sorted(listing.estimated)),
            tuple(dict.fromkeys((*self.options.get("assumed", ()), *listing.assumptions))),
            listing.parameters,
        )

    def record(self) -> RecordedTorch:
        """The graph and the exported program that executes it; raises `ModelError` for training."""
        if self.trains:
            raise ModelError(f"{self.name}: training steps of torch are placed, not executed")
        listing, results, program = self._listed()
        graph = build(self.label, listing, results, "torch")
        return RecordedTorch(graph, program, listing, positions(graph, listing, results))

    def _listed(self) -> tuple[ExportedOps, Results, Any]:
        listing, results, program = self.listed_as_traced()
        if stored := self.options.get("stored"):
            from gdp.importers.pytorch.quantised import apply_stored

            apply_stored(listing, weights_by_path(listing, program, self.prefix), stored)
        return listing, results, program

    def listed_as_traced(self) -> tuple[ExportedOps, Results, Any]:
        """The ops with all weights dense, their results, and the exported program."""
        notes: list[str] = []
        program = exported(
            self.module, self.args, self.kwargs, self.options.get("dynamic_shapes"),
            label=self.name, notes=notes,
        )  # fmt: skip
        listing, results = list_program(
            program, self.name, self.options.get("held", ()), self.prefix
        )
        listing.assumptions[:0] = notes
        return listing, results, program


def list_program(
    program: Any, label: str, held: Sequence[str] = (), prefix: str = ""
) -> tuple[ExportedOps, Results]:
    """The ops of an exported program, and its results."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    listing = ExportedOps(prefix=prefix)
    weights = {
        nodes[name]: _identity(program, name)
        for name in (
            *signature.inputs_to_parameters,
            *signature.inputs_to_buffers,
            *signature.inputs_to_lifted_tensor_constants,
            *_held_inputs(signature, held, label),
        )
    }
    list_inputs(listing, [n for n in nodes.values() if n.op == "placeholder"], weights)
    listing.parameters = sum(
        math.prod(listing.weight_of[identity].dims)
        for identity in {weights[nodes[name]] for name in signature.inputs_to_parameters}
    )
    caches = [listing.weight_of[name].weight for name in _held_inputs(signature, held, label)]
    listing.caches = {key[0] for key in caches if key}
    for node in program.graph.nodes:
        require_function(node, label)
        if node.op == "call_function":
            list_call(listing, node)
    returned = [
        (spec.arg.name, listing.value_of[nodes[spec.arg.name]])
        for spec in signature.output_specs
        if spec.kind.name == "USER_OUTPUT" and getattr(spec.arg, "name", None) in nodes
    ]
    seen: dict[int, str] = {}
    for _, value in returned:
        if isinstance(value, Value) and id(value) not in seen:
            seen[id(value)] = f"output_{len(seen)}" if seen else "output"
            list_output(listing, seen[id(value)], value)
    return listing, Results(state=_state(signature, nodes, listing))


def weights_by_path(listing: ExportedOps, program: Any, prefix: str) -> dict[str, Value]:
    """The weights of a listed program by the paths of its parameters and buffers, less a wrapper's
    prefix."""
    named, signature = {}, program.graph_signature
    for name, path in {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.items():
        path = path.removeprefix(f"{prefix}.") if prefix else path
        named[path] = listing.weight_of[_identity(program, name)]
    return named


def states_held(listing: ExportedOps, program: Any, held: Sequence[str], label: str) -> list[Value]:
    """The inputs that stay where they are read, in the order of the program's."""
    names = _held_inputs(program.graph_signature, held, label)
    return [listing.weight_of[_identity(program, name)] for name in names]


def _state(
    signature: Any, nodes: Mapping[str, Any], listing: ExportedOps
) -> list[tuple[Value, Value]]:
    """New values of buffers, and the buffers: they are kept where they are made."""
    replaced = []
    inputs = dict(signature.inputs_to_buffers)
    by_target = {target: name for name, target in inputs.items()}
    for name, target in dict(signature.buffers_to_mutate).items():
        new, old = listing.value_of[nodes[name]], listing.value_of[nodes[by_target[target]]]
        if isinstance(new, Value) and new.maker >= 0:
            replaced.append((new, old))
    return replaced


def _held_inputs(signature: Any, held: Sequence[str], label: str) -> list[str]:
    inputs = []
    for wanted in held:
        names = [
            n for n in map(str, signature.user_inputs) if n == wanted or n.startswith(f"{wanted}_")
        ]
        if not names:
            raise ModelError(
                f"{label}: no input {wanted!r} to hold; there are {signature.user_inputs}"
            )
        inputs += names
    return inputs


def _identity(program: Any, name: str) -> object:
    """Identity of a weight that tied ones share: their memory."""
    signature = program.graph_signature
    target = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}.get(name)
    tensor = program.state_dict.get(target)
    if tensor is None:
        tensor = program.constants.get(
            target or signature.inputs_to_lifted_tensor_constants.get(name)
        )
    return name if tensor is None else int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def torch_model(returned: object, name: str) -> TorchModel:
    """The model that a function's `(module, inputs)` or `(module, inputs, options)` is.

    Inputs are a tuple of positional ones, a mapping of named ones, or one tensor; the option
    `kwargs` holds named ones beside positional ones. A mapping whose keys are all arguments of
    `forward`, and no options, holds named inputs as well: `(module, args, kwargs)`.
    """
    parts = tuple(returned) if isinstance(returned, tuple | list) else ()
    if len(parts) not in (2, 3):
        raise ModelError(
            f"{name}: a PyTorch model is (module, inputs) or (module, inputs, options)"
        )
    options = dict(_mapping(name, "options", parts[2] if len(parts) == 3 else {}))
    inputs, module = parts[1], _as_module(parts[0])
    if options:
        arguments = set(inspect.signature(module.forward).parameters) - {*_OPTIONS, "kwargs"}
        options = {"kwargs": options} if options.keys() <= arguments else options
    kwargs = _mapping(name, "option 'kwargs'", options.pop("kwargs", {}))
    if isinstance(inputs, Mapping):
        return TorchModel(name, module, (), {**inputs, **kwargs}, options)
    args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return TorchModel(name, module, args, kwargs, options)


def _mapping(name: str, what: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"{name}: {what} must be a mapping, got {type(value).__name__}")
    return value


def trace_torch(
    module: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    held: Sequence[str] = (),
    name: str | None = None,
) -> OpGraph:
    """The graph of `module(*args, **kwargs)`; estimates and assumptions are logged.

    Nothing is computed and no weight is allocated. Parameters, buffers and the inputs named in
    `held` are weights; tied ones count once. Views are no ops: an op that reads a view reads its
    base.

    Args:
        module: a `torch.nn.Module` or a function of tensors; may lie on the meta device.
        args: positional example inputs, real or on the meta device.
        kwargs: named example inputs.
        dynamic_shapes: as `torch.export.export` takes them; sizes are those of the inputs.
        held: names of inputs that stay on the devices that read them, such as caches.
        name: of the graph; without it, the module's class.

    Raises:
        ModelError: `torch.export` refuses the module.
        MissingExtraError: torch is not installed.
    """
    options = {"dynamic_shapes": dynamic_shapes, "held": tuple(held), "name": name}
    as_module = _as_module(module)
    return _reported(TorchModel(_called(module), as_module, tuple(args), kwargs or {}, options))


def trace_torch_training_step(
    module: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: Any = "adamw",
    loss: Callable[[Any], Any] | None = None,
    name: str | None = None,
) -> OpGraph:
    """The graph of one training step: forward, gradients of the loss, and the optimizer's update.

    Ops that read or update a parameter share a device with it and the optimizer's state.

    Args:
        module: a `torch.nn.Module` or a function of tensors; may lie on the meta device.
        args: positional example inputs, real or on the meta device.
        kwargs: named example inputs.
        optimizer: "sgd", "momentum", "adam", "adamw", a class of `torch.optim`, or None for
            gradients alone.
        loss: a function from the module's result to one number; without it, the result itself or
            its `loss`.
        name: of the graph; without it, the module's class with "_step".

    Raises:
        ModelError: torch cannot export or differentiate the module, or the loss is no number.
        MissingExtraError: torch is not installed.
    """
    options = {"optimizer": optimizer, "loss": loss, "name": name}
    label = f"{_called(module)}_step"
    return _reported(TorchModel(label, _as_module(module), tuple(args), kwargs or {}, options))


def _reported(model: TorchModel) -> OpGraph:
    trace = model.trace()
    report(trace)
    return trace.graph


def _as_module(value: Any) -> Any:
    """A module unchanged, a function wrapped in a module."""
    torch = import_torch()
    if isinstance(value, torch.nn.Module):
        return value
    if not callable(value) or isinstance(value, type):
        raise ModelError(
            f"a torch.nn.Module or a function of tensors is needed, got {type(value).__name__}"
        )

    class Function(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return value(*args, **kwargs)

    return Function()


def _called(value: object) -> str:
    """A module's class, or a function's own name."""
    own = str(getattr(value, "__name__", ""))
    return own if own.isidentifier() else type(value).__name__


def boundaries(recorded: RecordedTorch, whole: Collection[str] = ()) -> dict[int, str]:
    """Ops before which a module's program can be cut, each with the path of the module whose call
    begins there; the outermost of several.

    Modules that are called more than once are left out, as a split at their beginning is one at
    every call; so are modules inside of `whole` paths. Before the first boundary are all that read
    an input of the model, behind the last one all that make an output: pipelines are fed at their
    first stage, and answer at their last.
    """
    graph = recorded.graph
    nodes = [node for node in recorded.program.graph.nodes if node.op == "call_function"]
    op_of = {
        node: recorded.op_of[op]
        for node, op in recorded.listing.op_of.items()
        if op in recorded.op_of
    }
    begins: dict[str, int] = {}  # position of the first node of each module
    again: set[str] = set()
    for position, node in enumerate(nodes):
        for path, call in module_calls(node):
            begins.setdefault(path, position)
            if call:
                again.add(path)
    # The first op at or behind each position.
    following = np.full(len(nodes) + 1, graph.num_ops)
    for position in reversed(range(len(nodes))):
        own = op_of.get(nodes[position], graph.num_ops)
        following[position] = min(following[position + 1], own)
    first, last = _input_output_span(recorded)
    path_of: dict[int, str] = {}
    for path in sorted(begins, key=lambda p: (p.count("."), p)):
        op = int(following[begins[path]])
        kept = outermost(path, whole) in (None, path)
        if path and path not in again and kept and first < op <= last:
            path_of.setdefault(op, path)
    return dict(sorted(path_of.items()))


def _input_output_span(recorded: RecordedTorch) -> tuple[int, int]:
    """The last op that reads an input of the model, or the first op where none does; and the first
    op that makes an output."""
    graph = recorded.graph
    src, dst = graph.edges
    own = np.flatnonzero(~graph.is_io)
    outputs = graph.has_type((OUTPUT,))
    reads = dst[graph.is_io[src]]
    makes = src[outputs[dst] & ~graph.is_io[src]]
    return int(reads.max(initial=own.min())), int(makes.min(initial=own.max()))


def uncut_reason(recorded: RecordedTorch) -> str:
    """Why a program has no `boundaries`, in a sentence with names of inputs, outputs and ops."""
    graph = recorded.graph
    first, last = _input_output_span(recorded)
    if first < last:
        return (
            "a pipeline of torch is cut where calls of modules begin, and none that is called once "
            f"begins between op {graph.op_names[first]!r}, the last that reads an input, and op "
            f"{graph.op_names[last]!r}, the first that makes an output"
        )
    src, dst = graph.edges
    late = graph.op_names[src[(dst == first) & graph.is_io[src]][0]]
    early = graph.op_names[dst[(src == last) & graph.is_io[dst]][0]]
    return (
        "a pipeline of torch is fed at its first stage and answers at its last, and here output "
        f"{early!r} is made (op {graph.op_names[last]!r}) before input {late!r} is read (op "
        f"{graph.op_names[first]!r}): no cut has all inputs before it and all outputs behind it"
    )
