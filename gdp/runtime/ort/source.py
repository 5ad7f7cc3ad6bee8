"""Models as they are executed: the same nodes under the same names as in the imported graph."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from gdp.runtime.ort.weights import (
    external_locations,
    randomise_weights,
    require_weights,
    with_weights,
)


@dataclass(frozen=True)
class Source:
    """A model to execute: functions inlined, a unique name on every node."""

    model: onnx.ModelProto
    folder: Path  # what the files of external weights are relative to
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)  # handed over in memory
    # Products with quantised weights take floats as they are, where the runtime would round them
    # to 8 bits in some pieces and not in others.
    exact: bool = False


def load_source(spec: str | os.PathLike[str], dims: Mapping[str, int] | None = None) -> Source:
    """The model of an .onnx path or `onnx:NAME`, prepared as the graph of `load_onnx` describes it.

    Raises `ModelError` when it cannot be read, or as `require_weights` does.
    """
    import onnx_ir as ir

    from gdp.importers.onnx.model import prepare, resolve_spec

    path = resolve_spec(spec)
    model = ir.to_proto(prepare(spec, dims))
    require_weights(path, external_locations(model))
    _drop_unread_inputs(model)
    return Source(model, path.parent)


def randomised(source: Source, seed: int) -> Source:
    """The source with seeded random weights if it carries none; see `randomise_weights`."""
    weights = randomise_weights(source.model, seed)
    if not weights:
        return source
    return Source(with_weights(source.model, weights), source.folder, weights)


def _drop_unread_inputs(model: onnx.ModelProto) -> None:
    """Folding leaves inputs that no node reads; a session would ask for them."""
    from gdp.exporters.ort_cut import values_read

    graph = model.graph
    read = {name for node in graph.node for name in values_read(node)}
    read |= {value.name for value in graph.output}
    kept = [value for value in graph.input if value.name in read]
    del graph.input[:]
    graph.input.extend(kept)
