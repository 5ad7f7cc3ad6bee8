"""Draws the curve of a run: `python -m pretrain.plot FOLDER/metrics.jsonl -o curve.png`."""

import json
from pathlib import Path

import click
import numpy as np


def smooth(values: list[float], span: int = 25) -> np.ndarray:
    """A running mean over the last `span` values."""
    padded = np.concatenate([np.full(span - 1, values[0]), values])
    return np.convolve(padded, np.ones(span) / span, mode="valid")


@click.command()
@click.argument("metrics", type=Path)
@click.option("-o", "--out", type=Path, required=True)
def main(metrics: Path, out: Path) -> None:
    """Training ratios and cross-entropy above, validation below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True)
    for key, label in (
        ("cross_entropy", "cross-entropy (nats per choice)"),
        ("sample_ratio", "samples / best known (training)"),
        ("best_ratio", "best sample / best known (training)"),
    ):
        points = [(x["step"], x[key]) for x in lines if key in x and np.isfinite(x[key])]
        if points:
            above.plot([p[0] for p in points], smooth([p[1] for p in points]), label=label)
    for key, label in (("val_greedy", "greedy"), ("val_best", "best of greedy and 16 samples")):
        points = [(x["step"], x[key]) for x in lines if key in x]
        if points:
            below.plot(*zip(*points, strict=True), marker=".", label=label)
    below.set_ylabel("validation families: cost / best known")
    below.set_xlabel("update")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
