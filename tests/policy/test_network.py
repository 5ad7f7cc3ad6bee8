"""The network: gates, attention, padding, and both forms in one code path."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import random_problem

from gdp.policy.advice import advice
from gdp.policy.model.config import NetworkConfig, published
from gdp.policy.model.network import (
    Gate,
    PublishedSage,
    SegmentAttention,
    SuperposedLinear,
    abstract,
    apply,
    init,
)
from gdp.policy.view.batching import Batch, max_over_neighbours, on_device, pad
from gdp.policy.view.features import bucket, features

CONFIG = NetworkConfig(width=16, heads=2, sage_layers=1, head_width=8, segment=64)


def batch_of(seed: int = 0, **fields) -> Batch:
    return on_device(pad(features(random_problem(seed, num_ops=30, num_devices=3), **fields)))


def block(**changes) -> SegmentAttention:
    plain = NetworkConfig(width=8, heads=2, segment=4, summaries=False, residual_gate=False)
    return SegmentAttention(replace(plain, **changes), 5, rngs=nnx.Rngs(0))


def test_gates_are_one_at_the_start() -> None:
    gate = Gate(5, 7, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(gate(jnp.linspace(-3, 3, 5)), np.ones(7))


def test_gate_multiplies_the_input_of_its_layer() -> None:
    """Equation 5 by hand: x' = W(c * x) with c = 2 sigmoid(ln 3) = 1.5."""
    layer = SuperposedLinear(2, 1, 1, gated=True, rngs=nnx.Rngs(0))
    assert layer.gate is not None
    layer.gate.conditioning.bias[...] = jnp.full(2, jnp.log(3.0))
    layer.dense.kernel[...] = jnp.array([[1.0], [10.0]])
    whole, x = jnp.zeros(1), jnp.array([2.0, 4.0])
    np.testing.assert_allclose(layer(x, whole), [63.0], rtol=1e-6)
    np.testing.assert_allclose(x @ layer.kernel(whole), [63.0], rtol=1e-6)


def test_max_pooling_by_hand() -> None:
    """Op 2 reads 0 and 1; op 0 reads nothing; the masked pair is not there."""
    message = jnp.array([[1.0, 5.0], [3.0, 2.0], [9.0, 9.0]])
    src, dst = jnp.array([0, 1, 2]), jnp.array([2, 2, 0])
    pooled = max_over_neighbours(message, dst, src, jnp.array([True, True, False]))
    np.testing.assert_array_equal(pooled, [[0.0, 0.0], [0.0, 0.0], [3.0, 5.0]])


def test_published_sage_is_equations_2_and_3() -> None:
    """Against a loop over ops: h' = FC([h ; max_u sigmoid(W h_u + b)])."""
    problem = random_problem(1, num_ops=12, num_devices=2)
    found = features(problem)
    batch = on_device(pad(found))
    layer = PublishedSage(16, rngs=nnx.Rngs(1))
    h = jax.random.normal(jax.random.key(0), (len(batch.op_mask), 16))
    out = layer(h, batch)
    position = np.argsort(found.order)
    src, dst = position[found.src], position[found.dst]
    for op in range(problem.num_ops):
        near = [s for s, d in zip(src, dst, strict=True) if d == op]
        near += [d for s, d in zip(src, dst, strict=True) if s == op]
        pooled = jnp.zeros(16)
        if near:
            pooled = jnp.max(jnp.stack([jax.nn.sigmoid(layer.message(h[u])) for u in near]), axis=0)
        wanted = layer.combine(jnp.concatenate([h[op], pooled]))
        np.testing.assert_allclose(out[op], wanted, rtol=2e-4, atol=2e-5)


def test_untrained_attention_passes_its_input_through() -> None:
    h = jax.random.normal(jax.random.key(0), (16, 8))
    out = block(residual_gate=True)(h, jnp.ones(16, bool), jnp.zeros(5))
    np.testing.assert_array_equal(out, h)


def test_attention_sees_its_segment_and_the_one_before() -> None:
    """Segments of four ops: op 8 (segment 2) feels ops 4..11 and nothing else."""
    layer, mask, whole = block(), jnp.ones(16, bool), jnp.zeros(5)
    h = jax.random.normal(jax.random.key(1), (16, 8))
    base = layer.attend(h, mask, whole)[8]
    for op in range(16):
        moved = layer.attend(h.at[op].add(1.0), mask, whole)[8]
        assert bool(jnp.any(moved != base)) == (4 <= op < 12)


def test_memory_is_gradient_stopped() -> None:
    layer, mask, whole = block(), jnp.ones(16, bool), jnp.zeros(5)
    h = jax.random.normal(jax.random.key(1), (16, 8))
    grad = jax.grad(lambda x: layer.attend(x, mask, whole)[8].sum())(h)
    felt = jnp.abs(grad).sum(axis=1) > 0
    assert felt.tolist() == [8 <= op < 12 for op in range(16)]


def test_summaries_show_every_segment() -> None:
    layer, mask, whole = block(summaries=True), jnp.ones(16, bool), jnp.zeros(5)
    h = jax.random.normal(jax.random.key(1), (16, 8))
    base = layer.attend(h, mask, whole)[15]
    assert jnp.any(layer.attend(h.at[0].add(1.0), mask, whole)[15] != base)


@pytest.mark.parametrize("config", [CONFIG, published(width=16, heads=2, segment=64)])
def test_padding_changes_nothing(config: NetworkConfig) -> None:
    problem = random_problem(0, num_ops=30, num_devices=3)
    found = features(problem, config.features, advice(problem) if config.advice else None)
    params = jax.tree.map(lambda x: x + 0.01, init(config, 0))
    batch = on_device(pad(found))
    small = apply(config, params, batch)
    n = len(found.op)
    # More padding by hand: the arrays once more, all masked.
    twice = batch._replace(
        graph=batch.graph._replace(
            nodes=jnp.concatenate([batch.graph.nodes, batch.graph.nodes]),
            senders=jnp.concatenate([batch.graph.senders, batch.graph.senders]),
            receivers=jnp.concatenate([batch.graph.receivers, batch.graph.receivers]),
        ),
        op_type=jnp.concatenate([batch.op_type, batch.op_type]),
        op_mask=jnp.concatenate([batch.op_mask, jnp.zeros_like(batch.op_mask)]),
        pair_mask=jnp.concatenate([batch.pair_mask, jnp.zeros_like(batch.pair_mask)]),
        place=jnp.concatenate([batch.place, batch.place + len(batch.place)]),
    )
    large = apply(config, params, twice)
    np.testing.assert_allclose(small.node[:n], large.node[:n], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(small.feature, large.feature, rtol=1e-4, atol=1e-5)


def test_weights_have_the_shapes_foretold() -> None:
    shapes = jax.tree.map(lambda x: x.shape, abstract(CONFIG))
    assert shapes == jax.tree.map(lambda x: x.shape, init(CONFIG, 0))


def test_buckets_grow_past_the_largest() -> None:
    assert [bucket(k, (4, 8)) for k in (1, 4, 5, 8, 9, 17)] == [4, 4, 8, 8, 16, 24]
