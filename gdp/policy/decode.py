"""Placements from a scored problem: greedy, sampled or forced, several at a time.

Axes: K placements, N ops, T tensors, E uses, C channels, D devices, F pair features, W head width.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from gdp.methods.priorities import links, timing
from gdp.policy.model.config import Head
from gdp.policy.view.decode_problem import NUM_PAIR_FEATURES, SHARED, DecodeProblem
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem, cached_on_problem
from gdp.problem.symmetry import twins
from gdp.sim.objectives import objective_of

T = TypeVar("T")
R = TypeVar("R")


class Rollout(NamedTuple):
    """Decoded placements and the inputs of their choices, for learning.

    Axes of the inputs: M >= N ops and L >= D devices, as wide as the padded network; one where they
    are not kept.
    """

    device: Int[np.ndarray, "K N"]
    log_probability: Float[np.ndarray, "K"]  # of the free choices, at temperature 1
    taken: Bool[np.ndarray, "K M"]  # where a choice was free
    legal: Bool[np.ndarray, "K M L"]
    feats: Float32[np.ndarray, "K M L F"]


def decode(
    view: DecodeProblem,
    head: Head,
    *,
    samples: int,
    seed: int,
    temperature: float = 1.0,
    greedy_first: bool = False,
    forced: Int[np.ndarray, "K N"] | None = None,
    keep: tuple[int, int] | None = None,
    threads: int = 1,
) -> Rollout:
    """`samples` placements; the first is the greedy one with `greedy_first`.

    `forced` rows replace the last rows of the batch: their ops go where they are told and are only
    scored. `keep` (M, L) keeps the inputs of choices, padded with zeros to so many ops and devices.
    """
    from gdp.policy.decode_kernels import SeenChoices, new_scratch, new_state, rollout

    n, d = view.cost_s.shape
    wide_n, wide_d = keep or (1, 1)
    uniform = np.random.default_rng(seed).random((samples, n))
    device = np.zeros((samples, n), dtype=np.int64)
    fixed = np.full((samples, n), -1, dtype=np.int64)
    if forced is not None and len(forced):
        fixed[samples - len(forced) :] = forced
    taken = np.zeros((samples, wide_n), dtype=bool)
    legal = np.zeros((samples, wide_n, wide_d), dtype=bool)
    feats = np.zeros((samples, wide_n, wide_d, NUM_PAIR_FEATURES), dtype=np.float32)
    log_probability = np.zeros(samples)

    def run(k: int) -> None:
        greedy = greedy_first and k == 0
        log_probability[k] = rollout(
            view, new_state(view), new_scratch(d, len(head.out)), head, fixed[k], uniform[k],
            greedy, temperature, device[k], SeenChoices(taken[k], legal[k], feats[k]),
            keep is not None,
        )  # fmt: skip

    in_threads(run, range(samples), threads)
    return Rollout(device, log_probability, taken, legal, feats)


def in_threads(work: Callable[[T], R], items: Sequence[T], threads: int) -> list[R]:
    """The results in order; in this thread where there is one item, or one thread is wanted."""
    if min(threads, len(items)) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(work, items))


@cached_on_problem
def prepare(
    problem: Problem, *, mask_memory: bool = True, mask_alike: bool = True
) -> DecodeProblem:
    """The kernels' view of a problem, under the masks given."""
    a, cluster, times = arrays_of(problem), problem.cluster, timing(problem)
    latency_s, s_per_byte = links(problem)
    speed = np.where(problem.allowed & ~a.is_io[:, None], times.cost_s, np.nan)
    total = np.maximum(np.nan_to_num(speed).sum(axis=0), 1e-30)
    weight = np.unique(problem.graph.weight_id, return_inverse=True)[1]
    return DecodeProblem(
        **{name: getattr(a, name) for name in SHARED},
        cost_s=times.cost_s,
        order=times.order,
        tail_s=times.up_s - times.mean_cost_s,
        weight=np.arange(len(a.weight_bytes)).reshape(len(a.held_on), -1)[:, weight],
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
        kept=_kept(problem),
        host=cluster.host,
        num_channels=max(cluster.num_channels, 1),
        num_groups=problem.num_groups,
        num_weights=len(a.weight_bytes),
        mask_memory=mask_memory,
        mask_alike=mask_alike,
    )


def _kept(problem: Problem) -> Bool[np.ndarray, "T"]:
    """Of a full pipeline that trains: what forward ops make and backward ops read."""
    a = arrays_of(problem)
    read_back = np.zeros(len(a.held_bytes), dtype=bool)
    if objective_of(problem).copies > 1.0:
        tensor_of_use = np.repeat(np.arange(len(read_back)), np.diff(a.use_start))
        read_back[tensor_of_use[a.is_backward[a.use_op]]] = True
        read_back &= ~a.is_backward[a.producer]
    return read_back
