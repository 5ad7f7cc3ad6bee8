"""The question that gdp answers: made once, of a call or of a placement, and passed whole.

Whoever changes a part of it, such as a runtime that needs other constraints, passes on a copy
(`dataclasses.replace`), so that no part is forgotten on the way. `QuestionRecord` is its form in
the file of a placement.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from gdp.base.errors import ArgumentError, PlacementError, of_kind
from gdp.base.files.writing import storable
from gdp.cluster.file import Machine, cluster_toml, load_cluster
from gdp.cluster.reserve import for_runtime
from gdp.cluster.types import Cluster
from gdp.costs.base import CostModel
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.placement.device_maps import DeviceMap
from gdp.placement.placement import (
    DraftModel,
    Placed,
    Placement,
    QuestionRecord,
    digest_of,
    placement_on,
    read_placed,
    require,
)
from gdp.question.models import Model, is_code, is_onnx, load, spec_of
from gdp.sim.objectives import find_objective

SIMPLICITY = 0.02
"""Share of the best value that fewer transfers and cuts may cost, where a user says none."""


MOST_KEPT = 16
"""Graphs, costs and problems of each kind that an answer keeps: those of a few plans."""
Made = TypeVar("Made")


class Kept:
    """Parts of an answer that are prepared once: of each kind the newest few.

    Answers make one (`gdp.api.answer`) and pass it on with the copies of their question; frozen
    parts such as graphs and clusters are told apart by identity, text and bytes by value.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._rows: dict[str, dict[tuple[object, ...], Any]] = {}

    def once(self, kind: str, parts: tuple[object, ...], make: Callable[[], Made]) -> Made:
        """The value of a kind that is made of some parts."""
        rows = self._rows.setdefault(kind, {})
        key = tuple(x if isinstance(x, str | bytes | bool | None) else _Same(x) for x in parts)
        if key in rows:
            return rows[key]
        made = make()
        if self._most:
            rows[key] = made
        if len(rows) > self._most:
            del rows[next(iter(rows))]
        return made


@dataclass(frozen=True, eq=False)
class _Same:
    """An object by its identity, which lives as long as its key does."""

    of: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


NOTHING_KEPT = Kept(0)


@dataclass(frozen=True, eq=False)
class Question:
    """On which device of a cluster each op of a graph runs, and how that is found out.

    Raises:
        ArgumentError: The objective is unknown, or the limit of seconds not above 0.
    """

    graph: OpGraph
    cluster: Cluster
    model: Model | None = None  # that the graph was loaded from
    dims: Mapping[str, int] = field(default_factory=dict)  # of its symbolic dimensions
    objective: str = "latency"
    costs: CostModel | str | Path | None = None  # None: the shipped ones, and what was learned
    constraints: Constraints = field(default_factory=Constraints)
    method: str = "auto"
    checkpoint: str | Path | None = None  # of the policy; None: the shipped one
    search: Search = field(default_factory=Search)
    target: str | None = None  # runtime that shall be able to follow; None: no restriction
    granularity: str | None = None  # pieces that stay whole; None: those of the target
    offload: str | None = None  # where accelerate keeps weights that do not fit
    longest: bool = False  # reserve caches for the longest context that fits
    copies: int = 0  # of a decoder, each for requests of its own; 0: as the objective wants them
    role: str = ""  # "prefill" or "decode" of disaggregated serving; "": both
    draft: DraftModel | None = None  # a small model beside it
    within_s: float = math.inf  # that one run may take, for an objective that is no time
    kept: Kept = field(default=NOTHING_KEPT, repr=False)  # what was prepared for its answer

    def __post_init__(self) -> None:
        find_objective(self.objective)
        if not self.within_s > 0:
            raise ArgumentError(f"within must be seconds above 0, got {self.within_s!r}")

    @property
    def simplicity(self) -> float:
        """Share of the best value that fewer transfers and cuts may cost: what the search says,
        else 2%, and nothing for a method that is asked for by its name, whose answers are often
        compared with those of others."""
        if self.search.simplicity is not None:
            return self.search.simplicity
        return SIMPLICITY if self.method == "auto" else 0.0

    def record(self) -> QuestionRecord:
        """The form in which a placement keeps it: names of files, no graphs and no callables."""
        costs = os.fspath(self.costs) if isinstance(self.costs, str | os.PathLike) else ""
        return QuestionRecord(
            model="" if self.model is None else storable(spec_of(self.model)), dims=dict(self.dims),
            cluster=cluster_toml(self.cluster), objective=self.objective,
            constraints=self.constraints, costs=storable(costs),
            costs_sha256=digest_of(costs) if costs else "", target=self.target or "",
            granularity=self.granularity or "", offload=self.offload or "", role=self.role,
            draft=self.draft,
        )  # fmt: skip


