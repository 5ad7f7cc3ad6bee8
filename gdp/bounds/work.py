"""Work that devices share: the ops of a window take their time, however they are split.

For any shares c with sum 1 (the dual of the fractional assignment of Lawler and Labetoulle 1978,
doi 10.1145/322092.322101), devices that run a set S of ops within a window of L seconds have

    L >= sum over devices of c_d * load_d >= sum over S of min over d of c_d * op_s(v, d).

Axes: M ops or groups, D devices, V ops of a window, N ops, S ops inside it, B thresholds.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int, Num

from gdp.cluster.types import Cluster
from gdp.graph.fuse import fuse
from gdp.graph.groups import distinct
from gdp.graph.op_graph import OpGraph
from gdp.problem.problem import Problem

_ROUNDS = 60
_BINS = 64
_SAMPLE = 20_000
"""Of more ops so many say which shares are good."""
_LAST_ROUNDS = 4
"""Of all ops, after those of the sample."""


def shared_work_s(op_s: Float[np.ndarray, "M D"]) -> tuple[float, Float[np.ndarray, "D"]]:
    """(seconds that the work takes at least, the shares that prove it). O(M D) a round.

    Shares follow the loads by multiplicative weights; any of them are valid, the best are kept.
    """
    usable = np.isfinite(op_s).any(axis=0)
    share = np.where(usable, 1.0, 1e-12)
    share /= share.sum()
    if len(op_s) <= _SAMPLE:
        return _best_shares(op_s, share, range(_ROUNDS))
    some = np.random.default_rng(0).choice(len(op_s), _SAMPLE, replace=False)
    _, share = _best_shares(op_s[some], share, range(_ROUNDS))
    return _best_shares(op_s, share, range(_ROUNDS, _ROUNDS + _LAST_ROUNDS))


def _best_shares(
    op_s: Float[np.ndarray, "M D"], share: Float[np.ndarray, "D"], rounds: range
) -> tuple[float, Float[np.ndarray, "D"]]:
    """(seconds that they prove, the best shares of some rounds), later ones in smaller steps."""
    num_devices = op_s.shape[1]
    best_s, best = -1.0, share
    for k in rounds:
        cost = op_s * share
        where = cost.argmin(axis=1)
        value_s = float(cost[np.arange(len(op_s)), where].sum())
        if value_s > best_s:
            best_s, best = value_s, share
        load = np.bincount(where, op_s[np.arange(len(op_s)), where], minlength=num_devices)
        if num_devices == 1 or load.max() <= 0.0:
            break
        step = 1.0 / (1.0 + 0.3 * k)
        share = share * np.exp(step * (load / load.max() - 0.5))
        share /= share.sum()
    return max(best_s, 0.0), best


def fastest_work(
    op_s: Float[np.ndarray, "M D"],
) -> tuple[Float[np.ndarray, "M"], Float[np.ndarray, "D"]]:
    """(Seconds of each op on its fastest device, price of each device in these seconds).

    In L seconds device d does at most L / price(d) of fastest work, whatever it is given; where the
    price is infinite, none.
    """
    fastest_s = op_s.min(axis=1)
    works = (fastest_s > 0) & np.isfinite(fastest_s)
    ratio = op_s[works] / fastest_s[works, None]
    return fastest_s, ratio.min(axis=0) if works.any() else np.ones(op_s.shape[1])


def work_over_speed_s(op_s: Float[np.ndarray, "M D"]) -> float:
    """Bound of the largest load: work over the speed of all devices, and the dearest op.

    The shares of `shared_work_s` that are proportional to 1 / price, with the least cost of an op
    rounded down to that of its fastest work. O(M D).

    >>> work_over_speed_s(np.array([[1.0, 2.0], [2.0, 4.0]]))
    2.0
    """
    fastest_s, price = fastest_work(op_s)
    return max(float(fastest_s.sum()) / float((1.0 / price).sum()), float(fastest_s.max()))


def window_s(
    op_s: Float[np.ndarray, "V D"],
    start_s: Float[np.ndarray, "V"],
    tail_s: Float[np.ndarray, "V"],
) -> tuple[float, Int[np.ndarray, "S"]]:
    """(max over r and q of r + work of the ops that start after r and have q to follow + q, these).

    As for identical machines (Carlier and Pinson 1998, Annals of Operations Research 83), with
    thresholds from the quantiles of heads and tails. O(V D + bins^2).
    """
    _, share = shared_work_s(op_s)
    weight_s = (op_s * share).min(axis=1)
    marks_r, marks_q = _marks(start_s), _marks(tail_s)
    r = np.searchsorted(marks_r, start_s, side="right") - 1
    q = np.searchsorted(marks_q, tail_s, side="right") - 1
    table = np.zeros((len(marks_r), len(marks_q)))
    np.add.at(table, (r, q), weight_s)
    table = table[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    value = np.where(table > 0.0, table + marks_r[:, None] + marks_q[None, :], 0.0)
    i, j = np.unravel_index(int(value.argmax()), value.shape)
    inside = np.flatnonzero((start_s >= marks_r[i]) & (tail_s >= marks_q[j]))
    if len(inside) == 0:
        return 0.0, inside
    # With shares of its own the window found may be longer still.
    own_s, _ = shared_work_s(op_s[inside])
    whole_s = float(start_s[inside].min() + tail_s[inside].min()) + own_s
    return max(whole_s, float(value[i, j])), inside


def _marks(values: Float[np.ndarray, "V"]) -> Float[np.ndarray, "B"]:
    """At most `count` thresholds, of which the smallest is the smallest value."""
    marks = distinct(values)
    if len(marks) <= _BINS:
        return marks
    return marks[np.linspace(0, len(marks) - 1, _BINS).astype(np.int64)]


def earliest_ends(problem: Problem, duration: Num[np.ndarray, "N"]) -> Num[np.ndarray, "N"]:
    """The end of each op on the longest path to it; any unit of time. O(N + E)."""
    end = duration.copy()
    src, dst = problem.graph.edges
    for u, v in zip(src.tolist(), dst.tolist(), strict=True):
        end[v] = max(end[v], end[u] + duration[v])
    return end


def roofline_bound_s(graph: OpGraph, cluster: Cluster, devices: Sequence[int]) -> float:
    """Seconds of a run, and of a period, that no division of the ops over these devices beats.

    Sound for all costs that are no faster than the peaks of a device. Tensors may stay in caches:
    weights alone are read.
    """
    graph = fuse(graph).graph
    n = graph.num_ops
    read = np.bincount(graph.use_op, graph.tensor_bytes[graph.use_tensor], n)
    made = np.bincount(graph.producer, graph.tensor_bytes, n)
    held = np.maximum(graph.memory_traffic_bytes - read - made, 0.0)
    own = [cluster.devices[d] for d in devices]
    op_s = np.stack(
        [np.maximum(graph.flop / max(d.flop_per_s.values()), held / d.bytes_per_s) for d in own],
        axis=1,
    )
    return shared_work_s(op_s * graph.repeats[:, None])[0]


def divided_pass_s(graph: OpGraph, cluster: Cluster) -> float:
    """Seconds in which the GPUs read, at once, all bytes of a pass; of a generation, of a step."""
    step = graph.repeats > 1 if (graph.repeats > 1).any() else np.ones(graph.num_ops, dtype=bool)
    slowest = min(cluster.devices[d].bytes_per_s for d in cluster.gpus)
    return float(graph.memory_traffic_bytes[step].sum()) / (len(cluster.gpus) * slowest)
