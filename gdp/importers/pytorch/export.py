"""Exports modules with `torch.export`: on fake tensors, so that no weight is ever allocated."""

import contextlib
import io
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gdp.base.errors import MissingExtraError, ModelError
from gdp.base.version import install_command
from gdp.importers.program import users_code
from gdp.importers.pytorch.masks import masks_as_run


def import_torch() -> Any:
    """The torch module; raises `MissingExtraError` where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtraError(f"PyTorch models need torch: {install_command('torch')}") from None
    return torch


def exported(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
    *,
    label: str,
    train: bool = False,
    notes: list[str] | None = None,
) -> Any:
    """The module as an `ExportedProgram` of functional ATen ops; assumptions are added to `notes`.

    Parameters and inputs may be real, fake, or on the meta device. Ops that write in place are
    replaced by ones that do not, and their results stand for the written tensors. Where the code
    asks what its data are, it goes the way of the example inputs, if these and the weights are
    real. Raises `ModelError` where the module cannot be exported.
    """
    torch = import_torch()

    with users_code(), torch.set_grad_enabled(train), _without_stacks():
        try:
            program = _exported(module, tuple(args), dict(kwargs), dynamic_shapes, train, notes)
            if any(map(_writes, _all_nodes(program.graph_module))):
                _require_real_constants(program, label)
                with _quietly():
                    program = program.run_decompositions({})
        except ModelError:
            raise
        except (Exception, SystemExit) as error:
            raise ModelError(f"{label}: torch.export failed: {_advised(error)}") from error
    return program


@contextlib.contextmanager
def _without_stacks() -> Iterator[None]:
    """Without the lines of code that led to every op: nobody reads them here, and writing them down
    takes a fifth of a trace."""
    import torch.fx

    config = getattr(torch.fx, "config", None)
    before = getattr(config, "do_not_emit_stack_traces", None)
    if before is None:  # of another version
        yield
        return
    config.do_not_emit_stack_traces = True  # pyright: ignore[reportOptionalMemberAccess]
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before  # pyright: ignore[reportOptionalMemberAccess]


def _require_real_constants(program: Any, label: str) -> None:
    """Refuse writes to weights that the code reached around autograd (`self.w.data`) on meta: torch
    keeps such weights as constants without memory, and its decompositions crash on the writes."""
    from torch._subclasses.fake_tensor import FakeTensor

    constants = dict(program.graph_signature.inputs_to_lifted_tensor_constants)
    for node in filter(_writes, _all_nodes(program.graph_module)):
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):  # noqa: SLF001
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            name = constants.get(_base_of_view(value).name, "")
            if isinstance(program.constants.get(name), FakeTensor):
                raise ModelError(
                    f"{label}: the forward pass uses the data of a weight outside of autograd "
                    f"(constant {name!r}, such as self.w.data) and writes in place; write to the "
                    "weight itself under torch.no_grad(), or give weights that are not on meta"
                )


def _base_of_view(node: Any) -> Any:
    """The node whose memory a chain of views shows."""
    while node.op == "call_function":
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if not returns or returns[0].alias_info is None:
            break
        node = node.args[0]
    return node


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warnings, and without the graphs that it logs and prints when it fails."""
    before, stderr, graph = logging.root.manager.disable, io.StringIO(), ""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(stderr):
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        graph = str(getattr(error, "partial_fx_graph", ""))
        raise
    finally:
        logging.disable(before)
        text = stderr.getvalue()
        sys.stderr.write(text.replace(graph, "").lstrip("\n") if graph else text)


def _exported(
    module: Any, args: Any, kwargs: Any, dynamic_shapes: Any, train: bool, notes: list[str] | None
) -> Any:
    import torch

    if isinstance(module, torch.jit.ScriptModule):
        return _of_script(module, args, kwargs)
    args, kwargs = _beside_weights(module, args, kwargs)
    if train or dynamic_shapes is not None:
        return _of_module(module, args, kwargs, dynamic_shapes, train, notes)
    with masks_as_run(module, args, kwargs):
        return _of_module(module, args, kwargs, None, train, notes)


