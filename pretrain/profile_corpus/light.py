"""The light models of the onnx package at other batch and image sizes."""

from pathlib import Path

import onnx
from onnx import numpy_helper

from gdp.importers.onnx.read import resolve_spec

# (name, family, batch, image size or None for the model's own)
LIGHT: tuple[tuple[str, str, int, int | None], ...] = (
    ("bvlc_alexnet", "alexnet", 1, None),
    ("bvlc_alexnet", "alexnet", 4, None),
    ("zfnet512", "zfnet", 1, None),
    ("zfnet512", "zfnet", 2, None),
    ("vgg19", "vgg", 1, None),
    ("vgg19", "vgg", 2, None),
    ("shufflenet", "shufflenet", 1, None),
    ("shufflenet", "shufflenet", 4, None),
    ("inception_v1", "inception", 1, None),
    ("inception_v1", "inception", 4, None),
    ("inception_v2", "inception", 1, None),
    ("inception_v2", "inception", 4, None),
    ("resnet50", "resnet", 1, None),
    ("resnet50", "resnet", 4, None),
    ("densenet121", "densenet", 1, None),
    ("densenet121", "densenet", 2, None),
    ("densenet121", "densenet", 1, 160),
    ("squeezenet", "squeezenet", 1, None),
    ("squeezenet", "squeezenet", 4, None),
    ("squeezenet", "squeezenet", 1, 320),
)


def build_light(name: str, batch: int, size: int | None, folder: Path) -> Path:
    """A light model with another input; reshapes to a fixed batch follow."""
    path = folder / f"{name}-b{batch}{'' if size is None else f'-i{size}'}.onnx"
    if path.exists():
        return path
    model = onnx.load(resolve_spec(f"onnx:light_{name}"))
    graph = model.graph
    held = {i.name for i in graph.initializer}
    for value in graph.input:
        if value.name not in held:
            dims = value.type.tensor_type.shape.dim
            dims[0].dim_value = batch
            if size is not None:
                dims[2].dim_value = dims[3].dim_value = size
    shapes = {n.input[1] for n in graph.node if n.op_type == "Reshape"}
    for tensor in graph.initializer:
        if tensor.name in shapes:
            values = numpy_helper.to_array(tensor).copy()
            if values[0] == 1 and batch != 1:
                values[0] = batch
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    del graph.value_info[:]
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path
