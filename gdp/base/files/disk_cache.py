"""Cache of slow results on disk: files named by a digest of all they depend on.

A damaged file, which zlib's checksum tells, is a miss. Beyond its size limit the least recently
used files are deleted. A folder that other users can write to is not used, as its content is
trusted.
"""

import contextlib
import os
import stat
import zlib
from pathlib import Path
from typing import NamedTuple

from gdp.base.files.reading import MAX_BYTES, open_regular
from gdp.base.files.writing import write_atomic

MOST_BYTES = 1 << 28
"""Limit of the cache of one kind of results; a trace of a model of 32 layers takes about 1 MB."""


class CacheUsage(NamedTuple):
    """A cache folder and its size."""

    folder: Path
    files: int
    size_bytes: int


def cache_folder() -> Path:
    """Folder of all caches: `GDP_CACHE_DIR`, else gdp's part of the user's cache folder."""
    if named := os.environ.get("GDP_CACHE_DIR"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gdp"


def read_cached(kind: str, key: str) -> bytes | None:
    """The cached result of this digest; None where there is none or it is damaged."""
    try:
        path = _folder(kind) / key
        if not is_private(path.parent):
            return None
        with open_regular(path) as file:
            unpacking = zlib.decompressobj()
            result = unpacking.decompress(file.read(MAX_BYTES), MAX_BYTES)
        if not unpacking.eof:
            return None  # cut short, or larger than any result that is written
        os.utime(path)  # used now
    except (OSError, RuntimeError, zlib.error):  # no home is a RuntimeError
        return None
    return result


def write_cached(kind: str, key: str, data: bytes, most_bytes: int = MOST_BYTES) -> None:
    """Cache a result; where that fails, it is computed again next time."""
    body = zlib.compress(data, 1)
    if len(body) > most_bytes:
        return
    with contextlib.suppress(OSError, RuntimeError):
        folder = _folder(kind)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(folder):
            write_atomic(folder / key, body)
            _drop_oldest(folder, most_bytes)


def usage(kind: str) -> CacheUsage | None:
    """Size of the cache of a kind; None where there is no home folder for it."""
    try:
        folder = _folder(kind)
    except RuntimeError:
        return None
    entries = _entries(folder)
    return CacheUsage(folder, len(entries), sum(size for _, _, size in entries))


def _folder(kind: str) -> Path:
    return cache_folder() / kind


def is_private(folder: Path) -> bool:
    """True where only the user can write to the folder."""
    if not hasattr(os, "getuid"):
        return folder.is_dir()
    status = folder.stat()
    others = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid == os.getuid() and not status.st_mode & others


def _entries(folder: Path) -> list[tuple[float, Path, int]]:
    """(when it was used, path, bytes) of all files of the cache, least recently used first."""
    entries = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # another process drops files, too
                status = path.stat()
                entries.append((status.st_mtime, path, status.st_size))
    return sorted(entries)


def _drop_oldest(folder: Path, most_bytes: int) -> None:
    entries = _entries(folder)
    total = sum(size for _, _, size in entries)
    for _, path, size in entries:
        if total <= most_bytes:
            break
        path.unlink(missing_ok=True)
        total -= size


def use_xla_cache() -> None:
    """Let XLA keep compiled programs in the cache folder, unless the user has chosen another, or
    others can write to it: they are code."""
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    try:
        folder = cache_folder() / "xla"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(folder):
            return
    except (OSError, RuntimeError):
        return  # a home that is read-only, or none at all, costs time, not the answer
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
