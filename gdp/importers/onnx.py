"""ONNX models as graphs: by shapes alone, so that no weight needs to be there.

The steps, one module each: `onnx_read` (file to onnx_ir, weights left on disk), `onnx_normalise`
(functions inlined, nodes named), `onnx_shapes` (every shape and small constant), `onnx_fold`
(constants taken out), `onnx_graph` (FLOPs, bytes and edges).
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gdp.errors import ModelError
from gdp.graph import INPUT, OUTPUT, OpGraph
from gdp.importers.onnx_inspect import Inspection, TensorInfo, op_type_infos

if TYPE_CHECKING:
    from onnx_ir import Model

    from gdp.importers.onnx_fold import Roles
    from gdp.importers.onnx_graph import GraphLists
    from gdp.importers.onnx_shapes import Facts
else:
    # onnx_ir takes a second to import, so these names stand for anything until it is needed.
    Model = Roles = GraphLists = Facts = object

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
    inspection: Inspection


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
    """A model with its graph. Raises `ModelError` with one line that says what is wrong.

    `dims` gives sizes to open dimensions, by their symbol ("batch"), or as "TENSOR:AXIS" where they
    have none. `trips` is the trip count of loops whose own depends on data; without it, one is
    assumed. Operators of unknown domains are refused unless `unknown` is "estimate". Both kinds of
    assumption are listed in `inspection`. With `weights`, the model keeps the weights that are
    inside the file, so that it can be run; external data stays a reference to its file either way.
    The graph is the same.
    """
    from gdp.importers.onnx_fold import Roles, annotate, fold
    from gdp.importers.onnx_graph import build
    from gdp.importers.onnx_normalise import normalise
    from gdp.importers.onnx_read import read_model, resolve_spec
    from gdp.importers.onnx_shapes import Facts, ImportOptions

    path = resolve_spec(spec)
    options = ImportOptions(dict(dims or {}), trips, unknown)
    try:
        model = read_model(path, weights=weights)
        normalise(model, str(path))
    except RecursionError:
        raise ModelError(f"{path}: {TOO_DEEP}") from None
    try:
        facts = Facts(model, options)
        facts.infer()
        dropped = fold(facts)
        annotate(facts)
        roles = Roles(facts)
        graph, lists = build(path.parent.name if path.stem == "model" else path.stem, roles)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except RecursionError:
        raise ModelError(f"{path}: {TOO_DEEP}") from None
    if lists.estimated:
        logger.warning(
            "%s: %d ops have no cost formula, first %r; one FLOP per output element is assumed",
            path, len(lists.estimated), lists.estimated[0],
        )  # fmt: skip
    return ImportedOnnx(
        graph=graph,
        model=model,
        node_of_op=tuple(lists.node),
        weight_nodes=tuple(node.name or "" for node in model.graph if node in roles.weight_nodes),
        inspection=_inspection(path, graph, lists, roles, dropped),
    )


def prepare(spec: str | os.PathLike[str], dims: Mapping[str, int] | None = None) -> Model:
    """The model that the graph of `load_onnx` describes, weights included, ready to be cut.

    Functions are inlined, nodes named as the graph's ops, open dimensions bound, shape arithmetic
    folded into initialisers, and every value carries its shape.
    """
    return load_onnx_model(spec, dims, weights=True).model


def inspect_onnx(
    spec: str | os.PathLike[str],
    dims: Mapping[str, int] | None = None,
    *,
    trips: int | None = None,
    unknown: Literal["error", "estimate"] = "estimate",
) -> Inspection:
    """What a model is made of, operators that gdp does not know included."""
    return load_onnx_model(spec, dims, trips=trips, unknown=unknown).inspection


def resolve_spec(spec: str | os.PathLike[str]) -> Path:
    """The file of an .onnx path or of `onnx:NAME`, a model inside the installed onnx package."""
    from gdp.importers.onnx_read import resolve_spec as resolve

    return resolve(spec)


def _inspection(
    path: Path, graph: OpGraph, lists: GraphLists, roles: Roles, dropped: int
) -> Inspection:
    facts, model = roles.facts, roles.facts.model
    ops = [op for op in range(graph.num_ops) if not graph.is_io[op]]
    estimated = set(lists.estimated)
    once: set[int] = set()
    weight_bytes = [0] * graph.num_ops
    for op in ops:
        if graph.weight_id[op] not in once:
            once.add(int(graph.weight_id[op]))
            weight_bytes[op] = int(graph.weight_bytes[op])
    rows = op_type_infos(
        [graph.op_types[op] for op in ops],
        [float(graph.flop[op]) for op in ops],
        [float(graph.memory_traffic_bytes[op]) for op in ops],
        [weight_bytes[op] for op in ops],
        [graph.op_names[op] in estimated for op in ops],
    )
    return Inspection(
        name=graph.name,
        path=str(path),
        producer=" ".join(t for t in (model.producer_name, model.producer_version) if t),
        ir_version=model.ir_version,
        opsets=dict(model.opset_imports),
        dims=dict(facts.options.dims),
        inputs=_infos(graph, INPUT),
        outputs=_infos(graph, OUTPUT),
        ops=len(ops),
        tensors=graph.num_tensors,
        parameters=roles.parameters(),
        weight_bytes=sum(weight_bytes),
        activation_bytes=int(graph.tensor_bytes.sum()),
        flop=float(graph.flop.sum()),
        memory_traffic_bytes=float(graph.memory_traffic_bytes.sum()),
        op_types=rows,
        estimated_ops=list(lists.estimated),
        assumptions=list(facts.assumptions),
        weight_nodes=len(roles.weight_nodes),
        dropped_nodes=dropped,
    )


def _infos(graph: OpGraph, kind: str) -> list[TensorInfo]:
    infos: list[TensorInfo] = []
    for name, op_type, detail in zip(graph.op_names, graph.op_types, graph.detail, strict=True):
        if op_type == kind:
            shapes = detail.output_shapes if kind == INPUT else detail.input_shapes
            infos.append(
                TensorInfo(name.partition(":")[2], detail.dtype, list(shapes[0]) if shapes else [])
            )
    return infos
