"""Interchangeable devices.

What must agree differs: a stage of a pipeline depends on less of a device than the simulator. So a
caller names the traits that must agree; whether links agree is asked in one way. All relations are
equivalences, given as matrices. Axes: N ops, D devices.
"""

import numpy as np
from jaxtyping import Bool, Int

from gdp.problem.problem import Problem, cached_on_problem


def same(*traits: np.ndarray) -> Bool[np.ndarray, "D D"]:
    """Pairs of devices that agree in every trait; the last axis of a trait are the devices.

    >>> same(np.array([1, 2, 1]), np.array([[0.5, 0.5, 0.5], [3.0, 1.0, 3.0]])).astype(int)
    array([[1, 0, 1],
           [0, 1, 0],
           [1, 0, 1]])
    """
    kinds: dict[tuple[bytes, ...], int] = {}
    kind = np.array(
        [
            kinds.setdefault(tuple(trait[..., d].tobytes() for trait in traits), len(kinds))
            for d in range(traits[0].shape[-1])
        ]
    )
    return kind[:, None] == kind[None, :]


def classes_of(alike: Bool[np.ndarray, "D D"]) -> list[list[int]]:
    """The devices class by class, ascending.

    >>> classes_of(same(np.array([1, 2, 1])))
    [[0, 2], [1]]
    """
    first = alike.argmax(axis=1)
    return [np.flatnonzero(first == d).tolist() for d in np.unique(first)]


@cached_on_problem
def links_alike(problem: Problem) -> Bool[np.ndarray, "D D"]:
    """Pairs of devices whose exchange leaves links and where their ops run unchanged and renames
    channels.

    Both share their memory and their processor with each other, or with none, and the same thread
    launches their ops, in the same time.
    """
    cluster, d, launches = problem.cluster, problem.num_devices, problem.launches
    alike = np.eye(d, dtype=bool)
    off = ~alike
    num_channels = len(np.unique(cluster.channel[off]))
    for i in range(d):
        for j in range(i):
            swap = np.arange(d)
            swap[[i, j]] = j, i
            moved = np.ix_(swap, swap)
            kept = (cluster.link_latency_s[moved] == cluster.link_latency_s).all() and (
                cluster.link_bytes_per_s[moved] == cluster.link_bytes_per_s
            ).all()
            # One to one: as many pairs (channel before, channel after) as there are channels.
            pairs = np.stack([cluster.channel[off], cluster.channel[moved][off]])
            renamed = len(np.unique(pairs, axis=1).T) == num_channels
            queues = (cluster.queues[moved] == cluster.queues).all()
            runs = (swap[cluster.runs_on[swap]] == cluster.runs_on).all()
            alike[i, j] = alike[j, i] = kept and renamed and queues and runs
    launched = () if launches is None else (launches.thread, launches.seconds)
    return alike & same(cluster.pool, cluster.processor, *launched)


def is_host(problem: Problem) -> Bool[np.ndarray, "D"]:
    """True for the device of the graph's inputs and outputs, where there are any."""
    host = np.arange(problem.num_devices) == problem.cluster.host
    return host & bool(problem.graph.is_io.any())


@cached_on_problem
def interchangeable(problem: Problem) -> Bool[np.ndarray, "D D"]:
    """Pairs of devices whose exchange changes no score of any placement.

    They have the same costs, constraints, memory and dispatch, and exchanging the two leaves every
    link and the sharing of channels, memories and processors as they are.
    """
    return links_alike(problem) & same(
        problem.compute_s,
        problem.allowed,
        problem.cluster.memory_bytes,
        problem.cluster.op_dispatch_s,
        problem.cluster.segment_dispatch_s,
        is_host(problem),
    )


def twins(problem: Problem) -> Int[np.ndarray, "D"]:
    """For each device the next lower one that is interchangeable with it, or -1."""
    alike = interchangeable(problem)
    lower = [np.flatnonzero(alike[d, :d]) for d in range(problem.num_devices)]
    return np.array([ids[-1] if len(ids) else -1 for ids in lower], dtype=np.int64)


def canonical(
    problem: Problem, device: Int[np.ndarray, "N"], order: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "N"]:
    """Rename interchangeable devices by first use, ops taken in `order`."""
    label = interchangeable(problem).argmax(axis=1)  # the first device that is alike
    name = np.full(problem.num_devices, -1, dtype=np.int64)
    for used in (*device[order].tolist(), *range(problem.num_devices)):
        if name[used] < 0:
            alike = np.flatnonzero(label == label[used])
            name[used] = alike[~np.isin(alike, name)][0]
    return name[device]
