"""The first run: who compiles what, what the user is told, and that later runs do neither."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gdp.api import first_run
from gdp.sim.score import score

REPOSITORY = str(Path(first_run.__file__).resolve().parents[2])

KERNEL = """
import sys
import numba
from gdp.api import first_run

class Helper:
    def poll(self): return None
    def wait(self): print("waited"); self.poll = lambda: 0
    def terminate(self): raise AssertionError("the helper had not ended")

def start(objective, pipe):
    print("helper takes", next(first_run._taken(pipe)))
    return Helper()

first_run._start = start
first_run.num_cores = lambda: 2

@numba.njit(cache=True)
def kernel(x):
    return x + 1

def group(name):
    return lambda _: print("main takes", name)

first_run.GROUPS = {name: group(name) for name in first_run.GROUPS}
first_run.GROUPS["simulator"] = lambda _: kernel(1)
first_run.prepare(sys.argv[1], sys.argv[2])
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
    assert first.stderr == f"gdp: {first_run.MESSAGE}\n"
    rest = ("pipeline", "search", "lists", "paths")
    mains = "".join(f"main takes {name}\n" for name in rest)
    assert first.stdout == f"helper takes policy\n{mains}waited\n"
    second = run(tmp_path, "auto", "throughput")
    assert (second.stderr, second.stdout) == ("", "")


def test_a_heuristic_gets_no_kernels_of_search_and_policy(tmp_path: Path) -> None:
    found = run(tmp_path, "heft", "latency")
    assert "bounds" in found.stdout
    assert "search" not in found.stdout
    assert "policy" not in found.stdout


def test_objectives_without_a_policy_are_left_alone(tmp_path: Path) -> None:
    found = run(tmp_path, "auto", "max_load")
    assert (found.stderr, found.stdout) == ("", "")


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_every_group_of_kernels_runs(objective: str) -> None:
    first_run.compile_groups(objective, list(first_run.GROUPS))


def test_the_tight_problem_has_something_to_repair() -> None:
    tight = first_run._tiny("latency", memory_bytes=70)
    assert score(tight, np.zeros(8, np.int64), None).overflow_bytes > 0
    assert score(tight, np.array([0] * 4 + [1] * 4), None).feasible


def test_two_processes_take_every_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, bytes(range(200)))
    os.close(theirs)
    code = "import os, time\nwhile b := os.read(0, 1): print(b[0]); time.sleep(0.001)"
    helper = subprocess.Popen([sys.executable, "-c", code], stdin=ours, stdout=subprocess.PIPE)
    monkeypatch.setattr(first_run, "GROUP_NAMES", range(200))
    mine = []
    for number in first_run._taken(ours):
        mine.append(int(number))
        time.sleep(0.001)
    os.close(ours)
    others = [int(line) for line in helper.communicate()[0].split()]
    assert sorted(mine + others) == list(range(200))


def test_a_helper_that_fails_changes_nothing() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, bytes([200]))  # no such group
    os.close(theirs)
    assert first_run._start("latency", ours).wait() != 0
    os.close(ours)


COMPLETE = """
import sys
from numba.core.dispatcher import Dispatcher
from gdp.api import first_run
from gdp.cli.main import cli

def ready():
    return {
        f"{value.py_func.__module__}.{value.py_func.__qualname__} {signature}"
        for name, module in list(sys.modules.items()) if name.startswith("gdp.")
        for value in vars(module).values() if isinstance(value, Dispatcher)
        for signature in value.overloads
    }

method, objective, graph = sys.argv[1:]
first_run.compile_groups(objective, first_run._groups_of(method, objective))
before = ready()
arguments = ["place", graph, "--cluster", "2xcpu-core", "--method", method]
cli([*arguments, "--objective", objective, "--evaluations", "200"], standalone_mode=False)
print("missing:", *sorted(ready() - before), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "objective"), [("heft", "latency"), ("auto", "latency"), ("auto", "throughput")]
)
def test_what_a_command_calls_is_in_its_groups(method: str, objective: str, tmp_path: Path) -> None:
    """Whatever is missing here, a new user waits for while the other process stands idle."""
    files = (Path(REPOSITORY) / "data/corpus/two_tower").glob("*.json.gz")
    graph = min(files, key=lambda file: (file.stat().st_size, file.name))
    script = tmp_path / "complete.py"
    script.write_text(COMPLETE)
    done = subprocess.run(
        [sys.executable, str(script), method, objective, str(graph)],
        env=os.environ | {"PYTHONPATH": REPOSITORY}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.partition("missing:")[2].split("\n") == ["", ""]


def test_an_interrupted_command_leaves_no_process_behind() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(KeyboardInterrupt), first_run._ended(process):
        raise KeyboardInterrupt
    assert process.poll() is not None


WRONG = [
    ["--method", "nonsense"],
    ["--simplicity", "200"],
    ["--evaluations", "-1"],
    ["--pin", "nowhere/*=core0"],
    ["--forbid", "*=core7"],
    ["--costs", "none"],
    ["--checkpoint", "none"],
]
REFUSING = """
import io, json, sys
from contextlib import redirect_stderr
from gdp.api import first_run
from gdp.cli import program
program.prepare_process()
from gdp.cli.main import cli
from gdp.cli.program import run
first_run.compile_groups = lambda *groups: print("compiled before refusing", file=sys.stderr)
for wrong in json.loads(sys.argv[2]):
    for verb in ("place", "run"):
        sys.argv[1:2] = [sys.argv[1]]
        said, before = io.StringIO(), sys.argv
        sys.argv = ["gdp", verb, before[1], "--cluster", "2xcpu-core", *wrong]
        try:
            with redirect_stderr(said):
                run(cli)
        except SystemExit as done:
            print(json.dumps([verb, wrong, done.code, said.getvalue()]))
        sys.argv = before
"""


def test_a_bad_argument_is_refused_in_one_line_before_anything_is_compiled(tmp_path: Path) -> None:
    """With an empty cache, as on the first start."""
    script = tmp_path / "refusing.py"
    script.write_text(REFUSING)
    done = subprocess.run(
        [sys.executable, str(script), "onnx:light_squeezenet", json.dumps(WRONG)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": REPOSITORY},
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * len(WRONG)
    for verb, wrong, code, said in rows:
        assert code == 2, (verb, wrong, said)
        assert said.startswith("gdp: ")
        assert said.count("\n") == 1, (verb, wrong, said)
