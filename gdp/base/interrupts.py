"""Ctrl-C as a request to end a long task with its best answer so far."""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

log = logging.getLogger(__name__)


class StopRequestError(BaseException):
    """A request to end a loop of searches, through all of them.

    Searches answer a `KeyboardInterrupt` with their best placement so far, which would end one of
    them and let the loop go on.
    """


class Interrupts:
    """Context in which Ctrl-C stops a search, which then answers its best so far.

    A request raises an exception where the program is. While `held`, it only sets `requested`, and
    the current step is finished first, as JAX may not survive an exception in the midst of its
    work. A second request raises `KeyboardInterrupt` at once.

    Args:
        raised: Exception of the first request; by default the one that a search ends on.
    """

    def __init__(self, raised: type[BaseException] = KeyboardInterrupt) -> None:
        self.requests = 0
        self._raised = raised
        self._is_held = False
        self._before: Any = None

    @property
    def requested(self) -> bool:
        """True after Ctrl-C."""
        return self.requests > 0

    def __enter__(self) -> "Interrupts":
        # Signals reach the main thread alone, and nobody else may ask for them.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Context in which the first request is not raised."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def _handle(self, number: int, frame: object) -> None:
        self.requests += 1
        if self.requests > 1:
            raise KeyboardInterrupt
        log.warning("interrupted: ends with the best so far; once more to stop without it")
        if not self._is_held:
            raise self._raised
