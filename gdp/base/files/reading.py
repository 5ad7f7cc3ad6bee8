"""Bounded, strict reading: every failure is one line that names the file.

A file may come from anywhere. It is a regular one (`open_regular`, through which all of gdp reads);
its size is bounded, also once decompressed; JSON and TOML are decoded into types, so that an error
names the field by msgspec's path (`$.device[0].name`). Files that ship with gdp are found in the
wheel or in a source checkout (`data_path`).
"""

import errno
import gzip
import io
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_type_hints

import msgspec
import numpy as np

from gdp.base.errors import one_line
from gdp.base.units import format_bytes

T = TypeVar("T")

MAX_BYTES = 1 << 28
"""Most bytes of a file, and of its decompressed content."""
MAX_TOML_BYTES = 1 << 24
"""Most bytes of a TOML file, which is parsed in Python; 300 devices with all links make 12 MB."""
MAX_VALUES = 1 << 24
"""Most values of a JSON file, each of which may take 64 bytes of memory."""
MAX_KEY_PARTS = 64
"""Most parts of a dotted TOML key, whose parser takes quadratic time; gdp writes 6 at most."""

# A string or a comment; one left open ends with the file, since no parser reads beyond it.
_TOML_STRING = re.compile(
    rb'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:""")?|\'\'\'[^\']*(?:\'(?!\'\')[^\']*)*(?:\'\'\')?'
    rb'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"?|\'[^\'\n]*\'?|#[^\n]*',
    re.DOTALL,
)
_DOTTED_KEY = re.compile(rb'(?<![\w"-])(?:(?:[\w-]++|"")[ \t]*+\.[ \t]*+){%d}' % MAX_KEY_PARTS)


@dataclass(frozen=True)
class Kind:
    """Description of an expected file, and the exception to raise where it is another."""

    name: str  # "placement file"
    error: Callable[[str], Exception]  # made with the line to say
    missing: str = ""  # what to do where there is none

    def exception(self, text: str) -> Exception:
        """The error to raise, on one line whatever names of the file it quotes."""
        return self.error(one_line(text))


_IRREGULAR = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise `OSError` for all but a regular file: a pipe may wait for ever, a device has no end."""
    _require_mode(path, os.stat(path).st_mode)


def _require_mode(path: str | os.PathLike[str], mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        found = _IRREGULAR.get(stat.S_IFMT(mode), "no regular file")
        raise OSError(errno.EINVAL, f"it is {found}; give a regular file", os.fspath(path))


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A regular file, open for reading; raises `OSError` for anything else, and waits for
    nothing."""
    require_regular(path)  # before it is opened, which some devices notice
    at_once = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda p, flags: os.open(p, flags | at_once))  # noqa: SIM115
    try:
        _require_mode(path, os.fstat(file.fileno()).st_mode)  # another may stand there by now
    except BaseException:
        file.close()
        raise
    return file


def is_below(name: str) -> bool:
    """True for a path within a folder, as manifests name their files.

    >>> is_below("weights/0.json"), is_below("../other.json"), is_below("/etc/hosts")
    (True, False, False)
    """
    path = PurePath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


# Of a name that no file can have (too long, a null byte) pathlib raises; it is of no file.


def is_there(path: str | os.PathLike[str]) -> bool:
    """True where a path leads to something; False for any name that no file can have."""
    return os.path.exists(path)


def is_file(path: str | os.PathLike[str]) -> bool:
    """True for a regular file; False for any name that no file can have."""
    return os.path.isfile(path)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """True for a folder; False for any name that no file can have."""
    return os.path.isdir(path)


