"""Placing for runtimes that cut a model into a row of blocks: torch's pipelines, vLLM and OpenVINO.

Rows are found by the dynamic program of `gdp.targets.rows`. A pipeline of
torch.distributed.pipelining is cut where calls of modules begin; of the plans within the share that
simplicity may cost, the one that sends the fewest bytes is answered. vLLM's holds whole layers.
OpenVINO's HETERO compiles one subgraph a device and runs each at one go, so that a plan enters each
device once.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from gdp import solve
from gdp.cluster.types import Cluster
from gdp.constraints import allowed_mask
from gdp.costs.offload import resident
from gdp.errors import ArgumentError, InfeasibleError, PlacementError
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Candidate
from gdp.methods.simplify import SHARE
from gdp.models import Model, as_served
from gdp.ops.vllm import BATCHED_TOKENS, BATCHED_TOKENS_LARGE, LARGE_BYTES
from gdp.placement import Placement, check, make_placement
from gdp.question import Question
from gdp.result import Result
from gdp.sim.objectives import find_objective
from gdp.targets.modules import modules_kept, torch_boundaries, with_whole_modules
from gdp.targets.openvino.export import hetero_plan
from gdp.targets.rows import (
    MEMORY_SHARES,
    ModuleBlocks,
    Row,
    best_row,
    first_that_fits,
    module_blocks,
)
from gdp.targets.vllm.export import layer_row, with_one_share

MAX_CUTS = 256
"""Places between ops where a row of pieces may be cut: those over which the fewest bytes pass."""
PIPELINE_METHODS = ("blocks", "pipeline_dp")
"""Their plans enter most devices once."""


def plan_pipelining(question: Question) -> Result:
    """The best pipeline of a PyTorch module; see `best_pipeline`. A note says why one device has
    it all."""
    graph = question.graph
    cuts, reason = torch_boundaries(question.model, graph, modules_kept(question))
    result = best_pipeline(question, list(cuts))
    used = np.unique(result.placement.device[~graph.is_io])
    devices = result.question.cluster.devices
    usable = sum(device.supported != frozenset() for device in devices)
    if len(used) == 1 and usable > 1:
        reason = reason or (
            f"of the pipelines over {len(cuts)} places where calls of modules begin none is faster "
            "than one device by more than a cut may cost"
        )
        result = replace(result, notes=(*result.notes, f"all on one device: {reason}"))
    return result


def best_pipeline(question: Question, cuts: Sequence[int]) -> Result:
    """The plan of least period whose stages begin at some of the ops `cuts`: on the accelerators,
    or where there are none on the CPUs.

    Tensors that pass over a stage are charged to both links, so the plan is the best there is where
    none do. Devices of one kind are tried in the cluster's order only.

    Raises:
        InfeasibleError: if nothing fits.
    """
    if question.objective != "throughput":
        raise ArgumentError(
            f"--for pipelining plans pipelines, not {question.objective}: add --objective "
            "throughput"
        )
    if question.constraints.together or question.constraints.whole:
        raise ArgumentError("--for pipelining cuts where modules begin: leave out --together")
    question = replace(question, cluster=resident(question.cluster))
    ops = np.arange(question.graph.num_ops)
    blocks = module_blocks(question, np.searchsorted(np.array(sorted(cuts)), ops, side="right"))
    simplicity = question.search.simplicity
    share_of_time = SHARE if simplicity is None else simplicity
    rows = (_pipeline_row(blocks, share, share_of_time) for share in MEMORY_SHARES)
    plans = (blocks.placement(row, "gdp pipelining") for row in rows)
    return first_that_fits(question, plans, "no device holds even one of its pieces", "pipelining")


def _pipeline_row(blocks: ModuleBlocks, memory_share: float, simplicity: float) -> Row:
    """The row of stages that sends the fewest bytes among those of nearly the least period; empty
    where nothing fits."""
    seconds, link_s, orders = blocks.fitting_s(memory_share), blocks.link_s, blocks.orders
    least_s = min(best_row(order, seconds, link_s, np.maximum)[0].real for order in orders)
    if not np.isfinite(least_s):
        return []
    limit_s = least_s * (1 + simplicity) * (1 + 1e-9)
    allowed_links = np.where(link_s <= limit_s, blocks.cut_bytes.astype(float), np.inf)
    allowed = np.where(seconds <= limit_s, 0.0, np.inf)
    plans = [best_row(order, allowed, allowed_links, np.add) for order in orders]
    return min(plans, key=lambda plan: plan[0].real)[1]


def vllm_model(model: Model, cluster: Cluster) -> Model:
    """A configuration as vLLM computes it: attention fused, prompts in chunks of the tokens that
    `vllm serve` computes at once on the GPUs of a cluster. Other models as they are."""
    gpus = [device for device in resident(cluster).devices if not device.is_cpu]
    large = gpus and all(
        device.total_bytes >= LARGE_BYTES and not device.kind.startswith("a100") for device in gpus
    )
    return as_served(model, BATCHED_TOKENS_LARGE if large else BATCHED_TOKENS)


def plan_vllm(question: Question) -> Result:
    """The best plan that vLLM's pipeline can follow: of least seconds of a sample, or for
    throughput of least period, over all orders of unlike GPUs. Of plans that are equally fast one
    that spreads evenly: vLLM gives every rank the cache that the fullest one has room for.

    Raises:
        InfeasibleError: if nothing fits.
        PlacementError: if the model has no single row of layers.
    """
    constraints = question.constraints
    if question.granularity not in (None, "op") or constraints.together or constraints.whole:
        raise ArgumentError(
            "--for vllm keeps layers whole by itself: leave out --granularity and --together"
        )
    machine = with_one_share(resident(question.cluster))
    if all(device.is_cpu for device in machine.devices):
        raise InfeasibleError(
            f"cluster {question.cluster.name!r} has no GPU, and vLLM needs one here"
        )
    question = replace(question, cluster=machine)
    row = layer_row(question.graph)
    blocks = module_blocks(question, row.layer.clip(0, row.num_layers - 1))
    join = np.maximum if find_objective(question.objective).pipelined else np.add
    rows = (blocks.even_row(share, join) for share in MEMORY_SHARES)
    plans = (blocks.placement(row, "gdp vllm") for row in rows)
    return first_that_fits(question, plans, "no GPU holds even one of its layers", "vllm")


def plan_openvino(question: Question) -> Result:
    """The best plan with one piece a device: each device alone, the shortest row of pieces along
    the ops' order (a dynamic program over the cuts), and the plans of pipeline methods.

    Raises:
        InfeasibleError: if no such plan fits.
    """
    started_s, question = time.perf_counter(), with_whole_modules(question)
    rows: list[Candidate] = []
    best: tuple[float, Placement] | None = None
    for name, placement in _plans(question):
        since_s = time.perf_counter()
        if reason := _refusal(question, placement):
            rows.append(Candidate(name, None, None, None, False, 0.0, reason))
            continue
        score = solve.simulate(question, placement)
        rows.append(
            Candidate(name, score.latency_s, score.period_s, score.value_s, score.feasible,
                      time.perf_counter() - since_s, "" if score.feasible else str(score))
        )  # fmt: skip
        if score.feasible and (best is None or score.value_s < best[0]):
            best = score.value_s, placement
    if best is None:
        raise InfeasibleError(
            f"{question.graph.name!r} does not fit on cluster {question.cluster.name!r} with one "
            "piece a device"
        )
    return replace(
        solve.evaluate(question, best[1]), method="openvino", candidates=tuple(rows),
        seed=question.search.seed, evaluations=len(rows),
        seconds=time.perf_counter() - started_s,
    )  # fmt: skip


def _refusal(question: Question, placement: Placement) -> str:
    """Why OpenVINO cannot follow a plan, or the constraints forbid it; "" where neither is so."""
    graph, cluster = question.graph, question.cluster
    if faults := check(placement, graph, cluster):
        return faults[0]
    allowed = allowed_mask(question.constraints, graph, cluster)
    if not allowed[np.arange(graph.num_ops), placement.device].all():
        return "the constraints forbid it"
    try:
        hetero_plan(graph, placement.device, placement.device_names)
    except PlacementError:
        return "it enters a device twice"
    return ""


def _plans(question: Question) -> Iterator[tuple[str, Placement]]:
    """Plans by name that mostly have one piece a device."""
    graph, cluster, constraints = question.graph, question.cluster, question.constraints
    for d, device in enumerate(cluster.devices):
        alone = np.where(graph.is_io, cluster.host, d)
        yield f"all on {device.name}", make_placement(graph, cluster, alone, made_by="gdp openvino")
    if not (constraints.whole or constraints.together):
        for k, devices in enumerate(_rows(question)):
            placement = make_placement(graph, cluster, devices, made_by="gdp openvino")
            yield f"row of pieces {k + 1}", placement
    for method in PIPELINE_METHODS:
        try:
            result = solve.solve(replace(question, objective="throughput", method=method))
        except InfeasibleError:
            continue
        yield method, replace(result.placement, made_by="gdp openvino")


def _rows(question: Question) -> Iterator[Int[np.ndarray, "N"]]:
    """Devices of the rows of least latency, and of least period, with less and less memory."""
    ops = np.arange(question.graph.num_ops)
    blocks = module_blocks(question, np.searchsorted(_cuts(question.graph), ops, side="right"))
    seen: set[bytes] = set()
    for join, share in itertools.product((np.add, np.maximum), MEMORY_SHARES):
        row = blocks.best_of_orders(share, join)[1]
        devices = blocks.devices(row)
        if row and (key := devices.tobytes()) not in seen:
            seen.add(key)
            yield devices


def _cuts(graph: OpGraph) -> Int[np.ndarray, "C"]:
    """Ops before which a row may be cut: those over which the fewest bytes pass, ascending."""
    last = np.full(graph.num_tensors, -1)
    np.maximum.at(last, graph.use_tensor, graph.use_op)
    change = np.zeros(graph.num_ops + 1)
    read = last >= 0
    np.add.at(change, graph.producer[read] + 1, graph.tensor_bytes[read])
    np.add.at(change, last[read] + 1, -graph.tensor_bytes[read])
    passing = change.cumsum()[1 : graph.num_ops]
    return np.sort(1 + np.argsort(passing, kind="stable")[:MAX_CUTS])
