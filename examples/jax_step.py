"""A training step in JAX, placed on two GPUs from its shapes alone: nothing is computed.

python examples/jax_step.py
gdp place python:examples.jax_step:training_step --cluster 2xt4-pcie4    # the same from a shell
"""

import jax
import jax.numpy as jnp
import optax

import gdp
from gdp.importers.jax.trace import trace_training_step


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    """A float32 array that does not exist."""
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def loss(params, batch):
    """Two towers that meet in a dot product."""
    users, items, wanted = batch
    for user_layer, item_layer in zip(params["users"], params["items"], strict=True):
        users, items = jnp.tanh(users @ user_layer), jnp.tanh(items @ item_layer)
    return jnp.mean((jnp.sum(users * items, axis=1) - wanted) ** 2)


def training_step():
    """What `python:examples.jax_step:training_step` names: function, arguments, options."""
    tower = [shape(1024, 1024)] * 4
    batch = (shape(256, 1024), shape(256, 1024), shape(256))
    return loss, ({"users": tower, "items": tower}, batch), {"optimizer": optax.sgd(0.1)}


def main() -> None:
    """Place the step on one GPU and on two."""
    function, (params, batch), options = training_step()
    graph = trace_training_step(function, params, batch, **options)
    search = gdp.Search(seed=0, seconds=None, evaluations=200)
    for spec in ("1xt4", "2xt4-pcie4"):
        result = gdp.place(graph, gdp.Cluster.load(spec), search=search)
        print(
            f"{spec}: {result.value_s * 1e3:.3f} ms, proven at least {result.bound_s * 1e3:.3f} ms"
        )


if __name__ == "__main__":
    main()
