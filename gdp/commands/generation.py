"""A placed generation in the words of those who run one: first token, tokens per second, memory."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.costs.base import CostModel
from gdp.costs.offload import is_offload
from gdp.graph.generation import NEXT_TOKEN, Request, request_of, run_once
from gdp.graph.op_graph import OpGraph
from gdp.placement import Placement
from gdp.prepare import PreparedProblem, prepare_placement
from gdp.sim.latency import simulate
from gdp.sim.objectives import Score


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device; `free_bytes` is None where it has no limit."""

    device: str
    weights_bytes: int
    cache_bytes: int  # at the end of the request; of all requests in flight under throughput
    activations_bytes: int  # the most at once, beside weights and caches
    reserve_bytes: int  # kept beside all these for the system, drivers and runtimes
    free_bytes: int | None


@dataclass(frozen=True)
class GenerationAnswer:
    """Seconds and bytes of one request. Times are predictions of the simulator."""

    request: Request
    first_token_s: float  # from the prompt to the first token
    token_s: float  # of one step at the mean context
    request_s: float  # the prompt and all steps
    in_flight: int  # requests that a full pipeline works on at once
    all_tokens_per_s: float  # written by all requests of a full pipeline
    limits: tuple[str, str]  # what most of the time of the prompt and of the steps goes to
    memory: tuple[DeviceMemory, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of one request per second while it decodes, those of its batch together."""
        return self.request.batch / self.token_s if self.token_s > 0 else math.inf

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        plain = asdict(self) | {"request": self.request._asdict()}
        plain["limits"] = dict(zip(("prompt", "decode"), self.limits, strict=True))
        return plain | {"tokens_per_s": self.tokens_per_s}


def generation_answer(
    graph: OpGraph,
    placement: Placement,
    cluster: Cluster,
    score: Score,
    *,
    costs: CostModel | str | Path | None = None,
) -> GenerationAnswer | None:
    """Seconds and bytes of a request under a placement and its score; None for one phase.

    The prompt and one step are simulated with the links as they are; the score is that of the whole
    request.
    """
    request = request_of(graph)
    if request is None:
        return None
    once = run_once(graph)
    prepared, device, rank = prepare_placement(once, placement, cluster, costs=costs)
    schedule = simulate(prepared.problem, device, rank)
    first = int(prepared.group_of[once.op_index[NEXT_TOKEN]])
    first_s = float(schedule.finish_s[first])
    token_s = max(schedule.latency_s - first_s, 0.0)
    fused = prepared.problem.graph
    stepping = np.zeros(fused.num_ops, dtype=bool)
    stepping[prepared.group_of[graph.repeats > 1]] = True
    # No more requests are in flight than devices take turns.
    serving = {d for team in placement.teams for d in team}
    used = len(serving | set(device[~fused.is_io].tolist()))
    flight = min(used, max(1, round(score.latency_s / score.period_s))) if score.period_s else 1
    limits = (
        _limit(prepared, device, ~stepping, first_s, "the prompt"),
        _limit(prepared, device, stepping, token_s, "decode"),
    )
    per_s = 1.0 / score.period_s if score.period_s else math.inf
    return GenerationAnswer(
        request=request, first_token_s=first_s, token_s=token_s, request_s=score.latency_s,
        in_flight=flight, all_tokens_per_s=request.new * request.batch * per_s,
        limits=limits, memory=_memory(graph, placement, cluster, score),
    )  # fmt: skip


def _limit(
    prepared: PreparedProblem, device: np.ndarray, mine: Bool[np.ndarray, "M"], whole_s: float,
    phase: str,
) -> str:  # fmt: skip
    """Largest share of a phase: bandwidth, arithmetic or dispatch of a device, or transfers."""
    problem = prepared.problem
    graph, shares = problem.graph, dict[str, float]()
    for d, entry in enumerate(problem.cluster.devices):
        ops = np.flatnonzero(mine & (device == d) & ~graph.is_io)
        seconds = problem.compute_s[ops, d]
        per_op = ops.size if entry.dispatch_per == "op" else 0
        shares[f"dispatch of {entry.name}"] = per_op * entry.dispatch_s
        if is_offload(entry):
            shares[f"the way of the weights on {entry.name}"] = float(seconds.sum())
            continue
        moved_s = graph.memory_traffic_bytes[ops] / entry.bytes_per_s
        speed = np.array([entry.speed(graph.detail[op].dtype) for op in ops])
        counted_s = graph.flop[ops] / speed if ops.size else moved_s
        reads = moved_s >= counted_s
        shares[f"bandwidth of {entry.name}"] = float(seconds[reads].sum())
        shares[f"arithmetic of {entry.name}"] = float(seconds[~reads].sum())
    shares["moving tensors between devices"] = max(whole_s - sum(shares.values()), 0.0)
    most = max(shares, key=lambda name: shares[name])
    share = min(shares[most] / whole_s, 1.0) if whole_s > 0 else 0.0
    return f"{most} limits {phase} ({share:.0%} of its time)"


def _memory(
    graph: OpGraph, placement: Placement, cluster: Cluster, score: Score
) -> tuple[DeviceMemory, ...]:
    rows = []
    serving = {d: team[0] for team in placement.teams for d in team}
    for d, entry in enumerate(cluster.devices):
        mine = np.flatnonzero((placement.device == serving.get(d, d)) & (graph.weight_bytes > 0))
        once = mine[np.unique(graph.weight_id[mine], return_index=True)[1]]
        weights = int((graph.weight_bytes - graph.cache_bytes)[once].sum())
        cache = int(graph.cache_bytes[once].sum())
        peak = int(score.peak_bytes[d])
        limited = entry.memory_bytes < UNLIMITED_BYTES
        rows.append(
            DeviceMemory(
                entry.name, weights, cache, max(peak - weights - cache, 0), entry.reserve_bytes,
                entry.memory_bytes - peak if limited else None,
            )
        )  # fmt: skip
    return tuple(rows)
