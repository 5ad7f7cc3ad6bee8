"""The files of an ONNX model: of its path or `onnx:NAME`, and those of weights beside it."""

import difflib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from gdp.base.errors import ModelError
from gdp.base.files.reading import is_folder, is_there, open_regular


def resolve_spec(spec: str | os.PathLike[str]) -> Path:
    """The file of `onnx:NAME`, a model that the installed onnx package carries, or the path itself.

    Raises `ModelError` when there is no such file; for `onnx:NAME`, with the names that exist.
    """
    text = os.fspath(spec)
    if not text.startswith("onnx:"):
        path = Path(text)
        if is_folder(path):
            raise ModelError(
                f"{text}: is a folder, not an ONNX file; give the .onnx file inside it"
            )
        if not is_there(path):
            raise ModelError(f"{text}: no such file; give the path of an ONNX model")
        return path
    name = text.removeprefix("onnx:")
    models = packaged_models()
    if name in models:
        return models[name]
    light = [known for known in models if known.startswith("light_")]
    near = difflib.get_close_matches(name, models, n=1)
    raise ModelError(
        f"no model {text!r} in the onnx package; "
        + (f"did you mean 'onnx:{near[0]}'? " if near else "")
        + f"there are {', '.join(light)} and {len(models) - len(light)} operator tests"
    )


def packaged_models() -> dict[str, Path]:
    """The models inside the installed onnx package by name: a file's stem, or the folder of a file
    called model.onnx."""
    package = importlib.util.find_spec("onnx")
    if package is None or not package.submodule_search_locations:
        raise ModelError("the onnx package is not installed: pip install onnx")
    data = Path(package.submodule_search_locations[0]) / "backend" / "test" / "data"
    return {
        (path.parent.name if path.stem == "model" else path.stem): path
        for path in sorted(data.glob("**/*.onnx"))
    }


def external_files(path: Path) -> list[Path]:
    """The files beside a model that hold its weights; none where it cannot be read."""
    try:
        with open_regular(path) as file:
            graph = onnx.load(file, load_external_data=False).graph
    except (OSError, DecodeError):
        return []
    names = {
        ExternalDataInfo(tensor).location
        for tensor in _tensors(graph)
        if uses_external_data(tensor)
    }
    return [path.parent / name for name in sorted(names)]


def foreign_data(folder: Path, location: str) -> str:
    """Reason why a file that a model in `folder` names as its weights may be another's; "" for its
    own: a regular file in that folder, no link, and without a second name (a hard link)."""
    file, home = folder / location, Path(os.path.realpath(folder))
    place = home / os.path.normpath(location)
    if Path(os.path.realpath(file)) != place or not place.is_relative_to(home):
        return "lie outside of its folder or behind a link"
    if not file.is_file():
        return "are no regular file"
    return "have a second name elsewhere (a hard link)" if file.stat().st_nlink > 1 else ""


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)
