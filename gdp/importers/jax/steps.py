"""How the values of a listed program are computed: what a runtime needs beside the graph.

Equations are evaluated one by one, as functions of arrays that JAX can trace, so that a runtime may
jit any run of them together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gdp.importers.program.values import Value

Run = Callable[..., Sequence[Any]]
"""From the arrays of a step's `ins` to those of its `outs`."""


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """Computes values. The op that it belongs to is the maker of its outputs; -1: a view of weights
    or of constants, which the graph does not count as an op."""

    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    run: Run

    @property
    def maker(self) -> int:
        """Index of the op that it belongs to; -1 also where nothing is made."""
        return self.outs[0].maker if self.outs else -1


def equation(eqn: Any) -> Run:
    """One equation of a jaxpr. Element-wise ones are applied to rows of their arrays, too."""

    def run(*arrays: Any) -> Sequence[Any]:
        from jax.extend import core

        given = {
            variable: array
            for variable, array in zip(eqn.invars, arrays, strict=True)
            if not isinstance(variable, core.Literal)
        }
        wanted = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
        jaxpr = core.Jaxpr(
            constvars=(), invars=list(given), outvars=wanted, eqns=[eqn], effects=eqn.effects,
            debug_info=_debug_info(core),
        )  # fmt: skip
        made = iter(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*given.values()))
        return [None if isinstance(v, core.DropVar) else next(made) for v in eqn.outvars]

    return run


def _debug_info(core: Any) -> Any:
    """What JAX wants to know of a jaxpr for its messages."""
    return core.DebugInfo("gdp", "one equation", None, None)


def row_of(index: int) -> Run:
    """Row `index` along axis 0."""
    return lambda array: [array[index]]


def rows_of(array: Any) -> Sequence[Any]:
    """All rows along axis 0."""
    return [array[i] for i in range(array.shape[0])]


def stack_rows(*rows: Any) -> Sequence[Any]:
    """Rows written side by side along a new axis 0."""
    import jax.numpy as jnp

    return [jnp.stack(rows)]


def add_arrays(one: Any, two: Any) -> Sequence[Any]:
    """The sum of two microbatches' results."""
    return [one + two]


def scan_parts(eqn: Any) -> tuple[int, int]:
    """How many inputs of a scan are constant, and how many values it carries.

    Read off the shapes, because JAX versions name the parameters differently: only what is scanned
    or collected has an axis more outside of the body than inside.
    """
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])

    def same(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        pairs = zip(outside, inside, strict=True)
        return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)

    num_carry = same(eqn.outvars, body.outvars)
    return same(eqn.invars, body.invars) - num_carry, num_carry
