"""Episodes of HSDAG: at each step the graph is parsed anew, placed, and the state goes on.

Axes: S steps, K placements per step, L passes of parsing, N nodes with padding, M nodes, G groups.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdp.graph.groups import best_edges, components
from gdp.learn.hsdag.config import HsdagConfig
from gdp.learn.hsdag.network import Pass, View, finish, level, network, pooled, replay, start
from gdp.learn.hsdag.nodes import Nodes
from gdp.policy.model.config import Params


class Step(NamedTuple):
    """What one step of an episode read and chose."""

    state: Float[Any, "N H"]
    passes: Pass  # stacked: part [L N], kept [L P]
    legal: Bool[Any, "N D"]  # where some member of a group may go; nothing for rows without one
    action: Int[Any, "K N"]  # the device drawn for each group


class Parsed(NamedTuple):
    """The groups of one step, and what the network makes of them."""

    part: Int[np.ndarray, "N"]  # the group of every node, over all passes
    passes: Pass
    logits: Float[np.ndarray, "N D"]
    next: Float[Array, "N H"]


def parse_state(
    config: HsdagConfig, params: Params, view: View, state: Float[Array, "N H"], count: int
) -> Parsed:
    """Encode, parse and pool `config.passes` times, the first `count` nodes being real.

    A pass that would leave fewer than `config.least_groups` groups is not taken: without it, and
    with enough passes, every connected graph would end as one group.
    """
    wide = len(view.feature)
    src, dst, edge, h = view.src, view.dst, view.edge, state
    whole, alive = np.arange(wide), count
    parts, keeps = [], []
    for _ in range(config.passes):
        h, score = level(config, params, h, src, dst, edge)
        part, kept, left = _parse(config, np.asarray(score), src, dst, edge, alive, wide)
        h = pooled(config, params, h, score, src, Pass(part, kept))
        src, dst, alive = part[src], part[dst], left
        edge, whole = edge & (src != dst), part[whole]
        parts.append(part)
        keeps.append(kept)
    logits, following = finish(config, params, state, h, whole)
    return Parsed(whole, Pass(np.stack(parts), np.stack(keeps)), np.asarray(logits), following)


def _parse(
    config: HsdagConfig, score: np.ndarray, src: np.ndarray, dst: np.ndarray, edge: np.ndarray,
    alive: int, wide: int,
) -> tuple[Int[np.ndarray, "N"], Bool[np.ndarray, "P"], int]:  # fmt: skip
    """(group of every node, edges kept, groups) of a level with `alive` of `wide` nodes."""
    real = np.flatnonzero(edge)
    kept = np.zeros(len(score), dtype=bool)
    kept[real] = best_edges(score[real].astype(np.float64), src[real], dst[real])
    label = components(src[kept], dst[kept], alive)
    if label.max() + 1 < min(config.least_groups, alive):
        kept[:], label = False, np.arange(alive)
    part = np.full(wide, wide - 1, dtype=np.int32)
    part[:alive] = label
    return part, kept, int(label.max()) + 1


def first_state(config: HsdagConfig, params: Params, view: View) -> Float[Array, "N H"]:
    """Where every episode begins."""
    return start(config, params, view)


def draw(
    parsed: Parsed, legal: Bool[np.ndarray, "N D"], samples: int, rng: np.random.Generator
) -> Int[np.ndarray, "K N"]:
    """Devices of the groups, drawn from the policy; the best one of each with `samples` 0."""
    logits = np.where(legal, parsed.logits, -np.inf)
    logits[~legal.any(axis=1)] = 0.0
    if samples == 0:
        return logits.argmax(axis=1)[None]
    return (logits + rng.gumbel(size=(samples, *logits.shape))).argmax(axis=2)


def legal_of(part: Int[np.ndarray, "N"], legal: Bool[np.ndarray, "N D"]) -> Bool[np.ndarray, "N D"]:
    """Where some node of each group may go."""
    found = np.zeros_like(legal)
    np.logical_or.at(found, part, legal)
    return found


def node_devices(
    parsed: Parsed, action: Int[np.ndarray, "K N"], nodes: Nodes
) -> Int[np.ndarray, "K O"]:
    """The device of every op, from those of the groups."""
    return nodes.devices(action[:, parsed.part[: nodes.count]])


def policy_loss(
    logits: Float[Array, "N D"],
    legal: Bool[Array, "N D"],
    action: Int[Array, "K N"],
    advantage: Float[Array, "K"],
    entropy: float | Float[Array, ""],
) -> Float[Array, ""]:
    """Minus the mean over placements of advantage x log-probability, minus the entropy bonus.

    log p(placement) is the sum over its groups (equation 14); groups without a choice add nothing.
    """
    free = legal.sum(axis=1) > 1
    logp = jax.nn.log_softmax(jnp.where(legal, logits, -1e9), axis=-1)
    chosen = jnp.take_along_axis(logp[None], action[..., None], axis=-1)[..., 0]
    total = jnp.where(free, chosen, 0.0).sum(axis=1)
    spread = -jnp.where(legal, jnp.exp(logp) * logp, 0.0).sum(axis=-1)
    bonus = jnp.where(free, spread, 0.0).sum()
    return -(advantage * total).mean() - entropy * bonus


def episode_loss(
    params: Params,
    config: HsdagConfig,
    view: View,
    steps: Step,
    advantage: Float[Array, "S K"],
) -> Float[Array, ""]:
    """The mean of `policy_loss` over the steps of an episode, with the groups as they were."""
    net = network(config, params)

    def of_step(step: Step, advantage: Float[Array, "K"]) -> Float[Array, ""]:
        logits = replay(net, view, step.state, step.passes)
        return policy_loss(logits, step.legal, step.action, advantage, config.entropy)

    return jax.vmap(of_step)(steps, advantage).mean()
