"""Cut of an ONNX model into one sub-model per segment, which together compute the same outputs.

Nodes without an op in the graph (constants, and values computed from them alone) are copied into
every segment that reads them: they are cheap, and a runtime folds them when it loads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from jaxtyping import Int

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OpGraph
from gdp.targets.onnx_inputs import values_read

MIN_IR_VERSION = 4
"""From IR 4 on an initialiser need not be an input as well."""


@dataclass(frozen=True)
class SubModel:
    """One segment as an ONNX model."""

    segment: int
    model: onnx.ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """The pieces in an executable order, and the inputs and outputs of the whole."""

    pieces: tuple[SubModel, ...]
    inputs: tuple[str, ...]  # graph inputs that a piece reads, in the model's order
    outputs: tuple[str, ...]  # of the model, in its order

    @property
    def crossing(self) -> tuple[str, ...]:
        """The tensors that one piece hands to another, in order of production."""
        read = {name for piece in self.pieces for name in piece.inputs}
        return tuple(name for piece in self.pieces for name in piece.outputs if name in read)

    def maker(self) -> dict[str, int]:
        """The position of the piece that makes each tensor that leaves a piece."""
        return {name: i for i, piece in enumerate(self.pieces) for name in piece.outputs}


def cut_model(model: onnx.ModelProto, graph: OpGraph, segment: Int[np.ndarray, "N"]) -> Cut:
    """The model as one piece per segment; `segment` holds ids in topological order.

    Raises `ModelError` when the graph is not of this model, or a tensor that crosses a cut is not
    an ordinary tensor.
    """
    index = _Index(model, graph)
    contents = _contents(index, graph, segment)
    outputs = [value.name for value in model.graph.output]
    if not contents:
        raise ModelError(f"model {graph.name!r} has no op to execute, only inputs and outputs")
    # A model output that only constants feed belongs to no op: the first segment makes it.
    for name in outputs:
        if name not in index.maker_op and name not in index.graph_inputs:
            index.add_value(name, contents[0])
            contents[0].makes[name] = None  # a stored weight has no node to make it
    maker_of = {name: c.segment for c in contents for name in c.makes}
    wanted = set(outputs)
    for content in contents:
        for name in content.reads:
            if name in maker_of and maker_of[name] >= content.segment:
                raise ModelError(
                    f"model {graph.name!r}: tensor {name!r} is read by a segment that runs before "
                    "the one that makes it; place its ops on one device"
                )
            wanted.add(name)
    leaving = [tuple(n for n in c.makes if n in wanted) for c in contents]
    types = value_types(model, {n for c in contents for n in c.reads}.union(*leaving))
    pieces = tuple(
        _piece(index, content, names, types)
        for content, names in zip(contents, leaving, strict=True)
    )
    read = {name for piece in pieces for name in piece.inputs} | set(outputs)
    return Cut(pieces, tuple(n for n in index.graph_inputs if n in read), tuple(outputs))


def value_types(model: onnx.ModelProto, names: Iterable[str]) -> dict[str, onnx.ValueInfoProto]:
    """The type of each named value, inferred where the model does not declare it."""
    graph = model.graph
    declared = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
    typed = {n: v for n, v in declared.items() if v.type.WhichOneof("value")}
    types = {n: typed[n] for n in names if n in typed}
    unknown = sorted(set(names) - set(types))
    if unknown:
        inferred = onnx.shape_inference.infer_shapes(model).graph
        known = {v.name: v for v in (*inferred.value_info, *inferred.output)}
        types |= {n: known.get(n, onnx.ValueInfoProto(name=n)) for n in unknown}
    for name, value in types.items():
        if value.type.WhichOneof("value") != "tensor_type":
            kind = value.type.WhichOneof("value") or "value of unknown type"
            raise ModelError(
                f"{name!r} is a {kind}, which cannot cross between sessions; "
                "keep the ops that make and read it on one device"
            )
    return types


class _Content:
    """Contents of one segment: node positions and value names."""

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self.ops: list[str] = []
        self.nodes: set[int] = set()
        self.makes: dict[str, None] = {}  # ordered
        self.reads: dict[str, None] = {}
        self.initializers: dict[str, None] = {}


class _Index:
    """A model by name."""

    def __init__(self, model: onnx.ModelProto, graph: OpGraph) -> None:
        self.model = model
        proto = model.graph
        self.node_of_op = {node.name: i for i, node in enumerate(proto.node)}
        works = {name for name, io in zip(graph.op_names, graph.is_io, strict=True) if not io}
        missing = works - set(self.node_of_op)
        if missing:
            raise ModelError(
                f"{len(missing)} ops of graph {graph.name!r} are no nodes of the model, first "
                f"{min(missing)!r}; import the graph from this model"
            )
        self.initializer = {i.name: i for i in proto.initializer}
        self.sparse = {i.values.name: i for i in proto.sparse_initializer}
        held = self.initializer.keys() | self.sparse.keys()
        # Up to IR 3 weights are inputs as well; later such an input is a default. Both are weights.
        self.graph_inputs = [v.name for v in proto.input if v.name not in held]
        self.value_info = {v.name: v for v in proto.value_info}
        self.maker = {name: i for i, n in enumerate(proto.node) for name in n.output if name}
        self.maker_op = {k: i for k, i in self.maker.items() if proto.node[i].name in works}
        self.inputs = set(self.graph_inputs)

    def add_node(self, position: int, content: _Content) -> None:
        """Put a node in a segment, with the constants it reads."""
        content.nodes.add(position)
        node = self.model.graph.node[position]
        content.makes |= {name: None for name in node.output if name}
        for name in values_read(node):
            self.add_value(name, content)

    def add_value(self, name: str, content: _Content) -> None:
        """Make a value available in a segment: as an input, or by copying a constant."""
        if name in self.initializer or name in self.sparse:
            content.initializers[name] = None
        elif name in self.maker_op or name in self.inputs:
            content.reads[name] = None
        elif name not in self.maker:
            raise ModelError(f"no node, input or initializer makes value {name!r}")
        elif self.maker[name] not in content.nodes:
            self.add_node(self.maker[name], content)


def _contents(index: _Index, graph: OpGraph, segment: Int[np.ndarray, "N"]) -> list[_Content]:
    by_segment: dict[int, _Content] = {}
    for op in np.argsort(segment, kind="stable").tolist():
        if not graph.is_io[op]:
            content = by_segment.setdefault(int(segment[op]), _Content(int(segment[op])))
            content.ops.append(graph.op_names[op])
            index.add_node(index.node_of_op[graph.op_names[op]], content)
    for content in by_segment.values():
        content.reads = {n: None for n in content.reads if n not in content.makes}
    return list(by_segment.values())


def _piece(
    index: _Index,
    content: _Content,
    leaving: tuple[str, ...],
    types: Mapping[str, onnx.ValueInfoProto],
) -> SubModel:
    source = index.model
    model = onnx.ModelProto(
        ir_version=max(source.ir_version, MIN_IR_VERSION),
        opset_import=source.opset_import,
        functions=source.functions,
        producer_name="gdp",
    )
    graph = model.graph
    graph.name = f"segment_{content.segment}"
    for position in sorted(content.nodes):
        node = graph.node.add()
        node.CopyFrom(source.graph.node[position])
        # Exporters leave stack traces here, with the paths of whoever exported the model.
        del node.metadata_props[:]
        node.doc_string = ""
    for name in content.initializers:
        if name in index.sparse:
            graph.sparse_initializer.add().CopyFrom(index.sparse[name])
        else:
            graph.initializer.add().CopyFrom(index.initializer[name])
    reads = tuple(content.reads)
    graph.input.extend(types[name] for name in reads)
    graph.output.extend(types[name] for name in leaving)
    inner = [n for n in content.makes if n in index.value_info and n not in leaving]
    graph.value_info.extend(index.value_info[name] for name in inner)
    return SubModel(content.segment, model, reads, leaving, tuple(content.ops))
