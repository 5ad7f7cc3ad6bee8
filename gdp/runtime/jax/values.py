"""Arrays for arguments that are given as shapes, and how exactly results must agree."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gdp.graph.op_graph import OpGraph
from gdp.importers.jax.trace import JaxModel

RELATIVE_TOLERANCE = 1e-4
"""Of the largest magnitude in an array: other fusions add up in another order."""
_TF32 = 2.0**-10  # accelerators multiply float32 with ten bits of mantissa unless told otherwise


def argument_values(model: JaxModel, seed: int) -> list[Any]:
    """The leaves of a model's arguments, in the order of `RecordedJax.arguments`: the arrays that
    were given, random ones where a shape was given."""
    rng = np.random.default_rng(seed)
    held = model.held
    filled = [_filled(argument, i in held, rng) for i, argument in enumerate(model.args)]
    return model.leaves(filled)


def _filled(tree: Any, is_weight: bool, rng: np.random.Generator) -> Any:
    import jax

    def value(leaf: Any) -> Any:
        return _drawn(leaf, is_weight, rng) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(value, tree, is_leaf=lambda x: isinstance(x, jax.ShapeDtypeStruct))


def _drawn(leaf: Any, is_weight: bool, rng: np.random.Generator) -> Any:
    """Normal floats; integers 0 or 1, which any vocabulary and mask allow; true booleans.

    Weights are scaled such that products keep their size, and those of one axis are positive: they
    may be variances.
    """
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(int(rng.integers(1 << 30))), leaf.shape)
    if leaf.dtype == jnp.bool_:
        return jnp.ones(leaf.shape, leaf.dtype)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        return jnp.asarray(rng.integers(2, size=leaf.shape), leaf.dtype)
    drawn = rng.standard_normal(leaf.shape, dtype=np.float32)
    if is_weight and len(leaf.shape) == 1:
        drawn = 0.5 + 0.1 * np.abs(drawn)
    elif is_weight and leaf.shape:
        drawn = drawn / np.sqrt(np.prod(leaf.shape[:-1]))
    return jnp.asarray(drawn, leaf.dtype)


def tolerance(graph: OpGraph, devices: Iterable[Any]) -> float:
    """The relative difference that the arithmetic of a graph's ops explains.

    Cut programs round where fused ones need not, so the coarsest type of any op counts.
    """
    import jax
    import jax.numpy as jnp

    coarsest = 0.0
    for dtype in {detail.dtype for detail in graph.detail}:
        if jnp.issubdtype(_dtype(dtype), jnp.floating):
            coarsest = max(coarsest, float(jnp.finfo(_dtype(dtype)).eps))
    exact = getattr(jax.config, "jax_default_matmul_precision", None) in ("float32", "highest")
    if not exact and any(device.platform != "cpu" for device in devices):
        coarsest = max(coarsest, _TF32)
    return max(RELATIVE_TOLERANCE, 4.0 * coarsest)


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    try:
        return jnp.dtype(name)
    except TypeError:  # keys of random numbers
        return jnp.dtype("uint32")


def as_numpy(array: Any) -> np.ndarray:
    """The array on the host; keys of random numbers as the words that they consist of."""
    import jax
    import jax.numpy as jnp

    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def stacked(arrays: Sequence[Any]) -> np.ndarray:
    """Rows that may lie on different devices, as one array on the host."""
    return np.stack([as_numpy(array) for array in arrays])
