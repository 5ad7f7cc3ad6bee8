"""Curve of a training run, from its metrics: as text, and as a picture (extra `plots`)."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gdp.errors import MissingExtraError
from gdp.files.writing import atomic
from gdp.version import install_command

MOST_ROWS = 16
"""Rows of text, the best and the last among them."""
WIDTH = 40
"""Characters of the longest bar."""


class ValidationPoint(NamedTuple):
    """Cost over the best known, in the geometric mean, after so many updates."""

    update: int
    greedy: float
    best: float  # of the greedy placement and the samples
    feasible: float  # share of greedy placements that fit


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def validation_points(metrics: list[dict[str, Any]]) -> list[ValidationPoint]:
    """The validations of a run, in order; those without a problem are left out."""
    rows = [x for x in metrics if np.isfinite(x.get("val_best", np.nan))]
    return [
        ValidationPoint(x["step"] + 1, x["val_greedy"], x["val_best"], x["val_feasible"])
        for x in rows
    ]


def curve_text(points: list[ValidationPoint]) -> str:
    """A row for each validation, with a bar for what the best sample costs above the best known."""
    if not points:
        return ""
    best = min(range(len(points)), key=lambda i: points[i].greedy * points[i].best)
    shown = {*np.linspace(0, len(points) - 1, MOST_ROWS).round().astype(int).tolist(), best}
    most = max(max(p.best for p in points) - 1.0, 1e-9)
    lines = [f"{'update':>8} {'greedy':>8} {'best':>8} {'fit':>5}"]
    for i in sorted(shown):
        p = points[i]
        bar = "#" * max(0, round(WIDTH * (p.best - 1.0) / most))
        mark = "  <- best" if i == best else ""
        lines.append(f"{p.update:8} {p.greedy:8.3f} {p.best:8.3f} {p.feasible:5.0%} {bar}{mark}")
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
        values = [getattr(p, key) for p in validations]
        below.plot([p.update for p in validations], values, marker=".", label=label)
    below.set(ylabel="validation: cost / best known", xlabel="update")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.tight_layout()
    with atomic(out) as file:
        figure.savefig(file, dpi=110, format="png", metadata={"Software": "gdp"})
    pyplot.close(figure)
