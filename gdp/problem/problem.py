"""One question: this graph, on this cluster, at these costs, for this objective."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.base.errors import InfeasibleError
from gdp.base.units import format_seconds
from gdp.cluster.types import Cluster
from gdp.costs.base import CostModel
from gdp.graph.groups import all_per_group, joined, merge_ids, sum_per_group
from gdp.graph.op_graph import OpGraph

P = ParamSpec("P")
T = TypeVar("T")


class TimeUnit(NamedTuple):
    """The unit of a problem's times."""

    seconds: float = 1.0  # that one unit takes
    grid: float = 0.0  # every time is a whole multiple of so many units; 0: any number

    def text(self, time: float) -> str:
        """A time as users read it, such as "1.230 ms"."""
        return format_seconds(time * self.seconds)


SECONDS = TimeUnit()


@dataclass(frozen=True, eq=False)
class Origin:
    """Origin of a problem: the ops that its ops are fused from, and its costs. Axis: A ops of the
    model."""

    group_of: Int[np.ndarray, "A"]  # the fused op that holds each op of the model
    costs: str = ""  # which cost model, and why it
    model: CostModel | None = None  # that the label `costs` is of
    # True where kernels are cut between modules, so that these are free of each other: times are
    # then at most those of `gdp.question.prepare.prepare_placement`, but for `slack_s`.
    is_relaxed: bool = False
    slack_s: float = 0.0  # by which a time may exceed that of `prepare_placement`
    # Of the collectives in one run of each fused op; None where no op is divided.
    exchange_s: Float[np.ndarray, "N D"] | None = None
    # The graph as further members of splits of unlike shares hold it, by device.
    members: Mapping[int, OpGraph] = field(default_factory=dict)

    def expand(self, values: Int[np.ndarray, "N"]) -> Int[np.ndarray, "A"]:
        """Values of the fused ops, for the ops of the model."""
        return values[self.group_of]

    def coarser(self, part: Int[np.ndarray, "N"]) -> "Origin":
        """The origin of a problem whose op m stands for the fused ops of part m."""
        return replace(self, group_of=part[self.group_of])


class Launches(NamedTuple):
    """Host threads that launch the ops of several devices one by one, as the interpreter of PyTorch
    does. Axes: N ops, D devices."""

    seconds: Float[np.ndarray, "N D"]  # of the thread in all runs of an op, dispatch excluded
    thread: Int[np.ndarray, "D"]  # that launches a device's ops, 0..; below zero: its own

    def of_parts(self, part: Int[np.ndarray, "N"]) -> "Launches":
        """Launches of ops that each stand for the ops of a part."""
        return self._replace(seconds=sum_per_group(self.seconds, part))


@dataclass(frozen=True, eq=False)
class Problem:
    """Input of every method. Axes: N ops, T tensors, E uses, D devices.

    Times are seconds as `make_problem` makes it, and whole ticks as methods get it: then
    `unit.seconds` converts them (see `gdp.problem.ticks`).
    """

    graph: OpGraph
    cluster: Cluster
    compute_s: Float[np.ndarray, "N D"]  # inf where the device cannot run the op
    objective: str  # a name of `gdp.sim.objectives.OBJECTIVES`
    allowed: Bool[np.ndarray, "N D"]  # kernel support and the user's pins, both hard
    group: Int[np.ndarray, "N"]  # ops of one group share a device; ids 0..G-1
    # Over a link in one sample. Devices hold `graph.held_bytes`, however often an op runs.
    sent_bytes: Int[np.ndarray, "T"]
    origin: Origin  # the way back to the model; no method needs it
    # Time to move a tensor, whatever the devices, where the objective's row states it
    # (`Objective.sent_s`) instead of the cluster's links.
    sent_s: Float[np.ndarray, "T"] | None = None
    replicas: bool = False  # whether devices may take samples round-robin; see gdp.sim.score
    unit: TimeUnit = SECONDS
    within_s: float = np.inf  # seconds that a run may take, where the objective heeds them
    launches: Launches | None = None  # None: every device launches its own
    # By `cached_on_problem`.
    _cache: dict[tuple, Any] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """The problem alone: derived values are computed again after unpickling."""
        return vars(self) | {"_cache": {}}

    @property
    def num_ops(self) -> int:
        """N, inputs and outputs of the graph included."""
        return self.graph.num_ops

    @property
    def num_devices(self) -> int:
        """D."""
        return self.cluster.num_devices

    @functools.cached_property
    def num_groups(self) -> int:
        """G; an op without a group counts as one."""
        return int(self.group.max()) + 1

    @functools.cached_property
    def held_on(self) -> Int[np.ndarray, "K D"]:
        """Device that holds what the ops on each device hold, by kind: all of it the device itself,
        or of two kinds weights the device itself and caches the one that computes its ops."""
        own, cluster = np.arange(self.num_devices), self.cluster
        apart = cluster.streams.any() and self.graph.cache_bytes.any()
        return np.stack([own, cluster.runs_on]) if apart else own[None]

    @functools.cached_property
    def group_allowed(self) -> Bool[np.ndarray, "G D"]:
        """Allowed devices of each group: those that all of its ops may use."""
        return all_per_group(self.allowed, self.group)


