"""The first run: who compiles what, what the user is told, and that later runs do neither."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gdp.cli import first_run
from gdp.sim.score import score

REPOSITORY = str(Path(first_run.__file__).resolve().parents[2])

KERNEL = """
import sys
import numba
from gdp import first_run

class Helper:
    def poll(self): return None
    def wait(self): print("waited"); self.poll = lambda: 0
    def terminate(self): raise AssertionError("the helper had not ended")

started = []
first_run._start = lambda objective, names: started.append((objective, *names)) or Helper()
first_run.num_threads = lambda: 2

@numba.njit(cache=True)
def kernel(x):
    return x + 1

first_run.GROUPS["simulator"] = lambda _: kernel(1)
first_run.GROUPS["search"] = lambda _: print("search")
first_run.GROUPS["fusion"] = lambda _: print("fusion")
first_run.prepare(sys.argv[1], sys.argv[2])
print(started)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    if not script.exists():
        script.write_text(KERNEL)
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=True,
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": REPOSITORY},
    )  # fmt: skip


def test_the_first_run_says_so_and_shares_the_work_and_the_second_does_neither(
    tmp_path: Path,
) -> None:
    first = run(tmp_path, "auto", "throughput")
    assert first.stderr == f"{first_run.MESSAGE} ...\n"
    others = ("throughput", "lists", "policy", "pipeline")
    assert first.stdout == f"search\nfusion\nwaited\n[{others!r}]\n"
    second = run(tmp_path, "auto", "throughput")
    assert (second.stderr, second.stdout) == ("", "[]\n")


def test_methods_of_few_kernels_start_no_second_process(tmp_path: Path) -> None:
    found = run(tmp_path, "heft", "latency")
    assert found.stdout == "[]\n"
    assert first_run.MESSAGE in found.stderr


def test_objectives_without_a_policy_are_left_alone(tmp_path: Path) -> None:
    found = run(tmp_path, "auto", "max_load")
    assert (found.stderr, found.stdout) == ("", "[]\n")


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_every_group_of_kernels_runs(objective: str) -> None:
    first_run.compile_groups(objective, list(first_run.GROUPS))


def test_the_tight_problem_has_something_to_repair() -> None:
    tight = first_run._tiny("latency", memory_bytes=70)
    assert score(tight, np.zeros(8, np.int64), None).overflow_bytes > 0
    assert score(tight, np.array([0] * 4 + [1] * 4), None).feasible


def test_a_helper_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    process = first_run._start("latency", ["no such group"])
    assert process.wait() != 0


def test_an_interrupted_command_leaves_no_process_behind() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(KeyboardInterrupt), first_run._ended(process):
        raise KeyboardInterrupt
    assert process.poll() is not None
