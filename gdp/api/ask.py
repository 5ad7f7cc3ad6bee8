"""The question of a call, made once: files are read, and what cannot be answered is refused."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gdp.base.clock import Phases
from gdp.base.errors import ArgumentError, of_kind
from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.reserve import for_runtime
from gdp.cluster.types import Cluster
from gdp.costs.offload import resident
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import LONGEST, ModelSpec
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints, allowed_mask, together_ids
from gdp.question.models import Model, load, spec_of
from gdp.question.prepare import costs_of, room_bytes
from gdp.question.question import Kept, Question
from gdp.question.solve import methods_of, require_time
from gdp.sim.objectives import find_objective
from gdp.targets.hf_accelerate.plan import cluster_with_offload
from gdp.targets.table import PLANNERS


def ask(
    model: Model,
    cluster: Machine,
    *,
    phases: Phases | None = None,
    kept: Kept | None = None,
    **parts: Any,
) -> Question:
    """The question of a call; nothing is compiled or searched.

    Args:
        model: As in `gdp.place`.
        cluster: As in `gdp.place`.
        phases: Seconds of the call so far, which get those of reading.
        kept: What was prepared for other questions of the call. Default: nothing.
        **parts: Further fields of `Question`; None stands for the default of constraints, search
            and dims.

    Raises:
        ArgumentError: An argument is unknown, of another type, or contradicts another.
        InfeasibleError: The weights do not fit, or the constraints leave an op no device.
    """
    for name, kind in (("constraints", Constraints), ("search", Search)):
        parts[name] = of_kind(parts.get(name), kind, name)
    parts["dims"] = parts.get("dims") or {}
    target, offload = parts.get("target"), parts.get("offload")
    if target is not None and target not in PLANNERS:
        raise ArgumentError(f"no target {target!r}; there are {', '.join(PLANNERS)}")
    if offload is not None and (target is None or not PLANNERS[target].offloads):
        names = [name for name, row in PLANNERS.items() if row.offloads]
        raise ArgumentError(f"--offload needs --for {' or --for '.join(names)}")
    machine, spec = load_cluster(cluster), ModelSpec.of(model)
    longest = spec.options.get("context") == LONGEST
    model = spec.having(context=None) if longest else model
    room = _room_bytes(target, machine, offload, parts["constraints"])
    if target is not None:
        model = PLANNERS[target].model(model, machine)
    kept = Kept() if kept is None else kept
    graph = _loaded(kept, model, parts["dims"], partial(load, room_bytes=room), room)
    question = Question(graph, machine, model, longest=longest, kept=kept, **parts)
    require_answerable(question)
    if phases is not None:
        phases.ended("read")
    return question


def _loaded(
    kept: Kept, model: Model, dims: Mapping[str, int], load: Callable[..., OpGraph], room: int
) -> OpGraph:
    """The graph of a model, loaded once per specification, and again if its weights exceed the
    first question's memory: loading refuses models that do not fit."""
    spec = spec_of(model)
    if not spec:
        return load(model, dims)
    bound = ",".join(f"{name}={size}" for name, size in sorted(dims.items()))
    graph = kept.once("model", (spec, bound), partial(load, model, dims))
    weights = (graph.weight_bytes - graph.cache_bytes)[graph.weight_holders()].sum()
    return graph if weights <= room else load(model, dims)


def require_answerable(question: Question) -> None:
    """Raise the errors of an answer before anything is compiled or searched."""
    target = question.target
    if question.within_s < math.inf and not find_objective(question.objective).limited:
        raise ArgumentError(
            "--within 50ms is for --objective energy; latencies are minimised without it"
        )
    if target is not None:
        row = PLANNERS[target]
        if row.by_module and question.granularity == "op":
            raise ArgumentError(f"{target} goes by whole modules: granularity module or layer")
        if row.exact and question.method != "auto":
            raise ArgumentError(
                f"--for {target} is planned by one program, not by {question.method!r}: leave out "
                "--method"
            )
        return
    if question.method != "auto":
        methods_of(question)
    require_time(question)
    allowed_mask(question.constraints, question.graph, question.cluster)
    together_ids(question.constraints, question.graph)
    if question.costs is not None:
        costs_of(question)
    if question.checkpoint is not None:
        from gdp.policy.method import load as load_policy

        load_policy(question.checkpoint)


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
