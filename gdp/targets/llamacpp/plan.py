"""Placing for llama.cpp: a first stretch of blocks on the CPU, then one on each GPU in their order;
or all blocks divided among GPUs (`gdp.targets.llamacpp.tensor`), where that is faster.

The experts of any block may be on the CPU. The plan has the least sum of compute and transfers,
which is what a chain of blocks takes; beside it stands llama.cpp's own plan (`fit_rule`).
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from gdp import solve
from gdp.cluster.types import Cluster, fullness, nearly_full
from gdp.costs.op_offload import applies, is_sent
from gdp.errors import ArgumentError, InfeasibleError, PlacementError
from gdp.graph.generation import request_of, with_context, with_requests
from gdp.graph.op_graph import OpGraph
from gdp.methods.intervals import best_row
from gdp.models import is_gguf, load, spec_of
from gdp.ops.llamacpp import UBATCH
from gdp.placement import Placement, make_placement
from gdp.prepare import prepare_placement, prepare_problem, requests_in_flight
from gdp.problem.arrays import arrays_of
from gdp.question import Question
from gdp.result import Result, counts_of, with_bound
from gdp.sim.segments import border_tensors
from gdp.targets.llamacpp.encoder import homes_of_encoder, told
from gdp.targets.llamacpp.fit_rule import FitSizes, fit_plan
from gdp.targets.llamacpp.flags import Slots, slots_of
from gdp.targets.llamacpp.pipeline import saved_s
from gdp.targets.llamacpp.rules import with_known_gpus
from gdp.targets.llamacpp.tensor import TensorPlan, tensor_plans
from gdp.targets.peers import Peer, beside
from gdp.targets.rows import (
    EQUAL,
    EVEN_STEPS,
    FINE_SHARES,
    MEMORY_SHARES,
    SPREAD,
    evened,
    first_that_fits,
)
from gdp.targets.vllm.layouts import least_s
from gdp.units import format_seconds

BOUND_BY = "weights and caches over the bandwidth of all devices, FLOPs over their peaks"
UBATCHES = (1024, 2048, 4096)
"""Tokens of a prompt at once that are tried where weights on the processor cross the link for each
micro-batch, as long as each is faster than half as many."""
NOTED = 0.02
"""Share of an answer's seconds below which a pipeline of micro-batches is not mentioned."""


@dataclass(frozen=True, eq=False)
class _LlamaBlocks:
    """Seconds and bytes of the pieces that llama.cpp's flags move. Axes: S slots, D devices."""

    cluster: Cluster
    cpu: int
    layer_s: Float[np.ndarray, "S D"]
    experts_s: Float[np.ndarray, "S D"]
    prompt_s: Float[np.ndarray, "S D"]  # of these two, those of the micro-batches of a prompt
    segment_s: Float[np.ndarray, "D"]  # the dispatch that is paid for every stretch, in all passes
    layer_bytes: Int[np.ndarray, "S"]
    expert_bytes: Int[np.ndarray, "S"]
    shared_bytes: Int[np.ndarray, "S K"]  # of each kind of buffer, once for the slots of a device
    memory_bytes: Int[np.ndarray, "D"]  # for weights and caches
    rest: Int[np.ndarray, "N"]  # devices of ops that no slot has: inputs, the image encoder
    tensor_bytes: int  # at most so many are alive at once
    crossings: int  # of a border in one sample: by the prompt, and by all steps together
    # Bytes of all passes together:
    flow_bytes: int  # between blocks
    logits_bytes: int
    away_bytes: Int[np.ndarray, "S 2"]  # to the experts, and back
    chunks: int  # micro-batches of the prompt
    stage_s: float = np.inf  # most of `prompt_s` on a GPU that has whole slots; inf: any plan

    def move_s(self, src: int, dst: int, size: int) -> float:
        latency_s = self.cluster.link_latency_s * self.crossings
        return 0.0 if src == dst else float(
            latency_s[src, dst] + size / self.cluster.link_bytes_per_s[src, dst]
        )  # fmt: skip

    def with_share(self, share: float) -> "_LlamaBlocks":
        """With a share of the tensors' bytes kept free of weights on every device."""
        kept = int(share * self.tensor_bytes)
        return replace(self, memory_bytes=self.memory_bytes - kept)

    def filled(self, fill: float) -> "_LlamaBlocks":
        """With GPUs whose weights and tensors may take no more than a share of their memory."""
        memory_bytes = self.memory_bytes.copy()
        for d, device in enumerate(self.cluster.devices):
            if not device.is_cpu:
                most = int(fill * self.cluster.memory_bytes[d]) - self.tensor_bytes
                memory_bytes[d] = min(memory_bytes[d], most)
        return replace(self, memory_bytes=memory_bytes)

    def piped_s(self, total_s: float, at: Int[np.ndarray, "S"]) -> float:
        """Seconds of a plan whose GPUs read a prompt as a pipeline; see `pipeline.saved_s`."""
        stages = np.bincount(at, self.prompt_s[np.arange(len(at)), at])
        return total_s - (1 - 1 / self.chunks) * float(stages.sum() - stages.max())

    @cached_property
    def away_s(self) -> list[list[float]]:
        """Seconds of the experts of each slot on the CPU, [device that has the rest][slot]."""
        cpu, count = self.cpu, len(self.layer_bytes)
        if self.cluster.devices[cpu].is_unified:  # its GPU computes as near to its memory
            return [[np.inf] * count for _ in range(self.cluster.num_devices)]
        return [
            [
                float(self.experts_s[s, cpu] + self.segment_s[[cpu, device]].sum())
                + self.move_s(device, cpu, int(self.away_bytes[s, 0]))
                + self.move_s(cpu, device, int(self.away_bytes[s, 1]))
                for s in range(count)
            ]
            for device in range(self.cluster.num_devices)
        ]


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
    graph, devices = result.question.graph, result.question.cluster.devices
    here = np.array([device.is_cpu for device in devices])[result.placement.device]
    return bool((here & is_sent(graph)).any()) and applies(result.question.cluster)


