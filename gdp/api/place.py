"""Placing a model: freely, or as a runtime can follow; the question stays with the answer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from gdp.api.phases import phases_apart
from gdp.clock import Phases
from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.reserve import for_runtime
from gdp.cluster.types import Cluster
from gdp.constraints import Constraints
from gdp.costs.base import CostModel
from gdp.costs.offload import resident
from gdp.errors import ArgumentError, of_kind
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import LONGEST, ModelSpec
from gdp.measure.plan import make_plan
from gdp.methods.base import Search
from gdp.models import HF_PREFIX, Model, load, spec_of
from gdp.prepare import prepare_placement, room_bytes
from gdp.question import Question
from gdp.result import Result
from gdp.sim.objectives import find_objective
from gdp.targets.contexts import plan_longest
from gdp.targets.free import plan_freely
from gdp.targets.hf_accelerate.plan import cluster_with_offload
from gdp.targets.table import PLANNERS
from gdp.targets.vllm.export import tensor_parallel
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
    of those within the share `search.simplicity` of it the one with the fewest transfers and cuts.
    The placement remembers this question, so that `gdp.export`, `run`, `explain`, `report` and
    `simulate` need nothing else.

    Args:
        model: A path or a name as the command line takes it, a graph, or a traced model.
        cluster: A preset such as "cpu+2xt4-pcie4", a TOML file, or a `Cluster`.
        objective: "latency" minimises the makespan of one sample, "throughput" the period of a
            full pipeline; `gdp place --help` lists the others.
        target: Runtime that shall be able to follow the placement, as `--for`: "accelerate",
            "llamacpp", "openvino", "onnxruntime", "pipelining", "tensor-parallel" or "vllm".
            Default: no restriction.
        granularity: Pieces that stay whole: "op", "module" (with weights of their own, or that the
            model's class may not split) or "layer" (elements of a list of layers in addition).
            Default: "op"; for "accelerate" and "pipelining" "module".
        offload: Where accelerate keeps weights that do not fit: "cpu", "disk" (on both) or "none".
            Default: "cpu".
        dims: Sizes of the symbolic dimensions of an ONNX model, by name.
        method: "auto", or one of the methods that `gdp place --help` lists.
        costs: Seconds of each op on each device: a callable `(graph, cluster) -> [N, D]`, or a file
            of `gdp calibrate` or `gdp tune`. Default: what `gdp tune` learned of this machine, on
            top of "shipped": calibrations for devices that they match, the kernel network for
            accelerators, datasheet numbers (roofline) for the others. "datasheet": for all.
        search: Budget, seed and simplicity. Default: five seconds, seed 0, and 2% for fewer cuts
            with method "auto", 0 with another.
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
    phases = Phases()
    question = ask(
        model, cluster, objective=objective, target=target, granularity=granularity,
        offload=offload, dims=dims or {}, method=method, costs=costs, search=search,
        checkpoint=checkpoint, constraints=constraints,
    )  # fmt: skip
    phases.ended("read")
    return answer(question, phases)


def ask(
    model: Model,
    cluster: Machine,
    load: Callable[..., OpGraph] = load,
    **parts: Any,
) -> Question:
    """The question of a call; nothing is searched.

    Args:
        model: As in `place`.
        cluster: As in `place`.
        load: Loads the graph, as `gdp.models.load`.
        **parts: Further fields of `Question`; None stands for the default of constraints and
            search.

    Raises:
        ArgumentError: The target is unknown or does not offload, or a part is of another type.
    """
    for name, kind in (("constraints", Constraints), ("search", Search)):
        parts[name] = of_kind(parts.get(name), kind, name)
    target, offload = parts.get("target"), parts.get("offload")
    if target is not None and target not in PLANNERS:
        raise ArgumentError(f"no target {target!r}; there are {', '.join(PLANNERS)}")
    if offload is not None and (target is None or not PLANNERS[target].offloads):
        raise ArgumentError("offload is what accelerate does: give target='accelerate'")
    machine, spec = load_cluster(cluster), ModelSpec.of(model)
    longest = spec.options.get("context") == LONGEST
    model = spec.having(context=None) if longest else model
    room = _room_bytes(target, machine, offload, parts["constraints"])
    if target is not None:
        model = PLANNERS[target].model(model, machine)
    graph = load(model, parts.get("dims"), room_bytes=room)
    return Question(graph, machine, model, longest=longest, **parts)


def answer(question: Question, phases: Phases | None = None) -> Result:
    """Answer a question by the program of its target, freely where it has none.

    Args:
        question: What is asked; the placement remembers it.
        phases: Seconds of the call so far; by default none.
    """
    phases = phases or Phases()
    result = plan_longest(question, planned) if question.longest else planned(question)
    # A runtime's plan may be of another size of micro-batches, which its model says.
    graph, model, target = result.question.graph, result.question.model, question.target
    request = graph.request
    if question.longest and model is not None and request is not None:
        # So that it is loaded with the same caches.
        model = ModelSpec.of(model).having(context=request.context or None)
    phases.ended("planning", result.phases)
    notes = list(result.notes)
    if target in (None, "onnxruntime"):
        notes += _as_executed(result)
    divides = target is not None and PLANNERS[target].divides
    if request is not None and not divides:
        notes.append(tensor_parallel(graph, question.cluster))
    if request is not None and question.objective == "latency" and not request.is_served:
        notes.append(phases_apart(result))
    notes.append(loading_note(model, graph))
    record = replace(question, model=model).record()
    asked = set(question.constraints.whole)
    whole = tuple(sorted(set(result.question.constraints.whole) - asked))
    placement = replace(result.placement, question=structs.replace(record, whole=whole))
    phases.ended("pieces")
    return replace(
        result, placement=placement,
        bound_over=_pieces(result, target, question.granularity), notes=tuple(filter(None, notes)),
        phases=phases.seconds, seconds=sum(phases.seconds.values()),
    )  # fmt: skip


def planned(question: Question) -> Result:
    """The answer, whose placement does not know its question yet."""
    target = question.target
    if target is None:
        return plan_freely(question)
    row = PLANNERS[target]
    granularity = question.granularity or ("module" if row.by_module else "op")
    if row.by_module and granularity == "op":
        raise ArgumentError(f"{target} goes by whole modules: granularity module or layer")
    if row.exact and question.method != "auto":
        raise ArgumentError(
            f"--for {target} is planned by one program, not by {question.method!r}: leave out "
            "--method"
        )
    cluster = for_runtime(question.cluster, target)
    return row.plan(replace(question, cluster=cluster, granularity=granularity))


def _room_bytes(
    target: str | None, machine: Cluster, offload: str | None, constraints: Constraints
) -> int:
    """Bytes that weights may take on a machine in placements for a planning target."""
    if target is None:
        return room_bytes(machine, constraints)
    cluster = for_runtime(machine, target)
    if PLANNERS[target].offloads and offload != "none":
        return room_bytes(cluster_with_offload(cluster, offload), constraints)
    return room_bytes(resident(cluster), constraints)


def loading_note(model: Model | None, graph: OpGraph) -> str:
    """Type that weights are loaded in where the configuration does not name it, and experts that a
    scheme leaves at 16 bits, in a sentence; "" where there is nothing to tell."""
    if model is None or not spec_of(model).startswith(HF_PREFIX):
        return ""
    from gdp.importers.pytorch.huggingface import loading_note as note

    return note(spec_of(model), graph)


def _pieces(result: Result, target: str | None, granularity: str | None) -> str:
    """Pieces of the placements that the bound of an answer holds for: programs over blocks are
    bounded by all placements of ops."""
    row = None if target is None else PLANNERS[target]
    if row is not None and row.exact:
        return result.bound_over
    return f"whole {granularity or ('module' if row is not None and row.by_module else 'op')}s"


def _as_executed(result: Result) -> list[str]:
    """A note where `gdp run` would predict another time, for plans on processors.

    A placement is scored op by op; what is executed are pieces, whose outputs leave together.
    """
    question, objective = result.question, find_objective(result.objective)
    processors = all(device.is_cpu for device in question.cluster.devices)
    executable = processors and objective.on_links and result.score.feasible
    if not executable or question.graph.num_ops > MOST_CUT_OPS:
        return []
    plan = make_plan(prepare_placement(question, result.placement), result.objective)
    executed_s = plan.period_s if objective.pipelined else plan.latency_s
    before_s = result.score.period_s if objective.pipelined else result.score.latency_s
    if abs(executed_s - before_s) <= WORTH_TELLING * before_s:
        return []
    executed = format_seconds(executed_s)
    return [f"as gdp run executes it, in sub-models whose outputs leave together: {executed}"]
