"""Recurrent and sequence models of the corpus, unrolled in time."""

from typing import Any

import jax
import jax.numpy as jnp

from pretrain.corpus import layers as nn
from pretrain.corpus.layers import Model, Params

Built = tuple[Model, Any]


def _steps(x: jax.Array) -> list[jax.Array]:
    return [x[:, t] for t in range(x.shape[1])]


def rnnlm(
    layers: int = 2, steps: int = 16, hidden: int = 512, batch: int = 32, vocabulary: int = 10000
) -> Built:
    """A language model of stacked LSTMs: Jozefowicz et al. 2016."""

    def model(p: Params, tokens: jax.Array) -> jax.Array:
        with p.scope("embed"):
            outputs = _steps(nn.embed(p, tokens, vocabulary, hidden))
        for layer in range(layers):
            with p.scope(f"lstm{layer}"):
                outputs = nn.lstm_layer(p, outputs, hidden)
        with p.scope("softmax"):
            return nn.dense(p, jnp.stack(outputs, axis=1), vocabulary)

    return model, nn.ids(batch, steps)


def gnmt(
    layers: int = 2, steps: int = 12, hidden: int = 512, batch: int = 32, vocabulary: int = 16000
) -> Built:
    """GNMT: a bidirectional first encoder layer, residual LSTMs, additive attention fed to every
    decoder layer: Wu et al. 2016."""

    def encode(p: Params, tokens: jax.Array) -> jax.Array:
        with p.scope("embed"):
            outputs = _steps(nn.embed(p, tokens, vocabulary, hidden))
        with p.scope("forward"):
            ahead = nn.lstm_layer(p, outputs, hidden)
        with p.scope("backward"):
            back = nn.lstm_layer(p, outputs[::-1], hidden)[::-1]
        outputs = [jnp.concatenate(pair, axis=-1) for pair in zip(ahead, back, strict=True)]
        for layer in range(1, layers):
            with p.scope(f"lstm{layer}"):
                made = nn.lstm_layer(p, outputs, hidden)
            if layer > 1:
                made = [a + b for a, b in zip(made, outputs, strict=True)]
            outputs = made
        return jnp.stack(outputs, axis=1)

    def attend(query: jax.Array, keys: jax.Array, memory: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.tanh(query[:, None] + keys) @ v
        return jnp.einsum("bs,bsf->bf", jax.nn.softmax(scores, axis=-1), memory)

    def model(p: Params, batch_ids: tuple[jax.Array, jax.Array]) -> jax.Array:
        source, target = batch_ids
        with p.scope("encoder"):
            memory = encode(p, source)
        with p.scope("attention"):
            keys = nn.dense(p, memory, hidden, bias=False)
            v, project = p("v", hidden), p("query", hidden, hidden)
        with p.scope("decoder"):
            inputs = _steps(nn.embed(p, target, vocabulary, hidden))
            weights = [nn.lstm_weights(p, 2 * hidden, hidden) for _ in range(layers)]
        zero = jnp.zeros((source.shape[0], hidden))
        states = [(zero, zero) for _ in range(layers)]
        context, outputs = jnp.zeros_like(zero), []
        for step, x in enumerate(inputs):
            with jax.named_scope(f"decoder/step{step}"):
                for layer in range(layers):
                    with jax.named_scope(f"layer{layer}"):
                        joined = jnp.concatenate([x, context], axis=-1)
                        states[layer] = nn.lstm_cell(p, joined, states[layer], weights[layer])
                        x = states[layer][0] + x if layer > 1 else states[layer][0]
                        if layer == 0:
                            context = attend(x @ project, keys, memory, v)
                outputs.append(jnp.concatenate([x, context], axis=-1))
        with p.scope("softmax"):
            return nn.dense(p, jnp.stack(outputs, axis=1), vocabulary)

    return model, (nn.ids(batch, steps), nn.ids(batch, steps))


def gru_encoder(layers: int = 2, steps: int = 20, hidden: int = 384, batch: int = 32) -> Built:
    """A bidirectional GRU over acoustic frames behind a strided convolution, DeepSpeech-like."""

    def gru(p: Params, xs: list[jax.Array]) -> list[jax.Array]:
        w, u = p("kernel", xs[0].shape[-1], 3 * hidden), p("recurrent", hidden, 3 * hidden)
        state, made = jnp.zeros((xs[0].shape[0], hidden)), []
        for x in xs:
            wz, wr, wn = jnp.split(x @ w, 3, axis=-1)
            uz, ur, un = jnp.split(state @ u, 3, axis=-1)
            gate = jax.nn.sigmoid(wz + uz)
            new = jnp.tanh(wn + jax.nn.sigmoid(wr + ur) * un)
            state = gate * state + (1 - gate) * new
            made.append(state)
        return made

    def model(p: Params, frames: jax.Array) -> jax.Array:
        with p.scope("conv"):
            x = nn.conv_bn_relu(p, frames, 32, (11, 41), 2)
            xs = _steps(x.reshape(x.shape[0], x.shape[1], -1))
        for layer in range(layers):
            with p.scope(f"gru{layer}"):
                ahead, back = gru(p, xs), gru(p, xs[::-1])[::-1]
                xs = [jnp.concatenate(pair, axis=-1) for pair in zip(ahead, back, strict=True)]
        with p.scope("head"):
            return nn.dense(p, jnp.stack(xs, axis=1), 32)

    return model, nn.floats(batch, 2 * steps, 80, 1)


def wavenet(
    stacks: int = 2, layers: int = 9, channels: int = 64, batch: int = 4, steps: int = 2048
) -> Built:
    """WaveNet: gated dilated convolutions whose skips are summed: van den Oord et al. 2016."""

    def model(p: Params, tokens: jax.Array) -> jax.Array:
        with p.scope("embed"):
            x = nn.embed(p, tokens, 256, channels)
        skips = jnp.zeros((*x.shape[:2], 4 * channels))
        for stack in range(stacks):
            for layer in range(layers):
                with p.scope(f"stack{stack}_layer{layer}"):
                    a = nn.conv1d(p, x, channels, 2, dilation=2**layer)
                    b = nn.conv1d(p, x, channels, 2, dilation=2**layer)
                    gated = jnp.tanh(a) * jax.nn.sigmoid(b)
                    skips = skips + nn.conv1d(p, gated, 4 * channels, 1)
                    x = x + nn.conv1d(p, gated, channels, 1)
        with p.scope("head"):
            y = nn.conv1d(p, jax.nn.relu(skips), 4 * channels, 1)
            return nn.conv1d(p, jax.nn.relu(y), 256, 1)

    return model, nn.ids(batch, steps)


def state_space(
    layers: int = 6, features: int = 512, state: int = 16, batch: int = 8, steps: int = 512
) -> Built:
    """Mamba-like blocks: a gated, input-dependent diagonal state space run by an associative scan:
    Gu and Dao 2023."""

    def scan(decay: jax.Array, drive: jax.Array) -> jax.Array:
        def combine(a: Any, b: Any) -> Any:
            return a[0] * b[0], a[1] * b[0] + b[1]

        return jax.lax.associative_scan(combine, (decay, drive), axis=1)[1]

    def block(p: Params, x: jax.Array) -> jax.Array:
        inner = 2 * features
        y, gate = nn.dense(p, x, inner, bias=False), nn.dense(p, x, inner, bias=False)
        y = jax.nn.silu(nn.conv1d(p, y, inner, 4, groups=inner))
        step = jax.nn.softplus(nn.dense(p, nn.dense(p, y, features // 16), inner))
        b, c = nn.dense(p, y, state, bias=False), nn.dense(p, y, state, bias=False)
        decay = jnp.exp(-step[..., None] * jnp.exp(p("log_a", inner, state)))
        hidden = scan(decay, (step * y)[..., None] * b[:, :, None, :])
        out = jnp.einsum("bsin,bsn->bsi", hidden, c) + y * p("skip", inner)
        return nn.dense(p, out * jax.nn.silu(gate), features, bias=False)

    def model(p: Params, tokens: jax.Array) -> jax.Array:
        x = nn.embed(p, tokens, 32000, features)
        for layer in range(layers):
            with p.scope(f"layer{layer}"):
                x = x + block(p, nn.rms_norm(p, x))
        with p.scope("head"):
            return nn.dense(p, nn.rms_norm(p, x), 32000, bias=False)

    return model, nn.ids(batch, steps)
