"""What verbs show: a result as text or JSON, and a bar while they work."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

AS_JSON = "gdp.as_json"
"""Where click's context keeps whether `--json` was given."""


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
def progress_bar(label: str) -> Iterator[Callable[[float, float], None] | None]:
    """A bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=1.0)

        def update(fraction: float, value_s: float) -> None:
            bar.update(task, completed=fraction, description=f"{label} {value_s * 1e3:.3f} ms")

        yield update
