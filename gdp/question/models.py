"""Models by path or name, as graphs, and their contents for `gdp inspect`."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdp.base.errors import ArgumentError, ModelError
from gdp.base.units import whole_number
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import LONGEST, ModelSpec
from gdp.importers.table import HF_PREFIX, IMPORTERS, PYTHON_PREFIX, LoadOptions, importer_of
from gdp.importers.traceable import Traceable, reported, trace_of

if TYPE_CHECKING:
    from gdp.importers.jax.trace import JaxModel
    from gdp.importers.pytorch.model import TorchModel


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
        spec = ModelSpec.of(self.model)
        if not (is_gguf(spec) or spec.path.startswith(HF_PREFIX)):
            spec = replace(spec, path=HF_PREFIX + spec.path)
        return str(spec.having(**self._sizes()))

    def _sizes(self) -> dict[str, int | str]:
        sizes = {"prompt": self.prompt, "new": self.new, "batch": self.batch}
        more = {"requests": self.requests, "context": self.context}
        return sizes | {name: value for name, value in more.items() if value is not None}


Model = str | os.PathLike[str] | OpGraph | Traceable
"""A model as every library call takes it: a path or spec, a graph, or a traced model."""


def spec_of(model: object) -> str:
    """Path or spec of a model; empty for a graph or a traced model, which have none."""
    return os.fspath(model) if isinstance(model, str | os.PathLike) else ""


def is_onnx(spec: Model) -> bool:
    """True for an ONNX file, which ONNX Runtime can execute."""
    return importer_of(spec_of(spec)).name == "onnx"


def is_traced(spec: Model) -> bool:
    """True for code that is traced: a JAX function or a PyTorch module."""
    return importer_of(spec_of(spec)).name in ("python", "hf")


def is_code(spec: Model) -> bool:
    """True for a spec that runs code of its author when it is loaded. All others name data: files
    that are parsed, and architectures of the installed transformers."""
    return spec_of(spec).startswith(PYTHON_PREFIX)


def is_gguf(spec: Model) -> bool:
    """True for a GGUF file of llama.cpp, with or without options."""
    return importer_of(spec_of(spec)).name == "gguf"


def with_options(
    model: str | os.PathLike[str], **options: str | int | bool | None
) -> str | os.PathLike[str]:
    """A model with options of `hf:` and .gguf models; raises `ArgumentError` for a model that has
    none.

    >>> str(with_options("hf:llama", task="causal-lm", sequence=512, decode=True))
    'hf:llama?task=causal-lm&sequence=512&decode'
    """
    given = {k: v for k, v in options.items() if v is not None and v is not False}
    if not given.keys() <= importer_of(spec_of(model)).options:
        forms = " and ".join(row.form for row in IMPORTERS if given.keys() <= row.options)
        raise ArgumentError(
            f"--{next(iter(given))} is for {forms} models, not for {spec_of(model)!r}"
        )
    return ModelSpec.of(model).having(**given) if given else model


def with_draft(model: Model, file: str | os.PathLike[str], tokens: int, acceptance: float) -> str:
    """The spec of a .gguf model with another one that drafts so many tokens a pass; raises
    `ArgumentError` where one of them is none.

    >>> with_draft("m.gguf?cache=q8_0", "small.gguf", 4, 0.7)
    'm.gguf?cache=q8_0&draft=small.gguf&drafts=4&acceptance=0.7'
    """
    for each in (model, file):
        if not is_gguf(each):
            raise ArgumentError(
                f"llama.cpp drafts with one .gguf file for another one, and {spec_of(each)!r} is "
                "none"
            )
    drafts = {"draft": os.fspath(file), "drafts": tokens, "acceptance": f"{acceptance:g}"}
    return str(ModelSpec.of(model).having(**drafts))


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
    `hf:PATH`, a configuration of transformers (see `gdp.importers.huggingface.model`), or a .gguf
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
    given = {
        "task": task, "batch": batch, "sequence": sequence, "quantize": quantize, "decode": decode
    }  # fmt: skip
    text = spec_of(with_options(spec_of(spec), **given))
    if isinstance(spec, OpGraph):
        return spec
    if not isinstance(spec, str | os.PathLike):
        return reported(trace_of(spec, ""))
    return importer_of(text).load(text, LoadOptions(dims or {}, room_bytes))


def traced_model(spec: str) -> "str | JaxModel | TorchModel | OpGraph":
    """The JAX function or PyTorch module of a `python:` or `hf:` spec, ready to be traced or
    executed, or its graph; the spec of an ONNX or GGUF file. Raises `ModelError` for others."""
    executable = importer_of(spec).executable
    if executable is None:
        raise ModelError(f"{spec!r} holds a graph only, which cannot be executed")
    return executable(spec)


def source_files(spec: Model) -> list[Path]:
    """Files that a model is read from, including external weights and the module of a loaded
    `python:` model; unknown ones are left out."""
    text = spec_of(spec)
    if ModelSpec.of(text).options.get("context") == LONGEST:  # whatever it is: no file
        text = str(ModelSpec.of(text).having(context=None))
    return importer_of(text).files(text) if text else []


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
    imported = importer_of(model).inspect(model, LoadOptions(with_dims(dims)))
    graph = imported.graph
    about = summary(graph)
    about |= {"estimated": list(imported.estimated), "assumptions": list(imported.assumptions)}
    if imported.parameters is not None:
        about["parameters"] = imported.parameters
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
        "weight_bytes": int(graph.weight_bytes[graph.weight_holders()].sum()),
        "op_types": rows,
    }
