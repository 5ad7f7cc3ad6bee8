"""Placing for llama.cpp: a first stretch of blocks on the CPU, then one on each GPU in their order;
or all blocks divided among GPUs (`gdp.targets.llamacpp.tensor`), where that is faster.

The experts of any block may be on the CPU. The plan has the least sum of compute and transfers,
which is what a chain of blocks takes; beside it stands llama.cpp's own plan (`fit_rule`).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int

from gdp.base.errors import ArgumentError, InfeasibleError, ModelError, PlacementError
from gdp.base.units import format_seconds
from gdp.bounds.work import roofline_bound_s
from gdp.cluster.types import Cluster, fullness, nearly_full
from gdp.costs.offload import is_sent, sends_weights
from gdp.graph.generation import with_context
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import ModelSpec
from gdp.methods.chain import EQUAL, EVEN_STEPS
from gdp.ops.llamacpp import DRAFT, UBATCH
from gdp.placement.placement import Placement, make_placement
from gdp.question import solve
from gdp.question.models import is_gguf, load
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
from gdp.question.result import Result, counts_of, with_bound
from gdp.targets.llamacpp.blocks import LlamaBlocks, llama_blocks, llama_devices
from gdp.targets.llamacpp.fit_rule import FitSizes, fit_plan
from gdp.targets.llamacpp.flags import Slots, draft_of, slots_of
from gdp.targets.llamacpp.parts import homes_of_parts, told
from gdp.targets.llamacpp.pipeline import saved_s
from gdp.targets.llamacpp.rules import with_known_gpus
from gdp.targets.llamacpp.tensor import TensorPlan, tensor_plans
from gdp.targets.peers import Peer, beside
from gdp.targets.rows import FINE_SHARES, MEMORY_SHARES, SPREAD, balance_memory, first_feasible

BOUND_BY = "weights and caches over the bandwidth of all devices, FLOPs over their peaks"
UBATCHES = (1024, 2048, 4096)
"""Tokens of a prompt at once that are tried where weights on the processor cross the link for each
micro-batch, as long as each is faster than half as many."""
PROPOSAL = "'?cache=q8_0'"
"""Begins the note that proposes caches of half the size."""
PROPOSED, CACHES_TRIED = 1.15, 0.05
"""Times as fast that is proposed, and the share of caches in all bytes below which it is not
tried."""
DRAFTING = ("draft", "drafts", "acceptance")
"""Parameters of a spec with a model that drafts."""
NOTED = 0.02
"""Share of an answer's seconds below which a pipeline of micro-batches is not mentioned."""


def plan_llamacpp(question: Question) -> Result:
    """The best plan that llama.cpp's flags can express; of equally fast ones an even one.

    Raises:
        InfeasibleError: if nothing fits.
        PlacementError: if the graph was not read from a GGUF file.
    """
    if question.granularity not in (None, "op"):
        raise ArgumentError("llama.cpp's flags move blocks and experts: leave out --granularity")
    if question.objective != "latency":
        raise ArgumentError(
            f"--for llamacpp plans the latency of one pass, not {question.objective}"
        )
    if question.constraints.together or question.constraints.whole:
        raise ArgumentError("--for llamacpp keeps blocks whole by itself: leave out --together")
    planned = _drafted(question) if draft_of(question.graph) else _of_any_size(question)
    result = solve.proven(planned)
    proposal = _smaller_caches(result) if question.search.seconds != 0.0 else ""
    return replace(result, notes=(*result.notes, proposal)) if proposal else result


def _smaller_caches(result: Result) -> str:
    """A proposal to pack keys and values, where the plan would be much faster with that; it is
    never taken unasked, as it changes what the model writes."""
    question, graph = result.question, result.question.graph
    share = float(graph.cache_bytes.sum()) / max(1.0, float(graph.weight_bytes.sum()))
    if "cache" in ModelSpec.of(question.model).options or share < CACHES_TRIED:
        return ""
    try:
        packed = with_settings(question, cache="q8_0")
        found = None if packed is None else _of_size(packed)
    except (InfeasibleError, ModelError):
        return ""
    if found is None or found.value_s * PROPOSED > result.value_s:
        return ""
    return (
        f"{PROPOSAL}: {result.value_s / found.value_s:.2f} times as fast, "
        f"{format_seconds(found.value_s)}, by keys and values in 8.5 bits instead of 16"
    )


