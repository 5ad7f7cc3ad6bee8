"""Runs the uncut model for reference."""

from collections.abc import Sequence
from typing import Any

import onnx

from gdp.errors import ModelError
from gdp.runtime.compare import Arrays
from gdp.runtime.ort.sessions import make_session
from gdp.runtime.ort.source import Source
from gdp.runtime.ort.values import from_array


def reference_values(
    source: Source, names: Sequence[str], feeds: Sequence[Arrays]
) -> list[dict[str, Any]]:
    """Of each feed, the named tensors of the uncut model as OrtValues.

    Raises `ModelError` when the model cannot run on the feeds.
    """
    model = onnx.ModelProto()
    model.CopyFrom(source.model)
    outputs = {value.name for value in model.graph.output}
    model.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in names if name not in outputs
    )
    session = make_session(model, source)
    wanted = {value.name for value in session.get_inputs()}
    found = []
    for feed in feeds:
        values = {name: from_array(array) for name, array in feed.items() if name in wanted}
        try:
            made = session.run_with_ort_values(list(names), values)
        except Exception as error:  # onnxruntime raises classes of its own, most undocumented
            reason = " ".join(str(error).split())
            raise ModelError(
                f"model {source.model.graph.name!r} does not run, uncut, on inputs that are made "
                f"up (integers 0 and 1, normal floats): {reason}"
            ) from None
        found.append(dict(zip(names, made, strict=True)))
    return found
