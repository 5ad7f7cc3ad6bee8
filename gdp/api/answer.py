"""The answer to a question: compilation, plan, score, generation, notes, seconds of each phase."""

import functools
import itertools
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int
from msgspec import structs

from gdp.api import first_run
from gdp.api.generation import generation_answer, phases_s, with_energy
from gdp.base.clock import COMPILE, Phases, waiting_for
from gdp.base.errors import InfeasibleError, PlacementError
from gdp.base.terminal import stage
from gdp.base.units import format_bytes, format_seconds
from gdp.cluster.reserve import for_runtime
from gdp.cluster.types import Cluster, overflow_bytes
from gdp.graph.generation import steps_of
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import ModelSpec
from gdp.measure.plan import make_plan
from gdp.placement.placement import make_placement
from gdp.question.models import HF_PREFIX, Model, spec_of
from gdp.question.prepare import once_of, prepare_placement
from gdp.question.question import NOTHING_KEPT, Question
from gdp.question.result import Result
from gdp.sim.energy import ROUNDING
from gdp.sim.objectives import find_objective
from gdp.targets.contexts import plan_longest
from gdp.targets.free import plan_freely
from gdp.targets.peers import tensor_parallel_note
from gdp.targets.table import PLANNERS

MOST_CUT_OPS = 5_000
"""Ops of the largest graph that is cut into pieces only to predict them."""
WORTH_TELLING = 0.01
"""Least difference of two predictions of one placement that is told."""
WORTH_SEPARATING = 1.1
"""Times that a request has to be faster on two devices, one for each of its phases."""


def answer(question: Question, phases: Phases | None = None) -> Result:
    """Answer a question by the program of its target, freely where it has none.

    Args:
        question: What is asked; the placement remembers it.
        phases: Seconds of the call so far; by default none.

    Raises:
        InfeasibleError: No plan was found that fits, or that keeps the limit of seconds.
    """
    phases = phases or Phases()
    if question.target is None or PLANNERS[question.target].searches:
        compile_once(question.method, question.objective)
    phases.ended("read")
    result = plan_longest(question, planned) if question.longest else planned(question)
    if result.score.latency_s > question.within_s * (1 + ROUNDING):
        raise InfeasibleError(
            f"no plan within {format_seconds(question.within_s)} was found: the fastest takes "
            f"{format_seconds(result.score.latency_s)}; allow more time or add a faster device"
        )
    phases.ended("planning", result.phases)
    # A runtime's plan may be of another size of micro-batches, which its model says.
    asked, model = result.question, result.question.model
    request = asked.graph.request
    if question.longest and model is not None and request is not None:
        # So that it is loaded with the same caches.
        model = ModelSpec.of(model).having(context=request.context or None)
    notes = *result.notes, *_notes(question, result)
    generation = generation_answer(asked, result.placement, result.score)
    result = result if generation else with_energy(result)
    kept_whole = set(asked.constraints.whole) - set(question.constraints.whole)
    record = replace(question, model=model).record()
    record = structs.replace(record, whole=tuple(sorted(kept_whole)))
    phases.ended("pieces")
    return replace(
        result, question=replace(asked, kept=NOTHING_KEPT), generation=generation,
        placement=replace(result.placement, question=record),
        bound_over=_pieces(result, question.target, question.granularity), notes=notes,
        phases=phases.seconds, seconds=sum(phases.seconds.values()),
    )  # fmt: skip


@functools.cache
def compile_once(method: str, objective: str) -> None:
    """Compile the kernels of a method, and report it if they are not cached."""
    with waiting_for(COMPILE):
        first_run.prepare(method, objective, stage)


def planned(question: Question) -> Result:
    """The plan of a question with its score and bound; its placement does not know the question."""
    target = question.target
    if target is None:
        return plan_freely(question)
    row = PLANNERS[target]
    granularity = question.granularity or ("module" if row.by_module else "op")
    cluster = for_runtime(question.cluster, target)
    return row.plan(replace(question, cluster=cluster, granularity=granularity))


def _notes(question: Question, result: Result) -> list[str]:
    """Sentences on how a plan is executed, on other plans, and on the weights."""
    graph, target = result.question.graph, question.target
    request = graph.request
    notes = _as_executed(result) if target in (None, "onnxruntime") else []
    if request is not None and (target is None or not PLANNERS[target].divides):
        notes.append(tensor_parallel_note(graph, question.cluster))
    if request is not None and question.objective == "latency" and not request.is_served:
        notes.append(phases_apart(result))
    return [*filter(None, (*notes, loading_note(result.question.model, graph)))]


