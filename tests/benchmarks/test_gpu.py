"""The command for a machine with a GPU: budgets and records, and a rehearsal on the processor."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import Record


def test_a_step_that_fails_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    record = Record(tmp_path, 1.0)

    def broken(seconds: float) -> None:
        raise KeyError(f"after {seconds:.0f} s")

    assert record.step("broken", 3.0, broken) is None
    assert record.step("good", 4.0, lambda seconds: {"seconds": seconds}) == {"seconds": 4.0}
    on_disk = json.loads((tmp_path / "gpu.json").read_text())  # before the end, too
    assert on_disk["steps"]["broken"]["status"] == "failed: KeyError: 'after 3 s'"
    assert "broken" in on_disk["steps"]["broken"]["trace"]
    assert on_disk["results"] == {"good": {"seconds": 4.0}}
    record.close()
    assert json.loads((tmp_path / "gpu.json").read_text()) == record.found


def test_no_step_begins_when_time_is_over(tmp_path: Path) -> None:
    record = Record(tmp_path, 1.0)
    record.end_s = time.monotonic()
    assert record.step("late", 5.0, lambda seconds: {"never": 1}) is None
    record.close()
    assert record.found["steps"]["late"]["status"] == "left out: no time left"


def test_what_runs_when_time_is_over_is_cut_off_with_all_written(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from benchmarks.gpu import Record\n"
        "record = Record(Path(sys.argv[1]), 0.01)\n"
        "record.step('first', 1, lambda s: {'a': 1})\n"
        "record.step('long', 1, lambda s: time.sleep(60))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2], check=False,
        timeout=30,
    )  # fmt: skip
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert done.returncode == 0
    assert found["results"] == {"first": {"a": 1}}
    assert found["steps"]["long"]["status"] == "cut off: time was over"


WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys({NAMES}))  # importing one is an error
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""
NAMES = {"onnx", "onnxruntime", "onnx_ir", "flax", "jraph", "click", "rich", "pymetis",
         "ortools", "matplotlib"}  # fmt: skip
"""What a machine with a GPU need not have."""


@pytest.mark.slow
def test_a_rehearsal_runs_every_step_with_few_packages(tmp_path: Path) -> None:
    for needed in ("torch", "transformers", "accelerate"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.replace("{NAMES}", repr(NAMES)), "--device", "cpu",
         "--minutes", "0.4", "--models", "llama", "-o", str(tmp_path / "out")],
        cwd=Path(__file__).parents[2], check=False, timeout=200, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    failed = {name: step for name, step in found["steps"].items() if "failed" in step["status"]}
    assert not failed
    # On a slow machine time may be over early, and is kept to.
    rows = found["results"].get("execute llama", {"contenders": {}})["contenders"].values()
    assert not [row["failed"] for row in rows if "failed" in row]
