"""Errors and rank correlations of predicted placements, worked by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.validate import FORMAT, figures, read, report


def row(name: str, predicted: float, rounds: list[float], value: float) -> dict[str, Any]:
    """A placement whose latency and period are the same."""
    made: dict[str, Any] = {"name": name}
    for what in ("latency", "period"):
        made |= {
            f"{what}_s": value, f"{what}_rounds_s": rounds, f"predicted_{what}_s": predicted,
            f"{what}_interval_s": [0.9 * value, 1.1 * value], f"roofline_{what}_s": 2 * predicted,
        }  # fmt: skip
    return made


def rows() -> list[dict[str, Any]]:
    """Predicted 10% low, exact and 20% high, and in the order of the even rounds; the odd rounds
    have the last two the other way round."""
    return [
        row("a", 0.9, [1.0, 1.0, 1.0, 1.0], 1.0),
        row("b", 2.0, [2.0, 3.1, 2.0, 3.1], 2.0),
        row("c", 3.6, [3.0, 2.9, 3.0, 2.9], 3.0),
    ]


def test_medians_are_compared_and_every_other_round_is_a_repeat() -> None:
    found = figures(rows())["period"]
    assert found["predicted"]["median_error"] == pytest.approx(0.1)
    assert found["predicted"]["bias"] == pytest.approx(0.0)
    assert found["width"] == pytest.approx(0.2)
    assert found["spread"] == pytest.approx(2.0)
    assert found["repeat_spearman"] == pytest.approx(0.5)
    assert found["predicted"]["spearman"] == pytest.approx((1.0 + 0.5) / 2)


def test_pipelines_that_keep_their_predicted_rate_are_counted() -> None:
    """Predicted at 0.9, 1 and 1.2 times what they took: two of three at 0.95 at least."""
    assert "67% of the pipelines run at 0.95 of their predicted rate" in report({"m": rows()})
    assert report({"m": []}) == "nothing was measured"


def test_files_that_hold_the_fastest_rounds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pass.json"
    path.write_text(json.dumps({"resnet50": [{"period_s": [0.1, 0.2]}]}))
    with pytest.raises(ValueError, match=r"pass.json was measured with another statistic"):
        read(path)
    path.write_text(json.dumps({"format": FORMAT, "models": {}}))
    assert read(path)["models"] == {}