def _with_ubatch(question: Question, ubatch: int) -> Question | None:
    """The question with so many tokens of a prompt at once; None where its model says a size, or
    its prompts are no longer than half of it."""
    model, graph = question.model, question.graph
    if model is None or not is_gguf(model) or 2 * UBATCH * graph.chunks.max() <= ubatch:
        return None
    spec = spec_of(model)
    if "ubatch=" in spec:
        return None
    spec += ("&" if "?" in spec else "?") + f"ubatch={ubatch}"
    request, larger = request_of(graph), load(spec)
    if request is not None and request.context:
        larger = with_context(larger, request.context)
    if request is not None:
        larger = with_requests(larger, request.requests)
    return replace(question, graph=larger, model=spec)


def _of_size(question: Question) -> Result:
    """The best plan with micro-batches of the size that the graph says."""
    slots = slots_of(question.graph)
    question = replace(question, cluster=with_known_gpus(question.cluster))
    if not len(slots.projector):
        return _planned(question, slots, None)
    found, error = list[Result](), None
    for home in homes_of_encoder(question, slots):
        try:
            found.append(_planned(question, slots, home))
        except InfeasibleError as caught:
            error = error or caught
    if not found:
        raise error or InfeasibleError("the constraints leave no device for the image encoder")
    best = min(found, key=lambda result: (not result.score.feasible, result.value_s))
    return replace(best, notes=(*best.notes, told(best, found, slots)))


