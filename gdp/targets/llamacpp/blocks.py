"""Stretches of blocks as llama.cpp's flags have them: a first one on the CPU, then one on each GPU
in their order, and of each block the experts with it or on the CPU.

A row of stretches takes the least sum of compute and transfers, which is what a chain of blocks
takes. For an objective that is no time, fields in seconds hold its value: those of a second and of
the ops on the devices that a plan uses (`Objective.chain`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.base.errors import InfeasibleError, PlacementError
from gdp.base.rows import imported
from gdp.cluster.types import Cluster
from gdp.graph.generation import steps_of
from gdp.graph.op_graph import OpGraph
from gdp.methods.intervals import best_row
from gdp.placement.placement import Placement, make_placement
from gdp.problem.arrays import arrays_of
from gdp.question.prepare import problem_of, requests_in_flight
from gdp.question.question import Question
from gdp.sim.objectives import find_objective
from gdp.sim.segments import border_tensors
from gdp.targets.llamacpp.flags import Slots
from gdp.targets.llamacpp.parts import held_bytes
from gdp.targets.rows import by_piece


@dataclass(frozen=True, eq=False)
class LlamaBlocks:
    """Seconds and bytes of the pieces that llama.cpp's flags move.

    Axes: S slots, D devices, C places to cut: a stretch goes from one to a later one.
    """

    question: Question
    slots: Slots
    cluster: Cluster
    cpu: int
    per_s: float  # value of a second
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
    parts_s: float  # of the image encoder and the model that drafts, where they are
    # Of stretches with all that their slots have; 0 where a place is not the later one.
    stretch_s: Float[np.ndarray, "D C C"]
    stretch_prompt_s: Float[np.ndarray, "D C C"]
    stretch_bytes: Int[np.ndarray, "C C"]

    def move_s(self, src: int, dst: int, size: int) -> float:
        latency_s = self.cluster.link_latency_s * self.crossings
        return 0.0 if src == dst else self.per_s * float(
            latency_s[src, dst] + size / self.cluster.link_bytes_per_s[src, dst]
        )  # fmt: skip

    @cached_property
    def least(self) -> float:
        """Value that no plan is below; of a latency that of the separate parts alone, as tensor
        splits take less than whole slots."""
        if not find_objective(self.question.objective).chain:
            return self.parts_s
        return self.parts_s + float((self.layer_s.min(1) + self.experts_s.min(1)).sum())

    def room_bytes(self, share: float, fill: float = 1.0) -> Int[np.ndarray, "D"]:
        """Memory for weights and caches beside a share of the tensors' bytes; on GPUs weights and
        all tensors take no more than `fill` of it, where that is below 1."""
        room_bytes = self.memory_bytes - int(share * self.tensor_bytes)
        if fill < 1.0:
            most = (fill * self.cluster.memory_bytes).astype(np.int64) - self.tensor_bytes
            np.minimum(room_bytes, most, out=room_bytes, where=~self.cluster.is_cpu)
        return room_bytes

    def piped_s(self, row: "LlamaRow") -> float:
        """Seconds of a plan whose GPUs read a prompt as a pipeline; see `pipeline.saved_s`."""
        stages = np.bincount(row.at, self.prompt_s[np.arange(len(row.at)), row.at])
        return row.seconds - (1 - 1 / self.chunks) * float(stages.sum() - stages.max())

    def placed(
        self, at: Int[np.ndarray, "S"], experts_at: Int[np.ndarray, "S"],
        made_by: str = "gdp llamacpp",
    ) -> Placement:  # fmt: skip
        """The placement of slots, and of their experts, on some devices."""
        device, slots = self.rest.copy(), self.slots
        for ops, where in zip((*slots.layers, *slots.experts), (*at, *experts_at), strict=True):
            device[ops] = where
        question = self.question
        return make_placement(question.graph, question.cluster, device, made_by=made_by)

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


def processor_of(cluster: Cluster) -> int:
    """The processor of llama.cpp; `PlacementError` where there is none."""
    cpus = [d for d, device in enumerate(cluster.devices) if device.is_cpu]
    if cluster.devices[cluster.host].is_unified:  # a processor of its own, in the same memory
        cpus = [cluster.host]
    if not cpus:
        raise PlacementError(
            f"llama.cpp needs a CPU; cluster {cluster.name!r} has none: add one, or say `unified = "
            "true` of a GPU that shares its processor's memory"
        )
    return cluster.host if cluster.host in cpus else cpus[0]


def llama_blocks(
    question: Question, slots: Slots, homes: Sequence[int] = (), used: Sequence[int] | None = None,
    hurry: float = 1.0,
) -> LlamaBlocks:  # fmt: skip
    """Seconds and bytes of the slots, with separate parts (image encoder, draft model) on `homes`,
    by default the CPU; with `used`, values of the question's objective where these devices alone
    compute slots, and a second counts `hurry` times.

    Raises:
        PlacementError: There is no CPU, or it may not have the embedding.
    """
    graph, cluster = question.graph, question.cluster
    cpu = processor_of(cluster)
    pieces = [slots.embedding, *slots.layers, *slots.experts, *slots.parts]
    piece = np.full(graph.num_ops, len(pieces))
    for number, ops in enumerate(pieces):
        piece[ops] = number
    problem = problem_of(replace(question, objective="latency"), keep_apart=piece)
    count = len(slots.layers)
    op_s = np.where(problem.allowed, problem.compute_s + problem.cluster.op_dispatch_s, np.inf)
    chain = find_objective(question.objective).chain
    per_s, op_value = (1.0, 0.0) if used is None else imported(chain)(problem, used)
    per_s *= hurry
    seconds = by_piece(problem, piece, per_s * op_s + op_value)
    in_chunks = (problem.graph.chunks > 1)[:, None]
    prompt_s = by_piece(problem, piece, np.where(in_chunks, op_s, 0.0))
    if not np.isfinite(seconds[0, cpu]):
        raise InfeasibleError(
            f"llama.cpp keeps token_embd on the CPU, and {cluster.device_names[cpu]!r} is forbidden"
        )

    def bytes_of(values: np.ndarray) -> Int[np.ndarray, "K"]:
        return np.bincount(piece, values, len(pieces) + 1).astype(np.int64)

    layers, experts = slice(1, count + 1), slice(count + 1, 2 * count + 1)
    if used is not None:
        seconds[1 : 2 * count + 1, ~np.isin(np.arange(cluster.num_devices), used)] = np.inf
    made_bytes = bytes_of(np.bincount(graph.producer, graph.held_bytes, graph.num_ops))
    own_bytes = bytes_of(np.where(graph.is_buffer & (graph.cache_bytes > 0), 0, graph.weight_bytes))
    largest, flow = int((made_bytes[layers] + made_bytes[experts]).max()), int(made_bytes[0])
    passes = 1 if steps_of(graph) == 1 else 2
    memory_bytes = cluster.memory_bytes.copy()
    for embedding in (slots.embedding, slots.draft_embedding):
        memory_bytes[cpu] -= int(graph.weight_bytes[embedding].sum())
    rest, parts_s = np.where(graph.is_io, cluster.host, cpu), 0.0
    for k, (part, home) in enumerate(zip(slots.parts, homes or [cpu, cpu], strict=False)):
        rest[part] = home
        memory_bytes[home] -= held_bytes(question, part)
        parts_s += float(seconds[1 + 2 * count + k, home])

    read_s = prompt_s[layers] + prompt_s[experts]
    shared_bytes = _shared_bytes(question, slots.layers)
    return LlamaBlocks(
        question=question, slots=slots, cluster=problem.cluster, cpu=cpu, per_s=per_s,
        layer_s=seconds[layers], experts_s=seconds[experts], prompt_s=read_s,
        segment_s=arrays_of(problem).segment_s * passes * per_s,
        layer_bytes=own_bytes[layers], expert_bytes=own_bytes[experts], shared_bytes=shared_bytes,
        memory_bytes=memory_bytes, rest=rest, tensor_bytes=largest + 2 * flow, crossings=passes,
        flow_bytes=_crossing(graph, slots.embedding)[1],
        logits_bytes=_crossing(graph, slots.layers[-1])[1],
        away_bytes=np.array([_crossing(graph, ops) for ops in slots.experts]),
        chunks=int(graph.chunks.max()), parts_s=parts_s,
        stretch_s=_stretch_sums(seconds[layers] + seconds[experts]),
        stretch_prompt_s=_stretch_sums(read_s),
        stretch_bytes=_stretch_bytes(own_bytes[layers] + own_bytes[experts], shared_bytes),
    )  # fmt: skip


def _stretch_sums(slot_s: Float[np.ndarray, "S D"]) -> Float[np.ndarray, "D C C"]:
    """Seconds of all stretches on each device."""
    count, num_devices = slot_s.shape
    sums = np.zeros((num_devices, count + 1, count + 1))
    for device, column in enumerate(np.ascontiguousarray(slot_s.T)):
        for start in range(count):
            for stop in range(start + 1, count + 1):
                sums[device, start, stop] = column[start:stop].sum()
    return sums


def _stretch_bytes(
    slot_bytes: Int[np.ndarray, "S"], shared_bytes: Int[np.ndarray, "S K"]
) -> Int[np.ndarray, "C C"]:
    """Bytes of all stretches, with the buffers that their slots share."""
    count = len(slot_bytes)
    bytes_ = np.zeros((count + 1, count + 1), dtype=np.int64)
    for start in range(count):
        shared = np.maximum.accumulate(shared_bytes[start:], axis=0).sum(axis=1)
        bytes_[start, start + 1 :] = np.cumsum(slot_bytes[start:]) + shared
    return bytes_


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


class LlamaRow(NamedTuple):
    """A plan of least seconds, or of the fewest bytes on the CPU."""

    seconds: float
    cpu_bytes: float
    at: Int[np.ndarray, "S"]  # device of each slot
    experts_at: Int[np.ndarray, "S"]  # of its experts


class RowLimits(NamedTuple):
    """Limits of a row."""

    room_bytes: Int[np.ndarray, "D"]  # for weights and caches
    stage_s: float = np.inf  # most of `prompt_s` on a GPU that has whole slots; inf: any plan


def llama_row(blocks: LlamaBlocks, limits: RowLimits, frugal: bool = False) -> LlamaRow | None:
    """The plan of least seconds, of equal ones that of the fewest bytes on the CPU; with `frugal`
    the other way round. None where no stretches fit the GPUs. O(D S^2) stretches."""
    cluster, cpu, count = blocks.cluster, blocks.cpu, len(blocks.layer_bytes)
    gpus = [d for d in range(cluster.num_devices) if not cluster.devices[d].is_cpu]
    order = gpus if cpu in gpus else [cpu, *gpus]
    parts = (1, 0) if frugal else (0, 1)  # where seconds and bytes are in a cost
    stage = np.full((cluster.num_devices, count + 1, count + 1, 2), np.inf)
    for device in order:
        seconds, cpu_bytes = _stretches(blocks, limits, frugal, device)
        seconds += float(blocks.segment_s[device])
        seconds[0] += blocks.move_s(cpu, device, blocks.flow_bytes)
        seconds[:, count] += blocks.move_s(device, cluster.host, blocks.logits_bytes)
        fits = np.isfinite(seconds)
        stage[device][fits] = np.stack((seconds[fits], cpu_bytes[fits]), axis=1)[:, parts]
    link = np.zeros((cluster.num_devices, cluster.num_devices, count + 1, 2))
    for before, device in itertools.combinations(order, 2):
        link[before, device, :, parts[0]] = blocks.move_s(before, device, blocks.flow_bytes)
    total, row = best_row(order, lambda d: stage[d], link)
    if not row:
        return None
    at = np.repeat([where for *_, where in row], [stop - start for start, stop, _ in row])
    experts_at = at.copy()
    for start, stop, where in row:
        if not cluster.devices[where].is_cpu and where != cpu:
            stretch = _beside_experts(blocks, limits, frugal, where, start, stop)
            experts_at[stretch[2] if stretch else []] = cpu
    return LlamaRow(total[parts[0]], total[parts[1]], at, experts_at)


def _stretches(
    blocks: LlamaBlocks, limits: RowLimits, frugal: bool, device: int
) -> tuple[Float[np.ndarray, "C C"], Int[np.ndarray, "C C"]]:
    """Seconds of each stretch on a device, infinite where it does not fit, and bytes that it puts
    on the CPU."""
    count, processor = len(blocks.layer_bytes), blocks.cluster.devices[device].is_cpu
    seconds, cpu_bytes = blocks.stretch_s[device].copy(), np.zeros_like(blocks.stretch_bytes)
    fits = np.isfinite(seconds) & (blocks.stretch_bytes <= limits.room_bytes[device])
    fits &= blocks.stretch_prompt_s[device] <= limits.stage_s
    if processor:  # has the first stretch, and no stage of a pipeline
        fits[1:] = False
        fits[0] &= limits.stage_s == np.inf
        cpu_bytes[0] = blocks.stretch_bytes[0]
    elif device != blocks.cpu:
        for start in range(count):
            with_experts = np.flatnonzero(blocks.expert_bytes[start:] > 0)[:1] + start
            for stop in range(int(with_experts[0]) + 1 if len(with_experts) else count, count + 1):
                stretch = _beside_experts(blocks, limits, frugal, device, start, stop)
                if stretch is None:
                    fits[start, stop:] = False
                    break  # nor does a longer one fit
                seconds[start, stop], cpu_bytes[start, stop], _ = stretch
                fits[start, stop] = True
    fits = np.logical_and.accumulate(fits | np.tri(count + 1, dtype=bool), axis=1)
    seconds[~fits | np.tri(count + 1, dtype=bool)] = np.inf
    return seconds, cpu_bytes


def _least_to_free(needed_bytes: int, items: dict[int, tuple[float, int]]) -> list[int]:
    """Items (seconds, bytes) that free at least `needed_bytes` for few seconds.

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


