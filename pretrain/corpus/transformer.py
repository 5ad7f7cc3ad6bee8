"""Transformers of the corpus: text, images, mixtures of experts, diffusion."""

from typing import Any

import jax
import jax.numpy as jnp

from pretrain.corpus import layers as nn
from pretrain.corpus.layers import Model, Params

Built = tuple[Model, Any]


def encoder(
    layers: int = 6, features: int = 512, heads: int = 8, batch: int = 8, steps: int = 128
) -> Built:
    """BERT-like: post-normalised blocks over tokens and positions: Devlin et al. 2019."""

    def model(p: Params, tokens: jax.Array) -> jax.Array:
        with p.scope("embed"):
            x = nn.embed(p, tokens, 30522, features) + p("position", steps, features)
            x = nn.layer_norm(p, x)
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                x = nn.layer_norm(p, x + nn.attention(p, x, x, heads))
                x = nn.layer_norm(p, x + nn.feed_forward(p, x, 4 * features))
        with p.scope("head"):
            return nn.dense(p, x, 30522)

    return model, nn.ids(batch, steps)


def decoder(
    layers: int = 6, features: int = 512, heads: int = 8, batch: int = 8, steps: int = 256,
    llama: bool = False,
) -> Built:  # fmt: skip
    """GPT-2-like (Radford et al. 2019), or Llama-like with gated layers (Touvron et al. 2023)."""

    def norm(p: Params, x: jax.Array) -> jax.Array:
        return nn.rms_norm(p, x) if llama else nn.layer_norm(p, x)

    def model(p: Params, tokens: jax.Array) -> jax.Array:
        with p.scope("embed"):
            x = nn.embed(p, tokens, 32000, features)
            if not llama:
                x = x + p("position", steps, features)
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                y = norm(p, x)
                x = x + nn.attention(p, y, y, heads, causal=True)
                wide = 8 * features // 3 if llama else 4 * features
                x = x + nn.feed_forward(p, norm(p, x), wide, gated=llama)
        with p.scope("head"):
            return nn.dense(p, norm(p, x), 32000, bias=False)

    return model, nn.ids(batch, steps)


