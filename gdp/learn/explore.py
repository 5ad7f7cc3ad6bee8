"""Exploration in the superposition network: policies with other gates, the best of them kept.

Samples of a confident policy differ from its greedy placement in a few ops and repeat what it
knows. Noise on its weights changes many choices at once, and consistently (parameter-space noise,
Plappert et al. 2018, arXiv 1706.01905). Here the noise scales the gates of the pair head, 99
numbers of the shipped policy, and the policies that place best are varied further: a (mu + lambda)
evolution strategy (Beyer and Schwefel 2002, doi 10.1023/A:1015059928466).
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.policy.decode import DecodeProblem, decode
from gdp.policy.model.config import Params
from gdp.policy.model.head import Head
from gdp.sim.batch import num_threads

LAYERS = {"feature": "feature_head", "mixing": "mixing", "out": "out_head"}
"""Superposed layers whose kernels `Head` holds with their gates folded in, by field."""
ELITE = 8
"""Policies that are kept and varied."""
NOISE = (0.05, 2.0)
"""Range of the deviation of a policy's noise on the logarithms of its gates, log-uniform."""

FARTHEST = 10.0
"""Largest logarithm of a factor: what it scales stays within single precision."""
SMALL = 1000
"""Ops up to which one thread decodes: starting more takes longer."""

Factors = dict[str, Float[np.ndarray, "F"]]
"""By field of `Head`: the logarithm of what each gate is multiplied by."""


class _Rated(NamedTuple):
    cost_s: float
    factor: Factors


class Explorer:
    """The best policies met, as factors on the gates of one."""

    def __init__(self, params: Params, seed: int) -> None:
        self.params = params
        self.elite: list[_Rated] = []
        self.drawn: list[Factors] = []
        self.rng = np.random.default_rng([seed, 11])

    def draw(self, view: DecodeProblem, head: Head, count: int) -> Int[np.ndarray, "K N"]:
        """The greedy placements of `count` policies; the first time the policy's own is one."""
        self.drawn = [self._vary(head) for _ in range(count)]
        if not self.elite:
            self.drawn[0] = {name: np.zeros(len(getattr(head, name))) for name in LAYERS}

        def greedy(factor: Factors) -> Int[np.ndarray, "N"]:
            other = scaled(head, factor)
            return decode(view, other, samples=1, seed=0, greedy_first=True).device[0]

        if len(head.node) <= SMALL:
            return np.stack([greedy(factor) for factor in self.drawn])
        with ThreadPoolExecutor(num_threads()) as pool:
            return np.stack(list(pool.map(greedy, self.drawn)))

    def learn(self, cost_s: Float[np.ndarray, "K"]) -> None:
        """Keep the best of what was drawn and what was kept; one policy per cost."""
        met = [_Rated(float(c), factor) for c, factor in zip(cost_s, self.drawn, strict=True)]
        best = {rated.cost_s: rated for rated in reversed([*self.elite, *met])}
        self.elite = [best[cost] for cost in sorted(best)[:ELITE]]

    def adapted(self) -> Params:
        """The weights with the best gates; unchanged where nothing was explored."""
        return fold(self.params, self.elite[0].factor) if self.elite else self.params

    def _vary(self, head: Head) -> Factors:
        """Noise around one of the best so far."""
        parent = self.elite[int(self.rng.integers(len(self.elite)))].factor if self.elite else {}
        deviation = np.exp(self.rng.uniform(*np.log(NOISE)))
        varied = {}
        for name in LAYERS:
            noise = deviation * self.rng.standard_normal(len(getattr(head, name)))
            varied[name] = np.clip(parent.get(name, 0.0) + noise, -FARTHEST, FARTHEST)
        return varied


def scaled(head: Head, factor: Factors) -> Head:
    """The encoded problem as it is with scaled gates."""
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