def loading_note(model: Model | None, graph: OpGraph) -> str:
    """Type that weights are loaded in where the configuration does not name it, and experts that a
    scheme leaves at 16 bits, in a sentence; "" where there is nothing to tell."""
    if model is None or not spec_of(model).startswith(HF_PREFIX):
        return ""
    from gdp.importers.huggingface.model import loading_note as note

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
    executable = processors and objective.general and result.score.feasible
    if not executable or question.graph.num_ops > MOST_CUT_OPS:
        return []
    plan = make_plan(prepare_placement(question, result.placement), result.objective)
    executed_s = plan.period_s if objective.pipelined else plan.latency_s
    before_s = result.score.period_s if objective.pipelined else result.score.latency_s
    if abs(executed_s - before_s) <= WORTH_TELLING * before_s:
        return []
    executed = format_seconds(executed_s)
    return [f"as gdp run executes it, in sub-models whose outputs leave together: {executed}"]


def phases_apart(result: Result) -> str:
    """Seconds of a request whose prompt another device reads than the one that writes its tokens,
    both with all weights, in a sentence; "" where that gains less than `WORTH_SEPARATING`.

    seconds = first token on one + caches over the link + steps on the other

    Pairs are of devices of unlike kinds that each hold the whole model, those of one memory both.
    Most are ruled out by arithmetic and bandwidth alone; of the others both phases are simulated.
    """
    question, limit_s = result.question, result.score.latency_s / WORTH_SEPARATING
    graph, cluster = question.graph, question.cluster
    steps, caches = steps_of(graph), int(graph.cache_bytes[~graph.is_buffer].sum())
    devices = _first_of_kinds(cluster)
    reads_s, writes_s = _least_s(graph, cluster)
    alone: dict[int, tuple[float, float, Int[np.ndarray, "D"]] | None] = {}
    best = limit_s, -1, -1
    for a, b in itertools.permutations(devices, 2):
        if reads_s[a] + steps * writes_s[b] >= best[0]:
            continue
        for d in {a, b} - alone.keys():
            alone[d] = _alone(question, d)
        reader, writer = alone[a], alone[b]
        if reader is None or writer is None or overflow_bytes(cluster, reader[2] + writer[2]):
            continue
        way_s = cluster.link_latency_s[a, b] + caches / cluster.link_bytes_per_s[a, b]
        best = min(best, (reader[0] + float(way_s) + steps * writer[1], a, b))
    seconds, a, b = best
    if a < 0:
        return ""
    held = graph.weight_holders(np.flatnonzero(~graph.is_buffer))
    weights = int((graph.weight_bytes - graph.cache_bytes)[held].sum())
    names = cluster.device_names
    return (
        f"were the prompt read by {names[a]} and the tokens written by {names[b]}, each with all "
        f"weights ({format_bytes(weights)} more), the request would take {format_seconds(seconds)},"
        f" {result.score.latency_s / seconds:.2f} times as fast: no runtime that gdp plans for "
        "does that for a single request"
    )


def _first_of_kinds(cluster: Cluster) -> list[int]:
    """The first device of each kind that computes."""
    kinds: dict[str, int] = {}
    for d in np.flatnonzero(cluster.computes & ~cluster.streams).tolist():
        kinds.setdefault(cluster.devices[d].kind, d)
    return list(kinds.values())


def _least_s(
    graph: OpGraph, cluster: Cluster
) -> tuple[Float[np.ndarray, "D"], Float[np.ndarray, "D"]]:
    """(seconds of the prompt's arithmetic, seconds in which a step's bytes are read), by device."""
    once = graph.repeats == 1
    moved = graph.memory_traffic_bytes[~once].sum()
    dtypes, which = np.unique([x.dtype for x in graph.detail], return_inverse=True)
    flop = np.bincount(which[once], graph.flop[once], len(dtypes))
    speeds = np.array([[d.speed(str(x)) for x in dtypes] for d in cluster.devices])
    return (flop / speeds).sum(axis=1), np.array([moved / d.bytes_per_s for d in cluster.devices])


def _alone(question: Question, d: int) -> tuple[float, float, Int[np.ndarray, "D"]] | None:
    """(seconds to the first token, seconds of a step, bytes by device) of a whole request on a
    device; None where it cannot compute it."""
    graph, cluster = question.graph, question.cluster
    once = once_of(question)
    place = np.where(graph.is_io, cluster.host, d)
    try:
        whole = prepare_placement(question, make_placement(graph, cluster, place))
        phases = prepare_placement(
            replace(question, graph=once, objective="latency"), make_placement(once, cluster, place)
        )
    except PlacementError:
        return None
    return *phases_s(phases, once), whole.score().peak_bytes
