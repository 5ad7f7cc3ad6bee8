"""Headers of GGUF files: hyperparameters, and shape and type of every tensor.

The GGUF specification of ggml, versions 2 and 3 (docs/gguf.md of ggml-org/ggml). The header alone
is read, and its weights stay on disk. A file may be damaged or made to mislead: every count
and length in it is compared with the bytes that are left before anything is read, kept or passed
over.
"""

import contextlib
import io
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gdp.base.errors import MissingExtraError, ModelError
from gdp.base.files.reading import open_regular
from gdp.base.version import install_command

LARGEST = (1 << 31) - 1
"""Of a hyperparameter."""
MOST_BYTES = 1 << 26
"""Of a header; those with 260,000 tokens and their merges take 15 MB."""
MOST_NUMBERS = 1 << 16
"""Of a hyperparameter that differs by layer."""
MOST_AXES = 4
"""GGML_MAX_DIMS (ggml/include/ggml.h)."""
_TOKENS = "tokenizer.ggml.tokens"
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
        import_gguf()
        with _opened(part) as reader:
            named, more, stored = _contents(reader, *reader.contents(), architecture)
        architecture = architecture or named
        numbers |= more
        tensors |= stored
    if not architecture or not tensors:
        raise ModelError(f"{path} names no architecture or has no tensors; it is no language model")
    return GgufHeader(str(path), architecture, numbers, tensors)


class Vocabulary(NamedTuple):
    """Tokens of a model, and the special tokens that it adds to a text."""

    kind: str
    adds: tuple[object, object]  # a token before a text, and behind it; None where nothing says it
    ends: tuple[object, object]  # these tokens
    size: int
    tokens: tuple[bytes, ...]  # none where the file has no tokenizer


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a model, which its first part has; raises `ModelError` where it cannot be
    read."""
    first = part_files(path)[0]
    with _opened(first) as reader:
        reader.wanted = _TOKENS
        fields, _ = reader.contents()
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    tokens = tuple(reader.texts)
    return Vocabulary(
        str(said.get("model")), (said.get("add_bos_token"), said.get("add_eos_token")),
        (said.get("bos_token_id"), said.get("eos_token_id")),
        len(tokens) or next((v for k, v in fields.items() if k.endswith(".vocab_size")), 0), tokens,
    )  # fmt: skip


Numbers = dict[str, int | list[int]]
Tensors = dict[str, StoredTensor]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator["_Reader"]:
    """The reader of a file; raises `ModelError` where it cannot be read."""
    try:
        with open_regular(path) as file:
            yield _Reader(file, os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        parts = "; all parts of a split model must be in one folder" * bool(_PART.search(path.name))
        raise ModelError(f"no model {str(path)!r}{parts}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except _DamagedError as error:
        raise ModelError(f"{path} cannot be read as GGUF: {error}; the file is damaged") from None


class _DamagedError(Exception):
    """The header is none of GGUF."""


_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Types of values, as `struct` reads them."""
_LEAST_FIELD, _LEAST_INFO = 8 + 4 + 1, 8 + 4 + 4 + 8
"""Bytes of the shortest field, and of the shortest description of a tensor."""


