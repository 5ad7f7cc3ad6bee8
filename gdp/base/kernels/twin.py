"""Compiled twins of plain functions: small inputs need no compiler, large ones are worth it."""

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

PLAIN_OPS = 20_000
"""Ops up to which a plain function is called as it is: a tenth of a second, where its twin takes
three seconds to compile."""


def is_worth_compiling(steps: int, plain_steps: int) -> bool:
    """True beyond `plain_steps`, and for any once numba is loaded, as its kernels are kept."""
    return steps > plain_steps or "numba" in sys.modules


@functools.cache
def compiled(function: Callable[..., Any], *structs: type) -> Callable[..., Any]:
    """Compile a function with all functions of its module that it calls.

    Args:
        function: At the top of a module, whose functions take no default arguments. As it is, it
            reads lists; compiled, arrays.
        *structs: Named tuples among its arguments.
    """
    import numba

    from gdp.base.kernels.options import BARE, INNER
    from gdp.base.kernels.struct import as_struct

    as_struct(*structs)
    module = vars(sys.modules[function.__module__])
    scope = dict(module)
    for name, value in module.items():
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            copy = FunctionType(value.__code__, scope, name)
            copy.__module__, copy.__qualname__ = value.__module__, value.__qualname__
            scope[name] = numba.njit(**(BARE if value is function else INNER))(copy)
    return scope[function.__name__]
