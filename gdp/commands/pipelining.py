"""Placing for torch.distributed.pipelining, such that its split points can say the answer.

A pipeline there cuts the program where calls of modules begin, and every rank runs one stretch. A
program over stretches, for every order of the devices, finds the least period; among the plans
within the share that simplicity may cost, the one that sends the fewest bytes is answered.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from gdp import api
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.costs.offload import resident
from gdp.errors import InfeasibleError, ModelError
from gdp.graph.op_graph import OpGraph
from gdp.models import Model, is_traced, spec_of, traced_model
from gdp.placement import make_placement
from gdp.posed import pose
from gdp.problem.arrays import arrays_of
from gdp.result import Result

MANY = 2000  # orders of the devices that are tried, at most
Join = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class _Stretches:
    """What stretches of units take. Axes: C cuts between units, both ends
    included, D devices."""

    seconds: Float[np.ndarray, "C C D"]  # from a cut to a later one; inf where not allowed
    weight_bytes: Int[np.ndarray, "C C"]
    cut_bytes: Int[np.ndarray, "C"]  # of tensors that cross each cut
    cut_tensors: Int[np.ndarray, "C"]
    tensor_bytes: int  # of the unit that has most of them


def torch_boundaries(model: Model | None, graph: OpGraph, whole: Sequence[str]) -> dict[int, str]:
    """Where the program of a model can be cut; see `gdp.importers.pytorch.boundaries`. Raises
    `ModelError` where it is no PyTorch module for inference, or not the graph's."""
    from gdp.importers.pytorch.boundaries import boundaries
    from gdp.importers.pytorch.model import TorchModel

    found = traced_model(spec_of(model)) if model is not None and is_traced(model) else model
    if not isinstance(found, TorchModel):
        raise ModelError(
            "torch.distributed.pipelining cuts PyTorch modules: give python:package.module:function"
            " or hf:CONFIG"
        )
    if found.options.get("held"):
        raise ModelError(f"{found.name}: a pipeline of torch holds no caches between its samples")
    recorded = found.record()
    if recorded.graph.digest != graph.digest:
        raise ModelError(f"{found.name}: the module has changed since {graph.name!r} was traced")
    return boundaries(recorded, whole)


def place_for_pipelining(
    graph: OpGraph,
    cluster: Cluster,
    cuts: Sequence[int],
    *,
    objective: str = "throughput",
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
    simplicity: float = 0.02,
) -> Result:
    """The plan of least period whose stages begin at some of the ops `cuts`: on the accelerators,
    or where there are none on the CPUs.

    Tensors that pass over a stage are charged to both links, so the plan is the best there is where
    none do; the simulator then judges it as any other. Devices of one kind are tried in the
    cluster's order only. Raises `InfeasibleError` where nothing fits.
    """
    if objective != "throughput":
        raise ValueError(
            f"--for pipelining plans pipelines, not {objective}: add --objective throughput"
        )
    constraints = constraints or Constraints()
    if constraints.together or constraints.whole:
        raise ValueError("--for pipelining cuts where modules begin: leave out --together")
    machine = resident(cluster)
    base, _ = resolve_costs(costs, machine, graph)
    unit = np.searchsorted(np.array(sorted(cuts)), np.arange(graph.num_ops), side="right")
    stretches = _stretches(graph, machine, unit, base, constraints)
    said = "no device holds even one of its pieces"
    for share in (0.0, 0.5, 1.0):
        # How much of the memory tensors take is known once a plan is simulated.
        room = machine.memory_bytes - int(share * stretches.tensor_bytes)
        plan = _best(stretches, machine, room, simplicity)
        if plan is None:
            continue
        device = np.full(graph.num_ops, machine.host)
        for start, stop, where in plan:
            device[(unit >= start) & (unit < stop)] = where
        device[graph.is_io] = machine.host
        placement = make_placement(graph, machine, device, made_by="gdp pipelining")
        found = api.judged(graph, placement, machine, objective=objective, costs=costs)
        if found.score.feasible:
            return replace(found, method="pipelining")
        said = str(found.score)
    raise InfeasibleError(f"{graph.name!r} does not fit on cluster {cluster.name!r}: {said}")


