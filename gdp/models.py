"""Models by path or name, as graphs, and their contents for `gdp inspect`."""

import contextlib
import importlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from gdp.errors import ArgumentError, GdpError, ModelError
from gdp.files.reading import is_file, is_there
from gdp.files.writing import is_written_by_gdp
from gdp.graph.op_graph import OpGraph
from gdp.ops.vllm import AT_ONCE
from gdp.units import whole_number

if TYPE_CHECKING:
    from gdp.importers.jax.trace import JaxModel
    from gdp.importers.program import Traced
    from gdp.importers.pytorch.model import TorchModel

ONNX_PREFIX, PYTHON_PREFIX, HF_PREFIX = "onnx:", "python:", "hf:"
LONGEST = "max"
"""The context of a request that asks for the longest one that fits."""
GGUF_SUFFIX = ".gguf"
GRAPH_SUFFIXES = (".json", ".json.gz", ".gdpgraph")


@runtime_checkable
class Traceable(Protocol):
    """A function or module with its example arguments: what `traced_model` returns."""

    @property
    def name(self) -> str:
        """Name of the graph."""
        ...

    def trace(self) -> "Traced":
        """The graph, with its estimates and assumptions."""
        ...


@dataclass(frozen=True)
class Generation(os.PathLike[str]):
    """A request to a language model: a prompt that is read, and tokens that are written.

    A model for every library call: one placement serves both phases.

    Args:
        model: A configuration of transformers, or its folder, with or without "hf:", or a .gguf
            file.
        prompt: Tokens that are read.
        new: Tokens that are written.
        batch: Sequences side by side, one step for all.
        requests: Requests in flight, each with a cache of its own. Default: one; under throughput
            as many as there are devices.
        context: Tokens of one sequence that caches are reserved for; "max", in `gdp.place`, for
            the longest context that fits. Default: prompt + new.

    >>> Generation("llama", prompt=2048, new=256)
    Generation(model='llama', prompt=2048, new=256, batch=1, requests=None, context=None)
    """

    model: str | os.PathLike[str]
    prompt: int
    new: int
    batch: int = 1
    requests: int | None = None
    context: int | str | None = None

    def __post_init__(self) -> None:
        for name, value in self._sizes().items():
            if (name, value) == ("context", LONGEST):
                continue
            if not isinstance(value, int) or not 1 <= value < 1 << 31:
                raise ModelError(
                    f"{name} must be a positive whole number below 2**31, got {value!r}"
                )

    def __fspath__(self) -> str:
        """The spec that the command line writes."""
        path = os.fspath(self.model).removeprefix(HF_PREFIX)
        path = path if is_gguf(path) else HF_PREFIX + path
        joint = "&" if "?" in path else "?"
        return path + joint + "&".join(f"{k}={v}" for k, v in self._sizes().items())

    def _sizes(self) -> dict[str, int | str]:
        sizes = {"prompt": self.prompt, "new": self.new, "batch": self.batch}
        more = {"requests": self.requests, "context": self.context}
        return sizes | {name: value for name, value in more.items() if value is not None}


Model = str | os.PathLike[str] | OpGraph | Traceable
"""A model as every library call takes it: a path or spec, a graph, or a traced model."""


def spec_of(model: Model) -> str:
    """Path or spec of a model; empty for a graph or a traced model, which have none."""
    return os.fspath(model) if isinstance(model, str | os.PathLike) else ""


def is_onnx(spec: Model) -> bool:
    """True for an ONNX file, which ONNX Runtime can execute."""
    text = spec_of(spec)
    return text.startswith(ONNX_PREFIX) or text.endswith(".onnx")


def is_traced(spec: Model) -> bool:
    """True for code that is traced: a JAX function or a PyTorch module."""
    return spec_of(spec).startswith((PYTHON_PREFIX, HF_PREFIX))


def is_code(spec: Model) -> bool:
    """True for a spec that runs code of its author when it is loaded. All others name data: files
    that are parsed, and architectures of the installed transformers."""
    return spec_of(spec).startswith(PYTHON_PREFIX)


def is_gguf(spec: Model) -> bool:
    """True for a GGUF file of llama.cpp, with or without options."""
    return spec_of(spec).partition("?")[0].endswith(GGUF_SUFFIX)


