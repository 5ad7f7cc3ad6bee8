"""Errors and rank correlations of predicted placements, as a table.

    python -m benchmarks.validate.report validate.json

Every other round is one repeat. Errors are of medians over all rounds; rank correlations are means
over the two repeats, and between them for what the measurement has with itself.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

FORMAT = 2
"""Of the files: medians of rounds. Files without a format held the fastest round."""
SPREAD = 0.1
"""Models whose placements differ by less have no order to predict."""


def _rank_correlation(a: Float[np.ndarray, "P"], b: Float[np.ndarray, "P"]) -> float:
    """Spearman's, with ties ranked by their mean."""
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def read(path: Path) -> dict[str, Any]:
    """One pass; raises `ValueError` for files of another statistic."""
    document = json.loads(path.read_text())
    if document.get("format") != FORMAT:
        raise ValueError(
            f"{path} was measured with another statistic than format {FORMAT} (medians of rounds "
            "of a full pipeline); measure again with python -m benchmarks.validate.run"
        )
    return document


def repeats(rows: Sequence[dict[str, Any]], what: str) -> Float[np.ndarray, "P R"]:
    """What each repeat says of each placement: the median of every other round."""
    rounds = [row[f"{what}_rounds_s"] for row in rows]
    return np.array([[np.median(own[0::2]), np.median(own[1::2])] for own in rounds])


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors and rank correlations of one model's placements."""
    found: dict[str, Any] = {"placements": len(rows)}
    for what in ("latency", "period"):
        measured = np.array([row[f"{what}_s"] for row in rows])
        again = repeats(rows, what)
        pairs = itertools.combinations(again.T, 2)
        found[what] = {
            "spread": float(measured.max() / measured.min() - 1),
            "width": float(np.median([_width(row, what) for row in rows])),
            "repeat_spearman": float(np.mean([_rank_correlation(a, b) for a, b in pairs])),
        }
        for name in ("predicted", "roofline"):
            made = np.array([row[f"{name}_{what}_s"] for row in rows])
            error = np.abs(made / measured - 1)
            found[what][name] = {
                "median_error": float(np.median(error)),
                "p90_error": float(np.quantile(error, 0.9)),
                "bias": float(np.median(made / measured - 1)),
                "spearman": float(np.mean([_rank_correlation(made, r) for r in again.T])),
            }
    return found


def _width(row: dict[str, Any], what: str) -> float:
    """Of a 95% interval, as a share of the value."""
    low, high = row[f"{what}_interval_s"]
    return np.inf if high is None else (high - low) / row[f"{what}_s"]


def report(models: dict[str, Any]) -> str:
    """The figures as a table; shares are Spearman's correlation of predicted and measured over
    that of the repeats."""
    document = {model: rows for model, rows in models.items() if rows}
    if not document:
        return "nothing was measured"
    lines = [
        f"{'model':14} {'n':>3} {'what':8} {'spread':>7} {'95%':>6} {'error':>7} "
        f"{'p90':>7} {'bias':>7} {'rank':>6} {'repeat':>7} {'share':>6} "
        f"| {'roofline':>8} {'rank':>6} {'share':>6}"
    ]
    per_model = {model: figures(rows) for model, rows in document.items()}
    for model, found in per_model.items():
        for what in ("latency", "period"):
            lines.append(_line(model, found["placements"], what, found[what]))
    rows = [row for entries in document.values() for row in entries]
    found = figures(rows)
    lines += [_line("all", len(rows), what, found[what]) for what in ("latency", "period")]
    lines += [_ranks(per_model, what) for what in ("latency", "period")]
    lines.append(f"95%: widths of the intervals of what was measured, in the median; {_fast(rows)}")
    return "\n".join(lines)


def _fast(rows: Sequence[dict[str, Any]]) -> str:
    """How many pipelines keep what was predicted of them."""
    share = np.array([row["predicted_period_s"] / row["period_s"] for row in rows])
    return f"{(share >= 0.95).mean():.0%} of the pipelines run at 0.95 of their predicted rate"


def _share(found: dict[str, Any], name: str) -> float:
    """The rank correlation with the measurement over what the measurement has with itself."""
    return found[name]["spearman"] / max(found["repeat_spearman"], 1e-9)


def _ranks(per_model: dict[str, dict[str, Any]], what: str) -> str:
    """Over the models whose placements spread: the mean share, and how many reach 0.95."""
    spread = [found[what] for found in per_model.values() if found[what]["spread"] > SPREAD]
    if not spread:
        return f"{what}: no model's placements spread by more than {SPREAD:.0%}"
    ours, plain = ([_share(found, name) for found in spread] for name in ("predicted", "roofline"))
    return (
        f"{what}: of {len(spread)} models whose placements spread by more than {SPREAD:.0%}, rank "
        f"correlation is {np.mean(ours):.3f} of the repeats' on average, at least 0.95 in "
        f"{sum(x >= 0.95 for x in ours)} (roofline {np.mean(plain):.3f}, "
        f"{sum(x >= 0.95 for x in plain)})"
    )


def _line(model: str, count: int, what: str, found: dict[str, Any]) -> str:
    ours, plain = found["predicted"], found["roofline"]
    return (
        f"{model:14} {count:3} {what:8} {found['spread']:7.0%} {found['width']:6.1%} "
        f"{ours['median_error']:7.1%} {ours['p90_error']:7.1%} {ours['bias']:+7.1%} "
        f"{ours['spearman']:6.3f} {found['repeat_spearman']:7.3f} "
        f"{_share(found, 'predicted'):6.3f} | {plain['median_error']:8.1%} "
        f"{plain['spearman']:6.3f} {_share(found, 'roofline'):6.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    print(report(read(parser.parse_args().file)["models"]))


if __name__ == "__main__":
    main()
