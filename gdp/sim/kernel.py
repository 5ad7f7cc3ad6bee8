"""How kernels are compiled that allocate nothing."""

from typing import Any

BARE: dict[str, Any] = {"cache": True, "nogil": True, "_nrt": False}
"""Options of `numba.njit` without reference counts.

Kernels read their arrays from named tuples. numba counts a reference, atomically, each time one is
taken out of its tuple, which costs more than the work itself: moving one op took 4.4 us with the
counts and 0.2 us without. A kernel compiled so may not allocate arrays; slices are fine.
"""

INLINE: dict[str, Any] = {**BARE, "forceinline": True}
"""The same, for parts of kernels that are always inlined."""
