"""Markdown tables, means and intervals, as the benchmarks print them."""

from collections.abc import Sequence

import numpy as np


def head(titles: str, left: int = 1) -> str:
    """The heading of a table: titles with bars between them; all columns but the first `left` hold
    numbers."""
    return f"| {titles} |\n|" + " --- |" * left + " ---: |" * (titles.count("|") + 1 - left)


def line(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def between(value: float, low: float, high: float, form: str = ".1f") -> str:
    """A value and its interval."""
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def geomean(ratios: Sequence[float] | np.ndarray) -> float:
    """The geometric mean; nan of nothing."""
    return float(np.exp(np.mean(np.log(ratios)))) if len(ratios) else float("nan")


def interval(values: np.ndarray) -> float:
    """Half the width of the 95% interval of the mean (Student); 0 for a single value."""
    if len(values) < 2:
        return 0.0
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
