"""The public JSON benchmark of Tarnawski et al. 2020 (arXiv 2006.16423): its instances.

An instance holds a graph, devices and times together, so it comes back as a `Problem`. Its
communication model has no links: node u costs `c_u` each time that its output moves between an
accelerator and host memory, whoever reads it. That is `Problem.sent_s`.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from jaxtyping import Float

from gdp.base.errors import ModelError
from gdp.base.files.reading import Kind, read_json
from gdp.base.units import MAX_SIZE_BYTES
from gdp.cluster.types import MAX_DEVICES, UNLIMITED_BYTES, Cluster, Device, Link, make_cluster
from gdp.graph.op_graph import OpGraph, make_graph
from gdp.problem.problem import Problem, make_problem
from gdp.sim.objectives import find_objective

_log = logging.getLogger(__name__)

_KIND = Kind("dnn-partitioning instance", ModelError)
_Id = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
# 2**62 bytes at 2 GiB/s, in milliseconds.
_Cost = Annotated[float, msgspec.Meta(ge=0, le=2e12)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=float(MAX_SIZE_BYTES))]

ACCELERATOR, CPU = "accelerator", "cpu"  # the two kinds of device
_BYTES_PER_S = 2.0**31  # accelerator to host memory: the files' costs are bytes at 2 GiB/s


class _Node(msgspec.Struct):
    """Times are in milliseconds, sizes in bytes. Keys that are not listed are not needed."""

    id: _Id
    cpuLatency: _Amount
    fpgaLatency: _Amount
    supportedOnFpga: bool | int = True
    size: _Amount = 0.0
    isBackwardNode: bool | int = False
    colorClass: _Id | None = None
    name: str = ""


class _Edge(msgspec.Struct):
    sourceId: _Id
    destId: _Id
    cost: _Cost  # ms, a property of the source


class _Instance(msgspec.Struct):
    maxFPGAs: Annotated[float, msgspec.Meta(ge=0, le=MAX_DEVICES)]
    maxCPUs: Annotated[float, msgspec.Meta(ge=0, le=MAX_DEVICES)]
    maxSizePerFPGA: Annotated[float, msgspec.Meta(ge=0, le=1e300)]
    nodes: list[_Node]
    edges: list[_Edge]


def load_dnn_partitioning(path: str | os.PathLike[str], objective: str = "max_load") -> Problem:
    """The `Problem` of an instance file; op names are the node ids.

    Devices are the accelerators, then the CPUs. The latency objective knows CPUs without number,
    on which nodes never wait for each other: one device of kind "cpu" stands for all of them.

    Memory is compared in whole bytes, as every published file has them. Where sizes have
    fractions they are rounded up and the limit down, so that what fits here fits in truth; a
    warning says so. `tensor_bytes` and the cluster's links are such that a transfer takes `c_u`
    to or from a CPU, and twice that between accelerators.
    """
    if find_objective(objective).general:
        raise ValueError(f"objective must be max_load or block_latency, got {objective!r}")
    instance = _read(path)
    if violation := _violation(instance):
        raise ModelError(f"{path}: {violation}")
    num_cpus = int(instance.maxCPUs) if find_objective(objective).pipelined else 1
    cluster = _cluster(Path(path).stem, instance, num_cpus)
    try:
        graph, sent_s = _graph(Path(path).stem, instance)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    node = {str(entry.id): entry for entry in instance.nodes}
    times_ms = np.array(
        [
            [entry.fpgaLatency if entry.supportedOnFpga else np.inf, entry.cpuLatency]
            for entry in (node[name] for name in graph.op_names)
        ]
    )
    columns = [0] * int(instance.maxFPGAs) + [1] * num_cpus
    return make_problem(graph, cluster, times_ms[:, columns] / 1e3, objective, sent_s=sent_s)


def _read(path: str | os.PathLike[str]) -> _Instance:
    return read_json(path, _KIND, _Instance)


def _violation(instance: _Instance) -> str:
    """The first thing that is wrong with an instance, or an empty string."""
    for key in ("maxFPGAs", "maxCPUs"):
        value = getattr(instance, key)
        if not value.is_integer():
            return f"{key} must be a whole number, got {value}"
    if instance.maxFPGAs + instance.maxCPUs == 0:
        return "it has no devices: maxFPGAs and maxCPUs are 0"
    if instance.maxFPGAs and not instance.maxSizePerFPGA >= 1:
        return f"maxSizePerFPGA must be at least one byte, got {instance.maxSizePerFPGA}"
    ids = [node.id for node in instance.nodes]
    known = set(ids)
    if len(known) < len(ids):
        return f"node id {Counter(ids).most_common(1)[0][0]} appears twice"
    for edge in instance.edges:
        if not {edge.sourceId, edge.destId} <= known:
            return f"edge {edge.sourceId} -> {edge.destId} names a node that does not exist"
    return ""


def _cluster(name: str, instance: _Instance, num_cpus: int) -> Cluster:
    limit = min(int(instance.maxSizePerFPGA), UNLIMITED_BYTES)  # rounds down
    accelerators = [
        _device(f"{ACCELERATOR}{i}", ACCELERATOR, limit) for i in range(int(instance.maxFPGAs))
    ]
    cpus = [_device(f"{CPU}{i}", CPU, UNLIMITED_BYTES) for i in range(num_cpus)]
    links = [
        Link(one.name, two.name, _BYTES_PER_S / 2 if two.kind == ACCELERATOR else _BYTES_PER_S)
        for i, one in enumerate(accelerators)
        for two in accelerators[i + 1 :] + cpus
    ]
    # CPUs share the host's memory: nothing is moved between them.
    return make_cluster(
        name, accelerators + cpus, links,
        default_bytes_per_s=np.inf, default_latency_s=0.0,
        host=len(accelerators) if cpus else 0,
    )  # fmt: skip


def _device(name: str, kind: str, memory_bytes: int) -> Device:
    """The files give times, not speeds: the speeds are placeholders that nothing reads."""
    return Device(name, kind, {"default": 1.0}, 1.0, memory_bytes)


def _graph(name: str, instance: _Instance) -> tuple[OpGraph, Float[np.ndarray, "T"]]:
    """The graph, one tensor per node that has readers, and the transfer seconds of the tensors."""
    cost_ms = _output_costs_ms(name, instance.edges)
    index = {node.id: i for i, node in enumerate(instance.nodes)}
    tensor = {node: t for t, node in enumerate(cost_ms)}
    sizes = [node.size for node in instance.nodes]
    if not all(size.is_integer() for size in [*sizes, instance.maxSizePerFPGA]):
        _log.warning("%s: sizes with fractions of bytes; sizes are rounded up, limits down", name)
    classes: dict[tuple[str, int], int] = {}
    colocate = [
        classes.setdefault(
            ("node", node.id) if node.colorClass is None else ("class", node.colorClass),
            len(classes),
        )
        for node in instance.nodes
    ]
    graph = make_graph(
        name,
        [str(node.id) for node in instance.nodes],
        ["Node"] * len(instance.nodes),
        [(index[node], round(ms / 1e3 * _BYTES_PER_S)) for node, ms in cost_ms.items()],
        [(tensor[edge.sourceId], index[edge.destId]) for edge in instance.edges],
        weight_bytes=np.ceil(sizes).astype(np.int64),
        colocate=colocate,
        is_backward=[bool(node.isBackwardNode) for node in instance.nodes],
        scope=[node.name for node in instance.nodes],
    )
    makers = [int(graph.op_names[op]) for op in graph.producer]
    return graph, np.array([cost_ms[node] for node in makers], dtype=float) / 1e3


def _output_costs_ms(name: str, edges: Sequence[_Edge]) -> dict[int, float]:
    """c_u of every node with an outgoing edge: its first edge states it, the others agree."""
    cost_ms: dict[int, float] = {}
    for edge in edges:
        first = cost_ms.setdefault(edge.sourceId, edge.cost)
        if abs(first - edge.cost) > 1e-6:
            raise ModelError(
                f"{name}: node {edge.sourceId} has outgoing edges of cost {first} and {edge.cost}; "
                "a node has one output cost"
            )
    return cost_ms
