"""Results that took long, kept between processes: files named by a digest of all they depend on.

A damaged file counts as none. Where a folder holds more than it may, the files that were used
longest ago go first. A folder that others can write to is not used, as its content is trusted.
"""

import contextlib
import hashlib
import os
import stat
import zlib
from pathlib import Path
from typing import NamedTuple

from gdp.files.writing import write_atomic

MOST_BYTES = 1 << 28
"""Of one kind of results; a trace of a model of 32 layers takes about 1 MB."""
_DIGEST_BYTES = 32


class Usage(NamedTuple):
    """A folder of results, and how large it is."""

    folder: Path
    files: int
    size_bytes: int


def cache_folder() -> Path:
    """Where gdp keeps what it can make again: `GDP_CACHE_DIR`, else the user's cache folder."""
    if named := os.environ.get("GDP_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gdp"


def read_kept(kind: str, key: str) -> bytes | None:
    """The result of this digest; None where there is none, or a damaged one."""
    try:
        path = _folder(kind) / key
        if not _is_private(path.parent):
            return None
        data = path.read_bytes()
        found = zlib.decompress(data[_DIGEST_BYTES:])
        if hashlib.sha256(data[_DIGEST_BYTES:]).digest() != data[:_DIGEST_BYTES]:
            return None
        os.utime(path)  # used now
    except (OSError, RuntimeError, zlib.error):  # no home is a RuntimeError
        return None
    return found


def write_kept(kind: str, key: str, data: bytes, most_bytes: int = MOST_BYTES) -> None:
    """Keep a result; what cannot be written is not kept, which costs time alone."""
    body = zlib.compress(data, 1)
    if _DIGEST_BYTES + len(body) > most_bytes:
        return
    with contextlib.suppress(OSError, RuntimeError):
        folder = _folder(kind)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder):
            write_atomic(folder / key, hashlib.sha256(body).digest() + body)
            _drop_oldest(folder, most_bytes)


def usage(kind: str) -> Usage | None:
    """What is kept of a kind; None where there is no home to keep it in."""
    try:
        folder = _folder(kind)
    except RuntimeError:
        return None
    sizes = [entry.size_bytes for entry in _entries(folder)]
    return Usage(folder, len(sizes), sum(sizes))


class _Entry(NamedTuple):
    used_s: float
    path: Path
    size_bytes: int


def _folder(kind: str) -> Path:
    return cache_folder() / kind


def _is_private(folder: Path) -> bool:
    """Whether nobody but the user can write to a folder."""
    if not hasattr(os, "getuid"):
        return folder.is_dir()
    found = folder.stat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid == os.getuid() and not found.st_mode & others


def _entries(folder: Path) -> list[_Entry]:
    """Oldest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # another process drops files, too
                about = path.stat()
                found.append(_Entry(about.st_mtime, path, about.st_size))
    return sorted(found)


def _drop_oldest(folder: Path, most_bytes: int) -> None:
    entries = _entries(folder)
    total = sum(entry.size_bytes for entry in entries)
    for entry in entries:
        if total <= most_bytes:
            break
        entry.path.unlink(missing_ok=True)
        total -= entry.size_bytes
