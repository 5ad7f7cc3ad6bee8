"""Training steps of PyTorch modules: forward, the gradients of the loss, and the update.

The exported program is run once on fake tensors while autograd and `make_fx` record what it calls;
no number is computed. Ops that autograd runs bear the module path of the forward op that they
belong to.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gdp.base.errors import ModelError
from gdp.importers.program import Op, Results, Value, users_code
from gdp.importers.pytorch.export import exported, import_torch
from gdp.importers.pytorch.listing import ExportedOps, list_call, list_inputs, list_output, scope_of


@dataclass(frozen=True)
class OptimizerUpdate:
    """Work and state of an optimizer for each number of a parameter."""

    name: str  # op type
    states: int  # further numbers that are kept
    flop: int


OPTIMIZERS: Mapping[str, OptimizerUpdate] = {
    "sgd": OptimizerUpdate("fused_sgd", 0, 2),
    "momentum": OptimizerUpdate("fused_sgd", 1, 4),
    "adam": OptimizerUpdate(
        "fused_adam", 2, 12
    ),  # two averages, two corrections, a root and a quotient
    "adamw": OptimizerUpdate("fused_adamw", 2, 14),
}
"""Kingma and Ba 2015, arXiv 1412.6980; Loshchilov and Hutter 2019, arXiv 1711.05101."""


def list_training_step(model: Any) -> tuple[ExportedOps, Results]:
    """The ops of one step, and the new values of the parameters and the optimizer's state."""
    import torch
    from torch.utils._pytree import tree_leaves

    update = _update(model.options["optimizer"], model.name)
    leaves = tree_leaves((model.args, dict(model.kwargs)))
    tensors = tuple(leaf for leaf in leaves if torch.is_tensor(leaf))
    program = exported(_with_loss(model), tensors, {}, label=model.name, train=True)
    traced, marks, names = _joint(program, model.name)
    prefix = f"module.{model.prefix}" if model.prefix else "module"
    listing = ExportedOps(prefix=prefix)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    # Parameters come first, by name, and then the inputs.
    weights = dict(zip(placeholders, names, strict=False))
    list_inputs(listing, placeholders, weights)
    trained = set(program.graph_signature.parameters)
    listing.parameters = sum(
        _size(listing.weight_of[name]) for name in dict.fromkeys(names) if name in trained
    )
    for node in traced.graph.nodes:
        if node.op == "call_function":
            node.meta["nn_module_stack"] = {"": (marks.scope(node), "")}
            list_call(listing, node, backward=marks.is_backward(node))
    (returned,) = (node for node in traced.graph.nodes if node.op == "output")
    loss, *gradients = returned.args[0]
    list_output(listing, "loss", listing.value_of[loss])
    # Ops behind the Output are those of the optimizer.
    listing.optimizer_starts = len(listing.ops)
    state = []
    for name, gradient in zip(marks.differentiated, gradients, strict=True):
        new_gradient = listing.value_of[gradient] if gradient is not None else None
        if isinstance(new_gradient, Value):
            state += _updated(listing, name, new_gradient, update)
    return listing, Results(state=state, together=True)


def _updated(
    listing: ExportedOps, name: str, gradient: Value, update: OptimizerUpdate | None
) -> list[tuple[Value, Value]]:
    """Append the update of one parameter; its new value and states with those they replace."""
    weight = listing.weight_of[name]
    if update is None or weight.weight is None:
        return [(gradient, weight)]
    states = []
    for _ in range(update.states):
        held = Value(weight.dims, weight.dtype, weight.itemsize, weight=(len(listing.weights),))
        listing.weights.append(held)
        states.append(held)
    kept = [weight, *states]
    maker = len(listing.ops)
    updated = [
        Value(v.dims, v.dtype, v.itemsize, maker, i, backward=True) for i, v in enumerate(kept)
    ]
    module = name.removeprefix("module.").rpartition(".")[0]
    listing.ops.append(
        Op(
            op_type=update.name,
            scope=module,
            ins=[gradient, *kept],
            outs=updated,
            flop=float(update.flop * _size(weight)),
            traffic_bytes=float(gradient.nbytes + 2 * sum(v.nbytes for v in kept)),
            backward=True,
            dtype=weight.dtype,
            in_dims=(gradient.dims, *(v.dims for v in kept)),
        )
    )
    return list(zip(updated, kept, strict=True))


@dataclass
class _Marks:
    """Module and direction of each node of the recorded graph. Filled while recording."""

    differentiated: list[str] = field(default_factory=list)  # parameters that have gradients
    current: tuple[str, bool] = ("", False)  # the scope, and whether autograd runs it
    found: dict[str, tuple[str, bool]] = field(default_factory=dict)

    def mark(self, graph: Any, scope: str, backward: bool) -> None:
        """All nodes from now on belong to a scope."""
        for node in reversed(graph.nodes):
            if node.name in self.found:
                break
            self.found[node.name] = self.current
        self.current = (scope, backward)

    def scope(self, node: Any) -> str:
        """Module path of a node; nodes not marked yet are in the current scope."""
        return self.found.get(node.name, self.current)[0]

    def is_backward(self, node: Any) -> bool:
        """True for nodes that autograd made."""
        return self.found.get(node.name, self.current)[1]