def with_options(
    spec: str,
    *,
    task: str | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    quantize: str | None = None,
    decode: bool = False,
) -> str:
    """The spec of a model with options of `hf:` and .gguf models appended; raises `ArgumentError`
    for a model that has none.

    >>> with_options("hf:llama", task="causal-lm", sequence=512, decode=True)
    'hf:llama?task=causal-lm&sequence=512&decode'
    """
    settings = {"task": task, "batch": batch, "sequence": sequence, "quantize": quantize}
    parts = [f"{name}={value}" for name, value in settings.items() if value is not None]
    parts += ["decode"] * decode
    if not parts:
        return spec
    of_hf = (task, quantize) != (None, None)
    if not (spec.startswith(HF_PREFIX) or (is_gguf(spec) and not of_hf)):
        name = parts[0].partition("=")[0]
        kinds = "hf:CONFIG models" if of_hf else "hf:CONFIG and .gguf models"
        raise ArgumentError(f"--{name} is for {kinds}, not for {spec!r}")
    return spec + ("&" if "?" in spec else "?") + "&".join(parts)


def as_served(model: Model, at_once: int) -> Model:
    """A configuration of transformers as an engine computes it, so many tokens in one pass; other
    models, and one that says this itself, as they are.

    >>> as_served("hf:llama?prompt=64&new=8", 2048)
    'hf:llama?prompt=64&new=8&max_num_batched_tokens=2048'
    """
    spec = spec_of(model)
    if not spec.startswith(HF_PREFIX) or AT_ONCE in spec.partition("?")[2]:
        return model
    return spec + ("&" if "?" in spec else "?") + f"{AT_ONCE}={at_once}"


def asks_longest(model: Model) -> bool:
    """True for a request whose context shall be the longest that fits.

    >>> asks_longest(Generation("llama", prompt=8, new=4, context="max"))
    True
    """
    return f"context={LONGEST}" in spec_of(model).partition("?")[2].split("&")


def at_context(model: Model, tokens: int | None) -> Model:
    """A request with its context in tokens, None for that of its prompt and new tokens; other
    models are returned as they are.

    >>> at_context("hf:llama?prompt=8&new=4&context=max", 4096)
    'hf:llama?prompt=8&new=4&context=4096'
    """
    spec = spec_of(model)
    path, _, query = spec.partition("?")
    parts = [part for part in query.split("&") if part and not part.startswith("context=")]
    if not any(part.startswith("prompt=") for part in parts):
        return model
    return "?".join((path, "&".join([*parts, *([] if tokens is None else [f"context={tokens}"])])))


def load(
    spec: Model,
    dims: Mapping[str, int] | None = None,
    *,
    task: str | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    quantize: str | None = None,
    decode: bool = False,
    room_bytes: int | None = None,
) -> OpGraph:
    """The graph of a model.

    A model is an .onnx path, `onnx:NAME`, a graph file, `python:package.module:function`,
    `hf:PATH`, a configuration of transformers (see `gdp.importers.pytorch.huggingface`), or a .gguf
    path (see `gdp.importers.gguf`).

    A Python function is called without arguments, or with those behind a question mark
    (`python:package.module:function?layers=4`), and returns what to place, one of:

    - `(fn, args)`: the JAX function `fn(*args)`. Arguments are arrays or `jax.ShapeDtypeStruct`:
      nothing is computed. They are inputs that live on the host, but for those before the last
      that are trees of several arrays, such as parameters: these are weights.
    - `(fn, args, {"weight_argnums": 0})`: the arguments at these positions are weights, which stay
      on the devices whose ops read them. The other options of `gdp.trace` may stand there, too:
      `name`, `unroll_scan`, `trip_count`.
    - `(loss, (params, batch), {"optimizer": optax.sgd(0.1), "microbatches": 4})`: a training step
      of `loss(params, batch)`, as `trace_training_step` makes it.
    - `(module, inputs)` or `(module, inputs, options)`: a `torch.nn.Module` with example inputs,
      a tuple of positional ones or a mapping of named ones, which may lie on the meta device (a
      mapping of arguments of `forward` in place of options has named ones beside positional ones);
      options as `gdp.importers.pytorch.model.TorchModel` has them.
    - an `OpGraph`, which can be placed but not executed.

    Args:
        spec: a path or name as above, or a graph or traced model, whose graph is returned.
        dims: sizes of the symbolic dimensions of ONNX models, by name.
        task: of `hf:` models, such as "causal-lm"; by default that of the configuration.
        batch: samples, of `hf:` and .gguf models; by default 1.
        sequence: tokens, of `hf:` and .gguf models; with `decode` those in the cache. By default
            512, or the longest context of the model where that is less.
        quantize: scheme that weights are stored in instead of the configuration's, such as "nf4";
            "none" for none. `hf:` models.
        decode: one token with its cache instead of a prompt; `hf:` and .gguf models.
        room_bytes: memory that there is for weights; a configuration whose weights need more is
            refused before it is traced.

    Raises:
        ModelError: the model cannot be read or traced.
        ArgumentError: an option is given for a model that does not have it.
        InfeasibleError: its weights need more than `room_bytes`.

    Example:
        >>> import gdp
        >>> gdp.load("onnx:light_squeezenet").num_ops > 50
        True
    """
    named = os.fspath(spec) if isinstance(spec, str | os.PathLike) else ""
    text = with_options(
        named, task=task, batch=batch, sequence=sequence, quantize=quantize, decode=decode
    )
    if isinstance(spec, OpGraph):
        return spec
    if not isinstance(spec, str | os.PathLike):
        return _reported(_traced(spec, ""))
    spec = text
    if is_traced(text):
        trace = traced(text, room_bytes)
        return trace if isinstance(trace, OpGraph) else _reported(trace)
    if is_onnx(spec):
        from gdp.importers.onnx.model import load_onnx

        return load_onnx(text, dict(dims or {}))
    if is_gguf(text):
        from gdp.importers.gguf import load_gguf

        return load_gguf(text)
    if text.endswith(GRAPH_SUFFIXES):
        from gdp.graph.file import load_graph

        path = Path(text)
        if is_file(path) and path.stat().st_size and is_written_by_gdp(path, "placement"):
            raise ModelError(f"{text} is a placement; the model that it is of is wanted here")
        return load_graph(path)
    if not is_there(text):
        raise ModelError(
            f"no model {text!r}: give an .onnx path, onnx:NAME, a .gguf path, a graph file "
            f"({', '.join(GRAPH_SUFFIXES)}), python:package.module:function or hf:CONFIG"
        )
    # A file without a telling suffix: most exporters write ONNX.
    from gdp.importers.onnx.model import load_onnx

    return load_onnx(text, dict(dims or {}))


