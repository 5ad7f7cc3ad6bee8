"""Errors and rank correlations of predicted placements, as a table.

    python -m benchmarks.validate_report validate.json [again.json ...]

Files are passes over the same placements, minutes or more apart: each is one repeat. Of one file,
the two interleaved halves are the repeats, which then share what the machine did meanwhile. What is
measured is the fastest repeat; rank correlations are means over repeats, and over pairs of repeats
for what the measurement has with itself.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

SPREAD = 0.1
"""Models whose placements differ by less have no order to predict."""


def _rank_correlation(a: Float[np.ndarray, "P"], b: Float[np.ndarray, "P"]) -> float:
    """Spearman's, with ties ranked by their mean."""
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors and rank correlations of one model's placements."""
    found: dict[str, Any] = {"placements": len(rows)}
    for what in ("latency", "period"):
        measured = np.array([min(row[f"{what}_s"]) for row in rows])
        common = min(len(row[f"{what}_s"]) for row in rows)
        repeats = np.array([row[f"{what}_s"][:common] for row in rows])
        pairs = itertools.combinations(repeats.T, 2)
        found[what] = {
            "spread": float(measured.max() / measured.min() - 1),
            "repeat_spearman": float(np.mean([_rank_correlation(a, b) for a, b in pairs])),
        }
        for name in ("predicted", "roofline"):
            made = np.array([row[f"{name}_{what}_s"] for row in rows])
            error = np.abs(made / measured - 1)
            found[what][name] = {
                "median_error": float(np.median(error)),
                "p90_error": float(np.quantile(error, 0.9)),
                "bias": float(np.median(made / measured - 1)),
                "spearman": float(np.mean([_rank_correlation(made, r) for r in repeats.T])),
            }
    return found


def passes(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One document in which every pass is a repeat. A pass that did not finish a model does not
    count for it; a model with one pass keeps its two halves. Predictions are the last pass's."""
    merged: dict[str, Any] = {}
    for model in dict.fromkeys(name for document in documents for name in document):
        of_pass = [{row["name"]: row for row in d.get(model, [])} for d in documents]
        most = max(len(rows) for rows in of_pass)
        whole = [rows for rows in of_pass if len(rows) == most]
        if len(whole) == 1:
            merged[model] = list(whole[0].values())
            continue
        merged[model] = []
        for name, last in whole[-1].items():
            row = dict(last)
            for key in ("latency_s", "period_s"):
                row[key] = [min(rows[name][key]) for rows in whole]
            for key in ("alone", "busy"):
                found = [rows[name].get(key) for rows in whole]
                row[key] = found if None not in found else None
            row["mean_period_s"] = min(
                rows[name].get("mean_period_s", np.mean(rows[name]["period_s"])) for rows in whole
            )
            merged[model].append(row)
    return merged


def report(document: dict[str, Any]) -> str:
    """The figures as a table; shares are Spearman's correlation of predicted and measured over
    that of the repeats."""
    document = {model: rows for model, rows in document.items() if rows}
    lines = [
        f"{'model':14} {'n':>3} {'what':8} {'spread':>7} {'error':>7} {'p90':>7} {'bias':>7} "
        f"{'rank':>6} {'repeat':>7} {'share':>6} | {'roofline':>8} {'rank':>6} {'share':>6}"
    ]
    per_model = {model: figures(rows) for model, rows in document.items()}
    for model, found in per_model.items():
        for what in ("latency", "period"):
            lines.append(_line(model, found["placements"], what, found[what]))
    rows = [row for entries in document.values() for row in entries]
    found = figures(rows)
    lines += [_line("all", len(rows), what, found[what]) for what in ("latency", "period")]
    lines += [_ranks(per_model, what) for what in ("latency", "period")]
    means = [row["predicted_period_s"] / row["mean_period_s"] - 1 for row in rows
             if "mean_period_s" in row]  # fmt: skip
    if means:
        lines.append(f"period against the mean of all rounds: {_errors(np.array(means))}")
    return "\n".join([*lines, *_at_reference_speed(document)])


def _errors(error: Float[np.ndarray, "P"]) -> str:
    return f"median error {np.median(np.abs(error)):.1%}, bias {np.median(error):+.1%}"


def _at_reference_speed(document: dict[str, Any]) -> list[str]:
    """Errors and ranks with the machine's speed at the time taken out."""
    at = {
        model: [
            row | {"latency_s": (np.array(row["latency_s"]) / row["alone"]).tolist(),
                   "period_s": (np.array(row["period_s"]) / row["busy"]).tolist()}
            for row in rows
        ]
        for model, rows in document.items() if all(row.get("alone") for row in rows)
    }  # fmt: skip
    rows = [row for found in at.values() for row in found]
    if not rows:
        return []
    alone, busy = (np.concatenate([np.ravel(r[name]) for r in rows]) for name in ("alone", "busy"))
    lines = [
        f"models of known speed took {np.median(alone):.3f} of their profile's time on one core, "
        f"{np.median(busy):.3f} with all cores busy; with that taken out ({len(rows)} placements):"
    ]
    for what in ("latency", "period"):
        error = [r[f"predicted_{what}_s"] / min(r[f"{what}_s"]) - 1 for r in rows]
        lines.append(f"{what}: {_errors(np.array(error))}")
    per_model = {model: figures(found) for model, found in at.items()}
    return lines + [_ranks(per_model, what) for what in ("latency", "period")]


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
        f"{model:14} {count:3} {what:8} {found['spread']:7.0%} {ours['median_error']:7.1%} "
        f"{ours['p90_error']:7.1%} {ours['bias']:+7.1%} {ours['spearman']:6.3f} "
        f"{found['repeat_spearman']:7.3f} {_share(found, 'predicted'):6.3f} | "
        f"{plain['median_error']:8.1%} {plain['spearman']:6.3f} {_share(found, 'roofline'):6.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("passes", nargs="+", type=Path)
    found = [json.loads(path.read_text()) for path in parser.parse_args().passes]
    print(report(passes(found) if len(found) > 1 else found[0]))


if __name__ == "__main__":
    main()
