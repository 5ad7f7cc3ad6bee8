"""What a run says of itself: JSON lines, TensorBoard where it is installed, a bar on a terminal."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


Sink = Callable[[int, dict[str, Any]], None]
"""Takes the step and its numbers."""


class JsonLines:
    """Appends one object per call; on resume, lines from the checkpoint's step on are dropped."""

    def __init__(self, path: Path, from_step: int) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if not path.exists() else path.read_text().splitlines()
        kept = [line for line in kept if json.loads(line)["step"] < from_step]
        path.write_text("".join(line + "\n" for line in kept))

    def __call__(self, step: int, numbers: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")


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
        log.info("no TensorBoard files: pip install gdp[plots]")
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