def python_function(spec: str) -> object:
    """Result of calling the function of `python:package.module:function`, with the keyword
    arguments behind `?` where there are some: `python:models:bert?layers=4&causal=true`."""
    path, _, query = spec.removeprefix(PYTHON_PREFIX).partition("?")
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
            f"{spec!r}: module {module_name!r} cannot be imported: {_said(error)}"
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
        raise ModelError(f"{spec!r}: the function raised {_said(error)}") from error


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
    """Raise `ModelError` for a keyword that the function does not take, where that can be told."""
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
    """The parameters without a default; none where that cannot be told."""
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


def _said(error: BaseException) -> str:
    """An exception of somebody else's code, with its kind: messages alone may be just a key."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def traced_model(spec: str) -> "JaxModel | TorchModel | OpGraph":
    """The JAX function or PyTorch module of a `python:` or `hf:` spec, ready to be traced or
    executed, or its graph."""
    if spec.startswith(HF_PREFIX):
        from gdp.importers.pytorch.huggingface import huggingface_model

        return huggingface_model(spec)
    returned = python_function(spec)
    if isinstance(returned, OpGraph):
        return returned
    if _holds_module(returned):
        from gdp.importers.pytorch.model import torch_model

        return torch_model(returned, spec)
    from gdp.importers.jax.trace import jax_model

    return jax_model(returned, spec)


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


def traced(spec: str, room_bytes: int | None = None) -> "Traced | OpGraph":
    """Trace of a `python:` or `hf:` model; those of `hf:` models are kept between processes."""
    if spec.startswith(HF_PREFIX):
        from gdp.importers.pytorch.huggingface import find_huggingface_trace, huggingface_model

        if (trace := find_huggingface_trace(spec)) is not None:
            return trace
        model = huggingface_model(spec, whole=False)
        if room_bytes is not None:
            model.require_room(room_bytes)
        return _traced(model, spec)
    model = traced_model(spec)
    return model if isinstance(model, OpGraph) else _traced(model, spec)


def _reported(trace: "Traced") -> OpGraph:
    from gdp.importers.program import report

    report(trace)
    return trace.graph


def _traced(model: object, spec: str) -> "Traced":
    if not isinstance(model, Traceable):
        raise ModelError(
            "a model is a path, onnx:NAME, python:package.module:function, hf:CONFIG, a graph "
            f"(gdp.load, gdp.trace) or a traced model, not of type {type(model).__name__}"
        )
    try:
        return model.trace()
    except ModelError as error:
        if not spec or spec in str(error):
            raise
        raise ModelError(f"{spec!r}: {error}") from error  # a graph knows its own name alone
    except GdpError:
        raise
    except Exception as error:
        raise ModelError(f"{spec or model.name!r} cannot be traced: {_said(error)}") from error


def source_files(spec: Model) -> list[Path]:
    """The files that a model is read from: with those of external weights, and the module of a
    `python:` model that is loaded. Those that cannot be told are left out."""
    text = spec_of(spec)
    if not text:
        return []
    if text.startswith(PYTHON_PREFIX):
        path = text.removeprefix(PYTHON_PREFIX).partition("?")[0]
        module = sys.modules.get(path.rpartition(":")[0])
        origin = getattr(module, "__file__", None)
        return [Path(origin)] if origin else []
    if text.startswith(HF_PREFIX):
        from gdp.importers.pytorch.huggingface import config_file

        return [config_file(text)]
    if text.endswith(GRAPH_SUFFIXES):
        return [Path(text)]
    if is_gguf(text):
        from gdp.importers.gguf import gguf_files

        return gguf_files(text)
    from gdp.importers.onnx.read import external_files, resolve_spec

    try:
        path = resolve_spec(text)
        return [path, *external_files(path)]
    except ModelError:
        return [Path(text)]


def with_dims(dims: Sequence[str]) -> Mapping[str, int]:
    """Dimension bindings from `NAME=VALUE` texts; raises `ValueError` on malformed ones.

    >>> with_dims(["batch=8"])
    {'batch': 8}
    """
    bound: dict[str, int] = {}
    for item in dims:
        name, separator, value = item.partition("=")
        size = whole_number(value)
        if not separator or size is None:
            raise ArgumentError(
                f"--dim {item!r} must look like NAME=VALUE with a positive whole number below 2**31"
            )
        bound[name] = size
    return bound


def inspect_model(model: str, dims: Sequence[str] = (), *, ops: bool = False) -> dict[str, Any]:
    """Counts, FLOPs and bytes by op type, and the estimates and assumptions of the import."""
    estimated: list[str] = []
    assumptions: list[str] = []
    parameters: int | None = None
    if is_onnx(model):
        from gdp.importers.onnx.model import load_onnx_model

        # An op that placing would refuse is listed here instead.
        imported = load_onnx_model(model, with_dims(dims), unknown="estimate")
        graph, assumptions = imported.graph, list(imported.assumptions)
        estimated = sorted({graph.op_types[graph.op_index[op]] for op in imported.estimated})
    elif is_traced(model) and not isinstance(trace := traced(model), OpGraph):
        graph, estimated = trace.graph, list(trace.estimated)
        assumptions, parameters = list(trace.assumptions), trace.parameters
    else:
        graph = load(model, with_dims(dims))
    about = summary(graph)
    about |= {"estimated": estimated, "assumptions": assumptions}
    if parameters is not None:
        about["parameters"] = parameters
    if ops:
        about["ops"] = [
            {
                "name": graph.op_names[i],
                "op_type": graph.op_types[i],
                "flop": float(graph.flop[i]),
                "memory_traffic_bytes": float(graph.memory_traffic_bytes[i]),
                "weight_bytes": int(graph.weight_bytes[i]),
                "scope": graph.scope[i],
            }
            for i in range(graph.num_ops)
        ]
    return about


def summary(graph: OpGraph) -> dict[str, Any]:
    """Totals of a graph and a row per op type, costliest first."""
    types = np.array(graph.op_types)
    counts = Counter(graph.op_types)
    first_of_weight = np.unique(graph.weight_id, return_index=True)[1]
    rows = [
        {
            "op_type": op_type,
            "count": count,
            "flop": float(graph.flop[types == op_type].sum()),
            "memory_traffic_bytes": float(graph.memory_traffic_bytes[types == op_type].sum()),
        }
        for op_type, count in counts.items()
    ]
    rows.sort(key=lambda row: (-row["flop"], -row["memory_traffic_bytes"], row["op_type"]))
    return {
        "name": graph.name,
        "num_ops": int((~graph.is_io).sum()),
        "num_tensors": graph.num_tensors,
        "flop": float(graph.flop.sum()),
        "memory_traffic_bytes": float(graph.memory_traffic_bytes.sum()),
        "weight_bytes": int(graph.weight_bytes[first_of_weight].sum()),
        "op_types": rows,
    }
