"""Parts that all baselines share: nodes, features, the judge, and an optimiser.

Axes: M nodes, K placements, D devices, F features.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gdp.files.disk_cache import use_xla_cache
from gdp.learn.evaluator import PlacementEvaluator
from gdp.learn.hsdag.network import ColocatedNodes, HsdagConfig, make_nodes
from gdp.methods.base import Assignment
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem

Params = dict[str, Any]
RESERVED = 6  # evaluations kept back: what comes close to the best is tried under every rule


@dataclass(frozen=True, eq=False)
class Found:
    """Answer of a baseline, and its cost."""

    assignment: Assignment | None  # None where nothing that fits was met
    value_s: float
    first_s: float  # of the first placement drawn
    evaluations: int
    cpu_s: float  # of this process: compilation included
    best_at: int  # how many had been drawn when it was


def nodes_of(problem: Problem) -> ColocatedNodes:
    """The colocated nodes that all baselines place."""
    return make_nodes(problem, HsdagConfig())


class Arena:
    """One problem with its nodes, its judge and a budget."""

    def __init__(self, problem: Problem, evaluations: int) -> None:
        use_xla_cache()  # seeds share what is compiled
        self.problem, self.budget = problem, evaluations
        self.nodes = nodes_of(problem)
        self.judge = PlacementEvaluator(problem, evaluations)
        self.began_s = time.process_time()
        self.drawn, self.first_s, self.best_at = 0, np.inf, 0

    @property
    def left(self) -> int:
        """Placements that may still be drawn; one drawn twice is judged once, but counts here."""
        return self.budget - RESERVED - max(self.drawn, self.judge.evaluations)

    def seconds(self, node_device: np.ndarray) -> np.ndarray:
        """Seconds [K] of placements of the nodes [K, M]."""
        return self.rate(self.nodes.devices(node_device))

    def rate(self, device: np.ndarray) -> np.ndarray:
        """Seconds [K] of placements of the ops [K, N]."""
        before_s = self.judge.best_s
        cost_s = self.judge.judge(device)
        if self.drawn == 0:
            self.first_s = float(cost_s[0])
        self.drawn += len(cost_s)
        if self.judge.best_s < before_s:
            self.best_at = self.drawn
        return cost_s

    def found(self) -> Found:
        """The best placement that was judged."""
        best_s = self.judge.best_s
        best = self.judge.answer().assignment if np.isfinite(best_s) else None
        spent = time.process_time() - self.began_s
        return Found(best, best_s, self.first_s, self.judge.evaluations, spent, self.best_at)


class Average:
    """An exponential moving average of rewards, the baseline of most of these papers."""

    def __init__(self, keep: float = 0.9) -> None:
        self.keep, self.value = keep, None

    def advantage(self, reward: np.ndarray) -> np.ndarray:
        """The rewards minus the average of those before, which they then join."""
        before = float(reward.mean()) if self.value is None else self.value
        self.value = self.keep * before + (1.0 - self.keep) * float(reward.mean())
        return (reward - before).astype(np.float32)


def rewards(arena: Arena, cost_s: np.ndarray) -> np.ndarray:
    """-sqrt(seconds) as Mirhoseini et al. reward, with the unit such that one device takes 1."""
    return -np.sqrt(cost_s / one_device_s(arena.problem))


@functools.lru_cache(maxsize=8)
def one_device_s(problem: Problem) -> float:
    """Seconds of all work on the best device, one op after another: a unit for rewards."""
    return float(compute_s(problem).sum(axis=0).min())


def compute_s(problem: Problem) -> np.ndarray:
    """Seconds [N, D] of every op, dispatch included; where a device may not, its best elsewhere."""
    seconds = np.where(problem.allowed, arrays_of(problem).compute_s, np.inf)
    return np.where(np.isfinite(seconds), seconds, seconds.min(axis=1, keepdims=True))


def dense(rng: np.random.Generator, inputs: int, outputs: int, scale: float = 1.0) -> Params:
    """A kernel of variance 1 / inputs, and a bias of zeros."""
    kernel = scale * rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)
    return {"w": kernel.astype(np.float32), "b": np.zeros(outputs, np.float32)}


def linear(layer: Params, x: Any) -> Any:
    """x W + b, in NumPy or JAX."""
    return x @ layer["w"] + layer["b"]


def mlp(layers: tuple[Params, Params], x: Any, relu: Callable[[Any], Any] = jax.nn.relu) -> Any:
    """Two layers with a rectifier between them."""
    return linear(layers[1], relu(linear(layers[0], x)))


def np_relu(x: Any) -> Any:
    """The rectifier in NumPy."""
    return np.maximum(x, 0.0)


class Trainer:
    """Adam on the gradient of a loss `(params, *data)`, clipped to norm 1 and compiled once."""

    def __init__(self, loss: Callable[..., Any], params: Params, rate: float) -> None:
        self.params = params
        transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        self.state = transform.init(params)

        @jax.jit
        def step(params: Params, state: Any, *data: Any) -> tuple[Params, Any]:
            grads = jax.grad(loss)(params, *data)
            updates, state = transform.update(grads, state, params)
            return optax.apply_updates(params, updates), state  # type: ignore[return-value]

        self.step = step

    def learn(self, *data: Any) -> None:
        """One step."""
        self.params, self.state = self.step(self.params, self.state, *data)


def log_softmax(logits: Any, allowed: Any) -> Any:
    """Log-probabilities over the last axis, of what is allowed."""
    return jax.nn.log_softmax(jnp.where(allowed, logits, -1e9), axis=-1)


def gumbel_choice(logits: np.ndarray, allowed: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A draw from the softmax of what is allowed, over the last axis."""
    noisy = np.where(allowed, logits, -np.inf) + rng.gumbel(size=logits.shape)
    return noisy.argmax(axis=-1)
