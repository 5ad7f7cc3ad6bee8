"""The LSTM placer with attention of Mirhoseini et al. (2017 over ops, 2018 over groups).

Device Placement Optimization with Reinforcement Learning, arXiv 1706.04972. As far as recalled: an
LSTM reads the items in order; a second one makes a device for each, fed with the embedding of the
device before, with Bahdanau attention to the first one's outputs; logits are 5 tanh(x), which
keeps the policy from saturating. Axes: K placements, G items, F features, H width, D devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.published.baselines.common import Params, dense, linear, log_softmax

SQUASH = 5.0


def init(rng: np.random.Generator, features: int, devices: int, width: int) -> Params:
    """Fresh weights."""
    small = 0.1
    return {
        "enter": dense(rng, features, width),
        "encode": dense(rng, 2 * width, 4 * width),
        "decode": dense(rng, 3 * width, 4 * width),
        "device": (small * rng.standard_normal((devices + 1, width))).astype(np.float32),
        "keys": dense(rng, width, width),
        "query": dense(rng, width, width),
        "weigh": dense(rng, width, 1),
        "out": dense(rng, 2 * width, devices, small),
    }


def place(
    params: Params, items: Any, allowed: Any, noise: Any, action: Any, forced: Any
) -> tuple[Any, Any]:
    """(devices [G], log-probability) of one placement of items [G, F].

    With `forced`, those of `action`; else what is largest after `noise` [G, D] is added.
    """
    width = params["enter"]["w"].shape[1]
    zero, embedded = jnp.zeros(width), jnp.asarray(params["device"])
    _, memory = jax.lax.scan(
        lambda state, x: _cell(params["encode"], state, x),
        (zero, zero), jnp.tanh(linear(params["enter"], items)),
    )  # fmt: skip
    keys = linear(params["keys"], memory)

    def step(carry: Any, inputs: Any) -> tuple[Any, Any]:
        state, before, context = carry
        mine, may, gumbel, given = inputs
        state, h = _cell(params["decode"], state, jnp.concatenate([before, mine]))
        score = linear(params["weigh"], jnp.tanh(keys + linear(params["query"], h)))[:, 0]
        context = jax.nn.softmax(score) @ memory
        logits = SQUASH * jnp.tanh(linear(params["out"], jnp.concatenate([h, context])))
        chosen = jnp.argmax(jnp.where(may, logits + gumbel, -1e9))
        chosen = jnp.where(forced, given, chosen)
        logp = log_softmax(logits, may)[chosen]
        return (state, embedded[chosen + 1], context), (chosen, logp)

    begin = ((zero, zero), embedded[0], zero)
    _, (chosen, logp) = jax.lax.scan(step, begin, (memory, allowed, noise, action))
    free = allowed.sum(axis=1) > 1
    return chosen, jnp.where(free, logp, 0.0).sum()


def _cell(layer: Params, state: Any, x: Any) -> tuple[Any, Any]:
    """One step of an LSTM."""
    hidden, cell = state
    i, f, g, o = jnp.split(linear(layer, jnp.concatenate([x, hidden])), 4)
    cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (hidden, cell), hidden