def _drafted(question: Question) -> Result:
    """The best plan with a draft model, with a note of the seconds without it; the plan without it
    if both do not fit."""
    pins = tuple(pin for pin in question.constraints.pins if not pin.match.startswith(DRAFT))
    forbid = tuple(pin for pin in question.constraints.forbid if not pin.match.startswith(DRAFT))
    others = replace(question, constraints=replace(question.constraints, pins=pins, forbid=forbid))
    plain, draft = with_settings(others, **dict.fromkeys(DRAFTING)), draft_of(question.graph)
    name = "" if draft is None else f"{draft.tokens} tokens a pass by {Path(draft.model).name}"
    try:
        result = _of_any_size(question)
    except InfeasibleError:
        if plain is None:
            raise
        result = _of_any_size(plain)
        note = f"no drafts of {name}: beside the model it has no room on any device"
        return replace(result, notes=(*result.notes, note))
    if plain is None:
        return result
    without = _of_any_size(plain)
    note = (
        f"drafts of {name}: {without.value_s / result.value_s:.2f} times as fast as without "
        f"({format_seconds(without.value_s)})"
    )
    return replace(result, notes=(*result.notes, note))


def _of_any_size(question: Question) -> Result:
    """The best plan with micro-batches of the graph's size, or of a larger one that is faster."""
    result = _of_size(question)
    for ubatch in UBATCHES if question.search.seconds != 0.0 else ():
        other = _with_ubatch(question, ubatch) if _sends(result) else None
        try:
            found = None if other is None else _of_size(other)
        except InfeasibleError:
            break
        if found is None or found.value_s > result.value_s * (1 - NOTED):
            break
        note = (
            f"--ubatch-size {ubatch}: {result.value_s / found.value_s:.2f} times as fast as with "
            f"half as many tokens at once; '?ubatch={UBATCH}' keeps llama.cpp's default"
        )
        kept = [n for n in found.notes if not n.startswith("--ubatch-size")]
        result = replace(found, notes=(*kept, note))
    return result


def _sends(result: Result) -> bool:
    """True where the plan has weights on a processor that each micro-batch sends to a GPU."""
    graph, cluster = result.question.graph, result.question.cluster
    here = cluster.is_cpu[result.placement.device]
    return bool((here & is_sent(graph)).any()) and sends_weights(cluster)


def _with_ubatch(question: Question, ubatch: int) -> Question | None:
    """The question with so many tokens of a prompt at once; None where its model says a size, or
    its prompts are no longer than half of it."""
    if (
        "ubatch" in ModelSpec.of(question.model).options
        or 2 * UBATCH * question.graph.chunks.max() <= ubatch
    ):
        return None
    return with_settings(question, ubatch=str(ubatch))


def with_settings(question: Question, **settings: str | None) -> Question | None:
    """The question of the same file with other parameters of its spec, without those that are None;
    None where nothing says of which file it is."""
    model, graph = question.model, question.graph
    if model is None or not is_gguf(model):
        return None
    spec = ModelSpec.of(model).having(**settings)
    other = question.kept.once("model", (str(spec), ""), lambda: load(spec))
    request = graph.request
    if request is not None and other.request is not None:
        asked = other.request._replace(requests=request.requests)
        other = with_context(replace(other, request=asked), request.context)
    return replace(question, graph=other, model=spec)


def _of_size(question: Question) -> Result:
    """The best plan with the graph's micro-batch size."""
    slots = slots_of(question.graph)
    question = replace(question, cluster=with_known_gpus(question.cluster))
    found, error = list[Result](), None
    for homes in homes_of_parts(question, slots):
        blocks = llama_blocks(question, slots, homes)
        if any(result.value_s <= blocks.parts_s for result in found):
            continue
        try:
            found.append(_planned(question, slots, blocks))
        except InfeasibleError as caught:
            error = error or caught
    if not found:
        raise error or InfeasibleError("the constraints leave no device for --mmproj or --draft")
    if not slots.parts:
        return found[0]
    best = min(found, key=lambda result: (not result.score.feasible, result.value_s))
    return replace(best, notes=(*best.notes, told(best, found, slots)))


def _planned(question: Question, slots: Slots, blocks: LlamaBlocks) -> Result:
    """The best plan, with separate parts on the devices that `blocks` gives them."""
    graph, cluster = question.graph, question.cluster
    plans = _placements(graph, cluster, slots, blocks)
    reason = "a device is too small or forbidden"
    result = first_feasible(question, plans, reason, "llamacpp")
    result = beside(result, _fit_peer(graph, cluster, slots, blocks))
    result = balance_memory(result, _even_placements(graph, cluster, slots, blocks))
    result = _pipelined(result, _piped_placements(graph, cluster, slots, blocks))
    return _or_divided(result, tensor_plans(question, slots, blocks.rest))


