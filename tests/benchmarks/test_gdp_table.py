"""GDP's workloads: how their sizes grow, so that the published scale is reached by arithmetic."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.gdp_table import WORKLOADS
from pretrain.corpus.build import traced
from pretrain.corpus.families import CorpusGraph
from pretrain.corpus.rnn import gnmt


def ops(layers: int, steps: int) -> int:
    """Ops of a small GNMT's training step."""
    arguments = {"layers": layers, "steps": steps, "hidden": 16, "batch": 2, "vocabulary": 50}
    return traced(CorpusGraph("gnmt", gnmt, "training", arguments)).num_ops


@pytest.mark.slow
def test_the_eight_layer_gnmt_has_more_than_50000_ops() -> None:
    """An unrolled step costs as many ops as the one before it, and so does a layer after the
    second: four small graphs tell the size of the large one."""
    of = {(layers, steps): ops(layers, steps) for layers in (3, 4) for steps in (2, 3)}
    assert ops(3, 4) - of[3, 3] == of[3, 3] - of[3, 2]
    layer = {steps: of[4, steps] - of[3, steps] for steps in (2, 3)}
    assert ops(5, 2) - of[4, 2] == layer[2]
    steps = WORKLOADS["gnmt-8"].variant.arguments["steps"]
    eight = {k: of[4, k] + 4 * layer[k] for k in (2, 3)}
    assert eight[2] + (steps - 2) * (eight[3] - eight[2]) == 51_803  # what tracing it counts
