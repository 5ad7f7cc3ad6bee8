"""Placements from a scored problem: greedy, sampled or forced, several at a time.

Axes: K placements, N ops, T tensors, E uses, C channels, D devices, F pair features, W head width.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from gdp.policy.model.head import Head
from gdp.policy.timing import links, timing
from gdp.policy.view.pair_features import NUM_PAIR_FEATURES
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, derived
from gdp.problem.symmetry import twins
from gdp.sim.objectives import objective_of


class DecodeProblem(NamedTuple):
    """A problem as the decoder reads it: `Arrays`, and what is estimated or masked.

    What stands in `Arrays` too is the same array under the same name.
    """

    cost_s: Float[np.ndarray, "N D"]
    order: Int[np.ndarray, "N"]
    tail_s: Float[np.ndarray, "N"]  # longest path after the op, transfers included
    group: Int[np.ndarray, "N"]
    group_allowed: Bool[np.ndarray, "groups D"]
    group_start: Int[np.ndarray, "groups+1"]
    group_op: Int[np.ndarray, "N"]
    weight: Int[np.ndarray, "N"]  # id of the weight an op holds
    weight_bytes: Int[np.ndarray, "weights"]
    is_io: Bool[np.ndarray, "N"]
    in_start: Int[np.ndarray, "N+1"]
    in_tensor: Int[np.ndarray, "E"]
    out_start: Int[np.ndarray, "N+1"]
    out_tensor: Int[np.ndarray, "T"]
    producer: Int[np.ndarray, "T"]
    tensor_bytes: Int[np.ndarray, "T"]
    num_uses: Int[np.ndarray, "T"]
    use_start: Int[np.ndarray, "T+1"]
    use_op: Int[np.ndarray, "E"]
    latency_s: Float[np.ndarray, "D D"]
    s_per_byte: Float[np.ndarray, "D D"]
    channel: Int[np.ndarray, "D D"]
    segment_s: Float[np.ndarray, "D"]  # dispatch of devices that pay it per segment
    memory_bytes: Float[np.ndarray, "D"]
    twin: Int[np.ndarray, "D"]  # the next lower device that is exactly alike, or -1
    advice: Int[np.ndarray, "A N"]  # devices that advisers propose, the incumbent's first
    advice_weight: Float[np.ndarray, "A"]  # shares of the votes
    scale_s: float
    fair_s: float  # total work shared out by speed
    copies: float  # of a received tensor on its device: two in a full pipeline
    host: int
    num_channels: int
    num_groups: int
    num_weights: int
    mask_memory: bool
    mask_alike: bool


SHARED = (
    "group", "group_allowed", "group_start", "group_op", "weight_bytes", "is_io", "in_start",
    "in_tensor", "out_start", "out_tensor", "producer", "tensor_bytes", "use_start", "use_op",
    "segment_s",
)  # fmt: skip
"""Of `DecodeProblem`, what are the arrays of `Arrays`."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """Decoded placements; what was seen on the way is there when it was asked for.

    Axes of what was seen: M >= N ops and L >= D devices, as wide as the padded network.
    """

    device: Int[np.ndarray, "K N"]
    log_probability: Float[np.ndarray, "K"]  # of the free choices, at temperature 1
    taken: Bool[np.ndarray, "K M"] | None = None  # where a choice was free
    legal: Bool[np.ndarray, "K M L"] | None = None
    feats: Float32[np.ndarray, "K M L F"] | None = None


def decode(
    view: DecodeProblem,
    head: Head,
    *,
    samples: int,
    seed: int,
    temperature: float = 1.0,
    greedy_first: bool = False,
    forced: Int[np.ndarray, "K N"] | None = None,
    keep: bool = False,
    pad: tuple[int, int] | None = None,
    threads: int = 1,
) -> Rollout:
    """`samples` placements; the first is the greedy one with `greedy_first`.

    `forced` rows replace the last rows of the batch: their ops go where they are told and are only
    scored. `pad` (N, D) widens the kept arrays with zeros for a padded network.
    """
    from gdp.policy.decode_kernels import new_scratch, new_state, rollout

    n, d = view.cost_s.shape
    wide_n, wide_d = pad or (n, d)
    uniform = np.random.default_rng(seed).random((samples, n))
    device = np.zeros((samples, n), dtype=np.int64)
    fixed = np.full((samples, n), -1, dtype=np.int64)
    if forced is not None and len(forced):
        fixed[samples - len(forced) :] = forced
    rows, cols, deep = (samples, wide_n, wide_d) if keep else (samples, 1, 1)
    taken = np.zeros((rows, cols), dtype=bool)
    legal = np.zeros((rows, cols, deep), dtype=bool)
    feats = np.zeros((rows, cols, deep, NUM_PAIR_FEATURES), dtype=np.float32)
    log_probability = np.zeros(samples)

    def run(k: int) -> None:
        greedy = greedy_first and k == 0
        log_probability[k] = rollout(
            view, new_state(view), new_scratch(d, len(head.out)), head, fixed[k], uniform[k],
            greedy, temperature, device[k], taken[k], legal[k], feats[k], keep,
        )  # fmt: skip

    if threads > 1 and samples > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, range(samples)))
    else:
        for k in range(samples):
            run(k)
    if not keep:
        return Rollout(device, log_probability)
    return Rollout(device, log_probability, taken, legal, feats)


@derived
def prepare(
    problem: Problem, *, mask_memory: bool = True, mask_alike: bool = True
) -> DecodeProblem:
    """The kernels' view of a problem, under the masks given."""
    a, cluster, times = arrays_of(problem), problem.cluster, timing(problem)
    latency_s, s_per_byte = links(problem)
    speed = np.where(problem.allowed & ~a.is_io[:, None], times.cost_s, np.nan)
    total = np.maximum(np.nan_to_num(speed).sum(axis=0), 1e-30)
    return DecodeProblem(
        **{name: getattr(a, name) for name in SHARED},
        cost_s=times.cost_s,
        order=times.order,
        tail_s=times.up_s - times.mean_cost_s,
        weight=np.unique(problem.graph.weight_id, return_inverse=True)[1],
        num_uses=np.diff(a.use_start),
        latency_s=latency_s,
        s_per_byte=s_per_byte,
        channel=np.where(np.eye(problem.num_devices, dtype=bool), 0, cluster.channel),
        memory_bytes=cluster.memory_bytes.astype(float),
        twin=twins(problem),
        advice=np.zeros((0, problem.num_ops), dtype=np.int64),
        advice_weight=np.zeros(0),
        scale_s=max(times.scale_s, 1e-15),
        fair_s=max(float(1.0 / (1.0 / total).sum()), 1e-30),
        copies=objective_of(problem).copies,
        host=cluster.host,
        num_channels=max(cluster.num_channels, 1),
        num_groups=problem.num_groups,
        num_weights=len(a.weight_bytes),
        mask_memory=mask_memory,
        mask_alike=mask_alike,
    )