def _stretches(
    graph: OpGraph,
    cluster: Cluster,
    unit: Int[np.ndarray, "N"],
    costs: CostModel,
    constraints: Constraints,
) -> _Stretches:
    posed = pose(
        graph, cluster, "throughput", costs=costs, constraints=constraints, keep_apart=unit
    )
    flat = arrays_of(posed.problem)
    units = int(unit.max()) + 1
    per_op = np.where(posed.problem.allowed, flat.compute_s, np.inf)
    per_op[flat.is_io] = 0.0
    fused_unit = np.zeros(posed.problem.num_ops, dtype=np.int64)
    fused_unit[posed.group_of] = unit
    seconds = np.zeros((units, cluster.num_devices))
    np.add.at(seconds, fused_unit, per_op)
    # Sums of stretches; what is not allowed would make all behind it inf minus inf.
    never = np.isinf(seconds)
    total = _summed(np.where(never, 0.0, seconds))
    stretch_s = total[None] - total[:, None] + flat.segment_s
    stretch_s[_summed(never)[None] > _summed(never)[:, None]] = np.inf
    stretch_s[np.tril_indices(units + 1)] = np.inf
    crosses = ~graph.is_io[graph.producer[graph.use_tensor]] & ~graph.is_io[graph.use_op]
    last = np.full(graph.num_tensors, -1)
    np.maximum.at(last, graph.use_tensor[crosses], unit[graph.use_op[crosses]])
    cut = np.arange(units + 1)
    open_at = (unit[graph.producer] < cut[:, None]) & (cut[:, None] <= last)
    made = np.bincount(unit, np.bincount(graph.producer, graph.tensor_bytes, graph.num_ops), units)
    return _Stretches(
        stretch_s, _weights(graph, unit, units), (open_at * graph.tensor_bytes).sum(axis=1),
        open_at.sum(axis=1), int(made.max()),
    )  # fmt: skip


def _summed(values: np.ndarray) -> np.ndarray:
    """Sums of the first k rows, for every k."""
    return np.concatenate([np.zeros_like(values[:1], dtype=float), values.cumsum(axis=0)])


def _weights(graph: OpGraph, unit: np.ndarray, units: int) -> Int[np.ndarray, "C C"]:
    """Bytes of the weights that stretches hold, each weight once in each."""
    own = np.bincount(unit, graph.weight_bytes, units)
    total = _summed(own[:, None])[:, 0]
    held = total[None] - total[:, None]
    seen: dict[int, int] = {}
    for op in np.flatnonzero(graph.weight_bytes):
        weight, here = int(graph.weight_id[op]), int(unit[op])
        if weight in seen:
            held[: seen[weight] + 1, here + 1 :] -= graph.weight_bytes[op]
        seen[weight] = here
    return held.astype(np.int64)


def _best(
    found: _Stretches, cluster: Cluster, room: Int[np.ndarray, "D"], simplicity: float
) -> list[tuple[int, int, int]] | None:
    """(first unit, unit behind the last, device) of every stage; None where nothing fits."""
    fits = found.weight_bytes[:, :, None] <= room
    seconds = np.where(fits, found.seconds, np.inf)
    latency, rate = cluster.link_latency_s[..., None], cluster.link_bytes_per_s[..., None]
    link_s = latency * found.cut_tensors + found.cut_bytes / rate
    orders = list(itertools.islice(_orders(cluster), MANY))
    least_s = min(_chain(order, seconds, link_s, np.maximum)[0] for order in orders)
    if not np.isfinite(least_s):
        return None
    limit_s = least_s * (1 + simplicity) * (1 + 1e-9)
    allowed_links = np.where(link_s <= limit_s, found.cut_bytes.astype(float), np.inf)
    allowed = np.where(seconds <= limit_s, 0.0, np.inf)
    plans = [_chain(order, allowed, allowed_links, np.add) for order in orders]
    return min(plans, key=lambda plan: plan[0])[1]


def _orders(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Orders of the devices that compute, those of one kind in the cluster's own."""
    usable = [d for d, device in enumerate(cluster.devices) if device.supported != frozenset()]
    like = {d: (cluster.devices[d].kind, cluster.devices[d].memory_bytes) for d in usable}

    def rest(left: "Counter[tuple[str, int]]", order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == len(usable):
            yield order
        for kind in [k for k, count in left.items() if count]:
            mine = [d for d in usable if like[d] == kind]
            taken = mine[len(mine) - left[kind]]
            yield from rest(left - Counter([kind]), (*order, taken))

    return rest(Counter(like[d] for d in usable), ())


def _chain(
    order: Sequence[int], stage: np.ndarray, link: np.ndarray, join: Join
) -> tuple[float, list[tuple[int, int, int]]]:
    """The best cover of all units by stretches on devices of this order. O(D C^2 + D^2 C)."""
    units = stage.shape[0] - 1
    best: list[np.ndarray] = []  # of each device as the last: value of the units before j
    back: list[tuple[np.ndarray, np.ndarray]] = []  # where its stretch begins; the device before
    for k, device in enumerate(order):
        heads = [np.where(np.arange(units + 1) == 0, 0.0, np.inf)]
        heads += [join(best[b], link[order[b], device]) for b in range(k)]
        head, before = np.min(heads, axis=0), np.argmin(heads, axis=0) - 1
        values = join(head[:, None], stage[:, :, device])
        best.append(values.min(axis=0))
        back.append((values.argmin(axis=0), before))
    k = int(np.argmin([values[units] for values in best]))
    value, j, plan = float(best[k][units]), units, []
    while k >= 0 and np.isfinite(value):
        start = int(back[k][0][j])
        plan.append((start, j, order[k]))
        j, k = start, int(back[k][1][start])
    return value, plan[::-1]
