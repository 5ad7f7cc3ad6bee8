"""HDP: a feed-forward grouper and a sequence-to-sequence placer, trained together.

Mirhoseini et al. 2018, A Hierarchical Model for Device Placement (ICLR). As far as recalled: every
op, described by its type, output sizes and neighbours, is put into one of 256 groups by a softmax;
a group is described by the counts of types, sizes and its edges to the other groups; the placer
gives each group a device; reward -sqrt(step time), baseline a moving average, policy gradient for
both softmaxes. Differs: 32 groups at most, since these graphs have hundreds of nodes and not
thousands; nodes are colocated chains; Adam at 3e-3 and an entropy bonus for the grouper; width 64.
The placer is the LSTM with attention of Mirhoseini et al. 2017 (arXiv 1706.04972): one LSTM reads
the groups in order; a second one makes a device for each, fed with the embedding of the device
before, with Bahdanau attention to the first one's outputs; logits are 5 tanh(x), which keeps the
policy from saturating. Axes: K placements, M nodes, G groups, D devices, F features, H width.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.published.baselines.common import (
    Arena,
    Average,
    Found,
    Params,
    Trainer,
    dense,
    gumbel_choice,
    linear,
    log_softmax,
    mlp,
    rewards,
)
from gdp.problem.problem import Problem

GROUPS, WIDTH, RATE, SAMPLES, ENTROPY = 32, 64, 3e-3, 8, 1e-2
SQUASH = 5.0


def hdp(problem: Problem, evaluations: int, seed: int) -> Found:
    """The best placement met in training."""
    arena, rng = Arena(problem, evaluations), np.random.default_rng(seed)
    grouper = _Grouper(arena)
    size = min(GROUPS, arena.nodes.count)
    params: Params = {
        "group": (dense(rng, grouper.feature.shape[1], WIDTH), dense(rng, WIDTH, size, 0.1)),
        "place": placer(rng, grouper.feature.shape[1] + 1 + size, problem.num_devices, WIDTH),
    }
    trainer = Trainer(_loss, params, RATE)
    group_logits = jax.jit(lambda p: mlp(p["group"], grouper.feature))
    drawn = jax.jit(jax.vmap(_place, in_axes=(None, 0, 0, 0)))
    average = Average()
    while arena.drawn == 0 or arena.left >= SAMPLES:
        logits = np.asarray(group_logits(trainer.params))
        wide = np.broadcast_to(logits, (SAMPLES, *logits.shape))
        group = gumbel_choice(wide, np.ones_like(wide, dtype=bool), rng)
        items, allowed = grouper.describe(group, size)
        noise = rng.gumbel(size=allowed.shape).astype(np.float32)
        chosen = np.asarray(drawn(trainer.params["place"], items, allowed, noise))
        device = np.take_along_axis(chosen, group, axis=1)
        gain = average.advantage(rewards(arena, arena.seconds(device)))
        trainer.learn(grouper.feature, group, items, allowed, noise, chosen, gain)
    return arena.found()


class _Grouper:
    """Features of nodes and groups."""

    def __init__(self, arena: Arena) -> None:
        nodes = arena.nodes
        self.nodes, self.feature = nodes, nodes.feature

    def describe(self, group: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Features [K, G, F + 1 + G] of the groups, and where some node of each may go."""
        count = len(group)
        row = np.arange(count)[:, None]
        nodes = self.nodes
        total = np.zeros((count, size, self.feature.shape[1]), np.float32)
        np.add.at(total, (row, group), self.feature[None])
        members = np.zeros((count, size, 1), np.float32)
        np.add.at(members, (row, group), 1.0)
        edges = np.zeros((count, size, size), np.float32)
        np.add.at(edges, (row, group[:, nodes.src], group[:, nodes.dst]), 1.0)
        allowed = np.zeros((count, size, nodes.allowed.shape[1]), dtype=bool)
        np.logical_or.at(allowed, (row, group), nodes.allowed[None])
        allowed |= ~allowed.any(axis=2, keepdims=True)  # of a group without nodes
        mean = total / np.maximum(members, 1.0)
        return np.concatenate([mean, np.log1p(members), np.log1p(edges)], axis=2), allowed


def _place(params: Params, items: Any, allowed: Any, noise: Any) -> Any:
    action = jnp.zeros(items.shape[0], dtype=jnp.int32)
    return place(params, items, allowed, noise, action, False)[0]


def _loss(
    params: Params, feature: Any, group: Any, items: Any, allowed: Any, noise: Any, chosen: Any,
    gain: Any,
) -> Any:  # fmt: skip
    """Minus the mean of advantage x (log p(grouping) + log p(placement)), minus the bonus."""
    logits = mlp(params["group"], feature)
    logp = log_softmax(logits, jnp.ones(logits.shape, bool))
    grouping = jnp.take_along_axis(logp[None], group[..., None], axis=2)[..., 0].sum(axis=1)
    placing = jax.vmap(lambda i, a, n, c: place(params["place"], i, a, n, c, True)[1])(
        items, allowed, noise, chosen
    )
    spread = -(jnp.exp(logp) * logp).sum(axis=1).mean()
    return -(gain * (grouping + placing)).mean() - ENTROPY * spread


def placer(rng: np.random.Generator, features: int, devices: int, width: int) -> Params:
    """Fresh weights of the LSTM placer."""
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
