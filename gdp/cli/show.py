"""Output of commands: a result as text or JSON, and a progress bar while they work."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from gdp.base.terminal import listening, printable

AS_JSON = "gdp.as_json"
"""Key of click's context for `--json`."""
Say = Callable[..., None]
"""(stage, share of it that is done or None): report that a stage begins or continues."""


def show(data: dict[str, Any], text: Callable[[], str]) -> None:
    """Print a result: one JSON object under `--json`, otherwise text."""
    if click.get_current_context().meta.get(AS_JSON):
        # NaN and infinity are not JSON; a reader gets null.
        click.echo(json.dumps(_plain(data), allow_nan=False))
    else:
        click.echo(text())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


@contextlib.contextmanager
def reporting_stages() -> Iterator[None]:
    """Report the stages of loading a model that is traced: by a bar on a terminal, with the time
    since they began, elsewhere by a line on stderr when one begins."""
    with stages() as say, listening(say):
        yield


@contextlib.contextmanager
def stages() -> Iterator[Say]:
    """Report stages on stderr: by a bar on a terminal, elsewhere by a line when one begins."""
    if not sys.stderr.isatty():
        yield _say_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def say(stage: str, fraction: float | None = None) -> None:
            total = None if fraction is None else 1.0
            bar.update(task, total=total, completed=fraction or 0.0, description=printable(stage))

        yield say


def _say_line(stage: str, fraction: float | None = None) -> None:
    """Print the beginning of a stage; progress within it is for a bar alone."""
    if fraction is None:
        click.echo(f"gdp: {printable(stage)}", err=True)


def placing(say: Say) -> Callable[[float, float], None]:
    """The progress of a search as that of a stage."""

    def progress(fraction: float, value_s: float) -> None:
        say(f"placing, best so far {value_s * 1e3:.3f} ms", fraction)

    return progress
