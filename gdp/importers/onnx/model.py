"""ONNX models as graphs: by shapes alone, so that no weight needs to be there.

The steps, one module each: `spec` (the file), `read` (file to onnx_ir, weights left on disk by
`strip`, fields checked by `validate`), `normalise` (functions inlined, nodes named), `shapes`
(every shape and small constant), `graph` (constants taken out, then FLOPs, bytes and edges).
"""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gdp.base.errors import ModelError
from gdp.base.files.writing import storable
from gdp.graph.op_graph import OpGraph

if TYPE_CHECKING:
    from onnx_ir import Model
else:
    Model = object  # onnx_ir takes a second to import, so the name stands for anything until then

logger = logging.getLogger(__name__)

TOO_DEEP = "its subgraphs or functions are nested too deeply; export it with fewer of them"


@dataclass(frozen=True, eq=False)
class ImportedOnnx:
    """A model as a graph, and the prepared model that the graph describes.

    `graph.op_names[i]` is the name of node `node_of_op[i]` of `model.graph`; graph inputs and
    outputs are ops named "input:NAME" and "output:NAME" and have no node. The other nodes of
    `model.graph`, `weight_nodes`, only compute weights from stored data: whoever cuts the model
    gives each part its own copy of those it reads, as `onnx_ir.convenience.extract` does.
    """

    graph: OpGraph
    model: Model
    node_of_op: tuple[int | None, ...]
    weight_nodes: tuple[str, ...]
    estimated: tuple[str, ...]  # ops costed without a formula: one FLOP per output element
    assumptions: tuple[str, ...]  # trip counts, branches and shapes that the model leaves open


def load_onnx(
    spec: str | os.PathLike[str],
    dims: Mapping[str, int] | None = None,
    *,
    trips: int | None = None,
    unknown: Literal["error", "estimate"] = "error",
) -> OpGraph:
    """The graph of an .onnx file or `onnx:NAME`; see `load_onnx_model`."""
    return load_onnx_model(spec, dims, trips=trips, unknown=unknown).graph


def load_onnx_model(
    spec: str | os.PathLike[str],
    dims: Mapping[str, int] | None = None,
    *,
    weights: bool = False,
    trips: int | None = None,
    unknown: Literal["error", "estimate"] = "error",
) -> ImportedOnnx:
    """A model with its graph.

    Args:
        spec: an .onnx path, or `onnx:NAME` for a model inside the onnx package.
        dims: sizes of open dimensions, by symbol ("batch"), or by "TENSOR:AXIS" where they have
            none.
        weights: the model keeps the weights that are inside the file, so that it can be run.
            External data stays a reference to its file either way, and the graph is the same.
        trips: trip count of loops whose own depends on data; without it, one is assumed.
        unknown: "estimate" to estimate the costs of operators of unknown domains.

    Returns:
        The graph, the prepared model, and lists of estimates and assumptions.

    Raises:
        ModelError: one line that says what is wrong with the model.
    """
    from gdp.importers.onnx.graph import Roles, annotate, build_graph, fold
    from gdp.importers.onnx.normalise import normalise
    from gdp.importers.onnx.read import read_model
    from gdp.importers.onnx.shapes import Facts, ImportOptions
    from gdp.importers.onnx.spec import resolve_spec

    path = resolve_spec(spec)
    try:
        model = read_model(path, weights=weights)
        normalise(model, str(path))
    except RecursionError:
        raise ModelError(f"{path}: {TOO_DEEP}") from None
    try:
        facts = Facts(model, ImportOptions(dict(dims or {}), trips, unknown))
        facts.infer()
        fold(facts)
        annotate(facts)
        roles = Roles(facts)
        graph, node_of_op, estimated = build_graph(
            model_name(spec, path, model.graph.name or ""), roles
        )
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except RecursionError:
        raise ModelError(f"{path}: {TOO_DEEP}") from None
    if estimated:
        logger.warning(
            "%s: %d ops have no cost formula, first %r; one FLOP per output element is assumed",
            path, len(estimated), estimated[0],
        )  # fmt: skip
    return ImportedOnnx(
        graph, model, tuple(node_of_op),
        weight_nodes=tuple(node.name or "" for node in model.graph if node in roles.weight_nodes),
        estimated=tuple(estimated), assumptions=tuple(facts.assumptions),
    )  # fmt: skip


_SAYS_NOTHING = re.compile(
    # No word is made of others, so that a long name is matched in one pass.
    r".{0,2}|(main|sub|torch|tf|onnx|jax|keras|mlir|paddle|mxnet|converted|exported|optimized|my|"
    r"default|inference|jit|export|to|script|[-_\s\d]|graph|model|module|function|net|network|"
    r"quantized)+|[0-9a-f-]{16,}",
    re.IGNORECASE,
)
"""Of names of graphs: what exporters write for any model ("main_graph", "torch_jit",
"torch-jit-export"), single letters, and identifiers of nobody's choice."""


def model_name(spec: str | os.PathLike[str], path: Path, graph_name: str) -> str:
    """Name of a model: that of the graph in the file if it is distinctive, else the file's; of
    `onnx:NAME`, the name.

    >>> model_name("out/model.onnx", Path("out/model.onnx"), "resnet50")
    'resnet50'
    >>> model_name("out/model.onnx", Path("out/model.onnx"), "main_graph")
    'model'
    """
    if str(spec).startswith("onnx:"):
        return path.parent.name if path.stem == "model" else path.stem
    own = graph_name.strip()
    return storable(path.stem) if _SAYS_NOTHING.fullmatch(own) else own


def prepare(spec: str | os.PathLike[str], dims: Mapping[str, int] | None = None) -> Model:
    """The model that the graph of `load_onnx` describes, weights included, ready to be cut.

    Functions are inlined, nodes named as the graph's ops, open dimensions bound, shape arithmetic
    folded into initialisers, and every value carries its shape.
    """
    return load_onnx_model(spec, dims, weights=True).model
