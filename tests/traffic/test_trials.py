"""Trials of an engine by result files: `gdp tune --for`, with a simulated engine that gdp's own
order is wrong about."""

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gdp.api.measured.settings import Candidate, Figures, Setting, figures_of, served_candidates
from gdp.api.measured.trials import Trial, next_trial
from gdp.api.traffic.plan import engine_on
from gdp.base.errors import GdpError
from gdp.base.files.writing import TargetError
from gdp.cluster.file import load_cluster
from gdp.corrections.run import MeasurementFileError
from gdp.sim.serving import serve
from gdp.sim.traffic import ServedTraffic
from gdp.sim.traffic_text import NO_LIMITS, TrafficLimits, parse_traffic
from tests.generating_configs import generating_config

pytest.importorskip("transformers")
CLUSTER = "cpu+2xt4-pcie4"
TRAFFIC = "concurrency=64,prompt=192,new=16,requests=128"
TOGETHER = parse_traffic(f"{TRAFFIC},start=together")
Program = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(generating_config("llama")))
    return f"hf:{folder}"


@pytest.fixture(autouse=True)
def nothing_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path / "data"))


class SimulatedEngine:
    """An engine whose steps wait for one host that all copies share, which gdp does not know."""

    def __init__(self, candidates: list[Candidate], copies_s: float) -> None:
        self.served: dict[Setting, ServedTraffic] = {}
        for row in candidates:
            _, engine = engine_on(row.result, None)
            late = copies_s * (row.setting.copies - 1)
            slow = engine._replace(step_s=engine.step_s + late, launch_s=engine.launch_s + late)
            self.served[row.setting] = serve(TOGETHER, slow)

    def figures(self, setting: Setting) -> Figures:
        """The truth."""
        return figures_of(self.served[setting], NO_LIMITS)

    @property
    def best_s(self) -> float:
        """Seconds of a request under the best setting."""
        return min(served.request.mean_s for served in self.served.values())

    def document(self, setting: Setting, factor: float = 1.0) -> dict[str, Any]:
        """A file of `vllm bench serve`."""
        served, count = self.served[setting], len(TOGETHER.requests)
        seconds = served.seconds * factor
        first, token = served.first_token, served.token
        return {
            "backend": "vllm", "model_id": "llama", "num_prompts": count, "completed": count,
            "failed": 0, "duration": seconds, "request_rate": "inf", "max_concurrency": 64,
            "total_input_tokens": count * 192, "total_output_tokens": count * 16,
            "request_throughput": count / seconds, "output_throughput": count * 16 / seconds,
            "mean_ttft_ms": first.mean_s * 1e3 * factor,
            "median_ttft_ms": first.median_s * 1e3 * factor,
            "p95_ttft_ms": first.p95_s * 1e3 * factor,
            "mean_tpot_ms": token.mean_s * 1e3 * factor,
            "median_tpot_ms": token.median_s * 1e3 * factor,
            "p95_tpot_ms": token.p95_s * 1e3 * factor,
        }  # fmt: skip

    def run(self, trial: Trial, factor: float = 1.0, name: str = "result.json") -> Path:
        """The result file of a trial."""
        path = trial.folder / name
        path.write_text(json.dumps(self.document(trial.record.setting, factor)))
        return path


@pytest.fixture(scope="module")
def candidates(config: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Candidate]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDP_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        parts = {"cluster": load_cluster(CLUSTER), "target": "vllm"}
        yield served_candidates(parts, config, TOGETHER, NO_LIMITS).rows


@pytest.fixture(scope="module")
def engine(candidates: list[Candidate]) -> SimulatedEngine:
    return SimulatedEngine(candidates, 0.0)


def tuned(config: str, engine: SimulatedEngine, folder: Path, **more: Any) -> list[Any]:
    """All steps of the loop."""
    steps = []
    while not steps or steps[-1].next is not None:
        if steps:
            engine.run(steps[-1].next)
        steps.append(next_trial(config, CLUSTER, "vllm", traffic=TRAFFIC, folder=folder, **more))
        assert len(steps) < 10
    return steps


def test_x(config: str, engine: SimulatedEngine, tmp_path: Path) -> None:
    for s in engine.served: print(s, engine.figures(s))
    for step in tuned(config, engine, tmp_path / "tune"):
        print([ (t.record.setting, t.mean.request_s, t.record.predicted) for t in step.trials][-1:])
        print(step.expected_gain, step.learned, step.off, step.untried)
    from gdp.cli.measured import trials_text
    print(trials_text(step))
    assert 0
