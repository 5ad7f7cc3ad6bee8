"""Seconds from a command to its answer: the first after installing, and every later one.

    python benchmarks/first_answer.py [--case run|place|train|heft] [--repeat 5] [--json]

Whole processes, `python -m gdp`, with caches in a fresh folder: cold, then warm; wall-clock seconds
and CPU seconds, those of processes started by it included. Then one more of each in which the CPU
seconds of the main process are split up: imports, compiling, loading compiled kernels, the model,
the problem, each part of the placement, the run; and the kernels that took longest to compile.
Seconds of search and of measuring are part of the totals and named beside them. What installing
takes is not part of either; `--no-parts` leaves out the processes that are split up.
"""

import builtins
import contextlib
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
TRAINING = "data/corpus/multi_modal/multi_modal-layers4-training.json.gz"
INCEPTION = ["onnx:light_inception_v2", "--cluster", "2xcpu-core"]
CASES: dict[str, list[str]] = {
    "run": ["run", *INCEPTION, "--objective", "throughput"],  # the README's first command
    "place": ["place", *INCEPTION, "--method", "policy"],
    "train": ["place", str(ROOT / TRAINING), "--cluster", "4xa100-nvlink", "--method", "policy"],
    "heft": ["place", *INCEPTION, "--method", "heft"],
}
PARTS: dict[str, tuple[str, str]] = {
    "model": ("gdp.models", "load"),
    "problem": ("gdp.posed", "pose"),
    "warm-up": ("gdp.cli.first_run", "prepare"),
    "policy": ("gdp.policy.method", "place_with_policy"),
    "advice": ("gdp.policy.advice", "_made"),
    "candidates": ("gdp.methods.portfolio", "_try"),
    "search": ("gdp.methods.portfolio", "improve"),
    "bound": ("gdp.api", "_bound"),
    "run": ("gdp.runtime.ort.run", "run_onnx"),
    "measuring": ("gdp.runtime.measure", "measure"),
    "load kernels": ("numba.core.caching", "Cache.load_overload"),
}
"""Functions whose seconds are told apart, where they are defined."""


class Clock:
    """CPU seconds by part, each without the parts inside it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.kernels: defaultdict[str, float] = defaultdict(float)
        self._stack: list[str] = ["other"]
        self._since_s = 0.0  # of the process: starting Python counts
        self._patched: set[str] = set()

    def _turn(self) -> None:
        now_s = time.process_time()
        self.seconds[self._stack[-1]] += now_s - self._since_s
        if self._stack[-1].startswith("compile "):
            self.kernels[self._stack[-1].removeprefix("compile ")] += now_s - self._since_s
        self._since_s = now_s

    def enter(self, part: str) -> None:
        """What is spent from here on belongs to a part."""
        self._turn()
        self._stack.append(part)

    def leave(self) -> None:
        """Back to the part before."""
        self._turn()
        self._stack.pop()

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, on the clock."""

        def wrapped(*args: Any, **options: Any) -> Any:
            self.enter(part)
            try:
                return call(*args, **options)
            finally:
                self.leave()

        return wrapped

    def watch(self) -> None:
        """Time imports from here on, and the parts as soon as their modules are there."""
        plain = self.timed("imports", builtins.__import__)

        def importing(*args: Any, **options: Any) -> Any:
            found = plain(*args, **options)
            self._patch()
            return found

        builtins.__import__ = importing

    def _patch(self) -> None:
        for part, (module, path) in PARTS.items():
            if part in self._patched or module not in sys.modules:
                continue
            *outer, name = path.split(".")
            owner: Any = sys.modules[module]
            for step in outer:
                owner = getattr(owner, step, None)
            if owner is not None and hasattr(owner, name):
                self._patched.add(part)
                setattr(owner, name, self.timed(part, getattr(owner, name)))
        if "compile" not in self._patched and "numba.core.event" in sys.modules:
            event = sys.modules["numba.core.event"]
            if hasattr(event, "register"):
                self._patched.add("compile")
                event.register("numba:compile", _listener(event, self))

    def report(self) -> dict[str, Any]:
        """Seconds by part; of the kernels, the dearest."""
        self._turn()
        parts: defaultdict[str, float] = defaultdict(float)
        for part, seconds in self.seconds.items():
            parts["compile" if part.startswith("compile ") else part] += seconds
        return {
            "parts_s": dict(_dearest(parts)),
            "kernels": len(self.kernels),
            "kernels_s": dict(_dearest(self.kernels)[:25]),
        }


