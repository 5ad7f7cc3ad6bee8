"""What lets the `gdp` program answer sooner. The library changes nothing of this in a process."""

import importlib.machinery
import importlib.util
import os
import sys
import time
from types import ModuleType
from typing import Any

STARTED_S = time.perf_counter()
"""When the program began, but for Python's own start."""
DEFERRED = ("sympy", "onnx_ir._symbolic_shapes")
"""Half a second of imports for onnx_ir's arithmetic on symbolic dimensions, which few models need;
the second of them reads the first at once."""


def prepare_process() -> None:
    """To be called before NumPy is imported.

    One thread for NumPy's products, unless the user says otherwise: they are small here, and more
    threads spend their time waiting for one another. `DEFERRED` modules are read when something of
    theirs is first used (`importlib.util.LazyLoader`); where one is gone, nothing is lost.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not any(isinstance(finder, _Deferring) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Deferring())


class _Deferring:
    """Finds the deferred modules as usual, with a loader that waits."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for every other module, which leaves it to the finders that follow."""
        if name not in DEFERRED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec
