"""The walk of a question through gdp: functions, files and rooms that one command enters.

    python -m benchmarks.walk [--case onnx|accelerate|traffic|fit|tune] [--json]

Each command runs in a process of its own, under Python's profiling hook, with kernels compiled and
the model's trace kept by an earlier run of the same command. A room is a package of `gdp/`, or a
file beside them; a call changes the room where the caller, the nearest function of gdp on the
stack, is in another. Counts need no quiet machine and are the same at every run.
"""

import inspect
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
LLAMA = f"hf:{ROOT}/examples/llama-7b"
CASES: dict[str, list[str]] = {
    "onnx": ["place", "onnx:light_squeezenet", "--cluster", "2xt4-pcie4", "--evaluations", "300"],
    "accelerate": [
        "place", LLAMA, "--for", "accelerate", "--cluster", "cpu+rtx4090", "--evaluations", "300",
    ],
    "traffic": [
        "place", LLAMA, "--for", "vllm", "--cluster", "cpu+h100",
        "--traffic", "concurrency=4,prompt=256,new=16", "--no-disaggregation",
    ],
    "fit": ["fit", "GGUF", "--cluster", "cpu+rtx4090,cpu+h100", "--prompt", "1024,4096"],
    "tune": ["tune", "onnx:light_squeezenet", "--cluster", "2xcpu-core", "--runs", "2"],
}  # fmt: skip
PREPARED = ("prepare_problem", "fuse", "resolve_costs", "load", "methods")
"""Functions whose calls say how often the same is made again."""


class Walk:
    """Calls of functions of gdp while a command runs."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.room_changes = 0
        self._package = str(ROOT / "gdp") + "/"
        self._rooms: dict[CodeType, str | None] = {}

    def on_event(self, frame: FrameType, event: str, argument: object) -> None:
        """Count a call; the hook of `sys.setprofile`."""
        del argument
        if event != "call":
            return
        room = self._room(frame.f_code)
        if room is None:
            return
        self.calls[frame.f_code] += 1
        caller = frame.f_back
        while caller is not None and self._room(caller.f_code) is None:
            caller = caller.f_back
        if caller is not None and self._room(caller.f_code) != room:
            self.room_changes += 1

    def _room(self, code: CodeType) -> str | None:
        """The first folder or the file below `gdp/`; None for code of others, and for the bodies
        of modules and classes, which run when they are imported."""
        if code not in self._rooms:
            runs = bool(code.co_flags & inspect.CO_OPTIMIZED)
            inside = runs and code.co_filename.startswith(self._package)
            path = code.co_filename.removeprefix(self._package)
            self._rooms[code] = path.split("/")[0] if inside else None
        return self._rooms[code]

    def counts(self) -> dict[str, Any]:
        """One row of the table."""
        named = Counter[str]()
        for code, times in self.calls.items():
            named[code.co_name] += times
        return {
            "functions": len(self.calls),
            "files": len({code.co_filename for code in self.calls}),
            "rooms": len({self._room(code) for code in self.calls}),
            "calls": sum(self.calls.values()),
            "room_changes": self.room_changes,
            "numba": "numba" in sys.modules,
        } | {name: named[name] for name in PREPARED}


def walked(arguments: list[str]) -> dict[str, Any]:
    """Counts of a command that runs in this process."""
    from gdp.cli.main import cli

    walk = Walk()
    threading.setprofile(walk.on_event)
    sys.setprofile(walk.on_event)
    try:
        cli.main(arguments, standalone_mode=False)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return walk.counts()


def counted(arguments: list[str]) -> dict[str, Any]:
    """Counts of a command in a new process, the second of two."""
    command = [sys.executable, "-m", "benchmarks.walk", "--here", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stderr.splitlines()[-1])


def small_gguf(folder: Path) -> str:
    """The header of a decoder of eight blocks; its weights take no room on the disk."""
    from benchmarks.llamacpp import ModelSize, write_model

    size = ModelSize("small", "Q4_K", layers=8, width=1024, inner=4096, heads=16, key_heads=4)
    return str(write_model(folder / "small.gguf", size, hollow=True))


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--case", "cases", type=click.Choice(list(CASES)), multiple=True, help="Default: all."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.option("--here", is_flag=True, hidden=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(cases: tuple[str, ...], as_json: bool, here: bool, arguments: tuple[str, ...]) -> None:
    """Print the table."""
    if here:
        counts = walked(list(arguments))
        click.echo(json.dumps(counts), err=True)
        return
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in cases or CASES:
            model = small_gguf(Path(folder)) if "GGUF" in CASES[name] else ""
            rows[name] = counted([model if word == "GGUF" else word for word in CASES[name]])
            if not as_json:
                click.echo(f"gdp {' '.join(CASES[name]).replace(str(ROOT) + '/', '')}")
                click.echo("  " + ", ".join(f"{key} {value}" for key, value in rows[name].items()))
    if as_json:
        click.echo(json.dumps(rows))


if __name__ == "__main__":
    main()