def _planned(question: Question, slots: Slots, home: int | None) -> Result:
    """The best plan, with the image encoder on this device."""
    graph, cluster = question.graph, question.cluster
    blocks = _llama_blocks(question, slots, home)
    plans = _placements(graph, cluster, slots, blocks)
    reason = "a device is too small or forbidden"
    result = first_that_fits(question, plans, reason, "llamacpp")
    result = beside(result, _fit_peer(graph, cluster, slots, blocks))
    result = evened(result, _even_placements(graph, cluster, slots, blocks))
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
            counts=counts_of(question.graph, placement),
            notes=(*_other_notes(result), *([full] if full else [])),
        )  # fmt: skip
        result = with_bound(other, result.bound_s, result.bound_by)
    if saved < NOTED * result.value_s:
        return result
    note = (
        f"micro-batches of the prompt go through the GPUs as a pipeline, which saves about "
        f"{format_seconds(saved)} of these times: {format_seconds(piped_s[best])} in all, by which "
        "this plan was chosen"
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
    bound = least_s(question, every_device=True), BOUND_BY
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
        blocks = _llama_blocks(question, slots)
    except (PlacementError, InfeasibleError):
        return
    yield from filter(None, _placements(graph, cluster, slots, blocks))
    yield from _even_placements(graph, cluster, slots, blocks)


def _placements(
    graph: OpGraph, cluster: Cluster, slots: Slots, blocks: _LlamaBlocks
) -> Iterator[Placement | None]:
    """Plans of least seconds with less and less memory, then that of the fewest bytes on the CPU;
    None where nothing fits the GPUs."""
    tries = [*((share, False) for share in FINE_SHARES), (FINE_SHARES[-1], True)]
    for share, frugal in tries:
        found = _llama_devices(graph, slots, blocks.with_share(share), frugal)
        yield found and make_placement(graph, cluster, found[1], made_by="gdp llamacpp")


def _even_placements(
    graph: OpGraph, cluster: Cluster, slots: Slots, blocks: _LlamaBlocks
) -> Iterator[Placement]:
    """Plans of nearly the least seconds whose fullest GPU is emptier and emptier, by bisection;
    they put no more bytes on the CPU. None where there is one GPU."""
    if sum(not device.is_cpu for device in cluster.devices) < 2:
        return
    shares = (blocks.with_share(share) for share in MEMORY_SHARES)
    found = ((own, _llama_devices(graph, slots, own, False)) for own in shares)
    own, best = next(((own, plan) for own, plan in found if plan), (blocks, None))
    least, most = 0.0, 1.0
    for _ in range(EVEN_STEPS if best else 0):
        fill = (least + most) / 2
        plan = _llama_devices(graph, slots, own.filled(fill), False)
        if (
            plan and best and plan[0].real <= best[0].real * (1 + EQUAL)
            and plan[0].imag <= best[0].imag
        ):  # fmt: skip
            most = fill
            yield make_placement(graph, cluster, plan[1], made_by="gdp llamacpp")
        else:
            least = fill


def _piped_placements(
    graph: OpGraph, cluster: Cluster, slots: Slots, blocks: _LlamaBlocks
) -> Iterator[Placement]:
    """Of plans that have all blocks whole on GPUs, those of the fewest seconds as a pipeline: the
    least sum under a shorter and shorter slowest stage, by bisection. The best of these, and the
    one that shares most evenly."""
    if blocks.chunks < 2 or sum(not device.is_cpu for device in cluster.devices) < 2:
        return
    own, found = blocks.with_share(1.0), list[tuple[float, Int[np.ndarray, "N"]]]()
    least, most = 0.0, float(np.where(np.isfinite(own.prompt_s), own.prompt_s, 0).sum(0).max())
    for _ in range(EVEN_STEPS):
        middle = (least + most) / 2
        plan = _llama_devices(graph, slots, replace(own, stage_s=middle), False)
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


def _fit_peer(graph: OpGraph, cluster: Cluster, slots: Slots, blocks: _LlamaBlocks) -> Peer:
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


def _llama_blocks(question: Question, slots: Slots, home: int | None = None) -> _LlamaBlocks:
    graph, cluster = question.graph, question.cluster
    cpus = [d for d, device in enumerate(cluster.devices) if device.is_cpu]
    if cluster.devices[cluster.host].is_unified:  # a processor of its own, in the same memory
        cpus = [cluster.host]
    if not cpus:
        raise PlacementError(
            f"llama.cpp needs a CPU; cluster {cluster.name!r} has none: add one, or say `unified = "
            "true` of a GPU that shares its processor's memory"
        )
    cpu = cluster.host if cluster.host in cpus else cpus[0]
    pieces = [slots.embedding, *slots.layers, *slots.experts]
    piece = np.full(graph.num_ops, len(pieces))
    for number, ops in enumerate(pieces):
        piece[ops] = number
    problem = prepare_problem(replace(question, objective="latency"), keep_apart=piece)
    count = len(slots.layers)
    per_op = [d.dispatch_s if d.dispatch_per == "op" else 0.0 for d in problem.cluster.devices]
    of_group = np.zeros(problem.num_ops, dtype=np.int64)
    of_group[problem.origin.group_of] = piece
    seconds = np.zeros((len(pieces) + 1, cluster.num_devices))
    op_s = np.where(problem.allowed, problem.compute_s + per_op, np.inf)
    np.add.at(seconds, of_group, op_s)
    prompt_s = np.zeros_like(seconds)
    np.add.at(prompt_s, of_group, np.where((problem.graph.chunks > 1)[:, None], op_s, 0.0))
    if not np.isfinite(seconds[0, cpu]):
        raise InfeasibleError(
            f"llama.cpp keeps token_embd on the CPU, and {cluster.device_names[cpu]!r} is forbidden"
        )
    made_bytes = np.bincount(graph.producer, graph.held_bytes, graph.num_ops).astype(np.int64)
    largest = max(
        int(made_bytes[layer].sum() + made_bytes[experts].sum())
        for layer, experts in zip(slots.layers, slots.experts, strict=True)
    )
    flow, most = int(made_bytes[slots.embedding].sum()), int(graph.repeats.max())
    held_bytes = np.where(graph.is_buffer & (graph.cache_bytes > 0), 0, graph.weight_bytes)
    memory_bytes = cluster.memory_bytes.copy()
    memory_bytes[cpu] -= int(graph.weight_bytes[slots.embedding].sum())
    rest = np.where(graph.is_io, cluster.host, cpu)
    if len(slots.projector):
        rest[slots.projector] = cpu if home is None else home
        memory_bytes[rest[slots.projector[0]]] -= int(graph.weight_bytes[slots.projector].sum())

    return _LlamaBlocks(
        cluster=problem.cluster, cpu=cpu, layer_s=seconds[1 : count + 1],
        experts_s=seconds[count + 1 : -1],
        prompt_s=prompt_s[1 : count + 1] + prompt_s[count + 1 : -1],
        segment_s=arrays_of(problem).segment_s * (1 if most == 1 else 2),
        layer_bytes=_summed(held_bytes, slots.layers),
        expert_bytes=_summed(held_bytes, slots.experts),
        shared_bytes=_shared_bytes(question, slots.layers),
        memory_bytes=memory_bytes, rest=rest, tensor_bytes=largest + 2 * flow,
        crossings=1 if most == 1 else 2, flow_bytes=_crossing(graph, slots.embedding)[1],
        logits_bytes=_crossing(graph, slots.layers[-1])[1],
        away_bytes=np.array([_crossing(graph, ops) for ops in slots.experts]),
        chunks=int(graph.chunks.max()),
    )  # fmt: skip


def _summed(values: np.ndarray, pieces: Sequence[Int[np.ndarray, "_"]]) -> np.ndarray:
    return np.array([values[ops].sum(axis=0) for ops in pieces])


def _shared_bytes(
    question: Question, layers: Sequence[Int[np.ndarray, "_"]]
) -> Int[np.ndarray, "S K"]:
    """Bytes of the buffers of each slot that all slots of a device share: masks, of all requests in
    flight."""
    graph = question.graph
    shares = graph.is_buffer & (graph.cache_bytes > 0)
    kinds = np.unique(graph.weight_id[shares])
    bytes_ = np.zeros((len(layers), len(kinds)), dtype=np.int64)
    for slot, ops in enumerate(layers):
        mine = ops[shares[ops]]
        kind = np.searchsorted(kinds, graph.weight_id[mine])
        np.maximum.at(bytes_[slot], kind, graph.cache_bytes[mine])
    return requests_in_flight(graph, question.cluster, question.objective) * bytes_


def _crossing(graph: OpGraph, ops: Int[np.ndarray, "M"]) -> tuple[int, int]:
    """Bytes that some ops read from others, and that others read from them, in all passes."""
    inside = np.zeros(graph.num_ops, dtype=bool)
    inside[ops] = True
    into, out = border_tensors(graph, inside)
    return int(graph.sent_bytes[into].sum()), int(graph.sent_bytes[out].sum())


def _llama_devices(
    graph: OpGraph, slots: Slots, blocks: _LlamaBlocks, frugal: bool
) -> tuple[complex, Int[np.ndarray, "N"]] | None:
    """Seconds, bytes on the CPU as their imaginary part, and devices of the plan of least seconds;
    with `frugal` of the fewest bytes on the CPU, and these two the other way round. None where no
    stretches fit the GPUs. O(D S^2) stretches."""
    cluster, cpu, count = blocks.cluster, blocks.cpu, len(blocks.layer_bytes)
    gpus = [d for d in range(cluster.num_devices) if not cluster.devices[d].is_cpu]
    unified = cpu in gpus
    order = gpus if unified else [cpu, *gpus]

    def value(seconds: float, cpu_bytes: int = 0) -> complex:
        """Complex numbers are ordered by the real part first."""
        return complex(cpu_bytes, seconds) if frugal else complex(seconds, cpu_bytes)

    stage = np.full((count + 1, count + 1, cluster.num_devices), np.inf, dtype=complex)
    for device in order:
        for start in range(1 if device == cpu and not unified else count):
            for stop in range(start + 1, count + 1):
                stretch = _llama_stretch(blocks, frugal, device, start, stop)
                if stretch is None:
                    break  # nor does a longer one fit
                seconds, cpu_bytes, _ = stretch
                seconds += float(blocks.segment_s[device])
                if start == 0:
                    seconds += blocks.move_s(cpu, device, blocks.flow_bytes)
                if stop == count:
                    seconds += blocks.move_s(device, cluster.host, blocks.logits_bytes)
                stage[start, stop, device] = value(seconds, cpu_bytes)
    link = np.zeros((cluster.num_devices, cluster.num_devices, count + 1), dtype=complex)
    for before, device in itertools.combinations(order, 2):
        link[before, device] = value(blocks.move_s(before, device, blocks.flow_bytes))
    total, row = best_row(order, lambda d: stage[:, :, d], link)
    if not row:
        return None
    devices = blocks.rest.copy()
    for start, stop, where in row:
        stretch = _llama_stretch(blocks, frugal, where, start, stop)
        for slot in range(start, stop):
            devices[slots.layers[slot]] = where
            devices[slots.experts[slot]] = cpu if stretch and slot in stretch[2] else where
    return total, devices


def _least_to_free(needed_bytes: int, items: dict[int, tuple[float, int]]) -> list[int]:
    """Items (seconds, bytes) that free at least so many bytes for few seconds.

    Greedy for the covering knapsack, at most twice the least seconds: items of the fewest seconds
    per byte until they free enough, without those that are then superfluous; or the cheapest item
    that frees enough alone.
    """
    chosen: list[int] = []
    freed = 0
    for item in sorted(items, key=lambda i: items[i][0] / items[i][1]):
        if freed >= needed_bytes:
            break
        chosen.append(item)
        freed += items[item][1]
    for item in sorted(chosen, key=lambda i: -items[i][0]):
        if freed - items[item][1] >= needed_bytes:
            chosen.remove(item)
            freed -= items[item][1]
    enough = [item for item, (_, size) in items.items() if size >= needed_bytes]
    if needed_bytes <= 0 or not enough:
        return chosen
    alone = min(enough, key=lambda i: items[i][0])
    return [alone] if items[alone][0] < sum(items[i][0] for i in chosen) else chosen


def _llama_stretch(
    blocks: _LlamaBlocks, frugal: bool, device: int, start: int, stop: int
) -> tuple[float, int, Sequence[int]] | None:
    """Seconds of slots on one device, bytes that they put on the CPU, and slots whose experts are
    there, if a GPU is too small; None if nothing fits."""
    span = np.arange(start, stop)
    seconds = float((blocks.layer_s + blocks.experts_s)[span, device].sum())
    size = int((blocks.layer_bytes + blocks.expert_bytes)[span].sum())
    size += int(blocks.shared_bytes[span].max(axis=0).sum())
    cpu, unified = blocks.cpu, not blocks.cluster.devices[blocks.cpu].is_cpu
    pipes = blocks.stage_s < np.inf
    if pipes and (
        (device == cpu and not unified) or blocks.prompt_s[span, device].sum() > blocks.stage_s
    ):
        return None
    if device == cpu:
        fits = np.isfinite(seconds) and size <= blocks.memory_bytes[cpu]
        return (seconds, 0 if unified else size, ()) if fits else None
    seconds = float(blocks.layer_s[span, device].sum())
    owned = [int(s) for s in span if blocks.expert_bytes[s] > 0]
    here_s = {s: float(blocks.experts_s[s, device]) for s in owned}
    away_s = blocks.away_s[device]
    if any(here_s[s] == away_s[s] == np.inf for s in owned):
        return None
    extra_s = {s: away_s[s] - here_s[s] for s in owned}
    away = [s for s in owned if here_s[s] == np.inf or (extra_s[s] < 0 and not frugal)]
    size -= int(blocks.expert_bytes[away].sum())
    others = {s: (extra_s[s], int(blocks.expert_bytes[s])) for s in owned if s not in away}
    gone = _least_to_free(size - int(blocks.memory_bytes[device]), others)
    away += gone
    size -= int(blocks.expert_bytes[gone].sum())
    seconds += sum(away_s[s] if s in away else here_s[s] for s in owned)
    if size > blocks.memory_bytes[device] or not np.isfinite(seconds) or (pipes and away):
        return None
    return seconds, int(blocks.expert_bytes[away].sum()), away
