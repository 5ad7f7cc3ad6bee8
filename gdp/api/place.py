"""Placing a model: freely, or as a runtime can follow; the question stays with the answer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gdp import solve
from gdp.candidates import Planner
from gdp.clock import Phases
from gdp.cluster.file import Machine, cluster_toml, load_cluster
from gdp.cluster.reserve import for_runtime
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.costs.offload import resident
from gdp.errors import ArgumentError, PlacementError, of_kind
from gdp.files.writing import storable
from gdp.graph.generation import longest_of_model, request_of
from gdp.graph.op_graph import OpGraph
from gdp.measure.plan import Prediction, make_plan
from gdp.methods.base import Search
from gdp.models import HF_PREFIX, Model, asks_longest, at_context, load, spec_of
from gdp.placement import Question, costs_named
from gdp.prepare import prepare_placement, room_bytes
from gdp.result import Result
from gdp.sim.objectives import find_objective
from gdp.targets.accelerate.plan import (
    PlannedPlacement,
    cluster_with_offload,
    torch_module,
    whole_modules,
)
from gdp.targets.contexts import plan_longest
from gdp.targets.table import PLANNING_TARGETS
from gdp.targets.vllm.export import TENSOR_PARALLEL_FLAG, tensor_parallel
from gdp.units import format_seconds

MOST_CUT_OPS = 5_000
"""Ops of the largest graph that is cut into pieces only to predict them."""
WORTH_TELLING = 0.01
"""Least difference of two predictions of one placement that is told."""


def place(
    model: Model,
    cluster: Machine,
    *,
    objective: str = "latency",
    target: str | None = None,
    granularity: str | None = None,
    offload: str | None = None,
    dims: Mapping[str, int] | None = None,
    method: str = "auto",
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    checkpoint: str | Path | None = None,
    constraints: Constraints | None = None,
) -> Result:
    """Place the ops of a model on the devices of a cluster.

    The best placement that the method finds, scored by the simulator, with a proven lower bound;
    without the cuts that gain less than they may take beyond their prediction, or where
    `search.simplicity` is given, the simplest of those within that share of the best. The placement
    remembers this question, so that `gdp.export`, `run`, `explain`, `report` and `simulate` need
    nothing else.

    Args:
        model: A path or a name as the command line takes it, a graph, or a traced model.
        cluster: A preset such as "cpu+2xt4-pcie4", a TOML file, or a `Cluster`.
        objective: "latency" minimises the makespan of one sample, "throughput" the period of a
            full pipeline; `gdp place --help` lists the others.
        target: Runtime that shall be able to follow the placement, as `--for`: "accelerate",
            "llamacpp", "openvino", "onnxruntime", "pipelining" or "vllm". Default: no restriction.
        granularity: Pieces that stay whole: "op", "module" (with weights of their own, or that the
            model's class may not split) or "layer" (elements of a list of layers in addition).
            Default: "op"; for "accelerate" and "pipelining" "module".
        offload: Where accelerate keeps weights that do not fit: "cpu", "disk" (on both) or "none".
            Default: "cpu".
        dims: Sizes of the symbolic dimensions of an ONNX model, by name.
        method: "auto", or one of the methods that `gdp place --help` lists.
        costs: Seconds of each op on each device: a callable `(graph, cluster) -> [N, D]`, or a file
            of `gdp calibrate` or `gdp tune`. Default: what `gdp tune` learned of this machine, on
            top of "shipped": calibrations for devices that they match, datasheet numbers (roofline)
            for the others.
        search: Budget, seed and simplicity. Default: five seconds, seed 0, cuts weighed.
        checkpoint: A folder with weights of the policy. Default: the shipped ones.
        constraints: Pins, forbidden devices, ops that stay together. Default: none.

    Returns:
        The placement with value, bound, memory peaks and notes; times are in seconds.

    Raises:
        InfeasibleError: Nothing fits the memory of the devices under the constraints.
        ModelError, ClusterError: A file cannot be read.
        ArgumentError: An argument is unknown or contradicts another.

    Example:
        >>> import gdp
        >>> once = gdp.Search(seconds=None, evaluations=50)
        >>> result = gdp.place("onnx:light_squeezenet", "2xt4-pcie4", search=once)
        >>> result.bound_s <= result.value_s
        True
    """
    if target is not None and target not in PLANNING_TARGETS:
        raise ArgumentError(f"no target {target!r}; there are {', '.join(PLANNING_TARGETS)}")
    if offload is not None and (target is None or not PLANNING_TARGETS[target].offloads):
        raise ArgumentError("offload is what accelerate does: give target='accelerate'")
    phases, machine, longest = Phases(), load_cluster(cluster), asks_longest(model)
    model = at_context(model, None) if longest else model
    room = memory_for(target, machine, offload, constraints)
    model = model_for(target, model, machine)
    graph = load(model, dims, room_bytes=room)
    phases.ended("read")
    return place_for(
        target, graph, machine, model=model, dims=dims, granularity=granularity, offload=offload,
        longest=longest, phases=phases, objective=objective, method=method, costs=costs,
        search=search, checkpoint=checkpoint, constraints=constraints,
    ).result  # fmt: skip


def model_for(target: str | None, model: Model, cluster: Cluster) -> Model:
    """The model as the runtime of a planning target computes it on a cluster."""
    return model if target is None else PLANNING_TARGETS[target].model(model, cluster)


def memory_for(
    target: str | None,
    cluster: Cluster,
    offload: str | None = None,
    constraints: Constraints | None = None,
) -> int:
    """Bytes that weights may take on a cluster in placements for a planning target."""
    if target is None:
        return room_bytes(cluster, constraints)
    cluster = for_runtime(cluster, target)
    if PLANNING_TARGETS[target].offloads and offload != "none":
        return room_bytes(cluster_with_offload(cluster, offload), constraints)
    return room_bytes(resident(cluster), constraints)


def place_for(
    target: str | None,
    graph: OpGraph,
    cluster: Cluster,
    *,
    model: Model | None = None,
    dims: Mapping[str, int] | None = None,
    granularity: str | None = None,
    offload: str | None = None,
    longest: bool = False,
    phases: Phases | None = None,
    **placing: Any,
) -> PlannedPlacement:
    """Place a graph freely, or by the program of a planning target.

    Args:
        target: Name in `PLANNING_TARGETS`; None for no restriction.
        graph: Graph to place.
        cluster: Cluster to place it on.
        model: The model, which names the modules that may not be split.
        dims: Sizes of its symbolic dimensions.
        granularity: Pieces that stay whole: "op", "module" or "layer"; by default that of the
            target.
        offload: "cpu", "disk" or "none": where weights rest that do not fit; for accelerate.
        longest: Reserve caches for the longest context that fits, instead of that of the graph; it
            is then among the notes, and the graph is that of the answer.
        phases: Seconds of the call so far; by default none.
        **placing: Options of `gdp.place`.
    """
    phases = phases or Phases()
    asked = (target, graph, cluster, model, granularity, offload)
    planned = _planned_longest(*asked, placing) if longest else _planned(*asked, placing)
    if planned.graph is not None and (request := request_of(planned.graph)) is not None:
        graph, model = planned.graph, model and at_context(model, request.context)
    phases.ended("planning", planned.result.phases)
    if target in (None, "onnxruntime"):
        planned = _told_as_executed(graph, planned)
    question = question_of(
        model, dims, cluster, planned.result.objective, placing.get("constraints"),
        placing.get("costs"), target=target or "", granularity=granularity or "",
        offload=offload or "",
    )  # fmt: skip
    placement = replace(planned.result.placement, question=question)
    flag = TENSOR_PARALLEL_FLAG if target == "vllm" else ""
    split = tensor_parallel(graph, cluster, flag) if flag or request_of(graph) is not None else ""
    phases.ended("pieces")
    result = replace(
        planned.result, placement=placement, bound_over=_pieces(target, granularity),
        notes=(*planned.result.notes, *filter(None, [split, quantisation_note(model, graph)])),
        phases=phases.seconds,
        seconds=sum(phases.seconds.values()),
    )  # fmt: skip
    return replace(planned, result=result)


def quantisation_note(model: Model | None, graph: OpGraph) -> str:
    """Experts that a scheme of `--quantize` leaves at 16 bits, in a sentence; "" where none are."""
    if model is None or not spec_of(model).startswith(HF_PREFIX):
        return ""
    from gdp.importers.pytorch.huggingface import quantisation_note as note

    return note(spec_of(model), graph)


def _pieces(target: str | None, granularity: str | None) -> str:
    """Pieces of the placements that the bound of an answer holds for: programs over blocks are
    bounded by all placements of ops."""
    row = None if target is None else PLANNING_TARGETS[target]
    if row is not None and row.exact:
        return "whole ops"
    return f"whole {granularity or ('module' if row is not None and row.by_module else 'op')}s"


def _told_as_executed(graph: OpGraph, planned: PlannedPlacement) -> PlannedPlacement:
    """The plan with a note where `gdp run` would predict another time, for plans on processors.

    A placement is scored op by op; what is executed are pieces, whose outputs leave together.
    """
    result, cluster = planned.result, planned.cluster
    objective = find_objective(result.objective)
    processors = all(device.is_cpu for device in cluster.devices)
    executable = processors and objective.on_links and result.score.feasible
    if not executable or graph.num_ops > MOST_CUT_OPS:
        return planned
    prepared, device, _ = prepare_placement(
        graph, result.placement, cluster, result.objective, costs=planned.costs
    )
    prediction = Prediction(prepared.problem, device, prepared.group_of, result.placement.teams)
    plan = make_plan(prediction, result.objective)
    executed_s = plan.period_s if objective.pipelined else plan.latency_s
    before_s = result.score.period_s if objective.pipelined else result.score.latency_s
    if abs(executed_s - before_s) <= WORTH_TELLING * before_s:
        return planned
    executed = format_seconds(executed_s)
    note = f"as gdp run executes it, in sub-models whose outputs leave together: {executed}"
    return replace(planned, result=replace(result, notes=(*result.notes, note)))


def question_of(
    model: Model | None, dims: Mapping[str, int] | None, cluster: Cluster, objective: str,
    constraints: Constraints | None, costs: Any, **destination: str,
) -> Question:  # fmt: skip
    """The question that these arguments of `place` ask; `destination` are those of a target."""
    name, digest = costs_named(costs)
    return Question(
        model="" if model is None else storable(spec_of(model)), dims=dict(dims or {}),
        cluster=cluster_toml(cluster), objective=objective,
        constraints=constraints or Constraints(), costs=storable(name), costs_sha256=digest,
        **destination,
    )  # fmt: skip


def _planned(
    target: str | None, graph: OpGraph, cluster: Cluster, model: Model | None,
    granularity: str | None, offload: str | None, placing: Mapping[str, Any],
) -> PlannedPlacement:  # fmt: skip
    """The placement, which does not know its question yet."""
    row = None if target is None else PLANNING_TARGETS[target]
    cluster = cluster if target is None else for_runtime(cluster, target)
    granularity = granularity or ("module" if row is not None and row.by_module else "op")
    if row is not None and row.by_module and granularity == "op":
        raise ArgumentError(f"{target} goes by whole modules: granularity module or layer")
    module = torch_module(model) if granularity != "op" else None
    whole = whole_modules(module, graph, granularity)
    if row is None:
        return plan_freely(graph, cluster, whole=whole, **placing)
    if row.exact and placing.get("method", "auto") != "auto":
        raise ArgumentError(
            f"--for {target} is planned by one program, not by {placing['method']!r}"
        )
    return row.plan(
        graph, cluster, model=model, module=module, whole=whole, offload=offload, **placing
    )


def _planned_longest(
    target: str | None, graph: OpGraph, cluster: Cluster, model: Model | None,
    granularity: str | None, offload: str | None, placing: Mapping[str, Any],
) -> PlannedPlacement:  # fmt: skip
    """The placement of the longest context that fits, by plans that are made without a search."""
    search = of_kind(placing.get("search"), Search, "search")
    at_once = {**placing, "search": replace(search, seconds=0.0, evaluations=None, progress=None)}

    def plan(how: Mapping[str, Any], graph: OpGraph) -> PlannedPlacement:
        return _planned(target, graph, cluster, model, granularity, offload, how)

    tokens, graph, planned = plan_longest(graph, partial(plan, at_once), partial(plan, placing))
    most = longest_of_model(graph)
    note = f"the longest context for which a plan was found is {tokens} tokens"
    note += f"; the model was made for {most}" if most else ""
    result = planned.result
    return replace(planned, graph=graph, result=replace(result, notes=(*result.notes, note)))


def plan_freely(
    graph: OpGraph,
    cluster: Cluster,
    *,
    model: Any = None,
    module: Any = None,
    whole: tuple[str, ...] = (),
    offload: str | None = None,
    constraints: Constraints | None = None,
    **placing: Any,
) -> PlannedPlacement:
    """The best placement of all: ONNX Runtime can follow any."""
    del model, module, offload
    constraints = of_kind(constraints, Constraints, "constraints")
    constraints = replace(constraints, whole=(*constraints.whole, *whole))
    result = solve.place(
        graph, cluster, constraints=constraints,
        planners=_planners(graph, cluster, constraints, placing), **placing,
    )  # fmt: skip
    return PlannedPlacement(result, cluster, placing.get("costs"))


def _planners(
    graph: OpGraph, cluster: Cluster, constraints: Constraints, placing: Mapping[str, Any]
) -> dict[str, Planner]:
    """Programs of planning targets whose plans a free search knows, too, to be never behind."""
    from gdp.targets.llamacpp.flags import slots_of
    from gdp.targets.llamacpp.plan import candidate_placements

    kept_whole = constraints.together or constraints.whole
    if kept_whole or placing.get("objective", "latency") != "latency":
        return {}
    try:
        slots_of(graph)
    except PlacementError:  # no row of blocks that llama.cpp knows: nothing to tell of it
        return {}
    return {
        "llamacpp": partial(candidate_placements, graph, cluster, placing.get("costs"), constraints)
    }