def _pipelined(result: Result, plans: Iterable[Placement]) -> Result:
    """The result, or a plan that takes fewer seconds where GPUs read the prompt as a pipeline, with
    a note of those that are saved; of equal plans that with most room on its fullest device."""
    question, cluster = result.question, result.question.cluster
    rows = [(result.placement, result.score)]
    rows += [(p, solve.simulate(question, p)) for p in plans]
    rows = [row for row in rows if row[1].feasible]
    saved_by = [saved_s(prepare_placement(question, placement)) for placement, _ in rows]
    piped_s = [s.value_s - saved for (_, s), saved in zip(rows, saved_by, strict=True)]
    fullest = [max(fullness(cluster, score.peak_bytes.tolist())) for _, score in rows]
    slack = EQUAL if question.simplicity else 0.0
    near = [i for i, value_s in enumerate(piped_s) if value_s <= min(piped_s) * (1 + slack)]
    best = min(near, key=lambda i: (fullest[i], piped_s[i]))
    saved = saved_by[best]
    if rows[best][0] is not result.placement:
        placement, score = rows[best]
        full = nearly_full(cluster, score.peak_bytes.tolist())
        other = replace(
            result, placement=placement, score=score, deviation_s=None,
            counts=counts_of(question, placement),
            notes=(*_other_notes(result), *([full] if full else [])),
        )  # fmt: skip
        result = with_bound(other, result.bound_s, result.bound_by)
    if saved < NOTED * result.value_s:
        return result
    note = (
        f"micro-batches of the prompt go through the GPUs as a pipeline, which saves about "
        f"{format_seconds(saved)}: {format_seconds(piped_s[best])} in all, by which this plan was "
        f"chosen, instead of {format_seconds(piped_s[best] + saved)} one after the other"
    )
    return replace(result, notes=(*result.notes, note))


def _other_notes(result: Result) -> tuple[str, ...]:
    """Notes that are not of the memory of its plan, or of how evenly it shares."""
    full = nearly_full(result.question.cluster, result.score.peak_bytes.tolist())
    return tuple(n for n in result.notes if n != full and not n.startswith(SPREAD))


def _or_divided(result: Result, plans: Sequence[TensorPlan]) -> Result:
    """The result, or the best tensor split where that is faster than whole layers."""
    if not plans:
        return result
    question, best = result.question, plans[0]
    candidates = (*result.candidates, *(plan.candidate() for plan in plans))
    layers_s = result.value_s - saved_s(prepare_placement(question, result.placement))
    if not best.score.feasible or best.score.value_s >= layers_s:
        gain = "fits" if not best.score.feasible else "is as fast as whole layers"
        notes = (*result.notes, f"no tensor split of the GPUs {gain}")
        return replace(result, candidates=candidates, notes=notes)
    devices = range(question.cluster.num_devices)
    bound = roofline_bound_s(question.graph, question.cluster, devices), BOUND_BY
    divided = solve.evaluate(question, best.placement, bound)
    note = (
        f"{best.name}: {layers_s / best.score.value_s:.2f} times as fast as the best plan of "
        f"whole layers; what the GPUs exchange takes {best.exchanged:.0%}"
    )
    notes = (*divided.notes, note)
    return replace(divided, method="llamacpp", candidates=candidates, notes=notes)


def candidate_placements(question: Question) -> Iterator[Placement]:
    """The plans of `plan_llamacpp`, for a free search to start from; none where llama.cpp cannot
    run the graph here."""
    graph, cluster = question.graph, question.cluster
    try:
        slots = slots_of(graph)
        blocks = llama_blocks(question, slots)
    except (PlacementError, InfeasibleError):
        return
    yield from filter(None, _placements(graph, cluster, slots, blocks))
    yield from _even_placements(graph, cluster, slots, blocks)


def _placements(
    graph: OpGraph, cluster: Cluster, slots: Slots, blocks: LlamaBlocks
) -> Iterator[Placement | None]:
    """Plans of least seconds with less and less memory, then that of the fewest bytes on the CPU;
    None where nothing fits the GPUs."""
    tries = [*((share, False) for share in FINE_SHARES), (FINE_SHARES[-1], True)]
    for share, frugal in tries:
        found = llama_devices(graph, slots, blocks.with_share(share), frugal)
        yield found and make_placement(graph, cluster, found[1], made_by="gdp llamacpp")


