"""Placements from a scored problem: greedy, sampled or forced, several at a time.

Axes: K placements, N ops, T tensors, E uses, C channels, D devices, F pair features, W head width.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from gdp.policy.advice import Advice
from gdp.policy.view.timing import timing
from gdp.problem.problem import Problem, derived


class DecodeProblem(NamedTuple):
    """A problem as the kernels read it."""

    cost_s: Float[np.ndarray, "N D"]
    order: Int[np.ndarray, "N"]
    tail_s: Float[np.ndarray, "N"]  # longest path after the op, transfers included
    group: Int[np.ndarray, "N"]
    allowed: Bool[np.ndarray, "groups D"]
    member_first: Int[np.ndarray, "groups+1"]
    member: Int[np.ndarray, "N"]  # ops by group
    weight: Int[np.ndarray, "N"]  # id of the weight an op holds
    weight_size: Float[np.ndarray, "weights"]
    is_io: Bool[np.ndarray, "N"]
    in_first: Int[np.ndarray, "N+1"]
    in_tensor: Int[np.ndarray, "E"]
    out_first: Int[np.ndarray, "N+1"]
    out_tensor: Int[np.ndarray, "T"]  # tensors by producer
    producer: Int[np.ndarray, "T"]
    tensor_bytes: Float[np.ndarray, "T"]
    num_uses: Int[np.ndarray, "T"]
    reader_first: Int[np.ndarray, "T+1"]
    reader: Int[np.ndarray, "E"]
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


class Head(NamedTuple):
    """What the network computed for one problem: scores before the dynamic features are known.

    logit(op, d) = prior[op, d] + out . relu(mixing' relu(node[op] + device[d] + feature' f) + bias)
    """

    prior: Float32[np.ndarray, "N D"]
    node: Float32[np.ndarray, "N W"]
    device: Float32[np.ndarray, "D W"]
    feature: Float32[np.ndarray, "F W"]
    mixing: Float32[np.ndarray, "W W"]
    bias: Float32[np.ndarray, "W"]
    out: Float32[np.ndarray, "W"]
    dynamic: bool


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


def advised(view: DecodeProblem, found: Advice) -> DecodeProblem:
    """The view with the advice that the decoder is to read."""
    return view._replace(
        advice=np.ascontiguousarray(found.device), advice_weight=found.weight.astype(np.float64)
    )


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
    from gdp.policy.decode_kernels import NUM_PAIR_FEATURES, new_scratch, new_state, rollout

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


def num_threads() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def priority(problem: Problem) -> Int[np.ndarray, "N"]:
    """The rank of every op: its place in the decode order (decreasing longest path to the end)."""
    rank = np.empty(problem.num_ops, dtype=np.int64)
    rank[timing(problem).order] = np.arange(problem.num_ops)
    return rank


def twins(problem: Problem) -> Int[np.ndarray, "D"]:
    """For each device the next lower one that is exactly alike, or -1.

    Alike: same costs, constraints, memory and dispatch, and exchanging the two leaves every link
    and the sharing of channels as they are.
    """
    d = problem.num_devices
    found = np.full(d, -1, dtype=np.int64)
    for i in range(d):
        for j in range(i - 1, -1, -1):
            if _alike(problem, i, j):
                found[i] = j
                break
    return found


def canonical(
    problem: Problem, device: Int[np.ndarray, "N"], twin: Int[np.ndarray, "D"]
) -> Int[np.ndarray, "N"]:
    """The same placement with devices that are alike renamed by first use in decode order."""
    order = timing(problem).order
    d = problem.num_devices
    label = np.arange(d)
    for i in range(d):
        if twin[i] >= 0:
            label[i] = label[twin[i]]
    name = np.full(d, -1, dtype=np.int64)
    for used in device[order]:
        if name[used] < 0:
            same = [i for i in range(d) if label[i] == label[used] and i not in name]
            name[used] = same[0]
    for i in range(d):
        if name[i] < 0:
            name[i] = next(j for j in range(d) if label[j] == label[i] and j not in name)
    return name[device]


def _alike(problem: Problem, i: int, j: int) -> bool:
    cluster = problem.cluster
    swap = np.arange(problem.num_devices)
    swap[i], swap[j] = j, i
    a, b = cluster.devices[i], cluster.devices[j]
    if (a.memory_bytes, a.dispatch_s, a.dispatch_per) != (
        b.memory_bytes, b.dispatch_s, b.dispatch_per
    ):  # fmt: skip
        return False
    if cluster.host in (i, j) and problem.graph.is_io.any():
        return False
    if (problem.compute_s[:, i] != problem.compute_s[:, j]).any() or (
        problem.allowed[:, i] != problem.allowed[:, j]
    ).any():
        return False
    for links in (cluster.link_bytes_per_s, cluster.link_latency_s):
        if (links[np.ix_(swap, swap)] != links).any():
            return False
    off = np.flatnonzero(~np.eye(problem.num_devices, dtype=bool).ravel())
    before = cluster.channel.ravel()[off]
    after = cluster.channel[np.ix_(swap, swap)].ravel()[off]
    return bool(((before[:, None] == before[None, :]) == (after[:, None] == after[None, :])).all())


def _first(ends: Int[np.ndarray, "M"], count: int) -> Int[np.ndarray, "L"]:
    return np.searchsorted(ends, np.arange(count + 1))


def _links(problem: Problem) -> tuple[Float[np.ndarray, "D D"], Float[np.ndarray, "D D"]]:
    """(latency, seconds per byte); the block objectives move a tensor in the same time anywhere."""
    cluster = problem.cluster
    s_per_byte = np.where(np.isinf(cluster.link_bytes_per_s), 0.0, 1.0 / cluster.link_bytes_per_s)
    if problem.tensor_s is None:
        return cluster.link_latency_s, s_per_byte
    moved = float(np.maximum(problem.graph.tensor_bytes, 1).sum())
    per_byte = 2.0 * float(problem.tensor_s.sum()) / moved
    return np.zeros_like(s_per_byte), np.where(s_per_byte > 0, per_byte, 0.0)


@derived
def prepare(
    problem: Problem, *, mask_memory: bool = True, mask_alike: bool = True
) -> DecodeProblem:
    """The kernels' view of a problem, under the masks given."""
    graph, cluster, times = problem.graph, problem.cluster, timing(problem)
    d = problem.num_devices
    weight = np.unique(graph.weight_id, return_inverse=True)[1]
    weight_size = np.zeros(int(weight.max()) + 1)
    np.maximum.at(weight_size, weight, graph.weight_bytes.astype(float))
    by_tensor = np.argsort(graph.use_tensor, kind="stable")
    latency_s, s_per_byte = _links(problem)
    speed = np.where(problem.allowed & ~graph.is_io[:, None], times.cost_s, np.nan)
    total = np.maximum(np.nan_to_num(speed).sum(axis=0), 1e-30)
    fair_s = max(float(1.0 / (1.0 / total).sum()), 1e-30)
    return DecodeProblem(
        cost_s=times.cost_s,
        order=times.order,
        tail_s=times.up_s - times.mean_cost_s,
        group=problem.group,
        allowed=problem.group_allowed,
        member_first=_first(np.sort(problem.group), problem.num_groups),
        member=np.argsort(problem.group, kind="stable"),
        weight=weight,
        weight_size=weight_size,
        is_io=graph.is_io,
        in_first=_first(graph.use_op, graph.num_ops),
        in_tensor=graph.use_tensor,
        out_first=_first(np.sort(graph.producer), graph.num_ops),
        out_tensor=np.argsort(graph.producer, kind="stable"),
        producer=graph.producer,
        tensor_bytes=graph.tensor_bytes.astype(float),
        num_uses=np.bincount(graph.use_tensor, minlength=graph.num_tensors),
        reader_first=_first(graph.use_tensor[by_tensor], graph.num_tensors),
        reader=graph.use_op[by_tensor],
        latency_s=np.ascontiguousarray(latency_s),
        s_per_byte=np.ascontiguousarray(s_per_byte),
        channel=np.where(np.eye(d, dtype=bool), 0, cluster.channel),
        segment_s=np.array(
            [x.dispatch_s if x.dispatch_per == "segment" else 0.0 for x in cluster.devices]
        ),
        memory_bytes=cluster.memory_bytes.astype(float),
        twin=twins(problem),
        advice=np.zeros((0, problem.num_ops), dtype=np.int64),
        advice_weight=np.zeros(0),
        scale_s=max(times.scale_s, 1e-15),
        fair_s=fair_s,
        copies=1.0 if problem.objective in ("latency", "block_latency") else 2.0,
        host=cluster.host,
        num_channels=max(cluster.num_channels, 1),
        num_groups=problem.num_groups,
        num_weights=len(weight_size),
        mask_memory=mask_memory,
        mask_alike=mask_alike,
    )
