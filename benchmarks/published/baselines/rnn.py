"""An RNN placer over nodes, without groups: what HSDAG calls RNN-based (Mirhoseini et al. 2017).

The placer of `seq2seq` reads the colocated nodes in topological order. Rewarded as HDP's; the
public code of HSDAG's comparison has the sign of this loss turned and forbids placements on one
device: neither is so here. Differs from the paper: one process, Adam at 3e-3, width 64.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.published.baselines import seq2seq
from benchmarks.published.baselines.common import Arena, Average, Found, Params, Trainer, rewards
from gdp.problem.problem import Problem

WIDTH, RATE, SAMPLES = 64, 3e-3, 8


def rnn(problem: Problem, evaluations: int, seed: int) -> Found:
    """The best placement met in training."""
    arena, rng = Arena(problem, evaluations), np.random.default_rng(seed)
    nodes = arena.nodes
    params = seq2seq.init(rng, nodes.feature.shape[1], problem.num_devices, WIDTH)
    trainer, average = Trainer(_loss, params, RATE), Average()
    nothing = np.zeros(nodes.count, dtype=np.int32)
    draw = jax.jit(
        lambda p, noise: jax.vmap(
            lambda n: seq2seq.place(p, nodes.feature, nodes.allowed, n, nothing, False)[0]
        )(noise)
    )
    while arena.drawn == 0 or arena.left >= SAMPLES:
        noise = rng.gumbel(size=(SAMPLES, *nodes.allowed.shape)).astype(np.float32)
        chosen = np.asarray(draw(trainer.params, noise))
        gain = average.advantage(rewards(arena, arena.seconds(chosen)))
        trainer.learn(nodes.feature, nodes.allowed, chosen, gain)
    return arena.found()


def _loss(params: Params, feature: Any, allowed: Any, chosen: Any, gain: Any) -> Any:
    """Minus the mean of advantage x log p(placement)."""
    silent = jnp.zeros(allowed.shape)
    logp = jax.vmap(lambda c: seq2seq.place(params, feature, allowed, silent, c, True)[1])(chosen)
    return -(gain * logp).mean()
