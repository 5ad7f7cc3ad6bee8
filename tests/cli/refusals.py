"""What tests of refused input share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdp.api.first_run import MESSAGE
from gdp.graph.op_graph import OpGraph, make_graph

Run = Callable[..., tuple[int, str, str]]


def refused(run: Run, *args: str | Path) -> str:
    """The one line of a program that refuses its input."""
    code, out, err = run(*args)
    assert (code, out) == (2, ""), err
    assert err.startswith("gdp: ")
    # What is compiled first says so, once on a machine.
    lines = [line for line in err.splitlines() if MESSAGE not in line]
    assert len(lines) == 1, err
    return lines[0]


def small() -> OpGraph:
    return make_graph(
        "small", ["a", "b"], ["Conv", "Conv"], [(0, 100), (1, 100)], [(0, 1)], flop=[1e6, 1e6]
    )


def changed(path: Path, **changes: Any) -> Path:
    document = json.loads(path.read_bytes()) | changes
    path.write_text(json.dumps(document))
    return path


CLUSTER = ("--cluster", "2xcpu-core")
QUICK = ("--evaluations", "10", "--method", "heft")
DEVICE = '[[device]]\nname = "a"\nflop_per_s = 1e9\nbytes_per_s = 1e9\n'
