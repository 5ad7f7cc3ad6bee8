"""transformers, closed: no network, no code and no kernels of others, whatever a file asks for.

The classes of transformers look up the hub where a configuration names a backbone, ask on the
terminal whether to run code that lies beside it, and load compiled kernels by name. Inside of
`closed` the hub is offline, this thread reaches no network, and kernels are refused; all is as it
was when it ends. The keys that ask for such things are removed before (`gdp.importers.pytorch.
huggingface`), so this is the second wall.
"""

import contextlib
import importlib
import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gdp.base.errors import MissingExtraError
from gdp.base.version import install_command

_OFFLINE = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
}  # fmt: skip
_KERNELS = ("get_kernel", "get_local_kernel", "load_kernel", "get_locked_kernel", "install_kernel")
_HUB_KERNELS = "transformers.integrations.hub_kernels"

_lock = threading.RLock()
_threads: list[int] = []  # that are inside, once for each time
_undo = contextlib.ExitStack()


class NotAtHandError(FileNotFoundError):
    """Something that is not on this machine, or not gdp's to run; the message names it."""


@contextlib.contextmanager
def closed() -> Iterator[None]:
    """Nothing is downloaded and nothing of others is run inside; may be nested, in any threads."""
    with _lock:
        if not _threads:
            _close()
        _threads.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock:
            _threads.remove(threading.get_ident())
            if not _threads:
                _undo.close()


def import_transformers() -> Any:
    """The transformers module, offline inside of `closed` also where it is imported there; raises
    `MissingExtraError` where it is not installed."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"hf: models need transformers: {install_command('torch')}"
        ) from None
    with _lock:
        if _threads:
            _close_kernels()
    return transformers


def not_at_hand(error: BaseException | None) -> str:
    """Name of the thing that `closed` kept from the code; empty for errors of other reasons."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, NotAtHandError):
            return str(error)
        if type(error).__name__ in ("OfflineModeIsEnabled", "LocalEntryNotFoundError"):
            words = [word.rstrip(":,.") for word in str(error).split()]
            return next(
                (word for word in words if word.startswith("https://")), "a file of the hub"
            )
        error = error.__cause__ or error.__context__
    return ""


def error_line(error: BaseException) -> str:
    """An error of others in one line: its class and its first line, with the next where the first
    only announces it."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    last = next((i for i, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return f"{type(error).__name__}: {' '.join(lines[: last + 1])}".removesuffix(": ")


def _close() -> None:
    """Put all in place; `_undo` takes it back."""
    # Read once, when the hub's library is imported; what the user's environment says holds after.
    first = "huggingface_hub.constants" not in sys.modules
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(_OFFLINE)
    _undo.callback(_restore, before)
    with contextlib.suppress(ImportError):
        constants: Any = importlib.import_module("huggingface_hub.constants")
        asked = before["HF_HUB_OFFLINE"] or before["TRANSFORMERS_OFFLINE"] or ""
        was = asked.upper() in ("1", "ON", "YES", "TRUE") if first else constants.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = True
        _undo.callback(setattr, constants, "HF_HUB_OFFLINE", was)
    for name in ("connect", "connect_ex", "sendto"):
        _replace(socket.socket, name, _guarded(getattr(socket.socket, name)))
    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
        _replace(socket, name, _guarded(getattr(socket, name)))
    _close_kernels()


def _close_kernels() -> None:
    if "transformers" not in sys.modules:
        return
    modules = [sys.modules["kernels"]] if "kernels" in sys.modules else []
    if not modules and importlib.util.find_spec("kernels") is not None:
        with contextlib.suppress(Exception):  # whatever a broken package raises
            modules.append(importlib.import_module("kernels"))
    with contextlib.suppress(ImportError):
        hub = importlib.import_module(_HUB_KERNELS)
        modules.append(hub)
        for name, value in (("get_kernel_hub", _no_kernel), ("_kernels_enabled", False)):
            if hasattr(hub, name):
                _replace(hub, name, value)
    for module in modules:
        for name in _KERNELS:
            if hasattr(module, name):
                _replace(module, name, _no_kernel)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute until `_undo`; one that a class inherits is deleted again."""
    own = vars(owner)
    if own.get(name) is value:
        return
    if name in own:
        _undo.callback(setattr, owner, name, own[name])
    else:
        _undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _guarded(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the network that only threads outside may make; sockets of this machine alone
    (AF_UNIX) stay open to all."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        local = args and getattr(args[0], "family", None) == getattr(socket, "AF_UNIX", object())
        if threading.get_ident() in _threads and not local:
            whom = next((a for a in args if isinstance(a, str | tuple)), "a host")
            raise NotAtHandError(f"{whom} on the network")
        return call(*args, **kwargs)

    return guarded


def _no_kernel(*args: Any, **kwargs: Any) -> Any:
    named = next((a for a in (*args, *kwargs.values()) if isinstance(a, str)), "")
    raise NotAtHandError(f"the compiled kernel {named!r} of others")
