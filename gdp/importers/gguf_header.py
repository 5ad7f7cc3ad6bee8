"""Headers of GGUF files: hyperparameters, and shape and type of every tensor.

The GGUF specification of ggml, version 3. The file is mapped, and its weights stay on disk.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdp.errors import MissingExtraError, ModelError
from gdp.files.reading import require_regular
from gdp.version import install_command

LARGEST = (1 << 31) - 1
"""Of a hyperparameter."""
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file."""

    dims: tuple[int, ...]  # as ggml orders them: inputs of a product first, experts last
    kind: str  # the type, such as "Q4_K"
    nbytes: int  # packed: blocks of elements with their scales


@dataclass(frozen=True)
class GgufHeader:
    """Architecture, hyperparameters and tensors of a model, without its weights."""

    path: str
    architecture: str
    numbers: Mapping[str, int | list[int]]  # by key, less the architecture before it
    tensors: Mapping[str, StoredTensor]  # by name, such as "blk.0.attn_q.weight"

    def number(self, key: str, default: int | None = None, layer: int = 0) -> int:
        """A hyperparameter, of one layer where the layers differ; raises `ModelError` where it
        is missing and has no default, or is none that a model can have."""
        value = self.numbers.get(key, default)
        if isinstance(value, list):
            value = value[layer] if layer < len(value) else None
        if value is None:
            raise ModelError(f"{self.path} says no {self.architecture}.{key}")
        return self._within(key, value, 1)

    def count(self, key: str, default: int = 0) -> int:
        """A hyperparameter of the whole model that may be 0."""
        value = self.numbers.get(key, default)
        return self._within(key, default if isinstance(value, list) else value, 0)

    def _within(self, key: str, value: int, least: int) -> int:
        if not least <= value <= LARGEST:
            raise ModelError(
                f"{self.path}: {self.architecture}.{key} must be from {least} to {LARGEST}, got "
                f"{value}; the file is damaged"
            )
        return value


def import_gguf() -> Any:
    """The `gguf` package."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise MissingExtraError(
            f".gguf models need the gguf package: {install_command('gguf')}"
        ) from None
    return gguf


def part_files(path: Path) -> list[Path]:
    """The file, or all parts of the model that it is one of."""
    part = _PART.search(path.name)
    if part is None:
        return [path]
    stem, count = path.name[: part.start()], int(part[2])
    return [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def read_header(path: Path) -> GgufHeader:
    """The header of a model, of all its parts; raises `ModelError` where it cannot be read."""
    numbers: dict[str, int | list[int]] = {}
    tensors: dict[str, StoredTensor] = {}
    architecture = ""
    for part in part_files(path):
        named, more, stored = _read_part(part, architecture)
        architecture = architecture or named
        numbers |= more
        tensors |= stored
    if not architecture or not tensors:
        raise ModelError(f"{path} names no architecture or has no tensors; it is no language model")
    return GgufHeader(str(path), architecture, numbers, tensors)


def _read_part(
    path: Path, architecture: str
) -> tuple[str, dict[str, int | list[int]], dict[str, StoredTensor]]:
    """(architecture, hyperparameters, tensors) of one file; the first part names the
    architecture."""
    gguf = import_gguf()
    try:
        require_regular(path)
    except FileNotFoundError:
        parts = "; all parts of a split model must be in one folder" * bool(_PART.search(path.name))
        raise ModelError(f"no model {str(path)!r}{parts}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    # What a damaged file makes the reader raise is of any kind.
    try:
        reader = gguf.GGUFReader(path)
        if not architecture:
            field = reader.get_field("general.architecture")
            architecture = str(field.contents()) if field else ""
        numbers = _numbers(reader, architecture + ".")
        tensors = {
            tensor.name: StoredTensor(
                tuple(int(size) for size in tensor.shape),
                tensor.tensor_type.name,
                int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read as GGUF: {type(error).__name__}: {error}"
        ) from error
    for name, stored in tensors.items():
        if not stored.dims or min(stored.dims) < 1:
            raise ModelError(
                f"{path}: tensor {name!r} has the shape {list(stored.dims)}; the file is damaged"
            )
    return architecture, numbers, tensors


def _numbers(reader: Any, prefix: str) -> dict[str, int | list[int]]:
    numbers: dict[str, int | list[int]] = {}
    for key, field in reader.fields.items():
        value = field.contents() if key.startswith(prefix) else None
        is_list = isinstance(value, list) and all(isinstance(v, int) for v in value)
        if value is not None and (isinstance(value, int) or is_list):
            numbers[key.removeprefix(prefix)] = value
    return numbers