def _even_placements(
    graph: OpGraph, cluster: Cluster, slots: Slots, blocks: LlamaBlocks
) -> Iterator[Placement]:
    """Plans of nearly the least seconds whose fullest GPU is emptier and emptier, by bisection;
    they put no more bytes on the CPU. None where there is one GPU."""
    if (~cluster.is_cpu).sum() < 2:
        return
    shares = (blocks.with_share(share) for share in MEMORY_SHARES)
    found = ((own, llama_devices(graph, slots, own, False)) for own in shares)
    own, best = next(((own, plan) for own, plan in found if plan), (blocks, None))
    least, most = 0.0, 1.0
    for _ in range(EVEN_STEPS if best else 0):
        fill = (least + most) / 2
        plan = llama_devices(graph, slots, own.filled(fill), False)
        if (
            plan and best and plan[0].real <= best[0].real * (1 + EQUAL)
            and plan[0].imag <= best[0].imag
        ):  # fmt: skip
            most = fill
            yield make_placement(graph, cluster, plan[1], made_by="gdp llamacpp")
        else:
            least = fill


def _piped_placements(
    graph: OpGraph, cluster: Cluster, slots: Slots, blocks: LlamaBlocks
) -> Iterator[Placement]:
    """Of plans that have all blocks whole on GPUs, those of the fewest seconds as a pipeline: the
    least sum under a shorter and shorter slowest stage, by bisection. The best of these, and the
    one that shares most evenly."""
    if blocks.chunks < 2 or (~cluster.is_cpu).sum() < 2:
        return
    own, found = blocks.with_share(1.0), list[tuple[float, Int[np.ndarray, "N"]]]()
    least, most = 0.0, float(np.where(np.isfinite(own.prompt_s), own.prompt_s, 0).sum(0).max())
    for _ in range(EVEN_STEPS):
        middle = (least + most) / 2
        plan = llama_devices(graph, slots, replace(own, stage_s=middle), False)
        if plan is None:
            least = middle
            continue
        at, most = np.array([plan[1][ops[0]] for ops in slots.layers if len(ops)]), middle
        rows = np.array([len(ops) > 0 for ops in slots.layers])
        value_s = replace(own, prompt_s=own.prompt_s[rows]).piped_s(plan[0].real, at)
        found.append((value_s, plan[1]))
    if found:
        best = min(found, key=lambda row: row[0])
        for device in {id(d): d for d in (best[1], found[-1][1])}.values():
            yield make_placement(graph, cluster, device, made_by="gdp llamacpp")


def even_row(graph: OpGraph, cluster: Cluster) -> Placement:
    """Blocks and output in equal shares on the CPU and each GPU, in the order of the flags."""
    slots, numbers = slots_of(graph), cluster.accelerator_numbers
    first = [numbers.index(None)] if None in numbers else []
    order = [*first, *(d for d, n in enumerate(numbers) if n is not None)]
    device = np.full(graph.num_ops, order[0])
    device[graph.is_io] = cluster.host
    count = len(slots.layers)
    for slot, (layer, experts) in enumerate(zip(slots.layers, slots.experts, strict=True)):
        device[layer] = device[experts] = order[slot * len(order) // count]
    return make_placement(graph, cluster, device, made_by="gdp llamacpp, even")


def _fit_peer(graph: OpGraph, cluster: Cluster, slots: Slots, blocks: LlamaBlocks) -> Peer:
    """The plan that llama.cpp makes by itself."""
    gpus = [d for d in range(cluster.num_devices) if not cluster.devices[d].is_cpu]

    def plan() -> Placement | None:
        if not gpus:
            return None
        buffers = blocks.tensor_bytes + int(blocks.shared_bytes.max(axis=0).sum())
        sizes = FitSizes(
            blocks.layer_bytes, blocks.expert_bytes, cluster.memory_bytes[gpus], buffers
        )
        fitted, where = fit_plan(sizes), np.array([*gpus, blocks.cpu])
        device = blocks.rest.copy()
        for slot, (layer, experts) in enumerate(zip(slots.layers, slots.experts, strict=True)):
            device[layer] = where[fitted.layers[slot]]
            device[experts] = where[fitted.experts[slot]]
        return make_placement(graph, cluster, device, made_by="llama.cpp's fit")

    return Peer("llama.cpp, fit", "llama.cpp's own plan (--fit on)", plan)
