"""The answer to a question: compilation, plan, score, generation, notes, seconds of each phase."""

import functools
from dataclasses import replace

from msgspec import structs

from gdp.api import first_run
from gdp.api.generation import generation_answer
from gdp.api.phases import phases_apart
from gdp.base.clock import COMPILE, Phases, waiting_for
from gdp.base.terminal import stage
from gdp.base.units import format_seconds
from gdp.cluster.reserve import for_runtime
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import ModelSpec
from gdp.measure.plan import make_plan
from gdp.question.models import HF_PREFIX, Model, spec_of
from gdp.question.prepare import prepare_placement
from gdp.question.question import NOTHING_KEPT, Question
from gdp.question.result import Result
from gdp.sim.objectives import find_objective
from gdp.targets.contexts import plan_longest
from gdp.targets.free import plan_freely
from gdp.targets.peers import tensor_parallel_note
from gdp.targets.table import PLANNERS

MOST_CUT_OPS = 5_000
"""Ops of the largest graph that is cut into pieces only to predict them."""
WORTH_TELLING = 0.01
"""Least difference of two predictions of one placement that is told."""


def answer(question: Question, phases: Phases | None = None) -> Result:
    """Answer a question by the program of its target, freely where it has none.

    Args:
        question: What is asked; the placement remembers it.
        phases: Seconds of the call so far; by default none.
    """
    phases = phases or Phases()
    if question.target is None or PLANNERS[question.target].searches:
        compile_once(question.method, question.objective)
    phases.ended("read")
    result = plan_longest(question, planned) if question.longest else planned(question)
    phases.ended("planning", result.phases)
    # A runtime's plan may be of another size of micro-batches, which its model says.
    asked, model = result.question, result.question.model
    request = asked.graph.request
    if question.longest and model is not None and request is not None:
        # So that it is loaded with the same caches.
        model = ModelSpec.of(model).having(context=request.context or None)
    notes = *result.notes, *_notes(question, result)
    generation = generation_answer(asked, result.placement, result.score)
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
