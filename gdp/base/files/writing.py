"""Atomic writes, and the check that nothing of the user's is overwritten unasked.

A file or a folder is written beside its final place and renamed, so that a crash leaves the old
one whole. Something that exists is replaced where gdp wrote it, as the same kind, and nobody has
changed it, or where the user passes `--force`; inputs of the command are never overwritten.
`gdp.json` lists gdp's files in a folder with their SHA-256; all others are the user's and survive.
"""

import contextlib
import errno
import gzip
import hashlib
import io
import os
import re
import secrets
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from gdp.base.errors import GdpError
from gdp.base.files.reading import MAX_BYTES, is_below, open_regular

MANIFEST = "gdp.json"
SCHEMA = 1
_STANDARD_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
# First bytes of the files that gdp writes, by kind. Other kinds are replaced with --force only.
_FIRST_BYTES = {
    "placement": rb'\s*\{\s*"schema":\s*\d+,\s*"graph_digest":',
    "profile": rb'\s*\{\s*"gdp_profile":',
    "trace": rb'\{"otherData":\{"generator":"gdp"',
    "report": rb"<!doctype html><html lang=.en.><head><meta name=.generator. content=.gdp.>",
    "plot": rb"\x89PNG\r\n.{0,200}tEXtSoftware\x00gdp",
}


class TargetError(GdpError):
    """A path that gdp will not overwrite."""


class OverwritePolicy(NamedTuple):
    """Inputs of a command, which are never overwritten, and whether the user forces the rest."""

    sources: Callable[[], Iterable[Path]] = tuple  # called only where the target exists
    force: bool = False


OWN_FILES_ONLY = OverwritePolicy()


class FolderManifest(msgspec.Struct):
    """`gdp.json` of a folder."""

    gdp_folder: int  # the schema
    kind: str
    files: dict[str, str]  # path from the folder: SHA-256, or "" where it is unknown or changes


# Files.


def indented_json(value: Any) -> bytes:
    """A value as JSON for people to read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def storable(text: str) -> str:
    r"""Text as JSON can hold it: a file's name may have bytes that are no UTF-8, which become "?".

    >>> storable("caf\udce9.onnx")
    'caf?.onnx'
    """
    return text.encode(errors="replace").decode()


def gzipped(data: bytes) -> bytes:
    """Bytes compressed without name and time, so that equal data makes equal files."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
        file.write(data)
    return buffer.getvalue()


