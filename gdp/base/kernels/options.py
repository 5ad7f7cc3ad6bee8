"""Options and compiler of all kernels.

A new user waits for the compilation of the first run. So no wrapper is made that nobody calls:
unpacking a named tuple of fifty arrays compiles more slowly than most kernels. And kernels are
compiled once, where they are called from Python: numba optimises every function three times over
and makes machine code of it, and then again inside each function that calls it. Here a kernel that
only other kernels call (`no_cpython_wrapper`) is lowered and left as it is; the kernel that Python
calls is optimised with all that it calls in one piece, by the same passes. That takes a quarter off
the first run and leaves the kernels as fast.
"""

from contextlib import ExitStack
from typing import Any

import llvmlite.binding as llvm
from numba.core import event
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler as NumbasCompiler
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

from gdp.base.clock import COMPILE, waiting_for
from gdp.base.kernels.cache import KEEP

_PARTS = (
    "_optimize_functions",
    "_optimize_final_module",
    "_finalize_final_module",
    "_get_module_for_linking",
)


class _Library(JITCodeLibrary):
    """The code of one kernel and of all that it calls."""

    inner = False
    """True if only other kernels call it."""

    def _optimize_functions(self, ll_module: Any) -> None:
        # The passes over the module contain those over its functions.
        ll_module.data_layout = self._codegen._data_layout  # noqa: SLF001

    def _optimize_final_module(self) -> None:
        if not self.inner:
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        if self.inner:
            self._finalized = True
            self._get_module_for_linking()  # what callers link is kept beside the module
            self._finalized = False
            self._final_module = self._module_of_environments()
        super()._finalize_final_module()

    def _module_of_environments(self) -> Any:
        """A module without code. numba writes a kernel's environment to its address."""
        lines = [str(self._codegen._create_empty_module(self.name))]  # noqa: SLF001
        for variable in self._final_module.global_variables:
            if variable.name.startswith("_ZN08NumbaEnv"):
                lines.append(f"@{variable.name} = common global i64 0")
        return llvm.parse_assembly("\n".join(lines))


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):
    _name = "gdp_native_lowering"

    def run_pass(self, state: Any) -> Any:
        """Lower into a library of ours."""
        if state.library is None:
            state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
            state.library.enable_object_caching()
            state.library.inner = state.flags.no_cpython_wrapper
        return super().run_pass(state)


class _Flags(Flags):
    """Flags that compare fast: numba compares them at each call that it finds the type of, and
    reads all of 26 options one by one to do so."""

    __slots__ = ()

    def __eq__(self, other: object) -> Any:
        if isinstance(other, Flags) and self._values == other._values:
            return True
        return super().__eq__(other)

    def __hash__(self) -> int:
        return _HASH


_HASH = hash(Flags())  # numba hashes the names of the options, which are the same for all


class _Compiler(CompilerBase):
    def __init__(self, typingctx: Any, targetctx: Any, library: Any, args: Any, *rest: Any) -> None:
        return_type, flags, local_types = rest
        super().__init__(
            typingctx, targetctx, library, args, return_type, _Flags(flags), local_types
        )

    def define_pipelines(self) -> list[Any]:
        """numba's own passes, with another one at the end."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes[:] = [
            (_Lowering, name) if made is NativeLowering else (made, name)
            for made, name in passes.passes
        ]
        passes._finalized = False  # noqa: SLF001
        passes.finalize()
        return [passes]


def _is_known() -> bool:
    """True if this numba has the parts that are changed here."""
    return all(hasattr(JITCodeLibrary, name) for name in _PARTS)


Compiler: type[CompilerBase] = _Compiler if _is_known() else NumbasCompiler
"""The option `pipeline_class` of every kernel."""

ENTRY: dict[str, Any] = {
    "cache": KEEP,
    "pipeline_class": Compiler,
    "nogil": True,
    "no_cfunc_wrapper": True,
    "error_model": "numpy",  # x / 0 is inf and needs no test
}
"""Options of `numba.njit` for kernels that Python calls."""

BARE: dict[str, Any] = {**ENTRY, "_nrt": False}
"""`ENTRY` without reference counts, for kernels that allocate nothing; slices are fine.

Kernels read their arrays from named tuples. numba counts a reference, atomically, each time one is
taken out of its tuple, which costs more than the work itself: moving one op took 4.4 us with the
counts and 0.2 us without.
"""

INLINE: dict[str, Any] = {**BARE, "forceinline": True}
"""`BARE` for parts of kernels that are always inlined."""

INNER: dict[str, Any] = {**BARE, "no_cpython_wrapper": True}
"""`BARE` for kernels that only other kernels call; calling one from Python crashes.

A Python constant as an argument is a literal, for each of which numba compiles anew:
`np.bool_(False)` and `np.int64(1)` are none.
"""

INNER_INLINE: dict[str, Any] = {**INNER, "forceinline": True}
"""`INLINE` for parts that only other kernels call."""


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
