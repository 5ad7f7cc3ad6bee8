"""Metrics of a training run: JSON lines, TensorBoard, a progress bar; and the curve they make."""

import contextlib
import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gdp.base.errors import GdpError, MissingExtraError
from gdp.base.files.reading import Kind, read_bytes
from gdp.base.files.writing import atomic, write_atomic
from gdp.base.version import install_command

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
_KIND = Kind("file of metrics", GdpError)


class MetricsLog:
    """Appends the numbers of a step to `metrics.jsonl`, and to TensorBoard's files where
    tensorboardX (extra `plots`) is installed."""

    def __init__(self, folder: Path, from_step: int) -> None:
        self._path, self._board = folder / METRICS, None
        truncate_metrics(self._path, from_step)
        try:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), flush_secs=30)
        except ImportError:
            log.info("no TensorBoard files: %s", install_command("plots"))

    def __call__(self, step: int, numbers: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step} | _finite(numbers), allow_nan=False) + "\n")
        if self._board is not None:
            for name, value in numbers.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, step)


def _finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """The numbers without those that are none, which JSON does not have."""
    return {
        name: value
        for name, value in numbers.items()
        if not isinstance(value, int | float) or math.isfinite(value)
    }


def truncate_metrics(path: Path, from_step: int) -> None:
    """Drop the lines from a checkpoint's step on, and a last line that a killed run left torn.

    Raises `GdpError` where another line is no object with a step.
    """
    lines = read_bytes(path, _KIND).splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    steps = [_step(line, path, at) for at, line in enumerate(lines, 1)]
    write_atomic(path, [line for line, at in zip(lines, steps, strict=True) if at < from_step])


def _step(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise GdpError(
            f"{path}, line {number}: is not a line of metrics; remove it to go on"
        ) from None


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


# The curve: as text, and as a picture (extra `plots`).

MOST_ROWS = 16
"""Rows of text, the best and the last among them."""
WIDTH = 40
"""Characters of the longest bar."""


class ValidationPoint(NamedTuple):
    """Geometric mean of cost over the best known after a number of updates."""

    update: int
    greedy: float
    best: float  # of the greedy placement and the samples
    feasible: float  # share of greedy placements that fit
    greedy_error: float = np.nan  # relative standard error of `greedy`, over problems
    best_error: float = np.nan


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in read_bytes(path, _KIND).splitlines()]


def validation_points(metrics: list[dict[str, Any]]) -> list[ValidationPoint]:
    """The validations of a run, in order; those without a problem are left out."""
    rows = [x for x in metrics if np.isfinite(x.get("val_best", np.nan))]
    return [
        ValidationPoint(
            x["step"] + 1,
            x.get("val_greedy", np.inf),
            x["val_best"],
            x["val_feasible"],
            x.get("val_greedy_error", np.nan),
            x.get("val_best_error", np.nan),
        )
        for x in rows
    ]


def curve_text(points: list[ValidationPoint]) -> str:
    """A row for each validation, with a bar for the best sample's cost above the best known; its
    standard error is over the problems, of which a few say little."""
    if not points:
        return ""
    best = min(range(len(points)), key=lambda i: points[i].greedy * points[i].best)
    shown = {*np.linspace(0, len(points) - 1, MOST_ROWS).round().astype(int).tolist(), best}
    most = max(max(p.best for p in points) - 1.0, 1e-9)
    lines = [f"{'update':>8} {'greedy':>8} {'best':>8} {'error':>6} {'fit':>5}"]
    for i in sorted(shown):
        p = points[i]
        bar = "#" * max(0, round(WIDTH * (p.best - 1.0) / most))
        mark = "  <- best" if i == best else ""
        error = "" if np.isnan(p.best_error) else f"{p.best_error:.1%}"
        row = f"{p.update:8} {p.greedy:8.3f} {p.best:8.3f} {error:>6} {p.feasible:5.0%}"
        lines.append(f"{row} {bar}{mark}")
    return "\n".join(lines)


def smooth(values: list[float], span: int = 25) -> np.ndarray:
    """A running mean over the last `span` values."""
    padded = np.concatenate([np.full(span - 1, values[0]), values])
    return np.convolve(padded, np.ones(span) / span, mode="valid")


def draw_curve(metrics: list[dict[str, Any]], out: Path) -> None:
    """Training ratios and cross-entropy above, validation below.

    Raises:
        MissingExtraError: where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError(f"a curve needs matplotlib: {install_command('plots')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True)
    for key, label in (
        ("cross_entropy", "cross-entropy (nats per choice)"),
        ("sample_ratio", "samples / best known (training)"),
        ("best_ratio", "best sample / best known (training)"),
    ):
        points = [(x["step"], x[key]) for x in metrics if np.isfinite(x.get(key, np.nan))]
        if points:
            above.plot([p[0] for p in points], smooth([p[1] for p in points]), label=label)
    validations = validation_points(metrics)
    for key, label in (("greedy", "greedy"), ("best", "best of greedy and 16 samples")):
        values = np.array([getattr(p, key) for p in validations])
        errors = np.nan_to_num([getattr(p, f"{key}_error") for p in validations]) * values
        updates = [p.update for p in validations]
        below.errorbar(updates, values, yerr=errors, marker=".", capsize=2, label=label)
    below.set(ylabel="validation: cost / best known", xlabel="update")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.tight_layout()
    with atomic(out) as file:
        figure.savefig(file, dpi=110, format="png", metadata={"Software": "gdp"})
    pyplot.close(figure)
