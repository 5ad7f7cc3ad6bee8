"""What tracing a function or module gives: a graph, and what was not exact on the way to it."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from gdp.graph.op_graph import OpGraph

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def users_code() -> Iterator[None]:
    """Within, what is printed goes to stderr: stdout may be carrying a result as JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph, and what was not computed exactly on the way to it."""

    graph: OpGraph
    estimated: tuple[str, ...]  # primitives without a formula: one operation per output element
    assumptions: tuple[str, ...]
    parameters: int | None = None  # numbers in all of them, tied ones once, where that is known


def report(traced: Traced) -> None:
    """Logs what was estimated or assumed."""
    if traced.estimated:
        _log.warning(
            "%s: no cost formula for %s; one operation per output element is assumed",
            traced.graph.name, ", ".join(traced.estimated),
        )  # fmt: skip
    for assumption in traced.assumptions:
        _log.warning("%s: %s", traced.graph.name, assumption)
