"""What the benchmark of an accelerator tells of its memory."""

import numpy as np

from benchmarks.accelerator import told_peak
from gdp.cluster.presets import cluster_preset
from gdp.sim.objectives import Score


def test_weights_under_way_are_on_the_accelerator_too() -> None:
    score = Score(1.0, 1.0, 0, np.array([5, 70]), 1.0)
    assert told_peak(cluster_preset("cpu+t4"), score, 30) == 100
