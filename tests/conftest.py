"""Shapes and types of gdp are checked in every test: jaxtyping's hook with beartype."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests that open sessions of their own shall no more send telemetry than gdp does.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

from jaxtyping import install_import_hook

# Numba kernels opt out with `@no_type_check` under `@njit`: a wrapper would not compile.
_HOOK = install_import_hook("gdp", "typecheck.check")
