"""JAX models that the tests name as `python:jax_models:NAME`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gdp.graph.op_graph import make_graph


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def attention_model() -> Any:
    """Two blocks of attention and dense layers with a causal mask, and a head over tied weights."""
    features, heads, steps, words = 32, 4, 16, 50
    layer = {
        "qkv": f32(features, 3 * features), "out": f32(features, features),
        "up": f32(features, 2 * features), "down": f32(2 * features, features),
        "scale": f32(2, features),
    }  # fmt: skip
    params = {"table": f32(words, features), "layers": [layer, layer]}

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale

    def forward(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["table"][tokens]
        for index, p in enumerate(params["layers"]):
            with jax.named_scope(f"layer{index}"):
                q, k, v = jnp.split(norm(x, p["scale"][0]) @ p["qkv"], 3, axis=-1)
                q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in (q, k, v))
                scores = jnp.einsum("bshd,bthd->bhst", q, k) / 3.0
                mask = jnp.tril(jnp.ones((steps, steps), bool))
                weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
                mixed = jnp.einsum("bhst,bthd->bshd", weights, v).reshape(x.shape)
                x = x + mixed @ p["out"]
                x = x + jax.nn.silu(norm(x, p["scale"][1]) @ p["up"]) @ p["down"]
        return x @ params["table"].T

    tokens = jax.ShapeDtypeStruct((2, steps), jnp.int32)
    return forward, (params, tokens), {"weight_argnums": 0}


def cnn() -> Any:
    """Convolutions with pooling and a residual; the kernels are weights, the head is an input."""

    def forward(kernels: list[jax.Array], dense: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
        for kernel in kernels:
            y = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = x + jax.nn.relu(y) if x.shape == y.shape else jax.nn.relu(y)
        pooled = jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
        return {"logits": pooled.mean((1, 2)) @ dense, "peak": pooled.max()}

    kernels = [f32(3, 3, 3, 8), f32(3, 3, 8, 8), f32(3, 3, 8, 8)]
    return forward, (kernels, f32(8, 10), f32(2, 12, 12, 3))


def _loss(params: Any, batch: Any) -> jax.Array:
    x, wanted = batch
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return jnp.square(x - wanted).mean()


_LAYERS = [(f32(12, 24), f32(24)), (f32(24, 24), f32(24)), (f32(24, 6), f32(6))]


def training_step() -> Any:
    """SGD with momentum, two microbatches added up."""
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "microbatches": 2}
    return _loss, (_LAYERS, (f32(8, 12), f32(8, 6))), options


def stacked_layers() -> Any:
    """A training step through a scan over stacked weights, rematerialised."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ p["w"] + p["b"]), None

        return jnp.square(jax.lax.scan(layer, x, params)[0]).mean()

    params = {"w": f32(3, 8, 8), "b": f32(3, 8)}
    return loss, (params, f32(4, 8)), {"optimizer": optax.adam(1e-2)}


def scanned_layers() -> Any:
    """Layers stacked on an axis and scanned, as most JAX programs write them; no options."""

    def forward(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ p["up"]) @ p["down"], None

        return jax.lax.scan(layer, x, params)[0]

    return forward, ({"up": f32(4, 8, 16), "down": f32(4, 16, 8)}, f32(2, 8))


def written_step() -> Any:
    """A training step as users write it: new parameters and the loss are results."""

    def step(params: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(_loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step, (_LAYERS, (f32(8, 12), f32(8, 6))), {"weight_argnums": (0,)}


def while_loop() -> Any:
    """A loop whose length is not known: one op, with an assumption."""

    def forward(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda s: s.sum() < 1e3, lambda s: s * 2.0 + 1.0, x) + 1.0

    return forward, (jnp.ones((4, 4)),)


def graph_only() -> Any:
    return make_graph("g", ["a", "b"], ["X", "X"], [(0, 4)], [(0, 1)])


def wrong() -> Any:
    return "a text"


def wrong_option() -> Any:
    return jnp.tanh, (f32(2),), {"weights": 0}


def wrong_position() -> Any:
    return jnp.tanh, (f32(2),), {"weight_argnums": 3}
