"""Which files and folders gdp may write over: the one place that decides it.

A target that does not exist may be written. One that exists must be gdp's own, of the same kind
and unchanged since, or the user says `--force`; what the command reads is never a target.
"""

import contextlib
import gzip
import hashlib
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gdp.errors import GdpError
from gdp.files.folders import (
    changed_files,
    files_below,
    put_in_place,
    read_manifest,
    recover,
    standing,
)
from gdp.files.writing import is_stream, staging

_HEAD_BYTES = 1 << 16
# How the files that gdp writes begin, by kind.
_MARKS = {
    "placement": rb'\s*\{\s*"schema":\s*\d+,\s*"graph_digest":',
    "profile": rb'\s*\{\s*"gdp_profile":',
    "trace": rb'\{"otherData":\{"generator":"gdp"',
    "report": rb"<!doctype html><html lang=.en.><head><meta name=.generator. content=.gdp.>",
    "plot": rb"\x89PNG\r\n.{0,200}tEXtSoftware\x00gdp",
}
_SEALED = re.compile(rb"# Written by gdp, SHA-256 of the rest: ([0-9a-f]{64})\n")

Sources = Callable[[], Iterable[Path]]
"""What a command reads; called only where something stands at the target."""


class Permit(NamedTuple):
    """What may be written over."""

    sources: Sources = tuple  # never
    force: bool = False  # whatever else stands at the target


OWN = Permit()
"""Only what gdp wrote."""


class TargetError(GdpError):
    """A target that gdp will not write over."""


def sealed(text: bytes) -> bytes:
    """A text for people to edit, under a comment by which gdp knows it as long as nobody has."""
    digest = hashlib.sha256(text).hexdigest()
    return f"# Written by gdp, SHA-256 of the rest: {digest}\n".encode() + text


def require_file(path: str | os.PathLike[str], kind: str, permit: Permit = OWN) -> None:
    """Raise `TargetError` where a file of this kind may not be written: see above.

    Pipes and character devices (/dev/stdout, /dev/null) may always be written. Links are followed.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        _require_parent(Path(path))
        return
    except OSError as error:
        raise TargetError(f"{os.fspath(path)!r} cannot be written: {error.strerror}") from None
    if is_stream(path):
        return
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "no ordinary file"
        raise TargetError(f"{os.fspath(path)!r} is {what}; give a file for the {kind}")
    _require_no_source(Path(path), permit.sources)
    # A rename would replace it all the same, as the folder's mode decides.
    if not permit.force and not mode & 0o222:
        raise TargetError(
            f"{os.fspath(path)!r} is write-protected; give another path, or --force to replace it"
        )
    if not permit.force and not is_ours(Path(path), kind):
        raise TargetError(
            f"{os.fspath(path)!r} exists and holds no {kind} as gdp wrote it; give another path, "
            "or --force to write over it"
        )


def require_folder(path: str | os.PathLike[str], kind: str, permit: Permit = OWN) -> None:
    """The same for a folder. Empty folders may be written; in others only gdp's files go, and
    with force whatever has the name of a file that is written."""
    target = Path(path)
    if not target.exists() and standing(target) == Path(os.path.realpath(target)):
        _require_parent(target)
        return
    recover(Path(os.path.realpath(target)))
    if not target.is_dir():
        raise TargetError(f"{str(target)!r} is a file; give a folder for the {kind}")
    _require_no_source(target, permit.sources)
    if permit.force or not any(target.iterdir()):
        return
    manifest = read_manifest(target)
    if manifest is None:
        raise TargetError(
            f"folder {str(target)!r} holds files that gdp did not write; give a new or an empty "
            "folder, or --force to write among them"
        )
    if manifest.kind != kind:
        raise TargetError(
            f"folder {str(target)!r} holds another thing than the {kind}: {manifest.kind}; give "
            "another folder, or --force to replace it"
        )
    if changed := changed_files(target, manifest):
        raise TargetError(
            f"folder {str(target)!r}: {changed[0]!r} was changed since gdp wrote it; give another "
            "folder, or --force to write over it"
        )


@contextlib.contextmanager
def new_contents(path: str | os.PathLike[str], kind: str, permit: Permit = OWN) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of the one at `path` at the end; see
    `require_folder` and `gdp.files.folders.put_in_place`."""
    require_folder(path, kind, permit)
    target = Path(os.path.realpath(path))
    with staging(target) as folder:
        yield folder
        require_not_source((target / name for name in files_below(folder)), permit.sources)
        put_in_place(folder, target, kind)


def require_not_source(paths: Iterable[Path], sources: Sources) -> None:
    """Raise `TargetError` where one of the paths that are to be written is a source."""
    for path in paths:
        if path.exists():
            _require_no_source(path, sources)


def _require_no_source(target: Path, sources: Sources) -> None:
    for source in sources():
        if source.exists() and source.samefile(target):
            raise TargetError(
                f"{str(target)!r} is read by this command and is never written over; give "
                "another path"
            )


def _require_parent(target: Path) -> None:
    """Said before the work is done: a folder to write into must exist or can be made."""
    for parent in Path(os.path.realpath(target)).parents:
        if parent.exists():
            if not parent.is_dir():
                raise TargetError(f"{str(target)!r}: {str(parent)!r} is a file, not a folder")
            if not os.access(parent, os.W_OK | os.X_OK):
                raise TargetError(f"{str(target)!r}: folder {str(parent)!r} cannot be written to")
            return


def is_ours(path: Path, kind: str) -> bool:
    """Whether a file begins as gdp's files of this kind do, or is empty."""
    try:
        head = _head(path)
    except (OSError, EOFError, zlib.error):
        return False
    if not head:
        return True
    if kind == "cluster":
        seal = _SEALED.match(head)
        text = path.read_bytes()
        return seal is not None and text == sealed(text[seal.end() :])
    return re.match(_MARKS[kind], head, re.DOTALL) is not None


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            file.seek(0)
            return file.read(_HEAD_BYTES)
        file.seek(0)
        with gzip.GzipFile(fileobj=file) as packed:
            return packed.read(_HEAD_BYTES)
