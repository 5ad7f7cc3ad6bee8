"""How kernels are compiled.

What is compiled on the first run is what a new user waits for, so no wrapper is made that nobody
calls: unpacking a named tuple of fifty arrays compiles more slowly than most kernels.
"""

from contextlib import ExitStack
from typing import Any

from numba.core import event

from gdp.clock import COMPILE, waiting_for
from gdp.kernels.cache import KEEP
from gdp.kernels.pipeline import Compiler

ENTRY: dict[str, Any] = {
    "cache": KEEP,
    "pipeline_class": Compiler,
    "nogil": True,
    "no_cfunc_wrapper": True,
    "error_model": "numpy",  # x / 0 is inf and needs no test
}
"""Options of `numba.njit` for kernels that Python calls."""

BARE: dict[str, Any] = {**ENTRY, "_nrt": False}
"""The same without reference counts, for kernels that allocate nothing; slices are fine.

Kernels read their arrays from named tuples. numba counts a reference, atomically, each time one is
taken out of its tuple, which costs more than the work itself: moving one op took 4.4 us with the
counts and 0.2 us without.
"""

INLINE: dict[str, Any] = {**BARE, "forceinline": True}
"""The same, for parts of kernels that are always inlined."""

INNER: dict[str, Any] = {**BARE, "no_cpython_wrapper": True}
"""As `BARE`, for kernels that only other kernels call; calling one from Python crashes.

A Python constant as an argument is a literal, for each of which numba compiles anew:
`np.bool_(False)` and `np.int64(1)` are none.
"""

INNER_INLINE: dict[str, Any] = {**INNER, "forceinline": True}
"""As `INLINE`, likewise."""


class _Compiling(event.Listener):
    """Counts every compilation, wherever it happens, as waiting for it: no budget pays for it."""

    def __init__(self) -> None:
        self.open: list[ExitStack] = []  # nested: a kernel compiles those that it calls

    def on_start(self, event: Any) -> None:
        del event
        self.open.append(ExitStack())
        self.open[-1].enter_context(waiting_for(COMPILE))

    def on_end(self, event: Any) -> None:
        del event
        self.open.pop().close()


event.register("numba:compile", _Compiling())