def read_bytes(
    path: str | os.PathLike[str], kind: Kind, limit: int = MAX_BYTES, *, unpack: bool = True
) -> bytes:
    """Bytes of a regular file, gunzipped if need be and `unpack`; raises the error of its kind for
    anything else, and beyond `limit` bytes."""
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
            if unpack and data[:2] == b"\x1f\x8b" and len(data) <= limit:
                data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(limit + 1)
    except (FileNotFoundError, NotADirectoryError):
        hint = f"; {kind.missing}" if kind.missing else ""
        raise kind.exception(f"no {kind.name} {str(path)!r}{hint}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise kind.exception(f"{path} is a damaged gzip file: {error}") from None
    except OSError as error:
        raise kind.exception(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise kind.exception(
            f"{path} holds more than {format_bytes(limit)}, which is too much for a {kind.name}"
        )
    return data


def read_text(path: str | os.PathLike[str], kind: Kind) -> str:
    """Text of a file in UTF-8, no longer than a TOML file; raises the error of its kind."""
    try:
        return read_bytes(path, kind, MAX_TOML_BYTES).decode()
    except UnicodeDecodeError as error:
        raise kind.exception(f"{path} is not a {kind.name}: {error}") from None


def read_json(path: str | os.PathLike[str], kind: Kind, type_: type[T]) -> T:
    """A JSON file as a value of a type; errors name the field at fault."""
    return decode_json(read_bytes(path, kind), kind, type_, str(path))


def decode_json(data: bytes, kind: Kind, type_: type[T], where: str) -> T:
    """JSON bytes as a value of a type; `where` names their origin in errors."""
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise kind.exception(
            f"{where} holds more than {MAX_VALUES} values: too many for a {kind.name}"
        )
    return _parsed(lambda: msgspec.json.decode(data, type=type_), kind, where)


def read_toml(path: str | os.PathLike[str], kind: Kind, type_: type[T]) -> T:
    """A TOML file as a value of a type; errors name the field at fault."""
    return decode_toml(read_bytes(path, kind, MAX_TOML_BYTES), kind, type_, str(path))


def decode_toml(data: bytes, kind: Kind, type_: type[T], where: str) -> T:
    """TOML bytes as a value of a type; unknown keys are errors, too."""
    if _DOTTED_KEY.search(_TOML_STRING.sub(b'""', data)):
        raise kind.exception(
            f"{where} is not a {kind.name}: a key has more than {MAX_KEY_PARTS} parts"
        )
    raw = _parsed(lambda: msgspec.toml.decode(data), kind, where)
    return convert(raw, kind, type_, where)


def convert(raw: Any, kind: Kind, type_: type[T], where: str) -> T:
    """Plain values as a value of a type; raises the error of the kind, with the field at fault."""

    def checked() -> T:
        _reject_unknown(raw, type_, "$")
        return msgspec.convert(raw, type_)

    return _parsed(checked, kind, where)


def _parsed(parse: Callable[[], T], kind: Kind, where: str) -> T:
    try:
        return parse()
    except RecursionError:
        raise kind.exception(f"{where} is not a {kind.name}: it is nested too deeply") from None
    # Numbers of thousands of digits are ValueErrors, those past float64 are OverflowErrors.
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise kind.exception(f"{where} is not a {kind.name}: {error}") from None


def _reject_unknown(raw: Any, type_: Any, path: str) -> None:
    """Refuse unknown keys of dataclasses, which msgspec ignores; structs declare it themselves."""
    if not (isinstance(raw, dict) and isinstance(type_, type)):
        return
    if not (is_dataclass(type_) or issubclass(type_, msgspec.Struct)):
        return
    hints = get_type_hints(type_)
    for key, value in raw.items():
        if key in hints:
            _reject_unknown(value, hints[key], f"{path}.{key}")
        elif is_dataclass(type_):
            names = ", ".join(field.name for field in fields(type_))
            raise ValueError(f"unknown key {key!r} - at `{path}`; known are {names}")


def decode_arrays(data: bytes, kind: Kind, where: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz by name, all numbers and finite; raises the error of the kind.

    Nothing is allocated that the file does not hold, and nothing is unpickled.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            total = sum(entry.file_size for entry in archive.infolist())
            if total > MAX_BYTES:
                raise ValueError(f"it unpacks to {format_bytes(total)}, which is too much")
            names = archive.namelist()
            arrays = {name: _array(name, archive.read(name)) for name in names}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError,
            ValueError) as error:  # fmt: skip
        raise kind.exception(f"{where} is not a {kind.name}: {error}") from None
    return {name.removesuffix(".npy"): array for name, array in arrays.items()}


def _array(name: str, data: bytes) -> np.ndarray:
    """One .npy member; its header is believed only where the bytes are there."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        else:
            shape, _, dtype = np.lib.format.read_array_header_2_0(file)
        count = 1
        for size in shape:
            count *= size
        if dtype.kind not in "biuf" or count * dtype.itemsize != len(data) - file.tell():
            raise ValueError(f"{dtype} {shape} is not what its {len(data)} bytes hold")
        file.seek(0)
        array = np.lib.format.read_array(file, allow_pickle=False)
    # A header is a Python literal, and the error whatever its evaluation raises.
    except Exception as error:
        raise ValueError(f"array {name!r}: {error}") from None
    if not np.isfinite(array).all():
        raise ValueError(f"array {name!r} holds numbers that are not finite")
    return array


def data_path(*parts: str) -> Path:
    """A file or folder shipped with gdp, such as `data_path("clusters", "devices.toml")`."""
    package = Path(__file__).parents[2]
    if (packaged := package / "_data").is_dir():
        return packaged.joinpath(*parts)
    # A source checkout: these lie beside the package, all else in data/.
    beside = parts[0] in ("checkpoints", "pretrain", "finetune")
    return (package.parent if beside else package.parent / "data").joinpath(*parts)


def shipped(path: str | os.PathLike[str]) -> str:
    """The path itself if it exists, else the shipped file of that name if there is one: recipes and
    commands name files by their place in a checkout."""
    name = os.fspath(path)
    parts = Path(name).parts
    if is_there(name) or not parts or Path(name).is_absolute():
        return name
    found = data_path(*(parts[1:] if parts[0] == "data" and parts[1:] else parts))
    return str(found) if is_there(found) else name
