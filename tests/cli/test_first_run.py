"""The first run: what is compiled, which progress is shown, and that later runs do neither."""

import json
import os
import subprocess
import sys
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

@numba.njit(cache=True)
def kernel(x):
    return x + 1

def group(name):
    return lambda _: print(name)

first_run.GROUPS = {name: group(name) for name in first_run.GROUPS}
first_run.GROUPS["simulator"] = lambda _: kernel(1)
first_run.prepare(sys.argv[1], sys.argv[2], lambda text: print(text, file=sys.stderr))
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    if not script.exists():
        script.write_text(KERNEL)
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=True,
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": REPOSITORY},
    )  # fmt: skip


def test_the_first_run_reports_every_group_and_the_second_compiles_nothing(tmp_path: Path) -> None:
    first = run(tmp_path, "auto", "throughput")
    rest = ("policy", "pipeline", "search", "lists")
    said = [f"{first_run.MESSAGE} ({number} of {1 + len(rest)})" for number in range(1, 6)]
    assert first.stderr.splitlines() == said
    assert first.stdout == "".join(f"{name}\n" for name in rest)
    second = run(tmp_path, "auto", "throughput")
    assert (second.stderr, second.stdout) == ("", "")


def test_a_heuristic_gets_no_kernels_of_search_and_policy(tmp_path: Path) -> None:
    found = run(tmp_path, "heft", "latency")
    assert found.stdout == "lists\n"


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


@pytest.mark.parametrize(
    ("method", "objective"), [("heft", "latency"), ("auto", "latency"), ("auto", "throughput")]
)
def test_what_a_command_calls_is_in_its_groups(method: str, objective: str, tmp_path: Path) -> None:
    """Whatever is missing is compiled within the budget of a new user's search, without a word."""
    files = (Path(REPOSITORY) / "data/corpus/two_tower").glob("*.json.gz")
    graph = min(files, key=lambda file: (file.stat().st_size, file.name))
    script = tmp_path / "complete.py"
    script.write_text(COMPLETE)
    done = subprocess.run(
        [sys.executable, str(script), method, objective, str(graph)],
        env=os.environ | {"PYTHONPATH": REPOSITORY}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.partition("missing:")[2].split("\n") == ["", ""]


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
