"""HSDAG's models to be executed, and the loop that times OpenVINO."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.hsdag_measured import OneByOne, table_text
from benchmarks.published.hsdag_onnx import inception_v3
from gdp.runtime.measure import Measuring, Quota, measure


class Compiled:
    """Stands for a model of OpenVINO; counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, np.ndarray]] = []

    def create_infer_request(self) -> "Compiled":
        return self

    def infer(self, feeds: dict[str, np.ndarray]) -> None:
        self.asked.append(feeds)


def test_samples_run_one_after_another_until_the_quota_is_met() -> None:
    compiled, feeds = Compiled(), {"x": np.zeros(1)}
    (trace,) = OneByOne(compiled, feeds).run(Quota(completions=20, seconds=0.0, cap_s=60.0))
    assert len(compiled.asked) == len(trace.start_s) == 22  # one fills, one empties the pipeline
    assert all(asked is feeds for asked in compiled.asked)
    ends, starts = np.array(trace.finish_s), np.array(trace.start_s)
    assert (starts[1:] >= ends[:-1]).all()
    found = measure({"it": OneByOne(compiled, feeds)}, Measuring(0.05))["it"]
    rows = [{"row": "it", "latency_s": found.latency_s, "interval_s": [0.001, 0.002]}]
    assert table_text("m", rows).endswith("| 1.00 to 2.00 |")


def test_inception_v3_has_its_published_size() -> None:
    """23.8 million parameters without the auxiliary head, normalisation's included."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    module = inception_v3().eval()
    assert sum(p.numel() for p in module.parameters()) == 23_834_568
    with torch.no_grad():
        assert module(torch.zeros(1, 3, 299, 299)).shape == (1, 1000)