def _beside_experts(
    blocks: LlamaBlocks, limits: RowLimits, frugal: bool, device: int, start: int, stop: int
) -> tuple[float, int, list[int]] | None:
    """Seconds of slots on a GPU, bytes that they put on the CPU, and slots whose experts are there
    where the GPU is too small or slower; None if nothing fits."""
    pipes = limits.stage_s < np.inf
    if blocks.stretch_prompt_s[device, start, stop] > limits.stage_s:
        return None
    span, size = np.arange(start, stop), int(blocks.stretch_bytes[start, stop])
    owned = [int(s) for s in span if blocks.expert_bytes[s] > 0]
    here_s = {s: float(blocks.experts_s[s, device]) for s in owned}
    away_s = blocks.away_s[device]
    if any(here_s[s] == away_s[s] == np.inf for s in owned):
        return None
    extra_s = {s: away_s[s] - here_s[s] for s in owned}
    away = [s for s in owned if here_s[s] == np.inf or (extra_s[s] < 0 and not frugal)]
    size -= int(blocks.expert_bytes[away].sum())
    others = {s: (extra_s[s], int(blocks.expert_bytes[s])) for s in owned if s not in away}
    gone = _least_to_free(size - int(limits.room_bytes[device]), others)
    away += gone
    size -= int(blocks.expert_bytes[gone].sum())
    seconds = float(blocks.layer_s[span, device].sum())
    seconds += sum(away_s[s] if s in away else here_s[s] for s in owned)
    if size > limits.room_bytes[device] or not np.isfinite(seconds) or (pipes and away):
        return None
    return seconds, int(blocks.expert_bytes[away].sum()), away
