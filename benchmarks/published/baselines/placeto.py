"""Placeto: one group after another is moved, rewarded by what each move gains.

Addanki et al. 2019, Learning Generalizable Device Placement Algorithms for Distributed Machine
Learning, NeurIPS (arXiv 1906.08879). As far as recalled: a decision process over merged groups of
ops; its state holds each group's seconds, output bytes, present device and whether it is the
current one or was visited; messages pass along the edges, downwards and upwards; the current
group's embedding is read together with sums over its ancestors, its descendants and the rest;
the reward of a step is the seconds it saves, the return is summed from a step to the end of the
episode, and each step has its own moving average as baseline. Every step costs an evaluation.
Differs: 24 groups at most, merged by gdp's acyclic coarsening; seconds are told for each device,
since these devices are unequal; episodes begin at a random placement. Public re-implementations sum
the returns in the wrong direction; a test holds it here.
Axes: G groups, S steps, D devices, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.published.baselines.common import (
    Arena,
    Found,
    Params,
    Trainer,
    compute_s,
    dense,
    gumbel_choice,
    log_softmax,
    mlp,
    one_device_s,
)
from gdp.graph.fuse import coarsen
from gdp.graph.groups import merge_ids, sum_per_group
from gdp.problem.problem import Problem

GROUPS, WIDTH, ROUNDS, RATE, ENTROPY, KEEP = 24, 32, 4, 1e-2, 1e-2, 0.9


def placeto(problem: Problem, evaluations: int, seed: int) -> Found:
    """The best placement met in training."""
    arena, rng = Arena(problem, evaluations), np.random.default_rng(seed)
    graph = _merged(arena)
    size, devices = graph.allowed.shape
    trainer = Trainer(_loss, _init(rng, 3 + 2 * devices, devices), RATE)
    logits = jax.jit(_logits)
    average: np.ndarray | None = None
    while arena.drawn == 0 or arena.left >= size + 1:
        place = gumbel_choice(np.zeros((size, devices)), graph.allowed, rng)
        seconds = [float(arena.seconds(place[graph.part][None])[0])]
        states, actions = [], []
        for step in range(size):
            states.append(graph.state(place, step))
            row = np.asarray(logits(trainer.params, states[-1], graph.reach, graph.near, step))
            place = place.copy()
            place[step] = gumbel_choice(row, graph.allowed[step], rng)
            actions.append(place[step])
            seconds.append(float(arena.seconds(place[graph.part][None])[0]))
        gained = returns(np.array(seconds) / one_device_s(problem))
        average = gained if average is None else KEEP * average + (1.0 - KEEP) * gained
        trainer.learn(
            np.stack(states), graph.reach, graph.near, graph.allowed, np.array(actions),
            (gained - average).astype(np.float32),
        )  # fmt: skip
    return arena.found()


def returns(seconds: Sequence[float] | np.ndarray) -> np.ndarray:
    """Seconds saved from each step to the end: seconds before it minus those after the last.

    >>> returns([5.0, 4.0, 6.0, 3.0])
    array([2., 1., 3.])
    """
    saved = -np.diff(np.asarray(seconds, dtype=float))
    return np.cumsum(saved[::-1])[::-1]


@dataclass(frozen=True)
class _Graph:
    """The merged groups."""

    part: np.ndarray  # [M]: the group of every node
    allowed: np.ndarray  # [G, D]: where some node of a group may go
    near: np.ndarray  # [G, G]: whether the first is read by the second
    reach: np.ndarray  # [G, G]: whether a path leads from the first to the second
    static: np.ndarray  # [G, D + 1]: seconds on each device and output bytes, scaled

    def state(self, place: np.ndarray, step: int) -> np.ndarray:
        """Features [G, F] of every group before a step."""
        at = np.arange(len(place))
        flags = np.stack([at == step, at < step], axis=1)
        where = np.eye(self.allowed.shape[1])[place]
        return np.concatenate([self.static, flags, where], axis=1).astype(np.float32)


def _merged(arena: Arena) -> _Graph:
    problem, nodes = arena.problem, arena.nodes
    label = np.unique(problem.allowed, axis=0, return_inverse=True)[1].reshape(-1)
    group_of = coarsen(problem.graph, GROUPS, apart=label.astype(np.int64)).group_of
    of_op = merge_ids(group_of, nodes.node_of)
    part = of_op[np.unique(nodes.node_of, return_index=True)[1]]
    size = int(part.max()) + 1
    near = np.zeros((size, size), np.float32)
    near[part[nodes.src], part[nodes.dst]] = 1.0
    np.fill_diagonal(near, 0.0)
    reach = near > 0
    for _ in range(size.bit_length()):
        reach = reach | (reach.astype(np.int32) @ reach.astype(np.int32) > 0)
    allowed = np.zeros((size, problem.num_devices), dtype=bool)
    np.logical_or.at(allowed, part, nodes.allowed)
    seconds = sum_per_group(compute_s(problem), of_op)
    made = np.zeros((size, 1))
    np.add.at(made[:, 0], of_op[problem.graph.producer], problem.sent_bytes)
    scaled = [values / max(values.max(), 1e-12) for values in (seconds, made)]
    static = np.concatenate(scaled, axis=1)
    return _Graph(part, allowed, near, reach.astype(np.float32), static)


def _init(rng: np.random.Generator, features: int, devices: int) -> Params:
    def pair(inputs: int, outputs: int, scale: float = 1.0) -> tuple[Params, Params]:
        return dense(rng, inputs, WIDTH), dense(rng, WIDTH, outputs, scale)

    names = ("down", "down_join", "up", "up_join", "above", "below", "beside")
    layers: Params = {name: pair(WIDTH, WIDTH, 0.5) for name in names}
    return layers | {"enter": pair(features, WIDTH), "out": pair(4 * WIDTH, devices, 0.1)}


def _logits(params: Params, state: Any, reach: Any, near: Any, step: Any) -> Any:
    """Scores [D] of the current group's devices."""
    x = mlp(params["enter"], state)
    down = up = x
    degree = 1.0 + near.sum(axis=0)[:, None]
    for _ in range(ROUNDS):
        down = down + mlp(params["down_join"], near.T @ mlp(params["down"], down) / degree)
        up = up + mlp(
            params["up_join"], near @ mlp(params["up"], up) / (1.0 + near.sum(1)[:, None])
        )
    h = down + up
    above, below = reach[:, step], reach[step]
    beside = (1.0 - above) * (1.0 - below)
    told = [
        (mask @ mlp(params[name], h)) / (1.0 + mask.sum())
        for name, mask in (("above", above), ("below", below), ("beside", beside))
    ]
    return mlp(params["out"], jnp.concatenate([h[step], *told]))


def _loss(
    params: Params, states: Any, reach: Any, near: Any, allowed: Any, actions: Any, gain: Any
) -> Any:
    """Minus the mean of advantage x log-probability of each step, minus the entropy bonus."""
    steps = jnp.arange(len(actions))
    logits = jax.vmap(lambda s, t: _logits(params, s, reach, near, t))(states, steps)
    logp = log_softmax(logits, allowed)
    chosen = jnp.take_along_axis(logp, actions[:, None], axis=1)[:, 0]
    spread = -jnp.where(allowed, jnp.exp(logp) * logp, 0.0).sum(axis=1).mean()
    return -(gain * chosen).mean() - ENTROPY * spread