def _of_module(
    module: Any, args: Any, kwargs: Any, dynamic_shapes: Any, train: bool, notes: list[str] | None
) -> Any:
    import torch
    from torch.export import export

    def plain() -> Any:
        with _quietly():
            return export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)

    weights = (*module.parameters(), *module.buffers())
    tensors = [leaf for leaf in (*weights, *tree_leaves(args, kwargs)) if torch.is_tensor(leaf)]
    on_meta = {tensor.device.type for tensor in tensors} == {"meta"}
    if on_meta and not train and dynamic_shapes is None:
        # What has to know its device takes a way of its own on meta, which may run nowhere.
        with (
            contextlib.suppress(Exception), _quietly(),
            _on_cpu(module, args, kwargs) as (given, named),
        ):  # fmt: skip
            return export(module, given, named, strict=False)
    try:
        return plain()
    except Exception as error:
        real = all(type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta for t in tensors)
        if not (real and _asks_for_data(error)):
            raise
        import torch._functorch.config as config

        with config.patch(fake_tensor_propagate_real_tensors=True):
            program = plain()
        if notes is not None:
            notes.append(f"what it does depends on data{_line(error)}; the way of the example "
                         "inputs is taken")  # fmt: skip
        return program


def _of_script(module: Any, args: Any, kwargs: Any) -> Any:
    """A `ScriptModule`, by torch's own converter."""
    from torch._export.converter import TS2EPConverter

    with _quietly():
        return TS2EPConverter(module, args, kwargs).convert()


@contextlib.contextmanager
def _on_cpu(module: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The inputs as fake tensors of the CPU; within, so are the module's weights."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.nn.utils.stateless import _reparametrize_module
    from torch.utils._pytree import tree_map

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes: dict[int, Any] = {}

    def fake(tensor: Any) -> Any:
        if not torch.is_tensor(tensor):
            return tensor
        if id(tensor) not in fakes:
            fake_tensor = FakeTensor(mode, tensor.detach(), torch.device("cpu"))
            if isinstance(tensor, torch.nn.Parameter):
                fake_tensor = torch.nn.Parameter(fake_tensor, tensor.requires_grad)
            fakes[id(tensor)] = fake_tensor
        return fakes[id(tensor)]

    held = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    with _reparametrize_module(module, {name: fake(tensor) for name, tensor in held.items()}):
        yield tree_map(fake, (args, kwargs))


def tree_leaves(*trees: Any) -> list[Any]:
    """The leaves of nested tuples, lists and mappings."""
    from torch.utils._pytree import tree_leaves as leaves

    return list(leaves(trees))


def _asks_for_data(error: BaseException) -> bool:
    return type(error).__name__ in ("GuardOnDataDependentSymNode", "DataDependentOutputException")


def _line(error: BaseException) -> str:
    """The line of the user's code that torch names, where it names one."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', str(error))
    own = [f" ({Path(file).name}:{line})" for file, line, _ in frames if "/torch/" not in file]
    return own[-1] if own else ""


def _advised(error: BaseException) -> str:
    """The first line of an error and what to do about it."""
    kind = type(error).__name__
    message = (str(error).strip().splitlines() or [""])[0]
    if _asks_for_data(error):
        return (
            f"what the module does depends on data{_line(error)}: give real weights and example "
            f"inputs, whose way is then taken, or use torch.cond or torch.where ({kind})"
        )
    advice = next((advice for part, advice in _ADVICE.items() if part in f"{kind}: {message}"), "")
    return f"{kind}: {message}".removesuffix(": ") + advice


_ADVICE = {
    ".numpy()": "; compute with functions of torch instead of NumPy's",
    "SystemExit": "; the module ends the program: take its sys.exit out",
}


def _beside_weights(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The inputs where the module's weights are: only shapes are needed of either."""
    import torch
    from torch.utils._pytree import tree_map

    devices = {p.device for p in (*module.parameters(), *module.buffers())}
    if len(devices) != 1:
        return args, kwargs
    (device,) = devices

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device == device:
            return leaf
        if device.type == "meta":
            return leaf.to("meta")
        if leaf.device.type == "meta":
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        return leaf

    return tree_map(moved, (args, kwargs))


def _all_nodes(graph_module: Any) -> list[Any]:
    return [
        node
        for part in graph_module.modules()
        if hasattr(part, "graph")
        for node in part.graph.nodes
    ]


def _writes(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable
