"""Table of importers: adding one is a file and a row here.

A spec belongs to the first row that matches it. Rows import what they need when they are used, so
that `gdp --help` is quick.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from gdp.base.errors import ModelError
from gdp.base.files.reading import is_file, is_there
from gdp.base.files.writing import is_written_by_gdp
from gdp.base.rows import imported, later
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import HF_PREFIX as HF_PREFIX
from gdp.importers.spec import ModelSpec
from gdp.importers.traceable import reported, trace_of

if TYPE_CHECKING:
    from gdp.importers.jax.trace import JaxModel
    from gdp.importers.program import Traced
    from gdp.importers.pytorch.model import TorchModel

ONNX_PREFIX, PYTHON_PREFIX, DIFFUSERS_PREFIX = "onnx:", "python:", "diffusers:"
GGUF_SUFFIX = ".gguf"
GRAPH_SUFFIXES = (".json", ".json.gz", ".gdpgraph")


class LoadOptions(NamedTuple):
    """Options of one import, each of which only some importers have."""

    dims: Mapping[str, int] = {}  # sizes of symbolic dimensions, by name
    room_bytes: int | None = None  # memory for weights; models that need more are refused


@dataclass(frozen=True)
class Importer:
    """One kind of models."""

    name: str
    form: str  # its specs, in messages
    matches: Callable[[str], bool]
    load: Callable[[str, LoadOptions], OpGraph]
    files: Callable[[str], list[Path]]  # that a model is read from, as far as they can be told
    # The graph with its estimates and assumptions; None where an import makes none.
    trace: "Callable[[str, LoadOptions], Traced] | None" = None
    # The object that runtimes execute, or a graph; None where there are graphs alone.
    executable: "Callable[[str], str | JaxModel | TorchModel | OpGraph] | None" = None
    executables: tuple[Literal["onnx", "gguf", "jax", "torch"], ...] = ()  # kinds of these
    options: frozenset[str] = field(default_factory=frozenset)  # behind a question mark

    def inspect(self, spec: str, options: LoadOptions) -> "Traced":
        """The graph of a model with its estimates and assumptions."""
        from gdp.importers.program import Traced

        if self.trace is not None:
            return self.trace(spec, options)
        return Traced(self.load(spec, options), (), ())


_python: "Callable[[str], JaxModel | TorchModel | OpGraph]"
_python = later("gdp.importers.python:python_model")


def _load_python(spec: str, options: LoadOptions) -> OpGraph:
    del options
    model = _python(spec)
    return model if isinstance(model, OpGraph) else reported(trace_of(model, spec))


def _trace_python(spec: str, options: LoadOptions) -> "Traced":
    from gdp.importers.program import Traced

    del options
    model = _python(spec)
    return Traced(model, (), ()) if isinstance(model, OpGraph) else trace_of(model, spec)


def _trace_huggingface(spec: str, options: LoadOptions) -> "Traced":
    from gdp.importers.huggingface.model import find_huggingface_trace, huggingface_model

    if (trace := find_huggingface_trace(spec)) is not None:
        return trace
    model = huggingface_model(spec, whole=False)
    if options.room_bytes is not None:
        model.require_room(options.room_bytes)
    return trace_of(model, spec)


def _refuse_pipeline(spec: str, options: LoadOptions) -> OpGraph:
    raise ModelError(
        f"{spec!r} is a pipeline of diffusers: ask what it makes with --image or --video"
    )


def _load_onnx(spec: str, options: LoadOptions) -> OpGraph:
    return imported("gdp.importers.onnx.model:load_onnx")(spec, options.dims)


def _trace_onnx(spec: str, options: LoadOptions) -> "Traced":
    from gdp.importers.onnx.model import load_onnx_model
    from gdp.importers.program import Traced

    # An op that placing would refuse is listed here instead.
    imported = load_onnx_model(spec, options.dims, unknown="estimate")
    graph = imported.graph
    estimated = sorted({graph.op_types[graph.op_index[op]] for op in imported.estimated})
    return Traced(graph, tuple(estimated), imported.assumptions)


def _onnx_files(spec: str) -> list[Path]:
    from gdp.importers.onnx.spec import external_files, resolve_spec

    try:
        path = resolve_spec(spec)
    except ModelError:
        return [Path(spec)]
    return [path, *external_files(path)]


def _load_graph(spec: str, options: LoadOptions) -> OpGraph:
    from gdp.graph.file import load_graph

    del options
    path = Path(spec)
    if is_file(path) and path.stat().st_size and is_written_by_gdp(path, "placement"):
        raise ModelError(f"{spec} is a placement; the model that it is of is wanted here")
    return load_graph(path)


def _load_file(spec: str, options: LoadOptions) -> OpGraph:
    """A file without a telling suffix: most exporters write ONNX."""
    if not is_there(spec):
        raise ModelError(
            f"no model {spec!r}: give an .onnx path, onnx:NAME, a .gguf path, a graph file "
            f"({', '.join(GRAPH_SUFFIXES)}), python:package.module:function or hf:CONFIG"
        )
    return _load_onnx(spec, options)


IMPORTERS = (
    Importer("python", "python:package.module:function", lambda s: s.startswith(PYTHON_PREFIX),
             _load_python, later("gdp.importers.python:python_files"), _trace_python, _python,
             ("jax", "torch")),
    Importer("hf", "hf:CONFIG", lambda s: s.startswith(HF_PREFIX),
             lambda spec, options: reported(_trace_huggingface(spec, options)),
             lambda s: [imported("gdp.importers.huggingface.spec:config_file")(s)],
             _trace_huggingface, later("gdp.importers.huggingface.model:huggingface_model"),
             ("torch",),
             frozenset(("task", "batch", "sequence", "quantize", "decode"))),
    Importer("diffusers", "diffusers:NAME", lambda s: s.startswith(DIFFUSERS_PREFIX),
             _refuse_pipeline, later("gdp.importers.diffusers.spec:pipeline_files")),
    Importer("onnx", ".onnx", lambda s: s.startswith(ONNX_PREFIX) or s.endswith(".onnx"),
             _load_onnx, _onnx_files, _trace_onnx, str, ("onnx",)),
    Importer("gguf", ".gguf", lambda s: ModelSpec.of(s).path.endswith(GGUF_SUFFIX),
             lambda spec, options: imported("gdp.importers.gguf:load_gguf")(spec),
             later("gdp.importers.gguf:gguf_files"), None, str, ("gguf",),
             frozenset(("batch", "sequence", "decode", "mmproj", "image"))),
    Importer("graph", GRAPH_SUFFIXES[0], lambda s: s.endswith(GRAPH_SUFFIXES), _load_graph,
             lambda s: [Path(s)]),
    Importer("file", "a file", lambda _: True, _load_file, _onnx_files),
)  # fmt: skip


def importer_of(spec: str) -> Importer:
    """The row of a path or spec.

    >>> importer_of("onnx:light_squeezenet").name, importer_of("model.gguf?decode").name
    ('onnx', 'gguf')
    """
    return next(row for row in IMPORTERS if row.matches(spec))
