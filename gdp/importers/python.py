"""Models of Python code: the function of `python:package.module:function` is called, and what it
returns traced by JAX or PyTorch."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OpGraph
from gdp.importers.traceable import named

if TYPE_CHECKING:
    from gdp.importers.jax.trace import JaxModel
    from gdp.importers.pytorch.model import TorchModel

PREFIX = "python:"


def python_model(spec: str) -> "JaxModel | TorchModel | OpGraph":
    """The JAX function or PyTorch module that the function returns, or its graph."""
    returned = python_function(spec)
    if isinstance(returned, OpGraph):
        return returned
    if _holds_module(returned):
        from gdp.importers.pytorch.model import torch_model

        return torch_model(returned, spec)
    from gdp.importers.jax.trace import jax_model

    return jax_model(returned, spec)


def python_files(spec: str) -> list[Path]:
    """The file of the function's module, once it is loaded."""
    path = spec.removeprefix(PREFIX).partition("?")[0]
    module = sys.modules.get(path.rpartition(":")[0])
    origin = getattr(module, "__file__", None)
    return [Path(origin)] if origin else []


def python_function(spec: str) -> object:
    """Result of calling the function of `python:package.module:function`, with the keyword
    arguments behind `?` where there are some: `python:models:bert?layers=4&causal=true`."""
    path, _, query = spec.removeprefix(PREFIX).partition("?")
    module_name, separator, function_name = path.rpartition(":")
    if not separator or not module_name or not function_name:
        raise ModelError(f"{spec!r} must look like python:package.module:function")
    given = _keywords(spec, query)
    # The console script does not look where it was started; `python -m` does.
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
    from gdp.importers.program import users_code

    # What a user's module or function raises is theirs, whatever it is.
    try:
        with users_code():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{spec!r}: module {module_name!r} cannot be imported: {named(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ModelError(f"{spec!r}: module {module_name!r} has no function {function_name!r}")
    if missing := [name for name in _required(function) if name not in given]:
        raise ModelError(
            f"{spec!r}: the function needs {', '.join(missing)}; give "
            f"{'&'.join(f'{name}=VALUE' for name in missing)} behind a question mark"
        )
    _require_parameters(spec, function, given)
    try:
        with users_code():
            return function(**given)
    except (Exception, SystemExit) as error:
        raise ModelError(f"{spec!r}: the function raised {named(error)}") from error


_VALUES = {"true": True, "false": False, "none": None}


def _keywords(spec: str, query: str) -> dict[str, object]:
    """Keyword arguments of `key=value&key=value`: whole numbers, numbers, true, false, none, else
    texts."""
    given: dict[str, object] = {}
    for part in query.split("&") if query else ():
        key, separator, text = part.partition("=")
        if not (separator and key.isidentifier()) or key in given:
            raise ModelError(
                f"{spec!r}: {part!r} must be NAME=VALUE, once for each argument of the function"
            )
        given[key] = _VALUES.get(text.lower(), text)
        for number in (float, int):
            with contextlib.suppress(ValueError):
                given[key] = number(text)
    return given


def _require_parameters(
    spec: str, function: Callable[..., object], given: Mapping[str, object]
) -> None:
    """Raise `ModelError` for a keyword that the function, if its signature is known, lacks."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [parameter.name for parameter in parameters if parameter.kind in kinds]
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    strange = [name for name in given if name not in known]
    if strange and not takes_all:
        raise ModelError(
            f"{spec!r}: the function has no argument {strange[0]!r}; it has "
            f"{', '.join(known) or 'none'}"
        )


def _required(function: Callable[..., object]) -> list[str]:
    """Parameters without a default; none if the signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _holds_module(returned: object) -> bool:
    """True for a tuple that begins with a `torch.nn.Module`, or with a function before inputs of
    torch; without torch there is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    first, *given = returned if isinstance(returned, tuple | list) and returned else (returned,)
    if isinstance(first, torch.nn.Module):
        return True
    from torch.utils._pytree import tree_leaves

    return callable(first) and any(map(torch.is_tensor, tree_leaves(given[:1])))