def _dearest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda pair: -pair[1])


def _listener(event: Any, clock: Clock) -> Any:
    class Listener(event.Listener):
        def on_start(self, event: Any) -> None:
            function = event.data["dispatcher"].py_func
            clock.enter(f"compile {function.__module__}.{function.__qualname__}")

        def on_end(self, event: Any) -> None:
            del event
            clock.leave()

    return Listener()


def split(report: str, arguments: list[str]) -> None:
    """Run the command in this process and write where its seconds went."""
    clock = Clock()
    clock.watch()
    sys.argv = ["gdp", *arguments]
    try:
        with contextlib.suppress(SystemExit):
            runpy.run_module("gdp", run_name="__main__")
    finally:
        Path(report).write_text(json.dumps(clock.report()))


@contextlib.contextmanager
def _caches() -> Iterator[dict[str, str]]:
    """An environment with empty caches."""
    with tempfile.TemporaryDirectory(prefix="gdp-first-") as folder:
        yield os.environ | {"NUMBA_CACHE_DIR": f"{folder}/numba", "GDP_CACHE_DIR": f"{folder}/gdp"}


def _timed_run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Wall-clock and CPU seconds of one process and of all that it waits for."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - began_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def _split_run(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        subprocess.run(
            [sys.executable, __file__, "split", report.name, *arguments],
            env=environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(Path(report.name).read_text())


def measure(arguments: list[str], repeat: int, parts: bool) -> dict[str, Any]:
    """One cold process, several warm ones, and the parts of one more of each."""
    command = [sys.executable, "-m", "gdp", *arguments]
    with _caches() as environment:
        cold = _timed_run(command, environment)
        warm = [_timed_run(command, environment) for _ in range(repeat)]
        warm_parts = _split_run(arguments, environment) if parts else {}
    with _caches() as environment:
        cold_parts = _split_run(arguments, environment) if parts else {}
    return {
        "command": " ".join(["gdp", *arguments]),
        "cold": cold | cold_parts,
        "warm": {key: median(row[key] for row in warm) for key in cold} | warm_parts,
    }


def _table(row: dict[str, Any]) -> str:
    lines = [row["command"]]
    for kind in ("cold", "warm"):
        found = row[kind]
        lines.append(f"  {kind}: {found['wall_s']:.2f} s, of CPU {found['cpu_s']:.2f} s")
        if "parts_s" not in found:
            continue
        parts = [f"{part} {s:.2f}" for part, s in found["parts_s"].items() if s >= 0.005]
        lines.append(f"    main process, CPU s: {', '.join(parts)}")
        if found["kernels"]:
            lines.append(f"    {found['kernels']} kernels compiled there; the dearest, CPU s:")
            lines += [f"      {s:6.2f}  {name}" for name, s in found["kernels_s"].items()]
    return "\n".join(lines)


@click.command()
@click.option(
    "--case", "cases", type=click.Choice(list(CASES)), multiple=True, help="Default: all."
)
@click.option("--repeat", type=int, default=5, show_default=True, help="Warm processes.")
@click.option("--parts/--no-parts", default=True, help="Split up the main process's CPU seconds.")
@click.option("--json", "as_json", is_flag=True)
def main(cases: tuple[str, ...], repeat: int, parts: bool, as_json: bool) -> None:
    """Print the table."""
    rows = [measure(CASES[name], repeat, parts) for name in cases or CASES]
    click.echo(json.dumps({"rows": rows}) if as_json else "\n".join(map(_table, rows)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["split"]:
        split(sys.argv[2], sys.argv[3:])
    else:
        main()
