"""Models of other shapes: towers, graphs, tables, diffusion U-Nets, plain stacks."""

from typing import Any

import jax
import jax.numpy as jnp

from pretrain.corpus import layers as nn
from pretrain.corpus.layers import Model, Params

Built = tuple[Model, Any]


def mlp(layers: int = 8, features: int = 1024, batch: int = 256) -> Built:
    """Dense layers with residuals every second layer."""

    def model(p: Params, x: jax.Array) -> jax.Array:
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                y = jax.nn.relu(nn.dense(p, x, features))
                x = x + y if layer % 2 and x.shape == y.shape else y
        return nn.dense(p, x, 10)

    return model, nn.floats(batch, 784)


def dlrm(tables: int = 16, rows: int = 100000, features: int = 64, batch: int = 2048) -> Built:
    """Embedding tables, pairwise products, two stacks of dense layers: Naumov et al. 2019."""

    def model(p: Params, pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        numbers, tokens = pair
        with p.scope("bottom"):
            x = jax.nn.relu(nn.dense(p, numbers, 512))
            x = jax.nn.relu(nn.dense(p, jax.nn.relu(nn.dense(p, x, 256)), features))
        vectors = [x]
        for table in range(tables):
            with p.scope(f"table{table}"):
                bags = nn.embed(p, tokens[:, table], rows * (1 + table % 4), features)
                vectors.append(bags.sum(1))
        with p.scope("interact"):
            stacked = jnp.stack(vectors, axis=1)
            products = jnp.einsum("bif,bjf->bij", stacked, stacked)
            first, second = jnp.triu_indices(tables + 1, 1)
            x = jnp.concatenate([x, products[:, first, second]], axis=-1)
        with p.scope("top"):
            for width in (1024, 1024, 512, 256):
                x = jax.nn.relu(nn.dense(p, x, width))
            return nn.dense(p, x, 1)

    return model, (nn.floats(batch, 13), nn.ids(batch, tables, 4))


def two_tower(layers: int = 4, features: int = 256, batch: int = 256, tables: int = 4) -> Built:
    """Two towers of dense layers over embeddings that meet in one product: Yi et al. 2019."""

    def tower(p: Params, tokens: jax.Array) -> jax.Array:
        parts = []
        for table in range(tables):
            with p.scope(f"table{table}"):
                parts.append(nn.embed(p, tokens[:, table], 200000, features))
        x = jnp.concatenate(parts, axis=-1)
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                x = jax.nn.relu(nn.layer_norm(p, nn.dense(p, x, 4 * features)))
        x = nn.dense(p, x, features)
        return x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)

    def model(p: Params, pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        with p.scope("user"):
            user = tower(p, pair[0])
        with p.scope("item"):
            item = tower(p, pair[1])
        return user @ item.T

    return model, (nn.ids(batch, tables), nn.ids(batch, tables))


def multi_modal(
    layers: int = 4, features: int = 256, heads: int = 4, batch: int = 16, image: int = 96
) -> Built:
    """An image and a text transformer, joined by cross attention both ways, LXMERT-like: Tan and
    Bansal 2019."""

    def blocks(p: Params, x: jax.Array) -> jax.Array:
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                y = nn.layer_norm(p, x)
                x = x + nn.attention(p, y, y, heads)
                x = x + nn.feed_forward(p, nn.layer_norm(p, x), 4 * features)
        return x

    def model(p: Params, pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        picture, tokens = pair
        with p.scope("vision"):
            x = nn.conv(p, picture, features, 16, stride=16, bias=True)
            x = blocks(p, x.reshape(x.shape[0], -1, features))
        with p.scope("text"):
            y = blocks(p, nn.embed(p, tokens, 30522, features))
        for layer in range(max(1, layers // 2)):
            with p.scope(f"cross{layer}"):
                a = x + nn.attention(p, nn.layer_norm(p, x), y, heads)
                b = y + nn.attention(p, nn.layer_norm(p, y), x, heads)
                x = a + nn.feed_forward(p, nn.layer_norm(p, a), 4 * features)
                y = b + nn.feed_forward(p, nn.layer_norm(p, b), 4 * features)
        with p.scope("head"):
            return nn.dense(p, jnp.concatenate([x.mean(1), y.mean(1)], axis=-1), 3129)

    return model, (nn.floats(batch, image, image, 3), nn.ids(batch, 32))


def gnn(
    layers: int = 6, features: int = 128, nodes: int = 4096, edges: int = 32768, heads: int = 4
) -> Built:
    """Message passing with attention over edges, GAT-like: Velickovic et al. 2018."""

    def model(p: Params, graph: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x, src, dst = graph
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                heads_out = []
                for head in range(heads):
                    with p.scope(f"head{head}"):
                        h = nn.dense(p, x, features, bias=False)
                        score = (h @ p("source", features, 1))[src] + (
                            h @ p("target", features, 1)
                        )[dst]
                        weight = jnp.exp(jax.nn.leaky_relu(score))
                        total = jax.ops.segment_sum(weight, dst, nodes)
                        message = jax.ops.segment_sum(weight * h[src], dst, nodes)
                        heads_out.append(message / (total + 1e-6))
                x = jax.nn.elu(jnp.concatenate(heads_out, axis=-1))
        return nn.dense(p, x, 40)

    return model, (nn.floats(nodes, 128), nn.ids(edges), nn.ids(edges))


def diffusion_unet(
    levels: int = 3, width: int = 64, batch: int = 4, image: int = 32, repeat: int = 2
) -> Built:
    """A denoising U-Net with time conditioning and attention at the lower levels, guided by text:
    Ho et al. 2020; Rombach et al. 2022."""

    def residual(p: Params, x: jax.Array, time: jax.Array, channels: int) -> jax.Array:
        y = nn.conv(p, jax.nn.silu(nn.group_norm(p, x)), channels, bias=True)
        y = y + nn.dense(p, jax.nn.silu(time), channels)[:, None, None]
        y = nn.conv(p, jax.nn.silu(nn.group_norm(p, y)), channels, bias=True)
        return y + (nn.conv(p, x, channels, 1) if x.shape != y.shape else x)

    def attend(p: Params, x: jax.Array, text: jax.Array) -> jax.Array:
        y = nn.group_norm(p, x).reshape(x.shape[0], -1, x.shape[-1])
        y = y + nn.attention(p, y, y, 4)
        y = y + nn.attention(p, nn.layer_norm(p, y), text, 4)
        y = y + nn.feed_forward(p, nn.layer_norm(p, y), 4 * x.shape[-1])
        return x + y.reshape(x.shape)

    def model(p: Params, inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        x, time, text = inputs
        with p.scope("time"):
            time = nn.dense(p, jax.nn.silu(nn.dense(p, time, 4 * width)), 4 * width)
        x = nn.conv(p, x, width, bias=True)
        skips = [x]
        for level in range(levels):
            for index in range(repeat):
                with p.scope(f"down{level}_{index}"):
                    x = residual(p, x, time, width * 2**level)
                    x = attend(p, x, text) if level else x
                    skips.append(x)
            if level < levels - 1:
                with p.scope(f"shrink{level}"):
                    x = nn.conv(p, x, x.shape[-1], stride=2, bias=True)
                    skips.append(x)
        with p.scope("middle"):
            x = residual(p, attend(p, residual(p, x, time, x.shape[-1]), text), time, x.shape[-1])
        for level in reversed(range(levels)):
            for index in range(repeat + 1):
                with p.scope(f"up{level}_{index}"):
                    x = residual(p, jnp.concatenate([x, skips.pop()], -1), time, width * 2**level)
                    x = attend(p, x, text) if level else x
            if level:
                with p.scope(f"grow{level}"):
                    x = nn.conv(p, nn.upsample(x), x.shape[-1], bias=True)
        with p.scope("out"):
            return nn.conv(p, jax.nn.silu(nn.group_norm(p, x)), 4, bias=True)

    return model, (nn.floats(batch, image, image, 4), nn.floats(batch, 128),
                   nn.floats(batch, 16, 256))  # fmt: skip