def write_atomic(path: str | os.PathLike[str], data: bytes | Sequence[bytes]) -> None:
    """Write a temporary file in the same folder, flush it to the disk and rename it.

    Links are followed. An existing file keeps its mode and owner, a new one gets 0666 less the
    umask. Pipes, character devices and open descriptors (/dev/stdout) are written through. Raises
    `OSError`, which names the path, where that fails.
    """
    with atomic(path) as file:
        for chunk in [data] if isinstance(data, bytes) else data:
            file.write(chunk)


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """The open file of `write_atomic`; an error inside leaves the old file as it was."""
    if is_stream(path):
        number = _descriptor(path)
        # A descriptor is duplicated: opened anew, the file would be written from its beginning.
        with _naming(path), open(path if number is None else os.dup(number), "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    temporary = _temporary_beside(target)
    with _naming(path, temporary):
        before = target.stat() if target.exists() else None
        if before is not None and not stat.S_ISREG(before.st_mode):
            raise OSError(errno.EISDIR, "is no file that can be written", os.fspath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o666 if before is None else 0o600
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                if before is not None:
                    with contextlib.suppress(PermissionError):  # only root may give files away
                        os.fchown(handle, before.st_uid, before.st_gid)
                    os.fchmod(handle, stat.S_IMODE(before.st_mode))
                yield file
                file.flush()
                os.fsync(handle)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """True where a path is written through instead of replaced."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    text = os.path.abspath(path)
    match = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", text)
    return int(match[1]) if match else _STANDARD_STREAMS.get(text)


def _temporary_beside(target: Path, role: str = "tmp") -> Path:
    return target.with_name(f".{target.name[:200]}.{role}-{secrets.token_hex(6)}")


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str], temporary: Path | None = None) -> Iterator[None]:
    """Let system errors name `path`: a full disk names nothing, and a temporary file is gone."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        name = os.fspath(path) if error.filename is None else str(error.filename)
        if temporary is not None:
            name = name.replace(str(temporary), os.fspath(path))
        raise OSError(error.errno, error.strerror or str(error), name) from error


# Folders.


@contextlib.contextmanager
def new_contents(
    path: str | os.PathLike[str], kind: str, policy: OverwritePolicy = OWN_FILES_ONLY
) -> Iterator[Path]:
    """An empty folder to fill, which replaces the one at `path` when the block ends."""
    check_folder_writable(path, kind, policy)
    target = Path(os.path.realpath(path))
    with staging_folder(target) as folder:
        yield folder
        check_no_source((target / name for name in files_below(folder)), policy)
        replace_folder(folder, target, kind)


@contextlib.contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A new folder beside the target, to be filled and renamed; removed at the end if it is not."""
    folder = _temporary_beside(target)
    folder.mkdir(parents=True)
    try:
        with _naming(target, folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(folder: Path, target: Path, kind: str) -> None:
    """Rename a finished folder to `target` and keep the user's files of the folder it replaces.

    No file of the target is written in place: whatever a crash leaves is whole. Between the two
    renames that is the old folder as `.NAME.old-...` beside the target, to be renamed by hand.
    """
    write_manifest(folder, kind)
    for name in files_below(folder):
        with open_regular(folder / name) as file:
            os.fsync(file.fileno())
    if not target.exists():
        os.rename(folder, target)
        return
    _keep_users_files(target, folder)
    os.chmod(folder, target.stat().st_mode & 0o7777)
    old = _temporary_beside(target, "old")
    try:
        os.rename(target, old)
        os.rename(folder, target)
    finally:
        if not target.exists():
            os.rename(old, target)
    _keep_users_files(old, target)  # a file that came in the meantime
    shutil.rmtree(old)


def _keep_users_files(old: Path, new: Path) -> None:
    """Copy files that gdp did not write or a user changed since, unless `new` has their names."""
    manifest = read_manifest(old)
    written = set() if manifest is None else {MANIFEST, *manifest.files}
    written -= set() if manifest is None else set(changed_files(old, manifest))
    for name in files_below(old):
        if name not in written and not os.path.lexists(new / name):
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(old / name, new / name, follow_symlinks=False)


def write_manifest(folder: Path, kind: str, files: Mapping[str, str] | None = None) -> None:
    """Write `gdp.json`; without `files`, of every file in the folder."""
    if files is None:
        files = {name: _digest(folder / name) for name in files_below(folder) if name != MANIFEST}
    manifest = FolderManifest(SCHEMA, kind, dict(files))
    (folder / MANIFEST).write_bytes(indented_json(manifest) + b"\n")


def read_manifest(folder: Path) -> FolderManifest | None:
    """The list of gdp's files in a folder; None where gdp did not make it."""
    try:
        with open_regular(folder / MANIFEST) as file:
            manifest = msgspec.json.decode(file.read(MAX_BYTES), type=FolderManifest)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    # A name that leads elsewhere is none that gdp wrote.
    return manifest if all(map(is_below, manifest.files)) else None


def changed_files(folder: Path, manifest: FolderManifest) -> list[str]:
    """Files that gdp wrote and somebody has changed since, in order."""
    return [
        name
        for name, digest in manifest.files.items()
        if digest and (folder / name).is_file() and _digest(folder / name) != digest
    ]


def files_below(folder: Path) -> list[str]:
    """All files and links below a folder, as sorted paths from it with slashes."""
    paths = [p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()]
    return sorted(p.relative_to(folder).as_posix() for p in paths)


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Permission.


def check_file_writable(
    path: str | os.PathLike[str], kind: str, policy: OverwritePolicy = OWN_FILES_ONLY
) -> None:
    """Raise `TargetError` where a file of this kind may not be written; see the module."""
    target, name = Path(path), repr(os.fspath(path))
    if is_stream(path):
        return
    if not target.exists():
        _check_parent(target)
        return
    if not target.is_file():
        what = "a folder" if target.is_dir() else "no ordinary file"
        raise TargetError(f"{name} is {what}; give a file for the {kind}")
    check_no_source([target], policy)
    # A rename would replace a write-protected file: only the folder's mode counts there.
    if not policy.force and not target.stat().st_mode & 0o222:
        raise TargetError(f"{name} is write-protected; give another path, or --force to replace it")
    if not policy.force and not is_written_by_gdp(target, kind):
        raise TargetError(
            f"{name} exists and holds no {kind} as gdp wrote it; give another path, or --force to "
            "write over it"
        )


def check_folder_writable(
    path: str | os.PathLike[str], kind: str, policy: OverwritePolicy = OWN_FILES_ONLY
) -> None:
    """Raise `TargetError` where a folder of this kind may not be written; see the module."""
    target, name = Path(path), f"folder {str(path)!r}"
    if not target.exists():
        _check_parent(target)
        return
    if not target.is_dir():
        raise TargetError(f"{str(target)!r} is a file; give a folder for the {kind}")
    if os.path.ismount(target):
        raise TargetError(f"{name} is a mount point, which cannot be replaced; give one below it")
    check_no_source([target], policy)
    if policy.force or not any(target.iterdir()):
        return
    manifest = read_manifest(target)
    if manifest is None:
        raise TargetError(
            f"{name} holds files that gdp did not write; give a new or an empty folder, or --force "
            "to write among them"
        )
    if manifest.kind != kind:
        raise TargetError(
            f"{name} holds another thing than the {kind}: {manifest.kind}; give another folder, or "
            "--force to replace it"
        )
    if changed := changed_files(target, manifest):
        raise TargetError(
            f"{name}: {changed[0]!r} was changed since gdp wrote it; give another folder, or "
            "--force to write over it"
        )


def check_no_source(paths: Iterable[Path], policy: OverwritePolicy) -> None:
    """Raise `TargetError` where one of the paths to be written is an input of the command."""
    for path in paths:
        if path.exists() and any(s.exists() and s.samefile(path) for s in policy.sources()):
            raise TargetError(
                f"{str(path)!r} is read by this command and is never written over; give another "
                "path"
            )


def _check_parent(target: Path) -> None:
    """Fail before the work where the folder to write into is a file or write-protected."""
    parent = next(p for p in Path(os.path.realpath(target)).parents if p.exists())
    if not parent.is_dir():
        raise TargetError(f"{str(target)!r}: {str(parent)!r} is a file, not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise TargetError(f"{str(target)!r}: folder {str(parent)!r} cannot be written to")


def is_written_by_gdp(path: Path, kind: str) -> bool:
    """True where a file is empty or begins as gdp's files of this kind do."""
    try:
        with open_regular(path) as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            head = (gzip.GzipFile(fileobj=file) if packed else file).read(1 << 16)
    except (OSError, EOFError, zlib.error):
        return False
    first = _FIRST_BYTES.get(kind)
    return not head or (first is not None and re.match(first, head, re.DOTALL) is not None)
