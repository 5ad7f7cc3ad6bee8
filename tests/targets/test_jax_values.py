"""Values drawn for arguments given as shapes, and the JAX devices that devices stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import plain_graph

from gdp.base.errors import ClusterError
from gdp.cluster.types import Cluster
from gdp.targets.jax.program import RELATIVE_TOLERANCE, _drawn, tolerance
from gdp.targets.jax.run import jax_devices


def drawn(shape: tuple[int, ...], dtype: object, *, is_weight: bool = False) -> np.ndarray:
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    return np.asarray(_drawn(leaf, is_weight, np.random.default_rng(0)))


def test_products_with_drawn_matrices_keep_their_size() -> None:
    """256 inputs of variance 1 times weights of variance 1/256 have variance 1 again."""
    weight = drawn((256, 300), jnp.float32, is_weight=True)
    made = drawn((50, 256), jnp.float32) @ weight
    assert made.std() == pytest.approx(1.0, rel=0.1)


def test_weights_of_one_axis_may_be_variances() -> None:
    assert drawn((500,), jnp.float32, is_weight=True).min() >= 0.5
    assert drawn((500,), jnp.float32).min() < -1.0


def test_masks_are_true_and_whole_numbers_fit_any_vocabulary() -> None:
    assert drawn((40,), jnp.bool_).all()
    assert sorted(set(drawn((40,), jnp.int32).tolist())) == [0, 1]


def test_coarse_types_are_compared_coarsely() -> None:
    """bfloat16 rounds at 2**-7, float32 far below the tolerance that other fusions need."""
    from dataclasses import replace

    graph = plain_graph(1, [])
    cpu = jax.local_devices(backend="cpu")
    wanted = {"float32": RELATIVE_TOLERANCE, "bfloat16": 4 * 2.0**-7}
    for dtype, relative in wanted.items():
        detail = tuple(replace(d, dtype=dtype) for d in graph.detail)
        assert tolerance(replace(graph, detail=detail), cpu) == relative


def test_cpu_devices_are_those_of_jax_and_accelerators_are_not_made_up() -> None:
    one = jax_devices(Cluster.load("1xcpu-core"))
    assert [device.platform for device in one] == ["cpu"]
    many = len(jax.local_devices(backend="cpu")) + 1
    with pytest.raises(ClusterError, match=f"has {many} CPU devices"):
        jax_devices(Cluster.load(f"{many}xcpu-core"))
