"""Shapes and types of gdp are checked in every test: jaxtyping's hook with beartype."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook

# Numba kernels opt out with `@no_type_check` under `@njit`: a wrapper would not compile.
_HOOK = install_import_hook("gdp", "typecheck.check")