def encoder_decoder(
    layers: int = 4, features: int = 512, heads: int = 8, batch: int = 8, steps: int = 64
) -> Built:
    """T5-like, with a position bias that all layers of a stack share: Raffel et al. 2020."""

    def model(p: Params, pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        source, target = pair
        table = p("shared", 32000, features)
        x, y = jnp.take(table, source, axis=0), jnp.take(table, target, axis=0)
        with p.scope("encoder"):
            bias = p("bias", heads, steps, steps)
            for layer in range(layers):
                with p.scope(f"layer{layer}"):
                    z = nn.rms_norm(p, x)
                    x = x + nn.attention(p, z, z, heads, bias=bias)
                    x = x + nn.feed_forward(p, nn.rms_norm(p, x), 4 * features)
            x = nn.rms_norm(p, x)
        with p.scope("decoder"):
            bias = p("bias", heads, steps, steps)
            for layer in range(layers):
                with p.scope(f"layer{layer}"):
                    z = nn.rms_norm(p, y)
                    y = y + nn.attention(p, z, z, heads, causal=True, bias=bias)
                    y = y + nn.attention(p, nn.rms_norm(p, y), x, heads)
                    y = y + nn.feed_forward(p, nn.rms_norm(p, y), 4 * features)
        return nn.rms_norm(p, y) @ table.T

    return model, (nn.ids(batch, steps), nn.ids(batch, steps))


def transformer_xl(
    layers: int = 6, features: int = 512, heads: int = 8, batch: int = 8, steps: int = 64,
    segments: int = 2,
) -> Built:  # fmt: skip
    """Transformer-XL: segments attend to the one before, relative positions: Dai et al. 2019."""

    def relative(p: Params, x: jax.Array, context: jax.Array) -> jax.Array:
        width = features // heads
        query = nn.dense(p, x, features, bias=False).reshape(x.shape[0], -1, heads, width)
        key = nn.dense(p, context, features, bias=False).reshape(x.shape[0], -1, heads, width)
        value = nn.dense(p, context, features, bias=False).reshape(x.shape[0], -1, heads, width)
        position = nn.dense(p, p("sinusoid", key.shape[1], features), features, bias=False)
        position = position.reshape(-1, heads, width)
        content = jnp.einsum("bshd,bthd->bhst", query + p("u", heads, width), key)
        where = jnp.einsum("bshd,thd->bhst", query + p("v", heads, width), position)
        # The shift of the paper's appendix B: pad one column, reshape, drop the first row.
        b, h, s, t = where.shape
        padded = jnp.pad(where, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(b, h, t + 1, s)
        scores = (content + padded[:, :, 1:].reshape(b, h, s, t)) * width**-0.5
        mask = jnp.tril(jnp.ones((s, t), bool), t - s)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        mixed = jnp.einsum("bhst,bthd->bshd", weights, value)
        return nn.dense(p, mixed.reshape(x.shape), features, bias=False)

    def model(p: Params, tokens: jax.Array) -> jax.Array:
        with p.scope("embed"):
            table = p("embedding", 32000, features)
        memory: list[jax.Array | None] = [None] * layers
        outputs = []
        for segment in range(segments):
            x = jnp.take(table, tokens[:, segment * steps : (segment + 1) * steps], axis=0)
            for layer in range(layers):
                with p.scope(f"segment{segment}_layer{layer}"):
                    before, memory[layer] = memory[layer], jax.lax.stop_gradient(x)
                    context = x if before is None else jnp.concatenate([before, x], axis=1)
                    x = nn.layer_norm(p, x + relative(p, x, context))
                    x = nn.layer_norm(p, x + nn.feed_forward(p, x, 4 * features))
            outputs.append(x)
        return jnp.concatenate(outputs, axis=1) @ table.T

    return model, nn.ids(batch, steps * segments)


def mixture_of_experts(
    layers: int = 4, experts: int = 8, features: int = 512, heads: int = 8, batch: int = 8,
    steps: int = 128,
) -> Built:  # fmt: skip
    """Every second block routes each token to its best expert, with capacity: Fedus et al. 2022."""

    def route(p: Params, x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, features)
        capacity = 2 * flat.shape[0] // experts
        gate = jax.nn.softmax(nn.dense(p, flat, experts, bias=False), axis=-1)
        chosen = jax.nn.one_hot(gate.argmax(-1), experts)
        slot = (jnp.cumsum(chosen, axis=0) - 1) * chosen
        kept = chosen * (slot < capacity)
        where = jax.nn.one_hot((slot * kept).sum(-1).astype(jnp.int32), capacity)
        dispatch = kept[:, :, None] * where[:, None, :]
        combine = dispatch * gate.max(-1)[:, None, None]
        outputs = []
        for expert in range(experts):
            with p.scope(f"expert{expert}"):
                mine = jnp.einsum("tc,tf->cf", dispatch[:, expert], flat)
                outputs.append(nn.feed_forward(p, mine, 4 * features))
        mixed = sum(jnp.einsum("tc,cf->tf", combine[:, i], outputs[i]) for i in range(experts))
        return jnp.asarray(mixed).reshape(x.shape)

    def model(p: Params, tokens: jax.Array) -> jax.Array:
        x = nn.embed(p, tokens, 32000, features)
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                y = nn.layer_norm(p, x)
                x = x + nn.attention(p, y, y, heads, causal=True)
                y = nn.layer_norm(p, x)
                x = x + (route(p, y) if layer % 2 else nn.feed_forward(p, y, 4 * features))
        with p.scope("head"):
            return nn.dense(p, nn.layer_norm(p, x), 32000, bias=False)

    return model, nn.ids(batch, steps)


def _patches(p: Params, x: jax.Array, size: int, features: int) -> jax.Array:
    y = nn.conv(p, x, features, size, stride=size, bias=True)
    return y.reshape(y.shape[0], -1, features)


def vit(
    layers: int = 6, features: int = 384, heads: int = 6, batch: int = 8, image: int = 224
) -> Built:
    """Vision transformer over patches of 16 by 16: Dosovitskiy et al. 2021."""

    def model(p: Params, x: jax.Array) -> jax.Array:
        with p.scope("embed"):
            x = _patches(p, x, 16, features)
            x = x + p("position", x.shape[1], features)
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                y = nn.layer_norm(p, x)
                x = x + nn.attention(p, y, y, heads)
                x = x + nn.feed_forward(p, nn.layer_norm(p, x), 4 * features)
        with p.scope("head"):
            return nn.dense(p, nn.layer_norm(p, x).mean(1), 1000)

    return model, nn.floats(batch, image, image, 3)


def mixer(layers: int = 8, features: int = 384, batch: int = 8, image: int = 224) -> Built:
    """MLP-Mixer: dense layers over patches, then over channels: Tolstikhin et al. 2021."""

    def model(p: Params, x: jax.Array) -> jax.Array:
        with p.scope("embed"):
            x = _patches(p, x, 16, features)
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                y = nn.layer_norm(p, x).swapaxes(1, 2)
                x = x + nn.feed_forward(p, y, features // 2).swapaxes(1, 2)
                x = x + nn.feed_forward(p, nn.layer_norm(p, x), 4 * features)
        with p.scope("head"):
            return nn.dense(p, nn.layer_norm(p, x).mean(1), 1000)

    return model, nn.floats(batch, image, image, 3)


def swin(
    counts: tuple[int, ...] = (2, 2, 6, 2), features: int = 96, batch: int = 4, image: int = 224
) -> Built:
    """Windows of 7 by 7 that shift every second block, stages merged 2 by 2: Liu et al. 2021."""

    def windows(p: Params, x: jax.Array, heads: int, shift: int) -> jax.Array:
        b, h, w, c = x.shape
        if shift:
            x = jnp.roll(x, (-shift, -shift), axis=(1, 2))
        y = x.reshape(b, h // 7, 7, w // 7, 7, c).swapaxes(2, 3).reshape(-1, 49, c)
        y = nn.attention(p, y, y, heads, bias=p("bias", heads, 49, 49))
        y = y.reshape(b, h // 7, w // 7, 7, 7, c).swapaxes(2, 3).reshape(b, h, w, c)
        return jnp.roll(y, (shift, shift), axis=(1, 2)) if shift else y

    def model(p: Params, x: jax.Array) -> jax.Array:
        with p.scope("embed"):
            x = nn.layer_norm(p, nn.conv(p, x, features, 4, stride=4, bias=True))
        for stage, count in enumerate(counts):
            heads = features // 32 * 2**stage
            for index in range(count):
                with p.scope(f"stage{stage}_{index}"):
                    shift = 3 if index % 2 and x.shape[1] > 7 else 0
                    x = x + windows(p, nn.layer_norm(p, x), heads, shift)
                    x = x + nn.feed_forward(p, nn.layer_norm(p, x), 4 * x.shape[-1])
            if stage < len(counts) - 1:
                with p.scope(f"merge{stage}"):
                    b, h, w, c = x.shape
                    x = x.reshape(b, h // 2, 2, w // 2, 2, c).swapaxes(2, 3)
                    x = x.reshape(b, h // 2, w // 2, 4 * c)
                    x = nn.dense(p, nn.layer_norm(p, x), 2 * c, bias=False)
        with p.scope("head"):
            return nn.dense(p, nn.layer_norm(p, x).mean((1, 2)), 1000)

    return model, nn.floats(batch, image, image, 3)


def dit(
    layers: int = 6, features: int = 384, heads: int = 6, batch: int = 8, image: int = 32
) -> Built:
    """Diffusion transformer: blocks scaled and shifted by the time step: Peebles and Xie 2023."""

    def model(p: Params, pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, time = pair
        with p.scope("embed"):
            x = _patches(p, x, 2, features)
            condition = nn.feed_forward(p, nn.dense(p, time, features), features)
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                shifts = nn.dense(p, jax.nn.silu(condition), 6 * features)[:, None]
                a, b, c, d, e, f = jnp.split(shifts, 6, axis=-1)
                y = nn.layer_norm(p, x) * (1 + a) + b
                x = x + c * nn.attention(p, y, y, heads)
                y = nn.layer_norm(p, x) * (1 + d) + e
                x = x + f * nn.feed_forward(p, y, 4 * features)
        with p.scope("head"):
            return nn.dense(p, nn.layer_norm(p, x), 16)

    return model, (nn.floats(batch, image, image, 4), nn.floats(batch, 128))
