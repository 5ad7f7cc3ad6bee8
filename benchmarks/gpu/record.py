"""Steps with budgets of seconds, whose results are on disk as soon as they are there."""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdp.files.writing import write_atomic

MARGIN_S = 5.0
"""Kept for the last writing."""


class Record:
    """Results of a run so far, as `gpu.json`, complete also when time ends in the middle of a
    step."""

    def __init__(self, folder: Path, minutes: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.started_s = time.monotonic()
        self.end_s = self.started_s + 60 * minutes - min(MARGIN_S, 6 * minutes)
        self.found: dict[str, Any] = {"minutes": minutes, "steps": {}, "results": {}}
        self.lock = threading.RLock()
        self.over = threading.Event()
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

    @property
    def left_s(self) -> float:
        """Seconds until everything must be written."""
        return self.end_s - time.monotonic()

    def step(self, name: str, seconds: float, run: Callable[[float], Any]) -> Any:
        """What `run(seconds)` returns, None where it failed or no time is left for it.

        Seconds are what is asked of the step, and at most what is left.
        """
        seconds = min(seconds, self.left_s)
        if seconds <= 0:
            return self._note(name, "left out: no time left", 0.0)
        began_s = time.monotonic()
        self._note(name, "cut off: time was over", None)
        try:
            found = run(seconds)
        except Exception as error:
            with self.lock:
                self.found["steps"].setdefault(name, {})["trace"] = traceback.format_exc()
            return self._note(
                name, f"failed: {type(error).__name__}: {error}", time.monotonic() - began_s
            )
        with self.lock:
            if isinstance(found, dict | list):
                self.found["results"][name] = found
        self._note(name, "done", time.monotonic() - began_s)
        return found

    def keep(self, name: str, value: Any) -> None:
        """Put something beside the steps."""
        with self.lock:
            self.found[name] = value

    def close(self) -> None:
        """Write everything for the last time."""
        with self.lock:
            self.over.set()
            self._write()

    def _note(self, name: str, said: str, seconds: float | None) -> None:
        with self.lock:
            entry = self.found["steps"].setdefault(name, {})
            entry |= {"status": said, "seconds": seconds}
            self._write()

    def _write(self) -> None:
        self.found["seconds"] = time.monotonic() - self.started_s
        data = json.dumps(self.found, indent=1, default=str)
        write_atomic(self.folder / "gpu.json", data.encode())

    def _watch(self) -> None:
        """Ends the process when time is over: a step may be in the middle of a kernel."""
        if not self.over.wait(max(self.left_s, 0.0)):
            try:
                with self.lock:
                    self._write()
            finally:
                os._exit(0)
