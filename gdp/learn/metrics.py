"""Metrics of a run: JSON lines, TensorBoard where it is installed, a progress bar."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gdp.errors import GdpError
from gdp.files.writing import write_atomic
from gdp.version import install_command

log = logging.getLogger(__name__)


Sink = Callable[[int, dict[str, Any]], None]
"""Takes the step and its numbers."""


class JsonLines:
    """Appends one object per call.

    On resume, lines from the checkpoint's step on are dropped, and a last line that a killed run
    left unfinished. Raises `GdpError` where another line is no object with a step.
    """

    def __init__(self, path: Path, from_step: int) -> None:
        self._path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        write_atomic(
            path,
            [line for at, line in enumerate(lines, 1) if _step(line, path, at) < from_step],
        )

    def __call__(self, step: int, numbers: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")


def _step(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise GdpError(
            f"{path}, line {number}: is not a line of metrics; remove it to go on"
        ) from None


class TensorBoard:
    """Scalars in TensorBoard's format, through tensorboardX (extra `plots`)."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=30)

    def __call__(self, step: int, numbers: dict[str, Any]) -> None:
        for name, value in numbers.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)


def sinks(folder: Path, from_step: int) -> list[Sink]:
    """JSON lines always; TensorBoard where it is installed."""
    found: list[Sink] = [JsonLines(folder / "metrics.jsonl", from_step)]
    try:
        found.append(TensorBoard(folder / "tensorboard"))
    except ImportError:
        log.info("no TensorBoard files: %s", install_command("plots"))
    return found


@contextlib.contextmanager
def progress_bar(total: int, done: int, name: str = "training") -> Iterator[Any]:
    """A function (step, text) that draws a bar; it does nothing away from a terminal."""
    if not sys.stderr.isatty():
        yield lambda step, text: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda step, text: bar.update(task, completed=step, description=text)
