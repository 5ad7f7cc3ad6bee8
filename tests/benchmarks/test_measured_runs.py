"""Measured runs under load: which are asked, and how long they take."""

from pathlib import Path

import pytest

from benchmarks.measured_world.runs import Loaded, loaded_runs, seconds_of, told
from benchmarks.measured_world.serving import Predicted, Run

HEAD = (
    "device,n_devices,model,engine,max_num_seqs,requests,arrival_span_s,input_tokens_mean,"
    "output_tokens_mean,duration_s,output_tokens_per_s,tpot_mean_ms"
)


def test_runs_of_one_device_are_asked(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        f"{HEAD}\nNVIDIA H100 80GB,1,o/m,vllm 0.19,128,300,29.5,857.5,652.4,60,2900,32.5\n"
        "NVIDIA H100 80GB,2,o/n,vllm 0.19,128,300,29.5,857.5,652.4,60,2900,32.5\n"
    )
    (loaded,), others = loaded_runs(path)
    assert (loaded.preset, loaded.requests, loaded.seconds) == ("h100", 300, 60.0)
    assert (loaded.run.prompt, loaded.run.new, loaded.run.batch) == (858, 652, 128)
    assert loaded.run.token_s == pytest.approx(0.0325)
    assert others == ["o/n on 2 x NVIDIA H100 80GB"]


def test_slots_are_half_full_while_they_fill_and_empty() -> None:
    """By hand: 40 requests of 1 + 100 x 0.09 = 10 s in 10 slots, which fill in 5 of 20 s: 2.5 s,
    four lives and half of one."""
    run = Run("r", "m", "h100", "vllm", "", 64, 100, 10, 0.0, 0.1)
    loaded = Loaded(run, "h100", 40, 20.0, 50.0, 80.0)
    answer = Predicted(10, first_s=1.0, token_s=0.09)
    assert seconds_of(loaded, answer) == pytest.approx(2.5 + 40 + 5)
    line = list(told([loaded], {"shipped": [answer]}))[-1]
    assert "| 90.0 | 100.0 | -10% | 84 | 80 | +5% | 47.5 | 50.0 | -5% |" in line