def _joint(program: Any, label: str) -> tuple[Any, _Marks, list[str]]:
    """The graph of (weights, inputs) -> (loss, gradients), its marks, and the weights' names."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    module = program.module(check_guards=False)
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    marks = _Marks()
    marks.differentiated = [name for name, p in module.named_parameters() if p.requires_grad]
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [torch.empty_like(i, device=i.device) for i in inputs if isinstance(i, torch.Tensor)]

    def step(weights: Sequence[Any], inputs: Sequence[Any]) -> Any:
        held = {
            name: w.detach().requires_grad_(name in marks.differentiated)
            for name, w in zip(named, weights, strict=True)
        }
        # A tied weight is read by several names, and is one tensor.
        of_tensor = {id(tensor): held[name] for name, tensor in named.items()}
        result = _recorder(module, of_tensor, marks).run(*inputs)
        loss = result[0] if isinstance(result, tuple) else result
        marks.mark(_graph(), "", True)
        wanted = [held[name] for name in marks.differentiated]
        return [loss, *torch.autograd.grad(loss, wanted, allow_unused=True)]

    with warnings.catch_warnings(), torch.enable_grad(), users_code():
        warnings.simplefilter("ignore")
        try:
            traced = make_fx(step, tracing_mode="fake")(list(named.values()), inputs)
        except (Exception, SystemExit) as error:
            message = str(error).strip().splitlines()
            raise ModelError(
                f"{label}: autograd failed: {type(error).__name__}: {message[0] if message else ''}"
            ) from error
    return traced, marks, list(named)


def _graph() -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None, "only called while make_fx records"
    return mode.tracer.graph


def _recorder(module: Any, of_tensor: Mapping[int, Any], marks: _Marks) -> Any:
    """An interpreter of the module that records the calls of each node and of its gradient."""
    import torch

    class Recorder(torch.fx.Interpreter):
        def __init__(self) -> None:
            super().__init__(module)
            self.known: set[Any] = set()

        def fetch_attr(self, target: str) -> Any:
            given = super().fetch_attr(target)
            return of_tensor.get(id(given), given)

        def run_node(self, n: Any) -> Any:
            scope = scope_of(n)
            marks.mark(_graph(), scope, False)
            result = super().run_node(n)
            for value in result if isinstance(result, list | tuple) else [result]:
                if isinstance(value, torch.Tensor):
                    self.follow(value.grad_fn, scope)
            return result

        def follow(self, grad_fn: Any, scope: str) -> None:
            """Mark the functions that autograd will run for this node with its scope."""
            todo = [grad_fn]
            while todo:
                function = todo.pop()
                if function is None or function in self.known:
                    continue
                self.known.add(function)
                function.register_prehook(lambda _: marks.mark(_graph(), scope, True))
                todo += [following for following, _ in function.next_functions]

    return Recorder()


def _with_loss(model: Any) -> Any:
    """The module with positional tensors as its inputs and the loss alone as its result."""
    torch = import_torch()
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, form = tree_flatten((model.args, dict(model.kwargs)))
    loss = model.options.get("loss")

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model.module

        def forward(self, *tensors: Any) -> Any:
            given = iter(tensors)
            filled = [next(given) if torch.is_tensor(leaf) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(filled, form)
            return _loss_of(self.module(*args, **kwargs), loss, model.name)

    return WithLoss()


def _loss_of(result: Any, loss: Any, label: str) -> Any:
    value = loss(result) if loss is not None else getattr(result, "loss", None)
    if value is None and isinstance(result, Mapping):
        value = result.get("loss")
    value = result if value is None else value
    shape = getattr(value, "shape", None)
    if shape is None or len(shape):
        raise ModelError(
            f"{label}: the loss must be one number, got {tuple(shape) if shape else value!r}; give "
            "the option 'loss', a function from what the module returns to the loss"
        )
    return value


def _update(optimizer: Any, label: str) -> OptimizerUpdate | None:
    """By name, or by the name of a class of `torch.optim`."""
    if optimizer is None:
        return None
    name = optimizer if isinstance(optimizer, str) else getattr(optimizer, "__name__", "")
    if name.lower() not in OPTIMIZERS:
        raise ModelError(
            f"{label}: no optimizer {name or optimizer!r}; there are {', '.join(OPTIMIZERS)}, "
            "or None for gradients alone"
        )
    return OPTIMIZERS[name.lower()]


def _size(value: Value) -> int:
    return value.nbytes // max(value.itemsize, 1)