def cached_on_problem(
    make: Callable[Concatenate[Problem, P], T],
) -> Callable[Concatenate[Problem, P], T]:
    """A function of a problem whose result is kept in the problem, once per further arguments.

    Arguments after the problem must be hashable, and the result is shared: nobody may change it.
    Two threads that ask at once may both compute it.

    >>> @cached_on_problem
    ... def fastest_s(problem: Problem) -> float:
    ...     return float(problem.compute_s.min(axis=1).sum())
    """

    @functools.wraps(make)
    def cached(problem: Problem, /, *args: P.args, **kwargs: P.kwargs) -> T:
        store, key = problem._cache, (make, args, tuple(sorted(kwargs.items())))  # noqa: SLF001
        if key not in store:
            store[key] = make(problem, *args, **kwargs)
        return store[key]

    return cached


class StoredBytes(NamedTuple):
    """Bytes that ops hold throughout a run, on the devices of `Problem.held_on`.

    A device holds entries of one id once, of the largest size. Axis: H entries, by ids, ascending.
    """

    op: Int[np.ndarray, "H"]
    id: Int[np.ndarray, "H"]  # those of one kind are no other's
    size_bytes: Int[np.ndarray, "H"]
    kind: Int[np.ndarray, "H"]  # ascending

    def on(self, problem: Problem, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "H"]:
        """The device that holds each entry in a placement."""
        return problem.held_on[self.kind, device[self.op]]


@cached_on_problem
def stored_bytes(problem: Problem) -> StoredBytes:
    """Weights and caches of a problem's ops, of one kind unless they lie apart. O(N log N)."""
    graph = problem.graph
    cache = graph.cache_bytes if len(problem.held_on) > 1 else np.zeros_like(graph.cache_bytes)
    sizes = np.stack([graph.weight_bytes - cache, cache]).astype(np.int64)
    kind, op = np.nonzero(sizes)
    after = int(graph.weight_id.max(initial=0)) + 1
    ids = graph.weight_id[op].astype(np.int64) + kind * after
    order = np.argsort(ids, kind="stable")
    return StoredBytes(op[order], ids[order], sizes[kind, op][order], kind[order])


def make_problem(
    graph: OpGraph,
    cluster: Cluster,
    compute_s: Float[np.ndarray, "N D"],
    objective: str = "latency",
    *,
    allowed: Bool[np.ndarray, "N D"] | None = None,
    together: Int[np.ndarray, "N"] | None = None,
    sent_s: Float[np.ndarray, "T"] | None = None,
    replicas: bool = False,
    unit: TimeUnit = SECONDS,
    origin: Origin | None = None,
    within_s: float = np.inf,
    launches: Launches | None = None,
) -> Problem:
    """A problem; `allowed` and `together` (ids, ops of one id share a device) are the user's.
    `compute_s` is of all runs of an op in one sample (`graph.repeats`). `unit` is that of all times
    given; seconds by default.
    Without an `origin` the ops are those of the model.

    Raises `InfeasibleError` when some op, or some group that must share a device, can run on no
    device at all; the message names it.
    """
    possible = np.isfinite(compute_s)
    homeless = np.flatnonzero(~possible.any(axis=1))
    if homeless.size:
        op = int(homeless[0])
        raise InfeasibleError(
            f"{homeless.size} of {graph.num_ops} ops run on no device of cluster "
            f"{cluster.name!r}, first {graph.op_names[op]!r} ({graph.op_types[op]}); "
            "add a device that supports it"
        )
    if allowed is not None:
        possible = possible & allowed
        barred = np.flatnonzero(~possible.any(axis=1))
        if barred.size:
            op = int(barred[0])
            raise InfeasibleError(
                f"the constraints leave no device for {barred.size} of {graph.num_ops} ops, "
                f"first {graph.op_names[op]!r}; relax a pin or a forbidden device"
            )
    group = merge_ids(graph.colocate, together)
    origin = origin or Origin(np.arange(graph.num_ops))
    problem = Problem(
        graph, cluster, compute_s, objective, possible, group, graph.sent_bytes, origin, sent_s,
        replicas, unit, within_s, launches,
    )  # fmt: skip
    torn = np.flatnonzero(~problem.group_allowed.any(axis=1))
    if torn.size:
        members = np.flatnonzero(group == torn[0])
        raise InfeasibleError(
            f"{len(members)} ops must share a device but no device is allowed for all of them, "
            f"first {graph.op_names[members[0]]!r} and {graph.op_names[members[-1]]!r}"
        )
    return problem


def contracted(
    problem: Problem,
    graph: OpGraph,
    part: Int[np.ndarray, "N"],
    *,
    compute_s: Float[np.ndarray, "N D"] | None = None,
    cluster: Cluster | None = None,
    launches: Launches | None = None,
) -> Problem:
    """The problem over `graph`, whose op m stands for the ops of part m and takes their time.

    A part may go where all of its ops may, and shares a device with the parts that any of its ops
    are tied to. Costs, cluster and launches are the problem's own unless given. For
    objectives on the cluster's links, without `sent_s`. Raises `InfeasibleError` where parts that
    are tied have no device in common.
    """
    launches = launches or problem.launches
    return make_problem(
        graph,
        problem.cluster if cluster is None else cluster,
        sum_per_group(problem.compute_s if compute_s is None else compute_s, part),
        problem.objective,
        allowed=all_per_group(problem.allowed, part),
        together=joined(part, problem.group),
        unit=problem.unit,
        origin=problem.origin.coarser(part),
        within_s=problem.within_s,
        launches=launches and launches.of_parts(part),
    )
