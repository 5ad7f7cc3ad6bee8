"""Cache of compiled kernels; imported before the first kernel is declared.

Kernels are kept by content: a folder for each file of kernels and each state of its dependencies
(the file, the kernels that it calls, the files of its constants). So an edit of a callee is
noticed, which numba's own stamp, of one file, is blind to; and a fresh checkout, another worktree
or a second environment find what was compiled before. They lie in `NUMBA_CACHE_DIR`, else in gdp's
cache folder.

numba ends a program over a file of its cache that is cut short, at every start until somebody
deletes it, and over a disk that is full. Kernels of gdp are compiled again there.
"""

import atexit
import contextlib
import functools
import glob
import hashlib
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, no_type_check

import llvmlite
import numba
from numba.core import dispatcher
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache, _CacheLocator

from gdp.base.files.disk_cache import cache_folder, is_private

log = logging.getLogger(__name__)
MOST_STATES = 8
"""States of a file of kernels that are kept; those used longest ago are deleted."""
_PACKAGE = Path(__file__).resolve().parents[2]
_IMPORT = re.compile(rb"^from (gdp\.[\w.]+) import|^import (gdp\.[\w.]+)", re.MULTILINE)
_temporary: str | None = None  # the folder that ends with the process


@no_type_check  # numba asks for its file, and that of a wrapper is another
def _probe() -> None:
    """A function that is never compiled; it tests whether a kernel could be cached."""


def keeps_compiled() -> bool:
    """True if compiled kernels can be kept, if need be in a folder that ends with the process.

    numba refuses to compile at all where it can write nowhere: for somebody without a home.
    """
    try:
        numba.njit(cache=True)(_probe)
        return True
    except RuntimeError:
        pass
    advice = "set NUMBA_CACHE_DIR to a folder that can be written to"
    try:
        # Private and new: whoever can write to it runs code in this process.
        folder = tempfile.mkdtemp(prefix="gdp-kernels-")
    except OSError:
        log.warning("no cache folder: kernels are compiled anew as they are needed; %s", advice)
        return False
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    global _temporary
    _temporary = numba.config.CACHE_DIR = folder  # type: ignore[attr-defined]
    log.warning(
        "no cache folder can be written to: kernels are compiled for this run alone, which takes "
        "a minute or more; %s",
        advice,
    )
    return True


def kept_in() -> str | None:
    """The folder where compiled kernels outlive this process, None where there is none."""
    if not KEEP or _temporary == numba.config.CACHE_DIR:  # type: ignore[attr-defined]
        return None
    return numba.njit(cache=True)(_probe).stats.cache_path


class _ByContent(_CacheLocator):
    """The folder of the kernels of a file in its present state."""

    def __init__(self, stamp: str, name: str, line: int) -> None:
        self._stamp, self._name, self._line = stamp, name, line

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_ByContent | None":
        """The locator of a kernel; None where its folder cannot be written to, or by others."""
        try:
            stamp = _stamp(Path(py_file).resolve())
            locator = cls(stamp, py_func.__module__, py_func.__code__.co_firstlineno)
            locator.ensure_cache_path()
        except (OSError, RuntimeError):  # no home is a RuntimeError
            return None
        return locator

    def ensure_cache_path(self) -> None:
        """Make the folder; it was used now."""
        folder = Path(self.get_cache_path())
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # another process made it now
            _drop_oldest(folder.parent, f"{self._name}-")
        if not is_private(folder):
            raise PermissionError(f"{folder}: others can write to it")
        os.utime(folder)
        tempfile.TemporaryFile(dir=folder).close()

    def get_cache_path(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`<folder of all kernels>/<module>-<stamp>`."""
        named = numba.config.CACHE_DIR  # type: ignore[attr-defined]
        base = Path(named) if named else cache_folder() / "kernels"
        return str(base / f"{self._name}-{self._stamp}")

    def get_source_stamp(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A constant: the name of the folder holds the stamp, so its files are up to date."""
        return self._stamp

    def get_disambiguator(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The first line of the kernel, as in numba."""
        return str(self._line)


@functools.cache
def _stamp(path: Path) -> str:
    """Digest of the dependencies of the machine code of a file of kernels.

    The versions of numba and LLVM, the options and compiler of all kernels, the file, the files of
    kernels that it imports, and theirs; of other files of gdp, which hold constants and types,
    those that these import by name.
    """
    known = sorted(_read_by(path, {path, *_PACKAGE.glob("base/kernels/*.py")}))
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for file in known:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _read_by(path: Path, known: set[Path]) -> set[Path]:
    """The files that a file of kernels depends on, added to those that are known."""
    for found in _IMPORT.finditer(path.read_bytes()):
        module = (found[1] or found[2]).decode().split(".")[1:]
        file = _PACKAGE.joinpath(*module).with_suffix(".py")
        if file.is_file() and file not in known:
            known.add(file)
            if b"gdp.base.kernels" in file.read_bytes():
                _read_by(file, known)
    return known


def _drop_oldest(folder: Path, prefix: str) -> None:
    """Delete the least recently used states of a file of kernels beyond `MOST_STATES`."""
    states = []
    for each in folder.iterdir():
        if each.name.startswith(prefix):
            with contextlib.suppress(OSError):  # another process drops some, too
                states.append((each.stat().st_mtime, each))
    for _, each in sorted(states, reverse=True)[MOST_STATES:]:
        shutil.rmtree(each, ignore_errors=True)


class _Implementation(CompileResultCacheImpl):
    _locator_classes = (_ByContent,)


class HealingCache(FunctionCache):
    """numba's cache of a kernel, without which the kernel runs as well."""

    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel; None if it is not cached, or was damaged and is now deleted."""
        try:
            return super().load_overload(sig, target_context)
        # A pickle that is cut or altered raises anything.
        except Exception as error:
            _warn_once(
                "damaged",
                "a compiled kernel in %s is damaged (%s): it is deleted and compiled again",
                self.cache_path, type(error).__name__,
            )  # fmt: skip
            self._delete()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled kernel, unless its folder is full or no longer there."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(
                "full",
                "compiled kernels cannot be kept in %s: %s; the next start compiles them again, "
                "make room there or set NUMBA_CACHE_DIR to another folder",
                self.cache_path, error.strerror or error,
            )  # fmt: skip

    def _delete(self) -> None:
        """Remove the index of this kernel and its compiled forms, or leave them for good."""
        base = os.path.join(self.cache_path, self._impl.filename_base)
        try:
            for path in (f"{base}.nbi", *glob.glob(f"{glob.escape(base)}.*.nbc")):
                if os.path.exists(path):
                    os.unlink(path)
        except OSError:
            self.disable()


_said: set[str] = set()


def _warn_once(kind: str, text: str, *parts: object) -> None:
    """Log a warning, the first of its kind in this process: hundreds of kernels lie in a folder."""
    if kind not in _said:
        _said.add(kind)
        log.warning(text, *parts)


def _cache_of(function: Any) -> FunctionCache | NullCache:
    if not function.__module__.startswith("gdp."):
        return FunctionCache(function)
    try:
        return HealingCache(function)
    except RuntimeError:  # no folder that only this user can write to
        if function is _probe:
            raise
        _warn_once(
            "folder",
            "compiled kernels of %s cannot be kept: their folder is read-only, or others can "
            "write to it; each start compiles them again",
            function.__module__,
        )
        return NullCache()


# The one place where numba chooses a cache; kernels of others keep theirs.
dispatcher.FunctionCache = _cache_of  # type: ignore[assignment]

KEEP = keeps_compiled()
"""The option `cache` of every kernel."""
