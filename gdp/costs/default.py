"""The default cost model of a placement, and the cost models that ship with gdp."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float
from msgspec import structs

from gdp.base.errors import ArgumentError
from gdp.base.files.reading import data_path
from gdp.cluster.links import PCIE_LATENCY_S, has_own_latency
from gdp.cluster.presets import device_preset
from gdp.cluster.types import CORE_KIND, Cluster, Device
from gdp.costs.base import CostModel, DerivedCosts, launch_floors_s, roofline
from gdp.costs.cost_file import load_costs
from gdp.costs.learned import Calibration, KernelNetworks, LearnedCosts, same_vectors
from gdp.costs.llama_backends import backend_of
from gdp.costs.llamacpp import LlamaCosts
from gdp.costs.llamacpp import predicts as llama_predicts
from gdp.costs.machine import read_record, recorded_costs, remembered_costs
from gdp.costs.measured.costs import MeasuredCosts, covers
from gdp.costs.measured.graph import type_of_products
from gdp.costs.measured.host import HOSTS
from gdp.costs.measured.network import error_label, shipped_network
from gdp.costs.measured.own import with_own_cards
from gdp.costs.offload import OpOffloadCosts
from gdp.costs.profile import ProfileError
from gdp.costs.work_rates import WorkRates
from gdp.graph.fuse import fuse
from gdp.graph.groups import first_members
from gdp.graph.op_graph import OpGraph

SHIPPED = "shipped"
"""Name of the costs that travel with gdp, without what was learned of this machine."""
DATASHEET = "datasheet"
"""Name of the roofline of datasheet numbers on every device."""
FROM_DATASHEETS = "roofline from datasheets"
"""Source of the seconds of devices of which no kernel was measured, nor of their family."""
PROCESSOR_ERROR = 0.14
"""Mean error of whole models on two cores as one device, by one core's costs: `python
benchmarks/costs.py transfer data/profiles/cpu-2-cores-avx2.json.gz`; its roofline is 31% off."""
TO_HOST_S, FROM_HOST_S = 46e-6, 135e-6
"""Seconds of a small tensor to the memory of a host, and from it; see `CrossingCosts`."""
PIECE_S = TO_HOST_S - PCIE_LATENCY_S
COPIES = (
    f"copies of PyTorch from {TO_HOST_S * 1e6:.0f} us (to the host) to {FROM_HOST_S * 1e6:.0f} "
    "(from it)"
)
"""Part of the line of costs that says so."""


def resolve_costs(
    costs: CostModel | str | Path | None, cluster: Cluster, graph: OpGraph | None = None
) -> tuple[CostModel, str]:
    """The cost model to use, and a line with its name and reason.

    None takes what was learned of this machine (`gdp.costs.machine`) and of kernels of its cards
    (`gdp.costs.measured.own`) on top of the shipped costs;
    "shipped" the latter alone: calibrations for the devices they match, the kernel network for
    accelerators, datasheet numbers for the others, and the rates of XLA for graphs of JAX on cores
    such as were measured. "datasheet" takes datasheet numbers for all. The name of an
    engine (`gdp.costs.measured.host`) takes the shipped costs with the host's part of its steps. A
    path is a cost file, which is used for all devices of its kind, whatever their model, or a
    record of `gdp tune --write-costs`.
    """
    if costs is None:
        model, label = _shipped_costs(cluster, graph)
        if graph is None:
            return model, label
        return remembered_costs(model, label, cluster, graph)
    if costs == SHIPPED:
        return _shipped_costs(cluster, graph, own_cards=False)
    if costs == DATASHEET:
        return _datasheets(cluster, graph)
    if isinstance(costs, str) and costs in HOSTS:
        model, label = _shipped_costs(cluster, graph)
        if isinstance(model, MeasuredCosts):
            model = replace(model, host=HOSTS[costs])
        return model, f"{label}; steps of {costs}"
    if isinstance(costs, str | Path):
        if Path(costs).suffix == ".json":
            return recorded_costs(*_shipped_costs(cluster, graph), read_record(costs))
        calibration = load_costs(costs)
        rates = isinstance(calibration.predictor, WorkRates)
        if rates and graph is not None and not calibration.predictor.covers(graph):
            raise ProfileError(
                f"{str(costs)!r} holds rates of {calibration.runtime}, and the model is not of "
                "JAX; give the costs of its runtime"
            )
        return _with_network(LearnedCosts((calibration,), any_model=True), cluster, graph)
    if not callable(costs):
        raise ArgumentError(
            "costs must be a cost model (a callable of graph and cluster), a cost file or None, "
            f"got {type(costs).__name__}"
        )
    if costs is roofline:
        return _datasheets(cluster, graph)
    return costs, getattr(costs, "__name__", type(costs).__name__)


def _shipped_costs(
    cluster: Cluster, graph: OpGraph | None, own_cards: bool = True
) -> tuple[CostModel, str]:
    rates = shipped_rates() if graph is not None and graph.source == "jax" else None
    if rates is not None and any(
        device.kind == CORE_KIND and same_vectors(device.model, rates.device.model)
        for device in cluster.devices
    ):
        return _with_label(LearnedCosts((rates,)), cluster, graph, cluster.devices)
    if graph is not None and graph.source == "gguf":
        return _llama_costs(cluster, graph)
    known = with_processors(shipped(), cluster, graph)
    return _with_network(LearnedCosts(known), cluster, graph, own_cards)


def _llama_costs(cluster: Cluster, graph: OpGraph) -> tuple[CostModel, str]:
    """Kernels of llama.cpp on GPUs and processors, under CUDA near their peaks as the network
    learned it; the roofline on the others."""
    found = shipped_network()
    gpus = [device for device in cluster.devices if llama_predicts(device)]
    cpus = [device for device in cluster.devices if device.is_cpu]
    others = [device for device in cluster.devices if device not in (*gpus, *cpus)]
    base, label = _with_label(LearnedCosts(()), cluster, graph, others)
    labels = []
    if gpus:
        kinds = ", ".join(dict.fromkeys(f"{d.kind}, {backend_of(d)}" for d in gpus))
        labels.append(
            f"kernels of llama.cpp: launches, bytes, and products as others measured them ({kinds})"
        )
    if cpus:
        kinds = ", ".join(dict.fromkeys(device.kind for device in cpus))
        labels.append(f"what llama.cpp reaches of datasheet numbers ({kinds})")
    model = LlamaCosts(found[0] if found else None, base)
    return OpOffloadCosts(model), "; ".join(filter(None, [*labels, label]))


def _with_network(
    model: LearnedCosts, cluster: Cluster, graph: OpGraph | None, own_cards: bool = True
) -> tuple[CostModel, str]:
    """The kernel network on the accelerators that it covers or whose kernels the user measured,
    another model elsewhere; for PyTorch with the seconds of its copies."""
    served = graph is not None and graph.request is not None and graph.request.is_served
    eager = graph is not None and graph.source == "torch" and not served
    learned, lines = shipped_network(), dict[str, str]()
    if learned is not None and own_cards:
        network, lines = with_own_cards(learned[0], cluster.devices)
        learned = network, learned[1]
    own = [
        x for x in cluster.devices
        if learned and (x.kind in lines or covers(x)) and model.of(x) is None
    ]  # fmt: skip
    others = [device for device in cluster.devices if device not in own]
    costs, label = _with_label(model, cluster, graph, others)
    if learned is not None and own:
        network, meta = learned
        kinds = dict.fromkeys(device.kind for device in own)
        dtype = graph and type_of_products(graph)
        labels = [lines.get(kind) or error_label(meta, kind, dtype) for kind in kinds]
        costs = MeasuredCosts(network, costs, served, eager)
        label = "; ".join(filter(None, [*labels, label]))
    if not eager or cluster.num_devices < 2 or cluster.is_cpu.all():
        return costs, label
    return CrossingCosts(costs), f"{label}; {COPIES}"


def _datasheets(cluster: Cluster, graph: OpGraph | None) -> tuple[CostModel, str]:
    """The roofline; of GGUF files with weights that llama.cpp sends to a GPU for a prompt."""
    model, label = _with_label(LearnedCosts(()), cluster, graph, cluster.devices)
    stored = graph is not None and graph.source == "gguf"
    return (OpOffloadCosts(model) if stored else model), label


def calibrated(device: Device) -> bool:
    """True for a device that a shipped calibration is of."""
    return LearnedCosts(shipped()).of(device) is not None


def source_of(device: Device) -> str:
    """Source of the default seconds of a device, for models whose ops were measured."""
    calibration = LearnedCosts(shipped()).of(device)
    if calibration is not None:
        return calibration.label()
    found = shipped_network()
    lines = with_own_cards(found[0], [device])[1] if found else {}
    if found is not None and (lines or covers(device)):
        return (*lines.values(), error_label(found[1], device.kind))[0].partition(": ")[2]
    if device.is_cpu and shipped():
        scaled = transferred(shipped()[0], device).label()
        return f"{scaled} for ONNX models, else {FROM_DATASHEETS}"
    return FROM_DATASHEETS


@functools.cache
def _all_shipped() -> tuple[Calibration, ...]:
    folder = data_path("checkpoints", "costs")
    if not folder.is_dir():
        return ()
    return tuple(load_costs(path.parent) for path in sorted(folder.glob("*/meta.json")))


def shipped() -> tuple[Calibration, ...]:
    """The calibrations of single kernels that travel with gdp."""
    return tuple(c for c in _all_shipped() if isinstance(c.predictor, KernelNetworks))


def shipped_rates() -> Calibration | None:
    """The rates of XLA that travel with gdp; None where none do."""
    return next((c for c in _all_shipped() if isinstance(c.predictor, WorkRates)), None)


def shipped_for(kind: str) -> Calibration:
    """The calibration of a kind of device that travels with gdp; raises `ProfileError` where there
    is none."""
    calibration = next((c for c in shipped() if c.device.kind == kind), None)
    if calibration is None:
        kinds = ", ".join(dict.fromkeys(c.device.kind for c in shipped()))
        raise ProfileError(f"no costs of {kind} ship, only of {kinds}; calibrate without --base")
    return calibration


def _with_label(
    model: LearnedCosts, cluster: Cluster, graph: OpGraph | None, devices: Sequence[Device]
) -> tuple[CostModel, str]:
    """The model, or the roofline if it covers no device; a label with the source of the seconds of
    these devices."""
    by_label: dict[str, dict[str, None]] = {}
    for device in devices:
        calibration = model.of(device)
        if calibration is None:
            label = FROM_DATASHEETS
        elif graph is not None and not calibration.predictor.covers(graph):
            overheads = calibration.label()
            label = f"{FROM_DATASHEETS}, as no such op was measured, and overheads {overheads}"
        else:
            label = calibration.label()
            if calibration.speeds is not None:
                label += f", {PROCESSOR_ERROR:.0%} off on two of its cores as one device"
            elif calibration.mean_error is not None:
                label += f", whole models held out {calibration.mean_error:.1%} off in the mean"
        by_label.setdefault(label, {})[device.kind] = None
    text = "; ".join(f"{label} ({', '.join(kinds)})" for label, kinds in by_label.items())
    learned = any(model.of(device) is not None for device in cluster.devices)
    return (model if learned else roofline), text


def with_processors(
    calibrations: Sequence[Calibration], cluster: Cluster, graph: OpGraph | None
) -> tuple[Calibration, ...]:
    """The calibrations, with one for every processor of a cluster that none of them is of; as given
    where none knows the ops of the graph."""
    own, known = list(calibrations), LearnedCosts(tuple(calibrations))
    core = next((c for c in calibrations if isinstance(c.predictor, KernelNetworks)), None)
    if core is None or graph is None or not core.predictor.covers(graph):
        return tuple(own)
    for device in cluster.devices:
        if device.is_cpu and known.of(device) is None:
            own.append(transferred(core, device))
            known = LearnedCosts(tuple(own))
    return tuple(own)


def transferred(core: Calibration, device: Device) -> Calibration:
    """The calibration of a core as one of another processor, scaled by their speeds.

    The learned costs are a sum over arithmetic, traffic and launches: arithmetic takes the ratio of
    both devices' FLOP/s, traffic that of their bandwidths, and a launch what it took. Nothing is
    fitted: the descriptor of a processor is its datasheet, or what `gdp devices` measures in a
    second and a half.
    """
    reference = device_preset(core.device.kind)
    networks = replace(
        core.networks,
        arithmetic=device.speed("float32") / reference.speed("float32"),
        traffic=device.bytes_per_s / reference.bytes_per_s,
    )
    return replace(
        core, device=structs.replace(core.device, kind=device.kind, model=device.model),
        predictor=networks, mean_error=None, measured_on=core.device.model,
        speeds=(device.speed("float32"), device.bytes_per_s),
    )  # fmt: skip


@dataclass(frozen=True)
class CrossingCosts(DerivedCosts):
    """Costs of PyTorch whose pieces pay for the tensors that they read from other devices.

    One host calls op after op, and a copy between devices is more of its work than a launch: memory
    is pinned, streams join. On an H200 (docs/benchmarks/accelerators.md) a small tensor took 46 us
    to the host's memory and 135 us from it; of two accelerators nothing was measured, and the
    lesser is taken, as no memory is pinned. The device that reads the tensor, or its thread on the
    host, is busy for `PIECE_S` of them; the rest is the latency of the link.

    Links whose latency somebody gave or measured keep it, and devices with such links alone pay for
    no piece. Devices pay for pieces or for ops, so that the dispatch of ops is in their seconds.
    """

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        return self.base(graph, cluster) + self._dispatch_s(graph, cluster)

    def launch_floor_s(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"] | None:
        """Launches of the other model and the dispatch of ops; see `KnowsLaunches`."""
        floor_s = launch_floors_s(self.base, graph, cluster)
        return None if floor_s is None else floor_s + self._dispatch_s(graph, cluster)

    def _dispatch_s(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        first = np.ones(graph.num_ops, dtype=bool)
        if self.reads_unfused:  # the simulator adds it once for fused ops
            first[:] = False
            first[first_members(fuse(graph).group_of)] = True
        pays = first & ~graph.is_io & ~graph.rests
        return pays[:, None] * np.where(_pays_for_pieces(cluster), cluster.dispatch_s, 0.0)

    def with_runtime_overheads(self, cluster: Cluster) -> Cluster:
        """The other model's cluster, whose devices pay for pieces; copies from a processor to an
        accelerator start later than those back."""
        latency_s = cluster.link_latency_s.copy()
        for i, j in np.argwhere(cluster.is_cpu[:, None] & ~cluster.is_cpu).tolist():
            if not has_own_latency(cluster, i, j):
                latency_s[i, j] = max(latency_s[i, j], FROM_HOST_S - PIECE_S)
        devices = tuple(
            replace(device, dispatch_per="segment", dispatch_s=PIECE_S) if pays else device
            for device, pays in zip(cluster.devices, _pays_for_pieces(cluster), strict=True)
        )
        cluster = replace(cluster, devices=devices, link_latency_s=latency_s)
        return super().with_runtime_overheads(cluster)


def _pays_for_pieces(cluster: Cluster) -> Bool[np.ndarray, "D"]:
    """Devices with an incoming link of unmeasured latency."""
    size = range(cluster.num_devices)
    return np.array([
        launches and any(i != d and not has_own_latency(cluster, i, d) for i in size)
        for d, launches in enumerate(cluster.launches_ops)
    ])  # fmt: skip
