"""Where compiled kernels are kept: to be asked before the first of them is declared."""

import atexit
import logging
import shutil
import tempfile

import numba

log = logging.getLogger(__name__)
_temporary: str | None = None  # the folder that ends with the process


def _probe() -> None:
    """Compiled never; asked whether it could be kept."""


def keeps_compiled() -> bool:
    """Whether compiled kernels can be kept, if need be in a folder that ends with the process.

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


KEEP = keeps_compiled()
"""The option `cache` of every kernel."""