def question_about(
    placement: Placed,
    model: Model | None = None,
    cluster: Machine | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    objective: str | None = None,
    costs: CostModel | str | Path | None = None,
    constraints: Constraints | None = None,
    load: Callable[..., OpGraph] = load,
) -> tuple[Question, Placement]:
    """The question that a placement answers, and the placement, from whatever stands for one.

    What is not given is taken from the placement; `load` loads the graph, as
    `gdp.question.models.load`.
    Cluster and costs are those to evaluate it with: those of offloading, too, where it names such
    devices (`gdp.costs.offload`).

    Raises:
        ArgumentError: Nothing says for which cluster it is.
        PlacementError: Nothing says of which model it is, they do not belong together, its costs
            have changed, or its file names code.
    """
    read = read_placed(placement)
    record = read.question if isinstance(read, Placement) else None
    model, sizes = model_asked(read, model, dims)
    machine = None if cluster is None else load_cluster(cluster)
    if record is not None:
        machine = record.machine() if machine is None else machine
        costs = record.require_costs() if costs is None else costs
        constraints = record.constraints if constraints is None else constraints
        objective = record.objective if objective is None else objective
        if record.whole:
            # Kernels of the plan end where these modules do.
            constraints = of_kind(constraints, Constraints, "constraints")
            whole = tuple(dict.fromkeys((*constraints.whole, *record.whole)))
            constraints = replace(constraints, whole=whole)
    graph = load(model, sizes)
    if machine is None:
        raise ArgumentError(
            "the placement does not say for which cluster it is, and only a cluster tells CPUs "
            "from accelerators: give the cluster (--cluster)"
        )
    # A plan for a runtime was made with the memory that the runtime leaves to it.
    machine = for_runtime(machine, record.target) if record is not None else machine
    placed = placement_on(read, graph, machine)
    machine, costs = evaluating(placed, graph, machine, costs)
    require(placed, graph, machine)
    question = Question(
        graph,
        machine,
        model,
        sizes,
        "latency" if objective is None else objective,
        costs,
        of_kind(constraints, Constraints, "constraints"),
        role=record.role if record is not None else "",
        draft=record.draft_model if record is not None else None,
    )
    return question, placed


def model_asked(
    placed: Placement | DeviceMap | None, model: Model | None, dims: Mapping[str, int] | None = None
) -> tuple[Model, Mapping[str, int]]:
    """A model with the sizes of its dimensions: those given, otherwise those of a placement.

    Raises:
        PlacementError: No model is given or remembered, or the file of the placement names code.
    """
    record = placed.question if isinstance(placed, Placement) else None
    if record is not None and model is None:
        file = placed.read_from if isinstance(placed, Placement) else ""
        # A file may come from anybody: the code that it names runs only where the user names it.
        if file and is_code(record.model):
            raise PlacementError(
                f"{file} names the model {record.model!r}, which is code, and gdp runs code only "
                "where you name it yourself: give the model (--model, or MODEL before the "
                "placement) if you trust it"
            )
        model = record.model or None
    if model is None:
        raise PlacementError("the placement does not say of which model it is; give the model")
    if dims or record is None:
        return model, dims or {}
    # Other models than ONNX files have no dimensions to bind.
    return model, record.dims if model == record.model or is_onnx(model) else {}


def evaluating(
    placement: Placement, graph: OpGraph, cluster: Cluster, costs: CostModel | str | Path | None
) -> tuple[Cluster, CostModel | str | Path | None]:
    """Cluster and costs to evaluate a placement of a graph with: those given, and where it was made
    for accelerate, with the offload devices that it names."""
    from gdp.costs.default import resolve_costs
    from gdp.costs.offload import Streamed, offload_targets, resident, with_offload

    targets = offload_targets(placement.device_names)
    if not targets or placement.device_names == cluster.device_names:
        return cluster, costs
    base, _ = resolve_costs(costs, resident(cluster), graph)
    return with_offload(cluster, targets, placement.streamed_bytes), Streamed(base)
