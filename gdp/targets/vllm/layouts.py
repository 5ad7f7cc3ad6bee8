"""Layouts of vLLM: tensor, pipeline and data parallel sizes, and whole experts on each GPU.

GPUs form groups of the tensor parallel size, alike ones first; a dynamic program lays one stretch
of layers on each group of a pipeline (`gdp.methods.chain`), with embedding and head counted; data
parallel copies of it take requests in turn. The best layouts by that estimate are simulated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Int

from gdp.base.errors import ModelError
from gdp.cluster.machines import machines
from gdp.cluster.types import Cluster
from gdp.costs.measured.host import host_of
from gdp.graph.op_graph import OpGraph
from gdp.methods.chain import LayerCosts
from gdp.methods.intervals import Row
from gdp.placement.constraints import allowed_mask
from gdp.placement.placement import Placement, Split
from gdp.question.question import Question
from gdp.question.result import Degrees
from gdp.sim.objectives import find_objective
from gdp.splits.division import Pieces
from gdp.splits.members import divided, known_division
from gdp.targets.engine import runs_stages
from gdp.targets.rows import FINE_SHARES, layer_costs
from gdp.targets.simulated import Simulated, simulated
from gdp.targets.vllm.groups import Group, arrangements, grouped
from gdp.targets.vllm.rules import VLLM

SIMULATED = 2
"""Layouts that are simulated, of those that fit."""
EQUAL_STAGES = 0.02
"""Share by which stages may be slower than the fastest for more room: every stage has so many
blocks of cache as the one with the least room, and fewer layers on the first and the last stage of
a 70B model on eight L4 gave 2.1 times the blocks and 1.46 times the throughput
(vllm-project/vllm#6920)."""
BOUND_BY = "weights and caches over the bandwidth of all GPUs, FLOPs over their peaks"


@dataclass(frozen=True, eq=False)
class LayoutEstimate:
    """A layout, its seconds by the dynamic program, and how it is placed."""

    degrees: Degrees
    value_s: float
    blocks: LayerCosts
    twins: dict[int, tuple[int, ...]]  # first GPUs of the groups that take turns with a group

    @property
    def machines(self) -> int:
        """Machines over which the GPUs of a group are."""
        at = machines(self.blocks.cluster)
        return max((len({at[d] for d in split.devices}) for split in self.blocks.splits), default=1)

    def placements(self, pipelined: bool) -> Iterator[Placement]:
        """Its plans with less and less memory for weights; of equally fast ones the emptiest."""
        join = np.maximum if pipelined else np.add
        even = partial(self.blocks.memory_balanced_partition, join=join, equal=EQUAL_STAGES)
        rows = map(even, FINE_SHARES)
        yield from filter(None, map(self._placed, rows))

    def _placed(self, row: Row) -> Placement | None:
        leads = {lead for *_, lead in row}
        teams = tuple((lead, *self.twins[lead]) for lead in sorted(leads) if self.twins[lead])
        used = leads.union(*teams)
        splits = tuple(s for s in self.blocks.splits if s.devices[0] in used)
        return self.blocks.placement(row, "gdp vllm", teams, splits)


@dataclass(frozen=True, eq=False)
class PlannedLayout:
    """A layout with its plan, which does not fit where none does."""

    estimate: LayoutEstimate
    plan: Simulated

    @property
    def degrees(self) -> Degrees:
        """Its sizes."""
        return self.estimate.degrees

    @property
    def value_s(self) -> float:
        """Value by which layouts are compared: collectives between machines, which are not
        measured, count twice."""
        doubt = (self.plan.exchanged or 0.0) if self.estimate.machines > 1 else 0.0
        return self.plan.score.value_s * (1 + doubt)


def simulated_layouts(
    question: Question, found: Sequence[LayoutEstimate], machine: Callable[[int], Cluster]
) -> list[PlannedLayout]:
    """The best layouts by their estimates, as many as it takes until `SIMULATED` of them
    fit, of those whose groups lie within a machine and of others, and of the best one without
    splits, nor copies but those that are requested.

    Args:
        question: What is asked.
        found: Layouts, the fastest first.
        machine: The cluster with the memory that so many stages leave.
    """
    plain = [one for one in found if _is_plain(one.degrees, question)][:1]
    tried: list[PlannedLayout] = []
    for estimate in found:
        spans = estimate.machines > 1
        alike = [one.plan for one in tried if (one.estimate.machines > 1) == spans]
        enough = sum(plan.score.feasible for plan in alike) >= SIMULATED
        if not enough or estimate in plain:
            stages = machine(estimate.degrees.pipeline)
            tried += _first_fitting(replace(question, cluster=stages), estimate)
    return tried


def _is_plain(degrees: Degrees, question: Question) -> bool:
    """True if each layer is whole on one GPU of each requested copy."""
    return degrees.tensor == 1 and degrees.data == max(1, question.copies)


def _first_fitting(question: Question, estimate: LayoutEstimate) -> list[PlannedLayout]:
    """The first plan of a layout that fits, else its last one; none where it has no plan."""
    last = list[PlannedLayout]()
    for placement in estimate.placements(find_objective(question.objective).pipelined):
        last = [PlannedLayout(estimate, simulated(question, placement))]
        if last[0].plan.score.feasible:
            break
    return last


def told_layout(question: Question, best: PlannedLayout, fitting: Sequence[PlannedLayout]) -> str:
    """Describe a layout, compared with the best one of whole layers on one GPU each."""
    plain = [one for one in fitting if _is_plain(one.degrees, question)]
    if not plain:
        note = f"{best.degrees}: layers on one GPU each do not fit"
    elif plain[0] is best:
        more = "" if question.copies else " or copies the model"
        return f"no layout that divides layers{more} is better"
    else:
        gain = plain[0].plan.score.value_s / best.plan.score.value_s
        words = find_objective(question.objective).compared
        note = f"{best.degrees}: {gain:.2f} {words} whole layers ({plain[0].degrees})"
    if best.estimate.machines > 1:
        note += f"; its GPUs are on {best.estimate.machines} machines, as the links between earn it"
    exchanged = best.plan.exchanged
    return note if exchanged is None else f"{note}; collectives take {exchanged:.0%}"


def estimates(question: Question, block: Int[np.ndarray, "N"], known: bool) -> list[LayoutEstimate]:
    """All layouts for which a row of layers fits, the fastest first; one group of one GPU each
    where it is not known how the layers divide."""
    graph = question.graph
    allowed = allowed_mask(question.constraints, graph, question.cluster)[~graph.is_io]
    gpus = [d for d in question.cluster.gpus if allowed[:, d].any()]
    free = [d for d in gpus if allowed[:, d].all()]  # members, and copies, compute all ops
    found: list[LayoutEstimate] = []
    has_experts = known and known_division(graph).has_experts
    wholes = _divided_evenly(graph) if known else ()
    for size in range(1, max(1, len(free)) + 1 if known else 2):
        if any(whole % size for whole in wholes):
            continue
        groups = grouped(question.cluster, free if size > 1 else gpus, size)
        for experts in (False, True) if has_experts and size > 1 else (False,):
            try:
                found += _of_groups(question, block, groups, experts, free)
            except ModelError:  # so many GPUs do not divide the heads or columns
                continue
    return sorted(found, key=lambda estimate: estimate.value_s)


def _divided_evenly(graph: OpGraph) -> tuple[int, ...]:
    """Numbers that engines divide by the tensor parallel size without a rest: heads
    (`verify_with_parallel_config` of `vllm/config/model.py`), and words, padded before
    (`pad_vocab_size`, `divide` of `vllm/model_executor/layers/vocab_parallel_embedding.py`)."""
    units = known_division(graph).units
    words = (-(-u.total // VLLM.padding) for u in units if u.kind == Pieces.VOCABULARY)
    heads = (unit.total for unit in units if unit.kind == Pieces.HEADS)
    return (*(count * VLLM.padding for count in words), *heads)


def _of_groups(
    question: Question, block: Int[np.ndarray, "N"], groups: list[Group], experts: bool,
    free: Sequence[int],
) -> Iterator[LayoutEstimate]:  # fmt: skip
    """The layouts of groups of one size, with every number of copies for which there are GPUs that
    are free to compute all ops."""
    cluster, size = question.cluster, len(groups[0]) if groups else 0
    parts, splits = None, tuple(Split(group, experts) for group in groups if size > 1)
    if splits:
        parts = divided(question.graph, cluster, splits, host=host_of(question.costs))
    blocks = layer_costs(question, block, parts, [group[0] for group in groups])
    pipelined = find_objective(question.objective).pipelined
    join, staged = np.maximum if pipelined else np.add, runs_stages(VLLM, question.model)
    for copies in _copies(question, len(groups)):
        for twins, every in arrangements(cluster, groups, copies, free):
            own = blocks.limited_to(list(twins), every)
            if not staged:
                own = min(own.alone(), key=lambda one: one.best_of_orders(0.0, join)[0])
            value_s, row = own.best_of_orders(0.0, join)
            if row and (staged or not every):
                degrees = Degrees(size, len(row), copies, experts)
                yield LayoutEstimate(degrees, value_s / (copies if pipelined else 1), own, twins)


def _copies(question: Question, groups: int) -> Sequence[int]:
    """Numbers of copies to consider: the requested one, else all for throughput."""
    if question.copies:
        return range(question.copies, min(question.copies, groups) + 1)
    copied = find_objective(question.objective).pipelined and question.constraints.replicas
    return range(1, groups + 1 if copied else 2)
