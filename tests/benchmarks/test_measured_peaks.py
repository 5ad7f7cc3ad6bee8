"""Measured peaks of products: which rows count, and how predictions stand beside them."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.measured_world.__main__ import main
from benchmarks.measured_world.peaks import Peak, measured_peaks, products, rates, told
from gdp.cluster.presets import cluster_preset
from gdp.costs.base import roofline

ROWS = (
    "device,tflops_fp32,tflops_tf32,tflops_fp16,tflops_bf16,torch",
    "RTX 3090 24GB,24.5,,75,76,2.6", "RTX 3090,24.8,,74,,2.8", "RTX 3090 *OC,99,,99,99,",
    "RTX 3080 Laptop GPU,11,,37,35,", "Tesla T4 16GB,4.2,,41.9,2.5,", "GTX 1650 Ti,2,,0.4,1.7,",
)  # fmt: skip


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "peaks.csv"
    path.write_text("\n".join(ROWS) + "\n")
    return path


def test_the_fastest_card_of_each_preset_counts(rows: Path) -> None:
    assert measured_peaks(rows) == {
        ("rtx3090", "float32"): 24.8e12, ("rtx3090", "float16"): 75e12,
        ("rtx3090", "bfloat16"): 76e12, ("t4", "float32"): 4.2e12, ("t4", "float16"): 41.9e12,
    }  # fmt: skip


def test_a_roofline_reaches_the_datasheet_in_large_products_and_no_other() -> None:
    """By hand on a T4: 65 TFLOP/s, 320 GB/s, 6 us of launch; 256^3 is 33.6 MFLOP."""
    cluster, graph = cluster_preset("t4"), products("float16", (256, 16384))
    predicted = rates(graph, cluster, roofline)
    small_s = 3 * 2 * 256**2 / 320e9  # its traffic takes longer than its arithmetic
    assert predicted[0] == pytest.approx(2 * 256**3 / (small_s + 6e-6))
    assert predicted.max() == predicted[-1] == pytest.approx(65e12, rel=1e-3)


def test_predictions_above_the_peak_are_counted() -> None:
    peaks = [
        Peak("x", "float16", 100.0, np.array([90.0, 104.0, 120.0]), np.array([130.0])),
        Peak("y", "float16", 100.0, np.array([80.0]), np.array([102.0])),
    ]
    lines = list(told(peaks, 0.05))
    assert lines[1].endswith("| 1.20 | 1.30 | 1 of 3 |")
    assert (
        "predictions pass the measured peak by more than 5% on 1 of 2 cards, at all on 1; "
        in (lines[-1])
    )
    assert "1.00 in the median" in lines[-1]
    assert "1.20 at worst; datasheets" in lines[-1]


def test_the_command_compares_cards_and_refuses_a_file_of_none(rows: Path) -> None:
    answer = CliRunner().invoke(main, ["peaks", "--peaks", str(rows)])
    assert answer.exit_code == 0, answer.output
    assert len([line for line in answer.output.splitlines() if line.startswith("| t4 |")]) == 2
    rows.write_text("\n".join(ROWS[:1]) + "\n")
    answer = CliRunner().invoke(main, ["peaks", "--peaks", str(rows)])
    assert answer.exit_code == 2
    assert "no row is of a card that gdp has a preset of" in answer.output
