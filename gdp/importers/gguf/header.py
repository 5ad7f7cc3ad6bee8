"""What the header of a GGUF file says: hyperparameters, and shape and type of every tensor.

The file is mapped, so that no tensor data is read. Format: the GGUF specification of ggml,
version 3.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdp.errors import MissingExtraError, ModelError

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class Stored:
    """One tensor of the file."""

    dims: tuple[int, ...]  # as ggml orders them: inputs of a product first, experts last
    kind: str  # the type, such as "Q4_K"
    nbytes: int  # packed: blocks of elements with their scales


@dataclass(frozen=True)
class Header:
    """What is known of a model without its weights."""

    path: str
    architecture: str
    numbers: Mapping[str, int | list[int]]  # by key, less the architecture before it
    tensors: Mapping[str, Stored]  # by name, such as "blk.0.attn_q.weight"

    def number(self, key: str, default: int | None = None, layer: int = 0) -> int:
        """A hyperparameter, of one layer where the layers differ; raises `ModelError` where it
        is missing and has no default."""
        found = self.numbers.get(key, default)
        if isinstance(found, list):
            found = found[layer] if layer < len(found) else None
        if found is None:
            raise ModelError(f"{self.path} says no {self.architecture}.{key}")
        return found


def import_gguf() -> Any:
    """The `gguf` package."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise MissingExtraError(
            ".gguf models need the gguf package: pip install 'gdp-placement[gguf]'"
        ) from None
    return gguf


def part_files(path: Path) -> list[Path]:
    """The file, or all parts of the model that it is one of."""
    part = _PART.search(path.name)
    if part is None:
        return [path]
    stem, count = path.name[: part.start()], int(part[2])
    return [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def read_header(path: Path) -> Header:
    """The header of a model, of all its parts; raises `ModelError` where it cannot be read."""
    numbers: dict[str, int | list[int]] = {}
    tensors: dict[str, Stored] = {}
    architecture = ""
    for part in part_files(path):
        reader = _reader(part)
        field = reader.get_field("general.architecture")
        architecture = architecture or (str(field.contents()) if field else "")
        numbers |= _numbers(reader, architecture + ".")
        for tensor in reader.tensors:
            dims = tuple(int(size) for size in tensor.shape)
            tensors[tensor.name] = Stored(dims, tensor.tensor_type.name, int(tensor.n_bytes))
    if not architecture or not tensors:
        raise ModelError(f"{path} names no architecture or has no tensors; it is no language model")
    return Header(str(path), architecture, numbers, tensors)


def _reader(path: Path) -> Any:
    gguf = import_gguf()
    if not path.is_file():
        raise ModelError(
            f"no model {str(path)!r}; all parts of a split model must be in one folder"
        )
    # What a damaged file makes the reader raise is of any kind.
    try:
        return gguf.GGUFReader(path)
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read as GGUF: {type(error).__name__}: {error}"
        ) from error


def _numbers(reader: Any, prefix: str) -> dict[str, int | list[int]]:
    found: dict[str, int | list[int]] = {}
    for key, field in reader.fields.items():
        value = field.contents() if key.startswith(prefix) else None
        is_list = isinstance(value, list) and all(isinstance(v, int) for v in value)
        if value is not None and (isinstance(value, int) or is_list):
            found[key.removeprefix(prefix)] = value
    return found