class _Reader:
    """The header of an open file, read from its beginning."""

    def __init__(self, file: io.BufferedReader, size: int) -> None:
        self.file, self.size, self.order = file, size, "<"
        self.wanted, self.texts = "", list[bytes]()  # the field whose texts are kept
        self.end = min(size, MOST_BYTES)

    def contents(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
        """(values of its fields by name; name, dimensions, type and offset of its tensors)."""
        if self.take(4) != b"GGUF":
            raise _DamagedError("it does not begin with GGUF")
        version = self.number("I")
        if version & 0xFFFF == 0:  # written by a machine of the other byte order
            self.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise _DamagedError(f"version {version} of the format is not known")
        tensors, fields = self.number("Q"), self.number("Q")
        self.require(fields, _LEAST_FIELD, "fields")
        values = {}
        for _ in range(fields):
            name = self.text()
            if name in values:
                raise _DamagedError(f"it has field {name!r} twice")
            values[name] = self.value(self.number("I"), name)
        self.require(tensors, _LEAST_INFO, "tensors")
        return values, [self.info() for _ in range(tensors)]

    def require(self, count: int, each: int, what: str) -> int:
        """Size in bytes of `count` parts of the file; raises `_DamagedError` if the file is
        shorter."""
        left = self.end - self.file.tell()
        if count * each > left:
            raise _DamagedError(f"it says {count} {what} where {left} bytes are left of its header")
        return count * each

    def take(self, count: int) -> bytes:
        """The next bytes."""
        return self.file.read(self.require(count, 1, "bytes"))

    def number(self, code: str) -> Any:
        """The next number."""
        return struct.unpack(self.order + code, self.take(struct.calcsize(self.order + code)))[0]

    def text(self) -> str:
        """The next text."""
        return self.take(self.number("Q")).decode(errors="replace")

    def value(self, kind: int, name: str, depth: int = 0) -> Any:
        """The next value of a type; None for arrays that are no numbers, or are too long for
        hyperparameters, which are passed over."""
        if kind == _STRING:
            return self.text()
        if code := _SCALARS.get(kind):
            return self.number(code)
        if kind != _ARRAY or depth > 4:
            raise _DamagedError(f"field {name!r} is of type {kind}, which is not known")
        inner, count = self.number("I"), self.number("Q")
        if code := _SCALARS.get(inner):
            form = f"{self.order}{count if count <= MOST_NUMBERS else 0}{code}"
            size = self.require(count, struct.calcsize(self.order + code), f"numbers in {name!r}")
            if count <= MOST_NUMBERS:
                return list(struct.unpack(form, self.take(size)))
            self.file.seek(size, os.SEEK_CUR)
            return None
        self.require(count, 8, f"values in {name!r}")
        if inner == _STRING:
            self.pass_texts(count, name)
        else:
            for _ in range(count):
                self.value(inner, name, depth + 1)
        return None

    def pass_texts(self, count: int, name: str) -> None:
        """Pass over texts, such as all tokens and their merges."""
        length_of, at = struct.Struct(f"{self.order}Q").unpack, self.file.tell()
        for _ in range(count):
            if at + 8 > self.end:
                self.require(8, 1, "bytes")
            (length,) = length_of(self.file.read(8))
            at += 8 + length
            if at > self.end:
                self.require(length, 1, f"letters in {name!r}")
            if name == self.wanted:
                self.texts.append(self.file.read(length))
            else:
                self.file.seek(length, os.SEEK_CUR)

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, dimensions, type and offset of the next tensor."""
        name, axes = self.text(), self.number("I")
        if axes > MOST_AXES:
            raise _DamagedError(f"tensor {name!r} has {axes} axes; ggml has {MOST_AXES}")
        return (
            name,
            tuple(self.number("Q") for _ in range(axes)),
            self.number("I"),
            self.number("Q"),
        )


def _contents(
    reader: _Reader, fields: dict[str, Any], infos: list[tuple[str, tuple[int, ...], int, int]],
    architecture: str,
) -> tuple[str, Numbers, Tensors]:  # fmt: skip
    """(architecture, hyperparameters, tensors) of a header that was read to its end."""
    named = fields.get("general.architecture")
    architecture = architecture or (named if isinstance(named, str) else "")
    align = fields.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise _DamagedError(f"general.alignment must be a power of two, got {align!r}")
    begin = -(-reader.file.tell() // align) * align
    tensors: Tensors = {}
    for name, dims, kind, offset in infos:
        if name in tensors:
            raise _DamagedError(f"it has tensor {name!r} twice")
        tensors[name] = stored = _stored(name, dims, kind)
        if begin + offset + stored.nbytes > reader.size:
            raise _DamagedError(
                f"tensor {name!r} ends at byte {begin + offset + stored.nbytes}, and the file at "
                f"{reader.size}"
            )
    prefix = f"{architecture}."
    numbers = {
        key.removeprefix(prefix): value for key, value in fields.items()
        if key.startswith(prefix)
        and all(isinstance(part, int) for part in (value if isinstance(value, list) else [value]))
    }  # fmt: skip
    return architecture, numbers, tensors


def _stored(name: str, dims: tuple[int, ...], kind: int) -> StoredTensor:
    gguf = import_gguf()
    if not dims or min(dims) < 1:
        raise _DamagedError(f"tensor {name!r} has the shape {list(dims)}")
    try:
        type_ = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[type_]
    except (ValueError, KeyError):
        raise _DamagedError(f"tensor {name!r} is of type {kind}, which is not known") from None
    if dims[0] % block:
        raise _DamagedError(
            f"tensor {name!r} has rows of {dims[0]}, of which {type_.name} packs {block} together"
        )
    return StoredTensor(dims, type_.name, math.prod(dims) // block * size)
