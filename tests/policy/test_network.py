"""The network: gates, attention, padding, and both forms in one code path."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_problem

from gdp.learn.recipe import load_recipe
from gdp.policy.advice import advice
from gdp.policy.model.config import NetworkConfig, Params
from gdp.policy.model.network import (
    Batch,
    JaxNetwork,
    apply,
    init,
    max_over_neighbours,
    on_device,
    pad,
)
from gdp.policy.view.features import NUM_GLOBAL_FEATURES, bucket, features

PUBLISHED = load_recipe("pretrain/recipes/gdp_one.toml")[0].network
CONFIG = NetworkConfig(width=16, heads=2, sage_layers=1, head_width=8, segment=64)


def batch_of(seed: int = 0, **fields) -> Batch:
    return on_device(pad(features(random_problem(seed, num_ops=30, num_devices=3), **fields)))


def network(config: NetworkConfig, params: Params, context: jax.Array) -> JaxNetwork:
    found = JaxNetwork(config, params, batch_of())
    found.context = context
    return found


class Block:
    """Attention over 16 ops in segments of four."""

    def __init__(self, **changes) -> None:
        plain = NetworkConfig(
            width=8, heads=2, segment=4, summaries=False, residual_gate=False, attention_layers=1
        )
        config = replace(plain, **changes)
        params = init(config, 0)
        self.network = network(config, params, jnp.zeros(8 + NUM_GLOBAL_FEATURES))
        self.network.op_mask = jnp.ones(16, bool)
        self.params = params["attention"][0]

        self.block = jax.jit(lambda h: self.network.block(self.params, h))
        self.attend = jax.jit(lambda h: self.network.attend(self.params, h))


def test_gates_are_one_at_the_start() -> None:
    params = init(CONFIG, 0)
    context = jnp.linspace(-3, 3, 16 + NUM_GLOBAL_FEATURES)
    gate = network(CONFIG, params, context).factor(params["out_head"])
    np.testing.assert_array_equal(gate, np.ones(8))


def test_gate_multiplies_the_input_of_its_layer() -> None:
    """Equation 5 by hand: x' = W(c * x) with c = 2 sigmoid(ln 3) = 1.5."""
    layer = {
        "dense": {"kernel": jnp.array([[1.0], [10.0]]), "bias": jnp.zeros(1)},
        "gate": {"conditioning": {"kernel": jnp.zeros((1, 2)), "bias": jnp.full(2, jnp.log(3.0))}},
    }
    whole, x = jnp.zeros(1), jnp.array([[2.0, 4.0]])
    found = network(CONFIG, {}, whole)
    np.testing.assert_allclose(found.gated(layer, x), [[63.0]], rtol=1e-6)
    np.testing.assert_allclose(x @ found.kernel(layer), [[63.0]], rtol=1e-6)


def test_max_pooling_by_hand() -> None:
    """Op 2 reads 0 and 1; op 0 reads nothing; the masked pair is not there."""
    message = jnp.array([[1.0, 5.0], [3.0, 2.0], [9.0, 9.0]])
    src, dst = jnp.array([0, 1, 2]), jnp.array([2, 2, 0])
    pooled = max_over_neighbours(message, dst, src, jnp.array([True, True, False]))
    np.testing.assert_array_equal(pooled, [[0.0, 0.0], [0.0, 0.0], [3.0, 5.0]])


def test_published_sage_is_equations_2_and_3() -> None:
    """Against a loop over ops: h' = FC([h ; max_u sigmoid(W h_u + b)])."""
    problem = random_problem(1, num_ops=12, num_devices=2)
    config, found = replace(PUBLISHED, width=16), features(problem)
    batch, params = on_device(pad(found)), init(config, 1)
    layer, weights = JaxNetwork(config, params, batch), params["sage"][0]
    h = jax.random.normal(jax.random.key(0), (len(batch.op_mask), 16))
    out = layer.published(weights, h)

    def message(u: int) -> jax.Array:
        return jax.nn.sigmoid(h[u] @ weights["message"]["kernel"] + weights["message"]["bias"])

    position = np.argsort(found.order)
    src, dst = position[found.src], position[found.dst]
    for op in range(problem.num_ops):
        near = [s for s, d in zip(src, dst, strict=True) if d == op]
        near += [d for s, d in zip(src, dst, strict=True) if s == op]
        pooled = jnp.zeros(16)
        if near:
            pooled = jnp.max(jnp.stack([message(u) for u in near]), axis=0)
        wanted = jnp.concatenate([h[op], pooled]) @ weights["combine"]["kernel"]
        np.testing.assert_allclose(out[op], wanted, rtol=2e-4, atol=2e-5)


def test_untrained_attention_passes_its_input_through() -> None:
    h = jax.random.normal(jax.random.key(0), (16, 8))
    out = Block(residual_gate=True).block(h)
    np.testing.assert_array_equal(out, h)


def test_attention_sees_its_segment_and_the_one_before() -> None:
    """Segments of four ops: op 8 (segment 2) feels ops 4..11 and nothing else."""
    layer = Block()
    h = jax.random.normal(jax.random.key(1), (16, 8))
    base = layer.attend(h)[8]
    for op in range(16):
        moved = layer.attend(h.at[op].add(1.0))[8]
        assert bool(jnp.any(moved != base)) == (4 <= op < 12)


def test_memory_is_gradient_stopped() -> None:
    layer = Block()
    h = jax.random.normal(jax.random.key(1), (16, 8))
    grad = jax.jit(jax.grad(lambda x: layer.attend(x)[8].sum()))(h)
    felt = jnp.abs(grad).sum(axis=1) > 0
    assert felt.tolist() == [8 <= op < 12 for op in range(16)]


def test_summaries_show_every_segment() -> None:
    layer = Block(summaries=True)
    h = jax.random.normal(jax.random.key(1), (16, 8))
    base = layer.attend(h)[15]
    assert jnp.any(layer.attend(h.at[0].add(1.0))[15] != base)


@pytest.mark.parametrize("config", [CONFIG, replace(PUBLISHED, width=16, heads=2, segment=64)])
def test_padding_changes_nothing(config: NetworkConfig) -> None:
    problem = random_problem(0, num_ops=30, num_devices=3)
    found = features(problem, config.features, advice(problem) if config.advice else None)
    params = jax.tree.map(lambda x: x + 0.01, init(config, 0))
    batch = on_device(pad(found))
    compiled = jax.jit(apply, static_argnums=0)
    small = compiled(config, params, batch)
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
    large = compiled(config, params, twice)
    np.testing.assert_allclose(small.node[:n], large.node[:n], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(small.feature, large.feature, rtol=1e-4, atol=1e-5)


def test_buckets_grow_past_the_largest() -> None:
    assert [bucket(k, (4, 8)) for k in (1, 4, 5, 8, 9, 17)] == [4, 4, 8, 8, 16, 24]
