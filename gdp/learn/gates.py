"""Exploration of the gates of a policy by an evolution strategy, without gradients.

Samples of a confident policy differ from its greedy placement in a few ops. Noise on weights
changes many choices at once, consistently (parameter-space noise, Plappert et al. 2018, arXiv
1706.01905). Here it scales the gates of the pair head, 99 numbers of the shipped policy, in a
(mu + lambda) evolution strategy (Beyer and Schwefel 2002, doi 10.1023/A:1015059928466).
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.base.cores import num_cores
from gdp.policy.decode import DecodeProblem, decode, in_threads
from gdp.policy.model.config import Head, Params

LAYERS = {"feature": "feature_head", "mixing": "mixing", "out": "out_head"}
"""Superposed layers whose kernels `Head` holds with their gates folded in, by field."""
ELITE = 8
"""Number of best policies that are kept and varied."""
NOISE = (0.05, 2.0)
"""Range of the deviation of a policy's noise on the logarithms of its gates, log-uniform."""

FARTHEST = 10.0
"""Largest log factor, within which scaled weights stay in single precision."""
SMALL = 1000
"""Ops up to which one thread decodes: starting more takes longer."""

Factors = dict[str, Float[np.ndarray, "F"]]
"""By field of `Head`: the logarithm of each gate's factor."""


class _Rated(NamedTuple):
    cost_s: float
    factor: Factors


class Explorer:
    """The best policies found, as factors on the gates of one policy."""

    def __init__(self, params: Params, seed: int) -> None:
        self.params = params
        self.elite: list[_Rated] = []
        self.drawn: list[Factors] = []
        self.rng = np.random.default_rng([seed, 11])

    def draw(self, view: DecodeProblem, head: Head, count: int) -> Int[np.ndarray, "K N"]:
        """Greedy placements of `count` varied policies, at first with the unchanged one."""
        self.drawn = [self._vary(head) for _ in range(count)]
        if not self.elite:
            self.drawn[0] = {name: np.zeros(len(getattr(head, name))) for name in LAYERS}

        def greedy(factor: Factors) -> Int[np.ndarray, "N"]:
            other = scaled(head, factor)
            return decode(view, other, samples=1, seed=0, greedy_first=True).device[0]

        threads = 1 if len(head.node) <= SMALL else num_cores()
        return np.stack(in_threads(greedy, self.drawn, threads))

    def learn(self, cost_s: Float[np.ndarray, "K"]) -> None:
        """Select the best policies of old and new ones; one policy per cost."""
        met = [_Rated(float(c), factor) for c, factor in zip(cost_s, self.drawn, strict=True)]
        best = {rated.cost_s: rated for rated in reversed([*self.elite, *met])}
        self.elite = [best[cost] for cost in sorted(best)[:ELITE]]

    def adapted(self) -> Params:
        """The weights with the best gates; unchanged where nothing was explored."""
        return fold(self.params, self.elite[0].factor) if self.elite else self.params

    def _vary(self, head: Head) -> Factors:
        """Factors of a policy varied from one of the best so far."""
        parent = self.elite[int(self.rng.integers(len(self.elite)))].factor if self.elite else {}
        deviation = np.exp(self.rng.uniform(*np.log(NOISE)))
        varied = {}
        for name in LAYERS:
            noise = deviation * self.rng.standard_normal(len(getattr(head, name)))
            varied[name] = np.clip(parent.get(name, 0.0) + noise, -FARTHEST, FARTHEST)
        return varied


def scaled(head: Head, factor: Factors) -> Head:
    """The encoded problem under scaled gates."""
    changed: dict[str, Any] = {}
    for name, logs in factor.items():
        kernel = getattr(head, name)
        rows = np.exp(logs).reshape(-1, *[1] * (kernel.ndim - 1))
        changed[name] = (kernel * rows).astype(np.float32)
    return head._replace(**changed)


def fold(params: Params, factor: Factors) -> Params:
    """Weights that encode every problem with scaled gates."""
    changed = dict(params)
    for name, layer in LAYERS.items():
        # In the layer behind the gates, as a gate's own sigmoid ends at 2.
        dense = params[layer]["dense"]
        kernel = np.asarray(dense["kernel"]) * np.exp(factor[name])[:, None]
        changed[layer] = params[layer] | {"dense": dense | {"kernel": kernel.astype(np.float32)}}
    return changed
