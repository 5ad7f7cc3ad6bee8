"""Cache of compiled kernels; imported before the first kernel is declared.

numba ends a program over a file of its cache that is cut short, at every start until somebody
deletes it, and over a disk that is full. Kernels of gdp are compiled again there.
"""

import atexit
import glob
import logging
import os
import shutil
import tempfile
from typing import Any, no_type_check

import numba
from numba.core import dispatcher
from numba.core.caching import FunctionCache

log = logging.getLogger(__name__)
_temporary: str | None = None  # the folder that ends with the process


@no_type_check  # numba asks for its file, and that of a wrapper is another
def _probe() -> None:
    """Compiled never; asked whether it could be kept."""


def keeps_compiled() -> bool:
    """True if compiled kernels can be kept, if need be in a folder that ends with the process.

    numba keeps them beside the source or in the user's cache folder, and refuses to compile at all
    where it can write to neither: a package installed by root, used by somebody without a home.
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


class HealingCache(FunctionCache):
    """numba's cache of a kernel, without which the kernel runs as well."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel; None where it is not kept, or is damaged and now deleted."""
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


def _cache_of(function: Any) -> FunctionCache:
    return (HealingCache if function.__module__.startswith("gdp.") else FunctionCache)(function)


# The one place where numba chooses a cache; kernels of others keep theirs.
dispatcher.FunctionCache = _cache_of  # type: ignore[assignment]

KEEP = keeps_compiled()
"""The option `cache` of every kernel."""
