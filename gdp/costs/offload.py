"""Weights that cross a link to the accelerator that computes with them.

**accelerate** lets weights rest in host memory or on disk; they cross the link at every use. An
offload device stands for that in a cluster. An op on it takes the time of its weights' way to
the main device and of its computation there; its tensors are the main device's, so that nothing
has to be moved between the two, and its caches lie there (`Device.runs_on`). The main device
keeps room for weights that stream through it. What this leaves out: the main device and its
offload device could overlap here, while accelerate copies, then computes. Placements that keep
modules whole are chains, in which nothing overlaps.

**llama.cpp** sends weights on the processor to a GPU for the tokens of a prompt.
A product whose weights lie there is computed on the first GPU of its machine where at
least `OFFLOAD_TOKENS` tokens are computed at once: the weights go over the link for each
micro-batch, of experts those that the tokens chose (`--op-offload`, on by default). So are the ops
between such products, with flash attention and without: ggml's scheduler assigns them by no weight,
or offloads them as it does products, and expands the GPU over them
(`ggml_backend_sched_split_graph`); tensors stay there in between. Keys and values lie in the
processor's memory, so that each micro-batch copies those so far to the GPU, and its own ones back.

`--no-op-offload` computes all that on the processor, which is faster where the link is slow: the
flag is for all products of a model, so that the quicker of the two is told for all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.cluster.machines import machine_of, machines
from gdp.cluster.types import UNLIMITED_BYTES, Cluster, Device
from gdp.costs.base import DerivedCosts, roofline
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import DECODE
from gdp.placement.device_maps import OFFLOAD_NAMES

KINDS = {"cpu": "offload-cpu", "disk": "offload-disk"}
"""Kind of the device that stands for each place of offloaded weights."""
DISK_BYTES_PER_S = 2e9
"""Bandwidth of an undescribed disk: a solid-state disk on four lanes of PCIe 3.0, with the copy to
host memory.
"""
DISK_LATENCY_S = 100e-6
HOST_POOL = "host memory"
COPY_BYTES_PER_S = 15e9
"""Of weights that leave memory which is not pinned, where the processor's own rate is not known: a
core copies them into pinned memory first. By hand from llama-bench rows, the slopes of prompts over
layers whose experts llama.cpp sent over PCIe 4: 11.5 and 16.5 GB/s on one desktop, 13.7 to 16.1 on
another. On a Xeon of which one core reads 15.1 GB/s, weights of accelerate came at 7, half of that,
where pinned memory made 54 (`docs/benchmarks/accelerators.md`).
"""
MAX_SHARE = 0.5  # of a memory that is kept for streamed weights, at most
SENT_BYTES = "sent_weight_bytes"
"""Attribute of an op that a GPU computes if it lies on a processor: bytes of weights and caches
that go over the link for it in one pass."""
LENT = "rpc-core"
"""Begins the kinds of cores that stand for GPUs over RPC, to which no weights are sent so."""
_NO_GPUS = (LENT, "npu")
"""Begin the kinds of devices to which no weights are sent so: op offload is one of GPU backends."""


def offload_targets(device_names: Sequence[str]) -> list[str]:
    """The places of `KINDS` that some devices stand for, by their names."""
    return [t for t in KINDS if OFFLOAD_NAMES[t] in device_names]


def _offload_device(
    main: Device, target: str, devices: Sequence[Device], streamed_bytes: int
) -> Device:
    """The device that stands for weights at rest; in host memory it shares the host's, less what is
    on its way (and so has room for the model's inputs and outputs)."""
    # accelerate computes an offloaded module on the main device (`execution_device` in its
    # `dispatch_model`), so its keys and values are made there and stay; weights alone rest.
    blank = replace(
        main, name=OFFLOAD_NAMES[target], kind=KINDS[target], reserve_bytes=0, memory_pool="",
        runs_on=main.name,
    )  # fmt: skip
    memories = {d.memory_pool or d.name: d for d in devices if d.is_cpu}
    host_bytes = sum(d.memory_bytes for d in memories.values())
    if target != "cpu" or not 0 < host_bytes < UNLIMITED_BYTES:
        return replace(blank, memory_bytes=UNLIMITED_BYTES)
    shared = next(iter(memories)) if len(memories) == 1 else ""
    return replace(
        blank, memory_bytes=host_bytes - min(streamed_bytes, int(MAX_SHARE * host_bytes)),
        reserve_bytes=sum(d.reserve_bytes for d in memories.values()), memory_pool=shared,
    )  # fmt: skip


def main_device(cluster: Cluster) -> int | None:
    """The device that computes what is offloaded: the first accelerator, of the host's machine
    where that has one."""
    accelerators = np.flatnonzero(~cluster.is_cpu & ~cluster.streams).tolist()
    at = machines(cluster)
    return next(
        (i for i in accelerators if at[i] == at[cluster.host]), next(iter(accelerators), None)
    )


def resident(cluster: Cluster) -> Cluster:
    """The cluster where CPUs hold inputs and outputs and compute nothing, as under accelerate."""
    if main_device(cluster) is None:
        return cluster
    return cluster.idling(cluster.is_cpu)


def with_offload(cluster: Cluster, targets: Sequence[str], reserved_bytes: int = 0) -> Cluster:
    """The resident cluster with an offload device per target ("cpu", "disk"), the main device's
    memory less what streams through it. Unchanged where there is no accelerator."""
    main = main_device(cluster)
    if main is None:
        return cluster
    base = resident(cluster)
    devices = list(base.devices)
    streamed = min(reserved_bytes, int(MAX_SHARE * devices[main].memory_bytes))
    devices[main] = replace(
        devices[main], memory_bytes=devices[main].memory_bytes - streamed,
        reserve_bytes=devices[main].reserve_bytes + streamed * (devices[main].reserve_bytes > 0),
    )  # fmt: skip
    hosts = [i for i, device in enumerate(devices) if device.is_cpu]
    if len({devices[i].memory_pool or devices[i].name for i in hosts}) == 1:
        for i in hosts:
            devices[i] = replace(devices[i], memory_pool=devices[i].memory_pool or HOST_POOL)
    devices += [_offload_device(base.devices[main], t, devices, streamed) for t in targets]
    # The links of the main device are those of the devices that stand for its weights, too.
    rows = np.array([*range(cluster.num_devices), *[main] * len(targets)])
    widened = _of_devices(cluster, devices, rows)
    channel = widened.channel.copy()
    aliases = np.nonzero((rows[:, None] == rows) & ~np.eye(len(rows), dtype=bool))
    channel[aliases] = cluster.num_channels + np.arange(len(aliases[0]))
    return replace(widened, channel=channel)


@dataclass(frozen=True)
class Streamed(DerivedCosts):
    """Costs on a cluster of `with_offload`: those of another model plus the transfer of weights."""

    @property
    def __name__(self) -> str:
        return f"{getattr(self.base, '__name__', type(self.base).__name__)}, weights streamed"

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        plain, streams = np.flatnonzero(~cluster.streams), np.flatnonzero(cluster.streams)
        devices = [cluster.devices[d] for d in plain]
        seconds = np.full((graph.num_ops, cluster.num_devices), np.inf)
        seconds[:, plain] = self.base(graph, _of_devices(cluster, devices, plain))
        for d, main in zip(streams.tolist(), cluster.runs_on[streams].tolist(), strict=True):
            way_s = weight_way_s(graph, cluster, main, cluster.devices[d].kind)
            seconds[:, d] = np.where(graph.is_io, np.inf, seconds[:, main] + way_s)
        return seconds


def unpinned_bytes_per_s(cluster: Cluster, host: int, device: int) -> float:
    """Bytes per second of weights from the memory of a processor to another device, where a runtime
    keeps them in memory that is not pinned, as accelerate and llama.cpp do."""
    copied = cluster.devices[host].copy_bytes_per_s or COPY_BYTES_PER_S
    return min(float(cluster.link_bytes_per_s[host, device]), copied)


def weight_way_s(graph: OpGraph, cluster: Cluster, main: int, kind: str) -> Float[np.ndarray, "N"]:
    """Seconds in which the weights of each op reach the main device. Caches are there already."""
    hosts = [i for i, device in enumerate(cluster.devices) if device.is_cpu]
    host = hosts[0] if hosts else cluster.host
    rate = unpinned_bytes_per_s(cluster, host, main)
    latency_s = cluster.link_latency_s[host, main]
    if kind == KINDS["disk"]:
        # From disk to host memory, then over the link.
        rate = 1.0 / (1.0 / rate + 1.0 / DISK_BYTES_PER_S)
        latency_s += DISK_LATENCY_S
    sent_bytes = read_bytes(graph)
    return np.where(sent_bytes > 0, latency_s + sent_bytes / rate, 0.0)


def read_bytes(graph: OpGraph) -> Int[np.ndarray, "N"]:
    """Bytes of weights, caches aside, that each op reads in one of its runs.

    In a generation the ops of the prompt hold the weights of a module, as they count once; the step
    reads them again for every token. Of the ops of a step that share a device with them, the one
    with most traffic stands for all.
    """
    held = np.where(graph.rests, 0, graph.weight_bytes - graph.cache_bytes)
    step = graph.phase == DECODE
    if not step.any():
        return held
    module = np.unique(graph.colocate, return_inverse=True)[1]
    mine = np.flatnonzero(~step & (held > 0))
    mine = graph.weight_holders(mine, module)
    of_module = np.zeros(int(module.max()) + 1, dtype=np.int64)
    np.add.at(of_module, module[mine], held[mine])
    steps = np.flatnonzero(step & ~graph.is_io)
    steps = steps[np.lexsort((-graph.memory_traffic_bytes[steps], module[steps]))]
    modules, at = np.unique(module[steps], return_index=True)
    read = held.copy()
    read[steps[at]] += of_module[modules]
    return read


def _of_devices(cluster: Cluster, devices: Sequence[Device], rows: Int[np.ndarray, "X"]) -> Cluster:
    """A cluster of other devices, with the links of the devices at some rows."""
    index = np.ix_(rows, rows)
    return replace(
        cluster, devices=tuple(devices), link_bytes_per_s=cluster.link_bytes_per_s[index],
        link_latency_s=cluster.link_latency_s[index], channel=cluster.channel[index],
    )  # fmt: skip


@dataclass(frozen=True)
class OpOffloadCosts(DerivedCosts):
    """Costs of llama.cpp, whose processor sends weights to a GPU for a prompt where that is
    faster."""

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        seconds = self.base(graph, cluster)
        return _offloaded(graph, cluster, seconds) if offloads(graph, cluster) else seconds


def offloads(graph: OpGraph, cluster: Cluster) -> bool:
    """True where weights of a prompt are computed sooner on a GPU that they are sent to, by the
    roofline: of experts where there are any, as these are the weights that lie on a processor."""
    sends = is_sent(graph)
    experts = _of_experts(graph)
    moved = sends & experts if (sends & experts).any() else sends
    plain_s = roofline(graph, cluster)
    sent_s = _offloaded(graph, cluster, plain_s)
    here = [d for d, device in enumerate(cluster.devices) if device.is_cpu]
    return bool(sent_s[moved][:, here].sum() < plain_s[moved][:, here].sum())


def sends_weights(cluster: Cluster) -> bool:
    """True where a processor has a GPU to send weights to."""
    return any(
        _gpu(cluster, d) is not None for d, device in enumerate(cluster.devices) if device.is_cpu
    )


def sent_bytes(graph: OpGraph) -> Float[np.ndarray, "N"]:
    """Weights of each op that llama.cpp would send from a processor to a GPU in one pass."""
    return np.array([float(d.attributes.get(SENT_BYTES, 0)) for d in graph.detail])  # pyright: ignore[reportArgumentType]


def is_sent(graph: OpGraph) -> Bool[np.ndarray, "N"]:
    """True for ops that a GPU computes where they lie on a processor."""
    return np.array([SENT_BYTES in d.attributes for d in graph.detail], dtype=bool)


def _of_experts(graph: OpGraph) -> Bool[np.ndarray, "N"]:
    return np.array([scope.endswith(".experts") for scope in graph.scope], dtype=bool)


def _gpu(cluster: Cluster, cpu: int) -> int | None:
    """The first GPU that a processor sends weights to."""
    return next(
        (
            d
            for d, device in enumerate(cluster.devices)
            if not device.is_cpu
            and not device.kind.startswith(_NO_GPUS)
            and machine_of(cluster, d) == cpu
        ),
        None,
    )


def _offloaded(
    graph: OpGraph, cluster: Cluster, seconds: Float[np.ndarray, "N D"]
) -> Float[np.ndarray, "N D"]:
    """Seconds of ops where processors send the weights of long batches away: the weights, the GPU's
    seconds and launch, and tensors that are made on the processor."""
    sent, goes, result = sent_bytes(graph), is_sent(graph), seconds.copy()
    made_here = ~goes[graph.producer] & ~_of_experts(graph)[graph.producer]
    tensors = np.bincount(
        graph.use_op, (graph.tensor_bytes * made_here)[graph.use_tensor], graph.num_ops
    )
    for cpu, device in enumerate(cluster.devices):
        gpu = _gpu(cluster, cpu) if device.is_cpu else None
        if gpu is not None:
            once_s = 2 * cluster.link_latency_s[cpu, gpu] + cluster.devices[gpu].dispatch_s
            each_s = np.where(sent > 0, once_s * graph.chunks, 0.0)
            # Weights lie where the file was read to; tensors of the scheduler in pinned memory.
            way_s = sent / unpinned_bytes_per_s(cluster, cpu, gpu)
            way_s += tensors / cluster.link_bytes_per_s[cpu, gpu]
            away_s = seconds[:, gpu] + way_s + each_s
            sends = goes & np.isfinite(seconds[:, cpu])
            result[:, cpu] = np.where(sends, away_s, seconds[:, cpu])
    return result
