"""Runs of the golden cases, and what is recorded of them."""

import contextlib
import functools
import io
import json
import re
import runpy
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from golden.answers import numbers, placement_summary, without
from golden.calls import CALLS
from golden.cases import CLUSTERS, FOLLOWED, PLACED
from golden.models import FILES

SECONDS = ("--seconds", "6000")
"""Far beyond what any case takes, so that evaluations end searches, and proofs their own work."""
_PLACED = {case.name: case for case in PLACED}
_FOLLOWED = {case.name: case for case in FOLLOWED}
NAMES = (*_PLACED, *_FOLLOWED, *CALLS)


def missing(name: str) -> str:
    """The module of an optional extra that a case needs and that is not installed, or ""."""
    return next((module for module in _needs(name) if find_spec(module) is None), "")


def traced_with(name: str) -> dict[str, str]:
    """Versions of the installed libraries whose own code a case traces: their models change."""
    return {
        module: version(module).partition("+")[0]
        for module in _needs(name)
        if module in ("torch", "transformers")
    }


def _needs(name: str) -> tuple[str, ...]:
    if name in CALLS:
        return CALLS[name].needs
    return _PLACED[_FOLLOWED[name].of if name in _FOLLOWED else name].needs


def answer(name: str) -> dict[str, Any]:
    """What a case answers now."""
    if name in _PLACED:
        return _placed(name)[0]
    with contextlib.chdir(_folder()):
        if name in CALLS:
            return CALLS[name].call(Path.cwd())
        return _followed(name)


@functools.cache
def _folder() -> Path:
    """Where the cases run, with the cluster files; it lasts as long as the process."""
    kept = tempfile.TemporaryDirectory(prefix="golden-")
    _KEPT.append(kept)
    for name, text in CLUSTERS.items():
        Path(kept.name, name).write_text(text)
    return Path(kept.name)


_KEPT: list[Any] = []


def written(text: str) -> list[str]:
    """The arguments of a command line, the model file among them written where it is not yet."""
    words = shlex.split(text)
    name = words[0].removeprefix("hf:") if words else ""
    if name in FILES and not Path(name).exists():
        FILES[name](Path(name))
    return words


def program(*arguments: str) -> tuple[int, str]:
    """`python -m gdp` in this process: its exit code and standard output."""
    out, before = io.StringIO(), sys.argv
    sys.argv = ["gdp", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            runpy.run_module("gdp", run_name="__main__")
    except SystemExit as done:
        return int(done.code or 0), out.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("the program ends by exiting")


@functools.cache
def _placed(name: str) -> tuple[dict[str, Any], Path]:
    """What is recorded of a placement, and the file that holds it."""
    case = _PLACED[name]
    with contextlib.chdir(_folder()):
        path = Path(f"{name}.json").absolute()
        code, out = program(
            "place", *written(case.model), "--cluster", *shlex.split(case.cluster),
            "--objective", case.objective, *shlex.split(case.options),
            *(() if "--for llamacpp" in case.options else SECONDS), "--json", "-o", str(path),
        )  # fmt: skip
        if code:
            return {"exit_code": code, "printed": out}, path
        found = json.loads(out)
        return numbers(found) | placement_summary(json.loads(path.read_text())), path


def _followed(name: str) -> dict[str, Any]:
    """What a verb says of a placement, or of its model alone."""
    followed = _FOLLOWED[name]
    case, (_, path) = _PLACED[followed.of], _placed(followed.of)
    verb, *options = shlex.split(followed.verb)
    model, cluster = written(case.model), ["--cluster", *shlex.split(case.cluster)]
    with tempfile.TemporaryDirectory(dir=".", prefix="out-") as folder:
        options = [word.replace("out/", f"{folder}/") for word in options]
        if verb in ("simulate", "inspect", "compare"):
            given = [*model, str(path)] if verb == "simulate" else model
        else:
            given = [] if verb == "devices" else [str(path), "--model", *model]
        given += [] if verb == "inspect" else cluster
        given += SECONDS if verb == "compare" else ()
        code, out = program(verb, *given, *options, "--json")
        kind = options[options.index("--to") + 1] if verb == "export" else verb
        kind = "trace" if "--trace" in options else kind
        found = READERS.get(kind, _documents)(json.loads(out), Path(folder)) if out else {}
    return {"exit_code": code} | found


def _plain(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All that is printed but names and sentences."""
    del folder
    return without(found)


def _explained(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Values and memory after moving some ops, and the transfers that they cause."""
    del folder
    keys = ("device", "holds", "compute_s", "value_s", "feasible", "peak_bytes")
    return {
        "ops": found["ops"], "kernels": len(found["kernels"]), "value_s": found["value_s"],
        "devices": [{key: row[key] for key in keys} for row in found["devices"]],
        "transfers": [
            {key: row[key] for key in ("direction", "source", "destination", "bytes", "seconds")}
            for row in found["transfers"]
        ],
    }  # fmt: skip


def _inspected(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Numbers of a graph, of each type of op, and how many types were estimated."""
    del folder
    counted = {key: len(found[key]) for key in ("estimated", "assumptions")}
    return without(found) | counted


def _compared(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The numbers of each method."""
    del folder
    return {row["method"]: numbers(row) for row in found["rows"]}


def _trace(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """How many events of each kind there are, and when the last one ends."""
    del found
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    ends_us = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    return {"events": dict(Counter(event["ph"] for event in events)), "ends_us": max(ends_us)}


def _report(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The cells of the page's first table, one row for each device."""
    del found
    page = (folder / "report.html").read_text()
    table = page[page.index("<table") : page.index("</table>")]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", table, re.DOTALL)[1:]
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
    return {"devices": [[_text(cell) for cell in row] for row in cells]}


def _text(cell: str) -> str:
    """HTML without its tags."""
    return " ".join(re.sub(r"<[^>]+>", " ", cell).split())


def _segments(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The manifest, and the ops of each sub-model."""
    import onnx

    models = {
        path.name: dict(
            sorted(Counter(node.op_type for node in onnx.load(path).graph.node).items())
        )
        for path in sorted(folder.rglob("*.onnx"))
    }
    return _documents(found, folder) | {"models": models}


def _documents(found: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What an exporter wrote: the names of the files, and what those of JSON say."""
    del found
    written = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "gdp.json")
    said: dict[str, Any] = {"files": [path.name for path in written]}
    for path in written:
        if path.name == "placement.json":
            said[path.name] = placement_summary(json.loads(path.read_text()))
        elif path.suffix == ".json":
            said[path.name] = without(json.loads(path.read_text()))
        elif path.suffix == ".txt":
            said[path.name] = path.read_text().strip()
    return said


READERS: dict[str, Callable[[dict[str, Any], Path], dict[str, Any]]] = {
    "simulate": _plain,
    "devices": _plain,
    "explain": _explained,
    "inspect": _inspected,
    "compare": _compared,
    "trace": _trace,
    "report": _report,
    "onnxruntime": _segments,
}
"""What is recorded of each verb, and of each target of `export`; of others their documents."""
