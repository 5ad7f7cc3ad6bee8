"""The cost model of accelerators by the kernel network."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.cluster.presets import presets
from gdp.cluster.types import Cluster, Device
from gdp.costs.base import CostModel, can_run, roofline
from gdp.costs.learned import LearnedCosts
from gdp.costs.measured.collectives import with_measured_sends
from gdp.costs.measured.graph import GraphKernels, graph_kernels
from gdp.costs.measured.host import ENGINE, HOSTS, Host, host_s, is_blackwell
from gdp.costs.measured.kernels import (
    ARITHMETIC,
    KINDS,
    NUMBERS,
    DeviceDescriptor,
    Kernels,
    descriptor_of,
    floor_s,
)
from gdp.costs.measured.network import VECTOR, KernelNetwork, measured_families
from gdp.graph.fuse import Fused, fuse
from gdp.graph.groups import first_members
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import DECODE, PREFILL

_EXPERTS, _PRODUCT = KINDS.index("experts"), KINDS.index("product")
_ELEMENTWISE = KINDS.index("elementwise")
_ATTENTION = KINDS.index("prompt attention"), KINDS.index("token attention")
LIBRARY_S, ELEMENTWISE_S = 50e-6, 8e-6
"""Host seconds until eager PyTorch has launched a kernel of a library (products, convolutions,
attention, normalisation), with the Python of its module, and any other one. Chosen by hand for five
models of transformers at small batches on a Xeon with an H200, where float32 and bfloat16 took the
same; a compiler ran beside them, so that 0.74 of their seconds count, as of a model that ran again
without it (`benchmarks/measured/README.md`, 2026-11-27).
"""

EXPERT_LAUNCHES = 2, 4
"""Kernels that an engine launches for a block of experts: two products; and two that sort tokens by
expert, the gate's activation and the sum. Before each product whose weights have scales by blocks
one more packs what it reads. `fused_experts_impl` and the products by blocks of vLLM and SGLang.
Experts in 4 bits are one call behind one that packs (`trtllm_fp4_block_scale_moe` of FlashInfer). A
pass of DeepSeek-V3 over one token that launches everything takes SGLang 82.6 ms, replayed from a
graph 23.1 (sgl-project/sglang#12160); these numbers make 73.
"""

PROMPT_PACE = 1.2
"""Seconds of an engine's pass over prompts to those of its kernels, which were measured in bursts,
at clocks that a GPU under its power limit does not keep; and small ones between them are merged in
a graph. 1.0 (Llama 3.1 70B, H200) to 1.45 (7B, A100); chosen by `benchmarks.measured_world pace`.
"""


@dataclass(frozen=True, eq=False)
class MeasuredCosts:
    """Seconds by the network on accelerators whose silicon is known, else by another model.

    Each kernel of the network contains its launch. Where a runtime launches ops one by one, the
    time of an op is that of its kernel or of its launch, whichever is longer, as launches run
    ahead; `dispatch_s` is subtracted here, and the simulator adds it. An engine that serves replays
    recorded graphs of kernels: there devices have no dispatch beside them, and the last op of a
    step takes the host's part of it, too (`gdp.costs.measured.host`). An eager runtime fuses
    nothing: what the graph merges is a kernel for each op, whose results pass through memory; and
    its host is slow: a launch takes `LIBRARY_S` or `ELEMENTWISE_S`, where the device's own is less.
    """

    network: KernelNetwork
    base: CostModel = roofline
    served: bool = False
    eager: bool = False
    host: Host = HOSTS[ENGINE]  # of an engine that serves

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        seconds = self.base(graph, cluster)
        chosen = [d for d, device in enumerate(cluster.devices) if self.predicts(device)]
        if self.eager:
            launches, found = _launches(graph, fuse(graph)), graph_kernels(graph, served=False)
            own = self._seconds(graph, cluster, chosen, found, launches)
            if not self._base_reads_unfused:
                seconds += _more_dispatches_s(launches, cluster)
                seconds += self._on_processors_s(launches_s(found), cluster, launches)
        elif self.reads_unfused:
            # All of a fused kernel's seconds are those of its first op.
            fused = fuse(graph)
            own = np.zeros((graph.num_ops, len(chosen)))
            found = graph_kernels(fused.graph, served=self.served)
            own[first_members(fused.group_of)] = self._seconds(fused.graph, cluster, chosen, found)
            if self.served:
                own += host_s(graph, self.host)[:, None]
        else:
            own = self._seconds(graph, cluster, chosen, graph_kernels(graph, served=False))
        seconds[:, chosen] = own
        seconds[graph.is_io] = 0.0
        return np.where(can_run(graph, cluster), seconds, np.inf)

    @property
    def __name__(self) -> str:
        return "kernel network"

    def predicts(self, device: Device) -> bool:
        """True for accelerators that the network covers, or has kernels of, and no calibration is
        of."""
        known = covers(device) or (device.kind in self.network.vectors and not device.is_cpu)
        return known and not self._calibrated(device)

    def _calibrated(self, device: Device) -> bool:
        return isinstance(self.base, LearnedCosts) and self.base.of(device) is not None

    @property
    def reads_unfused(self) -> bool:
        """True where this model or the other one needs the graph before fusion."""
        return self.eager or self.served or self._base_reads_unfused

    @property
    def _base_reads_unfused(self) -> bool:
        return bool(getattr(self.base, "reads_unfused", False))

    def _seconds(
        self,
        graph: OpGraph,
        cluster: Cluster,
        chosen: list[int],
        found: GraphKernels,
        launches: Float[np.ndarray, "N"] | None = None,
    ) -> Float[np.ndarray, "N C"]:
        """Seconds of kernels on the chosen devices, beyond the share that each has of the one
        dispatch of its group, which the simulator adds."""
        plain = roofline(graph, cluster)
        launches = np.ones(graph.num_ops) if launches is None else launches
        launch_s = launches_s(found)
        pace = np.where(self.served & (graph.phase == PREFILL), PROMPT_PACE, 1.0)
        seconds = np.empty((graph.num_ops, len(chosen)))
        alike: dict[tuple[str, DeviceDescriptor], Float[np.ndarray, "N"]] = {}
        for i, d in enumerate(chosen):
            device = cluster.devices[d]
            key = device.kind, descriptor_of(device)
            if key not in alike:
                alike[key] = self.kernel_seconds(found, device)
            learned = found.known & ~slower_types(graph, device)
            own = np.where(learned, alike[key] * pace, plain[:, d])
            if not self.served and cluster.launches_ops[d]:
                launched = np.maximum(own, device.dispatch_s)
                if self.eager:
                    launched = np.maximum(launched, launch_s)
                own = np.where(
                    launches > 0, launched - device.dispatch_s / np.maximum(launches, 1), 0.0
                )
            seconds[:, i] = own
        return seconds

    def _on_processors_s(
        self,
        launch_s: Float[np.ndarray, "N"],
        cluster: Cluster,
        launches: Float[np.ndarray, "N"],
    ) -> Float[np.ndarray, "N D"]:
        """Host seconds, beyond their dispatch, of ops on processors without a calibration: PyTorch
        calls an op there as late as elsewhere, and waits for it."""
        known = np.array([self._calibrated(device) for device in cluster.devices])
        return np.where(
            (launches > 0)[:, None] & cluster.is_cpu & cluster.launches_ops & ~known,
            np.maximum(launch_s[:, None] - cluster.dispatch_s, 0.0),
            0.0,
        )

    def launch_floor_s(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"] | None:
        """Seconds, of those that this model tells, in which an eager host launches each op: what
        it takes on however quick a device. None where recorded graphs or fusion leave none."""
        if not self.eager:
            return None
        launches = _launches(graph, fuse(graph))
        launch_s = launches_s(graph_kernels(graph, served=False))
        floor_s = np.zeros((graph.num_ops, cluster.num_devices))
        if not self._base_reads_unfused:
            floor_s = _more_dispatches_s(launches, cluster)
            floor_s += self._on_processors_s(launch_s, cluster, launches)
        for d, device in enumerate(cluster.devices):
            if self.predicts(device) and cluster.launches_ops[d]:
                at_least = np.maximum(launch_s, device.dispatch_s)
                floor_s[:, d] = at_least - device.dispatch_s / np.maximum(launches, 1)
        floor_s[graph.is_io | (launches == 0)] = 0.0
        return floor_s

    def kernel_seconds(self, found: GraphKernels, device: Device) -> Float[np.ndarray, "N"]:
        """Seconds of the kernels of a graph on a device; zero for ops without a known one."""
        seconds, known = np.zeros(len(found.kernels)), np.flatnonzero(found.known)
        # Layers of a model are identical, so few kernels differ.
        first, which = np.unique(found.row[known], return_index=True, return_inverse=True)[1:]
        own, passes = found.kernels.take(known[first]), found.passes[known[first]]
        seconds[known] = self._in_passes(own, passes, device)[which]
        inside = found.block >= 0
        if not inside.any():
            return seconds
        parts = inside & np.isin(found.kernels.kind, [_EXPERTS, _PRODUCT]) & found.known
        whole, share = _whole_blocks(found.kernels, found.block, parts)
        seconds[inside], passes = 0.0, np.ones(len(whole))
        np.maximum.at(passes, found.block[parts], found.passes[parts])
        first, which = whole.distinct()
        of_block = self._in_passes(whole.take(first), passes[first], device)[which]
        exceeds = np.bincount(found.block[parts], found.exceeds[parts], len(whole)) > 0
        of_block *= self.host.experts.factors(whole, exceeds, is_blackwell(device))
        seconds[parts] = of_block[found.block[parts]] * share
        return seconds

    def _in_passes(
        self, kernels: Kernels, passes: Float[np.ndarray, "K"], device: Device
    ) -> Float[np.ndarray, "K"]:
        """Seconds of kernels whose rows, or sequences that attend, are spread over passes."""
        attends = np.isin(kernels.kind, _ATTENTION)
        apart = np.where(attends, passes, 1.0)  # sequences, each with its cache
        one = replace(
            kernels, flop=kernels.flop / passes, moved_bytes=kernels.moved_bytes / passes,
            b=kernels.b / apart, m=kernels.m * apart / passes,
            held_bytes=kernels.held_bytes / apart,
        )  # fmt: skip
        return passes * self._predicted(one, device)

    def _predicted(self, kernels: Kernels, device: Device) -> Float[np.ndarray, "K"]:
        """Seconds of kernels; experts in 8 bits with a scale a channel take no longer than with one
        for each block, which are more to read and to apply.

        The tables of experts by channel on H100 and H200 are FlashInfer's CUTLASS kernels without
        tuning (AIConfigurator 0.12, vLLM 0.24): 6 to 11 times the bytes over the bandwidth. The
        kernels of vLLM 0.19 and TensorRT-LLM take 1.4 to 1.7 times, and so do blocks everywhere.
        """
        own, asked = _multiplied_on(kernels, device)
        seconds = self._asked(own, asked, device)
        eights = (own.arithmetic == ARITHMETIC.index("float8")) & (own.block_scaled == 0)
        eights &= own.kind == _EXPERTS
        if eights.any():
            blocks = replace(asked.take(eights), block_scaled=np.ones(int(eights.sum())))
            by_block = self._asked(own.take(eights), blocks, device)
            seconds[eights] = np.minimum(seconds[eights], by_block)
        return seconds

    def _asked(self, kernels: Kernels, dense: Kernels, device: Device) -> Float[np.ndarray, "K"]:
        """Seconds of kernels that reach the share of their roofline that others reach of theirs."""
        vector = self.network.vectors.get(device.kind, np.zeros(VECTOR))
        zeros, silicon = np.zeros(len(kernels), dtype=np.int64), descriptor_of(device)
        logs = self.network.log_seconds(dense, [silicon], vector[None], zeros)
        rates = np.full(len(kernels), silicon.bytes_per_s)
        own_s = floor_s(kernels, _peaks(kernels, device), rates)
        dense_s = floor_s(dense, np.array(silicon.flop_per_s)[dense.arithmetic], rates)
        logs += np.log(np.maximum(own_s, 1e-12) / np.maximum(dense_s, 1e-12))
        # Rounded, as processors differ in the last bits of a product of matrices.
        return np.exp(np.round(logs, 9))

    def with_runtime_overheads(self, cluster: Cluster) -> Cluster:
        """The cluster whose links are as fast as measured, and whose devices have no dispatch
        beside the kernels of an engine."""
        base: Any = self.base
        cluster = with_measured_sends(cluster)
        if hasattr(base, "with_runtime_overheads"):
            cluster = base.with_runtime_overheads(cluster)
        if not self.served:
            return cluster
        devices = (replace(x, dispatch_s=0.0) if self.predicts(x) else x for x in cluster.devices)
        return replace(cluster, devices=tuple(devices))


def _multiplied_on(kernels: Kernels, device: Device) -> tuple[Kernels, Kernels]:
    """(kernels in the types that a device multiplies, kernels as inputs of the network).

    Weights whose scheme never casts activations are unpacked to 16 bits everywhere (Marlin; GPTQ,
    AWQ, bitsandbytes in 4 bits), others where a device multiplies no such numbers: floats of 8 bits
    on an A100, integers of 8 bits on a V100, 4 bits on all but Blackwell. Where nobody said which 8
    bits they are, those with scales by blocks are floats, and others what the device has. The
    network is asked about dense 16-bit weights in place of packed
    ones of 4 bits in products: a kernel that unpacks in registers reaches the same share of its own
    roofline (Marlin, Frantar et al. 2024, arXiv 2408.11743; not measured by gdp).
    """
    eights, fours = (kernels.arithmetic == ARITHMETIC.index(n) for n in ("float8", "float4"))
    alone, _, integers = (kernels.numbers == NUMBERS.index(name) for name in NUMBERS[1:])
    lacks = {name: name not in device.flop_per_s for name in ("float8", "float4", "int8")}
    is_four = fours & (alone | lacks["float4"])
    cannot = _are_floats(kernels) & lacks["float8"] | integers & lacks["int8"]
    packed = is_four | eights & (alone | cannot)
    half = np.where(packed, ARITHMETIC.index("float16"), kernels.arithmetic)
    own = replace(kernels, arithmetic=half)
    dense = is_four & (kernels.kind == _PRODUCT)
    return own, replace(
        own,
        stored_bits=np.where(dense, 16.0, own.stored_bits),
        block_scaled=np.where(dense, 0.0, own.block_scaled),
        held_bytes=np.where(dense, 2.0 * own.b * own.n * own.k, own.held_bytes),
    )


def _are_floats(kernels: Kernels) -> Bool[np.ndarray, "K"]:
    """Kernels of narrow floats, as their scheme or scales by blocks tell."""
    told = kernels.numbers != NUMBERS.index("not told")
    return np.where(told, kernels.numbers == NUMBERS.index("floats"), kernels.block_scaled > 0)


def _peaks(kernels: Kernels, device: Device) -> Float[np.ndarray, "K"]:
    """FLOP/s of a device for each kernel: integers and floats of 8 bits have peaks of their own,
    which differ by half on GeForce cards and by thirty times on a B300."""
    peaks = np.array(descriptor_of(device).flop_per_s)[kernels.arithmetic]
    eights = kernels.arithmetic == ARITHMETIC.index("float8")
    integers = kernels.numbers == NUMBERS.index("integers")
    for name, chosen in (("int8", integers), ("float8", _are_floats(kernels))):
        peaks = np.where(eights & chosen, device.flop_per_s.get(name, 0.0) or peaks, peaks)
    return peaks


def launches_s(found: GraphKernels) -> Float[np.ndarray, "N"]:
    """Host seconds of eager PyTorch for each op."""
    library = found.known & (found.kernels.kind != _ELEMENTWISE)
    return np.where(library, LIBRARY_S, ELEMENTWISE_S)


def prompt_launch_s(graph: OpGraph) -> float:
    """Host seconds until an engine that serves has launched the kernels of one pass over prompts,
    for which no recorded graph is replayed; ops that it computes by one kernel count once."""
    fused = fuse(graph).graph
    found = graph_kernels(fused, served=True)
    works = ~fused.is_io & ((fused.flop > 0) | (fused.memory_traffic_bytes > 0))
    works &= fused.phase != DECODE
    block = np.where(found.block < 0, np.arange(fused.num_ops) + fused.num_ops, found.block)
    first = np.zeros(fused.num_ops, dtype=bool)
    first[np.unique(block, return_index=True)[1]] = True
    return float(_engine_launch_s(found)[works & first].sum())


def _engine_launch_s(found: GraphKernels) -> Float[np.ndarray, "N"]:
    """Host seconds of an engine for each op, of a block of experts for all of it."""
    kernels, launch_s = found.kernels, launches_s(found)
    packs = found.known & (kernels.block_scaled > 0)
    is_experts = found.known & (kernels.kind == _EXPERTS)
    launch_s += np.where(packs & (kernels.kind == _PRODUCT), LIBRARY_S, 0.0)
    blocks = np.unique(found.block[is_experts & (found.block >= 0)])
    packed = np.isin(found.block, found.block[is_experts & packs])
    of_block_s = EXPERT_LAUNCHES[0] * LIBRARY_S + EXPERT_LAUNCHES[1] * ELEMENTWISE_S
    of_block_s += np.where(packed, EXPERT_LAUNCHES[0] * LIBRARY_S, 0.0)
    is_four = is_experts & (kernels.arithmetic == ARITHMETIC.index("float4"))
    of_block_s = np.where(np.isin(found.block, found.block[is_four]), 2 * LIBRARY_S, of_block_s)
    return np.where(np.isin(found.block, blocks), of_block_s, launch_s)


def _launches(graph: OpGraph, fused: Fused) -> Float[np.ndarray, "N"]:
    """Ops with work among those that each op is merged with; none for an op without work."""
    works = (graph.flop > 0) | (graph.memory_traffic_bytes > 0)
    return np.where(works, np.bincount(fused.group_of, works)[fused.group_of], 0.0)


def _more_dispatches_s(
    launches: Float[np.ndarray, "N"], cluster: Cluster
) -> Float[np.ndarray, "N D"]:
    """Seconds of the dispatch of every op with work, less the one of its group, which the simulator
    adds."""
    share = np.where(launches > 0, 1.0 - 1.0 / np.maximum(launches, 1), 0.0)
    return share[:, None] * cluster.op_dispatch_s


def slower_types(graph: OpGraph, device: Device) -> Bool[np.ndarray, "N"]:
    """Ops in a type that the device computes more slowly than the one of that width which was
    learned: float64 everywhere, bfloat16 on a V100. Their roofline is nearer."""
    single, half, *_ = descriptor_of(device).flop_per_s
    usual = {"bfloat16": half, "float16": half}
    kinds, which = graph.kinds
    dtypes = [detail.dtype for _, detail in kinds]
    slower = [device.speed(dtype) < usual.get(dtype, single) for dtype in dtypes]
    return np.array(slower, dtype=bool)[which]


def _whole_blocks(
    kernels: Kernels, block: Int[np.ndarray, "N"], parts: np.ndarray
) -> tuple[Kernels, Float[np.ndarray, "P"]]:
    """(one kernel for each block, share of it that each of its products has, by FLOPs).

    The last product of a block of experts leads back to the hidden width from the inner one.
    Products of one input are one of all their columns, which reads it once.
    """
    at = np.flatnonzero(parts)
    which, count = block[at], int(block[at].max()) + 1
    last = np.zeros(count, dtype=np.int64)
    np.maximum.at(last, which, at)
    whole = kernels.take(last)
    flop, held, moved, columns = (
        np.bincount(which, getattr(kernels, name)[at], count)
        for name in ("flop", "held_bytes", "moved_bytes", "n")
    )
    experts = whole.kind == _EXPERTS
    again = (np.bincount(which, minlength=count) - 1) * 2.0 * whole.m * whole.k
    return replace(
        whole, n=np.where(experts, whole.k, columns), k=np.where(experts, whole.n, whole.k),
        flop=flop, held_bytes=held,
        moved_bytes=np.where(experts, moved, np.maximum(moved - again, 0.0)),
    ), kernels.flop[at] / flop[which]  # fmt: skip


@functools.lru_cache(maxsize=256)
def _known(kind: str) -> bool:
    preset = presets().get(kind)
    return preset is not None and preset.units > 0 and preset.family in measured_families()


def covers(device: Device) -> bool:
    """True for accelerators whose silicon gdp knows, of families that were measured."""
    return not device.is_cpu and _known(device.kind)
