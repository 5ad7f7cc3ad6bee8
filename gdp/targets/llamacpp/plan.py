"""Placing for llama.cpp: a first stretch of blocks on the CPU, then one on each GPU in their order;
or all blocks divided among GPUs (`gdp.targets.llamacpp.tensor`), where that is faster.

The experts of any block may be on the CPU. The plan has the least sum of compute and transfers,
which is what a chain of blocks takes; beside it stands llama.cpp's own plan (`fit_rule`). Of an
objective that is no time (`Objective.chain`), such as energy, it is the best of the plans of least
value on each set of devices.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gdp.base.errors import ArgumentError, InfeasibleError, ModelError, PlacementError
from gdp.base.units import format_seconds
from gdp.bounds.work import roofline_bound_s
from gdp.cluster.types import Cluster
from gdp.costs.offload import is_sent, sends_weights
from gdp.graph.generation import with_context
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import ModelSpec
from gdp.methods.base import Candidate
from gdp.methods.chain import EQUAL
from gdp.methods.intervals import tightened
from gdp.ops.llamacpp import DRAFT, UBATCH
from gdp.placement.placement import Placement, make_placement
from gdp.question import solve
from gdp.question.models import is_gguf, load
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.sim.objectives import find_objective
from gdp.targets.llamacpp.blocks import LlamaBlocks, LlamaRow, RowLimits, llama_blocks, llama_row
from gdp.targets.llamacpp.fit_rule import FitSizes, fit_plan
from gdp.targets.llamacpp.flags import draft_of, slots_of
from gdp.targets.llamacpp.parts import homes_of_parts, parts_note
from gdp.targets.llamacpp.pipeline import saved_s
from gdp.targets.llamacpp.rules import with_known_gpus
from gdp.targets.llamacpp.tensor import split_name, tensor_plans
from gdp.targets.peers import Peer, beside
from gdp.targets.rows import (
    FINE_SHARES,
    MEMORY_SHARES,
    balance_memory,
    first_feasible,
    fullest,
    in_place_of,
)
from gdp.targets.simulated import Simulated

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
MOST_SETS, MOST_COUNTED = 256, 1 << 16
"""Sets of devices whose plans are compared, the smallest of those that are listed."""
HURRIES = 1.0, 10.0, 1e6
"""Times that a second may count for more of an objective, where runs must keep a limit: with the
last one plans are the fastest."""
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
    if question.objective != "latency" and not find_objective(question.objective).chain:
        raise ArgumentError(
            f"--for llamacpp plans the latency of one pass, or its energy, not {question.objective}"
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
    row = find_objective(question.objective)
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
        f"{PROPOSAL}: {result.value_s / found.value_s:.2f} {row.compared} now, "
        f"{row.text(found.value_s)}, by keys and values in 8.5 bits instead of 16"
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
    without, row = _of_any_size(plain), find_objective(question.objective)
    note = (
        f"drafts of {name}: {without.value_s / result.value_s:.2f} {row.compared} without "
        f"({row.text(without.value_s)})"
    )
    return replace(result, notes=(*result.notes, note))


def _of_any_size(question: Question) -> Result:
    """The best plan with micro-batches of the graph's size, or of a larger one that is faster."""
    result, compared = _of_size(question), find_objective(question.objective).compared
    for ubatch in UBATCHES if question.search.seconds != 0.0 else ():
        other = _with_ubatch(question, ubatch) if _sends(result) else None
        try:
            found = None if other is None else _of_size(other)
        except InfeasibleError:
            break
        if found is None or found.value_s > result.value_s * (1 - NOTED):
            break
        note = (
            f"--ubatch-size {ubatch}: {result.value_s / found.value_s:.2f} {compared} with "
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

    def order(result: Result) -> tuple[bool, float]:
        return not result.score.feasible, result.value_s

    found, error = dict[tuple[int, ...], Result](), None
    homes_of, sets = homes_of_parts(question, slots), _device_sets(question)
    for homes, (used, hurry) in itertools.product(homes_of, sets):
        blocks = llama_blocks(question, slots, homes, used, hurry)
        if any(hurry == 1 and result.value_s <= blocks.least for result in found.values()):
            continue
        try:
            result = _planned(blocks)
        except InfeasibleError as caught:
            error = error or caught
            continue
        found[homes] = min(result, found.get(homes, result), key=order)
    if not found:
        raise error or InfeasibleError("the constraints leave no device for --mmproj or --draft")
    best = min(found.values(), key=order)
    if not slots.parts:
        return best
    return replace(best, notes=(*best.notes, parts_note(best, [*found.values()], slots)))


def _device_sets(question: Question) -> list[tuple[tuple[int, ...] | None, float]]:
    """Sets of devices that may compute blocks, small ones first and of identical devices the first
    ones, each with factors of the cost of a second: 1, and larger ones under a limit of seconds.
    All devices at once for a latency."""
    if not find_objective(question.objective).chain:
        return [(None, 1.0)]
    kinds: dict[str, list[int]] = {}
    distinct = question.constraints.pins or question.constraints.forbid
    for d, device in enumerate(question.cluster.devices):
        kind = device.name if distinct else repr(replace(device, name="any"))
        kinds.setdefault(kind, []).append(d)
    counts = itertools.product(*(range(len(own) + 1) for own in kinds.values()))
    sets = [
        tuple(d for own, count in zip(kinds.values(), row, strict=True) for d in own[:count])
        for row in itertools.islice(counts, 1, MOST_COUNTED)
    ]
    hurries = HURRIES if question.within_s < math.inf else HURRIES[:1]
    return [*itertools.product(sorted(sets, key=len)[:MOST_SETS], hurries)]


def _planned(blocks: LlamaBlocks) -> Result:
    """The best plan, with separate parts on the devices that `blocks` gives them."""
    reason = "a device is too small or forbidden"
    result = first_feasible(blocks.question, _placements(blocks), reason, "llamacpp")
    result = beside(result, _fit_peer(blocks))
    result = balance_memory(result, _even_placements(blocks))
    if find_objective(blocks.question.objective).chain:
        return result
    result = _pipelined(result, _piped_placements(blocks))
    return _or_divided(result, tensor_plans(blocks.question, blocks.slots, blocks.rest))


def _pipelined(result: Result, plans: Iterable[Placement]) -> Result:
    """The result, or a plan that takes fewer seconds where GPUs read the prompt as a pipeline, with
    a note of those that are saved; of equal plans that with most room on its fullest device."""
    question, cluster = result.question, result.question.cluster
    rows = [(result.placement, result.score)]
    rows += [(p, solve.simulate(question, p)) for p in plans]
    rows = [row for row in rows if row[1].feasible]
    saved_by = [saved_s(prepare_placement(question, placement)) for placement, _ in rows]
    piped_s = [s.value_s - saved for (_, s), saved in zip(rows, saved_by, strict=True)]
    slack = EQUAL if question.simplicity else 0.0
    near = [i for i, value_s in enumerate(piped_s) if value_s <= min(piped_s) * (1 + slack)]
    best = min(near, key=lambda i: (fullest(cluster, rows[i][1]), piped_s[i]))
    saved = saved_by[best]
    if rows[best][0] is not result.placement:
        result = in_place_of(result, *rows[best])
    if saved < NOTED * result.value_s:
        return result
    note = (
        f"micro-batches of the prompt go through the GPUs as a pipeline, which saves about "
        f"{format_seconds(saved)}: {format_seconds(piped_s[best])} in all, by which this plan was "
        f"chosen, instead of {format_seconds(piped_s[best] + saved)} one after the other"
    )
    return replace(result, notes=(*result.notes, note))


def _or_divided(result: Result, plans: Sequence[Simulated]) -> Result:
    """The result, or the best tensor split where that is faster than whole layers."""
    if not plans:
        return result
    question, best = result.question, plans[0]
    candidates = (*result.candidates, *(_candidate(plan) for plan in plans))
    layers_s = result.value_s - saved_s(prepare_placement(question, result.placement))
    if not best.score.feasible or best.score.value_s >= layers_s:
        gain = "fits" if not best.score.feasible else "is as fast as whole layers"
        notes = (*result.notes, f"no tensor split of the GPUs {gain}")
        return replace(result, candidates=candidates, notes=notes)
    devices = range(question.cluster.num_devices)
    bound = roofline_bound_s(question.graph, question.cluster, devices), BOUND_BY
    divided = solve.evaluate(question, best.placement, bound)
    note = (
        f"{split_name(best.placement)}: {layers_s / best.score.value_s:.2f} times as fast as the "
        f"best plan of whole layers; what the GPUs exchange takes {best.exchanged or 0:.0%}"
    )
    notes = (*divided.notes, note)
    return replace(divided, method="llamacpp", candidates=candidates, notes=notes)


def _candidate(plan: Simulated) -> Candidate:
    """The row of a tensor split."""
    names = plan.placement.device_names
    gpus = ", ".join(names[d] for d in plan.placement.splits[0].devices)
    return plan.candidate(f"{split_name(plan.placement)} of {gpus}")


def candidate_placements(question: Question) -> Iterator[Placement]:
    """The plans of `plan_llamacpp`, for a free search to start from; none where llama.cpp cannot
    run the graph here."""
    try:
        blocks = llama_blocks(question, slots_of(question.graph))
    except (PlacementError, InfeasibleError):
        return
    yield from filter(None, _placements(blocks))
    yield from _even_placements(blocks)


def _placements(blocks: LlamaBlocks) -> Iterator[Placement | None]:
    """Plans of least seconds with less and less memory, then that of the fewest bytes on the CPU;
    None where nothing fits the GPUs."""
    for share, frugal in (*((share, False) for share in FINE_SHARES), (FINE_SHARES[-1], True)):
        row = llama_row(blocks, RowLimits(blocks.room_bytes(share)), frugal)
        yield row and blocks.placed(row.at, row.experts_at)


def _even_placements(blocks: LlamaBlocks) -> Iterator[Placement]:
    """Plans of nearly the least seconds whose fullest GPU is emptier and emptier; they put no more
    bytes on the CPU. None where there is one GPU."""
    if (~blocks.cluster.is_cpu).sum() < 2:
        return
    rows = ((kept, llama_row(blocks, RowLimits(blocks.room_bytes(kept)))) for kept in MEMORY_SHARES)
    kept, best = next(((kept, row) for kept, row in rows if row), (0.0, None))

    def filled(fill: float) -> LlamaRow | None:
        row = llama_row(blocks, RowLimits(blocks.room_bytes(kept, fill)))
        if row is None or best is None or row.cpu_bytes > best.cpu_bytes:
            return None
        return row if row.seconds <= best.seconds * (1 + EQUAL) else None

    for row in tightened(1.0, filled) if best else ():
        yield blocks.placed(row.at, row.experts_at)


def _piped_placements(blocks: LlamaBlocks) -> Iterator[Placement]:
    """Of plans that have all blocks whole on GPUs, those of the fewest seconds as a pipeline: the
    least sum under a shorter and shorter slowest stage. The best of these, and the one that shares
    most evenly."""
    if blocks.chunks < 2 or (~blocks.cluster.is_cpu).sum() < 2:
        return
    limits, prompt_s = RowLimits(blocks.room_bytes(1.0)), blocks.prompt_s
    slowest_s = float(np.where(np.isfinite(prompt_s), prompt_s, 0).sum(0).max())
    rows = tightened(slowest_s, lambda s: llama_row(blocks, limits._replace(stage_s=s)))
    if found := list(rows):
        best, last = min(found, key=blocks.piped_s), found[-1]
        for row in (best, last) if best is not last else (best,):
            yield blocks.placed(row.at, row.experts_at)


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


def _fit_peer(blocks: LlamaBlocks) -> Peer:
    """The plan that llama.cpp makes by itself."""
    cluster = blocks.question.cluster
    gpus = [d for d in range(cluster.num_devices) if not cluster.devices[d].is_cpu]

    def plan() -> Placement | None:
        if not gpus:
            return None
        buffers = blocks.tensor_bytes + int(blocks.shared_bytes.max(axis=0).sum())
        sizes = FitSizes(
            blocks.layer_bytes, blocks.expert_bytes, cluster.memory_bytes[gpus], buffers
        )
        fitted, where = fit_plan(sizes), np.array([*gpus, blocks.cpu])
        return blocks.placed(where[fitted.layers], where[fitted.experts], "llama.cpp's fit")

    return Peer("llama.cpp, fit", "llama.cpp's own plan (--fit on)", plan)
